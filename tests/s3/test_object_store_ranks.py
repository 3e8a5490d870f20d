"""Saves and loads of an object store by several ranks, and by what the environment says alone."""

from __future__ import annotations

import json
import os
import pickle
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

import shardstore
from shardstore import ShardedTensor
from shardstore.errors import RanksError, StorageError
from shardstore.storage.stores.location import Location
from shardstore.storage.stores.tensorstore import KvStoreIO
from testing.s3_servers import S3Server
from tests.helpers.ranks_helper import run_ranks
from tests.helpers.store_suite import small_state, tensor


def _rows(rank: int, world_size: int, whole: torch.Tensor) -> ShardedTensor:
    part = whole.chunk(world_size)[rank].clone()
    return ShardedTensor.from_rank_offsets("w", part, (0, rank, world_size))


def _save_and_load(rank: int, world_size: int, url: str, options: dict[str, Any]) -> None:
    whole = torch.arange(64.0 * 8).reshape(64, 8)
    flat = ShardedTensor.from_rank_offsets_flat(
        "flat",
        torch.arange(10.0)[rank * 3 : 3 if rank == 0 else 10].clone(),
        (10,),
        flattened_range=slice(rank * 3, 3 if rank == 0 else 10),
    )
    shardstore.save(
        {"w": _rows(rank, world_size, whole), "flat": flat, "step": 1},
        url,
        storage_options=options,
    )
    part = whole.chunk(world_size, 1)[rank]
    wanted = ShardedTensor.from_rank_offsets("w", torch.zeros(part.shape), (1, rank, world_size))
    loaded = shardstore.load({"w": wanted}, url, storage_options=options)
    assert torch.equal(loaded["w"], part)
    plain = shardstore.load_plain_tensors(url, storage_options=options)
    assert torch.equal(plain["flat"], torch.arange(10.0))


def test_ranks_save_and_load_under_another_layout(s3_server: S3Server) -> None:
    url = f"s3://{s3_server.new_bucket()}/step-1"
    run_ranks(_save_and_load, 2, url, s3_server.storage_options)


def _fail_on_one(rank: int, world_size: int, url: str, options: dict[str, Any]) -> str:
    whole = torch.zeros(64, 8)
    state: dict[str, Any] = {"w": _rows(rank, world_size, whole)}
    if rank == 1:  # overlaps with rank 0's
        state = {"w": _rows(0, world_size, whole)}
    try:
        shardstore.save(state, url, storage_options=options)
    except shardstore.CheckpointingException as error:
        return str(error)
    return "no error"


def test_nothing_is_committed_where_the_manifests_do_not_fit(s3_server: S3Server) -> None:
    bucket = s3_server.new_bucket()
    texts = run_ranks(_fail_on_one, 2, f"s3://{bucket}/step-1", s3_server.storage_options)
    assert all("Invalid access pattern" in text for text in texts)
    assert s3_server.keys(bucket) == []


def _no_such_bucket(rank: int, world_size: int, url: str, options: dict[str, Any]) -> str:
    with pytest.raises((StorageError, RanksError), match="bucket does not exist") as caught:
        shardstore.save({"w": tensor("w", torch.zeros(3))}, url, storage_options=options)
    return type(caught.value).__name__


def test_a_missing_bucket_is_an_error_on_every_rank(s3_server: S3Server) -> None:
    options = s3_server.storage_options
    assert len(run_ranks(_no_such_bucket, 2, "s3://no-such-bucket-here/x", options)) == 2


# -- options and credentials ---------------------------------------------------------------------


def test_a_profile_alone_suffices(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in s3_server.environment:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "credentials").write_text(
        f"[training]\naws_access_key_id = {s3_server.key}\n"
        f"aws_secret_access_key = {s3_server.secret}\n"
    )
    (tmp_path / "config").write_text(
        f"[profile training]\nregion = {s3_server.region}\n"
        f"endpoint_url = {s3_server.endpoint_url}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "training")
    url = f"s3://{s3_server.new_bucket()}/step-1"
    shardstore.save(small_state(2.0), url)
    assert shardstore.load(small_state(), url)["step"] == 2


def test_credentials_are_nowhere_to_be_seen(
    s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    bucket = s3_server.new_bucket()
    place = Location.of(f"s3://{bucket}/step-1", s3_server.storage_options)
    shardstore.save(small_state(2.0), place.place)
    seen = repr(place) + repr(place.place) + str(place) + json.dumps({"url": place.place})
    seen += (
        repr(pickle.dumps(place.place))
        + repr(place.remote)
        + repr(KvStoreIO(place.url, place.options).opened())
        + repr(place.kvstore())
    )
    wrong = {
        **s3_server.storage_options,
        "key": "AKNOBODY000000000000",
        "secret": "not-the-secret-0123456789",
    }
    try:
        shardstore.save(small_state(), f"s3://{bucket}/other", storage_options=wrong)
    except StorageError as error:
        seen += "".join(traceback.format_exception(error)) + repr(error)
    else:
        pytest.fail("a wrong secret was taken")
    for name in s3_server.keys(bucket):
        seen += repr(Location.of(f"s3://{bucket}", s3_server.storage_options).read(name))
    for secret in (s3_server.secret, s3_server.key, wrong["secret"], wrong["key"]):
        assert secret not in seen
    assert list(tmp_path.iterdir()) == []
    assert not any(s3_server.secret in value for value in os.environ.values())
