"""Merges the ranks' reports into one manifest and checks them. The process that commits calls it.

Each chunk has a row. Sorting the ranks' rows also shows whether each chunk was written exactly
once. The work is linear in ranks, in arrays per rank and in chunks, over whole NumPy columns.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardstore.errors import MAY_LACK, AccessPatternError
from shardstore.storage.format.documents import ArrayMeta, array_document
from shardstore.storage.format.grid import inner_blocks
from shardstore.storage.format.manifest import ROW, Counted, Manifest, RankManifest
from shardstore.storage.format.packs import Places

MAX_COLUMNS_RANKS = 256
"""Up to this number of ranks, the columns of the commit record have one value per rank."""

SHOWN = 4
"""Maximum number of wrong regions that an error lists."""


@dataclass
class Merged:
    """The merged reports of all ranks.

    Attributes:
        manifest: the manifest of the checkpoint.
        documents: ``(node, document text)`` of every array that is not packed.
        arrays: metadata of every array.
        objects: unique key of each sharded object -> ranks that wrote it.
        files: name -> crc32c and size of the files other than chunks.
        copies: rank -> keys that it holds copies of, for the ranks that report them.
        reused_bytes: bytes of the chunks that were reused from a base.
        array_documents: whether each array has its own document in addition to the root's copy.
        packs: names of the packs; ``None`` if small chunks are not packed.
        ranks: bytes, chunks and durations of each rank, see :func:`rank_record`.
    """

    manifest: Manifest
    documents: list[tuple[str, str]]
    arrays: list[ArrayMeta]
    objects: dict[str, list[int]]
    files: dict[str, tuple[int, int]]
    copies: dict[int, Sequence[str]]
    reused_bytes: int
    array_documents: bool
    packs: Sequence[str] | None
    ranks: dict[str, Any]


def merge(reports: Sequence[bytes | RankManifest], *, check: bool = True) -> Merged:
    """Merge the manifests of all ranks and check that every chunk was written exactly once.

    In addition to the reports, this takes about twice the memory of the result.

    Args:
        reports: the report of each rank, as sent (:meth:`RankManifest.to_bytes`) or as an object.
        check: whether to raise if chunks are missing or were written twice. Without the check, a
            chunk that several ranks wrote counts for the last of them, and a missing chunk is an
            error only at a load.

    Raises:
        AccessPatternError: "Invalid access pattern", with key, region and ranks; or the ranks
            disagree about ``array_documents``.
    """
    whole = joined(reports)
    for key, number in whole.arrays.items():
        if key not in whole.created:
            rank = whole.describers[number]
            raise AccessPatternError(
                f"Invalid access pattern: rank {rank} wrote a part of key {key!r}, but "
                "no rank holds its first shard (offset 0 along every axis) as main replica; check "
                "offsets and replica ids",
                key=key,
                rank=rank,
            )
    created = dict(sorted(whole.created.items()))
    numbers = {key: number for number, key in enumerate(created)}
    rows = np.frombuffer(whole.rows, ROW)
    array = np.array([numbers[key] for key in whole.arrays], np.int64)[rows["array"]]
    metas = list(created.values())
    counted = [Counted.of(meta) for meta in metas]
    starts = np.cumsum([0, *(one.chunks for one in counted)], dtype=np.int64)
    position = starts[array] + rows["chunk"]
    if check:
        _check_coverage(position, rows["rank"], starts, metas)
    ordered = np.zeros(int(starts[-1]), ROW)
    ordered[position] = rows
    if whole.packs:
        metas = _with_places(metas, ordered, starts, tuple(whole.packs))
    objects: dict[str, list[int]] = {}
    for part in whole.others:
        for unique_key in part.objects:
            objects.setdefault(unique_key, []).append(part.rank)
    seconds = {part.rank: part.seconds for part in whole.others}
    ranks = 1 + max(seconds, default=0)
    chunks = np.bincount(rows["rank"], minlength=ranks)
    stored = np.zeros(ranks, np.int64)
    np.add.at(stored, rows["rank"], rows["stored"].astype(np.int64))
    return Merged(
        Manifest(
            arrays=counted,
            **{name: ordered[name].copy() for name in ("stored", "crc", "digest", "rank")},
            running=_running(whole, array, starts, [one.size for one in counted]),
        ),
        [(meta.node, array_document(meta)) for meta in metas if meta.places is None],
        metas,
        objects,
        {name: sums for part in (whole, *whole.others) for name, sums in part.files.items()},
        {part.rank: part.copies for part in whole.others if part.copies},
        sum(part.reused_bytes for part in whole.others),
        _agreed(whole.others, "array_documents", default=True),
        whole.packs if _agreed(whole.others, "has_packs", default=False) else None,
        rank_record(seconds, stored.tolist(), chunks.tolist()),
    )


def joined(reports: Iterable[bytes | RankManifest], rank: int = 0) -> RankManifest:
    """Return one report that combines those of several ranks, as input of :func:`merge`.

    Args:
        reports: the reports.
        rank: the rank that joins them.

    Raises:
        AccessPatternError, DamagedCheckpointError: as :func:`merge`.
    """
    whole = RankManifest(rank)
    for report in reports:
        if isinstance(report, bytes):
            report = RankManifest.from_bytes(report)
        whole.add_report(report)
    return whole


_OPTIONS = {"array_documents": "array_documents", "has_packs": "pack"}
"""Members of a report on which the ranks must agree, and the options that set them."""


def _agreed(parts: Iterable[RankManifest], name: str, *, default: bool) -> bool:
    """Return a member of all reports. Raise if the ranks disagree."""
    ranks = {bool(getattr(part, name)): part.rank for part in parts}
    if len(ranks) > 1:
        option = _OPTIONS[name]
        raise AccessPatternError(
            f"rank {ranks[True]} saves with {option}=True but rank {ranks[False]} with "
            f"{option}=False; give every rank the same",
            rank=ranks[False],
        )
    return next(iter(ranks), default)


def _with_places(
    metas: Sequence[ArrayMeta],
    rows: NDArray[np.void],
    starts: NDArray[np.int64],
    files: tuple[str, ...],
) -> list[ArrayMeta]:
    """Return arrays with the places of packed chunks. ``starts``: first row of each array."""
    places = np.zeros(len(rows), [("file", "<u4"), ("first", "<u8"), ("size", "<u4")])
    places["file"], places["first"], places["size"] = rows["file"], rows["first"], rows["stored"]
    return [
        meta if meta.places is None else replace(meta, places=Places(files, places[a:b].tobytes()))
        for meta, a, b in zip(metas, starts[:-1], starts[1:], strict=True)
    ]


def _running(
    whole: RankManifest,
    array: NDArray[np.int64],
    starts: NDArray[np.int64],
    chunk_bytes: Iterable[int],
) -> NDArray[np.uint32]:
    """Return the ranks' running checksums in the order of the manifest's rows.

    The number of checksums per chunk depends on the array. The checksums of a chunk stay together
    and move from their position in the ranks' order to that in the manifest.

    Args:
        whole: the joined reports.
        array: number of the array of each chunk in them.
        starts: first row of each array in the manifest, and the number of rows.
        chunk_bytes: size of a chunk of each array.
    """
    lengths = np.array([inner_blocks(size) for size in chunk_bytes], np.int64)
    bases = np.cumsum([0, *(np.diff(starts) * lengths)], dtype=np.int64)
    count, chunk = lengths[array], np.frombuffer(whole.rows, ROW)["chunk"]
    moved = bases[array] + chunk * count - (np.cumsum(count) - count)
    out = np.zeros(int(bases[-1]), np.uint32)
    out[np.repeat(moved, count) + np.arange(len(whole.running))] = whole.running
    return out


def _check_coverage(
    position: NDArray[np.int64],
    rank: NDArray[np.uint32],
    starts: NDArray[np.int64],
    metas: Sequence[ArrayMeta],
) -> None:
    times = np.bincount(position, minlength=int(starts[-1]))
    wrong = np.flatnonzero(times != 1)
    if not len(wrong):
        return
    shown = []
    numbers = np.searchsorted(starts, wrong[:SHOWN], side="right") - 1
    for row, number in zip(wrong[:SHOWN], numbers, strict=True):
        meta = metas[number]
        box = meta.grid.box(meta.grid.index_at(int(row - starts[number])))
        how = "by no rank (no main replica holds it)"
        if times[row]:
            ranks = np.unique(rank[position == row]).tolist()
            how = f"{times[row]} times, by rank(s) {ranks} (they overlap as main replicas)"
        region = f"key {meta.key!r} offset {box.offset} shape {box.shape}"
        shown.append(f"{region} was written {how}")
    more = f"; and {len(wrong) - SHOWN} more regions" if len(wrong) > SHOWN else ""
    lacks = "" if times[wrong].all() else f"; {MAY_LACK}"
    raise AccessPatternError(
        f"Invalid access pattern: {'; '.join(shown)}{more}. Nothing was committed; "
        f"check global_offset and replica_id of these shards{lacks}",
        key=metas[numbers[0]].key,
    )


def rank_record(
    seconds: Mapping[int, Mapping[str, float]], stored: Sequence[int], chunks: Sequence[int]
) -> dict[str, Any]:
    """Return the slowest rank, and the columns ``bytes``, ``chunks`` and ``NAME_s`` in the order of
    the ranks. For more than 256 ranks, a column is its minimum, median and maximum.

    Args:
        seconds: rank -> phase (``plan``, ``exchange``, ``stage``, ``write``) -> seconds.
        stored: bytes of the chunks that each rank wrote, or reused from a base.
        chunks: number of these chunks.
    """
    ranks = sorted(seconds)
    if not ranks:
        return {}
    record: dict[str, Any] = {
        "slowest": max(ranks, key=lambda rank: sum(seconds[rank].values())),
        "bytes": [stored[rank] for rank in ranks],
        "chunks": [chunks[rank] for rank in ranks],
    }
    for name in sorted({name for phases in seconds.values() for name in phases}):
        record[f"{name}_s"] = [round(seconds[rank].get(name, 0), 4) for rank in ranks]
    if len(ranks) > MAX_COLUMNS_RANKS:
        for name in record.keys() - {"slowest"}:
            record[name] = _summary(record[name])
    return record


def _summary(values: Sequence[float]) -> dict[str, float]:
    # median_low returns a value of the column, not a mean of two: bytes and chunks stay integers.
    return {"min": min(values), "median": statistics.median_low(values), "max": max(values)}
