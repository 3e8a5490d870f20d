"""Pickled values reach no memory but their own, and cost no more than they weigh."""

from __future__ import annotations

import codecs
import collections
import decimal
import enum
import fractions
import io
import os
import pickle
import random
import resource
import signal
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardstore
from shardstore.dcp.files import DcpFiles
from shardstore.errors import CheckpointingException, DamagedCheckpointError, UnsafeObjectError
from shardstore.storage.stores.location import Location
from shardstore.values.torch_dump import dump_bytes
from shardstore.values.torch_values import load_bytes
from tests.helpers.deaths import alone
from tests.helpers.nested import exactly_same

LIMIT_BYTES = 256 << 20


class Color(enum.Enum):
    RED = 1
    Holder = 2  # has the name of a class of this module


class Holder:
    class Inner:
        pass


class Call:
    """Pickles as a call: whatever a hostile file asks for."""

    def __init__(self, function: Any, *args: Any, state: Any = None) -> None:
        self.reduced = (function, args) if state is None else (function, args, state)

    def __reduce__(self) -> Any:
        return self.reduced


def archive(pickled: bytes, records: dict[str, bytes] | None = None, method: int = 0) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method, compresslevel=1) as file:
        for name, data in {"data.pkl": pickled, "version": b"3\n", **(records or {})}.items():
            file.writestr(f"archive/{name}", data)
    return out.getvalue()


def storage(count: int) -> bytes:
    """The opcodes of a storage of so many elements."""
    number = b"J" + count.to_bytes(4, "little")
    kind = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
    return kind + b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpu" + number + b"tQ"


def tensor(count: int, shape: int, records: dict[str, bytes]) -> bytes:
    """A file of a tensor that claims a size and a shape."""
    size = b"J" + shape.to_bytes(4, "little")
    rebuild = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n("
    return archive(rebuild + storage(count) + b"K\x00" + size + b"\x85K\x01\x85\x89}tR.", records)


def _array(dtype: Any, shape: Any, data: Any) -> Call:
    reconstruct = np.arange(1).__reduce__()[0]
    return Call(reconstruct, np.ndarray, (0,), b"b", state=(1, shape, dtype, False, data))


HOSTILE: dict[str, Any] = {
    "list of a range": Call(list, range(10**9)),
    "set of a range": Call(set, range(10**9)),
    "frozenset of a range": Call(frozenset, range(10**9)),
    "deque of a range": Call(collections.deque, range(10**9)),
    "size of a range": Call(torch.Size, range(10**9)),
    "fraction of a decimal": Call(fractions.Fraction, decimal.Decimal("1e100000000")),
    "fraction of a text": Call(fractions.Fraction, "1e100000000"),
    "bytearray": Call(bytearray, 4 << 30),
    "bytes": Call(bytes, 4 << 30),
    "tensor": Call(torch.Tensor, 1 << 30),
    "storage": Call(torch.storage.UntypedStorage, 4 << 30),
    "void": Call(np.float32(0).__reduce__()[0], np.dtype("V999999999"), b""),
    "array": Call(np.ndarray, (1 << 29,)),
    "array without its bytes": _array(np.dtype("f8"), (1 << 29,), b"x" * 8),
    "array of negative shape": _array(np.dtype("f8"), (-1,), b"x" * 8),
    "array of objects": _array(np.dtype("O"), (1,), b"x" * 8),
    "array upon another": _array(np.dtype("f8"), (1,), np.frombuffer(b"x" * 8, np.uint8)),
    "array of a list": _array(np.dtype("f8"), (1,), [1]),
    "data type of any state": Call(
        np.dtype, "f8", False, True, state=(3, "|", ("f4", (9,)), ("a",), {}, 999, 1, 63)
    ),
    "data type that is never filled": Call(np.dtype, "f8", False, True),
    "memo": archive(b"\x80\x02]r\xff\xff\xff\x7f."),
    "buffer": archive(b"\x80\x05\x96" + (4 << 30).to_bytes(8, "little") + b"."),
    "long bytes": archive(b"\x80\x04\x8e" + (4 << 30).to_bytes(8, "little") + b"."),
    "compressed": lambda: archive(
        b"\x80\x02X" + (300 << 20).to_bytes(4, "little") + bytes(300 << 20) + b".", None, 8
    ),
    "larger than its storage": tensor(4, 1 << 30, {"data/0": bytes(16)}),
    "larger than an empty storage": tensor(0, 1 << 30, {"data/0": b""}),
    "larger than its record": tensor(1 << 30, 1 << 30, {"data/0": bytes(16)}),
    "items into a tensor": archive(
        b"\x80\x02(ctorch._utils\n_rebuild_tensor_v2\n("
        + storage(1)
        + (b"K\x00J\xff\xff\xff\x7f\x85K\x00\x85\x89}tRK\x00K\x01st."),
        {"data/0": bytes(4)},
    ),
    "attribute of a value": Call(getattr, decimal.Decimal, "from_float"),
    "state of a function": archive(b"\x80\x02c_codecs\nencode\n}b."),
    "call of a class by an old opcode": archive(b"\x80\x02(J\xff\xff\xff\x7fitorch\nTensor\n."),
}
"""What costs more than it weighs, or writes where it should not."""


HOSTILE_OF_DCP = {
    "memo of DCP": b"\x80\x02]r\xff\xff\xff\x0f.",
    "array of DCP": b"\x80\x05\x96" + bytes(4) + b"\x01\0\0\0.",
}
"""Bytes that make the unpickler in C allocate gigabytes, as the metadata of PyTorch DCP."""


def refused_in(folder: str) -> list[str]:
    """Names of the files in a folder that are refused, in a process that takes little memory."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = []
    for path in sorted(Path(folder).iterdir()):
        print("loading", path.name, flush=True)
        try:
            if path.name in HOSTILE_OF_DCP:
                DcpFiles.parse(Location.of(folder), path.read_bytes())
            else:
                load_bytes(path.read_bytes(), str(path))
        except CheckpointingException:
            refused.append(path.name)
        more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used
        assert more < LIMIT_BYTES / 1024, (path.name, more)
    return refused


def test_hostile_files_are_refused_and_cost_nothing(tmp_path: Path) -> None:
    for name, value in HOSTILE.items():
        made = value() if callable(value) else value
        data = made if isinstance(made, bytes) else dump_bytes(made)
        (tmp_path / name).write_bytes(data)
    for name, data in HOSTILE_OF_DCP.items():
        (tmp_path / name).write_bytes(data)
    refused = alone(refused_in, str(tmp_path))
    # These load, at no cost: as an empty list, and as the data type without more.
    assert {*refused} == {*HOSTILE, *HOSTILE_OF_DCP} - {"memo", "data type of any state"}


def test_no_class_with_a_state_setter_is_called() -> None:
    """An array whose buffer is another's, which is set anew and freed while the array looks at it:
    what the raw setters of NumPy let a file do."""
    first = _array(np.dtype("f8"), (64,), bytes(512))
    view = _array(np.dtype("f8"), (64,), first)
    for value in (view, [first, view, first]):
        with pytest.raises(DamagedCheckpointError, match="NumPy array"):
            load_bytes(dump_bytes(value), "/place/common.pt")
    # The state of an array that is there already.
    filled = pickle.dumps(np.arange(4.0), protocol=2)
    again = filled[:-1] + b"(K\x01K\x04\x85h\x00K\x00Nt" + b"b."
    with pytest.raises(CheckpointingException):
        load_bytes(archive(again), "/place/common.pt")


class Held:
    """A class of the program's."""

    def __init__(self, value: int) -> None:
        self.value = value


class Items(list[int]):
    """Another one, which has to be filled."""


def named(module: str, name: str) -> bytes:
    """A file that has a global by its name."""
    return archive(f"\x80\x02c{module}\n{name}\n.".encode("latin-1"))


# Python 3.11.0 to 3.11.3 store members of enumerations as a call of getattr, or by their name in
# the module (signals).
CALLED = Call(getattr, Color, "RED")
# As protocol 2 stores a class in a class.
INNER = Call(getattr, Holder, "Inner")
PROGRAMS = {"held": Held(3), "items": Items([1, 2])}


def test_what_the_program_allows_is_loaded() -> None:
    with torch.serialization.safe_globals([Color, signal.Signals]):
        assert load_bytes(dump_bytes(CALLED), "/place/common.pt") is Color.RED
        assert load_bytes(named("signal", "SIGTERM"), "/place/common.pt") is signal.SIGTERM
    with torch.serialization.safe_globals([Holder, Holder.Inner, getattr]):
        assert load_bytes(dump_bytes(INNER), "/place/common.pt") is Holder.Inner
    with torch.serialization.safe_globals([Held, Items]):
        found = load_bytes(dump_bytes(PROGRAMS), "/place/common.pt")
    assert found["held"].value == 3
    assert (type(found["items"]), found["items"]) == (Items, [1, 2])


@pytest.mark.parametrize(
    ("data", "allowed", "says"),
    [
        (CALLED, [], "Color"),
        (Call(getattr, Color, "__init_subclass__"), [Color], "a call of getattr for '__init_subc"),
        (named("signal", "SIGTERM"), [], "SIGTERM"),
        (named("signal", "SIG_DFL"), [signal.Signals], "SIG_DFL"),  # of another enumeration
        (named(__name__, "Holder"), [Color], "Holder"),  # which is the name of a member
        (INNER, [Holder, Holder.Inner], "add_safe_globals"),
        (PROGRAMS, [], r"add_safe_globals.*pickled_values\.Held"),
        (Call(os.mkdir, "never"), [os.mkdir], "mkdir"),
    ],
)
def test_what_the_program_does_not_allow_is_refused(
    data: Any, allowed: list[Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stored = data if isinstance(data, bytes) else dump_bytes(data)
    with torch.serialization.safe_globals(allowed), pytest.raises(UnsafeObjectError, match=says):
        load_bytes(stored, "/place/common.pt")
    assert not any(tmp_path.iterdir())


def test_a_file_does_not_change_a_member_of_the_process() -> None:
    changing = dump_bytes(Call(Color, 1, state={"_value_": 99}))
    with (
        torch.serialization.safe_globals([Color]),
        pytest.raises(DamagedCheckpointError, match="a state"),
    ):
        load_bytes(changing, "/place/common.pt")
    assert Color.RED.value == 1


VALUES: dict[str, list[Any]] = {
    "arrays": [np.arange(6, dtype=code).reshape(2, 3) for code in "bhilqBHILQefdFD"],
    "odd arrays": [
        np.arange(3, dtype=">f4"),
        np.asfortranarray(np.ones((2, 3))),
        np.array([True, False]),
        np.zeros((0, 3)),
        np.array(1.5),
    ],
    "one twice": [np.dtype("f4"), np.ones(2, "f4"), np.float32(3)],
    "random states": [np.random.RandomState(3).get_state(), random.getstate()],
    "bytes": [b"", b"\x00\xff", bytearray(), bytearray(b"xy"), 2**3000, -(2**70)],
    "torch": [torch.float32, torch.bfloat16, torch.strided],
}


@pytest.mark.parametrize("name", VALUES)
def test_harmless_values_load(name: str) -> None:
    found = load_bytes(dump_bytes(VALUES[name]), "/place/common.pt")
    assert exactly_same(found, VALUES[name])
    for one, other in zip(VALUES[name], found, strict=True):
        if isinstance(one, np.ndarray):
            assert other.flags.f_contiguous == one.flags.f_contiguous
            assert other.flags.writeable


def test_files_with_the_names_of_numpy_1_load() -> None:
    """As Megatron-Core and version 0.1.0 wrote them."""
    value = [np.arange(3.0), np.float32(2)]
    pickled = pickle.dumps(value, protocol=2)
    assert b"numpy._core" in pickled
    old = pickled.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    for text in (pickled, old):
        assert exactly_same(value, load_bytes(archive(text), "/place/common.pt"))


def test_a_factory_that_is_a_function_is_damage() -> None:
    data = archive(b"\x80\x02ccollections\ndefaultdict\nc_codecs\nencode\n\x85R.")
    with pytest.raises(DamagedCheckpointError, match="defaultdict"):
        load_bytes(data, "/place/common.pt")


class Holding:
    """A class that holds any value."""

    def __init__(self, value: Any) -> None:
        self.value = value


class OwnOptimizer(torch.optim.SGD):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("a file called it")


@pytest.mark.parametrize("kind", [torch.optim.AdamW, OwnOptimizer])
def test_classes_of_optimizers_are_values_that_no_file_calls(kind: Any, tmp_path: Path) -> None:
    """Megatron-Core's offloaded optimizer has the classes of its parts in its groups."""
    weight = torch.nn.Parameter(torch.ones(2))
    groups = torch.optim.Optimizer([weight], {"lr": 0.1, "cpu_optimizer_cls": kind}).param_groups
    kept = {name: value for name, value in groups[0].items() if name != "params"}
    for state in ({"param_groups": [kept]}, {"kind": kind}):
        shardstore.save(state, tmp_path / "c", overwrite=True)
        assert shardstore.load({}, tmp_path / "c") == state
    named = f"c{kind.__module__}\n{kind.__name__}\n".encode()
    for call in (pickle.REDUCE, pickle.NEWOBJ):
        with pytest.raises(CheckpointingException, match="a call"):
            load_bytes(archive(b"\x80\x02" + named + b"]\x85" + call + b"."), "/place/common.pt")


@pytest.mark.parametrize(
    ("held", "name"),
    [
        (getattr, "builtins.getattr"),
        (codecs.encode, "_codecs.encode"),
        (np.arange(1).__reduce__()[0], "_reconstruct"),
        (torch._utils._rebuild_tensor_v2, "_rebuild_tensor_v2"),
        (torch.FloatStorage, "torch.FloatStorage"),
    ],
)
def test_a_value_is_no_function_that_takes_the_place_of_its_name(held: Any, name: str) -> None:
    """Functions of ours take the place of these names if a file calls them."""
    for value in (Holding(held), [(held,), torch.ones(2), np.ones(2)], {"key": {held}}):
        with (
            torch.serialization.safe_globals([Holding]),
            pytest.raises(UnsafeObjectError, match=rf"needs \S*{name} as a value"),
        ):
            load_bytes(dump_bytes(value), "/place/common.pt")


def test_a_save_refuses_a_value_that_is_such_a_function(tmp_path: Path) -> None:
    with (
        torch.serialization.safe_globals([Holding]),
        pytest.raises(CheckpointingException, match=r"'args\.hook'.*builtins\.getattr as a value"),
    ):
        shardstore.save({"args": {"hook": Holding(getattr)}}, tmp_path / "c")


def test_metadata_of_dcp_still_loads(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "d", no_dist=True)
    assert list(DcpFiles.open(Location.of(tmp_path / "d")).arrays) == ["w"]
