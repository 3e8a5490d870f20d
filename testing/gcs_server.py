"""A server of the JSON API of Google Cloud Storage, in a thread, with the objects in memory.

It exists because no emulator on PyPI or npm serves the tests: gcp-storage-emulator and gcplocal
ignore ``ifGenerationMatch``, and the fake-gcs-server on PyPI (1.54) ignores it in uploads with
``uploadType=media``, which TensorStore sends. (Cloud Storage JSON API v1, resources Buckets and
Objects; "Request preconditions"; "Uploads and downloads".)
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote

from aiohttp import web

Query = dict[str, str]


@dataclass
class Stored:
    """An object: its content, its generation, and the time of writing."""

    data: bytes
    generation: int
    updated: str = field(default_factory=lambda: f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%fZ}")


@dataclass
class GcsServer:
    """The server, on a free port of 127.0.0.1; a context manager.

    Attributes:
        token: the bearer token that requests must have; empty: they need none.
        buckets: objects by bucket and name.
        endpoint_url: ``http://127.0.0.1:port``.
    """

    token: str = ""
    buckets: dict[str, dict[str, Stored]] = field(default_factory=dict)
    endpoint_url: str = ""

    @property
    def storage_options(self) -> dict[str, Any]:
        """The options of gcsfs for this server."""
        return {"endpoint_url": self.endpoint_url, "token": "anon"}

    def new_bucket(self) -> str:
        """Create a bucket with a name that no other has, and return the name."""
        self.buckets[name := f"shardstore-{uuid.uuid4().hex[:16]}"] = {}
        return name

    def __enter__(self) -> GcsServer:
        self._loop, self._numbers = asyncio.new_event_loop(), itertools.count(1)
        self._uploads: dict[str, tuple[str, str, Query, bytearray]] = {}
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(30)
        return self

    async def _start(self) -> None:
        app = web.Application(client_max_size=2**32)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.endpoint_url = "http://{}:{}".format(*self._runner.addresses[0])

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _answer(self, request: web.Request) -> web.Response:
        body, query = await request.read(), dict(request.query)
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return _error(401, "Unauthorized")
        parts = [unquote(part) for part in request.rel_url.raw_path.strip("/").split("/")]
        bucket, *rest = parts[parts.index("b") + 1 :]
        if bucket not in self.buckets:
            return _error(404, "The specified bucket does not exist.")
        objects, name = self.buckets[bucket], "/".join(rest[1:2])
        if parts[0] == "upload":
            return self._upload(request, bucket, query, body)
        if not name:
            return _listing(objects, query)
        if (found := objects.get(name)) is None:
            return _error(404, "No such object")
        if len(rest) > 2:  # o/NAME/rewriteTo/b/BUCKET/o/NAME
            return self._put(rest[4], rest[6], found.data, query, done=True)
        if not _holds(found, query):
            return _error(412, "conditionNotMet")
        if request.method == "DELETE":
            del objects[name]
            return web.Response(status=204)
        return _content(request, found) if "alt" in query else _json(_about(name, found))

    def _upload(self, request: web.Request, bucket: str, query: Query, body: bytes) -> web.Response:
        kind, ident = query["uploadType"], query.get("upload_id", "")
        if kind == "media":
            return self._put(bucket, query["name"], body, query)
        if kind == "multipart":
            boundary = request.headers["Content-Type"].partition("boundary=")[2].strip('"')
            _, about, content = body.split(f"--{boundary}".encode(), 2)
            data = content.split(b"\n\n", 1)[1].rpartition(f"\n--{boundary}--".encode())[0]
            return self._put(bucket, json.loads(about.split(b"\n\n", 1)[1])["name"], data, query)
        if not ident:
            ident = str(next(self._numbers))
            self._uploads[ident] = bucket, json.loads(body)["name"], query, bytearray()
            there = f"{self.endpoint_url}{request.path}?uploadType=resumable&upload_id={ident}"
            return web.Response(headers={"Location": there})
        self._uploads[ident][3].extend(body)
        bucket, name, first, whole = self._uploads[ident]
        total = request.headers.get("Content-Range", "*").rpartition("/")[2]
        if total == "*" or len(whole) < int(total):
            return web.Response(status=308, headers={"Range": f"bytes=0-{len(whole) - 1}"})
        return self._put(bucket, name, bytes(whole), first)

    def _put(self, bucket: str, name: str, data: bytes, query: Query, **more: Any) -> web.Response:
        if not _holds(self.buckets[bucket].get(name), query):
            return _error(412, "conditionNotMet")
        made = self.buckets[bucket][name] = Stored(data, next(self._numbers))
        return _json({**_about(name, made), **more})


def _holds(found: Stored | None, query: Query) -> bool:
    wanted = query.get("ifGenerationMatch")
    return wanted is None or int(wanted) == (found.generation if found else 0)


def _about(name: str, found: Stored) -> dict[str, Any]:
    numbers = {"generation": str(found.generation), "size": str(len(found.data))}
    return {"name": name, "updated": found.updated, "etag": str(found.generation), **numbers}


def _content(request: web.Request, found: Stored) -> web.Response:
    part, size = request.http_range, len(found.data)
    headers = {"X-Goog-Generation": str(found.generation)}
    if part.start is None:
        return web.Response(body=found.data, headers=headers)
    if part.start >= size:
        return _error(416, "Range Not Satisfiable")
    first, stop, _ = part.indices(size)
    headers["Content-Range"] = f"bytes {first}-{stop - 1}/{size}"
    return web.Response(status=206, body=found.data[first:stop], headers=headers)


def _listing(objects: dict[str, Stored], query: Query) -> web.Response:
    prefix, cut = query.get("prefix", ""), query.get("delimiter", "")
    found = {name: one for name, one in objects.items() if name.startswith(prefix)}
    below = {name for name in found if cut and cut in name[len(prefix) :]}
    prefixes = {prefix + name[len(prefix) :].partition(cut)[0] + cut for name in below}
    items = [_about(name, found[name]) for name in sorted(found.keys() - below)]
    return _json({"items": items, "prefixes": sorted(prefixes)})


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"code": status, "message": message}}, status=status)


def _json(document: object) -> web.Response:
    return web.json_response(document)
