"""Saves of programs that only know ``dcp.save``, in the background, one at a time."""

from __future__ import annotations

import atexit
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import StorageWriter

from shardstore.async_handle import exit_with_error


class Background:
    """Saves by ``dcp.async_save``, one at a time.

    The next save waits for the last one and raises its error. The end of the program waits too;
    after an error it prints it and exits with 1. In a program that has only ``dcp.save``
    (:meth:`changes`), whatever else could rely on a save waits as well: the next load through DCP,
    the deletion of a folder by ``shutil.rmtree``, which is how trainers delete older checkpoints,
    and the end of the process group.

    The first save makes a process group of gloo for the messages of the saves, so that they do not
    mix with those of the program; every rank waits for it.
    """

    def __init__(self) -> None:
        self._save: tuple[Future[Any], str] | None = None
        self._groups: dict[Any, Any] = {}
        self._process = 0
        atexit.register(self._at_exit)

    def finish(self) -> None:
        """Wait for the last save. In another thread than the main one, do nothing: that may be the
        thread of the save. In a forked child too, because the save belongs to its parent.

        Raises:
            CheckpointException: it failed.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and self._process == os.getpid() and self._save is not None:
            (future, _), self._save = self._save, None
            future.result()

    def _at_exit(self) -> None:
        if self._process == os.getpid() and self._save is not None:
            future, place = self._save
            if (error := future.exception()) is not None:
                exit_with_error(place, error)

    def start(
        self,
        state_dict: Any,
        place: str | os.PathLike[str],
        storage_writer: StorageWriter | None,
        **given: Any,
    ) -> None:
        """Save to a place, and return when the state is copied. All ranks of the group call it.

        Args:
            storage_writer: ``None`` for the one that DCP chooses for the place.
            **given: other arguments of ``dcp.async_save``.

        Raises:
            CheckpointException: the save before it failed.
        """
        self.finish()
        given["process_group"] = self._group(given.get("process_group"))
        found = vars(dcp)["async_save"](
            state_dict,
            # DCP's default stager takes no ShardedTensor of FSDP1.
            **{**given, "async_stager": BlockingAsyncStager(), "checkpoint_id": place},
            storage_writer=storage_writer,
        )
        # Newer stagers answer with two futures.
        self._save = getattr(found, "upload_completion", found), os.fspath(place)
        self._process = os.getpid()

    def changes(
        self, place_of: Callable[[Any, Any], str | os.PathLike[str] | None]
    ) -> dict[tuple[Any, str], Any]:
        """Return new functions for a program that calls ``dcp.save``: (module, name) -> function.

        Args:
            place_of: returns the place of a call's ``storage_writer`` and ``checkpoint_id``,
                ``None`` if the call is not ours.
        """
        before = vars(dcp)["save"]

        @wraps(before)
        def save(state_dict: Any, **given: Any) -> Any:
            storage = given.get("storage_writer"), given.get("checkpoint_id")
            if (place := place_of(*storage)) is None or given.get("no_dist"):
                self.finish()
                return before(state_dict, **given)
            self.start(state_dict, place, **{**given, "storage_writer": None})
            return None

        destroy = self._after(dist.destroy_process_group)
        return {
            (dcp, "save"): save,
            (shutil, "rmtree"): self._after(shutil.rmtree),
            (dist, "destroy_process_group"): destroy,
            (distributed_c10d, "destroy_process_group"): destroy,
        }

    def _after(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.finish()
            if function.__name__ == "destroy_process_group":
                self._groups.clear()
            return function(*args, **kwargs)

        return call

    def _group(self, group: Any) -> Any:
        """Return the gloo group of the ranks of a group; ``None`` without ranks."""
        if not dist.is_initialized():
            return None
        if group not in self._groups:
            ranks = dist.get_process_group_ranks(group)
            # Of a part of the ranks, the others do not call it.
            self._groups[group] = dist.new_group(
                ranks, backend="gloo", use_local_synchronization=group is not None
            )
        return self._groups[group]
