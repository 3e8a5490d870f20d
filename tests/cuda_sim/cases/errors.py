"""Errors of devices and memory on one rank: the save fails or goes on more slowly, no memory stays
registered (see conftest.py), and the next save is right."""

from __future__ import annotations

import gc
import logging
import resource
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import shardstore
from shardstore.saving import staging as module
from shardstore.saving.plan import DevicePart
from shardstore.saving.staging import Staging
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Grid
from shardstore.storage.movers.chunks import ChunkWrite
from shardstore.strategies.async_utils import AsyncCallsQueue
from tests.cuda_sim import simulation
from tests.cuda_sim.states import differing, queue, random_tensor, sevens, sharded, strategy

LAUNCH_FAILURE = 719
OUT_OF_MEMORY = 2


class Training:
    """A state on a device, and saves of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.wanted = {f"w{i}": random_tensor((512, 256), seed=i) for i in range(4)}
        self.device = {key: value.to("cuda") for key, value in self.wanted.items()}
        self.others = sevens(self.wanted.values())

    @property
    def state(self) -> dict[str, Any]:
        return dict(sharded(self.device))

    def request(self, name: str = "request", **options: Any) -> Any:
        return shardstore.save(
            self.state, self.path / name, strategy(1 << 17), async_sharded_save=True, **options
        )

    def error(self, name: str = "c", **options: Any) -> BaseException | None:
        """Save while the state changes, and return the save's error."""
        queue(self.device.values(), self.wanted.values(), busy_ms=0)
        handle = shardstore.async_save(
            self.state, self.path / name, strategy(1 << 17), overwrite=True, **options
        )
        handle.wait_staged()
        queue(self.device.values(), self.others, busy_ms=0)
        return handle.exception()

    def require_right(self, name: str = "c", **options: Any) -> None:
        assert self.error(name, **options) is None
        assert not differing(shardstore.load_plain_tensors(self.path / name), self.wanted)


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path)


# -- saves that do not run -------------------------------------------------------------------------


def test_a_dropped_request_leaves_nothing_registered(training: Training) -> None:
    for step in range(3):
        request = training.request(str(step))
        assert simulation.registered() == 1
        del request
        gc.collect()
        assert simulation.registered() == 0
    training.require_right()


def queued_copy() -> Staging:
    """Return a copy that is queued, and is made in a moment."""
    source = torch.ones(1 << 18, device="cuda")
    array = ArrayMeta("w", "w", Grid((1 << 18,), (1 << 18,)), "float32")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        simulation.hold(torch.cuda.current_stream().cuda_stream)
        part = DevicePart(source, torch.cuda.current_stream())
        staging = Staging([ChunkWrite(array, (0,), part)], overlap=True)
    staging.wait()
    assert simulation.queued_copies() == 1
    threading.Timer(0.1, simulation.release).start()
    return staging


def test_a_dropped_copy_keeps_its_memory_until_it_is_complete() -> None:
    """Else it would write to memory that others own by then."""
    staging = queued_copy()
    del staging
    gc.collect()
    assert simulation.queued_copies() == 0
    assert simulation.registered() == 0


def test_memory_of_an_aborted_copy_is_given_back_when_it_is_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the copy would overwrite the next save's."""
    queued: list[int] = []

    class Pool(deque[module.Arena]):
        def append(self, arena: module.Arena) -> None:
            queued.append(simulation.queued_copies())
            super().append(arena)

    monkeypatch.setattr(module, "POOL", Pool())
    staging = queued_copy()
    staging.fail(RuntimeError("aborted"))
    staging.close()
    assert queued == [0]


@pytest.mark.parametrize("persistent", [True, False])
def test_an_aborted_queue_leaves_nothing_registered(training: Training, persistent: bool) -> None:
    calls = AsyncCallsQueue(persistent=persistent)
    for step in range(3):
        calls.schedule_async_request(training.request(str(step)))
    calls.close(abort=True)
    del calls
    for thread in threading.enumerate():
        if thread.name == "shardstore-save":
            thread.join()
    gc.collect()
    assert simulation.registered() == len(module.POOL)
    training.require_right()


@pytest.mark.parametrize("name", ["shardstore-stage", "shardstore-save"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_save_whose_thread_cannot_start_runs_in_the_callers(
    training: Training, name: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    training.require_right(overlap_staging=overlap)


# -- errors of the runtime -------------------------------------------------------------------------

FAILING = [
    ("cudaMemcpyAsync", LAUNCH_FAILURE, 2),
    ("cudaEventSynchronize", LAUNCH_FAILURE, 0),
    ("cudaEventRecordWithFlags", LAUNCH_FAILURE, 1),
    ("cudaStreamWaitEvent", LAUNCH_FAILURE, 0),
    ("cudaStreamCreateWithPriority", OUT_OF_MEMORY, 0),
]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [None, 1 << 18])
@pytest.mark.parametrize(("function", "code", "skip"), FAILING, ids=lambda value: str(value))
def test_an_error_on_a_stream_is_the_saves_error(
    training: Training, function: str, code: int, skip: int, budget: int | None, overlap: bool
) -> None:
    options: dict[str, Any] = {"staging_budget_bytes": budget, "overlap_staging": overlap}
    training.require_right(**options)
    simulation.fail(function, code, skip)
    try:
        error = training.error("failed", **options)
    except RuntimeError as problem:  # the trainer's own call met the error
        error = problem
    finally:
        simulation.fail(function, 0, 0, 0)
    assert error is None or "CUDA error" in str(error)
    assert error is None or not (training.path / "failed" / "zarr.json").exists()
    del error
    for _ in range(2):
        training.require_right(**options)


@pytest.mark.parametrize("code", [OUT_OF_MEMORY, 712, 999])
@pytest.mark.parametrize("overlap", [False, True])
def test_refused_page_locking_is_a_warning(
    training: Training, code: int, overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The trainer's next kernel does not raise the error that the save has dealt with."""
    with simulation.failing("cudaHostRegister", code), caplog.at_level(logging.WARNING):
        training.require_right(overlap_staging=overlap)
    assert f"failed with CUDA error {code}" in caplog.text
    assert "ulimit -l" in caplog.text
    assert simulation.registered() == 0


def test_refused_unlocking_is_a_warning(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    training.require_right()
    address = module.POOL[0].memory.ctypes.data
    with simulation.failing("cudaHostUnregister", 999), caplog.at_level(logging.WARNING):
        module.POOL.clear()
    assert "unlocking page-locked memory failed with CUDA error 999" in caplog.text
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def test_device_memory_for_a_strided_copy_is_missing(training: Training) -> None:
    wide = random_tensor((2048, 2048)).to("cuda")
    state = sharded({"t": wide.t()})
    torch.cuda.empty_cache()
    with simulation.failing("cudaMalloc", OUT_OF_MEMORY, count=10**6):
        with pytest.raises(torch.OutOfMemoryError):
            shardstore.save(state, training.path / "sync")
        handle = shardstore.async_save(state, training.path / "async")
        assert isinstance(handle.exception(), torch.OutOfMemoryError)
    del handle
    assert not (training.path / "async" / "zarr.json").exists()
    shardstore.async_save(state, training.path / "async").result()
    training.require_right()


def test_host_memory_for_the_copy_is_missing(training: Training) -> None:
    state = sharded({"b": torch.empty(100 << 20, dtype=torch.uint8, device="cuda")})
    with limited_memory(60 << 20):
        handle = shardstore.async_save(state, training.path / "b", strategy(1 << 20))
        assert isinstance(handle.exception(), MemoryError)
    del handle
    training.require_right()


@contextmanager
def limited_memory(extra_bytes: int) -> Iterator[None]:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + extra_bytes, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


# -- the end of the process ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "at_exit", "overlap"),
    [
        ("", "wait", True),
        ("", "abort", False),
        ("handle.abort()", "wait", True),
        ("raise RuntimeError('the program fails')", "wait", False),
        ("raise RuntimeError('the program fails')", "abort", True),
        ("del handle, state, device", "wait", True),
        ("del handle, state, device", "abort", True),
    ],
)
def test_a_process_ends_while_a_save_runs(
    tmp_path: Path, end: str, at_exit: str, overlap: bool
) -> None:
    program = f"""if True:
        import torch, shardstore
        from tests.cuda_sim.states import sharded, strategy
        device = {{f"w{{i}}": torch.full((512, 256), float(i), device="cuda") for i in range(4)}}
        state = sharded(device)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(100_000_000)
            handle = shardstore.async_save(state, {str(tmp_path / "c")!r}, strategy(1 << 15),
                                           overlap_staging={overlap}, at_exit={at_exit!r})
        {end}
    """
    done = simulation.run("-c", program, CUDA_SIM_DELAY_US=2000, timeout=60)
    aborted = at_exit == "abort" or "abort" in end
    assert done.returncode in ((0, 1) if aborted or "raise" in end else (0,)), done.stderr
    assert "FAULT" not in done.stderr
    if not aborted:
        found = shardstore.load_plain_tensors(tmp_path / "c")
        assert [float(found[f"w{i}"][5, 5]) for i in range(4)] == [0, 1, 2, 3]
