"""What all commands share: opening a checkpoint, choosing keys, printing, exit codes.

Exit codes: 0 all is well, 1 a difference or damage was found, 2 the command was used wrongly or
could not be carried out. Results go to standard output, everything else to standard error.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NoReturn

from shardstore.cli.printing import clean
from shardstore.errors import CheckpointingException, MissingKeyError, NotACheckpointError
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.commit.identity import instead, node_type
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.names import key_of
from shardstore.storage.stores.errors import CLIENT_OPTIONS, OPTIONS
from shardstore.storage.stores.location import Location

__all__ = [
    "DAMAGE",
    "WRONG_USE",
    "UsageProblem",
    "Warnings",
    "choose",
    "complain",
    "counted",
    "get_array",
    "human_bytes",
    "locate",
    "matcher",
    "open_stored",
    "parse_options",
    "parse_size",
    "progress_bar",
    "require_no_array",
    "require_output",
    "warn_of_idle_options",
]

TEXTS = (*OPTIONS, *CLIENT_OPTIONS, "account_name", "profile", "region_name")
"""Storage options that may look like numbers and must stay what they are."""
DAMAGE = 1
WRONG_USE = 2


class UsageProblem(CheckpointingException, ValueError):  # noqa: N818 (it is the user's)
    """The command was used wrongly; the text says how to use it."""


def parse_options(given: Sequence[str]) -> dict[str, Any]:
    """Storage options from ``name=value``; dots nest, values that are JSON are taken as such.

    Raises:
        UsageProblem: not of that form.
    """
    out: dict[str, Any] = {}
    for text in given:
        name, found, value = text.partition("=")
        if not found or not name:
            raise UsageProblem(
                f"--storage-option '{_name_in(text)}...': give NAME=VALUE, such as "
                "endpoint_url=http://host:9000"
            )
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = value
        place = out
        *path, last = name.split(".")
        if last in TEXTS and isinstance(parsed, int | float) and not isinstance(parsed, bool):
            parsed = value
        for part in path:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise UsageProblem(f"--storage-option {name!r}: {part!r} has a value already")
        place[last] = parsed
    return out


def _name_in(text: str) -> str:
    """The name of an option that a wrong text begins with; what follows may be a secret."""
    names = ("key", "secret", "token", "endpoint_url", "region_name", "client_kwargs", "profile")
    return next((name for name in names if text.startswith(name)), "")


def open_stored(place: str | Location, options: Sequence[str] = ()) -> StoredCheckpoint:
    """A checkpoint from a path or URL, its root document read.

    Raises:
        NotACheckpointError: nothing of ours is there; says what is.
    """
    stored = StoredCheckpoint(place if isinstance(place, Location) else locate(place, options))
    try:
        root = stored.root
    except NotACheckpointError:
        require_no_array(stored.location)
        raise
    if root is None:
        _require_zarr(stored.location)
    return stored


def locate(place: str, options: Sequence[str] = ()) -> Location:
    """Where a path or URL leads.

    Raises:
        UsageProblem: a URL that names no bucket, or options of another form.
    """
    if re.fullmatch(r"\w+:/+", place):
        raise UsageProblem(f"{place} names no bucket; give a URL such as s3://bucket/run/step-100")
    location = Location.of(place, **parse_options(options))
    warn_of_idle_options(options, location)
    return location


def warn_of_idle_options(options: Sequence[str], *locations: Location) -> None:
    """Say that storage options have no effect, where all places are on disks of this machine."""
    if options and all(location.is_local for location in locations):
        urls = " and ".join(location.url for location in locations)
        what = "is a local path" if len(locations) == 1 else "are local paths"
        complain(f"--storage-option has no effect: {urls} {what}, and it is for object stores")


def require_no_array(location: Location) -> None:
    """Raise :class:`NotACheckpointError` for the folder of a single array, and say what to do."""
    if node_type(location) != "array":
        return
    parent, _, node = location.url.rpartition("/")
    above = Location(parent, location.options)
    hint = "open it with zarr"
    if node_type(above) == "group":
        hint = f"give the checkpoint, {parent}, and its key, {key_of(node) or node}"
    raise NotACheckpointError(
        f"{location.url} is a single array, not a checkpoint: {hint}", url=location.url
    )


def _require_zarr(location: Location) -> None:
    try:
        backend = json.loads(location.read("metadata.json"))
        name = backend["sharded_backend"]
    except FileNotFoundError:
        _not_a_checkpoint(location)
    except (ValueError, KeyError, TypeError):
        raise NotACheckpointError(f"{location.url}/metadata.json is damaged") from None
    if name != "zarr":
        raise NotACheckpointError(
            f"{location.url} was written by the backend {name!r}, not as Zarr "
            "arrays; convert it first"
        )


def _not_a_checkpoint(location: Location) -> NoReturn:
    if not location.exists():
        raise NotACheckpointError(f"{location.url} does not exist")
    found = instead(location)
    if not location.is_dir():
        found = found or "give the folder that save() wrote"
        raise NotACheckpointError(f"{location.url} is a file; {found}")
    found = found or "it has neither zarr.json nor metadata.json"
    raise NotACheckpointError(f"{location.url} is not a checkpoint: {found}")


def matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Whether a key is chosen: by name, by prefix up to a dot, or by shell pattern; all if none."""

    def wanted(key: str) -> bool:
        return not patterns or any(
            key == pattern
            or key.startswith((f"{pattern}.", f"{pattern}/"))
            or fnmatchcase(key, pattern)
            for pattern in patterns
        )

    return wanted


def choose(arrays: Mapping[str, ArrayMeta], patterns: Sequence[str]) -> dict[str, ArrayMeta]:
    """The arrays that patterns choose.

    Raises:
        MissingKeyError: a pattern chooses nothing.
    """
    for pattern in patterns:
        if not any(map(matcher([pattern]), arrays)):
            raise _missing(arrays, pattern)
    wanted = matcher(patterns)
    return {key: meta for key, meta in arrays.items() if wanted(key)}


def get_array(stored: StoredCheckpoint, key: str) -> ArrayMeta:
    """The array of a key.

    Raises:
        MissingKeyError: says which keys come near.
    """
    if key not in stored.arrays:
        raise _missing(stored.arrays, key)
    return stored.arrays[key]


def _missing(arrays: Mapping[str, ArrayMeta], key: str) -> MissingKeyError:
    near = get_close_matches(key, arrays, n=3, cutoff=0.5)
    near = near or [known for known in arrays if key.lower() in known.lower()][:3]
    hint = (
        f"; did you mean {', '.join(map(clean, near))}?"
        if near
        else "; `shardstore ls` lists all keys"
    )
    return MissingKeyError(f"no key {key!r} among {len(arrays)}{hint}", key=key)


def require_output(output: str) -> Path:
    """The file to write, before anything is read for it.

    Raises:
        UsageProblem: it is none, or its folder is not there.
    """
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", output):
        raise UsageProblem(
            f"--output {output!r} is a URL: give the path of a file on this machine, and copy it "
            "from there"
        )
    target = Path(output)
    if not output or target.is_dir():
        raise UsageProblem(f"--output {output!r} is a folder; give the name of a file")
    if not target.parent.is_dir():
        raise UsageProblem(f"{target.parent} is no folder; give another --output")
    return target


def parse_size(text: str) -> int:
    """Bytes from ``512MiB``, ``2G``, ``1000``.

    Raises:
        UsageProblem: no size.
    """
    units = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
    number = (
        text.strip().lower().removesuffix("ib") if len(text.strip()) > 2 else text.strip().lower()
    )
    digits = number.rstrip("bkmgt")
    unit = number[len(digits) :].removesuffix("b") if number[len(digits) :] != "b" else ""
    try:
        size = int(float(digits) * units[unit])
    except (KeyError, ValueError, OverflowError):
        size = 0
    if size < 1:
        raise UsageProblem(f"{text!r} is no size; give one such as 512MiB or 2GiB")
    return size


def counted(count: int, what: str) -> str:
    """``1 chunk``, ``2 chunks``."""
    return f"{count:,} {what}{'s' * (count != 1)}"


def human_bytes(size: float) -> str:
    """``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{int(size)} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


def complain(message: object) -> None:
    """One line to standard error."""
    line = re.sub(r"\s*[\n\t]\s*", " ", str(message).strip())
    print(clean(f"shardstore: {line}"), file=sys.stderr)


class Warnings(logging.Handler):
    """What the library warns of, told as all else: one line to standard error, nothing raw."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        """See :meth:`logging.Handler.emit`."""
        complain(record.getMessage())


@contextmanager
def progress_bar(what: str, total: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar on standard error while a command works, where that is a terminal."""
    if quiet or not sys.stderr.isatty() or total <= 0:
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, advance=done)
