"""safetensors: one file a rank; it maps the file, so the load ends with a copy into the tensors."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from bench.clients.base import Share, sync_once


class SafetensorsFile:
    """`save_file` and `safe_open`, one file a rank; replicated tensors lie in rank 0's file."""

    settings = "one file a rank, no checksum; sync: one syncfs after save"

    def prepare(self, share: Share) -> Share:
        """The share itself."""
        return share

    def save(self, prepared: Share, path: Path, sync: bool) -> None:
        """Write this rank's file."""
        path.mkdir(parents=True, exist_ok=True)
        mine = {e.key: prepared.tensors[e.key] for e in prepared.entries if prepared.writes(e)}
        save_file(mine, path / f"{prepared.rank}.safetensors")
        if sync:
            sync_once(path)

    def load(self, prepared: Share, path: Path) -> None:
        """Copy every tensor out of the mapped files."""
        device = str(next(iter(prepared.tensors.values())).device)
        for rank in {prepared.rank, 0}:
            name = path / f"{rank}.safetensors"
            with safe_open(name, framework="pt", device=device) as file:
                for entry in prepared.entries:
                    if prepared.writes(entry) == (rank == prepared.rank):
                        prepared.tensors[entry.key].copy_(file.get_tensor(entry.key))
