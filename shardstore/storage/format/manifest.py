"""The manifest: what is known of every chunk, while it is written and beside the arrays.

A :class:`RankManifest` collects what one rank writes: its arrays and, for each chunk, size, crc32c,
a 128-bit hash and the running crc32c at block boundaries. The coordinator merges the ranks' reports
(:mod:`.merge`) into one :class:`Manifest` with a row a chunk, in the order of the arrays and of the
chunks within an array. Its file (``manifest.npz``, no pickle) opens in any NumPy.

Checksums and hashes are over the decoded chunk: little-endian, C order, padded to the full chunk
shape.
"""

from __future__ import annotations

import io
import json
import pickle
import zlib
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardstore.errors import AccessPatternError, DamagedCheckpointError
from shardstore.storage.format.documents import ArrayMeta, array_document
from shardstore.storage.format.grid import inner_blocks
from shardstore.storage.format.names import MANIFEST_NAME, require_inside
from shardstore.storage.movers.checksums import crc32c

__all__ = [
    "MANIFEST_NAME",
    "ChunkRecord",
    "Manifest",
    "RankManifest",
    "RankReport",
    "content_digest",
]


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """What is known of one chunk once it is written.

    Attributes:
        stored_bytes: size of the stored object, checksum included.
        crc: crc32c of the decoded chunk.
        digest: 16 bytes, xxh3-128 of the decoded chunk, big-endian as the library prints it.
        running: crc32c of the chunk's start up to each block boundary (:func:`block_bytes`), the
            end left out.
    """

    stored_bytes: int
    crc: int
    digest: bytes
    running: Sequence[int]


@dataclass
class RankManifest:
    """What one rank wrote.

    Attributes:
        rank: the writer's global rank.
        objects: unique keys of the sharded objects that it wrote.
        files: name -> crc32c of the files that it wrote which are no chunks and that a load reads.
        copies: kind -> keys that it holds copies of and did not write, if it tells them.
        reused_bytes: bytes of the chunks that it took over from a base.
        array_documents: whether it writes the documents of the arrays that it creates.
        seconds: what it did -> seconds, for the commit record.
    """

    rank: int
    _arrays: dict[str, tuple[int, ArrayMeta, str]] = field(default_factory=dict)
    _created: set[str] = field(default_factory=set)
    _array: list[int] = field(default_factory=list)
    _chunk: list[int] = field(default_factory=list)
    _stored: list[int] = field(default_factory=list)
    _crc: list[int] = field(default_factory=list)
    _digest: list[bytes] = field(default_factory=list)
    _running: list[int] = field(default_factory=list)
    objects: list[str] = field(default_factory=list)
    files: dict[str, int] = field(default_factory=dict)
    copies: dict[str, list[str]] = field(default_factory=dict)
    reused_bytes: int = 0
    array_documents: bool = True
    seconds: dict[str, float] = field(default_factory=dict)

    def add_array(self, meta: ArrayMeta, *, created: bool) -> str:
        """Note an array that this rank writes to, and whether it is the one that creates it.
        Returns the text of the array's document.

        Raises:
            AccessPatternError: the same key was noted with another document.
        """
        known = self._arrays.get(meta.key)
        if known is not None and known[1] == meta:
            text = known[2]
        else:
            text = array_document(meta)
            if known is not None and known[2] != text:
                raise AccessPatternError(
                    f"key {meta.key!r} is used for two different tensors on rank {self.rank}: "
                    f"{differences(known[2], text)}; give them different keys",
                    key=meta.key,
                    rank=self.rank,
                )
            self._arrays[meta.key] = (len(self._arrays), meta, text)
        if created:
            self._created.add(meta.key)
        return text

    def add_chunk(self, meta: ArrayMeta, index: Sequence[int], record: ChunkRecord) -> None:
        """Note a chunk that is written. The array must have been added."""
        self._array.append(self._arrays[meta.key][0])
        self._chunk.append(meta.grid.linear(index))
        self._stored.append(record.stored_bytes)
        self._crc.append(record.crc)
        self._digest.append(record.digest)
        self._running.extend(record.running)

    def add_file(self, name: str, data: bytes) -> None:
        """Note a file that is no chunk, by its name below the root."""
        self.files[name] = crc32c(data, 0)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all chunks written."""
        return sum(self._stored)

    def report(self) -> RankReport:
        """For the coordinator in this process."""
        summaries: dict[str, str] = {}  # equal texts as one object, which pickle sends once
        noted = self._arrays.values()
        texts = [summary_of(meta) for _, meta, _ in noted]
        return RankReport(
            rank=self.rank,
            keys=list(self._arrays),
            documents=np.array([digest_of(text) for _, _, text in noted], np.uint64),
            summaries=[summaries.setdefault(text, text) for text in texts],
            created={
                key: (text, meta)
                for key, (_, meta, text) in self._arrays.items()
                if key in self._created
            },
            array=np.array(self._array, np.int64),
            chunk=np.array(self._chunk, np.int64),
            stored=np.array(self._stored, np.uint64),
            crc=np.array(self._crc, np.uint32),
            digest=np.frombuffer(b"".join(self._digest), np.uint8).reshape(-1, 16),
            running=np.array(self._running, np.uint32),
            objects=self.objects,
            files=self.files,
            copies=self.copies,
            reused_bytes=self.reused_bytes,
            array_documents=self.array_documents,
            seconds=self.seconds,
        )

    def to_bytes(self) -> bytes:
        """The report for the coordinator in another process, see :meth:`RankReport.from_bytes`."""
        return zlib.compress(pickle.dumps(self.report()), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What one rank tells the coordinator of its part of a save.

    Attributes:
        rank: its global rank.
        keys: of the arrays that it writes to.
        documents: :func:`digest_of` the document of each, ``(keys,)``.
        summaries: :func:`summary_of` each.
        created: key -> document text and array, of those that it creates.
        array: position in ``keys`` of each chunk's array, ``(chunks,)``.
        chunk: position of each chunk in C order over its grid, ``(chunks,)``.
        stored, crc, digest, running: as in :class:`Manifest`, in the order of ``chunk``.

    The others are described at :class:`RankManifest`.
    """

    rank: int
    keys: list[str]
    documents: NDArray[np.uint64]
    summaries: list[str]
    created: dict[str, tuple[str, ArrayMeta]]
    array: NDArray[np.int64]
    chunk: NDArray[np.int64]
    stored: NDArray[np.uint64]
    crc: NDArray[np.uint32]
    digest: NDArray[np.uint8]
    running: NDArray[np.uint32]
    objects: list[str]
    files: dict[str, int]
    copies: dict[str, list[str]]
    reused_bytes: int
    array_documents: bool
    seconds: dict[str, float]

    @classmethod
    def from_bytes(cls, data: bytes, number: int) -> RankReport:
        """Unpack what a rank of the same job sent.

        Args:
            data: of :meth:`RankManifest.to_bytes`.
            number: of the rank, for error texts.

        Raises:
            DamagedCheckpointError: it is no such report.
        """
        try:
            report = pickle.loads(zlib.decompress(data))
            if not isinstance(report, cls):
                raise TypeError(f"a {type(report).__name__}")
        except Exception as error:  # pickle raises many kinds on damaged input
            raise DamagedCheckpointError(
                f"the report of rank {number} can not be read ({error}); do all ranks run the same "
                "version of shardstore? Save again",
                rank=number,
            ) from error
        return report


def summary_of(meta: ArrayMeta) -> str:
    """What ranks may disagree about, in words."""
    sharding = "" if meta.shard_shape is None else f", shards of {meta.shard_shape}"
    return (
        f"global shape {meta.shape}, data type {meta.dtype}{sharding}, chunks of "
        f"{meta.grid.chunk_shape}"
    )


def digest_of(text: str) -> int:
    """Which document an array has, in 64 bits."""
    return xxhash.xxh3_64_intdigest(text.encode())


def _json_column(value: object) -> NDArray[np.uint8]:
    return np.frombuffer(zlib.compress(json.dumps(value).encode(), 1), dtype=np.uint8)


def _json_of(column: NDArray[Any]) -> Any:
    return json.loads(zlib.decompress(column.tobytes()))


def _pack(columns: Mapping[str, NDArray[Any]]) -> bytes:
    out = io.BytesIO()
    np.savez(out, allow_pickle=False, **columns)
    return out.getvalue()


def _unpack(data: bytes, url: str) -> dict[str, NDArray[Any]]:
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as columns:
            return {name: columns[name] for name in columns.files}
    except Exception as error:  # np.load raises many kinds on damaged input
        raise DamagedCheckpointError(
            f"{url} is damaged: its columns can not be read; load an earlier checkpoint", url=url
        ) from error


def differences(one: str, other: str) -> str:
    """In what two documents of an array differ, in words."""
    a, b = json.loads(one), json.loads(other)
    parts = [
        f"{name} {json.dumps(a.get(name))} against {json.dumps(b.get(name))}"
        for name in ("shape", "data_type", "dtype", "chunk_grid", "chunks", "codecs", "attributes")
        if a.get(name) != b.get(name)
    ]
    return "; ".join(parts) or "documents differ"


@dataclass
class Manifest:
    """One row a chunk, in order of the arrays and, within an array, of the chunks in C order.

    Attributes:
        arrays: ``(node, number of chunks, bytes of a decoded chunk)`` in order.
        stored: bytes of each stored object, ``(chunks,)`` uint64.
        crc: crc32c of each decoded chunk, ``(chunks,)`` uint32.
        digest: xxh3-128 of each decoded chunk, ``(chunks, 16)`` uint8.
        rank: global rank that wrote each chunk, ``(chunks,)`` uint32.
        running: crc32c at the inner block boundaries of all chunks, in the same order.
    """

    arrays: list[tuple[str, int, int]]
    stored: NDArray[np.uint64]
    crc: NDArray[np.uint32]
    digest: NDArray[np.uint8]
    rank: NDArray[np.uint32]
    running: NDArray[np.uint32]

    def __post_init__(self) -> None:
        self._start: dict[str, tuple[int, int, int, int, int]] = {}
        first = boundary = 0
        for node, chunks, size in self.arrays:
            length = inner_blocks(size)
            self._start[node] = (first, boundary, length, chunks, size)
            first += chunks
            boundary += chunks * length

    def row(self, meta: ArrayMeta, index: Sequence[int]) -> int | None:
        """Row of a chunk, ``None`` where the manifest does not know the array."""
        start = self._of(meta)
        return None if start is None else start[0] + meta.grid.linear(index)

    def first_row(self, meta: ArrayMeta) -> int | None:
        """Row of an array's first chunk, ``None`` where the manifest does not know the array."""
        start = self._of(meta)
        return None if start is None else start[0]

    def place(self, node: str) -> tuple[int, int, int] | None:
        """First row, number of chunks and bytes of a decoded chunk of what was saved as a node."""
        start = self._start.get(node)
        return None if start is None else (start[0], start[3], start[4])

    def _of(self, meta: ArrayMeta) -> tuple[int, int, int] | None:
        """First row, first inner boundary and boundaries a chunk of an array.

        ``None`` too where the array has another grid by now: its checksums are of no use then.
        """
        start = self._start.get(meta.node)
        if start is None or start[3:] != (meta.grid.size, meta.chunk_bytes):
            return None
        return start[:3]

    def running_of(self, meta: ArrayMeta, index: Sequence[int]) -> NDArray[np.uint32] | None:
        """Running checksums of one chunk at its inner block boundaries, then the whole chunk's."""
        start = self._of(meta)
        if start is None:
            return None
        first, boundary, length = start
        linear = meta.grid.linear(index)
        inner = self.running[boundary + linear * length : boundary + (linear + 1) * length]
        return np.append(inner, self.crc[first + linear])

    def writer(self, meta: ArrayMeta, index: Sequence[int]) -> int | None:
        """Global rank that wrote a chunk."""
        row = self.row(meta, index)
        return None if row is None else int(self.rank[row])

    def chunk_sums(self) -> dict[str, str]:
        """Node -> base64 of the crc32c of its chunks in order, little-endian, for the commit."""
        crcs = self.crc.astype("<u4").tobytes()
        return {
            node: b64encode(crcs[4 * start[0] : 4 * (start[0] + start[3])]).decode()
            for node, start in self._start.items()
        }

    def without(self, nodes: set[str]) -> Manifest:
        """The manifest less some arrays."""
        keep_rows = np.ones(len(self.crc), dtype=bool)
        keep_running = np.ones(len(self.running), dtype=bool)
        for node, chunks, _ in self.arrays:
            if node in nodes:
                first, boundary, length, _, _ = self._start[node]
                keep_rows[first : first + chunks] = False
                keep_running[boundary : boundary + chunks * length] = False
        return Manifest(
            [entry for entry in self.arrays if entry[0] not in nodes],
            self.stored[keep_rows],
            self.crc[keep_rows],
            self.digest[keep_rows],
            self.rank[keep_rows],
            self.running[keep_running],
        )

    def to_bytes(self) -> bytes:
        """Content of ``manifest.npz``."""
        return _pack(
            {
                "arrays": _json_column(self.arrays),
                "stored_bytes": self.stored,
                "crc32c": self.crc,
                "xxh3_128": self.digest,
                "rank": self.rank,
                "running_crc32c": self.running,
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes, url: str) -> Manifest:
        """Parse ``manifest.npz``.

        Raises:
            DamagedCheckpointError: damaged.
        """
        columns = _unpack(data, url)
        try:
            arrays = [
                (require_inside(node, url), int(n), int(size))
                for node, n, size in _json_of(columns["arrays"])
            ]
            manifest = cls(
                arrays,
                columns["stored_bytes"],
                columns["crc32c"],
                columns["xxh3_128"],
                columns["rank"],
                columns["running_crc32c"],
            )
            if any(n < 0 or size < 1 for _, n, size in arrays):
                raise ValueError("an array of impossible size")
            rows = sum(n for _, n, _ in arrays)
            boundaries = sum(n * inner_blocks(size) for _, n, size in arrays)
            if (
                any(len(c) != rows for c in (manifest.stored, manifest.crc, manifest.rank))
                or manifest.digest.shape != (rows, 16)
                or len(manifest.running) != boundaries
            ):
                raise ValueError("columns differ in length")
        except (KeyError, ValueError, TypeError, zlib.error) as error:
            raise DamagedCheckpointError(
                f"{url} is damaged ({type(error).__name__}: {error})", url=url
            ) from error
        return manifest


def content_digest(arrays: Iterable[ArrayMeta], manifest: Manifest) -> str | None:
    """XXH3-128, in hexadecimal, over keys, data types, shapes and chunk shapes (as JSON), and then
    the hashes of all chunks, in the order of the keys.

    Args:
        arrays: of a checkpoint, in any order.
        manifest: of the same.

    Returns:
        ``None`` where there is no chunk at all, or the manifest is not about these arrays.
    """
    metas = sorted(arrays, key=lambda meta: meta.key)
    rows = [(meta.node, meta.grid.size, meta.chunk_bytes) for meta in metas]
    if rows != manifest.arrays or not len(manifest.digest):
        return None
    described = [[m.key, m.dtype, list(m.shape), list(m.grid.chunk_shape)] for m in metas]
    hasher = xxhash.xxh3_128(json.dumps(described, separators=(",", ":")).encode())
    hasher.update(manifest.digest.tobytes())
    return hasher.hexdigest()
