"""Safetensors files as source and target of a conversion."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec
from numpy.typing import NDArray

from shardstore.convert.formats import Arrays, FileTarget, NonTensors, Read, Receipts, record_of
from shardstore.errors import ArgumentError, KeyNameError
from shardstore.hf.files import INDEX_NAME, FileLayout, WeightFiles, damaged
from shardstore.hf.places import FolderFiles, StreamedFiles
from shardstore.inspection.opened import plain_tensors
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta, array_of_one_chunk
from shardstore.storage.format.grid import Box
from shardstore.storage.movers.chunk_bytes import as_bytes, span
from shardstore.storage.movers.chunks import ChunkWrite, RegionRead
from shardstore.storage.movers.ranges import read_bytes
from shardstore.storage.stores.location import Location
from shardstore.values.record import MEMBER, StateRecord

if TYPE_CHECKING:
    import torch

MIN_PART_BYTES = 8 * 1024 * 1024
MAX_PART_BYTES = 64 * 1024 * 1024

STATE_METADATA = "shardstore.state_dict"
"""Name of the metadata entry that holds the values that are not tensors."""
METADATA_ATTRIBUTE = "safetensors"
"""Name of the root group's attribute that holds the other metadata entries."""


class SafetensorsSource(WeightFiles):
    """Safetensors files as the source of a conversion."""

    def boxes(self, key: str) -> list[Box]:
        """Return no box: the tensor is whole."""
        return []

    def rest(self) -> NonTensors:
        """Return the metadata, and the values that a conversion stored in it.

        Raises:
            DamagedCheckpointError: these values cannot be read.
        """
        metadata, path = dict(self.metadata), f"{self.location.url}/{self.roots[0]}"
        kept = metadata.pop(STATE_METADATA, "")
        try:
            about = {"shardstore": {MEMBER: msgspec.json.decode(kept) if kept else None}}
        except msgspec.DecodeError as error:
            raise damaged(path, error) from error
        record = StateRecord.from_root(about, path) or StateRecord()
        metadata.pop("format", None)
        return NonTensors(None, record, {}, {METADATA_ATTRIBUTE: metadata} if metadata else {})


class WithPlainTensors:
    """A source whose plain tensors, which are common values, are arrays like the others.

    Raises:
        KeyNameError: a plain tensor has the key of an array.
    """

    def __init__(self, source: Any) -> None:
        self._source, self.rest = source, source.rest
        self.location, self.roots, self.left_out = source.location, source.roots, source.left_out
        self._values: dict[str, NDArray[Any]] = {}
        self.arrays: dict[str, ArrayMeta] = dict(source.arrays)
        for tensor in plain_tensors(source.rest().common_values()).values():
            from shardstore.saving.plan import plain_tensor  # imports torch

            key, data = tensor.key, cast("torch.Tensor", tensor.data)
            if key in self.arrays:
                text = f"an array and a tensor among the common values have the key {key!r}"
                raise KeyNameError(f"{text}; convert to another format", key=key)
            self._values[key] = values = dtypes.as_numpy(plain_tensor(data, key))
            self.arrays[key] = array_of_one_chunk(key, values.shape, dtypes.zarr_name(values.dtype))

    def boxes(self, key: str) -> list[Box]:
        """Return one box for each stored part."""
        return [] if key in self._values else self._source.boxes(key)

    def read(self, reads: Sequence[RegionRead]) -> None:
        """Read regions into their destinations."""
        self._source.read([read for read in reads if read.array.key not in self._values])
        for read in reads:
            if read.array.key in self._values:
                read.out[...] = self._values[read.array.key][read.box.slices]


class SafetensorsTarget(FileTarget):
    """One file ``NAME.safetensors``, or a folder with several files and an index.

    On a disk, files have their full size from the beginning. In an object store, each file is one
    upload; an interrupted upload starts again. Several files are uploaded to the target itself, the
    index last. A single file is uploaded under another name, and the store copies it after it is
    verified.

    Args:
        work: folder or prefix beside the target.
        output: path or URL of a file, or of a folder.
        file_bytes: approximate size of each of several files.
        budget_bytes: approximate memory for an upload.
    """

    def __init__(
        self, work: Location, output: Location, file_bytes: int, budget_bytes: int
    ) -> None:
        self._single = output.name if output.name.endswith(".safetensors") else None
        names = r"model-\d{5}-of-\d{5}\.safetensors"
        super().__init__(work, output, "" if self._single else INDEX_NAME, names)
        self._file_bytes = sys.maxsize if self._single else file_bytes
        self._part_bytes = max(MIN_PART_BYTES, min(MAX_PART_BYTES, budget_bytes // 4))
        self._files: FolderFiles | StreamedFiles | None = None

    def prepare(self, arrays: Arrays, rest: NonTensors) -> None:
        """Assign the tensors to files in the given order.

        Raises:
            DTypeMismatchError: the format lacks the data type of a tensor.
            ArgumentError: a header is too large.
        """
        super().prepare(arrays, rest)
        self._layout = self._lay_out(rest)

    def _lay_out(self, rest: NonTensors, level: int = logging.WARNING) -> FileLayout:
        record, kept = record_of(rest, level), rest.attributes.get(METADATA_ATTRIBUTE)
        pairs = kept.items() if isinstance(kept, Mapping) else ()
        about = {name: text for name, text in pairs if isinstance(text, str)}
        about[STATE_METADATA] = json.dumps(record.to_json())
        try:
            return FileLayout.of(self.arrays, self._file_bytes, about, self._single)
        except ArgumentError as error:
            lengths = {key: len(json.dumps(value)) for key, value in record.values.items()}
            key = max(lengths, key=lengths.__getitem__, default="")
            raise ArgumentError(
                f"{error}, convert to another format, or leave out the value of {key!r} "
                f"({lengths.get(key, 0)} bytes of JSON)",
                key=key,
            ) from None

    def begin(self, known: Receipts) -> Receipts:
        """Write the headers, and find the files that are complete."""
        if self._at.is_local:
            self._files = FolderFiles(self._at.url)
            self._files.create(self._layout)
            return known
        self._files = StreamedFiles(self._at.remote, self._layout.sizes, self._part_bytes)
        sizes = self._at.sizes(self._layout.sizes)
        done = {name for name in self._layout.sizes if sizes.get(name) == self._layout.sizes[name]}
        return {at: row for at, row in known.items() if self._layout.places[at[0]][0] in done}

    def write(self, chunks: Sequence[ChunkWrite]) -> list[Any]:
        """Write chunks to their places in the files. The chunks are in the order of the files."""
        for chunk in chunks:
            name, start = self._layout.places[chunk.array.key]
            values = chunk.data()
            box = chunk.array.grid.box(chunk.index)
            first, _ = span(box, chunk.array.shape, values.itemsize)
            self._write(name, start + first, as_bytes(values).data)
        return [None] * len(chunks)

    def _write(self, name: str, start: int, data: memoryview) -> None:
        """Write a range of a file, the first one after the header."""
        assert self._files is not None  # it has begun
        head = self._layout.heads[name]
        if start == len(head):
            self._files.write(name, 0, memoryview(head))
        self._files.write(name, start, data)

    def finish(self, receipts: Receipts) -> Read:
        """Write the files without elements, and open all files for reading."""
        for name, head in self._layout.heads.items():
            if len(head) == self._layout.sizes[name]:
                self._at.write(name, head)
        return SafetensorsSource(self._at, list(self._layout.sizes)).read

    def documents(self, rest: NonTensors) -> Iterator[tuple[str, bytes, bytes]]:
        """Yield name, expected header and stored header of each file."""
        for name, head in self._lay_out(rest, logging.DEBUG).heads.items():
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
        self.complete(INDEX_NAME, self._layout.index())

    def stop(self) -> None:
        """Abort an upload, so that the store does not keep its parts."""
        if isinstance(self._files, StreamedFiles):
            self._files.discard()
