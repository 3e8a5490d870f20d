"""Merges the ranks' reports into one manifest and checks them. Called by the process that commits.

Each chunk has a row; putting the ranks' rows in order also proves that each was written exactly
once. The work is linear in ranks, in arrays a rank and in chunks, over whole NumPy columns.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from shardstore.errors import AccessPatternError
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import inner_blocks
from shardstore.storage.format.manifest import (
    Manifest,
    RankReport,
    differences,
    digest_of,
    summary_of,
)

__all__ = ["MAX_COLUMNS_RANKS", "Merged", "RankRow", "merge", "rank_record"]

MAX_COLUMNS_RANKS = 256
"""Up to so many ranks each has its number in each column of the commit record."""

SHOWN = 4
"""Wrong regions that an error lists."""


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank's part of a save.

    Attributes:
        rank: global rank.
        stored_bytes: bytes of the chunks that it wrote, or took over from a base.
        chunks: how many.
        seconds: what it did -> seconds (``plan``, ``exchange``, ``stage``, ``write``).
    """

    rank: int
    stored_bytes: int
    chunks: int
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Merged:
    """All ranks' manifests as one.

    Attributes:
        manifest: the columns.
        documents: ``(node, document text)`` of every array.
        arrays: the arrays themselves.
        objects: unique key of each sharded object -> ranks that wrote it.
        files: name -> crc32c of the files that are no chunks.
        copies: rank -> kind -> keys that it holds copies of, of the ranks that tell.
        reused_bytes: bytes of the chunks that were taken over from a base.
        array_documents: whether each array has a document of its own beside the root's copy.
        ranks: what each rank wrote and how long it took.
    """

    manifest: Manifest
    documents: list[tuple[str, str]]
    arrays: list[ArrayMeta]
    objects: dict[str, list[int]]
    files: dict[str, int] = field(default_factory=dict)
    copies: dict[int, dict[str, list[str]]] = field(default_factory=dict)
    reused_bytes: int = 0
    array_documents: bool = True
    ranks: Sequence[RankRow] = ()


def merge(reports: Sequence[bytes | RankReport], *, check: bool = True) -> Merged:
    """Merge the manifests of all ranks and check that every chunk was written exactly once.

    Memory beyond the reports: about twice that of the result.

    Args:
        reports: of each rank, as it was sent (:meth:`RankManifest.to_bytes`) or, of this process,
            as it is (:meth:`RankManifest.report`).
        check: raise if chunks are missing or were written twice. Without it a chunk that several
            ranks wrote counts for the last of them, and missing ones are left to readers to find.

    Raises:
        AccessPatternError: "Invalid access pattern", with key, region and ranks; or the ranks do
            not agree whether arrays get documents of their own.
    """
    parts = [
        RankReport.from_bytes(report, number) if isinstance(report, bytes) else report
        for number, report in enumerate(reports)
    ]
    array_documents = _array_documents(parts)
    created = dict(sorted(_created(parts).items()))
    order = {key: i for i, key in enumerate(created)}
    metas = [found.meta for found in created.values()]
    wanted = np.array([digest_of(found.text) for found in created.values()], dtype=np.uint64)
    lookups = [_lookup(part, order, wanted, created) for part in parts]
    objects: dict[str, list[int]] = {}
    for part in parts:
        for unique_key in part.objects:
            objects.setdefault(unique_key, []).append(part.rank)

    array = _joined([one[p.array] for one, p in zip(lookups, parts, strict=True)])
    entries = [(meta.node, meta.grid.size, meta.chunk_bytes) for meta in metas]
    starts = np.concatenate([[0], np.cumsum([size for _, size, _ in entries], dtype=np.int64)])
    chunk = _column(parts, "chunk")
    rows = starts[array] + chunk
    del chunk
    counts = [len(part.chunk) for part in parts]
    rank = np.repeat(np.array([part.rank for part in parts], np.uint32), counts)
    total = int(starts[-1])
    if check:
        _check_coverage(rows, total, starts, metas, rank)
    lengths = np.array([inner_blocks(size) for _, _, size in entries], dtype=np.int64)
    return Merged(
        Manifest(
            entries,
            _ordered(_column(parts, "stored"), rows, total),
            _ordered(_column(parts, "crc"), rows, total),
            _ordered(_column(parts, "digest"), rows, total),
            _ordered(rank, rows, total),
            _order_running(_column(parts, "running"), array, rows, starts, lengths),
        ),
        [(found.meta.node, found.text) for found in created.values()],
        metas,
        objects,
        {name: crc for part in parts for name, crc in part.files.items()},
        {part.rank: part.copies for part in parts if part.copies},
        sum(part.reused_bytes for part in parts),
        array_documents,
        [
            RankRow(p.rank, int(p.stored.sum()), n, p.seconds)
            for p, n in zip(parts, counts, strict=True)
        ],
    )


def _array_documents(parts: Sequence[RankReport]) -> bool:
    """Whether the arrays of a save get documents of their own; the ranks have to agree."""
    ranks = {bool(part.array_documents): part.rank for part in reversed(parts)}
    if len(ranks) > 1:
        raise AccessPatternError(
            f"rank {ranks[True]} saves with array_documents=True but rank {ranks[False]} with "
            "array_documents=False; give every rank the same",
            rank=ranks[False],
        )
    return next(iter(ranks), True)


def _joined(columns: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate(columns) if columns else np.zeros(0, np.int64)


def _column(parts: Sequence[RankReport], name: str) -> NDArray[Any]:
    return _joined([getattr(part, name) for part in parts])


def _ordered(values: NDArray[Any], rows: NDArray[np.int64], total: int) -> NDArray[Any]:
    """The values of the ranks, one after the other, in the order of the rows."""
    out = np.zeros((total, *values.shape[1:]), values.dtype)
    out[rows] = values
    return out


def _order_running(
    given: NDArray[np.uint32],
    array: NDArray[np.int64],
    rows: NDArray[np.int64],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
) -> NDArray[np.uint32]:
    """The ranks' running checksums in the order of the rows.

    A chunk has as many as its array says (31 at the most): chunks with equally many are moved
    together, as rows of that length.
    """
    bases = np.concatenate([[0], np.cumsum(np.diff(starts) * lengths)])
    out = np.zeros(int(bases[-1]), np.uint32)
    if not len(given):
        return out
    count = lengths[array]
    found = np.unique(count).tolist()
    if len(found) == 1 and len(out) == found[0] * int(starts[-1]):
        out.reshape(-1, found[0])[rows] = given.reshape(-1, found[0])
        return out
    source = np.cumsum(count) - count
    for length in found:
        if not length:
            continue
        here = np.flatnonzero(count == length)
        which = array[here]
        target = bases[which] + (rows[here] - starts[which]) * length
        values = sliding_window_view(given, length)[source[here]]
        sliding_window_view(out, length, writeable=True)[target] = values
    return out


class _Created(NamedTuple):
    rank: int
    text: str
    meta: ArrayMeta


def _created(parts: Sequence[RankReport]) -> dict[str, _Created]:
    """Key -> document, array and creating rank, from the ranks that created."""
    created: dict[str, _Created] = {}
    for part in parts:
        for key, (text, meta) in part.created.items():
            first = created.setdefault(key, _Created(part.rank, text, meta))
            if first.text != text:
                raise AccessPatternError(
                    f"Invalid access pattern: rank {first.rank} and rank {part.rank} both hold "
                    f"the first shard of key {key!r} but describe the tensor differently: "
                    f"{differences(first.text, text)}",
                    key=key,
                )
    return created


def _lookup(
    part: RankReport,
    order: Mapping[str, int],
    wanted: NDArray[np.uint64],
    created: Mapping[str, _Created],
) -> NDArray[np.int64]:
    """Places of a rank's arrays in the order of the keys.

    Raises:
        AccessPatternError: it wrote to an array that nobody created, or means another one than who
            created it.
    """
    keys: list[str] = part.keys
    found = np.fromiter((order.get(key, -1) for key in keys), np.int64, len(keys))
    unknown = np.flatnonzero(found < 0)
    rank = part.rank
    if len(unknown):
        key = keys[int(unknown[0])]
        raise AccessPatternError(
            f"Invalid access pattern: rank {rank} wrote a part of key {key!r}, but no rank holds "
            "its first shard (offset 0 along every axis) as main replica; check offsets and "
            "replica ids",
            key=key,
            rank=rank,
        )
    other = np.flatnonzero(wanted[found] != part.documents)
    if len(other):
        number = int(other[0])
        key = keys[number]
        mine, first = part.summaries[number], created[key]
        raise AccessPatternError(
            f"Invalid access pattern: rank {rank} and rank {first.rank} describe key {key!r} "
            f"differently: rank {rank} has {mine}; rank {first.rank} has "
            f"{summary_of(first.meta)}; give both the same",
            key=key,
            rank=rank,
        )
    return found


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


def rank_record(rows: Sequence[RankRow]) -> dict[str, Any]:
    """The columns ``bytes``, ``chunks`` and ``NAME_s`` in the order of the ranks; of more than 256
    ranks the least, median and largest value of each, and which rank took longest.

    Args:
        rows: of each rank, in any order; several of one rank add up.
    """
    rows = _added_up(rows)
    if not rows:
        return {}
    names = sorted({name for row in rows for name in row.seconds})
    columns: dict[str, list[float]] = {
        "bytes": [row.stored_bytes for row in rows],
        "chunks": [row.chunks for row in rows],
    }
    for name in names:
        columns[f"{name}_s"] = [round(row.seconds.get(name, 0.0), 4) for row in rows]
    took = [sum(row.seconds.values()) for row in rows]
    record: dict[str, Any] = {"slowest": rows[took.index(max(took))].rank}
    for name, values in columns.items():
        record[name] = values if len(rows) <= MAX_COLUMNS_RANKS else _summary(values)
    return record


def _added_up(rows: Sequence[RankRow]) -> list[RankRow]:
    """One row a rank, in the order of the ranks."""
    found: dict[int, RankRow] = {}
    for row in rows:
        before = found.get(row.rank, RankRow(row.rank, 0, 0))
        found[row.rank] = RankRow(
            row.rank,
            before.stored_bytes + row.stored_bytes,
            before.chunks + row.chunks,
            {
                name: before.seconds.get(name, 0.0) + row.seconds.get(name, 0.0)
                for name in {**before.seconds, **row.seconds}
            },
        )
    return [found[rank] for rank in sorted(found)]


def _summary(values: Sequence[float]) -> dict[str, float]:
    # A value that occurs, not a mean of two: bytes and chunks stay whole numbers.
    return {"min": min(values), "median": statistics.median_low(values), "max": max(values)}
