"""``verify`` and ``diff``: what is wrong with a checkpoint, and how two of them differ."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Literal

from shardstore.cli.printing import cells, clean, columns, emit, fold, say
from shardstore.cli.shared import (
    DAMAGE,
    UsageProblem,
    counted,
    human_bytes,
    matcher,
    progress_bar,
)
from shardstore.inspection.difference import ArrayDifference, Difference, compare
from shardstore.inspection.layout import array_bytes
from shardstore.inspection.verify import Finding, verify
from shardstore.storage.checkpoint import StoredCheckpoint

__all__ = ["run_diff", "run_verify"]

MARGIN = 11
"""Of what goes on in a further line."""


def run_verify(
    stored: StoredCheckpoint,
    patterns: Sequence[str],
    *,
    hashes: bool,
    strict: bool,
    threads: int | None,
    as_json: bool,
    limit: int,
) -> int:
    """Verify and print; returns the exit code."""
    findings: list[Finding] = []
    shown = 0

    def found(finding: Finding) -> None:
        nonlocal shown
        findings.append(finding)
        if not as_json and shown < limit:
            shown += 1
            say(f"{finding.severity.upper():<7}{finding.kind:<18}{finding.message}")
            sys.stdout.flush()

    bar: Literal["bar"] | None = None if as_json or not sys.stderr.isatty() else "bar"
    result = verify(stored, found, keys=patterns, hashes=hashes, threads=threads, progress=bar)
    if patterns and not result.arrays and not result.objects:
        raise UsageProblem(f"no key matches {', '.join(patterns)}; `shardstore ls` lists all keys")
    if as_json:
        emit(
            {
                "url": stored.location.url,
                **result.as_dict(),
                "findings": [asdict(f) for f in findings],
            }
        )
    else:
        if len(findings) > shown:
            say(f"... and {len(findings) - shown} more (--limit shows them)")
        rate = result.bytes / max(result.seconds, 1e-9)
        state = "OK" if result.ok else f"DAMAGED: {result.damage} finding(s)"
        unchecked = f", {result.unchecked} without checksums" if result.unchecked else ""
        notes = f", {result.notes} note(s)" if result.notes else ""
        say(
            f"{state}: {result.arrays} arrays, {result.chunks} chunks{unchecked}, {result.objects} "
            f"objects{notes}; {human_bytes(result.bytes)} in {result.seconds:.2f} s "
            f"({human_bytes(rate)}/s)"
        )
    return 0 if result.ok and not (strict and findings) else DAMAGE


def run_diff(
    a: StoredCheckpoint,
    b: StoredCheckpoint,
    patterns: Sequence[str],
    *,
    files: bool,
    budget_bytes: int,
    as_json: bool,
    wide: bool = False,
) -> int:
    """Compare and print; returns the exit code."""
    wants = matcher(patterns)
    if patterns and not any(wants(key) for key in {**a.arrays, **b.arrays}):
        raise UsageProblem(f"neither side has a key that matches {', '.join(patterns)}")
    total = sum(array_bytes(meta) for key, meta in a.arrays.items() if wants(key))
    with progress_bar("comparing", total, quiet=as_json) as advance:
        found = compare(a, b, wants, files=files, budget_bytes=budget_bytes, progress=advance)
    if as_json:
        emit({"a": a.location.url, "b": b.location.url, **found.as_dict()})
    else:
        _print(found, columns(wide))
    return 0 if found.same else DAMAGE


def _print(found: Difference, width: int | None) -> None:
    def tell(line: str) -> None:
        say(*fold(clean(line), width, MARGIN))

    for side, keys in (("A", found.only_a), ("B", found.only_b)):
        for key in keys:
            tell(f"only in {side}  {key}")
    for key, parts in found.described.items():
        text = ", ".join(f"{name} {a} -> {b}" for name, (a, b) in parts.items())
        tell(f"described  {key}  {text}")
    widest = max((cells(clean(key)) for key in found.values), default=0)
    for key, difference in found.values.items():
        room = " " * (0 if width is not None else widest - cells(clean(key)))
        tell(f"differs    {key}{room}  {_values(difference)}")
        for damage in difference.damage:
            tell(f"damaged    {key}  {damage}")
    for name, how in found.files.items():
        tell(f"file       {name}  {how}")
    tell(_summary(found))


def _summary(found: Difference) -> str:
    compared = found.equal + len(found.values) + len(found.described)
    if not compared and (found.only_a or found.only_b):
        return (
            f"no keys in common: {counted(len(found.only_a), 'array')} in A alone, "
            f"{counted(len(found.only_b), 'array')} in B alone"
        )
    how = f" ({found.hashed} by their hashes alone)" if found.hashed else ""
    read = f", {human_bytes(found.bytes_read)} of values read" if found.bytes_read else ""
    return f"{found.equal} equal{how}, {len(found.values)} with other values{read}"


def _values(found: ArrayDifference) -> str:
    relative = f" ({found.norm / found.norm_a:.3g} of |A|)" if found.norm_a else ""
    nonfinite = f", {found.nonfinite} not finite" if found.nonfinite else ""
    return (
        f"max abs {found.max_abs:.6g}, norm {found.norm:.6g}{relative}, {found.elements} of "
        f"{found.of} elements in {found.chunks} of {found.chunks_of} chunks{nonfinite}"
    )
