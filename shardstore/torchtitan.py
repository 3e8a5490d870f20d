"""torchtitan's checkpoint manager, with checkpoints of this package.

``CheckpointManager.Config`` is the ``checkpoint`` of torchtitan's trainer configuration::

    checkpoint = shardstore.torchtitan.CheckpointManager.Config(enable=True, interval=500)

torchtitan is imported on the first use of ``CheckpointManager``, not with this module. The class
implements ``BaseCheckpointManager`` of torchtitan 0.3 and of its main branch
(``components/checkpointer/base.py``), whose options have no ``enable``.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp

import shardstore
from shardstore import hf
from shardstore.dcp.reader import load_either
from shardstore.distributed.coordinator import Ranks
from shardstore.distributed.groups import described
from shardstore.errors import ArgumentError, CheckpointingException
from shardstore.hf.files import INDEX_NAME, SINGLE_NAME
from shardstore.mapping import StateDict
from shardstore.storage.commit.checkpoints import CheckpointStorage
from shardstore.storage.commit.identity import has_dcp_metadata, is_checkpoint

TRAINER = "torchtitan.components.checkpointer"
MODEL = "model"
"""torchtitan's name of the model state, whose tensors are at the top level of a checkpoint."""
NAMES = {"optimizers": "optimizer", "lr_schedulers": "lr_scheduler"}
"""Names of members of the training state that differ from those of the arguments."""
MODES = ("disabled", "async", "async_with_pinned_mem")


def __getattr__(name: str) -> Any:
    if name != "CheckpointManager":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base: Any = importlib.import_module(TRAINER).BaseCheckpointManager

    class CheckpointManager(_TitanManager, base):  # type: ignore[misc]
        __doc__ = _TitanManager.__doc__

        @dataclass(kw_only=True, slots=True)
        class Config(base.Config):  # type: ignore[misc]
            """torchtitan's options of checkpoints, and those of this package.

            Attributes:
                async_mode: ``"disabled"``: training waits for the save; ``"async"``: it waits for
                    the copy in memory; ``"async_with_pinned_mem"``: it waits for the copy before
                    the next step of the optimizer.
                storage_options: options of an object store, see :func:`shardstore.save`.

            Raises:
                ArgumentError, ValueError: an option has a wrong value.
            """

            async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
            storage_options: dict[str, Any] | None = None

            def __post_init__(self: Any) -> None:
                if self.async_mode not in MODES:
                    raise ArgumentError(f"async_mode={self.async_mode!r} must be one of {MODES}")
                # torchtitan's check would refuse to export to an object store.
                folder, self.folder = self.folder, self.folder.replace("://", ":")
                base.Config.__post_init__(self)
                self.folder = folder

    return globals().setdefault(name, CheckpointManager)


_Titan: Any = object  # the next class is torchtitan's


class _TitanManager(_Titan):  # type: ignore[misc]
    """Saves and restores torchtitan's training state. Every rank makes one, with equal options, and
    calls each method; ``save`` and ``load`` wait for the other ranks.

    The keys are those of torchtitan's own checkpoints: the parameters by name, and ``optimizer``,
    ``lr_scheduler``, ``dataloader`` and ``train_state`` with their state dicts. The steps are
    managed by :class:`shardstore.CheckpointManager`: it keeps the newest ``keep_latest_k``, and a
    load skips damaged steps.

    Args:
        config: the options.
        base_folder: folder or URL that ``config.folder`` is relative to.
        parts: torchtitan's other arguments: ``dataloader``, ``model_parts``, ``optimizers``,
            ``lr_schedulers``, ``states`` and ``sd_adapter``; on its main branch also ``ema``.

    Raises:
        ArgumentError: the model or its training state lacks what an option needs.
    """

    save_future: Any = None

    def __init__(self, config: Any, *, base_folder: str = "", **parts: Any) -> None:
        self.enable = getattr(config, "enable", True)
        if not self.enable:
            return
        # torchtitan's main branch reads the options, and other names, as attributes.
        self.__dict__.update({one.name: getattr(config, one.name) for one in fields(config)})
        is_url = "://" in config.folder
        self.folder = config.folder if is_url else os.path.join(base_folder, config.folder)
        self.purge_exempt = getattr(config, "purge_exempt", None) and config.purge_exempt.build()
        self._storage = CheckpointStorage(config.storage_options)
        model, adapter, states = map(parts.pop, ("model_parts", "sd_adapter", "states"))
        self.sd_adapter, self.states = adapter, states
        states[MODEL] = importlib.import_module(TRAINER).ModelWrapper(model)
        states |= {NAMES.get(name, name): one for name, one in parts.items() if one is not None}
        if adapter is None and (config.last_save_in_hf or config.initial_load_in_hf):
            raise ArgumentError("last_save_in_hf, initial_load_in_hf: this model has no sd_adapter")
        if unknown := sorted({*config.exclude_from_loading} - {*states, "dataloader"}):
            known = ", ".join(sorted({*states} - {MODEL}))
            raise ArgumentError(f"exclude_from_loading={unknown} must name some of: {known}")
        keep, options = config.keep_latest_k or None, config.storage_options
        rules: dict[str, Any] = {"keep_last": keep, "keep_if": keep and self.purge_exempt}
        self._steps = shardstore.CheckpointManager(self.folder, **rules, storage_options=options)

    def load(self, step: int = -1) -> bool:
        """Load a step, or the newest that is not damaged; every rank calls it.

        torchtitan's main branch has a ``load`` of its own, with which each rank looks for the step
        alone, and damage is an error.

        Args:
            step: the number of a step; -1: the newest, or else what ``initial_load_path`` and
                ``initial_load_in_hf`` name.

        Returns:
            Whether anything was loaded.

        Raises:
            CheckpointingException: the load failed on some rank; every rank raises it.
        """
        return self.enable and self._load(step)

    def _wait_for_saving(self) -> None:
        handle, self.save_future = self.save_future, None
        handle.result()

    def _maybe_wait_for_staging(self) -> None:
        if self.save_future is not None:
            self.save_future.wait_staged()

    def _close(self) -> None:
        self.maybe_wait_for_saving()
        self._steps.close()

    def _is_resumable_checkpoint(self, checkpoint_dir: str) -> bool:
        return is_checkpoint(self._storage.at(checkpoint_dir))

    def _is_valid_checkpoint(self, checkpoint_dir: str) -> bool:
        names = {SINGLE_NAME, INDEX_NAME}.intersection(self._storage.listdir(checkpoint_dir))
        return bool(names) or self._is_resumable_checkpoint(checkpoint_dir)

    # -- saving --------------------------------------------------------------------------------

    @torch.no_grad()
    def _save(self, step: int, last: bool = False) -> bool:
        is_first = step == 1 and self.enable_first_step_checkpoint
        if self.load_only or not (last or is_first or step % self.interval == 0):
            return False
        self.maybe_wait_for_saving()
        if last and self.last_save_model_only:
            self._export(step, getattr(torch, self.export_dtype))
            return True
        state = shardstore.shard(_state(self.states))
        if last or self.async_mode == "disabled":
            self._steps.save(step, state, overwrite=True)
        else:
            save, overlap = self._steps.async_save, self.async_mode == MODES[2]
            self.save_future = save(step, state, overwrite=True, overlap_staging=overlap)
        return True

    def _export(self, step: int, dtype: torch.dtype) -> None:
        """Save the model alone, in one data type, in this package's or Hugging Face's layout."""
        state = dict(self.states[MODEL].state_dict())
        if self.last_save_in_hf:
            place = self._storage.at(self._steps.url(step)).place
            hf.save(self.sd_adapter.to_hf(state), place, dtype, overwrite=True)
            return
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                state[key] = value.to(dtype)
        self._steps.save(step, shardstore.shard(state), overwrite=True)

    # -- loading -------------------------------------------------------------------------------

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        self.maybe_wait_for_saving()
        model, excluded = {MODEL: self.states[MODEL]}, self.exclude_from_loading
        whole = {key: part for key, part in self.states.items() if key not in excluded}
        in_hf, is_quantized = self.initial_load_in_hf, self.initial_load_in_hf_quantized
        path: Any = self.initial_load_path or (in_hf and self.sd_adapter.hf_assets_path)

        def newest(_: object) -> int | None:
            found = self._steps.latest() if step == -1 else step
            begins, root = found is None and not (path or in_hf), self._storage.at(self.folder)
            if begins and any(has_dcp_metadata(root.child(name)) for name in root.listing()):
                what = " has steps of torchtitan's own manager, which a new run would replace: set "
                remedy = "initial_load_path to one, initial_load_model_only=False, another folder"
                raise root.error(what + remedy, ArgumentError)
            return found

        # On rank 0, so that all see the same.
        found = Ranks.current().together(what=f"listing {self.folder}", decide=newest)
        if found is not None:
            states = whole if found else model  # step 0 is a seed: a model alone
            restored: Any = self._steps.restore(_state(states), None if step == -1 else step)
            _give(states, restored.state, restored.url)
            return True
        if path or in_hf:
            states = model if self.initial_load_model_only else whole
            self._load_checkpoint(states, path, from_hf=in_hf, from_quantized=is_quantized)
        return bool(path)

    def _load_checkpoint(
        self, states: dict[str, Any], checkpoint_id: str, *, from_hf: bool, from_quantized: bool
    ) -> None:
        """Load a checkpoint of this package, of PyTorch DCP, or of Hugging Face."""
        state, adapter = _state(states), self.sd_adapter
        if from_hf:
            named = adapter.to_hf(state)
            reader = adapter.get_hf_storage_reader(checkpoint_id, from_quantized)
            load_dcp(named, storage_reader=reader)
            loaded = adapter.from_hf(named)
        else:
            loaded = load_either(state, self._storage.at(checkpoint_id))
        _give(states, loaded, checkpoint_id)


def _state(states: Mapping[str, Any]) -> StateDict:
    """Return the state of members of the training state, with that of the model at the top. A dict
    is its own state, as in torchtitan's managers."""
    parts = {key: one for key, one in states.items() if key != MODEL}
    parts = {k: v if isinstance(v, dict) else v.state_dict() for k, v in parts.items()}
    return {**states[MODEL].state_dict(), **parts}


def _give(states: Mapping[str, Any], loaded: StateDict, url: str) -> None:
    """Give members of the training state what was loaded; every rank calls it."""
    with Ranks.current().meet(f"restoring from {url}"):
        for key, part in states.items():
            try:
                accept = part.update if isinstance(part, dict) else part.load_state_dict
                accept(loaded if key == MODEL else loaded[key])
            except Exception as error:
                text = f"{key!r} does not accept its state in {url}: {described(error)}"
                remedy = f"to load without it, set exclude_from_loading=[{key!r}]"
                raise CheckpointingException(f"{text}; {remedy}", key=key, url=url) from error
