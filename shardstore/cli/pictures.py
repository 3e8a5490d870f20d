"""Commands ``plot`` and ``report``. They draw SVG, in a file or in an HTML page.

The page has no scripts, fonts or requests, and texts from checkpoints are escaped.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from html import escape
from itertools import islice, product
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardstore.cli import options as opt
from shardstore.cli.looking import Module, describe, modules, summary, verdict
from shardstore.cli.printing import answer, complain
from shardstore.inspection.opened import clean, counted, human_bytes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Box
from shardstore.storage.stores.folder import store_errors

if TYPE_CHECKING:
    from shardstore.inspection.opened import StoredArray
    from shardstore.inspection.values import Statistics
    from shardstore.inspection.verify import Finding, Verified
    from shardstore.storage.format.manifest import Manifest

WIDE, HIGH, ROW = 360, 150, 12
BINS = 48
BARS = 25
MAX_PICTURED = 400
"""Number of arrays with a picture and a histogram; the largest arrays get them."""
MAX_OPENED = 50
"""Up to this number of arrays, all modules of a page are unfolded."""
MAX_FINDINGS = 500
COLOR = "#0f9488"
DAMAGED = '<span class="bad">damaged</span>'
MAX_CELLS = 4096
MAX_LABELS = 16
"""Largest number of ranks whose first chunks are labelled."""
Index = tuple[int, ...]
Picture = tuple[str, str, int]
"""Shapes of an SVG, a caption, and the height of the SVG; its width is ``WIDE``."""

Plot = StrEnum("Plot", ["layout", "histogram", "sizes"])
"""Kinds of plots."""


def plot(
    kind: Annotated[Plot, opt.argument("KIND", "layout, histogram or sizes.")],
    checkpoint: opt.Checkpoint,
    key: Annotated[str | None, opt.argument("KEY", "Array, for layout and histogram.")] = None,
    output: opt.Output = "",
    as_json: opt.Json = False,
    storage_option: opt.Options = None,
) -> None:
    """Draw KIND.svg: chunks and ranks of an array, a histogram of values, or sizes by module."""
    from shardstore.inspection.values import measure

    ckpt = opt.open_checkpoint(checkpoint, storage_option)
    output, damage = output or f"{kind.value}.svg", dict[str, list[str]]()
    target = opt.require_output(output)
    if not output.endswith(".svg"):
        raise opt.UsageProblem(f"pictures are SVG files: give a name such as {output}.svg")
    if kind is Plot.sizes:
        picture = _sizes(modules(a.meta for a in opt.choose(ckpt, [key] if key else [])))
    elif key is None:
        raise opt.UsageProblem(f"plot {kind.value} needs a key; `shardstore ls` lists all keys")
    elif kind is Plot.layout:
        picture = _layout(ckpt[key].meta, ckpt.stored.manifest)
    else:
        found, damage = measure([ckpt[key]])
        for text in damage.get(key, []):
            complain(text)
        picture = _histogram(ckpt[key], found[key])
    with store_errors("writing", output):
        target.write_text(_svg(picture, key or ckpt.url), encoding="utf-8")
    answer(as_json, {"kind": kind.value, "key": key, "output": output}, output)
    raise typer.Exit(opt.DAMAGE if damage else 0)


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
    from shardstore.inspection.values import measure
    from shardstore.inspection.verify import verify

    ckpt = opt.open_checkpoint(checkpoint, storage_option)
    budget = opt.parse_size(memory)
    target = opt.require_output(output)
    findings: list[Finding] = []
    progress = opt.bar(as_json)
    verified = verify(ckpt.stored, findings.append, progress=progress) if check else None
    manifest, _ = ckpt.manifest_or_damage()
    arrays = sorted(ckpt.values(), key=lambda array: (-array.nbytes, array.key))
    wanted = opt.readable(arrays) if values else []
    statistics, damage = measure(wanted, budget_bytes=budget, progress=progress)
    drawn = {array.key for array in arrays[:MAX_PICTURED]}
    findings.sort(key=lambda finding: (finding.severity, finding.path))
    wrong = {(finding.key, finding.chunk) for finding in findings if finding.severity == "damage"}

    def module(name: str, node: Module, depth: int = 0) -> str:
        """Return the part of the page about a module: its own array, and everything below it."""
        inside = [module(*child, depth + 1) for child in node.children()]
        if (meta := node.array) is not None:
            found, pictures = statistics.get(meta.key), {}
            if meta.key in drawn:
                pictures["layout"] = _layout(meta, manifest, wrong)
                if found is not None:
                    pictures["histogram"] = _histogram(ckpt[meta.key], found, budget_bytes=budget)
            inside.insert(0, _array(name, meta, pictures, found, damage.get(meta.key, ())))
        if not node.below:
            return inside[0]
        is_open = depth == 0 or len(arrays) <= MAX_OPENED
        mark = DAMAGED if any(DAMAGED in part for part in inside) else ""
        return (
            f"<details{' open' if is_open else ''}><summary>"
            f'<span class="size">{human_bytes(node.bytes)}</span><b>{escape(name)}</b> '
            f'<span class="dim">{counted(node.arrays, "array")}</span> {mark}</summary>'
            f"{''.join(inside)}</details>"
        )

    note = f"The {MAX_PICTURED} largest of {len(arrays):,} arrays have pictures."
    parts = [f'<p class="dim">{note}</p>'] * (len(arrays) > MAX_PICTURED)
    parts += (module(*child) for child in modules(ckpt.metas.values()).children())
    text = _page(ckpt.info, parts, verified, findings)
    with store_errors("writing", output):
        target.write_text(text, encoding="utf-8")
    is_damaged = bool(damage) or (verified is not None and not verified.ok)
    result = {"output": output, "bytes": len(text.encode()), "ok": not is_damaged}
    answer(as_json, result, f"{output}{'  (the checkpoint is DAMAGED)' if is_damaged else ''}")
    raise typer.Exit(opt.DAMAGE if is_damaged else 0)


def drawn_axes(array: ArrayMeta) -> tuple[int | None, int | None]:
    """Return the vertical and the horizontal axis of a picture: the two axes with the most chunks,
    or the last two; ``None`` for an axis that the array lacks."""
    counts = array.grid.counts
    best = sorted(range(len(counts)), key=lambda axis: (-counts[axis], -axis))[:2]
    high, wide = [None, None, *sorted(best)][-2:]
    return high, wide


def cells(array: ArrayMeta, manifest: Manifest | None) -> list[tuple[Index, Box, int | None]]:
    """Return index, rectangle and writer of the chunks at index 0 of the axes that are not drawn.

    Rectangles are in elements of the two drawn axes; their height is 1 for arrays with fewer axes.
    Only the first :data:`MAX_CELLS` chunks are returned, because a picture cannot show more.
    """
    axes = drawn_axes(array)
    most = (MAX_CELLS if axis in axes else 1 for axis in range(len(array.shape)))
    indices = product(*map(range, map(min, array.grid.counts, most)))
    out = []
    for index in islice(indices, MAX_CELLS):
        box = array.grid.box(index)
        corner = tuple(0 if axis is None else box.offset[axis] for axis in axes)
        shape = tuple(1 if axis is None else box.shape[axis] for axis in axes)
        rank = None if manifest is None else manifest.writer(array, index)
        out.append((index, Box(corner, shape), rank))
    return out


def rank_table(record: Any) -> list[list[str]] | None:
    """Return the work of each rank in a save as rows of texts; ``None`` for an invalid record.

    The first row holds the names of the columns: rank, bytes, chunks, seconds of each stage and in
    total, rate. For many ranks, the rows are minimum, median and maximum of each column.
    """
    try:
        stages = [name for name in record if name.endswith("_s")]
        columns = [record[name] for name in ("bytes", "chunks", *stages)]
        is_summary = isinstance(columns[0], Mapping)
        labels = ["min", "median", "max"] if is_summary else list(map(str, range(len(columns[0]))))
        if is_summary:
            columns = [[column[label] for label in labels] for column in columns]
        named = [f"{name.removesuffix('_s')} s" for name in stages]
        rows = [["ranks" if is_summary else "rank", "bytes", "chunks", *named, "total s", "rate"]]
        for label, size, chunks, *seconds in zip(labels, *columns, strict=True):
            took = math.fsum(seconds)
            rate = f"{human_bytes(size / took)}/s" if took and not is_summary else ""
            texts = [f"{value:.3f}" for value in seconds] + ["" if is_summary else f"{took:.3f}"]
            rows.append([label, human_bytes(size), f"{chunks:,.10g}", *texts, rate])
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        return None
    return rows


def _page(
    about: Mapping[str, Any],
    arrays: Sequence[str],
    verified: Verified | None,
    findings: Sequence[Finding],
) -> str:
    """Return the page; :func:`_node` makes the parts about arrays."""
    url, commit = str(about["url"]), about["commit"] or {}
    ranks, slowest = rank_table(commit.get("ranks")), ""
    if ranks and len(ranks) > 2 and "slowest" in commit["ranks"]:
        slowest = f'<p class="dim">Rank {escape(str(commit["ranks"]["slowest"]))} took longest.</p>'
    body = [
        f"<h1>{escape(url)}</h1>",
        _table("record", summary(about)[1:]),  # the first row is the heading of the page
        *([] if ranks is None else ["<h2>Ranks</h2>", _table("ranks", ranks), slowest]),
        "<h2>Verification</h2>",
        _verification(verified, findings),
        f'<h2>Arrays</h2><div id="tree">{"".join(arrays)}</div>',
    ]
    page = Template(Path(__file__).with_name("report.html").read_text("utf-8"))
    return page.substitute(name=escape(url.rsplit("/", 1)[-1]), body="\n".join(body))


def _table(name: str, rows: Sequence[Sequence[str]]) -> str:
    cells = ("".join(f"<td>{escape(text)}</td>" for text in row) for row in rows)
    return f'<table id="{name}">{"".join(f"<tr>{row}</tr>" for row in cells)}</table>'


def _verification(verified: Verified | None, findings: Sequence[Finding]) -> str:
    if verified is None:
        return '<p id="verification" class="dim">Not verified.</p>'
    items = (
        f'<li class="{finding.severity}"><b>{escape(finding.kind)}</b> '
        f"{escape(finding.message)}</li>"
        for finding in findings[:MAX_FINDINGS]
    )
    more = len(findings) - MAX_FINDINGS
    rest = f"<p>... and {more} more.</p>" if more > 0 else ""
    return (
        f'<p id="verification" class="{"ok" if verified.ok else "bad"}">{verdict(verified)}</p>'
        f'<ul id="findings">{"".join(items)}</ul>{rest}'
    )


def _array(
    name: str,
    meta: ArrayMeta,
    pictures: Mapping[str, Picture],
    statistics: Statistics | None,
    damage: Sequence[str],
) -> str:
    """Return the part of the page about an array.

    Args:
        name: name of the array in its module.
        meta: the array.
        pictures: kind -> picture.
        statistics: of the array's values, if they were read.
        damage: texts of errors.
    """
    dtype, shape, chunks, shards, size = map(escape, describe(meta))
    lines = [f"chunks: {chunks}", f"saved from {shards}" if shards else ""]
    if statistics is not None:
        lines.append(f"{_numbers(statistics)}{' (of the readable chunks)' if damage else ''}")
    damaged = "".join(f'<div class="bad">{escape(line)}</div>' for line in damage)
    figures = (
        f'<figure class="{kind}">{_svg(picture)}<figcaption>{escape(picture[1])}</figcaption>'
        "</figure>"
        for kind, picture in pictures.items()
        if picture[0]
    )
    key = escape(meta.key)
    return (
        f'<details class="array" data-key="{key}"><summary><span class="size">{size}</span>'
        f'{escape(name)} <span class="dim">{dtype} {shape}</span> {DAMAGED if damage else ""}'
        f'</summary><div class="dim">{key}</div><div>{"; ".join(filter(None, lines))}</div>'
        f'{damaged}<div class="pictures">{"".join(figures)}</div></details>'
    )


def _numbers(found: Statistics) -> str:
    values = {"norm": found.norm, "mean": found.mean, "min": found.min, "max": found.max}
    texts = [f"{name} {value:.6g}" for name, value in values.items() if value is not None]
    counts = {"zeros": found.zeros, "NaN": found.nan, "infinite": found.inf}
    return ", ".join(texts + [f"{n:,} {name}" for name, n in counts.items() if n])


def _layout(
    meta: ArrayMeta,
    manifest: Manifest | None,
    damaged: Collection[tuple[str | None, Index | None]] = (),
) -> Picture:
    found = cells(meta, manifest)
    high, wide = (max((box.end[i] for _, box, _ in found), default=1) for i in (0, 1))
    ranks = sorted({rank for _, _, rank in found if rank is not None})
    # Red means damage, so ranks have no red hues.
    hue = {rank: 210 - 180 * i // max(1, len(ranks) - 1) for i, rank in enumerate(ranks)}
    shapes, labels = [], dict[int, str]()
    for index, box, rank in found:
        fill = "#999" if rank is None else f"hsl({hue[rank]} 45% 55%)"
        by = "" if rank is None else f", rank {rank}"
        if (meta.key, index) in damaged:
            fill, by = "#cf222e", f"{by}, damaged"
        (top, left), (height, width) = box.offset, box.shape
        place = WIDE * left / wide, HIGH * top / high, WIDE * width / wide, HIGH * height / high
        shapes.append(_rect(place, fill, f"chunk {list(index)}{by}"))
        if rank is not None and len(ranks) <= MAX_LABELS:
            label = f"rank {rank}" if place[2] > 40 else str(rank)
            labels.setdefault(rank, _text(place[0] + 3, place[1] + 6, label, 9))
    shapes += labels.values()
    named = ", ".join(map(str, ranks[:12])) + (" ..." if len(ranks) > 12 else "")
    writers = f"written by rank{'s' * (len(ranks) > 1)} {named}" if ranks else "writers unknown"
    down, across = (None if axis is None else f"axis {axis}" for axis in drawn_axes(meta))
    axes = f"{across} across" + (f", {down} down" if down else "") if across else "one element"
    return "".join(shapes), f"{counted(len(found), 'chunk')}, {axes}; {writers}", HIGH


def _histogram(array: StoredArray, statistics: Statistics, **options: int) -> Picture:
    from shardstore.inspection.values import histogram

    counts, edges = histogram(array, statistics, BINS, **options)
    step, most = WIDE / len(counts), max(1, counts.max())
    shapes = []
    for i, count in enumerate(counts):
        if count:
            high = math.sqrt(count / most) * HIGH  # square roots keep small counts visible
            title = f"{edges[i]:.4g} to {edges[i + 1]:.4g}: {count}"
            shapes.append(_rect((i * step, HIGH - high, step, high), COLOR, title))
    caption = f"values from {edges[0]:.4g} to {edges[-1]:.4g} (heights: square root of counts)"
    return "".join(shapes), caption, HIGH


def _sizes(node: Module) -> Picture:
    title = ""
    while len(bars := list(node.children())) == 1 and bars[0][1].below:
        title, node = f"{clean(bars[0][0])}: ", bars[0][1]
    bars.sort(key=lambda bar: -bar[1].bytes)
    shapes = []
    for i, (name, child) in enumerate(bars[:BARS]):
        text = f"{clean(name)}: {human_bytes(child.bytes)}"
        length = WIDE * child.bytes / max(1, bars[0][1].bytes)
        shapes.append(_rect((0, i * ROW, length, ROW - 1), f"{COLOR}80", text))
        shapes.append(_text(4, (i + 0.45) * ROW, text, 8))
    rest = f"; {len(bars) - BARS:,} smaller ones are not shown" if len(bars) > BARS else ""
    total = f"{human_bytes(node.bytes)} in {counted(node.arrays, 'array')}"
    return "".join(shapes), f"{title}{total}{rest}", ROW * min(len(bars), BARS)


def _text(x: float, y: float, text: str, size: float) -> str:
    return (
        f'<text x="{x:.2f}" y="{y:.2f}" font-size="{size:.2f}" dominant-baseline="central" '
        f'fill="#000">{escape(text)}</text>'
    )


def _rect(place: tuple[float, float, float, float], fill: str, title: str) -> str:
    x, y, width, height = place
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{fill}" '
        f'stroke="#fff9" stroke-width=".6"><title>{escape(title)}</title></rect>'
    )


def _svg(picture: Picture, title: str = "") -> str:
    """Return a picture for the page; with a title, for a separate file."""
    shapes, caption, high = picture
    label = escape(caption)
    if not title:
        attributes = f'width="{WIDE}" height="{high}" viewBox="0 0 {WIDE} {high}"'
        return f'<svg {attributes} role="img" aria-label="{label}">{shapes}</svg>'
    attributes = f'width="{3 * WIDE}" viewBox="-8 -28 {WIDE + 16} {high + 36}" font-size="8"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {attributes} font-family="sans-serif">'
        f'<rect x="-8" y="-28" width="100%" height="100%" fill="#fff"/>'
        f'<text y="-16">{escape(clean(title))}</text><text y="-6">{label}</text>{shapes}</svg>\n'
    )


COMMANDS = (plot, report)
