"""verl's checkpoint manager of FSDP over shardstore."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import zarr

import shardstore
from shardstore.storage.stores.location import Location
from testing.s3_servers import S3Server
from tests.helpers.megatron_releases import ENVIRONMENT
from tests.helpers.trainers import run, whole

PROGRAM = "verl_fsdp2.py"
SEAM = {"VERL_USE_EXTERNAL_MODULES": "shardstore.verl"}


def found(output: Path) -> tuple[dict[int, float], list[list[float]]]:
    read = json.loads(output.read_text())
    return {int(step): loss for step, loss in read["losses"].items()}, read["drawn"]


def train(python: Path, root: str, steps: int, output: Path, *place: str, **how: Any) -> Any:
    run(python, PROGRAM, root, steps, output, *place, **SEAM, **how)
    return found(output)


@pytest.mark.long
def test_a_run_goes_on_where_it_was(python: Path, tmp_path: Path) -> None:
    losses, drawn = train(python, str(tmp_path / "unbroken"), 5, tmp_path / "a.json")
    names = sorted(place.name for place in (tmp_path / "unbroken").iterdir())
    assert names == ["global_step_4", "global_step_5"]  # its retention removed the others
    place = tmp_path / "unbroken" / "global_step_4"
    assert whole(place)
    assert (place / "huggingface" / "config.json").exists()
    assert not list(place.rglob("*rank_0.pt"))
    group = zarr.open_group(place, mode="r")
    assert group["optimizer.state.model.embed_tokens.weight.exp_avg"].shape == (32, 16)
    again, same = train(python, str(tmp_path / "again"), 5, tmp_path / "b.json", str(place))
    assert again == {5: losses[5]}
    assert same == drawn  # the random states of both ranks too


@pytest.mark.long
def test_a_store_and_another_number_of_ranks(
    python: Path, tmp_path: Path, s3_server: S3Server
) -> None:
    root = f"s3://{s3_server.new_bucket()}/run"
    store = s3_server.environment
    losses, _ = train(python, root, 3, tmp_path / "a.json", **store)
    options = s3_server.storage_options
    assert set(Location.of(root, options).listing()) == {"global_step_2", "global_step_3"}
    assert shardstore.latest(root, storage_options=options) == f"{root}/global_step_3"
    assert Location.of(f"{root}/global_step_2", options).exists("huggingface/config.json")
    place = f"{root}/global_step_2"
    again, _ = train(python, f"{root}/one", 3, tmp_path / "b.json", place, ranks=1, **store)
    assert again == pytest.approx({3: losses[3]}, rel=1e-4)


@pytest.mark.long
def test_contents_that_are_not_supported_are_refused(python: Path) -> None:
    program = (
        "import shardstore.verl, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo', init_method='tcp://127.0.0.1:0', rank=0, world_size=1)\n"
        "config, model = {'save_contents': ['model', 'hf_model']}, torch.nn.Linear(2, 2)\n"
        "try:\n"
        "    shardstore.verl.FSDPCheckpointManager(model, checkpoint_config=config)\n"
        "except ValueError as error:\n"
        "    assert 'shardstore.hf.export' in str(error), error\n"
        "else:\n"
        "    raise AssertionError\n"
    )
    subprocess.run([python, "-c", program], check=True, timeout=120)


MANAGER = """
import sys, shardstore.verl, torch, torch.distributed as dist, transformers
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
model = torch.nn.Linear(2, 2)
model.config = transformers.PretrainedConfig()
model = torch.distributed.fsdp.fully_shard(model)

def manager(*contents):
    config = {"save_contents": ["model"], "load_contents": contents}
    parts = model, torch.optim.AdamW(model.parameters())
    return shardstore.verl.FSDPCheckpointManager(*parts, checkpoint_config=config)

place = sys.argv[1]
"""


@pytest.mark.long
def test_contents_that_a_checkpoint_lacks_are_an_error(python: Path, tmp_path: Path) -> None:
    program = """
manager("model").save_checkpoint(place)
for lacks in ("optimizer", "extra"):
    try:
        manager("model", lacks).load_checkpoint(place)
    except shardstore.errors.MissingKeyError as error:
        assert lacks in str(error), error
    else:
        raise AssertionError(lacks)
"""
    subprocess.run([python, "-c", MANAGER + program, tmp_path / "step"], check=True, timeout=120)


@pytest.mark.long
def test_a_checkpoint_that_is_saved_again_stays(python: Path, tmp_path: Path) -> None:
    program = """
saving = manager("model")
for _ in range(2):
    saving.save_checkpoint(place, max_ckpt_to_keep=1)
saving.load_checkpoint(place)
saving.save_checkpoint(place + "2", max_ckpt_to_keep=1)
"""
    subprocess.run([python, "-c", MANAGER + program, tmp_path / "step"], check=True, timeout=120)
    assert [place.name for place in tmp_path.iterdir()] == ["step2"]


@pytest.mark.long
@pytest.mark.parametrize("version", ["0.15.3", "0.19.2"])
def test_the_functions_of_the_megatron_engine(python: Path, tmp_path: Path, version: str) -> None:
    if not (ENVIRONMENT / version).is_dir():
        pytest.skip("no environment with megatron-core: scripts/megatron_env makes it")
    path = os.pathsep.join(map(str, (ENVIRONMENT / version, ENVIRONMENT / "triton")))
    run(python, "verl_megatron.py", tmp_path, PYTHONPATH=path)
    place = tmp_path / "dist_ckpt"
    assert whole(place)
    assert zarr.open_group(place, mode="r")["part"][:].tolist() == [[5.0] * 3] * 2 + [[6.0] * 3] * 2
