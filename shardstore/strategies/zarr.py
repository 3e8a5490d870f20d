"""Strategies using Zarr as the underlying format: who creates, who writes what, who reads what.

Backend ``("zarr", 2)`` is Zarr v3 and the default; ``("zarr", 1)`` is the Zarr v2 layout of
Megatron-Core up to 0.15. The bytes are moved by :mod:`shardstore.storage`; this module is policy.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from logging import getLogger
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import torch
import torch.distributed as dist
import zarr
from numpy.typing import NDArray

from shardstore.dict_utils import dict_list_map_outplace, nested_values
from shardstore.errors import (
    CheckpointingException,
    FormatVersionError,
    NotACheckpointError,
    ShapeMismatchError,
)
from shardstore.mapping import ShardedStateDict, ShardedTensor, StateDict, is_main_replica
from shardstore.ranks import Ranks
from shardstore.storage import arrays, dtypes
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.chunks import ChunkWrite, as_bytes
from shardstore.storage.collector import collector_paused
from shardstore.storage.documents import ArrayMeta
from shardstore.storage.grid import DEFAULT_TARGET_CHUNK_BYTES, flat_range_boxes
from shardstore.storage.location import Location
from shardstore.storage.manifest import ChunkRecord
from shardstore.storage.names import check_collisions, key_of
from shardstore.storage.options import DEFAULT_BUDGET_BYTES, SaveOptions
from shardstore.strategies.base import (
    LoadShardedStrategy,
    SaveShardedStrategy,
    StrategyAction,
    register_default_strategy,
)
from shardstore.strategies.opened import open_checkpoint
from shardstore.strategies.read_plan import TensorRead, find_array, plan_read
from shardstore.strategies.session import SaveSession, session_of
from shardstore.strategies.write_plan import (
    CutChunk,
    Layouts,
    WritePlan,
    array_meta,
    flat_bounds,
    is_alone,
    is_first,
    local_box,
    local_layouts,
    merge_layouts,
    plan_writes,
)

logger = getLogger(__name__)

ZarrArray: TypeAlias = "zarr.Array[Any]"

numpy_to_torch_dtype_dict: dict[Any, torch.dtype] = {
    dtypes.numpy_dtype(name): dtypes.torch_dtype(name) for name in dtypes.names()
}
torch_to_numpy_dtype_dict: dict[torch.dtype, Any] = {
    v: k for k, v in numpy_to_torch_dtype_dict.items()
}

BACKEND = "zarr"
V2_LAYOUT, V3_LAYOUT = 1, 2
"""Backend versions: Megatron-Core's Zarr v2 layout, and ours."""

ROUND_BYTES = 16 * 1024 * 1024
"""Cut chunks are put together in rounds of about this many bytes."""


def register_default_zarr_strategies() -> None:
    """Register default strategies related to the Zarr backend, versions 1 and 2."""
    for version in (V2_LAYOUT, V3_LAYOUT):
        save = ZarrSaveShardedStrategy(BACKEND, version)
        register_default_strategy(StrategyAction.SAVE_SHARDED, BACKEND, version, save)
        load = ZarrLoadShardedStrategy()
        register_default_strategy(StrategyAction.LOAD_SHARDED, BACKEND, version, load)


def sharded_tensors_of(state_dict: ShardedStateDict) -> list[ShardedTensor]:
    """All sharded tensors of a nested state dict."""
    return [value for value in nested_values(state_dict) if isinstance(value, ShardedTensor)]


def needs_layouts(state_dict: ShardedStateDict) -> bool:
    """Whether a rank holds tensors that others must hear of: irregular cuts, flattened ranges."""
    return any(
        is_main_replica(tensor.replica_id) and not is_alone(tensor)
        for tensor in sharded_tensors_of(state_dict)
    )


class ZarrSaveShardedStrategy(SaveShardedStrategy):
    """Save strategy for the Zarr backend.

    Args:
        backend: ``"zarr"``.
        version: 2 for Zarr v3, 1 for the Zarr v2 layout of Megatron-Core.
        target_chunk_bytes: large shards are cut into chunks of about this many bytes (version 2).
        threads: threads that write, on each rank.
        mover: see :attr:`SaveOptions.mover`.
        budget_bytes: see :attr:`SaveOptions.budget_bytes`.
    """

    def __init__(
        self,
        backend: str,
        version: int,
        *,
        target_chunk_bytes: int = DEFAULT_TARGET_CHUNK_BYTES,
        threads: int | None = None,
        mover: str = "auto",
        budget_bytes: int = DEFAULT_BUDGET_BYTES,
    ) -> None:
        super().__init__(backend, version)
        if version not in (V2_LAYOUT, V3_LAYOUT):
            raise FormatVersionError(
                f"backend {backend!r} has no version {version!r}; 2 is Zarr v3 (default), 1 the "
                "Zarr v2 layout of "
                "Megatron-Core"
            )
        self.options = SaveOptions(
            target_chunk_bytes=target_chunk_bytes,
            threads=threads,
            mover=mover,
            budget_bytes=budget_bytes,
        )

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Write this rank's part of the sharded tensors.

        Called by every rank. Within :func:`shardstore.save` it writes into the attempt and
        returns; called by
        itself it also waits for all ranks and commits the arrays (a root group and nothing else).

        Args:
            sharded_state_dict: nested state dict with sharded tensors.
            checkpoint_dir: where to.

        Raises:
            AccessPatternError, DTypeMismatchError, KeyNameError, StorageError: as the package's
                errors say.
        """
        session = session_of(checkpoint_dir)
        if session is not None:
            self._write(session, sharded_state_dict)
            return
        ranks = Ranks.current()
        wanted = needs_layouts(sharded_state_dict)
        session = SaveSession.begin(ranks, checkpoint_dir, self.options, exchange_layouts=wanted)
        error: BaseException | None = None
        with session.active():
            try:
                self._write(session, sharded_state_dict)
            except Exception as problem:
                error = problem
        session.finish(error)

    def _write(self, session: SaveSession, state_dict: ShardedStateDict) -> None:
        tensors = sharded_tensors_of(state_dict)
        ranks = session.ranks
        session.zarr_format = 2 if self.version == V2_LAYOUT else 3
        layouts = Layouts()
        what = f"planning the save to {session.target.url}"
        if session.exchange_layouts:
            report = local_layouts(tensors, ranks.rank)
            answer = ranks.together(
                report, what=what, decide=lambda reports: pickle.dumps(merge_layouts(reports))
            )
            layouts = pickle.loads(answer)
        error: Exception | None = None
        plan = WritePlan()
        try:
            with collector_paused():
                check_collisions(tensor.key for tensor in tensors)
                plan = plan_writes(
                    tensors,
                    ranks.rank,
                    zarr_format=session.zarr_format,
                    target_chunk_bytes=self.options.target_chunk_bytes,
                    layouts=layouts,
                )
                created = [
                    (meta, text)
                    for meta, first in plan.arrays
                    for text in [session.manifest.add_array(meta, created=first)]
                    if first
                ]
        except Exception as problem:
            error, created = problem, []
        if session.exchange_layouts:
            # Before pieces travel, so that nobody waits for a rank that could not plan.
            ranks.together(what=what, error=error)
        if error is not None:
            raise error
        _carry_out(session, self.options, plan, created)


def _carry_out(
    session: SaveSession,
    options: SaveOptions,
    plan: WritePlan,
    created: Sequence[tuple[ArrayMeta, str]],
) -> None:
    """Create, write, and put cut chunks together.

    An error of this rank's disk waits until all pieces are exchanged.
    """
    location, manifest = session.attempt.location, session.manifest
    mover = arrays.mover_for(location, options, session.attempt)

    def done(item: ChunkWrite, record: ChunkRecord) -> None:
        manifest.add_chunk(item.array, item.index, record)

    failed: list[Exception] = []

    def attempt(step: Callable[[], None]) -> None:
        if not failed:
            try:
                step()
            except Exception as problem:
                failed.append(problem)

    if session.attempt.defers_documents:
        session.deferred += [
            (f"{meta.node}/{meta.document_name}", text.encode()) for meta, text in created
        ]
    else:
        attempt(lambda: arrays.create_arrays(location, created, threads=options.threads))
    attempt(lambda: mover.write(plan.writes, done))
    for batch in _rounds(plan.cut):
        writes = _put_together(session.ranks, batch)
        attempt(lambda writes=writes: mover.write(writes, done))  # type: ignore[misc]
    if failed:
        raise failed[0]


def _rounds(chunks: Sequence[CutChunk]) -> Iterator[list[CutChunk]]:
    batch: list[CutChunk] = []
    size = 0
    for chunk in chunks:
        batch.append(chunk)
        size += chunk.array.chunk_bytes
        if size >= ROUND_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _put_together(ranks: Ranks, chunks: Sequence[CutChunk]) -> list[ChunkWrite]:
    """Send pieces to the owners of their chunks, receive those of the chunks that this rank owns.

    Every rank goes through its chunks in the same global order, so that no two can wait for each
    other.
    """
    sends: list[tuple[int, NDArray[np.uint8]]] = []
    receives: list[tuple[int, NDArray[np.uint8]]] = []
    writes = []
    for chunk in chunks:
        itemsize = dtypes.itemsize(chunk.array.dtype)
        if chunk.owner != ranks.rank:
            if chunk.local is not None:
                sends.append((chunk.owner, as_bytes(np.ascontiguousarray(chunk.local()))))
            continue
        size = int(np.prod(chunk.shape, dtype=np.int64)) * itemsize
        buffer = np.empty(size, np.uint8)
        for rank, start, stop in chunk.pieces:
            part = buffer[start * itemsize : stop * itemsize]
            if rank != ranks.rank:
                receives.append((rank, part))
            elif chunk.local is not None:
                part[:] = as_bytes(np.ascontiguousarray(chunk.local()))
        data = buffer.view(dtypes.numpy_dtype(chunk.array.dtype)).reshape(chunk.shape)
        writes.append(ChunkWrite(chunk.array, chunk.index, data))
    if sends or receives:
        ranks.exchange(sends, receives)
    return writes


class ZarrLoadShardedStrategy(LoadShardedStrategy):
    """Load strategy for the Zarr backend, both versions."""

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> StateDict:
        """Read the sharded tensors, into the tensors given where there are any.

        Any rank may call it; it waits for no other.

        Args:
            sharded_state_dict: nested state dict whose leaves are sharded tensors.
            checkpoint_dir: a committed checkpoint.

        Returns:
            The same structure, with tensors.

        Raises:
            MissingKeyError, ShapeMismatchError, DTypeMismatchError: what is stored is not what is
                asked for.
            ChunkMissingError, ChunkCorruptError: what is stored is not what was written.
        """
        stored = open_checkpoint(checkpoint_dir)
        stored.require()
        planned: dict[int, TensorRead] = {}
        with collector_paused():
            for tensor in sharded_tensors_of(sharded_state_dict):
                planned[id(tensor)] = _plan(stored, tensor)
        stored.read([region for read in planned.values() for region in read.regions])

        def loaded(value: Any) -> Any:
            if not isinstance(value, ShardedTensor):
                raise CheckpointingException(
                    f"{type(value).__name__} among the sharded tensors to load from "
                    f"{checkpoint_dir}; "
                    "the common strategy loads other objects"
                )
            return planned[id(value)].finish()

        return cast(StateDict, dict_list_map_outplace(loaded, sharded_state_dict))

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """Key -> sharded tensor without data, whole, for each stored array."""
        stored = open_checkpoint(checkpoint_dir)
        stored.require()
        return {
            key: _whole_tensor(key, meta.shape, dtypes.torch_dtype(meta.dtype))
            for key, meta in stored.arrays.items()
        }

    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """Remove all tensors whose key starts with a prefix. Called by one rank."""
        stored = StoredCheckpoint(Location.of(checkpoint_dir))
        stored.require()
        stored.remove([key for key in stored.arrays if key.startswith(key_prefix)])

    def check_backend_compatibility(self, loaded_version: str) -> None:
        """Raise unless the checkpoint was written by the Zarr backend."""
        if loaded_version != BACKEND:
            raise NotACheckpointError(
                f"the checkpoint was written by backend {loaded_version!r}, this strategy reads "
                f"{BACKEND!r}; "
                "leave sharded_strategy out to have the right one chosen"
            )

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise unless the checkpoint was written by a version that this one reads (1 or 2)."""
        if loaded_version not in (V2_LAYOUT, V3_LAYOUT):
            raise FormatVersionError(
                f"the checkpoint has version {loaded_version!r} of the {BACKEND!r} backend, this "
                "version of shardstore "
                f"reads {V2_LAYOUT} and {V3_LAYOUT}: upgrade shardstore to load it"
            )


def _whole_tensor(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> ShardedTensor:
    zeros, ones = (0,) * len(shape), (1,) * len(shape)
    return ShardedTensor(key, None, dtype, shape, shape, zeros, ones)


def _plan(stored: StoredCheckpoint, tensor: ShardedTensor) -> TensorRead:
    return plan_read(tensor, find_array(stored.arrays, tensor, stored.location.url))


# -- array by array, over zarr handles: the names that the reference pages have
# -----------------------------


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


def postprocess_numpy_array(
    loaded_array: NDArray[Any], sharded_tensor: ShardedTensor, apply_flattened_range: bool = True
) -> torch.Tensor:
    """Turn a NumPy array of a whole shard into the torch tensor that is asked for.

    Args:
        loaded_array: the shard as it was stored, of the local shape unless
            ``allow_shape_mismatch``.
        sharded_tensor: what is asked for.
        apply_flattened_range: cut out the flattened range, if there is one.

    Raises:
        ShapeMismatchError: another shape, without ``allow_shape_mismatch``.
    """
    x = dtypes.as_tensor(np.ascontiguousarray(loaded_array).reshape(loaded_array.shape))
    if tuple(x.shape) != sharded_tensor.local_shape:
        if not sharded_tensor.allow_shape_mismatch:
            raise ShapeMismatchError(
                f"Local shape mismatch for key {sharded_tensor.key!r}: loaded {tuple(x.shape)}, "
                "expected "
                f"{sharded_tensor.local_shape}; set allow_shape_mismatch=True to zero-pad",
                key=sharded_tensor.key,
            )
        x = pad_to_expected_shape(x, sharded_tensor)
    if apply_flattened_range and sharded_tensor.flattened_range is not None:
        x = flatten_range(sharded_tensor, x)
    return x


def flatten_range(sharded_tensor: ShardedTensor, x: torch.Tensor) -> torch.Tensor:
    """The flattened range of a whole local tensor, one-dimensional.

    The tensor itself where there is no range.
    """
    if sharded_tensor.flattened_range is None:
        return x
    return x.reshape(-1)[sharded_tensor.flattened_range]


def pad_to_expected_shape(x: torch.Tensor, expected_sharded_ten: ShardedTensor) -> torch.Tensor:
    """A tensor in the expected local shape, zero beyond the tensor's own extent.

    Raises:
        ShapeMismatchError: another number of axes, or the tensor is longer than expected along one.
    """
    expected = expected_sharded_ten.local_shape
    if x.ndim != len(expected):
        raise ShapeMismatchError(
            f"key {expected_sharded_ten.key!r}: loaded {x.ndim} axes {tuple(x.shape)}, expected "
            f"{len(expected)} {expected}; "
            "padding changes lengths, not the number of axes",
            key=expected_sharded_ten.key,
        )
    if tuple(x.shape) == expected:
        return x
    if any(a > b for a, b in zip(x.shape, expected, strict=True)):
        raise ShapeMismatchError(
            f"key {expected_sharded_ten.key!r}: loaded {tuple(x.shape)} is larger than expected "
            f"{expected}; padding "
            "never drops data",
            key=expected_sharded_ten.key,
        )
    out = x.new_zeros(expected)
    out[tuple(slice(n) for n in x.shape)] = x
    return out


def load_zarr_based_sharded_metadata(
    checkpoint_dir: str | Path,
    get_shape_dtype_fn: Callable[[str], tuple[tuple[int, ...], np.dtype[Any]]],
) -> ShardedStateDict:
    """Metadata of the Zarr arrays below a folder, of either format.

    Args:
        checkpoint_dir: root of the checkpoint.
        get_shape_dtype_fn: path of an array -> its shape and NumPy data type.

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
    return found


def _is_filled(root: Location, name: str) -> bool:
    """Whether a document is there and not empty, as Megatron-Core's locks are."""
    try:
        return bool(root.read(name))
    except FileNotFoundError:
        return False


__all__ = [
    "ZarrLoadShardedStrategy",
    "ZarrSaveShardedStrategy",
    "flatten_range",
    "load_zarr_based_sharded_metadata",
    "numpy_to_torch_dtype_dict",
    "pad_to_expected_shape",
    "postprocess_numpy_array",
    "register_default_zarr_strategies",
    "torch_to_numpy_dtype_dict",
]
