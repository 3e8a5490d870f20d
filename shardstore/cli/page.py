"""The report as HTML: values in, text out. No scripts, no fonts, no requests; every text that comes
from a checkpoint is escaped."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardstore.cli.shared import counted, human_bytes
from shardstore.inspection.layout import Cell, Module, array_bytes, shard_counts
from shardstore.inspection.rank_table import RankTable, rank_table
from shardstore.inspection.statistics import Statistics
from shardstore.inspection.verify import Finding, Verified
from shardstore.storage.format.documents import ArrayMeta

__all__ = ["ArrayFacts", "page"]

WIDE, HIGH = 360, 150
MAX_FINDINGS = 500

STYLE = """
:root { color-scheme: light dark; --line: #8884; --dim: #8a8a8a; --bar: #4c78a8; }
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 74rem;
  padding: 0 1rem; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; } td, th { padding: .15rem .8rem .15rem 0; text-align: left;
  vertical-align: top; overflow-wrap: anywhere; } th { font-weight: 600; white-space: nowrap; }
details { border-left: 1px solid var(--line); margin-left: .3rem; padding-left: .8rem; }
details.array { padding-bottom: .2rem; } summary { cursor: pointer; padding: .1rem 0; }
.dim { color: var(--dim); } .size { float: right; font-variant-numeric: tabular-nums; }
.ok { color: #1a7f37; font-weight: 600; } .bad { color: #cf222e; font-weight: 600; }
.pictures { display: flex; flex-wrap: wrap; gap: 1.5rem; margin: .4rem 0; }
figure { margin: 0; } figcaption { color: var(--dim); font-size: .85em; max-width: 360px; }
#tree { overflow-wrap: anywhere; }
#ranks td, #ranks th { text-align: right; padding-left: .8rem; } .slowest { font-weight: 600; }
svg { display: block; background: #8881; } li { overflow-wrap: anywhere; }
"""


@dataclass(frozen=True, slots=True)
class ArrayFacts:
    """What the page shows of an array.

    Attributes:
        meta: the array.
        cells: its chunks as rectangles, ``None`` for no picture.
        statistics: of its values, if they were read.
        bars: histogram, counts and edges.
        damage: what could not be read.
    """

    meta: ArrayMeta
    cells: Sequence[Cell] | None = None
    statistics: Statistics | None = None
    bars: tuple[NDArray[np.int64], NDArray[np.float64]] | None = None
    damage: Sequence[str] = field(default_factory=list)


def page(
    about: Mapping[str, Any],
    tree: Module,
    facts: Mapping[str, ArrayFacts],
    verified: Verified | None,
    findings: Sequence[Finding],
) -> str:
    """The whole page."""
    title = str(about["url"]).rsplit("/", 1)[-1]
    body = [
        f"<h1>{escape(str(about['url']))}</h1>",
        _record(about),
        _ranks(rank_table((about["commit"] or {}).get("ranks"))),
        "<h2>Verification</h2>",
        _verification(verified, findings),
        "<h2>Arrays</h2>",
        f'<div id="tree">{"".join(_node(child, facts) for child in tree.below.values())}</div>',
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} - shardstore</title><style>{STYLE}</style></head>\n"
        f"<body>{chr(10).join(body)}\n</body></html>\n"
    )


def _record(about: Mapping[str, Any]) -> str:
    commit = about["commit"] or {}
    rows = {
        "Arrays": f"{about['arrays']} in {about['chunks']} chunks, {about['elements']:,} elements",
        "Size": ", ".join(
            [human_bytes(about["bytes"])]
            + [f"{name} {human_bytes(size)}" for name, size in about["bytes_by_dtype"].items()]
        ),
        "Layout": f"Zarr v{about['zarr_format']}",
        "Saved": commit.get("created"),
        "Ranks": commit.get("world_size"),
        "Took": f"{commit['seconds']} s" if "seconds" in commit else None,
        "Written by": f"shardstore {commit['shardstore']}" if "shardstore" in commit else None,
        "Content": json.dumps(about["content_metadata"]) if about["content_metadata"] else None,
    }
    known = {"created", "world_size", "seconds", "shardstore", "arrays", "chunks", "stored_bytes"}
    if rank_table(commit.get("ranks")) is not None:
        known.add("ranks")
    rows |= {name: json.dumps(value) for name, value in commit.items() if name not in known}
    cells = (
        f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>"
        for name, value in rows.items()
        if value is not None
    )
    return f'<table id="record">{"".join(cells)}</table>'


def _ranks(table: RankTable | None) -> str:
    if table is None:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in table.head)
    rows = []
    for row in table.rows:
        mark = ' class="slowest"' if row[0] == str(table.slowest) else ""
        rows.append(f"<tr{mark}>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>")
    slowest = "" if table.slowest is None else f"rank {table.slowest} took longest"
    return (
        f'<h2>Ranks</h2><table id="ranks"><thead><tr>{head}</tr></thead>'
        f'<tbody>{"".join(rows)}</tbody></table><p class="dim">{slowest}</p>'
    )


def _verification(verified: Verified | None, findings: Sequence[Finding]) -> str:
    if verified is None:
        return '<p id="verification" class="dim">Not verified.</p>'
    looked = (
        f"{verified.arrays} arrays, {verified.chunks} chunks, {verified.objects} objects, "
        f"{human_bytes(verified.bytes)} in {verified.seconds:.2f} s"
    )
    if verified.unchecked:
        looked += f"; {verified.unchecked} chunks have no checksum"
    state = "bad" if verified.damage else "ok"
    word = f"Damaged: {verified.damage} finding(s)" if verified.damage else "No damage found"
    items = (
        f'<li class="{finding.severity}"><b>{escape(finding.kind)}</b> '
        f"{escape(finding.message)}</li>"
        for finding in findings[:MAX_FINDINGS]
    )
    more = len(findings) - MAX_FINDINGS
    rest = f"<p>... and {more} more.</p>" if more > 0 else ""
    return (
        f'<p id="verification"><span class="{state}">{word}</span> <span class="dim">({looked})'
        f'</span></p><ul id="findings">{"".join(items)}</ul>{rest}'
    )


def _node(module: Module, facts: Mapping[str, ArrayFacts]) -> str:
    if module.array is not None and not module.below:
        return _array(module.name, facts[module.array.key])
    own = "" if module.array is None else _array(module.name, facts[module.array.key])
    below = "".join(_node(child, facts) for child in module.below.values())
    about = counted(module.arrays, "array")
    return (
        f'<details class="module"><summary><b>{escape(module.name)}</b> <span class="dim">{about}'
        f'</span><span class="size">{human_bytes(module.bytes)}</span></summary>{own}{below}'
        "</details>"
    )


def _array(name: str, facts: ArrayFacts) -> str:
    meta = facts.meta
    bad = ' <span class="bad">damaged</span>' if facts.damage else ""
    head = (
        f"<summary>{escape(name)} <span class='dim'>{escape(meta.dtype)} {list(meta.shape)}</span>"
        f'{bad}<span class="size">{human_bytes(array_bytes(meta))}</span></summary>'
    )
    shards = shard_counts(meta)
    lines = [f"{counted(meta.grid.size, 'chunk')} of {list(meta.grid.chunk_shape)}"]
    if shards is not None:
        whole = all(count == 1 for count in shards)
        cut = "1 shard" if whole else f"{' x '.join(map(str, shards))} shards"
        lines.append(f"saved from {cut}")
    if facts.statistics is not None:
        lines.append(_numbers(facts.statistics))
    text = f"<div class='dim'>{escape(meta.key)}</div><div>{escape('; '.join(lines))}</div>"
    damage = "".join(f'<div class="bad">{escape(line)}</div>' for line in facts.damage)
    pictures = ""
    if facts.cells:
        pictures += _layout(facts.cells)
    if facts.bars is not None and facts.bars[0].any():
        pictures += _histogram(*facts.bars)
    key = escape(meta.key, quote=True)
    return (
        f'<details class="array" data-key="{key}">{head}{text}{damage}'
        f'<div class="pictures">{pictures}</div></details>'
    )


def _numbers(found: Statistics) -> str:
    values = {"norm": found.norm, "mean": found.mean, "min": found.min, "max": found.max}
    texts = [f"{name} {value:.6g}" for name, value in values.items() if value is not None]
    counts = {"zeros": found.zeros, "NaN": found.nan, "infinite": found.inf}
    return ", ".join(texts + [f"{n:,} {name}" for name, n in counts.items() if n])


def _layout(cells: Sequence[Cell]) -> str:
    high = max(cell.top + cell.height for cell in cells)
    wide = max(cell.left + cell.width for cell in cells)
    ranks = sorted({cell.rank for cell in cells if cell.rank is not None})
    hue = {rank: 360 * i // max(1, len(ranks)) for i, rank in enumerate(ranks)}
    out = []
    for cell in cells:
        fill = "#999" if cell.rank is None else f"hsl({hue[cell.rank]} 55% 55%)"
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
    return _figure("layout", "".join(out), caption)


def _histogram(counts: NDArray[np.int64], edges: NDArray[np.float64]) -> str:
    # Square roots keep the tails in sight beside the bulk.
    heights = np.sqrt(counts / counts.max()) * HIGH
    step = WIDE / len(counts)
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
