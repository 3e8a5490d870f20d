"""Loads of one process: names, modes, casts, rules, quantised weights, and what is refused."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import shardstore
from shardstore import hf
from shardstore.convert import convert
from shardstore.errors import (
    ArgumentError,
    DamagedCheckpointError,
    DTypeMismatchError,
    KeyNameError,
    MissingKeyError,
    NotACheckpointError,
    ShapeMismatchError,
)
from shardstore.hf.files import SINGLE_NAME
from shardstore.hf.rules import concat
from shardstore.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from shardstore.storage.movers import files as chunk_files
from shardstore.storage.runtime.counters import counters
from shardstore.storage.stores import folder
from shardstore.storage.stores.location import Location
from testing.s3_servers import S3Server

W, B = torch.arange(24.0).reshape(4, 6), torch.arange(3).to(torch.bfloat16)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A model of two files and an index, and of a file that no index names."""
    model = tmp_path / "model"
    model.mkdir()
    save_file({"w": W}, model / "model-1.safetensors")
    save_file({"b": B, "i": torch.arange(5)}, model / "model-2.safetensors")
    files = {"w": "model-1.safetensors", "b": "model-2.safetensors", "i": "model-2.safetensors"}
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    return model


def zeros() -> dict[str, Any]:
    return {"w": torch.zeros(4, 6), "b": torch.zeros(3, dtype=torch.bfloat16)}


# -- what is filled --------------------------------------------------------------------------------


def test_other_values_stay(place: Path) -> None:
    local = object()
    state = {**zeros(), "step": 7, "kept": LocalNonpersistentObject(local), "list": [1, "a"]}
    loaded: Any = hf.load(state, place)
    assert (loaded["step"], loaded["kept"], loaded["list"]) == (7, local, [1, "a"])
    assert list(loaded) == ["w", "b", "step", "kept", "list"]
    assert loaded["w"].data_ptr() == state["w"].data_ptr()


def test_nested_dicts_and_lists_are_named_by_their_path(tmp_path: Path) -> None:
    save_file({"a.0.x": W, "a.1": B}, tmp_path / "m.safetensors")
    state: Any = {"a": [{"x": torch.zeros(4, 6)}, torch.zeros(3, dtype=torch.bfloat16), "text"]}
    loaded: Any = hf.load(state, tmp_path)
    assert torch.equal(state["a"][0]["x"], W)
    assert torch.equal(loaded["a"][1], B)
    assert loaded["a"][2] == "text"


def test_sharded_tensors_and_factories(place: Path) -> None:
    """Those of Megatron-Core: a shard of columns, a new tensor, and a factory that merges."""
    columns = torch.zeros(4, 3)

    def build(key: str, tensor: torch.Tensor, replica: Any, _: Any) -> dict[str, Any]:
        halves = tensor.chunk(2)
        return {
            str(n): ShardedTensor.from_rank_offsets(key, half, (0, n, 2), replica_id=replica)
            for n, half in enumerate(halves)
        }

    def merge(parts: dict[str, Any]) -> torch.Tensor:
        return torch.cat([parts["0"], parts["1"]])

    whole = torch.zeros(4, 6)
    state = {
        "right": ShardedTensor.from_rank_offsets("w", columns, (1, 1, 2)),
        "new": ShardedTensor("b", None, torch.bfloat16, (3,), (3,), (0,), None),
        "f": ShardedTensorFactory("w", whole, build, merge),
    }
    loaded: Any = hf.load(state, place)
    assert torch.equal(columns, W[:, 3:])
    assert torch.equal(loaded["new"], B)
    assert torch.equal(loaded["f"], W)


def test_a_prepended_axis_is_read_from_a_stack_of_layers(tmp_path: Path) -> None:
    layers = {f"layers.{n}.w": torch.full((2, 3), float(n)) for n in range(4)}
    save_file(layers, tmp_path / "m.safetensors")
    data = torch.zeros(2, 3)
    tensor = ShardedTensor.from_rank_offsets("decoder.w", data, (0, 2, 4), prepend_axis_num=1)
    hf.load({"w": tensor}, tmp_path, rules={"decoder.w": hf.rules.stack("layers.{n}.w", "n")})
    assert torch.equal(data, layers["layers.2.w"])


def test_strided_and_meta_tensors(place: Path) -> None:
    strided = torch.zeros(6, 4).T
    state = {"w": strided, "b": torch.empty(3, dtype=torch.bfloat16, device="meta")}
    loaded: Any = hf.load(state, place)
    assert torch.equal(strided, W)
    assert torch.equal(loaded["b"], B)


def test_tied_weights_are_loaded_from_the_one_that_is_stored(place: Path) -> None:
    state = zeros()
    state["tied"] = state["w"]
    loaded: Any = hf.load(state, place, strict="raise_unexpected")
    assert torch.equal(loaded["tied"], W)
    with pytest.raises(MissingKeyError, match="untied"):
        hf.load({**state, "untied": torch.zeros(4, 6)}, place)


def test_weights_that_are_tied_on_the_meta_device_are_loaded_and_stay_tied(place: Path) -> None:
    """As those of a model that is built there; a part of the same memory is no tied weight."""
    with torch.device("meta"):
        model = torch.nn.ModuleDict({name: torch.nn.Linear(6, 4, bias=False) for name in "ab"})
        model["b"].weight = model["a"].weight
        memory = torch.empty(8, 6)
    loaded: Any = hf.load(model.state_dict(), place, names={"a.weight": "w"})
    assert torch.equal(loaded["b.weight"], W)
    assert loaded["b.weight"].data_ptr() == loaded["a.weight"].data_ptr()
    with pytest.raises(MissingKeyError, match="'v'"):
        hf.load({"w": memory[:4], "v": memory[4:]}, place)


@pytest.mark.parametrize("keys", [["embed", "head"], ["head", "embed"], ["head"]])
def test_weights_tied_at_the_save_are_loaded_where_they_are_not_tied(
    tmp_path: Path, keys: list[str]
) -> None:
    hf.save({"embed": W, "head": W}, tmp_path / "m")
    state: Any = {key: torch.zeros(4, 6) for key in keys}
    loaded: Any = hf.load(state, tmp_path / "m", strict="raise_all")
    assert all(torch.equal(loaded[key], W) for key in keys)
    before = counters["bytes_read"]
    hf.load(dict.fromkeys(keys, torch.zeros(4, 6)), tmp_path / "m")
    assert counters["bytes_read"] - before == W.nbytes  # once, if they are tied
    rules = {"embed": hf.rules.transposed("embed")}
    hf.load(state := {"head": torch.zeros(6, 4)}, tmp_path / "m", rules=rules)
    assert torch.equal(state["head"], W.T)


# -- names and modes -------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [{"x.w": "w"}, lambda key: key.removeprefix("x.")])
def test_names_are_mapped(place: Path, names: Any) -> None:
    state: Any = {"x": {"w": torch.zeros(4, 6)}}
    hf.load(state, place, names=names)
    assert torch.equal(state["x"]["w"], W)


def test_the_parts_of_keys_that_wrappers_add_are_in_no_name(tmp_path: Path) -> None:
    """Such as ``torch.compile``, unless the files have them."""
    state: Any = {f"0._orig_mod.{name}": torch.rand(4) for name in ("weight", "bias")}
    state["1._orig_mod._checkpoint_wrapped_module.bias"] = torch.rand(4)
    hf.save(state, tmp_path / "m", names={"0._orig_mod.bias": "first"})
    assert sorted(load_file(tmp_path / "m" / SINGLE_NAME)) == ["0.weight", "1.bias", "first"]
    save_file(state, tmp_path / "n.safetensors")
    for place, names in (("m", {"0._orig_mod.bias": "first"}), ("n.safetensors", {})):
        loaded: Any = {key: torch.zeros_like(value) for key, value in state.items()}
        hf.load(loaded, tmp_path / place, names=names)
        assert all(torch.equal(loaded[key], value) for key, value in state.items())


def test_two_keys_with_one_name_are_an_error(place: Path) -> None:
    state = {"w": torch.zeros(4, 6), "v": torch.ones(4, 6)}
    with pytest.raises(KeyNameError, match=r"'w' and 'v' would both have the name 'w'"):
        hf.load(state, place, names={"v": "w"})
    assert not state["w"].any()


def test_modes(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {**zeros(), "x": torch.ones(2)}
    with pytest.raises(MissingKeyError, match=r"'x' is not in .*model"):
        hf.load(state, place)
    with pytest.raises(MissingKeyError, match=r"\['i'\].*\['x'\]"):
        hf.load(state, place, strict="raise_all")
    assert not state["w"].any()
    loaded, missing, unexpected = hf.load(state, place, strict="return_all")
    assert (missing, unexpected) == ({"i"}, {"x"})
    assert sorted(loaded) == ["b", "w"]
    assert hf.load(state, place, strict="return_unexpected")[1:] == (set(), {"x"})
    assert "x" not in hf.load(state, place, strict="ignore_all")
    hf.load(state, place, strict="log_all")
    assert "['i']" in caplog.text
    with pytest.raises(ArgumentError, match="strict"):
        hf.load(state, place, strict="all")


@pytest.mark.parametrize("load", [hf.load, shardstore.load])
def test_the_mode_that_an_error_advises_leaves_the_key_out(
    load: Callable[..., Any], place: Path, tmp_path: Path
) -> None:
    where, state = place, {"nowhere": torch.zeros(4)}
    if load is shardstore.load:
        where, state = tmp_path / "c", shardstore.shard(state)
        shardstore.save(shardstore.shard({"w": torch.zeros(4)}), where)
    with pytest.raises(MissingKeyError, match="nowhere") as caught:
        load(state, where)
    (mode,) = re.findall(r"strict='(\w+)'", str(caught.value))
    assert load(state, where, strict=mode) == {}


def test_objects_are_unexpected(place: Path) -> None:
    state = {**zeros(), "extra": ShardedObject("extra", b"x", (1,), (0,))}
    with pytest.raises(MissingKeyError, match=r"'extra \(an object, which"):
        hf.load(state, place)
    assert hf.load(state, place, strict="return_unexpected")[2] == {"extra"}


def test_a_missing_source_of_a_rule_is_named(place: Path) -> None:
    rules = {"both": hf.rules.concat("w", "ww", axis=1)}
    with pytest.raises(MissingKeyError, match=r"'ww' is not in .*model.*did you mean 'w'"):
        hf.load({"both": torch.zeros(4, 12)}, place, rules=rules)


def test_names_that_the_files_lack_are_not_compared_with_all_others(tmp_path: Path) -> None:
    """Neither at the end of a stack; it would take minutes for many experts."""
    names = [f"layers.{n // 10}.experts.{n % 10}.down_proj.weight" for n in range(400)]
    save_file(
        {name: torch.tensor([float(n)]) for n, name in enumerate(names)}, tmp_path / "m.safetensors"
    )
    state: Any = {f"layers.{n}.down": torch.zeros(10, 1) for n in range(40)}
    lost: Any = {f"layers.{n}.experts.20.down_proj.weight": torch.zeros(1) for n in range(40)}
    rules = {"layers.{n}.down": hf.rules.stack("layers.{n}.experts.{e}.down_proj.weight", "e")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("difflib.get_close_matches", lambda *_, **__: pytest.fail("compared"))
        _, _, unexpected = hf.load({**state, **lost}, tmp_path, rules=rules, strict="return_all")
    assert unexpected == set(lost)
    assert state["layers.7.down"][5].item() == 75


def test_tensors_that_rules_use_are_not_missing(place: Path) -> None:
    rules = {"both": hf.rules.concat("w", "w", axis=1)}
    _, missing, _ = hf.load({"both": torch.zeros(4, 12)}, place, rules=rules, strict="return_all")
    assert missing == {"b", "i"}


# -- casts -----------------------------------------------------------------------------------------


def test_casts_are_asked_for(place: Path) -> None:
    state = {"w": torch.zeros(4, 6, dtype=torch.float16)}
    with pytest.raises(DTypeMismatchError, match=r"'w' is stored as float32 in .*float16"):
        hf.load(state, place)
    hf.load(state, place, cast=True)
    assert torch.equal(state["w"], W.half())
    with pytest.raises(DTypeMismatchError):
        hf.load({"w": torch.zeros(4, 6, dtype=torch.int32)}, place, cast=True)
    with pytest.raises(ArgumentError, match="cast="):
        hf.load(state, place, cast="yes")  # type: ignore[arg-type]


def test_shapes_must_agree_unless_they_may_differ(place: Path) -> None:
    with pytest.raises(
        ShapeMismatchError,
        match=r"'w'.*\(4, 6\).*\(6, 4\).*model.*ShardedTensor with allow_shape_mismatch=True",
    ):
        hf.load({"w": torch.zeros(6, 4)}, place)
    larger = torch.ones(6, 6)
    shard = ShardedTensor.from_rank_offsets("w", larger, allow_shape_mismatch=True)
    hf.load({"w": shard}, place)
    assert torch.equal(larger, torch.nn.functional.pad(W, (0, 0, 0, 2)))


# -- quantised weights -----------------------------------------------------------------------------


@pytest.fixture
def quantised(tmp_path: Path) -> tuple[Path, torch.Tensor]:
    """A weight in blocks of 128 x 128, the last ones cut, and its values."""
    weight = torch.randn(300, 200).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 2) + 0.5
    save_file({"w.weight": weight, "w.weight_scale_inv": scale}, tmp_path / "m.safetensors")
    spread = scale.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :200]
    return tmp_path, weight.float() * spread


@pytest.mark.parametrize(
    ("dtype", "budget"),
    [(torch.bfloat16, 7001), (torch.float32, 1 << 28), (torch.float16, 1 << 28)],
)
def test_quantised_weights_are_scaled(
    quantised: tuple[Path, torch.Tensor], dtype: torch.dtype, budget: int
) -> None:
    place, values = quantised
    state = {"w": {"weight": torch.zeros(300, 200, dtype=dtype)}}
    _, missing, _ = hf.load(state, place, strict="return_all", exchange_budget_bytes=budget)
    assert torch.equal(state["w"]["weight"], values.to(dtype))
    assert missing == set()


@pytest.mark.parametrize(
    "shape", [(), (1,), (1, 1), (300,), (300, 1), (1, 2), (3, 1), (300, 2), (300, 200)]
)
def test_an_axis_has_a_scale_for_each_block_or_each_position_or_one(
    tmp_path: Path, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf.rules, "SCALED_ELEMENTS", 7000)  # in parts of 35 rows
    weight, scale = torch.randn(300, 200).to(torch.float8_e4m3fn), torch.rand(shape) + 0.5
    save_file({"w.weight": weight, "w.weight_scale": scale}, tmp_path / "m.safetensors")
    spread = scale.reshape(*shape, *[1] * (2 - len(shape)))
    for axis, size in enumerate(weight.shape):
        if spread.shape[axis] not in (1, size):
            spread = spread.repeat_interleave(128, axis).narrow(axis, 0, size)
    values = weight.float() * spread
    data, whole = torch.zeros(50, 60), torch.zeros(300, 200)
    shard = ShardedTensor("w.weight", data, data.dtype, (50, 60), (300, 200), (140, 100), None)
    hf.load({"w": shard}, tmp_path)
    hf.load({"w.weight": whole}, tmp_path, strict="raise_all")
    assert torch.equal(data, values[140:190, 100:160])
    assert torch.equal(whole, values)


@pytest.mark.parametrize("name", ["e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"])
def test_every_value_of_a_float8_type_is_scaled(tmp_path: Path, name: str) -> None:
    stored = torch.arange(256, dtype=torch.uint8).view(getattr(torch, f"float8_{name}"))
    save_file({"w": stored, "w_scale": torch.tensor(3.0)}, tmp_path / "m.safetensors")
    hf.load(state := {"w": torch.zeros(256)}, tmp_path)
    torch.testing.assert_close(state["w"], stored.float() * 3, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_scales_of_bytes_are_exponents(tmp_path: Path, dtype: torch.dtype) -> None:
    """As MX formats have them (OCP Microscaling Formats, "E8M0"), for 32 elements of a row each;
    MiniMax-M3 and compressed-tensors store them as U8."""
    weight, exponents = torch.randn(3, 64).to(torch.float8_e4m3fn), torch.arange(124, 130)
    scale = exponents.reshape(3, 2).to(torch.uint8).view(dtype)
    save_file({"w": weight, "w_scale": scale}, tmp_path / "m.safetensors")
    hf.load(state := {"w": torch.zeros(3, 64)}, tmp_path, dequantize=(1, 32))
    spread = (exponents.reshape(3, 2) - 127.0).exp2().repeat_interleave(32, 1)
    assert torch.equal(state["w"], weight.float() * spread)


def test_scales_of_other_integers_are_refused(tmp_path: Path) -> None:
    stored = {"w": torch.ones(4).to(torch.float8_e4m3fn), "w_scale": torch.tensor(3)}
    save_file(stored, tmp_path / "m.safetensors")
    with pytest.raises(DTypeMismatchError, match=r"'w_scale' has data type int64.*None"):
        hf.load({"w": torch.zeros(4)}, tmp_path)


def test_a_quantised_tensor_without_axes_is_scaled(tmp_path: Path) -> None:
    stored = {"s": torch.tensor(3.0).to(torch.float8_e4m3fn), "s_scale": torch.tensor(0.5)}
    save_file(stored, tmp_path / "m.safetensors")
    for dtype in (torch.float32, torch.bfloat16):
        state: Any = {"s": torch.tensor(0.0, dtype=dtype)}
        hf.load(state, tmp_path)
        assert state["s"] == 1.5


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        (torch.float8_e4m3fn, "l.scale"),
        (torch.float8_e5m2, "l.weight.scale"),
        (torch.int8, "l.weight_scale"),
        (torch.int8, "l.SCB"),
        (torch.uint8, "l.weight.absmax"),
        (torch.float8_e4m3fn, "l.scale_weight"),  # ComfyUI
        (torch.int8, "l.weight_scales"),  # EETQ
    ],
)
def test_no_cast_leaves_out_scales_that_lie_beside(
    tmp_path: Path, dtype: torch.dtype, scale: str
) -> None:
    """Nor is one advised."""
    stored = torch.ones(4, 4).to(dtype)
    tensors = {"l.weight": stored, "l.bias": stored.clone(), scale: torch.full((4,), 0.5)}
    save_file(tensors, tmp_path / "m.safetensors")
    named = re.escape(repr(scale))
    for key, names in (("l.weight", None), ("x", {"x": "l.weight"})):
        with pytest.raises(DTypeMismatchError, match=rf"'{key}'.*{named}") as caught:
            hf.load({key: torch.zeros(4, 4)}, tmp_path, names=names, dequantize=None)
        assert "cast=True" not in str(caught.value)
        assert "dequantize" in str(caught.value)
    with pytest.raises(DTypeMismatchError, match="cast=True"):
        hf.load({"l.bias": torch.zeros(4, 4)}, tmp_path)
    kept = torch.zeros(4, 4, dtype=dtype)
    hf.load({"l.weight": kept}, tmp_path, dequantize=None)
    assert torch.equal(kept.float(), stored.float())
    casts: list[Any] = [True, "warn"]
    for cast in casts:
        values, both = torch.zeros(4, 4), torch.zeros(8, 4)
        rules = {"x": concat("l.weight", "l.weight")}
        for state in ({"l.weight": values}, {"x": both}):
            with pytest.raises(DTypeMismatchError, match=named):
                hf.load(state, tmp_path, rules=rules, cast=cast)
        assert not values.any()
        assert not both.any()
        hf.load({"l.weight": values}, tmp_path, dequantize=None, cast=cast)
        assert values.unique().tolist() == [1]


def test_only_the_scales_of_the_blocks_are_read(quantised: tuple[Path, torch.Tensor]) -> None:
    place, values = quantised
    data = torch.zeros(50, 60, dtype=torch.bfloat16)
    shard = ShardedTensor("w.weight", data, data.dtype, (50, 60), (300, 200), (140, 100), None)
    before = counters["bytes_read"]
    hf.load({"w": shard}, place)
    assert torch.equal(data, values[140:190, 100:160].bfloat16())
    assert counters["bytes_read"] - before == 50 * 60 + 2 * 4  # one row of two blocks


def test_quantised_weights_are_kept_for_float8(quantised: tuple[Path, torch.Tensor]) -> None:
    place, values = quantised
    weight = torch.zeros(300, 200, dtype=torch.float8_e4m3fn)
    state = {"w.weight": weight, "w.weight_scale_inv": torch.zeros(3, 2)}
    hf.load(state, place, strict="raise_all")
    spread = state["w.weight_scale_inv"].repeat_interleave(128, 0)[:300]
    spread = spread.repeat_interleave(128, 1)[:, :200]
    assert torch.equal(weight.float() * spread, values)


def test_blocks_that_do_not_fit_the_scales_are_an_error(
    quantised: tuple[Path, torch.Tensor],
) -> None:
    state = {"w.weight": torch.zeros(300, 200)}
    with pytest.raises(ShapeMismatchError, match=r"\(300, 200\).*\(64, 64\).*\(5, 4\).*\(3, 2\)"):
        hf.load(state, quantised[0], dequantize=(64, 64))
    weight = torch.zeros(300, 200, dtype=torch.float8_e4m3fn)
    save_file(
        {"w.weight": weight, "w.weight_scale": torch.ones(200)}, quantised[0] / "m.safetensors"
    )
    with pytest.raises(ShapeMismatchError, match=r"w\.weight_scale' has shape \(200,\)"):
        hf.load(state, quantised[0])
    with pytest.raises(DTypeMismatchError, match=r"float8_e4m3fn.*weight_scale") as caught:
        hf.load(state, quantised[0], dequantize=None)
    assert "cast=True" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float4_e2m1fn_x2])
def test_only_floats_get_quantised_values_times_their_scales(
    quantised: tuple[Path, torch.Tensor], dtype: torch.dtype
) -> None:
    """A model that is quantised otherwise would get zeros, as the values are small."""
    state = {"w.weight": torch.empty(300, 200, dtype=dtype)}
    for cast in (False, True):
        with pytest.raises(DTypeMismatchError, match=r"stored as float8.*'w\.weight_scale_inv'"):
            hf.load(state, quantised[0], cast=cast)


# -- places ----------------------------------------------------------------------------------------


def test_places_without_a_model(tmp_path: Path, place: Path) -> None:
    for name in ("absent", "absent.safetensors", "model/absent.safetensors.index.json"):
        with pytest.raises(NotACheckpointError, match="absent"):
            hf.load(zeros(), tmp_path / name)
    (place / "model.safetensors.index.json").unlink()
    with pytest.raises(NotACheckpointError, match="0 safetensors indices and 2 files"):
        hf.load(zeros(), place)
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.safetensors").symlink_to("absent")
    with pytest.raises(NotACheckpointError, match=r"model\.safetensors .*a link to no file; load"):
        hf.load(zeros(), other)
    (other / "model.safetensors").unlink()
    (other / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(
        NotACheckpointError,
        match=r"other holds no safetensors file; shardstore\.load .*pytorch_model\.bin",
    ):
        hf.load(zeros(), other)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("org/model", "the URL hf://ORG/MODEL"),
        ("models--org--tiny", r"give its snapshot, .*/models--org--tiny/snapshots/abc$"),
        ("more", r"\['mtp'\] are not in the files that it names: if .* take them out of it"),
        ("runs", r"models are below it \(ckpt-9, ckpt-10\): give .*/runs/ckpt-10$"),
        ("model", r"add the index of the parts \(model\.safetensors\.index\.json\)"),
        ("model/config.json", r"neither \.safetensors nor \.safetensors\.index\.json"),
    ],
)
def test_a_place_that_is_taken_for_a_model_is_told_with_the_remedy(
    tmp_path: Path, place: Path, name: str, remedy: str
) -> None:
    for below in ("models--org--tiny/snapshots/abc", "runs/ckpt-9", "runs/ckpt-10"):
        hf.save({"w": W}, tmp_path / below)
    hf.save({"w": W, "b": B}, tmp_path / "more", file_bytes=1)
    index = tmp_path / "more" / "model.safetensors.index.json"
    index.write_text(
        index.read_text().replace('"b"', '"mtp": "model-00001-of-00002.safetensors", "b"')
    )
    single = tmp_path / "runs" / "ckpt-10" / "model.safetensors"
    single.rename(single.with_name("adapter_model.safetensors"))
    (place / "model.safetensors.index.json").rename(place / "config.json")
    kinds = NotACheckpointError, DamagedCheckpointError
    with pytest.raises(kinds, match=remedy):
        hf.load(zeros(), tmp_path / name)
    if name != "org/model":
        with pytest.raises(kinds, match=remedy):
            convert(tmp_path / name, tmp_path / "c")


def test_an_index_comes_before_a_single_file_and_a_warning_tells(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers leaves the file when a larger model is saved over it, and then loads the old."""
    save_file({"w": W + 1, "b": B}, place / "model.safetensors")
    for given, plus, warnings in ((place, 0, 1), (place / "model.safetensors", 1, 0)):
        caplog.clear()
        hf.load(state := zeros(), given)
        assert torch.equal(state["w"], W + plus)
        assert caplog.text.count("also holds model.safetensors") == warnings


@pytest.mark.parametrize("index", [True, False])
def test_the_files_of_transformers_come_before_others(tmp_path: Path, index: bool) -> None:
    """Mistral's own files, adapters and the like may lie beside a model."""
    hf.save({"w": W}, tmp_path)
    if index:
        (tmp_path / "model.safetensors").rename(tmp_path / "part.safetensors")
        text = json.dumps({"weight_map": {"w": "part.safetensors"}})
        (tmp_path / "model.safetensors.index.json").write_text(text)
    (tmp_path / "consolidated.safetensors.index.json").write_text("{}")
    for name in ("adapter_model", "consolidated", "model.fp16"):
        save_file({"w": W + 1}, tmp_path / f"{name}.safetensors")
    state = {"w": torch.zeros(4, 6)}
    hf.load(state, tmp_path)
    assert torch.equal(state["w"], W)


def test_a_variant_of_transformers_is_loaded(tmp_path: Path) -> None:
    """``save_pretrained(..., variant="fp16")`` puts the variant before the ending of each name."""
    index, parts = "model.safetensors.index.fp16.json", ["model.fp16-00001-of-00002.safetensors"]
    parts += ["model.fp16-00002-of-00002.safetensors"]
    place = tmp_path / "m"
    place.mkdir()
    save_file({"w": W}, place / parts[0])
    save_file({"b": B}, place / parts[1])
    (place / index).write_text(json.dumps({"weight_map": {"w": parts[0], "b": parts[1]}}))
    for given in (place, place / index):
        hf.load(state := zeros(), given)
        assert torch.equal(state["w"], W)
    convert(place, tmp_path / "c")
    convert(place / index, tmp_path / "d")
    save_file({"w": W + 1, "b": B}, place / "model.safetensors")
    for given, plus in ((place, 1), (place / index, 0)):
        hf.load(state := zeros(), given)
        assert torch.equal(state["w"], W + plus)
    (place / "model.safetensors").unlink()
    (place / "model.safetensors.index.bf16.json").write_text("{}")
    with pytest.raises(NotACheckpointError, match="2 safetensors indices"):
        hf.load(zeros(), place)


PARTS = ["model-00002-of-00003", "model-00001-of-000163", "model-1-of-2"]
PARTS += ["model.fp16-00001-of-00003", "model-00001-of-000011"]


@pytest.mark.parametrize("name", PARTS)
def test_one_of_several_parts_is_no_whole_model(tmp_path: Path, name: str) -> None:
    save_file({"w": W}, tmp_path / f"{name}.safetensors")
    with pytest.raises(NotACheckpointError, match="0 safetensors indices and 1 files"):
        hf.load({"w": torch.zeros(4, 6)}, tmp_path)


def test_the_parts_of_ranks_are_no_tensors(tmp_path: Path) -> None:
    """As PyTorch's ``HuggingFaceStorageWriter(save_distributed=True)`` saves them."""
    folder = tmp_path / "sharded"
    folder.mkdir()
    names = [f"shard-{rank:05}-model-00001-of-00001.safetensors" for rank in (1, 2)]
    save_file({"w": W[:2]}, folder / names[0])
    hf.load({"w": torch.zeros(2, 6)}, folder)  # of one rank
    save_file({"w": W[2:]}, folder / names[1])
    for given in (folder, *(folder / name for name in names)):
        with pytest.raises(NotACheckpointError, match="enable_consolidation=True"):
            hf.load({"w": torch.zeros(4, 6)}, given)
        with pytest.raises(NotACheckpointError, match="enable_consolidation=True"):
            convert(given, tmp_path / "c")
    (folder / names[0]).unlink()
    with pytest.raises(NotACheckpointError, match="enable_consolidation=True"):
        convert(folder, tmp_path / "c")


@pytest.mark.parametrize("name", ["model-00001-of-00001", "model-000001-of-000001", "best-of-3"])
def test_a_part_that_is_alone_is_a_whole_model(tmp_path: Path, name: str) -> None:
    save_file({"w": W}, tmp_path / f"{name}.safetensors")
    state = {"w": torch.zeros(4, 6)}
    hf.load(state, tmp_path)
    assert torch.equal(state["w"], W)


# -- hostile files ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("../model-1.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ".", "", ".hidden"),
        "http://127.0.0.1:9/x.safetensors",
        *("s3://bucket/x.safetensors", "file:x", "a\\b", "x?y", "x#y", "%2e%2e%2fx", "a\0b"),
    ],
)
def test_names_outside_of_the_folder_are_refused(place: Path, name: str) -> None:
    (place / "sub").mkdir()
    save_file({"w": W}, place / "sub" / "x.safetensors")
    index = {"weight_map": {"w": "model-1.safetensors", "b": name}}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    opened: list[str] = []
    watched = folder.open_regular
    with pytest.MonkeyPatch.context() as patch:
        for module in (folder, chunk_files):
            patch.setattr(module, "open_regular", lambda path: opened.append(path) or watched(path))
        with pytest.raises(DamagedCheckpointError, match=r"index\.json"):
            hf.load(zeros(), place)
    assert [Path(path).name for path in opened] == ["model.safetensors.index.json"]


def put_file(path: Path, header: object, size: int, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if length is None else length
    path.write_bytes(length.to_bytes(8, "little") + text + bytes(size))


def entry(shape: list[Any], start: int, stop: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


# Beside those of tests/interop/test_convert.py, which safetensors itself judges.
HEADERS: dict[str, tuple[object, int]] = {
    "a product beyond 64 bits": ({"w": entry([2**33, 2**33], 0, 96)}, 96),
    "a product that is 96 in 64 bits": ({"w": entry([2**63 + 12, 2], 0, 96)}, 96),
    "huge offsets": ({"w": entry([4, 6], 2**62, 2**62 + 96)}, 96),
    "fractions": ({"w": entry([4.5, 6], 0, 96)}, 96),
    "texts": ({"w": entry(["4", 6], 0, 96)}, 96),
    "no shape": ({"w": {"dtype": "F32", "data_offsets": [0, 96]}}, 96),
    "three offsets": ({"w": {**entry([4, 6], 0, 96), "data_offsets": [0, 48, 96]}}, 96),
    "no JSON": (b"{'w'", 96),
    "no text": (b"\xff\xfe{}", 96),
    "a name twice": (
        b'{"w":{"dtype":"F32","shape":[4,6],"data_offsets":[0,96]},'
        b'"w":{"dtype":"I32","shape":[6,4],"data_offsets":[0,96]}}',
        96,
    ),
    "depth": (b'{"w":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 96),
}


@pytest.mark.parametrize("name", HEADERS)
def test_hostile_headers_are_errors(tmp_path: Path, name: str) -> None:
    path = tmp_path / "m.safetensors"
    put_file(path, *HEADERS[name])
    state = {"w": torch.ones(4, 6)}
    with pytest.raises(DamagedCheckpointError, match=r"m\.safetensors.*download it again"):
        hf.load(state, path)
    assert state["w"].all()


@pytest.mark.parametrize("length", [0, 1, 97, 2**40, 2**63, 2**64 - 1, 100_000_001])
def test_hostile_header_lengths_are_errors(tmp_path: Path, length: int) -> None:
    put_file(tmp_path / "m.safetensors", {"w": entry([4, 6], 0, 96)}, 30, length)
    with pytest.raises(DamagedCheckpointError, match=r"m\.safetensors"):
        hf.load({"w": torch.zeros(4, 6)}, tmp_path)


def test_a_pointer_of_git_lfs_is_told_with_the_remedy(tmp_path: Path) -> None:
    """A clone without Git LFS holds pointers in the place of the files."""
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9000\n"
    path = tmp_path / "model.safetensors"
    path.write_text(text)
    with pytest.raises(DamagedCheckpointError, match=r"model\.safetensors .*git lfs pull"):
        hf.load(zeros(), tmp_path)
    with pytest.raises(DamagedCheckpointError, match=r"model\.safetensors .*git lfs pull"):
        convert(path, tmp_path / "out")


def test_unknown_data_types_are_errors(tmp_path: Path) -> None:
    put_file(tmp_path / "m.safetensors", {"w": entry([4, 6], 0, 96, "F33")}, 96)
    with pytest.raises(DTypeMismatchError, match=r"'w' of .*m\.safetensors.*'F33'"):
        hf.load({"w": torch.zeros(4, 6)}, tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {"w": 1}}', b"\xff"),
        b'{"weight_map": {"w": "model-1.safetensors", "w": "model-2.safetensors"}}',
        b'{"weight_map": {}, "weight_map": {"w": "model-1.safetensors"}}',
        b'{"weight_map": {"w": "model-2.safetensors"}}',  # it is in the other file
        b'{"weight_map": {"w": "model-3.safetensors"}}',  # which is not there
    ],
)
def test_hostile_indices_are_errors(place: Path, text: bytes) -> None:
    (place / "model.safetensors.index.json").write_bytes(text)
    with pytest.raises(DamagedCheckpointError, match=r"index\.json"):
        hf.load({"w": torch.zeros(4, 6)}, place)


@pytest.mark.parametrize(
    ("change", "what"),
    [(lambda path: os.truncate(path, path.stat().st_size - 1), "ends"), (Path.unlink, "; load")],
)
def test_a_file_that_is_cut_or_removed_during_the_load_is_an_error(
    place: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], what: str
) -> None:
    opened = hf.loading.WeightFiles.open

    def then_changed(location: Any) -> Any:
        found = opened(location)
        change(place / "model-1.safetensors")
        return found

    monkeypatch.setattr(hf.loading.WeightFiles, "open", then_changed)
    with pytest.raises(DamagedCheckpointError, match=rf"changed.*model-1\.safetensors ?{what}"):
        hf.load(zeros(), place)


@pytest.mark.parametrize("kind", ["a folder", "S3"])
def test_a_file_replaced_during_the_load_is_an_error(
    place: Path, s3_server: S3Server, kind: str
) -> None:
    """Its weights could be those of two models, as where a trainer exports to the same place."""
    model = Location.of(place)
    if kind == "S3":
        bucket = Location.of(f"s3://{s3_server.new_bucket()}/m", s3_server.storage_options)
        for name in model.listing():
            bucket.write(name, model.read(name))
        model = bucket

    def names(key: str) -> str:
        model.write("model-1.safetensors", model.read("model-1.safetensors")[:-1] + b"?")
        return key

    with pytest.raises(DamagedCheckpointError, match=r"changed while.*model-1\.safetensors was"):
        hf.load(zeros(), model.place, names=names)


def test_another_name_of_the_package_is_an_error() -> None:
    with pytest.raises(AttributeError, match="'lode'"):
        _ = hf.lode


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"names": 3}, "names=3"),
        ({"names": {"w": None}}, "gives the key 'w' no name"),
        ({"names": lambda _: 3}, "the name 3"),
        ({"rules": 3}, "rules=3"),
        ({"rules": {"w": 3}}, "template -> rule"),
        ({"dequantize": "x"}, "dequantize='x'"),
        ({"dequantize": (128, 0)}, "dequantize=0"),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: dict[str, Any], text: str) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ArgumentError, match=text):
        hf.load({"w": torch.zeros(2)}, tmp_path, **arguments)
    with pytest.raises(NotACheckpointError, match="does not exist"):
        hf.load({"w": torch.zeros(2)}, tmp_path / "nothing")
