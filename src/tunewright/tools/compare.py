"""``tunewright compare``: compares outputs with those of another engine."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from ..errors import DeviceError, InputError, TunewrightError
from .shared.console import (
    Configs,
    DeviceName,
    Inputs,
    ModelFile,
    Preprocessing,
    Seed,
    Shapes,
    cell,
    console,
    note,
    parse_config,
    table,
    working,
)

if TYPE_CHECKING:
    import numpy as np
    import onnx

    from ..core import Core
    from ..frontend.model import Model
    from ..frontend.preprocess_inputs import Preprocess
    from ..ir.types import Type

#: Types of quantised results, which may differ by one step on at most this part of the elements.
STEPS, STEPPED = ("int8", "uint8"), 1e-3

#: model, path, inputs -> outputs by name
Oracle: TypeAlias = Callable[["onnx.ModelProto", Path, Mapping[str, Any]], dict[str, Any]]


class Against(enum.StrEnum):
    AUTO = "auto"
    ONNXRUNTIME = "onnxruntime"
    REFERENCE = "reference"


@dataclass(frozen=True)
class Difference:
    """The comparison of one output with the expected one. ``why`` is empty if it passes."""

    name: str
    type: str
    max_abs: float = 0.0
    relative: float = 0.0
    cosine: float = 1.0
    why: str = ""


def compare(
    model: ModelFile,
    input: Inputs = None,
    shape: Shapes = None,
    preprocess: Preprocessing = None,
    against: Annotated[
        Against,
        typer.Option(
            "--against", metavar="ENGINE", help="onnxruntime, reference, or auto: ONNX Runtime where installed."
        ),
    ] = Against.AUTO,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance",
            min=0.0,
            metavar="T",
            show_default="by type, 1e-4 for float32",
            help="Largest error as a part of the output's scale.",
        ),
    ] = None,
    layers: Annotated[bool, typer.Option("--layers", help="Compare every layer; find the first that differs.")] = False,
    device: DeviceName = "CPU",
    config: Configs = None,
    seed: Seed = 0,
) -> None:
    """Compare outputs with another engine's. Exit code 1 when they differ.

    Example: tunewright compare model.onnx --shape x=1x3x224x224 --layers

    With --preprocess, numpy applies the same steps to the inputs of the other engine:

    tunewright compare model.onnx -i x=frame.npy --preprocess x=u8,hwc,reverse,resize,scale=255
    """
    from ..core import Core
    from ..ir.types import TensorType
    from ..plugins.find import find
    from .compare_pictures import prepared
    from .shared.inputs import make_feed, preprocessing

    core = Core(parse_config(config))
    find(device, core.settings)  # an unknown device fails before the work starts
    name, oracle = choose_oracle(against)
    out = console()
    with working(f"running here and in {name}"):
        read = core.read_model(model)
        given = preprocessing(read, preprocess)
        feed = make_feed(read.preprocess(given) if given else read, input, shape, seed, core.settings)
        for text in feed.notes:
            note(text)
        mine = core.compile_model(feed.model, device)(feed.values)
        types, values = dict(feed.model.inputs), dict(feed.values)
        for key, how in given.items():
            wanted = read.inputs[key]
            assert isinstance(wanted, TensorType)  # `read.preprocess` has accepted it
            values[key] = prepared(how, values[key], wanted)
            types[key] = TensorType.of(values[key])
        proto = with_shapes(_parse(model), types)
        theirs = oracle(proto, model, values)
    results = [d for key, value in mine.items() for d in differences(key, value, theirs.get(key), tolerance)]
    out.print(cell(f"{model} on {device} against {name}"), style="bold", soft_wrap=True)
    out.print()
    show(results)
    bad = [d for d in results if d.why]
    out.print()
    out.print("[red]the outputs differ[/red]" if bad else _agree(len(results), "output"))
    if layers:
        with working("comparing layers"):
            found = compare_layers(core, proto, model, values, device, oracle, tolerance, given, feed.values)
        out.print()
        show_layers(found, proto, bool(bad))
        bad = bad or [d for d in found if d.why]
    if bad:
        raise typer.Exit(1)


# -- oracles ----------------------------------------------------------------------------------------------------------
def choose_oracle(against: Against) -> tuple[str, Oracle]:
    """Return the name of the other engine and the function that runs it."""
    have = find_spec("onnxruntime") is not None
    if against is Against.ONNXRUNTIME and not have:
        raise DeviceError("ONNX Runtime is not installed", hint="pip install onnxruntime, or --against reference")
    if have and against is not Against.REFERENCE:
        return "ONNX Runtime", run_onnxruntime
    return "the ONNX reference", run_reference


def run_onnxruntime(proto: onnx.ModelProto, path: Path, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Run ONNX Runtime on the CPU, with one thread per core and its own optimisations."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(path.absolute().parent)
    )
    try:
        session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
        names = [o.name for o in session.get_outputs()]
        return dict(zip(names, session.run(names, dict(inputs)), strict=True))
    except Exception as error:  # native code may raise anything
        raise _refused("ONNX Runtime", error, "--against reference compares with the slow, complete one") from error


def run_reference(proto: onnx.ModelProto, path: Path, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Run onnx.reference: numpy, slow, complete."""
    import numpy as np
    import onnx
    from onnx.reference import ReferenceEvaluator

    try:
        onnx.load_external_data_for_model(proto, str(path.absolute().parent))
        with np.errstate(all="ignore"):
            session = ReferenceEvaluator(proto)
            return dict(zip(session.output_names, session.run(None, dict(inputs)), strict=True))
    except Exception as error:  # numpy code on an arbitrary model may raise anything
        raise _refused("the ONNX reference", error, "") from error


def _refused(who: str, error: Exception, hint: str) -> TunewrightError:
    text = " ".join(str(error).split())
    return TunewrightError(f"{who} cannot run the model: {text[:300]}", hint=hint)


def _parse(path: Path) -> onnx.ModelProto:
    import onnx

    return onnx.ModelProto.FromString(path.read_bytes())


def with_shapes(proto: onnx.ModelProto, inputs: Mapping[str, Type | None]) -> onnx.ModelProto:
    """Set the input sizes of --shape where the file declares other sizes. Open dimensions stay open.

    Closing them would let the other engine infer shapes inside branches that never run, and fail there.
    """
    from ..ir.types import TensorType

    changed = False
    for info in proto.graph.input:
        type = inputs.get(info.name)
        dims = info.type.tensor_type.shape.dim
        if not isinstance(type, TensorType) or type.shape is None or len(dims) != len(type.shape):
            continue
        for dim, size in zip(dims, type.shape, strict=True):
            if isinstance(size, int) and dim.HasField("dim_value") and dim.dim_value not in (-1, size):
                dim.dim_value = size
                changed = True
    if changed:
        del proto.graph.value_info[:]
        for info in proto.graph.output:
            if info.type.HasField("tensor_type"):
                info.type.tensor_type.ClearField("shape")
    return proto


# -- differences ------------------------------------------------------------------------------------------------------
def differences(name: str, mine: Any, theirs: Any, tolerance: float | None = None) -> list[Difference]:
    """Return one difference for a tensor, and one per element for a sequence."""
    import numpy as np

    if isinstance(mine, list) and isinstance(theirs, (list, tuple)):
        if len(mine) != len(theirs):
            return [Difference(name, f"seq of {len(mine)}", why=f"{len(mine)} elements, not {len(theirs)}")]
        return [
            d
            for i, (a, b) in enumerate(zip(mine, theirs, strict=True))
            for d in differences(f"{name}[{i}]", a, b, tolerance)
        ]
    if mine is None or theirs is None:
        here = mine is None and theirs is None
        return [Difference(name, "nothing", why="" if here else "present on one side only")]
    if isinstance(mine, dict) and isinstance(theirs, dict):
        if set(mine) != set(theirs):
            return [Difference(name, f"map of {len(mine)}", why="the keys differ")]
        mine, theirs = ([values[key] for key in mine] for values in (mine, theirs))
        theirs = np.asarray(theirs, np.asarray(mine).dtype)
    return [difference(name, np.asarray(mine), np.asarray(theirs), tolerance)]


def difference(
    name: str, mine: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any], tolerance: float | None = None
) -> Difference:
    """Compute the largest absolute error, also relative to the expected output's scale, and the cosine similarity."""
    import numpy as np

    from ..ir.types import DType
    from ..ops.tolerance import TOLERANCES

    type = f"{mine.dtype if mine.dtype != object else 'string'}{list(mine.shape)}".replace(" ", "")
    if mine.shape != theirs.shape:
        return Difference(name, type, math.inf, math.inf, 0.0, f"the other has shape {list(theirs.shape)}")
    if mine.dtype.kind in "OUS" or theirs.dtype.kind in "OUS":
        wrong = int(np.sum(mine.astype(str) != theirs.astype(str)))
        return Difference(name, type, why=f"{wrong} strings differ" if wrong else "")
    if mine.dtype.kind != "c" and mine.dtype.name != theirs.dtype.name:
        return Difference(name, type, math.inf, math.inf, 0.0, f"the other has type {theirs.dtype}")
    kind = np.complex128 if mine.dtype.kind == "c" else np.float64
    a, b = mine.astype(kind).ravel(), theirs.astype(kind).ravel()
    same = (a == b) | (np.isnan(a) & np.isnan(b))  # includes equal infinities, and NaN in the same places
    odd = ~same & ~(np.isfinite(a) & np.isfinite(b))
    a, b = np.where(same | odd, 0, a), np.where(same | odd, 0, b)
    scale = float(np.max(np.abs(theirs[np.isfinite(theirs)].astype(kind)), initial=0.0))
    error = float(np.max(np.abs(a - b), initial=0.0))
    relative = error / scale if scale else math.inf if error else 0.0
    whole = (mine.astype(kind).ravel()[~odd], theirs.astype(kind).ravel()[~odd])
    cosine = _cosine(*(np.nan_to_num(x, posinf=0.0, neginf=0.0) for x in whole))
    why = ""
    if odd.any():
        why = f"{int(odd.sum())} elements are not finite on one side only"
    elif mine.dtype.name in STEPS and tolerance is None:
        stepped = float(np.mean(a != b)) if a.size else 0.0
        if error > 1 or stepped > STEPPED:
            why = f"{stepped:.2%} of the elements differ, by up to {error:.0f} steps"
    else:
        limit = TOLERANCES.get(DType.of_numpy(mine.dtype))
        allowed = tolerance if tolerance is not None else limit.network if limit is not None else 0.0
        if relative > allowed:
            why = f"error {relative:.1e} of the scale is above {allowed:.0e}" if allowed else "not equal"
    return Difference(name, type, error, relative, cosine, why)


def _cosine(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    import numpy as np

    norm = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(np.vdot(a, b).real / norm) if norm else 1.0 if not a.any() and not b.any() else 0.0


def show(results: Sequence[Difference]) -> None:
    """Print one row per output."""
    made = table("output", "type", ">max abs", ">of scale", ">cosine", "verdict")
    for d in results:
        verdict = cell(d.why or "ok")
        verdict.stylize("red" if d.why else "green")
        made.add_row(cell(d.name), cell(d.type), f"{d.max_abs:.2e}", f"{d.relative:.2e}", f"{d.cosine:.6f}", verdict)
    console().print(made)


def _agree(count: int, what: str) -> str:
    return f"the {what} agrees" if count == 1 else f"all {count} {what}s agree"


# -- layers -----------------------------------------------------------------------------------------------------------
def compare_layers(
    core: Core,
    proto: onnx.ModelProto,
    path: Path,
    inputs: Mapping[str, Any],
    device: str,
    oracle: Oracle,
    tolerance: float | None,
    preprocess: Mapping[str, Preprocess] | None = None,
    unprepared: Mapping[str, Any] | None = None,
) -> list[Difference]:
    """Compare every result of the main graph, in the model's order, by making it an output on both sides.

    A value that is an output cannot be fused away, so each layer is compared separately. ``unprepared``: the inputs
    before ``preprocess``, which is then part of the model.
    """
    exposed = expose(proto)
    read = _read(core, exposed, path.absolute().parent)
    mine = core.compile_model(read, device, preprocess=preprocess or None)(unprepared if preprocess else inputs)
    theirs = oracle(exposed, path, inputs)
    order = [o for node in exposed.graph.node for o in node.output if o in mine and o in theirs]
    return [d for name in order for d in differences(name, mine[name], theirs[name], tolerance)]


def expose(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy in which every result of the main graph is an output."""
    import onnx

    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    known = {o.name for o in copy.graph.output}
    for node in copy.graph.node:
        for name in node.output:
            if name and name not in known:
                known.add(name)
                copy.graph.output.append(onnx.ValueInfoProto(name=name))
    return copy


def _read(core: Core, proto: onnx.ModelProto, folder: Path) -> Model:
    """Read a model. External weights come from the original's folder and pass the front end's checks."""
    import tempfile

    if not any(t.external_data for t in proto.graph.initializer):
        return core.read_model(proto)
    with tempfile.NamedTemporaryFile(suffix=".onnx", dir=folder) as file:
        file.write(proto.SerializeToString())
        file.flush()
        return core.read_model(file.name)


def show_layers(found: Sequence[Difference], proto: onnx.ModelProto, differ: bool) -> None:
    """Print the first layer that differs, with its neighbours, or that no layer differs."""
    out = console()
    if not found:
        raise InputError("there is no layer to compare", where="--layers")
    wrong = [i for i, d in enumerate(found) if d.why]
    if not wrong:
        out.print(f"{_agree(len(found), 'layer')}, each computed by itself")
        if differ:
            out.print("so a fusion or a fold makes the difference: switch passes off with --config DISABLED_PASSES=...")
        return
    first = wrong[0]
    makers = {o: node for node in proto.graph.node for o in node.output}
    node = makers.get(found[first].name.partition("[")[0])
    what = f"{node.op_type} {node.name!r}" if node is not None else "?"
    out.print(
        cell(f"{len(wrong)} of {len(found)} layers differ; the first is {what}, output {found[first].name!r}"),
        style="bold",
    )
    out.print()
    show(found[max(0, first - 2) : first + 3])


COMMANDS = (compare,)
