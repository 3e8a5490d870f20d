"""Prepares a sharded state dict for a save or a load.

It builds the factories, and splits the state into sharded entries, common values and non-persistent
objects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardstore.coverage import is_empty_range
from shardstore.dict_utils import Path, dict_list_map_inplace, extract_matching_values, leaves
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

        compared = validation.comparable(common, preprocess_common_before_consistancy_check)
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
    wanted, left_out = extract_matching_values(sharded_state_dict, _is_somewhere)
    if _has_elements(left_out):
        raise StructureError(
            "a list in the state dict holds a flattened range of a tensor without elements, which "
            "no checkpoint holds, so the positions of the other elements are unknown; make it a "
            "dict"
        )
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
    """Check that a state dict is a dict, and that its nesting ends.

    Raises:
        StructureError: the state dict is no dict, or dicts and lists in it are nested too deeply,
            as in one that contains itself.
    """
    if not isinstance(state_dict, dict):
        raise StructureError(
            "the state dict must be a dict of tensors and values, not a "
            f"{type(state_dict).__name__}; for one tensor, pass {{name: tensor}}"
        )
    for _ in leaves(state_dict):
        pass


def check_lists(x: dict[Any, Any] | list[Any], path: Path = ()) -> frozenset[str]:
    """Raise an error for lists whose elements hold different kinds of values: sharded, common and
    local ones, or flattened ranges of tensors without elements.

    The kinds are stored or kept separately, or not at all, without their positions in the list, so
    a load could not rebuild such a list.

    Args:
        x: the nested state dict of a save, with its factories built.
        path: path of ``x`` in the whole state dict, for the error text.

    Returns:
        The kinds of values in ``x``.

    Raises:
        StructureError: ``x`` holds such a list, a tuple with a sharded value, or a factory, which
            another factory has built.
    """
    found = []
    for key, value in x.items() if isinstance(x, dict) else enumerate(x):
        if isinstance(value, dict | list):
            found.append(check_lists(value, (*path, key)) or frozenset({"common"}))
        else:
            found.append(frozenset({_kind(value, ".".join(map(str, (*path, key))))}))
    kinds = frozenset[str]().union(*found)
    if isinstance(x, list) and ("empty" in kinds or any(one != kinds for one in found)):
        held = ", ".join(" and ".join(sorted(one)) for one in found[:8])
        raise StructureError(
            f"the list at {'.'.join(map(str, path)) or 'the top'} mixes kinds of values ({held}), "
            "and a load could not rebuild it; make it a dict"
        )
    return kinds


def _is_somewhere(value: object) -> bool:
    """Return whether any rank may save a value: no flattened range of a tensor without elements."""
    if not isinstance(value, ShardedTensor) or 0 not in value.global_shape:
        return True
    return not is_empty_range(value)


def _has_elements(x: object) -> bool:
    """Return whether nested dicts and lists hold a list that is not empty."""
    if isinstance(x, dict):
        return any(map(_has_elements, x.values()))
    return isinstance(x, list) and bool(x)


def _kind(value: object, name: str) -> str:
    if isinstance(value, tuple) and any(isinstance(item, ShardedBase) for item in value):
        raise StructureError(
            f"the tuple at {name!r} has a sharded value in it, and tuples are stored whole, by one "
            "rank; make it a list",
            key=name,
        )
    if isinstance(value, ShardedTensorFactory):
        raise StructureError(
            f"a factory built the factory at {name!r}, and factories are built once; let it build "
            "sharded tensors",
            key=name,
        )
    if isinstance(value, LocalNonpersistentObject):
        return "local"
    if not _is_somewhere(value):
        return "empty"
    return "sharded" if isinstance(value, ShardedBase) else "common"


def filter_out_empty_flatten_tensor(sharded_state_dict: dict[Any, Any] | list[Any]) -> Any:
    """Return a copy without the sharded tensors whose flattened range is empty.

    Dicts and lists that hold nothing else are removed too. Empty tensors that are not flattened
    stay.
    """

    def is_kept(value: Any) -> bool:
        return not isinstance(value, ShardedTensor) or not is_empty_range(value)

    kept, _ = extract_matching_values(sharded_state_dict, is_kept)
    return kept
