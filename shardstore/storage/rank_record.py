"""What each rank wrote and how long it took, as columns of numbers for the commit record.

Pure: values in, values out. Where there are many ranks, a summary takes the columns' place, so that
the root document, which every load reads, does not grow with the number of ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["MAX_COLUMNS_RANKS", "RankRow", "rank_record"]

MAX_COLUMNS_RANKS = 256
"""Up to so many ranks each has its number in each column."""


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
        before = found.get(row.rank)
        if before is not None:
            seconds = dict(before.seconds)
            for name, more in row.seconds.items():
                seconds[name] = seconds.get(name, 0.0) + more
            stored, chunks = before.stored_bytes + row.stored_bytes, before.chunks + row.chunks
            row = RankRow(row.rank, stored, chunks, seconds)
        found[row.rank] = row
    return [found[rank] for rank in sorted(found)]


def _summary(values: Sequence[float]) -> dict[str, float]:
    # A value that occurs, not a mean of two: bytes and chunks stay whole numbers.
    return {"min": min(values), "median": statistics.median_low(values), "max": max(values)}
