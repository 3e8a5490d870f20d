"""https with a certificate authority of one's own: which client trusts it, and moves the chunks."""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from testing.s3_proxy import FaultProxy
from testing.s3_servers import S3Server
from tests.helpers.processes import run_to_end

if shutil.which("openssl") is None:
    pytest.skip("no openssl here to make certificates with", allow_module_level=True)

PROGRAM = """
    import json, logging, os, sys
    url, verify, first = sys.argv[1:]
    if first == "tensorstore":
        import tensorstore
    import torch
    import shardstore
    from shardstore import ShardedTensor
    logging.basicConfig(level="INFO", stream=sys.stdout)
    options = json.loads(verify) or None
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.arange(1000.0)), "step": 1}
    shardstore.save(state, url, storage_options=options)
    state["w"].data.zero_()
    assert shardstore.load(state, url, storage_options=options)["step"] == 1
    assert state["w"].data[999] == 999
"""


@dataclass(frozen=True)
class Authority:
    """A certificate authority, and a certificate of it for this machine."""

    folder: Path

    @property
    def root(self) -> Path:
        return self.folder / "root.pem"

    @classmethod
    def new(cls, folder: Path) -> Authority:
        def openssl(*arguments: str) -> None:
            subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

        key = ("-newkey", "rsa:2048", "-nodes")
        openssl("req", "-x509", *key, "-keyout", "root.key", "-out", "root.pem", "-subj", "/CN=lab")
        openssl("req", *key, "-keyout", "host.key", "-out", "host.csr", "-subj", "/CN=localhost")
        (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        signing = ("-CA", "root.pem", "-CAkey", "root.key", "-CAcreateserial")
        openssl(
            *("x509", "-req", "-in", "host.csr", "-out", "host.pem", "-extfile", "names"), *signing
        )
        return cls(folder)

    @contextmanager
    def in_front_of(self, server: S3Server) -> Iterator[S3Server]:
        """The same server behind TLS."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.folder / "host.pem", self.folder / "host.key")
        _, _, port = server.endpoint_url.rpartition(":")

        def pump(source: socket.socket, target: socket.socket) -> None:
            with suppress(OSError):
                while data := source.recv(65536):
                    target.sendall(data)
            with suppress(OSError):
                target.shutdown(socket.SHUT_RDWR)

        def serve(plain: socket.socket) -> None:
            with (
                suppress(OSError),
                context.wrap_socket(plain, server_side=True) as client,
                socket.create_connection(("127.0.0.1", int(port))) as there,
            ):
                back = threading.Thread(target=pump, args=(there, client), daemon=True)
                back.start()
                pump(client, there)
                back.join()

        def accept() -> None:
            with suppress(OSError):
                while True:
                    client, _ = listening.accept()
                    threading.Thread(target=serve, args=(client,), daemon=True).start()

        with socket.create_server(("127.0.0.1", 0)) as listening:
            threading.Thread(target=accept, daemon=True).start()
            yield server.at(f"https://localhost:{listening.getsockname()[1]}")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.new(tmp_path_factory.mktemp("authority"))


@pytest.mark.parametrize(
    ("given", "first", "by"),
    [
        ("variable", "shardstore", "tensorstore"),
        ("variable", "tensorstore", "s3fs"),
        ("option", "shardstore", "s3fs"),
        ("nothing", "shardstore", ""),
    ],
)
def test_the_client_that_knows_the_certificate_moves_chunks(
    s3_server: S3Server, authority: Authority, given: str, first: str, by: str
) -> None:
    """The variable reaches TensorStore unless the program imported it first; an option never does.
    Then one line says who moves the chunks, and why."""
    bucket = s3_server.new_bucket()
    with (
        FaultProxy(s3_server.endpoint_url) as proxy,
        authority.in_front_of(s3_server.at(proxy.endpoint_url)) as server,
    ):
        environment = {n: v for n, v in os.environ.items() if "CA_BUNDLE" not in n}
        environment |= server.environment
        if given == "variable":
            environment["AWS_CA_BUNDLE"] = str(authority.root)
        options = {"client_kwargs": {"verify": str(authority.root)}} if given == "option" else {}
        program = [sys.executable, "-c", textwrap.dedent(PROGRAM), f"s3://{bucket}/run"]
        ended = run_to_end([*program, json.dumps(options), first], env=environment)
        agents = {r.headers["user-agent"] for r in proxy.passed() if "/w/c" in r.path}
    if not by:
        assert "the server's certificate is not trusted" in ended.stderr
        assert "AWS_CA_BUNDLE" in ended.stderr
        return
    assert ended.returncode == 0, ended.stderr
    assert len(agents) == 1
    assert ("tensorstore" in agents.pop()) == (by == "tensorstore")
    said = [line for line in ended.stdout.splitlines() if "fsspec moves chunks too" in line]
    assert len(said) == (by == "s3fs")
    assert all("does not take a certificate" in line for line in said)
