"""What callers give as the place of a checkpoint, as a local path or a URL, and what is wrong with
it.

Pure: it looks at texts alone, not at what is there.
"""

from __future__ import annotations

import os
import re

from shardstore.errors import ArgumentError

__all__ = ["shown", "url_of"]

_FILE = "file://"
# Of two letters at least, for drives of Windows have one.
_SCHEME = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):(?P<slashes>/+)(?P<rest>.*)", re.DOTALL)


_OF_BUCKETS = ("s3", "s3a", "gs", "gcs")


def shown(place: object) -> str:
    """A place as texts may name it: what stands where a URL has a user and a password is hidden."""
    return re.sub(r"(?s)(:/+)[^/]*:.*@", r"\1***@", str(place))


def url_of(place: object) -> str:
    """An absolute path, or a URL without a slash at its end.

    Args:
        place: a path (``~`` is the home folder) or a URL.

    Raises:
        ArgumentError: no path and no URL; says what it is, and what to give.
    """
    # RFC 3986, section 3.1: schemes do not mind capitals.
    url = re.sub(r"^[A-Za-z][A-Za-z0-9+.-]+:/", lambda found: found[0].lower(), _text(place))
    if url.startswith(_FILE):
        # RFC 8089: an empty host is this one, as is localhost.
        url = re.sub("^localhost(?=/)", "", url[len(_FILE) :])
        _require(bool(url), place, "is empty: give a path or a URL")
    elif parts := _SCHEME.match(url):
        scheme, rest = parts["scheme"], parts["rest"].strip("/")
        # A secret key may have slashes in it; names of buckets have no colon (but for ARNs).
        has_credentials = scheme in _OF_BUCKETS and bool(re.match(r"(?!arn:)[^/]*:", rest))
        if has_credentials:
            raise ArgumentError(
                f"the place of a checkpoint, {scheme}://***, has a colon where the name of the "
                "bucket is expected: credentials are no part of such a URL; give them as "
                "storage_options={'key': ..., 'secret': ...}, or as AWS_* variables or a profile",
                url=f"{scheme}://***",
            )
        named = bool(rest) or scheme == "memory"  # which has no buckets
        _require(named, place, "names no bucket; give a URL such as s3://bucket/run/step-100")
        parts_wrong = scheme in _OF_BUCKETS and not {"", ".", ".."}.isdisjoint(rest.split("/"))
        _require(
            not parts_wrong,
            place,
            "has a part between slashes that is empty, '.' or '..', which not every client of such "
            "a store takes: leave it out",
        )
        whole = f"{scheme}://{'/' * (scheme == 'file')}{rest}"
        _require(
            len(parts["slashes"]) > 1,
            place,
            f"has lost a slash, as URLs do in pathlib.Path: give {whole!r} as a string",
        )
    # What is between us and the store may answer from a cache, or keep many names in one file:
    # claims and commits need the store itself.
    is_chain = "://" in url and "::" in url
    _require(not is_chain, place, "is a chain of URLs, which can hold none: give the store's own")
    if "://" not in url:
        url = os.path.abspath(os.path.expanduser(url))
    scheme, separator, path = url.rpartition("://")
    return f"{scheme}{separator}{path.rstrip('/')}" or "/"


def _text(place: object) -> str:
    try:
        url = os.fspath(place)  # type: ignore[call-overload]
    except TypeError:
        url = None
    if not isinstance(url, str):
        raise ArgumentError(
            f"the place of a checkpoint is a path or a URL, not a {type(place).__name__} "
            f"({place!r:.100})"
        )
    _require(bool(url.strip()), place, "is empty: give a path or a URL")
    _require("\0" not in url, place, "has a NUL character, which no path has")
    _require(url == url.lstrip() or "://" not in url, place, "begins with a blank: take it away")
    return url


def _require(condition: bool, place: object, what: str) -> None:
    if not condition:
        raise ArgumentError(
            f"the place of a checkpoint, {shown(place)!r}, {what}", url=shown(place)
        )
