"""Asynchronous saves with a handle.

Each save has one thread per rank. It writes a copy of the state and then commits together with the
threads of the other ranks, over a separate gloo group. So the trainer need not poll, the save does
not use the trainer's process groups, and the handle of every rank gets an error of any rank.
"""

from __future__ import annotations

import atexit
import gc
import io
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, thread  # noqa: F401 (registers an exit function)
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, Unpack

from shardstore.distributed.coordinator import Ranks
from shardstore.errors import ArgumentError, SaveInProgressError
from shardstore.mapping import CommonStateDict, ShardedStateDict, StateDict
from shardstore.saving.run import run_save
from shardstore.saving.staging import Staging
from shardstore.serialization import save_request
from shardstore.storage.checkpoint import latest_save
from shardstore.storage.options import SaveKeywords, SaveOptions
from shardstore.storage.stores.location import Location
from shardstore.strategies.async_utils import AsyncRequest, in_background, staged
from shardstore.strategies.base import SaveCommonStrategy, SaveShardedStrategy

logger = logging.getLogger(__name__)

RANKS_PURPOSE = "background"
ABORT_WAIT_S = 10.0
"""Seconds that an exiting process waits for an aborted save to inform the other ranks."""

_latest: AsyncSave | None = None
"""The latest save; only this one may be running."""


def async_save(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | Path,
    sharded_strategy: SaveShardedStrategy | tuple[str, int] | None = None,
    common_strategy: SaveCommonStrategy | tuple[str, int] | None = None,
    *,
    validate_access_integrity: bool = True,
    preprocess_common_before_consistancy_check: Callable[[CommonStateDict], StateDict]
    | None = None,
    content_metadata: dict[str, Any] | None = None,
    verify_integrity: bool = False,
    overlap_staging: bool = False,
    when_busy: Literal["wait", "refuse"] = "wait",
    at_exit: Literal["wait", "abort"] = "wait",
    process_group: Any = None,
    options: SaveOptions | None = None,
    _error: BaseException | None = None,
    **keywords: Unpack[SaveKeywords],
) -> AsyncSave:
    """Save a sharded state dict while training continues.

    Every rank calls it and waits for all others once, before anything is copied, so that wrong
    input on one rank is an error on all. After the call the state may be changed, unless
    ``overlap_staging``. A thread writes the copy and commits together with the other ranks. The
    save completes even if the program does not use the handle. If the last save of a program failed
    and the program never asked its handle for the error, the program prints it and exits with 1.
    ``destroy_process_group`` may be called before the commit: the save keeps its connections.

    Args:
        sharded_state_dict: see :func:`shardstore.save`, also for the arguments that are not
            described here.
        sharded_strategy: must support asynchronous saves, as the default does.
        common_strategy: how the other values are stored; they are written before the call returns.
        overlap_staging: return at once and copy in the background. Call
            :meth:`AsyncSave.wait_staged` before changing the state.
        when_busy: what to do if the previous save is still running: ``"wait"`` for it, or
            ``"refuse"`` with an error.
        at_exit: what an exiting interpreter does: ``"wait"`` for the save, or ``"abort"`` it, so
            that nothing is committed.
        process_group: the ranks that save together, as for :func:`shardstore.save`. A rank has one
            save in progress, of whichever group.
        options: how the checkpoint is written, as for :func:`shardstore.save`. ``progress`` is
            called from the thread.
        _error: an earlier error of this rank; every rank raises it.
        **keywords: single options, as for :func:`shardstore.save`.

    Returns:
        The handle of the save on this rank.

    Raises:
        SaveInProgressError: the previous save is still running on some rank, and ``when_busy`` is
            ``"refuse"``; raised on every rank.
        ArgumentError: ``when_busy`` or ``at_exit`` has another value.
        CheckpointingException: as :func:`shardstore.save`, for errors that are found before the
            copy: the target exists, or the input is wrong on some rank.
    """
    global _latest
    request = save_request(
        "async_save",
        sharded_strategy,
        common_strategy,
        options,
        keywords,
        {
            "validate_access_integrity": validate_access_integrity,
            "overlap_staging": overlap_staging,
        },
        state=sharded_state_dict,
        checkpoint_dir=checkpoint_dir,
        ranks=Ranks.of(process_group),
        background=RANKS_PURPOSE,
        preprocess=preprocess_common_before_consistancy_check,
        content_metadata=content_metadata,
        verify_integrity=verify_integrity,
        error=_error or _latest_error(when_busy, at_exit),
    )
    session, rest = run_save(request)
    assert rest is not None
    _latest = AsyncSave(session, rest, at_exit)
    return _latest


class Running(Protocol):
    """The part of a save that a handle uses, see
    :class:`~shardstore.saving.session.SaveSession`."""

    target: Location
    record: dict[str, Any]

    @property
    def staging(self) -> Staging | None:
        """The copy of the state, if it is made in the background."""

    def abort(self) -> None:
        """Stop writing."""


def begin_background(begin: Callable[[], tuple[Running, AsyncRequest]]) -> AsyncSave:
    """Begin a save of another format after the asynchronous save before it has ended, and return
    its handle. Every rank calls it.

    Args:
        begin: copies this rank's part of the state, and returns the save and the rest of it.
    """
    global _latest
    if _latest is not None:
        _latest.wait()
    _latest = AsyncSave(*begin(), "wait")
    return _latest


def _latest_error(when_busy: str, at_exit: str) -> Exception | None:
    """Wait for the latest save, or return the error that it is still running. Return the error in
    an argument too."""
    if when_busy not in ("wait", "refuse"):
        return ArgumentError(f"when_busy={when_busy!r} must be 'wait' or 'refuse'")
    if at_exit not in ("wait", "abort"):
        return ArgumentError(f"at_exit={at_exit!r} must be 'wait' or 'abort'")
    if _latest is None or _latest.done():
        return None
    if when_busy == "refuse":
        return SaveInProgressError(
            f"the asynchronous save to {_latest.url} is still running; wait for its handle, save "
            "less often, or pass when_busy='wait'",
            url=_latest.url,
        )
    _latest.wait()
    return None


class AsyncSave:
    """Handle of an asynchronous save on this rank. :func:`async_save` returns it.

    No method communicates with other ranks: any rank may call any method at any time. In a child
    process forked during the save, the handle has failed with :class:`SaveInProgressError`, because
    the save belongs to the parent.

    Attributes:
        url: the target of the save.
    """

    def __init__(self, session: Running, request: AsyncRequest, at_exit: str) -> None:
        self.url = session.target.url
        self._session: Running | None = session
        self._is_seen = False
        self._thread: threading.Thread | None = None  # of the save: it calls the progress callback
        self._aborts = at_exit == "abort"
        # A daemon thread, so that the exit functions run and decide whether to wait for it.
        work = partial(self._run, session, request, staged(request))
        self._end = in_background(work, daemon=True)
        self._end.add_done_callback(self._free)
        latest_save.clear()
        latest_save[session.target] = self.wait

    def _run(
        self, session: Running, request: AsyncRequest, write: Callable[[], object]
    ) -> dict[str, Any]:
        self._thread = threading.current_thread()
        try:
            write()
            for finalize in request.finalize_fns:
                finalize()
            return session.record
        except BaseException as error:
            logger.error("asynchronous save to %s failed: %s", self.url, error)
            raise

    def _free(self, _: object) -> None:
        """Free the memory of the save, because a program may keep the handle."""
        self._session = None

    def done(self) -> bool:
        """Return whether the save has ended: committed on all ranks, or failed on all ranks."""
        return self._end.done()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end of the save.

        Args:
            timeout: seconds; ``None``: no limit. The save ends in any case, because ranks wait for
                each other at most ``SHARDSTORE_DEADLINE_S`` seconds.

        Returns:
            Whether the save has ended.

        Raises:
            SaveInProgressError: the save's own progress callback calls it, and would wait for
                itself.
        """
        if threading.current_thread() is self._thread and not self.done():
            raise SaveInProgressError(
                f"the asynchronous save to {self.url} has not ended while its progress callback "
                "runs: wait for it, and save or load its place, after the callback",
                url=self.url,
            )
        return not futures.wait([self._end], timeout).not_done

    def wait_staged(self, timeout: float | None = None) -> bool:
        """Wait until the state may be changed. Call it before the next optimizer step.

        For device tensors the call does not block: work that the caller then queues on its current
        stream waits for the copy on the device.

        Args:
            timeout: seconds; ``None``: no limit.

        Returns:
            Whether the state may be changed; also true after a failure.
        """
        session = self._session
        staging = None if session is None else session.staging
        return self.done() or staging is None or staging.wait(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end of the save and return its error, ``None`` if it succeeded.

        Args:
            timeout: seconds; ``None``: no limit.

        Raises:
            TimeoutError: the save has not ended within ``timeout``.
        """
        if not self.wait(timeout):
            raise TimeoutError(f"the save to {self.url} is still running after {timeout} s")
        self._is_seen = True
        return self._end.exception()

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait for the end of the save and return the commit record.

        Args:
            timeout: seconds; ``None``: no limit.

        Returns:
            The commit record, the same on every rank: bytes, chunks, seconds, time.

        Raises:
            TimeoutError: the save has not ended within ``timeout``.
            CheckpointingException: the save failed. The failed rank raises its own error, the
                others a :class:`RanksError` that names this rank and the cause.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return dict(self._end.result())

    def abort(self) -> None:
        """Stop writing, so that no rank commits. A commit that has begun is not stopped."""
        session = self._session
        if session is not None and not self.done():
            self._is_seen = True
            session.abort()


def _leave_latest() -> None:
    """End the handle in a forked child: the thread and the save belong to the parent."""
    # Keep the handle, because the child must not free memory of the save that a driver may own.
    save = _latest
    if save is None:
        return
    save._is_seen = True
    if save._session is not None:
        save._end = Future()  # a thread may have held the lock of the old one
        save._end.set_exception(
            SaveInProgressError(
                f"the asynchronous save to {save.url} belongs to the parent process "
                f"{os.getppid()}; wait for it there",
                url=save.url,
            )
        )


def _end_latest() -> None:
    if (save := _latest) is not None:
        if save._aborts:
            save.abort()
        ended = save.wait(ABORT_WAIT_S if save._aborts else None)
        # If the process group is gone, the thread frees connections, during which no process ends.
        if ended and save._thread not in (None, threading.current_thread()):
            save._thread.join(ABORT_WAIT_S)


def _tell_latest() -> None:
    """At exit, print the error if the program never asked for it, and set exit code 1."""
    save = _latest
    if save is None or not save.done() or save._is_seen:
        return
    if (error := save._end.exception()) is not None:
        exit_with_error(save.url, error)


def exit_with_error(url: str, error: BaseException) -> None:
    """Print the error of a save, and make the exiting interpreter return 1. An exit function calls
    it."""
    print(f"the asynchronous save to {url} failed:", file=sys.stderr)
    traceback.print_exception(error)
    for file in gc.get_objects():  # os._exit does not flush open files
        if isinstance(file, io.TextIOBase | io.BufferedIOBase):
            with suppress(Exception):
                file.flush()
    # The interpreter deletes this object after all exit functions and all other modules, because
    # it refers to none of them.
    leave = {"__del__": staticmethod(partial(os._exit, 1))}
    sys.shardstore_exit = type("Exit", (), leave)()  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_leave_latest)
atexit.register(_tell_latest)  # runs after _end_latest, because the last registered runs first
atexit.register(_end_latest)
# Exit functions run newest first, so that of executors must be registered before this.
with suppress(AttributeError, RuntimeError):  # the function is private
    threading._register_atexit(_end_latest)  # type: ignore[attr-defined]
