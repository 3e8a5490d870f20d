"""``gc`` and ``rm``: what is removed is listed first, and nothing is removed unasked."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta

from shardstore.cli.printing import clean, emit, say
from shardstore.cli.shared import UsageProblem, human_bytes
from shardstore.errors import CheckpointingException, NotACheckpointError
from shardstore.inspection.layout import array_bytes
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.stores.location import Location

__all__ = ["run_gc", "run_rm"]


def run_gc(root: Location, *, delete: bool, older_than_h: float, as_json: bool) -> None:
    """List, and if asked remove, what saves that did not finish left behind."""
    from shardstore.storage.commit.sweep import sweep

    if root.is_local and not root.is_dir():
        raise NotACheckpointError(
            f"{root.url} is no folder; give the one that checkpoints are saved in", url=root.url
        )
    found = sweep(root, dry_run=not delete, older_than=timedelta(hours=older_than_h))
    size = sum(leftover.stored_bytes for leftover in found)
    if as_json:
        leftovers = [asdict(leftover) for leftover in found]
        emit({"url": root.url, "deleted": delete, "bytes": size, "leftovers": leftovers})
        return
    for leftover in found:
        about = f"{human_bytes(leftover.stored_bytes):>10}  {leftover.objects:>8} files"
        say(f"{leftover.kind:<8}{about}  {leftover.url}")
    if not found:
        say(f"nothing left behind by dead saves below {root.url}")
    elif delete:
        say(f"removed {human_bytes(size)} in {len(found)} attempt(s)")
    else:
        say(
            f"{human_bytes(size)} in {len(found)} attempt(s); run again with --delete to remove "
            "them"
        )


def run_rm(location: Location, *, yes: bool, as_json: bool, confirm: Callable[[str], bool]) -> None:
    """Remove a checkpoint, after a question unless ``yes``."""
    from shardstore.storage.commit.folder import is_checkpoint
    from shardstore.storage.commit.identity import what_else
    from shardstore.storage.commit.sweep import delete_checkpoint

    if location.is_local and location.path.is_symlink():
        target = os.path.realpath(location.url)
        raise UsageProblem(
            f"{location.url} is a symbolic link to {target}; nothing was removed: give {target} to "
            "remove the checkpoint, or unlink the link if only that is to go"
        )
    if not is_checkpoint(location):
        instead = what_else(location)
        found = f"is {instead}, not a checkpoint" if instead else "is not a checkpoint"
        raise NotACheckpointError(f"{location.url} {found}; nothing was removed", url=location.url)
    what = f"{location.url}{_size(location)}"
    if not yes:
        if as_json or not sys.stdin.isatty():
            raise UsageProblem(f"nobody can be asked whether to remove {what}: give --yes")
        if not confirm(clean(f"Remove {what}?")):
            raise UsageProblem("nothing was removed")
    delete_checkpoint(location)
    left = location.listing()
    if as_json:
        emit({"url": location.url, "removed": True, "left": left})
        return
    say(f"removed {what}")
    if left:
        say(f"left what is not the checkpoint's: {', '.join(left[:8])}")


def _size(location: Location) -> str:
    """What would be lost, for the question; a damaged checkpoint can be removed all the same."""
    try:
        arrays = StoredCheckpoint(location).arrays.values()
    except CheckpointingException:
        return " (damaged)"
    return f" ({len(arrays)} arrays, {human_bytes(sum(map(array_bytes, arrays)))})"
