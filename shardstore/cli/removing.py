"""``gc`` and ``rm``: what is removed is listed first, and nothing is removed unasked."""

from __future__ import annotations

import sys
from collections.abc import Callable

from shardstore.cli.shared import UsageProblem, emit, human_bytes, parse_options
from shardstore.inspection.layout import array_bytes
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.location import Location
from shardstore.storage.removal import leftovers, remove_attempt, remove_checkpoint

__all__ = ["run_gc", "run_rm"]


def run_gc(
    place: str, options: list[str], *, delete: bool, older_than_h: float | None, as_json: bool
) -> None:
    """List, and if asked remove, attempts that were not committed."""
    root = Location.of(place, **parse_options(options))
    entries = []
    doomed_bytes = count = 0
    for leftover in leftovers(root):
        late = older_than_h is not None and leftover.age_s >= older_than_h * 3600
        doomed = leftover.state == "dead" or (leftover.state == "unknown" and late)
        if doomed and delete:
            remove_attempt(leftover)
        count += doomed
        doomed_bytes += leftover.bytes if doomed else 0
        action = ("removed" if delete else "would remove") if doomed else "kept"
        entries.append(
            {
                "path": leftover.location.url,
                "target": leftover.target,
                "state": leftover.state,
                "bytes": leftover.bytes,
                "age_s": round(leftover.age_s),
                "action": action,
            }
        )
    if as_json:
        emit({"url": root.url, "deleted": delete, "bytes": doomed_bytes, "attempts": entries})
        return
    for entry in entries:
        hours = float(str(entry["age_s"])) / 3600
        size = human_bytes(float(str(entry["bytes"])))
        print(f"{entry['action']:<13}{entry['state']:<8}{size:>10}  {hours:.1f} h old  {entry['path']}")
    if not entries:
        print("nothing left behind by dead saves")
    elif count and not delete:
        print(f"{human_bytes(doomed_bytes)} in {count} attempt(s); run again with --delete to remove them")
    elif count:
        print(f"removed {human_bytes(doomed_bytes)} in {count} attempt(s)")
    if any(entry["state"] == "unknown" and entry["action"] == "kept" for entry in entries):
        print(
            "unknown: saved from another host, where it may still be running; --older-than HOURS "
            "takes those that did not change for so long"
        )


def run_rm(
    stored: StoredCheckpoint, *, yes: bool, as_json: bool, confirm: Callable[[str], bool]
) -> None:
    """Remove a checkpoint, after a question unless ``yes``."""
    size = sum(map(array_bytes, stored.arrays.values()))
    what = f"{stored.location.url} ({len(stored.arrays)} arrays, {human_bytes(size)})"
    if not yes:
        if as_json or not sys.stdin.isatty():
            raise UsageProblem(f"nobody can be asked whether to remove {what}: give --yes")
        if not confirm(f"Remove {what}?"):
            raise UsageProblem("nothing was removed")
    left = remove_checkpoint(stored.location)
    if as_json:
        emit({"url": stored.location.url, "removed": True, "bytes": size, "left": left})
        return
    print(f"removed {what}")
    if left:
        print(f"left what is not the checkpoint's: {', '.join(left)}")
