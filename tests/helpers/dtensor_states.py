"""DTensors of every placement over four ranks or fewer, and the whole tensors that they are of.

What a rank holds of a tensor is cut out by torch's own placements, not by ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

SHAPES: dict[str, tuple[int, ...]] = {
    "even": (8, 4),
    "uneven": (11, 5),
    "thin": (3, 7),
    "vector": (13,),
    "cube": (5, 6, 4),
    "tall": (1001, 3),
    "empty": (0, 3),
    "one": (1,),
}


def whole(key: str, shift: int = 0) -> torch.Tensor:
    """The whole tensor of a key; every element of its own."""
    shape = SHAPES[key]
    values = torch.arange(math.prod(shape), dtype=torch.float32) + 1000 * shift
    dtype = torch.bfloat16 if key == "even" else torch.float32
    return values.reshape(shape).to(dtype)


def meshes(world_size: int) -> dict[str, DeviceMesh]:
    """A flat mesh, and a 2-D one where there are enough ranks."""
    found = {"flat": init_device_mesh("cpu", (world_size,))}
    if world_size == 4:
        found["square"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return found


def placements(world_size: int) -> dict[str, tuple[str, tuple[Placement, ...]]]:
    """Name -> mesh and placements."""
    found: dict[str, tuple[str, tuple[Placement, ...]]] = {
        "rows": ("flat", (Shard(0),)),
        "last": ("flat", (Shard(-1),)),
        "replica": ("flat", (Replicate(),)),
    }
    if world_size == 4:
        found |= {
            "hybrid": ("square", (Replicate(), Shard(0))),
            "grid": ("square", (Shard(0), Shard(-1))),
            "nested": ("square", (Shard(0), Shard(0))),
            "strided": ("square", (_StridedShard(0, split_factor=2), Shard(0))),
        }
    return found


def state(world_size: int, *, shift: int = 0, zero: bool = False) -> dict[str, Any]:
    """Every shape under every placement: ``{placement: {shape: DTensor}}``."""
    mesh = meshes(world_size)
    made: dict[str, Any] = {}
    for name, (which, placed) in placements(world_size).items():
        made[name] = {}
        for key in SHAPES:
            full = whole(key, shift)
            full = torch.full_like(full, -1) if zero else full
            made[name][key] = cut(full, mesh[which], [_normal(p, full.ndim) for p in placed])
    return made


def cut(full: torch.Tensor, mesh: DeviceMesh, placed: Sequence[Placement]) -> DTensor:
    """A whole tensor as a DTensor; no rank sends anything."""
    local, shape, stride = part_of(full, mesh, placed), full.shape, full.stride()
    return DTensor.from_local(local, mesh, placed, run_check=False, shape=shape, stride=stride)


def part_of(full: torch.Tensor, mesh: DeviceMesh, placed: Sequence[Placement]) -> torch.Tensor:
    """What this rank holds of a whole tensor."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    part = full
    for parts, index, placement in zip(mesh.shape, coordinate, placed, strict=True):
        if not placement.is_replicate():
            split: Any = placement
            part = split._split_tensor(part, parts, with_padding=False, contiguous=False)[0][index]
    return part.clone()


def _normal(placement: Placement, ndim: int) -> Placement:
    return Shard(ndim - 1) if placement == Shard(-1) else placement


def differences(loaded: dict[str, Any], shift: int = 0) -> list[str]:
    """Names of the tensors of which this rank does not hold what it should."""
    wrong = []
    for name, of_shape in loaded.items():
        for key, tensor in of_shape.items():
            expected = whole(key, shift)
            if isinstance(tensor, DTensor):
                expected = part_of(expected, tensor.device_mesh, tensor.placements)
                tensor = tensor.to_local()
            if not torch.equal(tensor, expected):
                wrong.append(f"{name}.{key}")
    return wrong
