"""The checkpoints of one training run: saved by step, old ones deleted, the newest restored.

:class:`CheckpointManager` keeps no state beside the checkpoints: what is there is what was
committed.
"""

from __future__ import annotations

import json
import logging
import os
import weakref
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Literal, Unpack

import torch.distributed as dist

from shardstore.async_handle import AsyncSave, async_save
from shardstore.distributed.coordinator import Ranks
from shardstore.errors import ArgumentError
from shardstore.manager.restore import (
    Damage,
    Restored,
    agree_on_damage,
    choose,
    damage_of,
    discard_later_steps,
    warn_of,
    warn_of_later,
)
from shardstore.manager.retention import Retention, note_save
from shardstore.manager.steps import MARK, StepInfo, Steps, branches, mark_of, number_of
from shardstore.mapping import CommonStateDict, ShardedStateDict, StateDict
from shardstore.progress import ProgressCallback, callback_of
from shardstore.saving.run import SaveCall
from shardstore.serialization import begin_save, load
from shardstore.storage.movers.parallel import yield_to_others
from shardstore.storage.options import StepKeywords, options_of
from shardstore.storage.stores.location import Location
from shardstore.strategies.base import SaveCommonStrategy, SaveShardedStrategy


class SaveArguments(StepKeywords, total=False):
    """What :meth:`CheckpointManager.save` hands on; see :func:`shardstore.save`."""

    sharded_strategy: SaveShardedStrategy | tuple[str, int] | None
    common_strategy: SaveCommonStrategy | tuple[str, int] | None
    validate_access_integrity: bool
    preprocess_common_before_consistancy_check: Callable[[CommonStateDict], StateDict] | None
    content_metadata: dict[str, Any] | None


class AsyncSaveArguments(SaveArguments, total=False):
    """What :meth:`CheckpointManager.async_save` hands on; see :func:`shardstore.async_save`."""

    overlap_staging: bool
    staging_budget_bytes: int | None
    when_busy: Literal["wait", "refuse"]
    at_exit: Literal["wait", "abort"]


def _metrics_of(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    if not isinstance(metrics, Mapping | None):
        raise ArgumentError(f"metrics={metrics!r:.100} must be a dict of numbers by name")
    found = {}
    for name, value in (metrics or {}).items():
        try:
            found[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise ArgumentError(f"metric {name!r} is {value!r}, which is not one number") from None
    return found


def _without_mark(
    preprocess: Callable[[CommonStateDict], StateDict] | None,
) -> Callable[[CommonStateDict], StateDict]:
    """Metrics may differ between ranks; rank 0's count, and nobody is told of the others'."""

    def process(common: CommonStateDict) -> StateDict:
        about = dict(common.get("content_metadata") or {})
        about.pop(MARK, None)
        common = {**common, "content_metadata": about}
        return preprocess(common) if preprocess is not None else common

    return process


logger = logging.getLogger(__name__)


class CheckpointManager:
    """Saves, keeps and restores the checkpoints of one run. Every rank makes one, alike.

    Steps lie directly below the root, named by number. What is not exactly so named, or was not
    saved by a manager, is never deleted. Deleting goes on in the background of rank 0: never the
    newest whole step, never one that this manager is writing, basing a save on, or restoring. One
    manager (one run) at a time writes below a root; a reader elsewhere may find a step gone that it
    is still reading, unless the policy keeps it.

    A run may go back: restore an earlier step by its number, and save lower numbers than are there.
    From the first such save on, the run is where that save is: :meth:`latest` and a
    :meth:`restore` without a step give it, and the policy counts the steps up to it. Higher numbers
    that were saved before it stay, whatever the policy, until the run has come past them; see
    ``discard_later`` of :meth:`restore`.

    Args:
        root: folder or URL.
        keep_last: keep the newest so many steps. With no rule at all everything is kept.
        keep_every: keep each step that is divisible by this.
        best: keep the best so many by ``metric``.
        metric: name of one of the metrics given to :meth:`save`.
        mode: ``"min"`` if the least is best, ``"max"`` if the greatest.
        prefix: of the names of steps.
        storage_options: of an object store, see :func:`shardstore.save`.
        sweep_after: in an object store: remove what a save left that did not finish, once nothing
            was written to it for so long. On local disks: at once, if its process ran on this host
            and is gone.

    Raises:
        ArgumentError: a policy or prefix that makes no sense.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        best: int | None = None,
        metric: str | None = None,
        mode: Literal["min", "max"] = "min",
        prefix: str = "step-",
        storage_options: Mapping[str, Any] | None = None,
        sweep_after: timedelta = timedelta(days=1),
    ) -> None:
        self.root = Location.given(root, storage_options)
        self.policy = Retention(
            keep_last=keep_last, keep_every=keep_every, best=best, metric=metric, mode=mode
        )
        self._prefix = prefix
        self._sweep_after = sweep_after
        self._swept = False
        self._begin()
        _managers.add(self)

    def _begin(self) -> None:
        """Begin with nothing in the background; again in a forked child, whose parent does it."""
        self._steps = Steps(self.root, self._prefix)
        # Exit functions of saves in the background run before the interpreter waits for its job.
        self._background = ThreadPoolExecutor(1, "shardstore-manager", yield_to_others)
        self._last: Future[None] | None = None

    # -- what is there -------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """All committed steps, ascending. Any rank may call it; it waits for no other.

        Raises:
            StorageError: the store refused.
        """
        return self._steps.committed()

    def latest(self) -> int | None:
        """Return the newest committed step: the highest number, unless a run went back and saved
        lower ones since; then the last of those. ``None`` if there is none. Any rank may call it;
        it waits for no other.

        Raises:
            StorageError: the store refused.
        """
        current, _ = branches(self._steps.infos())
        return current[-1] if current else None

    def url(self, step: int) -> str:
        """Where a step is, or would be.

        Raises:
            ArgumentError: no whole number, or a negative one.
        """
        return self._steps.url(number_of(step))

    # -- saving --------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: ShardedStateDict,
        *,
        metrics: Mapping[str, Any] | None = None,
        **options: Unpack[SaveArguments],
    ) -> dict[str, Any]:
        """Save a step, and have old ones deleted in the background. Called by every rank, which
        waits for all others as in :func:`shardstore.save`.

        A step that :meth:`restore` found damaged is replaced; any other that is there already only
        with ``overwrite=True``.

        Args:
            step: its number, the same on every rank.
            state: see :func:`shardstore.save`.
            metrics: name -> number; rank 0's are kept, in the checkpoint.
            **options: see :func:`shardstore.save`.

        Returns:
            The commit record, the same on every rank: bytes, chunks, seconds, what each rank did.

        Raises:
            ValueError, TypeError: the step, a metric or an option; on every rank an error.
            CheckpointingException: as :func:`shardstore.save`.
        """
        place, about, given, error = self._prepare(step, metrics, options, SaveArguments)
        used = self._used_by(place, given)
        settings = {name: given.pop(name) for name in StepKeywords.__annotations__ if name in given}
        validate = given.pop("validate_access_integrity", True)
        chosen, error = options_of("save", settings, error=error, validate=validate)
        with self._steps.using(used):
            call = SaveCall(
                sharded_state_dict=state,
                checkpoint_dir=place.place,
                options=chosen,
                error=error,
                **given,
            )
            session, _ = begin_save(call)
        self._steps.damaged.discard(about.step)
        if self._is_first:
            self._later(lambda: note_save(self._steps, self.policy, about, session.record))
        return dict(session.record)

    def async_save(
        self,
        step: int,
        state: ShardedStateDict,
        *,
        metrics: Mapping[str, Any] | None = None,
        **options: Unpack[AsyncSaveArguments],
    ) -> AsyncSave:
        """As :meth:`save`, in the background, as :func:`shardstore.async_save`. Called by every
        rank. Old steps are deleted once it is committed.

        Returns:
            A handle on the save.

        Raises:
            ValueError, TypeError, CheckpointingException: see :meth:`save`; what goes wrong in the
                background is the handle's.
        """
        place, about, given, error = self._prepare(step, metrics, options, AsyncSaveArguments)
        with ExitStack() as stack:
            stack.enter_context(self._steps.using(self._used_by(place, given)))
            handle = async_save(state, place.place, **given, _error=error)
            used = stack.pop_all()
        first = self._is_first  # now: by the time of the job the process group may be gone

        def job() -> None:
            with used:
                failed = handle.exception() is not None
            if failed:
                return
            self._steps.damaged.discard(about.step)
            if first:
                note_save(self._steps, self.policy, about, handle.result())

        self._later(job)
        return handle

    def _prepare(
        self,
        step: int,
        metrics: Mapping[str, Any] | None,
        options: Mapping[str, Any],
        known: type,
    ) -> tuple[Location, StepInfo, dict[str, Any], BaseException | None]:
        """Place, step and arguments of a save, and what is wrong with them on this rank."""
        error: BaseException | None = None
        place, about = self._steps.place(0), StepInfo(0)
        allowed: Collection[str] = known.__annotations__
        given = {name: value for name, value in options.items() if name in allowed}
        try:
            unknown = sorted(set(options) - set(given))
            if unknown:
                raise ArgumentError(
                    f"saving a step has no keyword {', '.join(unknown)}; it takes "
                    f"{', '.join(sorted(allowed))}"
                )
            number = number_of(step)
            place, about = self._steps.place(number), StepInfo(number)
            if number in self._steps.damaged:
                given["overwrite"] = True
            content = given.get("content_metadata") or {}
            if self._is_first and isinstance(content, dict):  # else the save says what is wrong
                saved = self._steps.time_of_save()
                about = StepInfo(number, True, _metrics_of(metrics), saved=saved)
                given["content_metadata"] = {**content, MARK: mark_of(about)}
            given["preprocess_common_before_consistancy_check"] = _without_mark(
                given.get("preprocess_common_before_consistancy_check")
            )
        except (TypeError, ValueError) as problem:
            error = problem
        self._open()
        return place, about, given, error

    def _used_by(self, place: Location, given: Mapping[str, Any]) -> set[int]:
        """Steps that must not go while a save runs: its own, and its base."""
        steps = {self._steps.step_of(place.name)}
        if given.get("base") is not None:
            base = Location.of(given["base"])
            if base == self.root.child(base.name):
                steps.add(self._steps.step_of(base.name))
        return {step for step in steps if step is not None}

    # -- restoring -----------------------------------------------------------------------------

    def restore(
        self,
        state: ShardedStateDict,
        step: int | None = None,
        *,
        verify_first: bool = False,
        discard_later: bool = False,
        progress: ProgressCallback | Literal["bar"] | None = None,
        **options: Any,
    ) -> Restored | None:
        """Load the newest step (see :meth:`latest`), or the newest before it that is not damaged.

        Called by every rank, which waits for all others. Every byte that is loaded is verified;
        where that fails on any rank, all of them warn, naming what is damaged, and go back to the
        step before together. The tensors given may hold a part of a damaged step meanwhile, and
        do if an error is raised in the end.

        Args:
            state: see :func:`shardstore.load`.
            step: this step and no other; then damage is an error.
            verify_first: rank 0 reads all of a checkpoint, also what no rank asks for, before
                anything is loaded; the others wait for it (``SHARDSTORE_DEADLINE_S``).
            discard_later: once it is loaded, delete the steps of higher numbers that managers saved
                (rank 0's word counts; the others wait for it, ``SHARDSTORE_DEADLINE_S``). Otherwise
                they stay, and rank 0 warns of them: until a step is saved, the next run that names
                no step resumes there, and saving one of their numbers needs ``overwrite=True``.
            progress: see :func:`shardstore.save`.
            **options: see :func:`shardstore.load`.

        Returns:
            What was restored; ``None`` where there is no step at all (and none was asked for).

        Raises:
            NotACheckpointError: the step asked for is not there.
            DamagedCheckpointError: the step asked for, or every one, is damaged.
            StorageError: a later step could not be deleted; the state is loaded.
            CheckpointingException: as :func:`shardstore.load`; what is no damage (another shape, a
                store that does not answer) is never fallen back from.
        """
        self._open()
        steps, ranks = self._steps, Ranks.current()
        what = f"restoring from {self.root.url}"
        error: BaseException | None = None
        callback: ProgressCallback | None = None
        try:
            callback = callback_of(progress, shows=ranks.is_coordinator)
            step = None if step is None else number_of(step)
        except (TypeError, ValueError) as problem:
            error = problem
        check = partial(damage_of, callback=callback) if verify_first else None
        passed: list[Damage] = []
        with ExitStack() as used:  # by rank 0: what is restored is not deleted meanwhile

            def decide(_: list[bytes]) -> bytes:
                chosen = choose(steps, used, step, passed, check)
                return json.dumps([*chosen, bool(discard_later)]).encode()

            while True:
                answer = ranks.together(what=what, error=error, decide=decide)
                chosen, found, discards = json.loads(answer)
                for damage in found:
                    warn_of(damage, steps)
                passed += found
                if chosen is None:
                    return None
                place = steps.place(chosen)
                try:
                    loaded = load(state, place.place, progress=callback, **options)
                    break
                except Exception as problem:
                    if step is not None or ranks.is_broken:
                        raise
                    text = agree_on_damage(ranks, place, problem, what)
                    if text is None:
                        raise
                    warn_of((chosen, text), steps)
                    passed.append((chosen, text))
        numbers = tuple(number for number, _ in passed)
        if discards:
            discard_later_steps(ranks, steps, chosen)
        elif ranks.is_coordinator:
            warn_of_later(steps, chosen, numbers)
        return Restored(chosen, loaded, place.url, numbers)

    # -- the background --------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the background has nothing left to do: saves of this manager committed, old
        steps deleted. Any rank may call it; it waits for no other.

        Args:
            timeout: seconds; ``None``: as long as it takes.

        Returns:
            Whether nothing is left to do.
        """
        return self._last is None or not wait([self._last], timeout).not_done

    def close(self) -> None:
        """The same as :meth:`wait` with no limit; the manager can still be used afterwards."""
        self.wait()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _is_first(self) -> bool:
        """Whether this is rank 0, which alone changes what is there."""
        return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0

    def _open(self) -> None:
        """Once: have what dead saves left swept."""
        if self._swept or not self._is_first:
            return
        self._swept = True

        def job() -> None:
            for url in self._steps.sweep(self._sweep_after):
                logger.info("removed what a save that did not finish left: %s", url)

        self._later(job)

    def _later(self, job: Callable[[], None]) -> None:
        """Run a job in the background, after those before it. If it fails, that is logged."""

        def run() -> None:
            try:
                job()
            except Exception as error:
                logger.warning(
                    "background work on %s failed and is tried again after the next save: %s: %s",
                    self.root.url,
                    type(error).__name__,
                    error,
                )

        try:
            self._last = self._background.submit(run)
        except RuntimeError:  # an exit function of the program saves: no more threads are started
            run()


_managers: weakref.WeakSet[CheckpointManager] = weakref.WeakSet()


def _begin_all() -> None:
    for manager in list(_managers):
        manager._begin()


os.register_at_fork(after_in_child=_begin_all)
