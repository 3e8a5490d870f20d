"""A small state to save to a bucket, and what is there afterwards, asked without any proxy."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import shardstore
from shardstore.errors import NotACheckpointError
from shardstore.mapping import ShardedObject, ShardedTensor
from shardstore.storage.stores.location import Location
from shardstore.storage.stores.s3 import LIMITS
from shardstore.strategies.zarr import ZarrSaveShardedStrategy
from testing.s3_proxy import Fault, FaultProxy, Passed
from testing.s3_servers import S3Server
from tests.helpers.verification import findings

CHUNK_BYTES = 4096
PASSING_FAULTS = [
    *(Fault.SLOW_DOWN, Fault.TOO_MANY, Fault.RESET_BEFORE, Fault.DROP_ANSWER),
    *(Fault.RESET_IN_ANSWER, Fault.RESET_AFTER_ANSWER, Fault.TRUNCATE_ANSWER),
]
"""Faults of one request, each of which the next try passes by."""
# A silence in a test need not last long. Given as options, they would have s3fs move all bytes.
LIMITS.update(connect_timeout=2, read_timeout=4)


def state(version: int, rank: int = 0, parts: int = 1) -> dict[str, Any]:
    """One rank's part of a state in which every value follows from the version."""
    whole = torch.arange(48 * 64, dtype=torch.float32).reshape(48, 64) + 10_000 * version
    flat = torch.full((32 * 32,), float(version))
    bounds = slice(rank * 1024 // parts, (rank + 1) * 1024 // parts)
    sharded = ShardedTensor.from_rank_offsets
    return {
        "step": version,
        "w": sharded("w", whole.chunk(parts)[rank].clone(), (0, rank, parts)),
        "b": sharded("b", torch.full((7,), float(version)), replica_id=rank),
        "flat": ShardedTensor.from_rank_offsets_flat(
            "flat", flat[bounds].clone(), (32, 32), flattened_range=bounds
        ),
        "o": ShardedObject("o", f"of version {version}", (parts,), (rank,)),
    }


def requests_of(proxy: FaultProxy, work: Callable[[], object]) -> list[Passed]:
    """What passes while a function works."""
    before = len(proxy.passed())
    work()
    return proxy.passed()[before:]


def use_profile(
    folder: Path, monkeypatch: pytest.MonkeyPatch, more: str = "", **options: object
) -> None:
    """Let clients find a profile of these options, and nothing else."""
    lines = "\n".join(f"{name} = {value}" for name, value in options.items())
    (folder / "config").write_text(f"[profile of-the-test]\n{lines}\n{more}")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(folder / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "of-the-test")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def credential_process(folder: Path, **answer: str) -> str:
    """A command that gives credentials, as a profile may name one."""
    (folder / "answer.py").write_text(f"print({json.dumps({'Version': 1, **answer})!r})")
    return f"{sys.executable} {folder}/answer.py"


@dataclass(frozen=True)
class Run:
    """A run's folder in a bucket: saves go through ``server``, questions to ``direct``."""

    server: S3Server
    direct: S3Server
    bucket: str
    options: dict[str, Any]

    @classmethod
    def new(cls, server: S3Server, direct: S3Server, **options: Any) -> Run:
        # Retries enough for one fault.
        config = {"s3": {"addressing_style": "path"}, "retries": {"total_max_attempts": 2}}
        return cls(
            server,
            direct,
            direct.new_bucket(),
            {**server.storage_options, "config_kwargs": config, **options},
        )

    def url(self, step: int) -> str:
        return f"s3://{self.bucket}/run/step-{step}"

    def save(self, step: int, rank: int = 0, parts: int = 1, **options: Any) -> None:
        """Save version ``step`` to its own folder; called on every rank."""
        shardstore.save(
            state(step, rank, parts),
            self.url(step),
            ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=CHUNK_BYTES),
            storage_options=self.options,
            **options,
        )

    def save_directly(self, step: int) -> None:
        self.with_direct().save(step)

    def with_direct(self) -> Run:
        return Run(self.direct, self.direct, self.bucket, self.direct.storage_options)

    def version(self, step: int, parts: int = 1) -> int | None:
        """The version that is committed there, every value and object of it, with nothing to find
        for who verifies it; ``None``: nothing is.

        Args:
            step: which.
            parts: number of ranks that saved it.
        """
        asked = state(0)
        del asked["step"]
        asked["o"] = [ShardedObject("o", None, (parts,), (i,)) for i in range(parts)]
        for key in ("w", "b", "flat"):
            asked[key].data.fill_(float("nan"))
        try:
            loaded: Any = shardstore.load(
                asked, self.url(step), storage_options=self.direct.storage_options
            )
        except NotACheckpointError:
            return None
        version = loaded["step"]
        assert loaded["o"] == [f"of version {version}"] * parts
        wanted = state(version)
        for key in ("w", "b", "flat"):
            assert torch.equal(loaded[key], wanted[key].data), f"{key} is not of version {version}"
        assert isinstance(version, int)
        assert self.findings(step) == []
        return version

    def claims(self, step: int) -> list[str]:
        """Claims and marks that are left there."""
        return self.direct.keys(self.bucket, f"run/step-{step}/.attempts")

    def findings(self, step: int) -> list[str]:
        """What a verification of a checkpoint finds, hashes included; claims that could not be
        removed are no part of it."""
        found = findings(Location.of(self.url(step), self.direct.storage_options), hashes=True)
        return [f"{one.severity}: {one.message}" for one in found if ".attempts" not in one.path]
