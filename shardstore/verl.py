"""verl's checkpoint manager of FSDP, with checkpoints of this package.

verl pickles a file on each rank, which only the same number of ranks can load. With the environment
variable ``VERL_USE_EXTERNAL_MODULES=shardstore.verl``, or after :func:`install`, its FSDP engine
saves one checkpoint that any number of ranks loads, to a folder or an object store. verl is
imported on the first use of ``FSDPCheckpointManager``, not with this module. The class implements
that of verl 0.9 (``utils/checkpoint/fsdp_checkpoint_manager.py``).
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict as of_torch

import shardstore
from shardstore.distributed.coordinator import Ranks
from shardstore.errors import ArgumentError, MissingKeyError
from shardstore.storage.commit.identity import is_checkpoint
from shardstore.storage.stores.location import Location

SEAM = "verl.utils.checkpoint.fsdp_checkpoint_manager"
BESIDE = "huggingface"
"""Folder in a checkpoint with the model's configuration and its tokenizer."""
STATE = "optimizer.state."
"""Beginning of the keys of the optimizer's state, before the names of parameters."""


def install(storage_options: Mapping[str, Any] | None = None) -> None:
    """Make verl's FSDP engine use this package. Call it in each process before verl imports its
    engine; no rank waits.

    Args:
        storage_options: options of an object store, see :func:`shardstore.save`.

    Raises:
        ArgumentError: the options are no mapping.
    """
    Location.of(os.curdir, storage_options)  # refuses options of another type
    kind = importlib.import_module(__name__).FSDPCheckpointManager
    kind.storage_options = storage_options
    importlib.import_module(SEAM).FSDPCheckpointManager = kind  # type: ignore[attr-defined]


def __getattr__(name: str) -> Any:
    if name != "FSDPCheckpointManager":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base: Any = importlib.import_module(SEAM).FSDPCheckpointManager
    kind = type(name, (_VerlManager, base), {"__doc__": _VerlManager.__doc__})
    return globals().setdefault(name, kind)


_Verl: Any = object  # the next class is verl's


class _VerlManager(_Verl):  # type: ignore[misc]
    """Saves and loads model, optimizer, schedule and random states with FSDP2. Every rank makes one
    and calls its methods.

    Args:
        *args, **kwargs: see verl's class.

    Raises:
        ArgumentError: ``hf_model`` is among the contents.
    """

    storage_options: Mapping[str, Any] | None = None
    previous_saved_paths: list[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "hf_model" in {*self.checkpoint_save_contents, *self.checkpoint_load_contents}:
            raise ArgumentError(
                "shardstore.verl has no contents 'hf_model': leave it out, and make Hugging Face "
                "files by shardstore.hf.export(CHECKPOINT, FOLDER, names=...), where names gives "
                "the keys below 'model.' without it, and all others None"
            )

    def save_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Save to ``local_path``, a folder or URL; rank 0 then deletes older checkpoints. Every
        rank calls it and waits for all others.

        Raises:
            CheckpointingException: see :func:`shardstore.save`.
        """
        if local_path is None:
            return
        self.previous_global_step = global_step
        place = Location.of(local_path, self.storage_options)
        # The configuration comes first, so that the commit says that everything is there.
        what = f"writing {BESIDE}/ of {place.url}"
        Ranks.current().together(what=what, decide=lambda _: self._write_beside(place))
        state = self._state(self.checkpoint_save_contents)
        if "extra" in self.checkpoint_save_contents:
            rng = {**super().get_rng_state()}
            rng = {name: one.numpy() if torch.is_tensor(one) else one for name, one in rng.items()}
            schedule = None if self.lr_scheduler is None else self.lr_scheduler.state_dict()
            state["extra"] = {"lr_scheduler": schedule, "rng": {str(self.rank): rng}}
        shardstore.save(state, local_path, storage_options=self.storage_options, overwrite=True)
        if self.rank == 0:
            if local_path in self.previous_saved_paths:  # else verl would delete what is there now
                self.previous_saved_paths.remove(local_path)
            super().register_checkpoint(local_path, max_ckpt_to_keep)

    def load_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        del_local_after_load: bool = False,
    ) -> None:
        """Load the parts that ``checkpoint_load_contents`` names from a folder or URL.

        A rank that the saved run did not have keeps its random state. A parameter that the saved
        run's optimizer had no state for, because it never had a gradient, gets none. Every rank
        calls it; nothing is deleted.

        Raises:
            CheckpointingException: see :func:`shardstore.load`.
        """
        if local_path is None:
            return
        wanted = self._state(self.checkpoint_load_contents)
        load: Any = partial(
            shardstore.load, wanted, local_path, storage_options=self.storage_options
        )
        loaded, _, absent = load(strict="return_unexpected")
        trained = loaded.get("optimizer", {}).get("state", {})
        for key in absent:
            parameter = key.removeprefix(STATE).rpartition(".")[0]
            if not trained or parameter in trained or not key.startswith(STATE):
                load()  # raises the error
        if "model" in wanted:
            strict = of_torch.StateDictOptions(strict=not self._is_lora_only)
            of_torch.set_model_state_dict(self.model, loaded["model"], options=strict)
        if "optimizer" in wanted:
            loose = of_torch.StateDictOptions(strict=False)
            state = loaded["optimizer"]
            of_torch.set_optimizer_state_dict(self.model, self.optimizer, state, options=loose)
        if "extra" in self.checkpoint_load_contents:
            if "extra" not in loaded:
                what = " was saved without the contents 'extra': leave it out of load_contents"
                raise Location.of(local_path, self.storage_options).error(what, MissingKeyError)
            extra = loaded["extra"]
            if extra.get("lr_scheduler") is not None and self.lr_scheduler is not None:
                self.lr_scheduler.load_state_dict(extra["lr_scheduler"])
            if (rng := extra.get("rng", {}).get(str(self.rank))) is not None:
                kept = ("numpy", "random")
                rng = {k: v if k in kept else torch.from_numpy(v) for k, v in rng.items()}
                super().load_rng_state(rng)

    def remove_previous_save_local_path(self, path: str | list[str]) -> None:
        """Delete checkpoints that this manager saved. Rank 0 calls it."""
        for one in [path] if isinstance(path, str) else path:
            place = Location.of(one, self.storage_options)
            if is_checkpoint(place):
                shardstore.delete_checkpoint(one, storage_options=self.storage_options)
            place.delete(BESIDE)
            with suppress(OSError):  # a URL, or it holds files of others
                os.rmdir(place.url)

    @property
    def _is_lora_only(self) -> bool:
        return bool(super().should_save_lora_only and super()._has_lora())

    def _state(self, contents: Iterable[str]) -> dict[str, Any]:
        """Return the tensors of a save or a load, by the names of contents."""
        state: dict[str, Any] = {}
        if "model" in contents:
            state["model"] = of_torch.get_model_state_dict(self.model)
            if self._is_lora_only:
                found = state["model"].items()
                state["model"] = {k: v for k, v in found if "lora_" in k or ".adapter_" in k}
        if "optimizer" in contents:
            state["optimizer"] = of_torch.get_optimizer_state_dict(self.model, self.optimizer)
        return state

    def _write_beside(self, place: Location) -> None:
        """Write configuration, tokenizer and the code of a custom model."""
        model: Any = getattr(self.model, "_fsdp_wrapped_module", self.model)
        with tempfile.TemporaryDirectory() as folder:
            generation = getattr(model, "generation_config", None)
            for one in (model.config, generation, self.processing_class):
                if one is not None:
                    one.save_pretrained(folder)
            if getattr(model.config, "auto_map", None):
                saving = importlib.import_module("transformers.dynamic_module_utils")
                base = model.get_base_model() if hasattr(model, "get_base_model") else model
                saving.custom_object_save(base, folder, config=model.config)
            for file in Path(folder).iterdir():
                place.write(f"{BESIDE}/{file.name}", file.read_bytes())


if __name__ in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(","):
    install()
