"""`benchmark plot`: pictures of what a run measured: bars of ratios, and lines of what grows.

Reads the JSON that the other subcommands write; measures nothing.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from arguments import new_file, run_of_benchmark

OURS, OURS_IN_DCP = "shardstore", "dcp-shardstore"
NOT_OURS, MINE = "#9aa7b4", "#1f6f8b"
BAR_INCHES = 0.24
WIDTH_INCHES = 9.0
MAX_SHOWN = 12.0
"""Longer bars are cut, and say how long they are."""

Data = dict[str, Any]
Group = tuple[str, int, str]


def add_parser(commands: Any) -> None:
    """Add the subcommand to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "plot", help="a picture of a run's JSON", description=__doc__
    )
    parser.set_defaults(run=run)
    parser.add_argument("json", type=run_of_benchmark, metavar="FILE", help="what --json wrote")
    parser.add_argument(
        "-o", "--output", type=new_file, default=None, help="PNG or SVG (default: FILE with .svg)"
    )


def run(options: argparse.Namespace) -> int:
    """Draw; 0."""
    data = json.loads(options.json.read_text())
    output = options.output or options.json.with_suffix(".svg")
    draw(data, output)
    print(output)
    return 0


def draw(data: Data, output: Path) -> None:
    """The picture that fits: lines for `benchmark scale`, bars for all others."""
    if data["notes"].get("cases") == ["scale"]:
        draw_scale(data, output)
    else:
        draw_ratios(data, output)


def ratios(data: Data) -> list[tuple[Group, list[tuple[str, float]]]]:
    """Of each time that several clients were measured in: each client's median over ours.

    Returns:
        (case, ranks, measure) -> clients with their ratio, ours among them as 1.
    """
    found: dict[Group, dict[str, list[float]]] = {}
    for sample in data["samples"]:
        if sample["unit"] == "s":
            group = (sample["case"], sample["world"], sample["measure"])
            found.setdefault(group, {}).setdefault(sample["client"], []).append(sample["value"])
    out = []
    for group, clients in found.items():
        ours = clients.get(OURS) or clients.get(OURS_IN_DCP)
        ours = ours or next(
            (values for name, values in clients.items() if name.startswith(OURS_IN_DCP)), None
        )
        if ours is None or len(clients) < 2 or not median(ours):
            ours = next(iter(clients.values()))
            if len(clients) < 2 or not median(ours):
                continue
        base = median(ours)
        out.append((group, [(name, median(v) / base) for name, v in clients.items()]))
    return out


def draw_ratios(data: Data, output: Path) -> None:
    """A bar a client: how many times as long as ours it took (the first one, where we are not)."""
    plt = _pyplot()
    groups = ratios(data)
    bars = sum(len(clients) + 2 for _, clients in groups)
    fig, axes = plt.subplots(figsize=(WIDTH_INCHES, 1.2 + BAR_INCHES * max(bars, 4)))
    place, ticks, names = 0.0, [], []
    for (case, world, measure), clients in groups:
        ranks = f", {world} ranks" if world != 1 else ""
        axes.text(0, place, f"{case}{ranks}: {measure}", weight="bold", va="center", fontsize=8)
        place += 1
        for client, ratio in clients:
            shown = min(ratio, MAX_SHOWN)
            axes.barh(place, shown, color=MINE if client.startswith(OURS) else NOT_OURS, height=0.8)
            axes.text(shown, place, f" {ratio:.2f}", va="center", fontsize=7)
            ticks.append(place)
            names.append(client)
            place += 1
        place += 1
    axes.set_yticks(ticks, names, fontsize=7)
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.6)
    axes.set_xlabel(f"time over that of {OURS}: longer is slower (cut at {MAX_SHOWN:g})")
    _titled(fig, data)
    _save(plt, fig, output)


def draw_scale(data: Data, output: Path) -> None:
    """Seconds over tensors and over chunks, a line a world."""
    plt = _pyplot()
    panels = (
        ("preparation of one rank", "tensors"),
        ("preparation of one rank, DTensors", "tensors"),
        ("manifest of one rank", "tensors"),
        ("commit", "chunks"),
    )
    fig, grid = plt.subplots(2, 2, figsize=(WIDTH_INCHES, 7))
    for axes, (measure, of) in zip(grid.flat, panels, strict=True):
        for world, points in sorted(_lines(data["samples"], measure, of).items()):
            axes.plot(*zip(*points, strict=True), marker="o", label=f"{world:,} ranks")
        if of == "chunks":
            axes.axhline(10, color="black", linewidth=0.6, linestyle="--", label="10 s")
        axes.set(xscale="log", yscale="log", xlabel=of, ylabel="seconds", title=measure)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    _titled(fig, data)
    _save(plt, fig, output)


def _lines(samples: Sequence[Data], measure: str, of: str) -> dict[int, list[tuple[int, float]]]:
    """World -> (size, median) of a measure that was taken at several sizes."""
    pattern = re.compile(rf"{re.escape(measure)}, ([\d,]+) {of}")
    found: dict[int, dict[int, list[float]]] = {}
    for sample in samples:
        match = pattern.fullmatch(sample["measure"])
        if match:
            size = int(match.group(1).replace(",", ""))
            found.setdefault(sample["world"], {}).setdefault(size, []).append(sample["value"])
    return {
        world: sorted((size, median(values)) for size, values in sizes.items())
        for world, sizes in found.items()
    }


def _titled(fig: Any, data: Data) -> None:
    about = data["notes"].get("machine", {})
    words = [str(about[name]) for name in ("processor",) if name in about]
    words += [f"{about['cores']} cores"] if "cores" in about else []
    words += [str(about["file_system"]).split(" ")[0]] if "file_system" in about else []
    fig.suptitle(", ".join(words), fontsize=8)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # The same picture of the same figures, whenever it is drawn.
    plt.rcParams["svg.hashsalt"] = "shardstore"
    return plt


def _save(plt: Any, fig: Any, output: Path) -> None:
    fig.tight_layout()
    metadata = {"Date": None} if output.suffix == ".svg" else None
    fig.savefig(output, metadata=metadata, dpi=120)
    plt.close(fig)
