"""Weights for training in low precision under FSDP2: subclasses of tensors, as those of torchao."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

KEPT = ("aten.detach.default", "aten.clone.default", "aten.slice.Tensor", "aten.copy_.default")
"""The operations whose results are weights, and not plain tensors."""


class Weight(torch.Tensor):
    """A weight in full precision; ``scale`` is computed from it ahead of time, or ``None``."""

    @staticmethod
    def __new__(cls, held: torch.Tensor, scale: torch.Tensor | None = None) -> Weight:
        made: Weight = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        return made

    def __init__(self, held: torch.Tensor, scale: torch.Tensor | None = None) -> None:
        self.held, self.scale = held, scale

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Weight({self.held!r})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"] if self.scale is None else ["held", "scale"], None

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        """What FSDP2 sends in its place."""
        return (self.held.to(torch.bfloat16),), None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def plain(value: Any) -> Any:
            return value.held if isinstance(value, Weight) else value

        made = func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))
        return cls(made) if str(func) in KEPT else made
