// Latency and memory of `agentzip serve` on real VMs. Starts and stops a server of
// its own.
//
//   node latency.mjs [--create] [--commands] [--idle] [--count N] [--rounds N] [--parallel N]
//
//   --create    creates N (--parallel, 20) sandboxes at once, --rounds (3) times, with
//               as many prepared VMMs
//   --commands  time of /bin/true through gateway and agent, and of the same in the
//               guest directly
//   --idle      --count (200) sandboxes, idle until they are compressed: list, one
//               command each in 40 of them, memory
//
// Without any of the three all are run. The closing line is "latency: KEY=VALUE ...",
// times in milliseconds, memory in MiB. Exit code 1 if something failed, 0 otherwise:
// targets are compared by the reader, this machine may be a noisy one.

import { readFile } from 'node:fs/promises';
import { parseArgs } from 'node:util';

import { startServer } from './lib/server.mjs';

const { values: options } = parseArgs({
  options: {
    create: { type: 'boolean', default: false },
    commands: { type: 'boolean', default: false },
    idle: { type: 'boolean', default: false },
    count: { type: 'string', default: '200' },
    rounds: { type: 'string', default: '3' },
    parallel: { type: 'string', default: '20' },
  },
});
const everything = !options.create && !options.commands && !options.idle;
const template = process.env.AGENTZIP_E2E_TEMPLATE || 'base';
const figures = {};
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// at returns the value that a share of the sorted list is at most.
function at(list, share) {
  const sorted = [...list].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.max(0, Math.ceil(share * sorted.length) - 1))];
}

function figure(name, value) {
  figures[name] = Math.round(value * 100) / 100;
  console.log(`  ${name} ${figures[name]}`);
}

// gateway talks to the server without an SDK, whose own cost is not the question.
function gateway({ variables }) {
  const url = variables.E2B_API_URL;
  const call = async (method, path, body, headers = {}) => {
    const response = await fetch(url + path, {
      method,
      headers: { 'X-API-Key': variables.E2B_API_KEY, ...(body ? { 'Content-Type': 'application/json' } : {}), ...headers },
      body: body && JSON.stringify(body),
    });
    const text = await response.text();
    if (!response.ok) throw new Error(`${method} ${path}: ${response.status} ${text.slice(0, 200)}`);
    return text === '' ? undefined : JSON.parse(text);
  };
  // command runs argv and returns its output.
  const command = async (sandbox, argv) => {
    const body = Buffer.from(JSON.stringify({ process: { cmd: argv[0], args: argv.slice(1) }, stdin: false }));
    const head = Buffer.alloc(5);
    head.writeUInt32BE(body.length, 1);
    const response = await fetch(`${url}/process.Process/Start`, {
      method: 'POST',
      headers: {
        'Content-Type': 'application/connect+json',
        'Connect-Protocol-Version': '1',
        'E2b-Sandbox-Id': sandbox.sandboxID,
        'E2b-Sandbox-Port': '49983',
        'X-Access-Token': sandbox.envdAccessToken,
      },
      body: Buffer.concat([head, body]),
    });
    const raw = Buffer.from(await response.arrayBuffer());
    if (response.status !== 200) throw new Error(`command: ${response.status} ${raw}`);
    let output = '';
    let ended = false;
    for (let i = 0; i + 5 <= raw.length; ) {
      const length = raw.readUInt32BE(i + 1);
      const message = JSON.parse(raw.subarray(i + 5, i + 5 + length));
      i += 5 + length;
      output += Buffer.from(message.event?.data?.stdout ?? '', 'base64');
      ended ||= message.event?.end?.exited === true && !message.event.end.exitCode;
    }
    if (!ended) throw new Error(`command ${argv.join(' ')} failed: ${raw.subarray(0, 300)}`);
    return output;
  };
  return {
    call,
    command,
    create: () => call('POST', '/v2/sandboxes', { templateID: template, timeout: 3600, metadata: { 'agentzip.cohort': 'latency' } }),
    kill: (sandbox) => call('DELETE', `/sandboxes/${sandbox.sandboxID}`),
  };
}

async function timed(fn) {
  const begin = performance.now();
  const value = await fn();
  return { value, ms: performance.now() - begin };
}

async function measureCreate(api, warmRefillMs) {
  const parallel = Number(options.parallel);
  const times = [];
  for (let round = 0; round < Number(options.rounds); round++) {
    await sleep(warmRefillMs); // the prepared VMMs are made again in the background
    const made = await Promise.all(Array.from({ length: parallel }, () => timed(() => api.create())));
    times.push(...made.map((item) => item.ms));
    await api.command(made[0].value, ['/bin/true']);
    await Promise.all(made.map((item) => api.kill(item.value)));
  }
  figure('create_p50', at(times, 0.5));
  figure('create_p95', at(times, 0.95));
  figure('create_max', at(times, 1));
}

// What the guest needs for the same by itself: spawn and wait, measured there.
const spawner = `
import os, time
t = []
for i in range(220):
    a = time.perf_counter()
    p = os.posix_spawn('/bin/true', ['/bin/true'], {})
    os.waitpid(p, 0)
    t.append((time.perf_counter() - a) * 1000)
t = sorted(t[20:])
print(t[len(t) // 2], t[int(len(t) * 0.95)])
`;

async function measureCommands(api) {
  const sandbox = await api.create();
  for (let i = 0; i < 20; i++) await api.command(sandbox, ['/bin/true']);
  const through = [];
  for (let i = 0; i < 200; i++) through.push((await timed(() => api.command(sandbox, ['/bin/true']))).ms);
  const [p50, p95] = (await api.command(sandbox, ['/usr/bin/python3', '-c', spawner])).trim().split(' ').map(Number);
  figure('command_p50', at(through, 0.5));
  figure('command_p95', at(through, 0.95));
  figure('guest_p50', p50);
  figure('guest_p95', p95);
  figure('command_added_p50', at(through, 0.5) - p50);
  await api.kill(sandbox);
}

async function available() {
  const text = await readFile('/proc/meminfo', 'utf8');
  return Number(/MemAvailable:\s+(\d+)/.exec(text)[1]) / 1024;
}

async function measureIdle(api) {
  const count = Number(options.count);
  const before = await available();
  const made = [];
  const begin = performance.now();
  await Promise.all(
    Array.from({ length: 4 }, async () => {
      while (made.length < count) {
        const place = made.push(undefined) - 1;
        made[place] = await api.create();
      }
    }),
  );
  figure('idle_creates_per_s', count / ((performance.now() - begin) / 1000));
  // Compressed is when nothing changes any more: two looks, 10 s apart, that agree.
  const statement = async () => {
    const sum = { private: 0, encoded: 0, pageTables: 0, vmm: 0, parked: 0 };
    for (const sandbox of made) {
      const memory = await api.call('GET', `/agentzip/v1/sandboxes/${sandbox.sandboxID}/memory`);
      for (const key of ['private', 'encoded', 'pageTables', 'vmm']) sum[key] += memory[key] ?? 0;
      if (memory.parked) sum.parked++;
    }
    return sum;
  };
  let sum = await statement();
  for (let i = 0; i < 30; i++) {
    await sleep(10_000);
    const next = await statement();
    const still = Math.abs(next.private - sum.private) < 0.02 * sum.private + (1 << 20) && next.parked === sum.parked;
    sum = next;
    if (still) break;
  }
  const mib = (bytes) => bytes / count / (1 << 20);
  figure('idle_parked', sum.parked);
  figure('idle_private', mib(sum.private));
  figure('idle_encoded', mib(sum.encoded));
  figure('idle_page_tables', mib(sum.pageTables));
  figure('idle_vmm', mib(sum.vmm));
  figure('idle_host_per_sandbox', (before - (await available())) / count);
  const lists = [];
  for (let i = 0; i < 200; i++) lists.push((await timed(() => api.call('GET', '/v2/sandboxes?limit=100'))).ms);
  figure('list_p50', at(lists, 0.5));
  figure('list_p99', at(lists, 0.99));
  const answers = [];
  for (let i = 0; i < Math.min(40, count); i++) {
    const sandbox = made[Math.floor((i * count) / Math.min(40, count))];
    answers.push((await timed(() => api.command(sandbox, ['/bin/true']))).ms);
  }
  figure('answer_p50', at(answers, 0.5));
  figure('answer_max', at(answers, 1));
  await Promise.all(made.map((sandbox) => api.kill(sandbox)));
}

const warm = everything || options.create ? Number(options.parallel) : 2;
const server = await startServer({ flags: ['--warm', String(warm), '--max-sandboxes', '1000'] });
let failed = false;
try {
  const api = gateway(server);
  await api.kill(await api.create()); // the client's first request is slow by itself
  if (everything || options.create) await measureCreate(api, 1000 * Math.max(5, warm * 0.75));
  if (everything || options.commands) await measureCommands(api);
  if (everything || options.idle) await measureIdle(api);
} catch (error) {
  failed = true;
  console.log(`latency.mjs: ${error.message}\n${server.tail().trim().slice(-1500)}`);
}
await server.stop();
console.log(`latency: ${Object.entries(figures).map(([key, value]) => `${key}=${value}`).join(' ')}`);
process.exit(failed ? 1 : 0);
