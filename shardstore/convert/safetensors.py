"""Safetensors as source and target of a conversion: one file, or several with an index.

A file is the length of the header (8 bytes, little-endian), the header (JSON: name -> ``dtype``,
``shape``, ``data_offsets``) and the tensors' bytes. The library safetensors writes only whole
files; a conversion reads slices and writes files piece by piece.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, groupby
from typing import Annotated, Any

import msgspec

from shardstore import errors
from shardstore.convert.formats import Arrays, Extras, FileTarget, Read, Receipts, record_of
from shardstore.inspection.opened import array_bytes
from shardstore.storage.commit.identity import instead
from shardstore.storage.format.documents import ArrayMeta, array_of_one_chunk
from shardstore.storage.format.grid import Box, Grid
from shardstore.storage.movers.chunk_bytes import as_bytes
from shardstore.storage.movers.chunks import ChunkWrite, RegionRead
from shardstore.storage.movers.ranges import for_each_region, read_box, read_bytes
from shardstore.storage.stores.location import Location, store_errors
from shardstore.values.record import MEMBER, StateRecord

INDEX_SUFFIX = ".safetensors.index.json"
INDEX_NAME = f"model{INDEX_SUFFIX}"
STATE_METADATA = "shardstore.state_dict"
"""Name of the metadata entry that holds the values that are not tensors."""
MAX_PARTS = 9000
"""Parts of an upload; S3 allows 10,000 (Amazon S3 user guide, "Multipart upload limits")."""
MIN_PART_BYTES = 8 * 1024 * 1024
MAX_PART_BYTES = 64 * 1024 * 1024
MAX_HEADER_BYTES = 100_000_000
METADATA = "__metadata__"

_NAMES = {
    "BOOL": "bool", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
    "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64",
    "F16": "float16", "F32": "float32", "F64": "float64", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "C64": "complex64",
}  # fmt: skip
_CODES = {name: code for code, name in _NAMES.items()}

Size = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct):
    """A tensor in the header of a file."""

    dtype: str
    shape: tuple[Size, ...]
    data_offsets: tuple[Size, Size]


class _Index(msgspec.Struct):
    """The index of several files."""

    weight_map: dict[str, str]


Place = tuple[str, int]
"""Name of a tensor's file, and the offset of the tensor in it, in bytes."""


def _damaged(path: str, what: object) -> errors.DamagedCheckpointError:
    """Return an error that says what is wrong with a file."""
    text = f"{path} is not a complete safetensors file ({what}); download it again"
    return errors.DamagedCheckpointError(text, url=path)


class SafetensorsSource:
    """Safetensors files of one folder.

    Args:
        folder: folder or prefix of the files.
        names: names of the files.
        weight_map: key -> name of the file, from the index; ``None``: all tensors of the files.

    Attributes:
        left_out: keys of tensors in the files that the index leaves out.

    Raises:
        DamagedCheckpointError: a file is truncated or not a safetensors file.
        DTypeMismatchError: a tensor has a data type that cannot be stored.
        FileNotFoundError: a file is missing.
    """

    def __init__(
        self, folder: Location, names: Sequence[str], weight_map: Mapping[str, str] | None = None
    ) -> None:
        self.location, self.roots = folder, sorted(names)
        self.arrays: dict[str, ArrayMeta] = {}
        self._places: dict[str, Place] = {}
        self._metadata: dict[str, str] = {}
        self._state: object = None
        self.left_out: list[str] = []
        for name in names:
            self._add(name, weight_map)

    def _add(self, name: str, weight_map: Mapping[str, str] | None) -> None:
        """Add the tensors and the metadata of a file."""
        folder, path = self.location, f"{self.location.url}/{name}"
        size, _ = folder.stamp(name) or (0, None)
        length = int.from_bytes(read_bytes(folder, name, 0, 8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise _damaged(path, f"a header of {length} bytes in a file of {size}")
        try:
            text = read_bytes(folder, name, 8, 8 + length)
            header = msgspec.json.decode(text, type=dict[str, Any])
            metadata = msgspec.convert(header.pop(METADATA, None), dict[str, str] | None) or {}
            if kept := metadata.pop(STATE_METADATA, None):
                self._state = msgspec.json.decode(kept)
            entries = msgspec.convert(header, dict[str, _Entry])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _damaged(path, error) from error
        self._metadata |= metadata
        position = 0
        for key, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
            if entry.data_offsets[0] != position:
                raise _damaged(path, f"{key!r} begins at {entry.data_offsets[0]}, not {position}")
            position = entry.data_offsets[1]
        if 8 + length + position != size:
            raise _damaged(path, f"{size - 8 - length} bytes for tensors of {position}")
        for key, entry in entries.items():
            if entry.dtype not in _NAMES:
                raise errors.DTypeMismatchError(
                    f"key {key!r} of {path} has data type {entry.dtype!r}, which cannot be stored "
                    f"as a Zarr array; known: {', '.join(_NAMES)}",
                    key=key,
                    url=path,
                )
            array = array_of_one_chunk(key, entry.shape, _NAMES[entry.dtype])
            start, stop = (8 + length + offset for offset in entry.data_offsets)
            if stop - start != array_bytes(array):
                raise _damaged(path, f"{key!r} of shape {entry.shape} in bytes {start} to {stop}")
            if weight_map is None or weight_map.get(key) == name:
                self.arrays[key], self._places[key] = array, (name, start)
            elif key not in weight_map:
                self.left_out.append(key)

    @classmethod
    def open(cls, place: Location) -> SafetensorsSource:
        """Open a file, an index and its files, or a folder with either.

        Raises:
            NotACheckpointError: there is no such file.
            DamagedCheckpointError: a file is damaged or does not match the index.
        """
        folder, name = _named(place)
        path = f"{folder.url}/{name}"
        try:
            if not name.endswith(INDEX_SUFFIX):
                return cls(folder, [name])
            document = folder.read(name)
        except FileNotFoundError:
            raise errors.NotACheckpointError(f"{path} does not exist", url=path) from None
        try:
            weight_map = msgspec.json.decode(document, type=_Index).weight_map
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _damaged(path, error) from error
        names = list(dict.fromkeys(weight_map.values()))
        if lost := sorted(set(names).difference(folder.listing())):
            raise _damaged(path, f"it names {lost[0]!r}, which is not a file in the same folder")
        found = cls(folder, names, weight_map)
        if missing := sorted(set(weight_map) - set(found.arrays)):
            raise _damaged(path, f"{missing[:4]} are in no file")
        return found

    def boxes(self, key: str) -> list[Box]:
        """Return one box: the tensor is whole."""
        shape = self.arrays[key].shape
        return [Box((0,) * len(shape), shape)]

    def read(self, reads: Sequence[RegionRead]) -> None:
        """Read regions.

        Raises:
            DamagedCheckpointError: a file is missing or truncated.
        """
        for_each_region(reads, self._read_one)

    def _read_one(self, read: RegionRead) -> None:
        key = read.array.key
        name, start = self._places[key]
        try:
            read_box(self.location, name, start, self.arrays[key].shape, read.box, read.out)
        except (FileNotFoundError, ValueError) as error:
            path = f"{self.location.url}/{name}"
            text = f"key {key!r}: {path} changed while it was read ({error})"
            raise errors.DamagedCheckpointError(text, key=key, url=path) from error

    def extras(self) -> Extras:
        """Return the metadata, and the values that a conversion stored in it."""
        metadata, about = dict(self._metadata), {"shardstore": {MEMBER: self._state}}
        path = f"{self.location.url}/{self.roots[0]}"
        record = StateRecord.from_root(about, path) or StateRecord()
        metadata.pop("format", None)
        return Extras(None, record, {}, {"safetensors": metadata} if metadata else {})


def _named(place: Location) -> tuple[Location, str]:
    """Return the folder, and the name of the file or index to open.

    Raises:
        NotACheckpointError: the place holds no safetensors file, or more than one without an index.
    """
    if is_file_name(place.name) and not place.is_dir():
        return Location(place.url.rpartition("/")[0], place.options), place.name
    names = place.listing()
    indices = [name for name in names if name.endswith(INDEX_SUFFIX)]
    files = [name for name in names if name.endswith(".safetensors")]
    if len(indices) == 1:
        return place, indices[0]
    if len(files) == 1 and not re.search(r"-of-(?!00001\.)\d{5}\.", files[0]):  # a part of several
        return place, files[0]
    if place.is_local and not place.is_dir():
        found = instead(place) or "its name ends in neither .safetensors nor .json"
        raise place.error(
            f" is a file, but not a safetensors file: {found}", errors.NotACheckpointError
        )
    raise place.error(
        f" holds {len(indices)} safetensors indices and {len(files)} files; give the path of one "
        "of them",
        errors.NotACheckpointError,
    )


def _too_large(name: str, size: int, tensors: Arrays, record: StateRecord) -> errors.ArgumentError:
    """Return the error for a header, which names the largest value in it."""
    lengths = {key: len(json.dumps(value)) for key, value in record.values.items()}
    key = max(lengths, key=lengths.__getitem__, default="")
    return errors.ArgumentError(
        f"the header of {name} would have {size} bytes, more than the {MAX_HEADER_BYTES} that "
        f"safetensors reads; nothing was written. It names {len(tensors)} tensors, and its largest "
        f"part is the value of {key!r} ({lengths.get(key, 0)} bytes of JSON): convert to several "
        "files (file_bytes) or to another format, or leave the value out",
        key=key,
    )


def is_file_name(name: str) -> bool:
    """Return whether a name is that of a safetensors file or index."""
    return name.endswith((".safetensors", INDEX_SUFFIX))


class SafetensorsTarget(FileTarget):
    """One file ``NAME.safetensors``, or a folder with several files and an index.

    On a disk, files have their full size from the beginning. In an object store, each file is one
    upload; an interrupted upload starts again. Several files are uploaded to the target itself, the
    index last. A single file is uploaded under another name, and the store copies it after it is
    verified.

    Args:
        work: folder or prefix beside the target.
        goal: path or URL of a file, or of a folder.
        file_bytes: approximate size of each of several files.
        budget_bytes: approximate memory for an upload.
    """

    def __init__(self, work: Location, goal: Location, file_bytes: int, budget_bytes: int) -> None:
        self._single = goal.name if goal.name.endswith(".safetensors") else None
        names = r"model-\d{5}-of-\d{5}\.safetensors"
        super().__init__(work, goal, "" if self._single else INDEX_NAME, names)
        self._file_bytes = sys.maxsize if self._single else file_bytes
        self._budget = budget_bytes
        self._sizes: dict[str, int] = {}
        self._places: dict[str, Place] = {}
        self._stream: Any = None

    def prepare(self, arrays: Arrays, extras: Extras) -> None:
        """Assign the tensors to files in the given order.

        Raises:
            DTypeMismatchError: the format lacks the data type of a tensor.
            ArgumentError: a header is too large.
        """
        self._arrays = arrays
        self._heads = self._headers(record_of(extras))

    def begin(self, arrays: Arrays, extras: Extras, known: Receipts) -> Receipts:
        """Write the headers, and find the files that are complete."""
        if self._at.is_local:
            for name, head in self._heads.items():
                path = f"{self._at.url}/{name}"
                with open(path, "r+b" if os.path.exists(path) else "w+b") as file:
                    file.write(head)
                    file.truncate(self._sizes[name])
            return known
        sizes = {name: size for name, size, _ in self._at.remote.details()}
        done = {name for name in self._sizes if sizes.get(name) == self._sizes[name]}
        return {at: row for at, row in known.items() if self._places[at[0]][0] in done}

    def _headers(self, record: StateRecord) -> dict[str, bytes]:
        """Return the header of each file, with its length before it. The tensors follow in their
        order. Set the tensors' places and the files' sizes.

        Raises: see :meth:`prepare`.
        """
        most, starts = self._file_bytes, accumulate(map(array_bytes, self._arrays), initial=0)
        numbered = groupby(zip(self._arrays, starts, strict=False), lambda at: at[1] // most)
        groups = [[meta for meta, _ in group] for _, group in numbered] or [[]]
        about = {"format": "pt", STATE_METADATA: json.dumps(record.to_json())}
        heads = {}
        for i, group in enumerate(groups):
            name = self._single or f"model-{i + 1:05}-of-{len(groups):05}.safetensors"
            header: dict[str, Any] = {METADATA: about if i == 0 else {"format": "pt"}}
            stop = 0
            for meta in group:
                if meta.dtype not in _CODES:
                    raise errors.DTypeMismatchError(
                        f"key {meta.key!r} has data type {meta.dtype}, which safetensors lacks; "
                        "convert it first",
                        key=meta.key,
                    )
                start, stop = stop, stop + array_bytes(meta)
                header[meta.key] = _Entry(_CODES[meta.dtype], meta.shape, (start, stop))
            text = msgspec.json.encode(header)
            text += b" " * (-len(text) % 8)
            if len(text) > MAX_HEADER_BYTES:
                raise _too_large(name, len(text), group, record)
            heads[name] = len(text).to_bytes(8, "little") + text
            for meta in group:
                self._places[meta.key] = name, len(heads[name]) + header[meta.key].data_offsets[0]
            self._sizes[name] = len(heads[name]) + stop
        return heads

    def write(self, chunks: Sequence[ChunkWrite]) -> list[Any]:
        """Write chunks to their places in the files. The chunks are in the order of the files."""
        for chunk in chunks:
            name, start = self._places[chunk.array.key]
            values = chunk.data()
            data = as_bytes(values).data
            if not self._at.is_local:
                self._upload(name, data)
                continue
            corner = chunk.array.grid.box(chunk.index).offset
            first = Grid(chunk.array.shape, (1,) * values.ndim).linear(corner)
            path = f"{self._at.url}/{name}"
            with store_errors("writing", path), open(path, "r+b") as file:
                file.seek(start + first * values.itemsize)
                file.write(data)
        return [None] * len(chunks)

    def _upload(self, name: str, data: memoryview) -> None:
        """Continue an upload, or begin the next one."""
        size = self._sizes[name]
        with self._at.remote.errors("writing", name):
            if self._stream is None:
                part_bytes = min(MAX_PART_BYTES, self._budget // 4)
                part_bytes = max(MIN_PART_BYTES, part_bytes, size // MAX_PARTS)
                self._stream = self._at.remote.stream(name, part_bytes)
                self._stream.write(self._heads[name])
            # Write small pieces, so that the stream can send full parts in between.
            for start in range(0, len(data), MIN_PART_BYTES):
                self._stream.write(data[start : start + MIN_PART_BYTES])
            if self._stream.tell() == size:
                self._stream.close()
                self._stream = None

    def finish(self, receipts: Receipts) -> Read:
        """Write the files without elements, and open all files for reading."""
        for name, head in self._heads.items():
            if not self._at.is_local and len(head) == self._sizes[name]:
                self._at.write(name, head)
        return SafetensorsSource(self._at, list(self._sizes)).read

    def documents(self, extras: Extras) -> Iterator[tuple[str, bytes, bytes]]:
        """Yield name, expected header and stored header of each file."""
        for name, head in self._headers(record_of(extras, logging.DEBUG)).items():
            yield name, head, read_bytes(self._at, name, 0, len(head))

    def publish(self) -> None:
        """Move a single file to the target, or write the index that completes several files.

        Raises:
            CheckpointExistsError: the target has appeared meanwhile.
        """
        if self._single is not None:
            self.put_in_place(self._at.child(self._single))
            self._at.delete()
            return
        weight_map = {key: name for key, (name, _) in self._places.items()}
        total = sum(map(array_bytes, self._arrays))
        about = {"metadata": {"total_size": total}, "weight_map": weight_map}
        self.complete(INDEX_NAME, json.dumps(about, indent=2).encode())

    def stop(self) -> None:
        """Abort an upload, so that the store does not keep its parts."""
        if self._stream is not None:
            with suppress(Exception):
                self._stream.discard()
