"""Merges the ranks' reports into one manifest and checks them. The process that commits calls it.

Each chunk has a row. Sorting the ranks' rows also shows whether each chunk was written exactly
once. The work is linear in ranks, in arrays per rank and in chunks, over whole NumPy columns.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardstore.errors import AccessPatternError
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import inner_blocks
from shardstore.storage.format.manifest import ROW, Manifest, RankManifest

MAX_COLUMNS_RANKS = 256
"""Up to this number of ranks, the columns of the commit record have one value per rank."""

SHOWN = 4
"""Maximum number of wrong regions that an error lists."""


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank's part of a save.

    Attributes:
        rank: global rank.
        stored_bytes: bytes of the chunks that it wrote, or reused from a base.
        chunks: number of these chunks.
        seconds: phase -> seconds (``plan``, ``exchange``, ``stage``, ``write``).
    """

    rank: int
    stored_bytes: int
    chunks: int
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Merged:
    """The merged reports of all ranks.

    Attributes:
        manifest: the manifest of the checkpoint.
        documents: ``(node, document text)`` of every array.
        arrays: metadata of every array.
        objects: unique key of each sharded object -> ranks that wrote it.
        files: name -> crc32c and size of the files other than chunks.
        copies: rank -> keys that it holds copies of, for the ranks that report them.
        reused_bytes: bytes of the chunks that were reused from a base.
        array_documents: whether each array has its own document in addition to the root's copy.
        ranks: bytes, chunks and durations of each rank.
    """

    manifest: Manifest
    documents: list[tuple[str, str]]
    arrays: list[ArrayMeta]
    objects: dict[str, list[int]]
    files: dict[str, tuple[int, int]]
    copies: dict[int, Sequence[str]]
    reused_bytes: int
    array_documents: bool
    ranks: list[RankRow]


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
    parts = _parts(reports)
    everyone = [one for part in parts for one in (part, *part.others)]
    created = _created(parts)
    numbers = {key: number for number, key in enumerate(created)}
    rows = np.concatenate([np.zeros(0, ROW), *(_rows_of(part, created, numbers) for part in parts)])
    metas = [first.meta for first in created.values()]
    entries = [(meta.node, meta.grid.size, meta.chunk_bytes) for meta in metas]
    starts = np.cumsum([0, *(chunks for _, chunks, _ in entries)], dtype=np.int64)
    position = starts[rows["array"]] + rows["chunk"]
    if check:
        _check_coverage(position, rows["rank"], starts, metas)
    ordered = np.zeros(int(starts[-1]), ROW)
    ordered[position] = rows
    objects: dict[str, list[int]] = {}
    for part in everyone:
        for unique_key in part.objects:
            objects.setdefault(unique_key, []).append(part.rank)
    return Merged(
        Manifest(
            entries,
            **{name: ordered[name].copy() for name in ("stored", "crc", "digest", "rank")},
            running=_running(parts, rows, starts, [size for _, _, size in entries]),
        ),
        [(first.meta.node, first.text) for first in created.values()],
        metas,
        objects,
        {name: sums for part in everyone for name, sums in part.files.items()},
        {part.rank: part.copies for part in everyone if part.copies},
        sum(part.reused_bytes for part in everyone),
        _array_documents(everyone),
        _rank_rows(everyone, rows),
    )


def join(reports: Sequence[bytes]) -> bytes:
    """Return one report that combines those of several ranks, as input of :func:`merge`.

    Raises:
        Exception: the reports contradict each other. :func:`merge` of the same reports raises an
            error that explains why.
    """
    whole, *others = _parts(reports)
    for other in others:
        whole.join(other)
    return whole.to_bytes()


def _parts(reports: Iterable[bytes | RankManifest]) -> list[RankManifest]:
    return [
        RankManifest.from_bytes(report, number) if isinstance(report, bytes) else report
        for number, report in enumerate(reports)
    ]


def _rank_rows(parts: Iterable[RankManifest], rows: NDArray[Any]) -> list[RankRow]:
    """Return one row per report. If a rank sent several, the first has its bytes and chunks."""
    chunks = np.bincount(rows["rank"])
    stored = np.zeros(len(chunks), np.int64)
    np.add.at(stored, rows["rank"], rows["stored"].astype(np.int64))
    wrote = dict(enumerate(zip(stored.tolist(), chunks.tolist(), strict=True)))
    return [RankRow(part.rank, *wrote.pop(part.rank, (0, 0)), part.seconds) for part in parts]


def _array_documents(parts: Iterable[RankManifest]) -> bool:
    """Return whether arrays have documents of their own. Raise if the ranks disagree."""
    ranks = {bool(part.array_documents): part.rank for part in parts}
    if len(ranks) > 1:
        raise AccessPatternError(
            f"rank {ranks[True]} saves with array_documents=True but rank {ranks[False]} with "
            "array_documents=False; give every rank the same",
            rank=ranks[False],
        )
    return next(iter(ranks), True)


def _running(
    parts: Iterable[RankManifest],
    rows: NDArray[Any],
    starts: NDArray[np.int64],
    chunk_bytes: Iterable[int],
) -> NDArray[np.uint32]:
    """Return the ranks' running checksums in the order of the manifest's rows.

    The number of checksums per chunk depends on the array. The checksums of a chunk stay together
    and move from their position in the ranks' order to that in the manifest.
    """
    lengths = np.array([inner_blocks(size) for size in chunk_bytes], np.int64)
    bases = np.cumsum([0, *(np.diff(starts) * lengths)], dtype=np.int64)
    count = lengths[rows["array"]]
    moved = bases[rows["array"]] + rows["chunk"] * count - (np.cumsum(count) - count)
    given = np.concatenate([np.zeros(0, np.uint32), *(part.running for part in parts)])
    out = np.zeros(int(bases[-1]), np.uint32)
    out[np.repeat(moved, count) + np.arange(len(given))] = given
    return out


class _Created(NamedTuple):
    """An array as described by the rank that creates it."""

    by: RankManifest
    meta: ArrayMeta
    text: str
    summary: str


def _created(parts: Iterable[RankManifest]) -> dict[str, _Created]:
    """Return the created arrays by key, in the order of the keys."""
    found: dict[str, _Created] = {}
    for part in parts:
        for key, (meta, text) in part.created.items():
            summary = part.summaries[part.keys[key]]
            first = found.setdefault(key, _Created(part, meta, text, summary))
            if first.text != text:
                raise _disagreement(key, part, summary, first)
    return dict(sorted(found.items()))


def _writer(part: RankManifest, key: str) -> int:
    """Return a rank that wrote chunks of an array, among the ranks of a report."""
    rows = np.frombuffer(part.rows, ROW)
    ranks = rows["rank"][rows["array"] == part.keys[key]]
    return int(ranks[0]) if len(ranks) else part.rank


def _disagreement(
    key: str, part: RankManifest, summary: str, first: _Created
) -> AccessPatternError:
    rank, creator = _writer(part, key), _writer(first.by, key)
    return AccessPatternError(
        f"Invalid access pattern: rank {rank} and rank {creator} describe key {key!r} "
        f"differently: rank {rank} has {summary}; rank {creator} has {first.summary}; "
        "give both the same",
        key=key,
        rank=rank,
    )


def _rows_of(
    part: RankManifest, created: Mapping[str, _Created], numbers: Mapping[str, int]
) -> NDArray[Any]:
    """Return the rows of a report, with array numbers in the order of the keys.

    Raises:
        AccessPatternError: a rank wrote to an array that no rank created, or describes it
            differently from its creator.
    """
    for key, summary in zip(part.keys, part.summaries, strict=True):
        first = created.get(key)
        if first is None:
            rank = _writer(part, key)
            raise AccessPatternError(
                f"Invalid access pattern: rank {rank} wrote a part of key {key!r}, but no "
                "rank holds its first shard (offset 0 along every axis) as main replica; check "
                "offsets and replica ids",
                key=key,
                rank=rank,
            )
        if summary != first.summary:
            raise _disagreement(key, part, summary, first)
    rows = np.frombuffer(part.rows, ROW).copy()
    rows["array"] = np.array([numbers[key] for key in part.keys], np.int64)[rows["array"]]
    return rows


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
        region = f"key {meta.key!r} offset {box.offset} shape {box.shape}"
        if times[row] == 0:
            shown.append(f"{region} was written by no rank (no main replica holds it)")
        else:
            shown.append(
                f"{region} was written {times[row]} times, by rank(s) "
                f"{np.unique(rank[position == row]).tolist()} (they overlap as main replicas)"
            )
    more = f"; and {len(wrong) - SHOWN} more regions" if len(wrong) > SHOWN else ""
    raise AccessPatternError(
        f"Invalid access pattern: {'; '.join(shown)}{more}. Nothing was committed; "
        "check global_offset and replica_id of these shards",
        key=metas[numbers[0]].key,
    )


def rank_record(rows: Iterable[RankRow]) -> dict[str, Any]:
    """Return the slowest rank, and the columns ``bytes``, ``chunks`` and ``NAME_s`` in the order of
    the ranks. For more than 256 ranks, a column is its minimum, median and maximum.

    Args:
        rows: the rows of all ranks, in any order; several rows of one rank are added.
    """
    rows = sorted(rows, key=lambda row: row.rank)
    if not rows:
        return {}
    ranks = list(dict.fromkeys(row.rank for row in rows))
    names = sorted({name for row in rows for name in row.seconds})
    columns: dict[str, dict[int, float]] = {
        name: dict.fromkeys(ranks, 0) for name in ("bytes", "chunks", *(f"{n}_s" for n in names))
    }
    took = dict.fromkeys(ranks, 0.0)
    for row in rows:
        columns["bytes"][row.rank] += row.stored_bytes
        columns["chunks"][row.rank] += row.chunks
        for name, seconds in row.seconds.items():
            columns[f"{name}_s"][row.rank] += seconds
            took[row.rank] += seconds
    record: dict[str, Any] = {"slowest": max(took, key=took.__getitem__)}
    for name, column in columns.items():
        values = [round(value, 4) for value in column.values()]
        record[name] = values if len(ranks) <= MAX_COLUMNS_RANKS else _summary(values)
    return record


def _summary(values: Sequence[float]) -> dict[str, float]:
    # median_low returns a value of the column, not a mean of two: bytes and chunks stay integers.
    return {"min": min(values), "median": statistics.median_low(values), "max": max(values)}
