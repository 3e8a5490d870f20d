"""The report as HTML: no scripts, fonts or requests, and texts from checkpoints escaped."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardstore.cli.checking import verdict
from shardstore.cli.listing import describe, summary
from shardstore.inspection.layout import Cell, Module, drawn_axes
from shardstore.inspection.opened import counted, human_bytes
from shardstore.inspection.statistics import Statistics
from shardstore.inspection.verify import Finding, Verified
from shardstore.storage.format.documents import ArrayMeta

WIDE, HIGH = 360, 150
MAX_FINDINGS = 500
MAX_RANKS = 256
IN_SUMMARY = {"created", "world_size", "seconds", "shardstore", "arrays", "chunks", "stored_bytes"}
"""Fields of the commit record that the summary shows, or other words for the same."""

STYLE = """
:root { color-scheme: light dark; --line: #8884; --dim: #5f6b7a; --bar: #0f766e;
  --ok: #1a7f37; --bad: #cf222e; }
@media (prefers-color-scheme: dark) {
  :root { --dim: #a3adba; --bar: #2dd4bf; --ok: #4ade80; --bad: #ff7b72; } }
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 74rem;
  padding: 0 1rem; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; }
td { padding: .15rem .8rem .15rem 0; vertical-align: top; overflow-wrap: anywhere; }
details { border-left: 1px solid var(--line); margin-left: .3rem; padding-left: .8rem; }
details.array { padding-bottom: .2rem; } summary { cursor: pointer; padding: .1rem 0; }
.dim { color: var(--dim); } .size { float: right; font-variant-numeric: tabular-nums; }
.ok { color: var(--ok); font-weight: 600; } .bad { color: var(--bad); font-weight: 600; }
.pictures { display: flex; flex-wrap: wrap; gap: 1.5rem; margin: .4rem 0; }
figure { margin: 0; } figcaption { color: var(--dim); font-size: .85em; max-width: 360px; }
#tree { overflow-wrap: anywhere; }
#record td:first-child, #ranks tr:first-child { font-weight: 600; white-space: nowrap; }
#ranks { display: block; overflow-x: auto; }
#ranks td { text-align: right; padding-left: .8rem; white-space: nowrap; }
svg { display: block; background: #8881; max-width: 100%; } li { overflow-wrap: anywhere; }
"""


ArrayHtml = Callable[[str, ArrayMeta], str]
"""From the last part of an array's path, and the array, to its part of the page."""


def rank_table(record: object) -> list[list[str]] | None:
    """What each rank did in a save, as rows of texts; ``None`` for what no save writes.

    The first row has the columns' names: rank, bytes, chunks, seconds of each stage and in all,
    rate. A record of many ranks has the least, the median and the largest of each column alone.
    """
    if not isinstance(record, Mapping):
        return None
    stages = [name for name in record if isinstance(name, str) and name.endswith("_s")]
    columns: list[Any] = [record.get(name) for name in ("bytes", "chunks", *stages)]
    is_summary = all(isinstance(column, Mapping) for column in columns)
    labels: list[str] = ["min", "median", "max"]
    if is_summary:
        columns = [[column.get(label) for label in labels] for column in columns]
    elif all(isinstance(column, list) for column in columns):
        labels = [str(rank) for rank in range(len(columns[0]))]
    else:
        return None
    numbers = [value for column in columns for value in column]
    is_sound = all(isinstance(value, int | float) and value >= 0 for value in numbers)
    if not numbers or not is_sound or any(len(column) != len(labels) for column in columns):
        return None
    named = [f"{name.removesuffix('_s')} s" for name in stages]
    rows = [["ranks" if is_summary else "rank", "bytes", "chunks", *named, "seconds", "rate"]]
    for label, size, chunks, *seconds in islice(zip(labels, *columns, strict=True), MAX_RANKS):
        took = sum(seconds)
        rate = f"{human_bytes(size / took)}/s" if took and not is_summary else ""
        texts = [f"{value:.3f}" for value in seconds] + ["" if is_summary else f"{took:.3f}"]
        rows.append([label, human_bytes(size), f"{chunks:g}", *texts, rate])
    return rows


def page(
    about: Mapping[str, Any],
    tree: Module,
    array_html: ArrayHtml,
    verified: Verified | None,
    findings: Sequence[Finding],
) -> str:
    """The whole page; :func:`array` makes the parts about arrays."""
    url, commit = str(about["url"]), about["commit"] or {}
    ranks = rank_table(commit.get("ranks"))
    hidden = IN_SUMMARY | ({"ranks"} if ranks else set())
    slowest = ""
    if ranks and "slowest" in commit["ranks"]:
        slowest = escape(f"rank {commit['ranks']['slowest']} took longest")
    record = summary(about)
    del record["checkpoint"]  # the heading
    for name, value in commit.items():
        if name not in hidden:
            record[f"commit.{name}"] = value if isinstance(value, str) else json.dumps(value)
    body = [
        f"<h1>{escape(url)}</h1>",
        _table("record", [[name, str(value)] for name, value in record.items() if value]),
        *([] if ranks is None else ["<h2>Ranks</h2>", _table("ranks", ranks), slowest]),
        "<h2>Verification</h2>",
        _verification(verified, findings),
        "<h2>Arrays</h2>",
        f'<div id="tree">{_below(tree, array_html, opened=len(tree.below) == 1)}</div>',
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(url.rsplit('/', 1)[-1])} - shardstore</title><style>{STYLE}</style>"
        f"</head>\n<body>{chr(10).join(body)}\n</body></html>\n"
    )


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


def _below(module: Module, array_html: ArrayHtml, opened: bool = False) -> str:
    return "".join(_node(child, array_html, opened) for child in module.below.values())


def _node(module: Module, array_html: ArrayHtml, opened: bool) -> str:
    own = "" if module.array is None else array_html(module.name, module.array)
    if not module.below:
        return own
    below = _below(module, array_html)
    return (
        f'<details class="module"{" open" if opened else ""}><summary><b>{escape(module.name)}</b> '
        f'<span class="dim">{counted(module.arrays, "array")}</span>'
        f'<span class="size">{human_bytes(module.bytes)}</span></summary>{own}{below}</details>'
    )


def array(
    name: str,
    meta: ArrayMeta,
    cells: Sequence[Cell],
    statistics: Statistics | None,
    bars: tuple[NDArray[np.int64], NDArray[np.float64]] | None,
    damage: Sequence[str],
) -> str:
    """The part of the page about an array.

    Args:
        name: last part of its path.
        meta: the array.
        cells: its chunks as rectangles; none for no picture.
        statistics: of its values, if they were read.
        bars: histogram, counts and edges.
        damage: what could not be read.
    """
    dtype, shape, chunks, shards, size = map(escape, describe(meta))
    bad = '<span class="bad">damaged</span>' if damage else ""
    lines = [f"chunks: {chunks}", f"saved from: {shards}" if shards else ""]
    lines.append(_numbers(statistics) if statistics is not None else "")
    damaged = "".join(f'<div class="bad">{escape(line)}</div>' for line in damage)
    pictures = _layout(meta, cells) if cells else ""
    if bars is not None and bars[0].any():
        pictures += _histogram(*bars)
    key = escape(meta.key, quote=True)
    whole = "" if name == meta.key else f'<div class="dim">{key}</div>'
    return (
        f'<details class="array" data-key="{key}"><summary>{escape(name)} '
        f'<span class="dim">{dtype} {shape}</span> {bad}<span class="size">{size}</span></summary>'
        f"{whole}<div>{'; '.join(filter(None, lines))}</div>{damaged}"
        f'<div class="pictures">{pictures}</div></details>'
    )


def _numbers(found: Statistics) -> str:
    values = {"norm": found.norm, "mean": found.mean, "min": found.min, "max": found.max}
    texts = [f"{name} {value:.6g}" for name, value in values.items() if value is not None]
    counts = {"zeros": found.zeros, "NaN": found.nan, "infinite": found.inf}
    return ", ".join(texts + [f"{n:,} {name}" for name, n in counts.items() if n])


def _layout(meta: ArrayMeta, cells: Sequence[Cell]) -> str:
    high = max(cell.top + cell.height for cell in cells)
    wide = max(cell.left + cell.width for cell in cells)
    ranks = sorted({cell.rank for cell in cells if cell.rank is not None})
    # Red means damage on this page: the hues begin at blue and end before red.
    hue = {rank: 210 - 180 * i // max(1, len(ranks) - 1) for i, rank in enumerate(ranks)}
    out = []
    for cell in cells:
        fill = "#999" if cell.rank is None else f"hsl({hue[cell.rank]} 45% 55%)"
        x, y = WIDE * cell.left / wide, HIGH * cell.top / high
        w, h = WIDE * cell.width / wide, HIGH * cell.height / high
        by = "" if cell.rank is None else f", rank {cell.rank}"
        out.append(
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{w:.2f}" height="{h:.2f}" fill="{fill}" '
            f'stroke="#fff" stroke-width=".6"><title>chunk {list(cell.index)}{by}</title></rect>'
        )
    named = ", ".join(map(str, ranks[:12])) + (" ..." if len(ranks) > 12 else "")
    caption = f"written by rank {named}" if len(ranks) == 1 else f"written by ranks {named}"
    caption = caption if ranks else "writers unknown"
    down, across = (None if axis is None else f"axis {axis}" for axis in drawn_axes(meta))
    axes = f"{across} across" + (f", {down} down" if down else "") if across else "one element"
    caption = f"{counted(len(cells), 'chunk')}, {axes}; {caption}"
    return _figure("layout", "".join(out), caption)


def _histogram(counts: NDArray[np.int64], edges: NDArray[np.float64]) -> str:
    # Square roots keep the tails in sight beside the bulk.
    step, most = WIDE / len(counts), counts.max()
    heights = [math.sqrt(count / most) * HIGH for count in counts]
    bars = (
        f'<rect x="{i * step:.2f}" y="{HIGH - h:.2f}" width="{step:.2f}" height="{h:.2f}" '
        f'fill="var(--bar)"><title>{edges[i]:.4g} to {edges[i + 1]:.4g}: {counts[i]}</title></rect>'
        for i, h in enumerate(heights)
        if counts[i]
    )
    caption = f"values from {edges[0]:.4g} to {edges[-1]:.4g} (heights: square root of counts)"
    return _figure("histogram", "".join(bars), caption)


def _figure(kind: str, shapes: str, caption: str) -> str:
    return (
        f'<figure class="{kind}"><svg width="{WIDE}" height="{HIGH}" '
        f'viewBox="0 0 {WIDE} {HIGH}" role="img" aria-label="{escape(caption, quote=True)}">'
        f"{shapes}</svg><figcaption>{escape(caption)}</figcaption></figure>"
    )
