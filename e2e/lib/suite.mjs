// What every test file shares: tests with a limit, tests left out of the short
// cut, sandboxes that are killed when the file ends.

import assert from 'node:assert/strict';
import nodeTest, { after } from 'node:test';

import { Sandbox } from 'e2b';

import { short, template } from './options.mjs';

// Limit of one test. Guest code runs 10 to 20 times slower where there is no KVM;
// without a limit one lost event would hang the suite.
const limitMs = 120_000;

export function test(name, ...rest) {
  const fn = rest.pop();
  return nodeTest(name, { timeout: limitMs, ...rest[0] }, fn);
}

// long is a test that the short cut leaves out.
export function long(name, ...rest) {
  const fn = rest.pop();
  return nodeTest(name, { timeout: limitMs * 3, skip: short ? 'not in the short cut' : false, ...rest[0] }, fn);
}

const made = new Set();

// keep registers a sandbox for the killing at the end of the file.
export function keep(sandbox) {
  made.add(sandbox.sandboxId);
  return sandbox;
}

// create is Sandbox.create with the suite's template.
export async function create(options = {}) {
  const { template: other, ...rest } = options;
  return keep(await Sandbox.create(other ?? template, { timeoutMs: 300_000, ...rest }));
}

export async function killAll() {
  const ids = [...made];
  made.clear();
  await Promise.allSettled(ids.map((id) => Sandbox.kill(id)));
}

after(killAll);

// lazy returns a function that makes the file's shared sandbox at its first call:
// a file that cannot make one fails in each test, with the reason, not once as a whole.
export function lazy(options) {
  let sandbox;
  return () => {
    sandbox ??= create(options);
    return sandbox;
  };
}

export const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// eventually polls until `check` returns something true. It fails with `what`,
// which says what was expected.
export async function eventually(what, limit, check, everyMs = 100) {
  const end = Date.now() + limit;
  let last;
  for (;;) {
    try {
      const value = await check();
      if (value) return value;
      last = undefined;
    } catch (error) {
      last = error;
    }
    if (Date.now() > end) {
      assert.fail(`expected within ${limit} ms: ${what}${last ? `; last error: ${last.message}` : ''}`);
    }
    await sleep(everyMs);
  }
}

// rejects awaits a failure and returns it after checking its class by name (the
// two packages each bundle classes of their own).
export async function rejects(promise, className, what) {
  let value;
  try {
    value = await promise;
  } catch (error) {
    const names = [];
    for (let proto = Object.getPrototypeOf(error); proto; proto = Object.getPrototypeOf(proto)) {
      names.push(proto.constructor.name);
    }
    assert.ok(names.includes(className), `${what}: expected a ${className}, got ${names[0]}: ${error.message}`);
    return error;
  }
  assert.fail(`${what}: expected a ${className}, got ${JSON.stringify(value)?.slice(0, 200)}`);
}
