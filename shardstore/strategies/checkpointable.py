"""Wrappers that make ShardedTensors usable in PyTorch Distributed Checkpoint (DCP).

They implement ``torch.distributed._checkpointable._Checkpointable``, so that
``torch.distributed.checkpoint.save`` and ``load`` accept shards of any grid, and several per rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, cast

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from shardstore.errors import CheckpointingException
from shardstore.mapping import ShardedTensor, local_box


class CheckpointableShardedTensor(torch.Tensor):
    """One local shard, which DCP handles as the global tensor.

    It has the shape and dtype of the global tensor, but no memory, and supports no tensor
    operations. DCP reads and writes the local data in place.

    Args:
        data: local data of the shard; None for a description.
        sh_ten: description of the shard.
    """

    _data: torch.Tensor
    _sh_ten: ShardedTensor

    def __new__(cls, data: torch.Tensor, sh_ten: ShardedTensor) -> CheckpointableShardedTensor:
        """Make the stand-in for the global tensor."""
        like = torch.empty((), dtype=sh_ten.dtype, device="cpu") if data is None else data
        return cast(CheckpointableShardedTensor, _stand_in(cls, sh_ten.global_shape, like))

    def __init__(self, data: torch.Tensor, sh_ten: ShardedTensor) -> None:
        self._data = data
        self._sh_ten = sh_ten

    def __create_write_items__(
        self, fqn: str, sh_ten: CheckpointableShardedTensor, index: int | None = None
    ) -> list[WriteItem]:
        """Return the items that this rank writes.

        Args:
            fqn: name of the tensor in the DCP checkpoint.
            sh_ten: this object.
            index: position in a :class:`LocalShardsContainer`, which speeds up the look-up later.

        Returns:
            One item; none if the shard has no elements but the global tensor has.

        Raises:
            CheckpointingException: the shard is a flattened range, which DCP cannot express.
        """
        items = []
        for chunk in sh_ten.__create_chunk_list__():
            properties = TensorProperties.create_from_tensor(sh_ten._data)
            data = TensorWriteData(chunk, properties, torch.Size(sh_ten._sh_ten.global_shape))
            place = MetadataIndex(fqn, chunk.offsets, index)
            items.append(WriteItem(place, WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the part of the global tensor that this rank holds.

        Returns:
            One chunk; none for an empty shard of a tensor with elements, because its offset equals
            that of the next shard.

        Raises:
            CheckpointingException: the shard is a flattened range, which DCP cannot express.
        """
        shard = self._sh_ten
        if shard.flattened_range is not None:
            raise CheckpointingException(
                f"{shard.key!r} holds the flattened range {shard.flattened_range} of its shard, "
                f"which PyTorch DCP cannot express; save whole shards, or use the zarr backend",
                key=shard.key,
            )
        if 0 in shard.local_shape and 0 not in shard.global_shape:
            return []
        box = local_box(shard)
        return [ChunkStorageMetadata(offsets=torch.Size(box.offset), sizes=torch.Size(box.shape))]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the local data (a view with the prepended axes, if there are any).

        Args:
            index: ignored, because there is one shard.
        """
        if self._sh_ten.prepend_axis_num:
            return self._data.view(local_box(self._sh_ten).shape)
        return self._data

    @classmethod
    def from_sh_ten(cls, sh_ten: ShardedTensor) -> CheckpointableShardedTensor:
        """Wrap a ShardedTensor with its data.

        Args:
            sh_ten: shard to wrap; the data is shared, not copied.
        """
        return cls(sh_ten.data, sh_ten)  # type: ignore[arg-type]  # None: a description alone

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any],
        kwargs: dict[str, Any] | None = None,
    ) -> NoReturn:
        """Raise an error for every operation, because this rank has only a part of the tensor."""
        raise _refused(cls, func, "data")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self._sh_ten.without_data()})"


class LocalShardsContainer(torch.Tensor):
    """All local shards of one global tensor, which DCP handles as that tensor.

    DCP needs one tensor per name on each rank, but a rank may hold several shards.

    Args:
        local_shards: at least one :class:`CheckpointableShardedTensor`, all of one global tensor.
    """

    _local_shards: list[Any]

    def __new__(cls, local_shards: list[torch.Tensor]) -> LocalShardsContainer:
        """Make the stand-in for the global tensor."""
        if not local_shards:
            raise CheckpointingException("A LocalShardsContainer needs at least one local shard")
        first = local_shards[0]
        for other in local_shards[1:]:
            if (other.shape, other.dtype) != (first.shape, first.dtype):
                raise CheckpointingException(
                    f"The shards of a LocalShardsContainer belong to one global tensor, but there "
                    f"is {first.dtype} {tuple(first.shape)} in {first} and {other.dtype} "
                    f"{tuple(other.shape)} in {other}"
                )
        return cast(LocalShardsContainer, _stand_in(cls, first.shape, first))

    def __init__(self, local_shards: list[torch.Tensor]) -> None:
        self._local_shards = local_shards

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> NoReturn:
        """Raise an error for every operation, because this rank has only a part of the tensor."""
        raise _refused(cls, func, "shards")

    def __create_write_items__(
        self, fqn: str, local_shards_cont: LocalShardsContainer
    ) -> list[object]:
        """Return the items that this rank writes, of all shards.

        Args:
            fqn: name of the tensor in the DCP checkpoint.
            local_shards_cont: this object.

        Returns:
            DCP write items, each with the position of its shard as index.
        """
        return [
            item
            for index, shard in enumerate(local_shards_cont._local_shards)
            for item in shard.__create_write_items__(fqn, shard, index)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the parts of the global tensor that this rank holds."""
        return [c for shard in self._local_shards for c in shard.__create_chunk_list__()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Find a shard by its offset.

        Args:
            index: has the offset; the position, a hint, is ignored.

        Returns:
            The local data of the shard.

        Raises:
            ValueError: no offset is given, or no shard has it.
        """
        offset = index.offset and tuple(index.offset)
        for shard in self._local_shards:
            if any(tuple(chunk.offsets) == offset for chunk in shard.__create_chunk_list__()):
                return cast(torch.Tensor, shard.__get_tensor_shard__(index))
        raise ValueError(
            f"Could not find a shard of {index.fqn!r} at offset {offset}; this rank has "
            f"{[tuple(chunk.offsets) for chunk in self.__create_chunk_list__()]}"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self._local_shards})"


def _refused(cls: type[Any], func: object, local: str) -> NotImplementedError:
    return NotImplementedError(
        f"{cls.__name__} stands for a global tensor, but this rank holds only a part of it; apply "
        f"{func} to the local {local} instead"
    )


def _stand_in(cls: type[Any], shape: Sequence[int], like: torch.Tensor) -> Any:
    """Return a tensor of a subclass that has a shape and no memory."""
    return torch.Tensor._make_wrapper_subclass(
        cls, torch.Size(shape), dtype=like.dtype, device=like.device
    )
