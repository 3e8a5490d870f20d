"""`benchmark page`: the page of figures and its pictures, made from the JSON of the runs.

Each run becomes a section with machine, command, versions, targets met and missed, and every
figure. The page begins with the targets met and missed, and with where a peer is faster and where
it is not. The folder beside the page, with its name, keeps the JSON and the pictures: without a
file, `benchmark page` makes both again. Of an earlier version of the page, the notes that people
wrote between its two marks stay.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from arguments import new_file, run_of_benchmark

from bench.clients import BUDGET, DCP_OURS, LIMITS, OURS
from bench.results import Results, amount

Row = Sequence[str]
Group = tuple[str, int, str, str]
"""Case, number of ranks, measure, unit."""
Figures: TypeAlias = dict[Group, dict[str, list[float]]]
"""Samples of each client."""
Medians = Mapping[Group, Mapping[str, float]]
Growth: TypeAlias = dict[tuple[str, str], dict[int, dict[int, float]]]
"""What was measured, and things counted -> ranks -> number of things -> seconds."""
Runs = Mapping[str, Results]
"""By name."""
HEAD = ("case", "ranks", "measure", "client", "median", "range", "to shardstore")
TARGETS = ("case", "target", "measured", "")
WORDS = {True: "pass", False: "FAIL", None: "not measured"}
INTRODUCTION = (
    "Made by `scripts/benchmark page` from the files that `scripts/benchmark COMMAND --json` "
    "wrote. Figures are medians; the clients of a round ran one after the other on the same "
    "machine. A ratio above 1 says that the other took longer."
)
NOTES = ("<!-- notes: begin -->", "<!-- notes: end -->")
"""Marks around what people wrote."""

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
    "shardstore-packed": "shardstore, pack=True",
    "dcp-shardstore-packed": "the same, pack=True",
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
}
"""What the title of a group says of its case; nothing where the measure says it all."""
MINE, PEER, LIMIT, INK, FAINT = "#0f766e", "#94a3b8", "#dbe2ea", "#1f2937", "#64748b"
MAX_SHOWN = 12.0
"""Longer bars are cut, and say how long they are."""
_SIZE = re.compile(r"(.+), ([\d,]+) (tensors|chunks)")


def add_parser(commands: Any) -> None:
    """Add the subcommand to the command line."""
    help = "the page of figures from the JSON of several runs"
    parser: argparse.ArgumentParser = commands.add_parser("page", help=help, description=__doc__)
    parser.set_defaults(run=run)
    add, help = parser.add_argument, "what --json wrote"
    add("json", type=run_of_benchmark, nargs="*", metavar="FILE", help=help)
    add("--markdown", type=new_file, required=True, metavar="FILE", help="the page")


def run(options: argparse.Namespace) -> int:
    """Keep the JSON, write page and pictures; 0."""
    page: Path = options.markdown
    folder = page.with_suffix("")
    folder.mkdir(exist_ok=True)
    for file in options.json:
        if file.parent.resolve() != folder.resolve():
            shutil.copy(file, folder)
    files = sorted(folder.glob("*.json"))
    runs = {file.stem: Results.from_dict(json.loads(file.read_text())) for file in files}
    before = page.read_text("utf-8") if page.exists() else ""
    notes, end, _ = before.partition(NOTES[0])[2].partition(NOTES[1])
    drawn = draw_all(runs, folder)
    page.write_text(text_of(runs, drawn, folder.name, notes.strip() if end else ""), "utf-8")
    print(page)
    return 0


def text_of(runs: Runs, drawn: Sequence[str], folder: str, notes: str = "") -> str:
    """The page as Markdown, with the pictures that were drawn; `notes` are people's."""
    parts = [
        "# Benchmarks",
        INTRODUCTION,
        "\n\n".join((NOTES[0], notes, NOTES[1])) if notes else "",
        "## In short",
        "\n".join(line for name, results in runs.items() for line in _missed(name, results)),
        "### Where a peer is faster",
        _compared(runs, slower=True),
        "### Where no peer is faster",
        _compared(runs, slower=False),
    ]
    for name, results in runs.items():
        notes_of = results.notes
        parts += [
            f"## {name}",
            f"![{name}]({folder}/{name}.svg)" if name in drawn else "",
            "`{command}`, {date}; {repeats} rounds, scale {scale}.".format(**notes_of),
            "\n".join(f"- {line}" for line in _about(notes_of)),
            text(results),
        ]
    return "\n\n".join(part for part in parts if part) + "\n"


def text(results: Results) -> str:
    """The tables of one run: targets, figures, and what failed."""
    verdicts = [
        (v.case, v.target, "" if v.value is None else amount(v.value), WORDS[v.ok])
        for v in results.targets
    ]
    tables = [_pipes(TARGETS, verdicts)] if verdicts else []
    return "\n\n".join([*tables, _pipes(HEAD, list(_rows(results))), *_failures(results)])


def _about(notes: dict[str, Any]) -> Iterator[str]:
    machine = notes["machine"].items()
    yield "Machine: " + "; ".join(f"{name.replace('_', ' ')} {value}" for name, value in machine)
    for name in ("device", "server"):
        if name in notes:
            yield f"{name.capitalize()}: {notes[name]}"
    for name, versions in notes.get("versions", {}).items():
        yield f"Environment of {name}: " + ", ".join(f"{p} {v}" for p, v in versions.items())
    for name, words in notes.get("settings", {}).items():
        yield f"{name}: {words}"
    for name, state in notes.get("states", {}).items():
        written, loaded = (state[f"bytes_{what}"] / 2**20 for what in ("written", "loaded"))
        yield (
            f"State of {name}: {state['tensors_on_rank_0']} tensors on rank 0, "
            f"{written:,.0f} MiB written, {loaded:,.0f} MiB loaded"
        )


def figures_of(results: Results) -> Figures:
    """All samples, by figure and client."""
    found: Figures = {}
    for s in results.samples:
        group = found.setdefault((s.case, s.world, s.measure, s.unit), {})
        group.setdefault(s.client, []).append(s.value)
    return found


def medians_of(results: Results) -> Medians:
    """The median of each client, for the figures in seconds and in bytes."""
    return {
        group: {client: median(values) for client, values in clients.items()}
        for group, clients in figures_of(results).items()
        if group[3] in ("s", "bytes")
    }


def _rows(results: Results) -> Iterator[Row]:
    for (case, world, measure, unit), clients in figures_of(results).items():
        ours = median(clients[OURS]) if OURS in clients and unit == "s" else 0.0
        for client, values in clients.items():
            low, middle, high = (
                _format(v, unit) for v in (min(values), median(values), max(values))
            )
            ratio = f"{median(values) / ours:.2f}" if ours else ""
            yield case, str(world), measure, client, middle, f"{low} - {high}", ratio


def _failures(results: Results) -> list[str]:
    return [
        f"{f['client']} gave no figure in {f['case']} with {f['world']} rank(s): "
        + (f["reason"].splitlines() or ["unknown"])[0]
        for f in results.failures
    ]


def _missed(name: str, results: Results) -> Iterator[str]:
    met = sum(verdict.ok is True for verdict in results.targets)
    yield f"- **{name}**: {met} of {len(results.targets)} targets met."
    for v in results.targets:
        if v.ok is None:
            yield f"    - not measured: {v.case}, {v.target}"
        elif not v.ok:
            yield f"    - missed: {v.case}, {v.target}: {amount(v.value or 0.0)}"


def _compared(runs: Runs, *, slower: bool) -> str:
    """Every time that we and a peer were measured in, with the fastest peer; the widest first."""
    rows: list[tuple[float, Row]] = []
    for name, results in runs.items():
        for (case, world, measure, unit), clients in medians_of(results).items():
            peers = {
                clients[peer] / clients[OURS]: peer
                for peer in clients
                if unit == "s" and clients.get(OURS) and OURS not in peer and peer not in LIMITS
            }
            if peers and (min(peers) < 1) == slower:
                best = min(peers)
                row = (name, case, str(world), measure, peers[best], f"{best:.2f}")
                rows.append((best, row))
    if not rows:
        return "Nowhere, of what was measured."
    rows.sort(key=lambda entry: entry[0], reverse=not slower)
    head = ("run", "case", "ranks", "measure", "fastest peer", "its time over ours")
    return _pipes(head, [row for _, row in rows])


def _format(value: float, unit: str) -> str:
    if unit == "bytes":
        return f"{value / 2**20:.1f} MiB"
    if unit == "count":
        return f"{value:.0f}"
    return f"{value:.3f} s" if unit == "s" else f"{value:.3f}"


def _pipes(head: Row, rows: Sequence[Row]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def draw_all(runs: Runs, folder: Path) -> list[str]:
    """Draw a picture of each run that compares clients or sizes, and the overview; the names."""
    everything: dict[Group, Mapping[str, float]] = {}
    sources, drawn = dict[Group, str](), []
    for name, results in runs.items():
        medians, source = medians_of(results), source_of(results.notes)
        several = {g: one for g, one in medians.items() if len(one) > 1 and any(one.values())}
        everything |= several
        sources |= dict.fromkeys(several, source)
        if several:
            draw(several, source, folder / f"{name}.svg")
        elif panels := growth(medians):
            draw_growth(panels, source, folder / f"{name}.svg")
        else:
            continue
        drawn.append(name)
    if all(group in sources for _, group in PANELS):
        shown = {sources[group] for _, group in PANELS}
        draw_overview(everything, "; ".join(sorted(shown)), folder / f"{OVERVIEW}.svg")
    return drawn


def source_of(notes: Mapping[str, Any]) -> str:
    """Version and machine of a run."""
    machine, versions = notes["machine"], notes.get("versions", {}).get("shardstore", {})
    version = f"shardstore {versions['shardstore']}" if "shardstore" in versions else ""
    parts = (version, machine["processor"], f"{machine['cores']} cores")
    return ", ".join(filter(None, (*parts, machine["file_system"].split()[0])))


def base_of(clients: Mapping[str, float]) -> str:
    """The client that the others are compared with: shardstore, or else the first."""
    return next((own for own in (OURS, DCP_OURS) if own in clients), next(iter(clients)))


def draw(figures: Medians, source: str, output: Path) -> None:
    """A bar for each client: times as ratios to the client that they are compared with."""
    rows = [len(clients) + 1.8 for clients in figures.values()]
    fig, grid = pyplot().subplots(
        *(len(rows), 1), figsize=(8.0, 0.9 + 0.23 * sum(rows)), layout="constrained", squeeze=False,
        height_ratios=[len(clients) for clients in figures.values()],
    )  # fmt: skip
    longest = 1.0
    for axes, ((case, world, measure, unit), clients) in zip(
        grid.flat, figures.items(), strict=True
    ):
        base = clients[base_of(clients)]
        ratios = unit == "s" and base > 0
        scale = base if ratios else max(clients.values()) / MAX_SHOWN
        longest = max(longest, max(clients.values()) / scale)
        texts = [
            _text(value, unit) + (f" ({value / base:.2f}x)" if ratios and value != base else "")
            for value in clients.values()
        ]
        lengths = [min(value / scale, MAX_SHOWN) for value in clients.values()]
        _bars(axes, clients, map(_name, clients), lengths, texts)
        axes.set_title(_title(case, world, measure))
        if ratios:
            axes.axvline(1, color=INK, linewidth=0.7, dashes=(3, 2))
    for axes in grid.flat:
        axes.set_xlim(0, min(longest, MAX_SHOWN) * 1.28)
    bases = {_name(one) for one in map(base_of, figures.values())}
    cut = f"; bars are cut at {MAX_SHOWN:g}x" if longest > MAX_SHOWN else ""
    base_line = f"{bases.pop()} (dashed)" if len(bases) == 1 else "the bar at the dashed line"
    about = f"Medians, and times as multiples of {base_line}; shorter is better{cut}"
    fig.suptitle(f"{about}\n{source}", fontsize=8, color=FAINT)
    save_picture(fig, output)


def growth(figures: Medians) -> Growth:
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
    fig, grid = pyplot().subplots(rows, 2, figsize=size, layout="constrained", squeeze=False)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    for axes, ((what, things), worlds) in zip(grid.flat, panels.items(), strict=False):
        for (world, line), colour in zip(worlds.items(), (PEER, INK, MINE), strict=False):
            points = zip(*line.items(), strict=True)
            axes.loglog(*points, "o-", color=colour, markersize=4, label=f"{world:,} ranks")
        axes.set_title(what[0].upper() + what[1:])
        axes.set(xlabel=things, ylabel="seconds")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:,.10g}")
            axis.set_minor_formatter("")
        axes.grid(True, color=LIMIT, linewidth=0.6)
        axes.legend(fontsize=7, frameon=False)
    fig.supxlabel(source, fontsize=8, color=FAINT)
    save_picture(fig, output)


def draw_overview(figures: Medians, source: str, output: Path) -> None:
    """The picture of the README: a panel for each of a few times, in seconds."""
    fig, panels = pyplot().subplots(2, 2, figsize=(8.0, 4.3), layout="constrained")
    for axes, (title, group) in zip(panels.flat, PANELS, strict=True):
        clients = figures[group]
        limit = min((c for c in clients if c in LIMITS), key=clients.__getitem__)
        shown = {c: value for c, value in clients.items() if c not in LIMITS or c == limit}
        names = ["plain files" if c == limit else _name(c) for c in shown]
        _bars(axes, shown, names, shown.values(), [_text(value, "s") for value in shown.values()])
        axes.set_xlim(0, max(shown.values()) * 1.2)
        axes.set_title(title)
    about = f"Median seconds; shorter is better. Only shardstore keeps checksums.\n{source}"
    fig.supxlabel(about, fontsize=8, color=FAINT)
    save_picture(fig, output)


def _bars(
    axes: Any,
    clients: Iterable[str],
    names: Iterable[str],
    lengths: Iterable[float],
    texts: Sequence[str],
) -> None:
    """A bar for each client, downwards, with a text at its end."""
    places = range(len(texts))
    colours = [LIMIT if c in LIMITS else MINE if OURS in c else PEER for c in clients]
    bars = axes.barh(places, list(lengths), color=colours, height=0.78)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
    axes.bar_label(bars, texts, padding=4, bbox=box)
    axes.set_yticks(places, list(names))
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.tick_params(left=False)
    axes.spines["bottom"].set_visible(False)


def _title(case: str, world: int, measure: str) -> str:
    ranks = f"{world} ranks" if world != 1 else ""
    about = ", ".join(filter(None, (CASES.get(case, ""), ranks)))
    title = f"{about}: {measure}".removeprefix(": ").replace(" s3", " S3")
    return title[0].upper() + title[1:]


def _name(client: str) -> str:
    return NAMES.get(client, client).replace("dcp", "DCP")


def _text(value: float, unit: str) -> str:
    value, unit = (value / 2**20, "MiB") if unit == "bytes" else (value, unit)
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f} {unit}"


def pyplot() -> Any:
    """matplotlib.pyplot, which draws the same picture of the same figures whenever it is run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {
        "axes.edgecolor": FAINT,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 9,
        "axes.titleweight": "bold",
        "font.sans-serif": ["DejaVu Sans", "Helvetica", "Arial", "sans-serif"],
        "font.size": 8,
        "svg.fonttype": "none",  # in the reader's own font
        "svg.hashsalt": "shardstore",
        "text.color": INK,
        **dict.fromkeys(("axes.labelcolor", "xtick.color", "ytick.color"), INK),
    }
    return plt


def save_picture(fig: Any, output: Path) -> None:
    """Write the SVG, without a date."""
    import matplotlib.pyplot as plt

    fig.savefig(output, metadata={"Date": None})
    plt.close(fig)
