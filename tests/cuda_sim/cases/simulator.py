"""The simulation itself: programs that lack a synchronisation get wrong bytes, the same programs
with it get the right ones, and wrong calls are counted."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch

from tests.cuda_sim import simulation
from tests.cuda_sim.states import is_equal, on_host, random_tensor

SLOW_NS = 30_000_000


@pytest.fixture
def busy() -> Iterator[torch.cuda.Stream]:
    """A stream with 30 ms of work."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLOW_NS)
    yield stream
    torch.cuda.synchronize()


@pytest.mark.parametrize("waits", [True, False])
def test_a_copy_to_the_host_is_read_too_early(busy: torch.cuda.Stream, waits: bool) -> None:
    source, target = torch.ones(1 << 18, device="cuda"), torch.zeros(1 << 18).pin_memory()
    torch.cuda.current_stream().synchronize()
    with torch.cuda.stream(busy):
        target.copy_(source, non_blocking=True)
    if waits:
        busy.synchronize()
    assert bool((target == 1).all()) is waits


@pytest.mark.parametrize("waits", [True, False])
def test_a_page_locked_source_is_changed_too_early(busy: torch.cuda.Stream, waits: bool) -> None:
    source, target = torch.ones(1 << 18).pin_memory(), torch.zeros(1 << 18, device="cuda")
    torch.cuda.current_stream().synchronize()
    with torch.cuda.stream(busy):
        target.copy_(source, non_blocking=True)
    if waits:
        busy.synchronize()
    source.fill_(2)
    assert bool((on_host(target) == 1).all()) is waits


def test_pageable_memory_is_copied_during_the_call(busy: torch.cuda.Stream) -> None:
    source, target, back = torch.ones(1 << 18), torch.zeros(1 << 18, device="cuda"), torch.zeros(1)
    torch.cuda.current_stream().synchronize()
    with torch.cuda.stream(busy):
        target.copy_(source, non_blocking=True)
        source.fill_(2)
        back.copy_(target[:1], non_blocking=True)
        assert float(back) == 1


@pytest.mark.parametrize("waits", [True, False])
def test_another_stream_overwrites_a_source(busy: torch.cuda.Stream, waits: bool) -> None:
    source, target = torch.ones(1 << 18, device="cuda"), torch.zeros(1 << 18).pin_memory()
    other = torch.cuda.Stream()
    torch.cuda.current_stream().synchronize()
    with torch.cuda.stream(busy):
        target.copy_(source, non_blocking=True)
    if waits:
        other.wait_stream(busy)
    with torch.cuda.stream(other):
        source.fill_(2)
    busy.synchronize()
    assert bool((target == 1).all()) is waits


@pytest.mark.parametrize("records", [True, False])
def test_the_memory_of_a_freed_source_is_used_again(busy: torch.cuda.Stream, records: bool) -> None:
    source, target = torch.ones(1 << 20, device="cuda"), torch.zeros(1 << 20).pin_memory()
    torch.cuda.current_stream().synchronize()
    with torch.cuda.stream(busy):
        target.copy_(source, non_blocking=True)
    if records:
        source.record_stream(busy)
    del source
    torch.full((1 << 20,), 2.0, device="cuda")
    busy.synchronize()
    assert bool((target == 1).all()) is records


def test_a_copy_that_is_read_meanwhile_is_torn() -> None:
    source, target = torch.ones(1 << 20, device="cuda"), torch.zeros(1 << 20).pin_memory()
    torch.cuda.synchronize()
    simulation.delay(20_000)
    target.copy_(source, non_blocking=True)
    while not bool((target == 1).any()):
        pass
    assert not bool((target == 1).all())
    torch.cuda.synchronize()
    assert bool((target == 1).all())


def test_an_event_waits_for_the_work_before_it(busy: torch.cuda.Stream) -> None:
    event = busy.record_event()
    assert not event.query()
    event.synchronize()
    assert busy.query()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.complex128])
def test_kernels_fill_and_copy_with_strides(dtype: torch.dtype) -> None:
    host = random_tensor((6, 5, 4), dtype)
    device = host.to("cuda")
    assert is_equal(device.transpose(0, 2)[::2].contiguous(), host.transpose(0, 2)[::2])
    device[:, ::2].fill_(1)
    host[:, ::2].fill_(1)
    assert is_equal(device, host)


# -- wrong calls -----------------------------------------------------------------------------------

WRONG = {
    "the host reads device memory": """
        ctypes.string_at(torch.ones(4, device="cuda").data_ptr(), 4)""",
    "memory is unlocked while a copy is queued": """
        t, source = torch.zeros(1 << 18), torch.ones(1 << 18, device="cuda")
        cudart.cudaHostRegister(t.data_ptr(), 1 << 20, 0)
        torch.cuda._sleep(30_000_000)
        t.copy_(source, non_blocking=True)
        cudart.cudaHostUnregister(t.data_ptr())
        torch.cuda.synchronize()""",
    "memory that is not locked is unlocked": """
        cudart.cudaHostUnregister(torch.zeros(4).data_ptr())""",
    "a kernel that is not simulated": """
        torch.ones(4, device="cuda") * 2""",
    "freed device memory is copied": """
        t = torch.ones(1 << 20, device="cuda")
        address = t.data_ptr()
        del t
        torch.cuda.empty_cache()
        runtime.cudaMemcpy(ctypes.c_void_p(address), ctypes.c_void_p(address), 4, 3)""",
    "an event of another device": """
        event = torch.cuda.Event()
        event.record()
        runtime.cudaEventRecord(ctypes.c_void_p(event.cuda_event),
                                ctypes.c_void_p(torch.cuda.Stream(1).cuda_stream))""",
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_call_is_counted_or_ends_the_process(what: str) -> None:
    program = f"""if True:
        import ctypes, torch
        from tests.cuda_sim import simulation
        torch.zeros(1, device="cuda")
        cudart, runtime = torch.cuda.cudart(), ctypes.CDLL(None)
        assert simulation.faults() == 0
        {WRONG[what]}
        print("faults:", simulation.faults())
    """
    done = simulation.run("-c", program, CUDA_SIM_DEVICES=2)
    if what == "the host reads device memory":
        assert done.returncode == -11, done.stderr
    else:
        assert "faults: 1" in done.stdout, done.stdout + done.stderr
        assert "[cuda_sim] FAULT" in done.stderr


def test_calls_fail_as_they_are_told() -> None:
    with simulation.failing("cudaMemcpyAsync", 719, skip=1):
        torch.ones(4).to("cuda")
        with pytest.raises(RuntimeError, match="CUDA error"):
            torch.ones(4).to("cuda")
    with simulation.failing("cudaMalloc", 2, count=9), pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 26, device="cuda")
    assert on_host(torch.ones(4).to("cuda")).tolist() == [1, 1, 1, 1]


def test_memory_is_locked_once() -> None:
    memory, runtime = torch.zeros(1 << 16), torch.cuda.cudart()
    assert runtime.cudaHostRegister(memory.data_ptr(), 1 << 18, 0) == 0
    assert simulation.registered() == 1
    assert runtime.cudaHostRegister(memory.data_ptr() + 4096, 4096, 0) == 712
    assert ctypes.CDLL(None).cudaGetLastError() == 712
    assert runtime.cudaHostUnregister(memory.data_ptr()) == 0
