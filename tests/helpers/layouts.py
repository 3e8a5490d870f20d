"""Random tensors and random ways to cut them over ranks, for round trips.

Everything is drawn from a ``random.Random``: hypothesis hands one in, spawned ranks seed their own
and all get the same. Knows the public types and NumPy, nothing of how anything is stored.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardstore.mapping import ShardedTensor

DTYPES = (
    *(torch.bool, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    *(torch.complex64, torch.complex128),
)

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A part of a global tensor as one rank holds it: a box, or a flat range of that box."""

    rank: int
    offset: Shape
    shape: Shape
    flat: tuple[int, int] | None
    replica_id: int | tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """All pieces of a global tensor."""

    pieces: tuple[Piece, ...]
    fragments: Shape | None
    prepended: int


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The bits of a tensor in C order: NaNs and negative zeros count as what they are."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.view(tensor.shape).copy_(tensor.detach())
    return flat.view(torch.uint8).numpy().tobytes()


def random_tensor(shape: Sequence[int], dtype: torch.dtype, rng: random.Random) -> torch.Tensor:
    """Any bit patterns, but for bool."""
    count = math.prod(shape)
    data = bytearray(rng.randbytes(count * dtype.itemsize))
    if dtype == torch.bool:
        data = bytearray(b & 1 for b in data)
    if not count:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(tuple(shape))


def random_shape(rng: random.Random, *, max_axes: int = 4, max_elements: int = 3000) -> Shape:
    """From 0-d to 4-d, with empty and unit axes and lengths rich in divisors among them."""
    lengths = (0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 16, 18, 24, 30, 36)
    shape = tuple(rng.choice(lengths) for _ in range(rng.randint(0, max_axes)))
    while math.prod(shape) > max_elements:
        longest = shape.index(max(shape))
        shape = (*shape[:longest], shape[longest] // 2, *shape[longest + 1 :])
    return shape


def random_layout(
    shape: Shape,
    world_size: int,
    rng: random.Random,
    *,
    flat: bool | None = None,
    kind: str | None = None,
) -> Layout:
    """Cut a tensor in a random way and give each part one main holder and perhaps replicas."""
    kind = kind or rng.choice(["regular", "regular", "chunk", "any", "tree"])
    prepended = 0 if kind == "tree" else rng.choice([0, 0, 0, 1, 2])
    prepended = min(prepended, len(shape))
    if any(n == 0 for n in shape[:prepended]):
        prepended = 0
    fragments: Shape | None = None
    if kind == "regular":
        fragments = tuple(
            n if axis < prepended else _divisor(n, rng) for axis, n in enumerate(shape)
        )
        cuts = [_even(n, n // f if f else 0, f) for n, f in zip(shape, fragments, strict=True)]
    elif kind == "chunk":
        # As torch.chunk and DTensor cut: ceil(n / parts) each, the last ones smaller or empty.
        cuts = []
        for n in shape:
            parts = rng.choice([1, 1, 2, 3, 5])
            cuts.append(_even(n, -(-n // parts), parts))
    else:
        cuts = [_arbitrary(n, rng) for n in shape]
    for axis in range(prepended):
        cuts[axis] = [(i, 1) for i in range(shape[axis])]
    boxes: list[tuple[Shape, Shape]] = [
        (tuple(o for o, _ in cell), tuple(n for _, n in cell)) for cell in itertools.product(*cuts)
    ]
    if kind == "tree":
        boxes = _tree((0,) * len(shape), shape, rng, 3)
    flat = rng.random() < 0.4 if flat is None else flat
    # Shards with an empty flat range are not saved at all, so that nothing would be left here.
    flat = flat and math.prod(shape) > 0
    pieces = []
    for offset, size in boxes:
        ranges: list[tuple[int, int] | None] = [None]
        if flat:
            ranges = list(_ranges(math.prod(size), rng))
        # Either a plain number or a tuple, as trainers with several kinds of parallelism give.
        for bounds in ranges:
            main = (0, 0) if rng.random() < 0.3 else 0
            pieces.append(Piece(rng.randrange(world_size), offset, size, bounds, main))
            if rng.random() < 0.3:
                copy = (0, 1) if isinstance(main, tuple) else 1
                pieces.append(Piece(rng.randrange(world_size), offset, size, bounds, copy))
    rng.shuffle(pieces)
    return Layout(tuple(pieces), fragments, prepended)


def expected_part(whole: torch.Tensor, piece: Piece, prepended: int) -> torch.Tensor:
    """What a piece holds of the whole tensor, as a tensor of its own."""
    box = whole[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))]
    if piece.flat is not None:
        return box.reshape(-1)[piece.flat[0] : piece.flat[1]].clone()
    return box.reshape(piece.shape[prepended:]).clone()


def sharded(
    key: str, whole: torch.Tensor, layout: Layout, piece: Piece, data: torch.Tensor | None
) -> ShardedTensor:
    """A piece as the public type describes it."""
    return ShardedTensor(
        key,
        data,
        whole.dtype,
        piece.shape[layout.prepended :],
        tuple(whole.shape),
        piece.offset,
        layout.fragments,
        piece.replica_id,
        layout.prepended,
        False,
        None if piece.flat is None else slice(*piece.flat),
    )


def strided(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """The same values, contiguous or in memory of other strides."""
    way = rng.choice(["as it is", "as it is", "reversed", "every second"])
    if way == "as it is" or tensor.ndim == 0:
        return tensor.clone()
    if way == "reversed":
        axes = tuple(reversed(range(tensor.ndim)))
        return tensor.permute(axes).contiguous().permute(axes)
    wide = torch.empty((*tensor.shape[:-1], 2 * tensor.shape[-1]), dtype=tensor.dtype)
    wide[..., ::2].copy_(tensor)
    return wide[..., ::2]


def destination(
    piece: Piece, layout: Layout, dtype: torch.dtype, rng: random.Random
) -> torch.Tensor | None:
    """What to load into: nothing, or a tensor of the right shape that holds something else."""
    if rng.random() < 0.4:
        return None
    shape = piece.shape[layout.prepended :]
    if piece.flat is not None:
        shape = (piece.flat[1] - piece.flat[0],)
    return strided(random_tensor(shape, dtype, rng), rng)


def _divisor(n: int, rng: random.Random) -> int:
    if n == 0:
        return rng.choice([1, 2])
    return rng.choice([d for d in range(1, n + 1) if n % d == 0 and d <= 8])


def _even(n: int, length: int, parts: int) -> list[tuple[int, int]]:
    starts = [min(i * length, n) for i in range(parts)]
    return [(start, min(length, n - start)) for start in starts]


def _arbitrary(n: int, rng: random.Random) -> list[tuple[int, int]]:
    inner = sorted(rng.randint(0, n) for _ in range(rng.choice([0, 1, 1, 2, 3])))
    edges = [0, *inner, n]
    return [(a, b - a) for a, b in itertools.pairwise(edges)]


def _tree(offset: Shape, shape: Shape, rng: random.Random, depth: int) -> list[tuple[Shape, Shape]]:
    """Cut in two, and each part again on its own: no grid of shards is left."""
    long = [axis for axis, n in enumerate(shape) if n > 1]
    if not depth or not long or rng.random() < 0.2:
        return [(offset, shape)]
    axis = rng.choice(long)
    at = rng.randint(1, shape[axis] - 1)
    first = (*shape[:axis], at, *shape[axis + 1 :])
    second = (*shape[:axis], shape[axis] - at, *shape[axis + 1 :])
    moved = (*offset[:axis], offset[axis] + at, *offset[axis + 1 :])
    return _tree(offset, first, rng, depth - 1) + _tree(moved, second, rng, depth - 1)


def _ranges(n: int, rng: random.Random) -> list[tuple[int, int]]:
    return [(start, start + length) for start, length in _arbitrary(n, rng)]
