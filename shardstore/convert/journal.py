"""What of a conversion is done, kept beside its target, so that it can go on where it died.

On a disk one file, to which lines are added; in an object store one object each time. Knows JSON,
and nothing of what it means.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from shardstore.storage.stores.location import Location, store_errors

__all__ = ["Journal", "Receipts"]

Receipts = dict[tuple[str, int], Any]
"""Key and position of a chunk -> what the target said when it was written."""


class Journal:
    """The journal of one conversion at a time.

    Args:
        folder: the folder that the target is in.
        name: of the journal in there.
    """

    def __init__(self, folder: Location, name: str) -> None:
        self._folder, self._name = folder, name
        self._path = f"{folder.url}/{name}"
        self._count = 0

    def open(self, head: dict[str, Any]) -> tuple[Receipts, Any] | None:
        """What an earlier run of the same conversion did, and the state that its target had.

        Args:
            head: what tells one conversion from another.

        Returns:
            ``None`` where there was none, or another one.
        """
        lines = self._file_lines() if self._folder.is_local else self._objects()
        try:
            first = json.loads(lines[0])
            if first["head"] != json.loads(json.dumps(head)):
                return None
            rows = [json.loads(line) for line in lines[1:]]
            found = {(str(key), int(chunk)): receipt for row in rows for key, chunk, receipt in row}
        except (ValueError, TypeError, KeyError, IndexError):
            return None
        if self._folder.is_local:
            os.truncate(self._path, sum(len(line) + 1 for line in lines))
        self._count = len(lines)
        return found, first["state"]

    def exists(self) -> bool:
        """Whether there is one, of this conversion or another."""
        return self._folder.exists(self._name)

    def _file_lines(self) -> list[bytes]:
        """Whole lines; a last one that was cut short does not count."""
        with suppress(FileNotFoundError):
            return self._folder.read(self._name).split(b"\n")[:-1]
        return []

    def _objects(self) -> list[bytes]:
        lines: list[bytes] = []
        for name in self._folder.listing(self._name):
            if name != _name(len(lines)):
                break
            lines.append(self._folder.read(f"{self._name}/{name}"))
        return lines

    def start(self, head: dict[str, Any], state: Any) -> None:
        """A journal with nothing done.

        Raises:
            StorageError: the store refused.
        """
        self.remove()
        if self._folder.is_local:
            self._folder.write(self._name, b"")
        self._append({"head": head, "state": state})

    def add(self, rows: Sequence[tuple[str, int, Any]]) -> None:
        """Note chunks that are written: key, position, receipt.

        Raises:
            StorageError: the store refused.
        """
        self._append(rows)

    def _append(self, what: Any) -> None:
        data = json.dumps(what).encode()
        if self._folder.is_local:
            with store_errors("writing", str(self._path)), open(self._path, "ab") as file:
                file.write(data + b"\n")
        else:
            self._folder.write(f"{self._name}/{_name(self._count)}", data)
        self._count += 1

    def remove(self) -> None:
        """The conversion is complete, or starts anew."""
        self._folder.delete(self._name)
        self._count = 0


def _name(number: int) -> str:
    return f"{number:08d}.json"
