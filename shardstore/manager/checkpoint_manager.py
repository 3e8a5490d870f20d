"""Manages the checkpoints of a training run: says when to save, saves steps, deletes old ones,
restores the newest.

:class:`CheckpointManager` stores no state other than the checkpoints.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import Any, Literal, Unpack

from shardstore import errors, hf
from shardstore.async_handle import AsyncSave, async_save
from shardstore.distributed.coordinator import Ranks
from shardstore.distributed.groups import first_of, group_rank
from shardstore.hf.writing import ExportKeywords
from shardstore.inspection.verify import Finding, verify
from shardstore.loading.given import SHOWN
from shardstore.loading.run import causes
from shardstore.manager.schedule import SIGNALS, Answer, Notices, Schedule, Vote, forget_signals
from shardstore.manager.steps import MARK, Retention, StepInfo, Steps, branches, logger, number_of
from shardstore.mapping import CommonStateDict, ShardedStateDict, StateDict
from shardstore.progress import ProgressArgument, ProgressCallback, callback_of
from shardstore.saving.run import run_save
from shardstore.serialization import load, save_request
from shardstore.state_dict_utils import check_state
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.commit.identity import is_checkpoint
from shardstore.storage.format.names import CONTENT_METADATA_KEY
from shardstore.storage.options import SaveOptions, StepKeywords, require_bool, require_duration
from shardstore.storage.runtime.parallel import yield_to_others
from shardstore.storage.stores.location import Location
from shardstore.strategies.base import SaveCommonStrategy, SaveShardedStrategy

LEAST_GRACE_S = 5.0
"""Seconds that the ranks wait for each other even if the time of a notice has passed."""
BEHIND, BEHIND_S = 8, 60.0
"""Number of saves whose old steps may wait for their deletion, so that they do not fill the disk,
and seconds that the next save then waits for the first of them."""


class SaveArguments(StepKeywords, total=False):
    """Arguments that :meth:`CheckpointManager.save` passes to :func:`shardstore.save`."""

    sharded_strategy: SaveShardedStrategy | tuple[str, int] | None
    common_strategy: SaveCommonStrategy | tuple[str, int] | None
    validate_access_integrity: bool
    preprocess_common_before_consistancy_check: Callable[[CommonStateDict], StateDict] | None
    content_metadata: dict[str, Any] | None
    options: SaveOptions | None


class AsyncSaveArguments(SaveArguments, total=False):
    """Arguments of :meth:`CheckpointManager.async_save` for :func:`shardstore.async_save`."""

    overlap_staging: bool
    staging_budget_bytes: int | None
    when_busy: Literal["wait", "refuse"]
    at_exit: Literal["wait", "abort"]


def _metrics_of(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    if not isinstance(metrics, Mapping | None):
        raise errors.ArgumentError(f"metrics={metrics!r:.100} must be a dict of numbers by name")
    found = {}
    for name, value in (metrics or {}).items():
        try:
            found[str(name)] = float(value)
        except Exception:  # whatever the value's own type raises
            text = f"metric {name!r}={value!r:.100} must be one number"
            raise errors.ArgumentError(text) from None
    return found


def _without_mark(
    preprocess: Callable[[CommonStateDict], StateDict] | None,
) -> Callable[[CommonStateDict], StateDict]:
    """Return a preprocessing that leaves the metrics out of the comparison of the ranks.

    Metrics may differ between ranks; those of rank 0 are saved.
    """

    def process(common: CommonStateDict) -> StateDict:
        about = common.get(CONTENT_METADATA_KEY) or {}
        if isinstance(about, dict):  # else the save is refused
            about = {name: value for name, value in about.items() if name != MARK}
        common = {**common, CONTENT_METADATA_KEY: about}
        return preprocess(common) if preprocess is not None else common

    return process


@dataclass(frozen=True, slots=True)
class Restored:
    """A restored step.

    Attributes:
        step: number of the step.
        state: result of :func:`shardstore.load`, without content metadata that only the manager
            gave.
        url: URL of the checkpoint.
        damaged: newer, damaged steps that were skipped, newest first.
    """

    step: int
    state: Any
    url: str
    damaged: tuple[int, ...] = ()


@dataclass(slots=True)
class _Prepared:
    """A save of a step that can begin.

    Attributes:
        place: where it goes.
        about: description of the step.
        arguments: arguments of :func:`shardstore.save`.
        used: the steps that must not be deleted during it: its own, and its base.
        error: error in the arguments of this rank.
    """

    place: Location
    about: StepInfo
    arguments: dict[str, Any]
    used: set[int] = field(default_factory=set)
    error: BaseException | None = None


class CheckpointManager(AbstractContextManager["CheckpointManager"]):
    """Saves, keeps and restores the checkpoints of one run. Every rank makes one, with equal
    arguments. With ``process_group``, only its ranks do, and its first rank counts as rank 0.

    Steps are folders directly below the root, named by number. The manager never deletes a folder
    with another name, or one that no manager saved. Rank 0 deletes steps in the background; a save
    waits for a deletion that is 8 saves behind, a minute at most. It never deletes the newest
    complete step, or a step that this manager is writing, restoring or using as base. Only one
    manager (one run) at a time may write below a root. A step that another process reads may be
    deleted, unless the policy keeps it.

    A run may go back: restore an earlier step by its number, and then save numbers lower than those
    that exist. From the first such save on, :meth:`latest` and a :meth:`restore` without a step
    return the steps of the new branch, and the policy counts only these. Steps with higher numbers
    from before stay until the run has passed them; see ``discard_later`` of :meth:`restore`.

    Args:
        root: folder or URL.
        keep_last: number of newest steps to keep. Without any rule, all steps are kept.
        keep_every: keep each step that is divisible by this number.
        keep_for: keep the steps that were saved at most this time before the newest.
        keep_if: keep each step for whose number this function returns true; rank 0 calls it in the
            background.
        best: number of best steps by ``metric`` to keep.
        metric: name of one of the metrics of :meth:`save`.
        mode: ``"min"`` if the smallest value is best, ``"max"`` if the greatest is.
        prefix: prefix of the names of steps. Below a root where others end with a digit, it must
            not: ``v12`` is step 12 of ``v``, and step 2 of ``v1``.
        storage_options: options of an object store, see :func:`shardstore.save`.
        sweep_after: in an object store, remove the remains of an unfinished save after nothing was
            written to it for this time. On local disks the same holds for a save of another host;
            if its process ran on this host and is dead, they are removed at once.
        process_group: the ranks that save and restore together, see :func:`shardstore.save`;
            default: all. Each group needs a root of its own.
        every: :meth:`should_save` returns ``True`` for each step that is divisible by this number.
        every_s: and for the first step that ends at least so many seconds after the last save
            began, by the clock of rank 0.
        interval: with ``"continuous"``, and for the first step that ends after the last save ended.
        save_on_signal: ``True``: and for the step in which a rank receives SIGTERM or SIGUSR1, or
            calls :meth:`request_save`. Other signals may be given as a list; an empty list: only
            requests. :meth:`close` gives the signals back to their earlier handlers, which are
            not called before.
        grace_s: seconds between such a signal and the end of the process. :meth:`save` then waits
            for another rank only until it has passed, and not ``SHARDSTORE_DEADLINE_S``.

    Raises:
        ArgumentError: a rule or the prefix has a wrong type or value, or this rank is not a member
            of the group, or signals are to be received and this is not the main thread.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_for: timedelta | None = None,
        keep_if: Callable[[int], object] | None = None,
        best: int | None = None,
        metric: str | None = None,
        mode: Literal["min", "max"] = "min",
        prefix: str = "step-",
        storage_options: Mapping[str, Any] | None = None,
        sweep_after: timedelta = timedelta(days=1),
        process_group: Any = None,
        every: int | None = None,
        every_s: float | None = None,
        interval: Literal["continuous"] | None = None,
        save_on_signal: bool | Iterable[int] = False,
        grace_s: float | None = None,
    ) -> None:
        self.root = Location.of(root, storage_options)
        require_duration("sweep_after", sweep_after)
        self.policy = Retention(keep_last, keep_every, keep_for, best, metric, mode, keep_if)
        self._schedule = Schedule(every=every, every_s=every_s, interval=interval, grace_s=grace_s)
        if process_group is not None:
            Ranks.of(process_group)  # a rank that is not a member would delete steps too
        self._group = process_group
        self._prefix = prefix
        self._sweep_after = sweep_after
        self._swept = False
        self._begin()
        self._began = monotonic()
        self._current: int | None = None  # the step that was saved or restored last
        self._handle: AsyncSave | None = None
        self._answer = Answer(False)
        self._ends: float | None = None  # when a notice says that this process will be ended
        self._takes_notices = save_on_signal is not False
        if isinstance(save_on_signal, bool):
            save_on_signal = SIGNALS if save_on_signal else ()
        self._notices = Notices(save_on_signal)
        _managers.add(self)

    def _begin(self) -> None:
        """Set the state of a manager without background work; called again in a forked child."""
        self._steps = Steps(self.root, self._prefix)
        # Exit functions of asynchronous saves run before the interpreter waits for this job.
        self._background = ThreadPoolExecutor(1, "shardstore-manager", yield_to_others)
        self._jobs = deque[Future[None]](maxlen=BEHIND)

    # -- steps ---------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Return all committed steps, ascending. Any rank may call it; it waits for no other.

        Raises:
            StorageError: the store failed.
        """
        return self._steps.committed()

    def latest(self) -> int | None:
        """Return the newest committed step, ``None`` if there is none. Any rank may call it; it
        waits for no other.

        The newest step is the one with the highest number, unless the run went back and saved lower
        numbers since; then it is the last of those.

        Raises:
            StorageError: the store failed.
        """
        current, _ = branches(self._steps.infos())
        return current[-1] if current else None

    def url(self, step: int) -> str:
        """Return the folder or URL of a step, which need not exist.

        Raises:
            ArgumentError: the step is not a whole number of at least 0.
        """
        return self._steps.place(number_of(step)).url

    # -- when to save --------------------------------------------------------------------------

    def should_save(self, step: int) -> bool:
        """Return whether to save a step, by the rules given to the manager.

        Every rank calls it after each step, and gets the same answer. With ``every=`` alone no rank
        waits; otherwise each call waits for all ranks, as :func:`shardstore.save` does, and the
        step that was saved or restored last is not saved again.

        Args:
            step: number of the step, the same on every rank.

        Raises:
            ArgumentError: no rule was given to the manager, the step is not a whole number of at
                least 0, or the ranks ask about different steps.
            RanksError: another rank failed, died, or did not call it within the deadline.
        """
        schedule, notices, ranks = self._schedule, self._notices, Ranks.of(self._group)
        if schedule.every_s is None and schedule.interval is None and not self._takes_notices:
            if schedule.every is None:
                raise errors.ArgumentError(
                    "should_save() needs a rule: give CheckpointManager every=, every_s=, "
                    "interval='continuous' or save_on_signal=True"
                )
            return schedule.falls_on(number_of(step))
        is_busy = self._handle is not None and not self._handle.done()
        what = f"asking whether to save step {step!s:.100} below {self.root.url}"

        def decide(votes: list[Vote]) -> Answer:
            by_rank = dict(zip(ranks.members, votes, strict=True))
            return schedule.decide(by_rank, monotonic() - self._began, self._current)

        with ranks.meet(what, decide) as meeting:
            meeting.report = Vote(number_of(step), is_busy, notices.pending, notices.age_s)
        self._answer = meeting.answer
        if self.notice is not None and schedule.grace_s is not None:
            self._ends = monotonic() + schedule.grace_s - self._answer.age_s
        return self._answer.saves

    @property
    def notice(self) -> str | None:
        """Why the last :meth:`should_save` asked for a save at once: the name of a signal, or the
        text of :meth:`request_save`, the same on every rank; ``None`` if there was no reason."""
        return self._answer.notice

    def request_save(self, reason: str) -> None:
        """Make the next :meth:`should_save` return ``True`` on every rank, for example because the
        cluster announces that it will end this node. Any rank and thread may call it; it waits for
        no other.

        Args:
            reason: text for :attr:`notice`.

        Raises:
            ArgumentError: the manager was made without ``save_on_signal``, so ranks do not ask each
                other.
        """
        if not self._takes_notices:
            raise errors.ArgumentError(
                f"request_save({reason!r:.100}): the ranks do not ask each other for requests. "
                "Give CheckpointManager save_on_signal=True, or save_on_signal=() for requests "
                "alone"
            )
        self._notices.add(str(reason))

    # -- saving --------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: ShardedStateDict,
        *,
        metrics: Mapping[str, Any] | None = None,
        **options: Unpack[SaveArguments],
    ) -> dict[str, Any]:
        """Save a step; rank 0 then deletes old steps in the background. Every rank calls it and
        waits for all others, as in :func:`shardstore.save`.

        An existing step is replaced if :meth:`restore` found it damaged, or with
        ``overwrite=True``.

        Args:
            step: number of the step, the same on every rank.
            state: see :func:`shardstore.save`.
            metrics: name -> number; rank 0's are stored in the checkpoint.
            **options: see :func:`shardstore.save`.

        Returns:
            The commit record, the same on every rank: bytes, chunks, seconds, the work of each
                rank.

        Raises:
            ValueError, TypeError: the step, a metric or an option has a wrong type or value; raised
                on every rank.
            CheckpointingException: as :func:`shardstore.save`.
        """
        prepared = self._prepare(step, state, metrics, options)
        about, given = prepared.about, prepared.arguments
        request = save_request(
            "save",
            given.pop("sharded_strategy", None),
            given.pop("common_strategy", None),
            given.pop("options", None),
            given,
            {"validate_access_integrity": given.pop("validate_access_integrity", True)},
            state=state,
            checkpoint_dir=prepared.place.place,
            ranks=self._hurried(Ranks.of(self._group)),
            preprocess=given.pop("preprocess_common_before_consistancy_check", None),
            content_metadata=given.pop("content_metadata", None),
            error=prepared.error,
        )
        with self._steps.using(prepared.used):
            session, _ = run_save(request)
        self._served(about.step)
        self._steps.damaged.discard(about.step)
        if self._is_first:
            self._later(lambda: self._steps.note_save(self.policy, about, session.record))
        return dict(session.record)

    def async_save(
        self,
        step: int,
        state: ShardedStateDict,
        *,
        metrics: Mapping[str, Any] | None = None,
        **options: Unpack[AsyncSaveArguments],
    ) -> AsyncSave:
        """Save a step asynchronously, see :func:`shardstore.async_save`. Every rank calls it. Rank
        0 deletes old steps after the commit.

        Returns:
            The handle of the save.

        Raises:
            ValueError, TypeError, CheckpointingException: see :meth:`save`. The handle raises
                errors of the background.
        """
        prepared = self._prepare(step, state, metrics, options)
        about = prepared.about
        with ExitStack() as stack:
            stack.enter_context(self._steps.using(prepared.used))
            handle = async_save(
                state,
                prepared.place.place,
                **prepared.arguments,
                process_group=self._group,
                _error=prepared.error,
            )
            used = stack.pop_all()
        self._handle = handle
        self._served(about.step)
        first = self._is_first  # the process group may be destroyed when the job runs

        def job() -> None:
            with used:
                handle.wait()
            # Not handle.exception(), which would count as asked by the program.
            if handle._end.exception() is not None:
                self._current = None if self._current == about.step else self._current
                return
            self._steps.damaged.discard(about.step)
            if first:
                self._steps.note_save(self.policy, about, handle._end.result())

        self._later(job)
        return handle

    def _prepare(
        self,
        step: int,
        state: ShardedStateDict,
        metrics: Mapping[str, Any] | None,
        options: Mapping[str, Any],
    ) -> _Prepared:
        given = dict(options)
        prepared = _Prepared(self._steps.place(0), StepInfo(0), given)
        try:
            number = number_of(step)
            place = prepared.place = self._steps.place(number)
            prepared.about = StepInfo(number)
            base = given.get("base", getattr(given.get("options"), "base", None))
            bases = [] if base is None else [Location.of(base)]
            names = [one.name for one in (place, *bases) if one == self.root.child(one.name)]
            prepared.used = {n for n in map(self._steps.step_of, names) if n is not None}
            if number in self._steps.damaged:
                given["overwrite"] = True
            content = given.get("content_metadata")
            if content is None:
                of_state = state.get(CONTENT_METADATA_KEY) if isinstance(state, dict) else None
                content = of_state if isinstance(of_state, dict) else {}
            if self._is_first and isinstance(content, dict):  # else save() raises the error
                saved = self._steps.time_of_save()
                prepared.about = StepInfo(number, True, _metrics_of(metrics), saved=saved)
                given["content_metadata"] = {**content, MARK: prepared.about.mark()}
            given["preprocess_common_before_consistancy_check"] = _without_mark(
                given.get("preprocess_common_before_consistancy_check")
            )
        except (TypeError, ValueError) as problem:
            prepared.error = problem
        self._open()
        if self.policy.deletes and len(self._jobs) == BEHIND:
            wait([self._jobs[0]], BEHIND_S)
        self._began = monotonic()
        return prepared

    def _hurried(self, ranks: Ranks) -> Ranks:
        """Return the ranks of a save, with a shorter deadline if a notice asked for it."""
        if self._ends is None:
            return ranks
        left = max(self._ends - monotonic(), LEAST_GRACE_S)
        return replace(ranks, deadline_s=min(ranks.deadline_s, left))

    def _served(self, step: int) -> None:
        """Forget the notice that :meth:`should_save` told: the save of a step served it."""
        self._current, self._ends = step, None
        if self.notice is not None:
            self._notices.clear(self.notice)

    # -- restoring -----------------------------------------------------------------------------

    def restore(
        self,
        state: ShardedStateDict,
        step: int | None = None,
        *,
        verify_first: bool = False,
        discard_later: bool = False,
        progress: ProgressArgument = None,
        **options: Any,
    ) -> Restored | None:
        """Load the newest undamaged step, see :meth:`latest`.

        Every rank calls it and waits for all others, and for the last :meth:`async_save`. Every
        loaded byte is verified. If verification fails on any rank, all ranks log a warning that
        names the damage, and load the step before. Until the call returns, and after an error, the
        given tensors may hold a part of a damaged step.

        Args:
            state: see :func:`shardstore.load`.
            step: load only this step; damage is then an error.
            verify_first: rank 0 first verifies the whole checkpoint; the others wait for it
                (``SHARDSTORE_DEADLINE_S`` seconds at most).
            discard_later: after the load, delete the steps with higher numbers that managers saved.
                Rank 0 decides and deletes; the others wait for it (``SHARDSTORE_DEADLINE_S``).
                Otherwise these steps stay, and rank 0 logs a warning: until a step is saved, a run
                that restores without a step continues from them, and saving one of their numbers
                needs ``overwrite=True``.
            progress: see :func:`shardstore.save`.
            **options: see :func:`shardstore.load`.

        Returns:
            The restored step; ``None`` if there are no steps and ``step`` was not given.

        Raises:
            NotACheckpointError: ``step`` does not exist.
            DamagedCheckpointError: ``step`` is damaged, or all steps are damaged.
            StorageError: a later step could not be deleted; the state is loaded.
            CheckpointingException: see :func:`shardstore.load`. Only damage makes the call go back
                to an earlier step; a shape mismatch or a store that fails does not.
        """
        self._open()
        if self._handle is not None:
            self._handle.wait()  # its step may be the newest
        steps, ranks, what = self._steps, Ranks.of(self._group), f"restoring from {self.root.url}"
        error: BaseException | None = None
        callback: ProgressCallback | None = None
        try:
            check_state(state)
            require_bool("verify_first", verify_first)
            require_bool("discard_later", discard_later)
            callback = callback_of(progress, shows=ranks.is_coordinator)
            step = None if step is None else number_of(step)
        except (TypeError, ValueError) as problem:
            error = problem
        check = partial(_damage_of, callback=callback) if verify_first else lambda _: None
        given = {"progress": callback, "process_group": self._group}
        infos: dict[int, StepInfo] = {}  # all steps, on rank 0
        damaged: dict[int, str] = {}
        tried = _candidates(steps, infos, step, check, damaged)

        with closing(tried):
            while True:
                chosen, text, discards = ranks.together(
                    what=what, error=error, decide=lambda _: (*next(tried), discard_later)
                )
                if chosen is None:
                    return None
                place = steps.place(chosen)
                if text is None:
                    try:
                        loaded = load(state, place.place, **given, **options)
                        break
                    except Exception as problem:
                        if step is not None or ranks.is_broken:
                            raise
                        text = _agree_on_damage(ranks, place, problem, what)
                        if text is None:
                            raise
                damaged[chosen] = text
                if ranks.together(what=what, decide=lambda _: is_checkpoint(place)):  # noqa: B023
                    steps.damaged.add(chosen)
                    text = f"step {chosen} below {self.root.url} is damaged and is skipped: {text}"
                    steps.log("damaged", chosen, text, logging.WARNING)
                else:
                    gone = "step %d below %s does not exist any more and is skipped: %s"
                    logger.warning(gone, chosen, self.root.url, text)
        self._current = chosen
        if discards:
            steps.discard_later(ranks, infos, chosen)
        elif ranks.is_coordinator:
            there = {number: info for number, info in infos.items() if number not in damaged}
            steps.warn_of_later(there, chosen)
        found = loaded[0] if isinstance(loaded, tuple) else loaded
        content = found.get(CONTENT_METADATA_KEY)
        if isinstance(content, dict) and [*content] == [MARK]:  # no key that the save was given
            del found[CONTENT_METADATA_KEY]
        skipped = tuple(number for number in damaged if number in steps.damaged)
        return Restored(chosen, loaded, place.url, skipped)

    def export(
        self, step: int, place: str | os.PathLike[str], **keywords: Unpack[ExportKeywords]
    ) -> None:
        """Write the tensors of a step as a model in Hugging Face's format, see
        :func:`shardstore.hf.export`. Every rank calls it, after the saves that it has begun.

        Args:
            step: a committed step.
            place: folder or URL of the model.
            **keywords: as for :func:`shardstore.hf.save`; ``storage_options`` are by default those
                of the manager.
        """
        self.wait()
        options = self.root.options
        keywords.setdefault("storage_options", options)
        hf.export(self.url(step), place, checkpoint_options=options, **keywords)

    # -- the background --------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all saves of this manager are committed and old steps are deleted. Any rank
        may call it; it waits for no other.

        Args:
            timeout: seconds; ``None``: no limit.

        Returns:
            Whether all background work has ended.
        """
        if self._handle is not None:
            self._handle.wait(0)  # an error in its own progress callback
        return not wait([*self._jobs], timeout).not_done

    def close(self) -> None:
        """Do :meth:`wait` without a limit, and receive no more signals. The manager can still be
        used afterwards."""
        self.wait()
        self._notices.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _is_first(self) -> bool:
        """Whether this is rank 0, the only rank that deletes steps."""
        return group_rank(self._group) == 0

    def _open(self) -> None:
        """Sweep the remains of dead saves, once, or again if that failed."""
        if self._swept or not self._is_first:
            return
        self._swept = True

        def job() -> None:
            for url in self._steps.sweep(self._sweep_after):
                logger.info("removed the remains of an unfinished save: %s", url)

        self._later(job)

    def _later(self, job: Callable[[], None]) -> None:
        """Run a job in the background, after earlier jobs. Log its error."""

        def run() -> None:
            try:
                job()
            except Exception as error:
                self._swept &= not isinstance(error, errors.StorageError)  # of a deletion too
                logger.warning(
                    f"background work on {self.root.url} failed; it is repeated after the next "
                    f"save: {type(error).__name__}: {error}"
                )

        try:
            self._jobs.append(self._background.submit(run))
        except RuntimeError:  # at interpreter exit, no more threads can be started
            run()


def _candidates(
    steps: Steps,
    infos: dict[int, StepInfo],
    wanted: int | None,
    check: Callable[[Location], str | None],
    damaged: Mapping[int, str],
) -> Generator[tuple[int | None, str | None], None, None]:
    """Yield the steps to load, on rank 0: only ``wanted``, or all of them, the newest first (see
    :func:`branches`), each with the result of ``check``. A step is not deleted until the next is
    requested. Yield ``None`` if there are no steps.

    Args:
        steps: the steps of the run.
        infos: receives the descriptions of all steps.
        wanted: number of the only step to consider.
        check: verifies a step; returns a text of its damage.
        damaged: the yielded steps that are damaged, with texts; the caller adds them.

    Raises:
        NotACheckpointError: the wanted step does not exist.
        DamagedCheckpointError: every step is damaged.
    """
    tried, is_gone, left = set[int](), True, list[int]()
    while is_gone or left:
        if is_gone:  # there may be newer ones
            infos.clear()
            infos.update(steps.infos())
            current, abandoned = branches(infos)
            order = [*reversed(current), *reversed(abandoned)] if wanted is None else [wanted]
            left = [step for step in order if step not in tried]
            if not left:
                break
        step = left.pop(0)
        tried.add(step)
        with steps.using([step]):
            place = steps.place(step)
            if step in infos and is_checkpoint(place):
                yield step, check(place)
        is_gone = step in infos and not is_checkpoint(place)  # since it was listed
    if damaged:
        texts = "; ".join(f"step {step}: {damaged[step]}" for step in list(damaged)[:SHOWN])
        raise errors.DamagedCheckpointError(
            f"no restorable checkpoint below {steps.root.url}: every step is damaged ({texts}). "
            "Verify older copies, or pass a different root to start over",
            url=steps.root.url,
        )
    if wanted is not None:
        raise errors.NotACheckpointError(
            f"there is no step {wanted} below {steps.root.url}; existing steps: "
            f"{', '.join(map(str, infos)) or 'none'}",
            url=steps.place(wanted).url,
        )
    yield None, None


def _agree_on_damage(ranks: Ranks, place: Location, problem: Exception, what: str) -> str | None:
    """Return a text of the damage if damage is the only cause of a failed load, else ``None``.

    Every rank calls it with its error of the load, and waits for all others. It returns the same
    text on every rank.

    Args:
        ranks: all ranks.
        place: the checkpoint that they tried to load.
        problem: error of the load on this rank.
        what: the operation, for error texts.
    """
    if isinstance(problem, LookupError | TypeError | ValueError):
        # A flipped bit in a root document without a checksum may change a key, shape or type.
        try:
            StoredCheckpoint(place).check_root()
        except errors.CheckpointingException as error:
            problem = error
    texts = causes(
        ranks, problem, (errors.DamagedCheckpointError, errors.NotACheckpointError), what
    )
    return "; ".join(texts) or None


def _damage_of(place: Location, callback: ProgressCallback | None) -> str | None:
    """Verify a checkpoint and return a text of its damage, ``None`` if there is none."""
    findings: list[Finding] = []
    try:
        verify(StoredCheckpoint(place), findings.append, progress=callback)
    except (errors.DamagedCheckpointError, errors.NotACheckpointError) as error:
        return str(error)
    texts = [finding.message for finding in findings if finding.severity == "damage"]
    return first_of(texts, SHOWN) or None


_managers: weakref.WeakSet[CheckpointManager] = weakref.WeakSet()


def _begin_all() -> None:
    forget_signals()
    for manager in list(_managers):
        manager._begin()


os.register_at_fork(after_in_child=_begin_all)
