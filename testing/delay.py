"""A TCP forwarder in front of a server. Bytes of a client reach the server some milliseconds later.

It counts requests without parsing HTTP, so it takes less processor time than `testing.s3_proxy`,
which would limit the measurements of many small requests.
"""

from __future__ import annotations

import asyncio
import threading
from urllib.parse import urlsplit


class Forwarder:
    """A forwarder on a free port of 127.0.0.1, in a thread of its own; a context manager.

    Attributes:
        url: what clients are given in place of the server's address.
        requests: heads of HTTP requests that passed.
    """

    def __init__(self, upstream_url: str, latency_s: float) -> None:
        where = urlsplit(upstream_url)
        self.where = where.hostname or "", where.port or 80
        self.latency_s, self.requests = latency_s, 0
        self.loop = asyncio.new_event_loop()
        serving = self.loop.create_server(lambda: _Client(self), "127.0.0.1", 0)
        self._server = self.loop.run_until_complete(serving)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    def __enter__(self) -> Forwarder:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self._server.close()


class _Server(asyncio.Protocol):
    """The connection to the server. Its bytes go to the client at once."""

    def __init__(self, client: asyncio.Transport) -> None:
        self.data_received, self._client = client.write, client  # type: ignore[method-assign]

    def connection_lost(self, error: Exception | None) -> None:
        self._client.close()


class _Client(asyncio.Protocol):
    """A client's connection. Its bytes go to the server after the latency."""

    def __init__(self, forwarder: Forwarder) -> None:
        self._forwarder = forwarder
        self._early: list[bytes] = []
        self._server: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connecting = self._forwarder.loop.create_task(self._connect(transport))

    async def _connect(self, client: asyncio.BaseTransport) -> None:
        assert isinstance(client, asyncio.Transport)
        connecting = self._forwarder.loop.create_connection(
            lambda: _Server(client), *self._forwarder.where
        )
        self._server, _ = await connecting
        self._server.writelines(self._early)

    def data_received(self, data: bytes) -> None:
        self._forwarder.requests += data.count(b" HTTP/1.1\r\n")
        self._forwarder.loop.call_later(self._forwarder.latency_s, self._send, data)

    def _send(self, data: bytes) -> None:
        if self._server is None:
            self._early.append(data)
        else:
            self._server.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self._server is not None:
            self._forwarder.loop.call_later(self._forwarder.latency_s, self._server.close)
