"""`benchmark page`: the page of figures, made from what the runs wrote as JSON, with pictures.

Each file becomes a section: machine, command, versions, targets met and missed, and every figure.
Of an earlier version of the page, the sections without a file stay, and so do the notes that people
wrote between its two marks. The page begins with the targets met and missed, and with where a peer
is faster and where it is not.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from arguments import new_file, run_of_benchmark

from bench import pictures
from bench.clients import LIMITS, OURS
from bench.results import Results, amount

Row = Sequence[str]
Group = tuple[str, int, str]
Sections = Mapping[str, str]
"""Name of a run -> its part of the page."""
HEAD = ("case", "ranks", "measure", "client", "median", "range", "to shardstore")
TARGETS = ("case", "target", "measured", "")
INTRODUCTION = (
    "Made by `scripts/benchmark page` from the files that `scripts/benchmark COMMAND --json` "
    "wrote. Figures are medians; the clients of a round ran one after the other on the same "
    "machine. A ratio above 1 says that the other took longer."
)
NOTES = ("<!-- notes: begin -->", "<!-- notes: end -->")
"""Marks around what people wrote."""
_SECTION = re.compile(r"^## (\S+)\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
_TARGET = re.compile(
    r"^\| ([^|]+) \| ([^|]+) \| ([^|]*) \| (pass|FAIL|not measured) \|", re.MULTILINE
)


def add_parser(commands: Any) -> None:
    """Add the subcommand to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "page", help="the page of figures from the JSON of several runs", description=__doc__
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "json", type=run_of_benchmark, nargs="*", metavar="FILE", help="what --json wrote"
    )
    parser.add_argument("--markdown", type=new_file, required=True, metavar="FILE", help="the page")


def run(options: argparse.Namespace) -> int:
    """Write page and pictures; 0."""
    before = options.markdown.read_text("utf-8") if options.markdown.exists() else ""
    _, begin, rest = before.partition(NOTES[0])
    notes, end, rest = rest.partition(NOTES[1])
    kept = notes.strip() if begin and end else ""
    sections = sections_of(rest or before)
    for file in options.json:
        results = Results.from_dict(json.loads(file.read_text()))
        picture = f"{options.markdown.stem}/{file.stem}.svg"
        sections[file.stem] = section(file.stem, results, picture)
    options.markdown.write_text(page(sections, kept), encoding="utf-8")
    pictures.draw_all(options.markdown)
    print(options.markdown)
    return 0


def sections_of(page: str) -> dict[str, str]:
    """The sections of the runs on a page."""
    return {name: text.strip() for name, text in _SECTION.findall(page)}


def page(sections: Sections, notes: str = "") -> str:
    """The page as Markdown; `notes` are people's."""
    parts = [
        "# Benchmarks",
        INTRODUCTION,
        "\n\n".join((NOTES[0], notes, NOTES[1])) if notes else "",
        "## In short",
        "\n".join(_missed(name, text) for name, text in sections.items()),
        "### Where a peer is faster",
        _compared(sections, slower=True),
        "### Where no peer is faster",
        _compared(sections, slower=False),
        *(f"## {name}\n\n{text}" for name, text in sections.items()),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def section(name: str, results: Results, picture: str) -> str:
    """The section of a run, without its heading."""
    notes, figures = results.notes, _pipes(HEAD, _figures(results))
    drawn = pictures.figures_of(figures)
    has_picture = pictures.compared(drawn) or pictures.growth(drawn)
    parts = [
        f"![{name}]({picture})" if has_picture else "",
        f"`{notes['command']}`, {notes['date']}; {notes['repeats']} rounds, "
        f"scale {notes['scale']}.",
        "\n".join(f"- {line}" for line in _about(notes)),
        _pipes(TARGETS, _verdicts(results)) if results.targets else "",
        figures,
        *_failures(results),
    ]
    return "\n\n".join(part for part in parts if part)


def text(results: Results) -> str:
    """The tables of one run."""
    tables = [_pipes(HEAD, _figures(results)), _pipes(TARGETS, _verdicts(results))]
    return "\n\n".join([*tables, *_failures(results)])


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


def _groups(results: Results) -> dict[Group, dict[str, list[float]]]:
    """(case, ranks, measure) -> client -> samples."""
    found: dict[Group, dict[str, list[float]]] = {}
    for sample in results.samples:
        clients = found.setdefault((sample.case, sample.world, sample.measure), {})
        clients.setdefault(sample.client, []).append(sample.value)
    return found


def _units(results: Results) -> dict[str, str]:
    return {sample.measure: sample.unit for sample in results.samples}


def _figures(results: Results) -> list[Row]:
    rows: list[Row] = []
    units = _units(results)
    for (case, world, measure), clients in _groups(results).items():
        unit = units[measure]
        ours = median(clients[OURS]) if OURS in clients and unit == "s" else 0.0
        for client, values in clients.items():
            low, middle, high = (
                _format(v, unit) for v in (min(values), median(values), max(values))
            )
            ratio = f"{median(values) / ours:.2f}" if ours else ""
            rows.append((case, str(world), measure, client, middle, f"{low} - {high}", ratio))
    return rows


def _verdicts(results: Results) -> list[Row]:
    words = {True: "pass", False: "FAIL", None: "not measured"}
    return [
        (v.case, v.target, "" if v.value is None else amount(v.value), words[v.ok])
        for v in results.targets
    ]


def _failures(results: Results) -> list[str]:
    return [
        f"{f['client']} gave no figure in {f['case']} with {f['world']} rank(s): "
        + (f["reason"].splitlines() or ["unknown"])[0]
        for f in results.failures
    ]


def _missed(name: str, section: str) -> str:
    targets = _TARGET.findall(section)
    met = sum(verdict == "pass" for *_, verdict in targets)
    lines = [f"- **{name}**: {met} of {len(targets)} targets met."]
    for case, target, value, verdict in targets:
        if verdict == "FAIL":
            lines.append(f"    - missed: {case}, {target}: {value}")
        elif verdict == "not measured":
            lines.append(f"    - not measured: {case}, {target}")
    return "\n".join(lines)


def _compared(sections: Sections, *, slower: bool) -> str:
    """Every time that we and a peer were measured in, with the fastest peer; the widest first."""
    rows: list[tuple[float, Row]] = []
    for name, section in sections.items():
        for (case, world, measure, unit), clients in pictures.figures_of(section).items():
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
