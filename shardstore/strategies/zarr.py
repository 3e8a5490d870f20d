"""Strategies of the Zarr backend, and functions that save and load single tensors.

Backend ``("zarr", 2)`` is Zarr v3 and the default. ``("zarr", 1)`` is the Zarr v2 layout of
Megatron-Core up to 0.15. The functions for single tensors use the same planner and reader as the
strategies; zarr itself writes an array that is open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Unpack, cast

import numpy as np
import torch
from numpy.typing import NDArray

from shardstore import errors
from shardstore.dict_utils import nested_values
from shardstore.distributed.coordinator import Ranks
from shardstore.loading.plan import (
    assemble,
    held_regions,
    plan_reads,
    stored_part,
    whole_tensor,
    whole_tensors,
)
from shardstore.loading.read import LoadContext, context_of, read_chunks
from shardstore.mapping import (
    ShardedStateDict,
    ShardedTensor,
    StateDict,
    flat_bounds,
    is_main_replica,
    local_box,
)
from shardstore.saving.plan import WritePlan, array_meta, plan_writes
from shardstore.saving.run import SaveRequest, run_save
from shardstore.saving.session import (
    SaveSession,
    Strategies,
    all_layouts,
    exchange_layouts,
    session_of,
    stage_chunks,
    write_chunks,
)
from shardstore.storage import checkpoint
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Box
from shardstore.storage.format.names import check_collisions, key_of
from shardstore.storage.options import DEFAULTS, SaveOptions, StrategyKeywords, options_of
from shardstore.storage.stores.location import Location
from shardstore.strategies import base
from shardstore.strategies.async_utils import AsyncRequest
from shardstore.utils import extract_sharded_base

if TYPE_CHECKING:
    import zarr

logger = getLogger(__name__)

numpy_to_torch_dtype_dict: dict[Any, torch.dtype] = {
    dtypes.numpy_dtype(name): dtypes.torch_dtype(name)
    for name in dtypes.names()
    if hasattr(torch, name)
}
torch_to_numpy_dtype_dict = {v: k for k, v in numpy_to_torch_dtype_dict.items()}

ZarrArray: TypeAlias = "zarr.Array[Any]"

BACKEND = "zarr"
V2_LAYOUT, V3_LAYOUT = 1, 2
"""Backend versions: Megatron-Core's Zarr v2 layout, and Zarr v3."""


def register_default_zarr_strategies() -> None:
    """Register default strategies related to the Zarr backend, versions 1 and 2."""
    save, load = base.StrategyAction.SAVE_SHARDED, base.StrategyAction.LOAD_SHARDED
    for version in (V2_LAYOUT, V3_LAYOUT):
        base.register_default_strategy(
            save, BACKEND, version, ZarrSaveShardedStrategy(BACKEND, version)
        )
        base.register_default_strategy(load, BACKEND, version, ZarrLoadShardedStrategy())


class ZarrSaveShardedStrategy(base.AsyncSaveShardedStrategy):
    """Save strategy of the Zarr backend, synchronous or asynchronous.

    Args:
        backend: ``"zarr"``.
        version: 2 for Zarr v3, 1 for the Zarr v2 layout of Megatron-Core.
        **options: ``target_chunk_bytes`` (version 2), ``threads``, ``budget_bytes``,
            ``constants``, ``pack`` and ``array_documents``, see
            :class:`~shardstore.storage.options.SaveOptions`. Array documents are left out if this
            or the argument of :func:`shardstore.save` is ``False``
            (version 2).

    Raises:
        ArgumentError: an option is unknown, or has a wrong type or value.
        FormatVersionError: there is no such version, or ``array_documents=False`` with version 1.
    """

    meets_to_plan = "layouts"

    def __init__(self, backend: str, version: int, **options: Unpack[StrategyKeywords]) -> None:
        super().__init__(backend, version)
        if version not in (V2_LAYOUT, V3_LAYOUT):
            raise errors.FormatVersionError(
                f"backend {backend!r} has no version {version!r}; 2 is Zarr v3 (default), 1 the "
                "Zarr v2 layout of Megatron-Core"
            )
        self.options = options_of(type(self).__name__, options, keywords=StrategyKeywords)
        self._given = options
        if version == V2_LAYOUT:
            _check_v2(self.options)

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Write this rank's part of the sharded tensors.

        Every rank calls it. Called by :func:`shardstore.save`, it writes into the attempt and
        returns. Called directly, it also waits for all ranks and commits a checkpoint of the arrays
        only.

        Args:
            sharded_state_dict: nested state dict with sharded tensors.
            checkpoint_dir: folder or URL to write to.

        Raises:
            AccessPatternError, DTypeMismatchError, KeyNameError, StorageError: as
                :func:`shardstore.save`.
        """
        session = session_of(checkpoint_dir)
        if session is None:
            self._save_alone(sharded_state_dict, checkpoint_dir, background=None)
        else:
            write_chunks(session, self._plan(session, sharded_state_dict))

    def async_save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> AsyncRequest:
        """Copy this rank's part of the sharded tensors, and return a request that writes it.

        Every rank calls it. After the call the state may be changed, unless the copy overlaps
        (``overlap_staging`` of :func:`shardstore.async_save`). The call exchanges pieces of chunks
        that ranks share; the background communicates with no rank. Called directly, the request
        commits the arrays, like :meth:`save`, when it is finalised.

        Args:
            sharded_state_dict: nested state dict with sharded tensors.
            checkpoint_dir: folder or URL to write to.

        Returns:
            A request: its function writes in a thread, its finalisation commits on every rank.
        """
        session = session_of(checkpoint_dir)
        if session is None:
            request = self._save_alone(sharded_state_dict, checkpoint_dir, background="")
            return cast(AsyncRequest, request)
        return stage_chunks(session, self._plan(session, sharded_state_dict))

    def _save_alone(
        self, state_dict: ShardedStateDict, place: str | Path, *, background: str | None
    ) -> AsyncRequest | None:
        """Save the arrays only, as a checkpoint of their own."""
        state_dict, _ = extract_sharded_base(state_dict)  # a copy
        request = SaveRequest(
            state=state_dict,
            checkpoint_dir=place,
            ranks=Ranks.current(),
            options=self.options,
            strategies=Strategies(self, None),
            background=background,
        )
        return run_save(request).request

    def _plan(self, session: SaveSession, state_dict: ShardedStateDict) -> WritePlan:
        """Plan the chunks of this rank, and create the arrays."""
        if self._given:
            session.options = session.options.of_strategy(self._given)
        options, is_v2 = session.options, self.version == V2_LAYOUT
        session.zarr_format = 2 if is_v2 else 3
        tensors = [one for one in nested_values(state_dict) if isinstance(one, ShardedTensor)]
        with exchange_layouts(session, tensors) as layouts, session.timed("plan"):
            if is_v2:
                _check_v2(options)
            check_collisions(tensor.key for tensor in tensors)
            plan = plan_writes(
                tensors,
                session.ranks.rank,
                options,
                zarr_format=session.zarr_format,
                layouts=layouts,
                shared=session.shared_writes,
            )
            session.manifest.array_documents = options.array_documents
            session.manifest.has_packs = options.pack
            _create_or_open_zarr_arrays(plan.tensors, session, plan.arrays)
            if is_v2:
                nodes = {array.node for array in plan.arrays}
                session.attempt.announce(nodes, session.ranks.rank)
            if session.meter.is_watched:
                written = plan.written(session.ranks.rank)
                size_bytes = sum(array.chunk_bytes for array in written)
                session.meter.tell("move", bytes_total=size_bytes, chunks_total=len(written))
        return plan


def _check_v2(options: SaveOptions) -> None:
    asked = {
        "compression": options.compression is not None,
        "array_documents": not options.array_documents,
        "constants": options.constants,
        "pack": options.pack,
    }
    if names := ", ".join(name for name, given in asked.items() if given):
        raise errors.FormatVersionError(
            "the Zarr v2 layout of Megatron-Core has no compression and no root document that "
            f"describes its arrays: leave {names} out, or save with backend ('zarr', 2)"
        )


class ZarrLoadShardedStrategy(base.ReadsOwnFormat, base.LoadShardedStrategy):
    """Load strategy for the Zarr backend, both versions.

    Args:
        cast: used if :func:`shardstore.load` is called without ``cast``; see there.
    """

    _backend, _versions = BACKEND, (V2_LAYOUT, V3_LAYOUT)

    def __init__(self, *, cast: bool | Literal["warn"] = False) -> None:
        self.cast = cast

    def check_backend_compatibility(self, loaded_version: str) -> None:
        """Raise unless the checkpoint was written by the Zarr backend."""
        super().check_backend_compatibility(loaded_version)

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> StateDict:
        """Read the sharded tensors; fill given tensors in place.

        Any rank may call it. It waits for no other, unless the ranks of a group share the reading.

        Args:
            sharded_state_dict: nested state dict whose leaves are sharded tensors.
            checkpoint_dir: a committed checkpoint.

        Returns:
            The same structure, with tensors.

        Raises:
            MissingKeyError, ShapeMismatchError, DTypeMismatchError: stored and requested keys,
                shapes or data types differ.
            ChunkMissingError, ChunkCorruptError: stored data is missing or damaged.
        """
        context = context_of(checkpoint_dir)
        stored, cast = context.stored, context.cast or self.cast
        with context.together():
            stored.require()
            values = nested_values(sharded_state_dict)
            tensors = [value for value in values if isinstance(value, ShardedTensor)]
            plan = plan_reads(tensors, stored.arrays, stored.location.url, cast=cast)
        read_chunks(context, plan)
        return assemble(plan, sharded_state_dict, stored.location.url)

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """Return key -> unsharded ShardedTensor without data, for each stored array."""
        stored = context_of(checkpoint_dir).stored
        stored.require()
        return whole_tensors(stored.arrays)

    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """Remove all tensors whose key starts with a prefix. One rank calls it."""
        stored = checkpoint.StoredCheckpoint(Location.of(checkpoint_dir))
        stored.require()
        stored.remove(key_prefix)


# -- one tensor, and zarr's own handles ------------------------------------------------------------


def _create_or_open_zarr_arrays(
    sharded_tensors: list[ShardedTensor],
    checkpoint_dir: str | Path | SaveSession,
    arrays: Sequence[ArrayMeta] = (),
) -> Sequence[ZarrArray | ArrayMeta | None]:
    """Return Zarr arrays for a rank's sharded tensors. The main replica of the first shard creates
    an array, and other main replicas open it.

    Every rank of the process group calls it. The ranks exchange the layouts of irregular and
    flattened shards. Ranks that open arrays wait for those that create them. A save passes its
    session in place of the folder, and the arrays of its plan, and waits for no rank.

    Returns:
        One entry per tensor; ``None`` for replicas, which write nothing.

    Raises:
        CheckpointExistsError: an array exists; every rank raises an error.
        AccessPatternError: in a save, see :meth:`RankManifest.add_array`.
    """
    if isinstance(checkpoint_dir, SaveSession):
        for tensor, meta in zip(sharded_tensors, arrays, strict=True):
            if _should_create_array(tensor):
                _create_zarr_array(tensor, checkpoint_dir, meta)
            else:
                checkpoint_dir.manifest.add_array(meta, created=False)
        return arrays
    ranks, location = Ranks.current(), Location.of(checkpoint_dir)
    what = f"creating arrays below {location.url}"
    layouts = all_layouts(ranks, sharded_tensors, what)
    with ranks.meet(what):
        for tensor in filter(_should_create_array, sharded_tensors):
            meta = array_meta(tensor, DEFAULTS, layouts=layouts)
            _create_zarr_array(tensor, checkpoint_dir, meta)

    def opened(tensor: ShardedTensor) -> ZarrArray:
        node = location.child(checkpoint.read_array_meta(location, tensor.key).node)
        return _open_zarr_array_verbose(node.place, "r+")

    return [opened(t) if is_main_replica(t.replica_id) else None for t in sharded_tensors]


def _should_create_array(ten: ShardedTensor) -> bool:
    """Return whether this rank creates the array: it holds the main replica of the first shard."""
    if any(ten.global_offset) or not is_main_replica(ten.replica_id):
        return False
    return ten.flattened_range is None or flat_bounds(ten)[0] == 0


def _create_zarr_array(
    sharded_tensor: ShardedTensor,
    checkpoint_dir: str | Path | SaveSession,
    meta: ArrayMeta | None = None,
) -> ZarrArray | ArrayMeta:
    """Create the array that a sharded tensor is a part of.

    Args:
        sharded_tensor: the tensor.
        checkpoint_dir: folder or URL to write to; or a save, whose documents are written together.
        meta: the array; default: that of a tensor that no other rank cuts otherwise.

    Raises:
        CheckpointExistsError: the array exists.
    """
    meta = meta or array_meta(sharded_tensor, DEFAULTS)
    if isinstance(checkpoint_dir, SaveSession):
        checkpoint_dir.files.add_arrays([(meta, True)])
        return meta
    location = Location.of(checkpoint_dir)
    checkpoint.create_array(location, meta)
    return _open_zarr_array_verbose(location.child(meta.node).place, "r+")


def _save_to_existing_array(sharded_tensor: ShardedTensor, arr: ZarrArray | None) -> None:
    """Write a local tensor to its place in an array; replicas (and ``None``) write nothing.

    zarr writes it, with the codecs and the grid of the array. If the tensor fills a part of a
    chunk, zarr reads, changes and writes the chunk, so two ranks must not write to one chunk at the
    same time.
    """
    if arr is None or not is_main_replica(sharded_tensor.replica_id):
        return
    if sharded_tensor.data is None:
        raise errors.CheckpointingException(
            f"key {sharded_tensor.key!r} has no data to write", key=sharded_tensor.key
        )
    data = dtypes.as_numpy(sharded_tensor.data.detach().cpu())
    import zarr  # slow; saves and loads do not need it

    parts = cast(Any, arr.metadata), arr.store_path
    arr = zarr.Array(zarr.AsyncArray(*parts, {"write_empty_chunks": True}))  # chunks of zeros too
    for region, piece in held_regions(sharded_tensor, local_box(sharded_tensor), data):
        if region.size:
            arr[region.slices or ...] = piece


def _load_from_array(sharded_tensor: ShardedTensor, checkpoint_dir: str | Path) -> torch.Tensor:
    """Load one sharded tensor from its array, committed or not."""
    location = Location.of(checkpoint_dir)
    meta = checkpoint.read_array_meta(location, sharded_tensor.key)
    plan = plan_reads([sharded_tensor], {meta.key: meta}, location.url)
    read_chunks(LoadContext(stored=checkpoint.StoredCheckpoint(location)), plan)
    return cast(torch.Tensor, assemble(plan, {"": sharded_tensor}, location.url)[""])


def _open_zarr_array_verbose(path: str | Path, mode: str, **open_kwargs: Any) -> ZarrArray:
    """Open an array with zarr.

    Raises:
        NotACheckpointError: there is no array; the text lists the files that are there.
    """
    import zarr  # slow; saves and loads do not need it

    from shardstore import zarr_dtypes  # noqa: F401 (teaches zarr bfloat16 and float8)

    location = Location.of(path)
    if location.options:
        open_kwargs.setdefault("storage_options", dict(location.options))
    try:
        return zarr.open_array(location.url, mode=cast(Any, mode), **open_kwargs)
    except (FileNotFoundError, KeyError, ValueError) as error:
        above = location.parent() or location
        raise errors.NotACheckpointError(
            f"Array {path} could not be opened: {type(error).__name__}: {error} (it contains "
            f"{location.listing()[:8]}, its folder contains {sorted(above.listing())[:8]})",
            url=location.url,
        ) from error


def postprocess_numpy_array(
    loaded_array: NDArray[Any], sharded_tensor: ShardedTensor, apply_flattened_range: bool = True
) -> torch.Tensor:
    """Convert a NumPy array of a whole shard to the requested torch tensor.

    Args:
        loaded_array: the stored shard, with the local shape unless ``allow_shape_mismatch``.
        sharded_tensor: the requested shard.
        apply_flattened_range: return only the flattened range, if there is one.

    Raises:
        ShapeMismatchError: the shape differs, without ``allow_shape_mismatch``.
    """
    x = dtypes.as_tensor(np.ascontiguousarray(loaded_array).reshape(loaded_array.shape))
    if tuple(x.shape) != sharded_tensor.local_shape:
        if not sharded_tensor.allow_shape_mismatch:
            raise errors.ShapeMismatchError(
                f"Local shape mismatch for key {sharded_tensor.key!r}: loaded {tuple(x.shape)}, "
                f"expected {sharded_tensor.local_shape}; set allow_shape_mismatch=True to zero-pad",
                key=sharded_tensor.key,
            )
        x = pad_to_expected_shape(x, sharded_tensor)
    return flatten_range(sharded_tensor, x) if apply_flattened_range else x


def flatten_range(sharded_tensor: ShardedTensor, x: torch.Tensor) -> torch.Tensor:
    """Return the flattened range of a whole local tensor, 1-D; the tensor if there is no range."""
    if sharded_tensor.flattened_range is None:
        return x
    return x.reshape(-1)[slice(*flat_bounds(sharded_tensor))]


def pad_to_expected_shape(x: torch.Tensor, expected_sharded_ten: ShardedTensor) -> torch.Tensor:
    """Return a tensor padded with zeros to the expected local shape.

    Raises:
        ShapeMismatchError: the number of axes differs, or the tensor is larger along an axis.
    """
    shape, expected = tuple(x.shape), expected_sharded_ten.local_shape
    if len(shape) != len(expected) or any(a > b for a, b in zip(shape, expected, strict=True)):
        raise errors.ShapeMismatchError(
            f"key {expected_sharded_ten.key!r}: loaded {shape}, expected {expected}; padding "
            "cannot change the number of axes or drop data: expect at least the stored shape",
            key=expected_sharded_ten.key,
        )
    out = x.new_zeros(expected)
    if (stored := stored_part(shape, Box((0,) * len(expected), expected), out)) is not None:
        stored[1].copy_(x)
    return out


def load_zarr_based_sharded_metadata(
    checkpoint_dir: str | Path,
    get_shape_dtype_fn: Callable[[str], tuple[tuple[int, ...], np.dtype[Any]]],
) -> ShardedStateDict:
    """Return the metadata of the Zarr arrays below a folder, of either Zarr format.

    Args:
        checkpoint_dir: root of the checkpoint.
        get_shape_dtype_fn: returns shape and NumPy data type for the path of an array. It is not
            called for arrays that only the root document describes.

    Returns:
        Key -> unsharded ShardedTensor without data.
    """
    found: ShardedStateDict = {}
    root = Location.of(checkpoint_dir)
    for node in root.listing():
        # Megatron-Core's locks are empty documents.
        names = [f"{node}/zarr.json", f"{node}/.zarray"]
        if not any(root.read_many(names)):
            continue
        key = key_of(node) or checkpoint.read_array_meta(root, node).key
        shape, dtype = get_shape_dtype_fn(str(root.child(node).place))
        torch_dtype = dtypes.torch_dtype(dtypes.zarr_name(np.dtype(dtype)))
        found[key] = whole_tensor(key, tuple(int(n) for n in shape), torch_dtype)
    return {**whole_tensors(checkpoint.root_arrays(root)), **found}
