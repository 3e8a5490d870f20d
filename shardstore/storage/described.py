"""Which folders of a checkpoint are arrays', by what the checkpoint says of itself.

An array without a document of its own is told from a folder of somebody else by the root document
alone, or where that is gone already by the manifest: whoever deletes asks here before anything
goes. It knows names and these two documents; not what is done with them.
"""

from __future__ import annotations

from collections.abc import Collection

from shardstore.errors import DamagedCheckpointError, FormatVersionError, NotACheckpointError
from shardstore.storage.location import Location
from shardstore.storage.names import MANIFEST_NAME
from shardstore.storage.root import parse_root

__all__ = ["described_nodes"]


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
    except (FileNotFoundError, NotACheckpointError, FormatVersionError):
        return set()
    # What another program's group names is not ours.
    return set() if root.format_version is None else set(root.documents)


def _of_manifest(location: Location) -> set[str]:
    # It brings NumPy, which a deletion of arrays that have documents does without.
    from shardstore.storage.manifest import Manifest

    try:
        data = location.read(MANIFEST_NAME)
        manifest = Manifest.from_bytes(data, f"{location.url}/{MANIFEST_NAME}")
    except (FileNotFoundError, DamagedCheckpointError):
        return set()
    return {node for node, _, _ in manifest.arrays}
