"""``stats`` and ``show``: values of arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardstore.cli.printing import Table, clean, columns, emit, fold, say
from shardstore.cli.shared import (
    DAMAGE,
    UsageProblem,
    choose,
    complain,
    get_array,
    progress_bar,
)
from shardstore.inspection.layout import array_bytes
from shardstore.inspection.statistics import Statistics, measure
from shardstore.inspection.streaming import read_box
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Box

__all__ = ["parse_selection", "run_show", "run_stats", "split_key"]

PRINTED = 1000
"""Elements that are printed whole; of more, NumPy shows the ends of each axis."""
EDGE = 3
LINE_WIDTH = 100
"""Where standard output is no terminal."""
Selection = tuple[int | slice, ...]


def run_stats(
    stored: StoredCheckpoint,
    patterns: Sequence[str],
    *,
    budget_bytes: int,
    as_json: bool,
    wide: bool = False,
) -> int:
    """Print statistics; returns the exit code."""
    arrays = choose(stored.arrays, patterns)
    total = sum(map(array_bytes, arrays.values()))
    with progress_bar("reading", total, quiet=as_json) as advance:
        found, damage = measure(
            stored, list(arrays.values()), budget_bytes=budget_bytes, progress=advance
        )
    if as_json:
        entries = [
            {
                "key": key,
                "dtype": arrays[key].dtype,
                "shape": list(arrays[key].shape),
                **found[key].as_dict(),
                "damage": damage.get(key, []),
            }
            for key in sorted(arrays)
        ]
        emit({"url": stored.location.url, "arrays": entries})
    else:
        _print_stats(arrays, found, columns(wide))
    for key in sorted(damage):
        for text in damage[key]:
            complain(text)
    return DAMAGE if damage else 0


def _print_stats(
    arrays: dict[str, ArrayMeta], found: dict[str, Statistics], width: int | None
) -> None:
    head = ("key", "dtype", "count", "norm", "mean", "min", "max", "zeros", "NaN", "Inf")
    rows: list[tuple[str, ...]] = []
    for key in sorted(arrays):
        s = found[key]
        numbers = (s.norm, s.mean, s.min, s.max)
        texts = ["-" if x is None else f"{x:.6g}" for x in numbers]
        counts = [str(n) for n in (s.zeros, s.nan, s.inf)]
        rows.append((clean(key), arrays[key].dtype, str(s.count), *texts, *counts))
    table = Table([head, *rows], "<<" + ">" * 8, width, names=head)
    for row in rows if table.is_stacked else [head, *rows]:
        say(*table.lines(row))


def split_key(text: str, known: Sequence[str] | dict[str, Any]) -> tuple[str, str]:
    """``KEY[0, :5]`` -> ``KEY`` and ``0, :5``; a key that has brackets itself is left whole."""
    if text in known or not text.endswith("]") or "[" not in text:
        return text, ""
    key, _, inside = text[:-1].rpartition("[")
    return key, inside


def parse_selection(text: str, shape: Sequence[int], key: str) -> Selection:
    """Basic NumPy indexing: integers, slices and one ellipsis.

    Raises:
        UsageProblem: of another form, too many axes, or out of range.
    """
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if parts and not parts[-1]:
        parts.pop()
    if parts.count("...") > 1:
        raise UsageProblem(f"[{text}] has more than one ellipsis")
    if len(parts) - parts.count("...") > len(shape):
        raise UsageProblem(f"[{text}] has more axes than {key!r} of shape {list(shape)}")
    if "..." not in parts:
        parts.append("...")
    at = parts.index("...")
    parts[at : at + 1] = [":"] * (len(shape) - len(parts) + 1)
    pairs = zip(parts, shape, strict=True)
    return tuple(_parse_axis(part, n, axis, key) for axis, (part, n) in enumerate(pairs))


def _parse_axis(part: str, length: int, axis: int, key: str) -> int | slice:
    try:
        if ":" not in part:
            index = int(part)
            if not -length <= index < length:
                raise UsageProblem(
                    f"index {index} is out of range for axis {axis} of {key!r}, length {length}"
                )
            return index % length
        ends = [int(end) if end.strip() else None for end in part.split(":")]
        if len(ends) > 3 or (len(ends) == 3 and ends[2] == 0):
            raise ValueError
        return slice(*ends)
    except UsageProblem:
        raise
    except ValueError:
        raise UsageProblem(
            f"{part!r} is no index: give integers and slices as NumPy has them, such as "
            f"'{key}[0, 2:10, ::2]'"
        ) from None


def run_show(
    stored: StoredCheckpoint, what: str, *, limit: int, as_json: bool, wide: bool = False
) -> None:
    """Print values of an array, all or a slice of them."""
    key, inside = split_key(what, dict(stored.arrays))
    array = get_array(stored, key)
    selection = parse_selection(inside, array.shape, key)
    picks = [_positions(part, n) for part, n in zip(selection, array.shape, strict=True)]
    shape = tuple(len(p) for p, s in zip(picks, selection, strict=True) if isinstance(s, slice))
    size = math.prod(shape)
    if as_json:
        if size > limit:
            raise UsageProblem(
                f"{size} values are more than --limit {limit}; choose a slice, such as "
                f"'{key}[0, :10]'"
            )
        values = _gather(stored, array, picks).reshape(shape)
        emit({"key": key, "dtype": array.dtype, "shape": list(shape), "values": _listed(values)})
        return
    width = columns(wide)
    title = f"{key}{f'[{inside}]' if inside else ''}  {array.dtype} {list(shape)}"
    say(*fold(clean(title), width))
    threshold = size
    if size > PRINTED:
        # Only the ends of each axis are printed, so only they are read.
        ends = 2 * EDGE + 1
        picks = [range(0) if not p else _ends(p) if len(p) > ends else p for p in picks]
        shape = tuple(len(p) for p, s in zip(picks, selection, strict=True) if isinstance(s, slice))
        threshold = 0
    values = _printable(_gather(stored, array, picks).reshape(shape))
    most = LINE_WIDTH if width is None else width
    text = np.array2string(values, threshold=max(threshold, 0), edgeitems=EDGE, max_line_width=most)
    say(*text.split("\n"))


def _positions(part: int | slice, length: int) -> Sequence[int]:
    return range(part, part + 1) if isinstance(part, int) else range(length)[part]


def _ends(positions: Sequence[int]) -> list[int]:
    """The first and the last few, and one between them for the dots."""
    return [*positions[: EDGE + 1], *positions[-EDGE:]]


def _gather(
    stored: StoredCheckpoint, array: ArrayMeta, picks: Sequence[Sequence[int]]
) -> NDArray[Any]:
    """The values at the outer product of positions, whole runs of neighbours read at once."""
    out = np.empty([len(p) for p in picks], dtypes.numpy_dtype(array.dtype))
    if out.size == 0:
        return out
    axes = [list(_spans(p)) for p in picks]

    def fill(axis: int, offset: list[int], shape: list[int], where: list[Any]) -> None:
        if axis == len(axes):
            box = Box(tuple(offset), tuple(shape))
            steps: list[Any] = [..., *(slice(None, None, step) for *_, step in where)]
            target: list[Any] = [..., *(slice(start, stop) for start, stop, _ in where)]
            out[tuple(target)] = read_box(stored, array, box)[tuple(steps)]
            return
        for low, high, step, start, stop in axes[axis]:
            fill(axis + 1, [*offset, low], [*shape, high - low], [*where, (start, stop, step)])

    fill(0, [], [], [])
    return out


def _spans(positions: Sequence[int]) -> list[tuple[int, int, int, int, int]]:
    """Runs of evenly spaced positions: lowest, one past the highest, step, and where they go."""
    spans = []
    start = 0
    while start < len(positions):
        step = positions[start + 1] - positions[start] if start + 1 < len(positions) else 1
        stop = start + 1
        while stop < len(positions) and positions[stop] - positions[stop - 1] == step:
            stop += 1
        low, high = sorted((positions[start], positions[stop - 1]))
        spans.append((low, high + 1, step, start, stop))
        start = stop
    return spans


def _printable(values: NDArray[Any]) -> NDArray[Any]:
    """Values of types that NumPy can not print itself, as float32, which holds them exactly."""
    return values if values.dtype.isbuiltin == 1 else values.astype(np.float32)


def _listed(values: NDArray[Any]) -> Any:
    values = _printable(values)
    if values.dtype.kind == "c":
        pairs = np.stack([values.real, values.imag], axis=-1)
        return pairs.tolist()
    return values.tolist()
