"""The limit on an object store: the same bytes by plain puts and gets, one object a tensor.

Two clients, the faster of which is the limit: TensorStore's key-value store and obstore, both
with as many requests at a time as shardstore has where all objects are large, or all small. No
condition, no checksum, no commit. Endpoint and credentials come from the environment.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from itertools import accumulate
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
        return _obstore(f"s3://{bucket}/{prefix}")

    async def _put(self, store: Any, name: str, memory: memoryview) -> None:
        import obstore

        await obstore.put_async(store, name, memory, use_multipart=False)

    async def _get(self, store: Any, name: str, memory: memoryview) -> None:
        import obstore

        answer = await obstore.get_async(store, name)
        memory[:] = memoryview(await answer.bytes_async()).cast("B")


class Multipart:
    """An object for what all ranks hold, and one for each rank's own, by uploads of several parts;
    loads get the range of each tensor."""

    PART_BYTES = 16 * 2**20

    def __init__(self, *, signed: bool = False) -> None:
        how = "with" if signed else "without"
        self.settings = (
            f"obstore, one upload a rank in parts of 16 MiB, {CONCURRENCY} requests at a time, "
            f"signatures {how} a hash of the content"
        )
        self._signed = signed

    def prepare(self, share: Share) -> dict[str, tuple[bool, list[memoryview]]]:
        """By object: whether this rank writes it, and the memory of its tensors."""
        own = f"rank-{share.rank}"
        objects = {own: (True, list[memoryview]()), "all": (share.rank == 0, list[memoryview]())}
        for entry in share.entries:
            name = "all" if entry.replicated else own
            objects[name][1].append(raw_bytes(share.tensors[entry.key]))
        return objects

    def save(
        self, prepared: dict[str, tuple[bool, list[memoryview]]], path: str, sync: bool
    ) -> None:
        """Put the objects."""
        import obstore

        size, store = self.PART_BYTES, _obstore(path, signed=self._signed)
        for name, (writes, memories) in prepared.items():
            parts = [m[start : start + size] for m in memories for start in range(0, len(m), size)]
            if writes:
                obstore.put(
                    store,
                    name,
                    iter(parts),
                    use_multipart=True,
                    chunk_size=size,
                    max_concurrency=CONCURRENCY,
                )

    def load(self, prepared: dict[str, tuple[bool, list[memoryview]]], path: str) -> None:
        """Get the ranges."""
        import obstore

        store = _obstore(path)
        for name, (_, memories) in prepared.items():
            sizes = [len(memory) for memory in memories]
            starts = [stop - size for stop, size in zip(accumulate(sizes), sizes, strict=True)]
            found = obstore.get_ranges(store, name, starts=starts, lengths=sizes, coalesce=0)
            for memory, data in zip(memories, found, strict=True):
                memory[:] = memoryview(data).cast("B")


def _obstore(url: str, *, signed: bool = False) -> Any:
    """A store of obstore for a URL."""
    from obstore.store import S3Store

    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    return S3Store(
        bucket,
        prefix=prefix,
        endpoint=os.environ["AWS_ENDPOINT_URL"],
        region=os.environ["AWS_REGION"],
        access_key_id=os.environ["AWS_ACCESS_KEY_ID"],
        secret_access_key=os.environ["AWS_SECRET_ACCESS_KEY"],
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
        unsigned_payload=not signed,
    )
