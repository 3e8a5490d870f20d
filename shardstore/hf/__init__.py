"""Models in the format of Hugging Face: safetensors files, with an index if there are several.

:func:`load` fills the tensors of every rank's state dict. The functions are imported when they are
first used, because they import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardstore.hf.loading import load as load

_MODULES = {
    "load": "shardstore.hf.loading",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
