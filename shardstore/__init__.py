"""Sharded training checkpoints as plain Zarr.

The public names are loaded on first use (PEP 562). Importing the package imports neither torch nor
other slow modules, because the command line and zarr (for the data types) import it too.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardstore import bridge as bridge
    from shardstore import convert as convert
    from shardstore import dcp as dcp
    from shardstore import errors as errors
    from shardstore import hf as hf
    from shardstore import lightning as lightning
    from shardstore import megatron as megatron
    from shardstore import progress as progress
    from shardstore import strategies as strategies
    from shardstore import torchtitan as torchtitan
    from shardstore import verl as verl
    from shardstore import zarr_dtypes as zarr_dtypes
    from shardstore.async_handle import AsyncSave as AsyncSave
    from shardstore.async_handle import async_save as async_save
    from shardstore.core import CheckpointingException as CheckpointingException
    from shardstore.core import check_is_distributed_checkpoint as check_is_distributed_checkpoint
    from shardstore.dtensor import shard as shard
    from shardstore.inspection.opened import open as open
    from shardstore.manager import CheckpointManager as CheckpointManager
    from shardstore.mapping import LocalNonpersistentObject as LocalNonpersistentObject
    from shardstore.mapping import ShardedObject as ShardedObject
    from shardstore.mapping import ShardedTensor as ShardedTensor
    from shardstore.serialization import load as load
    from shardstore.serialization import load_common_state_dict as load_common_state_dict
    from shardstore.serialization import load_content_metadata as load_content_metadata
    from shardstore.serialization import load_plain_tensors as load_plain_tensors
    from shardstore.serialization import load_sharded_metadata as load_sharded_metadata
    from shardstore.serialization import load_tensors_metadata as load_tensors_metadata
    from shardstore.serialization import remove_sharded_tensors as remove_sharded_tensors
    from shardstore.serialization import save as save
    from shardstore.storage.commit.checkpoints import delete_checkpoint as delete_checkpoint
    from shardstore.storage.commit.checkpoints import latest as latest
    from shardstore.storage.commit.checkpoints import sweep as sweep
    from shardstore.storage.options import SaveOptions as SaveOptions
    from shardstore.validation import StrictHandling as StrictHandling

_WHERE = {
    name: module
    for module, names in {
        "async_handle": "AsyncSave async_save",
        "core": "CheckpointingException check_is_distributed_checkpoint",
        "dtensor": "shard",
        "inspection.opened": "open",
        "manager": "CheckpointManager",
        "mapping": "LocalNonpersistentObject ShardedObject ShardedTensor",
        "serialization": "load load_common_state_dict load_content_metadata load_plain_tensors "
        "load_sharded_metadata load_tensors_metadata remove_sharded_tensors save",
        "storage.commit.checkpoints": "delete_checkpoint latest sweep",
        "storage.options": "SaveOptions",
        "validation": "StrictHandling",
    }.items()
    for name in names.split()
}
"""Public name -> the module that defines it."""
__all__ = sorted(_WHERE)


if not TYPE_CHECKING:  # else every wrong name would be one to a type checker

    def __getattr__(name: str) -> object:
        if name in _WHERE:
            from shardstore.storage.runtime.parallel import collector_paused

            with collector_paused():  # garbage collection slows the imports of a first save
                value = getattr(importlib.import_module(f"shardstore.{_WHERE[name]}"), name)
            globals()[name] = value
            return value
        try:
            return importlib.import_module(f"shardstore.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"shardstore.{name}":
                raise
            raise AttributeError(f"module 'shardstore' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    import pkgutil

    modules = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted({*globals(), *_WHERE, *modules})
