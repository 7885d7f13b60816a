// Commands: run, streamed, in the background, their input, their end.

import assert from 'node:assert/strict';

import { CommandExitError } from 'e2b';

import { stream, unary } from '../lib/gateway.mjs';
import { eventually, lazy, long, rejects, sleep, test } from '../lib/suite.mjs';

const shared = lazy();

// gone waits until no process of the sandbox has `word` in its command line.
async function gone(sandbox, word, limit = 10_000) {
  const [first, ...others] = word;
  await eventually(`no process with ${word} in its command line`, limit, async () => {
    const { stdout } = await sandbox.commands.run(`pgrep -f '[${first}]${others.join('')}' || true`);
    return stdout.trim() === '';
  });
}

test('stdout, stderr and exit code 0 of a command', async () => {
  const sandbox = await shared();
  const result = await sandbox.commands.run('echo out; echo err >&2');
  assert.deepEqual({ ...result }, { exitCode: 0, error: undefined, stdout: 'out\n', stderr: 'err\n' });
});

test('a failing command throws with its code and its output', async () => {
  const sandbox = await shared();
  const error = await rejects(sandbox.commands.run('echo before; echo why >&2; exit 42'), 'CommandExitError', 'exit 42');
  assert.ok(error instanceof CommandExitError);
  assert.equal(error.exitCode, 42);
  assert.equal(error.stdout, 'before\n');
  assert.equal(error.stderr, 'why\n');
});

test('an unknown command is exit code 127', async () => {
  const error = await rejects((await shared()).commands.run('no-such-command-here'), 'CommandExitError', 'unknown command');
  assert.equal(error.exitCode, 127);
});

test('user, home, working directory and variables are as documented', async () => {
  const sandbox = await shared();
  const plain = await sandbox.commands.run('whoami; pwd; echo $HOME $USER $LOGNAME');
  assert.equal(plain.stdout, 'user\n/home/user\n/home/user user user\n');
  const root = await sandbox.commands.run('whoami; pwd', { user: 'root' });
  assert.equal(root.stdout.split('\n')[0], 'root');
  assert.equal((await sandbox.commands.run('sudo -n whoami')).stdout, 'root\n', 'expected sudo without a password');
  assert.equal((await sandbox.commands.run('pwd', { cwd: '/usr/lib' })).stdout, '/usr/lib\n');
  await sandbox.commands.run('mkdir -p ~/rel');
  assert.equal((await sandbox.commands.run('pwd', { cwd: 'rel' })).stdout, '/home/user/rel\n', 'expected a relative cwd to start at home');
  assert.equal((await sandbox.commands.run('pwd', { cwd: '~/rel' })).stdout, '/home/user/rel\n', 'expected ~ to be home');
  assert.equal((await sandbox.commands.run('echo "$A-$B"', { envs: { A: '1', B: 'x y "z"' } })).stdout, '1-x y "z"\n');
});

test('a missing cwd and an unknown user are told', async () => {
  const sandbox = await shared();
  const cwd = await rejects(sandbox.commands.run('pwd', { cwd: '/not/there' }), 'InvalidArgumentError', 'cwd that is not there');
  assert.match(cwd.message, /cwd '\/not\/there' does not exist/);
  const user = await rejects(sandbox.commands.run('pwd', { user: 'nobody-here' }), 'AuthenticationError', 'unknown user');
  assert.match(user.message, /invalid username: 'nobody-here'/);
});

test('output is delivered while the command runs', async () => {
  const sandbox = await shared();
  const seen = [];
  const result = await sandbox.commands.run('echo one; sleep 2; echo two', { onStdout: (text) => seen.push([text, Date.now()]) });
  assert.equal(seen.map(([text]) => text).join(''), 'one\ntwo\n');
  assert.equal(result.stdout, 'one\ntwo\n');
  const gap = seen.at(-1)[1] - seen[0][1];
  assert.ok(gap > 1000, `expected the lines about 2 s apart, got ${gap} ms`);
});

test('a character cut by a chunk boundary arrives whole', async () => {
  const result = await (await shared()).commands.run(`printf '\\xe2'; sleep 0.5; printf '\\x82\\xac'`);
  assert.equal(result.stdout, '€');
});

test('a background command is listed, connected to, waited for', async () => {
  const sandbox = await shared();
  const handle = await sandbox.commands.run('echo early; sleep 3; echo late; exit 3', { background: true, envs: { MARK: 'bg' }, cwd: '/tmp' });
  assert.ok(handle.pid > 0);
  const listed = (await sandbox.commands.list()).find((item) => item.pid === handle.pid);
  assert.ok(listed, 'expected the command in the list');
  assert.equal(listed.cmd, '/bin/bash');
  assert.deepEqual(listed.args, ['-l', '-c', 'echo early; sleep 3; echo late; exit 3']);
  assert.equal(listed.envs.MARK, 'bg');
  assert.equal(listed.cwd, '/tmp');
  const second = await sandbox.commands.connect(handle.pid);
  assert.equal(second.pid, handle.pid);
  const [first, other] = await Promise.all([rejects(handle.wait(), 'CommandExitError', 'wait'), rejects(second.wait(), 'CommandExitError', 'wait of the second')]);
  assert.equal(first.stdout, 'early\nlate\n');
  assert.equal(other.stdout.endsWith('late\n'), true, `expected both subscribers to see the end, the second got ${JSON.stringify(other.stdout)}`);
  assert.equal(other.exitCode, 3);
  assert.ok(!(await sandbox.commands.list()).some((item) => item.pid === handle.pid), 'expected an ended command to leave the list');
});

test('a command that has just ended can still be connected to; a pid never seen cannot', async () => {
  const sandbox = await shared();
  const handle = await sandbox.commands.run('exit 5', { background: true });
  await rejects(handle.wait(), 'CommandExitError', 'exit 5');
  const late = await sandbox.commands.connect(handle.pid);
  const error = await rejects(late.wait(), 'CommandExitError', 'late connect');
  assert.equal(error.exitCode, 5);
  await rejects(sandbox.commands.connect(999_999), 'NotFoundError', 'connect to an unknown pid');
});

test('input is written, and closing it ends the reader', async () => {
  const sandbox = await shared();
  const handle = await sandbox.commands.run('cat; echo done', { background: true, stdin: true });
  await handle.sendStdin('first ');
  await sandbox.commands.sendStdin(handle.pid, 'second\n');
  await eventually('the echo of the input', 10_000, () => handle.stdout === 'first second\n');
  await handle.closeStdin();
  assert.equal((await handle.wait()).stdout, 'first second\ndone\n');
});

test('without stdin a reader sees the end at once', async () => {
  assert.equal((await (await shared()).commands.run('cat; echo eof')).stdout, 'eof\n');
});

test('a start without the stdin field has input, as old clients expect', async () => {
  const sandbox = await shared();
  const events = [];
  for await (const { flags, message } of stream(sandbox, 'process.Process/Start', { process: { cmd: '/bin/cat' } })) {
    if (flags & 2) {
      assert.deepEqual(message, {}, 'expected a clean end of the stream');
      break;
    }
    events.push(message.event);
    if (message.event.start) {
      const pid = message.event.start.pid;
      assert.equal((await unary(sandbox, 'process.Process/SendInput', { process: { pid }, input: { stdin: Buffer.from('hi\n').toString('base64') } })).status, 200);
      assert.equal((await unary(sandbox, 'process.Process/CloseStdin', { process: { pid } })).status, 200);
    }
  }
  assert.ok(events[0].start, `expected start first, got ${JSON.stringify(events[0])}`);
  const out = events.filter((event) => event.data).map((event) => Buffer.from(event.data.stdout ?? '', 'base64').toString()).join('');
  assert.equal(out, 'hi\n');
  const { end } = events.at(-1);
  assert.equal(end.exited, true);
  assert.equal(end.exitCode, undefined, 'expected exit code 0 to be left out, as protobuf JSON does');
  assert.equal(end.status, 'exit status 0');
});

test('kill ends a command and its wait; killing again says false', async () => {
  const sandbox = await shared();
  const handle = await sandbox.commands.run('sleep 313', { background: true });
  assert.equal(await handle.kill(), true);
  const error = await rejects(handle.wait(), 'CommandExitError', 'killed');
  assert.equal(error.exitCode, -1, 'expected exit code -1 for a signal');
  assert.match(error.error ?? error.message, /signal: killed/);
  assert.equal(await handle.kill(), false, 'expected a second kill to say false');
  assert.equal(await sandbox.commands.kill(999_999), false);
});

test('SIGTERM can be caught, and other signals are refused', async () => {
  const sandbox = await shared();
  const handle = await sandbox.commands.run(`trap 'echo caught; exit 9' TERM; echo ready; while :; do sleep 0.2; done`, { background: true });
  await eventually('the trap to be set', 10_000, () => handle.stdout.includes('ready'));
  const sent = await unary(sandbox, 'process.Process/SendSignal', { process: { pid: handle.pid }, signal: 'SIGNAL_SIGTERM' });
  assert.equal(sent.status, 200, sent.text);
  const error = await rejects(handle.wait(), 'CommandExitError', 'terminated');
  assert.equal(error.exitCode, 9);
  assert.match(error.stdout, /caught/);
});

test('the deadline kills the command, also when nobody listens', async () => {
  const sandbox = await shared();
  const begin = Date.now();
  await rejects(sandbox.commands.run('sleep 317', { timeoutMs: 3000 }), 'TimeoutError', 'deadline of 3 s');
  assert.ok(Date.now() - begin < 15_000, `expected the deadline after about 3 s, took ${Date.now() - begin} ms`);
  await gone(sandbox, 'sleep 317');
  const handle = await sandbox.commands.run('sleep 319', { background: true, timeoutMs: 4000 });
  await handle.disconnect();
  assert.match((await sandbox.commands.run('pgrep -f "[s]leep 319"')).stdout, /\d/, 'expected the command to outlive its client');
  await gone(sandbox, 'sleep 319', 15_000);
});

test('a client that leaves does not end the command', async () => {
  const sandbox = await shared();
  const handle = await sandbox.commands.run('sleep 4; echo survived > /tmp/survived', { background: true, timeoutMs: 0 });
  await handle.disconnect();
  await eventually('the file of the command', 20_000, () => sandbox.files.exists('/tmp/survived'), 500);
});

long('the deadline is 60 s when nothing is said', async () => {
  const sandbox = await shared();
  const begin = Date.now();
  await rejects(sandbox.commands.run('sleep 331'), 'TimeoutError', 'default deadline');
  const took = (Date.now() - begin) / 1000;
  assert.ok(took > 55 && took < 70, `expected 60 s, took ${took} s`);
  await gone(sandbox, 'sleep 331');
});

test('a child that keeps the output open keeps the command open', async () => {
  const sandbox = await shared();
  const begin = Date.now();
  const result = await sandbox.commands.run('(sleep 2; echo child) & echo parent');
  assert.equal(result.stdout, 'parent\nchild\n');
  assert.ok(Date.now() - begin > 1800, 'expected the command to last as long as its output is open');
});

test('ten megabytes of output arrive complete', async () => {
  const sandbox = await shared();
  const bytes = 10 << 20;
  const result = await sandbox.commands.run(`head -c ${bytes / 64} /dev/zero | tr '\\0' x | fold -w 63 > /tmp/part; for i in $(seq 64); do cat /tmp/part; done | head -c ${bytes}`, { timeoutMs: 110_000 });
  assert.equal(result.stdout.length, bytes);
  assert.match(result.stdout.slice(0, 640), /^(x{63}\n)+$/);
});

test('a slow reader holds the command and loses nothing', async () => {
  const sandbox = await shared();
  const lines = 60_000;
  let slow = 0;
  let text = '';
  const result = await sandbox.commands.run(`seq -f 'line %.0f of a slow reader' ${lines}`, {
    timeoutMs: 110_000,
    onStdout: async (chunk) => {
      text += chunk;
      if (slow++ < 20) await sleep(100);
    },
  });
  const got = text.split('\n');
  assert.equal(got.length, lines + 1, `expected ${lines} lines, got ${got.length - 1}`);
  assert.equal(got[lines - 1], `line ${lines} of a slow reader`);
  assert.equal(result.stdout, text);
});

test('a client that never reads does not keep others waiting', async () => {
  const sandbox = await shared();
  const abort = new AbortController();
  const stuck = stream(sandbox, 'process.Process/Start', { process: { cmd: '/bin/bash', args: ['-c', 'yes never-read'] }, stdin: false }, { signal: abort.signal });
  const { value } = await stuck.next();
  const pid = value.message.event.start.pid;
  await sleep(2000);
  assert.equal((await sandbox.commands.run('echo still here')).stdout, 'still here\n');
  assert.equal(await sandbox.commands.kill(pid), true);
  abort.abort();
  await stuck.return?.().catch(() => {});
});

test('twenty commands at once each get their own output', async () => {
  const sandbox = await shared();
  const results = await Promise.all(Array.from({ length: 20 }, (_, i) => sandbox.commands.run(`echo ${i}; sleep 0.2; echo ${i}`)));
  results.forEach((result, i) => assert.equal(result.stdout, `${i}\n${i}\n`));
});

test('stdout and stderr written by many keep their own order', async () => {
  const result = await (await shared()).commands.run('for i in 1 2 3 4 5; do echo o$i; echo e$i >&2; done');
  assert.equal(result.stdout, 'o1\no2\no3\no4\no5\n');
  assert.equal(result.stderr, 'e1\ne2\ne3\ne4\ne5\n');
});

test('bytes that are no text come back as replacement characters, not as an error', async () => {
  const result = await (await shared()).commands.run(`printf 'a\\xff\\xfeb'`);
  assert.equal(result.stdout, 'a\ufffd\ufffdb');
});

test('a quiet stream is kept alive', async () => {
  const sandbox = await shared();
  const events = [];
  for await (const { flags, message } of stream(sandbox, 'process.Process/Start', { process: { cmd: '/bin/sleep', args: ['3'] }, stdin: false }, { headers: { 'Keepalive-Ping-Interval': '1' } })) {
    if (!(flags & 2)) events.push(Object.keys(message.event)[0]);
  }
  assert.ok(events.filter((kind) => kind === 'keepalive').length >= 1, `expected keepalive events each second, got ${events}`);
  assert.equal(events[0], 'start');
  assert.equal(events.at(-1), 'end');
});

test('requests the agent cannot read are refused with a Connect error', async () => {
  const sandbox = await shared();
  const bad = await unary(sandbox, 'process.Process/SendSignal', { process: { pid: 'x' } });
  assert.equal(bad.status, 400, bad.text);
  assert.equal(bad.json.code, 'invalid_argument');
  const missing = await unary(sandbox, 'process.Process/SendInput', { process: { pid: 999_999 }, input: { stdin: '' } });
  assert.equal(missing.status, 404, missing.text);
  assert.equal(missing.json.code, 'not_found');
  const none = await unary(sandbox, 'process.Process/NoSuchMethod', {});
  assert.ok([404, 501].includes(none.status), `expected 404 or 501 for an unknown method, got ${none.status}`);
});
