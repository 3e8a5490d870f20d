"""``plot``: pictures of one array, or of all sizes, as PNG. The only room that needs matplotlib."""

from __future__ import annotations

from typing import Any

from shardstore.cli.printing import clean, emit, say
from shardstore.cli.shared import (
    UsageProblem,
    choose,
    complain,
    counted,
    get_array,
    human_bytes,
    require_output,
)
from shardstore.inspection.layout import Module, cells, drawn_axes, modules
from shardstore.inspection.statistics import histogram, measure
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.stores.location import store_errors

__all__ = ["run_plot"]

BARS = 40
NAMED_CELLS = 64
"""Chunks up to which each is labelled with its rank."""


def run_plot(
    stored: StoredCheckpoint, kind: str, key: str | None, output: str, *, as_json: bool
) -> None:
    """Draw a picture and say where it is."""
    require_output(output)
    if not output.endswith(".png"):
        raise UsageProblem(f"pictures are PNG: give a name such as {output}.png, not {output}")
    if kind != "sizes" and key is None:
        raise UsageProblem(f"plot {kind} needs a key; `shardstore ls` lists all keys")
    array = None if key is None or kind == "sizes" else get_array(stored, key)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageProblem("plot needs matplotlib: pip install 'shardstore[plot]'") from None
    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if array is None:
        _sizes(axes, modules(choose(stored.arrays, [key] if key else []).values()), key)
    elif kind == "layout":
        _layout(figure, axes, stored, array)
    else:
        _histogram(axes, stored, array)
    with store_errors("writing", output):
        figure.savefig(output, format="png", dpi=120)
    if as_json:
        emit({"kind": kind, "key": key, "output": output})
    else:
        say(output)


def _layout(figure: Any, axes: Any, stored: StoredCheckpoint, array: ArrayMeta) -> None:
    from matplotlib.patches import Patch, Rectangle

    manifest = stored.manifest
    found = cells(array, manifest)
    ranks = sorted({cell.rank for cell in found if cell.rank is not None})
    colors = _colors(len(ranks))
    color = dict(zip(ranks, colors, strict=True))
    for cell in found:
        face = "lightgrey" if cell.rank is None else color[cell.rank]
        place = (cell.left, cell.top)
        axes.add_patch(Rectangle(place, cell.width, cell.height, facecolor=face, edgecolor="white"))
        if len(found) <= NAMED_CELLS and cell.rank is not None:
            center = (cell.left + cell.width / 2, cell.top + cell.height / 2)
            axes.annotate(str(cell.rank), center, ha="center", va="center")
    rows, columns = drawn_axes(array)
    axes.set_xlim(0, max((cell.left + cell.width for cell in found), default=1))
    axes.set_ylim(max((cell.top + cell.height for cell in found), default=1), 0)
    axes.set_xlabel("" if columns is None else f"axis {columns}")
    axes.set_ylabel("" if rows is None else f"axis {rows}")
    if rows is None:
        axes.set_yticks([])
    shards = "" if array.shard_shape is None else f", shards of {list(array.shard_shape)}"
    chunks = f"{counted(array.grid.size, 'chunk')} of {list(array.grid.chunk_shape)}"
    axes.set_title(f"{clean(array.key)}\n{array.dtype} {list(array.shape)}, {chunks}{shards}")
    shown = ranks[:16]
    handles = [Patch(facecolor=color[rank], label=f"rank {rank}") for rank in shown]
    if handles:
        figure.legend(handles=handles, loc="outside right upper")


def _colors(count: int) -> list[Any]:
    from matplotlib import colormaps

    return [colormaps["turbo"](0.1 + 0.8 * i / max(1, count - 1)) for i in range(count)]


def _histogram(axes: Any, stored: StoredCheckpoint, array: ArrayMeta) -> None:
    found, damage = measure(stored, [array])
    for text in damage.get(array.key, []):
        complain(text)
    statistics = found[array.key]
    counts, edges = histogram(stored, array, statistics, bins=100)
    axes.stairs(counts, edges, fill=True)
    axes.set_yscale("symlog", linthresh=1)
    axes.set_xlabel("value")
    axes.set_ylabel("elements")
    mean = "-" if statistics.mean is None else f"{statistics.mean:.4g}"
    odd = f", {statistics.nan} NaN, {statistics.inf} infinite"
    odd = odd if statistics.nan or statistics.inf else ""
    axes.set_title(f"{clean(array.key)}\nnorm {statistics.norm:.4g}, mean {mean}{odd}")


def _sizes(axes: Any, tree: Module, path: str | None) -> None:
    node = tree
    while len(node.below) == 1 and (only := next(iter(node.below.values()))).below:
        node = only
    bars = sorted(node.below.values(), key=lambda child: child.bytes, reverse=True)
    shown = bars[:BARS]
    names = [child.name for child in shown]
    sizes = [child.bytes / 2**20 for child in shown]
    if len(bars) > BARS:
        names.append(f"{len(bars) - BARS} others")
        sizes.append(sum(child.bytes for child in bars[BARS:]) / 2**20)
    axes.barh(range(len(names)), sizes)
    axes.set_yticks(range(len(names)), list(map(clean, names)))
    axes.invert_yaxis()
    axes.set_xlabel("MiB")
    axes.set_title(
        f"{clean(path or 'all arrays')}: {human_bytes(node.bytes)} in {node.arrays} arrays"
    )
