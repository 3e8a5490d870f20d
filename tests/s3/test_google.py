"""Google Cloud Storage: which client moves the bytes, faults on the way, and errors with a remedy.

The suite of all stores and the tests of commits and deletions run on it too.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shardstore
from shardstore.errors import StorageError
from shardstore.storage.stores.gcs import problem_of
from shardstore.storage.stores.location import Location
from shardstore.storage.stores.prefix import ObjectPrefix
from shardstore.storage.stores.remote import FileSystemIO
from shardstore.storage.stores.tensorstore import KvStoreIO
from testing.gcs_server import GcsServer
from testing.s3_proxy import Fault, FaultProxy
from testing.s3_servers import free_port
from tests.helpers.store_suite import assert_holds, save_small, small_state
from tests.helpers.verification import findings

ENDPOINT = "TENSORSTORE_GCS_HTTP_URL"


def place_at(server: GcsServer, name: str = "run/step-1", **options: Any) -> ObjectPrefix:
    url = f"gs://{server.new_bucket()}/{name}"
    place = Location.of(url, {**server.storage_options, **options})
    assert isinstance(place, ObjectPrefix)
    return place


@pytest.fixture
def proxy(gcs_server: GcsServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    with FaultProxy(gcs_server.endpoint_url) as proxy:
        monkeypatch.setenv(ENDPOINT, proxy.endpoint_url)
        yield proxy


def test_tensorstore_moves_the_chunks_and_gcsfs_the_documents(
    gcs_server: GcsServer, proxy: FaultProxy
) -> None:
    place = place_at(gcs_server, endpoint_url=proxy.endpoint_url)
    assert isinstance(place.io(), KvStoreIO)
    save_small(place, 2.0)
    sent: dict[str, set[str]] = {"gcsfs": set(), "tensorstore": set()}
    for passed in proxy.log:
        client = "gcsfs" if "gcsfs" in passed.headers.get("user-agent", "") else "tensorstore"
        sent[client].add(f"{passed.method} {passed.path.partition('uploadType=')[2][:5]}".strip())
    assert sent["tensorstore"] == {"POST media"}
    assert {"POST multi", "GET", "DELETE"} <= sent["gcsfs"]
    assert_holds(place, 2.0)
    assert findings(place) == []


@pytest.mark.parametrize(
    ("option", "variables"),
    [
        ({}, {ENDPOINT: "http://127.0.0.1:9"}),
        ({}, {ENDPOINT: None}),
        ({"session_kwargs": {"trust_env": True}}, {}),
        ({"requester_pays": "project"}, {}),
        ({}, {"GOOGLE_APPLICATION_CREDENTIALS": "FILE"}),
    ],
)
def test_settings_that_tensorstore_does_not_take_leave_all_to_gcsfs(
    gcs_server: GcsServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    option: dict[str, Any],
    variables: dict[str, str | None],
) -> None:
    """Where it took others, it would read another server, or send credentials of another user."""
    (tmp_path / "account.json").write_text("{}")
    for name, value in variables.items():
        text = str(tmp_path / "account.json") if value == "FILE" else value
        monkeypatch.setenv(name, text) if text else monkeypatch.delenv(name)
    place = place_at(gcs_server, **option)
    assert isinstance(place.io(), FileSystemIO)
    save_small(place, 2.0)
    assert_holds(place, 2.0)
    with pytest.raises(StorageError, match=r"TensorStore does not take.*default credentials"):
        place.kvstore()


@pytest.mark.parametrize("fault", [Fault.DROP_ANSWER, Fault.RESET_IN_REQUEST])
def test_a_save_survives_a_fault_of_each_write(
    gcs_server: GcsServer, proxy: FaultProxy, fault: Fault
) -> None:
    """Lost answers too: the repeated request finds what the first one wrote."""
    place = place_at(gcs_server, endpoint_url=proxy.endpoint_url)
    # Each try that is repeated passes, because the rule that hit the first is used up.
    gcsfs = [proxy.add(fault, path="uploadType=multipart", skip=bool(n)) for n in range(4)]
    chunks = proxy.add(fault, path="uploadType=media", count=5)
    save_small(place, 3.0)
    assert [rule.hits for rule in gcsfs] == [1] * 4
    assert chunks.hits == 5
    proxy.clear()
    assert_holds(place, 3.0)
    assert findings(place) == []
    assert [name for name in place.walk() if ".attempts" in name] == []


def test_a_refused_commit_is_certain_and_leaves_nothing(
    gcs_server: GcsServer, proxy: FaultProxy
) -> None:
    place = place_at(gcs_server, endpoint_url=proxy.endpoint_url)
    proxy.add(Fault.DENIED, path="uploadType=multipart", skip=1, count=None)
    with pytest.raises(StorageError, match="GOOGLE_APPLICATION_CREDENTIALS") as caught:
        save_small(place, 3.0)
    assert "is not known" not in str(caught.value)
    assert place.url in str(caught.value)
    proxy.clear()
    assert [name for name in place.walk() if ".attempts" not in name] == []


def refused(place: Location, *words: str) -> None:
    """A save and a load fail with all these words and the URL."""
    for work in (shardstore.save, shardstore.load):
        with pytest.raises(StorageError) as caught:
            work(small_state(), place.place)
        for word in (place.url.rpartition("/")[0], *words):
            assert word in str(caught.value)


def test_credentials_that_the_server_refuses_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with GcsServer(token="secret-token") as server:
        monkeypatch.setenv(ENDPOINT, server.endpoint_url)
        refused(place_at(server), "401", "GOOGLE_APPLICATION_CREDENTIALS", "'token': FILE")
        io = place_at(server).io()
        assert isinstance(io, KvStoreIO)
        with pytest.raises(StorageError, match=r"HTTP 401.*GOOGLE_APPLICATION_CREDENTIALS"):
            io.put("x", [b"1"], create=True)


def test_an_absent_bucket_is_named(gcs_server: GcsServer) -> None:
    place = Location.of("gs://no-such-bucket/run/x", gcs_server.storage_options)
    with pytest.raises(StorageError, match="the bucket does not exist"):
        shardstore.save(small_state(), place.place)
    assert isinstance(place, ObjectPrefix)
    with pytest.raises(StorageError, match="the bucket does not exist"):
        place.io().put("x", [b"1"], create=True)
    with pytest.raises(StorageError, match="the bucket does not exist"):
        shardstore.latest(place.place)


def test_a_bucket_that_may_not_be_listed_is_told_so(
    gcs_server: GcsServer, proxy: FaultProxy
) -> None:
    place = place_at(gcs_server, endpoint_url=proxy.endpoint_url)
    proxy.add(Fault.DENIED, methods=("GET",), path=r"/o\?", count=None)
    with pytest.raises(StorageError, match=r"listing.*403.*GOOGLE_APPLICATION_CREDENTIALS"):
        shardstore.latest(place.place)


def test_an_endpoint_where_nobody_listens(
    gcs_server: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv(ENDPOINT, dead)
    monkeypatch.setattr("shardstore.storage.stores.remote.FIRST_DEADLINE_S", 3.0)
    refused(place_at(gcs_server, endpoint_url=dead), "does not answer", "STORAGE_EMULATOR_HOST")


def test_a_missing_package_is_named(gcs_server: GcsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs.core", None)
    with pytest.raises(StorageError, match=r"pip install gcsfs$"):
        place_at(gcs_server, project="none").exists()


@pytest.mark.parametrize(
    ("options", "variables", "words"),
    [
        ({"key": "a", "secret": "b"}, {}, "key is an option of S3: give token=FILE"),
        ({"token": "/nowhere/account.json"}, {}, "token names a file that does not exist"),
        ({"token": "account.json"}, {}, "token names a file that does not exist"),
        ({"project": 7}, {}, "project must be a text, not of type int"),
        ({"endpoint_url": "localhost:4443"}, {}, "give http://localhost:4443 or https://"),
        ({"endpoint_url": "http://me:secret@host"}, {}, "has credentials in it"),
        ({}, {"STORAGE_EMULATOR_HOST": "ftp://x"}, "STORAGE_EMULATOR_HOST must begin with http"),
    ],
)
def test_options_that_do_not_fit_are_named_with_the_remedy(
    options: dict[str, Any], variables: dict[str, str], words: str
) -> None:
    wrong = problem_of(options, variables)
    assert wrong is not None
    assert words in wrong
    assert "secret@" not in wrong


def test_options_that_fit() -> None:
    for token in (None, "anon", "google_default", "cloud", "ya29.a0Ae4lvC", __file__, {"a": 1}):
        assert problem_of({"token": token, "endpoint_url": "http://x:1"}, dict(os.environ)) is None
    assert problem_of({}, {"STORAGE_EMULATOR_HOST": "localhost:4443"}) is None


def test_secrets_of_a_token_are_hidden(
    gcs_server: GcsServer, caplog: pytest.LogCaptureFixture
) -> None:
    token = {"refresh_token": "a-long-secret", "client_secret": "another-secret", "client_id": "x"}
    place = place_at(gcs_server, token=token)
    with pytest.raises(StorageError) as caught:
        place.exists()
    logging.getLogger("gcsfs.credentials").warning("token a-long-secret of %s", "another-secret")
    assert "secret" not in str(caught.value)
    assert "secret" not in caplog.text.rpartition("token ")[2]
