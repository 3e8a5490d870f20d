"""Interfaces of sources and targets of a conversion, and the journal by which one is resumed."""

from __future__ import annotations

import json
import logging
import os
import pickle
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from numpy.typing import NDArray

from shardstore.errors import CheckpointExistsError
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Box, Grid, plan_grid
from shardstore.storage.movers.chunks import RegionRead
from shardstore.storage.movers.ranges import bytes_stamp
from shardstore.storage.stores.location import Location, store_errors
from shardstore.values.plain import NotPlainError
from shardstore.values.record import StateRecord, as_json

__all__ = [
    "UNREADABLE",
    "Extras",
    "Journal",
    "Read",
    "Receipt",
    "Receipts",
    "Source",
    "Target",
    "Written",
    "exists_error",
    "one_chunk",
    "plain_json",
    "put_in_place",
    "record_of",
    "stamps",
    "values_of",
]

logger = logging.getLogger(__name__)

UNREADABLE = object()
"""Stands for a written value whose class is not allowed to be loaded."""

Receipt = Any
"""Small JSON value by which a target recognises a chunk that an earlier run wrote."""
Receipts = dict[tuple[str, int], Receipt]
"""Key and position of a chunk -> its receipt."""
Read = Callable[[Sequence[RegionRead]], None]


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


class Source(Protocol):
    """An opened checkpoint."""

    @property
    def arrays(self) -> Mapping[str, ArrayMeta]:
        """Key -> tensor."""

    def boxes(self, key: str) -> list[Box]:
        """How the tensor is cut where it is stored."""

    def read(self, reads: Sequence[RegionRead]) -> None:
        """Read regions into their destinations."""

    def extras(self) -> Extras:
        """What is no tensor."""

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
        work: folder or prefix beside the target, where the result grows.
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
    def reader(self) -> Read:
        """Complete the files, and return a function that reads tensors back from them."""

    @abstractmethod
    def written(self) -> Extras:
        """Return the values that are no tensors, read back. Called after :meth:`reader`."""

    @abstractmethod
    def publish(self) -> None:
        """Put the finished checkpoint in its place."""

    def stop(self) -> None:  # noqa: B027 (most targets hold nothing)
        """Release resources after an error; what was written stays for the next run."""


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


def one_chunk(key: str, dtype: str, shape: tuple[int, ...]) -> ArrayMeta:
    """Return a tensor as an array of a single chunk, for formats without chunks."""
    return ArrayMeta(key, key, Grid(shape, tuple(max(1, n) for n in shape)), dtype, codecs=())


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
            found.append([name, bytes_stamp(place.read(name))])
    return found


def values_of(extras: Extras) -> Iterable[tuple[str, tuple[str | int, ...], Any]]:
    """``(key, path, value)`` of what is no tensor."""
    if extras.common is not None:
        for path, value in _common_values(extras.common, "common.pt").items():
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


def _common_values(common: bytes, url: str) -> dict[tuple[str | int, ...], Any]:
    """Return the leaves of a ``common.pt`` by their paths."""
    found: dict[tuple[str | int, ...], Any] = {}

    def walk(value: Any, path: tuple[str | int, ...]) -> None:
        if isinstance(value, dict) and value and all(isinstance(k, str) for k in value):
            for name, item in value.items():
                walk(item, (*path, name))
        else:
            found[path] = value

    from shardstore.values.torch_values import load_bytes

    state = load_bytes(common, url)
    if not isinstance(state, dict):
        raise pickle.UnpicklingError(f"{url} holds a {type(state).__name__}, not a dict")
    for name, item in state.items():
        walk(item, (str(name),))
    return found
