"""Copies tensors from CUDA devices to the host after the queued work that produces them.

The current stream of a new thread is the device's default stream, which waits for no other stream.
So a save records the caller's streams when it is planned, and the copying threads use these.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardstore.storage.format import dtypes

PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for all devices, not for one alone (CUDA runtime API)."""


def stream_of(device: torch.device | None = None) -> torch.cuda.Stream | None:
    """Return this thread's current stream of a device, by default of the current CUDA device;
    ``None`` for a device without CUDA, or if the process does not use CUDA."""
    if device is not None and device.type != "cuda":
        return None
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.cuda.current_stream(device)


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


class DeviceCopies:
    """Queue of copies from one device, on a separate stream that first waits for the work on the
    caller's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def copy(self, source: torch.Tensor, target: NDArray[Any]) -> None:
        """Queue a copy. Any thread may call it."""
        with behind(self._stream):
            dtypes.require_memory(source)
            dtypes.as_tensor(target).copy_(source.detach(), non_blocking=True)
            source.record_stream(self._stream)

    def wait(self, *, host: bool) -> None:
        """Wait for all queued copies: block the caller if ``host``, without using a processor, else
        only the caller's current stream."""
        if not host:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            return
        with behind(self._stream):
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(self._stream)
            event.synchronize()


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
