"""What was written: per rank while saving, merged and checked at the commit, kept beside the
arrays.

A rank's manifest lists the arrays that it touched and, for each chunk that it wrote, size, crc32c,
a 128-bit hash and the running crc32c at block boundaries. The coordinator merges the ranks'
manifests into columns with one row a chunk, in the order of the arrays and of the chunks within an
array, which also proves that each chunk was written exactly once. All columns are NumPy arrays: the
work is linear in chunks, and the file (``manifest.npz``, no pickle) opens in any NumPy.

Checksums and hashes are over the decoded chunk: little-endian, C order, padded to the full chunk
shape.
"""

from __future__ import annotations

import io
import json
import zlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardstore.errors import AccessPatternError, DamagedCheckpointError
from shardstore.storage import documents
from shardstore.storage.documents import ArrayMeta
from shardstore.storage.grid import inner_blocks
from shardstore.storage.names import MANIFEST_NAME
from shardstore.storage.rank_record import RankRow

__all__ = ["MANIFEST_NAME", "ChunkRecord", "Manifest", "RankManifest", "merge"]

SHOWN = 4


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
        reused_bytes: bytes of the chunks that it took over from a base.
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
    reused_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def add_array(self, meta: ArrayMeta, *, created: bool) -> str:
        """Note an array that this rank writes to, and whether it wrote the document. Returns the
        document's text.

        Raises:
            AccessPatternError: the same key was noted with another document.
        """
        known = self._arrays.get(meta.key)
        if known is not None and known[1] == meta:
            text = known[2]
        else:
            text = documents.array_document(meta)
            if known is not None and known[2] != text:
                raise AccessPatternError(
                    f"key {meta.key!r} is used for two different tensors on rank {self.rank}: "
                    f"{_differences(known[2], text)}; give them different keys",
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

    @property
    def stored_bytes(self) -> int:
        """Bytes of all chunks written."""
        return sum(self._stored)

    def to_bytes(self) -> bytes:
        """For sending to the coordinator."""
        arrays = [
            [key, text if key in self._created else [_digest_of(text), _summary(meta)]]
            for key, (_, meta, text) in self._arrays.items()
        ]
        head = {"rank": self.rank, "arrays": arrays, "created": sorted(self._created)}
        head["objects"] = self.objects
        head["reused_bytes"] = self.reused_bytes
        head["seconds"] = self.seconds
        return _pack(
            {
                "head": _json_column(head),
                "array": np.array(self._array, dtype=np.uint32),
                "chunk": np.array(self._chunk, dtype=np.uint64),
                "stored": np.array(self._stored, dtype=np.uint64),
                "crc": np.array(self._crc, dtype=np.uint32),
                "digest": np.frombuffer(b"".join(self._digest), dtype=np.uint8).reshape(-1, 16),
                "running": np.array(self._running, dtype=np.uint32),
            }
        )


def _summary(meta: ArrayMeta) -> str:
    """What ranks may disagree about, in words."""
    sharding = "" if meta.shard_shape is None else f", shards of {meta.shard_shape}"
    return (
        f"global shape {meta.shape}, data type {meta.dtype}{sharding}, chunks of "
        f"{meta.grid.chunk_shape}"
    )


def _digest_of(text: str) -> int:
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


def _differences(one: str, other: str) -> str:
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
                (str(node), int(n), int(size)) for node, n, size in _json_of(columns["arrays"])
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


@dataclass
class Merged:
    """All ranks' manifests as one.

    Attributes:
        manifest: the columns.
        documents: ``(node, document text)`` of every array.
        arrays: the arrays themselves.
        objects: unique key of each sharded object -> ranks that wrote it.
        reused_bytes: bytes of the chunks that were taken over from a base.
        ranks: what each rank wrote and how long it took.
    """

    manifest: Manifest
    documents: list[tuple[str, str]]
    arrays: list[ArrayMeta]
    objects: dict[str, list[int]]
    reused_bytes: int = 0
    ranks: Sequence[RankRow] = ()


def merge(reports: Sequence[bytes], *, check: bool = True) -> Merged:
    """Merge the manifests of all ranks and check that every chunk was written exactly once.

    Args:
        reports: :meth:`RankManifest.to_bytes` of each rank.
        check: raise if chunks are missing or were written twice. Without it a chunk that several
            ranks wrote counts for the last of them, and missing ones are left to readers to find.

    Raises:
        AccessPatternError: "Invalid access pattern", with key, region and ranks.
    """
    parts = [_unpack(report, f"manifest of rank {r}") for r, report in enumerate(reports)]
    heads = [_json_of(part["head"]) for part in parts]
    texts, creators = _documents(heads)
    order = {key: i for i, key in enumerate(sorted(texts))}
    metas = [_meta(key, texts[key]) for key in order]
    objects: dict[str, list[int]] = {}
    for head in heads:
        for unique_key in head["objects"]:
            objects.setdefault(unique_key, []).append(head["rank"])

    lookup = [
        np.array([order.get(key, -1) for key, _ in head["arrays"]] or [0], dtype=np.int64)
        for head in heads
    ]
    _agree(heads, texts, creators)
    array = np.concatenate([lookup[i][part["array"]] for i, part in enumerate(parts)])
    chunk = np.concatenate([part["chunk"] for part in parts]).astype(np.int64)
    rank = np.concatenate(
        [
            np.full(len(part["chunk"]), head["rank"], np.uint32)
            for head, part in zip(heads, parts, strict=True)
        ]
    )
    sizes = np.array([meta.grid.size for meta in metas], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    rows = starts[array] + chunk if len(array) else np.zeros(0, np.int64)
    total = int(starts[-1])
    if check:
        _check_coverage(rows, total, starts, metas, rank)

    lengths = np.array([inner_blocks(meta.chunk_bytes) for meta in metas] or [0], dtype=np.int64)
    stored = np.zeros(total, np.uint64)
    crc = np.zeros(total, np.uint32)
    digest = np.zeros((total, 16), np.uint8)
    writer = np.zeros(total, np.uint32)
    stored[rows] = np.concatenate([part["stored"] for part in parts])
    crc[rows] = np.concatenate([part["crc"] for part in parts])
    digest[rows] = np.concatenate([part["digest"] for part in parts])
    writer[rows] = rank
    running = _order_running(parts, array, rows, sizes, starts, lengths)
    entries = [(meta.node, meta.grid.size, meta.chunk_bytes) for meta in metas]
    return Merged(
        Manifest(entries, stored, crc, digest, writer, running),
        [(meta.node, texts[meta.key]) for meta in metas],
        metas,
        objects,
        sum(head["reused_bytes"] for head in heads),
        [
            RankRow(head["rank"], int(part["stored"].sum()), len(part["chunk"]), head["seconds"])
            for head, part in zip(heads, parts, strict=True)
        ],
    )


def _order_running(
    parts: Sequence[Mapping[str, NDArray[Any]]],
    array: NDArray[np.int64],
    rows: NDArray[np.int64],
    sizes: NDArray[np.int64],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
) -> NDArray[np.uint32]:
    """The ranks' running checksums put into the order of the rows."""
    bases = np.concatenate([[0], np.cumsum(sizes * lengths[: len(sizes)])])
    out = np.zeros(int(bases[-1]), np.uint32)
    given = np.concatenate([part["running"] for part in parts])
    count = lengths[array] if len(array) else np.zeros(0, np.int64)
    if not int(count.sum()):
        return out
    target = bases[array] + (rows - starts[array]) * count
    source = np.cumsum(count) - count
    within = np.arange(int(count.sum())) - np.repeat(source, count)
    out[np.repeat(target, count) + within] = given
    return out


def _meta(key: str, text: str) -> ArrayMeta:
    from shardstore.storage.names import node_name

    document = json.loads(text)
    if document["zarr_format"] == 2:
        return documents.parse_v2_array(node_name(key), text, key)
    return documents.parse_array(node_name(key), document, key)


def _documents(heads: Sequence[Mapping[str, Any]]) -> tuple[dict[str, str], dict[str, int]]:
    """Document text and creating rank of every array, from the ranks that wrote the documents."""
    texts: dict[str, str] = {}
    creators: dict[str, int] = {}
    for head in heads:
        created = set(head["created"])
        for key, text in head["arrays"]:
            if key not in created:
                continue
            if texts.setdefault(key, text) != text:
                raise AccessPatternError(
                    f"Invalid access pattern: rank {creators[key]} and rank {head['rank']} both "
                    "hold the first shard "
                    f"of key {key!r} but describe the tensor differently: "
                    f"{_differences(texts[key], text)}",
                    key=key,
                )
            creators.setdefault(key, head["rank"])
    return texts, creators


def _agree(
    heads: Sequence[Mapping[str, Any]], texts: Mapping[str, str], creators: Mapping[str, int]
) -> None:
    """Every rank that wrote to an array must mean the same array as the rank that created it."""
    digests = {key: _digest_of(text) for key, text in texts.items()}
    for head in heads:
        created = set(head["created"])
        for key, entry in head["arrays"]:
            if key in created:
                continue
            digest, summary = entry
            if key not in texts:
                raise AccessPatternError(
                    f"Invalid access pattern: rank {head['rank']} wrote a part of key {key!r}, "
                    "but no rank holds its first "
                    "shard (offset 0 along every axis) as main replica; check offsets and "
                    "replica ids",
                    key=key,
                    rank=head["rank"],
                )
            if digests[key] != digest:
                raise AccessPatternError(
                    f"Invalid access pattern: rank {head['rank']} and rank {creators[key]} "
                    f"describe key {key!r} differently: rank {head['rank']} has {summary}; rank "
                    f"{creators[key]} has {_summary(_meta(key, texts[key]))}; give both the same",
                    key=key,
                    rank=head["rank"],
                )


def _check_coverage(
    rows: NDArray[np.int64],
    total: int,
    starts: NDArray[np.int64],
    metas: Sequence[ArrayMeta],
    rank: NDArray[np.uint32],
) -> None:
    times = np.bincount(rows, minlength=total)
    wrong = np.flatnonzero(times != 1)
    if not len(wrong):
        return
    shown = []
    for row in wrong[:SHOWN]:
        number = int(np.searchsorted(starts, row, side="right")) - 1
        meta = metas[number]
        box = meta.grid.box(meta.grid.index(int(row - starts[number])))
        region = f"key {meta.key!r} offset {box.offset} shape {box.shape}"
        if times[row] == 0:
            shown.append(f"{region} was written by no rank (no main replica holds it)")
        else:
            ranks = sorted({int(r) for r in rank[rows == row]})
            shown.append(
                f"{region} was written {int(times[row])} times, by rank(s) {ranks} "
                "(they overlap as main replicas)"
            )
    more = f"; and {len(wrong) - SHOWN} more regions" if len(wrong) > SHOWN else ""
    first = metas[int(np.searchsorted(starts, wrong[0], side="right")) - 1]
    raise AccessPatternError(
        f"Invalid access pattern: {'; '.join(shown)}{more}. Nothing was committed; "
        "check global_offset and replica_id of these shards",
        key=first.key,
    )
