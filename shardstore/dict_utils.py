"""Functions that iterate over, map, split, merge and compare nested dicts and lists.

Dicts and lists are structure. Everything else is a value, including tuples.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from functools import reduce
from typing import Any, TypeAlias

import numpy as np
import torch

from shardstore.errors import StructureError
from shardstore.mapping import ShardedBase
from shardstore.values.record import LIST_LENGTH

Path: TypeAlias = tuple[Any, ...]
"""Keys and positions that lead to a value in nested dicts and lists."""


class Position(int):
    """A position in a list, as a part of a path."""


MOST_DEEP = 300
"""Largest number of nested dicts and lists; functions that walk them call themselves."""

_NESTED = (dict, list)  # a tuple, because `dict | list` makes an object for each test
PLAIN = frozenset((int, float, bool, str, type(None)))


def is_flat(x: object) -> bool:
    """Return whether a value is a list of numbers and text, which is stored as one value."""
    return isinstance(x, list) and PLAIN.issuperset(map(type, x))


def extract_matching_values(
    x: dict[Any, Any] | list[Any],
    predicate: Callable[[Any], bool],
    return_lists_as_dicts: bool = False,
) -> tuple[Any, Any]:
    """Split a nested structure into the values that match and those that do not.

    Both parts keep the structure. The matching part has no dicts and lists without values. Dicts
    and lists that are empty in ``x`` belong to the other part.

    Args:
        x: dict or list, possibly nested; not changed.
        predicate: called with every value (never with a dict or list).
        return_lists_as_dicts: return lists as dicts from index to value, which keep the positions.

    Returns:
        The matching part and the other part.

    Raises:
        ValueError: ``x`` is neither dict nor list.
    """
    if not isinstance(x, dict | list):
        raise StructureError(
            f"only dicts and lists can be split into matching and other values, not {type(x)}"
        )
    matching, others = empty_like(x), empty_like(x)
    for key, value in x.items() if isinstance(x, dict) else enumerate(x):
        if isinstance(value, _NESTED):
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


_BUILTIN = (None, bool, dict, float, int, list, set, str, tuple)


def empty_like(x: Any) -> dict[Any, Any]:
    """Return an empty dict of the same class: OrderedDict, Counter, or defaultdict with a builtin
    factory. For any other class, return a plain dict."""
    if type(x) is defaultdict and x.default_factory in _BUILTIN:
        return defaultdict(x.default_factory)
    return OrderedDict() if type(x) is OrderedDict else Counter() if type(x) is Counter else {}


def diff(
    x1: Any, x2: Any, prefix: tuple[Any, ...] = ()
) -> tuple[list[Any], list[Any], list[tuple[Any, ...]]]:
    """Compare two nested structures; lists, tuples and NumPy arrays are compared by position. NaN
    is equal to NaN.

    For sharded tensors, objects and factories only the data are compared. Their type is part of the
    path to a mismatch inside.

    Args:
        x1: left side.
        x2: right side.
        prefix: path of the two sides in the whole structure.

    Returns:
        Three lists: paths of dict keys that only the left side has, paths that only the right side
        has, and mismatches. Elements that only the longer of two sequences has are given by their
        positions. A mismatch is ``(path, left type, right type)``. For two tensors it also has the
        shapes if they differ, otherwise the number of unequal elements, the shape, and the indices
        of these elements.
    """
    if is_flat(x1) and is_flat(x2) and x1 == x2:
        return [], [], []
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
    tensors = [isinstance(x, torch.Tensor) for x in (x1, x2)]
    if all(tensors) and x1.shape != x2.shape:
        return [(*types, x1.shape, x2.shape)]
    try:
        unequal = (x1 != x2) & ((x1 == x1) | (x2 == x2))  # NaN is equal to NaN
        if all(tensors) and torch.any(unequal):
            return [(*types, unequal.sum(), x1.shape, unequal.nonzero().tolist())]
        equal = all(tensors) or not (any(tensors) or np.any(unequal))
    except Exception:
        # Values that cannot be compared (meta tensors, some objects) count as different.
        equal = False
    return [] if equal else [types]


def inspect_types(x: Any, prefix: tuple[Any, ...] = (), indent: int = 4) -> None:
    """Print the outline of a nested structure: keys, types, and shapes of tensors.

    Args:
        x: the structure.
        prefix: path of ``x`` in the whole structure; each step indents by one level.
        indent: spaces per level.
    """
    margin = " " * (indent * len(prefix))
    if isinstance(x, dict | list):
        print()
        mark, items = (">", x.items()) if isinstance(x, dict) else ("-", enumerate(x))
        for key, value in items:
            print(f"{margin}{mark} {key}: ", end="")
            inspect_types(value, (*prefix, key), indent)
    elif isinstance(x, torch.Tensor):
        print(f"Tensor of shape {x.shape}")
    else:
        text = str(x)
        print(f"[{type(x)}]: {text if len(text) <= 40 else text[:37] + '...'}")


def nested_values(x: dict[Any, Any] | list[Any]) -> Iterator[Any]:
    """Yield every value of nested dicts and lists, in order."""
    for value in list(x.values()) if isinstance(x, dict) else x:
        if isinstance(value, _NESTED):
            yield from nested_values(value)
        else:
            yield value


def nested_items_iter(
    x: dict[Any, Any] | list[Any],
) -> Iterator[tuple[dict[Any, Any] | list[Any], Any, Any]]:
    """Yield ``(container, key or position, value)`` for every value of nested dicts and lists.

    The caller may assign to this place while iterating.
    """
    for key, value in list(x.items()) if isinstance(x, dict) else enumerate(x):
        if isinstance(value, _NESTED):
            yield from nested_items_iter(value)
        else:
            yield x, key, value


def empty_places(x: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the path of every empty dict and list inside of nested dicts and lists."""
    for key, value in x.items() if isinstance(x, dict) else enumerate(x):
        if isinstance(value, _NESTED):
            if not value:
                yield (*path, key)
            yield from empty_places(value, (*path, key))


def dotted(path: Path) -> str:
    """Return the name of a path: its keys and positions, joined by dots."""
    return ".".join(map(str, path))


def leaves(x: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every value of nested dicts, lists and tuples, with its path.

    Args:
        x: the structure.
        path: path of ``x`` in the whole structure.

    Raises:
        StructureError: it is nested more than :data:`MOST_DEEP` levels deep, as is a list that
            contains itself.
    """
    require_shallow(path)
    for name, value in x.items() if isinstance(x, dict) else enumerate(x):
        if isinstance(value, dict | list | tuple):
            yield from leaves(value, (*path, name))
        else:
            yield (*path, name), value


def require_shallow(path: Path) -> None:
    """Raise :class:`StructureError` if a path is longer than :data:`MOST_DEEP`."""
    if len(path) >= MOST_DEEP:
        raise StructureError(
            f"the state dict is nested more than {MOST_DEEP} levels deep at "
            f"{'.'.join(map(str, path[:8]))}...: look for a dict or list there that contains "
            "itself, and remove it"
        )


def dict_map(f: Callable[[Any], Any], d: dict[Any, Any]) -> None:
    """Replace every value ``v`` of nested dicts and lists by ``f(v)``, in place."""
    dict_list_map_inplace(f, d)


def dict_map_with_key(f: Callable[[Any, Any], Any], d: dict[Any, Any]) -> None:
    """Replace every value ``v`` at key or position ``k`` by ``f(k, v)``, in place."""
    for container, key, value in nested_items_iter(d):
        container[key] = f(key, value)


def dict_list_map_inplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Replace every value ``v`` of nested dicts and lists by ``f(v)``, in place.

    Returns:
        ``x``, or ``f(x)`` if ``x`` is a value.
    """
    if not isinstance(x, _NESTED):
        return f(x)
    for container, key, value in nested_items_iter(x):
        container[key] = f(value)
    return x


def dict_list_map_outplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Return a copy of nested dicts and lists with every value ``v`` replaced by ``f(v)``."""
    if not isinstance(x, _NESTED):
        return f(x)
    pairs = x.items() if isinstance(x, dict) else enumerate(x)
    mapped = empty_like(x)
    for key, value in pairs:
        mapped[key] = dict_list_map_outplace(f, value) if isinstance(value, _NESTED) else f(value)
    return mapped if isinstance(x, dict) else [*mapped.values()]


def shaped_like(asked: Any, found: Any) -> Any:
    """Return ``found`` in the shape of ``asked``.

    Nested dicts have the keys in the order of ``asked``, then those that only ``found`` has. A
    plain dict becomes a dict of the class that ``asked`` has at its place. A dict that stands for a
    list (:data:`LIST_LENGTH`) becomes the list. A key of ``asked``, such as a number, takes the
    value of its text, which PyTorch DCP stores in its place. Dicts and lists of ``asked`` without
    values come back empty where ``found`` has nothing. Other values of a list come back, without
    sharded ones, before those of ``found`` and empty ones.
    """
    if not isinstance(found, _NESTED):
        return found
    is_list = isinstance(found, list) or LIST_LENGTH in found
    have = dict(enumerate(found) if isinstance(found, list) else found)
    have.pop(LIST_LENGTH, None)
    at: dict[Any, Any] = {}
    if isinstance(asked, list if is_list else dict):
        at = dict(enumerate(asked)) if isinstance(asked, list) else asked
        for key in () if is_list else at:
            if (text := str(key)) in have and text not in at:
                with suppress(StructureError):  # both are stored
                    held = [dict_list_map_outplace(_same, have[key])] if key in have else []
                    have[key] = reduce(united, [*held, have[text]])
                    del have[text]
    have |= {key: value for key, value in at.items() if key not in have and _is_empty(value)}
    if is_list:
        last = max(have, default=0)
        between = {i: value for i, value in at.items() if i < last and i not in have}
        have |= extract_matching_values(between, lambda x: not isinstance(x, ShardedBase))[0]
        return [shaped_like(at.get(i), have[i]) for i in sorted(have)]
    shaped = empty_like(asked if type(found) is dict else found)
    for key in dict.fromkeys((*at, *have)):
        if key in have:
            value = have[key]
            shaped[key] = shaped_like(at.get(key), value) if isinstance(value, _NESTED) else value
    return shaped


def _is_empty(x: Any) -> bool:
    """Return whether ``x`` is a dict or list without values."""
    return isinstance(x, _NESTED) and next(nested_values(x), x) is x


def merge(x1: Any, x2: Any, key: tuple[int | str, ...] = ()) -> Any:
    """Merge a nested structure into another one, in place. Only one may have a value at each place.

    Args:
        x1: receives the entries of ``x2``; dicts are united, lists must have equal lengths.
        x2: not changed; ``x1`` refers to its parts afterwards.
        key: path of the two in the whole structure, for error texts.

    Returns:
        ``x1``.

    Raises:
        ValueError: both have a value at the same place, or their structures do not match.
    """
    if isinstance(x1, list) and isinstance(x2, list) and len(x1) != len(x2):
        raise StructureError(
            f"lists of {len(x1)} and {len(x2)} elements at {key} cannot be merged; "
            "merging needs equal lengths"
        )
    return _merged(x1, x2, key, merge)


def united(x1: Any, x2: Any, key: tuple[int | str, ...] = ()) -> Any:
    """Do what :func:`merge` does, with lists of any lengths, and with dicts that stand for lists
    (:data:`LIST_LENGTH`). The result may be such a dict."""
    if isinstance(x1, list) and isinstance(x2, list):
        common = min(len(x1), len(x2))
        x1 += x2[common:]
        return _merged(x1, x2[:common], key, united)
    if isinstance(x1, list) and isinstance(x2, dict) and LIST_LENGTH in x2:
        x1 = {**dict(enumerate(x1)), LIST_LENGTH: len(x1)}
    if isinstance(x2, list) and isinstance(x1, dict) and LIST_LENGTH in x1:
        x2 = {**dict(enumerate(x2)), LIST_LENGTH: len(x2)}
    return _merged(x1, x2, key, united)


def _merged(x1: Any, x2: Any, key: tuple[Any, ...], inner: Callable[[Any, Any, Any], Any]) -> Any:
    """Merge ``x2`` into ``x1``; ``inner`` merges what both have at a place."""
    if isinstance(x1, dict) and isinstance(x2, dict):
        if (LIST_LENGTH in x1) != (LIST_LENGTH in x2):
            names = [k for k in (*x1, *x2) if k != LIST_LENGTH and not isinstance(k, int)]
            if names:
                raise StructureError(f"at {key} a list cannot be merged with a dict of {names[:4]}")
        for k, value in x2.items():
            if k == LIST_LENGTH:
                x1[k] = max(value, x1.get(k, 0))
            else:
                x1[k] = inner(x1[k], value, (*key, k)) if k in x1 else value
    elif isinstance(x1, list) and isinstance(x2, list):
        for i, value in enumerate(x2):
            x1[i] = inner(x1[i], value, (*key, i))
    else:
        raise StructureError(
            f"both sides of a merge have a value at {key}: {x1!r} and {x2!r}; "
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
        key_fn: returns the group of an element.
        value_fn: returns the value of an element.
        reduce_fn: takes the list of a group's values and returns the group's result.

    Returns:
        Group -> result, in the order of the groups' first elements.
    """
    groups: defaultdict[Any, list[Any]] = defaultdict(list)
    for x in xs:
        groups[key_fn(x)].append(value_fn(x))
    return {group: reduce_fn(values) for group, values in groups.items()}
