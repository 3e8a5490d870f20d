"""A web server for the files of a folder, which reads ranges; it may demand credentials, redirect,
and answer as the Hugging Face Hub does.

``/ORG/MODEL/resolve/REVISION/NAME`` of the Hub is redirected to ``/cdn/NAME`` with a signature. All
paths are there below ``/mirror`` too.
"""

from __future__ import annotations

import base64
import re
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

SIGNATURE = "signature-of-the-network"


@dataclass
class RangeServer:
    """A running server.

    Attributes:
        folder: its files, below ``/model``.
        url: ``http://127.0.0.1:port``.
        user, password: of basic authentication, if demanded.
        query: the query string that a request must have.
        token: the token that requests to the Hub must have.
        kind: that of the Hub's repository.
        revision: its only branch.
        commits: hash of a commit -> its files; the last one is that of the branch. Without any,
            the server answers as one that lacks the interface that tells of it.
        host: that of the server which the Hub redirects to. On its own it asks for the token too.
        ignores_ranges: whole files are sent.
        shifts_ranges: ranges are sent from the beginning of the file.
        cuts: how many answers of each request end in their middle, before a whole one.
        busy: status of the refusals, and how many there are of each request before an answer.
        refusal: headers of the refusals.
        expires_after: how many requests a signature is good for.
        uses: requests with each signature.
        signed: the files of each signature.
        refused: requests without a signature, with one that expired, or with the wrong token.
        requests: method, path and range of each request.
        authorizations: the header of each request.
    """

    folder: Path
    url: str = ""
    user: str = ""
    password: str = ""
    query: str = ""
    token: str = ""
    kind: str = "models"
    revision: str = "main"
    commits: dict[str, Path] = field(default_factory=dict)
    host: str = "localhost"
    ignores_ranges: bool = False
    shifts_ranges: bool = False
    cuts: int = 0
    busy: tuple[int, int] = (0, 0)
    refusal: dict[str, str] = field(default_factory=dict)
    expires_after: int = 1000
    uses: dict[str, int] = field(default_factory=dict)
    signed: dict[str, Path] = field(default_factory=dict)
    refused: int = 0
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    authorizations: list[str] = field(default_factory=list)

    def sent_bytes(self, suffix: str) -> int:
        """Bytes of the ranges asked for of files whose names end so."""
        spans = [
            re.fullmatch(r"bytes=(\d+)-(\d+)", part)
            for method, path, part in self.requests
            if method == "GET" and path.endswith(suffix)
        ]
        return sum(int(found[2]) + 1 - int(found[1]) for found in spans if found)


class Quiet(BaseHTTPRequestHandler):
    """A handler that logs nothing."""

    protocol_version = "HTTP/1.1"
    cut = False
    """Whether the next answer ends in its middle."""

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def end(self, status: int, headers: Mapping[str, str] | None = None, data: bytes = b"") -> None:
        """Answer; a HEAD without the data."""
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if self.cut else data)
        self.close_connection |= self.cut


@contextmanager
def answering(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Let a handler answer, and give the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def range_server(folder: Path) -> Iterator[RangeServer]:
    """Serve a folder."""
    about = RangeServer(folder)

    class Handler(_Handler):
        server_about = about

    with answering(Handler) as about.url:
        yield about


class _Handler(Quiet):
    server_about: RangeServer

    def do_GET(self) -> None:
        about, parts = self.server_about, urlsplit(self.path.removeprefix("/mirror"))
        path, asked = unquote(parts.path), self.headers.get("Range", "")
        about.requests.append((self.command, path, asked))
        about.authorizations.append(self.headers.get("Authorization", ""))
        self.cut = bool(asked) and about.requests.count(about.requests[-1]) <= about.cuts
        status, times = about.busy
        if about.requests.count(about.requests[-1]) <= times:
            self.end(status, about.refusal)
            return
        if path == f"/api/{about.kind}/org/tiny/revision/{about.revision}":
            sha = [*about.commits][-1:]
            self.end(
                200, data=b'{"sha": "%s", "id": "org/tiny"}' % sha[0].encode() if sha else b"<"
            )
            return
        above = "" if about.kind == "models" else f"/{about.kind}"
        if found := re.fullmatch(above + r"/org/tiny/resolve/([^/]+)/(.+)", parts.path):
            self._of_hub(*map(unquote, found.groups()))
            return
        is_hub = path.startswith("/cdn/")
        name = path.removeprefix("/cdn/").removeprefix("/model/")
        file = about.signed.get(parts.query, about.folder) / name
        if is_hub and not self._is_signed(parts.query):
            self.end(403)
        elif not is_hub and not self._is_allowed(parts.query):
            self.end(401)
        elif "/" in name or not file.is_file():
            self.end(404)
        else:
            self._send(file.read_bytes(), asked)

    do_HEAD = do_GET  # noqa: N815 (its name)

    def _is_allowed(self, query: str) -> bool:
        about = self.server_about
        expected = base64.b64encode(f"{about.user}:{about.password}".encode()).decode()
        if about.user and self.headers.get("Authorization") != f"Basic {expected}":
            return False
        return parse_qsl(query) == parse_qsl(about.query)

    def _is_signed(self, query: str) -> bool:
        about = self.server_about
        about.uses[query] = about.uses.get(query, about.expires_after) + 1
        has_token = about.token if about.host in about.url else ""
        is_allowed = self.headers.get("Authorization", "").removeprefix("Bearer ") == has_token
        about.refused += not (good := about.uses[query] <= about.expires_after and is_allowed)
        return good

    def _of_hub(self, revision: str, name: str) -> None:
        about = self.server_about
        if about.token and self.headers.get("Authorization") != f"Bearer {about.token}":
            self.end(401)
            return
        newest = next(reversed(about.commits.values()), about.folder)
        folder = newest if revision == about.revision else about.commits.get(revision)
        if folder is None or not (folder / name).is_file():
            self.end(404)
        else:
            port = about.url.rpartition(":")[2]
            query = f"sig={SIGNATURE}{secrets.token_hex(4)}"
            about.uses[query] = 0
            target = f"http://{about.host}:{port}/cdn/{name}?{query}"
            about.signed[query] = folder
            self.end(302, {"Location": target})

    def _send(self, data: bytes, asked: str) -> None:
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", asked)
        headers, status = {"ETag": f'"{len(data)}"'}, 200
        if found and not self.server_about.ignores_ranges:
            start, stop = int(found[1]), min(int(found[2]) + 1, len(data))
            if self.server_about.shifts_ranges:
                start, stop = 0, stop - start
            if start >= len(data):
                self.end(416)
                return
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
            data, status = data[start:stop], 206
        self.end(status, headers, data)
