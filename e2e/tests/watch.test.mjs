// Watching directories: the stream that the JS client uses, and the polling that
// the synchronous Python client uses.

import assert from 'node:assert/strict';

import { unary } from '../lib/gateway.mjs';
import { eventually, lazy, rejects, test } from '../lib/suite.mjs';

const shared = lazy();
const base = '/home/user/watched';

async function fresh(sandbox, name) {
  const dir = `${base}/${name}`;
  await sandbox.files.remove(dir);
  await sandbox.files.makeDir(dir);
  return dir;
}

test('the stream reports create, write, chmod, rename and remove', async () => {
  const sandbox = await shared();
  const dir = await fresh(sandbox, 'stream');
  const events = [];
  const handle = await sandbox.files.watchDir(dir, (event) => events.push(event));
  const saw = (type, name) => eventually(`an event ${type} for ${name}, have ${JSON.stringify(events)}`, 15_000, () => events.some((event) => event.type === type && event.name === name));
  await sandbox.files.write(`${dir}/a.txt`, 'hello');
  await saw('create', 'a.txt');
  await saw('write', 'a.txt');
  await sandbox.commands.run(`chmod 600 ${dir}/a.txt`);
  await saw('chmod', 'a.txt');
  await sandbox.files.rename(`${dir}/a.txt`, `${dir}/b.txt`);
  await saw('rename', 'a.txt');
  await saw('create', 'b.txt');
  await sandbox.files.remove(`${dir}/b.txt`);
  await saw('remove', 'b.txt');
  await handle.stop();
  const count = events.length;
  await sandbox.files.write(`${dir}/after.txt`, 'x');
  assert.equal(events.length, count, 'expected nothing after stop');
});

test('a recursive watch follows new directories; a plain one does not', async () => {
  const sandbox = await shared();
  const dir = await fresh(sandbox, 'deep');
  const plain = [];
  const deep = [];
  const one = await sandbox.files.watchDir(dir, (event) => plain.push(event.name));
  const two = await sandbox.files.watchDir(dir, (event) => deep.push(event.name), { recursive: true });
  await sandbox.files.makeDir(`${dir}/one`);
  await eventually('the new directory', 15_000, () => deep.includes('one') && plain.includes('one'));
  await sandbox.files.write(`${dir}/one/inner.txt`, 'x');
  await eventually(`an event for one/inner.txt, have ${deep}`, 15_000, () => deep.includes('one/inner.txt'));
  await sandbox.files.makeDir(`${dir}/one/two/three`);
  await sandbox.files.write(`${dir}/one/two/three/leaf.txt`, 'x');
  await eventually('an event three directories down', 15_000, () => deep.includes('one/two/three/leaf.txt'));
  assert.ok(!plain.some((name) => name.includes('/')), `expected a plain watch to stay in its directory, got ${plain}`);
  await one.stop();
  await two.stop();
});

test('an event carries the entry when asked', async () => {
  const sandbox = await shared();
  const dir = await fresh(sandbox, 'entry');
  const events = [];
  const handle = await sandbox.files.watchDir(dir, (event) => events.push(event), { includeEntry: true });
  await sandbox.files.write(`${dir}/e.txt`, 'entry');
  const event = await eventually('an event with an entry', 15_000, () => events.find((item) => item.name === 'e.txt' && item.entry));
  assert.equal(event.entry.path, `${dir}/e.txt`);
  await sandbox.files.remove(`${dir}/e.txt`);
  const removed = await eventually('the remove', 15_000, () => events.find((item) => item.type === 'remove'));
  assert.equal(removed.entry, undefined, 'expected no entry on remove');
  await handle.stop();
});

test('what cannot be watched is refused', async () => {
  const sandbox = await shared();
  await sandbox.files.write(`${base}/file`, 'x');
  await rejects(sandbox.files.watchDir(`${base}/absent`, () => {}), 'FileNotFoundError', 'watch of a missing directory');
  await rejects(sandbox.files.watchDir(`${base}/file`, () => {}), 'InvalidArgumentError', 'watch of a file');
});

test('a watch ends at its deadline, without an error', async () => {
  const sandbox = await shared();
  const dir = await fresh(sandbox, 'deadline');
  let exits = 0;
  const handle = await sandbox.files.watchDir(dir, () => {}, { timeoutMs: 2000, onExit: () => exits++ });
  await eventually('the watch to end', 15_000, () => exits === 1);
  await handle.stop();
});

test('polling collects the events between two questions', async () => {
  const sandbox = await shared();
  const dir = await fresh(sandbox, 'poll');
  const made = await unary(sandbox, 'filesystem.Filesystem/CreateWatcher', { path: dir, recursive: true });
  assert.equal(made.status, 200, made.text);
  const { watcherId } = made.json;
  assert.ok(watcherId, `expected a watcherId, got ${made.text}`);
  const ask = async () => {
    const answer = await unary(sandbox, 'filesystem.Filesystem/GetWatcherEvents', { watcherId });
    assert.equal(answer.status, 200, answer.text);
    return answer.json.events ?? [];
  };
  assert.deepEqual(await ask(), []);
  await sandbox.files.write(`${dir}/sub/p.txt`, 'polled');
  const seen = [];
  await eventually('the create of sub/p.txt', 15_000, async () => {
    seen.push(...(await ask()));
    return seen.some((event) => event.name === 'sub/p.txt');
  });
  assert.ok(seen.every((event) => /^EVENT_TYPE_(CREATE|WRITE|REMOVE|RENAME|CHMOD)$/.test(event.type)), JSON.stringify(seen));
  assert.ok(seen.some((event) => event.name === 'sub' && event.type === 'EVENT_TYPE_CREATE'), JSON.stringify(seen));
  const rest = await ask();
  assert.ok(!rest.some((event) => event.type === 'EVENT_TYPE_CREATE' && event.name === 'sub'), 'expected each event once');
  assert.equal((await unary(sandbox, 'filesystem.Filesystem/RemoveWatcher', { watcherId })).status, 200);
  const after = await unary(sandbox, 'filesystem.Filesystem/GetWatcherEvents', { watcherId });
  assert.equal(after.status, 404, after.text);
  assert.equal(after.json.code, 'not_found');
  const absent = await unary(sandbox, 'filesystem.Filesystem/CreateWatcher', { path: `${base}/absent` });
  assert.equal(absent.json?.code, 'not_found', absent.text);
});
