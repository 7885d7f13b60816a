// Pause and resume, with memory and without, by hand and by timeout; and what
// clients see of a sandbox that ends while they hold streams to it.

import assert from 'node:assert/strict';

import { Sandbox } from 'e2b';

import { apiUrl, expectError, expectStatus, rest, route, stream, token } from '../lib/gateway.mjs';
import { create, eventually, rejects, sleep, test } from '../lib/suite.mjs';

// counter starts a process that keeps a number in memory and adds one each 0.2 s.
async function counter(sandbox) {
  const handle = await sandbox.commands.run('n=0; while :; do n=$((n+1)); echo $n > /tmp/counter; sleep 0.2; done', { background: true, timeoutMs: 0 });
  await eventually('the counter to run', 15_000, async () => Number(await sandbox.files.read('/tmp/counter')) > 1);
  return handle.pid;
}

const count = async (sandbox) => Number((await sandbox.commands.run('cat /tmp/counter')).stdout);

async function state(sandbox) {
  return (await Sandbox.getInfo(sandbox.sandboxId)).state;
}

async function paused(sandbox, limit) {
  await eventually('the sandbox to be paused', limit, async () => (await state(sandbox)) === 'paused');
}

test('a paused sandbox goes on where it stopped: memory, processes, files, token', async () => {
  const sandbox = await create({ envs: { KEPT: 'yes' } });
  const pid = await counter(sandbox);
  await sandbox.files.write('/home/user/before', 'written just before the pause');
  const before = await count(sandbox);
  const bootId = (await sandbox.commands.run('cat /proc/sys/kernel/random/boot_id')).stdout;
  assert.equal(await sandbox.pause(), true);
  assert.equal(await sandbox.pause(), false, 'expected a second pause to say false');
  expectError(await rest('POST', `/sandboxes/${sandbox.sandboxId}/pause`), 409, 'POST pause of a paused sandbox');
  assert.equal(await state(sandbox), 'paused');
  assert.equal(await sandbox.isRunning(), false, 'expected a paused sandbox not to run');
  await sleep(1500);
  const answer = expectStatus(await rest('POST', `/sandboxes/${sandbox.sandboxId}/connect`, { timeout: 300 }), 201, 'POST connect to a paused sandbox').json;
  assert.equal(answer.envdAccessToken, sandbox.envdAccessToken, 'expected the token to survive');
  assert.equal(await state(sandbox), 'running');
  const after = await count(sandbox);
  assert.ok(after >= before, `expected the counter to go on from ${before}, got ${after}`);
  await eventually('the counter to move', 15_000, async () => (await count(sandbox)) > after);
  assert.ok((await sandbox.commands.list()).some((item) => item.pid === pid), 'expected the process in the list after the resume');
  assert.equal(await sandbox.files.read('/home/user/before'), 'written just before the pause');
  assert.equal((await sandbox.commands.run('cat /proc/sys/kernel/random/boot_id')).stdout, bootId, 'expected no reboot');
  assert.equal((await sandbox.commands.run('echo $KEPT')).stdout, 'yes\n');
  const skew = Math.abs(Number((await sandbox.commands.run('date +%s')).stdout) - Date.now() / 1000);
  assert.ok(skew < 5, `expected the guest's clock to be right after the resume, it is ${skew} s off`);
  const again = await sandbox.commands.connect(pid);
  assert.equal(await again.kill(), true);
  await sandbox.kill();
});

test('requests to a paused sandbox say that it is not there', async () => {
  const sandbox = await create();
  await sandbox.pause();
  const health = await fetch(`${apiUrl}/health`, { headers: route(sandbox) });
  assert.equal(health.status, 502);
  const body = await health.json();
  assert.equal(body.message, 'The sandbox was not found');
  assert.equal(body.sandboxId, sandbox.sandboxId);
  assert.equal(body.code, 502);
  await rejects(sandbox.commands.run('true'), 'TimeoutError', 'a command in a paused sandbox').catch(async (error) => {
    await rejects(sandbox.commands.run('true'), 'SandboxNotFoundError', `a command in a paused sandbox (${error.message})`);
  });
  assert.equal(await sandbox.kill(), true, 'expected kill of a paused sandbox to say true');
  expectError(await rest('GET', `/sandboxes/${sandbox.sandboxId}`), 404, 'GET of a killed paused sandbox');
});

test('paused time is not lifetime, and resume gives a new one', async () => {
  const sandbox = await create({ timeoutMs: 6000 });
  await sandbox.pause();
  await sleep(7000);
  assert.equal(await state(sandbox), 'paused');
  await sandbox.connect({ timeoutMs: 100_000 });
  const info = await sandbox.getInfo();
  const left = (info.endAt - Date.now()) / 1000;
  assert.ok(left > 80 && left <= 101, `expected about 100 s left, got ${left}`);
  await sandbox.kill();
});

test('at its timeout a sandbox with onTimeout pause is paused, not killed, also after a resume', async () => {
  const sandbox = await create({ timeoutMs: 3000, lifecycle: { onTimeout: 'pause' } });
  assert.deepEqual((await sandbox.getInfo()).lifecycle, { onTimeout: 'pause', autoResume: false });
  await sandbox.files.write('/home/user/late', 'written shortly before the timeout');
  await paused(sandbox, 10_000);
  const connected = await Sandbox.connect(sandbox.sandboxId, { timeoutMs: 3000 });
  assert.equal(await connected.files.read('/home/user/late'), 'written shortly before the timeout');
  await paused(sandbox, 15_000);
  await sandbox.kill();
});

test('auto-resume: a request wakes the sandbox and is answered', async () => {
  const sandbox = await create({ timeoutMs: 60_000, lifecycle: { onTimeout: 'pause', autoResume: true } });
  await counter(sandbox);
  await sandbox.pause();
  const wrong = await fetch(`${apiUrl}/process.Process/List`, {
    method: 'POST',
    headers: { ...route(sandbox), 'X-Access-Token': 'wrong', 'Content-Type': 'application/json' },
    body: '{}',
  });
  assert.equal(wrong.status, 403, `expected 403 for a wrong token, got ${wrong.status}: ${await wrong.text()}`);
  assert.equal(await state(sandbox), 'paused', 'expected a wrong token not to wake it');
  const result = await sandbox.commands.run('echo awake');
  assert.equal(result.stdout, 'awake\n');
  assert.equal(await state(sandbox), 'running');
  assert.ok(((await sandbox.getInfo()).endAt - Date.now()) / 1000 > 40, 'expected a new lifetime');
  await sandbox.pause();
  const results = await Promise.all([1, 2, 3].map((i) => sandbox.commands.run(`echo ${i}`)));
  assert.deepEqual(results.map((item) => item.stdout), ['1\n', '2\n', '3\n'], 'expected three requests at once to be held and answered');
  await sandbox.kill();
});

test('a filesystem-only pause keeps files, not processes', async () => {
  const sandbox = await create({ envs: { KEPT: 'yes' } });
  const pid = await counter(sandbox);
  await sandbox.files.write('/home/user/disk', 'on disk');
  await sandbox.commands.run('echo ram > /dev/shm/ram');
  const bootId = (await sandbox.commands.run('cat /proc/sys/kernel/random/boot_id')).stdout;
  assert.equal(await sandbox.pause({ keepMemory: false }), true);
  await sandbox.connect({ timeoutMs: 300_000 });
  assert.equal(await sandbox.files.read('/home/user/disk'), 'on disk');
  assert.equal(await sandbox.files.exists('/dev/shm/ram'), false, 'expected what was in memory to be gone');
  assert.ok(!(await sandbox.commands.list()).some((item) => item.pid === pid && item.args.join(' ').includes('counter')), 'expected the process to be gone');
  assert.notEqual((await sandbox.commands.run('cat /proc/sys/kernel/random/boot_id')).stdout, bootId, 'expected a new boot');
  assert.equal((await sandbox.commands.run('echo $KEPT')).stdout, 'yes\n', 'expected the variables after the boot');
  await sandbox.kill();
});

test('connect can boot a sandbox from its disk although its memory was kept', async () => {
  const sandbox = await create();
  await sandbox.commands.run('echo ram > /dev/shm/ram; echo disk > ~/disk; sync');
  await sandbox.pause();
  await sandbox.connect({ onResume: 'reboot' });
  assert.equal(await sandbox.files.exists('/dev/shm/ram'), false, 'expected a reboot');
  assert.equal(await sandbox.files.read('/home/user/disk'), 'disk\n');
  await sandbox.kill();
});

test('the deadline of a command stands still while the sandbox is paused', async () => {
  const sandbox = await create();
  const handle = await sandbox.commands.run('sleep 337', { background: true, timeoutMs: 12_000 });
  await handle.disconnect();
  await sandbox.pause();
  await sleep(14_000);
  await sandbox.connect();
  assert.ok((await sandbox.commands.list()).some((item) => item.pid === handle.pid), 'expected the command to live: the pause does not count');
  await eventually('the deadline to kill it', 30_000, async () => !(await sandbox.commands.list()).some((item) => item.pid === handle.pid), 500);
  await sandbox.kill();
});

test('pause resets open streams, and the process can be attached again', async () => {
  const sandbox = await create();
  const handle = await sandbox.commands.run('for i in $(seq 1000); do echo $i; sleep 0.2; done', { background: true, timeoutMs: 0 });
  const waiting = handle.wait().then(
    () => 'a result',
    (error) => error,
  );
  await sandbox.pause();
  const error = await Promise.race([waiting, sleep(10_000).then(() => 'nothing for 10 s')]);
  assert.ok(error instanceof Error, `expected the stream to fail at the pause, got ${error}`);
  await sandbox.connect();
  const again = await sandbox.commands.connect(handle.pid, { timeoutMs: 0 });
  await eventually('more output', 15_000, () => /\d/.test(again.stdout));
  assert.equal(await again.kill(), true);
  await sandbox.kill();
});

test('killing a sandbox resets its streams with a reason', async () => {
  const sandbox = await create();
  const handle = await sandbox.commands.run('sleep 300', { background: true, timeoutMs: 0 });
  const waiting = rejects(handle.wait(), 'TimeoutError', 'a command whose sandbox was killed');
  const raw = (async () => {
    for await (const { flags } of stream(sandbox, 'process.Process/Start', { process: { cmd: '/bin/sleep', args: ['300'] }, stdin: false })) {
      if (flags & 2) return 'a clean end';
    }
    return 'a clean end without an end message';
  })().catch((error) => error);
  await sleep(1000);
  await sandbox.kill();
  const error = await waiting;
  assert.match(error.message, /sandbox was killed or reached its end of life/);
  assert.ok((await raw) instanceof Error, 'expected a reset connection, not a clean end');
  const health = await fetch(`${apiUrl}/health`, { headers: { ...route(sandbox), ...token(sandbox) } });
  assert.equal(health.status, 502);
  await health.text();
});

test('a sandbox that ends at its timeout while a command streams says so', async () => {
  const sandbox = await create({ timeoutMs: 5000 });
  const error = await rejects(sandbox.commands.run('sleep 300', { timeoutMs: 0 }), 'TimeoutError', 'a command whose sandbox reached its timeout');
  assert.match(error.message, /sandbox was killed or reached its end of life/);
});

test('connect while the pause is going on waits for it and resumes', async () => {
  const sandbox = await create();
  const pausing = sandbox.pause();
  await sleep(20);
  const connected = await Sandbox.connect(sandbox.sandboxId);
  await pausing;
  if ((await state(sandbox)) === 'paused') await connected.connect(); // the connect came before the pause began
  assert.equal((await connected.commands.run('echo up')).stdout, 'up\n');
  await sandbox.kill();
});

test('an old client resumes by POST resume', async () => {
  const sandbox = await create();
  await sandbox.pause();
  const answer = expectStatus(await rest('POST', `/sandboxes/${sandbox.sandboxId}/resume`, { timeout: 120, autoPause: true }), 201, 'POST resume').json;
  assert.equal(answer.sandboxID, sandbox.sandboxId);
  assert.equal((await sandbox.commands.run('echo up')).stdout, 'up\n');
  await sandbox.kill();
});
