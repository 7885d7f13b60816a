// A gateway that is stopped and started again: paused sandboxes, snapshots and
// keys are there as before.

import assert from 'node:assert/strict';

import { Sandbox } from 'e2b';

import { startServer } from '../lib/server.mjs';
import { template } from '../lib/options.mjs';
import { test } from '../lib/suite.mjs';

test('a paused sandbox survives a restart of the gateway with its memory', async () => {
  let server = await startServer();
  try {
    const options = () => ({
      apiKey: server.variables.E2B_API_KEY,
      apiUrl: server.variables.E2B_API_URL,
      sandboxUrl: server.variables.E2B_SANDBOX_URL,
    });
    const sandbox = await Sandbox.create(template, { ...options(), timeoutMs: 300_000, metadata: { kept: 'yes' } });
    await sandbox.commands.run('echo in-memory > /dev/shm/kept; echo on-disk > ~/kept');
    assert.equal(await sandbox.pause(), true);
    server = await server.restart();
    const listed = await Sandbox.list({ ...options(), query: { state: ['paused'] } }).nextItems();
    assert.deepEqual(listed.map((item) => item.sandboxId), [sandbox.sandboxId], 'expected the paused sandbox in the list');
    assert.deepEqual(listed[0].metadata, { kept: 'yes' });
    const again = await Sandbox.connect(sandbox.sandboxId, options());
    const result = await again.commands.run('cat /dev/shm/kept ~/kept');
    assert.equal(result.stdout, 'in-memory\non-disk\n');
    assert.equal(await again.kill(), true);
  } finally {
    await server.stop();
  }
});
