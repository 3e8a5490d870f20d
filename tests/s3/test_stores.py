"""The suite of all stores, over local disk, memory, an S3 server, Azure's emulator where there is
one, and file systems of fsspec with habits of their own."""

from __future__ import annotations

import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest

from shardstore.storage.stores.location import Location
from testing.gcs_server import GcsServer
from testing.s3_servers import S3Server, answers, free_port
from tests.helpers.keeping_listings import KeepingMemory, ListingMemory
from tests.helpers.store_suite import StoreChanges, StoreTests, Target


class TestDisk(StoreTests):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Target:
        return lambda name: Location.of(tmp_path / name)


class TestMemory(StoreTests):
    @pytest.fixture
    def place(self) -> Target:
        return Location.of(f"memory://{uuid.uuid4().hex}").child


class TestS3(StoreTests):
    @pytest.fixture
    def place(self, s3_server: S3Server) -> Target:
        return Location.of(f"s3://{s3_server.new_bucket()}", s3_server.storage_options).child


class TestGoogle(StoreTests):
    """Google Cloud Storage: TensorStore moves the chunks, gcsfs everything else."""

    @pytest.fixture
    def place(self, gcs_server: GcsServer) -> Target:
        return Location.of(f"gs://{gcs_server.new_bucket()}", gcs_server.storage_options).child


class TestGcsfs(StoreChanges):
    """Google Cloud Storage through gcsfs alone, because of a setting that TensorStore lacks."""

    @pytest.fixture
    def place(self, gcs_server: GcsServer) -> Target:
        options = {**gcs_server.storage_options, "requests_timeout": 60}
        return Location.of(f"gs://{gcs_server.new_bucket()}", options).child


AZURITE_ACCOUNT = "devstoreaccount1"
AZURITE_KEY = (  # the one that Azurite's documentation gives to everybody
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
AZURITE_START_S = 30.0


@pytest.fixture(scope="module")
def azure_options() -> Iterator[dict[str, Any]]:
    """Storage options of an Azure Blob server on this machine, with a container for the tests."""
    pytest.importorskip("adlfs", reason="az:// needs adlfs, which the test command does not bring")
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("azurite-blob, Azure's own emulator (npm install -g azurite), is not on PATH")
    port = free_port()
    command = [program, "--inMemoryPersistence", "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    process = subprocess.Popen(
        [*command, "--skipApiVersionCheck", "--disableTelemetry", "--silent"],
        stdout=subprocess.DEVNULL,
    )
    try:
        limit = time.monotonic() + AZURITE_START_S
        while not answers(f"http://127.0.0.1:{port}"):
            assert process.poll() is None, "azurite-blob ended"
            assert time.monotonic() < limit, "azurite-blob does not answer"
            time.sleep(0.1)
        endpoint = f"http://127.0.0.1:{port}/{AZURITE_ACCOUNT}"
        options = {
            "connection_string": f"DefaultEndpointsProtocol=http;AccountName={AZURITE_ACCOUNT};"
            f"AccountKey={AZURITE_KEY};BlobEndpoint={endpoint};"
        }
        fsspec.filesystem("az", **options).mkdir("tests")
        yield options
    finally:
        process.terminate()
        process.wait(timeout=30)


class TestAzure(StoreTests):
    """Azure Blob Storage as its emulator has it, over adlfs; both are for who tries it to bring."""

    @pytest.fixture
    def place(self, azure_options: dict[str, Any]) -> Target:
        return Location.of(f"az://tests/{uuid.uuid4().hex}", azure_options).child


class TestKeptListings(StoreChanges):
    """File systems that answer from listings which they keep."""

    @pytest.fixture(params=[ListingMemory, KeepingMemory])
    def place(self, request: pytest.FixtureRequest) -> Target:
        kind = request.param
        fsspec.register_implementation(kind.protocol, kind, clobber=True)
        return Location.of(f"{kind.protocol}://{uuid.uuid4().hex}").child


class TestFilesOverFsspec(StoreChanges):
    """Real files, but by fsspec's way to them: no rename, no folders of attempts."""

    @pytest.fixture
    def place(self, tmp_path: Path) -> Target:
        return Location.of(f"local://{tmp_path}").child
