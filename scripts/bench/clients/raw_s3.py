"""The limit on an object store: the same bytes by plain puts and gets, one object a tensor.

Two clients, the faster of which is the limit: TensorStore's key-value store and obstore, both
with as many requests at a time as shardstore has where all objects are large, or all small. No
condition, no checksum, no commit. Endpoint and credentials come from the environment.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from bench.clients.base import Share, raw_bytes

CONCURRENCY, SMALL_CONCURRENCY = 32, 160
AT_ONCE = f"{CONCURRENCY} requests at a time, {SMALL_CONCURRENCY} where all are below 1 MiB"
DOCUMENT = memoryview(b" " * 700)
"""About what the document of a Zarr array takes."""

Part = tuple[str, memoryview]


def _parts(share: Share) -> list[Part]:
    if share.world != 1:
        raise NotImplementedError("plain puts are measured in a world of one")
    return [(key, raw_bytes(tensor)) for key, tensor in share.tensors.items()]


def _objects(parts: list[Part], documents: int) -> list[Part]:
    """What is put: the parts, each with so many small documents."""
    more = [(f"{key}.json{n}", DOCUMENT) for key, _ in parts for n in range(documents)]
    return [*parts, *more]


def _at_once(parts: list[Part]) -> int:
    """How many requests at a time."""
    small = all(len(memory) < 1024 * 1024 for _, memory in parts)
    return SMALL_CONCURRENCY if small else CONCURRENCY


def _bucket_and_prefix(url: str) -> tuple[str, str]:
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    return bucket, prefix


class TensorStorePuts:
    """TensorStore's s3 driver at the key-value level."""

    def __init__(self, documents: int = 0) -> None:
        self._documents = documents
        self.settings = f"tensorstore KvStore, {AT_ONCE}, unconditional, no checksum"

    def prepare(self, share: Share) -> list[Part]:
        """Name and memory of each tensor."""
        return _parts(share)

    def save(self, prepared: list[Part], path: str, sync: bool) -> None:
        """One put a tensor, and one a document."""
        most = _at_once(prepared)
        store, pending = self._open(path, most), deque[Any]()
        for name, memory in _objects(prepared, self._documents):
            if len(pending) >= most:
                pending.popleft().result()
            pending.append(store.write(name, bytes(memory)))
        for future in pending:
            future.result()

    def load(self, prepared: list[Part], path: str) -> None:
        """One get a tensor, copied into its memory."""
        most = _at_once(prepared)
        store, pending = self._open(path, most), deque[tuple[memoryview, Any]]()

        def land() -> None:
            memory, future = pending.popleft()
            memory[:] = future.result().value

        for name, memory in prepared:
            if len(pending) >= most:
                land()
            pending.append((memory, store.read(name)))
        while pending:
            land()

    def _open(self, url: str, most: int) -> Any:
        import tensorstore as ts

        bucket, prefix = _bucket_and_prefix(url)
        return ts.KvStore.open(
            {
                "driver": "s3",
                "bucket": bucket,
                "path": f"{prefix}/",
                "endpoint": os.environ["AWS_ENDPOINT_URL"],
                "aws_region": os.environ["AWS_REGION"],
                "aws_credentials": {"type": "environment"},
                "context": {"s3_request_concurrency": {"limit": most}},
            }
        ).result()


class ObstorePuts:
    """obstore, the object_store library of Rust."""

    def __init__(self, documents: int = 0) -> None:
        import obstore  # noqa: F401 (absent where it is not installed)

        self._documents = documents
        self.settings = (
            f"obstore, {AT_ONCE}, unconditional, no checksum, "
            "signatures without a hash of the content"
        )

    def prepare(self, share: Share) -> list[Part]:
        """Name and memory of each tensor."""
        return _parts(share)

    def save(self, prepared: list[Part], path: str, sync: bool) -> None:
        """One put a tensor, and one a document."""
        import obstore

        store = self._open(path)

        async def put(part: Part) -> None:
            await obstore.put_async(store, part[0], part[1], use_multipart=False)

        self._each(put, _objects(prepared, self._documents), _at_once(prepared))

    def load(self, prepared: list[Part], path: str) -> None:
        """One get a tensor, copied into its memory."""
        import obstore

        store = self._open(path)

        async def get(part: Part) -> None:
            answer = await obstore.get_async(store, part[0])
            part[1][:] = memoryview(await answer.bytes_async()).cast("B")

        self._each(get, prepared, _at_once(prepared))

    def _each(
        self, action: Callable[[Part], Awaitable[None]], parts: list[Part], most: int
    ) -> None:
        async def run() -> None:
            free = asyncio.Semaphore(most)

            async def one(part: Part) -> None:
                async with free:
                    await action(part)

            await asyncio.gather(*map(one, parts))

        asyncio.run(run())

    def _open(self, url: str) -> Any:
        from obstore.store import S3Store

        bucket, prefix = _bucket_and_prefix(url)
        return S3Store(
            bucket,
            prefix=prefix,
            endpoint=os.environ["AWS_ENDPOINT_URL"],
            region=os.environ["AWS_REGION"],
            access_key_id=os.environ["AWS_ACCESS_KEY_ID"],
            secret_access_key=os.environ["AWS_SECRET_ACCESS_KEY"],
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
            unsigned_payload=True,
        )
