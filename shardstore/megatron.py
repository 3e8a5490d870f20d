"""Makes unmodified Megatron-Core and its trainers use this package.

:func:`install` replaces ``megatron.core.dist_checkpointing`` with this package.
``python -m shardstore.megatron TRAINER.py ARGUMENTS...`` calls it and runs a program. In each
module of ``dist_checkpointing``, the names that this package has too are replaced. Names that only
Megatron-Core has (helpers of its trainer) stay, and use this package's classes. Functions and
classes whose defaults differ are defined below.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial, wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from shardstore import mapping, serialization
from shardstore.core import DCP_BACKEND
from shardstore.dict_utils import dict_list_map_outplace, merge
from shardstore.errors import ArgumentError
from shardstore.loading.read import LoadContext, opened
from shardstore.mapping import ShardedStateDict, ShardedTensor, StateDict
from shardstore.storage.format.names import COMMON_STATE_NAME, CONTENT_METADATA_KEY
from shardstore.strategies import fully_parallel
from shardstore.strategies import torch as dcp_strategies
from shardstore.strategies.base import LoadShardedStrategy, SaveShardedStrategy, called
from shardstore.strategies.zarr import BACKEND as ZARR_BACKEND
from shardstore.strategies.zarr import ZarrSaveShardedStrategy
from shardstore.utils import extract_sharded_objects
from shardstore.validation import verify_checkpoint_and_load_strategy

ROOT = "megatron.core.dist_checkpointing"
FORMATS = (ZARR_BACKEND, DCP_BACKEND)

_format = ZARR_BACKEND
"""Format given to :func:`install`; global, because Megatron-Core's signatures have no format."""


def install(format: str = ZARR_BACKEND) -> None:
    """Replace ``megatron.core.dist_checkpointing`` with this package.

    Each process calls it once, before or after it imports Megatron-Core. It also replaces names
    that other modules have imported from there. Objects of Megatron-Core's classes still work.

    Args:
        format: the format that ``save`` writes if a program asks for ``torch_dist``, ``zarr`` or no
            backend: ``"zarr"`` is plain Zarr v3; ``"torch_dist"`` is the format of the installed
            Megatron-Core. A load detects the format.

    Raises:
        ArgumentError: the format is unknown; another format is installed; or a program has already
            derived a class from a class of Megatron-Core, so that the call comes too late.
    """
    global _format
    if format not in FORMATS:
        raise ArgumentError(f"format={format!r:.100} must be one of {', '.join(FORMATS)}")
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        if format != _format:
            raise ArgumentError(
                f"install({format!r}): {_format!r} is installed already; choose one"
            )
        return
    _format = format
    taken = {name: sys.modules[name] for name in sys.modules if _is_below(name)}
    names = _names_to_mend(taken)
    sys.meta_path.insert(0, _Finder())
    for name in taken:
        del sys.modules[name]
    if taken:
        _mend(taken, names)


def installed() -> str:
    """Return the format that :func:`install` was given, or its default if it was not called."""
    return _format


def _is_below(name: str) -> bool:
    return f"{name}.".startswith(f"{ROOT}.")


# -- modules ---------------------------------------------------------------------------------------


class _Finder(MetaPathFinder):
    """Finds the modules below :data:`ROOT`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec that overlays Megatron-Core's module with ours of the same name; return
        Megatron-Core's own spec for packages and for modules that we lack."""
        own = PathFinder.find_spec(name, path) if _is_below(name) and name != ROOT else None
        if own is not None and own.submodule_search_locations is not None:
            return own
        ours = f"shardstore{name.removeprefix(ROOT)}"
        if not name.startswith(f"{ROOT}.") or importlib.util.find_spec(ours) is None:
            return own
        spec = ModuleSpec(name, _Overlay(ours, own), origin=None if own is None else own.origin)
        spec.has_location = own is not None
        return spec


class _Overlay(Loader):
    """Loads a module of Megatron-Core, if it exists, and replaces its names with ours."""

    def __init__(self, ours: str, own: ModuleSpec | None) -> None:
        self._ours, self._own = ours, own

    def exec_module(self, module: ModuleType) -> None:
        """See :class:`Loader`."""
        if self._own is not None and self._own.loader is not None:
            self._own.loader.exec_module(module)
        ours = importlib.import_module(self._ours)
        public = getattr(ours, "__all__", ())
        for name, value in vars(ours).items():
            if name in public or str(getattr(value, "__module__", "")).startswith("shardstore."):
                setattr(module, name, value)
        vars(module).update(_replaced(module.__name__))


def _names_to_mend(taken: Mapping[str, ModuleType]) -> dict[int, tuple[str, str]]:
    """Return ``id`` -> module and name, for each class and function of Megatron-Core.

    Raises:
        ArgumentError: a class of another module is derived from one of these classes.
    """
    names = {}
    for module in taken.values():
        for name, value in vars(module).items():
            if not _is_below(str(getattr(value, "__module__", ""))) or not callable(value):
                continue
            names[id(value)] = (value.__module__, name)
            for derived in type.__subclasses__(value) if inspect.isclass(value) else ():
                if not _is_below(derived.__module__):
                    raise ArgumentError(
                        f"{derived.__module__}.{derived.__qualname__} is derived from "
                        f"{value.__module__}.{name}, which would stay Megatron-Core's own: call "
                        "shardstore.megatron.install() before that module is imported"
                    )
    return names


def _mend(taken: Mapping[str, ModuleType], names: Mapping[int, tuple[str, str]]) -> None:
    """Replace the names that other modules have imported from Megatron-Core."""
    fresh = {id(module): importlib.import_module(name) for name, module in taken.items()}
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in fresh:
                setattr(module, name, fresh[id(value)])
            elif id(value) in names:
                home, original = names[id(value)]
                setattr(module, name, getattr(importlib.import_module(home), original, value))


# -- objects that were made before -----------------------------------------------------------------


def _understood(state_dict: ShardedStateDict) -> ShardedStateDict:
    """Return the state dict with Megatron-Core's sharded objects converted to this package's."""
    return cast(ShardedStateDict, dict_list_map_outplace(_own_object, state_dict))


def _own_object(value: Any) -> Any:
    kind = type(value)
    ours = getattr(mapping, kind.__name__, None) if _is_below(kind.__module__) else None
    if ours is None:
        return value
    if ours is mapping.LocalNonpersistentObject:
        return ours(value.unwrap())
    given = {field.name: getattr(value, field.name, None) for field in fields(ours)}
    if build := given.get("build_fn"):
        given["build_fn"] = lambda *args: _understood(build(*args))
    return ours(**given)


def _own_strategy(given: Any, wrapper: Any, default: Callable[[], Any]) -> Any:
    """Return the given strategy; if it is None or of Megatron-Core's own classes, return the
    corresponding one of this package."""
    if given is not None and not _is_below(type(given).__module__):
        return given
    if hasattr(given, "base_strategy"):
        base = _own_strategy(given.base_strategy, wrapper, default)
        return wrapper(base, given.parallelization_group, given.do_cache_distribution)
    return default()


# -- saving ----------------------------------------------------------------------------------------


class PlainZarrSaveStrategy(ZarrSaveShardedStrategy):
    """Takes the place of ``TorchDistSaveShardedStrategy`` after :func:`install` with ``"zarr"``.

    It accepts the arguments of Megatron-Core's class. They have no effect.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(ZARR_BACKEND, 2)


class TorchDistSaveStrategy(dcp_strategies.TorchDistSaveShardedStrategy):
    """Takes the place of ``TorchDistSaveShardedStrategy`` after :func:`install` with the format
    ``"torch_dist"``.

    By default, each rank writes as many files as in the installed Megatron-Core.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if len(args) < 4 and _megatron_version() >= (0, 17):
            kwargs.setdefault("thread_count", 1)
        super().__init__(*args, **kwargs)


def get_default_save_sharded_strategy(
    backend: str = DCP_BACKEND, version: int | None = None
) -> SaveShardedStrategy:
    """Return the default strategy for saving. For Megatron-Core's backends it writes the installed
    format."""
    if _format == ZARR_BACKEND and backend in FORMATS:
        return PlainZarrSaveStrategy()
    if backend == DCP_BACKEND:
        return TorchDistSaveStrategy(backend, version or 1)
    return serialization.get_default_save_sharded_strategy(backend, version)


@wraps(serialization.save)
def save(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | Path,
    sharded_strategy: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Save; replace an existing checkpoint, as Megatron-Core does."""
    if isinstance(sharded_strategy, tuple):
        sharded_strategy = get_default_save_sharded_strategy(*sharded_strategy)
    sharded_strategy = _own_strategy(
        sharded_strategy,
        fully_parallel.FullyParallelSaveStrategyWrapper,
        # Looked up at call time, because programs replace it to change the default.
        importlib.import_module(f"{ROOT}.serialization").get_default_save_sharded_strategy,
    )
    lacks_common = "common_strategy" not in kwargs and (not args or isinstance(args[0], bool))
    if lacks_common and sharded_strategy.backend == DCP_BACKEND and _megatron_version() >= (0, 19):
        args = ((DCP_BACKEND, 1), *args)
    kwargs.setdefault("overwrite", True)
    state = _understood(sharded_state_dict)
    return serialization.save(state, checkpoint_dir, sharded_strategy, *args, **kwargs)


def _megatron_version() -> tuple[int, ...]:
    version = str(importlib.import_module("megatron.core").__version__)
    return tuple(int(part) for part in version.split(".")[:2])


# -- loading ---------------------------------------------------------------------------------------


class AnyFormatLoadStrategy(dcp_strategies.TorchDistLoadShardedStrategy):
    """Takes the place of ``TorchDistLoadShardedStrategy``, and reads every format.

    Tensors whose data type differs from the stored one are cast, with one warning.
    """

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Accept every backend."""

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Accept every version."""

    def load(
        self,
        sharded_state_dict: ShardedStateDict,
        checkpoint_dir: str | Path,
        async_strategy: str | None = None,
    ) -> StateDict:
        """Read tensors and objects. Raises the errors of the strategies of the checkpoint's
        format."""
        with opened(checkpoint_dir) as context:
            context = replace(context, cast="warn")
            sharded, common = verify_checkpoint_and_load_strategy(context.stored)
            wanted: Any = sharded_state_dict
            if _is_old(context):
                wanted = dict_list_map_outplace(partial(_renamed, NEW_PREFIX, OLD_PREFIX), wanted)
            loaded: StateDict = {}
            if not sharded.can_handle_sharded_objects:
                objects, wanted = extract_sharded_objects(wanted)
                loaded = called(common.load_sharded_objects, objects, context)
            merge(loaded, called(sharded.load, wanted, context))
            return loaded

    def load_tensors_metadata(
        self, checkpoint_dir: str | Path, metadata: object = None
    ) -> ShardedStateDict:
        """See :meth:`LoadShardedStrategy.load_tensors_metadata`."""
        found = self.load_sharded_metadata(checkpoint_dir)
        return {key: value for key, value in found.items() if isinstance(value, ShardedTensor)}

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """See :meth:`LoadShardedStrategy.load_sharded_metadata`."""
        with opened(checkpoint_dir) as context:
            found = serialization.load_sharded_metadata(cast(Any, context))
            if _is_old(context):
                renamed = (_renamed(OLD_PREFIX, NEW_PREFIX, value) for value in found.values())
                found = {getattr(value, "unique_key", value.key): value for value in renamed}
            return found


@wraps(serialization.load)
def load(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | Path,
    sharded_strategy: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Load from any format, with the casts that Megatron-Core makes."""
    strategy = _own_strategy(
        None if isinstance(sharded_strategy, tuple) else sharded_strategy,
        fully_parallel.FullyParallelLoadStrategyWrapper,
        AnyFormatLoadStrategy,
    )
    kwargs.setdefault("cast", "warn")
    state = _understood(sharded_state_dict)
    loaded: Any = serialization.load(state, checkpoint_dir, strategy, *args, **kwargs)
    if _reads_no_old_states():
        _modernise(loaded[0] if isinstance(loaded, tuple) else loaded)
    return loaded


def get_default_load_sharded_strategy(checkpoint_dir: object = None) -> LoadShardedStrategy:
    """Return the default strategy for loading, which reads every format."""
    return AnyFormatLoadStrategy()


def load_common_state_dict(checkpoint_dir: str | Path) -> StateDict:
    """Load only the common values. Any rank may call it; it waits for no other."""
    state = serialization.load_common_state_dict(checkpoint_dir)
    return modernise(state) if _reads_no_old_states() else state


@wraps(serialization.load_content_metadata)
def load_content_metadata(
    checkpoint_dir: str | Path | None = None, *, preloaded_state_dict: StateDict | None = None
) -> dict[str, Any] | None:
    """Return the content metadata."""
    if preloaded_state_dict is None and checkpoint_dir is not None:
        preloaded_state_dict = load_common_state_dict(checkpoint_dir)
    return serialization.load_content_metadata(preloaded_state_dict=preloaded_state_dict)


# -- optimizer states of Megatron-Core before 0.14 -------------------------------------------------
# Their tensors have the keys and shapes of the current "fully_reshardable", except for one prefix.
# Flattened ranges are stored, or at least read, in the shapes of their tensors.

SHARDING_TYPES = ("distrib_optim_sharding_type", "param_state_sharding_type")
OLD_SHARDING, NEW_SHARDING = "fully_sharded_model_space", "fully_reshardable"
OLD_PREFIX, NEW_PREFIX = "optimizer.state.fp32_param.", "optimizer.state.param."


def _reads_no_old_states() -> bool:
    return _megatron_version() >= (0, 16)


def _is_old(context: LoadContext) -> bool:
    """Return whether a checkpoint has optimizer states that the installed release cannot load."""
    if not _reads_no_old_states() or not context.stored.has_file(COMMON_STATE_NAME):
        return False
    return _modernise(
        called(verify_checkpoint_and_load_strategy(context.stored)[1].load_common, context)
    )


def modernise(common_state: StateDict) -> StateDict:
    """Rename old optimizer states as Megatron-Core since 0.15 names them, in place."""
    if _modernise(common_state):
        common_state.setdefault(CONTENT_METADATA_KEY, {SHARDING_TYPES[0]: NEW_SHARDING})
    return common_state


def modernised_key(key: str) -> str:
    """Return the current key of a tensor of an old optimizer state."""
    return NEW_PREFIX + key.removeprefix(OLD_PREFIX) if key.startswith(OLD_PREFIX) else key


def _modernise(state: Any) -> bool:
    """Replace the names of old sharding types in place. Return whether there were any."""
    if isinstance(state, list):
        return max(map(_modernise, state), default=False)
    if not isinstance(state, dict):
        return False
    named = [name for name in SHARDING_TYPES if state.get(name) == OLD_SHARDING]
    state.update(dict.fromkeys(named, NEW_SHARDING))
    return max([bool(named), *map(_modernise, state.values())])


def _renamed(before: str, after: str, value: Any) -> Any:
    """Return a sharded tensor with another prefix of its key; return other values unchanged."""
    if isinstance(value, ShardedTensor) and value.key.startswith(before):
        return replace(value, key=after + value.key.removeprefix(before))
    return value


# -- replacements of Megatron-Core's names ---------------------------------------------------------


def get_async_strategy(async_strategy: str = "nvrx", module: str | None = None) -> tuple[str, Any]:
    """Return ``"mcore"``, and a dict of Megatron-Core's asynchronous classes by name, or the one
    that ``module`` names. Its queue and request are this package's.

    The argument ``async_strategy`` has no effect.
    """
    own = importlib.import_module(f"{ROOT}.strategies.torch")._import_mcore_async()
    return "mcore", own if module is None else own[module]


def _replaced(module: str) -> dict[str, Any]:
    """Return the names of a Megatron-Core module that get an object of this file instead of this
    package's object of the same name."""
    if module == f"{ROOT}.serialization":
        own = save, load, load_common_state_dict, load_content_metadata
        defaults = get_default_save_sharded_strategy, get_default_load_sharded_strategy
        return {function.__name__: function for function in (*own, *defaults)}
    if module == f"{ROOT}.strategies.torch":
        saves = PlainZarrSaveStrategy if _format == ZARR_BACKEND else TorchDistSaveStrategy
        return {
            "TorchDistSaveShardedStrategy": saves,
            "TorchDistLoadShardedStrategy": AnyFormatLoadStrategy,
            "get_async_strategy": get_async_strategy,
        }
    return {}


def main() -> None:
    """``python -m shardstore.megatron [--format FORMAT] TRAINER.py ARGUMENTS...``."""
    arguments = sys.argv[1:]
    chosen = ZARR_BACKEND
    if arguments[:1] == ["--format"]:
        chosen, arguments = "".join(arguments[1:2]), arguments[2:]
    if not arguments or arguments[0].startswith("-"):
        sys.exit("usage: python -m shardstore.megatron [--format zarr|torch_dist] TRAINER.py ...")
    if not Path(arguments[0]).is_file():
        sys.exit(f"{arguments[0]} is not a file: give the path of the trainer's program")
    # This module runs as __main__, so import the copy that all other modules import.
    importlib.import_module("shardstore.megatron").install(chosen)
    sys.argv = arguments
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
