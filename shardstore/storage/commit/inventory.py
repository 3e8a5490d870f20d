"""Which objects at a target belong to checkpoints, and whether one is committed there.

Judged by names, by the documents that commit a checkpoint, and by what attempts said that they
would write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from shardstore.errors import DamagedCheckpointError, FormatVersionError, NotACheckpointError
from shardstore.storage.commit.claims import ATTEMPTS, CLEARING, DELETING, NODES
from shardstore.storage.commit.identity import is_foreign_node
from shardstore.storage.format.documents import parse_root
from shardstore.storage.format.names import COMMON_STATE_NAME, MANIFEST_NAME
from shardstore.storage.movers.parallel import run_together
from shardstore.storage.stores.location import Location
from shardstore.storage.stores.object_io import read_objects

__all__ = [
    "Nodes",
    "committed_among",
    "deletion_rounds",
    "described_nodes",
    "is_committed",
    "known_nodes",
    "leftovers",
    "own_names",
]


def described_nodes(location: Location, names: Collection[str]) -> frozenset[str]:
    """Those of some names directly below a checkpoint that are nodes of its arrays.

    Reads nothing where there are no names, and the manifest only where the root does not know all
    of them: it still names arrays whose removal was cut short.

    Args:
        location: the checkpoint, or what is left of it.
        names: of folders.

    Raises:
        StorageError: the store refused.
    """
    unknown = set(names)
    for nodes_of in (_of_root, _of_manifest):
        if unknown:
            unknown -= nodes_of(location)
    return frozenset(names) - unknown


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


_OWN = frozenset({"zarr.json", "metadata.json", COMMON_STATE_NAME, MANIFEST_NAME, ".metadata"})
_COMMITS = ("zarr.json", "metadata.json")
_CHUNK = re.compile(r"c([./]\d+)*|\d+([./]\d+)*")
_PART = re.compile(
    r"zarr\.json|\.zarray|\.zattrs|c([./]\d+)*|\d+([./]\d+)*|shard_[\d._]*\.(pt|json)"
)


def is_committed(location: Location, names: Sequence[str] | None = None) -> bool:
    """Whether a committed checkpoint is there: ours, or one with a ``metadata.json`` of another
    backend. Two requests, at once.

    Args:
        location: the target.
        names: what lies directly below it, where that is known already.

    Raises:
        StorageError: the store refused.
    """
    if names is not None:
        return committed_among(location, names)
    store = location.remote
    root, config = run_together(
        # One byte tells as much as all of a large document.
        lambda: store.read_range("zarr.json", 0, 1),
        lambda: store.read_range("metadata.json", 0, None),
    )
    return root is not None or (config is not None and _is_commit(config))


def committed_among(location: Location, names: Sequence[str]) -> bool:
    """The same, where it is known what is there."""
    if "zarr.json" in names or "metadata.json" not in names:
        return "zarr.json" in names
    config = location.remote.read_range("metadata.json", 0, None)
    return config is not None and _is_commit(config)


def _is_commit(text: bytes) -> bool:
    """Whether a ``metadata.json`` is the commit by itself, and no root document is to come."""
    try:
        config = json.loads(text)
    except ValueError:
        return False
    if not isinstance(config, dict):
        return False
    version = config.get("sharded_backend_version", 1)
    committed_by_root = config.get("sharded_backend") == "zarr" and version != 1
    return not committed_by_root


class Nodes(NamedTuple):
    """What is known of the folders at a target, beside their names.

    Attributes:
        ours: arrays of ours.
        foreign: of other programs.
    """

    ours: frozenset[str] = frozenset()
    foreign: frozenset[str] = frozenset()


_NOTHING = Nodes()


def known_nodes(location: Location, names: Collection[str]) -> Nodes:
    """Ours are those that attempts said they would write, a request for each that said so, and
    those that the root or the manifest describes, a request or two. Of others that have a document
    of Zarr v3, that is read: it says whose it is.

    Args:
        location: the target.
        names: all object names below it.

    Raises:
        StorageError: the store refused.
    """
    documented = _documented(names)
    folders = documented | _undocumented(names)
    ours = _announced_nodes(location, names) | described_nodes(location, folders)
    asked = sorted(documented - ours)
    texts = read_objects(location, [f"{node}/zarr.json" for node in asked])
    found = zip(asked, texts, strict=True)
    foreign = {node for node, text in found if text is not None and is_foreign_node(text)}
    return Nodes(ours, frozenset(foreign))


def _documented(names: Iterable[str]) -> set[str]:
    """Folders with a document of Zarr v3."""
    parts = (name.partition("/") for name in names)
    return {first for first, _, rest in parts if rest == "zarr.json"}


def _undocumented(names: Collection[str]) -> set[str]:
    """Folders with chunks of layout 2 and without the document of an array."""
    found = set()
    for name in names:
        first, _, rest = name.partition("/")
        if rest.startswith("c") and _CHUNK.fullmatch(rest):
            found.add(first)
    return found - _documented(names)


def _announced_nodes(location: Location, names: Iterable[str]) -> frozenset[str]:
    found: set[str] = set()
    for name in names:
        folder, _, last = name.rpartition("/")
        if folder != ATTEMPTS or not NODES.fullmatch(last):
            continue
        try:
            nodes = json.loads(location.remote.read(name))
        except (FileNotFoundError, ValueError):
            continue
        found.update(node for node in nodes if isinstance(node, str))
    return frozenset(found)


def own_names(names: Iterable[str], known: Nodes = _NOTHING) -> list[str]:
    """Those of all object names below a target that belong to checkpoints, finished or not.

    A checkpoint further below, foreign Zarr arrays and groups, and anything else is left out. What
    only looks like a chunk (``logs/1``) counts beside the document of an array, and in a node that
    is known otherwise; where claims or marks say that a save or a deletion died here, those of
    layout 2 count without either: the documents come last. Those of layout 1 are arrays' of ours
    beside a checkpoint's documents, or a deletion's mark.

    Args:
        names: all that there are.
        known: see :func:`known_nodes`.
    """
    names = list(names)
    died = any(name.startswith(f"{ATTEMPTS}/") and "/probe-" not in name for name in names)
    old = {name.partition("/")[0] for name in names if name.endswith("/.zarray")}
    arrays = _documented(names) | known.ours | (old if _may_be_layout_1(names) else set())
    documents = {name for name in names if name.endswith(("/zarr.json", "/metadata.json"))}
    # A folder with documents in folders below it is a group or a checkpoint of its own.
    foreign = {name.partition("/")[0] for name in documents if name.count("/") > 1}
    foreign |= {name.partition("/")[0] for name in documents if name.endswith("/metadata.json")}
    foreign |= known.foreign | (old - arrays)
    own = []
    for name in names:
        first, _, rest = name.partition("/")
        if not rest:
            if first in _OWN or first.endswith(".distcp"):
                own.append(name)
        elif first == ATTEMPTS:
            own.append(name)
        elif first not in foreign and _PART.fullmatch(rest):
            chunk_like = _CHUNK.fullmatch(rest)
            if first in arrays or not chunk_like or (died and rest.startswith("c")):
                own.append(name)
    return own


def _may_be_layout_1(names: Collection[str]) -> bool:
    """Whether a checkpoint of layout 1 is there, or what a deletion left of one."""
    if "zarr.json" in names:
        return False
    if "metadata.json" in names or DELETING in names:
        return True
    return any(name.startswith(f"{ATTEMPTS}/") and CLEARING.search(name) for name in names)


def leftovers(names: Iterable[str], known: Nodes = _NOTHING) -> list[str]:
    """What checkpoints and dead attempts left, of all names at a target, but for the claims;
    arguments as :func:`own_names`."""
    own = own_names(names, known)
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
    rounds = [[name] for name in _COMMITS if name in there]
    for part in (sorted(there - last - set(_COMMITS)), sorted(last)):
        rounds += [part[i : i + most] for i in range(0, len(part), most)]
    return rounds
