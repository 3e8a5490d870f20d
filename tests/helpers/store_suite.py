"""What every store has to do alike: one suite, inherited by the tests of each store.

A store's test class gives `place`, a function from a name to a place in the store.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardstore
from shardstore import ShardedObject, ShardedTensor
from shardstore.distributed.coordinator import Ranks
from shardstore.errors import (
    CheckpointExistsError,
    CheckpointingException,
    ChunkCorruptError,
    ChunkMissingError,
    DamagedCheckpointError,
    FormatVersionError,
    MissingKeyError,
    NotACheckpointError,
)
from shardstore.saving.run import SaveRequest, run_save
from shardstore.saving.session import SaveSession, Strategies
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.commit.checkpoints import delete_checkpoint, latest
from shardstore.storage.commit.identity import is_checkpoint
from shardstore.storage.runtime.counters import counters
from shardstore.storage.stores.location import Location
from shardstore.strategies.zarr import (
    ZarrSaveShardedStrategy,
    _load_from_array,
    load_zarr_based_sharded_metadata,
)
from tests.helpers import layouts
from tests.helpers.verification import findings

Target = Callable[[str], Location]
"""Gives a place of a name, in one store."""

EACH_STORE = pytest.mark.parametrize("target", ["s3", "gs", "memory", "local"], indirect=True)
"""Runs a test in a store of each kind: where it is about what the store itself does."""

GOLDEN = Path(__file__).parents[1] / "golden" / "megatron-core-0.15.3-zarr" / "tp2dp1"


def tensor(key: str, data: torch.Tensor) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, data)


def small_state(value: float = 1.0) -> dict[str, Any]:
    return {
        "w": tensor("layer/0.w", torch.full((20, 30), value)),
        "nested": {"b": [tensor("b", torch.arange(7) + int(value))]},
        "half": tensor("half", torch.full((5,), value, dtype=torch.bfloat16)),
        "scalar": tensor("scalar", torch.tensor(value, dtype=torch.float64)),
        "empty": tensor("empty", torch.zeros(0, 3)),
        "o": ShardedObject("o", {"value": value}, (1,), (0,)),
        "step": int(value),
    }


def save_small(at: Location, value: float, **options: Any) -> None:
    shardstore.save(small_state(value), at.place, **options)


def assert_small_state(loaded: dict[str, Any], value: float) -> None:
    assert torch.equal(loaded["w"], torch.full((20, 30), value))
    assert torch.equal(loaded["nested"]["b"][0], torch.arange(7) + int(value))
    assert torch.equal(loaded["half"], torch.full((5,), value, dtype=torch.bfloat16))
    assert loaded["scalar"].item() == value
    assert loaded["empty"].shape == (0, 3)
    assert loaded["o"] == {"value": value}
    assert loaded["step"] == int(value)


def assert_holds(at: Location, value: float) -> None:
    """Load :func:`small_state` of this value from a place."""
    assert_small_state(shardstore.load(small_state(), at.place), value)


def unfinished_save(at: Location, *, version: int = 2) -> SaveSession:
    """A save that wrote everything but its commit, and is never heard of again."""
    request = SaveRequest(
        state={"w": tensor("layer/0.w", torch.full((20, 30), 5.0))},
        checkpoint_dir=at,
        ranks=Ranks(),
        strategies=Strategies(ZarrSaveShardedStrategy("zarr", version), None),
        background="",
    )
    session, rest = run_save(request)
    rest.async_fn()  # only the finalisation would commit
    assert session.failure is None
    return session


ARRAYS = {"layer/0.w", "b", "half", "scalar", "empty"}
CHUNKS = {"layer%2F0.w/c.0.0", "b/c.0", "half/c.0", "scalar/c"}
DOCUMENTS = {f"{node}/zarr.json" for node in ("layer%2F0.w", "b", "half", "scalar", "empty")}
BESIDE = {"zarr.json", "metadata.json", "manifest.npz", "common.pt", "o/shard_0_1.pt"}
"""What small_state() becomes."""


def names_of(where: Location) -> set[str]:
    """All files or objects below a place."""
    return set(where.walk())


def flipped(data: bytes, position: int) -> bytes:
    """The same bytes, but for one bit."""
    changed = bytearray(data)
    changed[position] ^= 1
    return bytes(changed)


class StoreChanges:
    """Checkpoints that come, are replaced, spoiled, reduced and deleted: what is there then."""

    @pytest.fixture
    def place(self) -> Target:
        raise NotImplementedError

    def test_everything_comes_back(self, place: Target) -> None:
        """With a layout and without, by the URL and its options."""
        at = place("run/step-1")
        url, options = at.url, {"storage_options": at.options}
        assert not shardstore.check_is_distributed_checkpoint(url, **options)
        shardstore.save(small_state(3.0), url, content_metadata={"kind": "test"}, **options)
        assert shardstore.check_is_distributed_checkpoint(url, **options)
        assert_small_state(shardstore.load(small_state(), url, **options), 3.0)
        common = shardstore.load_common_state_dict(url, **options)
        assert common == {"step": 3, "content_metadata": {"kind": "test"}}
        assert shardstore.load_content_metadata(url, **options) == {"kind": "test"}
        plain = shardstore.load_plain_tensors(url, **options)
        assert set(plain) == {*ARRAYS, "step", "content_metadata"}
        assert torch.equal(plain["layer/0.w"], torch.full((20, 30), 3.0))
        stored = shardstore.load_sharded_metadata(url, **options)
        assert set(stored) == {*ARRAYS, "o/shard_0_1"}
        assert stored["half"].dtype == torch.bfloat16

    def test_a_checkpoint_is_replaced_only_if_asked_and_wholly(self, place: Target) -> None:
        at = place("twice")
        save_small(at, 1.0)
        with pytest.raises(CheckpointExistsError, match="overwrite=True"):
            save_small(at, 2.0)
        assert_holds(at, 1.0)
        at.write("notes.txt", b"mine")
        save_small(at, 2.0, overwrite=True)
        assert_holds(at, 2.0)
        one = {"other": tensor("other", torch.ones(3))}
        shardstore.save(one, at.place, ("zarr", 1), overwrite=True)
        assert set(shardstore.load_sharded_metadata(at.place)) == {"other"}
        assert at.listing() == ["common.pt", "metadata.json", "notes.txt", "other"]
        assert at.read("notes.txt") == b"mine"

    def test_a_save_without_its_commit_is_no_checkpoint(self, place: Target) -> None:
        root, first, second = place("root"), place("root/step-1"), place("root/step-2")
        assert latest(root.place) is None
        with pytest.raises(NotACheckpointError, match=r"is not a distributed|not exist"):
            shardstore.load(small_state(), first.place)
        save_small(first, 1.0)
        unfinished_save(second)
        assert not shardstore.check_is_distributed_checkpoint(second.place)
        with pytest.raises(NotACheckpointError):
            shardstore.load(small_state(), second.place)
        assert latest(root.url, storage_options=root.options) == first.url
        # It hinders nobody.
        save_small(second, 6.0)
        assert_holds(second, 6.0)
        assert latest(root.url, storage_options=root.options) == second.url

    def test_damage_is_found(self, place: Target) -> None:
        """By a load, and by a verification that knows the arrays from the root alone."""
        at = place("damaged")
        save_small(at, 2.0, array_documents=False)
        wanted = {
            "layer%2F0.w/c.0.0": ("layer/0.w", (0, 0), torch.zeros(20, 30)),
            "scalar/c": ("scalar", (), torch.tensor(0.0, dtype=torch.float64)),
        }
        for name, (key, chunk, out) in wanted.items():
            content = at.read(name)
            cases: list[tuple[bytes | None, str, Any]] = [
                (flipped(content, 0), "crc", ChunkCorruptError),
                (flipped(content, -1), "crc", ChunkCorruptError),
                (content[:-1], "size", ChunkCorruptError),
                (b"", "size", ChunkCorruptError),
                (None, "missing", ChunkMissingError),
            ]
            for damaged, kind, error in cases if chunk else cases[::4]:
                at.delete(name) if damaged is None else at.write(name, damaged)
                with pytest.raises(error, match=key) as caught:
                    shardstore.load({"x": tensor(key, out)}, at.place)
                assert (caught.value.key, caught.value.chunk, caught.value.rank) == (key, chunk, 0)
                (finding,) = findings(at)
                assert (finding.kind, finding.severity) == (f"chunk-{kind}", "damage")
                assert (finding.key, finding.chunk, finding.rank) == (key, chunk, 0)
            # A load may read no further than the committed size, and then has the right values.
            at.write(name, content + b"x")
            with suppress(ChunkCorruptError):
                loaded: Any = shardstore.load({"x": tensor(key, out)}, at.place)
                assert bool((loaded["x"] == 2).all())
            (finding,) = findings(at)
            assert (finding.severity, finding.key, finding.chunk) == ("damage", key, chunk)
            at.write(name, content)
        # Whole, but of another place: only the commit and the manifest tell.
        own, other = at.read("b/c.0"), place("another")
        save_small(other, 5.0)
        at.write("b/c.0", other.read("b/c.0"))
        assert [finding.kind for finding in findings(at)] == ["chunk-manifest"]
        at.write("b/c.0", own)
        assert findings(at) == []

    def test_one_kind_of_documents_replaces_the_other(self, place: Target) -> None:
        at = place("turns")
        foreign = {"notes.txt", "logs/1", "logs/c.0", "logs/c/0/1"}
        for number, documents in enumerate((True, False, False, True)):
            state = small_state(float(number))
            state[f"only-{number}"] = tensor(f"only-{number}", torch.ones(2, 2))
            shardstore.save(state, at.place, overwrite=True, array_documents=documents)
            for name in foreign:
                at.write(name, b"mine")
            wanted = CHUNKS | BESIDE | {f"only-{number}/c.0.0"}
            if documents:
                wanted |= DOCUMENTS | {f"only-{number}/zarr.json"}
            assert names_of(at) == wanted | foreign
            assert_holds(at, float(number))
            assert {finding.kind for finding in findings(at)} == {"foreign"}
        assert all(at.read(name) == b"mine" for name in foreign)

    @pytest.mark.parametrize("documents", [True, False])
    def test_tensors_are_removed_and_objects_stay(self, place: Target, documents: bool) -> None:
        at = place("removed")
        state = {**small_state(2.0), "also": ShardedObject("half", [1], (1,), (0,))}
        shardstore.save(state, at.place, validate_access_integrity=False, array_documents=documents)
        shardstore.remove_sharded_tensors(at.url, "half", storage_options=at.options)
        wanted = CHUNKS | BESIDE | {"half/shard_0_1.pt"} | (DOCUMENTS if documents else set())
        assert names_of(at) == wanted - {"half/c.0", "half/zarr.json"}
        left = shardstore.load_sharded_metadata(at.place)
        assert set(left) == {*ARRAYS, "o/shard_0_1", "half/shard_0_1"} - {"half"}
        assert findings(at) == []
        with pytest.raises(MissingKeyError):
            shardstore.load({"half": small_state()["half"]}, at.place)

    def test_deleting_leaves_what_is_not_of_it(self, place: Target) -> None:
        """Also where a document of an array is lost, which is damage."""
        at, below = place("deleted"), place("deleted/inner")
        save_small(at, 2.0)
        at.delete("b/zarr.json")
        (finding,) = findings(at)
        assert (finding.kind, finding.severity) == ("document-missing", "damage")
        at.write("notes.txt", b"mine")
        save_small(below, 3.0)
        shardstore.delete_checkpoint(at.url, storage_options=at.options)
        assert at.listing() == ["inner", "notes.txt"]
        assert_holds(below, 3.0)
        with pytest.raises(NotACheckpointError):
            delete_checkpoint(at)


class StoreTests(StoreChanges):
    """All of the suite."""

    def test_compressed_chunks_come_back_and_are_verified(
        self, place: Target, tmp_path: Path
    ) -> None:
        at = place("zstd")
        data = torch.arange(40_000, dtype=torch.int32).reshape(200, 200) % 7
        state = {"w": tensor("w", data), "empty": tensor("empty", torch.zeros(0))}
        strategy = ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=40_000)
        for target in (at.place, tmp_path / "local"):
            shardstore.save(state, target, strategy, compression="zstd")
        chunk = at.read("w/c.1.0")
        assert len(chunk) < 20_000
        assert chunk == (tmp_path / "local" / "w" / "c.1.0").read_bytes()
        out = torch.zeros_like(data)
        shardstore.load({"w": tensor("w", out)}, at.place)
        assert torch.equal(out, data)
        group = zarr.open_group(at.url, mode="r", storage_options=dict(at.options) or None)
        assert (group["w"][55:60, 3] == data[55:60, 3].numpy()).all()
        for damaged in (flipped(chunk, 9), chunk[:-1], b""):
            at.write("w/c.1.0", damaged)
            with pytest.raises(ChunkCorruptError) as caught:
                shardstore.load({"w": tensor("w", out)}, at.place)
            assert caught.value.key == "w"
        # Whole, but of another place.
        at.write("w/c.1.0", at.read("w/c.2.0"))
        with pytest.raises(ChunkCorruptError, match="not the chunk that was committed"):
            shardstore.load({"w": tensor("w", out)}, at.place)

    def test_any_layout_saved_and_any_other_loaded(self, place: Target, tmp_path: Path) -> None:
        """Chunks have the bytes that files have."""
        local = Location.of(tmp_path / "local")

        @settings(
            max_examples=settings.default.max_examples // 3,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(st.randoms(use_true_random=False), st.integers(0, 10**9))
        def check(rng: random.Random, number: int) -> None:
            at = place(f"any-{number}")
            whole = layouts.random_tensor(
                layouts.random_shape(rng), rng.choice(layouts.DTYPES), rng
            )
            saved, loaded = (layouts.random_layout(tuple(whole.shape), 1, rng) for _ in range(2))
            state = {
                str(i): layouts.sharded(
                    "k", whole, saved, p, layouts.expected_part(whole, p, saved.prepended)
                )
                for i, p in enumerate(saved.pieces)
            }
            for target in (at, local):
                shardstore.save(state, target.place, overwrite=True)
            chunks = [name for name in local.walk() if name.startswith("k/")]
            assert [at.read(name) for name in chunks] == [local.read(name) for name in chunks]
            wanted = {
                str(i): layouts.sharded(
                    "k", whole, loaded, p, layouts.destination(p, loaded, whole.dtype, rng)
                )
                for i, p in enumerate(loaded.pieces)
            }
            got = shardstore.load(wanted, at.place)
            for i, piece in enumerate(loaded.pieces):
                if piece.flat is not None and piece.flat[0] == piece.flat[1]:
                    continue  # shards with an empty flat range are left out of what is loaded
                expected = layouts.expected_part(whole, piece, loaded.prepended)
                assert layouts.raw_bytes(got[str(i)]) == layouts.raw_bytes(expected)

        check()

    def test_a_part_of_a_chunk_is_read_and_no_more(self, place: Target) -> None:
        at = place("part")
        data = torch.randn(2048, 256)
        shardstore.save({"w": tensor("w", data)}, at.place)
        part = ShardedTensor.from_rank_offsets("w", torch.zeros(64, 256), (0, 5, 32))
        counters.clear()
        loaded = shardstore.load({"w": part}, at.place, validate_access_integrity=False)
        assert torch.equal(loaded["w"], data[320:384])
        assert counters["bytes_read"] <= 2 * 64 * 1024

    def test_a_file_of_another_save_is_not_taken_for_its_own(self, place: Target) -> None:
        """Whole by itself, as what a writer of a dead save leaves that comes too late."""
        at, other = place("late"), place("other")
        save_small(at, 1.0)
        save_small(other, 2.0)
        for name in ("common.pt", "o/shard_0_1.pt"):
            own = at.read(name)
            at.write(name, other.read(name))
            with pytest.raises(DamagedCheckpointError, match=f"{name} is not the file"):
                shardstore.load(small_state(), at.place)
            (finding,) = findings(at)
            assert finding.severity == "damage"
            assert finding.path.endswith(name)
            assert f"{name} is not the file" in finding.message
            at.write(name, own)
        assert_holds(at, 1.0)

    def test_a_removal_keeps_the_hashes_of_the_files_true(self, place: Target) -> None:
        at = place("hashed")
        save_small(at, 2.0, verify_integrity=True)
        b = at.read("b/c.0")
        at.write("b/c.0", b + b"x")
        with pytest.raises(DamagedCheckpointError, match=r"b/c\.0 has the SHA-256"):
            shardstore.remove_sharded_tensors(at.place, "half")
        assert at.listing("half") != []
        at.write("b/c.0", b)
        shardstore.remove_sharded_tensors(at.place, "half")
        state = {key: value for key, value in small_state().items() if key != "half"}
        shardstore.load(state, at.place, verify_integrity=True)
        at.write("b/c.0", b + b"x")
        with pytest.raises(DamagedCheckpointError, match=r"b/c\.0 has the SHA-256"):
            shardstore.load(state, at.place, verify_integrity=True)

    @pytest.mark.parametrize("documents", [True, False])
    def test_plain_zarr_reads_it(self, place: Target, documents: bool) -> None:
        at = place("zarr")
        save_small(at, 4.0, array_documents=documents)
        given: dict[str, Any] = {"mode": "r", "storage_options": dict(at.options) or None}
        group = zarr.open_group(at.url, **given)
        assert set(group.keys()) == {"layer%2F0.w", "b", "half", "scalar", "empty"}
        assert (group["layer%2F0.w"][3:5, 7] == 4.0).all()
        assert float(group["half"][2]) == 4.0
        assert group["empty"][...].shape == (0, 3)
        if not documents:  # what the documentation says of other ways
            unread = zarr.open_group(at.url, use_consolidated=False, **given)
            assert list(unread.keys()) == []
            with pytest.raises(FileNotFoundError):
                zarr.open_array(f"{at.url}/b", **given)

    # -- without documents of the arrays' own -----------------------------------------------------

    @pytest.mark.parametrize("in_the_background", [True, False])
    def test_one_document_is_enough(self, place: Target, in_the_background: bool) -> None:
        """Also where the strategy leaves the others out, and for compressed chunks."""
        at = place("root-only")
        if in_the_background:
            shardstore.async_save(
                small_state(3.0), at.url, storage_options=at.options, array_documents=False
            ).result(60)
        else:
            strategy = ZarrSaveShardedStrategy("zarr", 2, array_documents=False)
            save_small(at, 3.0, sharded_strategy=strategy, compression="zstd")
        assert names_of(at) == CHUNKS | BESIDE
        root = json.loads(at.read("zarr.json"))
        assert root["attributes"]["shardstore"]["array_documents"] is False
        assert_holds(at, 3.0)
        plain = shardstore.load_plain_tensors(at.place)
        assert torch.equal(plain["layer/0.w"], torch.full((20, 30), 3.0))
        stored = shardstore.load_tensors_metadata(at.url, storage_options=at.options)
        assert set(stored) == ARRAYS
        part = ShardedTensor.from_rank_offsets("layer/0.w", torch.zeros(20, 10), (1, 2, 3))
        loaded = shardstore.load({"w": part}, at.place, validate_access_integrity=False)
        assert torch.equal(loaded["w"], torch.full((20, 10), 3.0))
        assert findings(at) == []

    @pytest.mark.parametrize("documents", [True, False])
    def test_a_strategy_by_itself_commits_its_arrays(self, place: Target, documents: bool) -> None:
        at = place("alone")
        strategy = ZarrSaveShardedStrategy("zarr", 2, array_documents=documents)
        strategy.save({"w": tensor("w", torch.ones(3, 4))}, at.place)
        own = {"w/zarr.json"} if documents else set()
        assert names_of(at) == {"zarr.json", "manifest.npz", "w/c.0.0"} | own

    def test_its_root_is_all_there_is(self, place: Target) -> None:
        at = place("headless")
        save_small(at, 2.0, array_documents=False)
        root = at.read("zarr.json")
        for damaged in (b"", root[:-40], None):
            at.delete("zarr.json") if damaged is None else at.write("zarr.json", damaged)
            lost, unread = findings(at)
            assert lost.kind == ("root-missing" if damaged is None else "root-damaged")
            assert lost.severity == "damage"
            assert (unread.kind, unread.severity) == ("arrays-unread", "note")
            assert "5 array(s)" in unread.message
            with pytest.raises(CheckpointingException):
                shardstore.load(small_state(), at.place)

    def test_documents_where_there_should_be_none(self, place: Target) -> None:
        at = place("more")
        save_small(at, 2.0, array_documents=False)
        root = json.loads(at.read("zarr.json"))
        document = root["consolidated_metadata"]["metadata"]["b"]
        for text, kind, severity in (
            (json.dumps(document), "foreign", "note"),
            (json.dumps({**document, "shape": [3]}), "document-differs", "damage"),
            ("{", "document-damaged", "damage"),
        ):
            at.write("b/zarr.json", text.encode())
            (finding,) = findings(at)
            assert (finding.kind, finding.severity, finding.key) == (kind, severity, "b")

    @pytest.mark.parametrize("lost", [None, "zarr.json", "manifest.npz"])
    def test_deleting_it_takes_all_chunks(self, place: Target, lost: str | None) -> None:
        at = place("deleted")
        save_small(at, 2.0, array_documents=False)
        foreign = {"notes.txt", "logs/c.0"}
        for name in foreign:
            at.write(name, b"mine")
        if lost is not None:
            at.write(lost, b"{")
        delete_checkpoint(at)
        assert names_of(at) == foreign

    def test_a_removal_leaves_what_a_killed_one_of_other_tensors_left(
        self, place: Target, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Which goes on if it is asked for again."""
        at = place("killed")
        save_small(at, 2.0, array_documents=False)

        def killed(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(StoredCheckpoint, "_delete_arrays", killed)
            with pytest.raises(KeyboardInterrupt):
                shardstore.remove_sharded_tensors(at.place, "b")
        assert "b" not in shardstore.load_tensors_metadata(at.place)
        shardstore.remove_sharded_tensors(at.place, "empty")
        assert "b/c.0" in names_of(at)
        shardstore.remove_sharded_tensors(at.place, "b")
        assert "b/c.0" not in names_of(at)
        assert findings(at) == []

    @pytest.mark.usefixtures("copies_small_objects")
    def test_a_base_with_the_other_kind_of_documents_is_used(self, place: Target) -> None:
        data = torch.randn(100, 100)
        state = {"w": tensor("w", data), "e": tensor("e", torch.zeros(0, 2))}
        base: Any = None
        for name, documents in (("first", True), ("second", False), ("third", True)):
            at, before = place(name), counters.copy()
            shardstore.save(state, at.place, base=base, array_documents=documents)
            if base is not None:
                assert counters.copy()["bytes_reused"] - before["bytes_reused"] == 40_004
                shardstore.delete_checkpoint(base)
            own = {name for name in names_of(at) if name.endswith("/zarr.json")}
            assert own == ({"w/zarr.json", "e/zarr.json"} if documents else set())
            assert torch.equal(shardstore.load_plain_tensors(at.place)["w"], data)
            assert findings(at) == []
            base = at.place

    def test_functions_of_the_reference_page_read_it(self, place: Target) -> None:
        at = place("pages")
        save_small(at, 2.0, array_documents=False)
        target: Any = at.place
        whole = _load_from_array(tensor("layer/0.w", torch.zeros(20, 30)), target)
        assert torch.equal(whole, torch.full((20, 30), 2.0))
        with pytest.raises(MissingKeyError):
            _load_from_array(tensor("none", torch.zeros(2)), target)

        def never(path: str) -> Any:
            raise AssertionError(path)

        found = load_zarr_based_sharded_metadata(target, never)
        assert found == shardstore.load_tensors_metadata(at.place)

    def test_the_old_layout_has_documents_of_its_arrays(self, place: Target) -> None:
        at = place("old")
        with pytest.raises(FormatVersionError, match="leave array_documents out"):
            save_small(at, 1.0, sharded_strategy=("zarr", 1), array_documents=False)
        with pytest.raises(FormatVersionError, match="leave array_documents out"):
            ZarrSaveShardedStrategy("zarr", 1, array_documents=False)
        assert names_of(at) == set()
        save_small(at, 2.0, sharded_strategy=("zarr", 1))
        assert_holds(at, 2.0)

    def test_a_checkpoint_of_megatron_is_read(self, place: Target) -> None:
        at = place("megatron")
        for name in names_of(Location.of(GOLDEN)):
            at.write(name, (GOLDEN / name).read_bytes())
        stored = shardstore.load_tensors_metadata(at.place)
        assert stored == shardstore.load_tensors_metadata(GOLDEN)
        there = shardstore.load_plain_tensors(GOLDEN)
        here = shardstore.load_plain_tensors(at.place)
        for key in stored:
            assert layouts.raw_bytes(here[key]) == layouts.raw_bytes(there[key])

    def test_an_array_of_a_checkpoint_is_no_checkpoint(self, place: Target) -> None:
        at = place("whole")
        save_small(at, 2.0)
        array = at.child(next(iter(StoredCheckpoint(at).arrays.values())).node)
        assert is_checkpoint(at)
        assert not is_checkpoint(array)
        with pytest.raises(NotACheckpointError, match=r"single array.*nothing was deleted"):
            delete_checkpoint(array)
        for overwrite in (False, True):
            with pytest.raises(CheckpointExistsError):
                save_small(array, 3.0, overwrite=overwrite)
        assert_holds(at, 2.0)
