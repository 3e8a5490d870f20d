"""The S3 servers that any test may ask for; each is started by the first test that does.

The package is imported here, before any test imports TensorStore: its import bounds the requests
that TensorStore makes.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

import shardstore
from shardstore.storage.stores.prefix import ObjectPrefix
from testing.gcs_server import GcsServer
from testing.s3_servers import EmbeddedServer, S3Server, embedded_server, radosgw

assert shardstore
# TensorStore reads it once, when it is imported: a silence in a test need not last 15 seconds.
os.environ["TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS"] = "4"
# gcsfs reads it at its import. Without it, the file systems of zarr ask each server by gRPC for the
# kinds of buckets, and wait a minute for one that does not speak it.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

# Searches are short unless ``./scripts/test --all`` asks for long ones. A slow machine is no error.
ALL = os.environ.get("SHARDSTORE_TESTS") == "all"
settings.register_profile("short", deadline=None, max_examples=20)
settings.register_profile("long", deadline=None, max_examples=300)
settings.load_profile("long" if ALL else "short")

# Begun first where files run side by side, or all others would be done long before them.
LONG = (
    "project/test_oldest_versions.py",
    "distributed/test_quickstart.py",
    "interop/test_pages.py",
    "interop/test_trainers.py",
    "s3/test_races.py",
    "s3/test_save_faults.py",
    "s3/test_stores.py",
    "s3/test_object_planes.py",
    "s3/test_wrong_settings.py",
    "interop/megatron/test_gpt.py",
    "interop/megatron/test_trainer.py",
    "interop/test_real_megatron.py",
    "distributed/test_async_save.py",
    "s3/test_convert_s3.py",
)

NO_RADOSGW = "no Ceph gateway runs here: scripts/s3_server start brings one up (Debian, as root)"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    long = [] if ALL else [item for item in items if item.get_closest_marker("long")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    items.sort(key=lambda item: not item.path.as_posix().endswith(LONG))


def pytest_collection_finish() -> None:
    """What is there stays to the end; looking for garbage in it took a tenth of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """The embedded server, shared by all tests of a session: take a bucket of your own."""
    with embedded_server(tmp_path_factory.mktemp("embedded-s3")) as embedded:
        yield embedded.server


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[GcsServer]:
    """A server of Google Cloud Storage's API, shared by all tests: take a bucket of your own."""
    pytest.importorskip("gcsfs", reason="gs:// needs gcsfs, which shardstore[test] brings")
    with GcsServer() as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", server.endpoint_url)
        yield server


@pytest.fixture
def copies_small_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Object stores also copy chunks of a base that are sent sooner: a test needs no large ones."""
    monkeypatch.setattr(ObjectPrefix, "least_copied_bytes", 1)


@pytest.fixture
def own_s3_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """An embedded server for one test alone, which may kill it and start it again."""
    with embedded_server(tmp_path / "own-s3") as embedded:
        yield embedded


@pytest.fixture(scope="session")
def radosgw_server() -> S3Server:
    """The Ceph gateway of scripts/s3_server; skips where none runs."""
    server = radosgw()
    if server is None:
        pytest.skip(NO_RADOSGW)
    return server


@pytest.fixture(params=["embedded", "radosgw"])
def any_s3_server(request: pytest.FixtureRequest) -> S3Server:
    """Each server in turn; without ``--all`` the Ceph gateway alone, where it runs."""
    if request.param == "embedded" and not ALL and radosgw() is not None:
        pytest.skip("Ceph's gateway answers this; --all asks both servers")
    name = "s3_server" if request.param == "embedded" else "radosgw_server"
    server: S3Server = request.getfixturevalue(name)
    return server
