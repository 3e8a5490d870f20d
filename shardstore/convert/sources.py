"""What can be converted: checkpoints as arrays that are read region by region, without ranks.

Those of PyTorch DCP are in :mod:`.dcp_source`, which imports torch.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from shardstore.convert.safetensors_files import Entry, is_file_name, open_files
from shardstore.core import CONFIG_FNAME, maybe_load_config
from shardstore.errors import (
    CheckpointingException,
    DamagedCheckpointError,
    NotACheckpointError,
)
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Box, Grid
from shardstore.storage.format.names import COMMON_STATE_NAME, DCP_METADATA_NAME
from shardstore.storage.movers.chunks import RegionRead
from shardstore.storage.movers.parallel import default_threads, run_batched
from shardstore.storage.movers.ranges import FileRanges, bytes_stamp
from shardstore.storage.stores.location import Location
from shardstore.values.record import StateRecord

__all__ = [
    "FORMATS",
    "STATE_METADATA",
    "Extras",
    "Source",
    "common_values",
    "detect",
    "open_source",
    "stamps",
]

FORMATS = ("shardstore", "megatron-zarr", "torch_dist", "dcp", "safetensors")
STATE_METADATA = "shardstore.state_dict"
"""Name in the metadata of safetensors files under which values that are no tensors are kept."""
_BATCH_BYTES = 4 * 1024 * 1024


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


def detect(place: Location) -> str:
    """The format of what is at a place.

    Raises:
        NotACheckpointError: nothing that is known.
        StorageError: the store refused.
    """
    if is_file_name(place.name) or (place.is_local and place.path.is_file()):
        return "safetensors"
    names = place.listing()
    if not names and not (place.is_local and place.is_dir()):
        raise NotACheckpointError(f"{place.url} does not exist", url=place.url)
    config = maybe_load_config(place.place)
    if config is not None and config.sharded_backend == "torch_dist":
        return "torch_dist"
    if "zarr.json" in names and not (DCP_METADATA_NAME in names and _dcp_wrote_last(place)):
        return "shardstore"
    if config is not None:
        return "megatron-zarr"
    if DCP_METADATA_NAME in names:
        return "dcp"
    if any(is_file_name(name) for name in names):
        return "safetensors"
    raise NotACheckpointError(
        f"{place.url} is no checkpoint of a known format ({', '.join(FORMATS)}); if it is one, "
        "name its folder or file itself",
        url=place.url,
    )


def _dcp_wrote_last(place: Location) -> bool:
    """Whether DCP's own storage wrote over a checkpoint of ours: a pickle, and not our line."""
    return place.read(DCP_METADATA_NAME).startswith(pickle.PROTO)


def open_source(place: Location, source_format: str) -> Source:
    """Open a checkpoint of a known format for reading.

    Raises:
        NotACheckpointError, DamagedCheckpointError: it is not of that format, or damaged.
    """
    if source_format in ("shardstore", "megatron-zarr"):
        return ZarrSource(place)
    if source_format in ("torch_dist", "dcp"):
        from shardstore.convert.dcp_source import DcpSource  # torch's own format

        return DcpSource(place)
    if source_format == "safetensors":
        return SafetensorsSource(place)
    raise CheckpointingException(
        f"source_format={source_format!r} is not one of {', '.join(FORMATS)}"
    )


class ZarrSource:
    """Checkpoints of this package, and of Megatron-Core's zarr backend."""

    def __init__(self, place: Location) -> None:
        self._location = place
        self._stored = StoredCheckpoint(self._location)
        self._stored.require()
        self.arrays = self._stored.arrays

    def boxes(self, key: str) -> list[Box]:
        """One box a shard, or a chunk where shards are not known."""
        meta = self.arrays[key]
        grid = Grid(meta.shape, meta.shard_shape or meta.grid.chunk_shape)
        return [grid.box(grid.index(i)) for i in range(grid.size)]

    def read(self, reads: Sequence[RegionRead]) -> None:
        """Read regions, verified as far as there are checksums."""
        self._stored.read(reads)

    def extras(self) -> Extras:
        """The common part as it is, and sharded objects."""
        url = self._location.url
        attributes: dict[str, Any] = {}
        record = None
        if self._stored.root is not None:
            attributes = dict(self._stored.root.attributes)
            attributes.pop("shardstore", None)
            record = StateRecord.from_root(self._stored.root.attributes, url)
        objects: Mapping[str, Callable[[], Any]] = {}
        if record is None or record.files:
            objects = self._objects()
        if record is not None:
            # Their files are listed with the sharded objects.
            record = StateRecord(record.paths, record.values)
        common = None
        if record is None and self._location.exists(COMMON_STATE_NAME):
            common = self._location.read(COMMON_STATE_NAME)
        return Extras(common, record or StateRecord(), objects, attributes)

    def _objects(self) -> Mapping[str, Callable[[], Any]]:
        from shardstore.strategies.common import TorchCommonLoadStrategy

        loader = TorchCommonLoadStrategy()
        at = self._location.place
        sharded = loader.load_sharded_metadata(at)

        def value_of(key: str) -> Callable[[], Any]:
            return lambda: loader.load_sharded_objects({key: sharded[key]}, at)[key]

        return {key: value_of(key) for key in sharded}

    def identity(self) -> list[Any]:
        """What its documents are."""
        return stamps(self._location, ("zarr.json", CONFIG_FNAME))


class SafetensorsSource:
    """One safetensors file, or several with an index."""

    def __init__(self, place: Location) -> None:
        self._ranges, self._entries, self._metadata, self._names = open_files(place)
        self.arrays = {key: _meta(key, entry) for key, entry in self._entries.items()}

    def boxes(self, key: str) -> list[Box]:
        """The tensor is whole."""
        shape = self._entries[key].shape
        return [Box((0,) * len(shape), shape)]

    def read(self, reads: Sequence[RegionRead]) -> None:
        """Read regions."""

        def work(batch: Sequence[RegionRead]) -> None:
            for read in batch:
                entry = self._entries[read.array.key]
                read_entry(self._ranges, entry, read)

        run_batched(
            reads,
            work,
            threads=default_threads(),
            weight=lambda read: read.out.nbytes,
            batch_weight=_BATCH_BYTES,
        )

    def extras(self) -> Extras:
        """The metadata, and values that a conversion put there."""
        metadata = dict(self._metadata)
        kept = metadata.pop(STATE_METADATA, None)
        record = StateRecord()
        if kept is not None:
            about = {"shardstore": {"state_dict": json.loads(kept)}}
            record = StateRecord.from_root(about, self._names[0]) or record
        metadata.pop("format", None)
        return Extras(None, record, {}, {"safetensors": metadata} if metadata else {})

    def identity(self) -> list[Any]:
        """Sizes and times of the files."""
        return [self._ranges.stamp(name) for name in sorted(self._names)]


def read_entry(ranges: FileRanges, entry: Entry, read: RegionRead) -> None:
    """Read a region of a tensor in a safetensors file.

    Raises:
        DamagedCheckpointError: the file is gone, or truncated.
    """
    try:
        ranges.read_box(entry.file, entry.start, entry.shape, read.box, read.out)
    except (FileNotFoundError, ValueError) as error:
        path = ranges.path(entry.file)
        raise DamagedCheckpointError(
            f"key {read.array.key!r}: {path} changed while it was read ({error})",
            key=read.array.key,
            url=path,
        ) from error


def stamps(place: Location, names: Sequence[str]) -> list[Any]:
    """Documents as they are now."""
    found = []
    for name in names:
        with suppress(FileNotFoundError):
            found.append([name, bytes_stamp(place.read(name))])
    return found


def _meta(key: str, entry: Entry) -> ArrayMeta:
    grid = Grid(entry.shape, tuple(max(1, n) for n in entry.shape))
    return ArrayMeta(key, key, grid, entry.dtype, codecs=())


def common_values(common: bytes, url: str) -> dict[tuple[str | int, ...], Any]:
    """The leaves of a ``common.pt`` by their paths."""
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
