"""What a conversion asks of a format: a source, a target, and the values beside the arrays."""

from __future__ import annotations

import logging
import os
import pickle
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

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
"""Key and index of a chunk that is written -> small JSON value by which the target finds it."""


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
        """Return what is no tensor."""

    def identity(self) -> list[Any]:
        """JSON that tells this checkpoint from what may be at its place another time."""


class Target(ABC):
    """A checkpoint under construction, written chunk by chunk so that a later run can resume it."""

    def key_of(self, key: str) -> str:
        """Return the key that a tensor has there."""
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
            left: state of an earlier run, whose remains are removed; ``None``: there was none.

        Returns:
            State of this run, JSON but not ``None``.
        """

    @abstractmethod
    def resume(self, state: Any) -> bool:
        """Return whether this run can continue the one that had this state."""

    @abstractmethod
    def begin(self, arrays: Arrays, extras: Extras, known: Receipts) -> Receipts:
        """Make what is needed before the first chunk; what is there already stays.

        Args:
            arrays: all tensors, on the target's grid.
            extras: what is no tensor.
            known: receipts of the chunks that an earlier run wrote. A chunk is written before its
                receipt, and the comparison finds one that is damaged.

        Returns:
            The receipts of the chunks that need not be written again.
        """

    @abstractmethod
    def write(self, chunks: Sequence[ChunkWrite]) -> list[Any]:
        """Write chunks; one receipt each, in order."""

    @abstractmethod
    def finish(self, receipts: Receipts) -> None:
        """Complete the files, so that they can be read. All chunks are written."""

    @abstractmethod
    def read(self, reads: Sequence[RegionRead]) -> None:
        """Read regions of what was written."""

    @abstractmethod
    def documents(self, extras: Extras) -> Iterator[tuple[str, bytes, bytes]]:
        """Yield the files beside the chunks, or parts of files.

        Args:
            extras: of the source, read anew.

        Yields:
            The name of each, its content by ``extras``, and what is stored.
        """

    @abstractmethod
    def publish(self) -> None:
        """Put the finished checkpoint in its place."""

    def stop(self) -> None:  # noqa: B027 (most targets hold nothing)
        """Release resources after an error; what was written stays for the next run."""


class FileTarget(Target):
    """Files that are a checkpoint once the last of them is there.

    On a disk they grow in a work folder. In an object store they are written at the target itself.

    Args:
        work: folder beside a local target.
        goal: where the checkpoint shall be.
        last: name of the file that completes it; "" if the target is a single file.
        ours: pattern of the names of the other files.

    Raises:
        CheckpointExistsError: something is at the target.
    """

    def __init__(self, work: Location, goal: Location, last: str, ours: str) -> None:
        is_empty = goal.is_local and goal.is_dir() and not goal.listing()
        if goal.exists("" if goal.is_local else last) and not is_empty:
            raise _exists(goal)
        self._at = work if goal.is_local or not last else goal
        self._goal, self._ours = goal, ours

    def start(self, left: Any) -> Any:
        """Remove the files of an earlier run; files of others in an object store are refused."""
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
        """Go on in the folder."""
        return not self._at.is_local or self._at.is_dir()

    def complete(self, last: str, data: bytes) -> None:
        """Write the last file, and put all in their place.

        Raises:
            CheckpointExistsError: something is there by now.
        """
        if self._at.is_local:
            self._at.write(last, data)
            self.put_in_place(self._at)
        elif not self._at.remote.create(last, data):
            raise _exists(self._goal)

    def put_in_place(self, made: Location) -> None:
        """Rename or copy a finished folder or file; raises as :meth:`complete`."""
        with store_errors("putting the result at", self._goal.url):
            if self._goal.is_local and self._goal.is_dir() and not self._goal.listing():
                self._goal.path.rmdir()
            if self._goal.exists():
                raise _exists(self._goal)
            if self._goal.is_local:
                made.path.rename(self._goal.path)
            else:
                self._goal.remote.copy_from(made.remote, "", "", any_size=True)


def _exists(goal: Location, what: str = "") -> CheckpointExistsError:
    return CheckpointExistsError(
        f"{goal.url} already exists{what}; convert to elsewhere", url=goal.url
    )


def values_of(extras: Extras) -> Iterator[tuple[str, tuple[str | int, ...], Any]]:
    """``(key, path, value)`` of what is no tensor."""
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
    """The values that have a JSON form, for formats that hold tensors and hardly anything else.
    Others are left out, and logged; so are tensors, which nobody would look for there."""
    values: dict[str, Any] = {}
    left_out: list[str] = []
    paths: dict[str, Any] = dict(extras.record.paths)
    for key, path, value in values_of(extras):
        torch = sys.modules.get("torch")  # without it no value is a tensor
        try:
            if torch is not None and isinstance(value, torch.Tensor):
                raise NotPlainError("a tensor among the values that are not sharded")
            values[key] = as_json(value)
            paths[key] = path
        except NotPlainError as reason:
            left_out.append(f"{key} ({reason})")
    if left_out:
        shown = "; ".join(left_out[:8])
        logger.log(level, "%d value(s) without a JSON form are left out: %s", len(left_out), shown)
    return StateRecord(paths, values)
