// Terminals.

import assert from 'node:assert/strict';

import { eventually, lazy, rejects, test } from '../lib/suite.mjs';
import { unary } from '../lib/gateway.mjs';

const shared = lazy();

async function open(options = {}) {
  const sandbox = await shared();
  const screen = { text: '' };
  const decoder = new TextDecoder();
  const handle = await sandbox.pty.create({
    cols: 80,
    rows: 24,
    timeoutMs: 100_000,
    onData: (data) => {
      screen.text += decoder.decode(data, { stream: true });
    },
    ...options,
  });
  const type = (text) => sandbox.pty.sendInput(handle.pid, new TextEncoder().encode(text));
  const shows = (what) => eventually(`the terminal to show ${what}`, 30_000, () => (what instanceof RegExp ? what.test(screen.text) : screen.text.includes(what)));
  return { sandbox, handle, screen, type, shows };
}

test('a shell in a terminal answers what is typed, and ends with its code', async () => {
  const { handle, type, shows } = await open({ envs: { MARK: 'seen' }, cwd: '/tmp' });
  await type('echo "[$MARK:$TERM:$(pwd)]"\n');
  await shows('[seen:xterm-256color:/tmp]');
  await type('tty\n');
  await shows(/\/dev\/pts\/\d+/);
  await type('exit 7\n');
  const error = await rejects(handle.wait(), 'CommandExitError', 'exit 7 in a terminal');
  assert.equal(error.exitCode, 7);
});

test('the size is as asked, and follows a resize', async () => {
  const { sandbox, handle, type, shows } = await open({ cols: 91, rows: 17 });
  await type('echo "<$(stty size)>"\n');
  await shows('<17 91>');
  await sandbox.pty.resize(handle.pid, { cols: 120, rows: 40 });
  await type('echo "<$(stty size)>"\n');
  await shows('<40 120>');
  assert.equal(await sandbox.pty.kill(handle.pid), true);
  assert.equal(await sandbox.pty.kill(handle.pid), false);
});

test('control-C interrupts what runs, not the shell', async () => {
  const { sandbox, handle, type, shows } = await open();
  // A shell that still starts would be ended by the control-C itself.
  await type('echo "up-$((1+1))"\n');
  await shows('up-2');
  await type('echo "begin-$((2+2))"; sleep 300\n');
  await shows('begin-4');
  await type('\x03');
  await type('echo "alive-$((40+2))"\n');
  await shows('alive-42');
  await sandbox.pty.kill(handle.pid);
});

test('a second client attaches to the same terminal', async () => {
  const { sandbox, handle, type } = await open();
  let seen = '';
  const second = await sandbox.pty.connect(handle.pid, { onData: (data) => (seen += Buffer.from(data).toString()) });
  assert.equal(second.pid, handle.pid);
  await type('echo "both-$((1+1))"\n');
  await eventually('the second client to see the output', 30_000, () => seen.includes('both-2'));
  await sandbox.pty.kill(handle.pid);
});

test('closing the input of a terminal is refused', async () => {
  const { sandbox, handle } = await open();
  const answer = await unary(sandbox, 'process.Process/CloseStdin', { process: { pid: handle.pid } });
  assert.ok(answer.status >= 400 && answer.status < 500, `expected an error, got ${answer.status}: ${answer.text}`);
  await sandbox.pty.kill(handle.pid);
});
