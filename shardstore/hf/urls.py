"""The location of a model: a path or URL, also of the Hugging Face Hub and of web servers.

Passwords and query strings of a URL become storage options, so that no error text shows them.
"""

from __future__ import annotations

import os
import re
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import msgspec

from shardstore.errors import ArgumentError
from shardstore.storage.stores.errors import keep_quiet_about
from shardstore.storage.stores.location import Location, checked_options, shown

HUB = "https://huggingface.co"
_KINDS = ("datasets", "spaces")
_RESOLVE = re.compile(
    rf"(https?://.+?)/((?:{'|'.join(_KINDS)})/)?([^/]+/[^/]+)/resolve/"
    r"(?![0-9a-f]{40}\b)([^/]+)(|/.+)"  # a commit does not change
)


class _Revision(msgspec.Struct):
    """What the Hub says of a revision."""

    sha: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{40}$")]


def shown_url(place: object) -> str:
    """Return a path or URL for error texts and logs, without credentials."""
    text = shown(place)
    return text.partition("?")[0] if _is_web(text) else text


def _is_web(url: str) -> bool:
    return url.lower().startswith(("http://", "https://"))


def locate(place: Any, options: Mapping[str, Any] | None = None) -> Location:
    """Return the location of a model.

    Args:
        place: path or URL of a folder, a safetensors file or an index. ``hf://org/model@revision``
            is a repository of the Hub (``HF_ENDPOINT``, ``HF_TOKEN``). A branch with a slash has
            ``%2F`` in its place.
        options: storage options of fsspec; ``token`` is that of the Hub: a text; ``True`` for that
            of ``HF_TOKEN`` or ``hf auth login``, which is the default too; ``False`` for none.

    Raises:
        ArgumentError: ``place`` is neither a path nor a supported URL, or there is no token.
    """
    url = os.fspath(place) if isinstance(place, str | os.PathLike) else place
    if isinstance(url, str) and url.lower().startswith("hf://"):
        url, options = _of_hub(url[len("hf://") :], checked_options(options))
    if not isinstance(url, str) or not _is_web(url):
        return Location.of(place, options)
    parts, given = urlsplit(url), dict(checked_options(options))
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    keep_quiet_about({"username": user, "password": password}, parts.query, *query.values())
    if user:
        given = _with_header(given, f"Basic {b64encode(f'{user}:{password}'.encode()).decode()}")
    if query:
        given["params"] = query
    bare = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="")
    return Location.of(bare.geturl(), given)


def pinned(place: Location) -> Location:
    """Return a place on the Hub with the commit that its branch or tag names now, so that all ranks
    read one model (Hub documentation, "Hub API Endpoints"); other places as they are."""
    found = _RESOLVE.fullmatch(place.url)
    if found is None:
        return place
    endpoint, kind, model, revision, inner = found.groups()
    try:
        about = place.at(f"{endpoint}/api/{kind or 'models/'}{model}/revision").read(revision)
        commit = msgspec.json.decode(about, type=_Revision).sha
    except (OSError, msgspec.DecodeError):
        return place  # of another server, which has no such interface
    return place.at(f"{endpoint}/{kind or ''}{model}/resolve/{commit}{inner}")


def _with_header(options: Mapping[str, Any], authorization: str) -> dict[str, Any]:
    """Return options with a header that no log shows."""
    keep_quiet_about({}, authorization)
    return {**options, "headers": {**options.get("headers", {}), "Authorization": authorization}}


def _of_hub(name: str, options: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the URL of a repository's files (Hugging Face Hub documentation, "Download files"),
    and the options with the token as a header."""
    kind, _, rest = name.partition("/")
    above = f"{kind}/" if kind in _KINDS else ""
    owner, _, rest = (rest if above else name).strip("/").partition("/")
    repository, _, inner = rest.partition("/")
    repository, _, revision = repository.partition("@")
    if revision == "refs":  # such as refs/pr/1
        ref, number, *names = [*inner.split("/"), "", ""]
        revision, inner = f"refs/{ref}/{number}", "/".join(filter(None, names))
    if not owner or not repository:
        raise ArgumentError(f"'hf://{name:.100}' names no model; give hf://org/model@revision")
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if (value := os.environ.get(variable, "")).upper() in ("1", "ON", "YES", "TRUE"):
            raise ArgumentError(
                f"{variable}={value} forbids to ask the Hub for hf://{name:.100}; give the path of "
                "its folder, such as HF_HOME/hub/models--ORG--MODEL/snapshots/REVISION"
            )
    endpoint = os.environ.get("HF_ENDPOINT", HUB).rstrip("/")
    given = dict(options)
    asked = given.pop("token", None)
    token = str(asked or "").strip()
    if asked is True or not (token or asked is False):
        token = os.environ.get("HF_TOKEN", "").strip() or _kept_token()
    if asked is True and not token:
        raise ArgumentError(
            "token=True, but no token is kept: set HF_TOKEN, or run `hf auth login`"
        )
    if token:
        keep_quiet_about({"token": token})
        given = _with_header(given, f"Bearer {token}")
    revision = quote(unquote(revision or "main"), safe="")  # a branch with a slash may be quoted
    url = f"{endpoint}/{above}{owner}/{repository}/resolve/{revision}"
    return f"{url}/{inner}".rstrip("/"), given


def _kept_token() -> str:
    """Return the token that ``hf auth login`` keeps; empty without one."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{caches}/huggingface"
    path = Path(os.environ.get("HF_TOKEN_PATH") or f"{home}/token").expanduser()
    return path.read_text(encoding="utf-8").strip() if path.is_file() else ""
