"""A device that does not share the host's memory: the processor is treated as one, so no GPU is needed.

The host holds `DeviceArray`s instead of arrays there, so whatever touches the device's memory by mistake fails.
"""

import gc
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

import tunewright
from helpers import opencl_runtime
from helpers.opencl_runtime import needs_opencl
from tunewright.devices.opencl.svm import DeviceArray
from tunewright.ir.types import DType, TensorType
from tunewright.ops.tolerance import compare
from tunewright.plugins.single import SingleDevice, available, open_device
from tunewright.settings import Settings
from tunewright.solvers.base import Problem, solvers
from tunewright.testing.kernelcheck import Case, check
from tunewright.testing.models import resnet

pytestmark = needs_opencl


@pytest.fixture(scope="module")
def device():
    return opencl_runtime.device(shares_memory=False)


def model(text, version=21):
    return parser.parse_model(f'<ir_version: 10, opset_import: ["" : {version}]>\n' + text)


def compiled(device, proto, **config):
    return SingleDevice(device).compile(tunewright.Core().read_model(proto), Settings.make(config))


def agree(device, proto, *inputs, **config):
    """The model on the device gives what the host gives, for each set of inputs in turn and once more for the first."""
    mine, host = compiled(device, proto, **config), tunewright.Core().compile_model(proto, "CPU.HOST")
    for given in [*inputs, inputs[0]]:
        got, want = mine(given), host(given)
        assert list(got) == list(want)
        for name, value in got.items():
            assert_equal(value, want[name], name)
    return mine


def assert_equal(got, want, name):
    if isinstance(want, list):
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            assert_equal(a, b, name)
        return
    assert isinstance(got, np.ndarray) and got.dtype == want.dtype
    assert not compare(got, want), f"{name}: {compare(got, want)}"


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# The device's memory


def test_the_host_cannot_touch_it_and_reads_copies(device):
    queue = device.queue()
    buffer = device.alloc(64)
    assert isinstance(buffer, DeviceArray) and not device.shares_memory
    view = device.view(buffer, 16, TensorType(DType.FLOAT32, (2, 3)))
    with pytest.raises(TypeError):
        np.copyto(view, 0)
    x = normal(2, 3)
    queue.put(x, view)
    copy, other = queue.fetch([view, "not a tensor"])
    np.testing.assert_array_equal(copy, x)
    assert other == "not a tensor"
    (whole,) = queue.fetch([buffer])
    np.testing.assert_array_equal(whole[16:40], x.reshape(-1).view(np.uint8))


@pytest.mark.parametrize("dtype", list(DType))
def test_every_element_type_comes_back_as_it_went(device, dtype):
    if dtype is DType.STRING:
        return
    queue = device.queue()
    for shape in [(), (5,), (0, 3), (2, 3)]:
        x = np.ones(shape, np.float32).astype(dtype.numpy)
        there = device.view(device.alloc(x.nbytes), 0, TensorType(dtype, shape))
        queue.put(x, there)
        (back,) = queue.fetch([there])
        assert (back.shape, back.dtype, back.tobytes()) == (x.shape, x.dtype, x.tobytes())


def test_arrays_with_gaps_and_arrays_that_may_not_be_written_are_copied_right(device):
    queue = device.queue()
    x = normal(6, 8)[::2, 1::2]
    y = np.frombuffer(normal(3, 4).tobytes(), np.float32).reshape(3, 4)
    assert not y.flags.writeable
    for array in (x, y):
        there = device.view(device.alloc(array.nbytes), 0, TensorType.of(array))
        queue.put(array, there)
        np.testing.assert_array_equal(queue.fetch([there])[0], array)
    with pytest.raises(ValueError, match=r"float32\[3, 4\] is no float32\[4, 3\]"):
        queue.put(y, device.view(device.alloc(48), 0, TensorType(DType.FLOAT32, (4, 3))))


def test_memory_that_is_not_there_is_a_memory_error(device):
    with pytest.raises(MemoryError, match="bytes left"):
        device.alloc(2**60)


def test_a_constant_is_copied_once_and_as_long_as_it_lives(device):
    array = normal(7)
    first = device.constant(array)
    assert device.constant(array) is first
    np.testing.assert_array_equal(device.queue().fetch([first])[0], array)
    before = len(device._memory._constants._known)
    del array
    gc.collect()
    assert len(device._memory._constants._known) == before - 1


def test_weights_are_copied_once_for_all_requests_and_go_with_the_model(device):
    gc.collect()
    before = len(device._memory._constants._known)
    mine = compiled(device, resnet(18, 32, 4, 8))
    x = {"x": normal(1, 3, 32, 32)}
    mine(x)
    known = len(device._memory._constants._known)
    assert known > before + 20
    mine(x)
    mine.create_infer_request().infer(x)
    assert len(device._memory._constants._known) == known
    del mine
    gc.collect()
    assert len(device._memory._constants._known) == before


# Models


def test_a_network_with_residuals(device):
    mine = agree(
        device, resnet(18, 32, 10, 8), {"x": normal(1, 3, 32, 32)}, {"x": normal(1, 3, 32, 32, seed=1)},
        HOST_FALLBACK="NO",
    )  # fmt: skip
    assert not any(step.on_host for plan in mine.program.plans for step in plan.steps)


def test_dynamic_shapes(device):
    proto = resnet(50, 32, 10, 8, batch="n")
    agree(device, proto, *({"x": normal(n, 3, 32, 32, seed=n)} for n in (1, 3, 2)), HOST_FALLBACK="NO")


def test_a_recurrent_network(device):
    proto = model(
        """g (float[s, b, 8] x, int32[b] lengths) => (float[s, 1, b, 16] y, float[1, b, 16] h)
           { y, h, c = LSTM<hidden_size = 16>(x, w, r, bias, lengths) }"""
    )
    for name, shape in {"w": (1, 64, 8), "r": (1, 64, 16), "bias": (1, 128)}.items():
        proto.graph.initializer.append(numpy_helper.from_array(normal(*shape) * np.float32(0.3), name))
    given = [{"x": normal(s, 2, 8), "lengths": np.array([s, s - 2], np.int32)} for s in (5, 3)]
    agree(device, proto, *given, HOST_FALLBACK="NO")


#: Det has no kernel: its result is planned in the device's memory; NonZero's is not
DETOUR = """g (float[n, 4, 4] x, float[n] z) => (float[n] y, int64[1, k] places, float[n] d)
{ a = Relu(x) b = Add(a, x) d = Det(b) e = Add(d, z) f = Tanh(e) g = Sub(f, d) y = Mul(g, z) places = NonZero(y) }"""


def test_an_operation_of_the_host_between_kernels(device):
    mine = agree(device, model(DETOUR), *({"x": normal(n, 4, 4), "z": normal(n, seed=1)} for n in (5, 2)))
    steps = [step for plan in mine.program.plans for step in plan.steps]
    assert {s.node.op for s in steps if s.on_host} == {"Det", "NonZero"}
    assert any(not s.on_host and s.kernel is not None for s in steps)


def test_counters_tell_host_and_device_apart(device):
    mine = compiled(device, model(DETOUR), PERF_COUNT="YES")
    request = mine.create_infer_request()
    request.infer({"x": normal(3, 4, 4), "z": normal(3)})
    rows = {row.type: row for row in request.get_profiling_info() if row.calls}
    assert rows["Det"].host_seconds > 0 and rows["Det"].launches == 0
    assert all(row.host_seconds == 0 and row.launches for op, row in rows.items() if op not in ("Det", "NonZero"))


def test_what_is_planned_once_its_shape_is_known(device):
    """Behind NonZero a heavy operation: the plan is cut in front of it."""
    proto = model(
        """g (float[6] x, float[6, 4] table, float[4, 3] w) => (float[k, 3] y, float[6] r)
           { r = Relu(x) p = NonZero(r) i = Squeeze(p, zero) t = Gather(table, i) s = Tanh(t) y = MatMul(s, w) }"""
    )
    proto.graph.initializer.append(numpy_helper.from_array(np.array([0]), "zero"))
    xs = [np.array(x, np.float32) for x in ([1, -1, 2, 0, 3, -2], [-1, -1, 5, 5, 5, 5], [-1] * 6)]
    agree(device, proto, *({"x": x, "table": normal(6, 4), "w": normal(4, 3)} for x in xs))


BRANCHES = """g (float[n, 4] x, float z) => (float[n, 4] y)
{ a = Relu(x) s = ReduceSum<keepdims = 0>(a) c = Greater(s, z)
  b = If (c) <then_branch = t () => (float[n, 4] p) { q = Add(a, x) p = Tanh(q) },
              else_branch = e () => (float[n, 4] r) { r = Mul(a, a) }>
  y = Sub(b, x) }"""


@pytest.mark.parametrize("fallback", ["YES", "NO"])
def test_branches(device, fallback):
    given = [{"x": normal(n, 4), "z": np.float32(z)} for n, z in ((3, 0), (3, 1e9), (2, 0))]
    agree(device, model(BRANCHES), *given, HOST_FALLBACK=fallback)


LOOP = """g (float[n, 4] x, int64 m) => (float[n, 4] y, float[k, n, 4] all)
{ go = Constant<value = bool {1}>() a = Tanh(x)
  l, all = Loop (m, go, a) <body = b (int64 i, bool c, float[n, 4] s) => (bool d, float[n, 4] t, float[n, 4] u)
    { d = Identity(c) f = Cast<to = 1>(i) v = Add(s, f) w = Mul(v, a) t = Sigmoid(w) u = Add(t, s) }>
  y = Add(l, x) }"""


@pytest.mark.parametrize("fallback", ["YES", "NO"])
def test_loops(device, fallback):
    given = [{"x": normal(n, 4), "m": np.array(m)} for n, m in ((3, 4), (2, 1), (3, 0))]
    agree(device, model(LOOP), *given, HOST_FALLBACK=fallback)


def test_a_scan_along_another_axis(device):
    body = helper.make_graph(
        [helper.make_node("Add", ["s", "x"], ["t"]), helper.make_node("Tanh", ["t"], ["u"])],
        "body",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, [3]) for n in "sx"],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, [3]) for n in "tu"],
    )
    nodes = [
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Scan", ["s", "b"], ["z", "y"], body=body, num_scan_inputs=1, scan_input_axes=[1]),
    ]
    shapes = {"s": [3], "a": [3, "n"], "z": [3], "y": ["n", 3]}
    infos = {n: helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in shapes.items()}
    graph = helper.make_graph(nodes, "g", [infos["s"], infos["a"]], [infos["z"], infos["y"]])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    agree(device, proto, *({"s": normal(3), "a": normal(3, n)} for n in (4, 1)))


def test_sequences(device):
    proto = model(
        """g (float[n, 4] x) => (seq(float[?, 4]) s, float[n, 4] y)
           { a = Relu(x) s = SequenceConstruct(a, x) i = Constant<value = int64 {0}>()
             b = SequenceAt(s, i) y = Tanh(b) }"""
    )
    agree(device, proto, {"x": normal(2, 4)}, {"x": normal(5, 4)})


LATE = """g (float[8, 6] x, int64[1] begin, int64[1] end) => (float[?, 6] y, int64[2] size)
{ a = Relu(x) one = Constant<value = int64[1] {1}>() stop = Mul(end, one)
  b = Slice(a, begin, stop) y = Tanh(b) size = Shape(b) }"""


def test_kernels_that_wait_for_values(device):
    given = [{"x": normal(8, 6), "begin": np.array([b]), "end": np.array([e])} for b, e in ((0, 8), (2, 5), (3, 3))]
    agree(device, model(LATE), *given, HOST_FALLBACK="NO")


def test_an_index_that_the_caller_changes_in_place_is_read_anew(device):
    """What a kernel that waits for values takes for constant is the caller's own array."""
    proto = model(
        """g (float[8, 6] x, int64[2] i, int64[1] e) => (float[?, 6] y)
           { z = Constant<value = int64[1] {0}>() a = Slice(x, z, e) b = Relu(a) y = Gather<axis = 0>(b, i) }"""
    )
    mine = compiled(device, proto, HOST_FALLBACK="NO")
    x, i, e = np.abs(normal(8, 6)), np.array([1, 2]), np.array([8])
    for _ in range(3):
        np.testing.assert_array_equal(mine({"x": x, "i": i, "e": e})["y"], x[i])
        i += 1
        x *= 2


def test_outputs_that_are_inputs_or_constants_or_one_another(device):
    proto = model(
        """g (float[2, 4] x) => (float[2, 4] a, float[2, 4] b, float[2, 4] c, float[8] d, float[3] k)
           { a = Identity(x) b = Relu(x) c = Identity(b) s = Constant<value = int64[1] {-1}>() d = Reshape(b, s)
             k = Constant<value = float[3] {1, 2, 3}>() }"""
    )
    mine = agree(device, proto, {"x": normal(2, 4)})
    x = normal(2, 4)
    first = mine({"x": x})
    kept = {name: value.copy() for name, value in first.items()}
    for value in first.values():
        value += 1  # the results are the caller's
    second = mine({"x": x})
    for name, value in second.items():
        np.testing.assert_array_equal(value, kept[name])
        others = [x, *first.values(), *(v for n, v in second.items() if n != name)]
        assert not any(np.shares_memory(value, other) for other in others)


def test_empty_tensors(device):
    proto = model("g (float[n, 4] x, float[4, 3] w) => (float[n, 3] y) { a = Relu(x) b = MatMul(a, w) y = Tanh(b) }")
    agree(device, proto, *({"x": normal(n, 4), "w": normal(4, 3)} for n in (0, 2, 0)))


def test_small_element_types(device):
    text = "g (TYPE[n, 4] x) => (TYPE[n, 4] y) { a = Relu(x) b = Add(a, x) y = Tanh(b) }"
    for name, dtype in (("float16", DType.FLOAT16), ("bfloat16", DType.BFLOAT16)):
        agree(device, model(text.replace("TYPE", name)), {"x": normal(3, 4).astype(dtype.numpy)}, HOST_FALLBACK="NO")


def test_several_threads_and_requests(device):
    proto = model(DETOUR)
    mine, host = compiled(device, proto), tunewright.Core().compile_model(proto, "CPU.HOST")
    given = [{"x": normal(2 + k % 3, 4, 4, seed=k), "z": normal(2 + k % 3, seed=k)} for k in range(6)]
    want = [host(g) for g in given]
    start, failures = threading.Barrier(6), []

    def work(k):
        start.wait()
        try:
            for turn in range(20):
                at = (k + turn) % 6
                got = mine(given[at])
                for name, value in want[at].items():
                    assert_equal(got[name], value, name)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def test_kernels_are_checked_there_too(device):
    """Packed weights, scratch and tables; a wrong result shows."""
    x, w = normal(1, 5, 9, 9), normal(7, 5, 3, 3)
    cases = [
        Case("Conv", [x, w], {"pads": [1, 1, 1, 1]}, constant=frozenset({1})),
        Case("MatMul", [normal(33, 40), normal(40, 24)], constant=frozenset({1})),
        Case("Resize", [x, None, np.array([1, 1, 2, 1.5], np.float32)], {"mode": "linear"}, constant=frozenset({2})),
        Case("Softmax", [normal(3, 50)]),
        Case("CumSum", [normal(3, 5), np.array(1)], constant=frozenset({1})),
    ]
    for case in cases:
        assert not check(case, "opencl.", configs=0, device=device, specialised=False)


# What a device may lack


def test_without_fp64_problems_that_need_it_are_refused_and_the_others_compile():
    from tunewright.devices.opencl.device import WITHOUT_FP64

    device = opencl_runtime.device(shares_memory=False)
    device.target = replace(device.target, lacks=("fp64",), options=device.target.options + WITHOUT_FP64)
    elementwise = next(s for s in solvers() if s.id == "opencl.elementwise")

    def why(op, dtype, count=1):
        types = (TensorType(dtype, (4,)),) * count
        return elementwise.why_not(Problem(op, types, types[:1], {}, constant=(False,) * count), device.target)

    assert why("Relu", DType.FLOAT32) is None
    assert why("Relu", DType.FLOAT64) == f"{device.target.name} has no fp64"
    assert why("Pow", DType.INT32, 2) == f"computes in fp64, which {device.target.name} does not have"
    with pytest.raises(tunewright.ExecutionError, match="f64"):
        device.build("kernel void k(global float* x) { f64 y = x[0]; }")
    x = np.abs(normal(40)) + np.float32(0.1)
    for op, inputs in {"Pow": [x, normal(40, seed=1)], "Sin": [x], "Cos": [x], "Tan": [x], "Exp": [x]}.items():
        assert not check(Case(op, inputs), "opencl.", configs=0, device=device, specialised=False)
    text = "g (double[n] x, double[n] z) => (double[n] y) { a = Add(x, z) y = Relu(a) }"
    given = {"x": normal(5).astype(np.float64), "z": normal(5).astype(np.float64)}
    agree(device, model(text), given)  # on the host
    with pytest.raises(tunewright.UnsupportedError, match="has no fp64"):
        compiled(device, model(text), HOST_FALLBACK="NO")(given)


# Names


def gpu(name, integrated, svm=1, extensions="", **about):
    import pyopencl as cl

    return SimpleNamespace(
        name=name, type=cl.device_type.GPU, host_unified_memory=integrated, svm_capabilities=svm, extensions=extensions,
        **about,
    )  # fmt: skip


def nvidia(name, domain, bus, slot):
    return gpu(name, False, extensions="cl_khr_fp64 cl_nv_device_attribute_query",
               pci_domain_id_nv=domain, pci_bus_id_nv=bus, pci_slot_id_nv=slot)  # fmt: skip


def test_integrated_gpus_come_first_and_those_without_svm_are_told():
    from tunewright.devices.opencl.naming import names

    big, twin, small, old = gpu("big", False), gpu("big", False), gpu("small", True), gpu("old", True, svm=0)
    found, unusable = names([big, old, twin, small])
    assert found == {"GPU.0": small, "GPU.1": big, "GPU.2": twin}
    assert list(unusable) == ["old"] and "no shared virtual memory" in unusable["old"]
    assert names([]) == ({}, {})


def test_one_gpu_appears_once_and_cuda_comes_first():
    from tunewright.devices import pci
    from tunewright.devices.opencl.naming import names

    # torch tells the numbers of the bus, NVIDIA's OpenCL the slot: five bits of the device, three of the function
    cards = [SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0),
             SimpleNamespace(pci_domain_id=1, pci_bus_id=0x1B, pci_device_id=2)]  # fmt: skip
    places = [pci.of_cuda(card) for card in cards]
    assert places == ["0000:1b:00", "0001:1b:02"]
    second, first, other = nvidia("second", 1, 0x1B, 2 << 3), nvidia("first", 0, 0x1B, 0), nvidia("other", 0, 0x1C, 0)
    integrated = gpu("integrated", True)  # its driver does not tell where it is
    found, _ = names([second, integrated, first, other], places)
    assert found == {"GPU.0.OPENCL": first, "GPU.1.OPENCL": second, "GPU.2": integrated, "GPU.3": other}
    # an older torch does not tell: every GPU has a number, and CUDA's still come first
    assert pci.of_cuda(SimpleNamespace(name="card")) is None
    assert names([first], [None]) == ({"GPU.1": first}, {})


def test_where_a_device_is_plugged_in_is_asked_from_its_driver():
    """The processor is not plugged in: the call is the real one."""
    from tunewright.devices import pci

    raw = open_device(opencl_runtime.NAME).raw
    assert pci.of_opencl(raw) is None and pci._bus_info(raw) is None
    claims = SimpleNamespace(int_ptr=raw.int_ptr, extensions="cl_khr_pci_bus_info")
    assert pci.of_opencl(claims) is None


def test_other_ways_to_use_a_gpu_are_listed_as_such(monkeypatch):
    from tunewright.plugins import single

    names = ["CPU", "CPU.HOST", "GPU.0", "GPU.0.OPENCL", "GPU.1", "NULL"]
    monkeypatch.setattr(single, "available", lambda: ({n: SimpleNamespace(is_hidden=n == "NULL") for n in names}, {}))
    assert single.visible() == ["CPU", "GPU.0", "GPU.1"]
    assert single.visible(alternatives=True) == names[:-1]


def test_queues_follow_hints_as_far_as_the_device_knows_them(caplog):
    from tunewright.devices.base import Hints
    from tunewright.devices.opencl.naming import queue_properties

    hints = Hints("HIGH", "LOW")
    both = gpu("card", False, extensions="cl_khr_priority_hints cl_khr_throttle_hints")
    assert queue_properties(both, hints) == [0x1096, 1, 0x1097, 4]
    assert queue_properties(gpu("card", False, extensions="cl_khr_throttle_hints"), hints) == [0x1097, 4]
    mine = compiled(opencl_runtime.device(), model(DETOUR), GPU_QUEUE_PRIORITY="HIGH")
    for _ in range(2):
        request = mine.create_infer_request()  # a processor knows none
        assert request.infer({"x": normal(2, 4, 4), "z": normal(2)})["y"].shape == (2,)
    (told,) = [r for r in caplog.records if "no hints for queues" in r.message]
    assert "HIGH" in told.message


def test_the_first_gpu_is_also_called_gpu(monkeypatch):
    from tunewright.plugins import single

    monkeypatch.setattr(single, "serving", lambda name: object if name in ("CPU", "GPU.0", "GPU.1") else None)
    monkeypatch.setattr(single, "_opened", type("Opened", (str,), {"configured": lambda self, settings: self}))
    assert [open_device(name) for name in ("GPU", "gpu", "GPU.0", "GPU.1")] == ["GPU.0", "GPU.0", "GPU.0", "GPU.1"]


def test_devices_that_cannot_be_used_are_told_with_the_reason(monkeypatch):
    from tunewright.devices.opencl.device import OpenCLDevice

    monkeypatch.setattr(OpenCLDevice, "unusable", classmethod(lambda cls: {"Old Card": "has no SVM"}))
    assert available.__wrapped__()[1]["Old Card"] == "has no SVM"


def test_only_memory_that_opencl_need_not_know_of_is_shared():
    from tunewright.devices.opencl.naming import shares_memory

    assert not shares_memory(gpu("card", False)) and not shares_memory(gpu("card", True, svm=3))
    assert shares_memory(gpu("card", True, svm=1 | 2 | 4))
    assert open_device(opencl_runtime.NAME).shares_memory
