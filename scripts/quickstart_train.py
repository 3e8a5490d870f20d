"""One rank of the quickstart: trains and saves, or resumes under any layout and proves it.

Shows how a training state is described to ``save`` and ``load``, and compares what came back, bit
for bit, with what was there. ``quickstart_main.py`` runs it by torchrun, or alone as a world of
one. It leaves its findings in a JSON file; any difference ends it with an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from quickstart_gpt import GPT, Config, Lane, Layout, ShardedAdam, all_reduce, join_ranks, read_text
from torch import Tensor

import shardstore
from shardstore.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor
from shardstore.validation import StrictHandling

MIB = 1 << 20


class Trainer:
    """Model, optimizer, text and counters of one rank."""

    def __init__(self, config: Config, layout: Layout) -> None:
        torch.manual_seed(config.seed)
        self.config, self.layout = config, layout
        self.model = GPT(config, layout)
        self.adam = ShardedAdam(self.model)
        text = read_text()
        self.text_sha256 = sha256(text)
        share = config.batch // layout.dp
        first = layout.dp_rank * share
        self.lanes = [Lane(i, config, text) for i in range(first, first + share)]
        self.step = 0
        self.losses: list[float] = []

    def train(self, until: int) -> None:
        """Steps up to step number ``until``, on every rank; rank 0 prints."""
        began, first = time.perf_counter(), self.step
        while self.step < until:
            tokens = torch.stack([lane.next() for lane in self.lanes])
            loss, gradient = self.model.loss_and_gradient(tokens)
            self.adam.step(gradient)
            self.losses.append((all_reduce(loss, self.layout.dp_group) / self.layout.dp).item())
            self.step += 1
            if self.step % 5 == 0 or self.step in (first + 1, until):
                say(self.layout, f"  step {self.step:3d}  loss {self.losses[-1]:.4f}")
        took = time.perf_counter() - began
        tokens_each = self.config.batch * self.config.context
        rate = (until - first) * tokens_each / took
        steps = f"  {until - first} steps in {took:.1f} s"
        say(self.layout, f"{steps}, {rate:,.0f} bytes of text a second")

    def places(self, name: str) -> tuple[str, list[tuple[int, int, int]], int, tuple[int, int]]:
        """Key, cuts (axis, part, parts), prepended axes and replica of a parameter on this rank.

        A parameter of all layers is one global tensor with the layer as its first axis.
        """
        parameter, key, cuts = self.model.parameters[name], name, []
        prepended = int(name.startswith("layers."))
        if prepended:
            _, index, rest = name.split(".", 2)
            key, cuts = f"layers.{rest}", [(0, int(index), self.config.layers)]
        tp, tp_rank = self.layout.tp, self.layout.tp_rank
        if parameter.axis is not None:
            cuts.append((parameter.axis + prepended, tp_rank, tp))
        return key, cuts, prepended, (tp_rank if parameter.axis is None else 0, self.layout.dp_rank)

    def state_dict(self) -> dict[str, Any]:
        """Everything that training goes on from; its tensors are the live ones."""
        weights: dict[str, ShardedTensor] = {}
        state: dict[str, dict[str, ShardedTensor]] = {kind: {} for kind in self.adam.KINDS}
        for name, weight in self.model.weights.items():
            key, cuts, prepended, replica = self.places(name)
            weights[name] = ShardedTensor.from_rank_offsets(
                f"model.{key}", weight, *cuts, replica_id=replica, prepend_axis_num=prepended
            )
        for name, in_tensor, in_state in self.adam.pieces():
            key, cuts, prepended, replica = self.places(name)
            for kind, flat in self.adam.state.items():
                state[kind][name] = ShardedTensor.from_rank_offsets_flat(
                    f"optimizer.{kind}.{key}",
                    flat[in_state],
                    tuple(self.model.weights[name].shape),
                    *cuts,
                    flattened_range=in_tensor,
                    # Each range has one data-parallel owner; only tensor-parallel copies repeat it.
                    replica_id=(replica[0], 0),
                    prepend_axis_num=prepended,
                )
        batch, copy = (self.config.batch,), self.layout.tp_rank
        return {
            "model": weights,
            "optimizer": {"state": state, "steps": self.adam.steps},
            "lanes": {
                lane.index: ShardedObject("lanes", lane.position, batch, (lane.index,), copy)
                for lane in self.lanes
            },
            "step": self.step,
            "losses": list(self.losses),
            "config": asdict(self.config),
            "text_sha256": self.text_sha256,
            "rng": torch.get_rng_state(),
            "process": LocalNonpersistentObject({"pid": os.getpid(), "rank": self.layout.rank}),
        }

    def restore(self, loaded: dict[str, Any]) -> None:
        """Take over what is no tensor; the tensors were read into their place."""
        expect(loaded["text_sha256"] == self.text_sha256, "the text is not the one trained on")
        expect(loaded["config"] == asdict(self.config), "the model's sizes are not those saved")
        mine = {"pid": os.getpid(), "rank": self.layout.rank}
        expect(loaded["process"] == mine, "a non-persistent object was not kept local")
        self.step, self.losses = loaded["step"], list(loaded["losses"])
        self.adam.steps = loaded["optimizer"]["steps"]
        torch.set_rng_state(loaded["rng"])
        for lane in self.lanes:
            lane.position = loaded["lanes"][lane.index]

    def global_tensors(self) -> dict[str, Tensor]:
        """Every global tensor, put together on rank 0 without shardstore; empty on other ranks.

        Copies of the same part on several ranks have to be the same bits.
        """
        tp, dp = self.layout.tp, self.layout.dp
        flats: dict[str, list[Tensor]] = {"model": []}
        ranks = gather(self.model.flat, self.layout)
        if ranks:
            flats["model"] = ranks[:tp]
            for rank, flat in enumerate(ranks):
                expect(same_bits(flat, ranks[rank % tp]), f"rank {rank} has other weights")
        for kind, flat in self.adam.state.items():
            ranks = gather(flat, self.layout)
            flats[f"optimizer.{kind}"] = [
                torch.cat([ranks[d * tp + t] for d in range(dp)]) for t in range(tp if ranks else 0)
            ]
        found: dict[str, Tensor] = {}
        for kind, per_tp in flats.items():
            if not per_tp:
                continue
            views = [self.model.views(flat) for flat in per_tp]
            layers: dict[str, list[Tensor]] = {}
            for name, parameter in self.model.parameters.items():
                parts = [view[name] for view in views]
                if parameter.axis is None:
                    expect(all(same_bits(p, parts[0]) for p in parts), f"{kind}.{name} differs")
                whole = parts[0] if parameter.axis is None else torch.cat(parts, parameter.axis)
                key, _, prepended, _ = self.places(name)
                if prepended:
                    layers.setdefault(f"{kind}.{key}", []).append(whole)
                else:
                    found[f"{kind}.{key}"] = whole
            found.update({key: torch.stack(each) for key, each in layers.items()})
        return found


def expect(holds: bool, otherwise: str) -> None:
    """End this rank with an error unless ``holds``; torchrun then ends the others."""
    if not holds:
        raise SystemExit(f"quickstart: {otherwise}")


def say(layout: Layout, text: str) -> None:
    if layout.rank == 0:
        print(text, flush=True)


def raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(raw(one), raw(other))


def sha256(tensor: Tensor) -> str:
    return hashlib.sha256(raw(tensor).numpy().data).hexdigest()


def gather(tensor: Tensor, layout: Layout) -> list[Tensor]:
    """The tensor of every rank, in order of rank, on rank 0; an empty list elsewhere."""
    if layout.world == 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(layout.world)] if layout.rank == 0 else []
    dist.gather(raw(tensor), [p.view(torch.uint8) for p in parts] or None)
    return parts


def barrier(layout: Layout) -> None:
    if layout.world > 1:
        dist.barrier()


def summary(tensors: dict[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Shape, dtype and hash of each global tensor."""
    return {
        key: {"shape": list(t.shape), "dtype": str(t.dtype).split(".")[1], "sha256": sha256(t)}
        for key, t in tensors.items()
    }


def timed_mib(layout: Layout, began: float, nbytes: int, what: str) -> dict[str, float]:
    took, mib = time.perf_counter() - began, nbytes / MIB
    say(layout, f"  {what}: {mib:.1f} MiB in {took:.2f} s, {mib / took:,.0f} MiB/s")
    return {"seconds": took, "mib": mib}


def train_and_save(trainer: Trainer, checkpoint: str, steps: int) -> dict[str, Any]:
    """The unbroken run: half of the steps, a save, the other half."""
    layout = trainer.layout
    trainer.train(steps // 2)
    tensors = trainer.global_tensors()
    saved = summary(tensors)
    nbytes = sum(t.nbytes for t in tensors.values())
    elements = sum(t.numel() for key, t in tensors.items() if key.startswith("model."))
    say(layout, f"  the state: {len(tensors)} global tensors, {elements / 1e6:.1f} M parameters")
    barrier(layout)
    began = time.perf_counter()
    shardstore.save(
        trainer.state_dict(),
        checkpoint,
        content_metadata={"run": "quickstart", "step": trainer.step, "ranks": layout.world},
    )
    barrier(layout)
    took = timed_mib(layout, began, nbytes, f"saved at step {trainer.step}, synced and committed")
    trainer.train(steps)
    return {"save": took, "saved": saved}


def resume(trainer: Trainer, checkpoint: str, steps: int, record: dict[str, Any]) -> dict[str, Any]:
    """Load over junk, prove every bit, train to the end."""
    layout = trainer.layout
    # Nothing that was not read can look right.
    trainer.model.flat.fill_(float("nan"))
    for flat in trainer.adam.state.values():
        flat.fill_(float("nan"))
    nbytes = trainer.model.flat.nbytes + sum(f.nbytes for f in trainer.adam.state.values())
    barrier(layout)
    began = time.perf_counter()
    loaded = shardstore.load(trainer.state_dict(), checkpoint, strict=StrictHandling.RAISE_ALL)
    barrier(layout)
    what = "loaded into all ranks, checksums verified"
    took = timed_mib(layout, began, nbytes * layout.world, what)
    # Padding between the last tensor and the end of the buffer is nobody's: never stored.
    end = max(span.stop for span in trainer.model.spans.values())
    trainer.model.flat[end:] = 0
    for flat in trainer.adam.state.values():
        flat[max(0, end - trainer.adam.start) :] = 0
    assert isinstance(loaded, dict)  # no mode that returns keys too
    trainer.restore(loaded)
    about = shardstore.load_content_metadata(checkpoint)
    expect(about is not None and about["step"] == trainer.step, f"content metadata is {about}")

    found = summary(trainer.global_tensors())
    if layout.rank == 0:
        for key, was in record["saved"].items():
            expect(
                found.get(key) == was, f"{key} is not what was saved: {found.get(key)}, was {was}"
            )
        expect(len(found) == len(record["saved"]), "there are more global tensors than were saved")
    say(layout, f"  {len(found)} global tensors have the hashes recorded at the save")
    trainer.train(steps)
    return {"load": took}


def main() -> None:
    """Run the job that the JSON of ``quickstart_main.py`` describes."""
    options = json.loads(sys.argv[1])
    folder, checkpoint, steps = Path(options["folder"]), options["checkpoint"], options["steps"]
    # The number of threads decides the order of sums in a matrix product, so it has to be fixed.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    layout = join_ranks(options["tp"], options["dp"], timeout_s=120)
    trainer = Trainer(Config(**options["config"]), layout)
    if options["job"] == "train":
        result = train_and_save(trainer, checkpoint, steps)
    else:
        record = json.loads((folder / "train.json").read_text())
        result = resume(trainer, checkpoint, steps, record)
    result["losses"] = trainer.losses
    result["final"] = summary(trainer.global_tensors())
    if layout.rank == 0:
        (folder / options["result"]).write_text(json.dumps(result, indent=1))
    if layout.world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
