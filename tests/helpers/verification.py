"""Verifications of a checkpoint, with all that they find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardstore.inspection.verify import Finding, Verified, verify
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.stores.location import Location


def verified(place: str | Path | Location, **options: Any) -> tuple[Verified, list[Finding]]:
    """The result of a verification, and its findings; ``options`` are those of ``verify``."""
    found: list[Finding] = []
    return verify(StoredCheckpoint(Location.of(place)), found.append, **options), found


def findings(place: str | Path | Location, **options: Any) -> list[Finding]:
    return verified(place, **options)[1]
