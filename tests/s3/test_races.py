"""Who owns a target: racing saves, late writers, stores without conditions, stores that die."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import shardstore
from shardstore.errors import CheckpointingException, StorageError
from shardstore.storage.commit import objects as object_commit
from shardstore.storage.options import SaveOptions
from shardstore.storage.stores.location import Location
from testing.s3_proxy import Fault, FaultProxy
from testing.s3_servers import S3Server, embedded_server, radosgw
from tests.helpers.s3_checkpoints import Run

COMMITTERS = 8
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def test_the_newest_of_several_claims_wins(any_s3_server: S3Server) -> None:
    bucket, begun = any_s3_server.new_bucket(), threading.Barrier(COMMITTERS)
    place = Location.of(f"s3://{bucket}/run/step-1", any_s3_server.storage_options)

    def one(number: int) -> tuple[int, str]:
        attempt = object_commit.begin(place, SaveOptions())
        begun.wait()
        try:
            attempt.commit([("zarr.json", b"%d" % attempt.number)], durable=True)
        except CheckpointingException as error:
            return attempt.number, str(error)
        return attempt.number, ""

    with ThreadPoolExecutor(COMMITTERS) as pool:
        told = dict(pool.map(one, range(COMMITTERS)))
    assert len(told) == COMMITTERS
    assert [number for number, failure in told.items() if not failure] == [max(told)]
    assert all(place.url in failure for failure in told.values() if failure)
    assert place.read("zarr.json") == b"%d" % max(told)


def test_of_racing_overwriters_one_is_left_whole(any_s3_server: S3Server) -> None:
    """All replace the checkpoint that is there: what is there in the end is all one winner's."""
    url = f"s3://{any_s3_server.new_bucket()}/run/step-1"
    place = Location.of(url, any_s3_server.storage_options)
    first = object_commit.begin(place, SaveOptions())
    first.put_all([("w/zarr.json", b"first")])
    first.commit([("zarr.json", b"first")], durable=True)
    start = threading.Barrier(COMMITTERS)

    def one(number: int) -> bool:
        start.wait()
        content = b"%d" % number
        try:
            attempt = object_commit.begin(place, SaveOptions(overwrite=True))
            for name in ("w/c.0", "w/c.1", "common.pt", "w/zarr.json"):
                attempt.put_all([(name, content)])
            attempt.commit([("manifest.npz", content), ("zarr.json", content)], durable=True)
        except StorageError:
            return False
        return True

    with ThreadPoolExecutor(COMMITTERS) as pool:
        won = [number for number, told in enumerate(pool.map(one, range(COMMITTERS))) if told]
    assert won
    there = {place.read(name) for name in place.remote.walk()}
    assert len(there) == 1
    assert int(there.pop()) in won
    assert place.remote.walk() == sorted(
        ["common.pt", "manifest.npz", "w/c.0", "w/c.1", "w/zarr.json", "zarr.json"]
    )


@pytest.mark.parametrize("what", ["leftovers of a dead save", "a checkpoint"])
def test_a_late_deletion_takes_nothing_of_a_newer_save(any_s3_server: S3Server, what: str) -> None:
    """It is decided, or the commit is gone already; the request that deletes the data is long on
    the way."""
    with FaultProxy(any_s3_server.endpoint_url) as proxy:
        run = Run.new(any_s3_server.at(proxy.endpoint_url), any_s3_server)
        place = Location.of(run.url(1), run.options)
        if what == "a checkpoint":
            run.save(1)
        else:
            dead = Location.of(run.url(1), run.direct.storage_options)
            object_commit.begin(dead, SaveOptions()).put_all([("w/c.0.0", b"left over")])
        slow = proxy.add(Fault.DELAY, methods=("POST",), path="delete", skip=1, delay_s=2.0)

        def delete() -> None:
            with contextlib.suppress(CheckpointingException):
                if what == "a checkpoint":
                    shardstore.delete_checkpoint(place)
                else:
                    object_commit.begin(place, SaveOptions())

        thread = threading.Thread(target=delete)
        thread.start()
        while not slow.hits and thread.is_alive():
            time.sleep(0.005)
        run.save_directly(1)
        assert run.version(1) == 1
        thread.join()
        assert slow.hits == 1
        assert run.version(1) == 1
        assert run.claims(1) == []


def test_a_store_that_ignores_conditions_is_refused_or_taken_as_it_is(s3_server: S3Server) -> None:
    with FaultProxy(s3_server.endpoint_url) as proxy:
        run = Run.new(s3_server.at(proxy.endpoint_url), s3_server)
        proxy.add(Fault.IGNORE_CONDITIONS, conditional=True, count=None)
        with pytest.raises(StorageError, match="If-None-Match"):
            run.save(1)
        assert s3_server.keys(run.bucket) == []
        run.save(1, allow_unconditional=True)
        assert run.version(1) == 1


@pytest.fixture(scope="module", params=["embedded", "radosgw"])
def mortal(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[S3Server, Callable[[], object], Callable[[], object]]]:
    """A server that no other test uses, how to kill it, how to start it again."""
    if request.param == "embedded":
        with embedded_server(tmp_path_factory.mktemp("mortal")) as own:
            yield own.server, own.kill, own.start
        return
    request.getfixturevalue("radosgw_server")
    if os.getuid() != 0:
        pytest.skip("only root can start a Ceph gateway, kill it and start it again")

    def script(what: str) -> None:
        command = [SCRIPTS / "s3_server", what, "mortal"]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)

    script("start")
    server = radosgw("mortal")
    assert server is not None
    yield server, partial(script, "kill"), partial(script, "start")
    script("kill")


@pytest.mark.parametrize("after", [9, *(pytest.param(n, marks=pytest.mark.long) for n in (3, 14))])
def test_a_server_killed_in_mid_save_and_started_again(mortal: tuple[Any, ...], after: int) -> None:
    """The moment is counted in requests; the save rides it out or says what happened."""
    server, kill, start = mortal
    with FaultProxy(server.endpoint_url) as proxy:
        run = Run.new(server.at(proxy.endpoint_url), server)
        run.save_directly(1)
        saved = threading.Event()

        def murder() -> None:
            while proxy.count("PUT") < after and not saved.is_set():
                time.sleep(0.002)
            kill()
            start()

        proxy.latency_s = 0.02
        murderer = threading.Thread(target=murder)
        murderer.start()
        failure = None
        try:
            run.save(2)
        except CheckpointingException as error:
            failure = error
        finally:
            saved.set()
            murderer.join()
        assert run.version(1) == 1
        # Of a commit that had no answer nobody knows; it is whole where it came.
        assert run.version(2) in ((2,) if failure is None else (None, 2))
        if failure is not None:
            assert run.bucket in str(failure)
            run.save(2, overwrite=True)
            assert run.version(2) == 2
