// The property: whatever is written between pauses, to files and to the memory of
// a process, is there after the resume. A model of both is kept here and compared
// after every resume. Nothing is synced on purpose: a pause must not need it.

import assert from 'node:assert/strict';
import { createHash } from 'node:crypto';

import { cycles, seed } from '../lib/options.mjs';
import { create, eventually, sleep, test } from '../lib/suite.mjs';
import { Sandbox } from 'e2b';

const memoryBytes = 8 << 20;
const base = '/home/user/model';

const sha256 = (bytes) => createHash('sha256').update(bytes).digest('hex');

// random is a generator that a seed repeats (mulberry32).
function random(state) {
  const next = () => {
    state = (state + 0x6d2b79f5) | 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
  return {
    below: (limit) => Math.floor(next() * limit),
    pick: (list) => list[Math.floor(next() * list.length)],
  };
}

// content makes bytes that are neither all alike nor all noise, as programs do.
function content(rng, size) {
  const kind = rng.below(3);
  if (kind === 0) return Buffer.alloc(size, rng.below(256));
  const word = sha256(String(rng.below(1e9)));
  if (kind === 1) return Buffer.from(word.repeat(Math.ceil(size / 64)).slice(0, size));
  const out = Buffer.alloc(size);
  for (let at = 0; at < size; at += 32) createHash('sha256').update(`${word}${at}`).digest().copy(out, at);
  return out;
}

// The process whose memory is compared: commands on stdin, one line of answer each.
const holder = `
import base64, hashlib, sys
mem = bytearray(${memoryBytes})
for line in sys.stdin:
    op, *args = line.split()
    if op == 'write':
        at, data = int(args[0]), base64.b64decode(args[1])
        mem[at:at + len(data)] = data
    elif op == 'copy':
        src, dst, n = map(int, args)
        mem[dst:dst + n] = mem[src:src + n]
    print(hashlib.sha256(mem).hexdigest() if op == 'sum' else 'ok', flush=True)
`;

class Holder {
  constructor(sandbox, handle) {
    this.sandbox = sandbox;
    this.handle = handle;
    this.read = 0;
    this.model = Buffer.alloc(memoryBytes);
  }

  async ask(line) {
    const { handle } = this;
    await handle.sendStdin(`${line}\n`);
    const answer = await eventually(`an answer to ${line.slice(0, 40)}`, 60_000, () => {
      const end = handle.stdout.indexOf('\n', this.read);
      return end >= 0 && { text: handle.stdout.slice(this.read, end), end };
    }, 10);
    this.read = answer.end + 1;
    return answer.text;
  }

  async attach() {
    this.handle = await this.sandbox.commands.connect(this.handle.pid, { timeoutMs: 0 });
    this.handle.wait().catch(() => {}); // the next pause resets it
    this.read = 0;
  }

  async scribble(rng) {
    if (rng.below(4) === 0) {
      const n = rng.below(256 << 10) + 1;
      const from = rng.below(memoryBytes - n);
      const to = rng.below(memoryBytes - n);
      assert.equal(await this.ask(`copy ${from} ${to} ${n}`), 'ok');
      Buffer.from(this.model.subarray(from, from + n)).copy(this.model, to);
      return;
    }
    const data = content(rng, rng.below(48 << 10) + 1);
    const at = rng.below(memoryBytes - data.length);
    assert.equal(await this.ask(`write ${at} ${data.toString('base64')}`), 'ok');
    data.copy(this.model, at);
  }

  async check(when) {
    assert.equal(await this.ask('sum'), sha256(this.model), `${when}: expected the memory of the process as the model has it`);
  }
}

// Tree is the model of a directory: path below base -> bytes.
class Tree {
  constructor(sandbox) {
    this.sandbox = sandbox;
    this.files = new Map();
  }

  async scribble(rng) {
    const { sandbox, files } = this;
    const names = [...files.keys()];
    const name = `d${rng.below(3)}/f${rng.below(12)}`;
    const path = `${base}/${name}`;
    switch (names.length === 0 ? 0 : rng.below(6)) {
      case 0:
      case 1: {
        const data = content(rng, rng.below(200_000));
        await sandbox.files.write(path, data.buffer.slice(data.byteOffset, data.byteOffset + data.length));
        files.set(name, data);
        break;
      }
      case 2: {
        const old = rng.pick(names);
        const text = `line ${rng.below(1e9)}\n`;
        await sandbox.commands.run(`printf %s '${text}' >> ${base}/${old}`);
        files.set(old, Buffer.concat([files.get(old), Buffer.from(text)]));
        break;
      }
      case 3: {
        const old = rng.pick(names);
        await sandbox.files.remove(`${base}/${old}`);
        files.delete(old);
        break;
      }
      case 4: {
        const old = rng.pick(names);
        if (old === name) break;
        await sandbox.files.rename(`${base}/${old}`, path);
        files.set(name, files.get(old));
        files.delete(old);
        break;
      }
      default: {
        const old = rng.pick(names);
        const size = rng.below(files.get(old).length + 1);
        await sandbox.commands.run(`truncate -s ${size} ${base}/${old}`);
        files.set(old, files.get(old).subarray(0, size));
      }
    }
  }

  async check(when) {
    const { stdout } = await this.sandbox.commands.run(`cd ${base} && find . -type f -exec sha256sum {} +`, { timeoutMs: 90_000 });
    const got = stdout.split('\n').filter(Boolean).map((line) => line.replace(' ./', '')).sort();
    const want = [...this.files].map(([name, data]) => `${sha256(data)} ${name}`).sort();
    assert.deepEqual(got.map((line) => line.replace(/\s+/, ' ')), want, `${when}: expected the files as the model has them`);
  }
}

test(`${cycles} pauses lose nothing that was written between them (seed ${seed})`, { timeout: 60_000 + cycles * 60_000 }, async (t) => {
  const rng = random(seed);
  const sandbox = await create({ timeoutMs: 3_000_000, lifecycle: { onTimeout: 'pause', autoResume: false } });
  await sandbox.files.makeDir(base);
  await sandbox.files.write('/home/user/holder.py', holder);
  const memory = new Holder(sandbox, await sandbox.commands.run('exec python3 -u /home/user/holder.py', { background: true, stdin: true, timeoutMs: 0 }));
  memory.handle.wait().catch(() => {});
  const tree = new Tree(sandbox);
  await memory.check('before the first pause');
  const begin = Date.now();
  let resumed = 0;
  for (let cycle = 1; cycle <= cycles; cycle++) {
    for (let i = rng.below(3) + 1; i > 0; i--) await memory.scribble(rng);
    for (let i = rng.below(3) + 1; i > 0; i--) await tree.scribble(rng);
    if (rng.below(5) === 0) {
      // By timeout: the other way into a pause must lose as little.
      await sandbox.setTimeout(1000);
      await eventually('the pause at the timeout', 60_000, async () => (await Sandbox.getInfo(sandbox.sandboxId)).state === 'paused');
    } else {
      assert.equal(await sandbox.pause(), true);
    }
    if (rng.below(4) === 0) await sleep(rng.below(1500));
    const at = Date.now();
    await sandbox.connect({ timeoutMs: 3_000_000 });
    resumed += Date.now() - at;
    await memory.attach();
    const when = `after pause ${cycle} of ${cycles}, seed ${seed}`;
    await memory.check(when);
    await tree.check(when);
  }
  t.diagnostic(`note: ${cycles} cycles in ${((Date.now() - begin) / 1000).toFixed(0)} s, resume ${(resumed / cycles).toFixed(0)} ms on average`);
  await sandbox.kill();
});
