"""Maps torch and NumPy data types to Zarr names, and makes zero-copy views between torch and NumPy.

The Zarr names are those of the v3 core specification and, for bfloat16 and the 8-bit floats, of the
zarr-extensions registry ("data-types"). TensorStore receives only names that are listed here,
because some unknown names make it abort the process.

``float4_e2m1fn_x2`` is torch's name. An element is a byte with two 4-bit floats, the first one in
the lower bits, and shapes count bytes. Zarr has no such type: its ``float4_e2m1fn`` is one number,
and its codec ``bytes`` stores each in a byte of its own.
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, cast

from shardstore.errors import ArgumentError, DTypeMismatchError

if TYPE_CHECKING:
    # At run time functions import them: a listing needs neither, a verification no torch.
    import numpy as np
    import torch
    from numpy.typing import NDArray

ITEMSIZES = {
    "bool": 1,
    **{f"{kind}{8 * size}": size for kind in ("int", "uint") for size in (1, 2, 4, 8)},
    **{f"float{8 * size}": size for size in (2, 4, 8)},
    "bfloat16": 2,
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("float8_e8m0fnu", "float4_e2m1fn_x2"), 1),
    "complex64": 8,
    "complex128": 16,
}
"""Data types that can be stored, and the size of an element in bytes."""
_KNOWN = ", ".join(ITEMSIZES)

_FOREIGN = frozenset(n for n in ITEMSIZES if n.startswith(("bfloat16", "float8", "float4")))
"""Types that NumPy lacks. Zarr v2 documents contain their names instead of NumPy type codes."""

PACKED = frozenset({"float4_e2m1fn_x2"})
"""Types with several numbers in an element. torch does not convert them to others. For NumPy they
are structured types with one field, which has the same name."""
_FIELDS = {name: [(name, f"u{ITEMSIZES[name]}")] for name in PACKED}
_NAMES = {str(fields): name for name, fields in _FIELDS.items()}


def names() -> tuple[str, ...]:
    """Return the Zarr names of all data types that can be stored."""
    return tuple(ITEMSIZES)


@cache
def zarr_name(dtype: torch.dtype | np.dtype[Any]) -> str:
    """Return the name of a data type in ``zarr.json``.

    Raises:
        DTypeMismatchError: the type cannot be stored (quantised, sub-byte, or unknown).
    """
    # torch, NumPy and Zarr use the same names for nearly all types. The text of a big-endian type
    # of NumPy is another one.
    name = str(dtype).removeprefix("torch.")
    name = _NAMES.get(name, name)
    if name not in ITEMSIZES:
        raise DTypeMismatchError(
            f"data type {dtype} cannot be stored as a Zarr array; convert the tensor to one of: "
            f"{_KNOWN} (types below 8 bits: view(torch.uint8); quantised tensors: int_repr())"
        )
    return name


def check(name: object, url: str | None = None) -> None:
    """Raise :class:`DTypeMismatchError` unless ``name`` is the Zarr name of a known data type."""
    if not isinstance(name, str) or name not in ITEMSIZES:
        raise DTypeMismatchError(
            f"{url or 'an array'} has data type {name!r}, which this version does not read; known: "
            f"{_KNOWN}",
            url=url,
        )


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy data type of a Zarr name; from ml_dtypes for types that NumPy lacks, and a
    structured type for :data:`PACKED`.

    Raises:
        DTypeMismatchError: this version does not read the data type.
    """
    try:
        return _numpy_dtype(name)
    except TypeError:  # a name of another type
        check(name)
        raise


@cache
def _numpy_dtype(name: str) -> np.dtype[Any]:
    import ml_dtypes  # noqa: F401 (teaches NumPy the types that it lacks)
    import numpy as np

    check(name)
    return np.dtype(_FIELDS.get(name, name))


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch data type of a Zarr name.

    Raises:
        DTypeMismatchError: this version, or the installed torch, does not have the data type.
    """
    import torch

    check(name)
    if not hasattr(torch, name):
        text = f"torch {torch.__version__} has no data type {name}; install a newer torch"
        raise DTypeMismatchError(text)
    return cast("torch.dtype", getattr(torch, name))


def itemsize(name: str) -> int:
    """Return the size of an element in bytes. Raise errors as :func:`numpy_dtype`."""
    try:
        return ITEMSIZES[name]
    except (KeyError, TypeError):  # a name of another type
        check(name)
        raise


@lru_cache(maxsize=256)  # a checkpoint has few data types
def fill_value(name: str, bits: bytes) -> Any:
    """Return the fill value of a Zarr v3 document that has exactly these bits (core specification
    and registry, "Fill value"): a number where a number keeps them, else hexadecimal digits.

    Args:
        name: Zarr name of the data type.
        bits: an element, little-endian.
    """
    import numpy as np

    if name.startswith("complex"):
        part, half = f"float{4 * len(bits)}", len(bits) // 2
        return [fill_value(part, bits[:half]), fill_value(part, bits[half:])]
    if name.startswith(("bool", "int", "uint")):
        return np.frombuffer(bits, numpy_dtype(name))[0].item()
    if name not in (*PACKED, "float8_e8m0fnu"):  # of which readers disagree about numbers
        number = float(np.frombuffer(bits, numpy_dtype(name))[0])
        if math.isfinite(number):
            return number
    return f"0x{bits[::-1].hex()}"


def bits_of(name: str, value: Any) -> bytes:
    """Return the bits of a fill value, the inverse of :func:`fill_value`.

    Raises:
        ValueError: it is no value of the data type.
    """
    import numpy as np

    size = itemsize(name)
    try:
        if name.startswith("complex"):
            real, imaginary = (bits_of(f"float{4 * size}", part) for part in value)
            return real + imaginary
        if isinstance(value, str) and value.startswith("0x"):
            bits = bytes.fromhex(value[2:])[::-1]
        elif name.startswith(("int", "uint")):
            bits = int(value).to_bytes(size, "little", signed=name.startswith("int"))
        else:
            number = value if name == "bool" else float(value)
            bits = np.array(number).astype(numpy_dtype(name)).tobytes()
        if len(bits) != size:
            raise ValueError(f"{len(bits)} bytes")
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"fill value {value!r:.60} of {name}") from error
    return bits


def v2_dtype(name: str) -> str:
    """Return the ``dtype`` entry of a Zarr v2 document; for types that NumPy lacks the name, as
    Megatron-Core wrote it."""
    return name if name in _FOREIGN else numpy_dtype(name).str


def v2_dtype_name(code: object, url: str | None = None) -> str:
    """Return the Zarr name for the ``dtype`` entry of a Zarr v2 document.

    Raises:
        DTypeMismatchError: the data type is structured or unknown.
    """
    name = code
    if isinstance(code, str) and code not in _FOREIGN:
        import numpy as np

        # NumPy parses a small language: "1/0", "(2,".
        with suppress(TypeError, ValueError, SyntaxError):
            found = str(np.dtype(code).newbyteorder("="))
            name = found if found in ITEMSIZES else code
    check(name, url)
    return cast("str", name)


def numbers(values: NDArray[Any]) -> NDArray[Any]:
    """Return values as types of NumPy that hold them exactly: float32 for types that NumPy lacks,
    and for two numbers in one element a complex number with the first as its real part."""
    import ml_dtypes
    import numpy as np

    if values.dtype.names:
        pair: Any = np.stack([values.view("u1") & 15, values.view("u1") >> 4], axis=-1)
        pair = pair.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        return cast("NDArray[Any]", pair.view(np.complex64)[..., 0])
    return values.astype(np.float32) if values.dtype.isbuiltin == 2 else values


def as_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a NumPy view of a CPU tensor's memory with the same shape, strides and data type.

    Raises:
        DTypeMismatchError: the data type cannot be stored.
        ArgumentError: the memory of the tensor was freed.
    """
    name = zarr_name(tensor.dtype)
    tensor = tensor.detach().resolve_conj().resolve_neg()
    require_memory(tensor)
    return memory_of(tensor, name)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a tensor are memory of its own, on any device. They are not
    for sparse, nested, quantized, fake and uninitialized tensors, subclasses that hold other
    tensors, and data types of fewer than 8 bits."""
    import torch

    if torch.nn.parameter.is_lazy(tensor):
        return False
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return False
    # A FakeTensor reports a real device, but its storage is on the meta device.
    if tensor.untyped_storage().device.type == "meta":
        return False
    if re.fullmatch(r"torch\.u?int[1-7]", str(tensor.dtype)):
        return False
    has_own_operations = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return not has_own_operations or tensor.data_ptr() != 0


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a weight for training in low precision holds, which has its elements;
    any other tensor as it is.

    Such a weight has the methods for FSDP2's all-gathers, and detached it holds one tensor of its
    shape and data type, as those of torchao for float8 and MXFP8. Other subclasses that hold
    tensors may compute their elements.
    """
    import torch

    methods = ("fsdp_pre_all_gather", "__tensor_flatten__")
    if all(hasattr(tensor, method) for method in methods) and not is_plain(tensor):
        with torch.inference_mode(False):  # in which some of these cannot be detached
            weight: Any = tensor.detach()  # without scales that were computed from it
        held = [getattr(weight, name) for name in weight.__tensor_flatten__()[0]]
        if [(one.dtype, one.shape) for one in held] == [(tensor.dtype, tensor.shape)]:
            return cast("torch.Tensor", held[0])
    return tensor


def how_to_save(tensor: torch.Tensor) -> str:
    """Return what to do about a tensor that is not :func:`is_plain`, for error texts."""
    import torch

    if tensor.is_nested:
        return "unbind() returns its parts"
    if tensor.layout is not torch.strided:
        return "to_dense() makes a dense tensor"
    if tensor.is_quantized:
        return "save its int_repr(), q_scale() and q_zero_point(), or its dequantize()"
    if hasattr(tensor, "__tensor_flatten__"):  # a subclass that holds other tensors
        held = "{name: getattr(t, name) for name in t.__tensor_flatten__()[0]}"
        return f"give save and load the tensors that it holds, {held}, or save its dequantize()"
    if tensor.untyped_storage().device.type == "meta":
        return "give a tensor that has values"
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return "give save and load the tensors that it holds"
    return "view(torch.uint8) makes bytes of types below 8 bits"


def require_memory(tensor: torch.Tensor) -> None:
    """Raise :class:`ArgumentError` if a tensor's storage, on any device, is smaller than its
    elements.

    Without this check NumPy would allocate new memory for a freed tensor.
    """
    held, size = tensor.untyped_storage().nbytes(), extent_bytes(tensor)
    wanted = tensor.storage_offset() * tensor.element_size() + size
    if size and held < wanted:
        raise ArgumentError(
            f"the memory of a tensor of shape {tuple(tensor.shape)} and dtype {tensor.dtype} was "
            f"freed: its storage has {held} of {wanted} bytes, as FSDP leaves parameters that are "
            "not gathered, or not sharded, at the moment; give the tensors that have memory now"
        )


def extent_bytes(tensor: torch.Tensor) -> int:
    """Return the size of the memory from the first to the last element of a tensor, in bytes."""
    if tensor.is_contiguous() or not tensor.numel():
        return tensor.nbytes
    axes = zip(tensor.stride(), tensor.shape, strict=True)
    return (1 + sum(stride * (n - 1) for stride, n in axes)) * tensor.element_size()


def memory_of(tensor: torch.Tensor, name: str) -> NDArray[Any]:
    """Return :func:`as_numpy` of a tensor without its checks. ``name`` is the Zarr name of the data
    type. The tensor must be detached, have memory, and have no lazy conjugate or negative bit."""
    if name in _FOREIGN:
        # NumPy lacks the type, so view the bits as integers of the same size.
        bits = torch_dtype(f"uint{8 * tensor.itemsize}")
        return tensor.view(bits).numpy().view(numpy_dtype(name))
    return tensor.numpy()


def as_tensor(array: NDArray[Any]) -> torch.Tensor:
    """Return a CPU tensor over a NumPy array's memory, with the same shape and strides.

    Raises:
        DTypeMismatchError: the data type cannot be stored.
    """
    import torch

    name = zarr_name(array.dtype)
    if name in _FOREIGN:
        return torch.from_numpy(array.view(f"u{array.dtype.itemsize}")).view(torch_dtype(name))
    return torch.from_numpy(array)
