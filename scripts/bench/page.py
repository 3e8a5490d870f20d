"""`benchmark page`: the page of figures, made from what the runs wrote as JSON, with pictures.

Everything on the page comes from the files: machine, commands, versions, targets met and missed,
where a peer is faster and where it is not, and every figure. Notes that people wrote into an
earlier version of the page, between its two marks, stay.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from arguments import new_file, run_of_benchmark

from bench import pictures
from bench.clients import DCP_OURS, LIMITS, OURS
from bench.results import Results

Row = Sequence[str]
Runs = Sequence[tuple[str, Results]]
Group = tuple[str, int, str]
HEAD = ("case", "ranks", "measure", "client", "median", "range", "to shardstore")
TARGETS = ("case", "target", "measured", "")
INTRODUCTION = (
    "Made by `scripts/benchmark page` from the files that `scripts/benchmark COMMAND --json` "
    "wrote. Figures are medians; the clients of a round ran one after the other on the same "
    "machine. A ratio above 1 says that the other took longer."
)
NOTES = ("<!-- notes: begin -->", "<!-- notes: end -->")
"""Marks around what people wrote."""


def add_parser(commands: Any) -> None:
    """Add the subcommand to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "page", help="the page of figures from the JSON of several runs", description=__doc__
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "json", type=run_of_benchmark, nargs="+", metavar="FILE", help="what --json wrote"
    )
    parser.add_argument("--markdown", type=new_file, required=True, metavar="FILE", help="the page")


def run(options: argparse.Namespace) -> int:
    """Write page and pictures; 0."""
    runs = [(f.stem, Results.from_dict(json.loads(f.read_text()))) for f in options.json]
    before = options.markdown.read_text("utf-8") if options.markdown.exists() else ""
    _, begin, rest = before.partition(NOTES[0])
    notes, end, _ = rest.partition(NOTES[1])
    kept = notes.strip() if begin and end else ""
    options.markdown.write_text(page(runs, options.markdown.stem, kept), encoding="utf-8")
    pictures.draw_all(options.markdown)
    print(options.markdown)
    return 0


def page(runs: Runs, folder: str, notes: str = "") -> str:
    """The page as Markdown; `folder` of `NAME.svg` lies beside it, `notes` are people's."""
    abouts = {name: list(_about(results.notes)) for name, results in runs}
    lines = [line for about in abouts.values() for line in about]
    # A line is said once, above all runs, unless runs differ in it.
    subjects = {line.partition(":")[0]: set[str]() for line in lines}
    for line in lines:
        subjects[line.partition(":")[0]].add(line)
    shared = [found.pop() for found in subjects.values() if len(found) == 1]
    parts = [
        "# Benchmarks",
        INTRODUCTION,
        "\n\n".join((NOTES[0], notes, NOTES[1])) if notes else "",
        "## In short",
        "\n".join(_missed(name, results) for name, results in runs),
        "### Where a peer is faster",
        _compared(runs, slower=True),
        "### Where no peer is faster",
        _compared(runs, slower=False),
        "## Machine, versions and clients",
        "\n".join(f"- {line}" for line in shared),
    ]
    for name, results in runs:
        notes = results.notes
        own = [line for line in abouts[name] if line not in shared]
        parts += [
            f"## {name}",
            f"![{name}]({folder}/{name}.svg)" if ratios(results) else "",
            f"`{notes['command']}`, {notes['date']}; {notes['repeats']} rounds, "
            f"scale {notes['scale']}.",
            "\n".join(f"- {line}" for line in own),
            _pipes(TARGETS, _verdicts(results)) if results.targets else "",
            _pipes(HEAD, _figures(results)),
            *_failures(results),
        ]
    return "\n\n".join(part for part in parts if part) + "\n"


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
        (v.case, v.target, "" if v.value is None else f"{v.value:.3g}", words[v.ok])
        for v in results.targets
    ]


def _failures(results: Results) -> list[str]:
    return [
        f"{f['client']} gave no figure in {f['case']} with {f['world']} rank(s): "
        + (f["reason"].splitlines() or ["unknown"])[0]
        for f in results.failures
    ]


def _missed(name: str, results: Results) -> str:
    met = sum(verdict.ok is True for verdict in results.targets)
    lines = [f"- **{name}**: {met} of {len(results.targets)} targets met."]
    for verdict in results.targets:
        if verdict.ok is False:
            lines.append(f"  - missed: {verdict.case}, {verdict.target}: {verdict.value:.3g}")
        elif verdict.ok is None:
            lines.append(f"  - not measured: {verdict.case}, {verdict.target}")
    return "\n".join(lines)


def ratios(results: Results) -> list[tuple[Group, dict[str, float]]]:
    """For each time that several clients took: each client's median over ours, or the first's."""
    units = _units(results)
    out = []
    for group, clients in _groups(results).items():
        name = next((own for own in (OURS, DCP_OURS) if own in clients), next(iter(clients)))
        base = median(clients[name])
        if units[group[2]] == "s" and len(clients) > 1 and base:
            out.append((group, {client: median(v) / base for client, v in clients.items()}))
    return out


def _compared(runs: Runs, *, slower: bool) -> str:
    """Every time that we and a peer were measured in, with the fastest peer; the widest first."""
    rows: list[tuple[float, Row]] = []
    for name, results in runs:
        for (case, world, measure), clients in ratios(results):
            peers = {
                ratio: peer
                for peer, ratio in clients.items()
                if OURS not in peer and peer not in LIMITS
            }
            if OURS in clients and peers and (min(peers) < 1) == slower:
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
