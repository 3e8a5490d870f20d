"""The committed steps of one run: folders named by number directly below a root.

Folders with other names belong to other programs and are not changed. :class:`Retention` says
which steps to keep, a pure function of numbers, times and metrics. :meth:`Steps.note_save` is the
work of rank 0 in the background after each save.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal

from shardstore import errors
from shardstore.distributed.coordinator import Ranks
from shardstore.distributed.groups import described
from shardstore.progress import log_event
from shardstore.storage.checkpoint import ReplacedError, StoredCheckpoint
from shardstore.storage.commit import checkpoints
from shardstore.storage.commit.identity import is_checkpoint, require_root
from shardstore.storage.format.manifest import content_digest
from shardstore.storage.format.names import CONFIG_NAME
from shardstore.storage.options import require_number
from shardstore.storage.runtime.parallel import run_batched
from shardstore.storage.stores.location import Location

logger = logging.getLogger("shardstore.manager")

TRIES = 5
"""How often steps are listed until none is deleted meanwhile."""
MARK = "checkpoint_manager"
"""Member of a checkpoint's content metadata: step, metrics and time of the save. A manager deletes
only checkpoints that have it."""

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
        clock: time of the commit in nanoseconds, as the clock of then had it; default: ``saved``.
    """

    step: int
    managed: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    content: str | None = None
    saved: int | None = None
    clock: int | None = None

    def mark(self) -> dict[str, Any]:
        """Return the member for the content metadata. NaN and infinities are text, for JSON."""
        metrics = {name: v if math.isfinite(v) else str(v) for name, v in self.metrics.items()}
        return {"step": self.step, "metrics": metrics, "saved_ns": self.saved}


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


def number_of(step: int) -> int:
    """Return a step's number as an int; raises :class:`ArgumentError` for anything else."""
    require_number("step", step, at_least=0)
    return int(step)


class Steps:
    """The steps below a root. Any process may use it, except where a method says otherwise.

    Args:
        root: folder or URL.
        prefix: prefix of the names; step 100 is ``PREFIX100``.

    Attributes:
        damaged: steps that were found damaged.
        incomplete: incomplete steps that the last warning about them named or counted.
        abandoned: steps of branches that the run left, already named in a warning.
        is_unranked: whether a warning said that no step has the metric of the policy.

    Raises:
        ArgumentError: the prefix has characters that are not allowed.
    """

    def __init__(self, root: Location, prefix: str) -> None:
        if not isinstance(prefix, str) or not _PREFIX.fullmatch(prefix):
            raise errors.ArgumentError(
                f"prefix={prefix!r} may have letters, digits, '_', '-' and '.', and must not "
                "begin with '-' or '.'"
            )
        self.root = root
        self.prefix = prefix
        self.damaged: set[int] = set()
        self.incomplete: set[int] = set()
        self.abandoned: set[int] = set()
        self.is_unranked = False
        self._known: dict[int, tuple[object, StepInfo]] = {}  # by the stamp of its commit
        self._last: int | None = None
        self._changed = threading.Condition()
        self._used: Counter[int] = Counter()
        self._going: set[int] = set()

    def place(self, step: int) -> Location:
        """Return the location of a step, which need not exist."""
        return self.root.child(f"{self.prefix}{step}")

    def log(
        self, event: str, step: int, text: str, level: int = logging.INFO, /, **fields: Any
    ) -> None:
        """Log an event of a step, see :data:`shardstore.progress.EVENTS`."""
        log_event(logger, event, text, level, step=step, **{"url": self.place(step).url, **fields})

    def step_of(self, name: str) -> int | None:
        """Return the step of a folder's name, ``None`` for other names."""
        found = re.fullmatch(rf"{re.escape(self.prefix)}(0|[1-9][0-9]*)", name)
        return None if found is None else int(found[1])

    def committed(self) -> list[int]:
        """Return all committed steps, ascending.

        Raises:
            ArgumentError: the root is a checkpoint itself, without steps below it.
            StorageError: the root is a file, or the store failed.
        """
        again = self.root.listing()
        for _ in range(TRIES):
            names = again
            steps = [step for step in map(self.step_of, names) if step is not None]
            found = sorted(step for step in steps if is_checkpoint(self.place(step)))
            # A step may have been deleted since it was listed, and a newer one committed.
            if len(found) == len(steps) or (again := self.root.listing()) == names:
                break
        if not found:
            require_root(self.root, names, [self.place(n).name for n in sorted(steps)[::-1]])
        return found

    def infos(self) -> dict[int, StepInfo]:
        """Return the description of each committed step, ascending. A commit is read again only if
        it changed. If a step was deleted since it was listed, they are listed again.

        Raises:
            StorageError: the store failed.
        """
        read = set[int]()

        def work(batch: Sequence[int]) -> None:
            for step in batch:
                with suppress(ReplacedError):
                    stamp = self.place(step).stamp("zarr.json")
                    if stamp is None and not is_checkpoint(self.place(step)):
                        continue
                    if step not in self._known or self._known[step][0] != stamp:
                        self._known[step] = (stamp, self.info(step))
                    read.add(step)

        for _ in range(TRIES):
            read.clear()
            steps = self.committed()
            run_batched(steps, work, threads=self.root.threads())
            if len(read) == len(steps):
                break
        found = {step: self._known[step][1] for step in sorted(read)}
        self._last = max([self._last or 0, *(info.saved or 0 for info in found.values())])
        return found

    def time_of_save(self) -> int:
        """Return a time for a save that begins now, later than those of all steps, even if clocks
        differ. The process that saves calls it."""
        if self._last is None:
            with suppress(errors.StorageError):  # the save will raise it
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
            mark = _mapping(_mapping(stored.root.attributes.get("content_metadata")).get(MARK))
            content = stored.root.commit.get("content")
            if content is None and stored.manifest is not None:
                content = content_digest(stored.arrays.values(), stored.manifest)
        except errors.StorageError:
            raise
        except errors.CheckpointingException:
            return StepInfo(step)
        metrics = {}
        for name, value in _mapping(mark.get("metrics")).items():
            with suppress(TypeError, ValueError):
                metrics[name] = float(value)
        saved = mark.get("saved_ns")
        saved = saved if isinstance(saved, int) else None
        clock = saved
        with suppress(LookupError, TypeError, ValueError):
            created = datetime.fromisoformat(stored.root.commit["created"])
            clock = int(created.timestamp()) * 10**9
        return StepInfo(step, mark.get("step") == step, metrics, content, saved, clock)

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
                with suppress(errors.NotACheckpointError):  # another thread deleted it
                    checkpoints.delete_checkpoint(self.place(step))
                self._known.pop(step, None)
            return free

    def sweep(self, older_than: timedelta) -> Iterator[str]:
        """Remove the remains of unfinished saves of steps, and yield the URL of each. One process
        calls it.

        On local disks it removes attempts of dead processes; attempts of another host are removed
        after ``older_than``. In an object store it removes steps without a commit if nothing was
        written to them for ``older_than``, by the store's clock.

        Raises:
            StorageError: the store failed.
        """
        for target, remove in checkpoints.dead_targets(self.root, older_than):
            if (step := self.step_of(target.name)) is not None:
                with self._unused(step) as free:
                    if free:
                        yield from remove()

    def note_save(self, policy: Retention, about: StepInfo, record: Mapping[str, Any]) -> None:
        """Log a committed step, compare it with earlier ones, and delete the steps that the policy
        does not keep. Rank 0 calls it in the background.

        Args:
            policy: the retention policy.
            about: the new step.
            record: its commit record.
        """
        step, size, seconds = about.step, record.get("stored_bytes", 0), record.get("seconds", 0.0)
        text = f"saved step {step}: {self.place(step).url}"
        self.log("step", step, text, bytes=size, seconds=seconds, metrics=dict(about.metrics))
        infos, content = self.infos(), record.get("content")
        same = [n for n in infos if n < step and infos[n].content == content]
        if same and content is not None:
            earlier = same[-1]
            text = (
                f"all tensors of step {step} are equal to those of step {earlier} "
                f"({self.place(earlier).url}). Check that the model was trained in between, and "
                "that its current state is saved"
            )
            self.log("same_content", step, text, logging.WARNING, earlier=earlier)
        left = [n for n in branches(infos)[1] if n > step and n not in self.abandoned]
        if left:
            self.abandoned.update(left)
            text = (
                f"saved step {step} below {self.root.url}, but steps with higher numbers were "
                f"saved before it: {', '.join(map(str, left))}. Check whether another run saves "
                "there. These steps are no longer restored, and stay until the run has passed "
                "them; saving one of their numbers needs overwrite=True"
            )
            self.log("later_steps", step, text, logging.WARNING, later=left, url=self.root.url)
        if policy.deletes:
            self._retain(policy, infos)

    def _retain(self, policy: Retention, infos: Mapping[int, StepInfo]) -> None:
        """Delete the steps before the newest complete one that the policy does not keep.

        Steps of branches that the run left stay, because the user may want them.
        """
        unranked = policy.best and not any(policy.metric in i.metrics for i in infos.values())
        if unranked and infos and not self.is_unranked:
            self.is_unranked = True
            step = max(infos)
            logger.warning(
                f"best={policy.best} keeps no step below {self.root.url}, because none has the "
                f"metric {policy.metric!r}; step {step} has "
                f"{', '.join(sorted(infos[step].metrics)) or 'none'}. Pass it to save(metrics=)"
            )
        whole = {step: info for step, info in infos.items() if step not in self.damaged}
        managed = [step for step in branches(whole)[0] if infos[step].managed]
        incomplete: dict[int, str] = {}
        while managed and (missing := what_is_missing(self.place(managed[-1]))) is not None:
            incomplete[managed.pop()] = missing
        if incomplete.keys() - self.incomplete:
            named = "; ".join(f"step {n}: {text}" for n, text in list(incomplete.items())[:3])
            logger.warning("%d incomplete step(s) not counted as kept: %s", len(incomplete), named)
        self.incomplete = set(incomplete)
        keep = policy.kept({step: infos[step] for step in managed})
        failed = []
        for step in managed:
            try:
                if step not in keep and self.delete(step):
                    self.log("delete", step, f"deleted step {step}: {self.place(step).url}")
            except errors.StorageError as error:  # a step that cannot be deleted keeps no others
                failed.append(error)
        if failed:
            raise failed[0]

    def warn_of_later(self, infos: Mapping[int, StepInfo], chosen: int) -> None:
        """Log a warning about steps with higher numbers than the restored one. Rank 0 calls it."""
        later = [step for step in infos if step > chosen]
        if not later:
            return
        latest = branches(infos)[0][-1]
        resumes = f"Until a step is saved, a restore without a step loads step {latest}. "
        text = (
            f"restored step {chosen}; later steps exist below {self.root.url}: "
            f"{', '.join(map(str, later))}. {'' if latest == chosen else resumes}"
            "Saving one of their numbers again needs overwrite=True. "
            f"restore(..., step={chosen}, discard_later=True) deletes them"
        )
        self.log("later_steps", chosen, text, logging.WARNING, later=later, url=self.root.url)

    def discard_later(self, ranks: Ranks, infos: Mapping[int, StepInfo], chosen: int) -> None:
        """Delete the managed steps with higher numbers, on rank 0. Every rank calls it and waits
        for it."""

        def work(_: object) -> None:
            kept = []
            later = [step for step in infos if step > chosen]
            for step in reversed(later):  # the highest first, so that no gap is left
                if infos[step].managed and self.delete(step):
                    text = f"deleted step {step}, later than the restored step {chosen}: "
                    self.log("delete", step, text + self.place(step).url, logging.WARNING)
                else:
                    kept.append(step)
            if kept:
                logger.warning("steps %s stay: no manager saved them, or they are in use", kept)

        ranks.together(what=f"deleting the steps after {chosen} below {self.root.url}", decide=work)


def what_is_missing(place: Location) -> str | None:
    """Return a text about the first missing file of a managed step, or the first with a wrong size;
    ``None`` if the step is complete. No chunk is read.

    Raises:
        StorageError: the store failed.
    """
    stored = StoredCheckpoint(place)
    try:
        root, manifest, arrays = stored.root, stored.manifest, stored.arrays
    except errors.StorageError:
        raise
    except errors.CheckpointingException as error:
        return str(error)
    if root is None or manifest is None:
        return None

    def expected() -> Iterator[tuple[str, int | None, str]]:  # name, size and description
        yield from ((n, root.file_bytes.get(n), n) for n in (CONFIG_NAME, *root.file_sums))
        for meta in arrays.values():
            rows = manifest.rows(meta) if meta.constant is None and meta.places is None else None
            if rows is not None:  # else another program rewrote it
                for number, size in enumerate(rows.stored.tolist()):
                    index = meta.grid.index_at(number)
                    yield meta.chunk_name(index), size, f"chunk {index} of key {meta.key!r}"

    wanted = list(expected())
    sizes = place.sizes(name for name, _, _ in wanted)
    for name, size, what in wanted:
        if name not in sizes:
            return f"{what} is missing: {place.url}/{name}"
        if size not in (None, sizes[name]):
            return f"{what} has {sizes[name]} bytes, not {size}: {place.url}/{name}"
    return None


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


@dataclass(frozen=True)
class Retention:
    """The retention policy. A step is kept if any rule keeps it, or if it is the newest step.

    Callers leave out the steps of abandoned branches (:func:`branches`).

    Attributes:
        keep_last: number of newest steps to keep. ``None``: all, unless another rule is given.
        keep_every: keep each step that is divisible by this number.
        keep_for: keep the steps that were saved at most this time before the newest.
        best: number of best steps by ``metric`` to keep. Steps whose metric is missing or NaN are
            not counted. Of steps with equal metrics, the later one is better.
        metric: name of a metric.
        mode: ``"min"`` if the smallest value is best, ``"max"`` if the greatest is.
        keep_if: keep each step for whose number this function returns true.

    Raises:
        ArgumentError: a number is below 1, the mode is unknown, or only one of ``best`` and
            ``metric`` is given.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_for: timedelta | None = None
    best: int | None = None
    metric: str | None = None
    mode: Literal["min", "max"] = "min"
    keep_if: Callable[[int], object] | None = None

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every", "best"):
            require_number(name, getattr(self, name), none=True)
        span = self.keep_for
        if span is not None and not (isinstance(span, timedelta) and span > timedelta(0)):
            raise errors.ArgumentError(f"keep_for={span!r} must be a timedelta above 0, or None")
        if self.keep_if is not None and not callable(self.keep_if):
            raise errors.ArgumentError(f"keep_if={self.keep_if!r:.100} must be a function, or None")
        if self.mode not in ("min", "max"):
            raise errors.ArgumentError(f"mode={self.mode!r} must be 'min' or 'max'")
        if (self.best is None) != (self.metric is None):
            raise errors.ArgumentError(
                f"best={self.best} and metric={self.metric!r} must be given together, such as "
                "best=2, metric='loss'"
            )

    @property
    def deletes(self) -> bool:
        """Whether any rule is given."""
        return self != Retention(mode=self.mode)

    def kept(self, steps: Mapping[int, StepInfo]) -> set[int]:
        """Return the steps to keep.

        Args:
            steps: step -> its description.
        """
        if not self.deletes:
            return set(steps)
        newest_first = sorted(steps, reverse=True)
        keep = set(newest_first[: self.keep_last or 1])
        if self.keep_every is not None:
            keep.update(step for step in steps if step % self.keep_every == 0)
        keep.update(filter(self._is_chosen, steps))
        if self.keep_for is not None:
            # By the clocks of then: one that was ahead once would keep all later steps. A step of
            # the future stays, because the clock of the newest one may be wrong.
            saved = {step: info.saved for step, info in steps.items() if info.saved is not None}
            times = {step: steps[step].clock or when for step, when in saved.items()}
            newest = times[max(saved, key=saved.__getitem__)] if saved else 0
            span = self.keep_for // timedelta(microseconds=1) * 1000
            keep.update(step for step, when in times.items() if when >= newest - span)
        if self.best is not None and self.metric is not None:
            values = {step: info.metrics.get(self.metric, math.nan) for step, info in steps.items()}
            ranked = [step for step in newest_first if math.isfinite(values[step])]
            # The sort is stable, so the later of two equal steps comes first in both modes.
            sign = 1.0 if self.mode == "min" else -1.0
            ranked.sort(key=lambda step: sign * values[step])
            keep.update(ranked[: self.best])
        return keep

    def _is_chosen(self, step: int) -> bool:
        try:
            return self.keep_if is not None and bool(self.keep_if(step))
        except Exception as error:
            text = f"keep_if({step}) raised {described(error)}; no step is deleted"
            raise errors.ArgumentError(text) from error
