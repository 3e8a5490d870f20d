"""`benchmark page`: the results page, made from what the runs wrote as JSON, pictures beside it.

Everything on the page comes out of the files: machine, commands, versions, targets met and missed,
where a peer is faster and where it is not, and every figure. Measures nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from arguments import new_file, run_of_benchmark

from bench import plot, report
from bench.clients import OURS, RAW
from bench.results import Results, Sample, Verdict

LIMITS = (*RAW, "ideal", "memory copy", "copy + write", "pinned copy_", "stored")
"""What is no peer but the least that there can be."""


def add_parser(commands: Any) -> None:
    """Add the subcommand to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "page", help="the results page from the JSON of several runs", description=__doc__
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "json", type=run_of_benchmark, nargs="+", metavar="FILE", help="what --json wrote"
    )
    parser.add_argument("--markdown", type=new_file, required=True, metavar="FILE", help="the page")


def run(options: argparse.Namespace) -> int:
    """Write page and pictures; 0."""
    runs = [(file.stem, json.loads(file.read_text())) for file in options.json]
    pictures = options.markdown.with_suffix("")
    pictures.mkdir(parents=True, exist_ok=True)
    for name, data in runs:
        plot.draw(data, pictures / f"{name}.svg")
    options.markdown.write_text(page(runs, pictures.name))
    print(options.markdown)
    return 0


def page(runs: Sequence[tuple[str, dict[str, Any]]], pictures: str) -> str:
    """The page as Markdown.

    Args:
        runs: name and content of each file.
        pictures: folder of `NAME.svg`, beside the page.
    """
    parts = [
        "# Measured",
        "Made by `scripts/benchmark page` from the files that `scripts/benchmark COMMAND --json` "
        "wrote; nothing here is typed by hand. Figures are medians; all clients of a round ran one "
        "after the other on the same machine. A ratio above 1 says that the other took longer.",
        "## In short",
        "\n".join(_missed(name, _judged(data)) for name, data in runs),
        "### Where a peer is faster",
        _compared(runs, slower=True),
        "### Where none is",
        _compared(runs, slower=False),
    ]
    for name, data in runs:
        results = results_of(data)
        parts += [f"## {name}", f"![{name}]({pictures}/{name}.svg)"]
        parts += [report.about(results), report.tables(results, _judged(data), "###")]
    return "\n\n".join(part for part in parts if part) + "\n"


def results_of(data: dict[str, Any]) -> Results:
    """What a run measured, from its JSON."""
    samples = [Sample(**sample) for sample in data["samples"]]
    return Results(samples, data["notes"], data["failures"])


def _judged(data: dict[str, Any]) -> list[Verdict]:
    return [Verdict(**verdict) for verdict in data["targets"]]


def _missed(name: str, judged: Sequence[Verdict]) -> str:
    met = sum(verdict.ok is True for verdict in judged)
    lines = [f"- **{name}**: {met} of {len(judged)} targets met."]
    for verdict in judged:
        if verdict.ok is False:
            lines.append(f"  - missed: {verdict.case}, {verdict.target}: {verdict.value:.3g}")
        elif verdict.ok is None:
            lines.append(f"  - not measured: {verdict.case}, {verdict.target}")
    return "\n".join(lines)


def _compared(runs: Sequence[tuple[str, dict[str, Any]]], *, slower: bool) -> str:
    """Every time that we and a peer were measured in, with the fastest peer; the widest first."""
    rows: list[tuple[float, report.Row]] = []
    for name, data in runs:
        for (case, world, measure), clients in plot.ratios(data):
            known = dict(clients)
            peers = {
                peer: ratio
                for peer, ratio in known.items()
                if not peer.startswith(OURS) and peer not in LIMITS
            }
            if OURS not in known or not peers:
                continue
            best = min(peers, key=lambda peer: peers[peer])
            if (peers[best] < 1) == slower:
                row = (name, case, str(world), measure, best, f"{peers[best]:.2f}")
                rows.append((peers[best], row))
    if not rows:
        return "Nowhere, of what was measured." if slower else ""
    rows.sort(key=lambda entry: entry[0], reverse=not slower)
    head = ("run", "case", "ranks", "measure", "fastest peer", "its time over ours")
    return report.pipes(head, [row for _, row in rows])
