"""The record of a state dict's values that are not tensors: JSON by flat key, with nested paths.

The record is part of the root document. Conversions carry it from one format to another. It
contains no pickles, see :mod:`shardstore.values.plain`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from operator import getitem
from typing import TYPE_CHECKING, Any

from shardstore.errors import as_damage
from shardstore.values import plain as plain_values

if TYPE_CHECKING:  # its module imports torch
    from shardstore.mapping import StateDict

BACKEND, VERSION = "json", 1
"""Name and version of the common backend that stores such a record."""
MEMBER = "state_dict"
"""Member of ``attributes.shardstore`` of the root document."""

MAX_INLINE_CHARACTERS = 64 * 1024
"""Largest JSON text of a value in the root document, which every reader reads. Longer values are
separate files."""

MOST_DEEP = 500
"""Largest number of nested dicts and lists around a value."""

LIST_LENGTH = "__shardstore_list__"
"""Key in a dict that stands for a list, some of whose elements are stored elsewhere: the length of
the list. The other keys are positions."""

StatePath = tuple[str | int, ...]


@dataclass(frozen=True)
class StateRecord:
    """The values of a state dict that are not tensors, and its nesting.

    Attributes:
        paths: flat key -> path in the nested state dict; the default path is the key itself.
        values: flat key -> JSON form of a value.
        files: flat keys of the values in separate files.
        lists: paths of lists that hold tensors and other values.
    """

    paths: Mapping[str, StatePath] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    files: Sequence[str] = ()
    lists: Sequence[StatePath] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the member of the root document."""
        paths = {key: list(path) for key, path in self.paths.items() if path != (key,)}
        record = {"paths": paths, "values": dict(self.values), "files": list(self.files)}
        return {**record, "lists": [*map(list, self.lists)]} if self.lists else record

    @classmethod
    def from_root(cls, attributes: Mapping[str, Any], url: str) -> StateRecord | None:
        """Return the record in the attributes of a root group, ``None`` if it has none.

        Raises:
            DamagedCheckpointError: the record is malformed.
        """
        about = attributes.get("shardstore")
        found = about.get(MEMBER) if isinstance(about, Mapping) else None
        if found is None:
            return None
        with as_damage(url, f"{url}/zarr.json: the record of the state dict is malformed"):
            paths = {str(key): state_path(path) for key, path in found["paths"].items()}
            lists = [state_path(path) for path in found.get("lists", ())]
            files = [str(key) for key in found["files"]]
            return cls(paths, dict(found["values"]), files, lists)

    def value(self, key: str, url: str) -> Any:
        """Return a value by its flat key.

        Raises:
            DamagedCheckpointError: the stored JSON form cannot be decoded.
        """
        with as_damage(url, f"{url}/zarr.json: the value of {key!r} cannot be read", key):
            return plain_values.decode(self.values[key])

    def nested(self, url: str, objects: Mapping[str, Any], *, numbered: bool = False) -> StateDict:
        """Return the nested state dict of all values.

        The record has no tensors, so a list in :attr:`lists` lacks some elements.

        Args:
            url: URL of the checkpoint, for error texts.
            objects: flat key -> value, for the values in files.
            numbered: return such a list as a dict that stands for it, see :data:`LIST_LENGTH`.

        Raises:
            DamagedCheckpointError: a value cannot be decoded, or paths contradict each other.
        """
        known = {**{key: self.value(key, url) for key in self.values}, **objects}
        with as_damage(url, f"{url}/zarr.json: the paths of the state dict contradict each other"):
            paths = [path for key, path in self.paths.items() if key not in known]
            mixed = {path[:i] for path in paths for i, name in enumerate(path) if type(name) is int}
            by_path = {self.paths.get(key, (key,)): value for key, value in known.items()}
            found = dict(_nested(by_path, (), mixed))
        for path in sorted(self.lists, key=len, reverse=True):
            with suppress(LookupError, TypeError):  # it has no values
                place: Any = reduce(getitem, path[:-1], found)
                by_position = place[path[-1]]
                length = {LIST_LENGTH: max(by_position) + 1}
                listed = [by_position[i] for i in sorted(by_position)]
                place[path[-1]] = {**by_position, **length} if numbered else listed
        return found


def state_path(path: Any) -> StatePath:
    """Return a path as a tuple.

    Raises:
        TypeError: it is empty or too long, or has a part that is neither a string nor an integer.
    """
    if not 0 < len(path) <= MOST_DEEP or not all(type(name) in (str, int) for name in path):
        raise TypeError(f"{path!r:.60} is not a path")
    return tuple(path)


def _nested(values: Mapping[StatePath, Any], place: StatePath, mixed: Container[StatePath]) -> Any:
    """Return the dict or list at a place in the state dict, from its values by relative path."""
    below: defaultdict[str | int, dict[StatePath, Any]] = defaultdict(dict)
    for path, value in values.items():
        below[path[0]][path[1:]] = value
    made: dict[str | int, Any] = {}
    for name, inner in below.items():
        if () in inner:
            (made[name],) = inner.values()
        else:
            made[name] = _nested(inner, (*place, name), mixed)
    # A dict with integer keys has the same paths as a list.
    is_list = place and place not in mixed and made.keys() == set(range(len(made)))
    return [made[i] for i in range(len(made))] if is_list else made


def as_text(value: object) -> tuple[Any, str]:
    """Return the JSON form of a value, and its text.

    Raises:
        NotPlainError: the value has no JSON form.
    """
    try:
        document = plain_values.encode(value)
        return document, json.dumps(document, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise plain_values.NotPlainError(str(error)) from error


def is_long(text: str) -> bool:
    """Return whether a value's JSON is too long for the root document, so that it is a file."""
    return len(text) > MAX_INLINE_CHARACTERS
