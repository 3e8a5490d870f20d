"""The non-sharded part and sharded objects: small files written by torch, loaded with
``weights_only``.

``common.pt`` is rank 0's; a sharded object is one file, ``<key>/shard_<offset>_<shape>.pt``, of
the rank that holds it as main
replica. Nothing is unpickled unasked: tensors, containers and plain values load; a class loads if
it is harmless and known here,
or if the program allowed it (``torch.serialization.add_safe_globals``).
"""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import fractions
import io
import pathlib
import pickle
import re
import types
import uuid
from collections.abc import Iterator, Sequence
from logging import getLogger
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardstore.dict_utils import dict_list_map_outplace, nested_values
from shardstore.errors import (
    CheckpointingException,
    DamagedCheckpointError,
    KeyNameError,
    MissingKeyError,
    NotACheckpointError,
    UnsafeObjectError,
)
from shardstore.mapping import ShardedObject, ShardedStateDict, StateDict, is_main_replica
from shardstore.ranks import Ranks
from shardstore.storage.handed import read_document
from shardstore.storage.location import Location
from shardstore.storage.names import COMMON_STATE_NAME, key_of, node_name
from shardstore.storage.torch_archive import verify_archive
from shardstore.strategies.base import (
    LoadCommonStrategy,
    SaveCommonStrategy,
    StrategyAction,
    register_default_strategy,
)
from shardstore.strategies.compatibility import require_backend, require_version
from shardstore.strategies.opened import open_checkpoint
from shardstore.strategies.session import session_of

__all__ = [
    "COMMON_STATE_FNAME",
    "TorchCommonLoadStrategy",
    "TorchCommonSaveStrategy",
    "register_default_common_strategies",
]

logger = getLogger(__name__)

COMMON_STATE_FNAME = COMMON_STATE_NAME
BACKEND, VERSION = "torch", 1


def _safe_classes() -> list[Any]:
    """Classes that only hold values.

    Building them from a file runs no code of the file's choosing.
    """
    scalars = [type(np.dtype(code)) for code in "?bhilqBHILQefdFD"]
    found = [
        argparse.Namespace,
        types.SimpleNamespace,
        collections.OrderedDict,
        collections.Counter,
        collections.deque,
        datetime.date,
        datetime.datetime,
        datetime.time,
        datetime.timedelta,
        datetime.timezone,
        decimal.Decimal,
        fractions.Fraction,
        uuid.UUID,
        pathlib.Path,
        pathlib.PosixPath,
        pathlib.PurePosixPath,
        io.BytesIO,
        slice,
        range,
        bytearray,
        complex,
        np.ndarray,
        np.dtype,
        *scalars,
    ]
    for module in ("numpy._core.multiarray", "numpy.core.multiarray"):
        try:
            loaded = __import__(module, fromlist=["_reconstruct"])
        except ImportError:
            continue
        found += [loaded._reconstruct, loaded.scalar]
        break
    return found


# What torch.load raises on damaged files.
_BROKEN = (
    RuntimeError,
    EOFError,
    ValueError,
    OSError,
    KeyError,
    TypeError,
    AttributeError,
)


def _dump(value: object) -> bytes:
    out = io.BytesIO()
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)  # a program may have switched them off
    try:
        torch.save(value, out)
    finally:
        torch.serialization.set_crc32_options(before)
    return out.getvalue()


def _load(data: bytes, url: str, key: str | None = None) -> Any:
    """Load without running code from the file.

    Raises:
        UnsafeObjectError: a class that is not allowed; says how to allow it.
        DamagedCheckpointError: not a file of torch.
    """
    about = f" (object {key!r})" if key is not None else ""
    try:
        verify_archive(data)
        with torch.serialization.safe_globals(_safe_classes()):
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        text = str(error)
        found = re.search(r"GLOBAL ([\w.]+)", text)
        found = found or re.search(r"`?([\w]+\.[\w.]+)`? was not an allowed", text)
        name = found.group(1) if found else None
        if name is None and "nsupported" not in text:
            raise DamagedCheckpointError(
                f"{url}{about} can not be read ({text.splitlines()[0]}); load an earlier "
                "checkpoint",
                key=key,
                url=url,
            ) from error
        what = f"class {name}" if name else "a class"
        raise UnsafeObjectError(
            f"{url}{about} needs {what}, which was not allowed to be loaded. If you trust this "
            "checkpoint, allow it "
            f"before loading: torch.serialization.add_safe_globals([{name or 'TheClass'}])",
            key=key,
            url=url,
        ) from error
    except _BROKEN as error:
        raise DamagedCheckpointError(
            f"{url}{about} can not be read ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else ''}); "
            "load an earlier checkpoint",
            key=key,
            url=url,
        ) from error


def load_bytes(data: bytes, url: str, key: str | None = None) -> Any:
    """What ``torch.save`` wrote, loaded without running code from it; errors as :func:`_load`."""
    return _load(data, url, key)


def object_file(sharded: ShardedObject) -> str:
    """Name of a sharded object's file below the checkpoint."""
    return _file_of(sharded.unique_key)


def object_document(sharded: ShardedObject) -> tuple[str, bytes]:
    """Name and content of a sharded object's file.

    Raises:
        CheckpointingException: it can not be pickled.
    """
    try:
        return object_file(sharded), _dump(sharded.data)
    except Exception as error:
        raise CheckpointingException(
            f"object {sharded.unique_key!r} can not be pickled: {type(error).__name__}: {error}",
            key=sharded.key,
        ) from error


def _file_of(unique_key: str) -> str:
    key, _, shard = unique_key.rpartition("/")
    return f"{node_name(key)}/{shard}.pt"


class TorchCommonSaveStrategy(SaveCommonStrategy):
    """Save strategy for the common part and sharded objects."""

    def __init__(self, backend: str = BACKEND, version: int = VERSION) -> None:
        super().__init__(backend, version)

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Yes."""
        return True

    def save_common(self, common_state_dict: StateDict, checkpoint_dir: str | Path) -> None:
        """Write the common part; only the coordinator's is kept. Every rank may call it; it waits
        for none.

        Raises:
            CheckpointingException: something in it can not be pickled.
            StorageError: the store refused.
        """
        if not Ranks.current().is_coordinator:
            return
        try:
            data = _dump(common_state_dict)
        except Exception as error:
            raise CheckpointingException(
                f"the common (non-sharded) state can not be pickled: {type(error).__name__}: "
                f"{error}; keep such values out with "
                "LocalNonpersistentObject",
                url=str(checkpoint_dir),
            ) from error
        location = Location.of(checkpoint_dir)
        session = session_of(location)
        write = location.write if session is None else session.put
        write(COMMON_STATE_FNAME, data)

    def save_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> None:
        """Write the sharded objects that this rank holds as main replica. Waits for no other rank.

        Raises:
            CheckpointingException: an object can not be pickled.
            StorageError: the store refused.
        """
        location = Location.of(checkpoint_dir)
        session = session_of(location)
        write = location.write if session is None else session.put
        for sharded in nested_values(sharded_objects_state_dict):
            if not isinstance(sharded, ShardedObject) or not is_main_replica(sharded.replica_id):
                continue
            write(*object_document(sharded))
            if session is not None:
                session.manifest.objects.append(sharded.unique_key)


class TorchCommonLoadStrategy(LoadCommonStrategy):
    """Load strategy for the common part and sharded objects."""

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Yes."""
        return True

    def load_common(self, checkpoint_dir: str | Path) -> StateDict:
        """Load the common part.

        Raises:
            NotACheckpointError: there is none.
            UnsafeObjectError, DamagedCheckpointError: see :func:`_load`.
        """
        location = Location.of(checkpoint_dir)
        url = f"{location.url}/{COMMON_STATE_FNAME}"
        try:
            data = read_document(location, COMMON_STATE_FNAME)
        except FileNotFoundError:
            raise NotACheckpointError(
                f"{url} is missing: {location.url} is no whole checkpoint; it holds "
                f"{location.listing()[:8]}",
                url=url,
            ) from None
        open_checkpoint(location).check_file(COMMON_STATE_FNAME, data)
        loaded = _load(data, url)
        if not isinstance(loaded, dict):
            raise DamagedCheckpointError(
                f"{url} holds a {type(loaded).__name__}, not a dict", url=url
            )
        return loaded

    def load_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> StateDict:
        """Load sharded objects; the same structure with the objects themselves.

        Raises:
            MissingKeyError: an object is not in the checkpoint.
            UnsafeObjectError, DamagedCheckpointError: see :func:`_load`.
        """
        location = Location.of(checkpoint_dir)

        def load_one(sharded: Any) -> Any:
            if not isinstance(sharded, ShardedObject):
                raise CheckpointingException(f"{type(sharded).__name__} is no sharded object")
            data = _read_object(location, sharded)
            return _load(data, f"{location.url}/{object_file(sharded)}", sharded.unique_key)

        loaded: StateDict = dict_list_map_outplace(load_one, sharded_objects_state_dict)
        return loaded

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """Unique key -> sharded object without data, for each object stored."""
        location = Location.of(checkpoint_dir)
        found: ShardedStateDict = {}
        for node, name in _object_files(location):
            unique_key = f"{key_of(node) or node}/{name[: -len('.pt')]}"
            try:
                sharded = ShardedObject.empty_from_unique_key(unique_key)
            except (KeyNameError, ValueError):
                continue
            found[sharded.unique_key] = sharded
        return found

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise unless the common part was written by this backend."""
        require_backend("the common part", loaded_backend, BACKEND, "common_strategy")

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise unless the common part was written by a version that this one reads."""
        require_version("the common part", loaded_version, BACKEND, VERSION)


def _object_files(location: Location) -> Iterator[tuple[str, str]]:
    """Node and name of all files of sharded objects."""
    if location.is_local:
        paths = (
            (node, name)
            for node in location.listing()
            if location.is_dir(node)
            for name in location.listing(node)
        )
    else:
        # One listing, a thousand names a request, instead of one a folder.
        paths = (
            (node, name) for node, _, name in (p.partition("/") for p in location.remote.walk())
        )
    for node, name in paths:
        if name.startswith("shard_") and name.endswith(".pt"):
            yield node, name


def _read_object(location: Location, sharded: ShardedObject) -> bytes:
    names: Sequence[str] = dict.fromkeys((object_file(sharded), f"{sharded.unique_key}.pt"))  # type: ignore[assignment]
    for name in names:
        if ".." in name.split("/"):
            continue
        try:
            data = read_document(location, name)
        except FileNotFoundError:
            continue
        open_checkpoint(location).check_file(name, data)
        return data
    beside = [n for n in location.listing(node_name(sharded.key)) if n.endswith(".pt")][:4]
    hint = f"; stored parts of this key: {beside}" if beside else "; no part of this key is stored"
    raise MissingKeyError(
        f"object {sharded.unique_key!r} is not in the checkpoint {location.url}{hint}. Sharded "
        "objects can not be loaded under another "
        "sharding",
        key=sharded.key,
        url=location.url,
    )


def register_default_common_strategies() -> None:
    """Register the default strategies of the common part."""
    register_default_strategy(
        StrategyAction.SAVE_COMMON, BACKEND, VERSION, TorchCommonSaveStrategy(BACKEND, VERSION)
    )
    register_default_strategy(
        StrategyAction.LOAD_COMMON, BACKEND, VERSION, TorchCommonLoadStrategy()
    )


register_default_common_strategies()
