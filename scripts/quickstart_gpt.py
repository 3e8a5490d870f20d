"""A small GPT on bytes: tensor-parallel layers, and Adam state in ranges over replicas.

The training half of the quickstart: layout of ranks, text, model, optimizer.
``quickstart_train.py`` describes this state to shardstore.

Everything is deterministic. Start weights are drawn for the global model, and text for the global
batch, so that any layout of ranks computes the same loss up to the order of floating-point sums.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (the name everybody uses)
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

VOCABULARY = 256
SPREAD = 0.02


@dataclass(frozen=True)
class Config:
    """Sizes of model and batch; ``batch`` is the global one, in sequences of ``context`` bytes."""

    width: int = 256
    layers: int = 6
    heads: int = 8
    context: int = 128
    batch: int = 8
    learning_rate: float = 3e-4
    seed: int = 1234


@dataclass(frozen=True)
class Layout:
    """Who this rank is among ``dp`` x ``tp`` ranks; a group of one rank is None."""

    tp: int
    dp: int
    rank: int
    tp_group: dist.ProcessGroup | None
    dp_group: dist.ProcessGroup | None

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def dp_rank(self) -> int:
        return self.rank // self.tp

    @property
    def world(self) -> int:
        return self.tp * self.dp


def join_ranks(tp: int, dp: int, timeout_s: float) -> Layout:
    """Start gloo from torchrun's environment; every rank calls it. A world of one starts nothing.

    Args:
        tp: tensor-parallel size.
        dp: data-parallel size; ``tp * dp`` has to be torchrun's world size.
        timeout_s: after this long without an answer a collective fails instead of waiting on.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != tp * dp:
        raise SystemExit(f"tp {tp} x dp {dp} needs {tp * dp} ranks, there are {world}")
    if world == 1:
        return Layout(1, 1, 0, None, None)
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    groups = (mesh.get_group(name) if mesh[name].size() > 1 else None for name in ("tp", "dp"))
    return Layout(tp, dp, dist.get_rank(), *groups)


def all_reduce(value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum ``value`` in place over ``group`` (None: this rank alone)."""
    if group is not None:
        dist.all_reduce(value, group=group)
    return value


class Spread(torch.autograd.Function):
    """Into a tensor-parallel region: each rank uses the whole value, so their gradients add up."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradient.clone(), ctx.group), None


class Sum(torch.autograd.Function):
    """Out of a tensor-parallel region: the ranks' parts add up, each gets the whole gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        return all_reduce(part.clone(), group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


@dataclass(frozen=True)
class Parameter:
    """A parameter's shape over all tensor-parallel ranks, and the axis that they cut (or none)."""

    shape: tuple[int, ...]
    axis: int | None = None

    def local_shape(self, tp: int) -> tuple[int, ...]:
        return tuple(n // tp if a == self.axis else n for a, n in enumerate(self.shape))


def parameters(config: Config) -> dict[str, Parameter]:
    """All parameters by name; those of layer ``i`` are called ``layers.i.<name>``."""
    w = config.width
    layer = {
        "norm1.weight": Parameter((w,)),
        "norm1.bias": Parameter((w,)),
        "attention.qkv": Parameter((3, w, w), 1),
        "attention.out": Parameter((w, w), 1),
        "attention.out_bias": Parameter((w,)),
        "norm2.weight": Parameter((w,)),
        "norm2.bias": Parameter((w,)),
        "mlp.up": Parameter((4 * w, w), 0),
        "mlp.up_bias": Parameter((4 * w,), 0),
        "mlp.down": Parameter((w, 4 * w), 1),
        "mlp.down_bias": Parameter((w,)),
    }
    return {
        "embedding.tokens": Parameter((VOCABULARY, w)),
        "embedding.positions": Parameter((config.context, w)),
        **{f"layers.{i}.{n}": p for i in range(config.layers) for n, p in layer.items()},
        "final_norm.weight": Parameter((w,)),
        "final_norm.bias": Parameter((w,)),
        "head": Parameter((VOCABULARY, w)),
    }


class GPT:
    """This rank's part of the model: bf16 weights in one flat buffer, computed with in fp32."""

    def __init__(self, config: Config, layout: Layout) -> None:
        self.config, self.layout = config, layout
        self.parameters = parameters(config)
        self.spans: dict[str, slice] = {}
        end = 0
        for name, parameter in self.parameters.items():
            start, end = end, end + torch.Size(parameter.local_shape(layout.tp)).numel()
            self.spans[name] = slice(start, end)
        # Padded: data-parallel ranks own ranges of one length, wherever tensors begin and end.
        self.flat = torch.zeros(-(-end // layout.dp) * layout.dp, dtype=torch.bfloat16)
        self.weights = self.views(self.flat)
        for i, (name, parameter) in enumerate(self.parameters.items()):
            if name.endswith("bias"):
                continue
            if "norm" in name:
                self.weights[name].fill_(1.0)
                continue
            draw = torch.Generator().manual_seed(config.seed + i)
            whole = torch.randn(parameter.shape, generator=draw) * SPREAD
            cut = (whole,) if parameter.axis is None else whole.chunk(layout.tp, parameter.axis)
            self.weights[name].copy_(cut[layout.tp_rank % len(cut)])

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """A flat buffer seen as one tensor per parameter."""
        return {
            name: flat[self.spans[name]].view(parameter.local_shape(self.layout.tp))
            for name, parameter in self.parameters.items()
        }

    def loss_and_gradient(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss over this rank's sequences, and its gradient as one flat fp32 buffer.

        Args:
            tokens: sequences x (context + 1) bytes, int64.
        """
        flat = self.flat.float().requires_grad_()
        loss = self._loss(self.views(flat), tokens[:, :-1], tokens[:, 1:])
        (gradient,) = torch.autograd.grad(loss, flat)
        return loss.detach(), gradient

    def _loss(self, w: dict[str, Tensor], tokens: Tensor, targets: Tensor) -> Tensor:
        x = F.embedding(tokens, w["embedding.tokens"]) + w["embedding.positions"]
        for i in range(self.config.layers):
            layer = {n.split(".", 2)[2]: t for n, t in w.items() if n.startswith(f"layers.{i}.")}
            x = x + self._attention(layer, x)
            x = x + self._mlp(layer, x)
        x = self._norm(x, w["final_norm.weight"], w["final_norm.bias"])
        return F.cross_entropy(F.linear(x, w["head"]).flatten(0, 1), targets.flatten())

    def _norm(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (self.config.width,), weight, bias)

    def _attention(self, w: dict[str, Tensor], x: Tensor) -> Tensor:
        tp = self.layout.tp_group
        x = Spread.apply(self._norm(x, w["norm1.weight"], w["norm1.bias"]), tp)
        heads, depth = self.config.heads // self.layout.tp, self.config.width // self.config.heads
        shape = (*x.shape[:2], heads, depth)
        q, k, v = (F.linear(x, m).view(shape) for m in w["attention.qkv"])
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        part = F.linear(out.transpose(1, 2).flatten(2), w["attention.out"])
        return Sum.apply(part, tp) + w["attention.out_bias"]

    def _mlp(self, w: dict[str, Tensor], x: Tensor) -> Tensor:
        tp = self.layout.tp_group
        x = Spread.apply(self._norm(x, w["norm2.weight"], w["norm2.bias"]), tp)
        part = F.linear(F.gelu(F.linear(x, w["mlp.up"], w["mlp.up_bias"])), w["mlp.down"])
        return Sum.apply(part, tp) + w["mlp.down_bias"]


class ShardedAdam:
    """Adam over bf16 weights with fp32 state; each data-parallel rank keeps one range of it.

    The range is cut from the model's flat buffer with no regard to tensors, so most ranks hold the
    end of one tensor and the start of another.
    """

    KINDS = ("param", "exp_avg", "exp_avg_sq")

    def __init__(self, model: GPT) -> None:
        self.model = model
        size = model.flat.numel() // model.layout.dp
        self.start, self.end = model.layout.dp_rank * size, (model.layout.dp_rank + 1) * size
        self.state = {kind: torch.zeros(size) for kind in self.KINDS}
        self.state["param"].copy_(model.flat[self.start : self.end])
        self.steps = 0

    def pieces(self) -> Iterator[tuple[str, slice, slice]]:
        """Each parameter this rank has a part of: name, range in the tensor, range in the state."""
        for name, span in self.model.spans.items():
            low, high = max(span.start, self.start), min(span.stop, self.end)
            if low < high:
                in_tensor = slice(low - span.start, high - span.start)
                yield name, in_tensor, slice(low - self.start, high - self.start)

    def step(self, gradient: Tensor) -> None:
        """Average ``gradient`` over replicas, update this rank's range, share the weights."""
        layout = self.model.layout
        all_reduce(gradient, layout.dp_group).div_(layout.dp)
        own = gradient[self.start : self.end]
        self.steps += 1
        rate = self.model.config.learning_rate * min(1.0, self.steps / 5)
        param, mean, square = (self.state[kind] for kind in self.KINDS)
        mean.mul_(0.9).add_(own, alpha=0.1)
        square.mul_(0.95).addcmul_(own, own, value=0.05)
        scale = (square / (1 - 0.95**self.steps)).sqrt_().add_(1e-8)
        param.addcdiv_(mean, scale, value=-rate / (1 - 0.9**self.steps))
        mine = param.bfloat16()
        if layout.dp_group is None:
            self.model.flat.copy_(mine)
        else:
            parts = list(self.model.flat.view(torch.uint8).chunk(layout.dp))
            dist.all_gather(parts, mine.view(torch.uint8), group=layout.dp_group)


class Lane:
    """One sequence of the global batch: where it reads the text."""

    def __init__(self, index: int, config: Config, text: Tensor) -> None:
        self.index, self.context, self.text = index, config.context, text
        self.position = index * (len(text) // config.batch)

    def next(self) -> Tensor:
        """The next context + 1 bytes."""
        at = torch.arange(self.position, self.position + self.context + 1) % len(self.text)
        self.position = (self.position + self.context) % len(self.text)
        return self.text[at].long()


def read_text(limit_bytes: int = 4 << 20) -> Tensor:
    """Sources of this Python's standard library as uint8, in order of names."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:limit_bytes]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
