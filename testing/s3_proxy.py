"""An HTTP proxy in front of an S3 server that misbehaves as told, and counts what passes.

It has faults by method, path and count (``Rule``), latency, a bandwidth limit, and a log. It knows
nothing of S3 beyond one error document. Every header passes unchanged, ``Host`` included, because
SigV4 signs it; so clients must address buckets in the path.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
import threading
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NoReturn
from urllib.parse import unquote

import aiohttp
from aiohttp import hdrs, web
from multidict import CIMultiDict
from yarl import URL

PIECE_BYTES = 256 << 10


class Fault(Enum):
    """What is done to a request that a rule picks."""

    SLOW_DOWN = "503 SlowDown; the server sees nothing"
    TOO_MANY = (
        "429 TooManyRequests, as of Oracle's and Cloudflare's stores; the server sees nothing"
    )
    ABSENT = "404 NoSuchKey; the server sees nothing"
    DENIED = "403 AccessDenied; the server sees nothing"
    MOVED = "301 PermanentRedirect, as of another region; the server sees nothing"
    ARCHIVED = "403 InvalidObjectState; the server sees nothing"
    LOCKED = "400 InvalidRequest, as of a bucket with an object lock; the server sees nothing"
    UNKNOWN = "501 NotImplemented; the server sees nothing"
    HOLLOW = "200 without a body; the server sees nothing"
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


_MESSAGES = {
    Fault.SLOW_DOWN: "Please reduce your request rate.",
    Fault.TOO_MANY: "Too many requests.",
    Fault.ABSENT: "The specified key does not exist.",
    Fault.DENIED: "Access Denied",
    Fault.MOVED: "The bucket you are attempting to access must be addressed using its endpoint.",
    Fault.ARCHIVED: "The operation is not valid for the object's storage class",
    Fault.UNKNOWN: "A header you provided is not implemented",
    Fault.LOCKED: (
        "Content-MD5 OR x-amz-checksum- HTTP header is required for Put Object requests with "
        "Object Lock parameters"
    ),
}
"""Texts of the answers that the proxy gives by itself."""

_HALVED = (
    Fault.RESET_IN_ANSWER,
    Fault.TRUNCATE_ANSWER,
    Fault.SHORTEN_ANSWER,
    Fault.SILENT_ANSWER,
)

VIRTUAL_HOSTS = "store.invalid"
"""Hosts below this name exist for a client of whom the proxy is the forward proxy."""


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
    body: bytes = field(default=b"", repr=False)
    """Of a POST."""


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

    def takes(self, request: Passed) -> bool:
        """Whether this rule hits this request; counts it."""
        headers = request.headers
        matches = (
            (not self.methods or request.method in self.methods)
            and re.search(self.path, request.path)
            and re.search(self.client, headers.get("user-agent", ""))
            and (not self.conditional or not headers.keys().isdisjoint(_CONDITIONS))
            and (not self.copies or "x-amz-copy-source" in headers)
        )
        if matches and self.skip:
            self.skip -= 1
            return False
        is_taken = bool(matches) and (self.count is None or self.hits < self.count)
        self.hits += is_taken
        return is_taken


_CONDITIONS = ("if-none-match", "if-match")

_Request = tuple[str, URL, CIMultiDict[str], bytes]
"""Method, URL, headers and body of a request for the server."""


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
    held: list[_Request] = field(default_factory=list)

    def __enter__(self) -> FaultProxy:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Listen; raises OSError where the port of an earlier ``start`` is taken."""
        self._loop = asyncio.new_event_loop()
        self._at_once, self._free_at_s = 0, 0.0
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._await(self._start())

    def stop(self) -> None:
        """Cut every connection and refuse new ones; ``start`` listens on the same port again."""
        if self._loop.is_closed():
            return
        self._await(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

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

        asked, self.held = self.held, []
        return [self._await(self._ask(*one))[0].status for one in asked]

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

    def _await(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _start(self) -> None:
        self._session = aiohttp.ClientSession(
            auto_decompress=False,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )
        self._runner = web.ServerRunner(
            web.Server(self._serve, access_log=None), shutdown_timeout=0.01
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port, backlog=512).start()
        self._port = self._runner.addresses[0][1]

    async def _stop(self) -> None:
        await self._runner.cleanup()
        await self._session.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        target = _of_a_forward_proxy(request.raw_path)
        passed = Passed(request.method, unquote(target))
        passed.headers = {name.lower(): value for name, value in request.headers.items()}
        self.log.append(passed)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            return await self._pass_on(request, target, passed)
        except (aiohttp.ClientError, OSError):
            _cut(request)
        finally:
            self._at_once -= 1

    async def _pass_on(
        self, request: web.BaseRequest, target: str, passed: Passed
    ) -> web.StreamResponse:
        rule = next((rule for rule in self.rules if rule.takes(passed)), None)
        fault = passed.fault = rule.fault if rule else None
        await asyncio.sleep(self.latency_s + (rule.delay_s if rule else 0.0))
        if fault is Fault.RESET_BEFORE:
            _cut(request, reset=True)
        if hdrs.EXPECT in request.headers and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = bytearray()
        async for piece in request.content.iter_chunked(PIECE_BYTES):
            await self._pace(len(piece))
            body += piece
        headers = request.headers.copy()
        without = _CONDITIONS if fault is Fault.IGNORE_CONDITIONS else ()
        for name in (hdrs.EXPECT, hdrs.TRANSFER_ENCODING, *without):
            headers.popall(name, None)
        url = URL(self.upstream_url + target, encoded=True)
        asked = request.method, url, headers, bytes(body)
        if fault is Fault.HELD:
            self.held.append(asked)
            _cut(request, reset=True)
        if fault is Fault.SILENCE:
            await asyncio.Event().wait()
        if fault is Fault.RESET_IN_REQUEST:
            await self._send_half(*asked)
            _cut(request, reset=True)
        if fault is Fault.HOLLOW:
            return web.Response()
        if fault is not None and fault in _MESSAGES:
            return _refused(fault, passed)
        passed.sent_bytes = len(body)
        passed.body = bytes(body) if request.method == hdrs.METH_POST else b""
        answer, content = await self._ask(*asked)
        passed.status = answer.status
        if fault is Fault.DROP_ANSWER:
            _cut(request, reset=True)
        return await self._answer(request, answer, content, passed)

    async def _ask(
        self, method: str, url: URL, headers: CIMultiDict[str], body: bytes
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        asked = self._session.request(
            method, url, headers=headers, data=body or None, allow_redirects=False
        )
        async with asked as answer:
            return answer, await answer.read()

    async def _send_half(
        self, method: str, url: URL, headers: CIMultiDict[str], body: bytes
    ) -> None:
        """Send a request with half of its body, then close the connection."""
        _, writer = await asyncio.open_connection(url.host, url.port)
        lines = [f"{method} {url.raw_path_qs} HTTP/1.1", *map(": ".join, headers.items()), "", ""]
        writer.write("\r\n".join(lines).encode() + body[: len(body) // 2])
        await writer.drain()
        writer.close()

    async def _answer(
        self,
        request: web.BaseRequest,
        answer: aiohttp.ClientResponse,
        body: bytes,
        passed: Passed,
    ) -> web.StreamResponse:
        """Send an answer, or one whose body is cut or changed."""
        fault, middle = passed.fault, len(body) // 2
        sent = body[:middle] if fault in _HALVED else body
        if fault is Fault.FLIP_ANSWER and body:
            sent = body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
        headers = answer.headers.copy()
        headers.popall(hdrs.TRANSFER_ENCODING, None)
        if request.method != hdrs.METH_HEAD:
            said = sent if fault is Fault.SHORTEN_ANSWER else body
            headers[hdrs.CONTENT_LENGTH] = str(len(said))
        response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=headers)
        await response.prepare(request)
        for start in range(0, len(sent), PIECE_BYTES):
            piece = sent[start : start + PIECE_BYTES]
            passed.received_bytes += len(piece)
            await self._pace(len(piece))
            await response.write(piece)
        if fault is Fault.SILENT_ANSWER:
            await asyncio.Event().wait()
        if fault in (Fault.RESET_IN_ANSWER, Fault.RESET_AFTER_ANSWER):
            # What was written has to leave first: a reset throws away what is queued.
            await asyncio.sleep(0.05)
            _cut(request, reset=True)
        if fault is Fault.TRUNCATE_ANSWER:
            _cut(request)
        await response.write_eof()
        return response

    async def _pace(self, size: int) -> None:
        """Wait until ``size`` bytes more are within the limit that all connections share."""
        if self.bytes_per_s is None:
            return
        now = self._loop.time()
        self._free_at_s = max(now, self._free_at_s) + size / self.bytes_per_s
        await asyncio.sleep(self._free_at_s - now)


def _refused(fault: Fault, passed: Passed) -> web.Response:
    status, code, *_ = str(fault.value).replace(";", " ").replace(",", " ").split()
    passed.status = int(status)
    text = f"<Error><Code>{code}</Code><Message>{_MESSAGES[fault]}</Message></Error>"
    text = f'<?xml version="1.0" encoding="UTF-8"?>{text}'
    is_bare = passed.method == hdrs.METH_HEAD
    return web.Response(
        status=int(status), text="" if is_bare else text, content_type="application/xml"
    )


def _of_a_forward_proxy(target: str) -> str:
    """A whole URL, as forward proxies get it, made a path for the server: of a host
    ``BUCKET.VIRTUAL_HOSTS``, with the bucket in it."""
    if not target.startswith("http://"):
        return target
    host, slash, rest = target.removeprefix("http://").partition("/")
    bucket, _, of = host.partition(":")[0].partition(".")
    return f"{slash}{bucket}/{rest}" if of == VIRTUAL_HOSTS else f"{slash}{rest}"


def _cut(request: web.BaseRequest, *, reset: bool = False) -> NoReturn:
    """End a connection, in good order or so that the client sees a reset."""
    transport = request.transport
    if transport is not None and reset:
        end = transport.get_extra_info("socket")
        with contextlib.suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()
    elif transport is not None:
        transport.close()
    raise asyncio.CancelledError
