"""Prepares a sharded state dict for a save or a load.

It builds the factories, and splits the state into sharded entries, common values and non-persistent
objects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardstore.coverage import is_empty_range
from shardstore.dict_utils import (
    Path,
    dict_list_map_inplace,
    dotted,
    empty_like,
    extract_matching_values,
    leaves,
)
from shardstore.errors import StructureError
from shardstore.mapping import (
    CommonStateDict,
    LocalNonpersistentObject,
    ShardedBase,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
    apply_factories,
)
from shardstore.utils import extract_nonpersistent, extract_sharded_base
from shardstore.values.record import LIST_LENGTH

# The kinds of values, as sets.
_SHARDED = frozenset(["sharded"])
_COMMON = frozenset(["common"])
_LOCAL = frozenset(["local"])
_EMPTY = frozenset(["empty"])


def save_preprocess(
    sharded_state_dict: ShardedStateDict,
    validate_access_integrity: bool = True,
    preprocess_common_before_consistancy_check: Callable[[CommonStateDict], StateDict]
    | None = None,
) -> tuple[ShardedStateDict, CommonStateDict]:
    """Build the factories, drop non-persistent objects, and split the state.

    Every rank calls it. With ``validate_access_integrity`` the ranks exchange descriptions of their
    shards, and each waits for all others. Without it, no rank waits.

    Args:
        sharded_state_dict: its factories are replaced in place by what they build.
        validate_access_integrity: check that the shards of all ranks cover each tensor exactly
            once, and that the common values of the ranks agree.
        preprocess_common_before_consistancy_check: called with a copy of the common values; returns
            the values that the ranks compare. The saved values do not change.

    Returns:
        The sharded part (without empty flattened tensors) and the common values.

    Raises:
        CheckpointingException: the shards overlap, leave a gap, or contradict each other.
    """
    apply_factories(sharded_state_dict)
    _, persistent = extract_nonpersistent(sharded_state_dict)
    sharded, common = extract_sharded_base(persistent)
    sharded = filter_out_empty_flatten_tensor(sharded)
    if validate_access_integrity:
        # Only this check needs the process group and its modules.
        from shardstore import validation

        compared = validation.preprocessed(common, preprocess_common_before_consistancy_check)
        _, global_metadata = validation.determine_global_metadata(sharded)
        validation.validate_sharding_integrity(global_metadata, common_state_dict=compared)
    return sharded, common


def load_preprocess(
    sharded_state_dict: ShardedStateDict,
) -> tuple[ShardedStateDict, StateDict, StateDict]:
    """Build the factories and split off the entries that the checkpoint does not hold.

    Any rank may call it; it waits for no other.

    Args:
        sharded_state_dict: not changed; the results share its tensors.

    Returns:
        The entries to load, without flattened ranges of tensors that have no elements; the
        non-persistent local objects; and the factories, without data, for
        :func:`shardstore.mapping.apply_factory_merges` (lists as dicts from index to value).
    """
    # Other empty ranges stay, so that lists keep the positions of their elements.
    wanted, _ = extract_matching_values(sharded_state_dict, _is_somewhere)
    factories, _ = extract_matching_values(
        wanted, lambda value: isinstance(value, ShardedTensorFactory), return_lists_as_dicts=True
    )
    # Free the tensor of a factory before the merge.
    dict_list_map_inplace(lambda factory: factory.without_data(), factories)
    apply_factories(wanted)

    nonpersistent, wanted = extract_nonpersistent(wanted)
    dict_list_map_inplace(LocalNonpersistentObject.unwrap, nonpersistent)
    return wanted, nonpersistent, factories


def check_state(state_dict: object) -> None:
    """Check that a state dict is a dict of values, and that its nesting ends.

    Raises:
        StructureError: the state dict is no dict; dicts and lists in it are nested too deeply, as
            in one that contains itself; or a value is an object that has a state dict itself.
    """
    if not isinstance(state_dict, dict):
        raise StructureError(
            "the state dict must be a dict of tensors and values, not a "
            f"{type(state_dict).__name__}; for one tensor, pass {{name: tensor}}"
        )
    for path, value in leaves(state_dict):
        if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            name = dotted(path)
            raise StructureError(
                f"the value at {name!r} is a {type(value).__name__}, an object that has a state "
                "dict: put its state_dict() into the state dict, and pass what is loaded there to "
                "its load_state_dict()",
                key=name,
            )


def number_lists(x: Any, path: Path = (), *, built: bool) -> tuple[Any, frozenset[str]]:
    """Return a copy in which lists of different kinds of values are dicts by position.

    The kinds are sharded, common and local values. They are stored or kept separately, so the
    positions of such a list would be lost. The dict stands for the list, see
    :data:`~shardstore.dict_utils.LIST_LENGTH`.

    Args:
        x: nested dicts and lists of a state dict.
        path: path of ``x`` in the whole state dict, for error texts.
        built: whether the factories are built.

    Returns:
        The copy, and the kinds of values in ``x``.

    Raises:
        StructureError: ``x`` holds a tuple with a sharded value, a factory that another factory has
            built, or a list with a flattened range of a tensor without elements, which no
            checkpoint holds.
    """
    if not isinstance(x, dict | list):
        return x, _kind(x, path, built)
    items = x.items() if isinstance(x, dict) else enumerate(x)
    found = [(key, *number_lists(value, (*path, key), built=built)) for key, value in items]
    kinds = frozenset[str]().union(*{kinds for *_, kinds in found})
    if isinstance(x, list):
        if kinds >= _EMPTY:
            raise StructureError(
                f"the list at {'.'.join(map(str, path)) or 'the top'} holds a flattened range of a "
                "tensor without elements, which no checkpoint holds, so that the positions of the "
                "other elements are unknown; make it a dict"
            )
        values = [value for _, value, _ in found]
        if all(one == kinds for *_, one in found):
            return values, kinds or _COMMON
        # A load keeps its own lengths, because the stored lists may be others.
        length = len(values) if built else LocalNonpersistentObject(len(values))
        return {**dict(enumerate(values)), LIST_LENGTH: length}, kinds | _COMMON
    numbered = empty_like(x)
    for key, value, _ in found:
        numbered[key] = value
    return numbered, kinds or _COMMON


def _is_empty(value: Any) -> bool:
    return isinstance(value, ShardedTensor) and is_empty_range(value)


def _is_somewhere(value: Any) -> bool:
    """Return whether any rank may save a value: no flattened range of a tensor without elements."""
    return not _is_empty(value) or 0 not in value.global_shape


def _kind(value: object, path: Path, built: bool) -> frozenset[str]:
    if isinstance(value, ShardedBase):
        if built and isinstance(value, ShardedTensorFactory):
            name = dotted(path)
            raise StructureError(
                f"a factory built the factory at {name!r}, and factories are built once; let it "
                "build sharded tensors",
                key=name,
            )
        return _SHARDED if _is_somewhere(value) else _EMPTY
    if isinstance(value, tuple) and any(isinstance(item, ShardedBase) for item in value):
        name = dotted(path)
        raise StructureError(
            f"the tuple at {name!r} has a sharded value in it, and tuples are stored whole, by one "
            "rank; make it a list",
            key=name,
        )
    return _LOCAL if isinstance(value, LocalNonpersistentObject) else _COMMON


def filter_out_empty_flatten_tensor(sharded_state_dict: dict[Any, Any] | list[Any]) -> Any:
    """Return a copy without the sharded tensors whose flattened range is empty.

    Dicts and lists that hold nothing else are removed too. Empty tensors that are not flattened
    stay.
    """
    return extract_matching_values(sharded_state_dict, lambda value: not _is_empty(value))[0]
