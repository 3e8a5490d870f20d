"""Asynchronous requests, and a queue that finalises them on all ranks.

A request runs in a **thread** of this process, because TensorStore does not survive a fork and does
its work outside of the interpreter lock. It needs no collective operation. When the trainer polls,
the queue finalises requests that are done on **every** rank. A poll raises an error of any rank on
every rank.
"""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from shardstore.distributed.groups import gathered, group_rank, largest
from shardstore.errors import CheckpointingException, RanksError
from shardstore.storage.movers.parallel import yield_to_others

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
            run(self, _staged_args(self))
        except Exception as caught:
            error = caught
        _agree(True, error, self.call_idx, no_dist=False)
        _finalize(self, no_dist=False)

    def execute_finalize_fns(self, validate_matching_call_idx: bool = True) -> int:
        """Run the finalisation functions, and return :attr:`call_idx`; every rank calls it.

        Args:
            validate_matching_call_idx: check that all ranks succeeded and finalise the same call.
        """
        _finalize(self, no_dist=not validate_matching_call_idx)
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

    def __init__(self, function: Callable[[], None]) -> None:
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

        executor = ThreadPoolExecutor(1, initializer=yield_to_others)
        self._done = executor.submit(run)
        executor.shutdown(wait=False)

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


class _Call(NamedTuple):
    """A scheduled request that has not been finalised."""

    request: AsyncRequest
    future: Future[None]


class AsyncCallsQueue:
    """Runs requests in the background and finalises them in the order of their scheduling.

    Every rank must schedule the same requests and poll at the same points of its program.

    Args:
        persistent: run all requests in sequence in one thread; otherwise each request has its own
            thread, and several can run at the same time.
    """

    def __init__(self, persistent: bool = False) -> None:
        self.persistent = persistent
        self.async_calls: deque[_Call] = deque()
        self.call_idx = -1
        # At exit, the interpreter ends idle threads of an executor and waits for busy ones.
        self._executor: ThreadPoolExecutor | None = None

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
        self.async_calls.append(_Call(request, self._start(request)))
        self.call_idx = request.call_idx
        return request.call_idx

    def _start(self, request: AsyncRequest) -> Future[None]:
        try:
            args = _staged_args(request)
        except Exception as error:
            # Raised here, only this rank would see it, and the others' next poll would hang.
            failed: Future[None] = Future()
            failed.set_exception(error)
            return failed
        executor = self._executor or ThreadPoolExecutor(
            1, thread_name_prefix="shardstore-save", initializer=yield_to_others
        )
        future = executor.submit(run, request, args, current_cuda_device())
        if self.persistent:
            self._executor = executor
        else:
            executor.shutdown(wait=False)
        return future

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
        while self.async_calls and self._finalize_oldest(blocking, no_dist):
            finalized.append(self.call_idx - len(self.async_calls))
        return finalized

    def _finalize_oldest(self, blocking: bool, no_dist: bool) -> bool:
        request, future = self.async_calls[0]
        done = blocking or future.done()
        error = future.exception() if done else None
        try:
            if not _agree(done, error, request.call_idx, no_dist=no_dist):
                return False
        except CheckpointingException:
            self.async_calls.popleft()
            raise
        self.async_calls.popleft()
        _finalize(request, no_dist)
        return True

    def get_num_unfinalized_calls(self) -> int:
        """Return the number of requests that are scheduled and not finalised."""
        return len(self.async_calls)

    def close(self, abort: bool = False) -> None:
        """Finalise all requests and end the thread. Every rank calls it.

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
        self.async_calls.clear()
        if self._executor is not None:
            self._executor.shutdown(wait=not abort, cancel_futures=abort)
            self._executor = None
        if first_error is not None:
            raise first_error


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
        return not self._queue.async_calls or self._queue._finalize_oldest(blocking, no_dist)

    def sync_all_async_calls(self, is_alive: int) -> bool:
        """Return whether no rank has a call in flight; every rank calls it and waits for the
        others.

        Args:
            is_alive: 1 if this rank's call is in flight, else 0.
        """
        return _agree(not is_alive, None, 0, no_dist=False)

    def close(self, abort: bool = False) -> None:
        """End the thread, see :meth:`AsyncCallsQueue.close`."""
        self._queue.close(abort)


class TemporalAsyncCaller(AsyncCaller):
    """Runs each request in its own thread, which ends with the request."""

    _persistent = False


class PersistentAsyncCaller(AsyncCaller):
    """Runs requests in sequence in one thread, until :meth:`close`."""


def _staged_args(request: AsyncRequest) -> tuple[Any, ...]:
    """Call ``preload_fn``, and return the positional arguments of the background function."""
    args = tuple(request.async_fn_args)
    if request.async_fn is None or request.preload_fn is None:
        return args
    if len(args) < 2:
        raise CheckpointingException(
            f"An AsyncRequest with a preload_fn needs at least two positional arguments, because "
            f"the result of preload_fn replaces the second; got {len(args)}"
        )
    return (args[0], request.preload_fn(), *args[2:])


def run(
    request: AsyncRequest, args: Sequence[Any], cuda_device: torch.device | None = None
) -> None:
    """Call the function of a request, on a CUDA device if one is given."""
    if request.async_fn is None:
        return
    if cuda_device is not None:
        torch.cuda.set_device(cuda_device)
    request.async_fn(*args, **request.async_fn_kwargs)


def current_cuda_device() -> torch.device | None:
    """Return the calling thread's CUDA device: a new thread would start with device 0."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.device("cuda", torch.cuda.current_device())


def _finalize(request: AsyncRequest, no_dist: bool) -> None:
    """Run the finalisation functions, and raise an error if they failed on any rank."""
    error: BaseException | None = None
    try:
        for finalize_fn in request.finalize_fns:
            finalize_fn()
    except Exception as caught:
        error = caught
    _agree(True, error, request.call_idx, no_dist=no_dist, doing="finalising")


def _agree(
    done: bool,
    error: BaseException | None,
    call_idx: int,
    *,
    no_dist: bool,
    doing: str = "running",
) -> bool:
    """Return whether a call is done on every rank; raise an error on every rank if it failed.

    It reduces four integers. After a failure it also gathers the error texts.
    """
    rank = group_rank(None)
    state = [int(not done), int(error is not None), call_idx, -call_idx]
    text = None if error is None else f"{type(error).__name__}: {error}"
    in_flight, failed, newest, minus_oldest = state if no_dist else largest(state)
    if failed:
        texts = {rank: text} if no_dist else dict(enumerate(gathered(text)))
        failures = {r: text for r, text in texts.items() if text is not None}
        listed = "; ".join(f"rank {r}: {text}" for r, text in sorted(failures.items()))
        raise RanksError(
            f"Asynchronous save, {doing} call {call_idx}, failed on {listed}. "
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
