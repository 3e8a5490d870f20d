"""The object store that `benchmark s3` works in; a proxy that counts requests or delays them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from testing.s3_servers import S3Server, radosgw

ROOT = Path(__file__).resolve().parents[2]
DELAY = ROOT / "testing" / "delay.py"
PROXY = ROOT / "testing" / "s3_proxy.py"


class Bucket:
    """A bucket of its own on a server; see `bench.runs.Store`.

    What was saved is deleted when a case ends: a store that takes deleted objects apart in the
    background would do so during the samples of the next client.
    """

    def __init__(self) -> None:
        """Make a bucket.

        Raises:
            SystemExit: no server is named, and none of ours runs.
        """
        if "AWS_ENDPOINT_URL" not in os.environ:
            server = radosgw()
            if server is None:
                raise SystemExit("no S3 server: scripts/s3_server start, or set AWS_ENDPOINT_URL")
            os.environ.update(server.environment)
        os.environ.setdefault("AWS_REGION", "us-east-1")
        self.server = S3Server(
            name=os.environ.get("BENCH_SERVER", "radosgw"),
            endpoint_url=os.environ["AWS_ENDPOINT_URL"],
            key=os.environ["AWS_ACCESS_KEY_ID"],
            secret=os.environ["AWS_SECRET_ACCESS_KEY"],
            region=os.environ["AWS_REGION"],
        )
        self._name = self.server.new_bucket()

    def new(self, name: str) -> str:
        """A URL where nothing is yet."""
        return f"s3://{self._name}/{name}/{os.urandom(4).hex()}"

    def done(self, place: Path | str) -> None:
        """Leave it until the case is over."""

    def clear(self) -> None:
        """Delete every object."""
        client, keys = self.server.client(), self.server.keys(self._name)
        for start in range(0, len(keys), 1000):  # as many as one request takes
            batch = [{"Key": key} for key in keys[start : start + 1000]]
            client.delete_objects(Bucket=self._name, Delete={"Objects": batch, "Quiet": True})

    def remove(self) -> None:
        """Delete the bucket."""
        self.clear()
        self.server.client().delete_bucket(Bucket=self._name)


@contextmanager
def proxy(latency_ms: int, program: Path = PROXY) -> Iterator[None]:
    """Put a program between the server and every process that starts inside: PROXY, which counts
    requests, or DELAY, which takes less processor time."""
    upstream = os.environ["AWS_ENDPOINT_URL"]
    process = subprocess.Popen(
        [sys.executable, str(program), upstream, "--latency-ms", str(latency_ms)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    os.environ["AWS_ENDPOINT_URL"] = process.stdout.readline().strip()
    try:
        yield
    finally:
        os.environ["AWS_ENDPOINT_URL"] = upstream
        process.stdin.close()
        process.wait(timeout=30)


def requests(work: Callable[[], None]) -> int:
    """The number of requests that pass the proxy during `work`."""
    _ask("reset")
    work()
    return sum(_ask("counters")["requests"].values())


def _ask(what: str) -> Any:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{os.environ['AWS_ENDPOINT_URL']}/-/{what}", timeout=30) as answer:
        return json.load(answer)
