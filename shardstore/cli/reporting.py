"""``report``: one HTML page about a checkpoint, with nothing to fetch from anywhere.

Gathers what the page shows; :mod:`shardstore.cli.page` writes it down.
"""

from __future__ import annotations

from shardstore.cli.listing import about
from shardstore.cli.page import ArrayFacts, page
from shardstore.cli.printing import emit, say
from shardstore.cli.shared import DAMAGE, progress_bar, require_output
from shardstore.errors import DamagedCheckpointError
from shardstore.inspection.layout import array_bytes, cells, modules
from shardstore.inspection.statistics import Statistics, histogram, measure
from shardstore.inspection.verify import Finding, Verified, verify
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.stores.location import store_errors

__all__ = ["run_report"]

MAX_PICTURED = 400
"""Arrays that get a picture and a histogram, the largest ones; a page of more opens slowly."""
BINS = 48


def run_report(
    stored: StoredCheckpoint,
    output: str,
    *,
    values: bool,
    check: bool,
    budget_bytes: int,
    as_json: bool,
) -> int:
    """Write the page; returns the exit code."""
    target = require_output(output)
    arrays = stored.arrays
    findings: list[Finding] = []
    verified: Verified | None = None
    if check:
        verified = verify(stored, findings.append)
    try:
        manifest = stored.manifest
    except DamagedCheckpointError:
        manifest = None
    largest = sorted(arrays.values(), key=lambda meta: (-array_bytes(meta), meta.key))
    pictured = {meta.key for meta in largest[:MAX_PICTURED]}
    statistics: dict[str, Statistics] = {}
    damage: dict[str, list[str]] = {}
    if values:
        total = sum(map(array_bytes, arrays.values()))
        with progress_bar("reading", total, quiet=as_json) as advance:
            statistics, damage = measure(
                stored, list(arrays.values()), budget_bytes=budget_bytes, progress=advance
            )
    facts = {}
    for key, meta in arrays.items():
        drawn = key in pictured
        bars = None
        if drawn and key in statistics:
            bars = histogram(stored, meta, statistics[key], BINS, budget_bytes=budget_bytes)
        picture = cells(meta, manifest) if drawn else None
        facts[key] = ArrayFacts(meta, picture, statistics.get(key), bars, damage.get(key, []))
    text = page(about(stored), modules(arrays.values()), facts, verified, findings)
    with store_errors("writing", output):
        target.write_text(text, encoding="utf-8")
    damaged = bool(damage) or (verified is not None and not verified.ok)
    if as_json:
        emit({"output": output, "bytes": len(text.encode()), "ok": not damaged})
    else:
        say(f"{output}{'  (the checkpoint is DAMAGED)' if damaged else ''}")
    return DAMAGE if damaged else 0
