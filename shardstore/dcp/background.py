"""Saves of programs that only know ``dcp.save``, in the background, one at a time."""

from __future__ import annotations

import atexit
import logging
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

from shardstore.async_handle import exit_with_error
from shardstore.storage.commit.folder import is_taken
from shardstore.storage.stores.location import Location

logger = logging.getLogger(__name__)

_MOVING = ((shutil, "copytree"), (shutil, "move"), (os, "rename"), (os, "replace"))
"""Functions that copy or move a folder, and first wait for the save below it."""


class Background:
    """Saves by ``dcp.async_save``, one at a time.

    The next save waits for the last one and raises its error. The end of the program waits too; if
    the save failed, it prints the error, and the exit code is 1. In a program that has only
    ``dcp.save`` (:meth:`changes`), all other operations that could rely on a save wait as well: the
    next load through DCP, the deletion of a folder by ``shutil.rmtree``, which is how trainers
    delete older checkpoints, copying or moving the folder, and the end of the process group.

    There, ``shutil.rmtree`` keeps the last checkpoint that the process saved or loaded, because
    some trainers delete it before they save the next one. A checkpoint is a folder that DCP saves
    to, or one that directly holds such folders (model and optimizer). It is deleted when the
    program deletes a checkpoint again and a later one beside it has the same parts.

    The first save makes a process group of gloo for the messages of the saves, so that they do not
    mix with those of the program; every rank waits for it.
    """

    def __init__(self) -> None:
        self._save: tuple[Future[Any], str] | None = None
        self._groups: dict[Any, Any] = {}
        self._process = 0
        self._used: list[str] = []  # places of saves and loads, the last one last
        self._put_off: set[str] = set()
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

    def start(self, state_dict: Any, place: str | os.PathLike[str], **given: Any) -> None:
        """Save to a place, and return when the state is copied. All ranks of the group call it.

        Args:
            **given: other arguments of ``dcp.async_save``. Without a ``storage_writer``, DCP
                chooses one for the place.

        Raises:
            CheckpointException: the save before it failed.
        """
        self.finish()
        given["process_group"] = self._group(given.get("process_group"))
        # DCP's default stager takes no ShardedTensor of FSDP1.
        given |= {"async_stager": BlockingAsyncStager(), "checkpoint_id": place}
        found = vars(dcp)["async_save"](state_dict, **given)
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
                return before(state_dict, **given)
            self.start(state_dict, place, **{**given, "storage_writer": None})
            return None

        destroy_group = dist.destroy_process_group

        @wraps(destroy_group)
        def destroy(*args: Any, **kwargs: Any) -> None:
            self.finish()
            self._groups.clear()
            destroy_group(*args, **kwargs)

        return {
            **{(module, name): self._waiting(getattr(module, name)) for module, name in _MOVING},
            (dcp, "save"): save,
            (shutil, "rmtree"): self._keeping_the_last(shutil.rmtree),
            (dist, "destroy_process_group"): destroy,
            (distributed_c10d, "destroy_process_group"): destroy,
        }

    def using(self, place: object) -> None:
        """Wait for the last save. Record the place of the save or load that begins, if it is a
        path, and cancel a postponed deletion of this place."""
        self.finish()
        if isinstance(place, str | os.PathLike):
            place = os.path.realpath(place)
            self._used = [*(one for one in self._used if one != place), place]
            self._put_off -= {place, os.path.dirname(place)}

    def _waiting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(src: Any, *args: Any, **kwargs: Any) -> Any:
            if (save := self._save) is not None:
                folder = os.path.realpath(os.fsdecode(src))
                if os.path.commonpath([folder, os.path.realpath(save[1])]) == folder:
                    self.finish()
            return function(src, *args, **kwargs)

        return call

    def _keeping_the_last(self, rmtree: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(rmtree)
        def call(path: Any, ignore_errors: bool = False, *args: Any, **kwargs: Any) -> Any:
            self.finish()
            folder = os.path.realpath(os.fsdecode(path))
            # With a handler of errors it is the cleanup of a temporary folder.
            if args or kwargs or self._is_last(folder) is None:
                return rmtree(path, ignore_errors, *args, **kwargs)
            self._put_off.add(folder)
            for one in sorted(self._put_off):
                if is_last := self._is_last(one):
                    logger.info("%s stays until a later checkpoint beside it is complete", one)
                    continue
                self._put_off.discard(one)
                if is_last is False:  # else the program has put something else there
                    self._used = [p for p in self._used if one not in (p, os.path.dirname(p))]
                    rmtree(path if one == folder else one, ignore_errors or one != folder)

        return call

    def _is_last(self, folder: str) -> bool | None:
        """Return whether a checkpoint has no later one beside it that has all of its parts;
        ``None`` if the folder is not a checkpoint that this process saved or loaded."""
        parts: dict[str, set[str]] = {}  # of the checkpoints beside it, the last one first
        for place in reversed(self._used):
            for checkpoint, part in ((place, ""), os.path.split(place)):
                is_beside = os.path.dirname(checkpoint) == os.path.dirname(folder)
                if is_beside and is_taken(Location.of(place)):
                    parts.setdefault(checkpoint, set()).add(part)
        if folder not in parts:
            return None
        return folder == next(one for one in parts if parts[one] >= parts[folder])

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
