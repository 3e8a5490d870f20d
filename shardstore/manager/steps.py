"""The committed steps of one run: folders named by number directly below a root.

A name that is not exactly the one this run would give belongs to somebody else and is not touched.
"""

from __future__ import annotations

import logging
import math
import operator
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from shardstore.errors import (
    ArgumentError,
    CheckpointingException,
    NotACheckpointError,
    StorageError,
)
from shardstore.progress import log_event
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.commit import checkpoints, folder
from shardstore.storage.commit.inventory import is_checkpoint
from shardstore.storage.format.manifest import content_digest
from shardstore.storage.movers.parallel import run_batched
from shardstore.storage.stores.location import Location

logger = logging.getLogger("shardstore.manager")

MARK = "checkpoint_manager"
"""In the content metadata of a checkpoint: its step and metrics, when its save began, and that a
manager may delete it."""
READS = 16
"""Commits that are read at a time from an object store."""

_ATTEMPT = re.compile(r"\.(.+)\.attempt-.+")
_PREFIX = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*|")


@dataclass(frozen=True, slots=True)
class StepInfo:
    """What is known of one step.

    Attributes:
        step: its number.
        managed: whether a manager saved it; it is never deleted otherwise.
        metrics: given at the save.
        content: digest of all arrays, see :func:`content_digest`; ``None`` where there is none.
        saved: when its save began, in nanoseconds since 1970; of two saves of managers the later
            one has the greater, whatever the clocks say. ``None``: no manager saved it.
    """

    step: int
    managed: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    content: str | None = None
    saved: int | None = None


def branches(infos: Mapping[int, StepInfo]) -> tuple[list[int], list[int]]:
    """Tell the steps that a run is on from those that it left: a lower number was saved after them.
    A step of which nobody knows when it was saved counts as saved right after the one before it.

    Args:
        infos: what is known of each step.

    Returns:
        Both ascending. The last of the first is the last that was saved.
    """
    current: list[int] = []
    abandoned: list[int] = []
    newest = 0
    for step in sorted(infos):
        when = infos[step].saved
        is_left = when is not None and when < newest
        (abandoned if is_left else current).append(step)
        newest = newest if is_left or when is None else when
    return current, abandoned


def mark_of(info: StepInfo) -> dict[str, Any]:
    """What is kept in the content metadata. JSON has neither NaN nor infinities: they are text."""
    metrics = {name: v if math.isfinite(v) else str(v) for name, v in info.metrics.items()}
    return {"step": info.step, "metrics": metrics, "saved_ns": info.saved}


def number_of(step: object) -> int:
    """Return a step's number as an int; raises :class:`ArgumentError` for anything else."""
    try:
        if isinstance(step, bool):
            raise TypeError
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentError(f"step={step!r} must be a whole number") from None
    if not 0 <= number < 10**18:
        raise ArgumentError(f"step={number} must be at least 0 and below 10**18")
    return number


class Steps:
    """The steps below a root. Any process may make one and ask; what changes anything says so.

    Args:
        root: folder or URL.
        prefix: of the names; step 100 is ``PREFIX100``.

    Attributes:
        damaged: steps that were found damaged.
        told: steps that a run left, and that a warning named.

    Raises:
        ArgumentError: a prefix that could not be told from other names, or leads elsewhere.
    """

    def __init__(self, root: Location, prefix: str) -> None:
        if not isinstance(prefix, str) or not _PREFIX.fullmatch(prefix):
            raise ArgumentError(
                f"prefix={prefix!r} must be of letters, digits, '_', '-' and '.', and begin with "
                "neither of the last two"
            )
        self.root = root
        self.prefix = prefix
        self.damaged: set[int] = set()
        self.told: set[int] = set()
        self._known: dict[int, tuple[object, StepInfo]] = {}  # by the stamp of its commit
        self._last: int | None = None
        self._changed = threading.Condition()
        self._used: Counter[int] = Counter()
        self._going: set[int] = set()

    def place(self, step: int) -> Location:
        """Where a step is, or would be."""
        return self.root.child(f"{self.prefix}{step}")

    def url(self, step: int) -> str:
        """Return the same as a URL."""
        return self.place(step).url

    def log(
        self, event: str, step: int, text: str, level: int = logging.INFO, /, **fields: Any
    ) -> None:
        """Log an event of a step, see :data:`shardstore.progress.EVENTS`."""
        log_event(logger, event, text, level, step=step, **{"url": self.url(step), **fields})

    def step_of(self, name: str) -> int | None:
        """Return the step of a name; ``None`` unless it is exactly the name of one."""
        digits = name[len(self.prefix) :]
        if not name.startswith(self.prefix) or not re.fullmatch(r"0|[1-9][0-9]{0,17}", digits):
            return None
        return int(digits)

    def committed(self) -> list[int]:
        """All committed steps, ascending.

        Raises:
            StorageError: the store refused.
        """
        self.root.require_no_file()
        steps = [step for step in map(self.step_of, self.root.listing()) if step is not None]
        return sorted(step for step in steps if is_checkpoint(self.place(step)))

    def infos(self) -> dict[int, StepInfo]:
        """What is known of each committed step, ascending. A commit is read again only if it is
        another than before.

        Raises:
            StorageError: the store refused.
        """

        def work(batch: Sequence[int]) -> None:
            for step in batch:
                stamp = self.place(step).stamp("zarr.json")
                if step not in self._known or self._known[step][0] != stamp:
                    self._known[step] = (stamp, self.info(step))

        steps = self.committed()
        run_batched(steps, work, threads=1 if self.root.is_local else READS)
        found = {step: self._known[step][1] for step in steps}
        self._last = max([self._last or 0, *(info.saved or 0 for info in found.values())])
        return found

    def note(self, info: StepInfo) -> None:
        """Take what the save of a step knew of it: its commit need not be read."""
        self._known[info.step] = (self.place(info.step).stamp("zarr.json"), info)

    def time_of_save(self) -> int:
        """Return the time of a save that begins now: after all steps that are there, even if their
        hosts' clocks were ahead. Called by the one process that saves."""
        if self._last is None:
            with suppress(StorageError):  # what refuses will refuse the save too
                self.infos()
        self._last = max(time.time_ns(), (self._last or 0) + 1)
        return self._last

    def info(self, step: int) -> StepInfo:
        """What is known of a step; of one that cannot be read, or is of another layout, nothing.

        Raises:
            StorageError: the store refused.
        """
        stored = StoredCheckpoint(self.place(step))
        try:
            if stored.root is None or stored.root.format_version is None:
                return StepInfo(step)
            attributes = stored.root.attributes
            mark = _mapping(_mapping(attributes.get("content_metadata")).get(MARK))
            record = _mapping(_mapping(attributes.get("shardstore")).get("commit"))
            content = record.get("content")
            if content is None and stored.manifest is not None:
                content = content_digest(stored.arrays.values(), stored.manifest)
        except StorageError:
            raise
        except CheckpointingException:
            return StepInfo(step)
        metrics = {}
        for name, value in _mapping(mark.get("metrics")).items():
            with suppress(TypeError, ValueError):
                metrics[name] = float(value)
        saved = mark.get("saved_ns")
        saved = saved if isinstance(saved, int) else None
        return StepInfo(step, mark.get("step") == step, metrics, content, saved)

    @contextmanager
    def using(self, steps: Collection[int]) -> Iterator[None]:
        """Keep steps from being deleted by this process; waits while one of them is."""
        with self._changed:
            self._changed.wait_for(lambda: self._going.isdisjoint(steps))
            self._used.update(steps)
        try:
            yield
        finally:
            with self._changed:
                self._used.subtract(steps)

    @contextmanager
    def _unused(self, step: int) -> Iterator[bool]:
        """Keep a step from being used, unless it is: yields whether it is not."""
        with self._changed:
            free = self._used[step] == 0
            if free:
                self._going.add(step)
        try:
            yield free
        finally:
            with self._changed:
                self._going.discard(step)
                self._changed.notify_all()

    def delete(self, step: int) -> bool:
        """Delete a committed step, unless it is in use: its commit first, then its data. Foreign
        files in it stay. Called by one process.

        Returns:
            Whether it is gone.

        Raises:
            StorageError: the store refused.
        """
        with self._unused(step) as free:
            if free:
                with suppress(NotACheckpointError):  # another thread was faster
                    checkpoints.delete_checkpoint(self.place(step))
                self._known.pop(step, None)
            return free

    def sweep(self, older_than: timedelta) -> list[str]:
        """Remove what saves of steps that did not finish left. Called by one process.

        On local disks: attempts whose process ran on this host and is gone. In an object store:
        steps without a commit to which nothing was written for a time, by the store's clock.

        Returns:
            What was removed.

        Raises:
            StorageError: the store refused.
        """
        swept: list[str] = []
        is_local = self.root.is_local
        names = self.root.listing()
        if is_local:
            names = [found[1] for found in map(_ATTEMPT.fullmatch, names) if found]
        for step in {step for step in map(self.step_of, names) if step is not None}:
            place = self.place(step)
            # Asked before it is kept from others, too: somebody may be about to read it.
            if not is_local and is_checkpoint(place):
                continue
            with self._unused(step) as free:
                if free and is_local:
                    left = list(folder.leftovers(self.root.url, place.name, older_than))
                    swept += [one.location.url for one in left if folder.sweep(one)]
                elif free and not is_checkpoint(place):
                    swept += [
                        left.url
                        for left in checkpoints.sweep(place, dry_run=False, older_than=older_than)
                    ]
        return swept


def what_is_missing(place: Location) -> str | None:
    """Return the first thing of a managed step that is not there, or has another size than was
    written, in words; ``None`` if nothing is missing. No chunk is read.

    Raises:
        StorageError: the store refused.
    """
    stored = StoredCheckpoint(place)
    try:
        manifest, arrays = stored.manifest, stored.arrays
    except StorageError:
        raise
    except CheckpointingException as error:
        return str(error)
    if manifest is None:
        return None
    known = {} if place.is_local else {name: size for name, size, _ in place.remote.details()}

    def size_of(name: str) -> int | None:
        if not place.is_local:
            return known.get(name)
        with suppress(FileNotFoundError, NotADirectoryError):
            return os.stat(f"{place.url}/{name}").st_size
        return None

    for name in ("metadata.json", "common.pt"):
        if size_of(name) is None:
            return f"{place.url}/{name} is missing"
    for meta in arrays.values():
        for linear in range(meta.grid.size):
            index = meta.grid.index(linear)
            row = manifest.row(meta, index)
            if row is None:
                break  # rewritten by another program
            name = f"{meta.node}/{meta.chunk_key(index)}"
            size, wanted = size_of(name), int(manifest.stored[row])
            if size != wanted:
                how = "is missing" if size is None else f"has {size} bytes, not {wanted}"
                return f"chunk {index} of key {meta.key!r} {how}: {place.url}/{name}"
    return None


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
