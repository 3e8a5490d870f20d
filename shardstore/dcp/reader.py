"""The storage reader for PyTorch DCP: ``dcp.load(state, storage_reader=StorageReader(url))``.

Reads what :class:`shardstore.dcp.StorageWriter` wrote, and the tensors and values of any other
shardstore checkpoint, under any layout: regions go straight into the memory of the tensors that the
planner names. Nothing that is stored is unpickled, except objects that had no JSON form, and those
with ``weights_only``.
"""

from __future__ import annotations

import io
import itertools
import logging
import os
import pickle
import secrets
import weakref
from collections.abc import Container, Iterable, Iterator, Mapping, MutableSequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar, cast, overload

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as DcpStorageReader
from torch.futures import Future

from shardstore.errors import (
    CheckpointingException,
    DTypeMismatchError,
    KeyNameError,
    MissingKeyError,
)
from shardstore.loading.host import HostRead, read_through_host
from shardstore.loading.plan import goes_through_host, require_writable
from shardstore.mapping import ShardedObject
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.format import dtypes
from shardstore.storage.format.grid import Box
from shardstore.storage.movers.chunks import RegionRead
from shardstore.storage.options import require_number
from shardstore.storage.stores.location import Location, given_options
from shardstore.strategies.common import TorchCommonLoadStrategy
from shardstore.validation import verify_checkpoint_and_load_strategy
from shardstore.values.record import StatePath, StateRecord

__all__ = ["Placed", "SentItems", "StorageReader", "StoredValues", "described", "forget_listings"]

T = TypeVar("T")

_process = secrets.token_bytes(8)
_numbers = itertools.count()
_at_home: weakref.WeakValueDictionary[bytes, SentItems[Any]] = weakref.WeakValueDictionary()


class SentItems(MutableSequence[T]):
    """A list that is not unpickled where nobody looks into it.

    Whoever makes it keeps it until it is back. It may be changed, as a list may: from then on it is
    sent as it is.

    Args:
        items: what it holds.
    """

    def __init__(self, items: Iterable[T]) -> None:
        self._items: list[T] | None = list(items)
        self._length = len(self._items)
        self._packed: bytes | None = None
        # A forked process has the same token to begin with, and is another home.
        self._token = _process + os.getpid().to_bytes(4) + next(_numbers).to_bytes(8)
        _at_home[self._token] = self

    def __reduce__(self) -> tuple[Any, ...]:
        """As bytes that were made once."""
        if self._packed is None:
            self._packed = pickle.dumps(self._items, pickle.HIGHEST_PROTOCOL)
        return _arrived, (self._token, self._length, self._packed)

    @property
    def _list(self) -> list[T]:
        """The items, unpickled."""
        if self._items is None:
            assert self._packed is not None
            # From the process group that this whole object was unpickled from a moment ago.
            self._items = pickle.loads(self._packed)
        return self._items

    def _changed(self) -> list[T]:
        """The items, which are no more what was kept or packed."""
        items = self._list
        _at_home.pop(self._token, None)
        self._token, self._packed = b"", None
        return items

    def __len__(self) -> int:
        return self._length if self._items is None else len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._list)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        return self._list[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self._changed()[index] = value

    def __delitem__(self, index: int | slice) -> None:
        del self._changed()[index]

    def insert(self, index: int, value: T) -> None:
        """As that of a list."""
        self._changed().insert(index, value)

    def sort(self, *, key: Any = None, reverse: bool = False) -> None:
        """As that of a list."""
        self._changed().sort(key=key, reverse=reverse)

    def copy(self) -> list[T]:
        """The items as an ordinary list."""
        return list(self._list)

    # Not by way of a pickle, which would give this very object.
    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> list[T]:
        return deepcopy(self._list, memo)

    def __add__(self, other: Iterable[T]) -> list[T]:
        return [*self._list, *other]

    def __radd__(self, other: Iterable[T]) -> list[T]:
        return [*other, *self._list]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, list | SentItems):
            return self._list == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._list)


def _arrived(token: bytes, length: int, packed: bytes) -> SentItems[Any]:
    """What has been sent: the very items where they come from, else the bytes alone."""
    found = _at_home.get(token)
    if found is not None:
        return found
    made: SentItems[Any] = SentItems.__new__(SentItems)
    made._items, made._length, made._packed, made._token = None, length, packed, token
    return made


logger = logging.getLogger(__name__)

Described = TensorStorageMetadata | BytesStorageMetadata


def described(dtype: torch.dtype, shape: tuple[int, ...]) -> TensorStorageMetadata:
    """A tensor to DCP's planner: of one piece, since any region of it can be read."""
    size = torch.Size(shape)
    whole = ChunkStorageMetadata(torch.Size([0] * len(shape)), size)
    return TensorStorageMetadata(TensorProperties(dtype), size, [whole])


@dataclass
class StoredValues:
    """Everything that is no array.

    Attributes:
        location: of the checkpoint.
        record: values as JSON, names of objects in files, and paths.
        values: flat key -> value of the common part, tensors left out.
        tensors: flat key -> tensor of the common part.
        objects: flat key -> sharded object, without data.
        paths: flat key -> path in the nested state dict, as far as it is known.
    """

    location: Location
    record: StateRecord = field(default_factory=StateRecord)
    values: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    objects: Mapping[str, ShardedObject] = field(default_factory=dict)
    paths: Mapping[str, StatePath] = field(default_factory=dict)

    @classmethod
    def of(cls, stored: StoredCheckpoint) -> StoredValues:
        """What a checkpoint holds. Any rank may call it; it waits for no other.

        Raises:
            KeyNameError: values at two paths have one flat key.
            UnsafeObjectError: the common part needs a class that was not allowed.
        """
        location = stored.location
        if stored.root is not None:
            record = StateRecord.from_root(stored.root.attributes, location.url)
            if record is not None:
                objects = {key: ShardedObject(key, None, (1,), (0,)) for key in record.files}
                return cls(location, record, objects=objects, paths=record.paths)
        return cls._of_common_part(location, stored.arrays)

    @classmethod
    def _of_common_part(cls, location: Location, arrays: Container[str]) -> StoredValues:
        _, common = verify_checkpoint_and_load_strategy(location.place)
        try:
            flat, paths = flatten_state_dict(common.load_common(location.place))
        except ValueError as error:
            raise KeyNameError(
                f"{location.url}: two common values have one flat key, by which PyTorch DCP knows "
                f"them ({error}); load it with shardstore.load",
                url=location.url,
            ) from error
        for key in [key for key in flat if key in arrays]:
            logger.warning(
                "%s: the common value at %s can not be loaded through PyTorch DCP: an array has "
                "the same key; load it with shardstore.load_common_state_dict",
                location.url,
                paths[key],
            )
            del flat[key]
        tensors = {key: value for key, value in flat.items() if _is_dense(value)}
        objects: dict[str, ShardedObject] = {}
        for unique_key, sharded in common.load_sharded_metadata(location.place).items():
            # Of an object in one part the key says all; parts have names of their own.
            key = sharded.key if sharded.global_shape == (1,) else unique_key
            if key not in flat and key not in arrays:
                objects[key] = sharded
        values = {key: value for key, value in flat.items() if key not in tensors}
        return cls(location, StateRecord(), values, tensors, objects, paths)

    def described(self) -> Iterator[tuple[str, Described]]:
        """Flat keys, and what the planner is told of them."""
        for key, tensor in self.tensors.items():
            yield key, described(tensor.dtype, tuple(tensor.shape))
        for key in (*self.record.values, *self.values, *self.objects):
            yield key, BytesStorageMetadata()

    def pickled(self, key: str) -> io.BytesIO:
        """A value as the planner wants it: what ``torch.load`` reads, made anew in this process.

        Raises:
            MissingKeyError: there is none of that key.
            UnsafeObjectError: it needs a class that was not allowed.
        """
        url = self.location.url
        if key in self.values:
            value = self.values[key]
        elif key in self.record.values:
            value = self.record.value(key, url)
        elif key in self.objects:
            wanted = {key: self.objects[key]}
            loader = TorchCommonLoadStrategy()
            value = loader.load_sharded_objects(wanted, self.location.place)[key]
        else:
            raise MissingKeyError(f"value {key!r} is not in the checkpoint {url}", key=key, url=url)
        stream = io.BytesIO()
        torch.save(value, stream)
        stream.seek(0)
        return stream


def _is_dense(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


class Placed:
    """A place that is given at the beginning, or by DCP as ``checkpoint_id``.

    Args:
        url: the place; ``None`` if DCP is to name it.
        storage_options: options of the store behind the URL.

    Raises:
        ArgumentError: they are no mapping, or the place is none.
    """

    _purpose: ClassVar[str]
    """What the place is for, and the function of DCP that can name it: ``"write to:save"``."""

    def __init__(
        self, url: str | os.PathLike[str] | None, storage_options: Mapping[str, Any] | None
    ) -> None:
        self._storage_options = given_options(storage_options)
        self._location: Location | None = None
        if url is not None:
            self._go_to(url)

    def _go_to(self, place: str | os.PathLike[str]) -> None:
        self._location = Location.of(place, **self._storage_options)

    @property
    def _place(self) -> Location:
        if self._location is None:
            verb, function = self._purpose.split(":")
            raise CheckpointingException(
                f"the {type(self).__name__} has no place to {verb}: give it a URL, or give "
                f"torch.distributed.checkpoint.{function} a checkpoint_id"
            )
        # A location that was pickled, for DCP's process that saves, has left its options behind.
        return Location.of(self._location, **self._storage_options)

    @property
    def checkpoint_id(self) -> str:
        """Where the checkpoint is."""
        return self._place.url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint can be there: a local path or a URL."""
        return bool(os.fspath(checkpoint_id))


def forget_listings(place: Location) -> None:
    """Have the program's own fsspec file system list the folders above a place anew.

    It keeps listings for ever, except of what it wrote itself (as DCP's own storage does by it): a
    trainer that looks for its steps there would see those of its first look.
    """
    if place.is_local:
        return
    # A file system that the program can not have made has no listings to forget either.
    with suppress(Exception):
        import fsspec  # type: ignore[import-untyped]

        file_system, path = fsspec.core.url_to_fs(place.url)
        file_system.invalidate_cache(path)


STAGING_BYTES = 256 * 1024 * 1024


class StorageReader(Placed, DcpStorageReader):
    """Reads a shardstore checkpoint for ``torch.distributed.checkpoint.load``.

    DCP calls each method on the ranks that its docstring names; no method waits for other ranks.
    Every byte that is read is verified.

    Args:
        url: where from; ``None`` if DCP is given a ``checkpoint_id`` instead.
        cast: copy into tensors of another data type than the stored one, which is refused
            otherwise.
        threads: threads that read, each rank; default: one a processor, at most 8.
        storage_options: options of the store behind the URL.

    Raises:
        ArgumentError: ``threads`` is no number of at least 1.
    """

    _purpose = "read from:load"

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        *,
        cast: bool = False,
        threads: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(url, storage_options)
        require_number("threads", threads, none=True)
        self._cast = cast
        self._threads = threads
        self._stored: StoredCheckpoint | None = None
        self._values: StoredValues | None = None
        self._sent: SentItems[ReadItem] | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load. Called by all ranks."""
        if checkpoint_id is not None:
            self._go_to(checkpoint_id)
        self._stored = self._values = self._sent = None

    def read_metadata(self) -> Metadata:
        """What is stored: one document. Called by all ranks.

        Raises:
            NotACheckpointError: nothing there that can be loaded.
        """
        stored = StoredCheckpoint(self._place, threads=self._threads)
        stored.require()
        values = StoredValues.of(stored)
        found: dict[str, Any] = {
            key: described(dtypes.torch_dtype(meta.dtype), meta.shape)
            for key, meta in stored.arrays.items()
        }
        found.update(values.described())
        self._stored, self._values = stored, values
        return Metadata(
            state_dict_metadata=found,
            planner_data={key: values.paths.get(key, (key,)) for key in found},
            storage_meta=StorageMeta(checkpoint_id=self.checkpoint_id),
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to do: the checkpoint was opened for its metadata. Called by all ranks."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to add; but the items go to the coordinator as bytes, and are kept here. Called
        by all ranks."""
        self._sent = SentItems(plan.items)
        return replace(plan, items=cast("list[ReadItem]", self._sent))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to add. Called by the coordinator."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's items into the planner's tensors. Called by all ranks.

        Raises:
            DTypeMismatchError: a tensor has another data type than what is stored, without
                ``cast``.
            ArgumentError: a tensor can not be filled in place: it is sparse, or expanded.
            ChunkMissingError, ChunkCorruptError: what is stored is not what was written.
            UnsafeObjectError: an object needs a class that was not allowed.
        """
        assert self._stored is not None
        assert self._values is not None
        regions: list[RegionRead] = []
        targets: list[tuple[ReadItem, torch.Tensor]] = []
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._values.pickled(item.storage_index.fqn))
                continue
            target = planner.resolve_tensor(item).detach()
            require_writable(target, item.storage_index.fqn)
            targets.append((item, target))
            common = self._values.tensors.get(item.storage_index.fqn)
            if common is not None:
                self._check_dtype(item, target.dtype, common.dtype)
                where: tuple[Any, ...] = (..., *_box(item, common.ndim).slices)
                with torch.no_grad():
                    target.copy_(common[where])
                continue
            meta = self._stored.arrays[item.storage_index.fqn]
            stored = dtypes.torch_dtype(meta.dtype)
            self._check_dtype(item, target.dtype, stored)
            box = _box(item, len(meta.shape))
            if type(target) is not torch.Tensor:  # which may refuse to be written in parts
                whole = torch.empty(box.shape, dtype=stored)
                copies.append((target, whole))
                target = whole
            if target.dtype == stored and not goes_through_host(target):
                regions.append(RegionRead(meta, box, dtypes.as_numpy(target)))
            else:
                regions.append(HostRead(meta, box, target))
        if regions:
            read_through_host(self._stored.read, regions, STAGING_BYTES)
        with torch.no_grad():
            for target, whole in copies:
                target.copy_(whole)
        for item, target in targets:
            planner.commit_tensor(item, target)
        self._sent = None
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _check_dtype(self, item: ReadItem, wanted: torch.dtype, stored: torch.dtype) -> None:
        key = item.storage_index.fqn
        if wanted != stored and not self._cast:
            raise DTypeMismatchError(
                f"key {key!r} is stored as {stored} in {self.checkpoint_id} but is to be loaded "
                f"into {wanted}; nothing is cast silently: load into {stored} and convert, "
                "or give the StorageReader cast=True",
                key=key,
                url=self.checkpoint_id,
            )


def _box(item: ReadItem, ndim: int) -> Box:
    """The region of the stored tensor that an item is."""
    start = item.storage_index.offset or (0,) * ndim
    offset = tuple(a + b for a, b in zip(start, item.storage_offsets, strict=True))
    return Box(offset, tuple(item.lengths))
