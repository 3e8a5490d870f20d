"""shardstore itself, through its public functions and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import shardstore
from bench.clients.base import Share, sharded_state_dict
from shardstore import mapping


class Ours:
    """Backend ("zarr", 2) at its defaults: crc32c in every chunk, verified on load."""

    def __init__(self, *, saving: dict[str, Any] | None = None, **options: Any) -> None:
        self._saving, self._options = saving or {}, options
        self._async_save = shardstore.async_save  # imported here, in no figure
        words = ["zarr v3, crc32c written and verified; sync: durable=True"]
        words += [f"{name}={value}" for name, value in (self._saving | options).items()]
        self.settings = "; ".join(words)

    def prepare(self, share: Share) -> dict[str, Any]:
        """A sharded state dict over the share's tensors."""
        return sharded_state_dict(mapping, share)

    def save(self, prepared: dict[str, Any], path: Path, sync: bool) -> None:
        """Save and commit."""
        shardstore.save(prepared, str(path), durable=sync, **self._saving)

    def load(self, prepared: dict[str, Any], path: Path) -> Any:
        """Load, into the given tensors."""
        return shardstore.load(prepared, str(path))

    def start(self, prepared: dict[str, Any], path: Path) -> shardstore.AsyncSave:
        """`async_save`, durable as by default."""
        return self._async_save(prepared, path, **self._options)
