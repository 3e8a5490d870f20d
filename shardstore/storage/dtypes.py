"""Data types: which torch types can be stored, under which Zarr names, and zero-copy views between
the two.

The Zarr names are those of the v3 core specification and, for bfloat16 and the 8-bit floats, of the
zarr-extensions registry ("data-types"). Only what is listed here is ever handed to TensorStore:
some names that it does not know make it abort the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import torch

from shardstore.errors import DTypeMismatchError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "as_numpy",
    "as_tensor",
    "itemsize",
    "names",
    "numpy_dtype",
    "torch_dtype",
    "v2_dtype",
    "v2_dtype_name",
    "zarr_name",
]

_TYPES: dict[str, tuple[torch.dtype, np.dtype[Any]]] = {
    "bool": (torch.bool, np.dtype(np.bool_)),
    "int8": (torch.int8, np.dtype("<i1")),
    "int16": (torch.int16, np.dtype("<i2")),
    "int32": (torch.int32, np.dtype("<i4")),
    "int64": (torch.int64, np.dtype("<i8")),
    "uint8": (torch.uint8, np.dtype("<u1")),
    "uint16": (torch.uint16, np.dtype("<u2")),
    "uint32": (torch.uint32, np.dtype("<u4")),
    "uint64": (torch.uint64, np.dtype("<u8")),
    "float16": (torch.float16, np.dtype("<f2")),
    "float32": (torch.float32, np.dtype("<f4")),
    "float64": (torch.float64, np.dtype("<f8")),
    "bfloat16": (torch.bfloat16, np.dtype(ml_dtypes.bfloat16)),
    "float8_e4m3fn": (torch.float8_e4m3fn, np.dtype(ml_dtypes.float8_e4m3fn)),
    "float8_e4m3fnuz": (torch.float8_e4m3fnuz, np.dtype(ml_dtypes.float8_e4m3fnuz)),
    "float8_e5m2": (torch.float8_e5m2, np.dtype(ml_dtypes.float8_e5m2)),
    "float8_e5m2fnuz": (torch.float8_e5m2fnuz, np.dtype(ml_dtypes.float8_e5m2fnuz)),
    "complex64": (torch.complex64, np.dtype("<c8")),
    "complex128": (torch.complex128, np.dtype("<c16")),
}

_BY_TORCH = {pair[0]: name for name, pair in _TYPES.items()}
_BY_NUMPY = {pair[1]: name for name, pair in _TYPES.items()}
_FOREIGN = frozenset(n for n in _TYPES if n == "bfloat16" or n.startswith("float8"))
"""Types that NumPy does not have itself: named, not coded, in Zarr v2 documents."""

_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def _known() -> str:
    return ", ".join(_TYPES)


def names() -> tuple[str, ...]:
    """Zarr names of all data types that can be stored."""
    return tuple(_TYPES)


def zarr_name(dtype: torch.dtype | np.dtype[Any]) -> str:
    """Name of a data type in ``zarr.json``.

    Raises:
        DTypeMismatchError: the type can not be stored (quantised, sub-byte, or unknown).
    """
    name = (
        _BY_TORCH.get(dtype) if isinstance(dtype, torch.dtype) else _BY_NUMPY.get(np.dtype(dtype))
    )
    if name is None:
        raise DTypeMismatchError(
            f"data type {dtype} can not be stored as a Zarr array; convert the tensor to one of: "
            f"{_known()}"
        )
    return name


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy data type (of ml_dtypes for the foreign ones) of a Zarr name.

    Raises:
        DTypeMismatchError: the name is not one that this version reads.
    """
    try:
        return _TYPES[name][1]
    except (KeyError, TypeError):
        raise DTypeMismatchError(
            f"stored data type {name!r} is not one that this version reads; known: {_known()}"
        ) from None


def torch_dtype(name: str) -> torch.dtype:
    """Torch data type of a Zarr name; errors as :func:`numpy_dtype`."""
    numpy_dtype(name)
    return _TYPES[name][0]


def itemsize(name: str) -> int:
    """Bytes an element; errors as :func:`numpy_dtype`."""
    return numpy_dtype(name).itemsize


def v2_dtype(name: str) -> str:
    """The ``dtype`` entry of a Zarr v2 document; foreign types by name, as Megatron-Core wrote
    them."""
    return name if name in _FOREIGN else numpy_dtype(name).str


def v2_dtype_name(code: object) -> str:
    """Zarr name behind the ``dtype`` entry of a Zarr v2 document.

    Raises:
        DTypeMismatchError: structured, big-endian or unknown.
    """
    if isinstance(code, str):
        if code in _FOREIGN:
            return code
        try:
            name = _BY_NUMPY.get(np.dtype(code))
        except TypeError:
            name = None
        if name is not None:
            return name
    raise DTypeMismatchError(
        f"stored Zarr v2 data type {code!r} is not one that this version reads; known: {_known()}"
    )


def as_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    """A NumPy view of a CPU tensor's memory, of the same shape and strides, under its true data
    type.

    Raises:
        DTypeMismatchError: the data type can not be stored.
    """
    name = zarr_name(tensor.dtype)
    tensor = tensor.detach()
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if name in _FOREIGN:
        # NumPy does not know the type, so the bits go across as integers of its size.
        return tensor.view(_BITS[tensor.element_size()]).numpy().view(_TYPES[name][1])
    return tensor.numpy()


def as_tensor(array: NDArray[Any]) -> torch.Tensor:
    """A CPU tensor over a NumPy array's memory, of the same shape and strides.

    Raises:
        DTypeMismatchError: torch has no such data type.
    """
    name = zarr_name(array.dtype)
    if name in _FOREIGN:
        return torch.from_numpy(array.view(f"u{array.dtype.itemsize}")).view(_TYPES[name][0])
    return torch.from_numpy(array)
