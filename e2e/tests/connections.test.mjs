// Many connections of one client: the JS client keeps up to 200 RPCs open at once.

import assert from 'node:assert/strict';
import { once } from 'node:events';
import net from 'node:net';

import { apiUrl, rest } from '../lib/gateway.mjs';
import { short } from '../lib/options.mjs';
import { create, lazy, test } from '../lib/suite.mjs';

const shared = lazy();

test('199 open streams leave room for commands, and each still delivers', async () => {
  const sandbox = await shared();
  const other = await create();
  const dir = '/home/user/many';
  await sandbox.files.makeDir(dir);
  const seen = new Set();
  const handles = await Promise.all(
    Array.from({ length: 199 }, (_, i) => sandbox.files.watchDir(dir, () => seen.add(i), { timeoutMs: 0, requestTimeoutMs: 90_000 })),
  );
  assert.equal((await other.commands.run('echo through')).stdout, 'through\n');
  await sandbox.files.write(`${dir}/x`, 'x');
  const end = Date.now() + 30_000;
  while (seen.size < 199 && Date.now() < end) await new Promise((resolve) => setTimeout(resolve, 100));
  assert.equal(seen.size, 199, `expected an event on each of 199 streams, got ${seen.size}`);
  await Promise.all(handles.map((handle) => handle.stop()));
  await other.kill();
});

test(`${short ? 50 : 200} commands at once all succeed`, { timeout: 400_000 }, async () => {
  const sandbox = await shared();
  const count = short ? 50 : 200;
  const results = await Promise.all(Array.from({ length: count }, (_, i) => sandbox.commands.run(`echo ${i}`, { timeoutMs: 0, requestTimeoutMs: 300_000 })));
  results.forEach((result, i) => assert.equal(result.stdout, `${i}\n`));
});

test(`${short ? 500 : 2000} idle connections do no harm`, async () => {
  const { hostname, port } = new URL(apiUrl);
  const sockets = [];
  try {
    for (let i = 0; i < (short ? 500 : 2000); i++) {
      const socket = net.connect(Number(port), hostname);
      socket.on('error', () => {});
      sockets.push(socket);
      if (i % 100 === 99) await once(socket, 'connect');
    }
    const begin = Date.now();
    const answer = await rest('GET', '/v2/sandboxes');
    assert.equal(answer.status, 200);
    assert.ok(Date.now() - begin < 5000, `expected an answer beside idle connections, took ${Date.now() - begin} ms`);
  } finally {
    for (const socket of sockets) socket.destroy();
  }
});
