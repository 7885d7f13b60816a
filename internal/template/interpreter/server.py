"""The code interpreter of a sandbox: Python kernels behind E2B's HTTP protocol.

A small server of the standard library's asyncio and Debian's jupyter_client. It
runs as the sandbox's user and listens on port 49999:

    POST /execute                  a stream of JSON lines, the last one end_of_execution
    GET, POST /contexts            DELETE /contexts/ID     POST /contexts/ID/restart
    GET /health                    answers once the default context is ready

A context is one kernel. Its executions follow one another. A client that goes
away interrupts its execution, and the next one runs.

While nothing is executed nothing here or in a kernel wakes up: the kernels have
no heartbeat, no watch for their parent and no history; an idle guest must not
dirty memory that its host has compressed.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
import urllib.request
import uuid

import zmq
from jupyter_client.asynchronous import AsyncKernelClient
from jupyter_client.connect import write_connection_file

PORT = int(os.environ.get("AGENTZIP_INTERPRETER_PORT", "49999"))
HOME = os.path.expanduser("~")
ENVS_URL = os.environ.get("AGENTZIP_ENVS_URL", "http://localhost:49983/envs")
MARK = os.environ.get("AGENTZIP_MARK", "/run/e2b/.E2B_SANDBOX_ID")  # written anew whenever the sandbox is told who it is
STARTUP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup.py")

KEEPALIVE = 5.0  # seconds of silence between two keepalive lines: clients drop silent streams after minutes
INTERRUPT_AGAIN = 2.0  # seconds until a cell that ignores an interrupt gets another one
INTERRUPTS = 10  # after so many the kernel is started anew
READY = 300.0  # seconds for a kernel to start: 15 under TCG on a busy host
LOOK = 2.0  # how often a kernel that executes is looked at: it may have died
MAX_BODY = 64 << 20
MAX_HEAD = 64 << 10
# Loads in the template what most cells with data load: modules, fonts, the first drawing.
# It does not make a clone's first plot as fast as its second: 11 and 15 s against 6.5 and
# 5.8 s (TCG, a busy host). Whether it is worth its memory was not measured.
PRELOAD = """
def _preload():
    import io, numpy, pandas, matplotlib.pyplot as plt
    plt.plot(pandas.DataFrame({"a": [1, 2]})["a"].to_numpy(), label="a")
    plt.legend()
    plt.savefig(io.BytesIO(), format="png")
    plt.close("all")
_preload()
del _preload
"""

MIMES = {
    "text/plain": "text", "text/html": "html", "text/markdown": "markdown", "image/svg+xml": "svg", "image/png": "png",
    "image/jpeg": "jpeg", "application/pdf": "pdf", "text/latex": "latex", "application/json": "json",
    "application/javascript": "javascript", "e2b/data": "data", "e2b/chart": "chart",
}


class Failure(Exception):
    """An answer other than 200."""

    def __init__(self, status, text):
        super().__init__(text)
        self.status, self.text = status, text


def result_line(data, main):
    """The line of one result: E2B's keys for known types, the rest under extra."""
    line, extra = {"type": "result", "is_main_result": main}, {}
    for mime, value in data.items():
        key = MIMES.get(mime)
        if value is None:
            continue
        if key is None:
            extra[mime] = value
        elif key == "text" and len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            line[key] = value[1:-1]
        elif key in ("png", "jpeg"):
            line[key] = value.strip()
        else:
            line[key] = value
    if extra:
        line["extra"] = extra
    return line


def output_line(message):
    """The line of a message of a kernel, None for those that clients do not see."""
    kind, content = message["msg_type"], message["content"]
    if kind == "stream":
        date = message["header"]["date"]
        stamp = int(date.timestamp() * 1e9) if hasattr(date, "timestamp") else time.time_ns()
        return {"type": content["name"], "text": content["text"], "timestamp": stamp}
    if kind == "execute_result":
        return result_line(content["data"], True)
    if kind == "display_data":
        return result_line(content["data"], False)
    if kind == "error":
        return {"type": "error", "name": content["ename"], "value": content["evalue"], "traceback": "\n".join(content["traceback"])}
    if kind == "execute_input":
        return {"type": "number_of_executions", "execution_count": content["execution_count"]}
    return None


class Kernel:
    """A kernel process and the channels to it."""

    def __init__(self, cwd):
        self.cwd = cwd
        self.process = self.client = self.listener = self.file = None
        self.receivers = {}  # message id -> queue of what the kernel publishes for it; None: it died

    async def start(self):
        self.file, info = write_connection_file(ip="127.0.0.1")
        os.chmod(self.file, 0o600)
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "ipykernel_launcher", "-f", self.file,
            "--IPKernelApp.parent_handle=0", "--HistoryManager.enabled=False", f"--IPKernelApp.exec_files={STARTUP}",
            cwd=self.cwd, stdin=asyncio.subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, "MPLBACKEND": "module://matplotlib_inline.backend_inline", "PYDEVD_DISABLE_FILE_VALIDATION": "1"},
        )
        self.client = AsyncKernelClient()
        self.client.context.setsockopt(zmq.RCVHWM, 0)
        self.client.load_connection_info(info)
        self.client.start_channels(stdin=False, hb=False)
        self.listener = asyncio.create_task(self.listen())
        await asyncio.wait_for(self.answer(), READY)

    async def answer(self):
        """Wait until the kernel publishes: what it published before we listened is lost."""
        while True:
            queue = self.receive(self.client.kernel_info())
            try:
                await asyncio.wait_for(queue.get(), 1.0)
                return
            except asyncio.TimeoutError:
                if self.process.returncode is not None:
                    raise Failure(500, f"the kernel ended with {self.process.returncode}")

    def receive(self, message):
        # Without a bound: a kernel publishes what nobody takes into the void, it does not wait.
        queue = asyncio.Queue()
        self.receivers[message] = queue
        return queue

    async def listen(self):
        while True:
            message = await self.client.get_iopub_msg()
            parent = message.get("parent_header", {}).get("msg_id")
            queue = self.receivers.get(parent)
            if queue is None:
                continue
            queue.put_nowait(message)
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                self.receivers.pop(parent, None)

    async def drain_replies(self):
        while await self.client.shell_channel.msg_ready():
            await self.client.get_shell_msg(timeout=0)

    async def run(self, code, silent=False):
        """Execute code; yield the kernel's messages up to the idle one, and None for each LOOK of silence."""
        message = self.client.execute(code, silent=silent, store_history=not silent, allow_stdin=False, stop_on_error=False)
        queue = self.receive(message)
        try:
            while True:
                try:
                    m = await asyncio.wait_for(queue.get(), LOOK)
                except asyncio.TimeoutError:
                    if self.process.returncode is not None:
                        raise Failure(500, f"the kernel ended with {self.process.returncode}")
                    yield None
                    continue
                if m["msg_type"] == "status" and m["content"]["execution_state"] == "idle":
                    break
                yield m
            await self.drain_replies()
        finally:
            self.receivers.pop(message, None)

    async def call(self, function, *arguments):
        """Call a function of startup.py; its outcome does not matter to the user."""
        code = f'__import__("sys").modules["_agentzip"].{function}(*__import__("json").loads({json.dumps(json.dumps(arguments))}))'
        async for _ in self.run(code, silent=True):
            pass

    def interrupt(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGINT)

    async def stop(self):
        if self.listener:
            self.listener.cancel()
        if self.process and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            await self.process.wait()
        if self.client:
            self.client.stop_channels()
        with contextlib.suppress(OSError):
            os.unlink(self.file)


class Context:
    """A kernel with its lock."""

    def __init__(self, language, cwd):
        self.id, self.language, self.cwd = str(uuid.uuid4()), language, cwd
        self.kernel = Kernel(cwd)
        self.lock = asyncio.Lock()  # held by the execution in hand
        self.mark = None  # which sandbox the kernel knows it is in

    def shape(self):
        return {"id": self.id, "language": self.language, "cwd": self.cwd}

    async def restart(self):
        await self.kernel.stop()
        self.kernel, self.mark = Kernel(self.cwd), None
        await self.kernel.start()

    async def settle(self, token):
        """Before a cell: a kernel that was cloned gets random numbers and variables of its own."""
        if self.kernel.process.returncode is not None:
            await self.restart()
        try:
            st = os.stat(MARK)
            mark = (st.st_ino, st.st_mtime_ns)
        except OSError:
            mark = "none"
        if mark == self.mark:
            return
        await self.kernel.call("adopt", await asyncio.to_thread(fetch_envs, token))
        self.mark = mark

    async def execute(self, code, envs, token, emit):
        """Run a cell. emit(line) waits for the client; cancelling the task interrupts the cell."""
        async with self.lock:
            try:
                await self.settle(token)
                if envs:
                    await self.kernel.call("push_env", envs)
                try:
                    await self.follow(code, emit)
                finally:
                    if envs:
                        await asyncio.shield(self.kernel.call("pop_env"))
            except Failure as e:
                await emit({"type": "error", "name": "KernelDied", "value": str(e), "traceback": str(e)})
        await emit({"type": "end_of_execution"})

    async def follow(self, code, emit):
        silent_since = time.monotonic()
        messages = self.kernel.run(code)
        try:
            async for m in messages:
                line = output_line(m) if m else None
                if line is None and time.monotonic() - silent_since < KEEPALIVE:
                    continue
                await emit(line or {"type": "keepalive"})
                silent_since = time.monotonic()
        except asyncio.CancelledError:
            await messages.aclose()
            await self.halt()
            raise

    async def halt(self):
        """Interrupt until the kernel answers again; start it anew if it never does."""
        for _ in range(INTERRUPTS):
            self.kernel.interrupt()
            queue = self.kernel.receive(self.kernel.client.kernel_info())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(queue.get(), INTERRUPT_AGAIN)
                return
        await self.restart()


def fetch_envs(token):
    """The sandbox's own variables, from the agent."""
    if not token:
        return {}
    request = urllib.request.Request(ENVS_URL, headers={"X-Access-Token": token})
    try:
        with urllib.request.urlopen(request, timeout=5) as response:
            return json.load(response)
    except (OSError, ValueError):
        return {}


class Server:
    def __init__(self):
        self.contexts = {}
        self.default = None  # id
        self.making = asyncio.Lock()  # one default context is made at a time

    async def make(self, language, cwd):
        language = (language or "python").lower()
        if language not in ("python", "python3"):
            raise Failure(400, f"Language {language} is not available in this template, python is")
        cwd = os.path.join(HOME, os.path.expanduser(cwd or HOME))
        if not os.path.isdir(cwd):
            raise Failure(400, f"cwd {cwd} does not exist")
        context = Context("python", cwd)
        try:
            await context.kernel.start()
        except asyncio.TimeoutError:
            await context.kernel.stop()
            raise Failure(500, "the kernel did not start")
        self.contexts[context.id] = context
        return context

    async def make_default(self):
        async with self.making:
            if self.default not in self.contexts:
                self.default = (await self.make("python", HOME)).id
            return self.contexts[self.default]

    def find(self, id):
        if id not in self.contexts:
            raise Failure(404, f"Context {id} not found")
        return self.contexts[id]

    async def route(self, method, path, body):
        """Answer everything but /execute."""
        parts = path.strip("/").split("/")
        if (method, parts) == ("GET", ["health"]):
            return "OK"
        if parts[0] != "contexts":
            raise Failure(404, "Not Found")
        if method == "GET" and len(parts) == 1:
            return [c.shape() for c in self.contexts.values()]
        if method == "POST" and len(parts) == 1:
            return (await self.make(field(body, "language", str), field(body, "cwd", str))).shape()
        if method == "POST" and len(parts) == 3 and parts[2] == "restart":
            context = self.find(parts[1])
            context.kernel.interrupt()
            async with context.lock:
                await context.restart()
            return None
        if method == "DELETE" and len(parts) == 2:
            context = self.find(parts[1])
            del self.contexts[context.id]
            await context.kernel.stop()
            return None
        raise Failure(405, "Method Not Allowed")

    async def target(self, body):
        id, language = field(body, "context_id", str), field(body, "language", str)
        if id and language:
            raise Failure(400, "Only one of context_id or language can be provided")
        if id and id != "default":
            return self.find(id)
        if language and language.lower() not in ("python", "python3"):
            raise Failure(400, f"Language {language} is not available in this template, python is")
        return await self.make_default()

    async def execute(self, connection, headers, body):
        code, envs = field(body, "code", str), field(body, "env_vars", dict) or {}
        if code is None:
            raise Failure(422, "code is required")
        context = await self.target(body)
        await connection.begin()
        run = asyncio.create_task(context.execute(code, {str(k): str(v) for k, v in envs.items()}, headers.get("x-access-token"), connection.line))
        gone = asyncio.create_task(connection.gone())
        try:
            await asyncio.wait({run, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not run.done():
                run.cancel()
                with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                    await run
                raise ConnectionResetError("the client left")
            await run
        finally:
            gone.cancel()
            await asyncio.wait({gone})
        await connection.end()


def field(body, name, kind):
    value = body.get(name)
    if value is not None and not isinstance(value, kind):
        raise Failure(422, f"{name}: not of type {kind.__name__}")
    return value


class Connection:
    """One HTTP/1.1 connection."""

    def __init__(self, server, reader, writer):
        self.server, self.reader, self.writer = server, reader, writer
        self.spoiled = False  # a byte of the next request was read

    async def serve(self):
        try:
            while await self.request():
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            self.writer.close()

    async def request(self):
        head = await self.reader.readuntil(b"\r\n\r\n")
        try:
            first, *lines = head.decode("latin-1").rstrip().split("\r\n")
            method, target, version = first.split(" ")
            headers = {k.strip().lower(): v.strip() for k, v in (line.split(":", 1) for line in lines)}
            body = await self.body(headers)
            if method in ("POST", "PUT") and body:
                body = json.loads(body)
                if not isinstance(body, dict):
                    raise ValueError("the body is not an object")
            else:
                body = {}
        except (ValueError, RecursionError) as e:
            await self.answer(400, {"detail": str(e)}, False)
            return False
        keep = version == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
        path = target.split("?", 1)[0]
        try:
            if (method, path) == ("POST", "/execute"):
                await self.server.execute(self, headers, body)
            else:
                await self.answer(200, await self.server.route(method, path, body), keep)
        except Failure as e:
            await self.answer(e.status, e.text, keep)
        return keep and not self.spoiled

    async def body(self, headers):
        if headers.get("transfer-encoding", "").lower() == "chunked":
            body = b""
            while True:
                size = int((await self.reader.readline()).split(b";")[0], 16)
                if size < 0 or len(body) + size > MAX_BODY:
                    raise ValueError("the body is too large")
                body += await self.reader.readexactly(size)
                await self.reader.readline()
                if size == 0:
                    return body
        size = int(headers.get("content-length", "0"))
        if size < 0 or size > MAX_BODY:
            raise ValueError("the body is too large")
        return await self.reader.readexactly(size)

    async def answer(self, status, value, keep):
        text = isinstance(value, str) and status != 200
        data = value.encode() if text else json.dumps(value).encode()
        kind = "text/plain; charset=utf-8" if text else "application/json"
        self.writer.write(
            f"HTTP/1.1 {status} {'OK' if status == 200 else 'Error'}\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n"
            f"Connection: {'keep-alive' if keep else 'close'}\r\n\r\n".encode() + data
        )
        await self.writer.drain()

    async def begin(self):
        self.writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\nCache-Control: no-store\r\n\r\n")
        await self.writer.drain()

    async def line(self, value):
        data = json.dumps(value, default=str).encode() + b"\n"
        self.writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        await self.writer.drain()

    async def end(self):
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    async def gone(self):
        """Return when the client has closed. It sends nothing while it waits for an answer."""
        while not self.reader.at_eof():
            if not await self.reader.read(1):
                return
            self.spoiled = True


async def main():
    server = Server()
    context = await server.make_default()
    async for _ in context.kernel.run(PRELOAD, silent=True):
        pass
    listener = await asyncio.start_server(lambda r, w: Connection(server, r, w).serve(), "0.0.0.0", PORT, limit=MAX_HEAD)
    print(f"listening on port {PORT}", flush=True)
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    for s in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(s, over.set)
    await over.wait()
    listener.close()
    for c in list(server.contexts.values()):
        await c.kernel.stop()


if __name__ == "__main__":
    asyncio.run(main())
