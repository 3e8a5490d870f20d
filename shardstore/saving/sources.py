"""The plan of a save, and the tensors that its chunks are copied from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from numpy.typing import NDArray

from shardstore.errors import DTypeMismatchError
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.movers.chunks import ChunkWrite, Source
from shardstore.storage.movers.device import on_host, stream_of


@dataclass(frozen=True)
class CutChunk:
    """A chunk whose elements several ranks hold.

    Attributes:
        array: the array of the chunk.
        index: index of the chunk in the grid.
        shape: shape of the part of the chunk that is inside of the array.
        owner: rank that writes the chunk.
        pieces: ``(rank, start, stop)`` in elements of this part: the piece of each rank.
        local: start of each piece of this rank -> source of its elements.
    """

    array: ArrayMeta
    index: tuple[int, ...]
    shape: tuple[int, ...]
    owner: int
    pieces: tuple[tuple[int, int, int], ...]
    local: dict[int, Source] = field(default_factory=dict)


@dataclass
class WritePlan:
    """The plan of one rank.

    Attributes:
        arrays: arrays that the rank writes to, and whether it creates them.
        writes: chunks that it writes alone.
        cut: chunks that it shares with others, in the same order on all ranks.
    """

    arrays: list[tuple[ArrayMeta, bool]] = field(default_factory=list)
    writes: list[ChunkWrite] = field(default_factory=list)
    cut: list[CutChunk] = field(default_factory=list)

    def written(self, rank: int) -> list[ArrayMeta]:
        """Return the array of each chunk that this rank writes."""
        owned = [cut.array for cut in self.cut if cut.owner == rank]
        return owned + [write.array for write in self.writes]


@dataclass(frozen=True)
class DevicePart:
    """Part of a tensor on a device; calling it copies the part to the host.

    Attributes:
        tensor: the part.
        stream: stream of the tensor's thread; the copy waits for work queued there.
    """

    tensor: torch.Tensor
    stream: torch.cuda.Stream | None = None

    @property
    def is_cuda(self) -> bool:
        """Whether the device is a CUDA device."""
        return self.tensor.device.type == "cuda"

    def __call__(self) -> NDArray[Any]:
        return on_host(self.tensor, self.stream)

    def reshape(self, shape: tuple[int, ...]) -> DevicePart:
        """Return the same elements in another shape."""
        return DevicePart(self.tensor.reshape(shape), self.stream)


def fetched(source: Source) -> NDArray[Any]:
    """Return the data of a source."""
    return source() if callable(source) else source


def require_plain(tensor: torch.Tensor, key: str) -> None:
    """Raise :class:`DTypeMismatchError` for a tensor that is not dense memory."""
    if tensor.layout is torch.strided and tensor.device.type != "meta":
        # A FakeTensor reports a real device, but its storage is on the meta device.
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        if is_plain or tensor.untyped_storage().device.type != "meta":
            return
    raise DTypeMismatchError(
        f"key {key!r} is a {type(tensor).__name__} of layout {tensor.layout} on {tensor.device}, "
        "which has no plain memory to write; make it a dense tensor with data",
        key=key,
    )


class TensorSource:
    """A local tensor as source of chunks: views on the host, :class:`DevicePart` on a device.

    Args:
        tensor: the data.
        key: key of the tensor, for error texts.
        prepended: number of axes of length 1 that the chunks have before the tensor's axes.
    """

    def __init__(self, tensor: torch.Tensor, key: str, prepended: int = 0) -> None:
        require_plain(tensor, key)
        tensor = tensor.detach()
        self._tensor = tensor[(None,) * prepended] if prepended else tensor
        self._array = dtypes.as_numpy(self._tensor) if tensor.device.type == "cpu" else None
        self._stream = stream_of(tensor.device)

    def part(self, slices: tuple[slice, ...] | None = None) -> NDArray[Any] | DevicePart:
        """Return a part of the tensor; ``None``: all of it."""
        if self._array is None:
            tensor = self._tensor if slices is None else self._tensor[slices]
            return DevicePart(tensor, self._stream)
        if slices is None:
            return self._array
        where: tuple[Any, ...] = (..., *slices)  # the ellipsis keeps a 0-d part an array
        view: NDArray[Any] = self._array[where]
        return view
