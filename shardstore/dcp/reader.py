"""The storage reader for PyTorch DCP: ``dcp.load(state, storage_reader=StorageReader(url))``.

It reads all shardstore checkpoints, written by :class:`shardstore.dcp.StorageWriter` or otherwise,
under any layout. Regions are read directly into the memory of the planner's tensors. Only common
values and objects without a JSON form are unpickled, with ``weights_only``.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import threading
import weakref
from collections import UserList
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from time import perf_counter
from typing import Any, cast

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.storage import StorageReader as DcpStorageReader
from torch.futures import Future

from shardstore import validation
from shardstore.dcp.files import tensor_metadata
from shardstore.dict_utils import dotted, empty_places
from shardstore.errors import CheckpointingException, KeyNameError, NotACheckpointError
from shardstore.loading.plan import assemble, plan_reads, require_cast, require_writable
from shardstore.loading.read import LoadContext, read_chunks
from shardstore.mapping import ShardedObject, ShardedTensor
from shardstore.progress import log_event
from shardstore.serialization import load
from shardstore.storage.checkpoint import StoredCheckpoint, settled
from shardstore.storage.commit.attempt import Attempt
from shardstore.storage.commit.identity import is_checkpoint, warn_of_dcp
from shardstore.storage.format import dtypes
from shardstore.storage.format.grid import Box
from shardstore.storage.format.names import DCP_METADATA_NAME
from shardstore.storage.options import require_bool, require_number
from shardstore.storage.stores.location import Location
from shardstore.strategies.common import TorchCommonLoadStrategy
from shardstore.values.record import LIST_LENGTH, StatePath, StateRecord
from shardstore.values.torch_dump import dump_bytes

logger = logging.getLogger(__name__)


class SentItems(UserList[ReadItem]):
    """A rank's read items, sent as bytes that are unpickled only on access.

    DCP sends the items to the coordinator and back. There they stay bytes unless its planner looks
    at them. This makes a load of 2,000 arrays on four ranks 1.3 times as fast.
    """

    def __init__(self, packed: bytes) -> None:
        self._packed = packed

    @cached_property
    def data(self) -> list[ReadItem]:  # type: ignore[override]
        """The items."""
        # Safe: the bytes come from a rank of the process group, as this object does.
        return cast(list[ReadItem], pickle.loads(self._packed))

    def __reduce__(self) -> tuple[Any, ...]:
        if "data" in vars(self):
            return list, (self.data,)  # accessed, and perhaps changed
        return SentItems, (self._packed,)


class AnyKey(dict[str, Any]):
    """DCP's metadata by key. A key that is not stored counts as a value, so that DCP's planner asks
    for it and does not raise an error; the reader leaves it out."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: str) -> BytesStorageMetadata:
        return BytesStorageMetadata()


class OwnedAttempt:
    """An attempt on the coordinator, which is abandoned with this object."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.abandon = weakref.finalize(self, _abandon, attempt, os.getpid())


def _abandon(attempt: Attempt, process: int) -> None:
    """Abandon an attempt, unless this is a forked child of the process that began it."""
    if os.getpid() == process:
        attempt.abandon()


class Current(threading.local):
    """The save or load of a thread: DCP calls all methods for one of them in the same thread.

    Attributes:
        location: the place that DCP named.
        begun: the attempt of a save, on the coordinator.
        started: time when the save or load started.
        rank: position of this rank's plan in a save.
        world_size: number of ranks of a load, on the coordinator.
    """

    location: Location | None = None
    begun: OwnedAttempt | None = None
    started = 0.0
    rank = 0
    world_size = 0


class Placed:
    """The place of a checkpoint, given at construction or by DCP as ``checkpoint_id``.

    Args:
        url: folder or URL; ``None`` if DCP passes a ``checkpoint_id``.
        storage_options: options of the store of the URL.

    Raises:
        ArgumentError: an argument has a wrong type or value.
    """

    def __init__(
        self, url: str | os.PathLike[str] | None, storage_options: Mapping[str, Any] | None
    ) -> None:
        Location.of(os.curdir, storage_options)  # refuses options of another type
        self._storage_options = storage_options
        self._location = None if url is None else Location.of(url)
        self._current = Current()

    def __getstate__(self) -> dict[str, Any]:
        """Return place and options; an attempt stays in the thread that began it."""
        return {**self.__dict__, "_location": self._named, "_current": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _current=Current())

    @property
    def _named(self) -> Location | None:
        return self._current.location or self._location

    @property
    def _place(self) -> Location:
        if self._named is None:
            raise CheckpointingException(
                f"the {type(self).__name__} has no place: give it a URL, or give the save or load "
                "of torch.distributed.checkpoint a checkpoint_id"
            )
        # The location is kept without them, because they are lost when DCP pickles it.
        return Location.of(self._named, self._storage_options)

    @property
    def checkpoint_id(self) -> str:
        """Folder or URL of the checkpoint."""
        return self._place.url

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare for another save or load. All ranks call it."""
        if checkpoint_id is not None:
            self._current.location = Location.of(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a checkpoint id is a local path or a URL."""
        return bool(os.fspath(checkpoint_id))


class StorageReader(Placed, DcpStorageReader):
    """Reads a shardstore checkpoint for ``torch.distributed.checkpoint.load``.

    DCP calls each method on the ranks that its docstring names. No method waits for other ranks.
    Every byte that is read is verified.

    Args:
        url: folder or URL of the checkpoint; ``None`` if DCP passes a ``checkpoint_id``.
        cast: allow tensors whose data type differs from the stored one, as ``load(cast=)`` does.
        threads: number of threads that read on each rank; default: the rank's share of the
            processors (``LOCAL_WORLD_SIZE``), at most 8.
        storage_options: options of the store of the URL.
        strict: what to do about keys that only the state dict or only the checkpoint has, see
            :class:`~shardstore.validation.StrictHandling`; by default DCP raises an error for keys
            that the checkpoint lacks. The modes that return keys set ``missing_keys`` and
            ``unexpected_keys``, as those that log them do.

    Attributes:
        missing_keys: flat keys of the last load that are in the checkpoint and in no rank's state
            dict, the same on every rank.
        unexpected_keys: flat keys of the last load that are in this rank's state dict and not in
            the checkpoint. Their values were left as they are.

    Raises:
        ArgumentError: an argument has a wrong type or value.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        *,
        cast: bool = False,
        threads: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        strict: str | validation.StrictHandling = validation.StrictHandling.ASSUME_OK_UNEXPECTED,
    ) -> None:
        super().__init__(url, storage_options)
        self._strict = validation.parse_strict_flag(strict)
        self.missing_keys: set[str] = set()
        self.unexpected_keys: set[str] = set()
        require_bool("cast", cast)
        require_number("threads", threads, none=True)
        self._cast = cast
        self._threads = threads
        self._stored: StoredCheckpoint | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._values: dict[str, Callable[[], Any]] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of the checkpoint, from one document. All ranks call it.

        Raises:
            NotACheckpointError: the place holds no committed checkpoint.
            KeyNameError: values at two paths have the same flat key.
            UnsafeObjectError: a pickled class of the common values is not allowed.
        """
        self._current.started = perf_counter()
        stored = StoredCheckpoint(settled(self._place), threads=self._threads)
        stored.require()
        paths = self._find_values(stored)
        tensors = {key: (dtypes.torch_dtype(a.dtype), a.shape) for key, a in stored.arrays.items()}
        tensors |= {key: (one.dtype, tuple(one.shape)) for key, one in self._tensors.items()}
        # One box for each tensor, because any region can be read.
        found: dict[str, Any] = {
            key: tensor_metadata(dtype, shape, [Box((0,) * len(shape), shape)])
            for key, (dtype, shape) in tensors.items()
        }
        found.update((key, BytesStorageMetadata()) for key in self._values)
        self._stored = stored
        is_loose = validation.StrictHandling.requires_explicit_ckpt_mismatch_check(self._strict)
        return Metadata(
            state_dict_metadata=AnyKey(found) if is_loose else found,
            planner_data={key: paths.get(key, (key,)) for key in found},
            storage_meta=StorageMeta(checkpoint_id=self.checkpoint_id),
        )

    def _find_values(self, stored: StoredCheckpoint) -> Mapping[str, StatePath]:
        """Set ``_tensors`` (tensors of the common values) and ``_values`` (functions that return
        other values), both by flat key. Return the path of each key in the nested state dict."""
        url, place, root = stored.location.url, stored.location.place, stored.root
        record = None if root is None else StateRecord.from_root(root.attributes, url)
        self._tensors, self._values = {}, {}
        if record is not None:
            paths: Mapping[str, StatePath] = record.paths
            objects = {key: ShardedObject(key, None, (1,), (0,)) for key in record.files}
            self._values.update((key, partial(record.value, key, url)) for key in record.values)
        else:
            _, common = validation.verify_checkpoint_and_load_strategy(place)
            try:
                flat, paths = flatten_state_dict(common.load_common(place))
            except ValueError as error:
                raise KeyNameError(
                    f"{url}: two common values have the same flat key, by which PyTorch DCP finds "
                    f"them ({error}); load the checkpoint with shardstore.load",
                    url=url,
                ) from error
            if both := [key for key in flat if key in stored.arrays]:
                logger.warning(
                    "%s: %d common value(s) cannot be loaded through PyTorch DCP, because arrays "
                    "have the same keys: %s. Load them with shardstore.load_common_state_dict",
                    url,
                    len(both),
                    ", ".join(map(repr, both[:8])),
                )
            for key, value in flat.items():
                if key in stored.arrays or paths[key][-1] == LIST_LENGTH:
                    continue
                if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                    self._tensors[key] = value
                else:
                    self._values[key] = partial(flat.__getitem__, key)
            # An object of one shard is named by its key, other objects by their unique keys.
            objects = {
                sharded.key if sharded.global_shape == (1,) else unique_key: sharded
                for unique_key, sharded in common.load_sharded_metadata(place).items()
            }
            known = {*self._tensors, *self._values, *stored.arrays}
            objects = {key: sharded for key, sharded in objects.items() if key not in known}

        def read_object(key: str) -> Any:
            wanted = {key: objects[key]}
            context: Any = LoadContext(stored=stored)
            with stored.unless_replaced():
                return TorchCommonLoadStrategy().load_sharded_objects(wanted, context)[key]

        self._values.update((key, partial(read_object, key)) for key in objects)
        return paths

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Log a warning if DCP wrote newer values there, see :func:`warn_of_dcp`. All ranks call
        it."""
        if is_coordinator:
            warn_of_dcp(self._place)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan with items that are sent as bytes, and with its keys if those of all
        ranks are compared. All ranks call it."""
        if validation.StrictHandling.requires_global_app_metadata(self._strict):
            plan = replace(plan, storage_data={item.storage_index.fqn for item in plan.items})
        return replace(plan, items=cast(list[ReadItem], SentItems(pickle.dumps(plan.items))))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans, each with the keys of all if they are compared. The coordinator calls
        it."""
        self._current.world_size = len(plans)
        if not validation.StrictHandling.requires_global_app_metadata(self._strict):
            return plans
        asked = set().union(*(plan.storage_data for plan in plans))
        return [replace(plan, storage_data=asked) for plan in plans]

    def _compare_keys(self, plan: LoadPlan, arrays: Iterable[str]) -> None:
        """Set the keys that do not match, and do what ``strict`` says."""
        if not validation.StrictHandling.requires_explicit_ckpt_mismatch_check(self._strict):
            return
        stored = {*arrays, *self._tensors, *self._values}
        self.unexpected_keys = {item.storage_index.fqn for item in plan.items} - stored
        all_ranks = validation.StrictHandling.requires_global_app_metadata(self._strict)
        self.missing_keys = stored - plan.storage_data if all_ranks else set()
        validation.report_keys(self._strict, self.missing_keys, self.unexpected_keys)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's items into the planner's tensors. All ranks call it.

        Raises:
            DTypeMismatchError: stored and requested data types differ, without ``cast``.
            ArgumentError: a tensor cannot be filled in place because it is sparse or expanded.
            ChunkMissingError, ChunkCorruptError: stored data is missing or damaged.
            UnsafeObjectError: a pickled class is not allowed.
            MissingKeyError, CheckpointingException: keys do not match, and ``strict`` raises.
        """
        assert self._stored is not None
        arrays, url = self._stored.arrays, self.checkpoint_id
        self._compare_keys(plan, arrays)
        for path in empty_places(getattr(planner, "original_state_dict", {})):
            name = dotted(path)
            below = [key for key in (*arrays, *self._values) if key.startswith(f"{name}.")]
            if below:
                logger.warning(
                    "the state dict is empty at %r, where %s has %d entries, such as %r; DCP loads "
                    "none of them. Make the values first, then load into them",
                    *(name, url, len(below), below[0]),
                )
        targets: list[tuple[ReadItem, torch.Tensor]] = []
        wanted: list[ShardedTensor] = []
        for item in plan.items:
            key = item.storage_index.fqn
            if key in self.unexpected_keys:
                continue
            if item.type == LoadItemType.BYTE_IO:
                # The planner reads this form.
                planner.load_bytes(item, io.BytesIO(dump_bytes(self._values[key]())))
                continue
            target = planner.resolve_tensor(item).detach()
            targets.append((item, target))
            common = self._tensors.get(key)
            if common is not None or target.is_meta:
                require_writable(target, key)
            size, offset = tuple(item.lengths), tuple(item.storage_offsets)
            if common is None:
                shape = arrays[key].shape
                wanted.append(ShardedTensor(key, target, target.dtype, size, shape, offset, None))
                continue
            if target.dtype != common.dtype:
                require_cast(key, common.dtype, target.dtype, url, self._cast)
            with torch.no_grad():
                target.copy_(common[Box(offset, size).slices])
        reads = plan_reads(wanted, arrays, url, cast=self._cast)
        read_chunks(LoadContext(stored=self._stored, cast=self._cast), reads)
        assemble(reads, cast(Any, wanted), url)
        for item, target in targets:
            planner.commit_tensor(item, target)
        if world := self._current.world_size:
            seconds = perf_counter() - self._current.started
            told = {"url": url, "seconds": seconds, "bytes": sum(t.nbytes for _, t in targets)}
            text = f"{url}: loaded, {told['bytes']} bytes on the coordinator in {seconds:.3f} s"
            log_event(logger, "load", text, **told, world_size=world)
        future: Future[None] = Future()
        future.set_result(None)
        return future


def load_either(state: dict[str, Any], place: Location) -> Any:
    """Load a checkpoint of this package or of PyTorch DCP; every rank calls it.

    Args:
        state: as for both loads; its tensors are filled in place.
        place: the checkpoint.

    Raises:
        NotACheckpointError: it is neither.
        CheckpointingException: see :func:`shardstore.load`.
    """
    if is_checkpoint(place):
        return load(state, place.place)
    if not place.exists(DCP_METADATA_NAME):
        what = " is no checkpoint: give the folder of one step, such as .../step-100"
        raise place.error(what, NotACheckpointError)
    load_dcp(state, checkpoint_id=str(place.place))
    return state
