"""A save under every fault at every phase: committed and whole, or an error and nothing there.

Whatever happens, the checkpoint before it stays, and the next save to the same place succeeds.
"""

from __future__ import annotations

from typing import Any

import pytest

from shardstore.errors import CheckpointExistsError, CheckpointingException, StorageError
from shardstore.storage.commit import objects as object_commit
from testing.s3_proxy import Fault, FaultProxy
from testing.s3_servers import S3Server
from tests.helpers.s3_checkpoints import PASSING_FAULTS, Run

PHASES: dict[str, dict[str, Any]] = {
    "look": {"methods": ("GET",), "path": r"list-type=2"},
    "probe": {"methods": ("PUT",), "path": r"/\.attempts/probe"},
    "claim": {"methods": ("PUT",), "path": r"/\.attempts/\d+\.json"},
    "common": {"methods": ("PUT",), "path": r"/common\.pt$"},
    "chunk": {"methods": ("PUT",), "path": r"/w/c\.\d"},
    "array document": {"methods": ("PUT",), "path": r"/w/zarr\.json$"},
    "manifest": {"methods": ("PUT",), "path": r"/manifest\.npz$"},
    "mark": {"methods": ("PUT",), "path": r"\.committing$"},
    "commit": {"methods": ("PUT",), "path": r"/step-2/zarr\.json$"},
    "clean-up": {"methods": ("POST", "DELETE")},
}
ONCE = [*PASSING_FAULTS, Fault.RESET_IN_REQUEST]


@pytest.fixture
def run(shared_run: Run) -> Run:
    client = shared_run.direct.client()
    for key in shared_run.direct.keys(shared_run.bucket, "run/step-2/"):
        client.delete_object(Bucket=shared_run.bucket, Key=key)
    return shared_run


def attempt(run: Run) -> CheckpointingException | None:
    """Save step 2; the error, or None for success; what is there afterwards says the same."""
    failure = None
    try:
        run.save(2)
    except CheckpointingException as error:
        failure = error
    assert run.version(1) == 1
    if failure is None:
        assert run.version(2) == 2
    return failure


@pytest.mark.parametrize("fault", ONCE, ids=lambda fault: fault.name.lower())
def test_a_save_survives_one_fault_in_every_phase(
    run: Run, proxy: FaultProxy, fault: Fault
) -> None:
    rules = {phase: proxy.add(fault, **requests) for phase, requests in PHASES.items()}
    failure = attempt(run)
    assert failure is None, failure
    # The store is probed once a process.
    assert {phase for phase, rule in rules.items() if not rule.hits} <= {"probe"}
    assert run.claims(2) == []


@pytest.mark.parametrize("phase", ["chunk", "commit"])
def test_a_save_survives_one_silence(run: Run, proxy: FaultProxy, phase: str) -> None:
    rule = proxy.add(Fault.SILENCE, **PHASES[phase])
    failure = attempt(run)
    assert failure is None, failure
    assert rule.hits == 1


@pytest.mark.parametrize("phase", ["look", "chunk", "commit"])
def test_a_save_that_is_always_refused_is_an_error_with_nothing_committed(
    run: Run, proxy: FaultProxy, phase: str
) -> None:
    proxy.add(Fault.SLOW_DOWN, **PHASES[phase], count=None)
    failure = attempt(run)
    assert isinstance(failure, StorageError)
    assert run.bucket in str(failure)
    assert "SlowDown" in str(failure) or "503" in str(failure)
    assert run.version(2) is None
    proxy.clear()
    assert attempt(run) is None, "a dead attempt hinders the next"


def test_a_commit_whose_every_answer_is_lost_is_known_by_reading_it_back(
    run: Run, proxy: FaultProxy
) -> None:
    rule = proxy.add(Fault.DROP_ANSWER, **PHASES["commit"], count=None)
    failure = attempt(run)
    assert failure is None, failure
    assert rule.hits >= 1


def test_the_store_dies_at_the_commit(run: Run, proxy: FaultProxy) -> None:
    """After the store did its work: whether it is committed cannot be known, so it is an error."""
    proxy.add(Fault.DROP_ANSWER, path=r"/step-2/zarr\.json$", count=None)
    failure = attempt(run)
    assert isinstance(failure, StorageError)
    assert run.version(2) in (None, 2)


def test_a_commit_that_comes_after_the_next_save_changes_nothing(
    run: Run, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_commit, "SETTLE_S", 0.5)
    proxy.add(Fault.HELD, **PHASES["commit"], count=None)
    assert isinstance(attempt(run), StorageError)
    run.save_directly(2)
    assert set(proxy.release()) == {412}
    assert run.version(2) == 2
    assert run.claims(2) == []


def test_a_failed_clean_up_does_not_spoil_a_commit(run: Run, proxy: FaultProxy) -> None:
    # The first deletion of a save may be that of the probe, which has to work.
    run.save_directly(3)
    proxy.add(Fault.SLOW_DOWN, **PHASES["clean-up"], count=None)
    assert attempt(run) is None
    proxy.clear()
    run.save(2, overwrite=True)
    assert run.version(2) == 2


def test_answers_that_a_ceph_gateway_gave_and_nobody_got(radosgw_server: S3Server) -> None:
    with FaultProxy(radosgw_server.endpoint_url) as proxy:
        run = Run.new(radosgw_server.at(proxy.endpoint_url), radosgw_server)
        run.save_directly(1)
        phases = [PHASES[name] for name in ("claim", "common", "chunk", "array document", "commit")]
        rules = [proxy.add(Fault.DROP_ANSWER, **requests) for requests in phases]
        assert attempt(run) is None
        assert [rule.hits for rule in rules] == [1] * len(phases)


def test_a_slow_store_is_no_error(run: Run, proxy: FaultProxy) -> None:
    proxy.latency_s, proxy.bytes_per_s = 0.05, 100_000
    assert attempt(run) is None


def test_a_checkpoint_with_an_unreadable_config_is_still_one(proxy: FaultProxy, run: Run) -> None:
    """The root document decides; ``metadata.json`` is only asked for at the same time."""
    proxy.add(Fault.SLOW_DOWN, path=r"/step-1/metadata\.json$", count=None)
    with pytest.raises(CheckpointExistsError):
        run.save(1)
