"""Orbax, as a program in JAX calls it: a flat dictionary of arrays on the CPU, one process.

Runs only in an interpreter that has orbax-checkpoint (scripts/orbax_env).
"""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # type: ignore[import-not-found]
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp  # type: ignore[import-not-found]
import torch

from bench.clients.base import Share, sync_once

logging.getLogger("absl").setLevel(logging.ERROR)


class Orbax:
    """`StandardCheckpointer` at its defaults; what it loads are new arrays."""

    settings = "StandardCheckpointer (OCDBT, zstd), one process; sync: one syncfs after save"

    def prepare(self, share: Share) -> dict[str, Any]:
        """The tensors as arrays of JAX.

        Raises:
            ValueError: more ranks than one, which JAX would have to start.
        """
        if share.world != 1:
            raise ValueError("one rank only")
        return {key: jax.device_put(_as_numpy(tensor)) for key, tensor in share.tensors.items()}

    def save(self, prepared: dict[str, Any], path: Path, sync: bool) -> None:
        """Save, and wait for the end."""
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, prepared)
        if sync:
            sync_once(path)

    def load(self, prepared: dict[str, Any], path: Path) -> dict[str, torch.Tensor]:
        """Restore into new arrays of the shapes, types and device that are wanted."""
        wanted = jax.tree_util.tree_map(ocp.utils.to_shape_dtype_struct, prepared)
        with ocp.StandardCheckpointer() as checkpointer:
            found = checkpointer.restore(path, wanted)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nobody writes to what was loaded
            return {key: _as_tensor(np.asarray(array)) for key, array in found.items()}


def _as_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    array: np.ndarray[Any, Any] = tensor.numpy()
    return array


def _as_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)
