"""Copies tensors from CUDA devices to the host after the queued work that produces them.

The current stream of a new thread is the device's default stream, which waits for no other stream.
So a save records the caller's streams when it is planned, and the copying threads use these.
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

PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for all devices, not for one alone (CUDA runtime API)."""


def stream_of(device: torch.device) -> torch.cuda.Stream | None:
    """Return this thread's current stream of a device; ``None`` for a device without CUDA."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def stream_here() -> torch.cuda.Stream | None:
    """Return this thread's current stream of the current device; ``None`` if the process does not
    use CUDA."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.cuda.current_stream()


@contextmanager
def behind(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Queue the work of the context on ``stream``, from any thread. ``None`` changes nothing.

    The context enters the stream's device first. Otherwise, leaving the stream would initialise the
    thread's previous device, which takes some hundred megabytes of that device's memory.
    """
    if stream is None:
        yield
        return
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


def on_host(tensor: torch.Tensor, stream: torch.cuda.Stream | None) -> NDArray[Any]:
    """Return a tensor of any device as an array. The copy waits for the work queued on ``stream``.

    Args:
        tensor: a tensor with any strides.
        stream: result of :func:`stream_of` in the thread that owns the tensor.
    """
    with behind(stream):
        return dtypes.as_numpy(tensor.contiguous().cpu())


@dataclass(frozen=True)
class DeviceEvent:
    """The end of a copy."""

    event: torch.cuda.Event
    device: torch.device

    def wait(self) -> None:
        """Block until the copy ends, without using a processor."""
        with torch.cuda.device(self.device):
            self.event.synchronize()


class DeviceCopies:
    """Queue of copies from one device, on a separate stream that first waits for the work on the
    caller's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(torch.cuda.current_stream(device))
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_event(ready)
        self._last: DeviceEvent | None = None

    def copy(self, source: torch.Tensor, target: NDArray[Any]) -> DeviceEvent:
        """Queue a copy and return the event of its end."""
        with self._lock, behind(self._stream):
            dtypes.require_memory(source)
            dtypes.as_tensor(target).copy_(source.detach(), non_blocking=True)
            source.record_stream(self._stream)
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(self._stream)
            self._last = DeviceEvent(event, self._device)
            return self._last

    def wait(self, *, host: bool) -> None:
        """Wait for all queued copies: block the caller if ``host``, else only the caller's current
        stream."""
        with self._lock:
            last = self._last
        if last is None:
            return
        if host:
            last.wait()
        else:
            torch.cuda.current_stream(self._device).wait_event(last.event)


def page_lock(memory: NDArray[np.uint8], device: torch.device) -> int:
    """Page-lock host memory, so that devices copy to it directly.

    Returns:
        0, or the CUDA error code. The pending error is cleared, so that later CUDA calls do not
        raise it.
    """
    code = _cudart(device, "cudaHostRegister", memory.ctypes.data, len(memory), PORTABLE)
    if code:
        with torch.cuda.device(device), suppress(RuntimeError):
            torch.zeros(1, device=device)  # a kernel launch raises and clears the pending error
    return code


def page_unlock(memory: NDArray[np.uint8], device: torch.device) -> int:
    """Undo :func:`page_lock`. Return 0, or the CUDA error code."""
    return _cudart(device, "cudaHostUnregister", memory.ctypes.data)


def _cudart(device: torch.device, function: str, *arguments: int) -> int:
    with torch.cuda.device(device):
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        return int(getattr(runtime, function)(*arguments))
