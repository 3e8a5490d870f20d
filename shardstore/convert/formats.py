"""What the formats of conversions share: targets, and the values that are not arrays.

A source of each format has ``arrays`` (key -> tensor), ``boxes(key)`` (those of the tensor's stored
parts), ``read(reads)`` (regions into their destinations), ``extras()`` (the content that is not
tensors) and ``identity()`` (JSON that changes if the checkpoint is replaced).
"""

from __future__ import annotations

import logging
import os
import pickle
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardstore.errors import CheckpointExistsError
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Box, plan_grid
from shardstore.storage.movers.chunks import ChunkWrite, RegionRead
from shardstore.storage.stores.location import Location, store_errors
from shardstore.values.plain import NotPlainError
from shardstore.values.record import StateRecord, as_json

logger = logging.getLogger(__name__)

Arrays = Sequence[ArrayMeta]
Receipts = dict[tuple[str, tuple[int, ...]], Any]
"""Key and index of a written chunk -> small JSON value with which the target finds the chunk."""


@dataclass
class Extras:
    """The content of a checkpoint besides its tensors.

    Attributes:
        common: content of ``common.pt``; ``None`` if there is no such file.
        record: values and paths, if ``common`` is ``None``.
        objects: unique key of a sharded object -> function that returns its value.
        attributes: attributes of the root group, as JSON.
    """

    common: bytes | None = None
    record: StateRecord = field(default_factory=StateRecord)
    objects: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)


class Target(ABC):
    """A checkpoint under construction, written chunk by chunk so that a later run can resume it."""

    def key_of(self, key: str) -> str:
        """Return the key of a tensor in the target."""
        return key

    def array(self, meta: ArrayMeta, boxes: Sequence[Box], most_bytes: int) -> ArrayMeta:
        """Return the tensor on the target's grid, in chunks of about ``most_bytes`` bytes.

        By default each chunk is one contiguous range of the tensor.
        """
        size = dtypes.itemsize(meta.dtype)
        grid = plan_grid(meta.shape, meta.shape, size, most_bytes, leading_only=True)
        return ArrayMeta(meta.key, meta.node, grid, meta.dtype, codecs=())

    @abstractmethod
    def start(self, left: Any) -> Any:
        """Begin with nothing written.

        Args:
            left: state of an earlier run, whose files are removed; ``None`` without one.

        Returns:
            State of this run, as JSON other than ``None``.
        """

    @abstractmethod
    def resume(self, state: Any) -> bool:
        """Return whether this run can continue the one that had this state."""

    @abstractmethod
    def begin(self, arrays: Arrays, extras: Extras, known: Receipts) -> Receipts:
        """Prepare the target for the first chunk. Files of an earlier run stay.

        Args:
            arrays: all tensors, on the target's grid.
            extras: the content that is not tensors.
            known: receipts of the chunks that an earlier run wrote. A chunk is written before its
                receipt, and the comparison at the end finds a damaged chunk.

        Returns:
            The receipts of the chunks that are not written again.
        """

    @abstractmethod
    def write(self, chunks: Sequence[ChunkWrite]) -> list[Any]:
        """Write chunks and return their receipts, in the same order."""

    @abstractmethod
    def finish(self, receipts: Receipts) -> None:
        """Complete the files, so that they can be read. Called after all chunks are written."""

    @abstractmethod
    def read(self, reads: Sequence[RegionRead]) -> None:
        """Read regions of the written tensors."""

    @abstractmethod
    def documents(self, extras: Extras) -> Iterator[tuple[str, bytes, bytes]]:
        """Yield the files other than chunks, or parts of files.

        Args:
            extras: content of the source, read anew.

        Yields:
            Name, expected content according to ``extras``, and stored content.
        """

    @abstractmethod
    def publish(self) -> None:
        """Move the finished checkpoint to the target."""

    def stop(self) -> None:  # noqa: B027 (most targets hold nothing)
        """Release resources after an error. Written files stay for the next run."""


class FileTarget(Target):
    """A checkpoint of files, complete once its last file is written.

    On a disk the files are written to a work folder, in an object store directly to the target.

    Args:
        work: folder beside a local target.
        goal: path or URL of the finished checkpoint.
        last: name of the file that completes it; "" if the target is a single file.
        ours: pattern of the names of the other files.

    Raises:
        CheckpointExistsError: the target exists and is not an empty folder.
    """

    def __init__(self, work: Location, goal: Location, last: str, ours: str) -> None:
        is_empty = goal.is_local and goal.is_dir() and not goal.listing()
        if goal.exists("" if goal.is_local else last) and not is_empty:
            raise _exists(goal)
        self._at = work if goal.is_local or not last else goal
        self._goal, self._ours = goal, ours

    def start(self, left: Any) -> Any:
        """Remove the files of an earlier run.

        Raises:
            CheckpointExistsError: the target, in an object store, has files of another program.
        """
        if self._at.is_local:
            self._at.delete()
            with store_errors("creating", self._at.url):
                os.makedirs(self._at.url)
            return True
        names = self._at.listing()
        if names and left is None:
            raise _exists(self._at, f" and holds {', '.join(names[:4])}")
        self._at.remote.delete([name for name in names if re.fullmatch(self._ours, name)])
        return True

    def resume(self, state: Any) -> bool:
        """Return whether the work folder exists; always true in an object store."""
        return not self._at.is_local or self._at.is_dir()

    def complete(self, last: str, data: bytes) -> None:
        """Write the last file, and move the folder to a local target.

        Raises:
            CheckpointExistsError: the target has appeared meanwhile.
        """
        if self._at.is_local:
            self._at.write(last, data)
            self.put_in_place(self._at)
        elif not self._at.remote.create(last, data):
            raise _exists(self._goal)

    def put_in_place(self, made: Location) -> None:
        """Rename or copy a finished folder or file to the target. Raises the errors of
        :meth:`complete`."""
        with store_errors("putting the result at", self._goal.url):
            if self._goal.is_local and self._goal.is_dir() and not self._goal.listing():
                self._goal.path.rmdir()
            if self._goal.exists():
                raise _exists(self._goal)
            if self._goal.is_local:
                made.path.rename(self._goal.path)
            else:
                self._goal.remote.become_copy_of(made.remote)


def _exists(goal: Location, what: str = "") -> CheckpointExistsError:
    return CheckpointExistsError(
        f"{goal.url} already exists{what}; convert to another target", url=goal.url
    )


def values_of(extras: Extras) -> Iterator[tuple[str, tuple[str | int, ...], Any]]:
    """Yield ``(key, path, value)`` of each value that is not a tensor."""
    if extras.common is not None:
        for path, value in _leaves(_loaded(extras.common), ()):
            yield ".".join(map(str, path)), path, value
    for key in extras.record.values:
        path = extras.record.paths.get(key, (key,))
        yield key, path, extras.record.value(key, "the source")
    for unique_key, value_of in extras.objects.items():
        key = unique_key if extras.common is not None else unique_key.rpartition("/")[0]
        yield key, extras.record.paths.get(key, (key,)), value_of()


def _loaded(common: bytes) -> dict[Any, Any]:
    from shardstore.values.torch_values import load_bytes

    state = load_bytes(common, "common.pt")
    if not isinstance(state, dict):
        raise pickle.UnpicklingError(f"common.pt holds a {type(state).__name__}, not a dict")
    return {str(name): value for name, value in state.items()}


def _leaves(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    is_nested = isinstance(value, dict) and value and all(isinstance(k, str) for k in value)
    if not is_nested:
        if path:
            yield path, value
        return
    for name, item in value.items():
        yield from _leaves(item, (*path, name))


def record_of(extras: Extras, level: int = logging.WARNING) -> StateRecord:
    """Return the values that have a JSON form, for formats that store little besides tensors.

    Other values, and tensors among the common values, are left out; a log record names them.
    """
    values: dict[str, Any] = {}
    left_out: list[str] = []
    paths: dict[str, Any] = dict(extras.record.paths)
    for key, path, value in values_of(extras):
        torch = sys.modules.get("torch")  # without it no value is a tensor
        try:
            if torch is not None and isinstance(value, torch.Tensor):
                raise NotPlainError("it is a tensor among the common values")
            values[key] = as_json(value)
            paths[key] = path
        except NotPlainError as reason:
            left_out.append(f"{key} ({reason})")
    if left_out:
        shown = "; ".join(left_out[:8])
        logger.log(level, "%d value(s) without a JSON form are left out: %s", len(left_out), shown)
    return StateRecord(paths, values)
