"""What every store has to do alike: one suite, inherited by the tests of each store.

A store's test class gives `place`, a function from a name to a URL and its storage options.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardstore
from shardstore import ShardedObject, ShardedTensor
from shardstore.errors import (
    CheckpointExistsError,
    ChunkCorruptError,
    ChunkMissingError,
    DamagedCheckpointError,
    MissingKeyError,
    NotACheckpointError,
)
from shardstore.ranks import Ranks
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.commit import is_checkpoint
from shardstore.storage.counters import counters
from shardstore.storage.findings import Finding
from shardstore.storage.location import Location
from shardstore.storage.options import SaveOptions
from shardstore.storage.sweep import delete_checkpoint, latest
from shardstore.storage.verify import verify
from shardstore.strategies.session import SaveSession
from shardstore.strategies.zarr import ZarrSaveShardedStrategy
from tests import layouts

Place = Callable[[str], tuple[str, dict[str, Any]]]

GOLDEN = Path(__file__).parent / "golden" / "megatron-core-0.15.3-zarr" / "tp2dp1"


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
    session = SaveSession.begin(Ranks(), Location.of(url, **options), SaveOptions())
    with session.active() as place:
        ZarrSaveShardedStrategy("zarr", version).save(
            {"w": tensor("layer/0.w", torch.full((20, 30), value))}, place.place
        )
    return session


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

    def test_compressed_chunks(self, place: Place) -> None:
        url, options = place("zstd")
        data = torch.arange(40_000, dtype=torch.int32).reshape(200, 200) % 7
        state = {"w": tensor("w", data), "empty": tensor("empty", torch.zeros(0))}
        strategy = ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=40_000)
        shardstore.save(state, url, strategy, storage_options=options, compression="zstd")
        location = Location.of(url, **options)
        chunk = location.read("w/c.1.0")
        assert len(chunk) < 20_000
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
        if not location.is_local:
            with pytest.raises(ChunkCorruptError, match="not the chunk that was committed"):
                shardstore.load({"w": tensor("w", out)}, url, storage_options=options)

    @pytest.mark.parametrize("seed", range(3))
    def test_any_layout_saved_and_any_other_loaded(self, place: Place, seed: int) -> None:
        @settings(
            max_examples=6,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(st.randoms(use_true_random=False), st.integers(0, 10**9))
        def check(rng: random.Random, number: int) -> None:
            url, options = place(f"any-{seed}-{number}")
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
        counters.reset()
        loaded = shardstore.load(
            {"w": part}, url, storage_options=options, validate_access_integrity=False
        )
        assert torch.equal(loaded["w"], data[320:384])
        assert counters.bytes_read <= 2 * 64 * 1024

    def test_a_checkpoint_is_not_replaced_unasked(self, place: Place) -> None:
        url, options = place("twice")
        shardstore.save(small_state(1.0), url, storage_options=options)
        with pytest.raises(CheckpointExistsError, match="overwrite=True"):
            shardstore.save(small_state(2.0), url, storage_options=options)
        assert_small_state(shardstore.load(small_state(), url, storage_options=options), 1.0)
        Location.of(url, **options).write("notes.txt", b"mine")
        shardstore.save(small_state(2.0), url, storage_options=options, overwrite=True)
        assert_small_state(shardstore.load(small_state(), url, storage_options=options), 2.0)
        assert Location.of(url, **options).read("notes.txt") == b"mine"

    def test_what_replaces_it_leaves_nothing_of_it(self, place: Place) -> None:
        url, options = place("replaced")
        shardstore.save(small_state(1.0), url, storage_options=options)
        one = {"other": tensor("other", torch.ones(3))}
        shardstore.save(one, url, ("zarr", 1), storage_options=options, overwrite=True)
        assert set(shardstore.load_sharded_metadata(url, storage_options=options)) == {"other"}
        assert Location.of(url, **options).listing() == ["common.pt", "metadata.json", "other"]

    def test_without_its_commit_it_is_none(self, place: Place) -> None:
        url, options = place("root/step-2")
        first, _ = place("root/step-1")
        shardstore.save(small_state(1.0), first, storage_options=options)
        unfinished_save(url, options)
        assert not shardstore.check_is_distributed_checkpoint(url, storage_options=options)
        with pytest.raises(NotACheckpointError):
            shardstore.load(small_state(), url, storage_options=options)
        root = url.rpartition("/")[0]
        assert latest(root, storage_options=options) == Location.of(first, **options).url
        # It hinders nobody.
        shardstore.save(small_state(6.0), url, storage_options=options)
        assert_small_state(shardstore.load(small_state(), url, storage_options=options), 6.0)
        assert latest(root, storage_options=options) == Location.of(url, **options).url

    def test_damage_is_found(self, place: Place) -> None:
        url, options = place("damaged")
        shardstore.save(small_state(2.0), url, storage_options=options)
        where = Location.of(url, **options)
        chunk = "layer%2F0.w/c.0.0"
        content = where.read(chunk)
        wanted = {"w": tensor("layer/0.w", torch.zeros(20, 30))}
        for damaged in (
            bytes([content[0] ^ 1]) + content[1:],
            content[:-1] + bytes([content[-1] ^ 1]),
            content[:-9],
            content + b"x",
            b"",
        ):
            where.write(chunk, damaged)
            with pytest.raises(ChunkCorruptError, match=r"layer/0\.w") as caught:
                shardstore.load(wanted, url, storage_options=options)
            assert (caught.value.chunk, caught.value.rank) == ((0, 0), 0)
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
        at = Location.of(url, **options)
        own = at.read(name)
        at.write(name, Location.of(other, **options).read(name))
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

    def test_tensors_are_removed_and_objects_stay(self, place: Place) -> None:
        url, options = place("removed")
        state = {**small_state(2.0), "also": ShardedObject("half", [1], (1,), (0,))}
        shardstore.save(state, url, storage_options=options, validate_access_integrity=False)
        shardstore.remove_sharded_tensors(url, "half", storage_options=options)
        left = shardstore.load_sharded_metadata(url, storage_options=options)
        assert set(left) == {"layer/0.w", "b", "scalar", "empty", "o/shard_0_1", "half/shard_0_1"}
        assert Location.of(url, **options).listing("half") == ["shard_0_1.pt"]
        wanted = {"half": tensor("half", torch.zeros(5, dtype=torch.bfloat16))}
        with pytest.raises(MissingKeyError):
            shardstore.load(wanted, url, storage_options=options)

    def test_a_checkpoint_of_megatron_is_read(self, place: Place) -> None:
        url, options = place("megatron")
        where = Location.of(url, **options)
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
        target = Location.of(url, **options).place
        ZarrSaveShardedStrategy("zarr", 2).save({"w": tensor("w", data)}, target)
        assert "zarr.json" in Location.of(url, **options).listing()
        assert "metadata.json" not in Location.of(url, **options).listing()

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
        where = Location.of(url, **options)
        where.write("notes.txt", b"mine")
        below, _ = place("deleted/inner")
        shardstore.save(small_state(3.0), below, storage_options=options)
        delete_checkpoint(url, storage_options=options)
        assert where.listing() == ["inner", "notes.txt"]
        assert_small_state(shardstore.load(small_state(), below, storage_options=options), 3.0)
        with pytest.raises(NotACheckpointError):
            delete_checkpoint(url, storage_options=options)

    def test_an_array_of_a_checkpoint_is_none(self, place: Place) -> None:
        url, options = place("whole")
        shardstore.save(small_state(2.0), url, storage_options=options)
        key = next(iter(StoredCheckpoint(Location.of(url, **options)).arrays.values())).node
        array = f"{url}/{key}"
        assert is_checkpoint(Location.of(url, **options))
        assert not is_checkpoint(Location.of(array, **options))
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
            shown = f"{Location.of(url, **options)!r} {Location.of(url, **options).place!r}"
            assert not isinstance(value, str) or value not in shown
