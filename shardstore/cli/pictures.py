"""Commands ``plot`` (the only one that needs matplotlib) and ``report``."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardstore.cli import options as opt
from shardstore.cli.listing import describe
from shardstore.cli.printing import complain, emit, say
from shardstore.inspection.layout import Module, cells, drawn_axes, modules
from shardstore.inspection.opened import StoredArray, clean, counted, human_bytes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.stores.location import store_errors

if TYPE_CHECKING:
    from shardstore.inspection.statistics import Statistics
    from shardstore.inspection.verify import Finding

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
    kind: Annotated[Plot, opt.argument("KIND", "layout, histogram or sizes.")],
    checkpoint: opt.Checkpoint,
    key: Annotated[str | None, opt.argument("KEY", "Array, for layout and histogram.")] = None,
    output: opt.Output = "",
    as_json: opt.Json = False,
    storage_option: opt.Options = None,
) -> None:
    """Draw a PNG: how an array is cut over ranks and chunks, its values, or sizes by module."""
    ckpt = opt.open_checkpoint(checkpoint, storage_option)
    output = output or f"{kind.value}.png"
    opt.require_output(output)
    if not output.endswith(".png"):
        raise opt.UsageProblem(f"pictures are PNG: give a name such as {output}.png, not {output}")
    if kind is not Plot.sizes and key is None:
        raise opt.UsageProblem(f"plot {kind.value} needs a key; `shardstore ls` lists all keys")
    array = None if key is None or kind is Plot.sizes else ckpt[key]
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise opt.UsageProblem("plot needs matplotlib: pip install 'shardstore[plot]'") from None
    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if array is None:
        chosen = opt.choose(ckpt, [key] if key else [])
        _sizes(axes, modules(found.meta for found in chosen.values()), key)
    elif kind is Plot.layout:
        _layout(figure, axes, array)
    else:
        _histogram(axes, array)
    with store_errors("writing", output):
        figure.savefig(output, format="png", dpi=120)
    if as_json:
        emit({"kind": kind.value, "key": key, "output": output})
    else:
        say(output)


def _layout(figure: Any, axes: Any, array: StoredArray) -> None:
    import numpy as np

    found = cells(array.meta, array.checkpoint.stored.manifest)
    if found:
        lefts = sorted({cell.left for cell in found})
        tops = sorted({cell.top for cell in found})
        right, bottom = found[-1].left + found[-1].width, found[-1].top + found[-1].height
        ranks = np.array([cell.rank for cell in found], float).reshape(len(tops), len(lefts))
        edges = [*lefts, right], [*tops, bottom]
        limits = {"vmin": 0, "vmax": max(1, np.nanmax(ranks, initial=0))}
        mesh = axes.pcolormesh(
            *edges, ranks, cmap="viridis", edgecolors="white", alpha=0.6, **limits
        )
        axes.invert_yaxis()
        known = np.unique(ranks[np.isfinite(ranks)])
        if known.size > 1:
            figure.colorbar(mesh, label="written by rank", ticks=known[:16])
    for cell in found if len(found) <= NAMED_CELLS else ():
        center = (cell.left + cell.width / 2, cell.top + cell.height / 2)
        rank = "" if cell.rank is None else f"{'rank ' * (len(found) <= 16)}{cell.rank}"
        axes.annotate(rank, center, ha="center", va="center")
    rows, columns = drawn_axes(array.meta)
    axes.set_xlabel("" if columns is None else f"axis {columns}")
    axes.set_ylabel("" if rows is None else f"axis {rows}")
    if rows is None:
        axes.set_yticks([])
    dtype, shape, chunks, shards, _ = describe(array.meta)
    axes.set_title(f"{clean(array.key)}\n{dtype} {shape}, chunks: {chunks}, saved from: {shards}")


def _histogram(axes: Any, array: StoredArray) -> None:
    from shardstore.inspection.statistics import histogram, measure

    found, damage = measure([array])
    for text in damage.get(array.key, []):
        complain(text)
    statistics = found[array.key]
    counts, edges = histogram(array, statistics, bins=100)
    axes.stairs(counts, edges, fill=True)
    axes.set_yscale("symlog", linthresh=1)
    axes.set_xlabel("value")
    axes.set_ylabel("elements")
    mean = "-" if statistics.mean is None else f"{statistics.mean:.4g}"
    odd = f", {statistics.nan} NaN, {statistics.inf} infinite"
    odd = odd if statistics.nan or statistics.inf else ""
    axes.set_title(f"{clean(array.key)}\nnorm {statistics.norm:.4g}, mean {mean}{odd}")


def _sizes(axes: Any, tree: Module, path: str | None) -> None:
    node, name = tree, clean(path or "all arrays")
    while len(node.below) == 1 and (only := next(iter(node.below.values()))).below:
        node = only
        name = clean(only.name)
    bars = sorted(node.below.values(), key=lambda child: child.bytes, reverse=True)
    shown, rest = bars[:BARS], bars[BARS:]
    unit = 1024 ** min(3, max(0, (shown[0].bytes.bit_length() - 1) // 10))
    sizes = axes.barh(
        range(len(shown)),
        [child.bytes / unit for child in shown],
        tick_label=[clean(child.name) for child in shown],
    )
    axes.bar_label(sizes, [human_bytes(child.bytes) for child in shown], padding=3, fontsize=8)
    axes.margins(x=0.12, y=0.01)
    axes.invert_yaxis()
    axes.set_xlabel({1: "B", 1024: "KiB", 1024**2: "MiB"}.get(unit, "GiB"))
    others = f"\n{len(rest):,} more, not shown: {human_bytes(sum(c.bytes for c in rest))}"
    axes.set_title(
        f"{name}: {human_bytes(node.bytes)} in {counted(node.arrays, 'array')}"
        + (others if rest else "")
    )


def report(
    checkpoint: opt.Checkpoint,
    output: opt.Output = "report.html",
    values: Annotated[bool, typer.Option(help="Read all values, for norms and histograms.")] = True,
    check: Annotated[bool, opt.flag("--verify/--no-verify", "Verify first.")] = True,
    memory: opt.Memory = "256MiB",
    as_json: opt.Json = False,
    storage_option: opt.Options = None,
) -> None:
    """Write one self-contained HTML page about a checkpoint."""
    from shardstore.cli import page
    from shardstore.inspection.statistics import histogram, measure
    from shardstore.inspection.verify import verify

    ckpt = opt.open_checkpoint(checkpoint, storage_option)
    budget = opt.parse_size(memory)
    target = opt.require_output(output)
    findings: list[Finding] = []
    progress = opt.bar(as_json)
    verified = verify(ckpt.stored, findings.append, progress=progress) if check else None
    manifest, _ = ckpt.manifest_or_damage()
    statistics: dict[str, Statistics] = {}
    damage: dict[str, list[str]] = {}
    arrays = sorted(ckpt.values(), key=lambda array: (-array.nbytes, array.key))
    if values:
        statistics, damage = measure(arrays, budget_bytes=budget, progress=progress)
    drawn = {array.key for array in arrays[:MAX_PICTURED]}

    def array_html(name: str, meta: ArrayMeta) -> str:
        found, picture, bars = statistics.get(meta.key), [], None
        if meta.key in drawn:
            picture = cells(meta, manifest)
            if found is not None:
                bars = histogram(ckpt[meta.key], found, BINS, budget_bytes=budget)
        return page.array(name, meta, picture, found, bars, damage.get(meta.key, ()))

    tree = modules(ckpt.metas.values())
    text = page.page(ckpt.info, tree, array_html, verified, findings)
    with store_errors("writing", output):
        target.write_text(text, encoding="utf-8")
    is_damaged = bool(damage) or (verified is not None and not verified.ok)
    if as_json:
        emit({"output": output, "bytes": len(text.encode()), "ok": not is_damaged})
    else:
        say(f"{output}{'  (the checkpoint is DAMAGED)' if is_damaged else ''}")
    raise typer.Exit(opt.DAMAGE if is_damaged else 0)
