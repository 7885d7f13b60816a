// Starts and stops an `agentzip serve` of our own: its own port, its own state
// folder, the machine's templates.

import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { createWriteStream } from 'node:fs';
import { mkdtemp, rm } from 'node:fs/promises';
import { createServer } from 'node:net';
import { tmpdir } from 'node:os';
import path from 'node:path';
import { fileURLToPath } from 'node:url';

const root = path.join(path.dirname(fileURLToPath(import.meta.url)), '..', '..');

// Longest start: the first one may have to make the templates it offers ready.
const startMs = 120_000;

// Longest stop: it ends every sandbox that a failed test left.
const stopMs = 60_000;

const exportLine = /^\s*(?:export )?(E2B_API_KEY|E2B_API_URL|E2B_SANDBOX_URL)=["']?([^"'\s]+)["']?\s*$/;

async function freePort() {
  const server = createServer();
  server.listen(0, '127.0.0.1');
  await once(server, 'listening');
  const { port } = server.address();
  server.close();
  await once(server, 'close');
  return port;
}

// startServer returns {variables, port, state, pid, tail(), stop(), restart()}. `flags` are further flags of
// serve. It throws with the server's own words when it does not come up.
export async function startServer({ flags = [], logFile, port, state } = {}) {
  const binary = process.env.AGENTZIP_BIN || path.join(root, 'bin', 'agentzip');
  port ??= await freePort();
  state ??= await mkdtemp(path.join(tmpdir(), 'agentzip-e2e-'));
  const child = spawn(binary, ['serve', '--port', String(port), '--dir', state, '--on-exit', 'kill', ...flags], {
    env: { ...process.env, AGENTZIP_LIBDIR: process.env.AGENTZIP_LIBDIR || path.join(root, 'bin') },
    stdio: ['ignore', 'pipe', 'pipe'],
  });
  const ended = new Promise((resolve) => {
    child.once('error', (error) => resolve(`cannot run ${binary}: ${error.message}`));
    child.once('exit', (code, signal) => resolve(`ended with ${signal ?? `code ${code}`}`));
  });
  let tail = '';
  const file = logFile ? createWriteStream(logFile) : undefined;
  const variables = {};
  const ready = new Promise((resolve) => {
    let rest = '';
    child.stdout?.on('data', (chunk) => {
      rest += chunk;
      const lines = rest.split('\n');
      rest = lines.pop();
      for (const line of lines) {
        const found = exportLine.exec(line);
        if (found) variables[found[1]] = found[2];
      }
      if (Object.keys(variables).length === 3) resolve('ready');
    });
  });
  for (const stream of [child.stdout, child.stderr]) {
    stream?.on('data', (chunk) => {
      file?.write(chunk);
      tail = (tail + chunk).slice(-4000);
    });
  }
  const end = async () => {
    if (child.exitCode === null && child.signalCode === null && child.pid) {
      child.kill('SIGTERM');
      const timer = setTimeout(() => child.kill('SIGKILL'), stopMs);
      await ended;
      clearTimeout(timer);
    }
    file?.end();
    return { code: child.exitCode, signal: child.signalCode };
  };
  const stop = async () => {
    const how = await end();
    await rm(state, { recursive: true, force: true });
    return how;
  };
  // restart ends the server and starts another on the same port and state.
  const restart = async () => {
    const { code } = await end();
    if (code !== 0) throw new Error(`agentzip serve ended with code ${code}\n${tail.trim()}`);
    return startServer({ flags, logFile, port, state });
  };
  const late = new Promise((resolve) => setTimeout(resolve, startMs, `not ready after ${startMs / 1000} s`).unref());
  const outcome = await Promise.race([ready, ended, late]);
  if (outcome !== 'ready') {
    await stop();
    throw new Error(`agentzip serve: ${outcome}\n${tail.trim()}`);
  }
  return { variables, port, state, pid: child.pid, tail: () => tail, stop, restart };
}
