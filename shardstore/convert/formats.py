"""What the formats of conversions share, and Zarr checkpoints (of this package, and of
Megatron-Core's zarr backend) as source and target.

A source of each format has ``arrays`` (key -> tensor), ``boxes(key)`` (those of the tensor's stored
parts), ``read(reads)`` (regions into their destinations), ``rest()`` (the content that is not
tensors), ``location`` and ``roots`` (names of the documents that change if it is replaced).

A conversion calls the methods of a target in this order:

- ``key_of(key)`` and ``array(meta, boxes, most_bytes)`` return a tensor's key and its grid in the
  target, with chunks of about ``most_bytes`` bytes.
- ``prepare(arrays, rest)`` takes what the checkpoint will hold. It checks, before anything is
  written, that the format takes it.
- ``resume(state)`` returns whether this run can continue an earlier one, which had this state. If
  not, ``start(left)`` removes the files of the earlier run (``left`` is its state, or ``None``) and
  returns the state of this run, as JSON other than ``None``.
- ``begin(known)`` prepares the target for the first chunk; files of an earlier run stay. ``known``
  has the receipts of the chunks that the earlier run wrote. A chunk is written before its receipt,
  and the comparison at the end finds a damaged chunk. It returns the receipts of the chunks that
  are not written again.
- ``write(chunks)`` writes chunks and returns their receipts, in the same order.
- ``finish(receipts)`` completes the files, and returns a function that reads regions of them.
- ``documents(rest)`` yields name, expected content and stored content of the files other than
  chunks, or of parts of files. ``rest`` was read anew from the source.
- ``publish()`` moves the finished checkpoint to the target. After an error at any step, ``stop()``
  releases resources.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import getitem
from time import perf_counter
from typing import Any

import msgspec

from shardstore.errors import CheckpointExistsError, CheckpointingException, damaged
from shardstore.inspection import opened
from shardstore.storage.commit import checkpoints
from shardstore.storage.commit.publish import Files, RootContent, publish
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import DEFAULT_TARGET_CHUNK_BYTES, Box, Grid, grid_of, plan_grid
from shardstore.storage.format.manifest import ChunkRecord, RankManifest
from shardstore.storage.format.names import COMMON_STATE_NAME, CONFIG_NAME, node_name
from shardstore.storage.movers.chunks import ChunkWrite, RegionRead
from shardstore.storage.movers.mover import Mover
from shardstore.storage.options import SaveOptions
from shardstore.storage.stores.folder import store_errors
from shardstore.storage.stores.location import Location
from shardstore.values.plain import NotPlainError
from shardstore.values.record import BACKEND, MEMBER, VERSION, StatePath, StateRecord, as_text

logger = logging.getLogger(__name__)

Arrays = Sequence[ArrayMeta]
Receipts = dict[tuple[str, tuple[int, ...]], Any]
"""Key and index of a written chunk -> small JSON value with which the target finds the chunk."""
Read = Callable[[Sequence[RegionRead]], None]
"""Reads regions of tensors into their destinations."""


@dataclass
class NonTensors:
    """The content of a checkpoint besides its tensors.

    Attributes:
        common: content of ``common.pt``; ``None`` if there is no such file.
        record: values and paths, if ``common`` is ``None``.
        objects: unique key of a sharded object -> function that returns its value.
        attributes: attributes of the root group, as JSON.
    """

    common: bytes | None = None
    record: StateRecord = field(default_factory=StateRecord)
    objects: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def common_values(self) -> dict[Any, Any]:
        """Return the values in ``common``; empty without it. Imports torch otherwise.

        Raises:
            DamagedCheckpointError: the file cannot be read, or does not hold a dict.
        """
        if self.common is None:
            return {}
        from shardstore.values.torch_values import load_bytes

        state = load_bytes(self.common, COMMON_STATE_NAME)
        if not isinstance(state, dict):
            what = f"of the source holds a {type(state).__name__}, not a dict"
            raise damaged(COMMON_STATE_NAME, what)
        return state


class Target:
    """A checkpoint under construction, written chunk by chunk so that a later run can resume it.

    Attributes:
        arrays: its arrays.
        rest: what it holds besides them.
    """

    arrays: Arrays
    rest: NonTensors

    def key_of(self, key: str) -> str:
        """Return the key of a tensor in the target."""
        return key

    def prepare(self, arrays: Arrays, rest: NonTensors) -> None:
        """Take the content of the checkpoint."""
        self.arrays, self.rest = arrays, rest

    def stop(self) -> None:
        """Release resources after an error. Written files stay for the next run."""


class FileTarget(Target):
    """A checkpoint of files, complete once its last file is written.

    On a disk the files are written to a work folder, in an object store directly to the target.

    Args:
        work: folder beside a local target.
        output: path or URL of the finished checkpoint.
        last: name of the file that completes it; "" if the target is a single file.
        ours: pattern of the names of the other files.

    Raises:
        CheckpointExistsError: the target exists and is not an empty folder.
    """

    def __init__(self, work: Location, output: Location, last: str, ours: str) -> None:
        if not output.is_free(last):
            raise _exists(output)
        self._at = output.staging(work, last)
        self._output, self._ours = output, ours

    def start(self, left: Any) -> Any:
        """Remove the files of an earlier run.

        Raises:
            CheckpointExistsError: the target, in an object store, has files of another program.
        """
        self._at.make_empty_folder()
        names = self._at.listing()
        if names and left is None:
            raise _exists(self._at, f" and holds {', '.join(names[:4])}")
        self._at.delete_all([name for name in names if re.fullmatch(self._ours, name)])
        return True

    def resume(self, state: Any) -> bool:
        """Return whether the work folder exists; always true in an object store."""
        return not self._at.is_missing()

    def array(self, meta: ArrayMeta, boxes: Sequence[Box], most_bytes: int) -> ArrayMeta:
        """Return the tensor on a grid whose chunks are contiguous ranges of the tensor."""
        size = dtypes.itemsize(meta.dtype)
        grid = plan_grid(meta.shape, meta.shape, size, most_bytes, leading_only=True)
        return ArrayMeta(meta.key, meta.node, grid, meta.dtype, codecs=())

    def complete(self, last: str, data: bytes) -> None:
        """Write the last file, and move the folder to a local target.

        Raises:
            CheckpointExistsError: the target has appeared meanwhile.
        """
        if self._at is not self._output:
            self._at.write(last, data)
            self.put_in_place(self._at)
        elif not self._at.create(last, data):
            raise _exists(self._output)

    def put_in_place(self, made: Location) -> None:
        """Rename or copy a finished folder or file to the target. Raises the errors of
        :meth:`complete`."""
        with store_errors("putting the result at", self._output.url):
            if self._output.is_dir() and not self._output.listing():
                self._output.path.rmdir()
            if self._output.exists():
                raise _exists(self._output)
            self._output.publish(made)


def _exists(output: Location, what: str = "") -> CheckpointingException:
    return output.error(f" already exists{what}; convert to another target", CheckpointExistsError)


def values_of(
    rest: NonTensors, common: Mapping[Any, Any], tensors: Collection[StatePath] = ()
) -> Iterator[tuple[str, StatePath, Any]]:
    """Yield ``(key, path, value)`` of each value that is not a tensor.

    Args:
        rest: the values.
        common: result of :meth:`NonTensors.common_values`.
        tensors: paths in it that are left out.
    """
    around = {path[:i] for path in tensors for i in range(len(path))}
    for name, value in common.items():
        for path, leaf in _leaves(value, (str(name),), around):
            if path not in tensors:
                yield ".".join(map(str, path)), path, leaf
    for key in rest.record.values:
        path = rest.record.paths.get(key, (key,))
        yield key, path, rest.record.value(key, "the source")
    for unique_key, value_of in rest.objects.items():
        key = unique_key if rest.common is not None else unique_key.rpartition("/")[0]
        yield key, rest.record.paths.get(key, (key,)), value_of()


def _leaves(
    value: Any, path: StatePath, around: Container[StatePath]
) -> Iterator[tuple[StatePath, Any]]:
    """Yield path and value of each leaf. An empty dict, one with other keys than texts, and a list
    are leaves, except for those at the paths ``around``."""
    is_named = isinstance(value, dict) and value and all(isinstance(name, str) for name in value)
    if is_named or path in around:
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(item, (*path, name), around)
    else:
        yield path, value


def record_of(rest: NonTensors, level: int = logging.WARNING) -> StateRecord:
    """Return the values that have a JSON form, for formats that store little besides tensors.

    Other values are left out; a log record names them. Of the plain tensors, see
    :func:`~shardstore.inspection.opened.plain_tensors`, the record has the paths.
    """
    values: dict[str, Any] = {}
    left_out: list[str] = []
    common = rest.common_values()
    tensors = {(str(path[0]), *path[1:]): path for path in opened.plain_tensors(common)}
    paths = dict(rest.record.paths)
    paths |= {".".join(map(str, path)): path for path in tensors if _is_recorded(path)}
    lists = {
        path[:i]: None
        for path, own in tensors.items()
        for i in range(1, len(path))
        if isinstance(reduce(getitem, own[:i], common), list)
    }
    for key, path, value in values_of(rest, common, tensors):
        try:
            if not _is_recorded(path):
                raise NotPlainError("a dict with tensors and other keys than texts and integers")
            torch = sys.modules.get("torch")  # without it no value is a tensor
            if torch is not None and isinstance(value, torch.Tensor):
                raise NotPlainError("it is a tensor that cannot be an array")
            values[key], _ = as_text(value)
            paths[key] = path
        except NotPlainError as reason:
            left_out.append(f"{key} ({reason})")
    if left_out:
        shown = "; ".join(left_out[:8])
        logger.log(level, "%d value(s) without a JSON form are left out: %s", len(left_out), shown)
    return StateRecord(paths, values, lists=[*rest.record.lists, *lists])


def _is_recorded(path: StatePath) -> bool:
    return all(type(name) in (str, int) for name in path)


class ZarrSource:
    """Checkpoints of this package, and of Megatron-Core's zarr backend."""

    roots = ("zarr.json", CONFIG_NAME)

    def __init__(self, place: Location) -> None:
        self.location = place
        self._ckpt = opened.open(place)
        self.left_out = sorted(self._ckpt.refused)
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

    def rest(self) -> NonTensors:
        """Return the common part as stored, and the sharded objects."""
        ckpt = self._ckpt
        attributes = {name: v for name, v in ckpt.attrs.items() if name != "shardstore"}
        # The files that a record names are listed with the sharded objects.
        objects = {key: partial(ckpt.objects.__getitem__, key) for key in ckpt.objects}
        if record := StateRecord.from_root(ckpt.attrs, ckpt.url):
            return NonTensors(None, record, objects, attributes)
        if (common := ckpt.stored.document(COMMON_STATE_NAME)) is not None:
            from shardstore.strategies.common import require_same_content  # imports torch

            ckpt.stored.check_file(COMMON_STATE_NAME, common)
            require_same_content(ckpt.stored, common)
        return NonTensors(common, objects=objects, attributes=attributes)


class ShardstoreTarget(Target):
    """A checkpoint of this package, written as an attempt at the target like every save.

    A later run continues the attempt unless another writer has claimed the target.

    Args:
        output: path or URL of the finished checkpoint.
        source: name of the source's format, for the commit record.
        overwrite: replace a checkpoint at the target.
        budget_bytes: memory for chunks that are being written.
    """

    def __init__(self, output: Location, source: str, overwrite: bool, budget_bytes: int) -> None:
        self._output, self._source = output, source
        self._options = SaveOptions(overwrite=overwrite, budget_bytes=budget_bytes)
        self._manifest = RankManifest(0)
        self._started = perf_counter()

    def start(self, left: Any) -> Any:
        """Abandon the attempt of an earlier run, begin a new one, and return its id."""
        if left is not None and (old := checkpoints.resumed(self._output, left, self._options)):
            old.abandon()
        nodes = [meta.node for meta in self.arrays]
        self._attempt = checkpoints.begin(self._output, self._options, nodes)
        return self._attempt.id

    def resume(self, state: Any) -> bool:
        """Continue the attempt if it exists and owns the target; return whether it does."""
        found = checkpoints.resumed(self._output, state, self._options)
        if found is not None:
            self._attempt = found
        return found is not None

    def array(self, meta: ArrayMeta, boxes: Sequence[Box], most_bytes: int) -> ArrayMeta:
        """Return the tensor on a grid whose chunks cross few or no shard borders of the source."""
        size = dtypes.itemsize(meta.dtype)
        most = min(DEFAULT_TARGET_CHUNK_BYTES, most_bytes)
        grid, edges, straddled = grid_of(meta.shape, boxes, size, most)
        shards = None if straddled else edges
        return ArrayMeta(meta.key, node_name(meta.key), grid, meta.dtype, shard_shape=shards)

    def begin(self, known: Receipts) -> Receipts:
        """Write the common part and the sharded objects."""
        files = Files(self._attempt, self._manifest, self._options.budget_bytes)
        files.add_arrays((meta, True) for meta in self.arrays)
        for name, data in self._files(self.rest):
            files.put(name, data)
        self._attempt.put_all(files.taken())
        return known

    def _files(self, rest: NonTensors) -> Iterator[tuple[str, bytes]]:
        """Yield names and contents of ``common.pt`` and of the sharded objects' files."""
        if rest.common is not None:
            yield COMMON_STATE_NAME, rest.common
        if rest.objects:
            from shardstore.mapping import ShardedObject
            from shardstore.strategies.common import object_document

            for key, value in rest.objects.items():
                sharded = ShardedObject.empty_from_unique_key(key)
                sharded.data = value()
                # With a JSON record, the objects may be values that are too long for it.
                yield object_document(sharded, as_json=rest.common is None)

    def write(self, chunks: Sequence[ChunkWrite]) -> list[Any]:
        """Write chunks and return their manifest records as receipts."""
        found: Receipts = {}

        def done(item: ChunkWrite, record: ChunkRecord) -> None:
            found[item.array.key, item.index] = msgspec.to_builtins(record)

        Mover.of(self._attempt.location, self._options, self._attempt.check).write(chunks, done)
        return [found[chunk.array.key, chunk.index] for chunk in chunks]

    def finish(self, receipts: Receipts) -> Read:
        """Add the chunks to the manifest."""
        arrays = {meta.key: meta for meta in self.arrays}
        for (key, index), receipt in receipts.items():
            self._manifest.add_chunk(arrays[key], index, msgspec.convert(receipt, ChunkRecord))
        return Mover.of(self._attempt.location, self._options).read

    def documents(self, rest: NonTensors) -> Iterator[tuple[str, bytes, bytes]]:
        """Yield name, expected bytes and stored bytes of each file, and of the root document's
        record, which the commit writes."""
        for name, data in self._files(rest):
            yield name, data, self._attempt.location.read_range(name) or b""
        wanted, own = (json.dumps(_record(one)).encode() for one in (rest, self.rest))
        yield "zarr.json", wanted, own

    def publish(self) -> None:
        """Write the root document and commit."""
        rest = self.rest
        record: dict[str, Any] = {"converted_from": self._source}
        backend = ("torch", 1)
        if rest.common is None:
            backend = (BACKEND, VERSION)
            record[MEMBER] = _record(rest)
        seconds = perf_counter() - self._started
        self._manifest.seconds = {"write": seconds}
        about_root = RootContent(
            common_backend=backend, attributes=rest.attributes, record=record, seconds=seconds
        )
        publish(self._attempt, self._options, [self._manifest], about_root)


def _record(rest: NonTensors) -> dict[str, Any]:
    files = sorted(key.rpartition("/")[0] for key in rest.objects)
    return replace(rest.record, files=files).to_json()
