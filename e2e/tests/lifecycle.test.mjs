// Create, look at, prolong and end sandboxes: as the newest client does it, and as
// old ones do (plain REST, first generation of the API).

import assert from 'node:assert/strict';

import { Sandbox } from 'e2b';

import { expectError, expectStatus, rest, route, token } from '../lib/gateway.mjs';
import { template } from '../lib/options.mjs';
import { create, eventually, keep, lazy, rejects, sleep, test } from '../lib/suite.mjs';

const shared = lazy({ metadata: { purpose: 'shared' } });

const sandboxFields = ['sandboxID', 'templateID', 'clientID', 'envdVersion', 'envdAccessToken'];
const listedFields = ['sandboxID', 'templateID', 'clientID', 'envdVersion', 'startedAt', 'endAt', 'state', 'cpuCount', 'memoryMB', 'diskSizeMB'];

function hasFields(object, fields, what) {
  for (const field of fields) {
    assert.ok(object?.[field] !== undefined && object[field] !== null, `${what}: expected the field ${field}, got ${JSON.stringify(object)}`);
  }
}

// seconds until a listed sandbox ends.
const left = (info) => (new Date(info.endAt).getTime() - Date.now()) / 1000;

function near(got, want, slack, what) {
  assert.ok(Math.abs(got - want) <= slack, `${what}: expected ${want} ± ${slack}, got ${got}`);
}

test('a sandbox made by the newest client runs, is listed, and is gone when kill returns', async () => {
  const sandbox = await create({ metadata: { purpose: 'lifecycle' } });
  assert.match(sandbox.sandboxId, /^i[a-z0-9]{20}$/, 'an id is i and 20 of [a-z0-9]');
  assert.equal(await sandbox.isRunning(), true, 'expected a new sandbox to run');
  const info = await sandbox.getInfo();
  assert.equal(info.sandboxId, sandbox.sandboxId);
  assert.equal(info.state, 'running');
  assert.deepEqual(info.metadata, { purpose: 'lifecycle' });
  assert.ok(info.cpuCount >= 1 && info.memoryMB >= 128, `expected sizes of the VM, got ${info.cpuCount} CPUs, ${info.memoryMB} MB`);
  near(left(info), 300, 30, 'seconds left of a timeout of 300 s');
  assert.deepEqual(info.lifecycle, { onTimeout: 'kill', autoResume: false });
  const listed = await Sandbox.list({ query: { metadata: { purpose: 'lifecycle' } } }).nextItems();
  assert.deepEqual(listed.map((item) => item.sandboxId), [sandbox.sandboxId], 'expected it in the list as soon as create returned');
  assert.equal(await sandbox.kill(), true, 'expected kill of a running sandbox to say true');
  const after = await Sandbox.list({ query: { metadata: { purpose: 'lifecycle' } } }).nextItems();
  assert.deepEqual(after, [], 'expected it to be out of the list when kill returned');
  assert.equal(await sandbox.kill(), false, 'expected a second kill to say false');
  assert.equal(await sandbox.isRunning(), false);
  await rejects(sandbox.getInfo(), 'SandboxNotFoundError', 'getInfo of a killed sandbox');
  await rejects(Sandbox.connect(sandbox.sandboxId), 'SandboxNotFoundError', 'connect to a killed sandbox');
  await rejects(sandbox.setTimeout(1000), 'SandboxNotFoundError', 'setTimeout of a killed sandbox');
  await rejects(sandbox.pause(), 'SandboxNotFoundError', 'pause of a killed sandbox');
});

test('a client of the first API generation goes through a whole life', async () => {
  const made = expectStatus(
    await rest('POST', '/sandboxes', { templateID: template, timeout: 300, secure: true, metadata: { gen: 'one' }, envVars: { GEN: 'one' }, unknownKey: [1] }),
    201,
    'POST /sandboxes',
  ).json;
  keep({ sandboxId: made.sandboxID });
  hasFields(made, sandboxFields, 'POST /sandboxes');
  const path = `/sandboxes/${made.sandboxID}`;
  const list = expectStatus(await rest('GET', '/sandboxes?metadata=gen%3Done'), 200, 'GET /sandboxes').json;
  assert.equal(list.length, 1, `expected one sandbox with gen=one, got ${JSON.stringify(list)}`);
  hasFields(list[0], listedFields, 'GET /sandboxes');
  const detail = expectStatus(await rest('GET', path), 200, 'GET /sandboxes/{id}').json;
  hasFields(detail, listedFields, 'GET /sandboxes/{id}');
  assert.ok(/^\d{4}-\d\d-\d\dT.*Z$/.test(detail.startedAt), `expected startedAt in RFC 3339 UTC, got ${detail.startedAt}`);
  const timeout = expectStatus(await rest('POST', `${path}/timeout`, { timeout: 100 }), 204, 'POST timeout');
  assert.equal(timeout.text, '', 'expected an empty body after 204');
  near(left((await rest('GET', path)).json), 100, 20, 'seconds left after timeout 100');
  expectStatus(await rest('POST', `${path}/refreshes`, { duration: 200 }), 204, 'POST refreshes');
  near(left((await rest('GET', path)).json), 200, 20, 'seconds left after refreshes 200');
  expectStatus(await rest('POST', `${path}/refreshes`, { duration: 10 }), 204, 'POST refreshes that would shorten');
  near(left((await rest('GET', path)).json), 200, 20, 'seconds left after refreshes 10: refreshes only extend');
  const connected = expectStatus(await rest('POST', `${path}/connect`, { timeout: 300 }), 200, 'POST connect to a running sandbox').json;
  hasFields(connected, sandboxFields, 'POST connect');
  assert.equal(connected.envdAccessToken, made.envdAccessToken, 'expected connect to return the same token as create');
  expectError(await rest('POST', `${path}/resume`, { timeout: 300 }), 409, 'POST resume of a running sandbox');
  const killed = expectStatus(await rest('DELETE', path), 204, 'DELETE');
  assert.equal(killed.text, '');
  expectError(await rest('DELETE', path), 404, 'DELETE of a killed sandbox');
  expectError(await rest('GET', path), 404, 'GET of a killed sandbox');
});

test('without a timeout the first generation gets 15 s and the second 300 s', async () => {
  for (const [path, want] of [['/sandboxes', 15], ['/v2/sandboxes', 300]]) {
    const made = expectStatus(await rest('POST', path, { templateID: template }), 201, `POST ${path}`).json;
    keep({ sandboxId: made.sandboxID });
    const detail = (await rest('GET', `/sandboxes/${made.sandboxID}`)).json;
    near((new Date(detail.endAt) - new Date(detail.startedAt)) / 1000, want, 10, `seconds of life by ${path}`);
    assert.ok(made.envdAccessToken, `expected a token from ${path}`);
    expectStatus(await rest('DELETE', `/sandboxes/${made.sandboxID}`), 204, 'DELETE');
  }
});

test('a sandbox ends by itself at its timeout', async () => {
  const sandbox = await create({ timeoutMs: 3000 });
  const begin = Date.now();
  await eventually('a sandbox of 3 s to be gone', 6000, async () => {
    const answer = await rest('GET', `/sandboxes/${sandbox.sandboxId}`);
    return answer.status === 404;
  });
  assert.ok(Date.now() - begin >= 1500, `expected it to live about 3 s, gone after ${Date.now() - begin} ms`);
  assert.equal(await sandbox.isRunning(), false);
});

test('setTimeout shortens and extends, connect only extends', async () => {
  const sandbox = await shared();
  await sandbox.setTimeout(60_000);
  near(left(await sandbox.getInfo()), 60, 15, 'seconds left after setTimeout 60 s');
  await sandbox.connect({ timeoutMs: 20_000 });
  near(left(await sandbox.getInfo()), 60, 20, 'seconds left after connect 20 s');
  await sandbox.connect({ timeoutMs: 200_000 });
  near(left(await sandbox.getInfo()), 200, 20, 'seconds left after connect 200 s');
  await sandbox.setTimeout(300_000);
  near(left(await sandbox.getInfo()), 300, 20, 'seconds left after setTimeout 300 s');
});

test('a timeout of zero ends the sandbox now', async () => {
  const sandbox = await create();
  expectStatus(await rest('POST', `/sandboxes/${sandbox.sandboxId}/timeout`, { timeout: 0 }), 204, 'POST timeout 0');
  await eventually('the sandbox to be gone', 5000, async () => (await rest('GET', `/sandboxes/${sandbox.sandboxId}`)).status === 404);
});

test('a second client connects by id and sees the same machine', async () => {
  const sandbox = await shared();
  await sandbox.commands.run('echo from-the-first > /tmp/seen');
  const second = await Sandbox.connect(sandbox.sandboxId);
  const result = await second.commands.run('cat /tmp/seen');
  assert.equal(result.stdout, 'from-the-first\n');
});

test('variables given at create reach every command, and a command can override them', async () => {
  const sandbox = await create({ envs: { COLOUR: 'red', SHAPE: 'round' } });
  const result = await sandbox.commands.run('echo $COLOUR $SHAPE $E2B_SANDBOX $E2B_SANDBOX_ID', { envs: { COLOUR: 'blue' } });
  assert.equal(result.stdout, `blue round true ${sandbox.sandboxId}\n`);
  await sandbox.kill();
});

test('a wrong or missing API key is refused', async () => {
  await rejects(Sandbox.create(template, { apiKey: 'e2b_0000' }), 'AuthenticationError', 'create with a wrong key');
  const answer = await fetch(`${process.env.E2B_API_URL}/v2/sandboxes`);
  assert.equal(answer.status, 401, 'expected 401 without a key');
  assert.equal((await answer.json()).code, 401, 'expected the code in the body');
});

test('an unknown template is a 404 that is not about a sandbox', async () => {
  const error = await rejects(Sandbox.create('no-such-template'), 'SandboxError', 'create from an unknown template');
  assert.match(error.message, /^404: /);
  expectError(await rest('POST', '/sandboxes', { templateID: 'no-such-template', timeout: 10 }), 404, 'POST /sandboxes');
});

test('what cannot be granted is refused with a reason', async () => {
  const cases = [
    ['a timeout above the maximum', { timeout: 1_000_000 }],
    ['a negative timeout', { timeout: -1 }],
    ['no template', { templateID: undefined }],
    ['autoPauseMemory without autoPause', { autoPauseMemory: false }],
    ['filesystem-only auto-pause with auto-resume', { autoPause: true, autoPauseMemory: false, autoResume: { enabled: true } }],
    ['an MCP gateway', { mcp: { duckduckgo: {} } }],
    ['workload identity', { iam: { tokens: { a: { audience: 'x', tokenType: 'JWT-SVID' } } } }],
    ['an egress proxy', { network: { egressProxy: { address: '127.0.0.1:1' } } }],
    ['header rules', { network: { rules: { 'example.com': [{ transform: { headers: { a: 'b' } } }] } } }],
    ['a name in denyOut', { network: { denyOut: ['example.com'] } }],
    ['a name in allowOut without denying the rest', { network: { allowOut: ['example.com'] } }],
  ];
  for (const [what, change] of cases) {
    const answer = await rest('POST', '/v2/sandboxes', { templateID: template, timeout: 30, ...change });
    if (answer.json?.sandboxID) keep({ sandboxId: answer.json.sandboxID });
    expectError(answer, 400, what);
  }
});

test('bodies that are no JSON, cut short or of the wrong type get a 400', async () => {
  for (const body of ['{', '[]', '"x"', '{"templateID": 5}', '{"templateID":"base","metadata":{"a":1}}', '\u0000']) {
    const response = await fetch(`${process.env.E2B_API_URL}/v2/sandboxes`, {
      method: 'POST',
      headers: { 'X-API-Key': process.env.E2B_API_KEY, 'Content-Type': 'application/json' },
      body,
    });
    const text = await response.text();
    assert.equal(response.status, 400, `body ${JSON.stringify(body)}: expected 400, got ${response.status}: ${text}`);
    assert.equal(JSON.parse(text).code, 400);
  }
});

test('an id with a suffix means the sandbox before the dash', async () => {
  const sandbox = await shared();
  expectStatus(await rest('GET', `/sandboxes/${sandbox.sandboxId}-abcdef12`), 200, 'GET with suffix');
});

test('a sandbox answers nobody without its token', async () => {
  const sandbox = await shared();
  for (const headers of [{}, { 'X-Access-Token': 'wrong' }]) {
    const response = await fetch(`${process.env.E2B_API_URL}/process.Process/List`, {
      method: 'POST',
      headers: { ...route(sandbox), 'Content-Type': 'application/json', ...headers },
      body: '{}',
    });
    assert.equal(response.status, 401, `expected 401 with ${JSON.stringify(headers)}, got ${response.status}`);
    assert.equal(typeof (await response.json()).message, 'string', 'expected a message');
  }
  const health = await fetch(`${process.env.E2B_API_URL}/health`, { headers: route(sandbox) });
  assert.equal(health.status, 204, 'expected /health to need no token');
});

test('routes that only the host may use are not there from outside', async () => {
  const sandbox = await shared();
  for (const path of ['/init', '/freeze', '/unfreeze', '/collapse', '/fsfreeze', '/fsthaw', '/upgrade']) {
    const response = await fetch(`${process.env.E2B_API_URL}${path}`, {
      method: 'POST',
      headers: { ...route(sandbox), ...token(sandbox), 'Content-Type': 'application/json' },
      body: '{}',
    });
    assert.equal(response.status, 404, `POST ${path}: expected 404, got ${response.status}`);
    await response.text();
  }
});

test('two creates at once give two sandboxes with different tokens', async () => {
  const [one, two] = await Promise.all([create(), create()]);
  assert.notEqual(one.sandboxId, two.sandboxId);
  assert.notEqual(one.envdAccessToken, two.envdAccessToken);
  await Promise.all([one.kill(), two.kill()]);
  await sleep(0);
});
