"""Changes the root document of a checkpoint, as rot, a lie or another program would."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardstore.storage.format.documents import ROOT_SUM
from shardstore.storage.runtime.checksums import crc32c
from shardstore.storage.stores.location import Location


def rewrite(place: str | Path, change: Callable[[dict[str, Any]], object], *, sign: bool) -> None:
    """Change the root document, in the form that a save writes, with a right checksum or none."""
    location = Location.of(place)
    document = json.loads(location.read("zarr.json"))
    change(document)
    about = document["attributes"]["shardstore"]
    about.pop(ROOT_SUM, None)
    document["attributes"] = {
        **document["attributes"],
        "shardstore": {ROOT_SUM: "00000000", **about} if sign else about,
    }
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    if sign:
        head, begun, rest = text.partition(b'root_crc32c":"')
        text = head + begun + b"%08x" % crc32c(rest[8:], 0) + rest[8:]
    location.write("zarr.json", text)


def about(root: dict[str, Any]) -> dict[str, Any]:
    """What the root document says of the checkpoint itself."""
    return root["attributes"]["shardstore"]  # type: ignore[no-any-return]


def members(root: dict[str, Any]) -> dict[str, Any]:
    """Node -> document of its array."""
    return root["consolidated_metadata"]["metadata"]  # type: ignore[no-any-return]
