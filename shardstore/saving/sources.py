"""What a plan of a save is made of: chunks that one rank writes or shares, and where data is from.

Answers for the plan as a value, and for tensors as sources of chunks. Decides nothing; moves no
bytes until it is called for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from numpy.typing import NDArray

from shardstore.errors import DTypeMismatchError
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.movers.chunks import ChunkWrite
from shardstore.storage.movers.device import on_host, stream_of

__all__ = ["CutChunk", "DevicePart", "WritePlan", "require_plain"]


@dataclass(frozen=True)
class CutChunk:
    """A chunk whose elements several ranks hold.

    Attributes:
        array: its array.
        index: its index in the grid.
        shape: shape of the part within the array.
        owner: rank that writes it.
        pieces: ``(rank, start, stop)`` in elements of the chunk's part: what each rank gives.
        start: where this rank's own elements begin.
        local: this rank's own elements, if it has any.
    """

    array: ArrayMeta
    index: tuple[int, ...]
    shape: tuple[int, ...]
    owner: int
    pieces: tuple[tuple[int, int, int], ...]
    start: int
    local: Callable[[], NDArray[Any]] | None


@dataclass
class WritePlan:
    """What one rank does.

    Attributes:
        arrays: arrays that it writes to, and whether it creates them.
        writes: chunks that it writes alone.
        cut: chunks that it shares with others, in an order that all ranks follow.
    """

    arrays: list[tuple[ArrayMeta, bool]] = field(default_factory=list)
    writes: list[ChunkWrite] = field(default_factory=list)
    cut: list[CutChunk] = field(default_factory=list)


@dataclass(frozen=True)
class DevicePart:
    """Part of a tensor on a device: fetched when it is called, or by who copies it himself.

    Attributes:
        tensor: the part.
        stream: of the thread that has the tensor; what is queued there comes before the copy.
    """

    tensor: torch.Tensor
    stream: torch.cuda.Stream | None = None

    def __call__(self) -> NDArray[Any]:
        return on_host(self.tensor, self.stream)

    def reshape(self, shape: tuple[int, ...]) -> DevicePart:
        """The same elements in another shape."""
        return DevicePart(self.tensor.reshape(shape), self.stream)


def require_plain(tensor: torch.Tensor, key: str) -> None:
    """Raise :class:`DTypeMismatchError` for a tensor whose elements do not lie in memory."""
    if tensor.layout is torch.strided and tensor.device.type != "meta":
        # Of a FakeTensor the storage alone is on meta.
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        if is_plain or tensor.untyped_storage().device.type != "meta":
            return
    raise DTypeMismatchError(
        f"key {key!r} is a {type(tensor).__name__} of layout {tensor.layout} on {tensor.device}, "
        "which has no plain memory to write; make it a dense tensor with data",
        key=key,
    )


class _Source:
    """A local tensor as the source of chunks.

    A view on the host, fetched chunk by chunk from a device.

    Args:
        tensor: the data.
        key: for error texts.
        prepended: axes of length 1 that the chunks have before the tensor's own.
    """

    def __init__(self, tensor: torch.Tensor, key: str, prepended: int = 0) -> None:
        require_plain(tensor, key)
        tensor = tensor.detach()
        self._tensor = tensor[(None,) * prepended] if prepended else tensor
        self._array = dtypes.as_numpy(self._tensor) if tensor.device.type == "cpu" else None
        self._stream = stream_of(tensor.device)

    def whole(self) -> NDArray[Any] | Callable[[], NDArray[Any]]:
        """All of it, where it is one chunk."""
        return DevicePart(self._tensor, self._stream) if self._array is None else self._array

    def part(self, slices: tuple[slice, ...]) -> NDArray[Any] | Callable[[], NDArray[Any]]:
        if self._array is not None:
            where: tuple[Any, ...] = (..., *slices)
            view: NDArray[Any] = self._array[where]
            return view
        return DevicePart(self._tensor[slices], self._stream)
