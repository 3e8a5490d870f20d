"""shardstore itself, through its public `save` and `load` and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import shardstore
from bench.clients.base import Share
from bench.clients.sharded import sharded_state_dict
from shardstore import mapping


class Ours:
    """Backend ("zarr", 2) at its defaults: crc32c in every chunk, verified on load."""

    def __init__(self, array_documents: int = True) -> None:
        self._array_documents = bool(array_documents)
        self.settings = "zarr v3, crc32c written and verified; sync: durable=True" + (
            "" if array_documents else "; array_documents=False"
        )

    def prepare(self, share: Share) -> dict[str, Any]:
        """A sharded state dict over the share's tensors."""
        return sharded_state_dict(mapping, share)

    def save(self, prepared: dict[str, Any], path: Path, sync: bool) -> None:
        """Save and commit."""
        shardstore.save(prepared, str(path), durable=sync, array_documents=self._array_documents)

    def load(self, prepared: dict[str, Any], path: Path) -> dict[str, torch.Tensor]:
        """Load, into the given tensors."""
        loaded: dict[str, torch.Tensor] = shardstore.load(prepared, str(path))
        return loaded
