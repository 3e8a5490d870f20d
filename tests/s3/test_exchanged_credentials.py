"""Credentials that are exchanged while a program runs, at a server that refuses the old ones."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import shardstore
from shardstore.errors import StorageError
from shardstore.storage.stores import tensorstore
from shardstore.storage.stores.location import Location
from testing.s3_servers import ROOT, S3Server
from tests.helpers.processes import run_to_end
from tests.helpers.s3_checkpoints import credential_process, state, use_profile


class Keys:
    """Keys of the gateway's user, one at a time, beside that of the other tests."""

    def __init__(self, server: S3Server) -> None:
        self._user = json.loads(self._admin("user", "list"))
        self._user = next(
            name for name in self._user if server.key in self._admin("user", "info", "--uid", name)
        )
        self.key = self.secret = ""

    def exchange(self) -> None:
        """Make another key, and remove the one before it."""
        old, self.key, self.secret = self.key, secrets.token_hex(10), secrets.token_hex(20)
        about = ("--uid", self._user, "--key-type", "s3")
        given = ("--access-key", self.key, "--secret", self.secret)
        self._admin("key", "create", *about, *given)
        if old:
            self._admin("key", "rm", *about, "--access-key", old)

    def _admin(self, *arguments: str) -> str:
        folder = Path(os.environ.get("SHARDSTORE_S3_SERVER_DIR", ROOT / ".s3-server"))
        command = ["radosgw-admin", "-c", str(folder / "ceph.conf"), "-n", "client.rgw"]
        return run_to_end([*command, *arguments], check=True).stdout


@pytest.fixture(params=["file", "program", "variables"])
def exchange(
    request: pytest.FixtureRequest,
    radosgw_server: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[], None]:
    """Give the program credentials, others with each call, and have the server refuse the last."""
    keys = Keys(radosgw_server)
    names = ("aws_access_key_id", "aws_secret_access_key")
    found = {"retry_mode": "standard"}
    if request.param == "program":
        found = {"credential_process": credential_process(tmp_path)}
    use_profile(tmp_path, monkeypatch, **found)
    if request.param == "variables":
        monkeypatch.delenv("AWS_PROFILE")

    def work() -> None:
        keys.exchange()
        if request.param == "variables":
            for name, value in zip(names, (keys.key, keys.secret), strict=True):
                monkeypatch.setenv(name.upper(), value)
        elif request.param == "program":
            until = (datetime.now(UTC) + timedelta(minutes=5)).strftime("%Y-%m-%dT%H:%M:%SZ")
            answer = {"AccessKeyId": keys.key, "SecretAccessKey": keys.secret}
            credential_process(tmp_path, **answer, Expiration=until)
        else:  # as programs do that renew it: in one step
            text = f"[of-the-test]\n{names[0]} = {keys.key}\n{names[1]} = {keys.secret}\n"
            (tmp_path / "fresh").write_text(text)
            (tmp_path / "fresh").rename(tmp_path / "credentials")

    return work


def test_exchanged_credentials_reach_both_clients(
    exchange: Callable[[], None], radosgw_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two saves, and between two requests of one, once credentials are asked for."""
    bucket = radosgw_server.new_bucket()
    options = {"endpoint_url": radosgw_server.endpoint_url, "region_name": radosgw_server.region}
    exchange()
    url = f"s3://{bucket}/run"
    shardstore.save(state(1), f"{url}/1", storage_options=options)
    place = Location.of(f"{url}/chunks", options)
    under_way = place.io()
    assert under_way.put("first", [b"x"], create=True)
    exchange()
    shardstore.save(state(2), f"{url}/2", storage_options=options)
    for version in (1, 2):
        loaded = shardstore.load(state(0), f"{url}/{version}", storage_options=options)
        assert loaded["step"] == version
    with pytest.raises(StorageError, match="refuses the credentials"):
        under_way.put("second", [b"x"], create=True)
    monkeypatch.setattr(tensorstore, "ASKED_EVERY_S", 0.0)
    assert under_way.put("second", [b"x"], create=True)
    assert under_way.get("first") == b"x"
