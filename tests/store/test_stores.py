"""The suite of all stores, over local disk, memory, an S3 server, and one more file system of
fsspec."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from scripts.s3_servers import S3Server
from tests.store_suite import Place, StoreTests


class TestDisk(StoreTests):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        return lambda name: (str(tmp_path / name), {})


class TestMemory(StoreTests):
    @pytest.fixture
    def place(self) -> Place:
        bucket = uuid.uuid4().hex
        return lambda name: (f"memory://{bucket}/{name}", {})


class TestS3(StoreTests):
    @pytest.fixture
    def place(self, s3_server: S3Server) -> Place:
        bucket = s3_server.new_bucket()
        return lambda name: (f"s3://{bucket}/{name}", s3_server.storage_options)


class TestFilesOverFsspec(StoreTests):
    """Real files, but by fsspec's way to them: no rename, no folders of attempts."""

    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        return lambda name: (f"local://{tmp_path}/{name}", {})
