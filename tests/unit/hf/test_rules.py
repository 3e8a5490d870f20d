"""Each rule, against what torch makes of whole tensors, for any box."""

from __future__ import annotations

import itertools
import math
import re
from functools import partial
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardstore.errors import (
    ArgumentError,
    DTypeMismatchError,
    MissingKeyError,
    ShapeMismatchError,
)
from shardstore.hf.rules import Rule, Sources, concat, index, part, stack, transposed
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import array_of_one_chunk
from shardstore.storage.format.grid import Box

STORED = {
    **{f"layers.0.experts.{e}.{n}": (6, 4) for e in range(5) for n in ("gate", "up")},
    "layers.0.qkv": (24, 4),
    "layers.0.q": (16, 4),
    "layers.0.k": (4, 4),
    "layers.0.v": (4, 4),
    "layers.0.fused": (5, 12, 4),
}
SHORT: dict[str, tuple[int, ...]] = {"bias": (8,), "scalar": ()}
WHOLE: dict[str, torch.Tensor] = {}
for _key, _shape in STORED.items():
    _start = sum(t.numel() for t in WHOLE.values())
    WHOLE[_key] = torch.arange(_start, _start + math.prod(_shape)).reshape(_shape).float()


def of(name: str) -> torch.Tensor:
    return WHOLE[f"layers.0.{name}"]


def experts(name: str) -> torch.Tensor:
    return torch.stack([of(f"experts.{e}.{name}") for e in range(5)])


def grouped() -> torch.Tensor:
    """Fused QKV with two groups: two thirds of a group are queries."""
    parts = [of(name).chunk(2) for name in "qkv"]
    return torch.cat([parts[n][g] for g in range(2) for n in range(3)])


E, L = "layers.{l}.experts.{e}", "layers.{l}"
CASES: dict[str, tuple[Rule, torch.Tensor]] = {
    "name": (f"{L}.q", of("q")),
    "stack": (stack(f"{E}.gate", "e"), experts("gate")),
    "stack over a field of the key": (stack(f"{L}.q", "l"), of("q")[None]),
    "stack of concat": (
        stack(concat(f"{E}.gate", f"{E}.up"), over="e"),
        torch.cat([experts("gate"), experts("up")], 1),
    ),
    "stack of interleaved rows": (
        stack(concat(f"{E}.gate", f"{E}.up", groups=6), over="e"),
        torch.stack([experts("gate"), experts("up")], 2).reshape(5, 12, 4),
    ),
    "transposed stack": (transposed(stack(f"{E}.up", "e")), experts("up").mT),
    "concat of columns": (concat(f"{L}.k", f"{L}.v", axis=-1), torch.cat([of("k"), of("v")], 1)),
    "fused": (concat(f"{L}.q", f"{L}.k", f"{L}.v", groups=2), grouped()),
    "part": (part(f"{L}.qkv", 1, (4, 1, 1)), of("qkv")[16:20]),
    "part of groups": (
        part(f"{L}.qkv", 2, (4, 1, 1), groups=2),
        of("qkv").reshape(2, 12, 4)[:, 10:].reshape(4, 4),
    ),
    "index": (index(f"{L}.fused", "{l}"), of("fused")[0]),
    "part of index": (part(index(f"{L}.fused", 3), 1, (1, 1)), of("fused")[3, 6:]),
    "row-interleaved part": (
        part(f"{L}.fused", 1, (1, 1), axis=1, groups=6),
        of("fused")[:, 1::2],
    ),
    "fused of parts is the fused tensor": (
        concat(*(part(f"{L}.qkv", n, (4, 1, 1), groups=2) for n in range(3)), groups=2),
        of("qkv"),
    ),
}
SOURCES = Sources(
    {key: array_of_one_chunk(key, shape, "float32") for key, shape in STORED.items()},
    "place",
    {f"{name}.{{l}}": rule for name, (rule, _) in CASES.items()},
    {},
    (128, 128),
)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[str, Box]:
    name = draw(st.sampled_from(sorted(CASES)))
    edges = [
        sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in CASES[name][1].shape
    ]
    return name, Box(tuple(a for a, _ in edges), tuple(b - a for a, b in edges))


def filled(box: Box, name: str, out: Any) -> int:
    """Copy the regions; return the number of their elements."""
    count = 0
    for array, inner, target in SOURCES.of(f"{name}.0", torch.float32).regions(box, out):
        values = WHOLE[array.key][inner.slices]
        assert tuple(target.shape) == inner.shape
        as_tensor = target if isinstance(target, torch.Tensor) else dtypes.as_tensor(target)
        as_tensor.copy_(values)
        count += values.numel()
    return count


@given(boxes())
def test_any_box_of_any_rule(case: tuple[str, Box]) -> None:
    """Each element is read once."""
    name, box = case
    want = CASES[name][1][box.slices]
    for as_numpy in (True, False):
        out = torch.full(box.shape, -1.0)
        assert filled(box, name, out.numpy() if as_numpy else out) == want.numel()
        assert torch.equal(out, want)


@pytest.mark.parametrize("name", CASES)
def test_shapes_and_keys(name: str) -> None:
    source = SOURCES.of(f"{name}.0", torch.float32)
    assert source.shape == tuple(CASES[name][1].shape)
    assert source.keys <= set(STORED)


def made(rule: Rule, **more: tuple[int, ...]) -> Any:
    arrays = {
        **SOURCES.arrays,
        **{key: array_of_one_chunk(key, shape, "float16") for key, shape in more.items()},
    }
    return Sources(arrays, "place", {"t": rule}, {}, None).of("t", torch.float32)


def test_what_rules_refuse() -> None:
    with pytest.raises(MissingKeyError, match=r"'layers\.0\.x' is not stored in place"):
        made(concat("layers.0.q", "layers.0.x"))
    with pytest.raises(MissingKeyError, match=r"x\.0"):
        made(stack("x.{e}", "e"))
    with pytest.raises(MissingKeyError, match=r"fused\[5\]"):
        made(index("layers.0.fused", 5))
    with pytest.raises(MissingKeyError, match=r"fused\[-1\]"):
        made(index("layers.0.fused", -1))
    for rule in ("layers.{layer}.q", index("layers.0.fused", "{layer}")):
        with pytest.raises(ArgumentError, match=r"field 'layer'"):
            made(rule)
    for rule in ("layers.0.q", concat("layers.0.q", index("layers.0.fused", 1))):
        with pytest.raises(ArgumentError, match=r"over='e'.*never end.*the field \{e\}"):
            made(stack(rule, over="e"))
    with pytest.raises(ArgumentError, match=r"gives 'x' in a rule"):
        made(index("layers.0.fused", "x"))
    with pytest.raises(ShapeMismatchError, match=r"\(24, 4\).*24 elements are not 7 equal parts"):
        made(part("layers.0.qkv", 0, (3, 2, 2)))
    with pytest.raises(ShapeMismatchError, match="do not fit together along axis 1"):
        made(concat("layers.0.q", "layers.0.k", axis=1))
    with pytest.raises(DTypeMismatchError, match="float16"):
        made(concat("layers.0.q", "half"), half=(16, 4))


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (lambda: transposed("bias"), r"'bias' has shape \(8,\), and transposed .* axis -2"),
        (lambda: transposed("scalar"), r"'scalar' has shape \(\), and transposed .* axis -2"),
        (lambda: index("scalar", 0), r"'scalar' has shape \(\), and index .* axis 0"),
        (lambda: concat("scalar", "scalar"), r"'scalar' has shape \(\), and concat .* axis 0"),
        (lambda: concat("bias", "layers.0.q"), r"do not fit together"),
        (lambda: concat("layers.0.q", "bias", axis=1), r"'bias' has shape \(8,\), and concat"),
        (lambda: concat("layers.0.q", axis=5), r"'layers\.0\.q' .*\(16, 4\), and concat .* axis 5"),
        (lambda: concat("bias", axis=-2), r"'bias' has shape \(8,\), and concat .* axis -2"),
        (lambda: part("bias", 0, (1, 1), axis=1), r"'bias' has shape \(8,\), and part .* axis 1"),
    ],
)
def test_an_axis_that_a_tensor_lacks_is_named(rule: Any, text: str) -> None:
    """Such as a template for matrices that matches their biases too."""
    more = {key: array_of_one_chunk(key, n, "float32") for key, n in SHORT.items()}
    with pytest.raises(ShapeMismatchError, match=text):
        Sources({**SOURCES.arrays, **more}, "place", {"t": rule()}, {}, None).of("t", torch.int8)


def test_rules_that_fit_no_tensor() -> None:
    with pytest.raises(ArgumentError, match=r"concat\(\) has no parts"):
        concat()
    for number, sizes in ((2, (1, 2)), (-3, (1, 2)), (1, (-1, 3)), (0, ()), (0, cast(Any, 4))):
        with pytest.raises(ArgumentError, match=re.escape(f"part('w', {number}, {sizes})")):
            part("w", number, sizes)
    for template in ("a.{l}.{l}", "a.{0}", "a.{1x}"):
        with pytest.raises(ArgumentError, match=re.escape(repr(template))):
            Sources(SOURCES.arrays, "place", {template: "x"}, {}, None).of("a.0.0", torch.int8)


@pytest.mark.parametrize("wrong", ["0", 0.0, None, [0]])
def test_numbers_of_other_types_are_named(wrong: Any) -> None:
    text = re.escape(f"={wrong!r}")
    for name in ("axis", "groups"):
        for rule in (concat, partial(part, number=0, sizes=(1, 1))):
            with pytest.raises(ArgumentError, match=name + text):
                rule("w", **{name: wrong})
    with pytest.raises(ArgumentError, match=f"number{text}"):
        part("w", wrong, (1, 1))
    with pytest.raises(ArgumentError, match=f"size .*{text}"):
        part("w", 0, (1, wrong))


def test_fewer_than_one_group_is_refused() -> None:
    for rule, groups in itertools.product((concat, partial(part, number=0, sizes=(1,))), (0, -1)):
        with pytest.raises(ArgumentError, match=f"groups={groups} must be .* at least 1"):
            rule("w", groups=groups)


@pytest.mark.parametrize("wrap", [str, transposed, partial(index, at=0), partial(stack, over="e")])
def test_templates_that_are_none_are_named(wrap: Any) -> None:
    for field in ("{l.x}", "{l[x]}", "{l:d}", "{", "{}", "{0}", "{x}"):
        with pytest.raises(ArgumentError, match=re.escape(f"the template {field!r}")):
            SOURCES.made(wrap(field), {"": "float32", "l": "0"})


@pytest.mark.parametrize("wrong", [None, 3, ["layers.0.q"]])
@pytest.mark.parametrize(
    "wrap",
    [lambda x: x, transposed, partial(concat, "layers.0.q"), lambda x: part(x, 0, (1,)),
     lambda x: index(x, 0), lambda x: stack(x, "e")],
)  # fmt: skip
def test_what_is_no_rule_is_named(wrap: Any, wrong: Any) -> None:
    with pytest.raises(ArgumentError, match=re.escape(f"{wrong!r} in a rule is neither")):
        made(wrap(wrong))


def test_the_first_rule_that_matches_counts() -> None:
    for first, second in itertools.permutations(["layers.0.q", "layers.0.k"]):
        rules = {"{x}.t": first, "a.{y}": second}
        source = Sources(SOURCES.arrays, "place", rules, {}, None).of("a.t", torch.float32)
        assert source.keys == {first}
