"""DCP's own files, ``.metadata`` and ``__R_N.distcp``: adds an item, and reads a checkpoint.

``.metadata`` is a pickle. A restricted unpickler reads it and rebuilds only the classes of DCP's
metadata. Any other class becomes an inert object, so no code of the file can run. Tensors are
mapped from where ``torch.save`` put their bytes, and :func:`.load_bytes` loads objects.
Megatron-Core's ``torch_dist`` backend writes the same format with additional metadata.
"""

from __future__ import annotations

import io
import math
import os
import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any, Self, cast

import numpy as np
import torch
from fsspec.spec import AbstractBufferedFile  # type: ignore[import-untyped]
from numpy.typing import NDArray
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from shardstore import errors
from shardstore.saving.plan import stored_name
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta, array_of_one_chunk
from shardstore.storage.format.grid import Box, flat_range_boxes
from shardstore.storage.format.names import COMMON_OBJECT, DCP_METADATA_NAME, require_inside
from shardstore.storage.movers.chunks import ReadDone, RegionRead
from shardstore.storage.movers.mover import Mover
from shardstore.storage.movers.ranges import read_bytes
from shardstore.storage.runtime.parallel import run_batched
from shardstore.storage.stores.location import Location
from shardstore.values.record import state_path
from shardstore.values.torch_archive import Records
from shardstore.values.torch_dump import dump
from shardstore.values.torch_values import BoundedUnpickler, load_bytes

BATCH_BYTES = 4 * 1024 * 1024
BLOCK_BYTES = 64 * 1024
"""Block size of reads of the small structures in a file, in bytes."""
ORIGINAL_SHAPE = "nd_reformulated_orig_global_shape"
"""Megatron-Core's name for the shape of a tensor that is stored as flattened ranges."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A box of a tensor and its place in a file.

    Attributes:
        box: the box.
        extent: bytes of the item that holds the box.
        stored_shape: shape of the item.
        first: index of the box's first element in the flattened item.
    """

    box: Box
    extent: _StorageInfo
    stored_shape: tuple[int, ...]
    first: int = 0


def append(file: IO[bytes], name: str, value: object) -> _StorageInfo:
    """Write a tensor or an object to the end of a file.

    Args:
        file: the open file.
        name: its name.
        value: the value; bytes in the format of ``torch.save`` if it is a ``BytesIO``.

    Returns:
        The place of the value, for the metadata.
    """
    start = file.tell()
    if isinstance(value, io.BytesIO):
        file.write(value.getbuffer())
    else:
        dump(value, file)
    return _StorageInfo(name, start, file.tell() - start)


def tensor_metadata(
    dtype: torch.dtype, shape: Sequence[int], boxes: Iterable[Box]
) -> TensorStorageMetadata:
    """Return DCP's metadata of a tensor that consists of boxes."""
    chunks = [ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape)) for box in boxes]
    return TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), chunks)


class _Inert:
    """Takes the place of each class that is not part of DCP's metadata, and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Ignore the arguments."""

    __setstate__ = append = extend = __setitem__ = __init__


class _Properties(_Inert):
    """Properties of a tensor; only the data type is read."""

    def __setstate__(self, state: Any) -> None:
        self.dtype = state[0]


_DCP = (BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata)
_RECORDS: dict[str, type] = {kind.__name__: kind for kind in (*_DCP, _StorageInfo)}
_RECORDS |= {"MCoreMetadata": Metadata, "TensorProperties": _Properties}
_BUILTIN: dict[str, type] = {kind.__name__: kind for kind in (dict, frozenset, list, set, tuple)}
_BUILTIN |= {"Size": torch.Size, "OrderedDict": dict}


class _MetadataUnpickler(BoundedUnpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        known = _BUILTIN if module in ("torch", "collections", "builtins") else _RECORDS
        return known.get(name, _Inert)


@dataclass
class DcpFiles:
    """A DCP checkpoint in files.

    Attributes:
        location: root of the checkpoint.
        arrays: key -> tensor. Its chunk grid is a placeholder; ``parts`` has the stored boxes.
        parts: key -> stored boxes of a tensor.
        objects: key -> bytes of an object.
        paths: key -> path in the nested state dict, for the keys that the metadata has paths for.
    """

    location: Location
    arrays: dict[str, ArrayMeta] = field(default_factory=dict)
    parts: dict[str, Sequence[StoredPart]] = field(default_factory=dict)
    objects: dict[str, _StorageInfo] = field(default_factory=dict)
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)
    _corners: dict[str, NDArray[np.int64]] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def open(cls, place: str | os.PathLike[str] | Location) -> Self:
        """Read the metadata. Any rank may call it; it waits for no other.

        Raises:
            NotACheckpointError: ``.metadata`` is missing, or is not metadata of DCP.
            DamagedCheckpointError: ``.metadata`` cannot be read.
        """
        location = Location.of(place)
        return cls.parse(location, _read(location))

    @classmethod
    def parse(cls, location: Location, data: bytes) -> Self:
        """Return the checkpoint that a ``.metadata`` document describes.

        Args:
            location: root of the checkpoint.
            data: content of the document.

        Raises: the errors of :meth:`open`.
        """
        url = f"{location.url}/{DCP_METADATA_NAME}"
        with errors.as_damage(url):
            metadata = _unpickled(data, url)
            stored: dict[tuple[str, tuple[int, ...] | None], _StorageInfo] = {}
            for index, info in metadata.storage_data.items():
                if info.transform_descriptors:
                    raise errors.FormatVersionError(
                        f"{url}: {index.fqn!r} was transformed when it was written "
                        f"({info.transform_descriptors}); shardstore cannot undo that",
                        key=index.fqn,
                        url=url,
                    )
                name = require_inside(info.relative_path, url)
                offset = None if index.offset is None else tuple(index.offset)
                stored[index.fqn, offset] = _StorageInfo(name, int(info.offset), int(info.length))
            paths = _paths_of(metadata)
            if not all(type(key) is str for key in (*metadata.state_dict_metadata, *paths)):
                raise TypeError("a key is not a string")
            files = cls(location, paths={key: state_path(path) for key, path in paths.items()})
            original = vars(metadata).get("mcore_data") or {}
            for key, about in metadata.state_dict_metadata.items():
                if not isinstance(about, TensorStorageMetadata):
                    files.objects[key] = stored[key, None]
                    continue
                parts = []
                for chunk in about.chunks:
                    box = Box(tuple(map(int, chunk.offsets)), tuple(map(int, chunk.sizes)))
                    parts.append(StoredPart(box, stored[key, box.offset], box.shape))
                shape = tuple(map(int, about.size))
                unfolded = original.get(key, {}).get(ORIGINAL_SHAPE)
                if unfolded is not None:
                    parts = [part for one in parts for part in _unfolded(one, shape, unfolded)]
                    shape = tuple(map(int, unfolded))
                dtype = stored_name(key, about.properties.dtype, torch.strided)
                files.arrays[key] = array_of_one_chunk(key, shape, dtype)
                files.parts[key] = parts
            return files

    def read(self, reads: Sequence[RegionRead], done: ReadDone = lambda *_: None) -> None:
        """Read regions of tensors into their destinations.

        Args:
            reads: the regions.
            done: called after each, with its bytes and 1.

        Raises:
            ChunkMissingError: a file is missing.
            DamagedCheckpointError: a file does not match the metadata, or a part of a region is
                not stored.
        """

        def work(batch: Sequence[RegionRead]) -> None:
            for read in batch:
                self._read_one(read, done)

        run_batched(reads, work, weight=lambda read: read.out.nbytes, batch_weight=BATCH_BYTES)

    def _read_one(self, read: RegionRead, done: ReadDone) -> None:
        key, box = read.array.key, read.box
        seen = 0
        for part in self._touching(key, box):
            common = part.box.intersect(box)
            if common is None:
                continue
            into: tuple[Any, ...] = (..., *common.relative_to(box.offset).slices)
            self._read_part(read.array, part, common.relative_to(part.box.offset), read.out[into])
            seen += common.size
        if seen != box.size:
            raise errors.DamagedCheckpointError(
                f"key {key!r}: {seen} of the {box.size} elements at offset {box.offset} shape "
                f"{box.shape} are stored in {self.location.url}",
                key=key,
                url=self.location.url,
            )
        done(read.out.nbytes, 1)

    def _touching(self, key: str, box: Box) -> Iterator[StoredPart]:
        """Yield the parts of a tensor that can overlap a box. A conversion asks for many boxes, and
        a tensor may have a part for each of thousands of ranks."""
        parts = self.parts[key]
        if key not in self._corners:
            corners = np.array([(part.box.offset, part.box.end) for part in parts], np.int64)
            self._corners[key] = corners.reshape(len(parts), 2, len(box.shape))
        low, high = self._corners[key].swapaxes(0, 1)
        touching = np.flatnonzero(((low < box.end) & (high > box.offset)).all(1))
        return (parts[number] for number in touching.tolist())

    def _read_part(self, meta: ArrayMeta, part: StoredPart, within: Box, out: NDArray[Any]) -> None:
        """Read a box of a part into ``out``. The box's offset is relative to the part's corner."""
        key, at, extent = meta.key, part.box.offset, part.extent
        name, first = extent.relative_path, extent.offset
        path = f"{self.location.url}/{name}"
        what = f"key {key!r} at offset {at}: {path} holds no such tensor at byte {first}"
        try:
            with errors.as_damage(path, what, key):
                view = _RangeFile(self.location, name, first, extent.length)
                found = load_bytes(view, path, key, meta=True)
                if not isinstance(found, torch.Tensor) or found.shape != part.stored_shape:
                    raise ValueError("the stored item is not a tensor of this shape")
                if found.dtype != dtypes.torch_dtype(meta.dtype):
                    raise ValueError(f"the stored data type is {found.dtype}")
                if not found.is_contiguous() or found.storage_offset():
                    flat = dtypes.as_numpy(load_bytes(view, path, key)).reshape(-1)
                    where: tuple[Any, ...] = (..., *within.slices)
                    held = flat[part.first : part.first + part.box.size]
                    out[...] = held.reshape(part.box.shape)[where]
                    return
                records = Records(view)
                if records.entries["data/0"].file_size < found.nbytes:
                    raise ValueError("the tensor is truncated")
                first += records.start("data/0") + part.first * out.dtype.itemsize
                whole = array_of_one_chunk(key, part.box.shape, meta.dtype)
                read = RegionRead(whole, within, out)
                Mover.of(self.location).read_boxes([((name, first), read)], lambda *_: None)
        except FileNotFoundError:
            raise _missing(f"key {key!r} at offset {at}", path, key) from None
        except errors.StorageError as error:
            error.key = error.key or key
            raise

    def read_unwrapped(self, key: str) -> Any:
        """Load an object without the list of one in which Megatron-Core stores it. Raises the
        errors of :meth:`read_object`."""
        value = self.read_object(key)
        return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value

    def read_object(self, key: str) -> Any:
        """Load an object with :func:`.load_bytes`.

        Raises:
            UnsafeObjectError: the object needs a class that is not allowed.
            MissingKeyError, ChunkMissingError: see :meth:`object_bytes`.
        """
        data = self.object_bytes(key)
        return load_bytes(data, f"{self.location.url}/{self.objects[key].relative_path}", key)

    def object_bytes(self, key: str) -> bytes:
        """Return an object as it is stored.

        Raises:
            MissingKeyError: the checkpoint has no object with this key.
            ChunkMissingError: the file is missing.
        """
        extent = self.objects.get(key)
        if extent is None:
            raise errors.MissingKeyError(
                f"object {key!r} is not in the checkpoint {self.location.url}; it has "
                f"{sorted(self.objects)[:8]}",
                key=key,
                url=self.location.url,
            )
        try:
            stop = extent.offset + extent.length
            return read_bytes(self.location, extent.relative_path, extent.offset, stop)
        except FileNotFoundError:
            path = f"{self.location.url}/{extent.relative_path}"
            raise _missing(f"object {key!r}", path, key) from None


def remove_keys(location: Location, prefix: str) -> bool:
    """Remove the tensors and objects whose keys begin with a prefix from ``.metadata``, and then
    the files whose names begin with it and which hold no others. One rank calls it.

    Returns:
        False if there is no such file; then nothing changes, as in Megatron-Core.

    Raises: the errors of :meth:`DcpFiles.open`.
    """

    def stays(key: str) -> bool:
        return not key.startswith(prefix) or key.startswith(f"{COMMON_OBJECT}/")

    url = f"{location.url}/{DCP_METADATA_NAME}"
    with errors.as_damage(url):
        old = _unpickled(_read(location), url)
        kept = {index: at for index, at in old.storage_data.items() if stays(index.fqn)}
        held = {at.relative_path for at in kept.values()}
        names = {require_inside(at.relative_path, url) for at in old.storage_data.values()}
        names = {name for name in names - held if name.startswith(prefix)}
        about = {key: one for key, one in old.state_dict_metadata.items() if stays(key)}
        for one in about.values():
            if isinstance(one, TensorStorageMetadata):
                one.properties = TensorProperties(dtype=one.properties.dtype)
        paths = {key: path for key, path in _paths_of(old).items() if stays(key)}
        new = Metadata(about, paths or None, kept, StorageMeta(), old.version)
        cast(Any, new).mcore_data = vars(old).get("mcore_data", {})
    if names:
        location.replace(DCP_METADATA_NAME, pickle.dumps(new))
    for name in names:
        location.delete(name)
    return bool(names)


def _read(location: Location) -> bytes:
    """Return the content of ``.metadata``."""
    try:
        return location.read(DCP_METADATA_NAME)
    except FileNotFoundError:
        url = f"{location.url}/{DCP_METADATA_NAME}"
        raise errors.NotACheckpointError(
            f"{url} is missing: {location.url} is not a complete DCP checkpoint", url=url
        ) from None


def _unpickled(data: bytes, url: str) -> Metadata:
    """Return the metadata that a ``.metadata`` document holds."""
    metadata = _MetadataUnpickler(io.BytesIO(data)).load()
    if isinstance(metadata, Metadata) and isinstance(metadata.state_dict_metadata, dict):
        return metadata
    raise errors.NotACheckpointError(f"{url} is not the metadata of a DCP checkpoint", url=url)


def _paths_of(metadata: Metadata) -> dict[str, Any]:
    """Return the path of each key that has one."""
    return metadata.planner_data if isinstance(metadata.planner_data, dict) else {}


def _missing(what: str, path: str, key: str) -> errors.ChunkMissingError:
    return errors.ChunkMissingError(
        f"{what}: {path} is missing; the checkpoint is damaged, load an earlier one",
        key=key,
        url=path,
    )


def _unfolded(
    part: StoredPart, stored_shape: tuple[int, ...], shape: Sequence[int]
) -> list[StoredPart]:
    """Return the boxes of a tensor that a flattened range of Megatron-Core covers.

    Megatron-Core stores flattened ranges in an array of another shape: its leading axes are the
    grid of shards, and its last axis has the elements of a flattened shard.
    """
    ndim = len(shape)
    counts, index = stored_shape[:ndim], part.box.offset[:ndim]
    edges = tuple(n // count for n, count in zip(shape, counts, strict=True))
    if len(stored_shape) != ndim + 1 or math.prod(edges) != stored_shape[-1]:
        raise ValueError(f"shards of {edges} do not have {stored_shape[-1]} elements")
    corner = [i * edge for i, edge in zip(index, edges, strict=True)]
    start, size = part.box.offset[-1], part.box.shape[-1]
    out = []
    first = 0
    for box in flat_range_boxes(edges, start, start + size):
        offset = tuple(a + b for a, b in zip(corner, box.offset, strict=True))
        out.append(StoredPart(Box(offset, box.shape), part.extent, part.box.shape, first))
        first += box.size
    return out


class _RangeFile(AbstractBufferedFile):  # type: ignore[misc]
    """File object over a range of a file, for readers of small structures in it.

    It reads ahead and keeps what it read last, because such readers seek back and forth. It is not
    meant for the array data.

    Args:
        location: folder or prefix of the file.
        name: name of the file.
        start: first byte of the range.
        length: length of the range in bytes.
    """

    def __init__(self, location: Location, name: str, start: int, length: int) -> None:
        self._read = partial(read_bytes, location, name)
        self._first = start
        super().__init__(None, name, block_size=BLOCK_BYTES, cache_type="bytes", size=length)

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self._read(self._first + start, self._first + end)
