// The code interpreter package against the template code-interpreter-v1.

import assert from 'node:assert/strict';

import { Sandbox } from '@e2b/code-interpreter';

import { apiUrl, rest, route } from '../lib/gateway.mjs';
import { short } from '../lib/options.mjs';
import { eventually, keep, rejects, sleep, test as any } from '../lib/suite.mjs';

// The short cut runs these only where the template is there: building it takes minutes.
const absent = short && !(await rest('GET', '/templates/aliases/code-interpreter-v1').then((answer) => answer.status === 200, () => true));

function test(name, options, fn) {
  return any(name, { ...options, skip: absent && 'the template code-interpreter-v1 is not built here' }, fn);
}

let made;

function shared() {
  made ??= Sandbox.create({ timeoutMs: 600_000, envs: { GLOBAL: 'everywhere' } }).then(keep);
  return made;
}

// Python starts slowly without KVM: the first cell of a context waits for its kernel.
const patient = { timeoutMs: 180_000, requestTimeoutMs: 180_000 };

const slow = { timeout: 240_000 };

test('a cell returns its value, keeps its variables and counts', slow, async () => {
  const sandbox = await shared();
  const first = await sandbox.runCode('x = 20\nx + 1', patient);
  assert.equal(first.error, undefined, JSON.stringify(first.error));
  assert.equal(first.text, '21');
  assert.equal(first.results.filter((result) => result.isMainResult).length, 1);
  const second = await sandbox.runCode('x * 2', patient);
  assert.equal(second.text, '40');
  assert.equal(second.executionCount, first.executionCount + 1);
  const text = await sandbox.runCode('"quoted"', patient);
  assert.equal(text.text, 'quoted', 'expected the quotes of a repr to be stripped');
  const none = await sandbox.runCode('y = 1', patient);
  assert.equal(none.text, undefined);
  assert.deepEqual(none.results, []);
});

test('output is streamed line by line, both kinds apart', slow, async () => {
  const sandbox = await shared();
  const seen = [];
  const execution = await sandbox.runCode('import sys, time\nprint("one", flush=True)\ntime.sleep(2)\nprint("two", flush=True)\nprint("oops", file=sys.stderr, flush=True)', {
    ...patient,
    onStdout: (message) => seen.push([message.line, Date.now()]),
  });
  assert.equal(execution.logs.stdout.join(''), 'one\ntwo\n');
  assert.equal(execution.logs.stderr.join(''), 'oops\n');
  assert.ok(seen.at(-1)[1] - seen[0][1] > 1000, `expected the lines about 2 s apart, got ${seen.at(-1)[1] - seen[0][1]} ms`);
});

test('an error has a name, a value and a traceback', slow, async () => {
  const sandbox = await shared();
  let called;
  const execution = await sandbox.runCode('print("before")\n1/0', { ...patient, onError: (error) => (called = error) });
  assert.equal(execution.error?.name, 'ZeroDivisionError');
  assert.equal(execution.error.value, 'division by zero');
  assert.match(execution.error.traceback, /ZeroDivisionError/);
  assert.equal(called.name, 'ZeroDivisionError');
  assert.equal(execution.logs.stdout.join(''), 'before\n');
  const syntax = await sandbox.runCode('def', patient);
  assert.equal(syntax.error?.name, 'SyntaxError');
});

test('rich results: HTML, Markdown, JSON, a picture', slow, async () => {
  const sandbox = await shared();
  const execution = await sandbox.runCode(
    `from IPython.display import display, HTML, Markdown, JSON, Image
display(HTML('<b>bold</b>'))
display(Markdown('# title'))
display(JSON({'a': 1}))
import base64
display(Image(base64.b64decode('iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg==')))`,
    patient,
  );
  assert.equal(execution.error, undefined, JSON.stringify(execution.error));
  assert.equal(execution.results.find((result) => result.html)?.html, '<b>bold</b>');
  assert.equal(execution.results.find((result) => result.markdown)?.markdown, '# title');
  assert.deepEqual(execution.results.find((result) => result.json)?.json, { a: 1 });
  assert.match(execution.results.find((result) => result.png)?.png ?? '', /^iVBORw0KGgo/);
  assert.ok(execution.results.every((result) => result.isMainResult === false), 'expected displayed things not to be the main result');
});

test('a plot is a PNG and a chart with its data', slow, async () => {
  const sandbox = await shared();
  const execution = await sandbox.runCode(
    `import matplotlib.pyplot as plt
plt.plot([1, 2, 3], [4, 5, 6], label='rise')
plt.title('Growth'); plt.xlabel('time (s)'); plt.ylabel('size')
plt.show()`,
    patient,
  );
  assert.equal(execution.error, undefined, JSON.stringify(execution.error));
  const result = execution.results.find((item) => item.png);
  assert.ok(result, 'expected a PNG');
  assert.equal(result.chart?.type, 'line', `expected a line chart, got ${JSON.stringify(result.chart)}`);
  assert.equal(result.chart.title, 'Growth');
  assert.deepEqual(result.chart.elements[0].points, [[1, 4], [2, 5], [3, 6]]);
});

test('contexts have variables and directories of their own', slow, async () => {
  const sandbox = await shared();
  const context = await sandbox.createCodeContext({ cwd: '/tmp', requestTimeoutMs: 180_000 });
  assert.equal(context.language, 'python');
  assert.equal(context.cwd, '/tmp');
  await sandbox.runCode('owned = "default"', patient);
  const inside = await sandbox.runCode('import os\nowned = "mine"\nos.getcwd()', { ...patient, context });
  assert.equal(inside.text, '/tmp');
  assert.equal((await sandbox.runCode('owned', patient)).text, 'default');
  assert.ok((await sandbox.listCodeContexts()).some((item) => item.id === context.id));
  await sandbox.restartCodeContext(context);
  const after = await sandbox.runCode('owned', { ...patient, context });
  assert.equal(after.error?.name, 'NameError', 'expected a restart to forget the variables');
  await sandbox.removeCodeContext(context);
  assert.ok(!(await sandbox.listCodeContexts()).some((item) => item.id === context.id));
  await rejects(sandbox.runCode('1', { ...patient, context }), 'NotFoundError', 'a cell in a removed context');
});

test('variables: global ones in every kernel, those of a run only in that run', slow, async () => {
  const sandbox = await shared();
  const run = await sandbox.runCode('import os\n(os.environ.get("GLOBAL"), os.environ.get("ONCE"))', { ...patient, envs: { ONCE: 'now' } });
  assert.equal(run.text, "('everywhere', 'now')");
  assert.equal((await sandbox.runCode('str(os.environ.get("ONCE"))', patient)).text, 'None');
});

test('both context and language are refused, an unknown language too', slow, async () => {
  const sandbox = await shared();
  const execute = (body) => fetch(`${apiUrl}/execute`, { method: 'POST', headers: { ...route(sandbox, 49999), 'Content-Type': 'application/json' }, body: JSON.stringify(body) });
  const both = await execute({ code: '1', context_id: 'x', language: 'python' });
  assert.equal(both.status, 400, await both.text());
  const health = await fetch(`${apiUrl}/health`, { headers: route(sandbox, 49999) });
  assert.equal(health.status, 200);
  assert.equal(await health.text(), '"OK"');
});

test('a client that leaves interrupts its cell, and the next one runs', slow, async () => {
  const sandbox = await shared();
  await sandbox.runCode('1', patient);
  const abort = new AbortController();
  const begin = Date.now();
  const left = fetch(`${apiUrl}/execute`, {
    method: 'POST',
    headers: { ...route(sandbox, 49999), 'Content-Type': 'application/json' },
    body: JSON.stringify({ code: 'import time\nfor _ in range(600): time.sleep(0.1)' }),
    signal: abort.signal,
  }).then((response) => response.text());
  left.catch(() => {});
  await sleep(3000);
  abort.abort();
  const next = await sandbox.runCode('"free"', patient);
  assert.equal(next.text, 'free');
  assert.ok(Date.now() - begin < 45_000, `expected the cell of 60 s to be interrupted, waited ${Date.now() - begin} ms`);
});

test('a kernel goes on after pause and resume', slow, async () => {
  const sandbox = await shared();
  await sandbox.runCode('kept = [1, 2, 3]', patient);
  await sandbox.pause();
  await sandbox.connect({ timeoutMs: 600_000 });
  const execution = await eventually('the kernel to answer', 60_000, async () => sandbox.runCode('sum(kept)', patient));
  assert.equal(execution.text, '6');
  await sandbox.kill();
});
