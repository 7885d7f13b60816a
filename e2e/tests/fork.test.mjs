// Forks and snapshots: copies that go on as machines of their own.

import assert from 'node:assert/strict';

import { Sandbox } from 'e2b';

import { expectError, expectStatus, rest } from '../lib/gateway.mjs';
import { short } from '../lib/options.mjs';
import { create, eventually, keep, rejects, test } from '../lib/suite.mjs';

// remember starts a process whose memory holds a random word, written out on request.
async function remember(sandbox) {
  const handle = await sandbox.commands.run(
    `w=$(head -c 16 /dev/urandom | base64); echo "$w" > /tmp/word; n=0; while :; do n=$((n+1)); echo "$w $n" > /tmp/now.new; mv /tmp/now.new /tmp/now; sleep 0.2; done`,
    { background: true, timeoutMs: 0 },
  );
  await eventually('the process to write', 15_000, () => sandbox.files.exists('/tmp/now'));
  return { pid: handle.pid, word: (await sandbox.files.read('/tmp/word')).trim() };
}

async function now(sandbox) {
  const [word, n] = (await sandbox.files.read('/tmp/now')).trim().split(' ');
  return { word, n: Number(n) };
}

const copies = short ? 3 : 10;

test(`${copies} forks of a busy sandbox go on with its processes, each as itself`, async () => {
  const source = await create({ metadata: { family: 'fork' }, envs: { INHERITED: 'yes' } });
  const { pid, word } = await remember(source);
  const before = await now(source);
  const end = (await source.getInfo()).endAt;
  const forks = await source.fork({ count: copies, timeoutMs: 200_000 });
  assert.equal(forks.length, copies);
  for (const fork of forks) {
    assert.ok(!(fork instanceof Error), `expected a sandbox, got ${fork?.message}`);
    keep(fork);
  }
  const ids = new Set([source.sandboxId, ...forks.map((fork) => fork.sandboxId)]);
  assert.equal(ids.size, copies + 1, 'expected an id for each');
  assert.equal(new Set([source, ...forks].map((item) => item.envdAccessToken)).size, copies + 1, 'expected a token for each');
  assert.equal((await source.getInfo()).state, 'running');
  assert.equal(+(await source.getInfo()).endAt, +end, "expected the source's lifetime to be untouched");
  const entropy = new Set();
  for (const fork of forks) {
    const state = await now(fork);
    assert.equal(state.word, word, 'expected the memory of the process in the fork');
    assert.ok(state.n >= before.n, `expected the counter to go on from ${before.n}, got ${state.n}`);
    assert.ok((await fork.commands.list()).some((item) => item.pid === pid), 'expected the process in the list of the fork');
    await eventually('the counter of the fork to move', 15_000, async () => (await now(fork)).n > state.n);
    const own = await fork.commands.run('echo $E2B_SANDBOX_ID $INHERITED; date +%s; head -c 16 /dev/urandom | base64');
    const [identity, clock, random] = own.stdout.split('\n');
    assert.equal(identity, `${fork.sandboxId} yes`, 'expected the fork to know its own id and the variables of its source');
    assert.ok(Math.abs(Number(clock) - Date.now() / 1000) < 10, `expected the right time in the fork, got ${clock}`);
    entropy.add(random);
    await fork.files.write('/home/user/mine', fork.sandboxId);
    assert.deepEqual((await fork.getInfo()).metadata, { family: 'fork' });
  }
  assert.equal(entropy.size, copies, 'expected fresh entropy in each fork');
  for (const fork of forks) assert.equal(await fork.files.read('/home/user/mine'), fork.sandboxId, 'expected disks of their own');
  assert.equal(await source.files.exists('/home/user/mine'), false, 'expected the source not to see what forks write');
  const still = await now(source);
  await eventually('the source to go on', 15_000, async () => (await now(source)).n > still.n);
  await Promise.all([...forks, source].map((item) => item.kill()));
});

test('what a fork cannot be made of is refused', async () => {
  const sandbox = await create();
  expectError(await rest('POST', `/sandboxes/${sandbox.sandboxId}/fork`, { count: 0 }), 400, 'fork of none');
  expectError(await rest('POST', `/sandboxes/${sandbox.sandboxId}/fork`, { count: 101 }), 400, 'fork of too many');
  await sandbox.pause();
  expectError(await rest('POST', `/sandboxes/${sandbox.sandboxId}/fork`, {}), 409, 'fork of a paused sandbox');
  await sandbox.kill();
  await rejects(Sandbox.fork(sandbox.sandboxId), 'SandboxNotFoundError', 'fork of a killed sandbox');
});

test('an old client forks with count and timeout and reads the array', async () => {
  const sandbox = await create();
  const answer = expectStatus(await rest('POST', `/sandboxes/${sandbox.sandboxId}/fork`, { timeout: 300, count: 1 }), 201, 'POST fork').json;
  assert.equal(answer.length, 1);
  const made = answer[0].sandbox;
  keep({ sandboxId: made?.sandboxID });
  for (const field of ['sandboxID', 'templateID', 'clientID', 'envdVersion', 'envdAccessToken']) {
    assert.ok(made?.[field], `expected ${field} in ${JSON.stringify(answer)}`);
  }
  await Sandbox.kill(made.sandboxID);
  await sandbox.kill();
});

test('a snapshot is a template that goes on where the source was', async () => {
  const source = await create({ envs: { FROM: 'source' }, metadata: { family: 'snapshot' } });
  const { word } = await remember(source);
  await source.files.write('/home/user/then', 'at the snapshot');
  const snapshot = await source.createSnapshot();
  assert.ok(snapshot.snapshotId, 'expected an id');
  await source.files.write('/home/user/then', 'after the snapshot');
  const mine = async () => {
    const found = [];
    const pages = Sandbox.listSnapshots({ sandboxId: source.sandboxId });
    while (pages.hasNext) found.push(...(await pages.nextItems()));
    return found.map((item) => item.snapshotId);
  };
  assert.deepEqual(await mine(), [snapshot.snapshotId]);
  const copy = await create({ template: snapshot.snapshotId, metadata: { family: 'copy' }, envs: { FROM: 'copy' } });
  assert.equal((await now(copy)).word, word, 'expected the process of the source in the copy');
  assert.equal(await copy.files.read('/home/user/then'), 'at the snapshot');
  assert.equal((await copy.commands.run('echo $FROM')).stdout, 'copy\n', 'expected the variables of the create');
  assert.deepEqual((await copy.getInfo()).metadata, { family: 'copy' });
  assert.equal((await source.getInfo()).state, 'running');
  await source.kill();
  const late = await create({ template: snapshot.snapshotId });
  assert.equal((await now(late)).word, word, 'expected the snapshot to outlive its source');
  assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), true);
  assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), false, 'expected a second delete to say false');
  const state = await now(late);
  await eventually('a sandbox of a deleted snapshot to go on', 15_000, async () => (await now(late)).n > state.n);
  await rejects(Sandbox.create(snapshot.snapshotId), 'SandboxError', 'create from a deleted snapshot');
  await Promise.all([copy.kill(), late.kill()]);
});

test('a named snapshot can be found and used by its name', async () => {
  const source = await create();
  const name = `e2e-${process.pid}`;
  await source.files.write('/home/user/version', 'one');
  const first = await source.createSnapshot({ name });
  assert.ok(first.names.some((item) => item.includes(name)), `expected the name in ${JSON.stringify(first.names)}`);
  const listed = await Sandbox.listSnapshots({ name }).nextItems();
  assert.deepEqual(listed.map((item) => item.snapshotId), [first.snapshotId]);
  await source.files.write('/home/user/version', 'two');
  const second = await source.createSnapshot({ name });
  const copy = await create({ template: second.snapshotId });
  assert.equal(await copy.files.read('/home/user/version'), 'two', 'expected the same name to mean the newest');
  await copy.kill();
  await source.kill();
  await Sandbox.deleteSnapshot(second.snapshotId);
});
