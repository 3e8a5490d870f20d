"""Finds which files at a place belong to a checkpoint, and whether one is committed there.

It uses the names, the documents that commit a checkpoint, and the lists of attempts. The rules are
the same for folders and object stores; for a folder they use the names of two levels.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from shardstore.errors import DamagedCheckpointError, FormatVersionError, NotACheckpointError
from shardstore.storage.commit.identity import is_foreign_node, what_else
from shardstore.storage.format.documents import parse_root
from shardstore.storage.format.names import (
    COMMON_STATE_NAME,
    CONFIG_NAME,
    DCP_METADATA_NAME,
    INTEGRITY_NAME,
    MANIFEST_NAME,
)
from shardstore.storage.stores.location import Location

ATTEMPTS = ".attempts"
"""Folder of the claims and marks, below a target in an object store."""
DELETING = f"{ATTEMPTS}/deleting"
"""Mark of a deletion that is under way, or died."""
COMMITS = ("zarr.json", CONFIG_NAME)

_OWN = frozenset({*COMMITS, COMMON_STATE_NAME, MANIFEST_NAME, DCP_METADATA_NAME, INTEGRITY_NAME})
_MARK = re.compile(rf"(?:{ATTEMPTS}/)?(\d{{6,}})\.(\w+)")
_NODES = re.compile(rf"{ATTEMPTS}/\d{{6,}}\.nodes-\d+\.json")
_CHUNK = re.compile(r"|c([./]\d+)*|\d+([./]\d+)*")
"""Of an array without any there is its empty folder."""
_DOCUMENT = re.compile(r"zarr\.json|\.zarray|\.zattrs")
_OBJECT = re.compile(r"shard_[\d._]*\.(pt|json)")


def numbers(names: Iterable[str], *kinds: str) -> list[int]:
    """Return the numbers of the claims (``json``) or marks (``committing``, ``clearing``) of some
    kinds among names."""
    found = map(_MARK.fullmatch, names)
    return [int(mark[1]) for mark in found if mark is not None and mark[2] in kinds]


def is_checkpoint(location: Location) -> bool:
    """Return whether a committed checkpoint is there (ours, or one with a ``metadata.json`` of
    another backend).

    An array's folder inside a checkpoint is none, nor is a Zarr group of another program.
    """
    if location.is_local:
        has_config = location.exists(CONFIG_NAME)
        committed = has_config or location.exists("zarr.json")
    else:
        names = location.listing()
        has_config, committed = CONFIG_NAME in names, is_committed(location, names)
    return committed and (has_config or what_else(location) is None)


def is_committed(location: Location, names: Collection[str] | None = None) -> bool:
    """Return whether a committed checkpoint is in an object store: ours, or one with a
    ``metadata.json`` of another backend.

    Args:
        location: the target.
        names: what lies below it, where that is known already.

    Raises:
        StorageError: the store failed.
    """
    store = location.remote
    if names is None:
        # One byte tells as much as all of a large document.
        has_root = store.read_range("zarr.json", 0, 1) is not None
    else:
        has_root = "zarr.json" in names
    if has_root or (names is not None and CONFIG_NAME not in names):
        return has_root
    try:
        config = json.loads(store.read_range(CONFIG_NAME, 0, None) or b"")
    except ValueError:
        return False
    if not isinstance(config, dict):
        return False
    # With layout 2 a root document is to come.
    version = config.get("sharded_backend_version", 1)
    return config.get("sharded_backend") != "zarr" or version == 1


def names_at(folder: Location) -> list[str]:
    """Return the names in a local folder, and in the folders in it; ``NAME/`` for an empty one."""
    found = []
    for name in folder.listing():
        if folder.is_dir(name) and not folder.is_link(name):
            found += [f"{name}/{entry}" for entry in folder.listing(name) or ("",)]
        else:
            found.append(name)
    return found


def known_nodes(location: Location, names: Collection[str]) -> tuple[set[str], set[str]]:
    """Folders at a target that are arrays of ours, and those that are other programs'.

    Ours are those that attempts said they would write, a request for each that said so, and
    those that the root or the manifest describes, a request or two. Of others that have a document
    of Zarr v3, that is read: it says whose it is.

    Args:
        location: the target.
        names: all object names below it, or :func:`names_at` it.

    Raises:
        StorageError: the store failed.
    """
    documented = _documented(names)
    parts = (name.partition("/") for name in names)
    unknown = documented | {
        first
        for first, below, rest in parts
        if below and rest[:1] in ("", "c") and _CHUNK.fullmatch(rest)
    }
    ours = set(_announced(location, names))
    # The manifest still names arrays whose removal from the root was cut short.
    for described in (_of_root, _of_manifest):
        if not unknown <= ours:
            ours |= unknown & described(location)
    if location.is_local and "zarr.json" not in names and not _OWN.isdisjoint(names):
        ours |= {name.partition("/")[0] for name in names if name.endswith("/.zarray")}
    asked = sorted(documented - ours)
    texts = _read(location, [f"{node}/zarr.json" for node in asked])
    found = zip(asked, texts, strict=True)
    foreign = {node for node, text in found if text is None or is_foreign_node(text)}
    return ours, foreign


def _documented(names: Iterable[str]) -> set[str]:
    """Folders with a document of Zarr v3."""
    parts = (name.partition("/") for name in names)
    return {first for first, _, rest in parts if rest == "zarr.json"}


def _read(location: Location, names: Sequence[str]) -> Sequence[bytes | None]:
    if not location.is_local:
        from shardstore.storage.stores.object_io import read_objects

        return read_objects(location, names)
    found: list[bytes | None] = []
    for name in names:
        try:
            found.append(location.read(name))
        except FileNotFoundError:
            found.append(None)
        except DamagedCheckpointError:
            found.append(b"")
    return found


def _of_root(location: Location) -> set[str]:
    try:
        root = parse_root(location.read("zarr.json"), f"{location.url}/zarr.json")
    except (FileNotFoundError, NotACheckpointError, DamagedCheckpointError, FormatVersionError):
        return set()
    # What another program's group names is not ours.
    return set() if root.format_version is None else set(root.texts)


def _of_manifest(location: Location) -> set[str]:
    # It brings NumPy, which a deletion of arrays that have documents does without.
    from shardstore.storage.format.manifest import Manifest

    try:
        data = location.read(MANIFEST_NAME)
        manifest = Manifest.from_bytes(data, f"{location.url}/{MANIFEST_NAME}")
    except (FileNotFoundError, DamagedCheckpointError):
        return set()
    return {node for node, _, _ in manifest.arrays}


def _announced(location: Location, names: Iterable[str]) -> Iterator[str]:
    for name in filter(_NODES.fullmatch, names):
        try:
            nodes = json.loads(location.read(name))
        except (FileNotFoundError, ValueError):
            continue
        yield from (node for node in nodes if isinstance(node, str))


def own_names(
    names: Collection[str], ours: Collection[str] = (), others: Collection[str] = ()
) -> list[str]:
    """Those of all names below a target that belong to checkpoints, finished or not.

    A checkpoint further below, foreign Zarr arrays and groups, and anything else is left out. What
    only looks like a chunk (``logs/1``) counts beside the document of an array, and in a node that
    is known otherwise; where claims or marks say that a save or a deletion died here, those of
    layout 2 count without either: the documents come last. Those of layout 1 are arrays' of ours
    beside a checkpoint's documents, or a deletion's mark. Sharded objects are ours where anything
    says that a checkpoint is, or was to be, here.

    Args:
        names: all that there are.
        ours: arrays of ours, see :func:`known_nodes`.
        others: folders of other programs, see there.
    """
    died = any(name.startswith(f"{ATTEMPTS}/") and "/probe-" not in name for name in names)
    old = {name.partition("/")[0] for name in names if name.endswith("/.zarray")}
    arrays = _documented(names).union(ours)
    if "zarr.json" not in names and (
        CONFIG_NAME in names or DELETING in names or numbers(names, "clearing")
    ):
        arrays |= old
    documents = [name for name in names if name.endswith(("/zarr.json", f"/{CONFIG_NAME}"))]
    # A folder with documents in folders below it is a group or a checkpoint of its own.
    foreign = {
        name.partition("/")[0]
        for name in documents
        if name.count("/") > 1 or name.endswith(f"/{CONFIG_NAME}")
    }
    foreign |= set(others) | (old - arrays)
    evident = died or not _OWN.isdisjoint(names)

    def is_own(name: str) -> bool:
        first, below, rest = name.partition("/")
        if not below:
            # A document, or what a death left of one that was to take its place.
            return first.partition(".new-")[0] in _OWN or first.endswith(".distcp")
        if first == ATTEMPTS:
            return True
        if first in foreign:
            return False
        if _CHUNK.fullmatch(rest):
            return first in arrays or (died and rest.startswith("c"))
        return bool(_DOCUMENT.fullmatch(rest) or (evident and _OBJECT.fullmatch(rest)))

    return list(filter(is_own, names))


def remains(location: Location, names: Collection[str]) -> list[str]:
    """What checkpoints and dead attempts left, of all names at a target, but for the claims."""
    own = own_names(names, *known_nodes(location, names))
    return [name for name in own if not name.startswith(f"{ATTEMPTS}/")]


def deletion_rounds(names: Iterable[str], most: int) -> list[list[str]]:
    """In which order objects are deleted: the commits first, each by itself, and last what tells
    that chunks are ours: the documents of arrays, the manifest, the common part.

    Args:
        names: of the objects.
        most: how many go in one round.
    """
    there = set(names)
    last = {name for name in there if name.endswith(("/.zarray", "/zarr.json"))}
    last |= {MANIFEST_NAME, COMMON_STATE_NAME} & there
    rounds = [[name] for name in COMMITS if name in there]
    for part in (sorted(there - last - set(COMMITS)), sorted(last)):
        rounds += [part[i : i + most] for i in range(0, len(part), most)]
    return rounds
