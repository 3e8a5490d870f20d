"""S3 servers on this machine, for the tests, the quick start and the benchmark.

``S3Server`` is the value that says how to reach a server. An embedded server lives as long as the
process that started it; ``scripts/s3_server`` brings up a Ceph gateway.

The embedded server is MiniStack: of the servers on PyPI it is the one that refuses unknown keys and
lets exactly one of racing ``If-None-Match: *`` writers win. It does not check signatures; the Ceph
gateway does.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
START_LIMIT_S = 60.0


class ServerFailed(RuntimeError):  # noqa: N818 (reads as what it says in a test report)
    """A server did not start, or died."""


@dataclass(frozen=True, kw_only=True)
class S3Server:
    """How to reach an S3 server; holds no process, so it may be sent to spawned ranks.

    Attributes:
        name: "embedded" or "radosgw", for reports.
        endpoint_url: ``http://127.0.0.1:port``.
        key: access key id.
        secret: secret access key.
        region: region to sign for.
    """

    name: str
    endpoint_url: str
    key: str = field(repr=False)
    secret: str = field(repr=False)
    region: str = "us-east-1"

    @property
    def storage_options(self) -> dict[str, Any]:
        """The options of fsspec (s3fs) for this server, as shardstore takes them."""
        return {
            "key": self.key,
            "secret": self.secret,
            "client_kwargs": {"endpoint_url": self.endpoint_url, "region_name": self.region},
            "config_kwargs": {"s3": {"addressing_style": "path"}},
        }

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that say the same."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_REGION": self.region,
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
        }

    def at(self, endpoint_url: str) -> S3Server:
        """The same server by another way, a proxy in front of it for one."""
        return replace(self, endpoint_url=endpoint_url)

    @cache  # noqa: B019 (a server's client is for the whole process)
    def client(self) -> Any:
        """The process's botocore client: path addressing, few retries, short limits."""
        import botocore.config
        import botocore.session

        return botocore.session.Session().create_client(
            "s3",
            endpoint_url=self.endpoint_url,
            region_name=self.region,
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
            config=botocore.config.Config(
                s3={"addressing_style": "path"},
                retries={"total_max_attempts": 3},
                connect_timeout=10,
                read_timeout=60,
                max_pool_connections=64,
            ),
        )

    def new_bucket(self) -> str:
        """Create a bucket with a name that no other has, and return the name."""
        bucket = f"shardstore-{uuid.uuid4().hex[:16]}"
        self.client().create_bucket(Bucket=bucket)
        return bucket

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        """Every key of a bucket below ``prefix``, sorted, as the server itself lists them."""
        pages = (
            self.client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        )
        return sorted(entry["Key"] for page in pages for entry in page.get("Contents", ()))


class EmbeddedServer:
    """A MiniStack process on a free port of 127.0.0.1; ends with the process that started it.

    Args:
        folder: where it keeps its objects and its log; they outlive ``kill`` and ``start``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log.txt"
        self.server = S3Server(
            name="embedded",
            endpoint_url=f"http://127.0.0.1:{free_port()}",
            key=f"AK{secrets.token_hex(9).upper()}",
            secret=secrets.token_urlsafe(30),
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> S3Server:
        """Start it, wait until it answers, and return how to reach it.

        Raises:
            ServerFailed: MiniStack is not installed, died, or did not answer within a minute.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        port = self.server.endpoint_url.rpartition(":")[2]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
        environment |= {
            "AUTH": "true",
            "AWS_ACCESS_KEY_ID": self.server.key,
            "AWS_SECRET_ACCESS_KEY": self.server.secret,
            "BIND_HOST": "127.0.0.1",
            "GATEWAY_PORT": port,
            "LOG_LEVEL": "ERROR",
            "S3_DATA_DIR": str(self.folder / "objects"),
            "S3_PERSIST": "1",
            "SERVICES": "s3",
            "STATE_DIR": str(self.folder / "state"),
        }
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), "--serve"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                cwd=self.folder,
            )
        deadline = time.monotonic() + START_LIMIT_S
        while not answers(f"{self.server.endpoint_url}/_ministack/health"):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise ServerFailed(
                    f"MiniStack did not start on {self.server.endpoint_url} (installed with "
                    f"shardstore[test]): {self.log.read_text(errors='replace')[-2000:]}"
                )
            time.sleep(0.05)
        return self.server

    def kill(self) -> None:
        """End it at once, in the middle of whatever it does; harmless when it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._process = None


@contextmanager
def embedded_server(folder: Path) -> Iterator[EmbeddedServer]:
    """An embedded server that runs inside the ``with`` block."""
    embedded = EmbeddedServer(folder)
    embedded.start()
    try:
        yield embedded
    finally:
        embedded.kill()


def radosgw(
    name: str = "server", *, environment: Mapping[str, str] = os.environ
) -> S3Server | None:
    """The Ceph gateway that ``scripts/s3_server start`` brought up; None where none answers.

    Looks for the description that the script leaves in ``.s3-server/server.json`` of the checkout,
    or in the folder that SHARDSTORE_S3_SERVER_DIR names; another gateway's is beside it, by its
    ``name``.
    """
    folder = Path(environment.get("SHARDSTORE_S3_SERVER_DIR", ROOT / ".s3-server"))
    try:
        described = json.loads((folder / f"{name}.json").read_text())
    except (OSError, ValueError):
        return None
    server = S3Server(name="radosgw", **described)
    return server if answers(server.endpoint_url) else None


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(url: str) -> bool:
    """Whether an HTTP server answers there, with any status; goes round every proxy setting."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=5):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


def _serve() -> None:
    """Be the server, until whoever started this process closes its end of standard input."""

    def leave_with_the_parent() -> None:
        sys.stdin.buffer.read()
        os._exit(0)

    threading.Thread(target=leave_with_the_parent, daemon=True).start()
    import runpy

    sys.argv = ["ministack"]
    # The folder of this file is first on the path and must not hide an installed module.
    sys.path.pop(0)
    runpy.run_module("ministack", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _serve()
