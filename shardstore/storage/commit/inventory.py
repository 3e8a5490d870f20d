"""Find out which files at a place belong to a checkpoint, and keep their hashes.

The rules use the names, the documents that commit a checkpoint, and the lists of arrays that
attempts store. They are the same for folders and object stores.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress

from shardstore.errors import DamagedCheckpointError, FormatVersionError, NotACheckpointError
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.commit.identity import ATTEMPTS, is_foreign_node
from shardstore.storage.format.names import (
    COMMITS,
    COMMON_STATE_NAME,
    CONFIG_NAME,
    DCP_METADATA_NAME,
    INTEGRITY_NAME,
    MANIFEST_NAME,
    MODEL_COMMITS,
    OWN_FILES,
    WEIGHTS,
    object_place,
    require_inside,
)
from shardstore.storage.format.packs import is_pack
from shardstore.storage.runtime.parallel import run_batched
from shardstore.storage.stores.location import Location

DELETING = f"{ATTEMPTS}/deleting"
"""Mark of a deletion that is still running or whose process died."""
HASHED_BYTES = 16 * 1024 * 1024
"""A file is read in parts of this size to compute its hash."""

_MARK = re.compile(rf"(?:{ATTEMPTS}/)?(\d{{6,}})\.(\w+)")
_NODES = re.compile(rf"{ATTEMPTS}/\d{{6,}}\.nodes-\d+\.json")
_CHUNK = re.compile(r"|c([./]\d+)*|\d+([./]\d+)*")
"""Name of a chunk below its array. The empty name is that of an object ``NAME/``, which some
programs create as a folder."""
_DOCUMENTS = ("zarr.json", ".zarray", ".zattrs")
_ROOT_BELOW = re.compile(r"([^/]+)/(?:.+/zarr\.json|(?:.+/)?metadata\.json)", re.DOTALL)
"""A document that shows that the first folder is a group or a checkpoint of its own."""


def numbers(names: Iterable[str], *kinds: str) -> list[int]:
    """Return the numbers of all claims (kind ``json``) and marks (kinds ``committing``,
    ``clearing``) of the given kinds among names."""
    found = map(_MARK.fullmatch, names)
    return [int(mark[1]) for mark in found if mark is not None and mark[2] in kinds]


def known_nodes(location: Location, names: Collection[str]) -> tuple[set[str], set[str]]:
    """Return the folders at a target that are arrays of shardstore, and the folders of other
    programs.

    Arrays of shardstore are those that attempts announced (one request per announcement) and those
    that the root document or the manifest describes (one or two requests). For every other folder
    with a Zarr v3 document, the document is read, because it shows which program wrote it.

    Args:
        location: the target.
        names: the names of all files or objects below it.

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
    ours: set[str] = set()
    for name in filter(_NODES.fullmatch, names):  # what attempts announced
        with suppress(FileNotFoundError, RecursionError, TypeError, ValueError):
            ours |= {node for node in json.loads(location.read(name)) if isinstance(node, str)}
    # The manifest still lists the arrays after an interrupted deletion removed the root.
    described = _described(location)
    while not unknown <= ours and (nodes := next(described, None)) is not None:
        ours |= unknown & nodes
    if location.is_local and "zarr.json" not in names and not set(OWN_FILES).isdisjoint(names):
        ours |= {name.partition("/")[0] for name in names if name.endswith("/.zarray")}
    asked = sorted(documented - ours)
    foreign: set[str] = set()

    def read(nodes: Sequence[str]) -> None:
        for node in nodes:
            with suppress(DamagedCheckpointError):  # it is no regular file
                text = location.read_range(f"{node}/zarr.json")
                if text is None or is_foreign_node(text):
                    foreign.add(node)

    run_batched(asked, read, threads=location.threads())
    return ours, foreign


def _documented(names: Iterable[str]) -> set[str]:
    """Return the folders with a Zarr v3 document."""
    parts = (name.partition("/") for name in names)
    return {first for first, _, rest in parts if rest == "zarr.json"}


def _described(location: Location) -> Iterator[set[str]]:
    """Yield the arrays that the root document describes, and those that the manifest describes."""
    stored = StoredCheckpoint(location)
    with suppress(NotACheckpointError, DamagedCheckpointError, FormatVersionError):
        root = stored.root
        # The root group of another program describes no arrays of shardstore.
        if root is not None and root.format_version is not None:
            yield set(root.texts)
    with suppress(DamagedCheckpointError):
        if (manifest := stored.manifest) is not None:
            yield {array.node for array in manifest.arrays}


def own_names(
    names: Collection[str], ours: Collection[str] = (), others: Collection[str] = ()
) -> list[str]:
    """Return the names below a target that belong to checkpoints, committed or not.

    No name belongs to one unless a commit (also that of PyTorch DCP), a claim, a mark, or the
    manifest of known arrays shows that there is or was one. Checkpoints in subfolders, Zarr arrays
    and groups of other programs, and all other files are left out. A name that only looks like a
    chunk (``logs/1``) belongs to a checkpoint if its folder has an array document or is in
    ``ours``. If claims or marks show that a save or deletion died here, chunks of layout 2 belong
    to it even without a document, which may be written after them. Arrays of layout 1 belong to a
    checkpoint beside its documents or the mark of a deletion.

    Args:
        names: all names below the target.
        ours: arrays of shardstore, see :func:`known_nodes`.
        others: folders of other programs, see :func:`known_nodes`.
    """
    died = any(name.startswith(f"{ATTEMPTS}/") and "/probe-" not in name for name in names)
    old = {name.partition("/")[0] for name in names if name.endswith("/.zarray")}
    arrays = _documented(names).union(ours)
    if "zarr.json" not in names and (
        CONFIG_NAME in names or DELETING in names or numbers(names, "clearing")
    ):
        arrays |= old
    foreign = {found[1] for found in map(_ROOT_BELOW.fullmatch, names) if found is not None}
    foreign |= set(others) | (old - arrays)
    has_dcp = DCP_METADATA_NAME in names
    is_listed = MANIFEST_NAME in names and bool(ours)
    if not (died or has_dcp or is_listed or any(name in names for name in COMMITS)):
        return []

    def is_own(name: str) -> bool:
        first, below, rest = name.partition("/")
        if not below:
            # A document, or the temporary file of a process that died while writing one.
            is_data = (died or has_dcp) and first.endswith(".distcp")
            return is_data or first.partition(".new-")[0] in OWN_FILES
        if first == ATTEMPTS or is_pack(name):
            return True
        if first in foreign:
            return False
        if _CHUNK.fullmatch(rest):
            return first in arrays or (died and rest.startswith("c"))
        return (rest in _DOCUMENTS and first in arrays) or object_place(rest) is not None

    return list(filter(is_own, names))


def folders_of_others(location: Location, folders: Iterable[str]) -> set[str]:
    """Return those of the folders directly below a target that no checkpoint has, and that have
    files that no save, whole or interrupted, could have written."""
    names = [*location.listing(), *(name for one in folders for name in location.walk(one))]
    ours, foreign = known_nodes(location, names)
    own = {name.partition("/")[0] for name in own_names(names, ours, foreign)}.union(OWN_FILES)
    others = set[str]()
    for first, below, rest in (name.partition("/") for name in names):
        could_be_own = _CHUNK.fullmatch(rest) or rest == "zarr.json" or object_place(rest)
        if below and first not in own and (first in foreign or not could_be_own):
            others.add(first)
    return others


def remains(location: Location, names: Collection[str]) -> list[str]:
    """Return the names at a target that belong to checkpoints and dead attempts, without claims and
    marks."""
    own = own_names(names, *known_nodes(location, names))
    return [name for name in own if not name.startswith(f"{ATTEMPTS}/")]


def model_files(location: Location, names: Collection[str]) -> list[str]:
    """Return those of the names in a folder that belong to a model in Hugging Face's format: its
    index, and files of weights with the usual names or those in the index."""
    listed = set[object]()
    if MODEL_COMMITS[0] in names:
        with suppress(DamagedCheckpointError, KeyError, RecursionError, TypeError, ValueError):
            index = json.loads(location.read_if_there(MODEL_COMMITS[0]) or b"")
            listed.update(dict(index["weight_map"]).values())
    return [
        name
        for name in names
        if WEIGHTS.fullmatch(name) or (name in listed and name.endswith(".safetensors"))
    ]


def deletion_rounds(names: Iterable[str], most: int) -> list[list[str]]:
    """Return the order in which objects are deleted, as rounds.

    The documents that commit come first, each in a round of its own. The documents of arrays, the
    manifest and the common part come last, because they show that chunks belong to a checkpoint.

    Args:
        names: names of the objects.
        most: largest number of objects in one round.
    """
    there = set(names)
    last = {name for name in there if name.endswith(("/.zarray", "/zarr.json"))}
    last |= {MANIFEST_NAME, COMMON_STATE_NAME} & there
    rounds = [[name] for name in COMMITS if name in there]
    for part in (sorted(there - last - set(COMMITS)), sorted(last)):
        rounds += [part[i : i + most] for i in range(0, len(part), most)]
    return rounds


def write_integrity(location: Location) -> None:
    """Write ``integrity.json``, the SHA-256 of each file of a checkpoint.

    Raises:
        StorageError: the store failed.
    """
    names = [name for name in location.walk() if not name.startswith(f"{ATTEMPTS}/")]
    files = {name: _sha256(location, name) for name in sorted(names) if name != INTEGRITY_NAME}
    document = json.dumps({"algorithm": "sha256", "files": files}, indent=2)
    location.replace(INTEGRITY_NAME, document.encode())


def check_integrity(location: Location) -> None:
    """Compare each file of a checkpoint with ``integrity.json``.

    Raises:
        NotACheckpointError: there is no ``integrity.json``.
        DamagedCheckpointError: a file is missing or differs, or the document is malformed.
        StorageError: the store failed.
    """
    place = location.child(INTEGRITY_NAME)
    try:
        document = json.loads(location.read(INTEGRITY_NAME))
        algorithm, files = document["algorithm"], dict(document["files"])
    except FileNotFoundError:
        how = " is missing: save with verify_integrity=True, or load without it"
        raise place.error(how, NotACheckpointError) from None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise place.error(f" cannot be read ({error})", DamagedCheckpointError) from error
    if algorithm != "sha256":
        raise place.error(f" has {algorithm!r} hashes; only sha256 is known", FormatVersionError)
    wrong = []
    for name, expected in files.items():
        found = _sha256(location, require_inside(name, place.url))
        if found is None:
            wrong.append(f"{name} is missing")
        elif found != expected:
            wrong.append(f"{name} has the SHA-256 {found:.16}..., expected {expected!s:.16}...")
    if wrong:
        raise location.error(
            f": {len(wrong)} of {len(files)} files do not match {INTEGRITY_NAME}: "
            f"{'; '.join(wrong[:8])}; load an earlier checkpoint",
            DamagedCheckpointError,
        )


def _sha256(location: Location, name: str) -> str | None:
    """Return the hash of a file; ``None`` if there is none.

    Raises:
        DamagedCheckpointError: it is not a regular file.
        StorageError: the store failed.
    """
    hasher, size = hashlib.sha256(), 0
    while (part := location.read_range(name, size, size + HASHED_BYTES)) is not None:
        hasher.update(part)
        size += len(part)
        if len(part) < HASHED_BYTES:
            return hasher.hexdigest()
    return None
