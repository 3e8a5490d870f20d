"""What every store has to do alike: one suite, inherited by the tests of each store.

A store's test class gives `place`, a function from a name to a URL and its storage options.
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
from shardstore.inspection.verify import Finding, verify
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

Target = Callable[[str], Location]
"""Gives a place of a name, in one store."""

Place = Callable[[str], tuple[str, dict[str, Any]]]

GOLDEN = Path(__file__).parents[1] / "golden" / "megatron-core-0.15.3-zarr" / "tp2dp1"


def tensor(key: str, data: torch.Tensor | None = None, like: torch.Tensor | None = None) -> Any:
    if data is None:
        assert like is not None
        data = torch.zeros_like(like)
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


def assert_small_state(loaded: dict[str, Any], value: float) -> None:
    assert torch.equal(loaded["w"], torch.full((20, 30), value))
    assert torch.equal(loaded["nested"]["b"][0], torch.arange(7) + int(value))
    assert torch.equal(loaded["half"], torch.full((5,), value, dtype=torch.bfloat16))
    assert loaded["scalar"].item() == value
    assert loaded["empty"].shape == (0, 3)
    assert loaded["o"] == {"value": value}
    assert loaded["step"] == int(value)


def unfinished_save(
    url: str, options: dict[str, Any], value: float = 5.0, *, version: int = 2
) -> SaveSession:
    """A save that wrote everything but its commit, and is never heard of again."""
    request = SaveRequest(
        state={"w": tensor("layer/0.w", torch.full((20, 30), value))},
        checkpoint_dir=Location.of(url, options),
        ranks=Ranks(),
        strategies=Strategies(ZarrSaveShardedStrategy("zarr", version), None),
        background="",
    )
    session, rest = run_save(request)
    assert rest is not None
    assert rest.async_fn is not None
    rest.async_fn()  # only the finalisation would commit
    assert session.failure is None
    return session


CHUNKS = {"layer%2F0.w/c.0.0", "b/c.0", "half/c.0", "scalar/c"}
DOCUMENTS = {f"{node}/zarr.json" for node in ("layer%2F0.w", "b", "half", "scalar", "empty")}
BESIDE = {"zarr.json", "metadata.json", "manifest.npz", "common.pt", "o/shard_0_1.pt"}
"""What small_state() becomes."""


def names_of(where: Location) -> set[str]:
    """All files or objects below a place."""
    if not where.is_local:
        return set(where.remote.walk())
    files = [path for path in where.path.rglob("*") if path.is_file()]
    return {str(path.relative_to(where.path)) for path in files}


def findings(where: Location) -> list[Finding]:
    found: list[Finding] = []
    verify(StoredCheckpoint(where), found.append)
    return found


class StoreTests:
    """Inherited by the tests of each store."""

    reads_with_plain_zarr = True

    @pytest.fixture
    def place(self) -> Place:
        raise NotImplementedError

    def test_everything_comes_back(self, place: Place) -> None:
        url, options = place("run/step-1")
        assert not shardstore.check_is_distributed_checkpoint(url, storage_options=options)
        shardstore.save(
            small_state(3.0), url, storage_options=options, content_metadata={"kind": "test"}
        )
        assert shardstore.check_is_distributed_checkpoint(url, storage_options=options)
        assert_small_state(shardstore.load(small_state(), url, storage_options=options), 3.0)
        common = shardstore.load_common_state_dict(url, storage_options=options)
        assert common == {"step": 3, "content_metadata": {"kind": "test"}}
        about = shardstore.load_content_metadata(url, storage_options=options)
        assert about == {"kind": "test"}

    def test_it_is_read_without_a_layout(self, place: Place) -> None:
        url, options = place("plain")
        shardstore.save(small_state(4.0), url, storage_options=options)
        plain = shardstore.load_plain_tensors(url, storage_options=options)
        assert set(plain) == {"layer/0.w", "b", "half", "scalar", "empty", "step"}
        assert torch.equal(plain["layer/0.w"], torch.full((20, 30), 4.0))
        stored = shardstore.load_sharded_metadata(url, storage_options=options)
        assert set(stored) == {*plain, "o/shard_0_1"} - {"step"}
        assert stored["half"].dtype == torch.bfloat16

    def test_plain_zarr_reads_it(self, place: Place) -> None:
        if not self.reads_with_plain_zarr:
            pytest.skip("zarr can not open this store by its URL")
        url, options = place("zarr")
        shardstore.save(small_state(4.0), url, storage_options=options)
        group = zarr.open_group(url, mode="r", storage_options=options or None)
        assert set(group.keys()) == {"layer%2F0.w", "b", "half", "scalar", "empty"}
        assert (group["layer%2F0.w"][3:5, 7] == 4.0).all()
        assert float(group["half"][2]) == 4.0

    @pytest.mark.parametrize("compression", ["zstd", "blosc"])
    def test_compressed_chunks_come_back_and_are_verified(
        self, place: Place, tmp_path: Path, compression: str
    ) -> None:
        url, options = place(compression)
        data = torch.arange(40_000, dtype=torch.int32).reshape(200, 200) % 7
        state = {"w": tensor("w", data), "empty": tensor("empty", torch.zeros(0))}
        strategy = ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=40_000)
        shardstore.save(state, url, strategy, storage_options=options, compression=compression)
        location = Location.of(url, options)
        chunk = location.read("w/c.1.0")
        assert len(chunk) < 20_000
        shardstore.save(state, tmp_path / "local", strategy, compression=compression)
        assert chunk == (tmp_path / "local" / "w" / "c.1.0").read_bytes()
        out = torch.zeros_like(data)
        shardstore.load({"w": tensor("w", out)}, url, storage_options=options)
        assert torch.equal(out, data)
        if self.reads_with_plain_zarr:
            group = zarr.open_group(url, mode="r", storage_options=options or None)
            assert (group["w"][55:60, 3] == data[55:60, 3].numpy()).all()
        flipped = chunk[:9] + bytes([chunk[9] ^ 1]) + chunk[10:]
        for damaged in (flipped, chunk[:-1], b""):
            location.write("w/c.1.0", damaged)
            with pytest.raises(ChunkCorruptError) as caught:
                shardstore.load({"w": tensor("w", out)}, url, storage_options=options)
            assert caught.value.key == "w"
        # Whole, but of another place.
        location.write("w/c.1.0", location.read("w/c.2.0"))
        with pytest.raises(ChunkCorruptError, match="not the chunk that was committed"):
            shardstore.load({"w": tensor("w", out)}, url, storage_options=options)

    def test_any_layout_saved_and_any_other_loaded(self, place: Place) -> None:
        @settings(
            max_examples=settings.default.max_examples // 3,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(st.randoms(use_true_random=False), st.integers(0, 10**9))
        def check(rng: random.Random, number: int) -> None:
            url, options = place(f"any-{number}")
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
            shardstore.save(state, url, storage_options=options, overwrite=True)
            wanted = {
                str(i): layouts.sharded(
                    "k", whole, loaded, p, layouts.destination(p, loaded, whole.dtype, rng)
                )
                for i, p in enumerate(loaded.pieces)
            }
            got = shardstore.load(wanted, url, storage_options=options)
            for i, piece in enumerate(loaded.pieces):
                if piece.flat is not None and piece.flat[0] == piece.flat[1]:
                    continue  # shards with an empty flat range are left out of what is loaded
                expected = layouts.expected_part(whole, piece, loaded.prepended)
                assert layouts.raw_bytes(got[str(i)]) == layouts.raw_bytes(expected)

        check()

    def test_a_part_of_a_chunk_is_read_and_no_more(self, place: Place) -> None:
        url, options = place("part")
        data = torch.randn(2048, 256)
        shardstore.save({"w": tensor("w", data)}, url, storage_options=options)
        part = ShardedTensor.from_rank_offsets("w", torch.zeros(64, 256), (0, 5, 32))
        counters.clear()
        loaded = shardstore.load(
            {"w": part}, url, storage_options=options, validate_access_integrity=False
        )
        assert torch.equal(loaded["w"], data[320:384])
        assert counters["bytes_read"] <= 2 * 64 * 1024

    def test_a_checkpoint_is_not_replaced_unasked(self, place: Place) -> None:
        url, options = place("twice")
        shardstore.save(small_state(1.0), url, storage_options=options)
        with pytest.raises(CheckpointExistsError, match="overwrite=True"):
            shardstore.save(small_state(2.0), url, storage_options=options)
        assert_small_state(shardstore.load(small_state(), url, storage_options=options), 1.0)
        Location.of(url, options).write("notes.txt", b"mine")
        shardstore.save(small_state(2.0), url, storage_options=options, overwrite=True)
        assert_small_state(shardstore.load(small_state(), url, storage_options=options), 2.0)
        assert Location.of(url, options).read("notes.txt") == b"mine"

    def test_what_replaces_it_leaves_nothing_of_it(self, place: Place) -> None:
        url, options = place("replaced")
        shardstore.save(small_state(1.0), url, storage_options=options)
        one = {"other": tensor("other", torch.ones(3))}
        shardstore.save(one, url, ("zarr", 1), storage_options=options, overwrite=True)
        assert set(shardstore.load_sharded_metadata(url, storage_options=options)) == {"other"}
        assert Location.of(url, options).listing() == ["common.pt", "metadata.json", "other"]

    def test_a_save_without_its_commit_is_no_checkpoint(self, place: Place) -> None:
        url, options = place("root/step-2")
        first, _ = place("root/step-1")
        shardstore.save(small_state(1.0), first, storage_options=options)
        unfinished_save(url, options)
        assert not shardstore.check_is_distributed_checkpoint(url, storage_options=options)
        with pytest.raises(NotACheckpointError):
            shardstore.load(small_state(), url, storage_options=options)
        root = url.rpartition("/")[0]
        assert latest(root, storage_options=options) == Location.of(first, options).url
        # It hinders nobody.
        shardstore.save(small_state(6.0), url, storage_options=options)
        assert_small_state(shardstore.load(small_state(), url, storage_options=options), 6.0)
        assert latest(root, storage_options=options) == Location.of(url, options).url

    def test_damage_is_found(self, place: Place) -> None:
        url, options = place("damaged")
        shardstore.save(small_state(2.0), url, storage_options=options)
        where = Location.of(url, options)
        chunk = "layer%2F0.w/c.0.0"
        content = where.read(chunk)
        wanted = {"w": tensor("layer/0.w", torch.zeros(20, 30))}
        for damaged in (
            bytes([content[0] ^ 1]) + content[1:],
            content[:-1] + bytes([content[-1] ^ 1]),
            content[:-9],
            b"",
        ):
            where.write(chunk, damaged)
            with pytest.raises(ChunkCorruptError, match=r"layer/0\.w") as caught:
                shardstore.load(wanted, url, storage_options=options)
            assert (caught.value.chunk, caught.value.rank) == ((0, 0), 0)
        # A load may read no further than the committed size, and then has the right values.
        where.write(chunk, content + b"x")
        with suppress(ChunkCorruptError):
            loaded: Any = shardstore.load(wanted, url, storage_options=options)
            assert torch.equal(loaded["w"], torch.full((20, 30), 2.0))
        found: list[Finding] = []
        verify(StoredCheckpoint(where), found.append)
        assert [(one.severity, one.key, one.chunk) for one in found] == [
            ("damage", "layer/0.w", (0, 0))
        ]
        where.delete(chunk)
        with pytest.raises(ChunkMissingError, match="missing") as missing:
            shardstore.load(wanted, url, storage_options=options)
        assert (missing.value.key, missing.value.chunk) == ("layer/0.w", (0, 0))

    @pytest.mark.parametrize("name", ["common.pt", "o/shard_0_1.pt"])
    def test_a_file_of_another_save_is_not_taken_for_its_own(self, place: Place, name: str) -> None:
        """Whole by itself, as what a writer of a dead save leaves that comes too late."""
        url, options = place("late")
        other, _ = place("other")
        shardstore.save(small_state(1.0), url, storage_options=options)
        shardstore.save(small_state(2.0), other, storage_options=options)
        at = Location.of(url, options)
        own = at.read(name)
        at.write(name, Location.of(other, options).read(name))
        with pytest.raises(DamagedCheckpointError, match=f"{name} is not the file"):
            shardstore.load(small_state(), url, storage_options=options)
        found: list[Finding] = []
        verify(StoredCheckpoint(at), found.append)
        (finding,) = found
        assert finding.severity == "damage"
        assert finding.path.endswith(name)
        assert f"{name} is not the file" in finding.message
        at.write(name, own)
        assert_small_state(shardstore.load(small_state(), url, storage_options=options), 1.0)

    def test_a_removal_keeps_the_hashes_of_the_files_true(self, place: Place) -> None:
        url, options = place("hashed")
        shardstore.save(small_state(2.0), url, storage_options=options, verify_integrity=True)
        where = Location.of(url, options)
        rotten, b = where.read("b/c.0") + b"x", where.read("b/c.0")
        where.write("b/c.0", rotten)
        with pytest.raises(DamagedCheckpointError, match=r"b/c\.0 has the SHA-256"):
            shardstore.remove_sharded_tensors(url, "half", storage_options=options)
        assert where.listing("half") != []
        where.write("b/c.0", b)
        shardstore.remove_sharded_tensors(url, "half", storage_options=options)
        state = {key: value for key, value in small_state().items() if key != "half"}
        shardstore.load(state, url, storage_options=options, verify_integrity=True)
        where.write("b/c.0", rotten)
        with pytest.raises(DamagedCheckpointError, match=r"b/c\.0 has the SHA-256"):
            shardstore.load(state, url, storage_options=options, verify_integrity=True)

    def test_tensors_are_removed_and_objects_stay(self, place: Place) -> None:
        url, options = place("removed")
        state = {**small_state(2.0), "also": ShardedObject("half", [1], (1,), (0,))}
        shardstore.save(state, url, storage_options=options, validate_access_integrity=False)
        shardstore.remove_sharded_tensors(url, "half", storage_options=options)
        left = shardstore.load_sharded_metadata(url, storage_options=options)
        assert set(left) == {"layer/0.w", "b", "scalar", "empty", "o/shard_0_1", "half/shard_0_1"}
        assert Location.of(url, options).listing("half") == ["shard_0_1.pt"]
        wanted = {"half": tensor("half", torch.zeros(5, dtype=torch.bfloat16))}
        with pytest.raises(MissingKeyError):
            shardstore.load(wanted, url, storage_options=options)

    # -- without documents of the arrays' own -----------------------------------------------------

    @pytest.mark.parametrize("how", ["at once", "in the background", "compressed", "by strategy"])
    def test_one_document_is_enough(self, place: Place, how: str) -> None:
        url, options = place("root-only")
        if how == "in the background":
            shardstore.async_save(
                small_state(3.0), url, storage_options=options, array_documents=False
            ).result(60)
        elif how == "by strategy":
            strategy = ZarrSaveShardedStrategy("zarr", 2, array_documents=False)
            shardstore.save(small_state(3.0), url, strategy, storage_options=options)
        else:
            compression = "zstd" if how == "compressed" else None
            shardstore.save(
                small_state(3.0),
                url,
                storage_options=options,
                array_documents=False,
                compression=compression,
            )
        where = Location.of(url, options)
        assert names_of(where) == CHUNKS | BESIDE
        root = json.loads(where.read("zarr.json"))
        assert root["attributes"]["shardstore"]["array_documents"] is False
        assert_small_state(shardstore.load(small_state(), url, storage_options=options), 3.0)
        plain = shardstore.load_plain_tensors(url, storage_options=options)
        assert torch.equal(plain["layer/0.w"], torch.full((20, 30), 3.0))
        stored = shardstore.load_tensors_metadata(url, storage_options=options)
        assert set(stored) == {"layer/0.w", "b", "half", "scalar", "empty"}
        part = ShardedTensor.from_rank_offsets("layer/0.w", torch.zeros(20, 10), (1, 2, 3))
        loaded = shardstore.load(
            {"w": part}, url, storage_options=options, validate_access_integrity=False
        )
        assert torch.equal(loaded["w"], torch.full((20, 10), 3.0))
        assert findings(where) == []

    def test_a_strategy_by_itself_leaves_them_out_too(self, place: Place) -> None:
        url, options = place("alone")
        target = Location.of(url, options)
        strategy = ZarrSaveShardedStrategy("zarr", 2, array_documents=False)
        strategy.save({"w": tensor("w", torch.ones(3, 4))}, target.place)
        assert names_of(target) == {"zarr.json", "manifest.npz", "w/c.0.0"}

    def test_plain_zarr_reads_it_by_the_root_alone(self, place: Place) -> None:
        if not self.reads_with_plain_zarr:
            pytest.skip("zarr can not open this store by its URL")
        url, options = place("zarr")
        shardstore.save(small_state(4.0), url, storage_options=options, array_documents=False)
        given = options or None
        group = zarr.open_group(url, mode="r", storage_options=given)
        assert set(group.keys()) == {"layer%2F0.w", "b", "half", "scalar", "empty"}
        assert (group["layer%2F0.w"][3:5, 7] == 4.0).all()
        assert group["empty"][...].shape == (0, 3)
        # What the documentation says of other ways.
        unread = zarr.open_group(url, mode="r", storage_options=given, use_consolidated=False)
        assert list(unread.keys()) == []
        with pytest.raises(FileNotFoundError):
            zarr.open_array(f"{url}/b", mode="r", storage_options=given)

    def test_its_damage_is_found(self, place: Place) -> None:
        url, options = place("damaged")
        shardstore.save(small_state(2.0), url, storage_options=options, array_documents=False)
        where = Location.of(url, options)
        for name, key in (("layer%2F0.w/c.0.0", "layer/0.w"), ("scalar/c", "scalar")):
            content = where.read(name)
            for damaged, kind in (
                (bytes([content[0] ^ 1]) + content[1:], "crc"),
                (content[:-1], "size"),
                (None, "missing"),
            ):
                where.delete(name) if damaged is None else where.write(name, damaged)
                (finding,) = findings(where)
                assert (finding.kind, finding.severity) == (f"chunk-{kind}", "damage")
                assert (finding.key, finding.rank) == (key, 0)
            where.write(name, content)
        # Whole, but of another place: only the commit and the manifest tell.
        own = where.read("b/c.0")
        other, _ = place("another")
        shardstore.save(small_state(5.0), other, storage_options=options)
        where.write("b/c.0", Location.of(other, options).read("b/c.0"))
        assert [finding.kind for finding in findings(where)] == ["chunk-manifest"]
        where.write("b/c.0", own)
        assert findings(where) == []

    def test_its_root_is_all_there_is(self, place: Place) -> None:
        url, options = place("headless")
        shardstore.save(small_state(2.0), url, storage_options=options, array_documents=False)
        where = Location.of(url, options)
        root = where.read("zarr.json")
        for damaged in (b"", root[:-40], None):
            where.delete("zarr.json") if damaged is None else where.write("zarr.json", damaged)
            lost, unread = findings(where)
            assert lost.kind == ("root-missing" if damaged is None else "root-damaged")
            assert lost.severity == "damage"
            assert (unread.kind, unread.severity) == ("arrays-unread", "note")
            assert "5 array(s)" in unread.message
            with pytest.raises(CheckpointingException):
                shardstore.load(small_state(), url, storage_options=options)

    def test_documents_where_there_should_be_none(self, place: Place) -> None:
        url, options = place("more")
        shardstore.save(small_state(2.0), url, storage_options=options, array_documents=False)
        where = Location.of(url, options)
        root = json.loads(where.read("zarr.json"))
        document = root["consolidated_metadata"]["metadata"]["b"]
        where.write("b/zarr.json", json.dumps(document).encode())
        (finding,) = findings(where)
        assert (finding.kind, finding.severity, finding.key) == ("foreign", "note", "b")
        for wrong, kind in (({**document, "shape": [3]}, "differs"), (None, "damaged")):
            where.write("b/zarr.json", b"{" if wrong is None else json.dumps(wrong).encode())
            (finding,) = findings(where)
            assert (finding.kind, finding.severity) == (f"document-{kind}", "damage")

    def test_a_document_that_is_lost_is_damage(self, place: Place) -> None:
        url, options = place("lost")
        shardstore.save(small_state(2.0), url, storage_options=options)
        where = Location.of(url, options)
        where.delete("b/zarr.json")
        (finding,) = findings(where)
        assert (finding.kind, finding.severity) == ("document-missing", "damage")
        # What lies there is known all the same.
        delete_checkpoint(url, storage_options=options)
        assert names_of(where) == set()

    @pytest.mark.parametrize("first", [True, False])
    def test_one_kind_replaces_the_other(self, place: Place, first: bool) -> None:
        url, options = place("turns")
        where = Location.of(url, options)
        foreign = {"notes.txt", "logs/1", "logs/c.0", "logs/c/0/1"}
        for number, documents in enumerate((first, not first, first, first)):
            state = small_state(float(number))
            state[f"only-{number}"] = tensor(f"only-{number}", torch.ones(2, 2))
            shardstore.save(
                state, url, storage_options=options, overwrite=True, array_documents=documents
            )
            for name in foreign:
                where.write(name, b"mine")
            wanted = CHUNKS | BESIDE | {f"only-{number}/c.0.0"}
            if documents:
                wanted |= DOCUMENTS | {f"only-{number}/zarr.json"}
            assert names_of(where) == wanted | foreign
            loaded = shardstore.load(small_state(), url, storage_options=options)
            assert_small_state(loaded, float(number))
            assert {finding.kind for finding in findings(where)} == {"foreign"}
        assert all(where.read(name) == b"mine" for name in foreign)

    @pytest.mark.parametrize("lost", [None, "zarr.json", "manifest.npz"])
    def test_deleting_it_takes_all_chunks(self, place: Place, lost: str | None) -> None:
        url, options = place("deleted")
        shardstore.save(small_state(2.0), url, storage_options=options, array_documents=False)
        where = Location.of(url, options)
        foreign = {"notes.txt", "logs/c.0"}
        for name in foreign:
            where.write(name, b"mine")
        if lost is not None:
            where.write(lost, b"{")
        delete_checkpoint(url, storage_options=options)
        assert names_of(where) == foreign

    def test_tensors_are_removed_from_it(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        url, options = place("removed")
        state = {**small_state(2.0), "also": ShardedObject("half", [1], (1,), (0,))}
        shardstore.save(
            state,
            url,
            storage_options=options,
            validate_access_integrity=False,
            array_documents=False,
        )
        where = Location.of(url, options)
        shardstore.remove_sharded_tensors(url, "half", storage_options=options)
        assert names_of(where) == (CHUNKS | BESIDE | {"half/shard_0_1.pt"}) - {"half/c.0"}
        left = shardstore.load_sharded_metadata(url, storage_options=options)
        assert set(left) == {"layer/0.w", "b", "scalar", "empty", "o/shard_0_1", "half/shard_0_1"}
        assert findings(where) == []

        def killed(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(StoredCheckpoint, "_delete_arrays", killed)
            with pytest.raises(KeyboardInterrupt):
                shardstore.remove_sharded_tensors(url, "b", storage_options=options)
        assert "b" not in shardstore.load_tensors_metadata(url, storage_options=options)
        assert "b/c.0" in names_of(where)
        # Asked again, it goes on; a removal of other tensors leaves that alone.
        shardstore.remove_sharded_tensors(url, "empty", storage_options=options)
        assert "b/c.0" in names_of(where)
        with monkeypatch.context() as patch:
            patch.setattr(type(where), "replace", killed)
            with pytest.raises(KeyboardInterrupt):
                shardstore.remove_sharded_tensors(url, "b", storage_options=options)
        assert "b/c.0" not in names_of(where)
        shardstore.remove_sharded_tensors(url, "b", storage_options=options)
        assert findings(where) == []
        manifest = StoredCheckpoint(where).manifest
        assert manifest is not None
        assert {array.node for array in manifest.arrays} == {"layer%2F0.w", "scalar"}
        shardstore.save(
            {"w": tensor("w", torch.ones(2))}, url, storage_options=options, overwrite=True
        )
        wanted = {"w/zarr.json", "w/c.0", "zarr.json", "metadata.json", "manifest.npz", "common.pt"}
        assert names_of(where) == wanted

    @pytest.mark.usefixtures("copies_small_objects")
    @pytest.mark.parametrize("documents", [True, False])
    def test_a_base_with_the_other_kind_of_documents_is_used(
        self, place: Place, documents: bool
    ) -> None:
        (first, options), (second, _) = place("base"), place("upon")
        data = torch.randn(100, 100)
        state = {"w": tensor("w", data), "e": tensor("e", torch.zeros(0, 2))}
        shardstore.save(state, first, storage_options=options, array_documents=documents)
        before = counters.copy()
        shardstore.save(
            state, second, storage_options=options, base=first, array_documents=not documents
        )
        assert counters.copy()["bytes_reused"] - before["bytes_reused"] == 40_004
        delete_checkpoint(first, storage_options=options)
        there = Location.of(second, options)
        own = {name for name in names_of(there) if name.endswith("/zarr.json")}
        assert own == (set() if documents else {"w/zarr.json", "e/zarr.json"})
        loaded = shardstore.load_plain_tensors(second, storage_options=options)
        assert torch.equal(loaded["w"], data)
        assert findings(there) == []

    def test_functions_of_the_reference_page_read_it(self, place: Place) -> None:
        url, options = place("pages")
        shardstore.save(small_state(2.0), url, storage_options=options, array_documents=False)
        target: Any = Location.of(url, options).place
        whole = _load_from_array(tensor("layer/0.w", torch.zeros(20, 30)), target)
        assert torch.equal(whole, torch.full((20, 30), 2.0))
        with pytest.raises(MissingKeyError):
            _load_from_array(tensor("none", torch.zeros(2)), target)

        def never(path: str) -> Any:
            raise AssertionError(path)

        found = load_zarr_based_sharded_metadata(target, never)
        assert found == shardstore.load_tensors_metadata(url, storage_options=options)

    def test_the_old_layout_can_not_do_without(self, place: Place) -> None:
        url, options = place("old")
        with pytest.raises(FormatVersionError, match="leave array_documents out"):
            shardstore.save(
                small_state(), url, ("zarr", 1), storage_options=options, array_documents=False
            )
        with pytest.raises(FormatVersionError, match="leave array_documents out"):
            ZarrSaveShardedStrategy("zarr", 1, array_documents=False)
        assert names_of(Location.of(url, options)) == set()

    def test_a_checkpoint_of_megatron_is_read(self, place: Place) -> None:
        url, options = place("megatron")
        where = Location.of(url, options)
        for path in GOLDEN.rglob("*"):
            if path.is_file():
                where.write(str(path.relative_to(GOLDEN)), path.read_bytes())
        stored = shardstore.load_tensors_metadata(url, storage_options=options)
        assert stored == shardstore.load_tensors_metadata(GOLDEN)
        there = shardstore.load_plain_tensors(GOLDEN)
        here = shardstore.load_plain_tensors(url, storage_options=options)
        for key in stored:
            assert layouts.raw_bytes(here[key]) == layouts.raw_bytes(there[key])

    def test_the_old_layout_is_written_too(self, place: Place) -> None:
        url, options = place("old")
        shardstore.save(small_state(2.0), url, ("zarr", 1), storage_options=options)
        assert_small_state(shardstore.load(small_state(), url, storage_options=options), 2.0)

    def test_a_strategy_by_itself_commits_its_arrays(self, place: Place) -> None:
        url, options = place("alone")
        data = torch.arange(12.0).reshape(3, 4)
        target = Location.of(url, options).place
        ZarrSaveShardedStrategy("zarr", 2).save({"w": tensor("w", data)}, target)
        assert "zarr.json" in Location.of(url, options).listing()
        assert "metadata.json" not in Location.of(url, options).listing()

    def test_the_strictness_modes_see_what_is_stored(self, place: Place) -> None:
        url, options = place("strict")
        shardstore.save(small_state(2.0), url, storage_options=options)
        wanted = {"half": small_state()["half"], "more": tensor("more", torch.zeros(2))}
        _, missing, unexpected = shardstore.load(
            wanted, url, strict="return_all", storage_options=options
        )
        assert unexpected == {"more"}
        assert missing - {"o", "o/shard_0_1"} == {"layer/0.w", "b", "scalar", "empty"}

    def test_deleting_leaves_what_is_not_of_it(self, place: Place) -> None:
        url, options = place("deleted")
        shardstore.save(small_state(2.0), url, storage_options=options)
        where = Location.of(url, options)
        where.write("notes.txt", b"mine")
        below, _ = place("deleted/inner")
        shardstore.save(small_state(3.0), below, storage_options=options)
        delete_checkpoint(url, storage_options=options)
        assert where.listing() == ["inner", "notes.txt"]
        assert_small_state(shardstore.load(small_state(), below, storage_options=options), 3.0)
        with pytest.raises(NotACheckpointError):
            delete_checkpoint(url, storage_options=options)

    def test_an_array_of_a_checkpoint_is_no_checkpoint(self, place: Place) -> None:
        url, options = place("whole")
        shardstore.save(small_state(2.0), url, storage_options=options)
        key = next(iter(StoredCheckpoint(Location.of(url, options)).arrays.values())).node
        array = f"{url}/{key}"
        assert is_checkpoint(Location.of(url, options))
        assert not is_checkpoint(Location.of(array, options))
        with pytest.raises(NotACheckpointError, match=r"single array.*nothing was deleted"):
            delete_checkpoint(array, storage_options=options)
        for overwrite in (False, True):
            with pytest.raises(CheckpointExistsError):
                shardstore.save(
                    small_state(3.0), array, overwrite=overwrite, storage_options=options
                )
        assert_small_state(shardstore.load(small_state(), url, storage_options=options), 2.0)

    def test_options_are_not_shown(self, place: Place) -> None:
        url, options = place("shown")
        for value in options.values():
            shown = f"{Location.of(url, options)!r} {Location.of(url, options).place!r}"
            assert not isinstance(value, str) or value not in shown
