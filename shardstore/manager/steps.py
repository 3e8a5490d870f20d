"""The committed steps of one run: folders named by number directly below a root.

Folders with other names belong to other programs and are not changed.
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
"""Member of a checkpoint's content metadata: step, metrics and time of the save. A manager deletes
only checkpoints that have it."""
READS = 16
"""Number of commits that are read at a time from an object store."""

_PREFIX = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*|")


@dataclass(frozen=True, slots=True)
class StepInfo:
    """The description of a step.

    Attributes:
        step: number of the step.
        managed: whether a manager saved it; otherwise it is never deleted.
        metrics: metrics of the save.
        content: digest of all arrays, see :func:`content_digest`; ``None`` if there is none.
        saved: time when the save began, in nanoseconds since 1970, greater for later saves even if
            clocks differ. ``None``: no manager saved it.
    """

    step: int
    managed: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    content: str | None = None
    saved: int | None = None


def branches(infos: Mapping[int, StepInfo]) -> tuple[list[int], list[int]]:
    """Return the steps of the run's branch, and the steps of branches that it left.

    A run left a step if it saved a lower number after it. A step without a known time counts as
    saved directly after the step before it.

    Args:
        infos: step -> description.

    Returns:
        Two lists, ascending. The last step of the first list was saved last.
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
    """Return the member for the content metadata. NaN and infinities are text, for JSON."""
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
    """The steps below a root. Any process may use it, except where a method says otherwise.

    Args:
        root: folder or URL.
        prefix: prefix of the names; step 100 is ``PREFIX100``.

    Attributes:
        damaged: steps that were found damaged.
        incomplete: incomplete steps that the last warning about them named or counted.
        told: steps of branches that the run left, already named in a warning.

    Raises:
        ArgumentError: the prefix has characters that are not allowed.
    """

    def __init__(self, root: Location, prefix: str) -> None:
        if not isinstance(prefix, str) or not _PREFIX.fullmatch(prefix):
            raise ArgumentError(
                f"prefix={prefix!r} may have letters, digits, '_', '-' and '.', and must not "
                "begin with '-' or '.'"
            )
        self.root = root
        self.prefix = prefix
        self.damaged: set[int] = set()
        self.incomplete: set[int] = set()
        self.told: set[int] = set()
        self._known: dict[int, tuple[object, StepInfo]] = {}  # by the stamp of its commit
        self._last: int | None = None
        self._changed = threading.Condition()
        self._used: Counter[int] = Counter()
        self._going: set[int] = set()

    def place(self, step: int) -> Location:
        """Return the location of a step, which need not exist."""
        return self.root.child(f"{self.prefix}{step}")

    def url(self, step: int) -> str:
        """Return the URL of a step, which need not exist."""
        return self.place(step).url

    def log(
        self, event: str, step: int, text: str, level: int = logging.INFO, /, **fields: Any
    ) -> None:
        """Log an event of a step, see :data:`shardstore.progress.EVENTS`."""
        log_event(logger, event, text, level, step=step, **{"url": self.url(step), **fields})

    def step_of(self, name: str) -> int | None:
        """Return the step of a folder's name, ``None`` for other names."""
        digits = name[len(self.prefix) :]
        if not name.startswith(self.prefix) or not re.fullmatch(r"0|[1-9][0-9]{0,17}", digits):
            return None
        return int(digits)

    def committed(self) -> list[int]:
        """Return all committed steps, ascending.

        Raises:
            StorageError: the store failed.
        """
        self.root.require_no_file()
        steps = [step for step in map(self.step_of, self.root.listing()) if step is not None]
        return sorted(step for step in steps if is_checkpoint(self.place(step)))

    def infos(self) -> dict[int, StepInfo]:
        """Return the description of each committed step, ascending. A commit is read again only if
        it changed.

        Raises:
            StorageError: the store failed.
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
        """Store the description of a saved step, so that its commit need not be read."""
        self._known[info.step] = (self.place(info.step).stamp("zarr.json"), info)

    def time_of_save(self) -> int:
        """Return a time for a save that begins now, later than those of all steps, even if clocks
        differ. The process that saves calls it."""
        if self._last is None:
            with suppress(StorageError):  # the save will raise it
                self.infos()
        self._last = max(time.time_ns(), (self._last or 0) + 1)
        return self._last

    def info(self, step: int) -> StepInfo:
        """Return the description of a step, an empty one if it cannot be read or has another
        layout.

        Raises:
            StorageError: the store failed.
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
        """Prevent this process from deleting steps. Wait while it deletes one of them."""
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
        """Prevent this process from using a step. Yield ``False`` if the step is in use."""
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
        """Delete a committed step, unless it is in use. Files of other programs in it stay. One
        process calls it.

        Returns:
            Whether the step was deleted.

        Raises:
            StorageError: the store failed.
        """
        with self._unused(step) as free:
            if free:
                with suppress(NotACheckpointError):  # another thread deleted it
                    checkpoints.delete_checkpoint(self.place(step))
                self._known.pop(step, None)
            return free

    def sweep(self, older_than: timedelta) -> list[str]:
        """Remove the remains of unfinished saves of steps. One process calls it.

        On local disks it removes attempts of dead processes; attempts of another host are removed
        after ``older_than``. In an object store it removes steps without a commit if nothing was
        written to them for ``older_than``, by the store's clock.

        Returns:
            URLs of the removed attempts.

        Raises:
            StorageError: the store failed.
        """
        swept: list[str] = []
        if self.root.is_local:
            for left in folder.leftovers(self.root.url, older_than=older_than):
                if (step := self.step_of(left.target.name)) is not None:
                    with self._unused(step) as free:
                        if free and folder.sweep(left):
                            swept.append(left.location.url)
            return swept
        for step in {step for step in map(self.step_of, self.root.listing()) if step is not None}:
            place = self.place(step)
            # Check before locking, because another thread may be about to read the step.
            if is_checkpoint(place):
                continue
            with self._unused(step) as free:
                if free and not is_checkpoint(place):
                    found = checkpoints.sweep(place, dry_run=False, older_than=older_than)
                    swept += [left.url for left in found]
        return swept


def what_is_missing(place: Location) -> str | None:
    """Return a text about the first missing file of a managed step, or the first with a wrong size;
    ``None`` if the step is complete. No chunk is read.

    Raises:
        StorageError: the store failed.
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
            index = meta.grid.index_at(linear)
            row = manifest.row(meta, index)
            if row is None:
                break  # rewritten by another program
            name = meta.chunk_name(index)
            size, wanted = size_of(name), int(manifest.stored[row])
            if size != wanted:
                how = "is missing" if size is None else f"has {size} bytes, not {wanted}"
                return f"chunk {index} of key {meta.key!r} {how}: {place.url}/{name}"
    return None


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
