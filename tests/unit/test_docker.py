"""The container files parse and name nothing that is not in the checkout; no engine is needed."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.s3_servers import S3Server

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
INSTRUCTIONS = {
    "FROM", "RUN", "COPY", "ENV", "USER", "VOLUME", "EXPOSE", "CMD", "ENTRYPOINT", "WORKDIR",
}  # fmt: skip


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions with their arguments, lines that go on joined."""
    kept = [line for line in (DOCKER / "Dockerfile").read_text().splitlines() if line[:1] != "#"]
    text = re.sub(r"\\\n\s*", "", "\n".join(kept))
    found = []
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, arguments = line.partition(" ")
        found.append((name, arguments))
    return found


def compose() -> dict[str, Any]:
    with (DOCKER / "compose.yaml").open() as file:
        read: dict[str, Any] = yaml.safe_load(file)
    return read


def stages() -> list[str]:
    return [arguments.split(" AS ")[1] for name, arguments in instructions() if name == "FROM"]


def ignored(source: str) -> bool:
    """Whether the build context lacks it: everything does that is not let in by name."""
    lines = (DOCKER / "Dockerfile.dockerignore").read_text().split()
    assert lines[0] == "*"
    return f"!{source}" not in lines


def test_the_dockerfile_is_made_of_known_instructions() -> None:
    found = instructions()
    assert {name for name, _ in found} <= INSTRUCTIONS
    assert found[0][0] == "FROM"
    for name, arguments in found:
        if name in ("CMD", "ENTRYPOINT"):
            assert isinstance(json.loads(arguments), list), "the shell form loses signals"
        if name == "FROM":
            assert ":" in arguments, "an image without a version is another one tomorrow"


def test_every_source_that_is_copied_exists_and_is_in_the_context() -> None:
    copies = [shlex.split(arguments) for name, arguments in instructions() if name == "COPY"]
    sources = [source for copy in copies for source in copy[:-1]]
    assert {"pyproject.toml", "shardstore", "scripts"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
        assert not ignored(source), source


def test_images_run_as_nobody_special() -> None:
    per_stage: dict[str, list[str]] = {}
    for name, arguments in instructions():
        if name == "FROM":
            users = per_stage.setdefault(arguments.split(" AS ")[1], [])
        elif name == "USER":
            users.append(arguments)
    assert all(users and users[-1] != "root" for users in per_stage.values()), per_stage


def test_the_scripts_that_are_started_exist() -> None:
    texts = [arguments for name, arguments in instructions() if name in ("CMD", "ENTRYPOINT")]
    texts.append((DOCKER / "compose.yaml").read_text())
    started = re.findall(r"/opt/(?:shardstore/)?([\w/]+\.py)", "\n".join(texts))
    assert len(started) >= 4
    for script in started:
        assert (ROOT / script).is_file() or (DOCKER / script).is_file(), script


def test_the_compose_file_holds_together() -> None:
    read = compose()
    services = read["services"]
    assert set(services) == {"s3", "bucket", "trainer", "trainer-gpu"}
    built = {service["image"] for service in services.values() if "build" in service}
    for name, service in services.items():
        if "build" in service:
            build = service["build"]
            context = (DOCKER / build["context"]).resolve()
            assert context == ROOT
            assert (context / build["dockerfile"]).is_file()
            assert build["target"] in stages()
        else:
            assert service["image"] in built, f"{name} runs an image that nobody builds"
        for other, condition in service.get("depends_on", {}).items():
            assert other in services
            if condition["condition"] == "service_healthy":
                assert "healthcheck" in services[other]
        for volume in service.get("volumes", ()):
            assert volume.split(":")[0] in read["volumes"]
        assert "ports" not in service, "the trial's server is for its own network"


def test_an_engine_agrees() -> None:
    command = ["docker", "compose"]
    if (
        shutil.which("docker") is None
        or subprocess.run([*command, "version"], capture_output=True).returncode != 0
    ):
        pytest.skip("docker compose is not installed")
    found = subprocess.run(
        [*command, "-f", str(DOCKER / "compose.yaml"), "--profile", "gpu", "config", "--quiet"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert found.returncode == 0, found.stderr


def test_the_bucket_is_created_once_and_stays(s3_server: S3Server) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
    environment |= s3_server.environment | {"AWS_DEFAULT_REGION": s3_server.region}
    bucket = s3_server.new_bucket() + "-2"
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, DOCKER / "create_bucket.py", bucket],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert bucket in done.stdout
    assert s3_server.keys(bucket) == []
