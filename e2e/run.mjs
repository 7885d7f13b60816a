// Runs the suite against an `agentzip serve` that it starts and stops itself, and
// closes with the line "N passed, N failed, N skipped".
//
//   node run.mjs [--short] [--only TEXT] [--match REGEXP] [--cycles N] [--seed N] [--json] [--attach] [--log FILE]
//
//   --short    the cut that `make test` runs
//   --only     only test files whose name contains TEXT
//   --match    only tests whose name matches
//   --json     events as `go test -json` writes them, for scripts/testsum, and no closing line
//   --attach   use the server that E2B_API_KEY, E2B_API_URL and E2B_SANDBOX_URL name
//   --log      where the server's own words go (default build/log/e2e-serve.log)
//
// Exit code: 0 if nothing failed and something passed, 1 otherwise, 2 for bad usage.

import { mkdir, readdir } from 'node:fs/promises';
import path from 'node:path';
import { run } from 'node:test';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';

import { startServer } from './lib/server.mjs';

const here = path.dirname(fileURLToPath(import.meta.url));

function flags() {
  try {
    const { values } = parseArgs({
      options: {
        short: { type: 'boolean', default: false },
        only: { type: 'string', default: '' },
        match: { type: 'string' },
        cycles: { type: 'string' },
        seed: { type: 'string' },
        json: { type: 'boolean', default: false },
        attach: { type: 'boolean', default: false },
        log: { type: 'string', default: path.join(here, '..', 'build', 'log', 'e2e-serve.log') },
      },
    });
    return values;
  } catch (error) {
    console.error(`run.mjs: ${error.message}`);
    process.exit(2);
  }
}

function indent(text) {
  return String(text).split('\n').map((line) => `      ${line}`).join('\n');
}

// explain says what was expected and where.
function explain(error) {
  const cause = error?.cause ?? error;
  const lines = [indent(cause?.message ?? cause)];
  if (cause && typeof cause === 'object' && 'expected' in cause && cause.expected !== undefined) {
    lines.push(indent(`expected: ${JSON.stringify(cause.expected)?.slice(0, 500)}`));
    lines.push(indent(`actual:   ${JSON.stringify(cause.actual)?.slice(0, 500)}`));
  }
  const place = /(tests\/[^)\s]*\.mjs:\d+):\d+/.exec(cause?.stack ?? '');
  if (place) lines.push(indent(`at ${place[1]}`));
  return lines.join('\n');
}

// A text report for people.
const text = {
  note: (line) => console.log(line),
  passed: (name, file, seconds) => console.log(`  ok   ${name} (${seconds.toFixed(1)} s)`),
  skipped: () => {},
  failed: (name, file, seconds, why) => console.log(`  FAIL ${name} (${seconds.toFixed(1)} s)\n${why}`),
  end: (counts) => console.log(`${counts.passed} passed, ${counts.failed} failed, ${counts.skipped} skipped`),
};

// The events of `go test -json`, so that one program adds up all stages of a run.
const emit = (event) => console.log(JSON.stringify({ Package: 'e2e', ...event }));
const events = {
  note: () => {},
  passed: (name, file, seconds) => emit({ Action: 'pass', Test: `${file}: ${name}`, Elapsed: seconds }),
  skipped: (name, file) => emit({ Action: 'skip', Test: `${file}: ${name}` }),
  failed: (name, file, seconds, why) => {
    emit({ Action: 'output', Test: `${file}: ${name}`, Output: `${why}\n` });
    emit({ Action: 'fail', Test: `${file}: ${name}`, Elapsed: seconds });
  },
  end: (counts, seconds) => emit({ Action: counts.failed === 0 && counts.passed > 0 ? 'pass' : 'fail', Elapsed: seconds }),
};

// runFile runs the tests of one file in a process of its own and adds to counts.
async function runFile(name, match, report, counts) {
  const file = path.join(here, 'tests', name);
  const topic = name.replace('.test.mjs', '');
  const stream = run({ files: [file], concurrency: 1, testNamePatterns: match ? [new RegExp(match)] : undefined });
  stream.on('test:pass', (event) => {
    if (event.details?.type === 'suite' || event.name === file) return;
    const seconds = event.details.duration_ms / 1000;
    if (event.skip !== undefined && event.skip !== false) {
      counts.skipped++;
      report.skipped(event.name, topic);
      return;
    }
    counts.passed++;
    report.passed(event.name, topic, seconds);
  });
  stream.on('test:fail', (event) => {
    if (event.details?.error?.failureType === 'subtestsFailed') return;
    counts.failed++;
    report.failed(event.name, topic, (event.details?.duration_ms ?? 0) / 1000, explain(event.details?.error));
  });
  stream.on('test:diagnostic', (event) => {
    if (event.message.startsWith('note: ')) report.note(`       ${event.message.slice(6)}`);
  });
  stream.on('test:stderr', (event) => process.stderr.write(event.message));
  for await (const event of stream) void event;
}

async function main() {
  const options = flags();
  const names = (await readdir(path.join(here, 'tests'))).filter((name) => name.endsWith('.test.mjs') && name.includes(options.only)).sort();
  if (names.length === 0) {
    console.error(`run.mjs: no test file has ${JSON.stringify(options.only)} in its name`);
    process.exit(2);
  }
  process.env.AGENTZIP_E2E_SEED = options.seed ?? String(Date.now() % 1_000_000_000);
  if (options.short) process.env.AGENTZIP_E2E_SHORT = '1';
  if (options.cycles) process.env.AGENTZIP_E2E_CYCLES = options.cycles;

  let server;
  const stop = async () => {
    const ending = server;
    server = undefined;
    return ending?.stop();
  };
  for (const signal of ['SIGINT', 'SIGTERM']) {
    process.once(signal, () => stop().finally(() => process.exit(1)));
  }
  const counts = { passed: 0, failed: 0, skipped: 0 };
  const report = options.json ? events : text;
  const begin = Date.now();
  const broken = (name, why) => {
    counts.failed++;
    report.failed(name, 'run', 0, indent(why));
  };
  try {
    if (!options.attach) {
      await mkdir(path.dirname(options.log), { recursive: true });
      server = await startServer({ logFile: options.log });
      Object.assign(process.env, server.variables);
    }
    report.note(`e2e: ${process.env.E2B_API_URL}, seed ${process.env.AGENTZIP_E2E_SEED}`);
    for (const name of names) {
      report.note(`e2e: ${name}`);
      await runFile(name, options.match, report, counts);
    }
  } catch (error) {
    broken('the suite starts', error.message);
  }
  const end = await stop();
  if (end && end.code !== 0) {
    broken('agentzip serve ends cleanly', `expected code 0 on SIGTERM, got ${end.signal ?? end.code} (see ${options.log})`);
  }
  report.end(counts, (Date.now() - begin) / 1000);
  process.exit(counts.failed === 0 && counts.passed > 0 ? 0 : 1);
}

await main();
