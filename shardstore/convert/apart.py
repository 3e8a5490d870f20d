"""Whether the source and the target of a conversion are apart.

What is written into the source, or replaces a folder that the source is in, destroys what is read.
Knows places alone, and no formats.
"""

from __future__ import annotations

import os

from shardstore.errors import ArgumentError
from shardstore.storage.stores.location import Location

__all__ = ["require_apart"]


def require_apart(source: Location, target: Location) -> None:
    """Raise :class:`ArgumentError` if one is, or lies in, the other, through links too."""
    if _within(target, source):
        same = _within(source, target)
        where = "is the source itself" if same else "lies inside the source"
    elif _within(source, target):
        where = "holds the source"
    else:
        return
    raise ArgumentError(
        f"the target {target.url} {where} {source.url}: nothing was converted; convert to a folder "
        "beside it",
        url=target.url,
    )


def _within(inner: Location, outer: Location) -> bool:
    if inner.is_local != outer.is_local:
        return False
    if not inner.is_local:
        return f"{inner.url}/".startswith(f"{outer.url}/")
    path, folder = os.path.realpath(inner.url), os.path.realpath(outer.url)
    while True:
        if path == folder or _is_same(path, folder):
            return True
        above = os.path.dirname(path)
        if above == path:
            return False
        path = above


def _is_same(a: str, b: str) -> bool:
    """Of folders under two names, as mounts make them."""
    try:
        return os.path.samefile(a, b)
    except OSError:
        return False  # one is not there
