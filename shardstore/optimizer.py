"""Sharded state dicts of optimizers, cut like the model's parameters.

The state dict of a PyTorch optimizer numbers the parameters. It becomes a sharded state dict whose
tensors take key, shape and offset from the parameters. The state dict of any optimizer works.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch

from shardstore.dict_utils import nested_values
from shardstore.errors import CheckpointingException, ShapeMismatchError, StructureError
from shardstore.mapping import (
    LocalNonpersistentObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
    data_shape,
)
from shardstore.utils import extract_sharded_tensors_and_factories

logger = logging.getLogger(__name__)

KEEP_VARS_HINT = (
    " The model's state dict must hold the same torch.nn.Parameter objects as the optimizer, not"
    " plain tensors: get it with `.state_dict(keep_vars=True)`."
)


def get_optim_param_to_id_map(optim_params_iter: Iterable[torch.nn.Parameter]) -> dict[int, int]:
    """Number parameters as the optimizer's state dict does.

    Args:
        optim_params_iter: every parameter of the optimizer, group by group.

    Returns:
        ``id()`` of a parameter -> its number. A repeated parameter keeps its first number.
    """
    last_first = reversed(list(enumerate(optim_params_iter)))  # so that the first number stays
    return {id(param): number for number, param in last_first}


def get_param_id_to_sharded_param_map(
    model_sharded_state_dict: ShardedStateDict, optim_params_iter: Iterable[torch.nn.Parameter]
) -> dict[int, ShardedTensor | ShardedTensorFactory]:
    """Find the model's shard for each parameter of the optimizer.

    Args:
        model_sharded_state_dict: sharded tensors and factories whose ``data`` are the optimizer's
            parameter objects.
        optim_params_iter: every parameter of the optimizer, group by group.

    Returns:
        Number of the parameter in the optimizer's state dict -> its shard or factory. Shards of
        other parameters are left out. If no shard matches, a warning is logged.
    """
    numbers = get_optim_param_to_id_map(optim_params_iter)
    shards, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
    found: dict[int, ShardedTensor | ShardedTensorFactory] = {
        numbers[id(shard.data)]: shard
        for shard in nested_values(shards)
        if id(shard.data) in numbers
    }
    if not found:
        logger.warning(
            "None of the model's shards is a parameter of the optimizer.%s", KEEP_VARS_HINT
        )
    return found


def make_sharded_optimizer_tensor(
    model_param: ShardedTensor | ShardedTensorFactory, optim_param: torch.Tensor, prefix: str
) -> ShardedTensor | ShardedTensorFactory:
    """Describe a tensor of optimizer state by its parameter.

    Args:
        model_param: the parameter's shard or factory.
        optim_param: state with the parameter's local shape, of any data type.
        prefix: the key becomes ``<prefix>.<key of the parameter>``.

    Raises:
        ShapeMismatchError: the state does not have the parameter's local shape (or, for a
            flattened parameter, its length).
    """
    key = f"{prefix}.{model_param.key}"
    if not isinstance(optim_param, torch.Tensor):
        raise CheckpointingException(
            f"{key}: optimizer state of type {type(optim_param).__name__} is not a tensor and "
            "cannot be sharded like its parameter; name it in exclude_keys and keep it elsewhere",
            key=key,
        )
    if isinstance(model_param, ShardedTensorFactory):
        return replace(model_param, key=key, data=optim_param)
    shape = tuple(optim_param.shape)
    if shape != (expected := data_shape(model_param)):
        raise ShapeMismatchError(
            f"{key}: optimizer state has shape {shape}, its parameter has {expected}; "
            "name state with another shape than its parameter (such as a step count) in "
            "exclude_keys and keep it elsewhere",
            key=key,
        )
    return replace(model_param, key=key, data=optim_param, dtype=optim_param.dtype)


def optim_state_to_sharding_state(
    optim_state_dict: StateDict,
    id_to_sharded_param_map: dict[int, Any],
    exclude_keys: tuple[str, ...] = (),
) -> None:
    """Turn an optimizer's state dict into a sharded one, in place.

    Each tensor of state gets the key ``optimizer.state.<name>.<key of the parameter>``. The lists
    of parameter numbers in the groups become non-persistent, as they depend on the layout.

    Args:
        optim_state_dict: result of ``optimizer.state_dict()``.
        id_to_sharded_param_map: from :func:`get_param_id_to_sharded_param_map`.
        exclude_keys: names of state to drop, such as ``"step"``.

    Raises:
        ValueError: the map lacks a parameter that has state, or state has another shape than its
            parameter. Nothing is changed.
    """
    excluded = {exclude_keys} if isinstance(exclude_keys, str) else set(exclude_keys)
    state: dict[int, dict[str, ShardedTensor | ShardedTensorFactory]] = {}
    for number, param_state in optim_state_dict["state"].items():
        state[number] = {}
        for name, value in param_state.items():
            if name in excluded:
                continue
            if number not in id_to_sharded_param_map:
                raise StructureError(
                    f"the optimizer has state for its parameter {number}, but the model's state "
                    f"dict has no shard of it.{KEEP_VARS_HINT}"
                )
            state[number][name] = make_sharded_optimizer_tensor(
                id_to_sharded_param_map[number], value, prefix=f"optimizer.state.{name}"
            )
    groups = deepcopy(optim_state_dict["param_groups"])
    for group in groups:
        group["params"] = LocalNonpersistentObject(group["params"])
    optim_state_dict["param_groups"] = groups
    optim_state_dict["state"] = state
