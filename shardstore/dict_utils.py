"""Walking, mapping, splitting, merging and comparing nested dicts and lists.

Dicts and lists nested in each other are structure; everything else (tuples included) is a value.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from shardstore.errors import StructureError
from shardstore.sharded.base import ShardedBase


def extract_matching_values(
    x: dict[Any, Any] | list[Any],
    predicate: Callable[[Any], bool],
    return_lists_as_dicts: bool = False,
) -> tuple[Any, Any]:
    """Split a nested structure into the values that match and those that do not.

    Both parts keep the structure. Dicts and lists left without a value disappear from the matching
    part; those that were empty to begin with belong to the other.

    Args:
        x: dict or list, possibly nested; not changed.
        predicate: asked for every value (never for a dict or list).
        return_lists_as_dicts: lists become dicts from index to value, which keeps the positions
            that a shortened list would lose.

    Returns:
        What matches and what does not.

    Raises:
        ValueError: ``x`` is neither dict nor list.
    """
    if not isinstance(x, dict | list):
        raise StructureError(
            f"only a dict or a list can be split into matching and other values, "
            f"not a {type(x).__name__}"
        )
    matching: dict[Any, Any] = {}
    others: dict[Any, Any] = {}
    for key, value in x.items() if isinstance(x, dict) else enumerate(x):
        if isinstance(value, dict | list):
            inner_matching, inner_others = extract_matching_values(
                value, predicate, return_lists_as_dicts
            )
            if inner_matching:
                matching[key] = inner_matching
            if inner_others or not value:
                others[key] = inner_others
        else:
            (matching if predicate(value) else others)[key] = value
    if isinstance(x, dict) or return_lists_as_dicts:
        return matching, others
    return list(matching.values()), list(others.values())


def diff(
    x1: Any, x2: Any, prefix: tuple[Any, ...] = ()
) -> tuple[list[Any], list[Any], list[tuple[Any, ...]]]:
    """Compare two nested structures; lists, tuples and NumPy arrays are compared by position.

    Of sharded tensors, objects and factories the data are compared, and nothing else; their type is
    part of the path to a mismatch within.

    Args:
        x1: left side.
        x2: right side.
        prefix: where the two sides are within the whole.

    Returns:
        Three lists: paths of dict keys that only the left side has, paths that only the right side
        has, and mismatches. Elements that only the longer of two sequences has are given as bare
        positions. A mismatch is ``(path, left type, right type)``; for two tensors the shapes
        follow if they differ, otherwise the number of unequal elements, the shape, and the indices
        of those elements.
    """
    if isinstance(x1, dict) and isinstance(x2, dict):
        only_left: list[Any] = [(*prefix, k) for k in x1 if k not in x2]
        only_right: list[Any] = [(*prefix, k) for k in x2 if k not in x1]
        common: list[Any] = [k for k in x1 if k in x2]
    elif _is_sequence(x1) and _is_sequence(x2) and type(x1) is type(x2):
        shared = min(len(x1), len(x2))
        only_left = list(range(len(x1) - 1, shared - 1, -1))
        only_right = list(range(len(x2) - 1, shared - 1, -1))
        common = list(range(shared))
    elif isinstance(x1, ShardedBase) and type(x1) is type(x2):
        return diff(x1.data, x2.data, (*prefix, type(x1)))
    else:
        return [], [], _value_mismatch(x1, x2, prefix)

    mismatch: list[tuple[Any, ...]] = []
    for k in common:
        left, right, unequal = diff(x1[k], x2[k], (*prefix, k))
        only_left += left
        only_right += right
        mismatch += unequal
    return only_left, only_right, mismatch


def _is_sequence(x: Any) -> bool:
    return isinstance(x, list | tuple) or (isinstance(x, np.ndarray) and x.ndim > 0)


def _value_mismatch(x1: Any, x2: Any, path: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    types = (path, type(x1), type(x2))
    if isinstance(x1, torch.Tensor) != isinstance(x2, torch.Tensor):
        return [types]
    if isinstance(x1, torch.Tensor) and x1.shape != x2.shape:
        return [(*types, x1.shape, x2.shape)]
    try:
        if isinstance(x1, torch.Tensor):
            unequal = x1 != x2
            if torch.any(unequal):
                return [(*types, unequal.sum(), x1.shape, unequal.nonzero().tolist())]
            return []
        equal = bool(np.all(x1 == x2))
    except Exception:
        # What cannot be compared (meta tensors, some objects) cannot be shown to be the same.
        equal = False
    return [] if equal else [types]


def inspect_types(x: Any, prefix: tuple[Any, ...] = (), indent: int = 4) -> None:
    """Print the outline of a nested structure: keys, types, and shapes of tensors.

    Args:
        x: what to outline.
        prefix: where ``x`` is within the whole; each step indents by one level.
        indent: spaces for each level.
    """
    margin = " " * (indent * len(prefix))
    if isinstance(x, dict):
        print()
        for key, value in x.items():
            print(f"{margin}> {key}: ", end="")
            inspect_types(value, (*prefix, key), indent)
    elif isinstance(x, list):
        print()
        for position, value in enumerate(x):
            print(f"{margin}- {position}: ", end="")
            inspect_types(value, (*prefix, position), indent)
    elif isinstance(x, torch.Tensor):
        print(f"Tensor of shape {x.shape}")
    else:
        text = str(x)
        print(f"[{type(x)}]: {text if len(text) <= 40 else text[:37] + '...'}")


def nested_values(x: dict[Any, Any] | list[Any]) -> Iterator[Any]:
    """Yield every value of nested dicts and lists, in order."""
    for value in x.values() if isinstance(x, dict) else x:
        if isinstance(value, dict | list):
            yield from nested_values(value)
        else:
            yield value


def nested_items_iter(
    x: dict[Any, Any] | list[Any],
) -> Iterator[tuple[dict[Any, Any] | list[Any], Any, Any]]:
    """Yield ``(container, key or position, value)`` for every value of nested dicts and lists.

    Assigning to the container's place while iterating is allowed.
    """
    for key, value in list(x.items()) if isinstance(x, dict) else enumerate(x):
        if isinstance(value, dict | list):
            yield from nested_items_iter(value)
        else:
            yield x, key, value


def dict_map(f: Callable[[Any], Any], d: dict[Any, Any]) -> None:
    """Replace every value ``v`` of nested dicts and lists by ``f(v)``, in place."""
    for container, key, value in nested_items_iter(d):
        container[key] = f(value)


def dict_map_with_key(f: Callable[[Any, Any], Any], d: dict[Any, Any]) -> None:
    """Replace every value ``v`` at key or position ``k`` by ``f(k, v)``, in place."""
    for container, key, value in nested_items_iter(d):
        container[key] = f(key, value)


def dict_list_map_inplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Replace every value of nested dicts and lists by ``f`` of it, in place.

    Returns:
        ``x``, or ``f(x)`` if ``x`` is itself a value.
    """
    if isinstance(x, dict):
        for key, value in list(x.items()):
            x[key] = dict_list_map_inplace(f, value)
    elif isinstance(x, list):
        x[:] = [dict_list_map_inplace(f, value) for value in x]
    else:
        return f(x)
    return x


def dict_list_map_outplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Return a copy of nested dicts and lists with every value replaced by ``f`` of it."""
    if isinstance(x, dict):
        return {key: dict_list_map_outplace(f, value) for key, value in x.items()}
    if isinstance(x, list):
        return [dict_list_map_outplace(f, value) for value in x]
    return f(x)


def merge(x1: Any, x2: Any, key: tuple[int | str, ...] = ()) -> Any:
    """Join two nested structures that have no value in common, in place.

    Args:
        x1: receives what ``x2`` has; dicts are united, lists must be of one length.
        x2: not changed, but its parts end up in ``x1``.
        key: where the two are within the whole; for error texts.

    Returns:
        ``x1``.

    Raises:
        ValueError: both have a value at the same place, or structures that do not fit.
    """
    if isinstance(x1, dict) and isinstance(x2, dict):
        for k, value in x2.items():
            x1[k] = merge(x1[k], value, (*key, k)) if k in x1 else value
    elif isinstance(x1, list) and isinstance(x2, list):
        if len(x1) != len(x2):
            raise StructureError(
                f"lists of {len(x1)} and {len(x2)} elements at {key} cannot be merged; "
                "merging needs equal lengths"
            )
        for i, value in enumerate(x2):
            x1[i] = merge(x1[i], value, (*key, i))
    else:
        raise StructureError(
            f"both sides of a merge have something at {key}: {x1!r} and {x2!r}; "
            "only dicts with dicts and lists with lists can be merged"
        )
    return x1


def _same(value: Any) -> Any:
    return value


def map_reduce(
    xs: Iterable[Any],
    key_fn: Callable[[Any], Hashable] = _same,
    value_fn: Callable[[Any], Any] = _same,
    reduce_fn: Callable[[list[Any]], Any] = _same,
) -> dict[Any, Any]:
    """Group elements by key and reduce each group.

    Args:
        xs: elements.
        key_fn: an element's group.
        value_fn: what of an element goes into its group.
        reduce_fn: turns a group's list into the result for it.

    Returns:
        Group -> result, groups in the order of their first elements.
    """
    groups: defaultdict[Any, list[Any]] = defaultdict(list)
    for x in xs:
        groups[key_fn(x)].append(value_fn(x))
    return {group: reduce_fn(values) for group, values in groups.items()}
