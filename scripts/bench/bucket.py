"""The object store that `benchmark s3` works in, whose requests may be late."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testing.delay import Forwarder
from testing.s3_servers import S3Server, radosgw


class Bucket:
    """A bucket of its own on a server; see `bench.runs.Store`.

    What was saved is deleted when a case ends: a store that takes deleted objects apart in the
    background would do so during the samples of the next client.
    """

    forwarder: Forwarder

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
    def late(self, latency_ms: int) -> Iterator[None]:
        """Let the requests of every process that starts inside be late, and be counted."""
        with Forwarder(self.server.endpoint_url, latency_ms / 1000) as self.forwarder:
            os.environ["AWS_ENDPOINT_URL"] = self.forwarder.url
            try:
                yield
            finally:
                os.environ["AWS_ENDPOINT_URL"] = self.server.endpoint_url
