"""transformers.Trainer with FSDP2: trains a tiny model, saves every second step, keeps one
checkpoint, and goes on from the one that it is given.

torchrun transformers_fsdp2.py FOLDER STEPS MODE [CHECKPOINT]; see kills.py for DIES_AT. The program
raises the audit event "end of program".
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType
from kills import die_at_moment_of_environment
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import shardstore.dcp

BATCH = 8


class Data(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens, the same on every rank."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def trainer_of(folder: Path, steps: int) -> Trainer:
    """A trainer under FSDP2, which accelerate chooses by itself only on accelerators."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=32,
        )
    )
    fsdp = {
        "state_dict_type": "SHARDED_STATE_DICT",
        "cpu_ram_efficient_loading": False,
        "auto_wrap_policy": "NO_WRAP",
    }
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder),
            max_steps=steps,
            save_steps=2,
            save_total_limit=1,
            per_device_train_batch_size=BATCH // int(os.environ["WORLD_SIZE"]),
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=Data(),
    )
    state = trainer.accelerator.state
    PartialState().distributed_type = state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **fsdp)
    trainer.is_fsdp_enabled = True
    return trainer


def main() -> None:
    """Train, and write the losses by step beside the checkpoints."""
    folder, steps, mode, *checkpoint = sys.argv[1:]
    shardstore.dcp.install(named_writers=True, asynchronous=mode == "async", durable=False)
    die_at_moment_of_environment()
    trainer = trainer_of(Path(folder), int(steps))
    trainer.train(resume_from_checkpoint=checkpoint[0] if checkpoint else None)
    sys.audit("end", "of program")
    if dist.get_rank() == 0:
        losses = {log["step"]: log["loss"] for log in trainer.state.log_history if "loss" in log}
        Path(f"{folder}.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
