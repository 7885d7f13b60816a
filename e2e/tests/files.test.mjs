// Files: every call, every way to carry the bytes, and paths that lie.

import assert from 'node:assert/strict';
import { createHash, randomBytes } from 'node:crypto';
import { gunzipSync, gzipSync } from 'node:zlib';

import { FileType } from 'e2b';

import { apiUrl, route, token, unary } from '../lib/gateway.mjs';
import { short } from '../lib/options.mjs';
import { lazy, rejects, sleep, test } from '../lib/suite.mjs';

const shared = lazy();
const dir = '/home/user/files';

const sha256 = (bytes) => createHash('sha256').update(bytes).digest('hex');

// blocks yields `count` different blocks of 1 MiB.
function* blocks(count) {
  const block = randomBytes(1 << 20);
  for (let i = 0; i < count; i++) {
    block.writeUInt32LE(i, 0);
    yield Buffer.from(block);
  }
}

function get(sandbox, path, headers = {}) {
  return fetch(`${apiUrl}/files?path=${encodeURIComponent(path)}`, { headers: { ...route(sandbox), ...token(sandbox), ...headers } });
}

function post(sandbox, query, body, headers = {}) {
  return fetch(`${apiUrl}/files${query}`, { method: 'POST', headers: { ...route(sandbox), ...token(sandbox), ...headers }, body, duplex: 'half' });
}

test('text is written and read back, and the answer says where it is', async () => {
  const sandbox = await shared();
  const info = await sandbox.files.write(`${dir}/new/deep/hello.txt`, 'Grüße, 世界\n');
  assert.equal(info.path, `${dir}/new/deep/hello.txt`);
  assert.equal(info.name, 'hello.txt');
  assert.equal(info.type, 'file');
  assert.equal(await sandbox.files.read(`${dir}/new/deep/hello.txt`), 'Grüße, 世界\n');
  const owner = await sandbox.commands.run(`stat -c '%U:%G %a' ${dir}/new/deep ${dir}/new/deep/hello.txt`);
  assert.equal(owner.stdout, 'user:user 755\nuser:user 644\n');
});

test('a second write truncates', async () => {
  const sandbox = await shared();
  await sandbox.files.write(`${dir}/short`, 'a long first text');
  await sandbox.files.write(`${dir}/short`, 'short');
  assert.equal(await sandbox.files.read(`${dir}/short`), 'short');
});

test('paths may be relative to home or begin with a tilde', async () => {
  const sandbox = await shared();
  const info = await sandbox.files.write('relative.txt', 'r');
  assert.equal(info.path, '/home/user/relative.txt');
  assert.equal(await sandbox.files.read('~/relative.txt'), 'r');
});

test('an empty file is empty in every format', async () => {
  const sandbox = await shared();
  await sandbox.files.write(`${dir}/empty`, '');
  assert.equal(await sandbox.files.read(`${dir}/empty`), '');
  assert.equal((await sandbox.files.read(`${dir}/empty`, { format: 'bytes' })).length, 0);
  assert.equal((await sandbox.files.read(`${dir}/empty`, { format: 'blob' })).size, 0);
  assert.equal((await sandbox.files.getInfo(`${dir}/empty`)).size, 0);
  const response = await get(sandbox, `${dir}/empty`);
  assert.equal(response.headers.get('content-length'), '0');
  await response.arrayBuffer();
});

test('binary data survives every way in and out', async () => {
  const sandbox = await shared();
  const data = randomBytes(300_001);
  const copy = () => data.buffer.slice(data.byteOffset, data.byteOffset + data.length);
  const stream = () => new Blob([data]).stream();
  const ways = [
    ['buffer', copy(), {}],
    ['blob', new Blob([data]), {}],
    ['stream', stream(), {}],
    ['octet', copy(), { useOctetStream: true }],
    ['gzip', copy(), { gzip: true }],
    ['gzip-octet', copy(), { gzip: true, useOctetStream: true }],
    ['multipart', copy(), { useOctetStream: false }],
  ];
  for (const [name, body, options] of ways) {
    await sandbox.files.write(`${dir}/bin-${name}`, body, options);
    const back = await sandbox.files.read(`${dir}/bin-${name}`, { format: 'bytes' });
    assert.equal(sha256(back), sha256(data), `written as ${name}: expected the same bytes`);
  }
  const zipped = await sandbox.files.read(`${dir}/bin-gzip`, { format: 'bytes', gzip: true });
  assert.equal(sha256(zipped), sha256(data), 'read with gzip: expected the same bytes');
  const blob = await sandbox.files.read(`${dir}/bin-gzip`, { format: 'blob' });
  assert.equal(sha256(Buffer.from(await blob.arrayBuffer())), sha256(data));
  const { stdout } = await sandbox.commands.run(`sha256sum ${dir}/bin-gzip | cut -d' ' -f1`);
  assert.equal(stdout.trim(), sha256(data), 'expected the guest to see the same bytes');
});

test('many files are written in one call', async () => {
  const sandbox = await shared();
  const files = Array.from({ length: 12 }, (_, i) => ({ path: `${dir}/many/${i}/f${i}.txt`, data: `content ${i}` }));
  const infos = await sandbox.files.write(files);
  assert.deepEqual(infos.map((info) => info.path), files.map((file) => file.path));
  for (const file of files) assert.equal(await sandbox.files.read(file.path), file.data);
  assert.deepEqual(await sandbox.files.write([]), []);
});

test(`${short ? 20 : 100} MB are streamed in and out`, { timeout: 300_000 }, async () => {
  const sandbox = await shared();
  const count = short ? 20 : 100;
  const hash = createHash('sha256');
  const source = blocks(count);
  const body = new ReadableStream({
    pull(controller) {
      const { value, done } = source.next();
      if (done) return controller.close();
      hash.update(value);
      controller.enqueue(new Uint8Array(value));
    },
  });
  await sandbox.files.write('/tmp/large', body, { requestTimeoutMs: 280_000 });
  const want = hash.digest('hex');
  assert.equal((await sandbox.files.getInfo('/tmp/large')).size, count << 20);
  const back = createHash('sha256');
  for await (const chunk of await sandbox.files.read('/tmp/large', { format: 'stream', requestTimeoutMs: 280_000 })) back.update(chunk);
  assert.equal(back.digest('hex'), want, 'expected the bytes that were sent');
  await sandbox.files.remove('/tmp/large');
});

test('list, exists, getInfo, makeDir, rename and remove agree with the guest', async () => {
  const sandbox = await shared();
  const base = `${dir}/calls`;
  assert.equal(await sandbox.files.exists(base), false);
  assert.equal(await sandbox.files.makeDir(`${base}/sub/sub2`), true);
  assert.equal(await sandbox.files.makeDir(`${base}/sub`), false, 'expected false for a directory that is there');
  await sandbox.files.write(`${base}/b.txt`, 'bb');
  await sandbox.files.write(`${base}/sub/c.txt`, 'ccc');
  await sandbox.commands.run(`cd ${base} && ln -s b.txt link && ln -s nowhere broken && chmod 640 b.txt`);
  const names = async (depth) => (await sandbox.files.list(base, { depth })).map((item) => item.path.slice(base.length + 1)).sort();
  assert.deepEqual(await names(1), ['b.txt', 'broken', 'link', 'sub']);
  assert.deepEqual(await names(undefined), ['b.txt', 'broken', 'link', 'sub']);
  assert.deepEqual(await names(2), ['b.txt', 'broken', 'link', 'sub', 'sub/c.txt', 'sub/sub2']);
  const info = await sandbox.files.getInfo(`${base}/b.txt`);
  assert.equal(info.type, FileType.FILE);
  assert.deepEqual([info.size, info.mode, info.permissions, info.owner, info.group], [2, 0o640, '-rw-r-----', 'user', 'user']);
  assert.ok(Math.abs(info.modifiedTime - Date.now()) < 300_000, `expected a modification just now, got ${info.modifiedTime}`);
  const link = await sandbox.files.getInfo(`${base}/link`);
  assert.equal(link.type, FileType.FILE, 'expected a link to report the type of its target');
  assert.ok(link.symlinkTarget?.endsWith('b.txt'), `expected the target of the link, got ${link.symlinkTarget}`);
  assert.equal((await sandbox.files.getInfo(`${base}/sub`)).type, FileType.DIR);
  const moved = await sandbox.files.rename(`${base}/b.txt`, `${base}/made/on/the/way/d.txt`);
  assert.equal(moved.path, `${base}/made/on/the/way/d.txt`);
  assert.equal(await sandbox.files.exists(`${base}/b.txt`), false);
  assert.equal(await sandbox.files.read(moved.path), 'bb');
  await sandbox.files.remove(base);
  assert.equal(await sandbox.files.exists(base), false);
  await sandbox.files.remove(base);
});

test('what is not there and what is not a file is told apart', async () => {
  const sandbox = await shared();
  await sandbox.files.write(`${dir}/plain`, 'x');
  await rejects(sandbox.files.read(`${dir}/absent`), 'FileNotFoundError', 'read of a missing file');
  await rejects(sandbox.files.read(dir), 'InvalidArgumentError', 'read of a directory');
  await rejects(sandbox.files.getInfo(`${dir}/absent`), 'FileNotFoundError', 'getInfo of a missing file');
  await rejects(sandbox.files.list(`${dir}/absent`), 'FileNotFoundError', 'list of a missing directory');
  await rejects(sandbox.files.list(`${dir}/plain`), 'InvalidArgumentError', 'list of a file');
  await rejects(sandbox.files.makeDir(`${dir}/plain`), 'InvalidArgumentError', 'makeDir on a file');
  await rejects(sandbox.files.rename(`${dir}/absent`, `${dir}/x`), 'FileNotFoundError', 'rename of a missing file');
  await rejects(sandbox.files.write(dir, 'x'), 'InvalidArgumentError', 'write to a directory');
  await rejects(sandbox.files.read(`${dir}/plain`, { user: 'nobody-here' }), 'AuthenticationError', 'read as an unknown user');
});

test('a file of the kernel without a size is read to its end', async () => {
  const sandbox = await shared();
  const text = await sandbox.files.read('/proc/self/status');
  assert.match(text, /^Name:/);
  assert.match(text, /Threads:/);
});

test('another user owns what another user writes', async () => {
  const sandbox = await shared();
  await sandbox.files.write('/root/own', 'r', { user: 'root' });
  assert.equal((await sandbox.commands.run('stat -c %U /root/own', { user: 'root' })).stdout, 'root\n');
  assert.equal((await sandbox.files.getInfo('/root/own', { user: 'root' })).owner, 'root');
});

test('metadata of a file is kept, replaced as a set, and listed', async () => {
  const sandbox = await shared();
  const path = `${dir}/meta.txt`;
  const info = await sandbox.files.write(path, 'x', { metadata: { Origin: 'upload', step: '1' } });
  assert.deepEqual(info.metadata, { origin: 'upload', step: '1' });
  assert.deepEqual((await sandbox.files.getInfo(path)).metadata, { origin: 'upload', step: '1' });
  await sandbox.files.write(path, 'y', { metadata: { step: '2' } });
  const listed = (await sandbox.files.list(dir)).find((item) => item.path === path);
  assert.deepEqual(listed.metadata, { step: '2' });
});

test('signed URLs read and write without any header, until they expire', async () => {
  const sandbox = await shared();
  await sandbox.files.write('signed.txt', 'signed content');
  const down = await fetch(await sandbox.downloadUrl('signed.txt'));
  assert.equal(down.status, 200, `expected 200, got ${down.status}: ${down.status === 200 ? '' : await down.text()}`);
  assert.equal(await down.text(), 'signed content');
  const form = new FormData();
  form.append('file', new Blob(['uploaded']), 'signed.txt');
  const up = await fetch(await sandbox.uploadUrl('signed-up.txt', { useSignatureExpiration: 60 }), { method: 'POST', body: form });
  assert.equal(up.status, 200, await up.clone().text());
  assert.equal(await sandbox.files.read('signed-up.txt'), 'uploaded');
  const asRoot = await fetch(await sandbox.downloadUrl('/etc/shadow', { user: 'root' }));
  assert.equal(asRoot.status, 200, 'expected a signature for root to read as root');
  await asRoot.text();
  const brief = await sandbox.downloadUrl('signed.txt', { useSignatureExpiration: 1 });
  await sleep(2500);
  const late = await fetch(brief);
  assert.equal(late.status, 401, 'expected 401 after the expiry');
  assert.equal((await late.json()).code, 401);
  const url = new URL(await sandbox.downloadUrl('signed.txt'));
  url.searchParams.set('path', '/etc/passwd');
  const forged = await fetch(url);
  assert.equal(forged.status, 401, 'expected 401 for a path that was not signed');
  await forged.text();
  const wrongWay = await fetch(await sandbox.downloadUrl('signed.txt'), { method: 'POST', body: new FormData() });
  assert.equal(wrongWay.status, 401, 'expected 401 for writing with a signature for reading');
  await wrongWay.text();
});

test('headers of a download, ranges and encodings', async () => {
  const sandbox = await shared();
  const text = 'abcdefghij'.repeat(5000);
  await sandbox.files.write(`${dir}/range`, text);
  const whole = await get(sandbox, `${dir}/range`, { 'Accept-Encoding': 'identity' });
  assert.equal(whole.headers.get('content-length'), '50000');
  assert.match(whole.headers.get('content-disposition') ?? '', /^inline/);
  assert.match(whole.headers.get('vary') ?? '', /Accept-Encoding/i);
  assert.equal(await whole.text(), text);
  const part = await get(sandbox, `${dir}/range`, { Range: 'bytes=10-14', 'Accept-Encoding': 'identity' });
  assert.equal(part.status, 206, 'expected 206 for a range');
  assert.equal(await part.text(), 'abcde');
  const modified = whole.headers.get('last-modified');
  const same = await get(sandbox, `${dir}/range`, { 'If-Modified-Since': modified, 'Accept-Encoding': 'identity' });
  assert.equal(same.status, 304, 'expected 304 for a file that did not change');
  const refused = await get(sandbox, `${dir}/range`, { 'Accept-Encoding': 'br;q=1, identity;q=0, *;q=0' });
  assert.equal(refused.status, 406, 'expected 406 when no encoding is acceptable');
  await refused.text();
});

test('raw uploads: octet-stream, gzip, form with directories in the name, refusals', async () => {
  const sandbox = await shared();
  const octet = await post(sandbox, `?path=${dir}/raw-octet`, 'octets', { 'Content-Type': 'application/octet-stream' });
  assert.equal(octet.status, 200, await octet.clone().text());
  const [entry] = await octet.json();
  assert.deepEqual([entry.path, entry.name, entry.type], [`${dir}/raw-octet`, 'raw-octet', 'file']);
  const zipped = await post(sandbox, `?path=${dir}/raw-gzip`, gzipSync('zipped'), { 'Content-Type': 'application/octet-stream', 'Content-Encoding': 'gzip' });
  assert.equal(zipped.status, 200, await zipped.clone().text());
  await zipped.text();
  assert.equal(await sandbox.files.read(`${dir}/raw-gzip`), 'zipped');
  const form = new FormData();
  form.append('file', new Blob(['one']), `${dir}/form/a/one.txt`);
  form.append('file', new Blob(['two']), `${dir}/form/b/two.txt`);
  const two = await post(sandbox, '', form);
  assert.equal(two.status, 200, await two.clone().text());
  assert.deepEqual((await two.json()).map((item) => item.path), [`${dir}/form/a/one.txt`, `${dir}/form/b/two.txt`]);
  assert.equal(await sandbox.files.read(`${dir}/form/b/two.txt`), 'two');
  const twice = new FormData();
  twice.append('file', new Blob(['1']), `${dir}/form/same`);
  twice.append('file', new Blob(['2']), `${dir}/form/same`);
  const cases = [
    ['the same path twice', '', twice, {}, 400],
    ['octets without a path', '', 'x', { 'Content-Type': 'application/octet-stream' }, 400],
    ['a type we do not know', `?path=${dir}/x`, 'x', { 'Content-Type': 'text/plain' }, 400],
    ['a broken gzip body', `?path=${dir}/x`, 'no gzip', { 'Content-Type': 'application/octet-stream', 'Content-Encoding': 'gzip' }, 400],
  ];
  for (const [what, query, body, headers, want] of cases) {
    const answer = await post(sandbox, query, body, headers);
    const text = await answer.text();
    assert.equal(answer.status, want, `${what}: expected ${want}, got ${answer.status}: ${text}`);
    assert.equal(JSON.parse(text).code, want, `${what}: expected the code in the body, got ${text}`);
  }
});

test('gzip is used for a download when it is offered', async () => {
  const sandbox = await shared();
  await sandbox.files.write(`${dir}/zippable`, 'z'.repeat(100_000));
  const response = await get(sandbox, `${dir}/zippable`, { 'Accept-Encoding': 'gzip' });
  assert.equal((await response.text()).length, 100_000, 'expected the content, zipped or not');
  assert.equal(gunzipSync(gzipSync('x')).toString(), 'x');
});

test('paths that lie do no harm', async () => {
  const sandbox = await shared();
  const name = 'n'.repeat(300);
  for (const [what, path] of [
    ['a NUL in the path', `${dir}/a\0b`],
    ['a name that is too long', `${dir}/${name}`],
    ['a very long path', `/${'d/'.repeat(3000)}f`],
  ]) {
    const response = await get(sandbox, path);
    const text = await response.text();
    assert.ok([400, 404].includes(response.status), `${what}: expected 400 or 404, got ${response.status}: ${text.slice(0, 200)}`);
  }
  const up = await sandbox.files.write(`${dir}/x/../up.txt`, 'u');
  assert.equal(up.path, `${dir}/up.txt`, 'expected .. to be resolved');
  const odd = await sandbox.files.write(`${dir}/ü \n"%2F'.txt`, 'odd');
  assert.equal(await sandbox.files.read(odd.path), 'odd');
  const stat = await unary(sandbox, 'filesystem.Filesystem/Stat', { path: `${dir}/a\0b` });
  assert.equal(stat.status >= 400 && stat.status < 500, true, `Stat of a path with NUL: expected a 4xx, got ${stat.status}: ${stat.text}`);
  const app = await sandbox.files.write('/app/made-by-user.txt', 'a');
  assert.equal((await sandbox.files.getInfo(app.path)).owner, 'user', 'expected a user to be able to write below /, as clients do, and to own it');
});

test('an upload that is cut in the middle leaves the gateway well', async () => {
  const sandbox = await shared();
  const abort = new AbortController();
  let sent = 0;
  const body = new ReadableStream({
    async pull(controller) {
      controller.enqueue(new Uint8Array(65536));
      if (++sent === 5) abort.abort();
      await sleep(10);
    },
  });
  await assert.rejects(
    fetch(`${apiUrl}/files?path=${dir}/cut`, {
      method: 'POST',
      headers: { ...route(sandbox), ...token(sandbox), 'Content-Type': 'application/octet-stream' },
      body,
      duplex: 'half',
      signal: abort.signal,
    }),
  );
  assert.equal((await sandbox.commands.run('echo well')).stdout, 'well\n');
});
