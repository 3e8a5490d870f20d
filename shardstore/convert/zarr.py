"""Zarr checkpoints as source (also Megatron-Core's zarr backend) and target of a conversion."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any

from shardstore.convert.formats import Arrays, Extras, Receipts, Target
from shardstore.core import CONFIG_FNAME
from shardstore.errors import StorageError
from shardstore.inspection import opened
from shardstore.storage.commit import checkpoints, folder
from shardstore.storage.commit.attempt import Attempt
from shardstore.storage.commit.publish import About, Files, note_arrays, publish
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import SEPARATOR, ArrayMeta
from shardstore.storage.format.grid import DEFAULT_TARGET_CHUNK_BYTES, Box, Grid, grid_of
from shardstore.storage.format.manifest import ChunkRecord, RankManifest
from shardstore.storage.format.names import COMMON_STATE_NAME, node_name
from shardstore.storage.movers.chunks import ChunkWrite, RegionRead
from shardstore.storage.movers.mover import Mover
from shardstore.storage.options import SaveOptions
from shardstore.storage.stores.location import Location
from shardstore.values.record import BACKEND, MEMBER, VERSION, StateRecord


class ZarrSource:
    """Checkpoints of this package, and of Megatron-Core's zarr backend."""

    def __init__(self, place: Location) -> None:
        self._place = place
        self._ckpt = opened.open(place)
        if (root := self._ckpt.stored.root) is not None and not root.is_summed:
            self._ckpt.stored.check_root()
        for meta in self._ckpt.metas.values():
            self._ckpt.stored.require_chunks(meta)
        self.arrays = self._ckpt.metas
        self.read = self._ckpt.read

    def boxes(self, key: str) -> list[Box]:
        """Return one box for each shard; for each chunk if the shards are unknown or outnumber the
        chunks."""
        meta = self.arrays[key]
        shards = Grid(meta.shape, meta.shard_shape or meta.grid.chunk_shape)
        grid = min(shards, meta.grid, key=lambda grid: grid.size)
        return [grid.box(grid.index_at(i)) for i in range(grid.size)]

    def extras(self) -> Extras:
        """Return the common part as stored, and the sharded objects."""
        ckpt = self._ckpt
        attributes = {name: v for name, v in ckpt.attrs.items() if name != "shardstore"}
        record = StateRecord.from_root(ckpt.attrs, ckpt.url)
        objects = {key: partial(ckpt.objects.__getitem__, key) for key in ckpt.objects}
        if record is not None:
            # Their files are listed with the sharded objects.
            return Extras(None, StateRecord(record.paths, record.values), objects, attributes)
        common = None
        with suppress(FileNotFoundError):
            common = ckpt.stored.document(COMMON_STATE_NAME)
            from shardstore.strategies.common import require_same_content  # imports torch

            ckpt.stored.check_file(COMMON_STATE_NAME, common)
            require_same_content(ckpt.stored, common)
        return Extras(common, objects=objects, attributes=attributes)

    def identity(self) -> list[Any]:
        """Return stamps of the root documents."""
        return [self._place.stamp(name) for name in ("zarr.json", CONFIG_FNAME)]


class ShardstoreTarget(Target):
    """A checkpoint of this package, written as an attempt at the target like every save.

    A later run continues the attempt unless another writer has claimed the target.

    Args:
        goal: path or URL of the finished checkpoint.
        source: name of the source's format, for the commit record.
        overwrite: replace a checkpoint at the target.
        budget_bytes: memory for chunks that are being written.
    """

    _attempt: Attempt
    _arrays: dict[str, ArrayMeta]
    _extras: Extras

    def __init__(self, goal: Location, source: str, overwrite: bool, budget_bytes: int) -> None:
        self._goal, self._source = goal, source
        self._options = SaveOptions(overwrite=overwrite, budget_bytes=budget_bytes)
        self._manifest = RankManifest(0)
        self._started = perf_counter()

    def start(self, left: Any) -> Any:
        """Abandon the attempt of an earlier run, begin a new one, and return its id."""
        if left is not None and self._goal.is_local and (old := folder.resumed(self._goal, left)):
            old.abandon()
        self._attempt = checkpoints.begin(self._goal, self._options)
        return self._attempt.id

    def resume(self, state: Any) -> bool:
        """Continue the attempt if it exists and owns the target; return whether it does."""
        if self._goal.is_local:
            found = folder.resumed(self._goal, state, overwrite=self._options.overwrite)
            self._attempt = found or self._attempt
            return found is not None
        self._attempt = checkpoints.join(self._goal, state, self._options)
        try:
            self._attempt.check()
        except StorageError:
            return False
        return True

    def array(self, meta: ArrayMeta, boxes: Sequence[Box], most_bytes: int) -> ArrayMeta:
        """Return the tensor on a grid whose chunks cross few or no shard borders of the source."""
        size = dtypes.itemsize(meta.dtype)
        most = min(DEFAULT_TARGET_CHUNK_BYTES, most_bytes)
        grid, edges, straddled = grid_of(meta.shape, boxes, size, most)
        return ArrayMeta(
            meta.key,
            node_name(meta.key),
            grid,
            meta.dtype,
            separator=SEPARATOR,
            shard_shape=None if straddled else edges,
        )

    def begin(self, arrays: Arrays, extras: Extras, known: Receipts) -> Receipts:
        """Write the common part and the sharded objects."""
        self._extras, self._arrays = extras, {meta.key: meta for meta in arrays}
        note_arrays(self._manifest, [(meta, True) for meta in arrays])
        files = Files(self._attempt, self._manifest, self._options.budget_bytes)
        for name, data in self._files(extras):
            files.put(name, data)
        files.flush()
        return known

    def _files(self, extras: Extras) -> Iterator[tuple[str, bytes]]:
        """Yield names and contents of ``common.pt`` and of the sharded objects' files."""
        if extras.common is not None:
            yield COMMON_STATE_NAME, extras.common
        if extras.objects:
            from shardstore.mapping import ShardedObject
            from shardstore.strategies.common import object_document, value_document

            # With a JSON record, the objects may be values that are too long for it.
            document = value_document if extras.common is None else object_document
            for key, value in extras.objects.items():
                sharded = ShardedObject.empty_from_unique_key(key)
                sharded.data = value()
                yield document(sharded)

    def write(self, chunks: Sequence[ChunkWrite]) -> list[Any]:
        """Write chunks and return their manifest records as receipts."""
        found: Receipts = {}

        def done(item: ChunkWrite, record: ChunkRecord) -> None:
            running = [int(n) for n in record.running]
            receipt = [record.stored_bytes, record.crc, record.digest.hex(), running]
            found[item.array.key, tuple(item.index)] = receipt

        mover = Mover(self._attempt.location, self._options, self._attempt)
        mover.write(chunks, done)
        return [found[chunk.array.key, chunk.index] for chunk in chunks]

    def finish(self, receipts: Receipts) -> None:
        """Add the chunks to the manifest."""
        for (key, index), (stored, crc, digest, running) in receipts.items():
            record = ChunkRecord(stored, crc, bytes.fromhex(digest), running)
            self._manifest.add_chunk(self._arrays[key], index, record)

    def read(self, reads: Sequence[RegionRead]) -> None:
        """Read regions of the written tensors, and verify their checksums."""
        Mover(self._attempt.location, self._options).read(reads)

    def documents(self, extras: Extras) -> Iterator[tuple[str, bytes, bytes]]:
        """Yield name, expected bytes and stored bytes of each file, and of the root document's
        record, which the commit writes."""
        for name, data in self._files(extras):
            found = b""
            with suppress(FileNotFoundError):
                found = self._attempt.location.read(name)
            yield name, data, found
        wanted, own = (json.dumps(_record(one)).encode() for one in (extras, self._extras))
        yield "zarr.json", wanted, own

    def publish(self) -> None:
        """Write the root document and commit."""
        extras = self._extras
        record: dict[str, Any] = {"converted_from": self._source}
        backend = ("torch", 1)
        if extras.common is None:
            backend = (BACKEND, VERSION)
            record[MEMBER] = _record(extras)
        seconds = perf_counter() - self._started
        self._manifest.seconds = {"write": seconds}
        about_root = About(
            common_backend=backend, attributes=extras.attributes, record=record, seconds=seconds
        )
        publish(self._attempt, self._options, [self._manifest], about_root)


def _record(extras: Extras) -> dict[str, Any]:
    files = sorted(key.rpartition("/")[0] for key in extras.objects)
    return StateRecord(extras.record.paths, extras.record.values, files).to_json()
