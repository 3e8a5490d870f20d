"""Asynchronous requests, and a queue that finalises them on all ranks.

A request runs in a **thread** of this process, because TensorStore does not survive a fork and does
its work outside of the interpreter lock. It needs no collective operation. When the trainer polls,
the queue finalises requests that are done on **every** rank. A poll raises an error of any rank on
every rank.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sys
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

from shardstore.distributed.groups import described, failures_on, group_rank, largest, listed
from shardstore.errors import CheckpointingException, RanksError
from shardstore.storage.movers.device import on_current_device
from shardstore.storage.runtime.parallel import start_thread

logger = logging.getLogger(__name__)

T = TypeVar("T")

_QUEUES = (
    "nvidia_resiliency_ext.checkpointing.async_ckpt.core",
    "megatron.core.dist_checkpointing.strategies.async_utils",
)
"""Modules of queues that have worker processes."""


class AsyncRequest(NamedTuple):
    """The rest of a save: a function for the background, and functions that finalise the save.

    Attributes:
        async_fn: runs in the background; it must not use collectives. None if this rank has nothing
            to write.
        async_fn_args: its positional arguments.
        finalize_fns: called in order, without arguments, on every rank, after ``async_fn`` is done
            on all of them; they may use collectives.
        async_fn_kwargs: its keyword arguments.
        preload_fn: called in the caller's thread when the request is scheduled, for example to copy
            device data. Its result replaces ``async_fn_args[1]``.
        is_frozen: whether further finalisation functions are refused.
        call_idx: number of the request in its queue, set when it is scheduled.
    """

    async_fn: Callable[..., object] | None
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], object]]
    async_fn_kwargs: dict[str, Any] = {}  # noqa: RUF012 (never written to; the known default)
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], object]) -> None:
        """Append a function to run after the others at finalisation.

        Args:
            fn: takes no arguments.

        Raises:
            RuntimeError: the request is frozen, because it has been scheduled.
        """
        if self.is_frozen:
            raise RuntimeError(
                "This AsyncRequest is frozen (it has been scheduled): "
                "add finalization functions before that"
            )
        self.finalize_fns.append(fn)

    def execute_sync(self) -> None:
        """Run all functions in the caller's thread. Every rank calls it and waits for all others.

        Raises:
            RanksError: the function failed on some rank; raised on every rank.
        """
        error: BaseException | None = None
        try:
            staged(self)()
        except Exception as caught:
            error = caught
        _agree("running", True, error, self.call_idx)
        self.execute_finalize_fns()

    def execute_finalize_fns(self, validate_matching_call_idx: bool = True) -> int:
        """Run the finalisation functions, and return :attr:`call_idx`; every rank calls it.

        Args:
            validate_matching_call_idx: check that all ranks succeeded and finalise the same call.
        """
        error: BaseException | None = None
        try:
            for finalize_fn in self.finalize_fns:
                finalize_fn()
        except Exception as caught:
            error = caught
        _agree("finalising", True, error, self.call_idx, not validate_matching_call_idx)
        return self.call_idx

    def freeze(self) -> AsyncRequest:
        """Return the request, closed to further finalisation functions.

        Queues of other packages call it before they run the function in another process. If the
        function is an :class:`OwnProcessCall`, its work starts here, in this process.
        """
        if isinstance(self.async_fn, OwnProcessCall):
            self.async_fn.start()
        return self._replace(is_frozen=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return _request_elsewhere, (*self[:2], [], *self[3:])


def _request_elsewhere(*values: Any) -> Any:
    """Rebuild a request in a worker process, as the class that the queue there expects."""
    known = (sys.modules.get(name) for name in _QUEUES)
    kinds = [module.AsyncRequest for module in known if module is not None]
    return (kinds or [AsyncRequest])[0](*values)


class OwnProcessCall:
    """A function that always runs in the process that made it.

    The function needs the memory of this process. If a queue calls it in another process (forked,
    or spawned with a pickle), the call there only waits until the function has ended here, or this
    process has.

    Args:
        function: called once; must not raise an error.
    """

    def __init__(self, function: Callable[[], object]) -> None:
        self._function, self._pid = function, os.getpid()
        self._done: Future[None] | None = None
        self._path = ""

    def start(self) -> None:
        """Begin in a thread, and hold a file locked until the function is done."""
        if self._done is not None:
            return
        file, self._path = tempfile.mkstemp(prefix="shardstore-save-")
        fcntl.lockf(file, fcntl.LOCK_EX)  # a forked process does not inherit the lock

        def run() -> None:
            try:
                self._function()
            finally:
                os.unlink(self._path)
                os.close(file)

        self._done = in_background(run)

    def join(self) -> None:
        """Wait until the function has ended, if it was started."""
        if self._done is not None:
            self._done.result()

    def __call__(self) -> None:
        """Run the function, or wait until it has ended."""
        if os.getpid() != self._pid:
            _wait_for(self._path)
        elif self._done is None:
            self._function()
        else:
            self.join()

    def __reduce__(self) -> tuple[Any, ...]:
        self.start()
        return partial, (_wait_for, self._path)


def _wait_for(path: str) -> None:
    """Wait until another process unlocks a file."""
    with suppress(FileNotFoundError), open(path, "r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)


class AsyncCallsQueue:
    """Runs requests in the background and finalises them in the order of their scheduling.

    Every rank must schedule the same requests and poll at the same points of its program.

    Args:
        persistent: run one request after the other; otherwise several can run at the same time.
    """

    def __init__(self, persistent: bool = False) -> None:
        self.persistent = persistent
        self.async_calls: deque[tuple[AsyncRequest, Future[object]]] = deque()
        self.call_idx = -1
        weakref.finalize(self, _tell_uncommitted, self.async_calls, os.getpid())

    @staticmethod
    def warmup_persistent_caller(*args: object, **kwargs: object) -> None:
        """Do nothing. In Megatron-Core it starts a worker process; this queue has none."""

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Run ``preload_fn`` in this thread, start the request in the background, and return.

        Every rank calls it; it waits for no other.

        Args:
            async_request: the request. It is frozen: later additions are refused.

        Returns:
            The number of the request in this queue, from 0. The next poll raises an error of
            ``preload_fn``, on every rank.
        """
        request = async_request._replace(is_frozen=True, call_idx=self.call_idx + 1)
        after = self.async_calls[-1][1] if self.persistent and self.async_calls else None
        future: Future[object] = Future()
        try:
            future = in_background(staged(request), after=after)
        except Exception as error:
            # Raised here, only this rank would see it, and the others' next poll would hang.
            future.set_exception(error)
        self.async_calls.append((request, future))
        self.call_idx = request.call_idx
        return request.call_idx

    def maybe_finalize_async_calls(
        self, blocking: bool = False, no_dist: bool = False
    ) -> list[int]:
        """Finalise the requests that are done on every rank, oldest first.

        Every rank calls it and waits for the others (one reduction of a few integers per request),
        unless ``no_dist`` or without a process group.

        Args:
            blocking: wait for all running requests.
            no_dist: check only this rank; for callers that know that the others agree.

        Returns:
            Numbers of the requests that this call finalised.

        Raises:
            RanksError: a request failed on some rank, in the background or at finalisation. Every
                rank raises it; it names the ranks and causes. The request is dropped, and the next
                poll continues with the request after it.
        """
        finalized: list[int] = []
        while self.async_calls:
            request, future = self.async_calls[0]
            done = blocking or future.done()
            error = future.exception() if done else None
            self.async_calls.popleft()
            if not _agree("running", done, error, request.call_idx, no_dist):
                self.async_calls.appendleft((request, future))
                break
            # Requests of other classes too are finalised in this way.
            finalized.append(AsyncRequest.execute_finalize_fns(request, not no_dist))
        return finalized

    def get_num_unfinalized_calls(self) -> int:
        """Return the number of requests that are scheduled and not finalised."""
        return len(self.async_calls)

    def close(self, abort: bool = False) -> None:
        """Finalise all requests. Every rank calls it.

        Args:
            abort: finalise nothing and wait for no rank. A running request continues, but its save
                is never committed.

        Raises:
            RanksError: the first error of a request, after all requests have ended.
        """
        first_error: CheckpointingException | None = None
        while self.async_calls and not abort:
            try:
                self.maybe_finalize_async_calls(blocking=True)
            except CheckpointingException as error:
                first_error = first_error or error
        for _, future in self.async_calls:
            future.cancel()
        self.async_calls.clear()
        if first_error is not None:
            raise first_error


def _tell_uncommitted(calls: Collection[tuple[AsyncRequest, object]], process: int) -> None:
    """Log that the saves of a queue were not finalised, when it or its program ends."""
    lost = sum(bool(request.finalize_fns) for request, _ in calls)
    if lost and os.getpid() == process:
        logger.error(
            "%d asynchronous save(s) are not committed, because nobody finalised them: call "
            "maybe_finalize_async_calls(blocking=True) or close() of the queue on every rank",
            lost,
        )


class AsyncCaller:
    """Runs requests in the background without finalising them.

    Every rank schedules the same requests. :class:`AsyncCallsQueue` finalises them too.
    """

    _persistent = True

    def __init__(self) -> None:
        self._queue = AsyncCallsQueue(self._persistent)

    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        """Call ``preload_fn`` and start the request in the background."""
        self._queue.schedule_async_request(async_req._replace(finalize_fns=[]))

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """Return whether the oldest unfinished call is done, on every rank unless ``no_dist``.

        Args:
            blocking: wait for the call.
            no_dist: check only this rank; otherwise every rank calls this and waits for the others.

        Raises:
            RanksError: the call failed on a checked rank.
        """
        queue = self._queue
        return not queue.async_calls or bool(queue.maybe_finalize_async_calls(blocking, no_dist))

    def sync_all_async_calls(self, is_alive: int) -> bool:
        """Return whether no rank has a call in flight; every rank calls it and waits for the
        others.

        Args:
            is_alive: 1 if this rank's call is in flight, else 0.
        """
        return _agree("running", not is_alive, None, 0)

    def close(self, abort: bool = False) -> None:
        """End the thread, see :meth:`AsyncCallsQueue.close`."""
        self._queue.close(abort)


class TemporalAsyncCaller(AsyncCaller):
    """Runs each request in its own thread, which ends with the request."""

    _persistent = False


class PersistentAsyncCaller(AsyncCaller):
    """Runs requests in sequence, until :meth:`close`."""


def staged(request: AsyncRequest) -> Callable[[], object]:
    """Call ``preload_fn``, and return the background function with its arguments."""
    if request.async_fn is None:
        return lambda: None
    args = tuple(request.async_fn_args)
    if request.preload_fn is not None:
        if len(args) < 2:
            raise CheckpointingException(
                f"An AsyncRequest with a preload_fn needs at least two positional arguments, "
                f"because the result of preload_fn replaces the second; got {len(args)}"
            )
        args = (args[0], request.preload_fn(), *args[2:])
    return partial(request.async_fn, *args, **request.async_fn_kwargs)


def in_background(
    function: Callable[[], T], *, after: Future[Any] | None = None, daemon: bool = False
) -> Future[T]:
    """Call a function in a thread of its own, with the current device of the caller's thread.

    Args:
        function: the function.
        after: what must have ended before.
        daemon: whether an exiting interpreter does not wait for the thread.
    """
    future: Future[T] = Future()

    def work() -> None:
        if after is not None:
            wait([after])
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

    start_thread(on_current_device(work), name="shardstore-save", daemon=daemon, yields=True)
    return future


def _agree(
    doing: str, done: bool, error: BaseException | None, call_idx: int, no_dist: bool = False
) -> bool:
    """Return whether a call is done on every rank; raise an error on every rank if it failed.

    It reduces four integers. After a failure it also gathers the error texts.
    """
    rank = group_rank(None)
    state = [int(not done), int(error is not None), call_idx, -call_idx]
    in_flight, failed, newest, minus_oldest = state if no_dist else largest(state)
    if failed:
        alone = {} if error is None else {rank: described(error)}
        failures = alone if no_dist else failures_on(error)
        raise RanksError(
            f"Asynchronous save, {doing} call {call_idx}, failed on {listed(failures)}. "
            f"It was not committed; the checkpoint before it is unchanged.",
            failures=failures,
        ) from error
    if newest != -minus_oldest:
        raise RanksError(
            f"The ranks poll different asynchronous calls: rank {rank} polls call {call_idx}, "
            f"others calls {-minus_oldest} to {newest}. Schedule and poll the same requests "
            f"on every rank."
        )
    return not in_flight
