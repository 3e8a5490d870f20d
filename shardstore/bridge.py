"""Megatron-Bridge's checkpoint manager, with checkpoints of this package.

One line chooses it::

    shardstore.bridge.use(config.checkpoint)

:func:`use` sets ``checkpoint.custom_manager_class`` and lets Megatron-Bridge import the class.
Saves and loads are Megatron-Bridge's own functions (``training/checkpointing.py``), with this
package in the place of Megatron-Core's ``dist_checkpointing``: see :mod:`shardstore.megatron`.
Megatron-Bridge is imported on the first use.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shardstore import megatron
from shardstore.distributed.coordinator import Ranks
from shardstore.errors import ArgumentError, DamagedCheckpointError, NotACheckpointError
from shardstore.storage.stores.location import Location

TRAINER = "megatron.bridge.training.checkpointing"
ALLOWED = "megatron.bridge.utils.instantiate_utils"
NAME = "shardstore.bridge.CheckpointManager"
FORMAT = "torch_dist"
"""What Megatron-Bridge calls every checkpoint of ``dist_checkpointing``."""

STATE, OF_STEP = "train_state.pt", ("train_state.pt", "run_config.yaml")
"""What Megatron-Bridge itself writes into the folder of a checkpoint."""
NEWEST = "latest_checkpointed_iteration.txt"


def use(checkpoint_config: Any) -> None:
    """Choose :class:`CheckpointManager` in Megatron-Bridge's configuration. Each process calls it
    before training starts.

    Megatron-Bridge imports only classes of allowed packages; this call allows ``shardstore``. A
    release without ``custom_manager_class`` (0.3) has no managers: there the call only does what
    :func:`shardstore.megatron.install` does, and the trainer's own saves and loads use it.

    Args:
        checkpoint_config: Megatron-Bridge's ``CheckpointConfig``.

    Raises:
        ArgumentError: the configuration names another manager, or a format that does not use
            ``dist_checkpointing``; or it is too late, see :func:`shardstore.megatron.install`.
    """
    _begin(checkpoint_config)
    if not hasattr(checkpoint_config, "custom_manager_class"):
        return
    if checkpoint_config.custom_manager_class not in (None, NAME):
        raise ArgumentError(
            f"checkpoint.custom_manager_class={checkpoint_config.custom_manager_class!r:.200} is "
            "another manager: leave it None"
        )
    allow = getattr(importlib.import_module(ALLOWED), "register_allowed_target_prefix", None)
    if allow is not None:
        allow("shardstore.")
    checkpoint_config.custom_manager_class = NAME


def _begin(config: Any) -> None:
    """Check the configuration, and put this package in the place of ``dist_checkpointing``."""
    found = getattr(config, "ckpt_format", None)
    if found != FORMAT:
        raise ArgumentError(
            f"checkpoint.ckpt_format={found!r:.100} must be {FORMAT!r}: others are saved without "
            "dist_checkpointing. shardstore.megatron.install sets the format on the disk"
        )
    megatron.install(megatron.installed())


class CheckpointManager:
    """Saves and restores Megatron-Bridge's training state. Every rank makes one, with equal
    options, and calls each method; ``save`` and ``load`` wait for the other ranks.

    Megatron-Bridge makes it from ``checkpoint.custom_manager_class``. ``checkpoint.save`` and
    ``checkpoint.load`` may be URLs. Megatron-Bridge keeps small files beside each checkpoint, in a
    folder named after the URL below the working directory; the manager copies them to the URL after
    each commit, and from there before a load.

    Args:
        checkpoint_config: Megatron-Bridge's ``CheckpointConfig``.

    Attributes:
        checkpointing_context: what Megatron-Bridge keeps from one call to the next.

    Raises:
        ArgumentError: as for :func:`use`.
    """

    def __init__(self, checkpoint_config: Any) -> None:
        _begin(checkpoint_config)
        self.checkpoint_config = checkpoint_config
        self._bridge: Any = importlib.import_module(TRAINER)
        self.checkpointing_context: dict[str, Any] = self._bridge.init_checkpointing_context(
            checkpoint_config
        )

    def save(self, ctx: Any, callback_manager: Any = None) -> None:
        """Save the state of the context below ``checkpoint.save``.

        Args:
            ctx: Megatron-Bridge's ``CheckpointSaveContext``.
            callback_manager: the trainer's callbacks.

        Raises:
            CheckpointingException: the save failed on some rank; every rank raises it.
        """
        self._call(self._bridge.save_checkpoint, ctx, callback_manager=callback_manager)
        if not self.checkpoint_config.async_save:
            self._publish()

    def load(self, ctx: Any) -> tuple[int, int]:
        """Restore the state of the context from ``checkpoint.load``.

        Args:
            ctx: Megatron-Bridge's ``CheckpointLoadContext``.

        Returns:
            The iteration and the number of floating-point operations so far; zeros if there was
            nothing to load.

        Raises:
            CheckpointingException: the load failed on some rank; every rank raises it.
        """
        self._fetch()
        found: tuple[int, int] = self._call(self._bridge.load_checkpoint, ctx)
        return found

    def finalize_async_saves(
        self, state: Any, blocking: bool = False, terminate: bool = False
    ) -> None:
        """Commit asynchronous saves that have been written.

        Args:
            state: Megatron-Bridge's ``GlobalState``.
            blocking: wait for those that are being written.
            terminate: end the queue afterwards.

        Raises:
            CheckpointingException: a save failed on some rank; every rank raises it.
        """
        is_remote = _is_remote(self.checkpoint_config.save)
        queue: Any = state.async_calls_queue if is_remote else None
        before = 0 if queue is None else queue.get_num_unfinalized_calls()
        self._bridge.maybe_finalize_async_save(
            global_state=state,
            ckpt_cfg=self.checkpoint_config,
            blocking=blocking,
            terminate=terminate,
        )
        if before and queue.get_num_unfinalized_calls() < before:  # the same on every rank
            self._publish()

    def _publish(self) -> None:
        """Copy the files of the newest step to the URL; the one that names the step last."""
        url = self.checkpoint_config.save
        if not _is_remote(url):
            return

        def copied(_: object) -> None:
            here, there = Path(url), Location.of(url)
            newest = (here / f"latest_{STATE}").read_bytes()
            step = int(torch.load(here / f"latest_{STATE}", weights_only=True)["step"])
            folder = self._bridge.get_checkpoint_name("", step)
            for name in OF_STEP:
                there.write(f"{folder}/{name}", (here / folder / name).read_bytes())
            there.replace(f"latest_{STATE}", newest)
            there.replace(NEWEST, str(step).encode())

        Ranks.current().together(what=f"writing {NEWEST} of {url}", decide=copied)

    def _fetch(self) -> None:
        """Copy the files of the step to load from the URL. Each rank does, because ranks may have
        different disks."""
        url, asked = self.checkpoint_config.load, self.checkpoint_config.ckpt_step
        if not _is_remote(url):
            return
        here, there = Path(url), Location.of(url)

        def chosen(_: object) -> bytes:
            return there.read_if_there(NEWEST, 100) or b"" if asked is None else b"%d" % asked

        step = Ranks.current().together(what=f"reading {NEWEST} of {url}", decide=chosen)
        if not step:
            return
        with Ranks.current().meet(f"reading step {step.decode(errors='replace')} of {url}"):
            if not step.isdigit():
                raise there.error(f"/{NEWEST} does not hold a number", DamagedCheckpointError)
            folder = self._bridge.get_checkpoint_name("", int(step))
            (here / folder).mkdir(parents=True, exist_ok=True)
            copy = Location.of(here.absolute())  # other ranks of this host may write the same files
            for name in OF_STEP:
                data = there.read_if_there(f"{folder}/{name}")
                if data is None:
                    what = f"/{folder}/{name} is missing: set checkpoint.ckpt_step to another step"
                    raise there.error(what, NotACheckpointError)
                copy.replace(f"{folder}/{name}", data)
                if name == STATE:
                    copy.replace(f"latest_{STATE}", data)
            copy.replace(NEWEST, step)

    def _call(self, function: Callable[..., Any], ctx: Any, **more: Any) -> Any:
        """Call a function of Megatron-Bridge with what it takes of a context. Its parameters and
        the fields of the context have the same names in every release. A function that takes any
        keyword, such as one that a program put around Megatron-Bridge's, gets everything."""
        taken = inspect.signature(function).parameters
        takes_all = any(one.kind is one.VAR_KEYWORD for one in taken.values())
        given = {**vars(ctx), **more, "checkpointing_context": self.checkpointing_context}
        return function(**{k: value for k, value in given.items() if takes_all or k in taken})


def _is_remote(place: Any) -> bool:
    return isinstance(place, str) and "://" in place
