"""The interfaces of save and load strategies, and the registry of default strategies.

The first look-up that needs a built-in strategy imports it.
"""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from contextvars import ContextVar
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from shardstore.errors import CheckpointingException, FormatVersionError, NotACheckpointError
from shardstore.strategies.async_utils import AsyncCallsQueue, AsyncRequest

if TYPE_CHECKING:
    from shardstore.mapping import ShardedStateDict, StateDict


class StrategyAction(Enum):
    """The action of a strategy: load or save, the common values or the sharded part."""

    LOAD_COMMON = "load_common"
    LOAD_SHARDED = "load_sharded"
    SAVE_COMMON = "save_common"
    SAVE_SHARDED = "save_sharded"


default_strategies: defaultdict[str, dict[tuple[str, int], Any]] = defaultdict(dict)
"""Value of a :class:`StrategyAction` -> ``(backend, version)`` -> strategy."""

T = TypeVar("T")

running: ContextVar[Any] = ContextVar("running", default=None)
"""The save or load that calls a strategy, because a strategy of another program takes a place."""


def called(method: Callable[..., T], *arguments: Any) -> T:
    """Call a method of a strategy.

    Args:
        method: the method.
        *arguments: its arguments. In place of the checkpoint, the last one is the running save or
            load. A strategy of this package takes it as it is. Any other gets the folder or URL,
            and what it calls finds the save or load by :data:`running`.
    """
    *first, work = arguments
    kind = type(getattr(method, "__self__", None)).__module__
    if kind.startswith(f"{__name__.partition('.')[0]}.") or not hasattr(work, "place"):
        return method(*arguments)
    token = running.set(work)
    try:
        return method(*first, work.place)
    finally:
        running.reset(token)


async_calls = AsyncCallsQueue()
"""The queue of callers without their own queue."""

_BUILTIN_STRATEGIES = {
    ("save_sharded", "zarr", 1): "shardstore.strategies.zarr:ZarrSaveShardedStrategy",
    ("save_sharded", "zarr", 2): "shardstore.strategies.zarr:ZarrSaveShardedStrategy",
    ("save_sharded", "torch_dist", 1): "shardstore.dcp.torch_dist:TorchDistSaveShardedStrategy",
    ("load_sharded", "zarr", 1): "shardstore.strategies.zarr:ZarrLoadShardedStrategy",
    ("load_sharded", "zarr", 2): "shardstore.strategies.zarr:ZarrLoadShardedStrategy",
    ("load_sharded", "torch_dist", 1): "shardstore.dcp.torch_dist:TorchDistLoadShardedStrategy",
    ("save_common", "torch", 1): "shardstore.strategies.common:TorchCommonSaveStrategy",
    ("save_common", "torch_dist", 1): "shardstore.dcp.torch_dist:TorchDistCommonSaveStrategy",
    ("load_common", "torch", 1): "shardstore.strategies.common:TorchCommonLoadStrategy",
    ("load_common", "json", 1): "shardstore.strategies.common:JsonCommonLoadStrategy",
    ("load_common", "torch_dist", 1): "shardstore.dcp.torch_dist:TorchDistCommonLoadStrategy",
}
"""Value of a :class:`StrategyAction`, backend and version -> module and name of the class. The
first look-up makes the strategy."""


def get_default_strategy(
    action: StrategyAction, backend: str, version: int | None
) -> SaveStrategyBase | LoadStrategyBase:
    """Return the strategy registered for an action, backend and version.

    Any rank may call this at any time; it waits for no other.

    Args:
        action: action of the strategy.
        backend: backend name, for instance ``"zarr"``.
        version: version of the backend's format; ``None``: the newest one.

    Returns:
        The registered object.

    Raises:
        CheckpointingException: none is registered for them; the text lists the registered ones.
    """
    known = default_strategies[action.value]
    builtin = {key[1:]: name for key, name in _BUILTIN_STRATEGIES.items() if key[0] == action.value}
    offered = sorted({*known, *builtin}, key=str)
    if version is None:
        version = max((number for name, number in offered if name == backend), default=1)
    if (backend, version) not in offered:
        raise CheckpointingException(
            f"No default strategy is registered for action {action.value!r}, backend "
            f"{backend!r}, version {version!r}. Registered for {action.value!r}: "
            f"{', '.join(map(str, offered))}. Ask for one of these, pass a strategy object, or "
            "register one with register_default_strategy."
        )
    if (backend, version) not in known:
        try:
            kind = pkgutil.resolve_name(builtin[backend, version])
        except ImportError as error:
            raise CheckpointingException(
                f"the strategies of backend {backend!r} cannot be imported: {error}"
            ) from error
        known[backend, version] = kind(backend, version) if "SAVE" in action.name else kind()
    strategy: SaveStrategyBase | LoadStrategyBase = known[backend, version]
    return strategy


def register_default_strategy(
    action: StrategyAction,
    backend: str,
    version: int,
    strategy: SaveStrategyBase | LoadStrategyBase,
) -> None:
    """Make a strategy the default for an action, backend and version.

    A later registration replaces an earlier one. Built-in strategies never replace others.

    Args:
        action: action of the strategy.
        backend: name of the backend.
        version: version of the backend's format.
        strategy: the strategy object.
    """
    default_strategies[action.value][(backend, version)] = strategy


class LoadStrategyBase(ABC):
    """Base of load strategies. Its methods say which checkpoints the strategy can read."""

    can_handle_sharded_objects: bool = False
    """Whether this strategy loads ShardedObjects too (else the common strategy does)."""

    @abstractmethod
    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise a CheckpointingException if this strategy cannot read ``loaded_backend``."""

    @abstractmethod
    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise a CheckpointingException if this strategy cannot read ``loaded_version``."""


class ReadsOwnFormat(LoadStrategyBase):
    """A load strategy that reads one backend, in some versions."""

    _what, _argument = "the checkpoint", "sharded_strategy"
    _backend: str
    _versions: tuple[int, ...]

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise :class:`NotACheckpointError` unless this backend wrote the checkpoint."""
        if loaded_backend != self._backend:
            raise NotACheckpointError(
                f"{self._what} was written by backend {loaded_backend!r}, but this strategy reads "
                f"{self._backend!r}; leave {self._argument} out to get the right strategy"
            )

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise :class:`FormatVersionError` unless this strategy reads the version."""
        if loaded_version not in self._versions:
            raise FormatVersionError(
                f"{self._what} has version {loaded_version!r} of backend {self._backend!r}, but "
                f"this version of shardstore reads {' and '.join(map(str, self._versions))}; "
                "upgrade shardstore to load it"
            )


class SaveStrategyBase(ABC):  # noqa: B024 (subclasses declare the abstract methods)
    """Base of save strategies, with the backend and version of the format that they write.

    Args:
        backend: backend name, recorded in the checkpoint.
        version: format version, recorded in the checkpoint.
    """

    can_handle_sharded_objects: bool = False
    """Whether this strategy saves ShardedObjects too (else the common strategy does)."""

    def __init__(self, backend: str, version: int) -> None:
        self.backend = backend
        self.version = version

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.backend}, {self.version})"


class LoadCommonStrategy(LoadStrategyBase):
    """Loads common values and, if :attr:`can_handle_sharded_objects`, sharded objects."""

    @abstractmethod
    def load_common(self, checkpoint_dir: str | Path) -> StateDict:
        """Load the common values. Any rank may call it; it waits for no other.

        Args:
            checkpoint_dir: checkpoint to read.

        Returns:
            The common state dict as it was saved.
        """

    @abstractmethod
    def load_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> StateDict:
        """Load sharded objects.

        Args:
            sharded_objects_state_dict: state dict whose leaves are ShardedObjects.
            checkpoint_dir: checkpoint to read.

        Returns:
            The same structure with each ShardedObject replaced by its stored value.
        """

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """List the sharded objects that this strategy stored.

        Args:
            checkpoint_dir: checkpoint to read.

        Returns:
            Unique key -> ShardedObject without data; empty unless a subclass overrides this.
        """
        return {}


class LoadShardedStrategy(LoadStrategyBase):
    """Loads sharded tensors."""

    @abstractmethod
    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> StateDict:
        """Load the sharded part; every rank calls it with the shards that it wants.

        Args:
            sharded_state_dict: state dict whose leaves are ShardedTensors (and ShardedObjects if
                :attr:`can_handle_sharded_objects`).
            checkpoint_dir: checkpoint to read.

        Returns:
            The same structure with each leaf replaced by the loaded tensor or object.
        """

    @abstractmethod
    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """List the stored tensors.

        Args:
            checkpoint_dir: checkpoint to read.

        Returns:
            Tensor key -> unsharded ShardedTensor without data; only its global shape and dtype are
            meaningful.
        """

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """List the stored tensors and objects.

        Args:
            checkpoint_dir: checkpoint to read.

        Returns:
            Sharded key -> ShardedTensor or ShardedObject without data.

        Raises:
            NotImplementedError: the strategy handles sharded objects and does not override this.
        """
        if self.can_handle_sharded_objects:
            raise NotImplementedError(
                f"{type(self).__name__} handles sharded objects and must therefore define "
                f"load_sharded_metadata; this method lists only tensors"
            )
        return self.load_tensors_metadata(checkpoint_dir)

    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """Remove every stored tensor whose key starts with ``key_prefix``.

        Args:
            checkpoint_dir: checkpoint to change.
            key_prefix: prefix of the keys to remove.

        Raises:
            NotImplementedError: the strategy cannot remove tensors.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot remove sharded tensors")


class SaveCommonStrategy(SaveStrategyBase):
    """Saves common values and, if :attr:`can_handle_sharded_objects`, sharded objects."""

    notes_objects = False
    """Whether the session's manifest lists each sharded object that the strategy saves."""
    object_key: str | None = None
    """Key of the sharded object that the common part is saved as, if it is saved as one."""

    @abstractmethod
    def save_common(self, common_state_dict: StateDict, checkpoint_dir: str | Path) -> None:
        """Save the common values.

        Args:
            common_state_dict: state dict without sharded leaves.
            checkpoint_dir: directory to write to.
        """

    def save_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> None:
        """Save sharded objects; every rank calls it with its own.

        Args:
            sharded_objects_state_dict: state dict whose leaves are ShardedObjects.
            checkpoint_dir: directory to write to.

        Raises:
            NotImplementedError: the strategy cannot save sharded objects.
        """
        raise NotImplementedError(f"{self} cannot save sharded objects")


class SaveShardedStrategy(SaveStrategyBase):
    """Saves sharded tensors."""

    meets_to_plan = "never"
    """When the strategy lets the ranks meet to plan: ``"always"``, to exchange ``"layouts"``, or
    never."""

    @abstractmethod
    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Save the sharded part; every rank calls it with its own shards.

        Args:
            sharded_state_dict: state dict whose leaves are ShardedTensors (and ShardedObjects if
                :attr:`can_handle_sharded_objects`).
            checkpoint_dir: directory to write to.
        """


class AsyncSaveShardedStrategy(SaveShardedStrategy):
    """Saves sharded tensors in two steps: copy them at once, write them in the background."""

    @abstractmethod
    def async_save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> AsyncRequest:
        """Copy the shards, and return the rest of the save.

        Every rank calls it. The caller schedules the result, for instance with
        :meth:`AsyncCallsQueue.schedule_async_request`.

        Args:
            sharded_state_dict: state dict whose leaves are ShardedTensors.
            checkpoint_dir: directory to write to.

        Returns:
            The function to run in the background and those that finalise the save.
        """

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Save synchronously: run the result of :meth:`async_save` on every rank."""
        async_request = self.async_save(sharded_state_dict, checkpoint_dir)
        async_request.execute_sync()
