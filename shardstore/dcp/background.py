"""Saves of programs that only know ``dcp.save``, in the background, one at a time."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.stateful import Stateful

from shardstore.async_handle import AsyncSave, async_save
from shardstore.storage.options import ChunkKeywords, SaveKeywords, WriterKeywords
from shardstore.strategies.zarr import ZarrSaveShardedStrategy


class Background:
    """Replaces ``dcp.save`` by :func:`shardstore.async_save`.

    Whatever could rely on the save waits for its end, and raises its error: the next save or load
    through DCP, the deletion of a folder by ``shutil.rmtree``, which is how trainers delete older
    checkpoints, and the end of the process group. So does the end of the program, which then exits
    with 1.

    Args:
        place_of: returns the place of a call's ``storage_writer`` and ``checkpoint_id``, ``None``
            if this call is not ours.
        options: see :func:`shardstore.dcp.install`.
    """

    def __init__(
        self,
        place_of: Callable[[Any, Any], str | os.PathLike[str] | None],
        options: WriterKeywords,
    ) -> None:
        self._place_of = place_of
        chunks = {name: options[name] for name in _CHUNKS & options.keys()}  # type: ignore[literal-required]
        self._strategy = ZarrSaveShardedStrategy("zarr", 2, **cast(ChunkKeywords, chunks))
        others = {name: value for name, value in options.items() if name not in _CHUNKS}
        self._options = cast(SaveKeywords, others)
        self._handle: AsyncSave | None = None

    def finish(self) -> None:
        """Wait for the last save. In another thread than the main one, do nothing: that may be the
        thread of the save.

        Raises:
            CheckpointingException: it failed.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.result()

    def changes(self) -> dict[tuple[Any, str], Any]:
        """Return the new functions: (module, name) -> function."""
        found: dict[tuple[Any, str], Any] = {(dcp, "save"): self._saving(vars(dcp)["save"])}
        for module, name in _LATER:
            found[module, name] = self._after(getattr(module, name))
        return found

    def _after(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.finish()
            return function(*args, **kwargs)

        return call

    def _saving(self, before: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(before)
        def save(state_dict: Any, **given: Any) -> Any:
            self.finish()
            place = self._place_of(given.get("storage_writer"), given.get("checkpoint_id"))
            if place is None or given.get("no_dist"):
                return before(state_dict, **given)
            state = {
                key: value.state_dict() if isinstance(value, Stateful) else value
                for key, value in state_dict.items()
            }
            self._handle = async_save(
                state,
                os.fspath(place),
                self._strategy,
                process_group=given.get("process_group"),
                **self._options,
            )
            return None

        return save


_CHUNKS = ChunkKeywords.__annotations__.keys()
_LATER = (
    (shutil, "rmtree"),
    (dist, "destroy_process_group"),
    (distributed_c10d, "destroy_process_group"),
)
