"""The data types that this package gives to zarr, against TensorStore, bit for bit.

In this process: round trips in both directions and every fill value. In isolated processes, which
import neither this package nor torch: groups of such arrays through zarr and xarray.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import tensorstore as ts
import zarr
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from zarr.buffer.cpu import NDBuffer
from zarr.dtype import DataTypeValidationError, data_type_registry

import shardstore.zarr_dtypes as zd
from tests.helpers.other_programs import INTERPRETERS, failures, interpreter
from tests.helpers.processes import run_to_end

ROOT = Path(__file__).parents[2]
PAIRS = "float4_e2m1fn_x2"
"""The one type that ml_dtypes and TensorStore lack."""
NAMES = [data_type._zarr_v3_name for data_type in zd.DATA_TYPES if data_type._zarr_v3_name != PAIRS]
LAYOUTS = ["plain", "zstd", "sharded", "blosc", "big endian", "v2", "v2 zlib", "v2 blosc"]

Bits = npt.NDArray[np.unsignedinteger[Any]]


def uint_of(name: str) -> np.dtype[Any]:
    return np.dtype("u1" if name == PAIRS else f"u{np.dtype(getattr(ml_dtypes, name)).itemsize}")


def bits_of(array: Any) -> Bits:
    array = np.ascontiguousarray(array)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array.view(f"u{array.dtype.itemsize}")


@st.composite
def bit_arrays(draw: st.DrawFn) -> tuple[str, Bits, tuple[int, ...]]:
    """A data type, an array of any bits of its size, and a chunk shape; 0-d and empty included."""
    name = draw(st.sampled_from(NAMES))
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    chunks = tuple(draw(st.integers(1, max(1, n))) for n in shape)
    dtype = uint_of(name)
    count = int(np.prod(shape, dtype=int))
    raw = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    return name, np.frombuffer(raw, dtype).reshape(shape), chunks


BLOSC = {"cname": "lz4", "clevel": 5, "blocksize": 0}
COMPRESSORS_V2 = {
    "v2 zlib": {"id": "zlib", "level": 1},
    "v2 blosc": {"id": "blosc", "shuffle": 1, **BLOSC},
}


def metadata(name: str, shape: tuple[int, ...], chunks: tuple[int, ...], layout: str) -> Any:
    """An array document, in TensorStore's spelling and the one on disk."""
    if layout.startswith("v2"):
        return {
            "zarr_format": 2,
            "shape": list(shape),
            "chunks": list(chunks),
            "dtype": name,
            "compressor": COMPRESSORS_V2.get(layout),
            "fill_value": 0.0,
            "order": "C",
            "filters": None,
        }
    size = uint_of(name).itemsize
    endian = {"endian": "big" if layout == "big endian" else "little"}
    codecs = [codec("bytes", **(endian if size > 1 else {}))]
    if layout == "zstd":
        codecs += [codec("zstd", level=1)]
    elif layout == "blosc":
        codecs += [codec("blosc", shuffle="bitshuffle", typesize=size, **BLOSC)]
    grid = list(chunks)
    if layout == "sharded":
        grid = [2 * n for n in chunks]
        index = [codec("bytes", endian="little"), codec("crc32c")]
        inner = {"chunk_shape": list(chunks), "codecs": codecs, "index_codecs": index}
        codecs = [codec("sharding_indexed", **inner)]
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": name,
        "chunk_grid": codec("regular", chunk_shape=grid),
        "chunk_key_encoding": codec("default", separator="/"),
        "fill_value": 0.0,
        "codecs": codecs,
    }


def codec(name: str, **configuration: Any) -> dict[str, Any]:
    """A codec, or another extension, of an array document."""
    return {"name": name, **({"configuration": configuration} if configuration else {})}


def open_ts(path: Path, zarr_format: int, document: Any = None) -> ts.TensorStore:
    spec: dict[str, Any] = {
        "driver": {2: "zarr", 3: "zarr3"}[zarr_format],
        "kvstore": {"driver": "file", "path": str(path)},
        "store_data_equal_to_fill_value": True,
    }
    if document is not None:
        spec["metadata"] = {k: v for k, v in document.items() if k != "node_type"}
        spec["create"] = True
    return ts.open(spec).result()


def write_with_ts(path: Path, name: str, bits: Bits, chunks: tuple[int, ...], layout: str) -> None:
    document = metadata(name, bits.shape, chunks, layout)
    store = open_ts(path, document["zarr_format"], document)
    store.write(bits.view(getattr(ml_dtypes, name))).result()


def write_with_zarr(
    path: Path, name: str, bits: Bits, chunks: tuple[int, ...], layout: str
) -> None:
    of_layout: dict[str, dict[str, Any]] = {
        "big endian": {
            "serializer": zarr.codecs.BytesCodec(
                endian="big" if uint_of(name).itemsize > 1 else None
            )
        },
        "sharded": {"shards": tuple(2 * n for n in chunks)},
        "zstd": {"compressors": zarr.codecs.ZstdCodec(level=1)},
        "blosc": {"compressors": zarr.codecs.BloscCodec(cname="lz4", shuffle="bitshuffle")},
        "v2 zlib": {"compressors": COMPRESSORS_V2["v2 zlib"]},
    }
    with zarr.config.set({"array.write_empty_chunks": True}):
        array = zarr.create_array(
            path,
            shape=bits.shape,
            chunks=chunks,
            dtype=getattr(ml_dtypes, name, name),
            zarr_format=2 if layout.startswith("v2") else 3,
            fill_value="0x00" if name == PAIRS else 0,
            **{"compressors": None, **of_layout.get(layout, {})},
        )
        array[...] = bits.view(array.dtype)


round_trip_settings = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.parametrize("layout", LAYOUTS)
@given(case=bit_arrays())
@round_trip_settings
def test_zarr_reads_what_tensorstore_wrote(
    tmp_path: Path, layout: str, case: tuple[str, Bits, tuple[int, ...]]
) -> None:
    name, bits, chunks = case
    path = tmp_path / uuid4().hex
    write_with_ts(path, name, bits, chunks, layout)
    array = zarr.open_array(path, mode="r")
    assert array.dtype.newbyteorder("=") == getattr(ml_dtypes, name)
    np.testing.assert_array_equal(bits_of(array[...]), bits)
    # All-zero bits, whatever number they stand for (float8_e8m0fnu has no zero).
    assert int(bits_of(np.asarray(array.fill_value).reshape(1))[0]) == 0


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "v2 blosc"])
@given(case=bit_arrays())
@round_trip_settings
def test_tensorstore_reads_what_zarr_wrote(
    tmp_path: Path, layout: str, case: tuple[str, Bits, tuple[int, ...]]
) -> None:
    name, bits, chunks = case
    assume(bits.ndim > 0 or layout != "sharded")  # zarr 3.1 cannot write this, of any data type
    path = tmp_path / uuid4().hex
    write_with_zarr(path, name, bits, chunks, layout)
    store = open_ts(path, 2 if layout.startswith("v2") else 3)
    assert store.dtype.name == name
    np.testing.assert_array_equal(bits_of(store.read().result()), bits)
    np.testing.assert_array_equal(bits_of(zarr.open_array(path, mode="r")[...]), bits)


@pytest.mark.parametrize("name", NAMES)
def test_documents_of_both_writers_agree(tmp_path: Path, name: str) -> None:
    bits = np.arange(6, dtype=uint_of(name)).reshape(2, 3)
    for layout, document in (("plain", "zarr.json"), ("v2", ".zarray")):
        write_with_ts(tmp_path / "ts" / layout, name, bits, (1, 3), layout)
        write_with_zarr(tmp_path / "zarr" / layout, name, bits, (1, 3), layout)
        from_ts = json.loads((tmp_path / "ts" / layout / document).read_text())
        from_zarr = json.loads((tmp_path / "zarr" / layout / document).read_text())
        for field in ("data_type", "dtype", "shape", "chunks", "chunk_grid", "codecs"):
            assert from_zarr.get(field) == from_ts.get(field), field
        if name != "float8_e8m0fnu" or layout == "v2":  # see the module: hexadecimal there
            assert from_zarr["fill_value"] == from_ts["fill_value"] == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_fill_values_keep_their_bits(name: str) -> None:
    """Every one of 8 bits; of bfloat16, NaNs, infinities, -0 and some hundred others."""
    special = [0x7FC0, 0xFFC0, 0x7F80, 0xFF80, 0x7F81, 0x8000, 0x0001]
    for bits in range(256) if uint_of(name).itemsize == 1 else [*special, *range(0, 1 << 16, 255)]:
        check_fill_value(name, bits)


def bits_in(name: str, value: Any) -> int:
    return int(bits_of(np.array([value], getattr(ml_dtypes, name)))[0])


def check_fill_value(name: str, bits: int) -> None:
    """Through zarr's metadata and back, and as TensorStore understands the same metadata."""
    data_type = data_type_registry.get(name)()
    scalar = np.array([bits], uint_of(name)).view(getattr(ml_dtypes, name))[0]
    text = data_type.to_json_scalar(scalar, zarr_format=3)
    assert json.loads(json.dumps(text, allow_nan=False)) == text
    assert bits_in(name, data_type.from_json_scalar(text, zarr_format=3)) == bits
    assert bits_in(name, ts_fill_value(name, text, 3)) == bits
    hexadecimal = f"0x{bits:0{2 * uint_of(name).itemsize}x}"
    assert bits_in(name, data_type.from_json_scalar(hexadecimal, zarr_format=3)) == bits
    if np.isnan(float(scalar)) and text != "NaN":
        with pytest.raises(ValueError, match=hexadecimal):
            data_type.to_json_scalar(scalar, zarr_format=2)
        return
    text = data_type.to_json_scalar(scalar, zarr_format=2)
    assert bits_in(name, data_type.from_json_scalar(text, zarr_format=2)) == bits
    if name != "float8_e8m0fnu" or isinstance(text, str) or bits == 0:  # see the module docstring
        assert bits_in(name, ts_fill_value(name, text, 2)) == bits


def ts_fill_value(name: str, text: Any, zarr_format: int) -> Any:
    document = metadata(name, (1,), (1,), "plain" if zarr_format == 3 else "v2")
    del document["zarr_format"]
    document.pop("node_type", None)
    document["fill_value"] = text
    driver = {2: "zarr", 3: "zarr3"}[zarr_format]
    spec = {"driver": driver, "kvstore": "memory://", "metadata": document}
    return ts.open(spec, create=True).result().fill_value


@pytest.mark.parametrize("name", NAMES)
def test_fill_values_that_metadata_may_hold(name: str) -> None:
    data_type = data_type_registry.get(name)()
    formats: tuple[Literal[2, 3], ...] = (2, 3)
    for zarr_format in formats:
        read = data_type.from_json_scalar("NaN", zarr_format=zarr_format)
        assert bits_in(name, read) == bits_in(name, ts_fill_value(name, "NaN", zarr_format))
        assert float(data_type.from_json_scalar(2, zarr_format=zarr_format)) == 2
        for text in ("Infinity", "-Infinity"):
            if name in ("bfloat16", "float8_e5m2"):
                assert data_type.from_json_scalar(text, zarr_format=zarr_format) == float(text)
            else:
                with pytest.raises(ValueError, match=r"no infinities"):
                    data_type.from_json_scalar(text, zarr_format=zarr_format)
        for wrong in (True, None, [1], {"a": 1}):
            with pytest.raises(TypeError, match=name):
                data_type.from_json_scalar(wrong, zarr_format=zarr_format)  # type: ignore[arg-type]
        for wrong_text in ("nan", "0x", "0x_1", "0x1_0", "0xgg", "0x-1", "0x10000", "1.5", ""):
            with pytest.raises(ValueError, match=name):
                data_type.from_json_scalar(wrong_text, zarr_format=zarr_format)
    with pytest.raises(ValueError, match="Zarr v2"):  # another number to TensorStore
        data_type.from_json_scalar("0x7f", zarr_format=2)
    for wrong_value in (1j, b"1", np.complex64(1), np.datetime64(1, "s"), [1]):
        with pytest.raises(TypeError, match=name):
            data_type.cast_scalar(wrong_value)


PAIR = np.dtype([(PAIRS, "u1")])


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "v2 blosc"])
@pytest.mark.parametrize("shape", [(16, 16), (256,), (), (0, 3)])
def test_zarr_alone_writes_and_reads_pairs(
    tmp_path: Path, layout: str, shape: tuple[int, ...]
) -> None:
    bits = np.arange(256, dtype="u1")[: int(np.prod(shape, dtype=int))].reshape(shape)
    if layout == "sharded" and not shape:
        pytest.skip("zarr 3.1 cannot write this, of any data type")
    chunks = tuple(max(1, n // 3) for n in shape)
    write_with_zarr(tmp_path, PAIRS, bits, chunks, layout)
    array: Any = zarr.open_array(tmp_path, mode="r")
    assert array.dtype == PAIR
    np.testing.assert_array_equal(array[...].view("u1"), bits)
    assert array.fill_value == np.zeros(1, PAIR)[0]


def test_fill_values_of_pairs_are_bytes() -> None:
    data_type = data_type_registry.get(PAIRS)()
    formats: tuple[Literal[2, 3], ...] = (2, 3)
    for zarr_format in formats:
        for bits in range(256):
            scalar = data_type.from_json_scalar(f"0x{bits:02x}", zarr_format=zarr_format)
            assert np.array([scalar], PAIR).view("u1") == bits
            assert data_type.to_json_scalar(scalar, zarr_format=zarr_format) == f"0x{bits:02x}"
        for text in ("NaN", "Infinity", "0x", "0x1", "0x100", "1", ""):
            with pytest.raises(ValueError, match=PAIRS):
                data_type.from_json_scalar(text, zarr_format=zarr_format)
        for wrong in (0, 1.5, None, True, [1]):
            with pytest.raises(TypeError, match=PAIRS):
                data_type.from_json_scalar(wrong, zarr_format=zarr_format)  # type: ignore[arg-type]
    assert data_type_registry.get(PAIRS).from_native_dtype(PAIR) == data_type
    with pytest.raises(ValueError, match="float4_e2m1fn_x2"):  # a structured type too
        data_type_registry.match_dtype(PAIR)
    fields = np.dtype([("a", "u1")])
    assert data_type_registry.match_dtype(fields).to_native_dtype() == fields
    for other in (np.dtype([("float32", "u1")]), np.dtype("V1"), np.dtype("u1")):
        with pytest.raises(DataTypeValidationError):
            data_type_registry.get(PAIRS).from_native_dtype(other)


def test_registered_once_whatever_is_done_twice() -> None:
    before = {name: data_type_registry.get(name) for name in NAMES}
    zd.register()
    importlib.reload(zd)
    assert {name: data_type_registry.get(name) for name in NAMES} == before
    for name in NAMES:  # raises where two registered types claim one numpy type
        matched = data_type_registry.match_dtype(np.dtype(getattr(ml_dtypes, name)))
        assert type(matched) is before[name]


def test_big_endian_bfloat16_keeps_its_order_or_is_refused() -> None:
    native = np.dtype(ml_dtypes.bfloat16)
    big = zd.BFloat16.from_native_dtype(native.newbyteorder(">"))
    assert big.endianness == "big"
    assert big.to_native_dtype() == native.newbyteorder(">")
    assert zd.BFloat16.from_native_dtype(native).endianness == sys.byteorder
    with pytest.raises(ValueError, match="big-endian"):
        big.to_json(zarr_format=2)


def test_entry_points_are_installed() -> None:
    """Without them plain zarr finds nothing; an old editable install lacks them."""
    found = importlib.metadata.entry_points(group="zarr.data_type")
    assert {e.name: e.value for e in found if e.value.startswith("shardstore")} == {
        c._zarr_v3_name: f"shardstore.zarr_dtypes:{c.__name__}" for c in zd.DATA_TYPES
    }, "install the package again: its entry points are not those of pyproject.toml"
    found = importlib.metadata.entry_points(group="zarr.ndbuffer")
    (ndbuffer,) = [e.load() for e in found if e.value.startswith("shardstore")]
    assert ndbuffer is NDBuffer


# What follows runs in isolated processes (-I): they see only what is installed.


def write_group(root: Path, zarr_format: Any) -> None:
    """Arrays of every data type by TensorStore, and consolidated metadata."""
    zarr.create_group(root, zarr_format=zarr_format)
    for number, name in enumerate(NAMES):
        dtype = uint_of(name)
        bits = np.random.default_rng(number).integers(0, 1 << (8 * dtype.itemsize), (5, 3), dtype)
        np.save(root.parent / f"{name}.npy", bits)
        document = metadata(name, bits.shape, (2, 3), "plain" if zarr_format == 3 else "v2")
        dims = [f"{name}.0", f"{name}.1"]
        document |= {"dimension_names": dims} if zarr_format == 3 else {"fill_value": None}
        store = open_ts(root / name, zarr_format, document)
        store.write(bits.view(getattr(ml_dtypes, name))).result()
        if zarr_format == 2:
            (root / name / ".zattrs").write_text(json.dumps({"_ARRAY_DIMENSIONS": dims}))
    zarr.consolidate_metadata(root, zarr_format=zarr_format)


SAME_BITS = """
import json, sys
from pathlib import Path
import numpy as np
import zarr
def same(name, values):
    expected = np.load(root.parent / f"{name}.npy")
    values = np.ascontiguousarray(values)
    assert str(values.dtype) == name, (values.dtype, name)
    assert (values.view(expected.dtype) == expected).all(), name
names = sorted(p.stem for p in root.parent.glob("*.npy"))
"""
END = """
assert "torch" not in sys.modules
# The package itself and the limits that it sets for TensorStore, one small module.
plugin = {"shardstore", "shardstore.zarr_dtypes", "shardstore.storage",
    "shardstore.storage.stores", "shardstore.storage.stores.tensorstore_environment"}
more = {m for m in sys.modules if m.startswith("shardstore")} - plugin
assert not more, more
"""
BY_ZARR = """
group = zarr.open_group(root, mode="r", use_consolidated=CONSOLIDATED)
assert (group.metadata.consolidated_metadata is not None) == CONSOLIDATED
assert sorted(group.keys()) == names
assert sorted(name for name, _ in group.members()) == names
assert sorted(group.array_keys()) == names
if which == "newest":
    assert all(name in str(group.tree()) for name in names)
for name in names:
    same(name, group[name][...])
    same(name, np.concatenate([group[name][:2], group[name][2:]]))
    assert type(group[name].metadata.dtype).__module__ == "shardstore.zarr_dtypes"
"""
BY_XARRAY = """
import xarray
with xarray.open_zarr(root, chunks=None) as data:
    assert sorted(data.variables) == names
    for name in names:
        same(name, data[name].values)
        same(name, np.concatenate([data[name][:2].values, data[name][2:].values]))
"""
AN_ARRAY = "same('bfloat16', zarr.open_array(root / 'bfloat16', mode='r')[...])"
GROUPS = {
    "zarr, consolidated": BY_ZARR.replace("CONSOLIDATED", "True"),
    "zarr": BY_ZARR.replace("CONSOLIDATED", "False"),
    "zarr.open": "g = zarr.open(root, mode='r')\nsame(names[0], g[names[0]][:])",
    "an array first, the module imported": f"import shardstore.zarr_dtypes\n{AN_ARRAY}",
    "an array first": AN_ARRAY,
    "xarray": BY_XARRAY,
}
"""Programs that read a group."""
CREATED = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
CREATES = f"""
import ml_dtypes
group = zarr.create_group(root)
for name in {CREATED}:
    data = np.arange(24).reshape(4, 6).astype(getattr(ml_dtypes, name))
    array = group.create_array(name, shape=(4, 6), chunks=(3, 4), dtype=name)
    assert array.dtype == data.dtype
    array[...] = data
assert len(list(group.members())) == 3
"""


@pytest.fixture(scope="module", params=INTERPRETERS)
def others(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, str]]:
    """A folder, and the tracebacks of the programs that failed, by the kind of what they read.

    Nothing is imported before a program begins but zarr and xarray.
    """
    folder, which = tmp_path_factory.mktemp("others"), request.param
    programs = {"created": (folder / "created", CREATES)}
    for zarr_format in (2, 3):
        (root := folder / f"v{zarr_format}" / "group").parent.mkdir()
        write_group(root, zarr_format)
        programs |= {f"v{zarr_format}: {how}": (root, text) for how, text in GROUPS.items()}
    if which == "here":  # older releases look data types up only once a group was opened
        del programs["v2: an array first"], programs["v3: an array first"]
    texts = {
        name: f"root, which = __import__('pathlib').Path({str(root)!r}), {which!r}\n"
        f"{SAME_BITS}\n{text}\n{END}"
        for name, (root, text) in programs.items()
    }
    return folder, failures(which, "import numpy, xarray, zarr", texts)


def test_groups_are_read_with_nothing_imported(others: tuple[Path, dict[str, str]]) -> None:
    assert not [text for name, text in others[1].items() if name != "created"]


def test_plain_zarr_creates_them_in_a_group(others: tuple[Path, dict[str, str]]) -> None:
    """Written there by zarr alone, under the registered name, then read here by TensorStore."""
    folder, failed = others
    assert "created" not in failed
    for name in CREATED:
        data = np.arange(24).reshape(4, 6).astype(getattr(ml_dtypes, name))
        read = open_ts(folder / "created" / name, 3).read().result()
        np.testing.assert_array_equal(bits_of(read), bits_of(data))


@pytest.mark.parametrize("which", INTERPRETERS)
def test_zarr_finds_the_types_where_warnings_are_errors(which: str) -> None:
    """As in programs tested by pytest with ``filterwarnings = error``."""
    script = "import zarr, shardstore.zarr_dtypes as found; print(len(found.DATA_TYPES))"
    done = run_to_end([interpreter(which), "-W", "error", "-c", script], cwd=ROOT)
    assert (done.returncode, done.stdout.strip()) == (0, str(len(zd.DATA_TYPES))), done.stderr
