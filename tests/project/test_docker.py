"""The container files parse and name nothing that is not in the checkout; no engine is needed."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from testing.s3_servers import S3Server
from tests.helpers.processes import run_to_end

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
INSTRUCTIONS = {
    "FROM", "ARG", "RUN", "COPY", "ENV", "USER", "VOLUME", "EXPOSE", "CMD", "ENTRYPOINT", "WORKDIR",
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


def images() -> set[str]:
    """The stages that services run; others are there to be built upon."""
    services = compose()["services"].values()
    return {service["build"]["target"] for service in services if "build" in service}


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
    known: list[str] = []
    for base, stage in (arguments.split(" AS ") for name, arguments in found if name == "FROM"):
        assert base in known or ":" in base, "an image without a version is another one tomorrow"
        known.append(stage)


def test_every_source_that_is_copied_exists_and_is_in_the_context() -> None:
    copies = [shlex.split(arguments) for name, arguments in instructions() if name == "COPY"]
    between = [copy[0].removeprefix("--from=") for copy in copies if copy[0].startswith("--")]
    assert set(between) <= set(stages())
    sources = [source for copy in copies for source in copy[:-1] if not copy[0].startswith("--")]
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
    for image in images():
        assert per_stage[image], f"{image} runs as root"
        assert per_stage[image][-1] != "root", image


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


def compose_command(folder: Path) -> tuple[list[str], Path] | None:
    """What runs compose files here, and the file for it; None where nothing does.

    Compose 1 refuses the top-level ``name``, so it gets a copy without that line, in folders laid
    out as in the checkout so that the paths in it lead to something.
    """
    if (
        shutil.which("docker") is not None
        and subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0
    ):
        return ["docker", "compose"], DOCKER / "compose.yaml"
    if shutil.which("docker-compose") is None:
        return None
    shutil.copytree(DOCKER, folder / "docker")
    copy = folder / "docker" / "compose.yaml"
    lines = copy.read_text().splitlines(keepends=True)
    copy.write_text("".join(line for line in lines if not line.startswith("name:")))
    return ["docker-compose"], copy


def test_an_engine_agrees(tmp_path: Path) -> None:
    found = compose_command(tmp_path)
    if found is None:
        pytest.skip("neither docker compose nor docker-compose is installed")
    command, file = found
    done = run_to_end([*command, "-f", file, "--profile", "gpu", "config"])
    assert done.returncode == 0, done.stderr
    assert "warn" not in done.stderr.lower(), done.stderr
    resolved = yaml.safe_load(done.stdout)["services"]
    assert set(resolved) == set(compose()["services"])
    for name, service in resolved.items():
        # With the anchors merged, every client of the server has all of its environment.
        assert {"AWS_ENDPOINT_URL", "AWS_SECRET_ACCESS_KEY"} <= set(service["environment"]), name
        if "build" in service:
            assert Path(service["build"]["context"]) == file.parents[1]


def documented() -> list[list[str]]:
    """Every ``docker compose`` command line of the folder's texts, split into words."""
    texts = [path.read_text() for path in sorted(DOCKER.iterdir()) if path.is_file()]
    return [
        shlex.split(line)
        for text in texts
        for line in re.findall(r"docker compose [^`\n]*", text)
        if line.split()[2].startswith("-")
    ]


def test_documented_commands_outlive_the_service_that_ends_first() -> None:
    """`up` ends everything with the first service it watches, and `bucket` is meant to end."""
    commands = documented()
    assert len(commands) >= 3
    for words in commands:
        files = [Path(words[i + 1]) for i, word in enumerate(words) if word == "-f"]
        assert files == [Path("docker/compose.yaml")], f"{words} from the root of the checkout"
        if {"--abort-on-container-exit", "--exit-code-from"} & set(words):
            job = words[words.index("--exit-code-from") + 1]
            assert words[-2:] == [job, job], f"{words} watches more than the job"


def run_line(text: str) -> str:
    """The one RUN instruction that has this text."""
    (found,) = [found for name, found in instructions() if name == "RUN" and text in found]
    return found


def test_torch_is_named_wherever_it_could_be_replaced() -> None:
    """Installed alone, the wheel leaves pip free to bring another torch than the one above."""
    installs = [found for name, found in instructions() if name == "RUN" and "pip install" in found]
    of_trainer = [found for found in installs if "torch" in found]
    assert len(of_trainer) == 2
    assert all('"torch==$TORCH_VERSION"' in found for found in of_trainer)
    assert "shardstore-*.whl" in of_trainer[1]


def test_the_image_is_not_built_without_the_compiled_parts() -> None:
    """Without a compiler the installation succeeds, and is slower; the image has to have them."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        extensions = tomllib.load(file)["tool"]["setuptools"]["ext-modules"]
    compiled = {extension["name"].rpartition(".")[2] for extension in extensions}
    checks = re.findall(
        r"from shardstore.storage.movers import ([\w, ]+)", run_line("shardstore-*.whl")
    )
    assert {name.strip() for found in checks for name in found.split(",")} == compiled


def test_the_driver_of_the_host_is_asked_for() -> None:
    """The NVIDIA container toolkit lets nothing in where an image does not have these."""
    variables = " ".join(arguments for name, arguments in instructions() if name == "ENV")
    assert "NVIDIA_VISIBLE_DEVICES=all" in variables
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in variables


def test_nothing_built_on_the_host_is_copied() -> None:
    lines = (DOCKER / "Dockerfile.dockerignore").read_text().split()
    assert {"**/__pycache__", "**/*.so"} <= set(lines[1:])
    assert lines[-1].startswith("**"), "a later line would let them in again"


def test_the_bucket_is_created_once_and_stays(s3_server: S3Server) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
    environment |= s3_server.environment | {"AWS_DEFAULT_REGION": s3_server.region}
    bucket = s3_server.new_bucket() + "-2"
    for _ in range(2):
        done = run_to_end([sys.executable, DOCKER / "create_bucket.py", bucket], env=environment)
        assert done.returncode == 0, done.stderr
        assert bucket in done.stdout
    assert s3_server.keys(bucket) == []
