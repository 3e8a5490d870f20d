"""torchtitan's checkpoint manager, with checkpoints of this package.

``CheckpointManager.Config`` is the ``checkpoint`` of torchtitan's trainer configuration::

    checkpoint = shardstore.torchtitan.CheckpointManager.Config(enable=True, interval=500)

torchtitan is imported on the first use of ``CheckpointManager``, not with this module. The class
implements ``BaseCheckpointManager`` of torchtitan 0.3 (``components/checkpointer/base.py``).
"""

from __future__ import annotations

import importlib
import json
import os
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp

import shardstore
from shardstore.convert import convert
from shardstore.distributed.coordinator import Ranks
from shardstore.distributed.groups import described
from shardstore.errors import ArgumentError, CheckpointingException, NotACheckpointError
from shardstore.mapping import StateDict
from shardstore.storage.commit.identity import is_checkpoint
from shardstore.storage.stores.location import Location

TRAINER = "torchtitan.components.checkpointer"
MODEL = "model"
"""torchtitan's name of the model state, whose tensors are at the top level of a checkpoint."""
MODES = ("disabled", "async", "async_with_pinned_mem")


def __getattr__(name: str) -> Any:
    if name != "CheckpointManager":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base: Any = importlib.import_module(TRAINER).BaseCheckpointManager

    class CheckpointManager(_Manager, base):  # type: ignore[misc]
        __doc__ = _Manager.__doc__

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


class _Manager:
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
            ``lr_schedulers``, ``states`` and ``sd_adapter``.

    Raises:
        ArgumentError: the model or its training state lacks what an option needs.
    """

    save_future: shardstore.AsyncSave | None = None

    def __init__(self, config: Any, *, base_folder: str = "", **parts: Any) -> None:
        self.enable: bool = config.enable
        if not self.enable:
            return
        self._config, self._adapter = config, parts["sd_adapter"]
        states = self.states = parts["states"]
        states[MODEL] = importlib.import_module(TRAINER).ModelWrapper(parts["model_parts"])
        states |= {"optimizer": parts["optimizers"], "lr_scheduler": parts["lr_schedulers"]}
        if parts["dataloader"] is not None:
            states["dataloader"] = parts["dataloader"]
        if self._adapter is None and (config.last_save_in_hf or config.initial_load_in_hf):
            raise ArgumentError("last_save_in_hf, initial_load_in_hf: this model has no sd_adapter")
        if unknown := sorted({*config.exclude_from_loading} - {*states, "dataloader"}):
            known = ", ".join(sorted({*states} - {MODEL}))
            raise ArgumentError(f"exclude_from_loading={unknown} must name some of: {known}")
        is_url = "://" in config.folder
        self.folder = config.folder if is_url else os.path.join(base_folder, config.folder)
        self._options = {"storage_options": config.storage_options}
        keep = config.keep_latest_k or None
        self._steps = shardstore.CheckpointManager(self.folder, keep_last=keep, **self._options)

    def _wait_for_saving(self) -> None:
        handle, self.save_future = self.save_future, None
        if handle is not None:
            handle.result()

    def _maybe_wait_for_staging(self) -> None:
        if self.save_future is not None:
            self.save_future.wait_staged()

    def _close(self) -> None:
        self._wait_for_saving()
        self._steps.close()

    def _state(self, keys: list[str]) -> StateDict:
        """Return the state of the model and of other members of the training state."""
        parts = {key: self.states[key].state_dict() for key in keys if key != MODEL}
        return {**self.states[MODEL].state_dict(), **parts}

    # -- saving --------------------------------------------------------------------------------

    @torch.no_grad()
    def _save(self, step: int, last: bool = False) -> bool:
        config = self._config
        is_first = step == 1 and config.enable_first_step_checkpoint
        if config.load_only or not (last or is_first or step % config.interval == 0):
            return False
        self._wait_for_saving()
        if last and config.last_save_model_only:
            self._export(step, getattr(torch, config.export_dtype))
            return True
        state = shardstore.shard(self._state(list(self.states)))
        if last or config.async_mode == "disabled":
            self._steps.save(step, state, overwrite=True)
        else:
            save, overlap = self._steps.async_save, config.async_mode == MODES[2]
            self.save_future = save(step, state, overwrite=True, overlap_staging=overlap)
        return True

    def _export(self, step: int, dtype: torch.dtype) -> None:
        """Save the model alone, in one data type, in this package's or Hugging Face's layout."""
        state = self._state([MODEL])
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                state[key] = value.to(dtype)
        if not self._config.last_save_in_hf:
            self._steps.save(step, shardstore.shard(state), overwrite=True)
            return
        target, options = self._steps.url(step), self._config.storage_options
        source = f"{target}.export"
        state = shardstore.shard(self._adapter.to_hf(state))
        shardstore.save(state, source, overwrite=True, **self._options)

        def written(_: object) -> None:
            stores = {"source_options": options, "target_options": options}
            convert(source, target, target_format="safetensors", **stores)
            shardstore.delete_checkpoint(source, **self._options)

        Ranks.current().together(what=f"exporting to {target}", decide=written)

    # -- loading -------------------------------------------------------------------------------

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        self._wait_for_saving()
        config, everything = self._config, {*self.states} - {*self._config.exclude_from_loading}

        def newest(_: object) -> bytes:
            return json.dumps(self._steps.latest() if step == -1 else step).encode()

        what = f"looking for steps below {self.folder}"  # on rank 0, so that all see the same
        found = json.loads(Ranks.current().together(what=what, decide=newest))
        path, keys = config.initial_load_path, [MODEL]
        if found is not None:
            keys = keys if found == 0 else sorted(everything)  # step 0 is a seed: a model alone
            restored: Any = self._steps.restore(self._state(keys), None if step == -1 else step)
            path, loaded = restored.url, restored.state
        elif config.initial_load_in_hf:
            path = path or self._adapter.hf_assets_path
            names = self._adapter.to_hf(self._state(keys))
            reader = self._adapter.get_hf_storage_reader(path, config.initial_load_in_hf_quantized)
            load_dcp(names, storage_reader=reader)
            loaded = self._adapter.from_hf(names)
        elif path:
            keys = keys if config.initial_load_model_only else sorted(everything)
            loaded = self._load_from(Location.of(path, config.storage_options), self._state(keys))
        else:
            return False
        Ranks.current().step(f"restoring from {path}", lambda: self._give(keys, loaded, path))
        return True

    def _load_from(self, place: Location, state: StateDict) -> Any:
        """Load a checkpoint of this package or of PyTorch DCP."""
        if is_checkpoint(place):
            return shardstore.load(state, place.place)
        if not place.exists(".metadata"):
            raise place.error(
                " (initial_load_path) is no checkpoint: give the folder of one step, .../step-100",
                NotACheckpointError,
            )
        load_dcp(state, checkpoint_id=str(place.place))
        return state

    def _give(self, keys: list[str], loaded: StateDict, url: str) -> None:
        for key in keys:
            try:
                self.states[key].load_state_dict(loaded if key == MODEL else loaded[key])
            except Exception as error:
                text = f"{key!r} does not accept its state in {url}: {described(error)}"
                remedy = f"to load without it, set exclude_from_loading=[{key!r}]"
                raise CheckpointingException(f"{text}; {remedy}", key=key, url=url) from error
