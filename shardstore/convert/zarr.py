"""Zarr checkpoints as source (also Megatron-Core's zarr backend) and target of a conversion.

On a disk the target grows in a work folder. In an object store it is an attempt at the target
itself, like every save; a later run continues it unless another writer has claimed the target.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any

from shardstore.convert.interfaces import Extras, Reader, Receipt, Target, Written, stamps
from shardstore.core import CONFIG_FNAME
from shardstore.errors import DamagedCheckpointError, StorageError
from shardstore.inspection import opened
from shardstore.storage import arrays as stored_arrays
from shardstore.storage.commit import checkpoints
from shardstore.storage.commit.attempt import Attempt
from shardstore.storage.commit.folder import OWNER_NAME, FolderAttempt
from shardstore.storage.commit.publish import About, note_arrays, publish
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import SEPARATOR, ArrayMeta
from shardstore.storage.format.grid import DEFAULT_TARGET_CHUNK_BYTES, Box, Grid, grid_of
from shardstore.storage.format.manifest import ChunkRecord, RankManifest
from shardstore.storage.format.names import COMMON_STATE_NAME, node_name
from shardstore.storage.movers.chunks import ChunkWrite, RegionRead
from shardstore.storage.options import SaveOptions
from shardstore.storage.stores.location import Location
from shardstore.values.record import BACKEND, MEMBER, VERSION, StateRecord

__all__ = ["ShardstoreTarget", "ZarrSource"]


class ZarrSource:
    """Checkpoints of this package, and of Megatron-Core's zarr backend."""

    def __init__(self, place: Location) -> None:
        self._place = place
        self._ckpt = opened.open(place)
        self.arrays = self._ckpt.metas
        self.read = self._ckpt.read

    def boxes(self, key: str) -> list[Box]:
        """One box a shard, or a chunk where shards are not known."""
        meta = self.arrays[key]
        grid = Grid(meta.shape, meta.shard_shape or meta.grid.chunk_shape)
        return [grid.box(grid.index(i)) for i in range(grid.size)]

    def extras(self) -> Extras:
        """The common part as it is, and sharded objects."""
        ckpt = self._ckpt
        attributes = {name: v for name, v in ckpt.attributes.items() if name != "shardstore"}
        record = StateRecord.from_root(ckpt.attributes, ckpt.url)
        objects: dict[str, Callable[[], Any]] = {}
        if record is None or record.files:
            objects = {key: partial(ckpt.objects.__getitem__, key) for key in ckpt.objects}
        if record is not None:
            # Their files are listed with the sharded objects.
            return Extras(None, StateRecord(record.paths, record.values), objects, attributes)
        common = None
        if self._place.exists(COMMON_STATE_NAME):
            common = self._place.read(COMMON_STATE_NAME)
        return Extras(common, objects=objects, attributes=attributes)

    def identity(self) -> list[Any]:
        """What its documents are."""
        return stamps(self._place, ("zarr.json", CONFIG_FNAME))


class ShardstoreTarget(Target):
    """A checkpoint of this package.

    Args:
        work: folder beside a local target; it is not used in an object store.
        goal: where the checkpoint shall be.
        source: name of the source's format, for the record.
        overwrite: a checkpoint at the target may be replaced.
        budget_bytes: memory for chunks on their way to a store.
    """

    def __init__(
        self,
        work: Location,
        goal: Location,
        *,
        source: str,
        overwrite: bool,
        budget_bytes: int,
    ) -> None:
        super().__init__(work, goal)
        self._options = SaveOptions(overwrite=overwrite, budget_bytes=budget_bytes)
        self._manifest = RankManifest(0)
        self._attempt: Attempt = FolderAttempt(goal, "convert", overwrite, folder=work)
        self._source = source
        self._files: dict[str, str] = {}
        self._started = perf_counter()

    def start(self) -> Any:
        """An empty work folder, or a new attempt."""
        if self._goal.is_local:
            self._work.delete()
            self._work.write(OWNER_NAME, b"{}")
            return None
        self._attempt = checkpoints.begin(self._goal, self._options)
        return self._attempt.id

    def resume(self, state: Any) -> bool:
        """Go on in the folder, or with the attempt if it still owns the target."""
        if self._goal.is_local:
            return super().resume(state)
        self._attempt = checkpoints.join(self._goal, str(state), self._options)
        try:
            self._attempt.check()
        except StorageError:
            return False
        return True

    def array(self, meta: ArrayMeta, boxes: Sequence[Box], most_bytes: int) -> ArrayMeta:
        """Chunks that straddle no shard of the source."""
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

    def begin(self, arrays: Sequence[ArrayMeta], extras: Extras) -> None:
        """Array documents, and what is no tensor."""
        super().begin(arrays, extras)
        created = note_arrays(self._manifest, [(meta, True) for meta in arrays])
        if not self._attempt.defers_documents:
            stored_arrays.write_documents(self._attempt, self._options, created)
        if extras.objects:
            self._put_objects(extras.objects)
        if extras.common is not None:
            self._put(COMMON_STATE_NAME, extras.common)

    def _put_objects(self, objects: Mapping[str, Callable[[], Any]]) -> None:
        from shardstore.mapping import ShardedObject
        from shardstore.strategies.common import object_document, value_document

        # Beside a record in JSON they may be values that are too long for it.
        document = value_document if self._extras.common is None else object_document
        for key, value in objects.items():
            sharded = ShardedObject.empty_from_unique_key(key)
            sharded.data = value()
            name, data = document(sharded)
            self._put(name, data)
            self._files[key] = name

    def _put(self, name: str, data: bytes) -> None:
        self._attempt.put(name, data)
        self._manifest.add_file(name, data)

    def write(self, chunks: Sequence[Written]) -> list[Receipt]:
        """Write chunks; their records are the receipts."""
        found: dict[tuple[str, tuple[int, ...]], ChunkRecord] = {}

        def done(item: ChunkWrite, record: ChunkRecord) -> None:
            found[item.array.key, tuple(item.index)] = record

        mover = stored_arrays.mover_for(self._attempt.location, self._options, self._attempt)
        mover.write([ChunkWrite(c.array, c.index, c.data) for c in chunks], done)
        receipts = []
        for chunk in chunks:
            record = found[chunk.array.key, chunk.index]
            self._manifest.add_chunk(chunk.array, chunk.index, record)
            running = [int(n) for n in record.running]
            receipts.append([record.stored_bytes, record.crc, record.digest.hex(), running])
        return receipts

    def restore(self, array: ArrayMeta, index: tuple[int, ...], receipt: Receipt) -> bool:
        """Add a row to the manifest."""
        stored, crc, digest, running = receipt
        record = ChunkRecord(stored, crc, bytes.fromhex(digest), running)
        self._manifest.add_chunk(array, index, record)
        return True

    def read_back(self) -> Reader:
        """Chunks are read with their checksums verified, values from their files."""
        return self

    def read(self, reads: Sequence[RegionRead]) -> None:
        """Read regions of what was written."""
        mover = stored_arrays.mover_for(self._attempt.location, self._options, self._attempt)
        mover.read(reads, lambda: None)

    def extras(self) -> Extras:
        """From their files. Plain values are still to be written, with the commit: as they will
        be."""
        extras = self._extras
        objects = {key: partial(self._value, key) for key in extras.objects}
        if extras.common is not None:
            return Extras(self._file(COMMON_STATE_NAME), objects=objects)
        record = json.loads(json.dumps(self._record().to_json()))
        paths = {key: tuple(path) for key, path in record["paths"].items()}
        return Extras(None, StateRecord(paths, record["values"]), objects)

    def _value(self, key: str) -> Any:
        from shardstore.strategies.common import load_file

        name = self._files[key]
        return load_file(name, self._file(name), f"{self._attempt.location.url}/{name}", key)

    def _file(self, name: str) -> bytes:
        try:
            return self._attempt.location.read(name)
        except FileNotFoundError:
            url = f"{self._attempt.location.url}/{name}"
            raise DamagedCheckpointError(
                f"{url}, which was written, is not there; convert again with resume=False",
                url=url,
            ) from None

    def _record(self) -> StateRecord:
        extras = self._extras
        files = sorted(key.rpartition("/")[0] for key in extras.objects)
        return StateRecord(extras.record.paths, extras.record.values, files)

    def publish(self) -> None:
        """Root document and commit."""
        extras = self._extras
        record: dict[str, Any] = {"converted_from": self._source}
        backend = ("torch", 1)
        if extras.common is None:
            backend = (BACKEND, VERSION)
            record[MEMBER] = self._record().to_json()
        seconds = perf_counter() - self._started
        self._manifest.seconds = {"write": seconds}
        about_root = About(
            common_backend=backend, attributes=extras.attributes, record=record, seconds=seconds
        )
        publish(self._attempt, self._options, [self._manifest], about_root)
