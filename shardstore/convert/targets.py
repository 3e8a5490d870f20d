"""What is converted to: checkpoints that are written chunk by chunk, so that it can go on later.

Every chunk that is written gives a receipt, a small JSON value; a target that is given its receipts
again continues where it was. Here is what targets of all formats have in common.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
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
    "Journal",
    "Read",
    "Receipt",
    "Receipts",
    "Target",
    "Written",
    "plain_json",
    "put_in_place",
    "record_of",
    "rows_of",
    "values_of",
]

Receipts = dict[tuple[str, int], Any]
"""Key and position of a chunk -> what the target said when it was written."""


class Journal:
    """The journal of one conversion at a time.

    Args:
        folder: the folder that the target is in.
        name: of the journal in there.
    """

    def __init__(self, folder: Location, name: str) -> None:
        self._folder, self._name = folder, name
        self._path = f"{folder.url}/{name}"
        self._count = 0

    def open(self, head: dict[str, Any]) -> tuple[Receipts, Any] | None:
        """What an earlier run of the same conversion did, and the state that its target had.

        Args:
            head: what tells one conversion from another.

        Returns:
            ``None`` where there was none, or another one.
        """
        lines = self._file_lines() if self._folder.is_local else self._objects()
        try:
            first = json.loads(lines[0])
            if first["head"] != json.loads(json.dumps(head)):
                return None
            rows = [json.loads(line) for line in lines[1:]]
            found = {(str(key), int(chunk)): receipt for row in rows for key, chunk, receipt in row}
        except (ValueError, TypeError, KeyError, IndexError):
            return None
        if self._folder.is_local:
            os.truncate(self._path, sum(len(line) + 1 for line in lines))
        self._count = len(lines)
        return found, first["state"]

    def exists(self) -> bool:
        """Whether there is one, of this conversion or another."""
        return self._folder.exists(self._name)

    def _file_lines(self) -> list[bytes]:
        """Whole lines; a last one that was cut short does not count."""
        with suppress(FileNotFoundError):
            return self._folder.read(self._name).split(b"\n")[:-1]
        return []

    def _objects(self) -> list[bytes]:
        lines: list[bytes] = []
        for name in self._folder.listing(self._name):
            if name != _name(len(lines)):
                break
            lines.append(self._folder.read(f"{self._name}/{name}"))
        return lines

    def start(self, head: dict[str, Any], state: Any) -> None:
        """A journal with nothing done.

        Raises:
            StorageError: the store refused.
        """
        self.remove()
        if self._folder.is_local:
            self._folder.write(self._name, b"")
        self._append({"head": head, "state": state})

    def add(self, rows: Sequence[tuple[str, int, Any]]) -> None:
        """Note chunks that are written: key, position, receipt.

        Raises:
            StorageError: the store refused.
        """
        self._append(rows)

    def _append(self, what: Any) -> None:
        data = json.dumps(what).encode()
        if self._folder.is_local:
            with store_errors("writing", str(self._path)), open(self._path, "ab") as file:
                file.write(data + b"\n")
        else:
            self._folder.write(f"{self._name}/{_name(self._count)}", data)
        self._count += 1

    def remove(self) -> None:
        """The conversion is complete, or starts anew."""
        self._folder.delete(self._name)
        self._count = 0


def _name(number: int) -> str:
    return f"{number:08d}.json"


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
