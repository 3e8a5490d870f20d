"""Helpers for sharded state dicts: split them, rename keys, log and time operations on them."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, TypeAlias

import torch

from shardstore.dict_utils import dict_list_map_inplace, extract_matching_values, nested_values
from shardstore.errors import StructureError
from shardstore.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
)

# Key, global offset, and the flattened range's bounds (tensors) or the grid's shape (objects).
_ShardId: TypeAlias = tuple[str, tuple[int, ...], tuple[Any, ...] | None]

_Split: TypeAlias = tuple[ShardedStateDict, StateDict]


class _UnequalLengthsError(StructureError, AssertionError):
    """The error of zip_strict, for callers that catch either kind."""


def zip_strict(*args: Iterable[Any]) -> Iterable[tuple[Any, ...]]:
    """Do ``zip(..., strict=True)`` with an error that names every length.

    Args:
        args: iterables; they are read to their ends.

    Raises:
        ValueError: the lengths differ. The error is an ``AssertionError`` too.
    """
    lists = [list(arg) for arg in args]
    lengths = [len(values) for values in lists]
    if len(set(lengths)) > 1:
        raise _UnequalLengthsError(f"zip_strict needs iterables of equal length, not {lengths}")
    return zip(*lists, strict=True)


def _sharded_tensor_shard_id(sharded_tensor: ShardedTensor) -> _ShardId:
    """Return the identity of a tensor shard, the same for its replicas on all ranks."""
    flat = sharded_tensor.flattened_range
    bounds = None if flat is None else (flat.start, flat.stop)
    return sharded_tensor.key, sharded_tensor.global_offset, bounds


def _sharded_object_id(sharded_object: ShardedObject) -> _ShardId:
    """Return the identity of an object shard, the same for its replicas on all ranks."""
    return sharded_object.key, sharded_object.global_offset, sharded_object.global_shape


def sharded_tensors_of(state_dict: ShardedStateDict) -> list[ShardedTensor]:
    """Return all sharded tensors of a nested state dict."""
    return [value for value in nested_values(state_dict) if isinstance(value, ShardedTensor)]


def _extract(state_dict: ShardedStateDict, *kinds: type) -> _Split:
    return extract_matching_values(state_dict, lambda value: isinstance(value, kinds))


def extract_sharded_tensors(sharded_state_dict: ShardedStateDict) -> _Split:
    """Split off the tensors.

    Returns:
        Each :class:`ShardedTensor`, and everything else; both in the original structure.
    """
    return _extract(sharded_state_dict, ShardedTensor)


def extract_sharded_tensors_and_factories(sharded_state_dict: ShardedStateDict) -> _Split:
    """Split off the tensors and the factories of tensors.

    Returns:
        Each :class:`ShardedTensor` and :class:`ShardedTensorFactory`, and everything else; both in
        the original structure.
    """
    return _extract(sharded_state_dict, ShardedTensor, ShardedTensorFactory)


def extract_sharded_tensors_or_nonpersistent(sharded_state_dict: ShardedStateDict) -> _Split:
    """Split off the tensors, the factories of tensors, and non-persistent objects.

    Returns:
        Each :class:`ShardedTensor`, :class:`ShardedTensorFactory` and
        :class:`LocalNonpersistentObject`, and everything else; both in the original structure.
    """
    return _extract(
        sharded_state_dict, ShardedTensor, ShardedTensorFactory, LocalNonpersistentObject
    )


def extract_sharded_base(sharded_state_dict: ShardedStateDict) -> _Split:
    """Split off everything sharded: tensors, objects and factories.

    Returns:
        Each :class:`ShardedBase`, and everything else; both in the original structure.
    """
    return _extract(sharded_state_dict, ShardedBase)


def extract_sharded_objects(sharded_state_dict: ShardedStateDict) -> _Split:
    """Split off the objects.

    Returns:
        Each :class:`ShardedObject`, and everything else; both in the original structure.
    """
    return _extract(sharded_state_dict, ShardedObject)


def extract_nonpersistent(sharded_state_dict: ShardedStateDict) -> _Split:
    """Split off the non-persistent objects.

    Returns:
        Each :class:`LocalNonpersistentObject`, and everything else; both in the original structure.
    """
    return _extract(sharded_state_dict, LocalNonpersistentObject)


def _rename_keys(sharded_state_dict: ShardedStateDict, rename: Callable[[str], str]) -> None:
    """Replace every sharded key by ``rename(key)``, once per object. After an error of ``rename``
    no key is changed."""
    shards = {id(v): v for v in nested_values(sharded_state_dict) if isinstance(v, ShardedBase)}
    renamed = [(shard, rename(shard.key)) for shard in shards.values()]
    for shard, key in renamed:
        shard.key = key


def add_prefix_for_sharding(sharded_state_dict: ShardedStateDict, prefix: str) -> None:
    """Put ``prefix`` before the key of everything sharded, in place.

    Keys of the state dict itself stay as they are.
    """
    _rename_keys(sharded_state_dict, lambda key: f"{prefix}{key}")


def replace_prefix_for_sharding(
    sharded_state_dict: ShardedStateDict, old_prefix: str, new_prefix: str
) -> None:
    """Replace the prefix of the key of everything sharded, in place.

    Raises:
        ValueError: a key does not begin with ``old_prefix``; no key is changed.
    """

    def rename(key: str) -> str:
        if not key.startswith(old_prefix):
            raise StructureError(
                f"the key {key!r} does not begin with the prefix {old_prefix!r} to replace by "
                f"{new_prefix!r}; use apply_prefix_mapping to leave such keys unchanged",
                key=key,
            )
        return new_prefix + key.removeprefix(old_prefix)

    _rename_keys(sharded_state_dict, rename)


def apply_prefix_mapping(sharded_state_dict: ShardedStateDict, prefix_map: dict[str, str]) -> None:
    """Replace prefixes of sharded keys, in place. Keys that match no prefix stay unchanged.

    Args:
        sharded_state_dict: state dict whose sharded keys change.
        prefix_map: old prefix -> new prefix; the first match, in the order of the dict, is used.
    """

    def rename(key: str) -> str:
        old = next((prefix for prefix in prefix_map if key.startswith(prefix)), None)
        return key if old is None else prefix_map[old] + key.removeprefix(old)

    _rename_keys(sharded_state_dict, rename)


def force_all_tensors_to_non_fp8(sharded_state_dict: ShardedStateDict) -> None:
    """Replace float8 tensors by tensors of a wider type, in place.

    Tensor subclasses that define ``dequantize`` (such as those of Transformer Engine) are
    dequantized. Tensors of PyTorch's float8 types become bfloat16, which represents each of their
    values exactly. Transformer Engine need not be installed. Other tensors do not change.

    Args:
        sharded_state_dict: its sharded tensors (``data`` and ``dtype``), factories and plain
            tensors are changed.
    """

    def widened(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _without_fp8(value)
        if isinstance(value, ShardedTensor | ShardedTensorFactory) and value.data is not None:
            value.data = _without_fp8(value.data)
        if isinstance(value, ShardedTensor):
            value.dtype = _wider(value.dtype) if value.data is None else value.data.dtype
        return value

    dict_list_map_inplace(widened, sharded_state_dict)


def _without_fp8(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor).dequantize is not torch.Tensor.dequantize:
        return tensor.dequantize()
    return tensor.to(_wider(tensor.dtype))


def _wider(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if str(dtype).startswith("torch.float8_") else dtype


fallback_logger = logging.getLogger(__name__)
__LOGGER_NAME_STACK: list[str] = []
__LOGGER_STACK: list[logging.Logger] = []


@contextmanager
def logger_stack(
    name: str | None = None, current_logger: logging.Logger | None = None
) -> Iterator[tuple[str, logging.Logger]]:
    """Name a scope and set its logger, for :func:`debug_msg` and :func:`debug_time`.

    Scopes nest. When a scope ends, also by an error, the enclosing scope is current again.

    Args:
        name: appended to the names of the enclosing scopes with a dot; ``None`` appends nothing.
        current_logger: logger within the scope; ``None``: that of the enclosing scope, or
            ``fallback_logger`` if there is none.

    Yields:
        The joined name and the logger in use.
    """
    if name:
        __LOGGER_NAME_STACK.append(name)
    if current_logger is None:
        current_logger = __LOGGER_STACK[-1] if __LOGGER_STACK else fallback_logger
    __LOGGER_STACK.append(current_logger)
    try:
        yield ".".join(__LOGGER_NAME_STACK), current_logger
    finally:
        __LOGGER_STACK.pop()
        if name:
            __LOGGER_NAME_STACK.pop()


@contextmanager
def debug_time(
    name: str,
    logger: logging.Logger | None = None,
    threshold: float = float("-inf"),
    level: int | None = None,
) -> Iterator[None]:
    """Log the duration of a block, also if it raises an error. It can be used as a decorator.

    Args:
        name: name of the block, a scope of :func:`logger_stack`.
        logger: logger to use; ``None``: that of the enclosing scope.
        threshold: seconds; the duration of a faster block is not logged.
        level: logging level; ``None``: WARNING with a threshold, otherwise DEBUG.
    """
    if level is None:
        level = logging.DEBUG if threshold == float("-inf") else logging.WARNING
    with logger_stack(name, logger) as (scope, scope_logger):
        start = perf_counter()
        try:
            yield
        finally:
            seconds = perf_counter() - start
            if seconds >= threshold:
                scope_logger.log(level, f"{scope} took {seconds:.4f}s")


def debug_msg(msg: str) -> None:
    """Log ``msg`` at DEBUG level to the current scope's logger, after the scope's name.

    Args:
        msg: the message.
    """
    with logger_stack() as (scope, scope_logger):
        scope_logger.debug(f"{scope} {msg}")


def _clean_metadata_for_serialization(metadata: Any) -> Any:
    """Return a copy without values that cannot be stored, such as process groups and functions.

    Args:
        metadata: nested dicts and lists; not changed.

    Returns:
        The entries that can be stored, at any depth. Other elements of lists are left out.
    """
    clean = _clean_metadata_for_serialization
    if isinstance(metadata, dict):
        return {key: clean(value) for key, value in metadata.items() if _is_storable(value)}
    if isinstance(metadata, list):
        return [clean(value) for value in metadata if _is_storable(value)]
    return metadata


def _is_storable(value: Any) -> bool:
    if isinstance(value, dict | list):
        return True  # its entries are filtered
    if callable(value):
        return False  # functions and classes: a pickle holds only their names
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True
