"""Open a checkpoint for a load, and read its planned regions: directly to their destinations,
through host memory, or together with replicas.

:class:`LoadContext` is the opened checkpoint with the caller's options. Strategies get it as their
place; those of other programs get a path or URL, of which :func:`context_of` makes one.

Values for a device, and values that are cast, pass through two buffers in host memory: one is read
while the other is copied. The buffers together use at most the budget.

If a group shares the reading, every rank of it reports which chunks it wants (a digest, if all want
the same), and computes which rank reads which chunk. If only one rank wants a chunk, it reads the
chunk directly to its destination. One of the ranks that want another chunk reads and verifies the
whole chunk, and broadcasts it. This happens in rounds within a memory budget; the next round is
read while one is sent.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from shardstore.distributed.groups import (
    Group,
    broadcast_bytes,
    gathered,
    group_rank,
    group_size,
    raise_together,
)
from shardstore.errors import CheckpointingException
from shardstore.exchange_utils import distribute_shards_to_ranks
from shardstore.loading.plan import HostRead, ReadPlan, moved
from shardstore.progress import Meter
from shardstore.storage.checkpoint import StoredCheckpoint, settled
from shardstore.storage.commit.inventory import check_integrity
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta, RootDocument
from shardstore.storage.format.grid import Box, flat_range_boxes
from shardstore.storage.format.names import CONFIG_NAME
from shardstore.storage.movers.chunks import ChunkPart, ReadDone, RegionRead, chunk_parts
from shardstore.storage.movers.device import behind, host_memory, streams_of
from shardstore.storage.options import DEFAULT_BUDGET_BYTES
from shardstore.storage.runtime.checksums import crc32c
from shardstore.storage.runtime.parallel import in_rounds
from shardstore.storage.stores.location import Location
from shardstore.strategies.base import running

START_BYTES = 1024 * 1024
"""A document up to this size takes one request. About 2,000 arrays have a root document of this
size."""
ALIGNMENT = 64
HOST_BUFFERS = 2
"""Number of buffers of a read through host memory."""
ROUND_BYTES = 16 * 1024 * 1024
"""Largest number of bytes of one rank in a round, so that reading and sending overlap."""
ROUND_BUFFERS = 4
"""Number of buffers of a rank in an exchange: to send, to receive, to read the next round, and to
convert chunks that only it wants."""

Read = Callable[[Sequence[RegionRead], ReadDone], None]
_ChunkId: TypeAlias = tuple[str, int]
"""Key of the array, and the chunk's position in the grid."""
_Holders: TypeAlias = dict[_ChunkId, list[int]]
"""The ranks of a group that want each chunk."""
PartsByChunk: TypeAlias = dict[_ChunkId, list[ChunkPart]]
"""The parts of each chunk that a rank wants."""


# -- the opened checkpoint -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadContext:
    """One load on one rank.

    Attributes:
        stored: the checkpoint.
        cast: fill tensors of another data type than the stored one, see :func:`shardstore.load`.
        budget_bytes: host memory for chunks that are sent to other ranks, copied to a device or
            cast.
        group: process group whose ranks share the reading; ``None``: no sharing.
        meter: counts the read bytes.
    """

    stored: StoredCheckpoint
    cast: bool | Literal["warn"] = False
    budget_bytes: int = DEFAULT_BUDGET_BYTES
    group: Group = None
    meter: Meter = field(default_factory=partial(Meter, "load", ""))

    def together(self) -> AbstractContextManager[None]:
        """Raise an error of the block on every rank that shares the reading."""
        if self.group is None:
            return nullcontext()
        return raise_together(self.group, f"loading {self.stored.location.url} together")

    @property
    def place(self) -> str | Path:
        """The folder or URL of the checkpoint, for strategies of other programs."""
        return self.stored.location.place


def context_of(place: str | Path | Location | LoadContext) -> LoadContext:
    """Return the context of the load that calls a strategy.

    Args:
        place: the checkpoint. It is opened again if the current load reads another checkpoint, or
            if a strategy is called without a load.
    """
    if isinstance(place, LoadContext):
        return place
    location, current = Location.of(place), running.get()
    if not isinstance(current, LoadContext):
        return LoadContext(stored=StoredCheckpoint(location))
    if current.stored.location.url == location.url:
        return current
    return replace(current, stored=StoredCheckpoint(location))


def read_documents(
    location: Location, names: Sequence[str], *, verify_integrity: bool = False
) -> StoredCheckpoint:
    """Open a checkpoint, and read small documents of it.

    From an object store, the first :data:`START_BYTES` of all documents are requested at once. A
    document that the root document does not confirm is read again after it, because it is
    larger, or may be that of another checkpoint at the same place.

    Args:
        location: the checkpoint.
        names: names of the documents. The first is the root document, which has the checksums and
            sizes of the others, and the content of ``metadata.json``.
        verify_integrity: first compare each file with ``integrity.json``.

    Returns:
        The checkpoint with these documents.

    Raises:
        DamagedCheckpointError: a document is larger than the commit says.
        ReplacedError: the checkpoint was replaced during the read.
        StorageError: the store failed.
    """
    if verify_integrity:
        check_integrity(location)
    root, ahead = names[0], location.read_ahead(names, START_BYTES)
    stored, commit = StoredCheckpoint(location), None
    if root in ahead and len(ahead[root] or b"") < START_BYTES:
        stored.documents[root] = ahead[root]
    if stored.document(root) is not None:
        with suppress(CheckpointingException):  # raised by what needs the root document
            commit = stored.root
    known = {} if commit is None else commit.file_bytes
    for name in names[1:]:
        if commit is not None and name in ahead and _is_confirmed(commit, name, ahead[name]):
            stored.documents[name] = ahead[name]
    others = [name for name in names if name not in stored.documents]
    with stored.unless_replaced():
        texts = location.read_many(others, [known.get(name) for name in others])
    stored.documents.update(zip(others, texts, strict=True))
    return stored


def _is_confirmed(commit: RootDocument, name: str, start: bytes | None) -> bool:
    """Return whether the start of a document is the whole document that a commit names."""
    config, sums = commit.about.get("config"), commit.file_sums
    if config is None:
        return False
    if start is None:  # older root documents name no files
        return name != CONFIG_NAME and bool(sums) and name not in sums
    if name == CONFIG_NAME:
        with suppress(ValueError, RecursionError):
            return bool(json.loads(start) == config)
    return name in sums and crc32c(start, 0) == sums[name]


@contextmanager
def opened(
    checkpoint_dir: str | Path | LoadContext, storage_options: Mapping[str, Any] | None = None
) -> Iterator[LoadContext]:
    """Open a checkpoint for a query. An error of a replaced checkpoint says so.

    In an object store, the root document is requested once, or twice if it is larger than
    :data:`START_BYTES`.
    """
    if isinstance(checkpoint_dir, LoadContext):
        with checkpoint_dir.stored.unless_replaced():
            yield checkpoint_dir
        return
    location = settled(Location.of(checkpoint_dir, storage_options))
    context = context_of(location)
    if context is not running.get():
        documents = location.read_ahead(["zarr.json"], START_BYTES)
        if len(documents.get("zarr.json") or b"") == START_BYTES:
            (documents["zarr.json"],) = location.read_many(["zarr.json"])
        context = replace(context, stored=StoredCheckpoint(location, documents=documents))
    with context.stored.unless_replaced():
        yield context


# -- reading the planned regions -------------------------------------------------------------------


def read_chunks(context: LoadContext, plan: ReadPlan, *, read: Read | None = None) -> None:
    """Read the planned regions. If the load has a group, its ranks share the reading and wait for
    each other.

    Args:
        context: the context of the load.
        plan: the plan of this rank.
        read: reads regions, without sharing; default: reads chunks of the checkpoint.

    Raises:
        RanksError: another rank of the group failed.
        ChunkMissingError, ChunkCorruptError: as :meth:`StoredCheckpoint.read`.
    """
    if read is not None:
        context = replace(context, group=None)
    stored = context.stored
    meter = context.meter
    with context.together(), torch.no_grad():
        regions = [region for one in plan.values() for region in one.regions]
        watched = regions if meter.is_watched else ()
        chunks = sum(1 for region in watched for _ in chunk_parts(region))
        size_bytes = sum(region.out.nbytes for region in regions)
        meter.tell("move", bytes_total=size_bytes, chunks_total=chunks)
        for one in plan.values():
            if one.is_padded:
                one.target.zero_()
        parts = {} if context.group is None else by_chunk(regions)
    if context.group is not None:
        exchange(context, parts, meter.count)
        return
    read = read or stored.read
    if not any(isinstance(region, HostRead) for region in regions):
        read(regions, meter.count)
        return
    budget_bytes = stored.location.buffer_bytes(context.budget_bytes)
    read_through_host(read, regions, budget_bytes, meter.count)


# -- through host memory ---------------------------------------------------------------------------


class BufferedBox(NamedTuple):
    """A box of an array that is read into a buffer.

    Attributes:
        array: the array.
        box: box of the array.
        targets: for each destination its part of the box, and the array or tensor.
        chunks: number of chunks that are complete with each target.
    """

    array: ArrayMeta
    box: Box
    targets: Sequence[tuple[Any, Any]]
    chunks: int = 1

    @property
    def size_bytes(self) -> int:
        """Bytes of the piece in a buffer with several pieces."""
        return -(-self.box.size * dtypes.itemsize(self.array.dtype) // ALIGNMENT) * ALIGNMENT


def read_through_host(
    read: Read,
    regions: Sequence[RegionRead],
    budget_bytes: int,
    done: ReadDone,
    chunks: Sequence[BufferedBox] = (),
) -> None:
    """Read regions to their destinations, :class:`HostRead` through buffers.

    Args:
        read: reads regions into arrays of the stored data types.
        regions: the wanted regions.
        budget_bytes: memory for the buffers. A compressed chunk, which cannot be read in parts, may
            need more.
        done: called as the regions fill, with bytes of their destinations.
        chunks: further chunks, which are read once for all of their destinations.

    Raises:
        ChunkMissingError, ChunkCorruptError: as ``read``.
    """
    through = [region for region in regions if isinstance(region, HostRead)]
    read([region for region in regions if not isinstance(region, HostRead)], done)
    limit_bytes = max(1, budget_bytes // HOST_BUFFERS)
    pieces = [piece for region in through for piece in _pieces(region, limit_bytes)]
    batches = in_batches([*pieces, *chunks], limit_bytes)
    device = next((region.out.device for region in through if not region.out.is_cpu), None)
    for batch, buffer in zip(batches, read_ahead(read, batches, device), strict=False):
        deliver(buffer, batch, done)


def read_ahead(
    read: Read, batches: Sequence[Sequence[BufferedBox]], device: torch.device | None = None
) -> Iterator[NDArray[np.uint8]]:
    """Yield a buffer with the stored bytes of each batch, while the next batch is read.

    A buffer is reused for the batch after the next. ``device`` is where the bytes are copied to.
    """
    sizes = [sum(piece.size_bytes for piece in batch) for batch in batches]
    buffers = [host_memory(max(sizes), device) for _ in batches[:HOST_BUFFERS]]

    def fetch(number: int) -> NDArray[np.uint8]:
        if number >= len(batches) or not batches[number]:
            return np.empty(0, np.uint8)
        buffer = buffers[number % HOST_BUFFERS][: sizes[number]]
        views = zip(batches[number], _views(buffer, batches[number]), strict=True)
        read([RegionRead(piece.array, piece.box, view) for piece, view in views], lambda *_: None)
        return buffer

    with ThreadPoolExecutor(1, thread_name_prefix="shardstore-host") as reader:
        coming = reader.submit(fetch, 0)
        for number in range(len(batches)):
            buffer = coming.result()
            coming = reader.submit(fetch, number + 1)
            yield buffer


def deliver(buffer: NDArray[np.uint8], batch: Sequence[BufferedBox], done: ReadDone) -> None:
    """Copy the bytes of a batch to their destinations."""
    for piece, view in zip(batch, _views(buffer, batch), strict=True):
        for where, out in piece.targets:
            copy_to(out, view[where])
            done(out.nbytes, piece.chunks)


def copy_to(out: Any, values: NDArray[Any]) -> None:
    """Copy values to an array of their data type, or to a tensor of any type on any device."""
    target = dtypes.as_tensor(out) if isinstance(out, np.ndarray) else out
    with torch.no_grad():
        target.copy_(dtypes.as_tensor(values))


def _views(buffer: NDArray[np.uint8], batch: Sequence[BufferedBox]) -> list[NDArray[Any]]:
    """Cut a buffer into arrays of the pieces' shapes and stored data types."""
    starts = accumulate((piece.size_bytes for piece in batch), initial=0)
    return [
        np.ndarray(piece.box.shape, dtypes.numpy_dtype(piece.array.dtype), buffer, start)
        for piece, start in zip(batch, starts, strict=False)
    ]


def in_batches(pieces: Iterable[BufferedBox], limit_bytes: int) -> list[list[BufferedBox]]:
    """Divide pieces into batches that fit into a buffer or consist of one piece."""
    return list(in_rounds(pieces, lambda piece: piece.size_bytes, limit_bytes))


def _pieces(region: HostRead, limit_bytes: int) -> Iterator[BufferedBox]:
    """Cut a region along the chunk grid and, if that is not enough, along its axes."""
    array = region.array
    most = max(1, limit_bytes // dtypes.itemsize(array.dtype))
    for part in chunk_parts(region):
        box = moved(part.within, part.array.grid.box(part.index).offset)
        rest = box.size
        for small in _split(box, most) if array.is_plain else [box]:
            rest -= small.size
            where: tuple[Any, ...] = (..., *small.relative_to(box.offset).slices)
            yield BufferedBox(array, small, [(..., part.out[where])], int(rest == 0))


def _split(box: Box, most: int) -> Iterator[Box]:
    """Cut a box into boxes of at most ``most`` elements, in C order."""
    for start in range(0, box.size, most):
        for part in flat_range_boxes(box.shape, start, min(start + most, box.size)):
            yield moved(part, box.offset)


# -- together with replicas ------------------------------------------------------------------------


def by_chunk(regions: Iterable[RegionRead]) -> PartsByChunk:
    """Split the regions that this rank wants along the chunk grid."""
    parts: PartsByChunk = {}
    for region in regions:
        for part in chunk_parts(region):
            parts.setdefault((part.array.key, part.number), []).append(part)
    return parts


def exchange(context: LoadContext, parts: PartsByChunk, done: ReadDone) -> None:
    """Read regions together with the other ranks of the context's group, and exchange them.

    Every rank of the group calls it and waits for the others. The smallest budget of the group is
    used.

    Args:
        context: the context of the load, with the group.
        parts: result of :func:`by_chunk`.
        done: called as the regions fill.

    Raises:
        RanksError: another rank of the group failed.
    """
    group, read = context.group, context.stored.read
    limit_bytes, holders = _agreed(context, sorted(parts))
    pieces = {chunk: _piece(context, chunk, parts.get(chunk, ())) for chunk in holders}
    rank = group_rank(group)
    rounds = _rounds(pieces, holders, group_size(group), limit_bytes)
    most = max((sum(p.size_bytes for p in one) for by_rank in rounds for one in by_rank), default=0)
    received = np.empty(most, np.uint8)
    buffers = read_ahead(read, [by_rank[rank] for by_rank in rounds])
    streams = streams_of(part.out for held in parts.values() for part in held)

    def read_alone() -> None:
        """Read the chunks that no other rank wants. It runs in another thread; copies to a
        device wait for work that the caller has queued on its current stream of that device."""
        reads: list[RegionRead] = []
        several: list[BufferedBox] = []
        for chunk in (chunk for chunk, by in holders.items() if by == [rank]):
            piece, (part, *others) = pieces[chunk], parts[chunk]
            if others:  # boxes of a flat range may share a chunk, which is read once
                several.append(piece)
                continue
            kind = RegionRead if isinstance(part.out, np.ndarray) else HostRead
            reads.append(kind(part.array, moved(part.within, piece.box.offset), part.out))
        with behind(*streams):
            read_through_host(read, reads, limit_bytes, done, several)

    failed: Exception | None = None
    with ThreadPoolExecutor(1, thread_name_prefix="shardstore-read") as reader:
        reading_alone = reader.submit(read_alone)
        for by_rank in rounds:
            with context.together():
                if failed is not None:
                    raise failed
                mine = next(buffers)
            for source, batch in enumerate(by_rank):
                if not batch:
                    continue
                size = sum(piece.size_bytes for piece in batch)
                buffer = mine if source == rank else received[:size]
                broadcast_bytes(torch.from_numpy(buffer), source, group)
                try:
                    deliver(buffer, batch, done)
                except Exception as problem:  # continue: the others wait for the next broadcast
                    failed = failed or problem
    with context.together():
        if failed is not None:
            raise failed
        reading_alone.result()


def _agreed(context: LoadContext, wanted: list[_ChunkId]) -> tuple[int, _Holders]:
    """Return the bytes of one rank in a round, and the ranks that want each chunk; the same on
    every rank. The ranks send their chunks only if not all of them want the same."""
    limit_bytes = max(1, min(ROUND_BYTES, context.budget_bytes // ROUND_BUFFERS))
    digest = xxhash.xxh3_64_intdigest(pickle.dumps((context.stored.location.url, wanted)))
    reports = gathered((digest, limit_bytes), context.group)
    limit_bytes = min(limit for _, limit in reports)
    if len({digest for digest, _ in reports}) == 1:
        everyone = list(range(len(reports)))
        return limit_bytes, dict.fromkeys(wanted, everyone)
    holders: _Holders = {}
    for rank, chunks in enumerate(gathered(wanted, context.group)):
        for chunk in chunks:
            holders.setdefault(chunk, []).append(rank)
    return limit_bytes, holders


def _piece(context: LoadContext, chunk: _ChunkId, parts: Sequence[ChunkPart]) -> BufferedBox:
    """Return a whole chunk with the parts that this rank wants."""
    key, number = chunk
    array = context.stored.arrays[key]
    targets = [((..., *part.within.slices), part.out) for part in parts]
    return BufferedBox(array, array.grid.box(array.grid.index_at(number)), targets)


def _rounds(
    pieces: Mapping[_ChunkId, BufferedBox], holders: _Holders, ranks: int, limit_bytes: int
) -> list[list[list[BufferedBox]]]:
    """Return the rounds in which the chunks are sent that several ranks want."""
    sizes = {chunk: piece.size_bytes for chunk, piece in pieces.items()}
    by_rank: list[list[_ChunkId]] = [[] for _ in range(ranks)]
    for chunk, rank in distribute_shards_to_ranks(holders, sizes, ranks, set()).items():
        if len(holders[chunk]) > 1:
            by_rank[rank].append(chunk)
    cut = [
        in_batches((pieces[chunk] for chunk in sorted(chunks)), limit_bytes) for chunks in by_rank
    ]
    return [list(one) for one in zip_longest(*cut, fillvalue=[])]
