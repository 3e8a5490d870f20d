"""Models in the format of Hugging Face: safetensors files, with an index if there are several."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardstore.hf.writing import async_save as async_save
    from shardstore.hf.writing import export as export
    from shardstore.hf.writing import save as save

_WHERE = dict.fromkeys(("save", "async_save", "export"), "writing")
"""Public name -> the module that defines it, which imports torch."""
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'shardstore.hf' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"shardstore.hf.{_WHERE[name]}"), name)
    globals()[name] = value
    return value
