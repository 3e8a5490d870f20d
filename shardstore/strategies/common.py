"""Strategies for common values and sharded objects.

Backend ``("torch", 1)``: rank 0 writes ``common.pt``. The main replica of a sharded object writes
``<key>/shard_<offset>_<shape>.pt``. Both are in the format of ``torch.save``, see
:mod:`shardstore.values.torch_values`. Backend ``("json", 1)``: the DCP writer and the converters
write the common values as JSON in the root document, see :mod:`shardstore.values.record`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from shardstore import errors
from shardstore.dict_utils import dict_list_map_outplace, nested_values
from shardstore.distributed.coordinator import Ranks
from shardstore.loading.plan import LEAVES_OUT
from shardstore.loading.read import context_of
from shardstore.mapping import ShardedObject, ShardedStateDict, StateDict, is_main_replica
from shardstore.saving.session import session_of
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.format.names import (
    COMMON_STATE_NAME,
    CONTENT_METADATA_KEY,
    is_inside,
    node_name,
    object_place,
)
from shardstore.storage.runtime.parallel import in_rounds
from shardstore.storage.stores.location import Location
from shardstore.strategies.base import LoadCommonStrategy, ReadsOwnFormat, SaveCommonStrategy
from shardstore.values import plain as plain_values
from shardstore.values import record
from shardstore.values.torch_dump import dump_bytes, require_loadable
from shardstore.values.torch_values import load_bytes

logger = logging.getLogger(__name__)

COMMON_STATE_FNAME = COMMON_STATE_NAME
BACKEND, VERSION = "torch", 1
LARGE_BYTES = 1024 * 1024 * 1024
"""Size from which a warning says that tensors among the common values may be arrays."""
ROUND_BYTES, ROUND_FILES = 64 * 1024 * 1024, 1024
"""Files of sharded objects that are in memory at a time."""


def load_file(name: str, data: bytes, url: str, key: str) -> Any:
    """Return the object that a file holds: JSON if its name ends with ``.json``, else the format of
    ``torch.save``.

    Raises:
        UnsafeObjectError, DamagedCheckpointError: see :func:`load_bytes`.
    """
    if not name.endswith(".json"):
        return load_bytes(data, url, key)
    with errors.as_damage(url, f"{url} (object {key!r}) cannot be read", key):
        return plain_values.decode(json.loads(data))


def object_file(sharded: ShardedObject, suffix: str = ".pt") -> str:
    """Return the name of a sharded object's file, relative to the checkpoint."""
    key, _, shard = sharded.unique_key.rpartition("/")
    return f"{node_name(key)}/{shard}{suffix}"


OBJECT_NAMES: tuple[Callable[[ShardedObject], str], ...] = (
    object_file,
    lambda sharded: f"{sharded.unique_key}.pt",  # Megatron-Core's
    partial(object_file, suffix=".json"),  # the DCP writer's
)
"""What an object's file may be called, in the order in which it is looked for."""


def object_document(sharded: ShardedObject, *, as_json: bool = False) -> tuple[str, bytes]:
    """Return name and content of a sharded object's file.

    Args:
        sharded: the object.
        as_json: make a JSON file, if the object has a JSON form.

    Raises:
        CheckpointingException: the object cannot be pickled.
    """
    with suppress(plain_values.NotPlainError):
        if as_json:
            return object_file(sharded, ".json"), record.as_text(sharded.data)[1].encode()
    require_loadable(sharded.data, f"object {sharded.unique_key!r}")
    return object_file(sharded), dump_bytes(sharded.data)


class TorchCommonSaveStrategy(SaveCommonStrategy):
    """Save strategy for common values and sharded objects."""

    can_handle_sharded_objects = True
    notes_objects = True

    def __init__(self, backend: str = BACKEND, version: int = VERSION) -> None:
        super().__init__(backend, version)

    def save_common(self, common_state_dict: StateDict, checkpoint_dir: str | Path) -> None:
        """Write the common values, on the coordinator only. Every rank may call it; it waits for no
        other.

        Raises:
            CheckpointingException: a value cannot be pickled.
            StorageError: the store failed.
        """
        session = session_of(checkpoint_dir)
        if not (Ranks.current() if session is None else session.ranks).is_coordinator:
            return
        require_loadable(common_state_dict, "the common (non-sharded) state")
        write = Location.of(checkpoint_dir).write if session is None else session.files.put
        write(COMMON_STATE_FNAME, data := dump_bytes(common_state_dict))
        if len(data) > LARGE_BYTES:
            text = (
                "%s: the common values are one file of %d bytes, which takes as much memory again "
                "and one thread, in loads too; describe the tensors in them by "
                "shardstore.shard(state_dict), to save them as arrays"
            )
            logger.warning(text, session.target.url if session else checkpoint_dir, len(data))

    def save_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> None:
        """Write the sharded objects that this rank holds as main replica. Waits for no other rank.

        Raises:
            CheckpointingException: an object cannot be pickled.
            StorageError: the store failed.
        """
        session = session_of(checkpoint_dir)
        write = Location.of(checkpoint_dir).write if session is None else session.files.put
        for sharded in nested_values(sharded_objects_state_dict):
            if isinstance(sharded, ShardedObject) and is_main_replica(sharded.replica_id):
                write(*object_document(sharded))
                if session is not None:
                    session.manifest.objects.append(sharded.unique_key)


class TorchCommonLoadStrategy(ReadsOwnFormat, LoadCommonStrategy):
    """Load strategy for the common part and sharded objects."""

    can_handle_sharded_objects = True
    _what, _argument = "the common part", "common_strategy"
    _backend, _versions = BACKEND, (VERSION,)

    def load_common(self, checkpoint_dir: str | Path) -> StateDict:
        """Load the common part.

        Raises:
            NotACheckpointError: ``common.pt`` is missing.
            UnsafeObjectError, DamagedCheckpointError: see :func:`load_bytes`.
        """
        stored = context_of(checkpoint_dir).stored
        url = f"{stored.location.url}/{COMMON_STATE_FNAME}"
        if (data := stored.document(COMMON_STATE_FNAME)) is None:
            raise errors.NotACheckpointError(
                f"{url} is missing: this is not a complete checkpoint; it holds "
                f"{stored.location.listing()[:8]}",
                url=url,
            )
        stored.check_file(COMMON_STATE_FNAME, data)
        loaded = load_bytes(data, url)
        if not isinstance(loaded, dict):
            raise errors.damaged(url, f"holds a {type(loaded).__name__}, not a dict")
        return loaded

    def load_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> StateDict:
        """Return the same structure with each ShardedObject replaced by its stored value.

        Raises:
            MissingKeyError: an object is not in the checkpoint.
            UnsafeObjectError, DamagedCheckpointError: see :func:`load_bytes`.
        """
        stored = context_of(checkpoint_dir).stored
        sizes = {} if stored.root is None else stored.root.file_bytes
        objects, url = list(nested_values(sharded_objects_state_dict)), stored.location.url
        values: dict[int, Any] = {}
        for name_of in OBJECT_NAMES:
            left = [(one, name_of(one)) for one in objects if id(one) not in values]
            wanted = [(one, name) for one, name in left if is_inside(name)]
            for some in in_rounds(wanted, lambda of: sizes.get(of[1], 0), ROUND_BYTES, ROUND_FILES):
                names = [name for _, name in some]
                files = stored.location.read_many(names, [sizes.get(name) for name in names])
                for (sharded, name), data in zip(some, files, strict=True):
                    if data is not None:
                        stored.check_file(name, data)
                        key = sharded.unique_key
                        values[id(sharded)] = load_file(name, data, f"{url}/{name}", key)
        for sharded in objects:
            if id(sharded) not in values:
                raise _missing_object(stored, sharded)
        loaded: StateDict = dict_list_map_outplace(
            lambda sharded: values[id(sharded)], sharded_objects_state_dict
        )
        return loaded

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """Return unique key -> ShardedObject without data, for each stored object."""
        found: ShardedStateDict = {}
        for unique_key in context_of(checkpoint_dir).stored.object_files():
            with suppress(ValueError):  # another program's file
                sharded = ShardedObject.empty_from_unique_key(unique_key)
                found[sharded.unique_key] = sharded
        return found


class JsonCommonLoadStrategy(TorchCommonLoadStrategy):
    """Load strategy for common values in the root document.

    Values that have no JSON form are stored in separate files, like sharded objects.
    """

    _backend, _versions = record.BACKEND, (record.VERSION,)

    def load_common(self, checkpoint_dir: str | Path) -> StateDict:
        """Load the common part. Any rank may call it; it waits for no other.

        Raises:
            NotACheckpointError: the root document is missing.
            DamagedCheckpointError: the record in the root document is malformed.
            UnsafeObjectError: a value without a JSON form needs a class that is not allowed.
        """
        stored = context_of(checkpoint_dir).stored
        url = stored.location.url
        if stored.root is None:
            raise errors.NotACheckpointError(
                f"{url}/zarr.json is missing: {url} is not a complete checkpoint", url=url
            )
        found = record.StateRecord.from_root(stored.root.attributes, url) or record.StateRecord()
        wanted = {key: ShardedObject(key, None, (1,), (0,)) for key in found.files}
        objects = self.load_sharded_objects(wanted, checkpoint_dir)
        return found.nested(url, objects, numbered=True)


def _missing_object(stored: StoredCheckpoint, sharded: ShardedObject) -> errors.MissingKeyError:
    """Return the error for an object that has no file.

    Raises:
        DamagedCheckpointError: the commit names a file of this object.
    """
    url = stored.location.url
    for name_of in OBJECT_NAMES:
        stored.check_file(name_of(sharded), None)
    beside = [n for n in stored.location.listing(node_name(sharded.key)) if object_place(n)][:4]
    hint = f"no part of this key is stored.{LEAVES_OUT}"
    if beside:
        hint = (
            f"stored parts of this key: {beside}. Sharded objects are loaded in the grid that they "
            "were saved in: ask for these parts, by their offset and global shape, or leave the "
            "key out of the state dict"
        )
    return errors.MissingKeyError(
        f"object {sharded.unique_key!r} is not in the checkpoint {url}; {hint}",
        key=sharded.key,
        url=url,
    )


def require_same_content(stored: StoredCheckpoint, common: bytes) -> None:
    """Compare the ``content_metadata`` in a root document that has no checksum with ``common.pt``.

    Raises:
        DamagedCheckpointError: they differ, or ``common`` cannot be read.
    """
    root = stored.root
    if root is None or root.is_summed or root.is_rewritten:
        return
    try:
        loaded = load_bytes(common, f"{stored.location.url}/{COMMON_STATE_FNAME}")
    except errors.UnsafeObjectError:
        return
    saved = loaded.get(CONTENT_METADATA_KEY) if isinstance(loaded, dict) else None
    copy = root.attributes.get(CONTENT_METADATA_KEY)
    if copy is None and "converted_from" in root.about:
        return  # only saves have the copy
    for name, value in saved.items() if isinstance(saved, dict) else ():
        with suppress(TypeError, ValueError):  # the text of another value may not be the same again
            document = json.loads(json.dumps(value, allow_nan=False))
            if not isinstance(copy, dict) or copy.get(str(name), ...) != document:
                raise root.damaged(f"has another content_metadata[{name!r}] than common.pt")
