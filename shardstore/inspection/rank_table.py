"""Pure: what each rank did in a save, as rows of a table, from the columns in the commit record.

The record comes from a file: whatever in it is not as a save writes it is left out, not trusted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardstore.cli.shared import human_bytes

__all__ = ["RankTable", "rank_table"]

SHOWN_RANKS = 256
SUMMARIES = ("min", "median", "max")


@dataclass(frozen=True, slots=True)
class RankTable:
    """A table of texts.

    Attributes:
        head: names of the columns: rank, bytes, chunks, seconds of each stage and in all, rate.
        rows: one a rank; or, of many ranks, the least, the median and the largest of each column.
        slowest: rank that took longest, if known.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    slowest: int | None


def rank_table(record: object) -> RankTable | None:
    """The table of ``commit.ranks``; ``None`` where there is nothing of the kind."""
    if not isinstance(record, Mapping):
        return None
    stages = [name for name in record if isinstance(name, str) and name.endswith("_s")]
    slowest = record.get("slowest")
    slowest = slowest if isinstance(slowest, int) else None
    columns = {name: record.get(name) for name in ("bytes", "chunks", *stages)}
    if all(isinstance(column, list) for column in columns.values()):
        return _ranks({name: _numbers(column) for name, column in columns.items()}, stages, slowest)
    if all(isinstance(column, Mapping) for column in columns.values()):
        return _summary(columns, stages, slowest)
    return None


def _ranks(
    columns: Mapping[str, list[float]], stages: list[str], slowest: int | None
) -> RankTable | None:
    count = len(columns["bytes"])
    if not count or any(len(column) != count for column in columns.values()):
        return None
    rows = []
    for rank in range(min(count, SHOWN_RANKS)):
        size = columns["bytes"][rank]
        seconds = [columns[name][rank] for name in stages]
        took = sum(seconds)
        rows.append(
            (
                str(rank),
                human_bytes(size),
                f"{columns['chunks'][rank]:.0f}",
                *(f"{value:.3f}" for value in seconds),
                f"{took:.3f}",
                f"{human_bytes(size / took)}/s" if took > 0 else "",
            )
        )
    return RankTable(_head("rank", stages), tuple(rows), slowest)


def _summary(columns: Mapping[str, Any], stages: list[str], slowest: int | None) -> RankTable:
    rows = []
    for which in SUMMARIES:
        sizes = _numbers([columns["bytes"].get(which)])
        rest = [columns[name].get(which) for name in ("chunks", *stages)]
        texts = (f"{value:.4g}" if isinstance(value, int | float) else "" for value in rest)
        rows.append((which, human_bytes(sizes[0]) if sizes else "", *texts, "", ""))
    return RankTable(_head("ranks", stages), tuple(rows), slowest)


def _head(first: str, stages: list[str]) -> tuple[str, ...]:
    named = (f"{name.removesuffix('_s')} s" for name in stages)
    return (first, "bytes", "chunks", *named, "seconds", "rate")


def _numbers(column: Any) -> list[float]:
    return [value for value in column if isinstance(value, int | float) and value >= 0]
