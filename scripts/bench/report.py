"""Tables of a run: every figure with its spread and ratios, and every target with its verdict."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from bench.clients import OURS, RAW
from bench.results import Results, Verdict

Row = Sequence[str]


def summary(results: Results) -> list[Row]:
    """One row a figure: case, ranks, measure, client, median, range, ratio to raw, and to us."""
    rows: list[Row] = []
    seen = {(s.case, s.world, s.measure): s.unit for s in results.samples}
    for (case, world, measure), unit in seen.items():
        here = (case, world)
        names = list(
            dict.fromkeys(
                s.client
                for s in results.samples
                if (s.case, s.world, s.measure) == (*here, measure)
            )
        )
        raw = results.fastest(*here, RAW, measure)
        ours = results.median(*here, OURS, measure)
        for name in names:
            values = results.values(*here, name, measure)
            middle = results.median(*here, name, measure)
            assert middle is not None
            rows.append(
                (
                    case,
                    str(world),
                    measure,
                    name,
                    _format(middle, unit),
                    f"{_format(min(values), unit)} - {_format(max(values), unit)}",
                    f"{middle / raw:.2f}" if raw and unit == "s" else "",
                    f"{middle / ours:.2f}" if ours and unit == "s" else "",
                )
            )
    return rows


_SUMMARY = ("case", "ranks", "measure", "client", "median", "range", "to raw", "to shardstore")
_VERDICTS = ("case", "target", "measured", "")


def _verdict_rows(verdicts: Sequence[Verdict]) -> list[Row]:
    words = {True: "pass", False: "FAIL", None: "not measured"}
    return [
        (v.case, v.target, "" if v.value is None else f"{v.value:.3g}", words[v.ok])
        for v in verdicts
    ]


def text(results: Results, verdicts: Sequence[Verdict]) -> str:
    """The tables for a terminal."""
    parts = [
        _plain(_SUMMARY, summary(results)),
        _plain(_VERDICTS, _verdict_rows(verdicts)),
        *_failures(results),
    ]
    return "\n\n".join(parts)


def markdown(results: Results, verdicts: Sequence[Verdict]) -> str:
    """The same for a page, with the machine and the settings of each client."""
    return "\n\n".join(["# Benchmark", about(results), tables(results, verdicts, "##")]) + "\n"


def about(results: Results) -> str:
    """Machine, command, versions, settings and states of a run, as Markdown."""
    notes = results.notes
    machine = "; ".join(
        f"{name.replace('_', ' ')} {value}" for name, value in notes["machine"].items()
    )
    parts = [f"Machine: {machine}."]
    if "device" in notes:
        parts.append(f"Device: {notes['device']}.")
    if "server" in notes:
        parts.append(f"Server: {notes['server']}.")
    if "command" in notes:
        parts.append(f"Command: `{notes['command']}`, {notes['date']}.")
    rounds = notes.get("repeats", notes.get("rounds", 1))
    parts.append(f"Rounds: {rounds}; scale {notes['scale']}.")
    for name, versions in notes.get("versions", {}).items():
        listed = ", ".join(f"{package} {version}" for package, version in versions.items())
        parts.append(f"Environment of {name}: {listed}.")
    parts.append(
        "\n".join(f"- {name}: {words}" for name, words in notes.get("settings", {}).items())
    )
    states = [
        f"- {name}: {s['tensors_on_rank_0']} tensors on rank 0, "
        f"{s['bytes_written'] / 2**20:,.0f} MiB written, "
        f"{s['bytes_loaded'] / 2**20:,.0f} MiB loaded"
        for name, s in notes.get("states", {}).items()
    ]
    if states:
        parts += ["States:", "\n".join(states)]
    return "\n\n".join(part for part in parts if part)


def tables(results: Results, verdicts: Sequence[Verdict], level: str) -> str:
    """Targets and figures as Markdown, under headings of a level such as `##`."""
    parts = [
        f"{level} Targets",
        pipes(_VERDICTS, _verdict_rows(verdicts)),
        f"{level} Figures",
        pipes(_SUMMARY, summary(results)),
        *_failures(results),
    ]
    return "\n\n".join(part for part in parts if part)


def _failures(results: Results) -> list[str]:
    return [
        f"{f['client']} gave no figure in {f['case']} with {f['world']} rank(s): "
        + (f["reason"].splitlines() or ["unknown"])[0]
        for f in results.failures
    ]


def _format(value: float, unit: str) -> str:
    if unit == "s":
        return f"{value:.3f} s"
    if unit == "bytes":
        return f"{value / 2**20:.1f} MiB"
    if unit == "ms":
        return f"{value:.4f} ms"
    return f"{value:.3f}" if unit == "ratio" else f"{value:.0f}"


def _plain(head: Row, rows: Sequence[Row]) -> str:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [head, ["-" * width for width in widths], *rows]
    ]
    return "\n".join(lines)


def pipes(head: Row, rows: Sequence[Row]) -> str:
    """A table in Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def publish(results: Results, judged: Sequence[Verdict], options: argparse.Namespace) -> int:
    """Print what was measured, and write the files that were asked for.

    Returns:
        The exit code: 0 if no target that was measured is missed.
    """
    print(text(results, judged))
    if options.json:
        whole = {**results.as_dict(), "targets": [vars(verdict) for verdict in judged]}
        options.json.write_text(json.dumps(whole, indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(markdown(results, judged))
    return 1 if any(verdict.ok is False for verdict in judged) else 0
