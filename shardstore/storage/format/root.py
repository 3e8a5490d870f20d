"""Pure: the root group's document, parsed; the commit itself.

As a save writes it, the document of each array in it is of one form, and most differ in their key
alone. Such a text is taken apart without a parser of JSON, which would make a dozen objects for
each array that nobody looks at; any other text of the same meaning is parsed. Texts in, values out:
nothing here reads a file.
"""

from __future__ import annotations

import json
from collections.abc import Container
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from shardstore.errors import FormatVersionError, NotACheckpointError
from shardstore.storage.format.documents import (
    ARRAY_DOCUMENTS,
    CHUNK_SUMS,
    FILE_SUMS,
    FORMAT_VERSION,
    ArrayMeta,
    array_document,
)
from shardstore.storage.format.names import require_inside
from shardstore.storage.format.parsing import ArrayParser, crcs_of, json_object

__all__ = ["RootDocument", "parse_root"]

_MEMBERS = ',"consolidated_metadata":{"kind":"inline","must_understand":false,"metadata":{'
_AXES = '"dimension_names":['
_KEY = '],"attributes":{"shardstore":{"key":"'
_SHARDS = '","shard_shape":['


class _Member(NamedTuple):
    """The document of an array, cut into what arrays share and what is its own.

    Attributes:
        node: its node name.
        text: all of it.
        layout: what comes before the names of its axes.
        axes: the names of its axes.
        key: its key.
        shards: the edges of its shards, ``None`` where there are none.
    """

    node: str
    text: str
    layout: str
    axes: str
    key: str
    shards: str | None


@dataclass(frozen=True)
class RootDocument:
    """The parsed root document.

    Attributes:
        attributes: of the root group.
        format_version: of ``attributes.shardstore``, ``None`` where another program wrote the
            group.
        members: node -> document of each array that the group lists, parsed; or, of a text in the
            form that saves write, what it is made of.
        consolidated: whether the group lists its arrays; other programs need not.
    """

    url: str
    attributes: dict[str, Any]
    format_version: int | None
    members: dict[str, Any] | list[_Member]
    consolidated: bool = True

    @cached_property
    def documents(self) -> dict[str, Any]:
        """Node -> document of each array that the group lists, parsed.

        Raises:
            NotACheckpointError: one is not valid JSON.
        """
        if isinstance(self.members, dict):
            return self.members
        return {
            member.node: json_object(member.text, f"{self.url}/{member.node}")
            for member in self.members
        }

    @property
    def array_documents(self) -> bool:
        """Whether arrays have documents of their own, as far as this one says."""
        about = self.attributes.get("shardstore")
        return not isinstance(about, dict) or about.get(ARRAY_DOCUMENTS) is not False

    def arrays(self, without: Container[str] = ()) -> dict[str, ArrayMeta]:
        """All arrays by key.

        Args:
            without: nodes that are left out.

        Raises:
            FormatVersionError, DTypeMismatchError: an array uses what this version does not read.
        """
        if isinstance(self.members, list):
            found = self._arrays_of(self.members, without)
            if found is not None:
                return found
        out: dict[str, ArrayMeta] = {}
        sums, parser = self.chunk_sums, ArrayParser()
        for node, document in self.documents.items():
            if node in without:
                continue
            if isinstance(document, dict) and document.get("node_type") == "array":
                meta = parser.parse(node, document, f"{self.url}/{node}", sums.get(node))
                out[meta.key] = meta
        return out

    def _arrays_of(
        self, members: list[_Member], without: Container[str]
    ) -> dict[str, ArrayMeta] | None:
        """:meth:`arrays`, of texts; ``None`` where one is not as a save writes it."""
        out: dict[str, ArrayMeta] = {}
        sums, parser = self.chunk_sums, ArrayParser()
        known: dict[tuple[str, str | None], tuple[ArrayMeta, int]] = {}
        for node, text, layout, axes, key, shards in members:
            if node in without:
                continue
            like = known.get((layout, shards))
            if like is None:
                url = f"{self.url}/{node}"
                meta = parser.parse(node, json_object(text, url), url, sums.get(node))
                if meta.codecs is None or meta.key != key or array_document(meta) != text:
                    return None
                known[layout, shards] = meta, meta.grid.size
                out[key] = meta
                continue
            meta, chunks = like
            if not key or axes != ",".join([f'"{key}:{i}"' for i in range(len(meta.shape))]):
                return None
            crcs = sums.get(node)
            out[key] = ArrayMeta(
                key,
                node,
                meta.grid,
                meta.dtype,
                meta.codecs,
                separator=meta.separator,
                shard_shape=meta.shard_shape,
                crcs=crcs_of(crcs, chunks) if type(crcs) is str else None,
            )
        return out

    def file_sum(self, name: str) -> int | None:
        """crc32c of a file that is no chunk, as the commit wrote it down; ``None`` if it did not.

        Args:
            name: below the root.
        """
        found = self.file_sums.get(name)
        return found if isinstance(found, int) else None

    @property
    def file_sums(self) -> dict[str, int]:
        """Name below the root -> crc32c of each file that is no chunk, as the commit wrote them."""
        about = self.attributes.get("shardstore")
        sums = about.get(FILE_SUMS) if isinstance(about, dict) else None
        return sums if isinstance(sums, dict) else {}

    @property
    def chunk_sums(self) -> dict[str, str]:
        """Node -> base64 of :attr:`ArrayMeta.crcs`, as the commit wrote them."""
        about = self.attributes.get("shardstore")
        sums = about.get(CHUNK_SUMS) if isinstance(about, dict) else None
        return sums if isinstance(sums, dict) else {}


def parse_root(text: str | bytes, url: str) -> RootDocument:
    """Parse the root group's document.

    Raises:
        NotACheckpointError: not a Zarr v3 group.
        DamagedCheckpointError: a name in it leads out of the checkpoint.
        FormatVersionError: written by a later format.
    """
    members: dict[str, Any] | list[_Member]
    taken = _taken_apart(text)
    if taken is not None:
        document, members = taken
        consolidated = True
    else:
        document = json_object(text, url)
        about_members = document.get("consolidated_metadata")
        inline = about_members.get("metadata") if isinstance(about_members, dict) else None
        consolidated = isinstance(inline, dict)
        members = inline if isinstance(inline, dict) else {}
    if document.get("zarr_format") != 3 or document.get("node_type") != "group":
        raise NotACheckpointError(
            f"{url} is no Zarr v3 group; is not a distributed checkpoint of this format", url=url
        )
    attributes = document.get("attributes")
    attributes = attributes if isinstance(attributes, dict) else {}
    about = attributes.get("shardstore")
    version: int | None = None
    if isinstance(about, dict):
        version = about.get("format_version")
        if not isinstance(version, int) or not 1 <= version <= FORMAT_VERSION:
            raise FormatVersionError(
                f"{url} has shardstore format version {version!r}; this version of shardstore "
                "reads up to "
                f"{FORMAT_VERSION}: upgrade shardstore to load it",
                url=url,
            )
    root = RootDocument(url, attributes, version, members, consolidated)
    nodes = members if isinstance(members, dict) else [member.node for member in members]
    for name in (*nodes, *root.file_sums):
        require_inside(name, url)
    return root


def _taken_apart(text: str | bytes) -> tuple[dict[str, Any], list[_Member]] | None:
    """A root document without its arrays, and these; ``None`` unless it is as a save writes it.

    No name or key that JSON has to escape is taken: there every quote ends a text.
    """
    try:
        whole = text if isinstance(text, str) else text.decode()
        head, found, tail = whole.partition(_MEMBERS)
        document = json.loads(head + "}") if found else None
    except ValueError:
        return None
    if not isinstance(document, dict) or "\\" in tail:
        return None
    members: list[_Member] = []
    at = 0
    while tail.startswith(',"' if members else '"', at):
        at = tail.index('"', at)
        end = tail.find('":{', at + 1)
        axes = tail.find(_AXES, end)
        key = tail.find(_KEY, axes)
        quote = tail.find('"', key + len(_KEY))
        if min(end, axes, key, quote) < 0:
            return None
        close, shards = quote + 1, None
        if tail.startswith(_SHARDS, quote):
            close = tail.find("]", quote) + 1
            shards = tail[quote + len(_SHARDS) : close - 1]
        node = tail[at + 1 : end]
        if '"' in node or not tail.startswith("}}}", close):
            return None
        members.append(
            _Member(
                node,
                tail[end + 2 : close + 3],
                tail[end + 2 : axes],
                tail[axes + len(_AXES) : key],
                tail[key + len(_KEY) : quote],
                shards,
            )
        )
        at = close + 3
    if tail[at:] != "}}}" or len({member.node for member in members}) < len(members):
        return None
    return document, members
