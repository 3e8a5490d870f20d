"""Interfaces of the sources and targets of a conversion."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import xxhash
from numpy.typing import NDArray

from shardstore.errors import CheckpointExistsError
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Box, plan_grid
from shardstore.storage.movers.chunks import RegionRead
from shardstore.storage.stores.location import Location, store_errors
from shardstore.values.record import StateRecord

__all__ = [
    "Extras",
    "Reader",
    "Receipt",
    "Source",
    "Target",
    "Written",
    "exists_error",
    "put_in_place",
    "stamps",
]

Receipt = Any
"""Small JSON value by which a target recognises a chunk that an earlier run wrote."""


@dataclass
class Extras:
    """What a checkpoint holds beside tensors.

    Attributes:
        common: ``common.pt`` as it is, where there is one.
        record: values and paths otherwise.
        objects: unique key of a sharded object -> gives its value.
        attributes: JSON that describes the content.
    """

    common: bytes | None = None
    record: StateRecord = field(default_factory=StateRecord)
    objects: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)


class Reader(Protocol):
    """Reads what a checkpoint holds."""

    def read(self, reads: Sequence[RegionRead]) -> None:
        """Read regions into their destinations."""

    def extras(self) -> Extras:
        """Return what is no tensor."""


class Source(Reader, Protocol):
    """An opened checkpoint."""

    @property
    def arrays(self) -> Mapping[str, ArrayMeta]:
        """Key -> tensor."""

    def boxes(self, key: str) -> list[Box]:
        """How the tensor is cut where it is stored."""

    def identity(self) -> list[Any]:
        """JSON that tells this checkpoint from what may be at its place another time."""


@dataclass(frozen=True)
class Written:
    """A chunk to be written.

    Attributes:
        array: its tensor, on the target's grid.
        index: its place in the grid.
        data: its elements, contiguous.
    """

    array: ArrayMeta
    index: tuple[int, ...]
    data: NDArray[Any]


class Target(ABC):
    """A checkpoint under construction, written chunk by chunk so that a later run can resume it.

    Args:
        work: folder or prefix beside the target, where the result may grow.
        goal: where the checkpoint shall be.
    """

    plain: ClassVar[bool] = False
    """Whether the format keeps only values that have a JSON form."""

    def __init__(self, work: Location, goal: Location) -> None:
        self._work, self._goal = work, goal
        self._arrays: Sequence[ArrayMeta] = ()
        self._extras = Extras()

    def array(self, meta: ArrayMeta, boxes: Sequence[Box], most_bytes: int) -> ArrayMeta:
        """Return the tensor on the target's grid, in chunks of about ``most_bytes`` bytes.

        By default each chunk is one contiguous range of the tensor.
        """
        size = dtypes.itemsize(meta.dtype)
        grid = plan_grid(meta.shape, meta.shape, size, most_bytes, leading_only=True)
        return ArrayMeta(meta.key, meta.node, grid, meta.dtype, codecs=())

    @abstractmethod
    def start(self) -> Any:
        """Remove what an earlier run left. Returns JSON that :meth:`resume` is given."""

    def resume(self, state: Any) -> bool:
        """Return whether this run can continue what an earlier one began."""
        return not self._goal.is_local or self._work.is_dir()

    def begin(self, arrays: Sequence[ArrayMeta], extras: Extras) -> None:
        """Make what is needed before the first chunk; what is there already stays."""
        self._arrays, self._extras = arrays, extras

    def restore(self, array: ArrayMeta, index: tuple[int, ...], receipt: Receipt) -> bool:
        """Take over a chunk that an earlier run wrote; False: it has to be written again.

        A chunk is written before its receipt, and the comparison finds one that is damaged.
        """
        return True

    @abstractmethod
    def write(self, chunks: Sequence[Written]) -> list[Receipt]:
        """Write chunks; one receipt each, in order."""

    @abstractmethod
    def read_back(self) -> Reader:
        """Complete the files, and return what reads them."""

    @abstractmethod
    def publish(self) -> None:
        """Put the finished checkpoint in its place. Called after :meth:`read_back`."""

    def stop(self) -> None:  # noqa: B027 (most targets hold nothing)
        """Release resources after an error; what was written stays for the next run."""


def exists_error(goal: Location, remedy: str = "") -> CheckpointExistsError:
    """Return the error for a target that is taken."""
    return CheckpointExistsError(
        f"{goal.url} already exists; convert to elsewhere{remedy}", url=goal.url
    )


def put_in_place(work: Location, goal: Location) -> None:
    """Rename a local folder or file to its place, where only an empty folder may be.

    Raises:
        CheckpointExistsError: something is there.
    """
    with store_errors("putting the result at", goal.url):
        if goal.is_dir() and not goal.listing():
            goal.path.rmdir()
        if goal.exists():
            raise exists_error(goal)
        work.path.rename(goal.path)


def stamps(place: Location, names: Sequence[str]) -> list[Any]:
    """Return the names and digests of those documents that exist."""
    found = []
    for name in names:
        with suppress(FileNotFoundError):
            found.append([name, xxhash.xxh3_128_hexdigest(place.read(name))])
    return found
