"""What is converted to: checkpoints that are written chunk by chunk, so that it can go on later.

Every chunk that is written gives a receipt, a small JSON value; a target that is given its receipts
again continues where it was. Here is what targets of all formats have in common.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from numpy.typing import NDArray

from shardstore.convert.sources import Extras, common_values
from shardstore.errors import CheckpointExistsError
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Box, plan_grid
from shardstore.storage.movers.chunks import RegionRead
from shardstore.storage.stores.location import Location, store_errors
from shardstore.values.plain import NotPlainError
from shardstore.values.record import StateRecord, as_json

__all__ = [
    "UNREADABLE",
    "Read",
    "Receipt",
    "Target",
    "Written",
    "plain_json",
    "put_in_place",
    "record_of",
    "rows_of",
    "values_of",
]

logger = logging.getLogger(__name__)

UNREADABLE = object()
"""In the place of a value that was written, and can be read by who allows its class alone."""

Receipt = Any
Read = Callable[[Sequence[RegionRead]], None]


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


class Target(Protocol):
    """A checkpoint under construction."""

    plain: ClassVar[bool]
    """Whether its format keeps only values that have a JSON form."""

    def array(self, meta: ArrayMeta, boxes: Sequence[Box], most_bytes: int) -> ArrayMeta:
        """The tensor on the grid that it is written by, in chunks of about so many bytes."""

    def start(self) -> Any:
        """Begin anew, without what an earlier run left. Returns JSON by which to go on."""

    def resume(self, state: Any) -> bool:
        """Go on with what an earlier run began, given its state; whether that can be."""

    def has(self, array: ArrayMeta, index: tuple[int, ...], receipt: Receipt) -> bool:
        """Whether a chunk that an earlier run wrote is still there; asked after :meth:`begin`."""

    def begin(self, arrays: Sequence[ArrayMeta], extras: Extras) -> None:
        """Make what is needed before the first chunk; what is there already stays."""

    def write(self, chunks: Sequence[Written]) -> list[Receipt]:
        """Write chunks; one receipt each, in order."""

    def restore(self, array: ArrayMeta, index: tuple[int, ...], receipt: Receipt) -> None:
        """Take note of a chunk that was written before."""

    def reader(self) -> Read:
        """How to read back what was written, once all of it is."""

    def written(self) -> Extras:
        """What is no tensor, read back from what was written; asked after :meth:`reader`."""

    def publish(self) -> None:
        """Put the finished checkpoint in its place."""

    def stop(self) -> None:
        """Let go of what is held, after an error; what was written stays for the next run."""


def rows_of(meta: ArrayMeta, most_bytes: int) -> ArrayMeta:
    """The tensor in chunks that are each one contiguous range of it."""
    size = dtypes.itemsize(meta.dtype)
    grid = plan_grid(meta.shape, meta.shape, size, most_bytes, leading_only=True)
    return ArrayMeta(meta.key, meta.node, grid, meta.dtype, codecs=())


def put_in_place(work: Location, target: Location) -> None:
    """Rename a local folder or file into place; it may not replace anything but an empty folder.

    Raises:
        CheckpointExistsError: something is there.
    """
    with store_errors("putting the result at", target.url):
        if target.is_dir() and not target.listing():
            target.path.rmdir()
        if target.exists():
            raise CheckpointExistsError(
                f"{target.url} already exists; convert to elsewhere", url=target.url
            )
        work.path.rename(target.path)


def values_of(extras: Extras) -> Iterable[tuple[str, tuple[str | int, ...], Any]]:
    """``(key, path, value)`` of what is no tensor."""
    if extras.common is not None:
        for path, value in common_values(extras.common, "common.pt").items():
            yield ".".join(map(str, path)), path, value
    for key in extras.record.values:
        path = extras.record.paths.get(key, (key,))
        yield key, path, extras.record.value(key, "the source")
    for unique_key, value_of in extras.objects.items():
        key = unique_key if extras.common is not None else unique_key.rpartition("/")[0]
        yield key, extras.record.paths.get(key, (key,)), value_of()


def plain_json(value: object) -> Any:
    """The JSON form of a value for formats that hold tensors and hardly anything else.

    Raises:
        NotPlainError: it has none, or is a tensor, which nobody would look for there.
    """
    torch = sys.modules.get("torch")  # without it no value is a tensor
    if torch is not None and isinstance(value, torch.Tensor):
        raise NotPlainError("a tensor among the values that are not sharded")
    return as_json(value)


def record_of(extras: Extras) -> StateRecord:
    """The values that have a JSON form, for formats that hold no others."""
    values: dict[str, Any] = {}
    paths: dict[str, Any] = dict(extras.record.paths)
    for key, path, value in values_of(extras):
        try:
            values[key] = plain_json(value)
            paths[key] = path
        except NotPlainError as reason:
            logger.warning("%s is left out: %s", key, reason)
    return StateRecord(paths, values)
