"""Sharded tensors array by array, over zarr handles: the names that the reference pages have.

Answers for creating, opening, filling and describing single arrays of a checkpoint, committed or
not, through zarr itself. The strategies do not go this way: they plan all arrays and move the bytes
with :mod:`shardstore.storage`. Public as :mod:`shardstore.strategies.zarr`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import torch
import torch.distributed as dist
import zarr

from shardstore.errors import CheckpointingException, NotACheckpointError
from shardstore.loading.plan import find_array, plan_read
from shardstore.mapping import ShardedStateDict, ShardedTensor, is_main_replica
from shardstore.saving.plan import array_meta
from shardstore.sharded.layouts import flat_bounds, is_first, local_box
from shardstore.storage import arrays
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.format import dtypes
from shardstore.storage.format.grid import DEFAULT_TARGET_CHUNK_BYTES, flat_range_boxes
from shardstore.storage.format.names import key_of
from shardstore.storage.stores.location import Location

__all__ = ["ZarrArray", "load_zarr_based_sharded_metadata"]

ZarrArray: TypeAlias = "zarr.Array[Any]"


def _create_or_open_zarr_arrays(
    sharded_tensors: list[ShardedTensor], checkpoint_dir: str | Path
) -> list[ZarrArray | None]:
    """Zarr arrays for a rank's sharded tensors: created by the main replica of the first shard,
    opened by other main replicas.

    Called by every rank of the process group, if there is one: those that open wait for those that
        create.

    Returns:
        One entry a tensor; ``None`` for replicas, which write nothing.
    """
    found: list[ZarrArray | None] = [
        _create_zarr_array(tensor, checkpoint_dir) if _should_create_array(tensor) else None
        for tensor in sharded_tensors
    ]
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
    for i, tensor in enumerate(sharded_tensors):
        if found[i] is None and is_main_replica(tensor.replica_id):
            location = Location.of(checkpoint_dir)
            node = location.child(arrays.read_array_meta(location, tensor.key).node)
            found[i] = _open_zarr_array_verbose(node.place, "r+")
    return found


def _should_create_array(ten: ShardedTensor) -> bool:
    """Whether this tensor's holder creates the array: main replica of the first shard."""
    return is_first(ten)


def _save_to_existing_array(sharded_tensor: ShardedTensor, arr: ZarrArray | None) -> None:
    """Write a local tensor to its place in an array; replicas (and ``None``) write nothing."""
    if arr is None or not is_main_replica(sharded_tensor.replica_id):
        return
    if sharded_tensor.data is None:
        raise CheckpointingException(
            f"key {sharded_tensor.key!r} has no data to write", key=sharded_tensor.key
        )
    data = dtypes.as_numpy(sharded_tensor.data.detach().cpu())
    box = local_box(sharded_tensor)
    if sharded_tensor.flattened_range is None:
        arr[box.slices or ...] = data.reshape(box.shape)
        return
    position = 0
    for part in flat_range_boxes(box.shape, *flat_bounds(sharded_tensor)):
        slices = tuple(
            slice(a + b, a + b + n)
            for a, b, n in zip(box.offset, part.offset, part.shape, strict=True)
        )
        arr[slices or ...] = data[position : position + part.size].reshape(part.shape)
        position += part.size


def _create_zarr_array(sharded_tensor: ShardedTensor, checkpoint_dir: str | Path) -> ZarrArray:
    """Create the array that a sharded tensor is a part of.

    Raises:
        CheckpointExistsError: it exists.
    """
    meta = array_meta(sharded_tensor, zarr_format=3, target_chunk_bytes=DEFAULT_TARGET_CHUNK_BYTES)
    return arrays.open_zarr_array(Location.of(checkpoint_dir), meta, create=True)


def _load_from_array(sharded_tensor: ShardedTensor, checkpoint_dir: str | Path) -> torch.Tensor:
    """Load one sharded tensor from its array, committed or not."""
    location = Location.of(checkpoint_dir)
    stored = StoredCheckpoint(location)
    meta = arrays.read_array_meta(location, sharded_tensor.key)
    read = plan_read(sharded_tensor, find_array({meta.key: meta}, sharded_tensor, location.url))
    stored.read(read.regions)
    return read.finish()


def _open_zarr_array_verbose(path: str | Path, mode: str, **open_kwargs: Any) -> ZarrArray:
    """Open an array with zarr; where that fails, say what is there instead.

    Raises:
        NotACheckpointError: there is no array, or nothing at all.
    """
    known = cast(Literal["r", "r+", "a", "w", "w-"], mode)
    location = Location.of(path)
    if location.options:
        open_kwargs.setdefault("storage_options", dict(location.options))
    try:
        return zarr.open_array(location.url, mode=known, **open_kwargs)
    except (FileNotFoundError, KeyError, ValueError) as error:
        if not location.is_local:
            raise NotACheckpointError(
                f"Array {path} could not be opened: {type(error).__name__}: {error} (below it are "
                f"{location.listing()[:8]})",
                url=location.url,
            ) from error
        folder = Path(path)
        if folder.is_dir():
            beside = sorted(entry.name for entry in folder.iterdir())[:8]
            there = f"the folder exists and holds {beside}"
        elif folder.parent.is_dir():
            near = sorted(entry.name for entry in folder.parent.iterdir())[:8]
            there = f"its parent exists and holds {near}"
        else:
            there = "not even its parent exists"
        raise NotACheckpointError(
            f"Array {path} could not be opened: {type(error).__name__}: {error} ({there})",
            url=str(path),
        ) from error


def load_zarr_based_sharded_metadata(
    checkpoint_dir: str | Path,
    get_shape_dtype_fn: Callable[[str], tuple[tuple[int, ...], np.dtype[Any]]],
) -> ShardedStateDict:
    """Metadata of the Zarr arrays below a folder, of either format.

    Args:
        checkpoint_dir: root of the checkpoint.
        get_shape_dtype_fn: path of an array -> its shape and NumPy data type. Not asked about
            arrays that only the root's document describes.

    Returns:
        Key -> sharded tensor without data, whole.
    """
    found = {}
    root = Location.of(checkpoint_dir)
    for node in root.listing():
        if not root.is_dir(node) or not any(
            _is_filled(root, f"{node}/{name}") for name in ("zarr.json", ".zarray")
        ):
            continue
        key = key_of(node) or arrays.read_array_meta(root, node).key
        shape, dtype = get_shape_dtype_fn(str(root.child(node).place))
        torch_dtype = dtypes.torch_dtype(dtypes.zarr_name(np.dtype(dtype)))
        found[key] = _whole_tensor(key, tuple(int(n) for n in shape), torch_dtype)
    for key, meta in arrays.root_arrays(root).items():
        if key not in found:
            found[key] = _whole_tensor(key, meta.shape, dtypes.torch_dtype(meta.dtype))
    return found


def _is_filled(root: Location, name: str) -> bool:
    """Whether a document is there and not empty, as Megatron-Core's locks are."""
    try:
        return bool(root.read(name))
    except FileNotFoundError:
        return False


def _whole_tensor(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> ShardedTensor:
    zeros, ones = (0,) * len(shape), (1,) * len(shape)
    return ShardedTensor(key, None, dtype, shape, shape, zeros, ones)
