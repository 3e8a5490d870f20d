"""Places in object stores, one store after the other."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardstore.storage.stores.location import Location
from testing.gcs_server import GcsServer
from testing.s3_proxy import FaultProxy
from testing.s3_servers import S3Server
from tests.helpers.s3_checkpoints import Run
from tests.helpers.store_suite import Target


@pytest.fixture(params=["s3", "gs", "memory", "local"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    if request.param == "memory":
        bucket = uuid.uuid4().hex
        return lambda name: Location.of(f"memory://{bucket}/{name}")
    if request.param == "local":
        return lambda name: Location.of(f"local://{tmp_path}/{name}")
    if request.param == "gs":
        gcs: GcsServer = request.getfixturevalue("gcs_server")
        place, options = gcs.new_bucket(), gcs.storage_options
        return lambda name: Location.of(f"gs://{place}/{name}", options)
    server: S3Server = request.getfixturevalue("s3_server")
    bucket = server.new_bucket()
    return lambda name: Location.of(f"s3://{bucket}/{name}", server.storage_options)


@pytest.fixture(scope="module")
def server(s3_server: S3Server) -> S3Server:
    """The server behind the proxy; a module may name another one."""
    return s3_server


@pytest.fixture(scope="module")
def shared_proxy(server: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(server.endpoint_url) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def shared_run(server: S3Server, shared_proxy: FaultProxy) -> Run:
    """A run whose first checkpoint is there."""
    run = Run.new(server.at(shared_proxy.endpoint_url), server)
    run.save_directly(1)
    return run


@pytest.fixture
def proxy(shared_proxy: FaultProxy) -> Iterator[FaultProxy]:
    yield shared_proxy
    shared_proxy.clear()


@pytest.fixture
def run(shared_run: Run) -> Run:
    return shared_run
