"""The state that the golden checkpoints hold, and that the tests against Megatron-Core exchange.

Answers for every value, as a formula of its place in the global tensor, and for how a rank of a
given layout holds its part. Imports torch alone and takes the ``mapping`` module (ShardedTensor,
ShardedObject) as an argument, so that the same lines describe a checkpoint to this package and to
Megatron-Core. The golden checkpoints depend on it: add to it, never change what is there.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Layout:
    """``tp`` tensor parallel times ``dp`` data parallel ranks; rank = dp_rank * tp + tp_rank.

    ``flat``: the optimizer's part is held in flattened ranges, which Megatron-Core has up to 0.15;
    else the data parallel ranks hold copies of it.
    """

    tp: int
    dp: int
    flat: bool = True

    @property
    def world_size(self) -> int:
        return self.tp * self.dp

    def of_rank(self, rank: int) -> tuple[int, int]:
        """The rank's place: (tensor parallel rank, data parallel rank)."""
        return rank % self.tp, rank // self.tp

    def __str__(self) -> str:
        return f"tp{self.tp}dp{self.dp}" + ("" if self.flat else "-whole")

    @classmethod
    def parse(cls, text: str) -> Layout:
        ranks, _, how = text.partition("-")
        tp, dp = ranks.removeprefix("tp").split("dp")
        return cls(int(tp), int(dp), how != "whole")


GOLDEN = (Layout(1, 1), Layout(2, 1), Layout(2, 2), Layout(1, 4))
"""Layouts of the ranks that wrote the golden checkpoints, each in a folder of the layout's name."""


@dataclass(frozen=True)
class Tensor:
    """A global tensor; ``layers``: length of a prepended axis; ``tp_axis``: cut among tp ranks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    tp_axis: int | None = None
    layers: int | None = None
    allow_shape_mismatch: bool = False

    @property
    def global_shape(self) -> tuple[int, ...]:
        return self.shape if self.layers is None else (self.layers, *self.shape)


MODEL = {
    "embedding.weight": Tensor((12, 6), torch.float32, 0, allow_shape_mismatch=True),
    "decoder.qkv.weight": Tensor((8, 6), torch.bfloat16, 0, layers=3),
    "decoder.proj.weight": Tensor((5, 8), torch.bfloat16, 1, layers=3),
    "decoder.norm.weight": Tensor((7,), torch.float32, layers=3),
    "head.weight": Tensor((4, 10), torch.float16, 1),
    "final_norm.weight": Tensor((7,), torch.bfloat16),
    "token_counts": Tensor((6, 3), torch.int64, 0),
    "attention_mask": Tensor((4, 6), torch.bool, 1),
    "step": Tensor((1,), torch.int64),  # not 0-d: Megatron-Core's zarr strategy cannot save that
    "scale": Tensor((2, 3), torch.float64),
}

# Held as flattened ranges of one buffer that the data parallel ranks share out in equal parts, as a
# distributed optimizer does: the parts' borders fall anywhere in a tensor, and a rank may hold
# nothing of one.
OPTIMIZER = {
    "optimizer.exp_avg.embedding.weight": Tensor((12, 6), torch.float32, 0),
    "optimizer.exp_avg.decoder.qkv.weight": Tensor((8, 6), torch.float32, 0, layers=3),
    "optimizer.param.decoder.proj.weight": Tensor((5, 8), torch.bfloat16, 1, layers=3),
    "optimizer.exp_avg.final_norm.weight": Tensor((7,), torch.float32),
    "optimizer.count.head.weight": Tensor((4, 10), torch.int64, 1),
}

CONTENT_METADATA = {"distrib_optim_sharding_type": "fully_sharded_model_space", "revision": 3}

COMMON: dict[str, Any] = {
    "iteration": 1234,
    "args": {
        "lr": 0.1,
        "betas": [0.9, 0.95],
        "names": ["first", "zweiter", "третий"],
        "schedule": {"stages": [{"until": 10, "lr": 1e-3}, {"until": None, "lr": 1e-4}]},
        "shape": (3, 5),
        "flag": True,
    },
    "loss_history": torch.arange(5, dtype=torch.float32) / 3,
}


def values(key: str) -> torch.Tensor:
    """The whole global tensor ``key``; every value is exact in its data type, and no NaN."""
    spec = {**MODEL, **OPTIMIZER}[key]
    count = int(torch.Size(spec.global_shape).numel())
    start = sum(key.encode()) % 61
    index = torch.arange(count, dtype=torch.int64) + start
    if spec.dtype == torch.bool:
        flat = index % 3 == 0
    elif not spec.dtype.is_floating_point:
        flat = (index - 20) * (1 << 40) + index
    else:
        flat = ((index % 251 - 125).to(torch.float64) / 8).to(spec.dtype)
        if spec.dtype == torch.bfloat16:
            special = [-0.0, float("inf"), -float("inf"), 1e-40, 3.3895313892515355e38]
            flat[1 : 1 + len(special)] = torch.tensor(special, dtype=torch.bfloat16)
    return flat.reshape(spec.global_shape)


def local_tensors(layout: Layout, rank: int, tensors: dict[str, Tensor]) -> Iterator[LocalTensor]:
    """The rectangles of ``tensors`` that the rank's tensor parallel group member holds."""
    tp_rank, _ = layout.of_rank(rank)
    for key, spec in tensors.items():
        for layer in range(spec.layers or 1):
            whole = values(key)
            offsets: list[tuple[int, int, int]] = []
            prepended = 0
            if spec.layers is not None:
                whole = whole[layer]
                offsets.append((0, layer, spec.layers))
                prepended = 1
            if spec.tp_axis is not None and layout.tp > 1:
                whole = whole.chunk(layout.tp, spec.tp_axis)[tp_rank]
                offsets.append((spec.tp_axis + prepended, tp_rank, layout.tp))
            name = key if spec.layers is None else f"{key}.{layer}"
            copies = 0 if spec.tp_axis is not None else tp_rank
            yield LocalTensor(name, key, spec, whole.contiguous(), offsets, prepended, copies)


@dataclass(frozen=True)
class LocalTensor:
    """What one rank holds of a tensor: its values and its place, in terms of ``rank_offsets``."""

    name: str
    key: str
    spec: Tensor
    data: torch.Tensor
    offsets: list[tuple[int, int, int]]
    prepended: int
    tp_replica: int


def build(mapping: Any, layout: Layout, rank: int, *, empty: bool = False) -> dict[str, Any]:
    """The sharded state dict of one rank.

    Args:
        mapping: the module with ShardedTensor and ShardedObject.
        layout: how the ranks share the tensors.
        rank: the rank whose part it is.
        empty: the request of a load: tensors of wrong values, objects and common values left out.
    """
    wrong = _wrong if empty else torch.clone
    _, dp_rank = layout.of_rank(rank)

    def whole(tensors: dict[str, Tensor]) -> dict[str, Any]:
        return {
            part.name: mapping.ShardedTensor.from_rank_offsets(
                part.key,
                wrong(part.data),
                *part.offsets,
                replica_id=(0, part.tp_replica, dp_rank),
                prepend_axis_num=part.prepended,
                allow_shape_mismatch=part.spec.allow_shape_mismatch,
            )
            for part in local_tensors(layout, rank, tensors)
        }

    optimizer = _optimizer_part(mapping, layout, rank, wrong) if layout.flat else whole(OPTIMIZER)
    state: dict[str, Any] = {
        "model": whole(MODEL),
        "optimizer": {"state": [optimizer]},
        "objects": _objects(mapping, layout, rank, empty),
    }
    return state if empty else {**state, **COMMON}


def _optimizer_part(
    mapping: Any, layout: Layout, rank: int, wrong: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, Any]:
    parts = list(local_tensors(layout, rank, OPTIMIZER))
    share = -(-sum(part.data.numel() for part in parts) // layout.dp)
    _, dp_rank = layout.of_rank(rank)
    mine = range(dp_rank * share, (dp_rank + 1) * share)
    held: dict[str, Any] = {}
    begin = 0
    for part in parts:
        end = begin + part.data.numel()
        first, last = max(begin, mine.start), min(end, mine.stop)
        if first < last:
            taken = slice(first - begin, last - begin)
            held[part.name] = mapping.ShardedTensor.from_rank_offsets_flat(
                part.key,
                wrong(part.data.flatten()[taken]),
                tuple(part.data.shape),
                *part.offsets,
                flattened_range=taken,
                replica_id=(0, part.tp_replica, 0),
                prepend_axis_num=part.prepended,
            )
        begin = end
    return held


def _objects(mapping: Any, layout: Layout, rank: int, empty: bool) -> dict[str, Any]:
    """Two objects of each kind; the tensor parallel ranks share them out."""
    tp_rank, dp_rank = layout.of_rank(rank)
    contents: dict[str, Callable[[int], Any]] = {
        "rng": lambda i: {"seed": 100 + i, "states": [torch.arange(4) * (i + 1), "cpu"]},
        "fp8_meta": lambda i: io.BytesIO(bytes(range(i, i + 40))),
        "amax": lambda i: torch.arange(6, dtype=torch.float32).reshape(2, 3) + i,
    }
    return {
        f"{kind}.{i}": mapping.ShardedObject(
            f"objects.{kind}", None if empty else make(i), (2,), (i,), replica_id=dp_rank
        )
        for kind, make in contents.items()
        for i in range(2)
        if i % layout.tp == tp_rank
    }


def _wrong(tensor: torch.Tensor) -> torch.Tensor:
    """Values that a load has to overwrite: none of them is right."""
    bits = tensor.contiguous().view(torch.uint8) if tensor.ndim else tensor.reshape(1)
    if tensor.dtype == torch.bool:
        return ~tensor
    if tensor.ndim == 0:
        return tensor + 1
    return (bits ^ 0x55).view(tensor.dtype)


def expected(mapping: Any, layout: Layout, rank: int) -> dict[str, Any]:
    """What a load under this layout gives: values where :func:`build` has sharded ones."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(child) for key, child in value.items()}
        if isinstance(value, list):
            return [plain(child) for child in value]
        if isinstance(value, mapping.ShardedTensor | mapping.ShardedObject):
            return value.data
        return value

    result: dict[str, Any] = plain(build(mapping, layout, rank))
    return result


def differences(got: Any, want: Any, path: str = "state") -> list[str]:
    """Where two state dicts differ: keys of only one, types, and values, tensors to the bit."""
    if isinstance(want, dict):
        if not isinstance(got, dict):
            return [f"{path}: {type(got).__name__}, expected a dict"]
        found = [f"{path}: no {key!r}" for key in want if key not in got]
        found += [f"{path}: unexpected {key!r}" for key in got if key not in want]
        for key in want.keys() & got.keys():
            found += differences(got[key], want[key], f"{path}[{key!r}]")
        return found
    if isinstance(want, list | tuple):
        if type(got) is not type(want) or len(got) != len(want):
            return [f"{path}: {got!r}, expected {want!r}"]
        return [
            line
            for i, (one, other) in enumerate(zip(got, want, strict=True))
            for line in differences(one, other, f"{path}[{i}]")
        ]
    if isinstance(want, torch.Tensor):
        if not isinstance(got, torch.Tensor):
            return [f"{path}: {type(got).__name__}, expected a tensor"]
        if (got.shape, got.dtype) != (want.shape, want.dtype):
            return [f"{path}: {got.shape} {got.dtype}, expected {want.shape} {want.dtype}"]
        same = torch.equal(
            got.contiguous().reshape(-1).view(torch.uint8),
            want.contiguous().reshape(-1).view(torch.uint8),
        )
        return [] if same else [f"{path}: {got}, expected {want}"]
    if isinstance(want, io.BytesIO):
        same = isinstance(got, io.BytesIO) and got.getvalue() == want.getvalue()
        return [] if same else [f"{path}: {got!r}, expected the bytes {want.getvalue()!r}"]
    same = type(got) is type(want) and got == want
    return [] if same else [f"{path}: {got!r}, expected {want!r}"]
