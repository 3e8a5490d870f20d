"""DCP's own reader, where a program names it: over a checkpoint of ours it hands its calls on.

Some programs save by a place alone and load by a ``FileSystemReader`` that they make themselves.
The class stays what it is, whoever imported it and when; five of its methods look first whether the
place has a checkpoint of ours. What a place holds is told here, for :mod:`installation` too; where
a checkpoint goes and how a reader of ours is made is not known.
"""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from shardstore.dcp.files import METADATA_NAME
from shardstore.dcp.reader import StorageReader
from shardstore.storage.stores.location import Location

__all__ = ["handing_on", "is_of_dcp", "is_ours"]

_METADATA = "read_metadata"
_OTHERS = (
    "set_up_storage_reader",
    "prepare_local_plan",
    "prepare_global_plan",
    "read_data",
)
_KEPT = "_reader_of_shardstore"


def is_ours(location: Location) -> bool:
    """Whether a checkpoint of ours is at a place, and none that DCP has written over it since."""
    if not location.exists("zarr.json"):
        return False
    try:
        # A save of ours takes away what DCP has left there; the line of text that it may put in
        # its stead does not begin as a pickle does.
        return not location.read(METADATA_NAME).startswith(pickle.PROTO)
    except FileNotFoundError:
        return True


def is_of_dcp(location: Location) -> bool:
    """Whether a checkpoint that DCP's own storage wrote is at a place."""
    return not is_ours(location) and location.exists(METADATA_NAME)


def handing_on(new_reader: Callable[[], StorageReader]) -> dict[tuple[Any, str], Any]:
    """What to change in DCP's ``FileSystemReader`` so that it loads checkpoints of ours too.

    Each load begins with the metadata, and there the place is looked at anew, so that it does not
    matter when a reader was made or where it was sent by ``reset``. A reader over another file
    system than the machine's (``FsspecReader``) stays as it is.

    Args:
        new_reader: makes a reader of ours, without a place.

    Returns:
        The class and the name of each method, and what it is to be.
    """
    read_before = getattr(FileSystemReader, _METADATA)

    @functools.wraps(read_before)
    def read_metadata(self: FileSystemReader, *args: Any, **kwargs: Any) -> Metadata:
        vars(self).pop(_KEPT, None)
        # Metadata of one rank is asked for where there is none of all ranks: DCP alone writes it.
        if kwargs.get("rank") is None and type(self.fs) is FileSystem:
            # As DCP takes it: neither a URL nor the home folder.
            place = os.path.abspath(self.path)
            if is_ours(Location.of(place)):
                reader = new_reader()
                reader.reset(place)
                vars(self)[_KEPT] = reader
                return reader.read_metadata()
        found: Metadata = read_before(self, *args, **kwargs)
        return found

    changes = {(FileSystemReader, name): _handed_on(name) for name in _OTHERS}
    return {(FileSystemReader, _METADATA): read_metadata, **changes}


def _handed_on(name: str) -> Callable[..., Any]:
    """The method of that name: ours where the metadata were ours, else as it is now."""
    before = getattr(FileSystemReader, name)

    @functools.wraps(before)
    def method(self: FileSystemReader, *args: Any, **kwargs: Any) -> Any:
        reader = vars(self).get(_KEPT)
        if reader is None:
            return before(self, *args, **kwargs)
        return getattr(reader, name)(*args, **kwargs)

    return method
