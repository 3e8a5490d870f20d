"""Commands ``verify`` and ``diff``."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from shardstore.cli import options as opt
from shardstore.cli.printing import columns, emit, print_table, say
from shardstore.inspection import opened
from shardstore.inspection.opened import counted, human_bytes
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.stores.location import Location

if TYPE_CHECKING:
    from shardstore.inspection.difference import ArrayDifference, Difference
    from shardstore.inspection.verify import Finding, Verified


def verify(
    checkpoint: opt.Checkpoint,
    keys: opt.Patterns = None,
    hashes: Annotated[bool, opt.flag("--hashes", "128-bit hashes too, not only crc32c.")] = False,
    strict: Annotated[bool, opt.flag("--strict", "Exit with 1 for notes too.")] = False,
    threads: Annotated[int | None, opt.value("N", "Threads that read.", at_least=1)] = None,
    limit: Annotated[int, opt.value("N", "Findings to print.", at_least=1)] = 100,
    as_json: opt.Json = False,
    storage_option: opt.Options = None,
) -> None:
    """Verify every checksum, document and file. Exit code 1: damage was found."""
    from shardstore.inspection import verify as verification

    location = opt.locate(checkpoint, storage_option)
    if not location.exists("zarr.json"):
        opened.open(location)
    elif not location.exists("metadata.json"):
        opt.require_no_array(location)
    findings: list[Finding] = []

    def found(finding: Finding) -> None:
        findings.append(finding)
        if not as_json and len(findings) <= limit:
            say(f"{finding.severity.upper():<7}{finding.kind:<18}{finding.message}")
            sys.stdout.flush()

    result = verification.verify(
        StoredCheckpoint(location),
        found,
        keys=keys or (),
        hashes=hashes,
        threads=threads,
        progress=opt.bar(as_json),
    )
    if keys and not result.arrays and not result.objects:
        raise opt.UsageProblem(f"no key matches {', '.join(keys)}; `shardstore ls` lists all keys")
    if as_json:
        emit({"url": location.url, **result.as_dict(), "findings": list(map(asdict, findings))})
    else:
        if len(findings) > limit:
            say(f"... and {len(findings) - limit} more (--limit shows them)")
        say(verdict(result))
    raise typer.Exit(0 if result.ok and not (strict and findings) else opt.DAMAGE)


def verdict(result: Verified) -> str:
    """Return the result of a verification in one line."""
    rate = result.bytes / max(result.seconds, 1e-9)
    state = "OK:" if result.ok else f"DAMAGED: {counted(result.damage, 'finding')} in"
    unchecked = f", {result.unchecked:,} without checksums" if result.unchecked else ""
    notes = f", {counted(result.notes, 'note')}" if result.notes else ""
    chunks = counted(result.chunks, "chunk") + unchecked
    return (
        f"{state} {counted(result.arrays, 'array')}, {chunks}, "
        f"{counted(result.objects, 'object')}{notes}; {human_bytes(result.bytes)} in "
        f"{result.seconds:.2f} s ({human_bytes(rate)}/s)"
    )


def diff(
    a: Annotated[str, opt.argument("A", "Path or URL of a checkpoint.")],
    b: Annotated[str, opt.argument("B", "Path or URL of another one.")],
    keys: opt.Patterns = None,
    files: Annotated[bool, typer.Option(help="Compare common.pt and sharded objects too.")] = True,
    memory: opt.Memory = "256MiB",
    wide: opt.Wide = False,
    as_json: opt.Json = False,
    storage_option: opt.Options = None,
) -> None:
    """Compare two checkpoints, by hashes first. Exit code 1: they differ."""
    from shardstore.inspection.difference import compare

    places = [Location.of(place, **opt.parse_options(storage_option)) for place in (a, b)]
    opt.warn_of_idle_options(storage_option, *places)
    left, right = map(opened.open, places)
    budget = opt.parse_size(memory)
    wants = opt.matcher(keys)
    if keys and not any(map(wants, [*left, *right])):
        raise opt.UsageProblem(f"neither side has a key that matches {', '.join(keys)}")
    found = compare(
        left,
        right,
        wants,
        files=files and not keys,
        budget_bytes=budget,
        progress=opt.bar(as_json),
    )
    if as_json:
        emit({"a": left.url, "b": right.url, **found.as_dict()})
    else:
        _print(found, columns(wide))
    raise typer.Exit(0 if found.same else opt.DAMAGE)


def _print(found: Difference, width: int | None) -> None:
    rows = [("only in A", key, "") for key in found.only_a]
    rows += [("only in B", key, "") for key in found.only_b]
    for key, parts in found.described.items():
        text = ", ".join(f"{name} {a} -> {b}" for name, (a, b) in parts.items())
        rows.append(("described", key, text))
    for key, difference in found.values.items():
        rows.append(("differs  ", key, _values(difference)))
        rows += [("damaged", key, damage) for damage in difference.damage]
    rows += [("file", name, how) for name, how in found.files.items()]
    if rows:
        print_table(rows, "<<<", width)
    print_table([[_summary(found)]], "<", width)


def _summary(found: Difference) -> str:
    compared = found.equal + len(found.values) + len(found.described)
    if not compared and (found.only_a or found.only_b):
        return (
            f"no keys in common: {counted(len(found.only_a), 'array')} only in A, "
            f"{counted(len(found.only_b), 'array')} only in B"
        )
    how = f" ({found.hashed} by hashes)" if found.hashed else ""
    read = f", {human_bytes(found.bytes_read)} of values read" if found.bytes_read else ""
    return f"{found.equal} equal{how}, {len(found.values)} with other values{read}"


def _values(found: ArrayDifference) -> str:
    relative = f" ({found.norm / found.norm_a:.3g} of |A|)" if found.norm_a else ""
    nonfinite = f", {found.nonfinite} not finite" if found.nonfinite else ""
    return (
        f"max abs {found.max_abs:.6g}, norm {found.norm:.6g}{relative}, {found.elements} of "
        f"{found.of} elements in {found.chunks} of {found.chunks_of} chunks{nonfinite}"
    )
