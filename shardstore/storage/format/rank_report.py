"""What a rank tells the coordinator of its part of a save, and how it is sent.

Pure. A report is read by the process that commits, and by nobody later: a JSON head, then the
columns as they lie in memory, so that thousands of reports are taken apart without a copy and in
microseconds each. It knows names and columns, not what they mean.
"""

from __future__ import annotations

import json
import math
import statistics
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardstore.errors import DamagedCheckpointError

__all__ = [
    "COLUMNS",
    "MAX_COLUMNS_RANKS",
    "RankReport",
    "RankRow",
    "pack_report",
    "rank_record",
    "unpack_report",
]

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


COLUMNS: dict[str, tuple[str, tuple[int, ...]]] = {
    "document": ("<u8", ()),
    "chunk": ("<u8", ()),
    "stored": ("<u8", ()),
    "summary": ("<u4", ()),
    "array": ("<u4", ()),
    "crc": ("<u4", ()),
    "running": ("<u4", ()),
    "digest": ("<u1", (16,)),
}
"""Name -> data type and shape of a row; the widest first, so that each lies where it may be read.

``document`` and ``summary`` have a row an array (:meth:`RankManifest.to_bytes`), ``running`` one a
boundary, the others one a chunk.
"""

_ROWS = {
    name: (np.dtype(kind), math.prod(row), np.dtype(kind).itemsize * math.prod(row), row)
    for name, (kind, row) in COLUMNS.items()
}
"""Data type, numbers a row, bytes a row, shape of a row: worked out once, not for each report."""

_HEAD = struct.Struct(f"<Q{len(COLUMNS)}Q")
"""Bytes of the packed JSON, then rows of each column."""
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class RankReport:
    """A report, as the process that made it has it, or taken apart.

    Attributes:
        head: what is no column: values that JSON knows, tuples where it has lists.
        columns: by the names of :data:`COLUMNS`; of one that was sent, views into its bytes.
    """

    head: dict[str, Any]
    columns: dict[str, NDArray[Any]]

    @classmethod
    def of(cls, head: dict[str, Any], columns: Mapping[str, Sequence[int] | bytes]) -> RankReport:
        """A report of what a rank noted.

        Args:
            head: see above.
            columns: by name, numbers or the bytes of their rows.
        """
        arrays = {}
        for name, (kind, _, _, row) in _ROWS.items():
            given = columns[name]
            flat = np.frombuffer(given, kind) if isinstance(given, bytes) else np.array(given, kind)
            arrays[name] = flat.reshape(-1, *row)
        return cls(head, arrays)


def pack_report(report: RankReport) -> bytes:
    """A report for sending, see :func:`unpack_report`."""
    packed = zlib.compress(json.dumps(report.head).encode(), 1)
    packed += bytes(-len(packed) % _ALIGNMENT)
    columns = [report.columns[name] for name in _ROWS]
    rows = map(len, columns)
    return b"".join(
        [_HEAD.pack(len(packed), *rows), packed, *(column.tobytes() for column in columns)]
    )


def unpack_report(report: bytes, number: int) -> RankReport:
    """Take a report apart.

    Args:
        report: what :func:`pack_report` returned; kept alive by what is returned.
        number: of its rank, for error texts.

    Raises:
        DamagedCheckpointError: it is no such report.
    """
    try:
        length, *rows = _HEAD.unpack_from(report)
        position = _HEAD.size + length
        head = json.loads(zlib.decompressobj().decompress(report[_HEAD.size : position]))
        columns = {}
        for (name, (kind, numbers, row_bytes, row)), count in zip(_ROWS.items(), rows, strict=True):
            column = np.frombuffer(report, kind, count * numbers, position)
            columns[name] = column.reshape(count, *row) if row else column
            position += count * row_bytes
        if position != len(report):
            raise ValueError(f"{position} bytes announced, {len(report)} there")
    except (struct.error, ValueError, zlib.error) as error:
        raise DamagedCheckpointError(
            f"the report of rank {number} can not be read ({error}); do all ranks run the same "
            "version of shardstore? Save again",
            rank=number,
        ) from error
    return RankReport(head, columns)
