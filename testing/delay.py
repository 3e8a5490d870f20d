"""A TCP forwarder in front of a server. Bytes of a client reach the server some milliseconds later.

It takes less processor time than a proxy that parses HTTP, which limits the measurements of many
small requests. It prints its address, and ends when its standard input is closed:

    python testing/delay.py http://127.0.0.1:9000 --latency-ms 50
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from urllib.parse import urlsplit


class _Server(asyncio.Protocol):
    """The connection to the server. Its bytes go to the client at once."""

    def __init__(self, client: asyncio.Transport) -> None:
        self._client = client

    def data_received(self, data: bytes) -> None:
        self._client.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._client.close()


class _Client(asyncio.Protocol):
    """A client's connection. Its bytes go to the server after the latency."""

    def __init__(self, host: str, port: int, latency_s: float) -> None:
        self._where, self._latency_s = (host, port), latency_s
        self._loop = asyncio.get_running_loop()
        self._early: list[bytes] = []
        self._server: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._connecting = self._loop.create_task(self._connect(transport))

    async def _connect(self, client: asyncio.Transport) -> None:
        self._server, _ = await self._loop.create_connection(lambda: _Server(client), *self._where)
        self._server.writelines(self._early)

    def data_received(self, data: bytes) -> None:
        self._loop.call_later(self._latency_s, self._send, data)

    def _send(self, data: bytes) -> None:
        if self._server is None:
            self._early.append(data)
        else:
            self._server.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self._server is not None:
            self._loop.call_later(self._latency_s, self._server.close)


async def _serve(host: str, port: int, latency_s: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Client(host, port, latency_s), "127.0.0.1", 0)
    async with server:
        print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
        await loop.run_in_executor(None, sys.stdin.read)


def main() -> None:
    """Forward until standard input is closed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("upstream_url")
    parser.add_argument("--latency-ms", type=float, default=0.0)
    arguments = parser.parse_args()
    where = urlsplit(arguments.upstream_url)
    assert where.hostname is not None
    assert where.port is not None
    asyncio.run(_serve(where.hostname, where.port, arguments.latency_ms / 1000))


if __name__ == "__main__":
    main()
