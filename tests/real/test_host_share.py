"""Light and trained models on the CPU device: at most a twentieth of their time is spent in operations on the host."""

import statistics
from collections import defaultdict
from dataclasses import dataclass

import light_models
import minilm
import numpy as np
import onnx
import pytest
from model_inputs import CASES

import tunewright
from real.twins import TWINS, marks
from tunewright.plugins.single import open_device

pytestmark = pytest.mark.skipif(open_device("CPU").family == "host", reason="needs a CPU device with kernels")

MOST = 0.05
RUNS = 5

#: models that spend more, with the reason
EXCEPTIONS: dict[str, str] = {}

TRAINED = [
    pytest.param(package, file, id=f"{package}-{file.removesuffix('.onnx')}", marks=marks(package, file))
    for package, files in CASES.items()
    for file in files
]


#: in the short form; the others are made of the same layers, and most of them have weights that take seconds to make
LIGHT = ("inception_v2", "resnet50", "shufflenet")


@pytest.mark.parametrize(
    "name", [n if n in LIGHT else pytest.param(n, marks=pytest.mark.soak) for n in light_models.NAMES]
)
def test_light_model(name):
    model, inputs = light_models.load(name)
    check(name, model, inputs)


@pytest.mark.parametrize(("package", "file"), TRAINED)
def test_trained_model(folder, package, file):
    for path in [p for p in folder(package).rglob("*") if p.name == file]:
        model = minilm.build(path) if path.suffix == ".safetensors" else onnx.load(path)
        rng = np.random.default_rng(0)
        check(file, model, {name: make(rng) for name, make in CASES[package][file][0].items()})


def check(name, model, inputs):
    request = tunewright.Core({"PERF_COUNT": "YES"}).compile_model(model).create_infer_request()
    runs = [profile(request, inputs)]
    if runs[0].operations:  # else nothing runs on the host, and there is nothing to measure
        runs = [profile(request, inputs) for _ in range(RUNS)]
    share = statistics.median(run.on_host / run.total for run in runs)
    if name in EXCEPTIONS:
        assert share > MOST, f"{name} needs no exception: {share:.1%} of the time on the host"
        return
    operations = sorted(runs[-1].operations.items(), key=lambda item: -item[1])
    listed = ", ".join(f"{op} {seconds * 1e6:.0f} us" for op, seconds in operations)
    assert share <= MOST, f"{share:.1%} of the time on the host: {listed}"


@dataclass
class Profile:
    """Seconds of one inference."""

    on_host: float
    total: float
    #: on the host, by type of operation
    operations: dict[str, float]


def profile(request, inputs):
    """One inference. A control-flow node contains what its body's nodes took, so it is not counted itself."""
    request.infer(inputs)
    rows = [row for row in request.get_profiling_info() if row.kernel != "control flow"]
    operations: dict[str, float] = defaultdict(float)
    for row in rows:
        if row.host_seconds:
            operations[row.type] += row.host_seconds
    on_host = sum(operations.values())
    return Profile(on_host, on_host + sum(row.device_seconds for row in rows), operations)


def test_the_check_can_fail():
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[1,n,1] x) => (float[1,m,2] y) { r = Relu(x) y = DFT(r) }'
    )
    with pytest.raises(AssertionError, match=r"of the time on the host: DFT \d+ us"):
        check("it", model, {"x": np.ones((1, 100_000, 1), np.float32)})


def test_every_exception_and_twin_is_of_a_model():
    assert set(EXCEPTIONS) <= {*light_models.NAMES, *(file for files in CASES.values() for file in files)}
    assert all(file in CASES[package] for package, file in TWINS)
