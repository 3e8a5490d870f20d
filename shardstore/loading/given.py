"""What a load makes of the values that the caller gave: it fills the given tensors from common
values, and names the stored arrays in whose places there are values of another kind."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import accumulate, pairwise
from typing import Any, cast

import torch

from shardstore import errors
from shardstore.dict_utils import Path, Position, dotted
from shardstore.dtensor.adoption import Adoption
from shardstore.loading.plan import require_cast, require_writable, warn_of_casts
from shardstore.loading.read import LoadContext
from shardstore.mapping import StateDict, local_box
from shardstore.state_dict_utils import HeldShards, StateSplit
from shardstore.storage.format import dtypes

logger = logging.getLogger(__name__)

NOTHING = object()
"""Stands for a value that is not there."""
SHOWN = 3
"""Number of errors or findings that a text names."""


def value_at(state: Any, path: Path) -> Any:
    """Return the value at a path in dicts and lists; :data:`NOTHING` if there is none."""
    for name in path:
        try:
            state = state[name] if isinstance(state, dict | list) else NOTHING
        except (LookupError, TypeError):
            return NOTHING
    return state


@torch.inference_mode()  # which also changes the tensors that it made
def fill_given(
    held: Mapping[Path, HeldShards],
    left: Mapping[Path, torch.Tensor],
    loaded: StateDict,
    context: LoadContext,
) -> None:
    """Fill the given tensors from common values that were loaded, and put them in their places. A
    warning names those that cannot be filled.

    Args:
        held: the DTensors that are stored as common values; each gets its part.
        left: the plain tensors that are no arrays.
        loaded: the loaded state.
        context: the context of the load.
    """
    differing: list[str] = []
    for path, one in held.items():
        found = value_at(loaded, path)
        differing += _cast(path, found, one.tensor)
        for shard in one.shards:
            cast(torch.Tensor, shard.data).copy_(found[local_box(shard).slices])
        value_at(loaded, path[:-1])[path[-1]] = one.tensor
    stored = {path: value_at(loaded, path) for path in left}
    url = context.stored.location.url
    filled: list[tuple[Path, torch.Tensor, torch.Tensor]] = []
    for path, tensor in left.items():
        found, memory = stored[path], dtypes.unwrapped(tensor)
        if not isinstance(found, torch.Tensor) or not all(map(dtypes.is_plain, (found, memory))):
            continue  # such as one on the meta device
        if found.shape != tensor.shape:
            continue
        with suppress(errors.ArgumentError, errors.DTypeMismatchError):  # expanded, not to be cast
            if found.dtype != tensor.dtype:
                require_cast(dotted(path), found.dtype, tensor.dtype, url, context.cast)
            require_writable(memory, dotted(path))
            filled.append((path, memory.copy_(found), found.to(tensor.dtype)))
            differing += _cast(path, found, tensor)
    uses = Counter(memory.untyped_storage().data_ptr() for _, memory, _ in filled)
    for path, memory, found in filled:
        # One tensor may be given for several values, of which it has the last one.
        if uses[memory.untyped_storage().data_ptr()] == 1 or _is_same(memory, found):
            value_at(loaded, path[:-1])[path[-1]] = stored[path] = left[path]
    if differing and context.cast == "warn":
        warn_of_casts(differing, url)
    kept = [
        path
        for path, found in stored.items()
        if found is not NOTHING and found is not left[path] and not left[path].is_meta
    ]
    if kept:
        logger.warning(
            "%d given tensor(s) are not filled, such as %s: they are not dense, share memory, or "
            "differ from the stored values in shape or data type (see cast=); the result has the "
            "stored values",
            len(kept),
            [dotted(path) for path in kept[:SHOWN]],
        )


def _cast(path: Path, stored: torch.Tensor, given: torch.Tensor) -> list[str]:
    """Return what :func:`.warn_of_casts` names, if a tensor is cast."""
    names = [str(one.dtype).removeprefix("torch.") for one in (stored, given)]
    return [f"{dotted(path)!r} ({' as '.join(names)})"] if stored.dtype != given.dtype else []


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    with suppress(errors.DTypeMismatchError):  # of a type that no array has
        return dtypes.as_numpy(one.cpu()).tobytes() == dtypes.as_numpy(other.cpu()).tobytes()
    return False


def warn_unloaded(
    wanted: StateSplit,
    adoption: Adoption,
    loaded: StateDict,
    stored_arrays: Callable[[], Iterable[str]],
    url: str,
    rank: int,
) -> None:
    """Log a warning that names the stored arrays that the load left out, although the caller gave
    something there: a value that is no tensor, at, above or below their paths, or a list of tensors
    that ends before them.

    Args:
        wanted: the parts of the given state.
        adoption: the tensors of the given state.
        loaded: the loaded state.
        stored_arrays: returns the keys of the stored arrays; called if any may be left out.
        url: URL of the checkpoint.
        rank: this rank.
    """
    hidden = {dotted(at) for at, given in wanted.others if _may_hide(at, given, loaded)}
    tensors = [*(at for at, _ in wanted.shards), *adoption.held]
    lists = {dotted(at[:n]) for at in tensors for n, one in enumerate(at) if type(one) is Position}
    if not (hidden or lists):
        return
    others = (at for at, _ in wanted.others)
    places = (*tensors, *adoption.left, *wanted.empty, *others) if lists else ()
    given = {name for at in places for name in _prefixes(dotted(at))}
    above = {name for at in hidden for name in _prefixes(at)}

    def is_left(key: str) -> bool:
        names = [*_prefixes(key)]
        is_beyond = any(a in lists and b not in given for a, b in pairwise(names))
        return is_beyond or key in above or not hidden.isdisjoint(names)

    arrays: Iterable[str] = ()
    with suppress(Exception):  # of a strategy of another program; the load has succeeded
        arrays = stored_arrays()
    if left := sorted(filter(is_left, arrays)):
        logger.warning(
            "%d array(s) of %s are not loaded, such as %s: the state dict of rank %d has a value "
            "that is no tensor in their places, or a list that ends before; give a tensor of the "
            "stored shape there",
            len(left),
            url,
            left[:SHOWN],
            rank,
        )


def _may_hide(path: Path, given: Any, loaded: StateDict) -> bool:
    """Return whether there may be arrays in the place of a given value, or around it: the result
    has nothing there, or a container of another kind, or the value is an element of a list."""
    found = value_at(loaded, path)
    is_list = isinstance(given, list) and isinstance(found, list) and len(found) >= len(given)
    is_container = isinstance(found, dict | list) and not is_list
    return found is NOTHING or is_container or isinstance(path[-1], Position)


def _prefixes(name: str) -> Iterable[str]:
    return accumulate(name.split("."), "{}.{}".format)
