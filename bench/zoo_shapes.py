"""Many small networks with open sizes, at random sizes: results, plans and the cost of a new size.

python bench/zoo_shapes.py                          models as text, and those of the folder
python bench/zoo_shapes.py --export --folder zoo    exports networks of PyTorch at first (needs torch and onnxscript)
python bench/zoo_shapes.py pads yolo/legacy --sizes 40 --forms fp32,qdq

Each model runs at random sizes in random order and comes back to earlier ones: two requests in turns, one that is
asynchronous on one thread and counts, and one that has a plan for each shape. All are compared with ONNX Runtime
without optimisations. ``plans`` are those for classes of shapes, ``single`` those for one shape each; ``built`` are
kernels that were compiled behind the first two sizes; ``extra`` is the most that a first inference at a size took more
than later ones, where no new plan was made; ``bits`` is how often results have the bits of a plan for their shape.
"""

from __future__ import annotations

import argparse
import io
import logging
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

import tunewright
from zoo_shapes_texts import TEXTS

Arrays = dict[str, np.ndarray[Any, Any]]
#: input -> (kind, greatest integer, sizes), see `zoo_shapes_torch`
Specs = dict[str, tuple[str, int, tuple[int | str, ...]]]
#: of the greatest magnitude; what is quantised may be a step off
TOLERANCE = {"fp32": 2e-4, "fp16": 2e-2, "qdq": 5e-2, "int8": 5e-2}


@dataclass
class Subject:
    """A model, and how its inputs are drawn."""

    name: str
    load: Callable[[], bytes]
    specs: Specs
    sizes: dict[str, Sequence[int]]


@dataclass
class Findings:
    """What was seen of one model."""

    faults: list[str] = field(default_factory=list)
    inferences: int = 0
    refused: int = 0
    compared: int = 0
    bits: int = 0
    plans: int = 0
    single: int = 0
    built: int = 0
    extra: float = 0.0
    reasons: list[str] = field(default_factory=list)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", help="models, or the beginnings of their names; all of them")
    options.add_argument("--folder", type=Path, default=Path("zoo_shapes"), help="where exported models are")
    options.add_argument("--export", action="store_true", help="export what is not in the folder yet")
    options.add_argument("--sizes", type=int, default=14, help="new sizes of each model")
    options.add_argument("--forms", default="fp32", help="of fp32, fp16, qdq, int8 (the last two: onnxruntime's)")
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    failed = 0
    for subject in subjects(given.folder, given.export):
        if given.names and not any(subject.name.startswith(name) for name in given.names):
            continue
        for form in given.forms.split(","):
            failed += bool(report(subject, form, given.sizes, given.seed))
    return failed > 0


def report(subject: Subject, form: str, count: int, seed: int) -> list[str]:
    """Check one model and print what was found; answers the faults."""
    try:
        found = check(formed(subject, form, seed), subject, form, count, seed)
    except Exception as error:
        found = Findings([f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-3)}"])
    print(
        f"{subject.name + ' ' + form:36} {found.inferences:3} inferences, {found.refused:2} refused, "
        f"plans {found.plans:2}, single {found.single:2}, built {found.built:2}, extra {found.extra:6.1f} ms, "
        f"bits {found.bits}/{found.compared}", flush=True,
    )  # fmt: skip
    for reason in dict.fromkeys(re.sub(r"\d+", "#", reason) for reason in found.reasons):
        print("    because", reason[:300])
    for fault in list(dict.fromkeys(found.faults))[:4]:
        print("    FAULT", fault[:1500], flush=True)
    return found.faults


# -- models


def subjects(folder: Path, export: bool) -> Iterator[Subject]:
    for name, text in TEXTS.items():
        yield Subject(f"{name}/text", lambda text=text: text.model().SerializeToString(), _specs(text), text.sizes)
    if not export and not folder.is_dir():
        return
    import zoo_shapes_sequences  # noqa: F401
    from zoo_shapes_torch import NETS

    for name, net in NETS.items():
        for exporter in net.exporters:
            path = folder / f"{name}-{exporter}.onnx"
            if export and not path.exists():
                folder.mkdir(parents=True, exist_ok=True)
                try:
                    path.write_bytes(exported(net, exporter))
                except Exception as error:
                    print(f"{name}/{exporter}: not exported: {str(error).strip()[:200]}", flush=True)
            if path.exists():
                yield Subject(f"{name}/{exporter}", path.read_bytes, net.inputs, net.sizes)


def exported(net: Any, exporter: str) -> bytes:
    """The model of a network by one of torch's exporters."""
    import torch

    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    sizes = {name: sorted(values)[len(values) // 2] for name, values in net.sizes.items()}
    if len(set(sizes.values())) < len(sizes):  # equal sizes would be taken for one
        sizes = {name: sorted(values)[len(values) // 2 - k] for k, (name, values) in enumerate(net.sizes.items())}
    given = {name: torch.from_numpy(a) for name, a in drawn(net.inputs, sizes, rng).items()}
    module = net.make().eval()
    open_sizes = {
        name: {axis: size for axis, size in enumerate(dims) if isinstance(size, str)}
        for name, (_, _, dims) in net.inputs.items()
    }
    made, names = io.BytesIO(), list(given)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        if exporter == "dynamo":
            shapes = tuple(dict.fromkeys(axes, torch.export.Dim.DYNAMIC) for axes in open_sizes.values())
            program = torch.onnx.export(
                module, tuple(given.values()), dynamo=True, input_names=names, dynamic_shapes=shapes,
                opset_version=max(18, net.opset), verbose=False,
            )  # fmt: skip
            return program.model_proto.SerializeToString()
        run = torch.jit.script(module) if net.script else module
        torch.onnx.export(
            run, tuple(given.values()), made, dynamo=False, input_names=names, dynamic_axes=open_sizes,
            opset_version=net.opset,
        )  # fmt: skip
    return made.getvalue()


def _specs(text: Any) -> Specs:
    found: Specs = {}
    for value in text.model().graph.input:
        type = value.type.tensor_type
        dims = text.dims.get(value.name) or tuple(d.dim_param or d.dim_value for d in type.shape.dim)
        kind = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(type.elem_type)).kind
        found[value.name] = {"f": "float", "i": "int", "b": "bool"}[kind], text.high.get(value.name, 0), dims
    return found


def formed(subject: Subject, form: str, seed: int) -> bytes:
    """The model in another arithmetic."""
    model = subject.load()
    if form == "fp32":
        return model
    if form == "fp16":
        from onnxruntime.transformers.float16 import convert_float_to_float16

        return convert_float_to_float16(onnx.load_model_from_string(model), keep_io_types=True).SerializeToString()
    import tempfile

    from onnxruntime import quantization

    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "a.onnx", Path(folder) / "b.onnx"
        source.write_bytes(model)
        if form == "int8":
            quantization.quantize_dynamic(source, target)
        else:
            rng = np.random.default_rng(seed)

            class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
                left = [drawn(subject.specs, chosen(subject.sizes, rng), rng) for _ in range(3)]

                def get_next(self) -> Any:
                    return self.left.pop() if self.left else None

            quantization.quantize_static(source, target, Reader())
        return target.read_bytes()


# -- inputs


def chosen(sizes: dict[str, Sequence[int]], rng: np.random.Generator) -> dict[str, int]:
    return {name: int(rng.choice(list(values))) for name, values in sizes.items()}


def drawn(specs: Specs, sizes: dict[str, int], rng: np.random.Generator) -> Arrays:
    found: Arrays = {}
    for name, (kind, high, dims) in specs.items():
        shape = tuple(sizes[d] if isinstance(d, str) else d for d in dims)
        if kind == "float":
            found[name] = rng.standard_normal(shape).astype(np.float32)
        elif kind == "bool":
            found[name] = rng.random(shape) < 0.5
        elif kind == "int":
            found[name] = np.asarray(rng.integers(0, high, shape), np.int64)
        else:  # lengths
            most = sizes[kind.split()[1]]
            found[name] = np.sort(rng.integers(1, most + 1, shape).astype(np.int64))[::-1].copy()
            found[name][:1] = most
    return found


# -- the check


class Runs:
    """One model in several compiled forms, and ONNX Runtime."""

    def __init__(self, model: bytes, found: Findings) -> None:
        core, self.found = tunewright.Core(), found
        options = ort.SessionOptions()
        options.log_severity_level, options.graph_optimization_level = 4, ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        self.session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.outputs = [o.name for o in self.session.get_outputs()]
        self.classes = core.compile_model(model, "CPU", {"CPU_THREADS_NUM": 2})
        self.one = core.compile_model(model, "CPU", {"CPU_THREADS_NUM": 1, "PERF_COUNT": "YES"})
        self.each = core.compile_model(model, "CPU", {"CPU_THREADS_NUM": 2, "SHAPE_TEMPLATES": "NO"})
        self.requests = [self.classes.create_infer_request() for _ in range(2)]
        self.asynchronous, self.single = self.one.create_infer_request(), self.each.create_infer_request()

    def texts(self) -> int:
        """How many kernels there are."""
        return len(self.classes.env.device._programs)

    def peer(self, feeds: Arrays) -> Arrays | None:
        try:
            return dict(zip(self.outputs, self.session.run(self.outputs, feeds), strict=True))
        except Exception:
            return None

    def ours(self, step: int, feeds: Arrays) -> dict[str, Arrays | Exception]:
        def waited() -> Arrays:
            self.asynchronous.start_async(feeds)
            self.asynchronous.wait()
            assert self.asynchronous.get_profiling_info() is not None
            return {name: self.asynchronous.results[name] for name in self.outputs}

        ways: dict[str, Callable[[], Arrays]] = {
            "classes": lambda: self.requests[step % 2].infer(feeds),
            "asynchronous": waited,
            "each": lambda: self.single.infer(feeds),
        }
        return {name: _tried(way) for name, way in ways.items()}


def _tried(way: Callable[[], Arrays]) -> Arrays | Exception:
    try:
        return way()
    except tunewright.TunewrightError as error:
        return error


def check(model: bytes, subject: Subject, form: str, count: int, seed: int) -> Findings:
    found, rng = Findings(), np.random.default_rng(seed)
    heard = _Heard(found)
    logging.getLogger("tunewright").addHandler(heard)
    logging.getLogger("tunewright").setLevel(logging.DEBUG)
    try:
        runs = Runs(model, found)
        many = [chosen(subject.sizes, rng) for _ in range(4 * count)]
        new = [*{tuple(sizes.items()): sizes for sizes in many}.values()][:count]
        kept: list[tuple[str, Arrays, Arrays]] = []
        for number, sizes in enumerate(new):
            feeds, texts, plans = drawn(subject.specs, sizes, rng), runs.texts(), len(runs.classes.program.plans)
            first, *later = (_seconds(runs.requests[number % 2], feeds) for _ in range(3))
            if number >= 2:
                found.built += runs.texts() - texts
                if len(runs.classes.program.plans) == plans:
                    found.extra = max(found.extra, (first - min(later)) * 1e3)
            earlier = new[int(rng.integers(number + 1))]
            _step(runs, found, form, number, sizes, feeds, kept)
            _step(runs, found, form, number + 1, earlier, drawn(subject.specs, earlier, rng), kept)
        for what, results, copies in kept:
            if any(not np.array_equal(results[name], copies[name], equal_nan=True) for name in copies):
                found.faults.append(f"{what}: a later inference changed the results")
        program = runs.classes.program
        found.plans, found.single = len(program._classes), len(program._plans)
    finally:
        logging.getLogger("tunewright").removeHandler(heard)
    return found


def _seconds(request: Any, feeds: Arrays) -> float:
    begin = time.perf_counter()
    _tried(lambda: request.infer(feeds))
    return time.perf_counter() - begin


def _step(
    runs: Runs, found: Findings, form: str, number: int, sizes: dict[str, int], feeds: Arrays,
    kept: list[tuple[str, Arrays, Arrays]],
) -> None:  # fmt: skip
    """One inference of each kind at the same sizes."""
    expected, got, what = runs.peer(feeds), runs.ours(number, feeds), f"{sizes}"
    found.inferences += 1
    failed = {name: result for name, result in got.items() if isinstance(result, Exception)}
    if failed:
        found.refused += 1
        if expected is not None or len(failed) < len(got):
            found.faults += [f"{what}: {name} refuses: {error}" for name, error in failed.items()]
        return
    if expected is None:
        expected = got["each"]
    assert not isinstance(expected, Exception)
    for way, results in got.items():
        assert not isinstance(results, Exception)
        found.faults += [f"{what} {way} {fault}" for fault in _differences(results, expected, TOLERANCE[form])]
    one, other = got["classes"], got["each"]
    found.compared += 1
    found.bits += all(np.array_equal(one[name], other[name], equal_nan=True) for name in other)
    kept.append((what, one, {name: one[name].copy() for name in one}))


def _differences(got: Arrays, expected: Arrays, tolerance: float) -> Iterator[str]:
    for name, wanted in expected.items():
        if got[name].shape != wanted.shape or got[name].dtype != wanted.dtype:
            yield f"{name}: {got[name].dtype}{got[name].shape}, not {wanted.dtype}{wanted.shape}"
        elif wanted.dtype.kind != "f":
            if not np.array_equal(got[name], wanted):
                yield f"{name}: {np.count_nonzero(got[name] != wanted)} of {wanted.size} integers differ"
        elif wanted.size:
            finite = np.isfinite(wanted)
            if not np.array_equal(got[name][~finite], wanted[~finite], equal_nan=True):
                yield f"{name}: infinities differ"
            scale = max(1.0, float(np.abs(wanted[finite]).max(initial=0)))
            error = float(np.abs(got[name][finite].astype(np.float64) - wanted[finite]).max(initial=0))
            if not error <= tolerance * scale:
                yield f"{name}: off by {error:.2g} of {scale:.2g}"


class _Heard(logging.Handler):
    """Notes why a plan serves one shape only."""

    def __init__(self, found: Findings) -> None:
        super().__init__(logging.DEBUG)
        self.found = found

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "a plan for each shape" in text or "a plan for this shape" in text:
            if record.exc_info and record.exc_info[1] is not None:
                error, last = record.exc_info[1], traceback.extract_tb(record.exc_info[2])[-1]
                text += f": {type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"
            self.found.reasons.append(text)


if __name__ == "__main__":
    sys.exit(main())
