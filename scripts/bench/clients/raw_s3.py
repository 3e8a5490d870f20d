"""The limit on an object store: the same bytes by plain puts and gets, one object a tensor.

Two clients, the faster of which is the limit: TensorStore's key-value store and obstore, both
with as many requests at a time as shardstore has where all objects are large, or all small. No
condition, no checksum, no commit. Endpoint and credentials come from the environment.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

from bench.clients.base import Share, raw_bytes

CONCURRENCY, SMALL_CONCURRENCY = 32, 160
AT_ONCE = f"{CONCURRENCY} requests at a time, {SMALL_CONCURRENCY} where all are below 1 MiB"
DOCUMENT = memoryview(b" " * 700)
"""About what the document of a Zarr array takes."""

Part = tuple[str, memoryview]


class Puts:
    """One put a tensor, and one a document; one get a tensor, copied into its memory."""

    def __init__(self, documents: int = 0) -> None:
        self._documents = documents

    def prepare(self, share: Share) -> list[Part]:
        """Name and memory of each tensor."""
        if share.world != 1:
            raise NotImplementedError("plain puts are measured in a world of one")
        return [(key, raw_bytes(tensor)) for key, tensor in share.tensors.items()]

    def save(self, prepared: list[Part], path: str, sync: bool) -> None:
        """Put each part, with its documents."""
        more = [(f"{key}.json{n}", DOCUMENT) for key, _ in prepared for n in range(self._documents)]
        self._each(path, self._put, [*prepared, *more])

    def load(self, prepared: list[Part], path: str) -> None:
        """Get each part."""
        self._each(path, self._get, prepared)

    def _each(
        self, url: str, action: Callable[[Any, str, memoryview], Awaitable[None]], parts: list[Part]
    ) -> None:
        small = all(len(memory) < 2**20 for _, memory in parts)
        most = SMALL_CONCURRENCY if small else CONCURRENCY
        bucket, _, prefix = url.removeprefix("s3://").partition("/")

        async def run() -> None:
            store, free = self._open(bucket, prefix, most), asyncio.Semaphore(most)

            async def one(name: str, memory: memoryview) -> None:
                async with free:
                    await action(store, name, memory)

            await asyncio.gather(*(one(*part) for part in parts))

        asyncio.run(run())

    def _open(self, bucket: str, prefix: str, most: int) -> Any:
        raise NotImplementedError

    async def _put(self, store: Any, name: str, memory: memoryview) -> None:
        raise NotImplementedError

    async def _get(self, store: Any, name: str, memory: memoryview) -> None:
        raise NotImplementedError


class TensorStorePuts(Puts):
    """TensorStore's s3 driver at the key-value level."""

    settings = f"tensorstore KvStore, {AT_ONCE}, unconditional, no checksum"

    def _open(self, bucket: str, prefix: str, most: int) -> Any:
        import tensorstore as ts

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

    async def _put(self, store: Any, name: str, memory: memoryview) -> None:
        await store.write(name, bytes(memory))

    async def _get(self, store: Any, name: str, memory: memoryview) -> None:
        memory[:] = (await store.read(name)).value


class ObstorePuts(Puts):
    """obstore, the object_store library of Rust."""

    settings = (
        f"obstore, {AT_ONCE}, unconditional, no checksum, signatures without a hash of the content"
    )

    def __init__(self, documents: int = 0) -> None:
        import obstore  # noqa: F401 (absent where it is not installed)

        super().__init__(documents)

    def _open(self, bucket: str, prefix: str, most: int) -> Any:
        from obstore.store import S3Store

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

    async def _put(self, store: Any, name: str, memory: memoryview) -> None:
        import obstore

        await obstore.put_async(store, name, memory, use_multipart=False)

    async def _get(self, store: Any, name: str, memory: memoryview) -> None:
        import obstore

        answer = await obstore.get_async(store, name)
        memory[:] = memoryview(await answer.bytes_async()).cast("B")
