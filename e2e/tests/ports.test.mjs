// Servers inside a sandbox, reached by header, by name and by absolute URL.

import assert from 'node:assert/strict';
import { createHash, randomBytes } from 'node:crypto';
import { once } from 'node:events';
import net from 'node:net';

import { apiUrl, route, viaHost } from '../lib/gateway.mjs';
import { create, eventually, keep, test } from '../lib/suite.mjs';

// One server for all tests: echo of requests, events, a WebSocket, a large body.
const server = `
import base64, hashlib, http.server, json, socketserver, time
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    def log_message(self, *args): pass
    def do_GET(self):
        if self.path == '/events':
            self.send_response(200)
            self.send_header('Content-Type', 'text/event-stream')
            self.send_header('Transfer-Encoding', 'chunked')
            self.end_headers()
            for i in range(3):
                data = ('data: %d\\n\\n' % i).encode()
                self.wfile.write(b'%x\\r\\n%s\\r\\n' % (len(data), data)); self.wfile.flush()
                time.sleep(1)
            self.wfile.write(b'0\\r\\n\\r\\n')
        elif self.path == '/large':
            self.send_response(200); self.send_header('Content-Length', str(4 << 20)); self.end_headers()
            for i in range(64): self.wfile.write(bytes([i]) * 65536)
        elif self.headers.get('Upgrade', '').lower() == 'websocket':
            key = self.headers['Sec-WebSocket-Key'] + '258EAFA5-E914-47DA-95CA-C5AB0DC85B11'
            self.send_response(101); self.send_header('Upgrade', 'websocket'); self.send_header('Connection', 'Upgrade')
            self.send_header('Sec-WebSocket-Accept', base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()); self.end_headers()
            head = self.rfile.read(2); mask = self.rfile.read(4)
            body = bytes(b ^ mask[i % 4] for i, b in enumerate(self.rfile.read(head[1] & 127)))
            out = b'echo ' + body
            self.wfile.write(bytes([0x81, len(out)]) + out); self.wfile.flush(); self.close_connection = True
        else: self.echo(b'')
    def do_POST(self):
        n = int(self.headers.get('Content-Length') or 0)
        self.echo(self.rfile.read(n))
    def echo(self, body):
        out = json.dumps({'method': self.command, 'path': self.path, 'headers': dict(self.headers), 'sha': hashlib.sha256(body).hexdigest()}).encode()
        self.send_response(203); self.send_header('Content-Length', str(len(out))); self.send_header('X-From', 'guest'); self.end_headers(); self.wfile.write(out)
class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True
Server(('127.0.0.1', 3000), Handler).serve_forever()
`;

let made;

function shared() {
  made ??= (async () => {
    const sandbox = await create();
    await sandbox.files.write('/tmp/server.py', server);
    await sandbox.commands.run('python3 /tmp/server.py', { background: true, timeoutMs: 0 });
    await eventually('the server in the guest to answer', 30_000, async () => {
      const response = await fetch(`${apiUrl}/`, { headers: route(sandbox, 3000) });
      await response.text();
      return response.status === 203;
    }, 300);
    return sandbox;
  })();
  return made;
}

test('the two headers lead to a server that listens on localhost in the guest', async () => {
  const sandbox = await shared();
  const body = randomBytes(200_000);
  const response = await fetch(`${apiUrl}/some/path?q=%2F&x=1`, { method: 'POST', headers: { ...route(sandbox, 3000), 'X-Mine': 'kept' }, body });
  assert.equal(response.status, 203, "expected the guest's own status");
  assert.equal(response.headers.get('x-from'), 'guest');
  const echo = await response.json();
  assert.equal(echo.path, '/some/path?q=%2F&x=1', 'expected the path untouched');
  assert.equal(echo.headers['X-Mine'] ?? echo.headers['x-mine'], 'kept');
  assert.equal(echo.sha, createHash('sha256').update(body).digest('hex'));
});

test('getHost names the port, and the name works as a Host header', async () => {
  const sandbox = await shared();
  const host = sandbox.getHost(3000);
  assert.match(host, new RegExp(`^3000-${sandbox.sandboxId}\\.localhost:\\d+$`), 'expected PORT-ID.localhost:GATEWAY');
  const answer = await viaHost(host, '/by-name');
  assert.equal(answer.status, 203, answer.text);
  assert.equal(answer.json.path, '/by-name');
  assert.equal(answer.json.headers.Host ?? answer.json.headers.host, host, 'expected the Host header as the client sent it');
  const other = await viaHost(`3000-${sandbox.sandboxId}-suffix.example.com`, '/by-name');
  assert.equal(other.status, 203, 'expected any domain after PORT-ID');
  const proxied = await viaHost(`3000-${sandbox.sandboxId}.any.where`, '/absolute', { absolute: true });
  assert.equal(proxied.status, 203, 'expected an absolute URL (HTTP_PROXY) to work');
  assert.equal(proxied.json.path, '/absolute');
});

test('events are delivered one by one', async () => {
  const sandbox = await shared();
  const response = await fetch(`${apiUrl}/events`, { headers: route(sandbox, 3000) });
  const times = [];
  let text = '';
  for await (const chunk of response.body) {
    text += Buffer.from(chunk).toString();
    times.push(Date.now());
  }
  assert.equal(text, 'data: 0\n\ndata: 1\n\ndata: 2\n\n');
  assert.ok(times.at(-1) - times[0] > 1500, `expected the events about a second apart, got all within ${times.at(-1) - times[0]} ms`);
});

test('a large body comes through unchanged', async () => {
  const sandbox = await shared();
  const body = Buffer.from(await (await fetch(`${apiUrl}/large`, { headers: route(sandbox, 3000) })).arrayBuffer());
  assert.equal(body.length, 4 << 20);
  for (let i = 0; i < 64; i++) assert.equal(body[i * 65536 + 17], i);
});

test('a WebSocket is upgraded and carries frames both ways', async () => {
  const sandbox = await shared();
  const { hostname, port } = new URL(apiUrl);
  const socket = net.connect(Number(port), hostname);
  await once(socket, 'connect');
  socket.write(
    `GET /ws HTTP/1.1\r\nHost: ${sandbox.getHost(3000)}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: ${randomBytes(16).toString('base64')}\r\nSec-WebSocket-Version: 13\r\n\r\n`,
  );
  let data = Buffer.alloc(0);
  socket.on('data', (chunk) => (data = Buffer.concat([data, chunk])));
  await eventually('the upgrade', 15_000, () => data.includes('\r\n\r\n'));
  assert.match(data.toString('latin1'), /^HTTP\/1\.1 101 /);
  const mask = Buffer.from([1, 2, 3, 4]);
  const text = Buffer.from('hello');
  socket.write(Buffer.concat([Buffer.from([0x81, 0x80 | text.length]), mask, text.map((byte, i) => byte ^ mask[i % 4])]));
  await eventually('the echo', 15_000, () => data.toString('latin1').endsWith('echo hello'));
  socket.destroy();
});

test('a closed port and an unknown sandbox are told apart', async () => {
  const sandbox = await shared();
  const closed = await fetch(`${apiUrl}/`, { headers: route(sandbox, 4999) });
  assert.equal(closed.status, 502);
  const body = await closed.json();
  assert.equal(body.message, 'The sandbox is running but port is not open');
  assert.equal(body.port, 4999);
  assert.equal(body.sandboxId, sandbox.sandboxId);
  const unknown = await fetch(`${apiUrl}/`, { headers: { 'E2b-Sandbox-Id': 'i00000000000000000000', 'E2b-Sandbox-Port': '3000' } });
  assert.equal(unknown.status, 502);
  assert.equal((await unknown.json()).message, 'The sandbox was not found');
});

test('half an address or a wrong one is a 400', async () => {
  const sandbox = await shared();
  const cases = [
    { 'E2b-Sandbox-Id': sandbox.sandboxId },
    { 'E2b-Sandbox-Port': '3000' },
    { 'E2b-Sandbox-Id': sandbox.sandboxId, 'E2b-Sandbox-Port': '0' },
    { 'E2b-Sandbox-Id': sandbox.sandboxId, 'E2b-Sandbox-Port': '70000' },
    { 'E2b-Sandbox-Id': sandbox.sandboxId, 'E2b-Sandbox-Port': 'x' },
    { 'E2b-Sandbox-Id': '../x', 'E2b-Sandbox-Port': '3000' },
  ];
  for (const headers of cases) {
    const response = await fetch(`${apiUrl}/`, { headers });
    const text = await response.text();
    assert.equal(response.status, 400, `${JSON.stringify(headers)}: expected 400, got ${response.status}: ${text}`);
  }
});

test('a request to a port wakes an auto-resume sandbox and reaches its server', async () => {
  const sandbox = keep(await create({ timeoutMs: 120_000, lifecycle: { onTimeout: 'pause', autoResume: true } }));
  await sandbox.commands.run('cd /tmp && echo woken > index.html && python3 -m http.server 8000', { background: true, timeoutMs: 0 });
  await eventually('the server', 30_000, async () => (await fetch(`${apiUrl}/index.html`, { headers: route(sandbox, 8000) })).status === 200, 300);
  await sandbox.pause();
  const response = await fetch(`${apiUrl}/index.html`, { headers: route(sandbox, 8000) });
  assert.equal(response.status, 200);
  assert.equal(await response.text(), 'woken\n');
  await sandbox.kill();
});
