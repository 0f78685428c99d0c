"""TensorProto -> numpy, with every length checked before memory is taken, and external data from the model's folder only."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from ..errors import LimitError, ModelError
from ..ir.types import DType
from ..settings import Settings


def to_array(tensor: onnx.TensorProto, folder: Path | None, settings: Settings, where: str) -> np.ndarray[Any, Any]:
    """The tensor as an array. Raises a ModelError that names it when anything about it does not fit."""
    try:
        dtype = DType.of_onnx(tensor.data_type)
    except KeyError:
        raise ModelError(f"element type {tensor.data_type} is unknown", where=where) from None
    if any(d < 0 for d in tensor.dims):
        raise ModelError(f"has a negative dimension: {list(tensor.dims)}", where=where)
    nbytes = math.prod(tensor.dims) * dtype.itemsize
    if nbytes > settings.max_tensor_bytes:
        raise LimitError(
            f"has shape {list(tensor.dims)}, {nbytes:,} bytes", where=where,
            hint=f"the limit is MAX_TENSOR_BYTES = {settings.max_tensor_bytes:,}",
        )
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        return _external(tensor, dtype, folder, where)
    try:
        array = numpy_helper.to_array(tensor)
    except (ValueError, TypeError, RuntimeError, IndexError, UnicodeDecodeError) as error:
        raise ModelError(f"its data does not fit shape {list(tensor.dims)}: {error}", where=where) from None
    return array


def _external(tensor: onnx.TensorProto, dtype: DType, folder: Path | None, where: str) -> np.ndarray[Any, Any]:
    if folder is None:
        raise ModelError("has external data, but the model does not come from a file", where=where, hint="pass the file's path")
    raise ModelError("external data is not read yet", where=where, hint=os.fspath(folder))


def sparse_to_array(
    sparse: onnx.SparseTensorProto, folder: Path | None, settings: Settings, where: str
) -> np.ndarray[Any, Any]:
    """A sparse tensor, made dense."""
    values = to_array(sparse.values, folder, settings, where)
    indices = to_array(sparse.indices, folder, settings, where)
    dims = tuple(sparse.dims)
    size = math.prod(dims) * values.itemsize
    if any(d < 0 for d in dims) or size > settings.max_tensor_bytes:
        raise LimitError(f"has shape {list(dims)}", where=where, hint=f"the limit is MAX_TENSOR_BYTES = {settings.max_tensor_bytes:,}")
    dense = np.zeros(dims, values.dtype)
    try:
        if indices.ndim == 1:
            dense.reshape(-1)[indices] = values
        else:
            dense[tuple(indices.T)] = values
    except (IndexError, ValueError) as error:
        raise ModelError(f"its indices do not fit: {error}", where=where) from None
    return dense
