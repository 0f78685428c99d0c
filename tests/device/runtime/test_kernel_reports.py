"""What kernels report is raised wherever an inference runs, names the node, and is forgotten afterwards."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser

from helpers import opencl_runtime
from tunewright import AsyncInferQueue, Core, ExecutionError
from tunewright.devices.opencl.device import OpenCLQueue
from tunewright.devices.reports import KernelError, Reports
from tunewright.ir.types import TensorType
from tunewright.measure.judge import Judge
from tunewright.ops.input_errors import ReportedFault, describe
from tunewright.plugins.single import SingleDevice, open_device
from tunewright.settings import Settings
from tunewright.solvers.base import Problem, solvers

pytestmark = pytest.mark.skipif(open_device("CPU").family != "native", reason="needs the native CPU device")
OPENCL = pytest.param(opencl_runtime.NAME, marks=opencl_runtime.needs_opencl)

#: several launches in one table, two of which may report
NETWORK = """
<ir_version: 9, opset_import: ["" : 18]>
g (float[10, 4] x, int64[3] i, int64[3] k, float[4, 4] w) => (float[3, 4] y, float[3, 4] z)
{
    [first] a = Gather (x, i)
    [product] b = MatMul (a, w)
    [second] c = Gather (x, k)
    [sum] y = Add (b, c)
    [softmax] z = Softmax (y)
}
"""
FIRST = "node 'first' (Gather): an index is out of range: 17 for an axis of 10"
SECOND = "node 'second' (Gather): an index is out of range: -11 for an axis of 10"
X, W = (np.random.default_rng(0).standard_normal(shape).astype(np.float32) for shape in ((10, 4), (4, 4)))


def network(text: str = NETWORK) -> onnx.ModelProto:
    """The model, with the names of nodes in brackets in front of them."""
    names = [line.split("]")[0].strip("[ ") for line in text.splitlines() if line.strip().startswith("[")]
    lines = [line.split("]", 1)[1] if line.strip().startswith("[") else line for line in text.splitlines()]
    model = parser.parse_model("\n".join(lines))
    for node, name in zip(model.graph.node, names, strict=True):
        node.name = name
    return model


def feed(i: Any = (0, -10, 9), k: Any = (3, 3, -1)) -> dict[str, np.ndarray]:
    return {"x": X, "i": np.array(i), "k": np.array(k), "w": W}


def check(results: dict[str, Any], given: dict[str, np.ndarray]) -> None:
    y = X[given["i"]] @ W + X[given["k"]]
    np.testing.assert_allclose(results["y"], y, rtol=1e-4, atol=1e-5)
    e = np.exp(y - y.max(-1, keepdims=True))
    np.testing.assert_allclose(results["z"], e / e.sum(-1, keepdims=True), rtol=1e-4, atol=1e-5)


GOOD, BAD_FIRST, BAD_SECOND = feed(), feed(i=(0, 17, 9)), feed(k=(-11, 0, 0))
WAYS = [
    {}, {"PERF_COUNT": True}, {"NUM_STREAMS": 2}, {"CPU_THREADS_NUM": 1}, {"HOST_FALLBACK": "NO"},
    {"JOIN_LAUNCHES": "NO"},
]  # fmt: skip


def raises(call: Any, message: str) -> None:
    with pytest.raises(ExecutionError) as caught:
        call()
    assert str(caught.value) == message and type(caught.value) is ExecutionError


@pytest.mark.parametrize("device", ["CPU", OPENCL])
@pytest.mark.parametrize("config", WAYS, ids=str)
def test_infer(config: dict[str, Any], device: str) -> None:
    request = Core().compile_model(network(), device, config).create_infer_request()
    for _ in range(3):
        check(request.infer(GOOD), GOOD)
        raises(lambda: request.infer(BAD_FIRST), FIRST)
        raises(lambda: request.infer(BAD_SECOND), SECOND)
    check(request.infer(GOOD), GOOD)


def test_one_launch() -> None:
    """Steps that nobody goes through in Python."""
    request = Core().compile_model(network(), "CPU").create_infer_request()
    check(request.infer(GOOD), GOOD)
    ((_, frame),) = request.executor.frames()
    (segment,) = frame.segments
    assert len(segment.segment.steps) > 1
    raises(lambda: request.infer(BAD_FIRST), FIRST)
    raises(lambda: request.infer(BAD_SECOND), SECOND)
    check(request.infer(GOOD), GOOD)


@pytest.mark.parametrize("device", ["CPU", OPENCL])
def test_both_are_wrong(device: str) -> None:
    """The first one is told, and the second one is not told the next time."""
    request = Core().compile_model(network(), device).create_infer_request()
    both = feed(i=(17, 0, 0), k=(-11, 0, 0))
    with pytest.raises(ExecutionError, match="out of range"):
        request.infer(both)
    check(request.infer(GOOD), GOOD)


@pytest.mark.parametrize("device", ["CPU", OPENCL])
def test_asynchronous(device: str) -> None:
    model = Core().compile_model(network(), device, {"NUM_STREAMS": 2})
    requests = [model.create_infer_request() for _ in range(3)]
    for given, message in ((GOOD, ""), (BAD_FIRST, FIRST), (BAD_SECOND, SECOND), (GOOD, "")):
        for request in requests:
            request.start_async(given)
        for request in requests:
            if message:
                raises(request.wait, message)
            else:
                request.wait()
                check(request.results, given)


@pytest.mark.parametrize("device", ["CPU", OPENCL])
def test_queue(device: str) -> None:
    model, seen = Core().compile_model(network(), device, {"NUM_STREAMS": 2}), []
    queue = AsyncInferQueue(model, 2)
    queue.set_callback(lambda request, number: seen.append((number, request.results)))
    for number in range(20):
        queue.start_async(BAD_FIRST if number == 7 else GOOD, number)
    raises(queue.wait_all, FIRST)
    assert sorted(number for number, _ in seen) == [n for n in range(20) if n != 7]
    for _, results in seen:
        check(results, GOOD)


def test_threads() -> None:
    """Each request has records of its own."""
    model, failed = Core().compile_model(network(), "CPU"), []

    def work(bad: bool) -> None:
        request = model.create_infer_request()
        for _ in range(300):
            try:
                check(request.infer(BAD_SECOND if bad else GOOD), GOOD)
                failed.extend(["no error"] if bad else [])
            except ExecutionError as error:
                failed.extend([] if bad and str(error) == SECOND else [str(error)])

    threads = [threading.Thread(target=work, args=(n % 2 == 0,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed[:3]


@pytest.mark.parametrize("device", ["MULTI:CPU,CPU.HOST", "HETERO:CPU,CPU.HOST", "AUTO:CPU"])
def test_several_devices(device: str) -> None:
    request = Core().compile_model(network(), device).create_infer_request()
    for _ in range(3):
        check(request.infer(GOOD), GOOD)
        raises(lambda: request.infer(BAD_FIRST), FIRST)
    check(request.infer(GOOD), GOOD)


@pytest.mark.parametrize("second", ["CPU.HOST", OPENCL])
def test_parts_on_several_devices(second: str) -> None:
    core = Core()
    model = core.read_model(network())
    model.affinity = {"first": "CPU", "product": second, "second": second, "sum": "CPU", "softmax": second}
    request = core.compile_model(model, f"HETERO:CPU,{second}").create_infer_request()
    for _ in range(3):
        check(request.infer(GOOD), GOOD)
        raises(lambda: request.infer(BAD_FIRST), FIRST)
        raises(lambda: request.infer(BAD_SECOND), SECOND)
    check(request.infer(GOOD), GOOD)


def test_batch() -> None:
    """Of requests that run together only that one fails."""
    text = """
<ir_version: 9, opset_import: ["" : 18]>
g (float[1, 5] x, int64[1, 3] i) => (float[1, 3] y)
{
    [look] a = GatherElements <axis = 1> (x, i)
    [neg] y = Neg (a)
}
"""
    model = Core().compile_model(network(text), "BATCH:CPU(4)", {"AUTO_BATCH_TIMEOUT": 200})
    requests, x = [model.create_infer_request() for _ in range(4)], np.arange(5, dtype=np.float32)[None]
    for _ in range(3):
        for number, request in enumerate(requests):
            request.start_async({"x": x, "i": np.array([[0, 7 if number == 2 else -1, 4]])})
        for number, request in enumerate(requests):
            if number == 2:
                raises(request.wait, "node 'look' (GatherElements): an index is out of range: 7 for an axis of 5")
            else:
                request.wait()
                assert request.results["y"].tolist() == [[-0.0, -4.0, -4.0]]


LOOP = """
<ir_version: 9, opset_import: ["" : 18]>
g (float[10, 4] x, int64 n, int64 step) => (float[4] y, float[k, 4] all)
{
    start = Constant <value = float[4] {0, 0, 0, 0}> ()
    yes = Constant <value = bool {1}> ()
    y, all = Loop (n, yes, start) <body = b (int64 t, bool c, float[4] s) => (bool d, float[4] r, float[4] o) {
        d = Identity (c)
        at = Mul (t, step)
        row = Gather (x, at)
        r = Add (s, row)
        o = Identity (r)
    }>
}
"""


@pytest.mark.parametrize("device", ["CPU", OPENCL])
def test_bodies(device: str) -> None:
    model = parser.parse_model(LOOP)
    body = model.graph.node[2].attribute[0].g
    next(node for node in body.node if node.op_type == "Gather").name = "inner"
    request = Core().compile_model(model, device).create_infer_request()
    for _ in range(2):
        got = request.infer({"x": X, "n": np.array(5), "step": np.array(2)})
        np.testing.assert_allclose(got["all"], X[:9:2].cumsum(0), rtol=1e-5)
        message = "node 'inner' (Gather): an index is out of range: 12 for an axis of 10"
        raises(lambda: request.infer({"x": X, "n": np.array(20), "step": np.array(3)}), message)


BRANCH = """
<ir_version: 9, opset_import: ["" : 18]>
g (float[10, 4] x, bool c, int64[2] i) => (float[2, 4] y)
{
    y = If (c) <
        then_branch = t () => (float[2, 4] a) { a = Gather (x, i) },
        else_branch = e () => (float[2, 4] b) { j = Neg (i)
            b = Gather (x, j) }
    >
}
"""


@pytest.mark.parametrize("device", ["CPU", OPENCL])
def test_branches(device: str) -> None:
    """A decision that is known takes a way of its own."""
    request = Core().compile_model(parser.parse_model(BRANCH), device).create_infer_request()
    for _ in range(3):
        for taken in (True, False):
            given = {"x": X, "c": np.array(taken), "i": np.array([-9, 9])}
            assert (request.infer(given)["y"] == X[given["i"] if taken else -given["i"]]).all()
            wrong = -11 if taken else 11
            with pytest.raises(ExecutionError, match="an index is out of range: -11 for an axis of 10"):
                request.infer({**given, "i": np.array([0, wrong])})


#: a division in a chain of element-wise steps, and one that decides about a shape
DIVISION = """
<ir_version: 9, opset_import: ["" : 18]>
g (int32[5, 7] a, int32[7] b, float[5, 7] f) => (float[5, 7] y)
{
    [sum] s = Add (a, a)
    [quotient] q = Div (s, b)
    [cast] c = Cast <to = 1> (q)
    [product] y = Mul (c, f)
}
"""


@pytest.mark.parametrize("device", ["CPU", OPENCL])
def test_division_in_a_chain(device: str) -> None:
    request = Core().compile_model(network(DIVISION), device).create_infer_request()
    a, b = np.arange(35, dtype=np.int32).reshape(5, 7), np.array([1, -2, 3, 4, 5, 6, 7], np.int32)
    f = np.full((5, 7), 0.5, np.float32)
    for _ in range(2):
        got = request.infer({"a": a, "b": b, "f": f})["y"]
        np.testing.assert_allclose(got, np.trunc(2 * a / b) * f)
        with pytest.raises(ExecutionError, match=r"node '\w+' \(\w+\): an integer is divided by zero"):
            request.infer({"a": a, "b": b * (b != 4), "f": f})


DYNAMIC = """
<ir_version: 9, opset_import: ["" : 18]>
g (float[10, 4] x, int64[n] i, float[m] f) => (float[k, 4] y, float[n, 4] z)
{
    [look] z = Gather (x, i)
    [nonzero] p = NonZero (f)
    [shape] s = Constant <value_ints = [-1]> ()
    [flat] q = Reshape (p, s)
    [late] y = Gather (z, q)
}
"""


@pytest.mark.parametrize("device", ["CPU", OPENCL])
def test_open_shapes(device: str) -> None:
    request = Core().compile_model(network(DYNAMIC), device).create_infer_request()
    for n in (3, 5, 3):
        i = np.arange(n)
        got = request.infer({"x": X, "i": i, "f": np.array([0, 1, 1], np.float32)})
        assert (got["y"] == X[[1, 2]]).all() and (got["z"] == X[i]).all()
        with pytest.raises(ExecutionError, match=r"'look' \(Gather\): an index is out of range: 10 for an axis of 10"):
            request.infer({"x": X, "i": i + 10 - n + 1, "f": np.array([0, 1, 1], np.float32)})
        with pytest.raises(ExecutionError, match=rf"'late' \(Gather\): an index is out of range: 7 for an axis of {n}"):
            request.infer({"x": X, "i": i, "f": np.array([0, 1, 0, 0, 0, 0, 0, 1], np.float32)})


def test_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What kernels said before Ctrl-C came is not of the next inference."""
    request = Core().compile_model(network(), "CPU").create_infer_request()
    check(request.infer(GOOD), GOOD)
    ((_, frame),) = request.executor.frames()
    bound = frame.segments[0].bound
    again = bound._again

    def interrupted() -> int:
        again()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(bound, "_again", interrupted)
        with pytest.raises(KeyboardInterrupt):
            request.infer(BAD_FIRST)
    check(request.infer(GOOD), GOOD)


@opencl_runtime.needs_opencl
def test_a_device_with_memory_of_its_own() -> None:
    device = opencl_runtime.device(shares_memory=False)
    request = SingleDevice(device).compile(Core().read_model(network()), Settings.make({})).create_infer_request()
    for _ in range(3):
        check(request.infer(GOOD), GOOD)
        raises(lambda: request.infer(BAD_FIRST), FIRST)
        raises(lambda: request.infer(BAD_SECOND, remote=True), SECOND)
        there = request.infer(GOOD, remote=True)
        check({name: value.numpy() for name, value in there.items()}, GOOD)


@opencl_runtime.needs_opencl
def test_records_are_given_back() -> None:
    """Kernels that are made for one run take no more records than run at a time."""
    device, x = opencl_runtime.device(), X
    types = tuple(TensorType.of(a) for a in (x, np.zeros(3, np.int64)))
    out = (TensorType(types[0].dtype, (3, 4)),)
    solver = next(s for s in solvers() if s.id == "opencl.gather")
    kernel = solver.compile(Problem("Gather", types, out, {}, constant=(False, False)), {}, device)
    queue = device.queue()
    assert isinstance(queue, OpenCLQueue)
    for number in range(500):
        bad = number % 3 == 0
        kernel.run(queue, [x, np.array([0, 10 if bad else 9, 1])], [None])
        if bad:
            with pytest.raises(KernelError, match="10 for an axis of 10"):
                queue.check()
        else:
            queue.check()
    assert len(queue.reports._blocks) == 1


def test_the_judge_calls_it_wrong() -> None:
    """A kernel that complains of inputs that the reference takes."""
    types = tuple(TensorType.of(a) for a in (X, np.zeros(3, np.int64)))
    problem = Problem("Gather", types, (TensorType(types[0].dtype, (3, 4)),), {}, constant=(False, False))
    device = open_device("CPU")
    kernel = next(s for s in solvers() if s.id == "opencl.gather").compile(problem, {}, device)
    queue, run = device.queue(), kernel.run
    assert Judge(problem, device).check(kernel, queue).wrong == ""

    def complain(*arguments: Any) -> Any:
        run(*arguments)
        raise KernelError(describe(ReportedFault.INDEX, 3, 10))

    kernel.run = complain  # type: ignore[method-assign]
    assert (
        "it reports that an index is out of range: 3 for an axis of 10"
        in Judge(problem, device).check(kernel, queue).wrong
    )


def test_records() -> None:
    reports = Reports([4, 7])
    reports.check()
    reports.record(7)[:] = ReportedFault.LENGTH, -1, 5
    with pytest.raises(KernelError, match="a sequence length is out of range: -1, not 0 to 5") as caught:
        reports.check()
    assert caught.value.subject == 7
    reports.check()
