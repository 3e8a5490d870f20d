"""`benchmark pictures`: the pictures of the page of figures, drawn from the tables of that page."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from arguments import page_of_figures

from bench.clients import BUDGET, DCP_OURS, LIMITS, OURS

Group = tuple[str, int, str, str]
"""Case, number of ranks, measure, unit."""
Figures = Mapping[Group, Mapping[str, float]]
"""Median of each client."""
Growth: TypeAlias = dict[tuple[str, str], dict[int, dict[int, float]]]
"""What was measured, and things counted -> ranks -> number of things -> seconds."""

OVERVIEW = "overview"
_SYNC, _WARM = "save + one sync", "load, warm cache"
PANELS: Sequence[tuple[str, Group]] = (
    ("Save 2 GiB on 4 ranks, one sync", ("save-load", 4, _SYNC, "s")),
    ("Load it, page cache warm", ("save-load", 4, _WARM, "s")),
    ("Save 2.4 GiB of flattened\noptimizer ranges, 8 ranks", ("flattened", 8, _SYNC, "s")),
    ("Load them, page cache warm", ("flattened", 8, _WARM, "s")),
)
"""Title and figures of each panel of the overview."""
NAMES = {
    "raw-1": "plain files, 1 thread",
    "raw-2": "plain files, 2 threads",
    "raw-tensorstore": "plain requests, TensorStore",
    "raw-obstore": "plain requests, obstore",
    "raw-ts-documents": "twice as many requests, TensorStore",
    "raw-ob-documents": "twice as many requests, obstore",
    "dcp-best": "DCP, 2 threads",
    "dcp-default": "DCP, default",
    DCP_OURS: "DCP over shardstore",
    "dcp-shardstore-root-only": "the same, root document only",
    "shardstore-root-only": "shardstore, root document only",
    "dcp-s3": "DCP over s3fs, 2 threads",
    "dcp-s3-default": "DCP over s3fs, default",
    "megatron-zarr": "Megatron 0.15.3 zarr",
    "shardstore, 256 MiB": "staging budget of 256 MiB",
    BUDGET: "staging budget of 256 MiB",
}
CASES = {
    "save-load": "GPT of 2 GiB",
    "dcp": "GPT of 2 GiB through DCP",
    "flattened": "2.4 GiB of flattened optimizer ranges",
    "small": "20,000 small arrays",
    "memory": "",
    "s3-chunks": "64 tensors of 32 MiB",
    "s3-arrays": "2,000 arrays of 16 KiB",
    "s3-latency": "2,000 arrays of 16 KiB, 50 ms a request",
    "s3-memory": "64 tensors of 32 MiB",
    "s3-dcp": "GPT of 2 GiB through DCP",
    "stall": "Asynchronous save",
    "train": "Training during an asynchronous save",
    "base": "Save upon a base, one chunk in 20 changed",
    "replicas": "Load of replicas that share 250 MB/s",
    "loads": "Load",
    "start": "Command line",
    "verify": "",
    "cli": "",
}
"""What the title of a group says of its case; nothing where the measure says it all."""
MINE, PEER, LIMIT, INK, FAINT = "#0f766e", "#94a3b8", "#dbe2ea", "#1f2937", "#64748b"
MAX_SHOWN = 12.0
"""Longer bars are cut, and say how long they are."""
_ROW = re.compile(
    r"^\| ([^|]+) \| (\d+) \| ([^|]+) \| ([^|]+) \| ([\d.]+) (s|MiB) \|", re.MULTILINE
)
_SIZE = re.compile(r"(.+), ([\d,]+) (tensors|chunks)")


def add_parser(commands: Any) -> None:
    """Add the subcommand to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "pictures", help="draw the pictures of a page of figures again", description=__doc__
    )
    parser.set_defaults(run=run)
    parser.add_argument("page", type=page_of_figures, metavar="PAGE", help="what `page` wrote")


def run(options: argparse.Namespace) -> int:
    """Draw every picture of the page; 0."""
    draw_all(options.page)
    return 0


def draw_all(page: Path) -> None:
    """A picture for each run on the page, into the folder beside it, and the overview."""
    text = page.read_text(encoding="utf-8")
    folder = page.with_suffix("")
    folder.mkdir(exist_ok=True)
    everything: dict[Group, Mapping[str, float]] = {}
    sources = {}
    for name, section in re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE):
        figures, source = figures_of(section), source_of(section + text)
        several = compared(figures)
        everything.update(several)
        sources.update(dict.fromkeys(several, source))
        if several:
            draw(several, source, folder / f"{name}.svg")
        elif panels := growth(figures):
            draw_growth(panels, source, folder / f"{name}.svg")
    shown = {sources.get(group) for _, group in PANELS}
    if None not in shown:
        draw_overview(everything, "; ".join(sorted(map(str, shown))), folder / f"{OVERVIEW}.svg")


def source_of(text: str) -> str:
    """Version and machine that the text names first."""
    found = re.search(r"processor ([^;]+); cores (\d+);.*?file system (\w+)", text)
    machine = "{}, {} cores, {}".format(*found.groups()) if found else ""
    version = re.search(
        r"^.*Environment of shardstore: .*?(shardstore [\d.]+\w*)", text, re.MULTILINE
    )
    return ", ".join(filter(None, (version and version[1], machine)))


def figures_of(section: str) -> dict[Group, dict[str, float]]:
    """The medians in the tables of a section of the page."""
    found: dict[Group, dict[str, float]] = {}
    for case, world, measure, client, value, unit in _ROW.findall(section):
        found.setdefault((case, int(world), measure, unit), {})[client] = float(value)
    return found


def compared(figures: Figures) -> dict[Group, Mapping[str, float]]:
    """The groups in which several clients were measured."""
    return {
        group: found for group, found in figures.items() if len(found) > 1 and any(found.values())
    }


def base_of(clients: Mapping[str, float]) -> str:
    """The client that the others are compared with: shardstore, or else the first."""
    return next((own for own in (OURS, DCP_OURS) if own in clients), next(iter(clients)))


def draw(figures: Figures, source: str, output: Path) -> None:
    """A bar for each client: times as ratios to the client that they are compared with."""
    rows = sum(len(clients) + 1.8 for clients in figures.values())
    fig, axes = _pyplot().subplots(figsize=(8.0, 0.9 + 0.23 * rows), layout="constrained")
    place, ticks, names = 0.0, [], []
    longest = 1.0
    for (case, world, measure, unit), clients in figures.items():
        base = clients[base_of(clients)]
        ratios = unit == "s" and base > 0
        scale = base if ratios else max(clients.values()) / MAX_SHOWN
        axes.text(
            0,
            place,
            _title(case, world, measure),
            weight="bold",
            va="center",
            fontsize=9,
            color=INK,
        )
        top = place
        for client, value in clients.items():
            place += 1
            shown = min(value / scale, MAX_SHOWN)
            longest = max(longest, value / scale)
            axes.barh(place, shown, color=_colour(client), height=0.78)
            ratio = f" ({value / base:.2f}x)" if ratios and value != base else ""
            _label(axes, shown, place, _text(value, unit) + ratio)
            ticks.append(place)
            names.append(_name(client))
        if ratios:
            line = {"color": INK, "linewidth": 0.7, "dashes": (3, 2)}
            axes.plot([1, 1], [top + 0.55, place + 0.45], **line)
        place += 1.8
    axes.set_yticks(ticks, names, fontsize=8, color=INK)
    axes.set_ylim(place - 1.2, -0.8)
    axes.set_xlim(0, min(longest, MAX_SHOWN) * 1.28)
    axes.set_xticks([])
    _frameless(axes)
    bases = {_name(one) for one in map(base_of, figures.values())}
    cut = f"; bars are cut at {MAX_SHOWN:g}x" if longest > MAX_SHOWN else ""
    base_line = f"{bases.pop()} (dashed)" if len(bases) == 1 else "the bar at the dashed line"
    about = f"Medians, and times as multiples of {base_line}; shorter is better{cut}"
    axes.set_title(f"{about}\n{source}", fontsize=8, color=FAINT, loc="left")
    _save(fig, output)


def growth(figures: Figures) -> Growth:
    """The times that were measured for several sizes."""
    lines: Growth = {}
    for (_, world, measure, unit), clients in figures.items():
        if unit == "s" and (found := _SIZE.fullmatch(measure)):
            what, size, things = found.groups()
            worlds = lines.setdefault((what, things), {})
            worlds.setdefault(world, {})[int(size.replace(",", ""))] = next(iter(clients.values()))
    return {key: w for key, w in lines.items() if any(len(line) > 1 for line in w.values())}


def draw_growth(panels: Growth, source: str, output: Path) -> None:
    """A panel for each time that was measured for several sizes."""
    rows = -(-len(panels) // 2)
    size = (8.0, 0.4 + 2.4 * rows)
    fig, grid = _pyplot().subplots(rows, 2, figsize=size, layout="constrained", squeeze=False)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    for axes, ((what, things), worlds) in zip(grid.flat, panels.items(), strict=False):
        for (world, line), colour in zip(worlds.items(), (PEER, INK, MINE), strict=False):
            axes.loglog(*zip(*line.items(), strict=True), "o-", color=colour, markersize=4)
            axes.lines[-1].set_label(f"{world:,} ranks")
        axes.set_title(what[0].upper() + what[1:], fontsize=9, color=INK, loc="left", weight="bold")
        axes.set_xlabel(things, fontsize=8, color=INK)
        axes.set_ylabel("seconds", fontsize=8, color=INK)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:,.10g}")
            axis.set_minor_formatter("")
        axes.tick_params(labelsize=8, colors=INK)
        axes.grid(True, color=LIMIT, linewidth=0.6)
        axes.legend(fontsize=7, frameon=False)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    fig.supxlabel(source, fontsize=8, color=FAINT)
    _save(fig, output)


def draw_overview(figures: Figures, source: str, output: Path) -> None:
    """The picture of the README: a panel for each of a few times, in seconds."""
    fig, panels = _pyplot().subplots(2, 2, figsize=(8.0, 4.3), layout="constrained")
    for axes, (title, group) in zip(panels.flat, PANELS, strict=True):
        clients = figures[group]
        limit = min((c for c in clients if c in LIMITS), key=clients.__getitem__)
        shown = [c for c in clients if c not in LIMITS or c == limit]
        for place, client in enumerate(shown):
            axes.barh(place, clients[client], color=_colour(client), height=0.74)
            weight = "bold" if client == OURS else "normal"
            _label(axes, clients[client], place, _text(clients[client], "s"), weight=weight)
        names = ["plain files" if c == limit else _name(c) for c in shown]
        axes.set_yticks(range(len(shown)), names, fontsize=9, color=INK)
        axes.invert_yaxis()
        axes.set_xlim(0, max(clients[c] for c in shown) * 1.2)
        axes.set_xticks([])
        _frameless(axes)
        axes.set_title(title, fontsize=9, color=INK, loc="left", weight="bold")
    about = f"Median seconds; shorter is better. Only shardstore keeps checksums.\n{source}"
    fig.supxlabel(about, fontsize=8, color=FAINT)
    _save(fig, output)


def _label(axes: Any, x: float, y: float, text: str, **font: Any) -> None:
    """A figure at the end of a bar, legible where a line crosses it."""
    offset = {"xytext": (4, 0), "textcoords": "offset points"}
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
    axes.annotate(text, (x, y), **offset, va="center", fontsize=8, color=INK, bbox=box, **font)


def _title(case: str, world: int, measure: str) -> str:
    ranks = f"{world} ranks" if world != 1 else ""
    about = ", ".join(filter(None, (CASES.get(case, case), ranks)))
    title = f"{about}: {measure}".removeprefix(": ").replace(" s3", " S3")
    return title[0].upper() + title[1:]


def _name(client: str) -> str:
    return NAMES.get(client, client).replace("dcp", "DCP")


def _text(value: float, unit: str) -> str:
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f} {unit}"


def _colour(client: str) -> str:
    if client in LIMITS:
        return LIMIT
    return MINE if OURS in client else PEER


def _frameless(axes: Any) -> None:
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.spines["left"].set_color(FAINT)
    axes.tick_params(left=False)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # The same picture of the same figures, whenever it is drawn, in the reader's own font.
    plt.rcParams["svg.hashsalt"] = "shardstore"
    plt.rcParams["svg.fonttype"] = "none"
    plt.rcParams["font.sans-serif"] = ["DejaVu Sans", "Helvetica", "Arial", "sans-serif"]
    return plt


def _save(fig: Any, output: Path) -> None:
    import matplotlib.pyplot as plt

    fig.savefig(output, metadata={"Date": None})
    plt.close(fig)
