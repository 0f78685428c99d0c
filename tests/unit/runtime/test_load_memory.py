"""What a load holds: weights once, and no code that only tuning or another device needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tunewright import Core, discovery
from tunewright.devices.base import address
from tunewright.ir import weight_memory
from tunewright.ir.types import TensorType
from tunewright.ops import lookup, names
from tunewright.solvers import base
from tunewright.solvers.base import solvers

SEED = 11
SIZE, ROWS = 192, 24


def network(
    rng: np.random.Generator, *, shared: bool = False, shown: bool = False, rows: int | str = ROWS
) -> onnx.ModelProto:
    """Two products, with weights of their own or the same ones, which may be a result as well."""
    weights = [(rng.standard_normal((SIZE, SIZE)) / 14).astype(np.float32) for _ in range(2)]
    names = ["w0", "w0"] if shared else ["w0", "w1"]
    nodes = [
        helper.make_node("MatMul", ["x", names[0]], ["g"]),
        helper.make_node("Relu", ["g"], ["h"]),
        helper.make_node("MatMul", ["h", names[1]], ["y"]),
    ]
    made = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [rows, SIZE]) for n in "xy"]
    if shown:
        nodes.append(helper.make_node("Identity", ["w1"], ["z"]))
        made.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, weights[1].shape))
    kept = [numpy_helper.from_array(w, f"w{i}") for i, w in enumerate(weights) if f"w{i}" in names]
    return helper.make_model(helper.make_graph(nodes, "g", made[:1], made[1:], kept))


@pytest.mark.parametrize("given", [{}, {"shared": True}, {"shown": True}], ids=["own", "shared", "shown"])
def test_weights_go_when_they_are_packed(rng: np.random.Generator, given: dict[str, bool]) -> None:
    model = network(rng, **given)
    x = rng.standard_normal((ROWS, SIZE)).astype(np.float32)
    core = Core()
    mine, kept = core.compile_model(model, "CPU"), core.compile_model(core.read_model(model), "CPU")
    for name, want in kept({"x": x}).items():
        np.testing.assert_array_equal(mine({"x": x})[name], want)
    weight = 4 * SIZE * SIZE
    less = kept.memory_statistics()["constants"] - mine.memory_statistics()["constants"]
    assert round(less / weight) == (0 if given.get("shared") else 1 if given.get("shown") else 2)
    assert not any(any(v.const.strides) for v in mine.graph.constants()), "the graph says what they were like"


def test_weights_stay_while_other_shapes_may_come(rng: np.random.Generator) -> None:
    compiled = Core().compile_model(network(rng, rows="n"), "CPU")
    one = rng.standard_normal((ROWS, SIZE)).astype(np.float32)
    (first,) = compiled({"x": one}).values()
    (both,) = compiled({"x": np.concatenate([one, one])}).values()
    np.testing.assert_allclose(both, np.concatenate([first, first]), rtol=0, atol=1e-5)
    assert all(any(v.const.strides) for v in compiled.graph.constants())


def test_memory_of_its_own() -> None:
    made = weight_memory.lasting_array((3, weight_memory.LARGE), np.dtype(np.float32))
    assert address(made) % 4096 == 0 and made.flags.writeable
    made[...] = 1.0
    assert made.sum() == made.size
    with pytest.raises(MemoryError):
        weight_memory.lasting(1 << 60)


@pytest.mark.parametrize("language", ["c", "cuda", "null", ""])
def test_solvers_of_a_language_are_all_that_may_be_asked(language: str) -> None:
    asked = [s for s in solvers() if s.language in (None, language)]
    assert [s for s in solvers(language) if s.language in (None, language)] == asked


def test_solvers_of_an_operation_are_all_that_may_be_asked() -> None:
    """The table says of a module what its solvers say; ACCEPT=1 writes it. One that is not in it is always imported, as
    that of views must be, which serves extensions' operations too."""
    made = {}
    for module in discovery.modules("tunewright.solvers", skip=lambda name: not name.startswith("c.")):
        offered = [s.ops for s in getattr(module, "SOLVERS", ())]
        if module.__name__.startswith("tunewright.") and None not in offered:
            made[module.__name__.removeprefix("tunewright.solvers.")] = sorted(set().union(*offered))
    del made["c.movement.view"], made["c.elementwise.elementwise"]
    if os.environ.get("ACCEPT"):
        rows = (f"{json.dumps(name)}: {json.dumps(ops)}" for name, ops in made.items())
        base.TABLE.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    table = json.loads(base.TABLE.read_text(encoding="utf-8"))
    assert table == {name: made.get(name) for name in table}
    for op in ("Conv", "Gemm", "LSTM", "Relu", "Reshape", "tunewright::Reorder", "nobody::Knows"):
        asked = [s for s in solvers("c") if s.ops is None or op in s.ops]
        assert [s for s in solvers("c", op) if s.ops is None or op in s.ops] == asked


def test_views_of_all_domains_are_known() -> None:
    (view,) = [s for s in solvers() if s.id == "opencl.view"]
    assert view.ops == {name for name in names() if lookup(name).view}


UNUSED = (
    "numpy.random", "xml", "typer", "rich", "torch", "onnx", "tunewright.tools",
    "tunewright.solvers.c.convolution.conv_",
    "tunewright.solvers.triton.",
    "tunewright.solvers.vendor.", "tunewright.tuning.session", "tunewright.measure.isolated",
    "tunewright.measure.local", "tunewright.knowledge.tuning_file", "tunewright.ops.microsoft.moe",
    "tunewright.ops.openvino.roi", "tunewright.ops.ml.general",
    "tunewright.plugins.batching.batch_", "tunewright.plugins.hetero", "importlib.metadata",
)  # fmt: skip


def test_a_process_that_runs_a_model_imports_no_more(tmp_path: Path) -> None:
    """Each of these takes megabytes, or milliseconds. Messages of ONNX do without its package, and are the same."""
    text = '<ir_version: 10, opset_import: ["": 21]> g (float[64] x) => (float[64] y) {y = Relu(x)}'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    code = """if True:
        import sys, numpy
        from tunewright import Core
        compiled = Core().compile_model(sys.argv[1], "CPU")
        compiled({"x": numpy.zeros(64, numpy.float32)})
        print("\\n".join(sys.modules))
        import onnx
        assert Core().read_model(onnx.load(sys.argv[1])).graph.nodes[0].op == "Relu"
    """
    made = subprocess.run([sys.executable, "-c", code, tmp_path / "model.onnx"], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert [name for name in made.stdout.split() if name.startswith(UNUSED)] == []


def test_types_of_what_was_freed(rng: np.random.Generator) -> None:
    compiled = Core().compile_model(network(rng), "CPU")
    for value in compiled.graph.constants():
        assert value.const is not None and value.type == TensorType.of(value.const)
