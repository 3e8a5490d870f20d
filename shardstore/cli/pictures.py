"""Commands ``plot`` (the only one that needs matplotlib) and ``report``."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardstore.cli.options import (
    DAMAGE,
    Checkpoint,
    Json,
    Memory,
    Options,
    Output,
    UsageProblem,
    bar,
    choose,
    get_array,
    open_stored,
    parse_size,
    require_output,
)
from shardstore.cli.printing import clean, complain, counted, emit, human_bytes, say
from shardstore.errors import DamagedCheckpointError
from shardstore.inspection.layout import Module, array_bytes, cells, drawn_axes, modules
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.stores.location import store_errors

if TYPE_CHECKING:
    from shardstore.inspection.statistics import Statistics
    from shardstore.inspection.verify import Finding

__all__ = ["plot", "report"]

BARS = 40
NAMED_CELLS = 64
"""Chunks up to which each is labelled with its rank."""
MAX_PICTURED = 400
"""Arrays that get a picture and a histogram, the largest ones; a page of more opens slowly."""
BINS = 48


class Plot(StrEnum):
    """Kinds of plots."""

    layout = "layout"
    histogram = "histogram"
    sizes = "sizes"


def plot(
    kind: Annotated[Plot, typer.Argument(metavar="KIND", help="layout, histogram or sizes.")],
    checkpoint: Checkpoint,
    key: Annotated[
        str | None, typer.Argument(metavar="KEY", help="The array, for layout and histogram.")
    ] = None,
    output: Output = "",
    as_json: Json = False,
    storage_option: Options = None,
) -> None:
    """Draw a PNG: how an array is cut over ranks and chunks, its values, or sizes by module."""
    stored = open_stored(checkpoint, storage_option)
    output = output or f"{kind.value}.png"
    require_output(output)
    if not output.endswith(".png"):
        raise UsageProblem(f"pictures are PNG: give a name such as {output}.png, not {output}")
    if kind is not Plot.sizes and key is None:
        raise UsageProblem(f"plot {kind.value} needs a key; `shardstore ls` lists all keys")
    array = None if key is None or kind is Plot.sizes else get_array(stored, key)
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
    elif kind is Plot.layout:
        _layout(figure, axes, stored, array)
    else:
        _histogram(axes, stored, array)
    with store_errors("writing", output):
        figure.savefig(output, format="png", dpi=120)
    if as_json:
        emit({"kind": kind.value, "key": key, "output": output})
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
    from shardstore.inspection.statistics import histogram, measure

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


def report(
    checkpoint: Checkpoint,
    output: Output = "report.html",
    values: Annotated[bool, typer.Option(help="Read all values, for norms and histograms.")] = True,
    check: Annotated[bool, typer.Option("--verify/--no-verify", help="Verify first.")] = True,
    memory: Memory = "256MiB",
    as_json: Json = False,
    storage_option: Options = None,
) -> None:
    """Write one self-contained HTML page about a checkpoint."""
    from shardstore.cli.listing import about
    from shardstore.cli.page import ArrayFacts, page
    from shardstore.inspection.statistics import histogram, measure
    from shardstore.inspection.verify import verify

    stored = open_stored(checkpoint, storage_option)
    budget = parse_size(memory)
    target = require_output(output)
    arrays = list(stored.arrays.values())
    findings: list[Finding] = []
    progress = bar(as_json)
    verified = verify(stored, findings.append, progress=progress) if check else None
    try:
        manifest = stored.manifest
    except DamagedCheckpointError:
        manifest = None
    statistics: dict[str, Statistics] = {}
    damage: dict[str, list[str]] = {}
    if values:
        statistics, damage = measure(stored, arrays, budget_bytes=budget, progress=progress)
    facts = {}
    largest = sorted(arrays, key=lambda meta: (-array_bytes(meta), meta.key))
    for number, meta in enumerate(largest):
        is_drawn, found = number < MAX_PICTURED, statistics.get(meta.key)
        bars = None
        if is_drawn and found is not None:
            bars = histogram(stored, meta, found, BINS, budget_bytes=budget)
        picture = cells(meta, manifest) if is_drawn else None
        facts[meta.key] = ArrayFacts(meta, picture, found, bars, damage.get(meta.key, []))
    text = page(about(stored), modules(arrays), facts, verified, findings)
    with store_errors("writing", output):
        target.write_text(text, encoding="utf-8")
    is_damaged = bool(damage) or (verified is not None and not verified.ok)
    if as_json:
        emit({"output": output, "bytes": len(text.encode()), "ok": not is_damaged})
    else:
        say(f"{output}{'  (the checkpoint is DAMAGED)' if is_damaged else ''}")
    raise typer.Exit(DAMAGE if is_damaged else 0)
