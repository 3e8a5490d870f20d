"""The suite of all stores, over local disk, memory, an S3 server, Azure's emulator where there is
one, and file systems of fsspec with habits of their own."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest

from testing.gcs_server import GcsServer
from testing.s3_servers import S3Server
from tests.helpers.keeping_listings import KeepingMemory, ListingMemory
from tests.helpers.store_suite import Place, StoreTests


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


class TestGoogle(StoreTests):
    """Google Cloud Storage: TensorStore moves the chunks, gcsfs everything else."""

    @pytest.fixture
    def place(self, gcs_server: GcsServer) -> Place:
        bucket = gcs_server.new_bucket()
        return lambda name: (f"gs://{bucket}/{name}", gcs_server.storage_options)


class TestGcsfs(StoreTests):
    """Google Cloud Storage through gcsfs alone, because of a setting that TensorStore lacks."""

    @pytest.fixture
    def place(self, gcs_server: GcsServer) -> Place:
        bucket = gcs_server.new_bucket()
        options = {**gcs_server.storage_options, "requests_timeout": 60}
        return lambda name: (f"gs://{bucket}/{name}", options)


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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [program, "--inMemoryPersistence", "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    process = subprocess.Popen(
        [*command, "--skipApiVersionCheck", "--disableTelemetry", "--silent"],
        stdout=subprocess.DEVNULL,
    )
    try:
        limit = time.monotonic() + AZURITE_START_S
        while not _answers(port):
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


def _answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


class TestAzure(StoreTests):
    """Azure Blob Storage as its emulator has it, over adlfs; both are for who tries it to bring."""

    @pytest.fixture
    def place(self, azure_options: dict[str, Any]) -> Place:
        run = uuid.uuid4().hex
        return lambda name: (f"az://tests/{run}/{name}", azure_options)


class RegisteredMemory(StoreTests):
    """A file system of the tests under a protocol of its own."""

    reads_with_plain_zarr = False
    protocol = ""
    kind: type

    @pytest.fixture
    def place(self) -> Place:
        fsspec.register_implementation(self.protocol, self.kind, clobber=True)
        bucket = uuid.uuid4().hex
        return lambda name: (f"{self.protocol}://{bucket}/{name}", {})


class TestListingMemory(RegisteredMemory):
    protocol, kind = "listing-memory", ListingMemory


class TestKeepingMemory(RegisteredMemory):
    protocol, kind = "keeping-memory", KeepingMemory


class TestFilesOverFsspec(StoreTests):
    """Real files, but by fsspec's way to them: no rename, no folders of attempts."""

    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        return lambda name: (f"local://{tmp_path}/{name}", {})
