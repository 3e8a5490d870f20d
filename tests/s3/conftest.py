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


@pytest.fixture(params=["s3", "memory"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    """A store whose chunks TensorStore moves, and one of fsspec alone; :data:`EACH_STORE` adds
    the other kinds."""
    if request.param == "memory":
        return Location.of(f"memory://{uuid.uuid4().hex}").child
    if request.param == "local":
        return Location.of(f"local://{tmp_path}").child
    name = {"gs": "gcs_server", "s3": "s3_server"}[request.param]
    server: S3Server | GcsServer = request.getfixturevalue(name)
    return Location.of(f"{request.param}://{server.new_bucket()}", server.storage_options).child


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


@pytest.fixture
def proxied(server: S3Server, proxy: FaultProxy) -> S3Server:
    """The server by way of the proxy."""
    return server.at(proxy.endpoint_url)


@pytest.fixture
def own_run(server: S3Server, proxied: S3Server) -> Run:
    """A run in a bucket of its own, without a checkpoint."""
    return Run.new(proxied, server)
