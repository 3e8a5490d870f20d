"""An HTTP proxy in front of an S3 server that misbehaves as told, and counts what passes.

It has faults by method, path and count (``Rule``), latency, a bandwidth limit, and a log. It knows
HTTP/1.1 and nothing of S3 beyond one error document. Every header passes unchanged, ``Host``
included, because SigV4 signs it; so clients must address buckets in the path.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from urllib.parse import unquote, urlsplit

PIECE_BYTES = 256 << 10


class Fault(Enum):
    """What is done to a request that a rule picks."""

    SLOW_DOWN = "503 SlowDown; the server sees nothing"
    ABSENT = "404 NoSuchKey; the server sees nothing"
    DENIED = "403 AccessDenied; the server sees nothing"
    ARCHIVED = "403 InvalidObjectState; the server sees nothing"
    LOCKED = "400 InvalidRequest, as of a bucket with an object lock; the server sees nothing"
    UNKNOWN = "501 NotImplemented; the server sees nothing"
    RESET_BEFORE = "reset before the server sees anything"
    RESET_IN_REQUEST = "reset after half of the request's body went to the server"
    DROP_ANSWER = "the server does the work, then reset in place of its answer"
    RESET_IN_ANSWER = "reset after half of the answer's body"
    RESET_AFTER_ANSWER = "the whole answer, then a reset of the connection that was to be kept"
    TRUNCATE_ANSWER = "closed in good order after half of the answer's body"
    SHORTEN_ANSWER = "half of the answer's body, with a Content-Length that agrees"
    FLIP_ANSWER = "one bit of the answer's body is another"
    SILENCE = "no answer, ever; the server sees nothing"
    HELD = "reset in place of an answer; the server sees it once ``release`` is called"
    SILENT_ANSWER = "half of the answer's body, then nothing, ever"
    IGNORE_CONDITIONS = "If-None-Match and If-Match do not reach the server"
    DELAY = "as it should be, after ``delay_s``"


VIRTUAL_HOSTS = "store.invalid"
"""Hosts below this name exist for a client of whom the proxy is the forward proxy."""


@dataclass(kw_only=True)
class Rule:
    """Which requests a fault befalls.

    Attributes:
        fault: what happens to them.
        methods: HTTP methods; empty for all.
        path: regular expression searched for in the decoded ``/bucket/key?query``.
        client: regular expression searched for in the header ``User-Agent``.
        conditional: only requests with If-None-Match or If-Match.
        copies: only requests for a copy on the server's side.
        skip: how many matching requests pass unharmed first.
        count: how many are hit after that; None for all.
        delay_s: seconds to wait, for ``Fault.DELAY``.
        hits: how many were hit so far.
    """

    fault: Fault
    methods: tuple[str, ...] = ()
    path: str = ""
    client: str = ""
    conditional: bool = False
    copies: bool = False
    skip: int = 0
    count: int | None = 1
    delay_s: float = 0.0
    hits: int = 0

    def takes(self, head: Head) -> bool:
        """Whether this rule hits this request; counts it."""
        matches = (
            (not self.methods or head.method in self.methods)
            and re.search(self.path, head.path)
            and re.search(self.client, " ".join(head.fields("user-agent")))
            and (not self.conditional or head.fields("if-none-match") or head.fields("if-match"))
            and (not self.copies or head.fields("x-amz-copy-source"))
        )
        if matches and self.skip:
            self.skip -= 1
            return False
        is_taken = bool(matches) and (self.count is None or self.hits < self.count)
        self.hits += is_taken
        return is_taken


@dataclass
class Passed:
    """One request that came: what it was, what became of it, bytes of both bodies."""

    method: str
    path: str
    fault: Fault | None = None
    status: int | None = None
    sent_bytes: int = 0
    received_bytes: int = 0
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    """Of the request, by names in lower case."""


@dataclass
class Head:
    """Start line and headers of a message, the headers in order and untouched."""

    start: str
    headers: list[tuple[str, str]]

    @property
    def method(self) -> str:
        return self.start.split(" ", 1)[0]

    @property
    def path(self) -> str:
        return unquote(self.start.split(" ")[1])

    @property
    def status(self) -> int:
        return int(self.start.split(" ")[1])

    def fields(self, name: str) -> list[str]:
        return [value for header, value in self.headers if header.lower() == name]

    def without(self, *names: str) -> Head:
        kept = [(name, value) for name, value in self.headers if name.lower() not in names]
        return Head(self.start, kept)

    def encode(self) -> bytes:
        lines = [self.start, *(f"{name}: {value}" for name, value in self.headers), "", ""]
        return "\r\n".join(lines).encode("latin-1")

    def body_bytes(self) -> int | None:
        """Length of the body: None where it comes in HTTP chunks."""
        if "chunked" in ",".join(self.fields("transfer-encoding")).lower():
            return None
        return int((self.fields("content-length") or ["0"])[0])


class Cut(Exception):  # noqa: N818 (an order, not an error)
    """The connection is to be cut now."""


@dataclass
class FaultProxy:
    """The proxy, on a free port of 127.0.0.1 in a thread of its own; a context manager.

    Attributes:
        upstream_url: the server behind it, ``http://host:port``.
        latency_s: seconds that every request waits before it goes on.
        bytes_per_s: limit of all bodies together, both ways; None for none.
        rules: the faults; the first rule that takes a request decides. Change them at any time.
        log: every request that came.
        held: requests that were taken and wait for :meth:`release`.
        most_at_once: how many requests were under way at one time, at the most.
    """

    upstream_url: str
    latency_s: float = 0.0
    bytes_per_s: float | None = None
    rules: list[Rule] = field(default_factory=list)
    log: list[Passed] = field(default_factory=list)
    most_at_once: int = 0
    held: list[bytes] = field(default_factory=list)

    def __enter__(self) -> FaultProxy:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Listen; raises OSError where the port of an earlier ``start`` is taken."""
        self._loop = asyncio.new_event_loop()
        self._at_once = 0
        self._free_at_s = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        serving = asyncio.start_server(
            self._accept, "127.0.0.1", self._port, limit=4 * PIECE_BYTES, backlog=512
        )
        self._server = self._loop.run_until_complete(serving)
        self._port = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Cut every connection and refuse new ones; ``start`` listens on the same port again."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    @property
    def endpoint_url(self) -> str:
        """What clients are given in place of the server's address."""
        return f"http://127.0.0.1:{self._port}"

    def add(self, fault: Fault, **which: Any) -> Rule:
        """Add a rule and return it, for its ``hits``."""
        rule = Rule(fault=fault, **which)
        self.rules.append(rule)
        return rule

    def clear(self) -> None:
        """Forget the rules, the log and the limits."""
        self.rules.clear()
        self.log.clear()
        self.most_at_once = 0
        self.latency_s, self.bytes_per_s = 0.0, None

    def release(self) -> list[int]:
        """Send what was held to the server, one after the other; the statuses of its answers."""

        async def send() -> list[int]:
            statuses = []
            while self.held:
                where = urlsplit(self.upstream_url)
                reader, writer = await asyncio.open_connection(where.hostname, where.port)
                writer.write(self.held.pop(0))
                answer = await _read_head(reader)
                statuses.append(answer.status if answer else 0)
                writer.close()
            return statuses

        return asyncio.run_coroutine_threadsafe(send(), self._loop).result(60)

    def count(self, method: str = "", path: str = "") -> int:
        """How many requests came, of a method and with a path that the expression is found in."""
        return len(self.passed(method, path))

    def passed(self, method: str = "", path: str = "") -> list[Passed]:
        """The requests that came, of a method and with a path that the expression is found in."""
        return [
            entry
            for entry in list(self.log)
            if entry.method.startswith(method) and re.search(path, entry.path)
        ]

    _port = 0

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        connection = _Connection(self, reader, writer)
        try:
            await connection.serve()
        except (Cut, asyncio.CancelledError):
            _reset(writer)
        except (OSError, EOFError, asyncio.IncompleteReadError):
            pass
        finally:
            connection.close()
            self._tasks.discard(task)

    async def _pace(self, size: int) -> None:
        """Wait until ``size`` bytes more are within the limit that all connections share."""
        if self.bytes_per_s is None:
            return
        now = self._loop.time()
        self._free_at_s = max(now, self._free_at_s) + size / self.bytes_per_s
        await asyncio.sleep(self._free_at_s - now)


class _Connection:
    """One client's connection and the one to the server that belongs to it."""

    def __init__(
        self, proxy: FaultProxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.proxy = proxy
        self.reader, self.writer = reader, writer
        self.server: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    def close(self) -> None:
        for writer in (self.writer, self.server and self.server[1]):
            if writer:
                writer.close()

    async def serve(self) -> None:
        while (head := await _read_head(self.reader)) is not None:
            head = _of_a_forward_proxy(head)
            passed = Passed(head.method, head.path)
            passed.headers = {name.lower(): value for name, value in head.headers}
            self.proxy.log.append(passed)
            self.proxy._at_once += 1
            self.proxy.most_at_once = max(self.proxy.most_at_once, self.proxy._at_once)
            try:
                await self._pass_on(head, passed)
            finally:
                self.proxy._at_once -= 1
            if not _kept_alive(head):
                return

    async def _pass_on(self, head: Head, passed: Passed) -> None:
        rule = next((rule for rule in self.proxy.rules if rule.takes(head)), None)
        fault = passed.fault = rule.fault if rule else None
        if self.proxy.latency_s or (rule and rule.delay_s):
            await asyncio.sleep(self.proxy.latency_s + (rule.delay_s if rule else 0.0))
        if fault is Fault.RESET_BEFORE:
            raise Cut
        if head.fields("expect"):
            self.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            head = head.without("expect")
        if fault is Fault.HELD:
            body = b"".join([piece async for piece in _body(self.reader, head.body_bytes())])
            self.proxy.held.append(head.encode() + body)
            raise Cut
        if fault is Fault.SILENCE:
            async for _ in _body(self.reader, head.body_bytes()):
                pass
            await asyncio.Event().wait()
        if fault in _REFUSALS:
            await self._refuse(head, fault, passed)
            return
        if fault is Fault.IGNORE_CONDITIONS:
            head = head.without("if-none-match", "if-match")
        await self._send(head, fault, passed)
        await self._answer(head, fault, passed)

    async def _send(self, head: Head, fault: Fault | None, passed: Passed) -> None:
        if self.server is None:
            where = urlsplit(self.proxy.upstream_url)
            self.server = await asyncio.open_connection(
                where.hostname, where.port, limit=4 * PIECE_BYTES
            )
        server = self.server[1]
        server.write(head.encode())
        size = head.body_bytes()
        half = (size or 0) // 2
        async for piece in _body(self.reader, size):
            if fault is Fault.RESET_IN_REQUEST and passed.sent_bytes + len(piece) > half:
                server.write(piece[: half - passed.sent_bytes])
                await server.drain()
                break
            passed.sent_bytes += len(piece)
            await self._write(server, piece, size)
        if fault is Fault.RESET_IN_REQUEST:
            _reset(server)
            raise Cut
        await self._write(server, b"", size)

    async def _write(self, writer: asyncio.StreamWriter, piece: bytes, size: int | None) -> None:
        """Send a piece of a body, as an HTTP chunk where its size is not known; empty: its end."""
        await self.proxy._pace(len(piece))
        writer.write(piece if size is not None else b"%x\r\n%b\r\n" % (len(piece), piece))
        await writer.drain()

    async def _answer(self, head: Head, fault: Fault | None, passed: Passed) -> None:
        assert self.server is not None
        reader = self.server[0]
        answer = await _read_head(reader)
        while answer is not None and answer.status == 100:
            answer = await _read_head(reader)
        if answer is None:
            raise Cut
        passed.status = answer.status
        bare = head.method == "HEAD" or answer.status in (204, 304)
        size = 0 if bare else answer.body_bytes()
        if fault is Fault.DROP_ANSWER:
            async for _ in _body(reader, size):
                pass
            raise Cut
        if fault in _WHOLE_BODY:
            body = b"".join([piece async for piece in _body(reader, size)])
            await self._spoiled(answer, body, fault, passed)
            return
        self.writer.write(answer.encode())
        async for piece in _body(reader, size):
            passed.received_bytes += len(piece)
            await self._write(self.writer, piece, size)
        await self._write(self.writer, b"", size)
        if fault is Fault.RESET_AFTER_ANSWER:
            await asyncio.sleep(0.05)  # as in _spoiled
            raise Cut
        if not _kept_alive(answer):
            raise EOFError

    async def _spoiled(
        self, answer: Head, body: bytes, fault: Fault | None, passed: Passed
    ) -> None:
        """Send an answer whose body is cut or changed."""
        sent = body[: len(body) // 2]
        said = len(body)
        if fault is Fault.SHORTEN_ANSWER:
            said = len(sent)
        elif fault is Fault.FLIP_ANSWER and body:
            middle = len(body) // 2
            sent = body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
        head = answer.without("content-length", "transfer-encoding")
        head.headers.append(("Content-Length", str(said)))
        self.writer.write(head.encode() + sent)
        passed.received_bytes += len(sent)
        await self.writer.drain()
        if fault is Fault.SILENT_ANSWER:
            await asyncio.Event().wait()
        if fault is Fault.RESET_IN_ANSWER:
            # The half that was written has to leave first: a reset throws away what is queued.
            await asyncio.sleep(0.05)
            raise Cut
        if fault is Fault.TRUNCATE_ANSWER:
            raise EOFError

    async def _refuse(self, head: Head, fault: Fault, passed: Passed) -> None:
        async for _ in _body(self.reader, head.body_bytes()):
            pass
        status, message = _REFUSALS[fault]
        code = str(fault.value).split()[1].rstrip(";,")
        body = (
            '<?xml version="1.0" encoding="UTF-8"?>'
            f"<Error><Code>{code}</Code><Message>{message}</Message>"
            "<RequestId>1</RequestId></Error>"
        ).encode()
        passed.status = int(status.split()[0])
        body = b"" if head.method == "HEAD" else body
        headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
        self.writer.write(Head(f"HTTP/1.1 {status}", headers).encode() + body)
        await self.writer.drain()


_REFUSALS = {
    Fault.SLOW_DOWN: ("503 Slow Down", "Please reduce your request rate."),
    Fault.ABSENT: ("404 Not Found", "The specified key does not exist."),
    Fault.DENIED: ("403 Forbidden", "Access Denied"),
    Fault.ARCHIVED: (
        "403 Forbidden",
        "The operation is not valid for the object's storage class",
    ),
    Fault.UNKNOWN: ("501 Not Implemented", "A header you provided is not implemented"),
    Fault.LOCKED: (
        "400 Bad Request",
        "Content-MD5 OR x-amz-checksum- HTTP header is required for Put Object requests with "
        "Object Lock parameters",
    ),
}

_WHOLE_BODY = (
    Fault.RESET_IN_ANSWER,
    Fault.TRUNCATE_ANSWER,
    Fault.SHORTEN_ANSWER,
    Fault.FLIP_ANSWER,
    Fault.SILENT_ANSWER,
)


def _of_a_forward_proxy(head: Head) -> Head:
    """A request with a whole URL, as forward proxies get it, made one for the server: of a host
    ``BUCKET.VIRTUAL_HOSTS``, with the bucket in its path."""
    method, target, version = head.start.split(" ")
    if not target.startswith("http://"):
        return head
    host, slash, rest = target.removeprefix("http://").partition("/")
    bucket, _, of = host.partition(":")[0].partition(".")
    path = f"{slash}{bucket}/{rest}" if of == VIRTUAL_HOSTS else f"{slash}{rest}"
    return Head(f"{method} {path} {version}", head.headers)


async def _read_head(reader: asyncio.StreamReader) -> Head | None:
    """The next message's head; None where the other side closed in good order."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return None
    start, *lines = raw[:-4].decode("latin-1").split("\r\n")
    pairs = [line.split(":", 1) for line in lines]
    return Head(start, [(name, value.strip()) for name, value in pairs])


async def _body(reader: asyncio.StreamReader, size: int | None) -> AsyncIterator[bytes]:
    """The pieces of a body of ``size`` bytes, or of HTTP chunks where it is None."""
    if size is not None:
        while size:
            piece = await reader.read(min(size, PIECE_BYTES))
            if not piece:
                raise EOFError
            size -= len(piece)
            yield piece
        return
    while length := int((await reader.readline()).split(b";")[0], 16):
        async for piece in _body(reader, length):
            yield piece
        await reader.readline()
    while (await reader.readline()).strip():
        pass


def _kept_alive(head: Head) -> bool:
    return "close" not in ",".join(head.fields("connection")).lower()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Cut a connection so that the other side sees a reset."""
    end = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
