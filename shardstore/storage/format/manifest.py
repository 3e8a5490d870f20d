"""The manifest: sizes, checksums, hashes and writers of all chunks of a checkpoint.

A :class:`RankManifest` collects what one rank writes: its arrays and, for each chunk, size, crc32c,
a 128-bit hash and the running crc32c at block boundaries. The coordinator merges those of all ranks
(:mod:`.merge`) into one :class:`Manifest`. It has one row per chunk, in the order of the arrays and
of the chunks within an array. Any NumPy opens its file (``manifest.npz``, no pickle).

Checksums and hashes are over the decoded chunk: little-endian, C order, padded to the full chunk
shape.
"""

from __future__ import annotations

import encodings.cp437  # noqa: F401 (zipfile imports it on use, when the process may have lost it)
import io
import json
import pickle
import struct
import sys
import zipfile
import zlib
from array import array
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardstore.errors import AccessPatternError, DamagedCheckpointError, as_damage
from shardstore.storage.format.documents import ArrayMeta, array_document
from shardstore.storage.format.grid import inner_blocks
from shardstore.storage.format.names import require_inside
from shardstore.storage.format.packs import PACKS, Pack
from shardstore.storage.runtime.checksums import crc32c

ROW = np.dtype(
    [
        ("array", "<i8"),
        ("chunk", "<i8"),
        ("stored", "<u8"),
        ("crc", "<u4"),
        ("rank", "<u4"),
        ("digest", "u1", 16),
        ("file", "<u4"),
        ("first", "<u8"),
    ]
)
"""Row of a chunk in a rank's report: the number of its array, its position in C order over the
grid, the columns of :class:`Manifest`, and the place of :class:`ChunkRecord`."""
NOT_PACKED = 2**32 - 1
MOST_PACKED = 100
"""Maximum compression ratio of the member ``arrays``, beyond 64 KiB of uncompressed text."""
_PACK_ROW = struct.Struct("<qqQII16sIQ").pack
_JOINED = ("arrays", "summaries", "describers", "created", "rows", "running", "packs", "loose")
"""Members of a report that a joined report has for all of its ranks."""


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """Size and checksums of one written chunk.

    Attributes:
        stored_bytes: size of the stored object in bytes, including its checksum.
        crc: crc32c of the decoded chunk.
        digest: xxh3-128 of the decoded chunk, 16 bytes, big-endian.
        running: crc32c of the bytes from the chunk's start to each inner block boundary
            (:func:`block_bytes`).
        file: number of its pack in the report; :data:`NOT_PACKED` for an object of its own.
        first: its first byte in the pack.
    """

    stored_bytes: int
    crc: int
    digest: bytes
    running: Sequence[int]
    file: int = NOT_PACKED
    first: int = 0


@dataclass
class RankManifest:
    """A rank's report to the coordinator of what it wrote.

    Attributes:
        rank: the writer's global rank.
        objects: unique keys of the sharded objects that it wrote.
        files: name -> crc32c and size of the files other than chunks that it wrote and that loads
            read.
        copies: keys that it holds copies of and did not write, if it reports them.
        reused_bytes: bytes of the chunks that it reused from a base.
        array_documents: whether it writes the documents of the arrays that it creates.
        has_packs: whether it packs small chunks.
        seconds: phase of the save -> seconds, for the commit record.
        arrays: key of each array that it writes to -> number of the array.
        summaries: by number, :func:`summary_of` the array.
        describers: by number, the rank that describes the array; after :meth:`add_report` the
            first one.
        created: key -> array, for each array that it creates.
        rows: one :data:`ROW` for each chunk.
        running: the running checksums of the chunks, in the order of ``rows``.
        packs: names of the packs that it wrote; an empty name is that of ``loose``.
        loose: a pack that is not written yet.
        others: for a report that :meth:`add_report` filled, the added reports without their arrays
            and chunks. Its own members above ``arrays`` have no meaning then, but for the packs in
            ``files``.
    """

    rank: int
    objects: list[str] = field(default_factory=list)
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    copies: Sequence[str] = ()
    reused_bytes: int = 0
    array_documents: bool = True
    has_packs: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    arrays: dict[str, int] = field(default_factory=dict)
    summaries: list[str] = field(default_factory=list)
    describers: array[int] = field(default_factory=lambda: array("I"))
    created: dict[str, ArrayMeta] = field(default_factory=dict)
    rows: bytearray = field(default_factory=bytearray)
    running: array[int] = field(default_factory=lambda: array("I"))
    packs: list[str] = field(default_factory=list)
    loose: Pack | None = None
    others: list[RankManifest] = field(default_factory=list)

    def add_array(self, meta: ArrayMeta, *, created: bool) -> None:
        """Record an array that this rank writes to, and whether this rank creates it.

        Raises:
            AccessPatternError: the key was recorded before with another shape, data type or layout.
        """
        summary = sys.intern(summary_of(meta))  # pickle sends equal texts once if they are interned
        number = self._number(meta.key, summary, self.rank)
        if (known := self.summaries[number]) != summary:
            raise AccessPatternError(
                f"key {meta.key!r} is used for two different tensors on rank {self.rank}: one has "
                f"{known}; the other has {summary}; give them different keys",
                key=meta.key,
                rank=self.rank,
            )
        if created:
            self.created[meta.key] = meta

    def _number(self, key: str, summary: str, rank: int) -> int:
        """Return the number of an array; add the array if it has none."""
        number = self.arrays.setdefault(key, len(self.arrays))
        if number == len(self.summaries):
            self.summaries.append(summary)
            self.describers.append(rank)
        return number

    def add_chunk(self, meta: ArrayMeta, index: Sequence[int], record: ChunkRecord) -> None:
        """Record a written chunk. Its array must have been added before."""
        number, chunk = self.arrays[meta.key], meta.grid.linear(index)
        about = record.stored_bytes, record.crc, self.rank, record.digest, record.file, record.first
        self.rows += _PACK_ROW(number, chunk, *about)
        self.running.extend(record.running)

    def pack_chunk(self, name: str, content: Iterable[bytes | memoryview]) -> tuple[int, int]:
        """Put the stored bytes of a chunk into :attr:`loose`. Return its place, which its record
        must have: the number of the pack, and the first byte in it."""
        if self.loose is None:
            self.loose = Pack()
            self.packs.append("")
        first, _ = self.loose.add(name, content)
        return len(self.packs) - 1, first

    def close_pack(self, from_bytes: int = 0) -> tuple[str, bytes] | None:
        """Return name and content of :attr:`loose` as a file, which the caller must write; ``None``
        if it does not have ``from_bytes``. It describes the arrays of which it has every chunk."""
        if self.loose is None or len(self.loose.body) < from_bytes:
            return None
        file = self.packs.index("")
        rows = np.frombuffer(self.rows, ROW)
        held = np.bincount(rows["array"][rows["file"] == file], minlength=len(self.arrays))
        whole = (
            self.created[key]
            for key, number in self.arrays.items()
            if held[number] and key in self.created and held[number] == self.created[key].grid.size
        )
        data = self.loose.close([(meta.node, array_document(meta)) for meta in whole])
        number = sum(name.startswith(f"{PACKS}/{self.rank}.") for name in self.packs)
        name = self.packs[file] = f"{PACKS}/{self.rank}.{number}.zip"
        self.loose = None
        self.files[name] = crc32c(data, 0), len(data)
        return name, data

    def add_report(self, other: RankManifest) -> None:
        """Add the arrays and chunks of another rank's report. This report only collects those of
        other ranks.

        Raises:
            AccessPatternError: the ranks describe an array differently.
        """
        numbers = []
        for key, summary, rank in zip(other.arrays, other.summaries, other.describers, strict=True):
            number = self._number(key, summary, rank)
            if (known := self.summaries[number]) != summary:
                first = self.describers[number]
                raise AccessPatternError(
                    f"Invalid access pattern: rank {rank} and rank {first} describe key {key!r} "
                    f"differently: rank {rank} has {summary}; rank {first} has {known}; "
                    "give both the same",
                    key=key,
                    rank=rank,
                )
            numbers.append(number)
        self.created |= other.created
        rows = np.frombuffer(other.rows, ROW).copy()
        rows["array"] = np.array(numbers, np.int64)[rows["array"]]
        self._join_packs(other, rows)
        self.rows += rows.tobytes()
        self.running += other.running
        if other.others:
            self.files |= other.files  # packs that were written of joined reports
        self.others += other.others or [
            replace(other, **{name: getattr(RankManifest(0), name) for name in _JOINED})
        ]

    def _join_packs(self, other: RankManifest, rows: NDArray[np.void]) -> None:
        """Add the packs of another report, and change the places in its rows to these packs."""
        files = np.arange(len(other.packs), dtype=np.uint32) + len(self.packs)
        if other.loose is not None and self.loose is not None:
            loose = other.packs.index("")
            rows["first"][rows["file"] == loose] += self.loose.extend(other.loose)
            files[loose:] -= 1
            files[loose] = self.packs.index("")
            self.packs += other.packs[:loose] + other.packs[loose + 1 :]
        else:
            self.loose = self.loose or other.loose
            self.packs += other.packs
        packed = rows["file"] != NOT_PACKED
        rows["file"][packed] = files[rows["file"][packed]]

    def to_bytes(self) -> bytes:
        """Return the serialised report for the coordinator, see :meth:`from_bytes`."""
        # The chunks of a pack are numbers, which take long and do not shrink.
        return zlib.compress(pickle.dumps(self), 1 if self.loose is None else 0)

    @classmethod
    def from_bytes(cls, data: bytes) -> RankManifest:
        """Return the report that a rank of the same job sent.

        Args:
            data: result of :meth:`to_bytes`.

        Raises:
            DamagedCheckpointError: the data is not a report.
        """
        try:
            report = pickle.loads(zlib.decompress(data))
            if not isinstance(report, cls):
                raise TypeError(f"a {type(report).__name__}")
        except Exception as error:  # pickle raises many kinds on damaged input
            raise DamagedCheckpointError(
                f"the report of a rank cannot be read ({error}); do all ranks run the same version "
                "of shardstore? Save again"
            ) from error
        return report


def summary_of(meta: ArrayMeta) -> str:
    """Return a text of all properties of an array on which the ranks must agree."""
    sharding = "" if meta.shard_shape is None else f", shards of {meta.shard_shape}"
    packed = "" if meta.places is None else ", packed"
    return (
        f"global shape {meta.grid.shape}, data type {meta.dtype}{sharding}, chunks of "
        f"{meta.grid.chunk_shape}, codecs {meta.codecs}, Zarr v{meta.zarr_format}{packed}"
    )


@dataclass
class Rows:
    """The rows of one array: views of the columns of :class:`Manifest`, one entry per chunk.

    Attributes:
        stored: size of each stored object in bytes, ``(chunks,)`` uint64.
        crc: crc32c of each decoded chunk, ``(chunks,)`` uint32.
        digest: xxh3-128 of each decoded chunk, ``(chunks, 16)`` uint8.
        rank: global rank that wrote each chunk, ``(chunks,)`` uint32.
        running: crc32c at the inner block boundaries of each chunk, ``(chunks, boundaries)``.
    """

    stored: NDArray[np.uint64]
    crc: NDArray[np.uint32]
    digest: NDArray[np.uint8]
    rank: NDArray[np.uint32]
    running: NDArray[np.uint32]


class Counted(NamedTuple):
    """An array of a manifest, by the name of its node.

    Attributes:
        node: the node.
        chunks: number of its chunks.
        size: bytes of a decoded chunk.
    """

    node: str
    chunks: int
    size: int

    @classmethod
    def of(cls, meta: ArrayMeta) -> Counted:
        """Return the entry of an array."""
        return cls(meta.node, meta.grid.size, meta.chunk_bytes)


class _Ranges(NamedTuple):
    """The parts of the columns of a manifest that belong to an array."""

    array: Counted
    rows: slice
    boundaries: slice


@dataclass
class Manifest(Rows):
    """Table with one row per chunk, ordered by array and, within an array, by chunk in C order.

    Attributes:
        arrays: the arrays in order.
        running: here one-dimensional, because its length per chunk depends on the array.
    """

    arrays: list[Counted]

    def __post_init__(self) -> None:
        self._ranges: dict[str, _Ranges] = {}
        row = boundary = 0
        for one in self.arrays:
            end, last = row + one.chunks, boundary + one.chunks * inner_blocks(one.size)
            self._ranges[one.node] = _Ranges(one, slice(row, end), slice(boundary, last))
            row, boundary = end, last

    def rows(self, meta: ArrayMeta) -> Rows | None:
        """Return the rows of an array; ``None`` if the manifest does not contain the array, or
        contains it with another number or size of chunks, as its checksums do not apply then."""
        found, one = self._ranges.get(meta.node), Counted.of(meta)
        if found is None or found.array != one:
            return None
        rows, running = found.rows, self.running[found.boundaries]
        running = running.reshape(one.chunks, inner_blocks(one.size))
        return Rows(self.stored[rows], self.crc[rows], self.digest[rows], self.rank[rows], running)

    def writer(self, meta: ArrayMeta, index: Sequence[int]) -> int | None:
        """Return the global rank that wrote a chunk; ``None`` if the manifest lacks the array."""
        rows = self.rows(meta)
        return None if rows is None else int(rows.rank[meta.grid.linear(index)])

    def by_node(self, column: NDArray[Any], nodes: Iterable[str] | None = None) -> dict[str, str]:
        """Return the parts of a column in the form that the commit contains: node -> base64 of the
        values of its chunks in order, as little-endian uint32; of all nodes by default."""
        numbers = column.astype("<u4")
        wanted = self._ranges if nodes is None else nodes
        return {node: b64encode(numbers[self._ranges[node].rows].data).decode() for node in wanted}

    def without(self, nodes: set[str]) -> Manifest:
        """Return the manifest without some arrays."""
        keep = np.array([one.node not in nodes for one in self.arrays], dtype=bool)
        rows = np.repeat(keep, [one.chunks for one in self.arrays])
        inner = np.repeat(keep, [one.chunks * inner_blocks(one.size) for one in self.arrays])
        arrays = [one for one in self.arrays if one.node not in nodes]
        columns = {name: getattr(self, name)[rows] for name in _COLUMNS if name != "running"}
        return Manifest(arrays=arrays, **columns, running=self.running[inner])

    def to_bytes(self) -> bytes:
        """Return the content of ``manifest.npz``."""
        arrays = zlib.compress(json.dumps(self.arrays).encode(), 1)
        out = io.BytesIO()
        columns = {member: getattr(self, name) for name, (member, _) in _COLUMNS.items()}
        np.savez(out, allow_pickle=False, arrays=np.frombuffer(arrays, np.uint8), **columns)
        return out.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes, url: str) -> Manifest:
        """Parse ``manifest.npz``.

        Raises:
            DamagedCheckpointError: the file is damaged.
        """
        with as_damage(url, f"{url} is damaged"):
            with zipfile.ZipFile(io.BytesIO(data)) as file:
                if sum(member.file_size for member in file.infolist()) > len(data):
                    raise ValueError("members that are larger than the file")
            with np.load(io.BytesIO(data), allow_pickle=False) as columns:
                packed = columns["arrays"].tobytes()
                unpacked = zlib.decompressobj()
                text = unpacked.decompress(packed, MOST_PACKED * len(packed) + 65536)
                if not unpacked.eof:
                    raise ValueError("a list of arrays that is cut short, or far too long")
                arrays = [
                    Counted(require_inside(node, url), int(n), int(size))
                    for node, n, size in json.loads(text)
                ]
                found = {name: columns[member] for name, (member, _) in _COLUMNS.items()}
                manifest = cls(**found, arrays=arrays)
            if any(n < 0 or size < 1 for _, n, size in arrays):
                raise ValueError("an array of impossible size")
            rows = sum(n for _, n, _ in arrays)
            boundaries = sum(n * inner_blocks(size) for _, n, size in arrays)
            wanted = [(rows,), (rows,), (rows, 16), (rows,), (boundaries,)]
            for (name, (_, kind)), shape in zip(_COLUMNS.items(), wanted, strict=True):
                column = getattr(manifest, name)
                if (column.shape, column.dtype) != (shape, np.dtype(kind)):
                    raise ValueError(f"{column.dtype} of shape {column.shape} as column {name}")
        return manifest


_COLUMNS = {
    "stored": ("stored_bytes", "u8"),
    "crc": ("crc32c", "u4"),
    "digest": ("xxh3_128", "u1"),
    "rank": ("rank", "u4"),
    "running": ("running_crc32c", "u4"),
}
"""Columns of a manifest: their names in the file, and NumPy data types."""


def content_digest(arrays: Iterable[ArrayMeta], manifest: Manifest) -> str | None:
    """Return the content digest of a checkpoint: the hexadecimal XXH3-128 of keys, data types,
    shapes and chunk shapes (as JSON), followed by the hashes of all chunks, in the order of the
    keys.

    Args:
        arrays: the arrays of a checkpoint, in any order.
        manifest: the manifest of the checkpoint.

    Returns:
        The digest; ``None`` if there are no chunks, or the manifest describes other arrays.
    """
    metas = sorted(arrays, key=lambda meta: meta.key)
    if [Counted.of(meta) for meta in metas] != manifest.arrays or not len(manifest.digest):
        return None
    described = [[m.key, m.dtype, list(m.shape), list(m.grid.chunk_shape)] for m in metas]
    hasher = xxhash.xxh3_128(json.dumps(described, separators=(",", ":")).encode())
    hasher.update(manifest.digest.tobytes())
    return hasher.hexdigest()
