"""Verifies what lies in a checkpoint beside its arrays: ``metadata.json``, ``common.pt``, sharded
objects, and files that are nobody's.

Answers for what is missing, damaged or foreign among them. It knows neither chunks nor the
documents of arrays.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from shardstore.errors import CheckpointingException, DamagedCheckpointError
from shardstore.inspection.findings import Findings
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.commit.object_files import beside_arrays, object_place
from shardstore.storage.format.names import key_of
from shardstore.storage.movers.parallel import run_batched
from shardstore.values.torch_archive import verify_archive

if TYPE_CHECKING:
    from shardstore.storage.stores.object_io import ObjectIO

__all__ = ["OtherFiles"]

T = TypeVar("T")

SHOWN_OBJECTS = 10
"""Of one key that are missing; a name alone can claim a grid of any size."""


class OtherFiles:
    """The files of one checkpoint that are no arrays'.

    Args:
        stored: the checkpoint.
        findings: where to report to.
        wants: whether a key is of interest.
        everything: whether what belongs to no key is, too.
        threads: how many requests at a time are of use; findings come from any of them.
    """

    def __init__(
        self,
        stored: StoredCheckpoint,
        findings: Findings,
        wants: Callable[[str], bool],
        *,
        everything: bool,
        threads: int = 1,
    ) -> None:
        self._threads = threads
        self.stored = stored
        self.location = stored.location
        self._io: ObjectIO | None = None
        if not self.location.is_local:
            from shardstore.storage.stores.object_io import (
                object_io,  # files of a folder need none of it
            )

            self._io = object_io(self.location)
        self._findings = findings
        self._wants = wants
        self._everything = everything
        # Other backends keep what is not sharded elsewhere: ("json", 1) in the root document.
        self._common_backend: object = "torch"
        self._seen: set[str] = set()
        """Names of objects' files that were looked at, or reported."""

    def config(self, top: Sequence[str]) -> None:
        """Look at ``metadata.json``; ``top`` are the names directly below the checkpoint."""
        name = "metadata.json"
        path = f"{self.location.url}/{name}"
        if name not in top:
            if self.stored_by_us:
                self._findings.report(
                    "config-missing",
                    f"{path} is missing: load() takes the folder for no checkpoint",
                    name,
                )
            return
        try:
            document = json.loads(self.location.read(name))
            if not isinstance(document, dict) or "sharded_backend" not in document:
                raise ValueError("it names no sharded_backend")
            self._common_backend = document.get("common_backend", "torch")
        except (OSError, ValueError) as error:
            self._findings.report("config-damaged", f"{path} is damaged: {error}", name)

    @property
    def stored_by_us(self) -> bool:
        """Whether the root says that shardstore wrote it (a damaged root counts as ours)."""
        try:
            return self.stored.root is None or self.stored.root.format_version is not None
        except CheckpointingException:
            return True

    @property
    def _is_old_layout(self) -> bool:
        try:
            return self.stored.root is None
        except CheckpointingException:
            return False

    def whole(
        self, top: Sequence[str], nodes: set[str], listed: Sequence[str] | None = None
    ) -> None:
        """Look at all else.

        Args:
            top: the names directly below the checkpoint.
            nodes: what the names of arrays' folders begin with.
            listed: all names in an object store, which need not be asked for again.
        """
        if self._everything:
            if "common.pt" in top:
                self._check_archive("common.pt", "common-damaged")
            elif self.stored_by_us and self._common_backend == "torch":
                path = f"{self.location.url}/common.pt"
                text = f"{path} is missing: the non-sharded part of the state is gone"
                self._findings.report("common-missing", text, "common.pt")
        folders = None if listed is None else _folders(listed)
        there = list(beside_arrays(self.location, top, nodes, self._wants, folders))
        self._check_objects(
            [(f"{found.name}/{name}", found.key) for found in there for name in found.objects]
        )
        for found in there:
            self._check_grids(found.name, found.key, found.objects)
            self._foreign(found.name, found.entries, found.objects)
        self._committed_objects()

    def _each(self, items: Sequence[T], work: Callable[[T], None]) -> None:
        """Do something with each, so many at a time."""

        def several(batch: Sequence[T]) -> None:
            for item in batch:
                work(item)

        run_batched(items, several, threads=self._threads, weight=lambda _: 1, batch_weight=1)

    def _committed_objects(self) -> None:
        """Look whether each object that was committed is there: where none of a key is left, no
        name tells how many there were."""
        try:
            root = self.stored.root
        except CheckpointingException:
            return  # reported before
        for name in () if root is None else root.file_sums:
            node, _, file = name.rpartition("/")
            key = key_of(node) or node
            if name in self._seen or not self._wants(key) or (place := object_place(file)) is None:
                continue
            if not self.location.exists(name):
                self._missing(name, place[0], key)

    def objects(self, node: str, key: str, names: Sequence[str]) -> None:
        """Look at the sharded objects of a key, by the names of their files."""
        self._check_objects([(f"{node}/{name}", key) for name in names])
        self._check_grids(node, key, names)

    def _check_objects(self, files: Sequence[tuple[str, str]]) -> None:
        """Look into files, of which name and key are given."""
        with self._findings.lock:
            self._findings.result.objects += len(files)
            self._seen.update(name for name, _ in files)
        self._each(files, lambda file: self._check_archive(file[0], "object-damaged", key=file[1]))

    def _check_grids(self, node: str, key: str, names: Sequence[str]) -> None:
        """Look whether the objects of a key are all there, as their names tell."""
        shapes = {place[1] for name in names if (place := object_place(name))}
        places = {place for name in names if (place := object_place(name))}
        for shape in shapes:
            missing = (index for index in _grid(shape) if (index, shape) not in places)
            for index in islice(missing, SHOWN_OBJECTS):
                name = f"shard_{'.'.join(map(str, index))}_{'.'.join(map(str, shape))}.pt"
                self._missing(f"{node}/{name}", index, key)

    def _missing(self, name: str, index: tuple[int, ...], key: str) -> None:
        with self._findings.lock:
            if name in self._seen:
                return
            self._seen.add(name)
        text = f"object {index} of key {key!r} is missing: {self.location.url}/{name}"
        self._findings.report("object-missing", text, name, key=key)

    def _check_archive(self, name: str, kind: str, key: str | None = None) -> None:
        path = f"{self.location.url}/{name}"
        about = "" if key is None else f" (object of key {key!r})"
        try:
            data = self._read(name)
            if not data:
                raise ValueError("it is empty")
            if name.endswith(".json"):
                json.loads(data)
            elif data[:1] not in (b"P", b"\x80"):
                raise ValueError("it is no file of torch.save")
            else:
                verify_archive(data)
        except (OSError, ValueError) as error:
            self._findings.report(kind, f"{path}{about} is damaged: {error}", name, key=key)
            return
        try:
            self.stored.check_file(name, data)
        except DamagedCheckpointError as error:
            if error.url != f"{self.location.url}/zarr.json":
                self._findings.report(kind, str(error), name, key=key)
        except CheckpointingException:
            pass  # of the root document, as the other was, which was reported before

    def _read(self, name: str) -> bytes:
        if self._io is None:
            return self.location.read(name)
        data = self._io.get(name)
        if data is None:
            raise FileNotFoundError(f"{self.location.url}/{name}")
        return data

    def _foreign(self, name: str, below: Sequence[str], objects: Sequence[str]) -> None:
        strangers = [f"{name}/{entry}" for entry in below if entry not in objects]
        if name.endswith(".sync") and self._is_old_layout:
            return  # locks that Megatron-Core left behind
        if not below:
            strangers = [name]
        for stranger in strangers:
            path = f"{self.location.url}/{stranger}"
            self._findings.report(
                "foreign", f"{path} is no part of the checkpoint", stranger, "note"
            )


def _folders(names: Sequence[str]) -> dict[str, list[str]]:
    """Folder directly below the root -> the names in it."""
    found: dict[str, dict[str, None]] = {}
    for name in names:
        folder, _, rest = name.partition("/")
        if rest:
            found.setdefault(folder, {})[rest.partition("/")[0]] = None
    return {folder: sorted(entries) for folder, entries in found.items()}


def _grid(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if not shape:
        yield ()
        return
    for first in range(shape[0]):
        for rest in _grid(shape[1:]):
            yield (first, *rest)
