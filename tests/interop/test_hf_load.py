"""Models on web servers, on the Hugging Face Hub and in S3, read by ranges."""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from safetensors.torch import save_file

import shardstore
from shardstore import hf
from shardstore.convert import convert
from shardstore.errors import (
    ArgumentError,
    CheckpointingException,
    DamagedCheckpointError,
    NotACheckpointError,
    StorageError,
)
from shardstore.hf import loading
from shardstore.mapping import ShardedTensor
from shardstore.storage.runtime.counters import counters
from shardstore.storage.stores import remote
from shardstore.storage.stores.location import Location
from testing.s3_servers import S3Server
from tests.helpers.range_server import SIGNATURE, Quiet, RangeServer, answering, range_server

SECRET = "a-secret-that-nobody-sees"
W = torch.arange(96.0 * 1024).reshape(96, 1024)
SMALL = {f"norm.{n}": torch.full((64,), float(n)) for n in range(20)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    save_file(SMALL, folder / names[0])
    save_file({"w": W}, folder / names[1])
    files = {**dict.fromkeys(SMALL, names[0]), "w": names[1]}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


@pytest.fixture
def web(model: Path) -> Iterator[RangeServer]:
    with range_server(model) as server:
        yield server


def state() -> dict[str, Any]:
    return {"w": torch.zeros_like(W), **{key: torch.zeros(64) for key in SMALL}}


def require_loads(place: str, **options: Any) -> None:
    found = state()
    hf.load(found, place, **options)
    assert all(torch.equal(found[key], value) for key, value in {"w": W, **SMALL}.items())


def messages(error: BaseException, caplog: pytest.LogCaptureFixture) -> str:
    return "".join(traceback.format_exception(error)) + repr(error) + caplog.text


# -- web servers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "/", "/model.safetensors.index.json"])
def test_an_index_on_a_web_server(web: RangeServer, name: str) -> None:
    require_loads(f"{web.url}/model{name}")


def test_the_index_of_a_variant_on_a_web_server(web: RangeServer, model: Path) -> None:
    index = model / "model.safetensors.index.fp16.json"
    (model / "model.safetensors.index.json").rename(index)
    require_loads(f"{web.url}/model/{index.name}")


def test_a_single_file_on_a_web_server(web: RangeServer, model: Path) -> None:
    (model / "model.safetensors.index.json").unlink()
    with pytest.raises(
        NotACheckpointError, match=r"model\.safetensors does not exist; give the path"
    ):
        hf.load(state(), f"{web.url}/model")
    (model / "model-00001-of-00002.safetensors").rename(model / "model.safetensors")
    found = {"norm.3": torch.zeros(64)}
    hf.load(found, f"{web.url}/model")
    hf.load(found, f"{web.url}/model/model.safetensors")
    assert torch.equal(found["norm.3"], SMALL["norm.3"])


def test_near_tensors_are_one_request_and_large_ones_are_parts(
    web: RangeServer, model: Path
) -> None:
    large = torch.arange(3.0 * 2**20)  # 12 MiB
    save_file({"w": large}, model / "model-00002-of-00002.safetensors")
    found = {**state(), "w": torch.zeros_like(large)}
    hf.load(found, f"{web.url}/model")
    assert all(torch.equal(found[key], value) for key, value in {"w": large, **SMALL}.items())
    reads = [path for method, path, part in web.requests if method == "GET"]
    # The header, and twenty tensors.
    assert sum(path.endswith("00001-of-00002.safetensors") for path in reads) == 2
    assert 3 <= sum(path.endswith("00002-of-00002.safetensors") for path in reads) <= 4


def test_rows_are_read_alone_and_columns_with_their_gaps(web: RangeServer) -> None:
    before = counters["bytes_read"]
    rows = torch.zeros(32, 1024)
    hf.load({"w": ShardedTensor.from_rank_offsets("w", rows, (0, 1, 3))}, f"{web.url}/model")
    assert torch.equal(rows, W[32:64])
    assert counters["bytes_read"] - before == rows.nbytes
    columns = torch.zeros(96, 256)
    hf.load({"w": ShardedTensor.from_rank_offsets("w", columns, (1, 2, 4))}, f"{web.url}/model")
    assert torch.equal(columns, W[:, 512:768])
    assert counters["bytes_read"] - before <= rows.nbytes + W.nbytes


@pytest.mark.parametrize("fault", ["ignores_ranges", "shifts_ranges"])
def test_a_server_that_sends_other_ranges_is_an_error(web: RangeServer, fault: str) -> None:
    setattr(web, fault, True)
    with pytest.raises(StorageError, match="sends whole files, or other bytes than the range"):
        hf.load(state(), f"{web.url}/model")


def test_a_whole_file_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_DEADLINE_S", 5.0)
    ended = threading.Event()

    class Endless(Quiet):
        def do_GET(self) -> None:  # noqa: N802 (its name)
            self.send_response(200)
            self.send_header("Content-Length", str(2**50))
            self.end_headers()
            ended.wait(60)

    with answering(Endless) as url:
        try:
            with pytest.raises(StorageError, match="sends whole files"):
                Location.of(url).read_range("model.safetensors", 0, 8)
        finally:
            ended.set()


def test_an_answer_that_ends_too_early_is_asked_for_again(web: RangeServer) -> None:
    web.cuts = 2
    require_loads(f"{web.url}/model")
    assert max(Counter(web.requests).values()) == 3


def test_a_file_that_an_index_names_is_missing(web: RangeServer, model: Path) -> None:
    (model / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointingException, match=r"00002-of-00002\.safetensors"):
        hf.load({"norm.1": torch.zeros(64)}, f"{web.url}/model")


def test_a_smaller_model_was_saved_over_a_larger_one(model: Path, tmp_path: Path) -> None:
    """transformers deletes the parts of the larger one, and leaves their index."""
    index, single = model / "model.safetensors.index.json", model / "model.safetensors"
    (model / "model-00001-of-00002.safetensors").rename(single)
    found = {"norm.3": torch.zeros(64)}
    with pytest.raises(DamagedCheckpointError, match=r"give the path of model\.safetensors"):
        hf.load(found, model)  # a part is left
    (model / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"give the path of model\.safetensors"):
        hf.load(found, index)
    for place in (model, single):
        found = {"norm.3": torch.zeros(64)}
        hf.load(found, place)
        assert torch.equal(found["norm.3"], SMALL["norm.3"])
    convert(model, tmp_path / "c")
    assert shardstore.open(tmp_path / "c").keys() >= SMALL.keys()
    single.unlink()
    with pytest.raises(DamagedCheckpointError, match="not a file in the same folder"):
        hf.load(found, model)


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_server_that_is_overloaded_is_asked_again(web: RangeServer, status: int) -> None:
    web.busy, web.refusal = (status, 2), {"Retry-After": "0"}
    require_loads(f"{web.url}/model")
    assert max(Counter(web.requests).values()) == 3


def test_the_time_that_an_overloaded_server_asks_for_is_waited(
    web: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, found = f"{web.url}/model/model-00001-of-00002.safetensors", {"norm.3": torch.zeros(64)}
    for asked, most, least in (
        ({"Retry-After": "1"}, 9, 3),
        ({"Retry-After": "10000"}, 0.5, 1.5),
        ({"Retry-After": "soon"}, 0.5, 0),
        ({"RateLimit": '"resolvers";r=0;t=1'}, 9, 3),  # of the Hub
    ):
        web.requests.clear()
        web.busy, web.refusal = (503, 1), asked
        monkeypatch.setattr(remote, "MOST_WAIT_S", most)
        started = time.monotonic()
        hf.load(found, url)
        assert least <= time.monotonic() - started < least + 5


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_stays_overloaded_is_named_so(web: RangeServer, status: int) -> None:
    web.busy, web.refusal = (status, 10**6), {"Retry-After": "0"}
    for read in (
        lambda: hf.load(state(), f"{web.url}/model"),
        lambda: Location.of(f"{web.url}/model").stamp("model.safetensors"),  # HEAD, then GET
    ):
        web.requests.clear()
        with pytest.raises(StorageError, match=rf"{status}.*; the store is overloaded"):
            read()
        assert set(Counter(web.requests).values()) == {remote.WEB_TRIES}


@pytest.mark.parametrize("status", [401, 403])
def test_other_refusals_are_not_tried_again(web: RangeServer, status: int) -> None:
    """The Hub answers so for models that are private or gated."""
    web.busy = status, 1
    with pytest.raises(StorageError, match=rf"{status}.*HF_TOKEN.*accepted its conditions"):
        hf.load(state(), f"{web.url}/model")
    assert len(web.requests) == 1


@pytest.mark.parametrize("own", [None, {}, {"trust_env": False}])
def test_the_proxy_of_the_environment(
    web: RangeServer, own: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy gets the whole URL, of a host that only it knows."""
    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", web.url)
    options = {} if own is None else {"client_kwargs": own}
    if own != {"trust_env": False}:
        require_loads("http://model.invalid/model", storage_options=options)
        return
    with pytest.raises(StorageError, match="does not answer"):
        hf.load(state(), "http://model.invalid/model", storage_options=options)
    assert not web.requests


@pytest.mark.parametrize("right", [True, False])
def test_passwords_of_a_url_stay_secret(
    web: RangeServer, right: bool, caplog: pytest.LogCaptureFixture
) -> None:
    web.user, web.password = "someone", SECRET
    typed = SECRET if right else f"{SECRET}-wrong"
    url = web.url.replace("://", f"://someone:{typed}@")
    with caplog.at_level(logging.DEBUG):
        if right:
            require_loads(f"{url}/model")
            return
        with pytest.raises(StorageError, match="401") as caught:
            hf.load(state(), f"{url}/model")
    assert SECRET not in messages(caught.value, caplog)


def test_signed_query_strings_stay_secret(
    web: RangeServer, caplog: pytest.LogCaptureFixture
) -> None:
    web.query = f"X-Amz-Expires=60&X-Amz-Signature={SECRET}%2F%2B"
    with caplog.at_level(logging.DEBUG):
        for name in ("model", "model/model.safetensors.index.json"):
            require_loads(f"{web.url}/{name}?{web.query}")
        with pytest.raises(StorageError) as caught:
            hf.load(state(), f"{web.url}/model?{web.query}wrong")
    assert SECRET not in messages(caught.value, caplog)


def test_nothing_is_saved_to_a_web_server(web: RangeServer) -> None:
    for save in (hf.save, shardstore.save):
        with pytest.raises(StorageError, match=r"501.*such a store is only read"):
            save({"w": W}, f"{web.url}/new")


# -- the Hub ---------------------------------------------------------------------------------------


@pytest.fixture
def hub(web: RangeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RangeServer:
    """A server with the Hub's URLs, and a private model."""
    monkeypatch.setenv("HF_ENDPOINT", web.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    web.token = SECRET
    return web


KEPT = {
    "HF_TOKEN_PATH": "token",
    "HF_HOME": "token",
    "XDG_CACHE_HOME": "huggingface/token",
    "HOME": ".cache/huggingface/token",
}
"""Where the Hub keeps the token (huggingface_hub documentation, "Environment variables")."""


@pytest.mark.parametrize("how", ["option", "HF_TOKEN", *KEPT])
def test_a_model_of_the_hub(
    hub: RangeServer, how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The token reaches the Hub, and not the server that it redirects to. A line break after it, as
    of ``"$(cat token; echo)"``, is no part of it."""
    token = f"{SECRET} \r\n"
    if how in KEPT:
        for name in KEPT:
            monkeypatch.delenv(name, raising=False)
        path = tmp_path / "of" / KEPT[how]
        path.parent.mkdir(parents=True)
        path.write_text(token)
        monkeypatch.setenv(how, str(path if how == "HF_TOKEN_PATH" else tmp_path / "of"))
    elif how == "HF_TOKEN":
        monkeypatch.setenv(how, token)
    require_loads("hf://org/tiny", storage_options={"token": token} if how == "option" else None)


def test_a_model_of_the_hub_or_a_web_server_is_converted(hub: RangeServer, tmp_path: Path) -> None:
    convert("hf://org/tiny", tmp_path / "hub", source_options={"token": SECRET})
    convert(f"{hub.url}/model/", tmp_path / "web")
    for place in (tmp_path / "hub", tmp_path / "web"):
        assert torch.equal(shardstore.load_plain_tensors(place)["w"], W)


def test_a_conversion_says_why_a_web_server_gives_no_model(
    hub: RangeServer, tmp_path: Path
) -> None:
    """The Hub refuses private and gated models; 127.0.0.1:9 answers nothing."""
    for url, kind, text in (
        ("hf://org/tiny", StorageError, "401.*HF_TOKEN"),
        ("http://127.0.0.1:9/model", StorageError, "does not answer"),
        (f"{hub.url}/other/model", NotACheckpointError, r"holds none of zarr\.json, .*model\.safe"),
    ):
        with pytest.raises(kind, match=text):
            convert(url, tmp_path / "out" / "converted")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_the_hub_is_not_asked_offline(
    hub: RangeServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv(name, "1")
    with pytest.raises(ArgumentError, match=rf"{name}=1.*hf://org/tiny.*snapshots"):
        hf.load(state(), "hf://org/tiny")
    monkeypatch.setenv(name, "0")
    hf.load(state(), "hf://org/tiny")


def test_a_token_that_is_true_or_false(hub: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in huggingface_hub: the token of the environment, and none."""
    with pytest.raises(ArgumentError, match=r"token=True.*HF_TOKEN"):
        hf.load(state(), "hf://org/tiny", storage_options={"token": True})
    monkeypatch.setenv("HF_TOKEN", SECRET)
    require_loads("hf://org/tiny", storage_options={"token": True})
    with pytest.raises(StorageError, match="401"):
        hf.load(state(), "hf://org/tiny", storage_options={"token": False})
    hub.token = ""
    require_loads("hf://org/tiny", storage_options={"token": False})
    assert hub.authorizations[-1] == ""


@pytest.mark.parametrize(
    ("revision", "written"),
    [*((name, name) for name in ("v1.0", "refs/pr/3", "a+b", "ä")), ("feature/x", "feature%2Fx")],
)
def test_a_revision_of_the_hub(hub: RangeServer, revision: str, written: str) -> None:
    hub.revision, options = revision, {"token": SECRET}
    for name in ("", "/model.safetensors.index.json"):
        require_loads(f"hf://org/tiny@{written}{name}", storage_options=options)
    with pytest.raises(NotACheckpointError):
        hf.load(state(), "hf://org/tiny@other", storage_options=options)


HEADER = {"headers": {"Authorization": f"Bearer {SECRET}"}}
LINK = "{}/org/tiny/resolve/main/large.safetensors?download=true"
ONCE = [
    ("hf://org/tiny/large.safetensors", {"token": SECRET}, "localhost", 1),
    (LINK, HEADER, "localhost", 1),
    (LINK, {"auth": ("me", SECRET)}, "localhost", 1),
    (LINK, {"client_kwargs": HEADER}, "localhost", 8),  # all requests of the session have it
    (LINK, HEADER, "127.0.0.1", 8),  # the Hub itself
]


@pytest.mark.filterwarnings("ignore:.*BasicAuth.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*'auth' parameter:DeprecationWarning")
@pytest.mark.parametrize(("place", "options", "host", "most"), ONCE)
@pytest.mark.parametrize("good_for", [1000, 3])
def test_the_hub_is_asked_once_for_a_file(
    hub: RangeServer,
    place: str,
    options: dict[str, Any],
    host: str,
    most: int,
    good_for: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It counts requests; the server that it redirects to does not, until a signature expires. That
    server gets no credentials, and no log its signatures."""
    large = torch.arange(12 * 2**20, dtype=torch.float32).reshape(12, -1)
    save_file({"w": large}, hub.folder / "large.safetensors")
    hub.commits, hub.expires_after, hub.host = {f"{good_for:040}": hub.folder}, good_for, host
    hub.token = "" if "auth" in options else SECRET
    if "auth" in options:
        options = {"auth": aiohttp.BasicAuth(*options["auth"])}
    found = {"w": torch.zeros_like(large)}
    with caplog.at_level(logging.DEBUG):
        hf.load(found, place.format(hub.url), storage_options=options)
    assert torch.equal(found["w"], large)
    hosts = [path.split("/")[1] for _, path, _ in hub.requests]
    assert hosts.count("cdn") >= 8
    assert hosts.count("org") <= (most if good_for > 100 else 8)
    assert not hub.refused or good_for < 100
    given = {auth for one, auth in zip(hosts, hub.authorizations, strict=True) if one == "cdn"}
    assert given == {f"Bearer {SECRET}" if host == "127.0.0.1" else ""}
    assert SIGNATURE not in caplog.text


@pytest.mark.parametrize(
    ("mirror", "kind", "place"),
    [
        ("", "models", "hf://org/tiny"),
        ("/mirror/", "models", "hf://org/tiny"),
        ("", "datasets", "hf://datasets/org/tiny"),
    ],
)
def test_a_branch_that_moves_during_a_load_is_read_at_its_commit(
    hub: RangeServer,
    mirror: str,
    kind: str,
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A later load reads the new commit, although the signatures of the old one are still good. A
    commit is read without another request."""
    monkeypatch.setenv("HF_ENDPOINT", hub.url + mirror)
    hub.kind = kind
    newer = shutil.copytree(hub.folder, tmp_path / "newer")
    save_file({"w": -W}, newer / "model-00002-of-00002.safetensors")
    hub.commits["a" * 40] = hub.folder
    find = loading._Call._find

    def moved(*arguments: Any) -> Any:
        hub.commits["b" * 40] = newer
        return find(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loading._Call, "_find", moved)
        require_loads(place, storage_options={"token": SECRET})
    found = state()
    hf.load(found, place, storage_options={"token": SECRET})
    assert torch.equal(found["w"], -W)
    hub.requests.clear()
    for name in ("", "/model.safetensors.index.json"):
        require_loads(f"{place}@{'a' * 40}{name}", storage_options={"token": SECRET})
    assert not [path for _, path, _ in hub.requests if "api" in path]


def test_tokens_stay_secret(hub: RangeServer, caplog: pytest.LogCaptureFixture) -> None:
    def refused(kind: type[CheckpointingException]) -> str:
        with caplog.at_level(logging.DEBUG), pytest.raises(kind) as caught:
            hf.load(state(), "hf://org/tiny", storage_options={"token": SECRET})
        return messages(caught.value, caplog)

    hub.token = "another"
    told = refused(StorageError)
    assert "401" in told
    hub.token = SECRET
    for path in hub.folder.glob("*.safetensors"):
        path.write_bytes(b"x" * 20)
    told += refused(CheckpointingException)
    assert SECRET not in told
    assert SIGNATURE not in told


# -- S3 --------------------------------------------------------------------------------------------


def test_a_model_in_s3(s3_server: S3Server, model: Path) -> None:
    bucket = s3_server.new_bucket()
    for path in model.iterdir():
        s3_server.client().put_object(Bucket=bucket, Key=f"m/{path.name}", Body=path.read_bytes())
    for name in ("m", "m/model.safetensors.index.json"):
        require_loads(f"s3://{bucket}/{name}", storage_options=s3_server.storage_options)
    with pytest.raises(NotACheckpointError):
        hf.load(state(), f"s3://{bucket}/none", storage_options=s3_server.storage_options)
