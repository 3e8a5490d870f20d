"""Tensors to convert, how they are compared, and a conversion that is killed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

import shardstore
from shardstore.convert import convert
from shardstore.progress import Progress
from tests.helpers.rank_server import start


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        a[k].shape == b[k].shape
        and a[k].dtype == b[k].dtype
        and torch.equal(bits(a[k]), bits(b[k]))
        for k in a
    )


def tensors_of(place: str | Path) -> dict[str, torch.Tensor]:
    loaded = shardstore.load_plain_tensors(place)
    return {key: value for key, value in loaded.items() if isinstance(value, torch.Tensor)}


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "model.w": torch.rand(300, 70, generator=generator),
        "model.b": torch.rand(300, generator=generator).bfloat16(),
        "scalar": torch.tensor(4.5),
        "empty": torch.zeros(0, 3),
        "flags": torch.arange(50) % 3 == 0,
        "a/b": torch.arange(24).reshape(2, 3, 4),
    }


def killed_conversion(source: str, target: str, target_format: str, file_bytes: int) -> int:
    """The exit code of a process that converts and dies after its fourth batch."""
    (process,) = start([(_convert_and_die, (source, target, target_format, file_bytes))])
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _convert_and_die(source: str, target: str, target_format: str, file_bytes: int) -> None:
    seen = []

    def stop(progress: Progress) -> None:
        seen.append(progress)
        if len(seen) == 7:
            os._exit(9)

    convert(
        source,
        target,
        target_format=target_format,
        memory_budget=200_000,
        file_bytes=file_bytes,
        progress=stop,
    )
