"""What lies in a checkpoint beside its arrays: sharded objects by their files' names, and files
that are nobody's.

Names only; what is in the files is for those who verify or compare them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardstore.storage.format.names import MANIFEST_NAME, key_of
from shardstore.storage.movers.parallel import run_batched
from shardstore.storage.stores.location import Location

__all__ = ["OWN_FILES", "Beside", "beside_arrays", "is_object_file", "object_place"]

LISTINGS = 8
"""Of an object store, at a time."""

OWN_FILES = frozenset({"zarr.json", "metadata.json", "common.pt", MANIFEST_NAME, ".owner.json"})
"""What the checkpoint itself keeps beside its arrays."""


@dataclass(frozen=True, slots=True)
class Beside:
    """A file or folder directly below a checkpoint that is no array's and not the checkpoint's own.

    Attributes:
        name: its name.
        key: of the objects in it.
        entries: names of all in it; empty for a file.
        objects: those of them that are sharded objects' files.
    """

    name: str
    key: str
    entries: Sequence[str]
    objects: Sequence[str]


def object_place(name: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Offset and grid shape in the name of a sharded object's file, ``None`` for other names."""
    if not is_object_file(name):
        return None
    parts = name[len("shard_") :].rpartition(".")[0].split("_")
    try:
        offset, shape = (tuple(int(n) for n in part.split(".") if n) for part in parts)
    except ValueError:
        return None
    return offset, shape


def is_object_file(name: str) -> bool:
    """Whether a file in a folder of an array or object is named as one of a sharded object: what
    ``torch.save`` wrote, or JSON."""
    return name.startswith("shard_") and name.endswith((".pt", ".json"))


def beside_arrays(
    location: Location,
    top: Sequence[str],
    nodes: Collection[str],
    wants: Callable[[str], bool],
    entries_of: Mapping[str, Sequence[str]] | None = None,
) -> Iterator[Beside]:
    """What is there beside arrays, in the order of ``top``.

    Args:
        location: the checkpoint.
        top: all names directly below it.
        nodes: those that are arrays'.
        wants: whether a key is of interest.
        entries_of: folder -> names directly below it, where they are known; else they are listed,
            those of an object store beside each other.

    Raises:
        StorageError: the store refused.
    """
    keys = {name: key_of(name) or name for name in top}
    wanted = [n for n in top if n not in OWN_FILES and n not in nodes and wants(keys[n])]
    if entries_of is None and not location.is_local:
        entries_of = _listings(location, wanted)
    for name in wanted:
        if entries_of is not None:
            entries = entries_of.get(name, ())
        else:
            entries = location.listing(name) if location.is_dir(name) else ()
        key = keys[name]
        yield Beside(name, key, entries, [entry for entry in entries if object_place(entry)])


def _listings(location: Location, names: Sequence[str]) -> dict[str, Sequence[str]]:
    """Name -> the names directly below it, in an object store."""
    found: dict[str, Sequence[str]] = {}

    def work(batch: Sequence[str]) -> None:
        for name in batch:
            found[name] = location.listing(name)

    run_batched(names, work, threads=LISTINGS, weight=lambda _: 1, batch_weight=1)
    return found
