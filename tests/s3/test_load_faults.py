"""Loading under faults: the right values, or an error that says what and where."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import shardstore
from shardstore import ShardedTensor
from shardstore.errors import StorageError
from testing.s3_proxy import Fault, FaultProxy
from testing.s3_servers import S3Server
from tests.helpers.s3_checkpoints import PASSING_FAULTS, Run, requests_of, state

DOCUMENTS = [r"/step-1/zarr\.json$", r"/metadata\.json$", r"/common\.pt$", r"/manifest\.npz$"]
CHUNK = r"/w/c\.\d"


def load(run: Run) -> dict[str, Any]:
    asked = state(0)
    del asked["step"]
    for key in ("w", "b", "flat"):
        asked[key].data.fill_(float("nan"))
    loaded: dict[str, Any] = shardstore.load(asked, run.url(1), storage_options=run.options)
    return loaded


def assert_version_1(loaded: dict[str, Any]) -> None:
    wanted = state(1)
    assert loaded["step"] == 1
    assert loaded["o"] == "of version 1"
    for key in ("w", "b", "flat"):
        assert torch.equal(loaded[key], wanted[key].data), key


@pytest.mark.parametrize("fault", PASSING_FAULTS, ids=lambda fault: fault.name.lower())
def test_a_load_survives_one_fault_of_each_kind(run: Run, proxy: FaultProxy, fault: Fault) -> None:
    rules = [proxy.add(fault, methods=("GET",), path=path) for path in [*DOCUMENTS, CHUNK]]
    assert_version_1(load(run))
    assert all(rule.hits for rule in rules[:3]), "a document was not read"
    assert rules[-1].hits == 1


@pytest.mark.parametrize("fault", [Fault.SILENCE, Fault.SILENT_ANSWER])
@pytest.mark.parametrize("path", [DOCUMENTS[0], CHUNK], ids=["document", "chunk"])
def test_a_load_survives_one_silence(run: Run, proxy: FaultProxy, path: str, fault: Fault) -> None:
    proxy.add(fault, methods=("GET",), path=path)
    assert_version_1(load(run))


def test_a_slow_large_chunk_is_no_error(
    server: S3Server, proxied: S3Server, proxy: FaultProxy
) -> None:
    """What counts is that bytes come, not that all of them do within the wait for an answer."""
    run = Run.new(proxied, server, config_kwargs={"read_timeout": 1})
    data = torch.arange(3 * 2**18, dtype=torch.float32)
    saved = {"w": ShardedTensor.from_rank_offsets("w", data)}
    shardstore.save(saved, run.url(1), storage_options=run.options)
    asked = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros_like(data))}
    proxy.bytes_per_s = 2**20
    loaded = shardstore.load(asked, run.url(1), storage_options=run.options)
    assert torch.equal(loaded["w"], data)
    assert proxy.count("GET", f"/{run.bucket}/run/step-1/w/c.0") == 1


def test_a_request_that_broke_off_after_long_is_tried_again(
    run: Run, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first try alone takes longer than tries go on for, as that of a large chunk may."""
    monkeypatch.setattr(proxy, "latency_s", 0.5)
    rule = proxy.add(Fault.RESET_IN_ANSWER, path=CHUNK)
    assert_version_1(load(run))
    assert rule.hits == 1


def test_a_load_asks_for_each_object_once(run: Run, proxy: FaultProxy) -> None:
    asked = [
        (request.method, request.path)
        for request in requests_of(proxy, lambda: assert_version_1(load(run)))
    ]
    assert len(asked) == len(set(asked))
    assert {method for method, _ in asked} == {"GET"}
    documents = {"zarr.json", "metadata.json", "common.pt"}
    assert documents <= {path.rpartition("/")[2] for _, path in asked}


@pytest.mark.parametrize(
    ("name", "member"),
    [("metadata.json", "info"), ("manifest.npz", "info"), ("common.pt", "common")],
)
def test_what_the_store_refuses_is_not_shown_as_absent(
    run: Run, proxy: FaultProxy, name: str, member: str
) -> None:
    opened = shardstore.open(run.url(1), storage_options=run.options)
    list(opened)
    rule = proxy.add(Fault.DENIED, path=rf"/{re.escape(name)}$", count=None)
    with pytest.raises(StorageError, match=re.escape(name)):
        getattr(opened, member)
    assert rule.hits
