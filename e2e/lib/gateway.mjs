// What the tests say to the gateway without an SDK: plain REST as old clients
// send it, Connect JSON by hand, and requests with a Host header of choice.

import assert from 'node:assert/strict';
import http from 'node:http';

export const apiUrl = process.env.E2B_API_URL || 'http://127.0.0.1:1';
export const apiKey = process.env.E2B_API_KEY || 'e2b_0';

// rest sends one control call. Returns {status, headers, text, json}.
export async function rest(method, path, body, headers = {}) {
  const response = await fetch(apiUrl + path, {
    method,
    headers: {
      'X-API-Key': apiKey,
      ...(body === undefined ? {} : { 'Content-Type': 'application/json' }),
      ...headers,
    },
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  return withJSON(response.status, response.headers, await response.text());
}

function withJSON(status, headers, text) {
  let json;
  try {
    json = JSON.parse(text);
  } catch {
    json = undefined;
  }
  return { status, headers, text, json };
}

// expectStatus fails with the body, which is where the gateway says why.
export function expectStatus(answer, want, what) {
  assert.equal(answer.status, want, `${what}: expected status ${want}, got ${answer.status}: ${answer.text.slice(0, 300)}`);
  return answer;
}

// expectError checks the shape of a refusal: the code in the body is what the JS
// client reads, the status what the Python client reads.
export function expectError(answer, want, what) {
  expectStatus(answer, want, what);
  assert.equal(answer.json?.code, want, `${what}: expected "code": ${want} in the body, got ${answer.text.slice(0, 300)}`);
  assert.equal(typeof answer.json?.message, 'string', `${what}: expected a "message" in the body, got ${answer.text.slice(0, 300)}`);
  return answer;
}

// route returns the headers that lead to a port of a sandbox.
export function route(sandbox, port = 49983) {
  return { 'E2b-Sandbox-Id': sandbox.sandboxId, 'E2b-Sandbox-Port': String(port) };
}

export function token(sandbox) {
  return { 'X-Access-Token': sandbox.envdAccessToken };
}

// unary calls a Connect method with JSON.
export async function unary(sandbox, method, message = {}, headers = {}) {
  const response = await fetch(`${apiUrl}/${method}`, {
    method: 'POST',
    headers: {
      'Content-Type': 'application/json',
      'Connect-Protocol-Version': '1',
      ...route(sandbox),
      ...token(sandbox),
      ...headers,
    },
    body: JSON.stringify(message),
  });
  return withJSON(response.status, response.headers, await response.text());
}

export function envelope(message) {
  const body = Buffer.from(JSON.stringify(message));
  const head = Buffer.alloc(5);
  head.writeUInt32BE(body.length, 1);
  return Buffer.concat([head, body]);
}

// stream calls a server-streaming Connect method and yields {flags, message}.
export async function* stream(sandbox, method, message, { headers = {}, signal } = {}) {
  const response = await fetch(`${apiUrl}/${method}`, {
    method: 'POST',
    headers: {
      'Content-Type': 'application/connect+json',
      'Connect-Protocol-Version': '1',
      ...route(sandbox),
      ...token(sandbox),
      ...headers,
    },
    body: envelope(message),
    signal,
  });
  assert.equal(response.status, 200, `${method}: a stream is always answered with 200, got ${response.status}`);
  let buffer = Buffer.alloc(0);
  for await (const chunk of response.body) {
    buffer = Buffer.concat([buffer, chunk]);
    while (buffer.length >= 5) {
      const length = buffer.readUInt32BE(1);
      if (buffer.length < 5 + length) break;
      yield { flags: buffer[0], message: JSON.parse(buffer.subarray(5, 5 + length).toString()) };
      buffer = buffer.subarray(5 + length);
    }
  }
  assert.equal(buffer.length, 0, `${method}: the stream ended in the middle of an envelope`);
}

// viaHost sends a request with a Host header that no resolver needs to know, on a
// connection of its own. Returns {status, headers, text, json}.
export function viaHost(host, path, { method = 'GET', headers = {}, body, absolute = false } = {}) {
  const { hostname, port } = new URL(apiUrl);
  return new Promise((resolve, reject) => {
    const request = http.request(
      {
        hostname,
        port,
        path: absolute ? `http://${host}${path}` : path,
        method,
        headers: { Host: host, ...headers },
        agent: false,
      },
      (response) => {
        const chunks = [];
        response.on('data', (chunk) => chunks.push(chunk));
        response.on('end', () => resolve(withJSON(response.statusCode, response.headers, Buffer.concat(chunks).toString())));
        response.on('error', reject);
      },
    );
    request.on('error', reject);
    request.end(body);
  });
}
