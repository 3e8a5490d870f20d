"""What a checkpoint holds beside its arrays, as DCP's planner sees it: values, objects, and tensors
of the common part, under flat keys.

A checkpoint that DCP wrote says itself what they are. Of any other the common part is flattened as
DCP flattens a state dict, so that the same nested state dict asks for the same keys. Knows nothing
of chunks.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from shardstore.errors import KeyNameError, MissingKeyError
from shardstore.mapping import ShardedObject
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.stores.location import Location
from shardstore.strategies.common import TorchCommonLoadStrategy
from shardstore.validation import verify_checkpoint_and_load_strategy
from shardstore.values.record import StatePath, StateRecord

__all__ = ["StoredValues", "described"]

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
