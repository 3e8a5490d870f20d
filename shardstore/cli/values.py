"""Commands ``stats`` and ``show``: values of arrays."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Annotated

import typer

from shardstore.cli import options as opt
from shardstore.cli.printing import clean, columns, complain, emit, fold, row_printer, say

PRINTED = 1000
"""Elements that are printed whole; of more, NumPy shows the ends of each axis."""
EDGE = 3
LINE_WIDTH = 100
"""Where standard output is no terminal."""


def stats(
    checkpoint: opt.Checkpoint,
    keys: opt.Patterns = None,
    memory: opt.Memory = "256MiB",
    wide: opt.Wide = False,
    as_json: opt.Json = False,
    storage_option: opt.Options = None,
) -> None:
    """Norm, mean, range, zeros, NaNs and infinities of arrays, by streaming."""
    from shardstore.inspection.statistics import measure

    stored = opt.open_stored(checkpoint, storage_option)
    budget = opt.parse_size(memory)
    arrays = [meta for _, meta in sorted(opt.choose(stored.arrays, keys).items())]
    found, damage = measure(stored, arrays, budget_bytes=budget, progress=opt.bar(as_json))
    if as_json:
        entries = [
            {
                "key": meta.key,
                "dtype": meta.dtype,
                "shape": list(meta.shape),
                **found[meta.key].as_dict(),
                "damage": damage.get(meta.key, []),
            }
            for meta in arrays
        ]
        emit({"url": stored.location.url, "arrays": entries})
    else:
        head = ("key", "dtype", "count", "norm", "mean", "min", "max", "zeros", "NaN", "Inf")
        rows = [head]
        for meta in arrays:
            s = found[meta.key]
            norm, mean, low, high = (
                "-" if x is None else f"{x:.6g}" for x in (s.norm, s.mean, s.min, s.max)
            )
            count, zeros, nan, inf = map(str, (s.count, s.zeros, s.nan, s.inf))
            row = (clean(meta.key), meta.dtype, count, norm, mean, low, high, zeros, nan, inf)
            rows.append(row)
        is_stacked, lines_of = row_printer(rows, "<<" + ">" * 8, columns(wide), names=head)
        for row in rows[is_stacked:]:
            say(*lines_of(row))
    for key in sorted(damage):
        for text in damage[key]:
            complain(text)
    raise typer.Exit(opt.DAMAGE if damage else 0)


def show(
    checkpoint: opt.Checkpoint,
    key: Annotated[str, typer.Argument(metavar="KEY[SLICE]", help="Such as 'w[0, :5]'.")],
    limit: Annotated[
        int, typer.Option(min=1, metavar="N", help="Most values that --json prints.")
    ] = 100_000,
    wide: opt.Wide = False,
    as_json: opt.Json = False,
    storage_option: opt.Options = None,
) -> None:
    """Print values of an array, all or a slice of them."""
    import numpy as np

    from shardstore.inspection.streaming import read_positions

    stored = opt.open_stored(checkpoint, storage_option)
    name, inside = split_key(key, stored.arrays)
    array = opt.get_array(stored, name)
    selection = parse_selection(inside, array.shape, name)
    positions: list[Sequence[int]] = [
        [range(length)[part]] if isinstance(part, int) else range(length)[part]
        for part, length in zip(selection, array.shape, strict=True)
    ]
    size = math.prod(map(len, positions))
    single = tuple(axis for axis, part in enumerate(selection) if isinstance(part, int))
    shape = [len(p) for axis, p in enumerate(positions) if axis not in single]
    if as_json and size > limit:
        raise opt.UsageProblem(
            f"{size} values are more than --limit {limit}; choose a slice, such as '{name}[0, :10]'"
        )
    is_cut = not as_json and size > PRINTED
    if is_cut:  # only the ends of each axis are printed, so only they are read
        ends = 2 * EDGE + 1
        positions = [[*p[: EDGE + 1], *p[-EDGE:]] if len(p) > ends else p for p in positions]
    values = read_positions(stored, array, positions).squeeze(single)
    if values.dtype.isbuiltin != 1:  # NumPy cannot print it; float32 holds the values exactly
        values = values.astype(np.float32)
    if as_json:
        if values.dtype.kind == "c":
            values = np.stack([values.real, values.imag], axis=-1)
        emit({"key": name, "dtype": array.dtype, "shape": shape, "values": values.tolist()})
        return
    width = columns(wide)
    where = f"[{inside}]" if inside else ""
    say(*fold(clean(f"{name}{where}  {array.dtype} {shape}"), width))
    text = np.array2string(
        values,
        threshold=0 if is_cut else size,
        edgeitems=EDGE,
        max_line_width=width or LINE_WIDTH,
    )
    say(*text.split("\n"))


def split_key(text: str, known: Collection[str]) -> tuple[str, str]:
    """``KEY[0, :5]`` -> ``KEY`` and ``0, :5``; a key that has brackets itself is left whole."""
    if text in known or not text.endswith("]") or "[" not in text:
        return text, ""
    key, _, inside = text[:-1].rpartition("[")
    return key, inside


def parse_selection(text: str, shape: Sequence[int], key: str) -> tuple[int | slice, ...]:
    """Basic NumPy indexing: integers, slices and one ellipsis.

    Raises:
        UsageProblem: of another form, too many axes, or out of range.
    """
    parts = [part.strip() for part in text.rstrip(" ,").split(",")] if text.strip() else []
    if "..." not in parts:
        parts.append("...")
    missing = len(shape) - len(parts) + 1
    if missing < 0:
        raise opt.UsageProblem(f"[{text}] has more axes than {key!r} of shape {list(shape)}")
    at = parts.index("...")
    parts[at : at + 1] = [":"] * missing
    out: list[int | slice] = []
    for axis, (part, length) in enumerate(zip(parts, shape, strict=True)):
        try:
            ends = [int(end) if end.strip() else None for end in part.split(":")]
            out.append(slice(*ends) if ":" in part else int(part))
            range(length)[out[-1]]
        except IndexError:
            raise opt.UsageProblem(
                f"index {part} is out of range for axis {axis} of {key!r}, length {length}"
            ) from None
        except (ValueError, TypeError):
            raise opt.UsageProblem(
                f"{part!r} is no index: give integers and slices as in NumPy, such as "
                f"'{key}[0, 2:10, ::2]'"
            ) from None
    return tuple(out)
