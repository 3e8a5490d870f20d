"""Models in the format of Hugging Face: safetensors files, with an index if there are several.

The functions are imported when they are first used, because they import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardstore.hf.loading import load as load
    from shardstore.hf.writing import async_save as async_save
    from shardstore.hf.writing import export as export
    from shardstore.hf.writing import save as save

_MODULES = {"load": "loading", **dict.fromkeys(("async_save", "export", "save"), "writing")}
"""Public name -> the module that defines it."""
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
