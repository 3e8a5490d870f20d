"""Values as JSON and back: every kind exactly, nothing that could run code."""

from __future__ import annotations

import argparse
import collections
import copy
import datetime
import decimal
import enum
import fractions
import io
import json
import math
import pathlib
import random
import sys
import types
import uuid
import zoneinfo
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shardstore.values.plain import NotPlainError, decode, encode
from tests.helpers.nested import exactly_same
from tests.helpers.processes import run_to_end

pytestmark = pytest.mark.filterwarnings("ignore")


def through_json(value: Any) -> Any:
    text = json.dumps(encode(value), allow_nan=False)
    text.encode("utf-8")
    return decode(json.loads(text))


hashable = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
    | st.dates()
    | st.timedeltas(),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
values = st.recursive(
    hashable
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters(codec=None), max_size=4)
    | st.datetimes(timezones=st.none() | st.just(datetime.UTC))
    | st.binary().map(bytearray),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(hashable | st.just("$type"), inner, max_size=3)
        | st.dictionaries(hashable, inner, max_size=3).map(collections.OrderedDict)
        | st.lists(inner, max_size=3).map(lambda items: collections.deque(items, maxlen=5))
        | st.dictionaries(st.text(), inner, max_size=3).map(
            lambda members: types.SimpleNamespace(**{f"a{k}": v for k, v in members.items()})
        )
    ),
    max_leaves=8,
)


@given(values)
def test_any_nesting_comes_back(value: Any) -> None:
    assert exactly_same(through_json(value), value)


@given(
    hnp.arrays(
        hnp.scalar_dtypes() | hnp.unicode_string_dtypes() | hnp.byte_string_dtypes(),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
    )
)
def test_arrays_of_numpy(array: np.ndarray[Any, Any]) -> None:
    found = through_json(array)
    assert type(found) is np.ndarray
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.tobytes() == array.tobytes()
    assert found.flags.writeable


DTYPES = [
    *(torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32),
    *(torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2fnuz),
    *(torch.float8_e8m0fnu, torch.float4_e2m1fn_x2),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
def test_tensors_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = math.prod(shape) * dtype.itemsize
    tensor = torch.tensor([(7 * i) % 2 for i in range(count)], dtype=torch.uint8)
    tensor = tensor.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    found = through_json((1, tensor))[1]
    assert type(found) is torch.Tensor
    assert exactly_same(found, tensor)
    assert not found.requires_grad


def test_tensors_with_strides_come_back() -> None:
    rows = torch.arange(12.0).reshape(3, 4)
    assert torch.equal(through_json(rows.t()), rows.t())
    assert torch.equal(through_json(rows[:, 1::2]), rows[:, 1::2])
    turned = torch.tensor([1 + 2j]).conj()
    assert torch.equal(through_json(turned), turned)
    assert torch.equal(through_json(turned.imag), turned.imag)
    leaf = torch.ones(2, requires_grad=True)
    assert through_json(leaf).requires_grad
    assert torch.equal(through_json(leaf * 3), torch.full((2,), 3.0))
    for frozen in (True, False):
        parameter = torch.nn.Parameter(torch.ones(2), requires_grad=not frozen)
        found = through_json(parameter)
        assert type(found) is torch.nn.Parameter
        assert found.requires_grad is not frozen
        assert torch.equal(found, parameter)


WEST = datetime.timezone(datetime.timedelta(hours=-5))

EXACT = {
    "numbers of NumPy": [np.float32(1.5), np.int8(-3), np.bool_(True), np.complex64(1j)],
    "text of NumPy": [np.str_("ab"), np.str_(""), np.bytes_(b"ab"), np.bytes_(b"")],
    "times of NumPy": [np.datetime64("2026-01-02T03:04:05"), np.timedelta64(5, "ns")],
    "not numbers": [math.nan, math.inf, -math.inf, -0.0],
    "large numbers": [2**200, -(2**70)],
    "data types": [torch.bfloat16, torch.device("cuda", 1), torch.Size([2, 3])],
    "range and slices": [range(1, 9, 3), slice(None), slice(1, None, -2)],
    "paths": [pathlib.Path("a") / "b", pathlib.PurePosixPath("/a"), pathlib.Path("\udc80")],
    "exact numbers": [decimal.Decimal("1.10"), decimal.Decimal("sNaN"), fractions.Fraction(1, 3)],
    "identifiers": [uuid.UUID(int=5)],
    "times of day": [datetime.time(3, 4, 5, 6, fold=1), datetime.time(3, tzinfo=datetime.UTC)],
    "data types of NumPy": [np.dtype("f2"), np.dtype(">i4"), np.dtype("U3")],
    "time": [datetime.datetime(2026, 1, 2, 3, tzinfo=WEST)],
    "random states": [random.Random(5).getstate(), np.random.RandomState(5).get_state()],
    "a generator's state": [np.random.default_rng(5).bit_generator.state],
    "surrogates": ["\ud800", {"\ud800": 1}],
    "namespaces": [argparse.Namespace(a=1, **{"$type": "tuple"})],
    "counters": [collections.Counter(a=2, b=-1), collections.Counter()],
    "defaults": [collections.defaultdict(list, a=[1]), collections.defaultdict(None, a=1)],
    "queues": [collections.deque([1, 2], maxlen=2), collections.deque()],
    "looks like a tag": [{"$type": "float", "value": "1"}],
}


@pytest.mark.parametrize("kind", EXACT)
def test_values_come_back_exactly(kind: str) -> None:
    for value in EXACT[kind]:
        found = through_json(value)
        assert exactly_same(found, value), found
        assert type(found) is type(value)


def test_details() -> None:
    found = through_json(collections.defaultdict(list))
    found["new"].append(1)
    assert found == {"new": [1]}
    assert through_json(collections.deque([1], maxlen=3)).maxlen == 3
    stream = io.BytesIO(b"abcdef")
    stream.seek(2)
    found = through_json(stream)
    assert found.read() == b"cdef"
    assert found.getvalue() == b"abcdef"
    # The one that was given is as it was, and can be written to and closed.
    assert stream.tell() == 2
    stream.write(b"more than it was")


class Opaque:
    """A class of somebody's own."""


class Flavor(enum.Enum):
    SOUR = 1


class Point(collections.namedtuple("Point", "x y")):
    pass


REFUSED: dict[str, tuple[Any, str]] = {
    "class": (Opaque(), "test_plain.Opaque"),
    "enum": (Flavor.SOUR, "Flavor"),
    "named tuple": (Point(1, 2), "Point"),
    "function": (print, "builtin_function_or_method"),
    "deep inside": ({"a": [{"b": (1, Opaque())}]}, "Opaque"),
    "array of objects": (np.array([None]), "dtype object"),
    "array of records": (np.zeros(2, [("a", "i4")]), "dtype"),
    "subclass of an array": (np.ma.zeros(2), "MaskedArray"),
    "data type of records": (np.dtype([("a", "i4")]), "dtype"),
    "time zone of a place": (
        datetime.datetime(2026, 1, 2, tzinfo=zoneinfo.ZoneInfo("UTC")),
        "datetime in the time zone UTC",
    ),
    "sparse": ((torch.eye(2).to_sparse(),), "sparse_coo"),
    "without memory": ((torch.ones(2, device="meta"),), "meta"),
    "own factory": (collections.defaultdict(lambda: 5), "lambda"),
    "own factory of a known name": (collections.defaultdict(type("list", (), {})), "list"),
    "subclass of a number": (type("Mine", (np.float64,), {})(1), "Mine"),
    "text that ends with a null": (np.str_("a\0"), "str_ that ends with a null"),
    "bytes that end with a null": ([np.bytes_(b"a\0")], "bytes_ that ends with a null"),
    "slice with text": ((slice(None, "b"),), "slice with text"),
    "offset of microseconds": (
        datetime.time(1, tzinfo=datetime.timezone(datetime.timedelta(microseconds=7))),
        "microseconds=7.* from UTC",
    ),
    "subclass of a dict": (type("Mine", (dict,), {})(a=1), "Mine"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_values_without_a_json_form_are_refused(what: str) -> None:
    value, named = REFUSED[what]
    with pytest.raises(NotPlainError, match=named):
        encode(value)


def test_a_value_inside_itself_is_refused() -> None:
    ring: list[Any] = []
    ring.append(ring)
    with pytest.raises(NotPlainError, match="nested deeper"):
        encode(ring)


MALFORMED = [
    {"$type": "os.system", "value": "true"},
    {"$type": "ndarray", "value": ["|O", [1], "AAAAAAAAAAA="]},
    {"$type": "ndarray", "value": ["<f4", [2], "AAAA"]},
    {"$type": "Tensor", "value": ["float32", [2], "AAAA", False]},
    {"$type": "Tensor", "value": ["nn", [], "", False]},
    {"$type": "Tensor", "value": ["float32", [-1], "", False]},
    {"$type": "defaultdict", "value": ["eval", []]},
    {"$type": "BytesIO", "value": ["AAAA", -1]},
    {"$type": "BytesIO", "value": 5},
    {"$type": "datetime", "value": ["tomorrow", 0]},
    {"$type": "timedelta", "value": [10**12, 0, 0]},
    {"$type": "Fraction", "value": [1, 0]},
    {"$type": "Fraction", "value": ["1e999999999"]},
    {"$type": ["tuple"], "value": []},
    {"$type": "Decimal", "value": "one"},
    {"$type": "range", "value": [1, 2, 0]},
    {"$type": "tuple"},
    {"$type": "numpy.dtype", "value": "|O"},
    *(
        {"$type": name, "value": value}
        for endless in [{"$type": "range", "value": [0, 10**15, 1]}]
        for name, value in (
            ("tuple", endless),
            ("set", endless),
            ("Size", endless),
            ("deque", [endless, 1]),
            ("ndarray", ["<f4", endless, ""]),
            ("Tensor", ["float32", endless, "", False]),
        )
    ),
]


@pytest.mark.parametrize("document", MALFORMED, ids=str)
def test_malformed_documents_are_refused(document: Any) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        decode(copy.deepcopy(document))
    assert isinstance(caught.value, ValueError)


def test_torch_is_not_imported_unless_it_must() -> None:
    program = (
        "import sys, numpy as np; from shardstore.values.plain import encode, decode;"
        "decode(encode({'a': np.ones(2), 'b': (1, 2.5, b'x')})); print('torch' in sys.modules)"
    )
    out = run_to_end([sys.executable, "-c", program], check=True)
    assert out.stdout.strip() == "False"
