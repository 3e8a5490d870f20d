"""Makes programs that give PyTorch DCP only a ``checkpoint_id`` use shardstore.

torchtitan and Lightning's FSDP2 call ``dcp.save(state, checkpoint_id=path)`` and offer no way to
pass a storage writer. :func:`install` changes the storage that DCP chooses in this case; a call
that names its storage keeps it. It replaces the methods of DCP's own reader and three private names
of ``torch.distributed.checkpoint``. It raises an error if this PyTorch lacks these names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any, Unpack

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter

from shardstore.dcp.background import Background
from shardstore.dcp.reader import StorageReader
from shardstore.dcp.writer import StorageWriter
from shardstore.errors import CheckpointingException
from shardstore.storage.commit.identity import is_ours
from shardstore.storage.format.names import DCP_METADATA_NAME
from shardstore.storage.options import WriterKeywords, require_bool
from shardstore.storage.stores.location import Location
from shardstore.validation import StrictHandling

_METHODS = (
    "read_metadata",
    "set_up_storage_reader",
    "prepare_local_plan",
    "prepare_global_plan",
    "read_data",
)
_KEPT = "_reader_of_shardstore"


def handing_on(new_reader: Callable[[str], StorageReader]) -> dict[tuple[Any, str], Any]:
    """Return new methods for DCP's ``FileSystemReader``, so that it loads our checkpoints too.

    Each load begins with ``read_metadata``. The new method checks the format of the checkpoint
    there, because it may have changed since the reader was made or ``reset``. Readers of other file
    systems (``FsspecReader``) do not change.

    Args:
        new_reader: makes a :class:`StorageReader` of a path.

    Returns:
        (class, name of the method) -> new method.
    """

    def method_of(name: str) -> Callable[..., Any]:
        before = getattr(FileSystemReader, name)

        @wraps(before)
        def method(self: FileSystemReader, *args: Any, **kwargs: Any) -> Any:
            if name == "read_metadata":
                # As in DCP, the path is not a URL, and ~ is not expanded.
                place = os.path.abspath(self.path)
                # A rank is given for metadata of a single rank, which only DCP writes.
                may_be_ours = kwargs.get("rank") is None and type(self.fs) is FileSystem
                is_served = may_be_ours and is_ours(Location.of(place))
                vars(self)[_KEPT] = new_reader(place) if is_served else None
            reader = vars(self).get(_KEPT)
            if reader is None:
                return before(self, *args, **kwargs)
            return getattr(reader, name)(*args, **kwargs)

        return method

    return {(FileSystemReader, name): method_of(name) for name in _METHODS}


def _is_plain(writer: object) -> bool:
    """Return whether a writer is DCP's own, in its usual format, and may overwrite."""
    if type(writer) is not FileSystemWriter or not writer.overwrite:
        return False
    form = getattr(writer, "serialization_format", None)  # older versions have one format
    return form is None or form.name == "TORCH_SAVE"


def _replaced(saver: Any, loader: Any) -> tuple[Any, Any]:
    """Return the function and the class of DCP that :func:`install` replaces."""
    try:
        before, _ = saver._storage_setup, loader._storage_setup
        return before, saver._ProcessBasedAsyncCheckpointExecutor
    except AttributeError as error:
        raise CheckpointingException(
            f"PyTorch {torch.__version__} chooses its storage in another way ({error}): give each "
            "call a shardstore.dcp.StorageWriter or StorageReader instead, or upgrade shardstore"
        ) from error


Place = str | os.PathLike[str]


class Installation(ExitStack):
    """The changes that :func:`install` made. As a context manager it undoes them on exit."""

    def __init__(self, changes: Mapping[tuple[Any, str], Any]) -> None:
        super().__init__()
        for (module, name), value in changes.items():
            self.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)

    def uninstall(self) -> None:
        """Undo the changes, also for readers that exist. Uninstall several installations in reverse
        order."""
        self.close()


def install(
    *,
    allow_pickle: bool = False,
    cast: bool = False,
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
    named_writers: bool = False,
    asynchronous: bool = False,
    **options: Unpack[WriterKeywords],
) -> Installation:
    """Make DCP use shardstore for calls that name a ``checkpoint_id`` and no storage.

    After it, ``torch.distributed.checkpoint.save``, ``async_save`` (both forms) and ``load`` of
    this process write and read our checkpoints, by path or URL. DCP still loads the checkpoints
    that its own storage wrote, so a run continues from its last one. Programs that load with DCP's
    ``FileSystemReader`` (Lightning's ``FSDPStrategy`` does, for optimizers) read ours from local
    folders. Programs that name a writer of DCP write DCP's own files. Each save also writes a file
    ``.metadata`` (a line of text), because programs look for it to find complete checkpoints. All
    ranks call this once, before the first save; no rank waits.

    Args:
        allow_pickle: see :class:`StorageWriter`.
        cast: see :class:`StorageReader`.
        strict: see :class:`StorageReader`. No program sees the reader, so give a mode that logs or
            raises.
        named_writers: also serve saves that name DCP's own ``FileSystemWriter(path)``, as
            accelerate's do, but not its subclasses, nor with ``overwrite=False`` or another format.
            Its other arguments have no effect.
        asynchronous: ``dcp.save`` of these calls returns ``None`` after it copied the state, and
            writes in the background, see :class:`~shardstore.dcp.background.Background`.
        **options: see :class:`StorageWriter`; the reader uses ``threads`` and ``storage_options``
            too. ``overwrite`` is on by default, because DCP's own storage overwrites, and programs
            rely on it when they save a step again. In a folder, the old checkpoint stays readable
            until the new one takes its place; an object store has no checkpoint in between.

    Returns:
        A handle that can undo the installation.

    Raises:
        ArgumentError: an option has a wrong type or value.
        CheckpointingException: this version of PyTorch chooses its storage in another way.
    """
    storage_options = options.get("storage_options")
    given: WriterKeywords = {"overwrite": True, **options}
    new_writer = partial(StorageWriter, allow_pickle=allow_pickle, dcp_marker=True, **given)
    new_reader = partial(
        StorageReader,
        cast=cast,
        strict=strict,
        threads=options.get("threads"),
        storage_options=storage_options,
    )

    # Raise errors of the options now, not at the first save.
    require_bool("named_writers", named_writers)
    require_bool("asynchronous", asynchronous)
    new_writer()
    new_reader()
    saver: Any = state_dict_saver
    loader: Any = state_dict_loader
    before, process = _replaced(saver, loader)

    def place_of(storage: Any, checkpoint_id: Place | None) -> Place | None:
        """Return the place of a call if it is served here."""
        if named_writers and _is_plain(storage):
            return checkpoint_id or os.path.abspath(storage.path)
        return None if storage is not None else checkpoint_id or None

    background = Background()

    def choose(storage: Any, checkpoint_id: Place | None, reader: bool = False) -> Any:
        background.using(checkpoint_id or getattr(storage, "path", None))
        if (url := place_of(storage, checkpoint_id)) is None:
            return before(storage, checkpoint_id, reader=reader)
        if reader:
            place = Location.of(url, storage_options)
            if not is_ours(place) and place.exists(DCP_METADATA_NAME):  # DCP's own storage wrote it
                return before(None, url, reader=True)
        return new_reader(url) if reader else new_writer(url)

    class InAProcess(process):  # type: ignore[misc, valid-type]
        """Passes our writer to DCP's process for saves, because nothing is installed there."""

        def execute_save(self, *args: Any, **options: Any) -> Any:
            writer = choose(options.get("storage_writer"), options.get("checkpoint_id"))
            return super().execute_save(*args, **{**options, "storage_writer": writer})

    installation = Installation(
        {
            (saver, "_storage_setup"): choose,
            (loader, "_storage_setup"): choose,
            (saver, "_ProcessBasedAsyncCheckpointExecutor"): InAProcess,
            **handing_on(new_reader),
            **(background.changes(place_of) if asynchronous else {}),
        }
    )
    installation.callback(background.finish)
    return installation
