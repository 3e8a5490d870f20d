"""What happens to a sharded state dict before it is saved or loaded.

Builds factories, and splits the state into the sharded, the common and the non-persistent part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardstore.dict_utils import (
    dict_list_map_inplace,
    dict_list_map_outplace,
    extract_matching_values,
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


def save_preprocess(
    sharded_state_dict: ShardedStateDict,
    validate_access_integrity: bool = True,
    preprocess_common_before_consistancy_check: Callable[[CommonStateDict], StateDict]
    | None = None,
) -> tuple[ShardedStateDict, CommonStateDict]:
    """Build the factories, drop non-persistent objects, and split the state.

    Every rank calls it. With ``validate_access_integrity`` the ranks exchange descriptions of their
    shards, so each waits for all others; without it none waits.

    Args:
        sharded_state_dict: factories in it are replaced in place by what they build.
        validate_access_integrity: check over all ranks that each tensor is covered once, and that
            common parts agree.
        preprocess_common_before_consistancy_check: given a copy of the common part, returns what of
            it is to be compared between the ranks. What is saved stays as it was.

    Returns:
        The sharded part (without empty flattened tensors) and the common part.

    Raises:
        CheckpointingException: the shards overlap, leave a gap, or contradict each other.
    """
    apply_factories(sharded_state_dict)
    _, persistent = extract_nonpersistent(sharded_state_dict)
    sharded, common = extract_sharded_base(persistent)
    sharded = filter_out_empty_flatten_tensor(sharded)
    if validate_access_integrity:
        # The process group and all that comes with it are needed by this check alone.
        from shardstore.validation import determine_global_metadata, validate_sharding_integrity

        compared: StateDict = dict_list_map_outplace(lambda value: value, common)
        if preprocess_common_before_consistancy_check is not None:
            compared = preprocess_common_before_consistancy_check(compared)
        _, global_metadata = determine_global_metadata(sharded)
        validate_sharding_integrity(global_metadata, common_state_dict=compared)
    return sharded, common


def load_preprocess(
    sharded_state_dict: ShardedStateDict,
) -> tuple[ShardedStateDict, StateDict, StateDict]:
    """Build the factories and split off what the checkpoint does not hold.

    No rank waits for another.

    Args:
        sharded_state_dict: not changed; the tensors in it are shared with the results.

    Returns:
        What is to be loaded; the local objects that take their places again after loading; and the
        factories, without data, for :func:`shardstore.mapping.apply_factory_merges` (lists as dicts
        from index to value).
    """
    wanted = filter_out_empty_flatten_tensor(sharded_state_dict)
    factories, _ = extract_matching_values(
        wanted, lambda value: isinstance(value, ShardedTensorFactory), return_lists_as_dicts=True
    )
    # The tensor that a factory stands for need not be kept alive until the merge.
    dict_list_map_inplace(lambda factory: factory.without_data(), factories)
    apply_factories(wanted)

    nonpersistent, wanted = extract_nonpersistent(wanted)

    def unwrapped(value: LocalNonpersistentObject) -> Any:
        return value.unwrap()

    dict_list_map_inplace(unwrapped, nonpersistent)
    return wanted, nonpersistent, factories


def check_state(state_dict: object) -> None:
    """Refuse what is no state dict at all.

    Raises:
        StructureError: neither a dict nor a list.
    """
    if not isinstance(state_dict, dict | list):
        a = "an" if type(state_dict).__name__[0] in "aeiou" else "a"
        raise StructureError(
            f"the state dict is to be a dict of tensors and values, not {a} "
            f"{type(state_dict).__name__}; for one tensor, make it {{name: tensor}}"
        )


def check_lists(x: dict[Any, Any] | list[Any], path: tuple[Any, ...] = ()) -> tuple[bool, bool]:
    """Refuse lists whose elements are in part sharded and in part common.

    The two parts are stored apart and put together by position, but a part of a list does not know
    its positions: such a list would fail to load, or come back with its elements mixed up.

    Args:
        x: nested state dict as it is given to a save. Non-persistent objects do not count.
        path: where it is within the whole, for the error text.

    Returns:
        Whether there are sharded values in it, and whether there are others.

    Raises:
        StructureError: there is such a list.
    """
    found = []
    for key, value in x.items() if isinstance(x, dict) else enumerate(x):
        if isinstance(value, dict | list):
            sharded, common = check_lists(value, (*path, key))
            if sharded or common or not value:
                found.append((sharded, common or not value))
        elif not isinstance(value, LocalNonpersistentObject):
            is_sharded = isinstance(value, ShardedBase)
            found.append((is_sharded, not is_sharded))
    sharded, common = any(s for s, _ in found), any(c for _, c in found)
    if sharded and common and isinstance(x, list) and not all(s and c for s, c in found):
        kinds = ["both" if s and c else "sharded" if s else "common" for s, c in found]
        raise StructureError(
            f"the list at {'.'.join(map(str, path)) or 'the top'} mixes sharded values with "
            f"others ({', '.join(kinds[:8])}), and could not be put together again on loading; "
            "make it a dict"
        )
    return sharded, common


def filter_out_empty_flatten_tensor(
    sharded_state_dict: dict[Any, Any] | list[Any],
) -> Any:
    """Return a copy without the sharded tensors whose flattened range is empty.

    Dicts and lists that hold nothing else disappear too. Empty tensors that are not flattened stay.
    """

    def is_kept(value: Any) -> bool:
        if not isinstance(value, ShardedTensor) or value.flattened_range is None:
            return True
        start, stop = value._flat_bounds()
        return start < stop

    kept, _ = extract_matching_values(sharded_state_dict, is_kept)
    return kept
