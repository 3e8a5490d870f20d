"""Copies tensors from devices to the host after the queued work that produces them.

A device here is one whose PyTorch module has streams: CUDA and ROCm (``torch.cuda``), XPU and
others. Only page-locking host memory is specific to CUDA and ROCm. Other devices (MPS) are copied
in the order of their one queue.

The current stream of a new thread is the device's default stream, which waits for no other stream.
So a save or load takes the caller's current streams in the caller's thread, and its threads use
these.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from shardstore.storage.format import dtypes

logger = logging.getLogger(__name__)

T = TypeVar("T")

PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for all devices, not for one alone (CUDA runtime API)."""


def _module(device: torch.device | None = None) -> Any:
    """Return PyTorch's module of a device with streams, by default of this process's accelerator;
    ``None`` for the host and for devices without streams."""
    module = torch.get_device_module(device)
    return module if module is not torch.cpu and hasattr(module, "Stream") else None


def stream_of(device: torch.device) -> torch.Stream | None:
    """Return this thread's current stream of a device; ``None`` if it has no streams."""
    module = _module(device)
    return None if module is None else module.current_stream(device)


def streams_of(values: Iterable[Any]) -> list[torch.Stream | None]:
    """Return this thread's current stream of each device that a tensor among the values is on, or
    that such a value writes to."""
    return [stream_of(device) for device in {v.device for v in values if hasattr(v, "is_cpu")}]


@contextmanager
def behind(*streams: torch.Stream | None) -> Iterator[None]:
    """Queue the work of the context on the given streams, at most one for each device, from any
    thread. ``None`` changes nothing.

    The context enters each stream's device first. Otherwise, leaving the stream would initialise
    the thread's previous device, which takes some hundred megabytes of that device's memory.
    """
    with ExitStack() as stack:
        for stream in filter(None, streams):
            module = _module(stream.device)
            stack.enter_context(module.device(stream.device))
            stack.enter_context(module.stream(stream))
        yield


def on_current_device(function: Callable[[], T]) -> Callable[[], T]:
    """Return a function that another thread calls with the current device of this thread. A new
    thread would begin with device 0."""
    module = _module()
    if module is None or not module.is_initialized():
        return function
    device = module.current_device()

    def call() -> T:
        module.set_device(device)
        return function()

    return call


def on_host(tensor: torch.Tensor, stream: torch.Stream | None) -> NDArray[Any]:
    """Return a tensor of any device as an array. The copy waits for the work queued on ``stream``.

    Args:
        tensor: a tensor with any strides.
        stream: result of :func:`stream_of` in the thread that owns the tensor.
    """
    with behind(stream):
        return dtypes.as_numpy(tensor.contiguous().cpu())


class DeviceCopies:
    """Queue of copies from one device with streams to host memory, on a separate stream that first
    waits for the work on the caller's current stream.

    The memory is kept until all copies are complete, even if nobody waits for them.

    Args:
        device: the device.
        memory: the memory that the targets are parts of.
    """

    def __init__(self, device: torch.device, memory: NDArray[np.uint8]) -> None:
        self._device, self._memory, self._module = device, memory, _module(device)
        self._stream = self._module.Stream(device)
        self._stream.wait_stream(self._module.current_stream(device))
        self._is_behind = False

    def copy(self, source: torch.Tensor, target: NDArray[Any]) -> None:
        """Queue a copy. Any thread may call it."""
        with behind(self._stream):
            dtypes.require_memory(source)
            self._is_behind = True
            dtypes.as_tensor(target).copy_(source.detach(), non_blocking=True)
            source.record_stream(self._stream)

    def wait(self, *, host: bool) -> None:
        """Wait for all queued copies: block the caller if ``host``, without using a processor, else
        only the caller's current stream."""
        if not host:
            self._module.current_stream(self._device).wait_stream(self._stream)
            return
        options = {"blocking": True} if self._device.type == "cuda" else {}
        event = self._module.Event(**options)
        event.record(self._stream)
        event.synchronize()
        self._is_behind = False

    def __del__(self) -> None:
        with suppress(Exception):  # a lost device, a forked child
            if self._is_behind:
                self.wait(host=True)


# -- page-locked memory: CUDA and ROCm only --------------------------------------------------------


def host_memory(size: int, device: torch.device | None = None) -> NDArray[np.uint8]:
    """Return new host memory, page-locked for a CUDA device, which copies to and from it directly.

    It stays page-locked until it is freed, when no array refers to it any more. If page-locking is
    refused, the memory is ordinary memory, and a warning is logged.

    Args:
        size: number of bytes.
        device: the device; memory for the host and for other devices is ordinary memory.

    Raises:
        MemoryError: the system does not have enough memory.
    """
    memory = np.empty(max(size, 1), np.uint8)  # NumPy asks the kernel for huge pages
    if device is None or device.type != "cuda":
        return memory
    code = _cudart(device, "cudaHostRegister", memory.ctypes.data, len(memory), PORTABLE)
    if code:
        logger.warning(
            "page-locking %d bytes of host memory failed with CUDA error %d: copies between it and "
            "devices are slower, and training may wait for them; raise the limit of locked memory "
            "(ulimit -l), or lower staging_budget_bytes of a save or exchange_budget_bytes of a "
            "load",
            len(memory),
            code,
        )
    else:
        weakref.finalize(memory, _unlock, device, memory.ctypes.data).atexit = False
    return memory


def _unlock(device: torch.device, address: int) -> None:
    with suppress(RuntimeError):  # a lost device; a forked child, whose memory is not locked
        if code := _cudart(device, "cudaHostUnregister", address):
            logger.warning("unlocking page-locked memory failed with CUDA error %d", code)


def _cudart(device: torch.device, function: str, *arguments: int) -> int:
    """Call a function of the CUDA runtime. Return 0, or the error code; the pending error is
    cleared, so that the trainer's next kernel does not raise it."""
    with torch.cuda.device(device):
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(getattr(runtime, function)(*arguments))
        if code:
            with suppress(RuntimeError):
                torch.zeros(1, device=device)  # a kernel launch raises and clears the pending error
        return code
