"""The same commands on a checkpoint in a real S3 server."""

from __future__ import annotations

import pytest

import shardstore
from testing.s3_servers import S3Server
from tests.helpers.cli_checkpoints import Cli, values


def test_all_commands_over_s3(
    s3_server: S3Server, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = s3_server.new_bucket()
    url = f"s3://{bucket}/run/step-1"
    state = shardstore.shard({**values(), "step": 1})
    shardstore.save(state, url, storage_options=s3_server.storage_options)
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)

    assert len(cli("ls", "--json", url).json["arrays"]) == 7
    outcome = cli("verify", url)
    assert (outcome.code, outcome.err) == (0, ""), outcome
    assert outcome.out.startswith("OK: 7 arrays")
    assert cli("stats", "--json", url, "layers.10.odd").json["arrays"][0]["nan"] == 1
    assert cli("show", "--json", url, "counts[1]").json["values"] == -4 * 2**40
    assert cli("diff", url, url).code == 0

    client = s3_server.client()
    client.delete_object(Bucket=bucket, Key="run/step-1/counts/c.0")
    (found,) = cli("verify", "--json", url).json["findings"]
    assert (found["kind"], found["key"], found["rank"]) == ("chunk-missing", "counts", 0)
    assert cli("show", url, "counts").code == 1
    assert cli("rm", "--yes", url).code == 0
    assert "objects" not in cli.refused("ls", url)
    assert client.list_objects_v2(Bucket=bucket).get("KeyCount") == 0


def test_options_on_the_command_line(s3_server: S3Server, cli: Cli) -> None:
    bucket = s3_server.new_bucket()
    url = f"s3://{bucket}/c"
    state = shardstore.shard({"w": values()["counts"]})
    shardstore.save(state, url, storage_options=s3_server.storage_options)
    words = ["--storage-option", f"key={s3_server.key}"]
    words += ["--storage-option", f"secret={s3_server.secret}"]
    words += ["--storage-option", f"client_kwargs.endpoint_url={s3_server.endpoint_url}"]
    words += ["--storage-option", f"client_kwargs.region_name={s3_server.region}"]
    assert cli("verify", url, *words).code == 0
    wrong = ["key=nobody" if word.startswith("key=") else word for word in words]
    line = cli.refused("ls", url, *wrong)
    assert s3_server.secret not in line
