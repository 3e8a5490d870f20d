"""Places in object stores, one store after the other."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from shardstore.storage.stores.location import Location
from testing.s3_servers import S3Server
from tests.helpers.store_suite import Target


@pytest.fixture(params=["s3", "memory", "local"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    if request.param == "memory":
        bucket = uuid.uuid4().hex
        return lambda name: Location.of(f"memory://{bucket}/{name}")
    if request.param == "local":
        return lambda name: Location.of(f"local://{tmp_path}/{name}")
    server: S3Server = request.getfixturevalue("s3_server")
    bucket = server.new_bucket()
    return lambda name: Location.of(f"s3://{bucket}/{name}", server.storage_options)
