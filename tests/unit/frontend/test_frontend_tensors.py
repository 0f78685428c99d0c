"""Tensors of every element type, in every place that they may lie in, against onnx.numpy_helper."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tunewright.errors import LimitError, ModelError
from tunewright.frontend.external import COPY_BYTES, ExternalFiles
from tunewright.frontend.tensors import sparse_to_array, to_array
from tunewright.ir.types import DType
from tunewright.settings import Settings

CODES = [code for name, code in TensorProto.DataType.items() if name != "UNDEFINED"]
NUMERIC = [code for code in CODES if code != TensorProto.STRING]
SHAPES = [(), (1,), (7,), (2, 3), (3, 0, 2), (1, 2, 5)]
NOWHERE = ExternalFiles(None)


def array_of(code: int, dims: tuple[int, ...]) -> np.ndarray:
    """Random bit patterns: every value of a narrow type, NaN and denormals included."""
    dtype = helper.tensor_dtype_to_np_dtype(code)
    rng = np.random.default_rng(code)
    if code == TensorProto.BOOL:
        return rng.integers(0, 2, dims).astype(bool)
    if dtype.kind in "iu" or code in (TensorProto.FLOAT, TensorProto.DOUBLE):
        return (rng.standard_normal(dims) * 50).astype(dtype)
    if code in (TensorProto.COMPLEX64, TensorProto.COMPLEX128):
        return (rng.standard_normal(dims) + 1j * rng.standard_normal(dims)).astype(dtype)
    return rng.standard_normal(dims).astype(np.float32).astype(dtype)


def same(mine: np.ndarray, theirs: np.ndarray) -> None:
    assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
    assert mine.tobytes() == np.ascontiguousarray(theirs).tobytes()
    assert not mine.flags.writeable


def read(tensor: TensorProto, files: ExternalFiles = NOWHERE) -> np.ndarray:
    return to_array(tensor, files, Settings(), "tensor 't'")


@pytest.mark.parametrize("dims", SHAPES, ids=str)
@pytest.mark.parametrize("code", NUMERIC, ids=TensorProto.DataType.Name)
def test_raw_data(code: int, dims: tuple[int, ...]) -> None:
    tensor = numpy_helper.from_array(array_of(code, dims), "t")
    assert tensor.HasField("raw_data")
    same(read(tensor), numpy_helper.to_array(tensor))


@pytest.mark.parametrize("dims", SHAPES, ids=str)
@pytest.mark.parametrize("code", NUMERIC, ids=TensorProto.DataType.Name)
def test_typed_fields(code: int, dims: tuple[int, ...]) -> None:
    tensor = helper.make_tensor("t", code, dims, array_of(code, dims).reshape(-1))
    assert not tensor.HasField("raw_data")
    same(read(tensor), numpy_helper.to_array(tensor))


@pytest.mark.parametrize("code", NUMERIC, ids=TensorProto.DataType.Name)
@pytest.mark.parametrize("offset", [0, 1, 4096])
def test_external_data(code: int, offset: int, tmp_path: Path) -> None:
    tensor = numpy_helper.from_array(array_of(code, (5, 3)), "t")
    (tmp_path / "data").write_bytes(bytes(offset) + tensor.raw_data + b"more")
    outside = TensorProto(name="t", data_type=code, dims=[5, 3], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "data"), ("offset", str(offset)), ("length", str(len(tensor.raw_data)))):
        outside.external_data.add(key=key, value=value)
    mine = read(outside, ExternalFiles(tmp_path))
    same(mine, numpy_helper.to_array(tensor))
    assert mine.flags.aligned


def test_external_data_is_mapped_and_shared(tmp_path: Path) -> None:
    """Large weights cost no memory of their own, small ones do not hold the file."""
    array = np.arange(COPY_BYTES, dtype=np.float32)
    array.tofile(tmp_path / "data")
    files = ExternalFiles(tmp_path)
    whole = files.read("data", 0, array.nbytes, "w")
    assert not whole.flags.owndata and np.array_equal(whole.view(np.float32), array)
    assert np.shares_memory(whole, files.read("data", 4, array.nbytes - 4, "w"))
    assert files.read("data", 8, 16, "w").flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        whole[0] = 1


def test_files_are_closed(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(64))
    before = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    files = ExternalFiles(tmp_path)
    for _ in range(20):
        files.read("data", 0, 64, "w")
        with pytest.raises(ModelError):
            files.read("nothing", 0, 64, "w")
    after = len(os.listdir("/proc/self/fd")) if before else 0
    assert after - before <= 2  # the mapping's own


def test_strings() -> None:
    tensor = helper.make_tensor("t", TensorProto.STRING, [2, 2], [b"a", "\u00e9".encode(), b"", b"long text"])
    mine = read(tensor)
    assert mine.dtype == object and mine.tolist() == [["a", "\u00e9"], ["", "long text"]]
    with pytest.raises(ModelError, match="UTF-8"):
        read(helper.make_tensor("t", TensorProto.STRING, [1], [b"\xff"]))


def test_bool_bytes_become_zero_or_one() -> None:
    mine = read(TensorProto(name="t", data_type=TensorProto.BOOL, dims=[3], raw_data=b"\0\1\2"))
    assert mine.tobytes() == b"\0\1\1"


@pytest.mark.parametrize("code", NUMERIC, ids=TensorProto.DataType.Name)
def test_every_length_is_checked(code: int) -> None:
    tensor = numpy_helper.from_array(array_of(code, (5,)), "t")
    for wrong in (tensor.raw_data[:-1], tensor.raw_data + b"\0"):
        with pytest.raises(ModelError, match=r"tensor 't': has \d+ bytes"):
            read(TensorProto(name="t", data_type=code, dims=[5], raw_data=wrong))
    with pytest.raises(ModelError, match=r"tensor 't': has 0 entries"):
        read(TensorProto(name="t", data_type=code, dims=[5]))


def test_limits() -> None:
    with pytest.raises(LimitError, match="MAX_TENSOR_BYTES"):
        to_array(numpy_helper.from_array(np.zeros(100)), NOWHERE, Settings(max_tensor_bytes=799), "w")
    with pytest.raises(ModelError, match="negative"):
        read(TensorProto(data_type=1, dims=[-1]))
    with pytest.raises(ModelError, match="unknown"):
        read(TensorProto(data_type=0, dims=[1]))


@pytest.mark.parametrize("linear", [True, False])
def test_sparse(linear: bool) -> None:
    dense = np.zeros((3, 4), np.float32)
    dense[[0, 1, 2], [1, 3, 0]] = [1, 2, 3]
    at = np.argwhere(dense) if not linear else np.flatnonzero(dense)
    values = numpy_helper.from_array(dense[dense != 0], "v")
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(at.astype(np.int64), "i"), [3, 4])
    assert np.array_equal(sparse_to_array(sparse, NOWHERE, Settings(), "t"), dense)


def test_sparse_model_input_gives_the_values(tmp_path: Path) -> None:
    """The whole way: a sparse initializer in a model."""
    from tunewright import Core

    values = numpy_helper.from_array(np.array([5.0], np.float32), "w")
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(np.array([2], np.int64), "i"), [4])
    graph = helper.make_graph(
        [helper.make_node("Neg", ["w"], ["y"])], "g", [], [helper.make_empty_tensor_value_info("y")]
    )
    graph.sparse_initializer.append(sparse)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
    assert Core().compile_model(model)({})["y"].tolist() == [0, 0, -5, 0]


def test_every_element_type_of_onnx_is_known() -> None:
    assert {DType.of_onnx(code).onnx_code for code in CODES} == set(CODES)
    for code in NUMERIC:
        assert DType.of_onnx(code).numpy == helper.tensor_dtype_to_np_dtype(code)
    assert onnx.TensorProto.DataType.Name(DType.STRING.onnx_code) == "STRING"
