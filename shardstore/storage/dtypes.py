"""Data types: which torch types can be stored, under which Zarr names, and zero-copy views between
the two.

The Zarr names are those of the v3 core specification and, for bfloat16 and the 8-bit floats, of the
zarr-extensions registry ("data-types"). Only what is listed here is ever handed to TensorStore:
some names that it does not know make it abort the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import ml_dtypes
import numpy as np

from shardstore.errors import DTypeMismatchError

if TYPE_CHECKING:
    # At run time torch comes with its first tensor: listing and verifying do without it.
    import torch
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

_TYPES: dict[str, np.dtype[Any]] = {
    "bool": np.dtype(np.bool_),
    "int8": np.dtype("<i1"),
    "int16": np.dtype("<i2"),
    "int32": np.dtype("<i4"),
    "int64": np.dtype("<i8"),
    "uint8": np.dtype("<u1"),
    "uint16": np.dtype("<u2"),
    "uint32": np.dtype("<u4"),
    "uint64": np.dtype("<u8"),
    "float16": np.dtype("<f2"),
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e4m3fnuz": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "float8_e5m2fnuz": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "complex64": np.dtype("<c8"),
    "complex128": np.dtype("<c16"),
}

_BY_NUMPY = {dtype: name for name, dtype in _TYPES.items()}
_TORCH = "torch."
_FOREIGN = frozenset(n for n in _TYPES if n == "bfloat16" or n.startswith("float8"))
"""Types that NumPy does not have itself: named, not coded, in Zarr v2 documents."""


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
    text = str(dtype)
    if text.startswith(_TORCH):  # torch calls every type that can be stored what Zarr calls it
        name = text[len(_TORCH) :] if text[len(_TORCH) :] in _TYPES else None
    else:
        name = _BY_NUMPY.get(np.dtype(cast("np.dtype[Any]", dtype)))
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
        return _TYPES[name]
    except (KeyError, TypeError):
        raise DTypeMismatchError(
            f"stored data type {name!r} is not one that this version reads; known: {_known()}"
        ) from None


def torch_dtype(name: str) -> torch.dtype:
    """Torch data type of a Zarr name; errors as :func:`numpy_dtype`."""
    import torch

    numpy_dtype(name)
    return cast("torch.dtype", getattr(torch, name))


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
        bits = torch_dtype(f"uint{8 * tensor.element_size()}")
        return tensor.view(bits).numpy().view(_TYPES[name])
    return tensor.numpy()


def as_tensor(array: NDArray[Any]) -> torch.Tensor:
    """A CPU tensor over a NumPy array's memory, of the same shape and strides.

    Raises:
        DTypeMismatchError: torch has no such data type.
    """
    import torch

    name = zarr_name(array.dtype)
    if name in _FOREIGN:
        return torch.from_numpy(array.view(f"u{array.dtype.itemsize}")).view(torch_dtype(name))
    return torch.from_numpy(array)
