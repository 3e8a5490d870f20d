"""Saving in the background with a handle: the simple form of an asynchronous save.

Each save has one thread, which writes from a copy of the state and then commits together with the
same threads of the other ranks, over a gloo group that nobody else uses. So the trainer has nothing
to poll for the save to complete, no rank waits in a collective of the trainer's, and a failure of
any rank reaches the handle of every rank.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Unpack

import torch

from shardstore.errors import ArgumentError, SaveInProgressError
from shardstore.mapping import CommonStateDict, ShardedStateDict, StateDict
from shardstore.saving.run import SaveCall
from shardstore.saving.session import SaveSession
from shardstore.serialization import begin_save
from shardstore.storage.movers.parallel import yield_to_others
from shardstore.storage.options import SaveKeywords, options_of
from shardstore.strategies.async_utils import AsyncRequest
from shardstore.strategies.base import SaveCommonStrategy, SaveShardedStrategy

__all__ = ["AsyncSave", "async_save"]

logger = logging.getLogger(__name__)

RANKS_PURPOSE = "background"
ABORT_WAIT_S = 10.0
"""Seconds that an exiting process gives an aborted save to tell the other ranks."""

_latest: AsyncSave | None = None
"""The only one that may be running."""


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
    overlap_staging: bool = False,
    when_busy: Literal["wait", "refuse"] = "wait",
    at_exit: Literal["wait", "abort"] = "wait",
    _error: BaseException | None = None,
    **options: Unpack[SaveKeywords],
) -> AsyncSave:
    """Save a sharded state dict while training goes on.

    Called by every rank; each waits for all others once, before anything is copied (so that wrong
    input on one rank is an error on all). When it returns the state may be changed, unless
    ``overlap_staging``. Writing, the meeting of all ranks and the commit happen in the background;
    a trainer that never looks at the handle gets its checkpoint too, and failures in its log. Wait
    for the handle before ``destroy_process_group``, which would take the ranks from each other.

    Args:
        sharded_state_dict: see :func:`shardstore.save`, also for the arguments that are not
            described here.
        sharded_strategy: must be one that can save asynchronously, as the default.
        common_strategy: how the rest is stored; it is written before the call returns.
        overlap_staging: return at once and copy in the background; call
            :meth:`AsyncSave.wait_staged` before the state is changed.
        when_busy: while the save before this one runs, wait for it, or refuse with an error.
        at_exit: an interpreter that exits waits for the save, or aborts it (nothing is committed).
        **options: how the checkpoint is written, as for :func:`shardstore.save`. ``progress`` is
            called from the background.
        _error: an earlier error of this rank, which every rank raises.

    Returns:
        A handle on the save.

    Raises:
        SaveInProgressError: the save before this one still runs on some rank, and ``when_busy`` is
            ``"refuse"``; raised on every rank.
        ArgumentError: ``when_busy`` or ``at_exit`` is none of the choices.
        CheckpointingException: as :func:`shardstore.save`, for what is found before the background
            begins: the target exists, the input is wrong on some rank.
    """
    global _latest
    error = _error
    for name, given, choices in (
        ("when_busy", when_busy, ("wait", "refuse")),
        ("at_exit", at_exit, ("wait", "abort")),
    ):
        if given not in choices:  # met by all ranks together
            error = error or ArgumentError(
                f"{name}={given!r} must be {' or '.join(map(repr, choices))}"
            )
    chosen, error = options_of(
        "async_save",
        options,
        error=error,
        validate=validate_access_integrity,
        overlap_staging=overlap_staging,
    )
    if _latest is not None and not _latest.done():
        if when_busy != "refuse":
            _latest.wait()
        else:
            error = SaveInProgressError(
                f"the asynchronous save to {_latest.url} is still running; wait for its handle, "
                "save less often, or pass when_busy='wait'",
                url=_latest.url,
            )
    call = SaveCall(
        sharded_state_dict=sharded_state_dict,
        checkpoint_dir=checkpoint_dir,
        options=chosen,
        sharded_strategy=sharded_strategy,
        common_strategy=common_strategy,
        async_sharded_save=True,
        preprocess_common_before_consistancy_check=preprocess_common_before_consistancy_check,
        content_metadata=content_metadata,
        error=error,
        later=RANKS_PURPOSE,
    )
    session, request = begin_save(call)
    assert request is not None
    _latest = AsyncSave(session, request, at_exit)
    return _latest


class AsyncSave:
    """A save in the background, on this rank. Made by :func:`async_save`.

    No method talks to other ranks: any rank may call any of them at any time. In a child forked
    while it runs, a handle has ended with a :class:`SaveInProgressError`: the save is the parent's.

    Attributes:
        url: where the checkpoint shall be.
    """

    def __init__(self, session: SaveSession, request: AsyncRequest, at_exit: str) -> None:
        self.url = session.target.url
        self._running: tuple[SaveSession, AsyncRequest] | None = (session, request)
        self._record: dict[str, Any] = {}
        self._error: BaseException | None = None
        self._finished = threading.Event()
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        # A daemon: exit functions run while it does, and decide whether to wait for it.
        self._thread = threading.Thread(target=self._run, name="shardstore-save", daemon=True)
        self._aborts = at_exit == "abort"
        self._thread.start()

    def _run(self) -> None:
        assert self._running is not None
        session, request = self._running
        yield_to_others()
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            if request.async_fn is not None:
                request.async_fn(*request.async_fn_args, **request.async_fn_kwargs)
            for finalize in request.finalize_fns:
                finalize()
            self._record = session.record
        except BaseException as error:
            self._error = error
            logger.error("asynchronous save to %s failed: %s", self.url, error)
        finally:
            self._running = None  # a handle may be kept for long
            self._finished.set()

    def done(self) -> bool:
        """Whether the save has ended: committed on all ranks, or failed on all ranks."""
        return self._finished.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end of the save.

        Args:
            timeout: seconds; ``None``: as long as it takes. The ranks wait for each other until the
                deadline (``SHARDSTORE_DEADLINE_S``), so that it does end.

        Returns:
            Whether it has ended.
        """
        return self._finished.wait(timeout)

    def wait_staged(self, timeout: float | None = None) -> bool:
        """Wait until the state may be changed; to be called before the next optimizer step.

        Device tensors cost the caller no waiting: what it queues on its current stream afterwards
        waits for the copy on the device.

        Args:
            timeout: seconds; ``None``: as long as it takes.

        Returns:
            Whether the state may be changed. It may after a failure, too: nothing reads it then.
        """
        running = self._running
        staging = None if running is None else running[0].staging
        return self.done() or staging is None or staging.wait(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Why the save failed; ``None`` if it succeeded.

        Args:
            timeout: seconds to wait for its end.

        Raises:
            TimeoutError: it has not ended.
        """
        if not self.wait(timeout):
            raise TimeoutError(f"the save to {self.url} still runs after {timeout} s")
        return self._error

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """What was committed.

        Args:
            timeout: seconds to wait for its end.

        Returns:
            The commit record, the same on every rank: bytes, chunks, seconds, time.

        Raises:
            TimeoutError: it has not ended.
            CheckpointingException: it failed; on the rank that failed its own error, on the others
                a :class:`RanksError` that names that rank and the cause.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return dict(self._record)

    def abort(self) -> None:
        """Stop writing; nothing is committed, on any rank. A commit under way is not stopped."""
        running = self._running
        if running is not None and not self.done():
            running[0].abort()

    def _leave(self) -> None:
        """In a forked child: the thread that saves is the parent's, and so is the save."""
        if self.done():
            return
        self._error = SaveInProgressError(
            f"the asynchronous save to {self.url} is that of process {os.getppid()}, which this "
            "process was forked from; wait for it there",
            url=self.url,
        )
        self._finished = threading.Event()  # a thread may have held the old one's lock
        self._finished.set()

    def _at_exit(self) -> None:
        if self._aborts:
            self.abort()
        self._finished.wait(ABORT_WAIT_S if self._aborts else None)


def _leave_latest() -> None:
    # The handle is kept: the save's memory, perhaps a device driver's, is not the child's to free.
    if _latest is not None:
        _latest._leave()


def _end_latest() -> None:
    if _latest is not None:
        _latest._at_exit()


os.register_at_fork(after_in_child=_leave_latest)
atexit.register(_end_latest)
# The module of executors is imported before: the newest exit function is called first.
assert issubclass(ThreadPoolExecutor, Executor)
with suppress(AttributeError, RuntimeError):  # not in the documented interface
    threading._register_atexit(_end_latest)  # type: ignore[attr-defined]
