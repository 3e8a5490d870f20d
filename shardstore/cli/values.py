"""Commands ``stats`` and ``show``: values of arrays."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Annotated, Any

import typer

from shardstore.cli import options as opt
from shardstore.cli.printing import columns, complain, emit, fold, print_table, say
from shardstore.inspection.opened import clean

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

    ckpt = opt.open_checkpoint(checkpoint, storage_option)
    budget = opt.parse_size(memory)
    arrays = [array for _, array in sorted(opt.choose(ckpt, keys).items())]
    found, damage = measure(arrays, budget_bytes=budget, progress=opt.bar(as_json))
    if as_json:
        entries = [
            {
                "key": array.key,
                "dtype": array.meta.dtype,
                "shape": list(array.shape),
                **found[array.key].as_dict(),
                "damage": damage.get(array.key, []),
            }
            for array in arrays
        ]
        emit({"url": ckpt.url, "arrays": entries})
    else:
        names = ("key", "dtype", "count", "norm", "mean", "min", "max", "zeros", "NaN", "Inf")
        rows = []
        for array in arrays:
            s = found[array.key]
            norm, mean, low, high = (
                "-" if x is None else f"{x:.6g}" for x in (s.norm, s.mean, s.min, s.max)
            )
            count, zeros, nan, inf = map(str, (s.count, s.zeros, s.nan, s.inf))
            row = (
                clean(array.key),
                array.meta.dtype,
                count,
                norm,
                mean,
                low,
                high,
                zeros,
                nan,
                inf,
            )
            rows.append(row)
        print_table(rows, "<<" + ">" * 8, columns(wide), names)
    for key in sorted(damage):
        for text in damage[key]:
            complain(text)
    raise typer.Exit(opt.DAMAGE if damage else 0)


def show(
    checkpoint: opt.Checkpoint,
    key: Annotated[str, opt.argument("KEY[SLICE]", "Such as 'w[0, :5]'.")],
    limit: Annotated[int, opt.value("N", "Most values of --json.", at_least=1)] = 100_000,
    wide: opt.Wide = False,
    as_json: opt.Json = False,
    storage_option: opt.Options = None,
) -> None:
    """Print values of an array, all or a slice of them."""
    import numpy as np

    ckpt = opt.open_checkpoint(checkpoint, storage_option)
    name, inside = split_key(key, ckpt)
    array = ckpt[name]
    chosen = array.positions(parse_selection(inside, name))
    size = math.prod(len(found) for found, _ in chosen)
    shape = [len(found) for found, single in chosen if not single]
    if as_json and size > limit:
        raise opt.UsageProblem(
            f"{size} values are more than --limit {limit}; choose a slice, such as '{name}[0, :10]'"
        )
    is_cut = not as_json and size > PRINTED
    axes = [
        # Only the ends of each axis are printed, so only they are read.
        [found[: EDGE + 1], found[-EDGE:]] if is_cut and len(found) > 2 * EDGE + 1 else [found]
        for found, _ in chosen
    ]
    singles = tuple(axis for axis, (_, single) in enumerate(chosen) if single)
    values = array.select(axes).squeeze(singles)
    if values.dtype.isbuiltin != 1:  # NumPy cannot print it; float32 holds the values exactly
        values = values.astype(np.float32)
    if as_json:
        if values.dtype.kind == "c":
            values = np.stack([values.real, values.imag], axis=-1)
        emit({"key": name, "dtype": array.meta.dtype, "shape": shape, "values": values.tolist()})
        return
    width = columns(wide)
    where = f"[{inside}]" if inside else ""
    say(*fold(clean(f"{name}{where}  {array.meta.dtype} {shape}"), width))
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


def parse_selection(text: str, key: str) -> tuple[Any, ...]:
    """Basic NumPy indexing: integers, slices and ellipses.

    Raises:
        UsageProblem: something else.
    """
    out: list[Any] = []
    for part in map(str.strip, text.rstrip(" ,").split(",") if text.strip() else ()):
        try:
            ends = [int(end) if end.strip() else None for end in part.split(":")]
            out.append(slice(*ends) if ":" in part else int(part))
        except (ValueError, TypeError):
            if part != "...":
                raise opt.UsageProblem(
                    f"{part!r} is no index: give integers and slices as in NumPy, such as "
                    f"'{key}[0, 2:10, ::2]'"
                ) from None
            out.append(...)
    return tuple(out)
