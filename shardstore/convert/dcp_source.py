"""Checkpoints of PyTorch DCP, and of Megatron-Core's torch_dist backend, as what is converted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardstore.convert.sources import Extras, stamps
from shardstore.dcp.files import DcpFiles
from shardstore.storage.format.grid import Box
from shardstore.storage.format.names import COMMON_STATE_NAME, DCP_METADATA_NAME
from shardstore.storage.movers.chunks import RegionRead
from shardstore.storage.stores.location import Location
from shardstore.values.plain import NotPlainError
from shardstore.values.record import StateRecord, as_text, is_long

__all__ = ["DcpSource"]


class DcpSource:
    """Checkpoints of PyTorch DCP, and of Megatron-Core's torch_dist backend."""

    def __init__(self, place: Location) -> None:
        self._place = place
        self._files = DcpFiles.open(place)
        self.arrays = self._files.arrays

    def boxes(self, key: str) -> list[Box]:
        """One box a part."""
        return [part.box for part in self._files.parts[key]]

    def read(self, reads: Sequence[RegionRead]) -> None:
        """Read regions."""
        self._files.read(reads)

    def extras(self) -> Extras:
        """Values as JSON where they have such a form."""
        if self._place.exists(COMMON_STATE_NAME):
            objects = {key: self._object(key, unwrap=True) for key in self._files.objects}
            return Extras(self._place.read(COMMON_STATE_NAME), objects=objects)
        values: dict[str, Any] = {}
        found: dict[str, Callable[[], Any]] = {}
        for key in self._files.objects:
            value = self._files.read_object(key)
            try:
                document, text = as_text(value)
            except NotPlainError:
                text = None
            if text is None or is_long(text):
                found[f"{key}/shard_0_1"] = self._object(key)
            else:
                values[key] = document
        return Extras(None, StateRecord(self._files.paths, values), found)

    def _object(self, key: str, *, unwrap: bool = False) -> Callable[[], Any]:
        def read() -> Any:
            value = self._files.read_object(key)
            # Megatron-Core keeps an object in a list of one.
            return value[0] if unwrap and isinstance(value, list) and len(value) == 1 else value

        return read

    def identity(self) -> list[Any]:
        """What its metadata is."""
        return stamps(self._place, (DCP_METADATA_NAME,))
