"""Where a storage writer or reader of ours works: the part that is the same for both.

Knows a URL and its storage options, and DCP's name for them (``checkpoint_id``); nothing of what is
written or read there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar

from shardstore.errors import CheckpointingException
from shardstore.storage.stores.location import Location, given_options

__all__ = ["Placed", "forget_listings"]


class Placed:
    """A place that is given at the beginning, or by DCP as ``checkpoint_id``.

    Args:
        url: the place; ``None`` if DCP is to name it.
        storage_options: options of the store behind the URL.

    Raises:
        ArgumentError: they are no mapping, or the place is none.
    """

    _purpose: ClassVar[str]
    """What the place is for, and the function of DCP that can name it: ``"write to:save"``."""

    def __init__(
        self, url: str | os.PathLike[str] | None, storage_options: Mapping[str, Any] | None
    ) -> None:
        self._storage_options = given_options(storage_options)
        self._location: Location | None = None
        if url is not None:
            self._go_to(url)

    def _go_to(self, place: str | os.PathLike[str]) -> None:
        self._location = Location.of(place, **self._storage_options)

    @property
    def _place(self) -> Location:
        if self._location is None:
            verb, function = self._purpose.split(":")
            raise CheckpointingException(
                f"the {type(self).__name__} has no place to {verb}: give it a URL, or give "
                f"torch.distributed.checkpoint.{function} a checkpoint_id"
            )
        # A location that was pickled, for DCP's process that saves, has left its options behind.
        return Location.of(self._location, **self._storage_options)

    @property
    def checkpoint_id(self) -> str:
        """Where the checkpoint is."""
        return self._place.url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint can be there: a local path or a URL."""
        return bool(os.fspath(checkpoint_id))


def forget_listings(place: Location) -> None:
    """Have the program's own fsspec file system list the folders above a place anew.

    It keeps listings for ever, except of what it wrote itself (as DCP's own storage does by it): a
    trainer that looks for its steps there would see those of its first look.
    """
    if place.is_local:
        return
    # A file system that the program can not have made has no listings to forget either.
    with suppress(Exception):
        import fsspec  # type: ignore[import-untyped]

        file_system, path = fsspec.core.url_to_fs(place.url)
        file_system.invalidate_cache(path)
