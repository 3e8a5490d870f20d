"""Megatron-Core's trainer, unmodified, with this package in its place: each run loads what another
one saved, under another layout and by another release, and compares model and optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from testing.s3_servers import S3Server
from tests.helpers.megatron_releases import ENVIRONMENT, PROGRAMS, run

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --swiglu "
    "--max-position-embeddings 16 --seq-length 16 --micro-batch-size 1 --bf16 --no-load-rng "
    "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable --ckpt-format torch_dist"
)
pytestmark = [pytest.mark.megatron, pytest.mark.long]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (ENVIRONMENT / "0.19.2").is_dir():
        pytest.skip("no environment with releases of megatron-core: scripts/megatron_env makes it")
    return tmp_path_factory.mktemp("trainer")


def train(version: str, options: str, *, install: str | None = "", **settings: str) -> str:
    """Run the trainer on two ranks; ``install``: options of this package, ``None``: without it."""
    program = str(PROGRAMS / "trainer.py")
    if install is not None:
        program = f"-m shardstore.megatron {install} {program}"
    command = (
        f"-m torch.distributed.run --standalone --nproc-per-node 2 {program} {MODEL} {options}"
    )
    return run(version, *command.split(), alone=install is None, **settings)


def test_megatron_saves_by_itself(folder: Path) -> None:
    saved = f"--tensor-model-parallel-size 2 --async-strategy mcore --save {folder / 'own'}"
    assert "found 0 megatron" in train("0.19.2", f"{saved} --load {folder / 'none'}", install=None)


@pytest.fixture(scope="module")
def bucket(folder: Path, s3_server: S3Server) -> str:
    (folder / "here").mkdir()
    return s3_server.new_bucket()


def test_it_loads_that_and_saves_zarr_in_the_background_to_an_object_store(
    folder: Path, bucket: str, s3_server: S3Server
) -> None:
    here = folder / "here"  # below it Megatron-Core keeps the number of the last iteration
    options = f"--pipeline-model-parallel-size 2 --load {folder / 'own'} --save s3://{bucket}/run"
    # Without nvidia-resiliency-ext, which is what nvrx names.
    options += " --async-save --async-strategy nvrx --ckpt-fully-parallel-load"
    found = train("0.19.2", options, **s3_server.environment, PWD=str(here))
    assert "found 100 shardstore" in found
    assert "run/iter_0000100/zarr.json" in s3_server.keys(bucket)
    (note,) = here.rglob("latest_checkpointed_iteration.txt")
    assert note.read_text() == "100"


def test_an_earlier_release_loads_that_and_saves_torch_dist(
    folder: Path, bucket: str, s3_server: S3Server
) -> None:
    options = f"--tensor-model-parallel-size 2 --load s3://{bucket}/run --save {folder / 'dist'}"
    options += " --ckpt-fully-parallel-save --ckpt-assume-constant-structure"
    settings = {**s3_server.environment, "PWD": str(folder / "here")}
    found = train("0.17.1", options, install="--format torch_dist", **settings)
    assert "found 100 shardstore" in found
    assert (folder / "dist" / "iter_0000100" / ".metadata").exists()
