"""safetensors: one file a rank; it maps the file, so the load ends with a copy into the tensors."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from bench.clients.base import Share, sync_once


class SafetensorsFile:
    """`save_file` and `safe_open`, one file a rank; replicated tensors lie in rank 0's file."""

    settings = "one file a rank, no checksum; sync: one syncfs after save"

    def prepare(self, share: Share) -> tuple[Share, dict[str, torch.Tensor]]:
        """The share, and the tensors that this rank writes."""
        writes = {
            entry.key: share.tensors[entry.key]
            for entry in share.entries
            if share.rank == 0 or entry.axis is not None or entry.flat is not None
        }
        return share, writes

    def save(self, prepared: tuple[Share, dict[str, torch.Tensor]], path: Path, sync: bool) -> None:
        """Write this rank's file."""
        share, writes = prepared
        path.mkdir(parents=True, exist_ok=True)
        save_file(writes, path / f"{share.rank}.safetensors")
        if sync:
            sync_once(path)

    def load(self, prepared: tuple[Share, dict[str, torch.Tensor]], path: Path) -> None:
        """Copy every tensor out of the mapped files."""
        share, writes = prepared
        for rank in {share.rank, 0}:
            with safe_open(path / f"{rank}.safetensors", framework="pt") as file:
                for key, tensor in share.tensors.items():
                    if (key in writes) == (rank == share.rank):
                        tensor.copy_(file.get_tensor(key))
