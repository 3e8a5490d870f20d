"""Megatron-Bridge's checkpoint manager, with checkpoints of this package.

``checkpoint.custom_manager_class`` names it::

    shardstore.bridge.use(config.checkpoint)

:func:`use` sets that option and lets Megatron-Bridge import the class.
Saves and loads are Megatron-Bridge's own functions (``training/checkpointing.py``), with this
package in the place of Megatron-Core's ``dist_checkpointing``: see :mod:`shardstore.megatron`.
Megatron-Bridge is imported on the first use.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from shardstore import megatron
from shardstore.errors import ArgumentError

TRAINER = "megatron.bridge.training.checkpointing"
ALLOWED = "megatron.bridge.utils.instantiate_utils"
NAME = "shardstore.bridge.CheckpointManager"
FORMAT = "torch_dist"
"""What Megatron-Bridge calls every checkpoint of ``dist_checkpointing``."""


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
    _check(checkpoint_config)
    megatron.install(megatron.installed())
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


def _check(config: Any) -> None:
    if config.ckpt_format != FORMAT:
        raise ArgumentError(
            f"checkpoint.ckpt_format={config.ckpt_format!r:.100} must be {FORMAT!r}: Megatron-"
            "Bridge saves other formats without dist_checkpointing. The format on the disk is the "
            "one of shardstore.megatron.install"
        )


class CheckpointManager:
    """Saves and restores Megatron-Bridge's training state. Every rank makes one, with equal
    options, and calls each method; ``save`` and ``load`` wait for the other ranks.

    Megatron-Bridge makes it from ``checkpoint.custom_manager_class``.

    Args:
        checkpoint_config: Megatron-Bridge's ``CheckpointConfig``.

    Attributes:
        checkpointing_context: what Megatron-Bridge keeps from one call to the next.

    Raises:
        ArgumentError: as for :func:`use`.
    """

    def __init__(self, checkpoint_config: Any) -> None:
        _check(checkpoint_config)
        megatron.install(megatron.installed())
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
        self._bridge.maybe_finalize_async_save(
            global_state=state,
            ckpt_cfg=self.checkpoint_config,
            blocking=blocking,
            terminate=terminate,
        )

    def _call(self, function: Callable[..., Any], ctx: Any, **more: Any) -> Any:
        """Call a function of Megatron-Bridge with what it takes of a context. Its parameters and
        the fields of the context have the same names in every release."""
        taken = inspect.signature(function).parameters
        given = {**vars(ctx), **more, "checkpointing_context": self.checkpointing_context}
        return function(**{name: value for name, value in given.items() if name in taken})
