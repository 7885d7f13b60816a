// What the host tells of a sandbox and grants it: metrics, network, our own
// additions, admission.

import assert from 'node:assert/strict';

import { Sandbox } from 'e2b';

import { apiUrl, expectError, expectStatus, rest, route, token } from '../lib/gateway.mjs';
import { startServer } from '../lib/server.mjs';
import { template } from '../lib/options.mjs';
import { create, eventually, lazy, rejects, test } from '../lib/suite.mjs';

const shared = lazy({ metadata: { 'agentzip.cohort': 'e2e' } });

test('metrics have every field and lie in the range asked for', async () => {
  const sandbox = await shared();
  const begin = new Date(Date.now() - 60_000);
  const metrics = await eventually('a first measurement', 30_000, async () => {
    const found = await sandbox.getMetrics({ start: begin, end: new Date(Date.now() + 60_000) });
    return found.length > 0 && found;
  }, 1000);
  for (const metric of metrics) {
    for (const field of ['cpuUsedPct', 'cpuCount', 'memUsed', 'memTotal', 'memCache', 'diskUsed', 'diskTotal']) {
      assert.equal(typeof metric[field], 'number', `expected ${field}, got ${JSON.stringify(metric)}`);
    }
    assert.ok(metric.memUsed > 0 && metric.memUsed <= metric.memTotal, JSON.stringify(metric));
    assert.ok(metric.diskUsed > 0 && metric.diskUsed <= metric.diskTotal, JSON.stringify(metric));
    assert.ok(metric.timestamp >= begin, `expected nothing before ${begin.toISOString()}`);
  }
  assert.deepEqual(await sandbox.getMetrics({ start: new Date(0), end: new Date(1000) }), [], 'expected nothing in 1970');
  await rejects(Sandbox.getMetrics('i00000000000000000000'), 'SandboxNotFoundError', 'metrics of an unknown sandbox');
  const many = expectStatus(await rest('GET', `/sandboxes/metrics?sandbox_ids=${sandbox.sandboxId}`), 200, 'GET /sandboxes/metrics').json;
  assert.ok(many.sandboxes?.[sandbox.sandboxId], `expected a metric by id, got ${JSON.stringify(many)}`);
});

test('the agent tells its own metrics and variables to those who have the token', async () => {
  const sandbox = await shared();
  const metrics = await (await fetch(`${apiUrl}/metrics`, { headers: { ...route(sandbox), ...token(sandbox) } })).json();
  for (const field of ['ts', 'cpu_count', 'cpu_used_pct', 'mem_total', 'mem_used', 'disk_used', 'disk_total']) {
    assert.equal(typeof metrics[field], 'number', `expected ${field}, got ${JSON.stringify(metrics)}`);
  }
  const inside = await sandbox.commands.run(`curl -s -H 'X-Access-Token: ${sandbox.envdAccessToken}' http://localhost:49983/envs || python3 -c "import urllib.request as r; print(r.urlopen(r.Request('http://localhost:49983/envs', headers={'X-Access-Token': '${sandbox.envdAccessToken}'})).read().decode())"`);
  assert.equal(typeof JSON.parse(inside.stdout), 'object', `expected the variables from inside the guest, got ${inside.stdout}`);
});

test('a sandbox without internet has no way out, and says so', async () => {
  const sandbox = await create({ allowInternetAccess: false });
  assert.equal((await sandbox.getInfo()).allowInternetAccess, false);
  const routes = await sandbox.commands.run(`awk 'NR > 1 && $2 == "00000000"' /proc/net/route`);
  assert.equal(routes.stdout, '', 'expected no default route in the guest');
  await sandbox.kill();
});

test('our additions: memory statement, signals, a usable URL', async () => {
  const sandbox = await shared();
  const base = `/agentzip/v1/sandboxes/${sandbox.sandboxId}`;
  const own = expectStatus(await rest('GET', base), 200, 'GET our view').json;
  assert.match(JSON.stringify(own), /e2e/, 'expected the cohort that the metadata named');
  const memory = expectStatus(await rest('GET', `${base}/memory`), 200, 'GET memory').json;
  assert.equal(typeof memory, 'object');
  const signal = await rest('POST', `${base}/signals`, { kind: 'tool_name', tool: 'bash' });
  assert.ok([200, 202, 204].includes(signal.status), `POST signals: expected success, got ${signal.status}: ${signal.text}`);
  expectError(await rest('POST', `${base}/signals`, { kind: 'nonsense' }), 400, 'a kind of signal that does not exist');
  const url = expectStatus(await rest('GET', `${base}/url?port=3000`), 200, 'GET url').text;
  assert.match(url, new RegExp(`3000-${sandbox.sandboxId}`));
  expectError(await rest('GET', '/agentzip/v1/sandboxes/i00000000000000000000/memory'), 404, 'memory of an unknown sandbox');
});

test('cloud features answer with an error that says so', async () => {
  for (const [method, path] of [['GET', '/secrets'], ['GET', '/volumes'], ['GET', '/no/such/route']]) {
    const answer = await rest(method, path);
    assert.ok([404, 501].includes(answer.status), `${method} ${path}: expected 404 or 501, got ${answer.status}`);
    assert.equal(answer.json?.code, answer.status, `${method} ${path}: expected the code in the body, got ${answer.text}`);
  }
});

test('a full gateway answers 429 with Retry-After, and has room again after a kill', async () => {
  const server = await startServer({ flags: ['--max-sandboxes', '1'] });
  try {
    const options = {
      apiKey: server.variables.E2B_API_KEY,
      apiUrl: server.variables.E2B_API_URL,
      sandboxUrl: server.variables.E2B_SANDBOX_URL,
    };
    const one = await Sandbox.create(template, { ...options, timeoutMs: 120_000 });
    const raw = await fetch(`${options.apiUrl}/v2/sandboxes`, {
      method: 'POST',
      headers: { 'X-API-Key': options.apiKey, 'Content-Type': 'application/json' },
      body: JSON.stringify({ templateID: template }),
    });
    assert.equal(raw.status, 429, `expected 429, got ${raw.status}: ${await raw.clone().text()}`);
    assert.match(raw.headers.get('retry-after') ?? '', /^\d+$/, 'expected Retry-After in whole seconds');
    assert.equal((await raw.json()).code, 429);
    await rejects(Sandbox.create(template, { ...options, retries: 0, requestTimeoutMs: 20_000 }), 'RateLimitError', 'create on a full gateway');
    assert.equal(await one.kill(), true);
    const two = await Sandbox.create(template, { ...options, timeoutMs: 60_000 });
    assert.equal((await two.commands.run('echo room')).stdout, 'room\n');
    await two.kill();
  } finally {
    const { code } = await server.stop();
    assert.equal(code, 0, 'expected a clean end on SIGTERM');
  }
});

test('both loopback addresses answer', async () => {
  const { port } = new URL(apiUrl);
  for (const host of ['127.0.0.1', '[::1]']) {
    const response = await fetch(`http://${host}:${port}/v2/sandboxes`, { headers: { 'X-API-Key': process.env.E2B_API_KEY } });
    assert.equal(response.status, 200, `expected an answer on ${host}`);
    await response.text();
  }
});
