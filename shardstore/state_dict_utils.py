"""Prepares a sharded state dict for a save or a load.

It builds the factories, and splits the state into sharded entries, common values and non-persistent
objects.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from shardstore import dict_utils
from shardstore.errors import AccessPatternError, DTypeMismatchError, StructureError
from shardstore.mapping import (
    CommonStateDict,
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
    apply_factories,
    apply_factory_merges,
    is_empty_range,
)
from shardstore.utils import extract_nonpersistent, extract_sharded_base
from shardstore.values.record import LIST_LENGTH

PART_NAMES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
"""Attributes of a tensor that names its parts, see :func:`names_its_parts`."""
_SHARDED, _COMMON, _LOCAL, _EMPTY, _FACTORY = "sharded", "common", "local", "empty", "factory"
_Parts: TypeAlias = dict[str, Any]
_Walked: TypeAlias = tuple[set[str], _Parts]


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
    wanted, _ = dict_utils.extract_matching_values(sharded_state_dict, _is_somewhere)
    factories, _ = dict_utils.extract_matching_values(
        wanted, lambda value: isinstance(value, ShardedTensorFactory), return_lists_as_dicts=True
    )
    # Free the tensor of a factory before the merge.
    dict_utils.dict_list_map_inplace(lambda factory: factory.without_data(), factories)
    apply_factories(wanted)

    nonpersistent, wanted = extract_nonpersistent(wanted)
    dict_utils.dict_list_map_inplace(LocalNonpersistentObject.unwrap, nonpersistent)
    return wanted, nonpersistent, factories


def check_state(state_dict: object) -> None:
    """Check that a state dict is a dict of values, and that its nesting ends.

    Raises:
        StructureError: the state dict is no dict; dicts and lists in it are nested too deeply, as
            in one that contains itself; or a value is an object that has a state dict itself.
    """
    require_dict(state_dict)
    for path, value in dict_utils.leaves(state_dict):
        if hasattr(value, "state_dict") or hasattr(value, "local_shards"):
            _require_value(value, path)


def require_dict(state_dict: object) -> None:
    """Raise :class:`StructureError` unless a state dict is a dict."""
    if not isinstance(state_dict, dict):
        has_one = hasattr(state_dict, "state_dict")
        how = "pass its state_dict()" if has_one else "for one tensor, pass {name: tensor}"
        raise StructureError(
            "the state dict must be a dict of tensors and values, not a "
            f"{type(state_dict).__name__}; {how}"
        )


def _require_value(value: object, path: dict_utils.Path) -> None:
    """Refuse an object that has a state dict, and the ShardedTensor of FSDP1. A class is a value,
    not such an object."""
    name = dict_utils.dotted(path)
    if hasattr(value, "local_shards") and isinstance(value, torch.Tensor):
        raise DTypeMismatchError(
            f"the value at {name!r} is torch's {type(value).__name__}: pass device_mesh= to FSDP, "
            "so that its state dict has DTensors; or save through torch.distributed.checkpoint "
            "with shardstore.dcp.StorageWriter",
            key=name,
        )
    if hasattr(value, "load_state_dict") and not isinstance(value, type):
        raise StructureError(
            f"the value at {name!r} is a {type(value).__name__}, an object that has a state dict: "
            "put its state_dict() into the state dict, and pass what is loaded there to its "
            "load_state_dict()",
            key=name,
        )


def is_plain(value: object) -> bool:
    """Return whether a value is a tensor of a layout that an array can have."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def is_dtensor(value: object) -> bool:
    """Return whether a value is a DTensor."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())  # if imported
    return isinstance(value, kind)


def names_its_parts(value: object) -> bool:
    """Return whether a tensor says itself which parts of a larger one it holds (PyTorch 2.14,
    ``torch.distributed.checkpoint.CheckpointableTensor``)."""
    return isinstance(value, torch.Tensor) and all(hasattr(value, name) for name in PART_NAMES)


def is_distributed(value: object) -> bool:
    """Return whether ranks hold parts of a tensor: a DTensor, or one that names its parts."""
    return is_dtensor(value) or names_its_parts(value)


def check_tuple(value: tuple[Any, ...], path: dict_utils.Path) -> None:
    """Refuse a tuple with a sharded value in it. Tuples are values, saved whole by one rank."""
    name, inside = dict_utils.dotted(path), [one for _, one in dict_utils.leaves(value)]
    if any(isinstance(one, ShardedBase) for one in inside):
        raise StructureError(
            f"the tuple at {name!r} has a sharded value in it, and tuples are stored whole, by "
            "one rank; make it a list",
            key=name,
        )
    if any(map(is_distributed, inside)):
        what = "a DTensor" if any(map(is_dtensor, inside)) else "a part of a tensor"
        raise AccessPatternError(
            f"there is {what} inside the tuple at {path}; tuples are not searched for tensors, so "
            "make it a list",
            key=name,
        )


class HeldShards(NamedTuple):
    """A tensor in a state, and the shards of it that this rank holds. They share its memory, so a
    load fills it."""

    tensor: Any
    shards: Sequence[ShardedTensor]


class StateSplit:
    """The parts of a state dict, made in one walk.

    The kinds of values are sharded, common and local (non-persistent). They are stored or kept
    separately, so a list of several kinds would lose its positions. A dict by position stands for
    it, see :data:`~shardstore.values.record.LIST_LENGTH`.

    Args:
        state: the state dict.
        loading: whether it is loaded, not saved.
        adopt: returns what takes the place of a tensor, or of a shard of a class of its own, at a
            path, such as :class:`HeldShards`; default: itself.
        keys: leave out tensors and objects with other keys, and what builds only such.
        keep: keep the common values of a load, as local ones.

    Attributes:
        found: all tensors and objects, those that factories build included.
        shards: the paths of those that are saved or loaded, and these.
        has_shards: whether sharded tensors, sharded objects or factories are in the state itself.
        empty: the paths of the empty dicts and lists.
        others: the paths of the common values of a load, which the stored ones replace, and these;
            without tensors.
        common: the common values of a save.
        sharded: the shards of a load, without those of :class:`HeldShards`.
        local: the unwrapped local values of a load, and the tensors of :class:`HeldShards`.
        factories: the factories of a load, without data; lists as dicts by position.

    Raises:
        StructureError: the state is no dict, or nested too deeply. It holds an object that has a
            state dict itself, a tuple with a sharded value, a factory that another factory has
            built, or a list with a flattened range of a tensor without elements, which no
            checkpoint holds.
    """

    def __init__(
        self,
        state: ShardedStateDict,
        *,
        loading: bool,
        adopt: Callable[[Any, dict_utils.Path], Any] = lambda value, _: value,
        keys: Container[str] | None = None,
        keep: bool = False,
    ) -> None:
        if not isinstance(state, dict):
            require_dict(state)  # raises the error
        self._loading, self._adopt, self._keys, self._keep = loading, adopt, keys, keep
        self.found: list[ShardedTensor | ShardedObject] = []
        self.shards: list[tuple[dict_utils.Path, ShardedTensor | ShardedObject]] = []
        self.has_shards = False
        self.empty: list[dict_utils.Path] = []
        self.others: list[tuple[dict_utils.Path, Any]] = []
        _, parts = self._walk(state, (), built=False)
        self.common: StateDict = parts.get(_COMMON, {})
        self.sharded: ShardedStateDict = parts.get(_SHARDED, {})
        self.local: StateDict = parts.get(_LOCAL, {})
        self.factories: ShardedStateDict = parts.get(_FACTORY, {})

    def _walk(self, x: Any, path: dict_utils.Path, *, built: bool) -> _Walked:
        """Return the kinds of the values in ``x``, and its parts by kind."""
        if not isinstance(x, dict | list):
            return self._leaf(x, path, built=built)
        if len(path) >= dict_utils.MOST_DEEP:
            dict_utils.require_shallow(path)
        if not x:
            self.empty += [] if built else [path]
            nothing: Any = dict_utils.empty_like(x) if isinstance(x, dict) else []
            return {_COMMON}, {} if self._loading else {_COMMON: nothing}
        is_list, walked = isinstance(x, list), []
        if is_list and dict_utils.is_flat(x):
            # One value, because a data loader may have a million numbers.
            return self._leaf([*x], path, built=built)
        is_plain = type(x) is dict and dict_utils.PLAIN.issuperset(map(type, x.values()))
        if is_plain and not self._loading:  # a list may have many of them
            return {_COMMON}, {_COMMON: x.copy()}
        for key, value in list(enumerate(x) if isinstance(x, list) else x.items()):
            here = (*path, dict_utils.Position(key) if is_list else key)
            made = self._adopt(value, here) if isinstance(value, torch.Tensor) else value
            if isinstance(made, HeldShards):
                walked.append((key, *self._hold(made, here)))
            elif isinstance(made, ShardedTensorFactory) and not built:
                walked.append((key, *self._build(made, here)))
            else:
                walked.append((key, *self._walk(made, here, built=built)))
            if not (built or self.has_shards):
                self.has_shards = isinstance(value, ShardedBase)
        kinds = set[str]().union(*(kinds for _, kinds, _ in walked))
        even = is_list and self._is_even(walked, kinds, path, built=built)
        if even:  # the positions stay, or those left out have no kind
            walked = [(n, *one[1:]) for n, one in enumerate(one for one in walked if one[2])]
        parts: _Parts = {}
        for key, _, of_value in walked:
            for kind, part in of_value.items():
                if kind not in parts:
                    parts[kind] = {} if is_list else dict_utils.empty_like(x)
                parts[kind][key] = part
        if even:
            return kinds, {k: p if k == _FACTORY else list(p.values()) for k, p in parts.items()}
        if is_list:
            # A load keeps its own lengths, because the stored lists may be others.
            parts.setdefault(_LOCAL if self._loading else _COMMON, {})[LIST_LENGTH] = len(x)
            kinds.add(_COMMON)
        return kinds, parts

    def _is_even(
        self,
        walked: Sequence[tuple[Any, set[str], _Parts]],
        kinds: set[str],
        path: dict_utils.Path,
        *,
        built: bool,
    ) -> bool:
        """Return whether all elements of a list have the same kinds of values, so that each part
        keeps their positions."""
        if _EMPTY in kinds:
            raise StructureError(
                f"the list at {dict_utils.dotted(path) or 'the top'} holds a flattened range of a "
                "tensor without elements, which no checkpoint holds, so that the positions of the "
                "other elements are unknown; make it a dict"
            )
        left = [parts.keys() for _, _, parts in walked if parts]
        # Stored common values beside what is left out count its elements.
        whole = _COMMON not in kinds or len(left) in (0, len(walked))
        # A list by position in it has a further part, its length.
        return all(one == left[0] for one in left) and (
            (built and self._loading) or (whole and all(one == kinds for _, one, _ in walked))
        )

    def _hold(self, held: HeldShards, path: dict_utils.Path) -> _Walked:
        """Add the shards of a tensor."""
        for shard in held.shards:
            self._leaf(shard, path, built=True)
        is_left_out = self._keys is not None and dict_utils.dotted(path) not in self._keys
        return {_SHARDED}, {} if is_left_out or not self._loading else {_LOCAL: held.tensor}

    def _build(self, factory: ShardedTensorFactory, path: dict_utils.Path) -> _Walked:
        """Walk what a factory builds."""
        before, shards = len(self.found), len(self.shards)
        kinds, parts = self._walk(factory.build(), path, built=True)
        if not self._loading:
            return kinds, parts
        if len(self.found) > before and len(self.shards) == shards:
            return {_SHARDED}, {}  # all of it is left out
        # Without its tensor, which is freed before the merge.
        return {_SHARDED}, {**parts, _FACTORY: factory.without_data()}

    def _leaf(self, value: Any, path: dict_utils.Path, *, built: bool) -> _Walked:
        if isinstance(value, ShardedTensorFactory):
            name = dict_utils.dotted(path)
            raise StructureError(
                f"a factory built the factory at {name!r}, and factories are built once; let it "
                "build sharded tensors",
                key=name,
            )
        if isinstance(value, ShardedTensor | ShardedObject):
            if type(value) not in (ShardedTensor, ShardedObject):
                value = self._adopt(value, path)
            self.found.append(value)
            is_flat = isinstance(value, ShardedTensor) and value.flattened_range is not None
            is_empty = is_flat and is_empty_range(value)
            is_somewhere = not is_empty or 0 not in value.global_shape
            kept = (built or is_somewhere) if self._loading else not is_empty
            if kept := kept and (self._keys is None or value.key in self._keys):
                self.shards.append((path, value))
            kind = _SHARDED if is_somewhere else _EMPTY
            return {kind}, {_SHARDED: value} if kept else {}
        inside = dict_utils.leaves(value, path) if isinstance(value, tuple) else [(path, value)]
        for where, one in inside:
            if hasattr(one, "state_dict") or hasattr(one, "local_shards"):
                _require_value(one, where)
        if isinstance(value, tuple):
            check_tuple(value, path)
        if isinstance(value, LocalNonpersistentObject):
            return {_LOCAL}, {_LOCAL: value.unwrap()} if self._loading else {}
        if not self._loading:
            return {_COMMON}, {_COMMON: value}
        if not isinstance(value, torch.Tensor):
            self.others.append((path, value))
        return {_COMMON}, {_LOCAL: value} if self._keep else {}

    def merged(self, common: StateDict, loaded: Mapping[str, Any]) -> StateDict:
        """Return the state of a load.

        Args:
            common: the stored common values.
            loaded: what was loaded for each of :attr:`shards`, by its number.
        """
        values = {id(item): loaded[str(number)] for number, (_, item) in enumerate(self.shards)}
        sharded = dict_utils.dict_list_map_outplace(lambda item: values[id(item)], self.sharded)
        state = dict_utils.united(dict_utils.united(common, self.local), sharded)
        return apply_factory_merges(state, self.factories)


def _is_empty(value: Any) -> bool:
    return isinstance(value, ShardedTensor) and is_empty_range(value)


def _is_somewhere(value: Any) -> bool:
    """Return whether any rank may save a value: no flattened range of a tensor without elements."""
    return not _is_empty(value) or 0 not in value.global_shape


def filter_out_empty_flatten_tensor(sharded_state_dict: dict[Any, Any] | list[Any]) -> Any:
    """Return a copy without the sharded tensors whose flattened range is empty.

    Dicts and lists that hold nothing else are removed too. Empty tensors that are not flattened
    stay.
    """
    return dict_utils.extract_matching_values(
        sharded_state_dict, lambda value: not _is_empty(value)
    )[0]
