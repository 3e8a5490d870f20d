"""Copies from CUDA devices to the host, each behind the work that its tensor is the result of.

A thread begins with a device's default stream as its current one, which waits for no other stream;
so whoever plans remembers the streams of the thread that called, and threads that copy go by them.
It knows tensors and streams; not chunks or saves.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardstore.storage.format import dtypes

__all__ = [
    "DeviceCopies",
    "DeviceEvent",
    "behind",
    "on_host",
    "page_lock",
    "page_unlock",
    "stream_here",
    "stream_of",
]

PORTABLE = 1
"""cudaHostRegisterPortable: page-locked to all devices, not to the one alone (CUDA runtime API)."""


def stream_of(device: torch.device) -> torch.cuda.Stream | None:
    """The stream that this thread queues work for a device on; ``None`` for one without CUDA."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def stream_here() -> torch.cuda.Stream | None:
    """The same for this thread's current device; ``None`` in a process that does not use CUDA."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.cuda.current_stream()


@contextmanager
def behind(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Queue work within on a stream, from any thread; ``None``: as ever.

    Its device comes first: a thread that left a stream for one of another device would begin to use
    that device, which takes some hundred megabytes of it.
    """
    if stream is None:
        yield
        return
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


def on_host(tensor: torch.Tensor, stream: torch.cuda.Stream | None) -> NDArray[Any]:
    """A tensor of any device as an array, copied behind what a stream has queued.

    Args:
        tensor: of any strides.
        stream: what :func:`stream_of` gave the thread that has the tensor.
    """
    with behind(stream):
        return dtypes.as_numpy(tensor.contiguous().cpu())


@dataclass(frozen=True)
class DeviceEvent:
    """The end of a copy."""

    event: torch.cuda.Event
    device: torch.device

    def wait(self) -> None:
        """Return once it has come, without taking a processor meanwhile."""
        with torch.cuda.device(self.device):
            self.event.synchronize()


class DeviceCopies:
    """Copies from one device: queued on a stream of its own, behind the caller's current one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(torch.cuda.current_stream(device))
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_event(ready)
        self._last: DeviceEvent | None = None

    def copy(self, source: torch.Tensor, target: NDArray[Any]) -> DeviceEvent:
        """Queue a copy; the event tells when it is done."""
        with self._lock, behind(self._stream):
            dtypes.require_memory(source)
            dtypes.as_tensor(target).copy_(source.detach(), non_blocking=True)
            source.record_stream(self._stream)
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(self._stream)
            self._last = DeviceEvent(event, self._device)
            return self._last

    def wait(self, *, host: bool) -> None:
        """Let the caller wait for all copies that were queued, or the caller's stream alone."""
        with self._lock:
            last = self._last
        if last is None:
            return
        if host:
            last.wait()
        else:
            torch.cuda.current_stream(self._device).wait_event(last.event)


def page_lock(memory: NDArray[np.uint8], device: torch.device) -> int:
    """Page-lock host memory, so that devices copy to it by themselves.

    Returns:
        0, or the CUDA error. It is forgotten then, and not found by whoever uses the device next.
    """
    code = _cudart(device, "cudaHostRegister", memory.ctypes.data, len(memory), PORTABLE)
    if code:
        with torch.cuda.device(device), suppress(RuntimeError):
            torch.zeros(1, device=device)  # a kernel's launch raises what is left of before it
    return code


def page_unlock(memory: NDArray[np.uint8], device: torch.device) -> int:
    """Undo :func:`page_lock`; 0, or the CUDA error."""
    return _cudart(device, "cudaHostUnregister", memory.ctypes.data)


def _cudart(device: torch.device, function: str, *arguments: int) -> int:
    with torch.cuda.device(device):
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        return int(getattr(runtime, function)(*arguments))
