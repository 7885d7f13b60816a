// The list: filters, order, pages.

import assert from 'node:assert/strict';

import { Sandbox } from 'e2b';

import { expectError, expectStatus, rest } from '../lib/gateway.mjs';
import { template } from '../lib/options.mjs';
import { create, test } from '../lib/suite.mjs';

const run = `run${process.pid}`;
const mark = { run };
let made;

// three makes sandboxes in a known order: running, running, paused.
async function three() {
  made ??= (async () => {
    const out = [];
    for (const name of ['a', 'b', 'c']) {
      out.push(await create({ metadata: { ...mark, name, odd: 'b c&d=é%' } }));
    }
    await out[2].pause();
    return out.map((sandbox) => sandbox.sandboxId);
  })();
  return made;
}

async function all(options) {
  const paginator = Sandbox.list(options);
  const pages = [];
  while (paginator.hasNext) pages.push(await paginator.nextItems());
  return pages;
}

const ids = (items) => items.map((item) => item.sandboxId);

test('newest first by default, oldest first on request, both states', async () => {
  const [a, b, c] = await three();
  assert.deepEqual(ids((await all({ query: { metadata: mark } })).flat()), [c, b, a]);
  assert.deepEqual(ids((await all({ query: { metadata: mark }, order: 'asc' })).flat()), [a, b, c]);
});

test('the state filter picks running or paused', async () => {
  const [a, b, c] = await three();
  assert.deepEqual(ids((await all({ query: { metadata: mark, state: ['paused'] } })).flat()), [c]);
  assert.deepEqual(ids((await all({ query: { metadata: mark, state: ['running'] }, order: 'asc' })).flat()), [a, b]);
  assert.deepEqual(ids((await all({ query: { metadata: mark, state: ['running', 'paused'] }, order: 'asc' })).flat()), [a, b, c]);
  const old = expectStatus(await rest('GET', `/sandboxes?metadata=run%3D${run}`), 200, 'GET /sandboxes').json;
  assert.deepEqual(old.map((item) => item.sandboxID).sort(), [a, b].sort(), 'expected the old list to hold running ones only');
});

test('metadata filters match all pairs, with any characters in them', async () => {
  const [, b] = await three();
  const odd = (await all({ query: { metadata: { ...mark, odd: 'b c&d=é%' } } })).flat();
  assert.equal(odd.length, 3, 'expected all three by the odd value');
  assert.deepEqual(odd[0].metadata.odd, 'b c&d=é%', 'expected metadata to come back as given');
  assert.deepEqual(ids((await all({ query: { metadata: { ...mark, name: 'b' } } })).flat()), [b]);
  assert.deepEqual((await all({ query: { metadata: { ...mark, name: 'z' } } })).flat(), []);
});

test('pages of one hold every sandbox once, and a new one does not shift them', async () => {
  const [a, b, c] = await three();
  const pages = await all({ query: { metadata: mark }, limit: 1 });
  assert.deepEqual(pages.map(ids).filter((page) => page.length > 0), [[c], [b], [a]]);
  const paginator = Sandbox.list({ query: { metadata: mark }, limit: 1 });
  assert.deepEqual(ids(await paginator.nextItems()), [c]);
  const late = await create({ metadata: mark });
  assert.deepEqual(ids(await paginator.nextItems()), [b], 'expected the second page to go on after the first');
  assert.deepEqual(ids(await paginator.nextItems()), [a]);
  await late.kill();
});

test('the last page has no token, and the count of running ones is in a header', async () => {
  await three();
  const first = expectStatus(await rest('GET', `/v2/sandboxes?metadata=run%3D${run}&limit=2`), 200, 'first page');
  assert.ok(first.headers.get('x-next-token'), 'expected X-Next-Token on the first page');
  assert.match(first.headers.get('x-total-running') ?? '', /^\d+$/, 'expected X-Total-Running');
  assert.ok(Number(first.headers.get('x-total-running')) >= 2);
  const next = encodeURIComponent(first.headers.get('x-next-token'));
  const last = expectStatus(await rest('GET', `/v2/sandboxes?metadata=run%3D${run}&limit=2&nextToken=${next}`), 200, 'last page');
  assert.equal(last.headers.get('x-next-token'), null, 'expected no X-Next-Token on the last page');
  assert.equal(last.json.length, 1);
  expectError(await rest('GET', `/v2/sandboxes?limit=2&order=asc&nextToken=${next}`), 400, 'a token under the other order');
  expectError(await rest('GET', '/v2/sandboxes?nextToken=nonsense'), 400, 'a token we never made');
});

test('startedAfter and template narrow the list', async () => {
  const [a, b, c] = await three();
  const info = await Sandbox.getInfo(a);
  const after = (await all({ query: { metadata: mark, startedAfter: info.startedAt } })).flat();
  assert.deepEqual(ids(after).filter((id) => id !== a), [c, b], 'expected those started after the first');
  assert.deepEqual((await all({ query: { metadata: mark, startedAfter: new Date(Date.now() + 60_000) } })).flat(), []);
  assert.equal((await all({ query: { metadata: mark, template } })).flat().length, 3, 'expected all by the template they were made from');
  assert.deepEqual((await all({ query: { metadata: mark, template: 'no-such-template' } })).flat(), []);
  expectError(await rest('GET', `/v2/sandboxes?template=${template}%3Atag`), 400, 'a template with a tag');
});

test('a bad limit, order or state is a 400', async () => {
  for (const query of ['limit=0', 'limit=101', 'limit=x', 'order=up', 'state=asleep', 'startedAfter=yesterday']) {
    expectError(await rest('GET', `/v2/sandboxes?${query}`), 400, query);
  }
});
