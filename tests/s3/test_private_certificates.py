"""https with a certificate authority of one's own: which client trusts it, and moves the chunks."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
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
from tests.helpers.programs import run_text

if shutil.which("openssl") is None:
    pytest.skip("no openssl here to make certificates with", allow_module_level=True)

PROGRAM = """
    import json, logging, sys
    url, verify, first = sys.argv[1:]
    if first == "tensorstore":
        import tensorstore
    import torch
    import shardstore
    from shardstore import ShardedTensor
    logging.basicConfig(level="INFO", stream=sys.stdout, force=True)
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

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            with suppress(OSError):
                while data := await source.read(65536):
                    target.write(data)
            target.close()

        async def serve(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            answers, requests = await asyncio.open_connection("127.0.0.1", int(port))
            await asyncio.gather(pump(source, requests), pump(answers, target))

        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        start = asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        listening = asyncio.run_coroutine_threadsafe(start, loop).result(30)
        yield server.at(f"https://localhost:{listening.sockets[0].getsockname()[1]}")
        loop.call_soon_threadsafe(loop.stop)


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
    server: S3Server,
    proxied: S3Server,
    proxy: FaultProxy,
    authority: Authority,
    monkeypatch: pytest.MonkeyPatch,
    given: str,
    first: str,
    by: str,
) -> None:
    """The variable reaches TensorStore unless the program imported it first; an option never does.
    Then one line says who moves the chunks, and why."""
    for name in [name for name in os.environ if "CA_BUNDLE" in name]:
        monkeypatch.delenv(name)
    verify = {"client_kwargs": {"verify": str(authority.root)}} if given == "option" else {}
    url = f"s3://{server.new_bucket()}/run"
    with authority.in_front_of(proxied) as secured:
        environment = secured.environment
        if given == "variable":
            environment["AWS_CA_BUNDLE"] = str(authority.root)
        program, words = textwrap.dedent(PROGRAM), [url, json.dumps(verify), first]
        if given == "variable":  # which is read when the package is imported
            command = [sys.executable, "-c", program, *words]
            ended = run_to_end(command, env={**os.environ, **environment})
        else:
            ended = run_text(program, *words, **environment)
    agents = {request.headers["user-agent"] for request in proxy.passed(path="/w/c")}
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
