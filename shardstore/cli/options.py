"""Arguments and options that commands share.

Exit codes: 0 success, 1 a difference or damage was found, 2 wrong usage or an error.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from shardstore.cli.printing import complain
from shardstore.errors import CheckpointingException
from shardstore.inspection import opened
from shardstore.inspection.opened import OpenCheckpoint, StoredArray, codec_error, matcher
from shardstore.storage.stores.errors import CLIENT_OPTIONS, OPTIONS
from shardstore.storage.stores.location import Location

DAMAGE = 1
WRONG_USE = 2

TEXTS = (*OPTIONS, *CLIENT_OPTIONS, "account_name", "profile", "region_name")
"""Storage options that are text even if they look like numbers."""


def argument(metavar: str, text: str) -> Any:
    """Return an argument of a command."""
    return typer.Argument(metavar=metavar, help=text)


def flag(names: str, text: str) -> Any:
    """Return an option without a value, ``--on`` or ``--on/--off``."""
    return typer.Option(names, help=text)


def value(
    metavar: str, text: str, *names: str, at_least: int | None = None, at_most: int | None = None
) -> Any:
    """Return an option with a value. Its name is that of its parameter unless names are given."""
    return typer.Option(*names, metavar=metavar, help=text, min=at_least, max=at_most)


Checkpoint = Annotated[str, argument("CKPT", "Path or URL of a checkpoint.")]
Patterns = Annotated[
    list[str] | None,
    argument("KEY", "Keys, prefixes up to a dot, or patterns with * and ?. Default: all."),
]
Json = Annotated[bool, flag("--json", "Print one JSON document.")]
Options = Annotated[
    list[str] | None,
    value("NAME=VALUE", "Of the object store, such as endpoint_url=...; may be repeated."),
]
Wide = Annotated[bool, flag("--wide", "Do not fold lines to the terminal's width.")]
Memory = Annotated[str, value("SIZE", "Memory for values, such as 512MiB.")]
Output = Annotated[str, value("FILE", "File to write.", "-o", "--output")]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kmgt]?)(?:i?b)?", re.IGNORECASE)


class UsageProblem(CheckpointingException, ValueError):  # noqa: N818 (an error of the user)
    """Wrong usage of a command; the text says how to use it."""


def bar(as_json: bool) -> Literal["bar"] | None:
    """Return ``"bar"`` if standard error is a terminal, and no JSON is printed."""
    return None if as_json or not sys.stderr.isatty() else "bar"


def parse_options(given: Sequence[str] | None) -> dict[str, Any]:
    """Parse storage options ``name=value``. Dots nest; JSON values are parsed.

    Raises:
        UsageProblem: an option does not have this form.
    """
    out: dict[str, Any] = {}
    for text in given or ():
        name, found, value = text.partition("=")
        if not found or not name:
            raise UsageProblem(  # does not print the text, which may be a secret
                "--storage-option: give NAME=VALUE, such as endpoint_url=http://host:9000"
            )
        parsed: Any = value
        with suppress(ValueError):
            parsed = json.loads(value)
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


def locate(options: Sequence[str] | None, *places: str) -> list[Location]:
    """Return the locations of paths or URLs. Print a warning if the options have no effect, because
    all places are local.

    Raises:
        ArgumentError: a place is neither a path nor a supported URL.
        UsageProblem: an option is not NAME=VALUE.
    """
    locations = [Location.of(place, parse_options(options)) for place in places]
    if options and all(location.is_local for location in locations):
        urls = " and ".join(location.url for location in locations)
        complain(f"--storage-option has no effect: it is for object stores, not for {urls}")
    return locations


def open_checkpoint(place: str, options: Sequence[str] | None = None) -> OpenCheckpoint:
    """Open the checkpoint at a path or URL. Raises the errors of :func:`shardstore.open`."""
    (location,) = locate(options, place)
    ckpt = opened.open(location)
    _leave_out(list(ckpt.refused.values()))
    return ckpt


def _leave_out(errors: Sequence[CheckpointingException]) -> None:
    if errors:
        others = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        complain(f"left out an array{others}: {errors[0]}")


def readable(arrays: Sequence[StoredArray]) -> list[StoredArray]:
    """Return the arrays whose codecs can be decoded. Print a warning that names one of the others.

    Raises:
        FormatVersionError: there are others only.
    """
    found = {array: codec_error(array.checkpoint.stored.location, array.meta) for array in arrays}
    errors = [error for error in found.values() if error]
    if errors and len(errors) == len(arrays):
        raise errors[0]
    _leave_out(errors)
    return [array for array, error in found.items() if not error]


def choose(ckpt: OpenCheckpoint, patterns: Sequence[str] | None) -> list[StoredArray]:
    """Return the arrays whose keys match patterns, sorted by key.

    Raises:
        MissingKeyError: a pattern matches no key.
    """
    for pattern in patterns or ():
        if not any(map(matcher([pattern]), ckpt)):
            raise ckpt.missing(pattern)
    return [ckpt[key] for key in sorted(filter(matcher(patterns), ckpt))]


def require_output(output: str) -> Path:
    """Check the argument ``--output``, and return the file to write.

    Raises:
        UsageProblem: ``output`` is a URL, ``-`` or a folder, or its folder does not exist.
    """
    if output == "-":
        raise UsageProblem("--output '-': give the path of a file, such as /dev/stdout")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", output):
        raise UsageProblem(
            f"--output {output!r} is a URL: give the path of a local file, and upload that file"
        )
    target = Path(output)
    if target.is_dir():
        raise UsageProblem(f"--output {output!r} is a folder; give the name of a file")
    if not target.parent.is_dir():
        raise UsageProblem(f"{target.parent} is not a folder; give another --output")
    return target


def parse_size(text: str) -> int:
    """Return the number of bytes in a text such as ``512MiB``, ``2G``, ``1000``.

    Raises:
        UsageProblem: the text is not a size.
    """
    found = _SIZE.fullmatch(text.strip())
    power = " kmgt".index(found[2].lower() or " ") if found else 0
    size = float(found[1]) * 1024**power if found else 0.0
    if not 1 <= size < math.inf:
        raise UsageProblem(f"{text!r} is not a size; give one such as 512MiB or 2GiB")
    return int(size)
