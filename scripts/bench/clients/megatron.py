"""megatron-core's `("zarr", 1)` strategy, as a program that uses core.dist_checkpointing calls it.

Runs only in an interpreter that has megatron-core 0.15 and zarr below 3.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bench.clients.base import Share, sharded_state_dict, sync_once

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    # Not installed where types are checked.
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import mapping
    from megatron.core.dist_checkpointing.serialization import (
        get_default_save_sharded_strategy,
    )

if not torch.cuda.is_available():
    # The strategy waits for the device whatever device there is; without one it cannot run.
    torch.cuda.synchronize = lambda device=None: None

if not hasattr(np, "product"):
    # Its check of flattened ranges was written for NumPy 1.
    np.product = np.prod  # type: ignore[attr-defined]

logging.getLogger("megatron").setLevel(logging.ERROR)
logging.getLogger("megatron.core").setLevel(logging.ERROR)


class Megatron:
    """The strategy at its defaults; it verifies no checksum and syncs nothing by itself."""

    settings = "zarr v2, no checksum; sync: one syncfs after save"

    def prepare(self, share: Share) -> dict[str, Any]:
        """A sharded state dict over the share's tensors."""
        return sharded_state_dict(mapping, share)

    def save(self, prepared: dict[str, Any], path: Path, sync: bool) -> None:
        """Save with the zarr strategy; the directory has to be there before."""
        if dist.get_rank() == 0:
            path.mkdir(parents=True)
        dist.barrier()
        strategy = get_default_save_sharded_strategy("zarr", 1)
        dist_checkpointing.save(prepared, str(path), strategy)
        if sync:
            sync_once(path)

    def load(self, prepared: dict[str, Any], path: Path) -> dict[str, torch.Tensor]:
        """Load; what comes back is not copied anywhere, which is in this peer's favour."""
        loaded: dict[str, torch.Tensor] = dist_checkpointing.load(prepared, str(path))
        return loaded
