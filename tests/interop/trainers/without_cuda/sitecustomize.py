"""What Megatron-Bridge needs to import and to save on the CPU, on PYTHONPATH.

Bridge and Megatron-Core are unmodified. Packages that need CUDA are replaced by empty ones:
Bridge's models and tokenizers, Transformer Engine, ModelOpt.
"""

from __future__ import annotations

import sys
import typing
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

EMPTY = (
    "transformer_engine",
    "modelopt",
    "megatron.bridge.data",
    "megatron.bridge.models",
    "megatron.bridge.peft",
    "megatron.bridge.training.tokenizers",
)


class Anything(type):
    """A class that has every attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {"__init__": lambda self, *args, **kwargs: None})


class Empty(MetaPathFinder, Loader):
    """Finds the packages of :data:`EMPTY`, in which every name is a class that does nothing.

    Not for Megatron-Core, which does without them.
    """

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        frame: Any = sys._getframe(1)
        while "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        by_core = frame.f_globals.get("__name__", "").startswith("megatron.core")
        below = any(f"{name}.".startswith(f"{empty}.") for empty in EMPTY)
        return ModuleSpec(name, self, is_package=True) if below and not by_core else None

    def exec_module(self, module: ModuleType) -> None:
        def attribute(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            if name.startswith("save_"):  # ModelOpt's functions
                return lambda *args, **kwargs: None
            return getattr(Anything("Empty", (), {}), name)

        module.__getattr__ = attribute  # type: ignore[method-assign]


sys.meta_path.insert(0, Empty())
sys.path.append(str(Path(__file__).resolve().parents[2] / "megatron"))

import torch  # noqa: E402
import typing_extensions  # noqa: E402

# Megatron-Core's wheel is for Python 3.12.
typing.override = typing_extensions.override

if not torch.cuda.is_available():
    from gpt import OnCpu

    OnCpu().__enter__()
    torch.cuda.get_rng_state = torch.get_rng_state
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda device=None: None
