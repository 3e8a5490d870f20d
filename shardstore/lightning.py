"""Lightning's sharded strategies, with checkpoints of this package on disks and object stores.

Lightning makes a local folder of every place, a URL too, and writes what is no tensor there in a
file of its own. :func:`with_storage` returns a strategy that saves everything as one checkpoint::

    Strategy = shardstore.lightning.with_storage(ModelParallelStrategy)
    Trainer(strategy=Strategy(storage_options={...}, asynchronous=True))

Lightning is not imported with this module. The classes override ``save_checkpoint``,
``load_checkpoint`` and ``remove_checkpoint`` of Lightning 2.6 (``fabric/strategies`` and
``pytorch/strategies``: ``fsdp.py``, ``model_parallel.py``).
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import state_dict as of_torch
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import shardstore
from shardstore.dcp import StorageReader, StorageWriter
from shardstore.dcp.background import Background
from shardstore.dcp.installation import Place
from shardstore.dict_utils import dotted, leaves
from shardstore.distributed.coordinator import Ranks
from shardstore.errors import ArgumentError, MissingKeyError
from shardstore.state_dict_utils import is_distributed
from shardstore.storage.commit.identity import is_checkpoint
from shardstore.storage.options import require_bool
from shardstore.storage.stores.location import Location

META = "meta.pt"
"""Key of what is no tensor: the bytes that Lightning writes to a file of this name."""
Options = Mapping[str, Any] | None
_Strategy: Any = object  # the next class is Lightning's


def with_storage(strategy: type[Any]) -> type[Any]:
    """Return a subclass of a strategy that saves and loads with this package.

    Args:
        strategy: ``FSDPStrategy`` or ``ModelParallelStrategy`` of ``lightning.fabric`` or of
            ``lightning.pytorch`` (``lightning_fabric``, ``pytorch_lightning``), or a subclass. The
            result takes two more arguments: ``storage_options``, see :func:`shardstore.save`, and
            ``asynchronous``: a save returns after it copied the state, see
            :class:`~shardstore.dcp.background.Background`.

    Raises:
        ArgumentError: the class is no such strategy.
    """
    names = [one.__name__ for one in getattr(strategy, "__mro__", ())]
    if not {"FSDPStrategy", "ModelParallelStrategy"}.intersection(names):
        raise ArgumentError(
            f"with_storage({strategy!r}): give Lightning's class FSDPStrategy or "
            "ModelParallelStrategy, or a subclass of one"
        )
    kind = _OfTrainer if hasattr(strategy, "lightning_module_state_dict") else _OfFabric
    return type(strategy.__name__, (kind, strategy), {"__doc__": strategy.__doc__})


class _WithStorage(_Strategy):  # type: ignore[misc]
    """What the strategies of Fabric and of the Trainer share."""

    def __init__(
        self, *args: Any, storage_options: Options = None, asynchronous: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        require_bool("asynchronous", asynchronous)
        is_sharded = getattr(self, "_save_distributed_checkpoint", True)
        if not is_sharded or getattr(self, "_state_dict_type", "sharded") != "sharded":
            raise ArgumentError(
                "shardstore.lightning saves sharded checkpoints: set state_dict_type='sharded' "
                "(FSDPStrategy) or save_distributed_checkpoint=True (ModelParallelStrategy)"
            )
        self._storage_options, self._is_asynchronous = storage_options, asynchronous
        self._background = Background()

    def _place(self, path: Place, storage_options: Options = None) -> Location:
        """Return the place that rank 0 gives, after the end of the last save."""
        self._background.finish()
        return Location.of(self.broadcast(path), storage_options or self._storage_options)

    def _write(self, place: Location, tensors: dict[str, Any], rest: Mapping[str, Any]) -> None:
        def prepare(_: object) -> None:
            for at, value in leaves(rest):
                if is_distributed(value):
                    what = f"{dotted(at)!r} is a DTensor, of which rank 0 would pickle its own part"
                    raise ArgumentError(f"{what}: give its full_tensor(), which all ranks call")
            if place.is_local:  # the program may put files beside it, or a link to it, at once
                os.makedirs(os.path.dirname(place.url), exist_ok=True)
            torch.save(rest, buffer := io.BytesIO())
            tensors[META] = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)

        Ranks.current().together(what=f"preparing {META} for {place.url}", decide=prepare)
        writer = StorageWriter(place.url, overwrite=True, storage_options=place.options)
        if self._is_asynchronous:
            self._background.start(tensors, place.url, storage_writer=writer)
        else:
            save_dcp(tensors, storage_writer=writer)

    def _read(
        self, place: Location, members: dict[str, Any], strict: bool, weights_only: bool | None
    ) -> dict[str, Any] | None:
        """Load the members of a state, and return what is no tensor; ``None`` for a local folder
        that Lightning wrote."""
        data: bytes | None = None
        with Ranks.current().meet(f"reading {META} of {place.url}"):
            if not place.is_local or is_checkpoint(place):
                checkpoint: Any = shardstore.open(place.place)
                data = np.asarray(checkpoint[META][...]).tobytes()
        if data is None:
            return None
        state, mode = _states(members), "raise_unexpected" if strict else "log_unexpected"
        reader = StorageReader(place.url, strict=mode, storage_options=place.options)
        load_dcp(state, storage_reader=reader)
        model, options = _model_of(members), of_torch.StateDictOptions(strict=strict)
        for key, one in members.items():
            if one is model:
                of_torch.set_model_state_dict(one, state[key], options=options)
            elif isinstance(one, torch.optim.Optimizer):
                of_torch.set_optimizer_state_dict(model, one, state[key], options=options)
            else:
                members[key] = state[key]
        return dict(torch.load(io.BytesIO(data), weights_only=weights_only))


def _parts(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the members of a state of which ranks hold parts (model, optimizers, and what has
    DTensors, such as averaged weights), and the rest."""
    members: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for key, one in state.items():
        if isinstance(one, torch.nn.Module | torch.optim.Optimizer):
            members[key] = one
            continue
        value = one.state_dict() if hasattr(one, "state_dict") else one
        is_sharded = any(is_distributed(each) for _, each in leaves({key: value}))
        (members if is_sharded else rest)[key] = value
    return members, rest


def _model_of(members: Mapping[str, Any]) -> torch.nn.Module:
    models = [one for one in members.values() if isinstance(one, torch.nn.Module)]
    if len(models) != 1:
        raise ArgumentError(
            f"a state must have one model and its optimizers, not {sorted(members)}: save and load "
            "each model in a place of its own"
        )
    return models[0]


def _states(members: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state dicts of a model and its optimizers, and the other members as they are."""
    model = _model_of(members)
    states: dict[str, Any] = {}
    for key, one in members.items():
        if one is model:
            states[key] = of_torch.get_model_state_dict(model)
        elif isinstance(one, torch.optim.Optimizer):
            states[key] = of_torch.get_optimizer_state_dict(model, one)
        else:
            states[key] = one
    return states


class _OfFabric(_WithStorage):
    """A strategy of Fabric. Every rank calls each method."""

    def save_checkpoint(
        self, path: Place, state: Any, storage_options: Options = None, filter: Any = None
    ) -> None:
        """Save a state to a folder or URL."""
        if filter is not None:
            raise ArgumentError("filter= does not go with sharded checkpoints: leave it out")
        members, rest = _parts(state)
        self._write(self._place(path, storage_options), _states(members), rest)

    def load_checkpoint(
        self, path: Place, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a state in place from a folder or URL; return what it did not ask for."""
        place, found = self._place(path), None
        if isinstance(state, Mapping):
            members, rest = _parts(state)
            found = self._read(place, members, strict, weights_only)
        if found is None:
            return dict(super().load_checkpoint(path, state, strict, weights_only))
        if strict and (missing := sorted(set(rest) - set(found))):
            what = f" has no {missing[0]!r}; load with strict=False, or without this key"
            raise place.error(what, MissingKeyError)
        state.update(members | {key: found.pop(key) for key in rest if key in found})
        return found


class _OfTrainer(_WithStorage):
    """A strategy of the Trainer. Every rank calls each method."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Place, storage_options: Options = None
    ) -> None:
        """Save what the Trainer collected to a folder or URL."""
        optimizers = enumerate(checkpoint.pop("optimizer_states", ()))
        tensors = {f"optimizer_{i}": one for i, one in optimizers}
        tensors["model"] = checkpoint.pop("state_dict")
        self._write(self._place(filepath, storage_options), tensors, checkpoint)

    def load_checkpoint(
        self, checkpoint_path: Place, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load model and optimizers in place from a folder or URL; return the rest."""
        members = {"model": self.model}
        members |= {f"optimizer_{i}": one for i, one in enumerate(self.optimizers)}
        strict = self.lightning_module.strict_loading
        found = self._read(self._place(checkpoint_path), members, strict, weights_only)
        if found is not None:
            return found
        return dict(super().load_checkpoint(checkpoint_path, weights_only))

    def remove_checkpoint(self, filepath: Place) -> None:
        """Delete a checkpoint after the end of the last save."""
        place = self._place(filepath)
        if not is_checkpoint(place):
            super().remove_checkpoint(filepath)
        elif self.global_rank == 0:
            shardstore.delete_checkpoint(place)

    def teardown(self) -> None:
        """End the strategy after the end of the last save."""
        self._background.finish()
        super().teardown()
