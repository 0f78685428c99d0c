"""Inputs for a model from the command line: files, literals, or random values that suit each type."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunewright.errors import InputError
from tunewright.frontend.stateful import parse_states

if TYPE_CHECKING:
    import numpy as np

    from tunewright.core import Core
    from tunewright.frontend.model import Model
    from tunewright.frontend.preprocess_inputs import Preprocess
    from tunewright.ir.graph import Value
    from tunewright.ir.types import Dim, TensorType, Type
    from tunewright.settings import Settings

#: exclusive limit of random integers; the rows of a table that they index may lower it
SMALL = 10
#: operations whose result holds the numbers of their first input
_SAME = frozenset({"Cast", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
#: operation -> {input with indices: input with the table}
_TABLES = {
    "Gather": {1: 0}, "com.microsoft::EmbedLayerNormalization": {0: 2, 1: 4, 8: 3},
}  # fmt: skip
WORDS = ("apple", "pear", "plum", "fig", "quince", "cherry", "lemon", "grape")


@dataclass
class DimensionSizes:
    """Values of symbolic dimensions. A dimension that nothing sets is 1, with a note."""

    settings: Settings
    symbols: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def static(self, type: TensorType, name: str) -> TensorType:
        """Return the type with every dimension set. An unknown rank or too large a tensor raises InputError."""
        where = f"input {name!r}"
        if type.shape is None:
            hint = f"give a shape: --shape {name}=1x3x224x224"
            raise InputError("its rank is unknown", where=where, hint=hint)
        dims = tuple(d if isinstance(d, int) else self.symbols.get(d or "", 1) for d in type.shape)
        opened = [d or "?" for d in type.shape if not isinstance(d, int) and d not in self.symbols]
        text = f"{name}: {', '.join(opened)} taken as 1; set with --shape {name}={'x'.join(map(str, dims))}"
        if opened and text not in self.notes:
            self.notes.append(text)
        static, limit = type.with_shape(dims), self.settings.max_tensor_bytes
        if static.nbytes > limit:
            hint = f"the limit is MAX_TENSOR_BYTES = {limit:,}"
            raise InputError(f"{static} has {static.nbytes:,} bytes", where=where, hint=hint)
        return static

    def learn(self, type: Type | None, value: Any) -> None:
        """Take sizes of symbolic dimensions from a given value."""
        shape, sizes = getattr(type, "shape", None), getattr(value, "shape", ())
        if shape is not None and len(shape) == len(sizes):
            for dim, size in zip(shape, sizes, strict=True):
                if isinstance(dim, str):
                    self.symbols.setdefault(dim, size)


@dataclass
class Feed:
    """A model with its shapes set, a value per input, and notes about assumptions."""

    model: Model
    values: dict[str, Any] = field(default_factory=dict)
    #: input -> the origin of its value
    origin: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def preprocessing(model: Model, texts: Sequence[str] | None) -> dict[str, Preprocess]:
    """Parse the texts of ``--preprocess`` by input."""
    from tunewright.frontend.preprocess_inputs import Preprocess

    return {name: Preprocess.parse(text) for name, text in pairs(texts or (), model, "--preprocess")}


def coming(model: Model, texts: Sequence[str] | None, stateful: str | None = None) -> Model:
    """Return a model whose inputs come as ``--preprocess`` says, with the states that ``--stateful`` names."""
    given = preprocessing(model, texts)
    model = model.preprocess(given) if given else model
    return model if stateful is None else model.make_stateful(parse_states(stateful))


def load(
    core: Core,
    path: Path,
    given: Sequence[str] | None,
    shapes: Sequence[str] | None,
    preprocess: Sequence[str] | None,
    seed: int,
    stateful: str | None = None,
) -> Feed:
    """Load a file with ``--input``, ``--shape``, ``--preprocess``, ``--seed`` and ``--stateful``.

    Prints a note about everything that it had to assume.
    """
    from .console import note, working

    with working("loading"):
        feed = make_feed(coming(core.read_model(path), preprocess, stateful), given, shapes, seed, core.settings)
    for text in feed.notes:
        note(text)
    return feed


def make_feed(
    model: Model, given: Sequence[str] | None, shapes: Sequence[str] | None, seed: int, settings: Settings
) -> Feed:
    """Make values for every input: given ones, random ones for the rest. Symbolic dimensions without a size are 1."""
    wanted, symbols = parse_shapes(model, shapes or ())
    if wanted:
        model = model.reshape(wanted)
    sizes = DimensionSizes(settings, symbols)
    feed = Feed(model, notes=sizes.notes)
    for name, text in pairs(given or (), model, "--input"):
        feed.values[name] = read_value(text, model.inputs[name], name, sizes)
        feed.origin[name] = text
        sizes.learn(model.inputs[name], feed.values[name])
    return _filled(feed, sizes, seed)


def feed_with(model: Model, values: Mapping[str, Any], settings: Settings, seed: int = 0) -> Feed:
    """Like `make_feed`, from values that are Python objects."""
    sizes = DimensionSizes(settings)
    feed = Feed(model, dict(values), dict.fromkeys(values, "given"), sizes.notes)
    for name, value in values.items():
        sizes.learn(model.inputs.get(name), value)
    return _filled(feed, sizes, seed)


def _filled(feed: Feed, sizes: DimensionSizes, seed: int) -> Feed:
    """Fill in random values where none are given; states begin with zeros."""
    import numpy as np

    from tunewright.ir.types import OptionalType

    rng = np.random.default_rng(seed)
    for name, type in feed.model.inputs.items():
        if name in feed.values or name in feed.model.states or isinstance(type, OptionalType):
            if name in feed.model.states:
                feed.origin.setdefault(name, "a state, zeros at first")
            continue  # an optional input may be absent
        value = next((v for v in feed.model.graph.inputs if v.name == name), None)
        feed.values[name] = random_value(rng, type, name, sizes, SMALL if value is None else below(value))
        feed.origin[name] = f"random, seed {seed}"
    return feed


def concrete(feed: Feed) -> Model:
    """Return the model with the open dimensions of its inputs set by the feed, so that compiling includes planning."""
    import numpy as np

    from tunewright.ir.types import TensorType

    fixed = {
        name: np.shape(feed.values[name])
        for name, type in feed.model.inputs.items()
        if isinstance(type, TensorType)
        and not type.is_static
        and name in feed.values
        and (type.shape is None or len(type.shape) == np.ndim(feed.values[name]))
    }
    known: dict[Dim, int] = {}
    for name, shape in fixed.items():
        known |= dict(zip(getattr(feed.model.inputs[name], "shape", None) or (), shape, strict=False))
    for name in feed.model.states:
        shape = getattr(feed.model.inputs[name], "shape", None)
        if shape is not None and name not in fixed:
            fixed[name] = tuple(known.get(dim, dim) if isinstance(dim, str) else dim for dim in shape)
    return feed.model.reshape(fixed) if fixed else feed.model


# -- shapes -----------------------------------------------------------------------------------------------------------
def parse_shapes(model: Model, texts: Sequence[str]) -> tuple[dict[str, list[Dim]], dict[str, int]]:
    """Parse shapes by input, and sizes by symbolic dimension."""
    names = {d for t in model.inputs.values() for d in getattr(t, "shape", None) or () if isinstance(d, str)}
    shapes: dict[str, list[Dim]] = {}
    symbols: dict[str, int] = {}
    for text in texts:
        name, equals, dims = text.rpartition("=")
        if equals and name in names and name not in model.inputs:
            size = _dim(dims, text)
            if size is not None:
                symbols[name] = size
            continue
        ((name, dims),) = pairs([text], model, "--shape", names)
        sizes: list[Dim] = [
            _dim(d, text) for d in dims.strip("[]() ").replace(",", "x").lower().split("x") if d.strip()
        ]
        old = getattr(model.inputs[name], "shape", None)
        if old is not None and len(old) == len(sizes):
            symbols.update({d: n for d, n in zip(old, sizes, strict=True) if isinstance(d, str) and isinstance(n, int)})
            # a dimension left open keeps its name
            sizes = [d if n is None else n for d, n in zip(old, sizes, strict=True)]
        shapes[name] = sizes
    return shapes, symbols


def _dim(text: str, where: str) -> int | None:
    text = text.strip()
    if text in ("?", "-1"):
        return None
    if not text.isdecimal():
        raise InputError(f"{text!r} is not a size", where=f"--shape {where}", hint="for example x=1x3x224x224")
    return int(text)


def pairs(texts: Sequence[str], model: Model, option: str, symbols: set[str] | None = None) -> list[tuple[str, str]]:
    """Split ``NAME=VALUE`` texts. The name is optional if the model has a single input."""
    found = []
    for text in texts:
        name = next((n for n in model.inputs if text.startswith(f"{n}=")), "")
        if name:
            found.append((name, text[len(name) + 1 :]))
            continue
        if "=" not in text and len(model.inputs) == 1:
            found.append((next(iter(model.inputs)), text))
            continue
        head, equals, _ = text.partition("=")
        what = f"there is no input {head!r}" if equals else "is not NAME=VALUE"
        hint = f"the inputs are {', '.join(model.inputs)}" if model.inputs else "the model has no inputs"
        if symbols:
            hint += f"; the symbolic dimensions are {', '.join(sorted(symbols))}"
        raise InputError(what, where=f"{option} {text}", hint=hint)
    return found


# -- given values -----------------------------------------------------------------------------------------------------
def read_value(text: str, type: Type | None, name: str, sizes: DimensionSizes) -> Any:
    """Read a value from a file or a literal, in the input's element type."""
    import numpy as np

    from tunewright.ir.types import OptionalType, SequenceType, TensorType

    where = f"input {name!r}"
    if isinstance(type, OptionalType):
        return read_value(text, type.elem, name, sizes)
    if isinstance(type, SequenceType):
        return [read_value(part, type.elem, name, sizes) for part in text.split(",")]
    if not text:
        hint = "give a .npy, .npz or .pb file, a number or a list"
        raise InputError("no value is given", where=f"--input {name}=", hint=hint)
    path = Path(text)
    suffix = path.suffix.lower()
    if suffix not in (".npy", ".npz", ".pb") and not path.exists():
        try:
            literal = json.loads(text)
        except ValueError:
            raise InputError(
                f"{text!r} is neither a file nor a value",
                where=where,
                hint="give a .npy, .npz or .pb file, a number or a list",
            ) from None
        return _literal(literal, type, name, sizes)
    try:
        array = _read_pb(path, where) if suffix == ".pb" else _read_npy(path, name)
    except OSError as error:
        raise InputError(f"{text}: {error.strerror or error}", where=where) from None
    except (ValueError, EOFError) as error:
        raise InputError(f"{text} cannot be read as an array: {error}", where=where) from None
    if isinstance(type, TensorType) and _foreign(type) and array.dtype != type.dtype.numpy:
        return array.astype(np.float32).astype(type.dtype.numpy)  # .npy has no bfloat16 and similar types
    return array


def _read_npy(path: Path, name: str) -> np.ndarray[Any, Any]:
    import zipfile

    import numpy as np

    with path.open("rb") as file:  # opened here, because np.load does not close a broken archive
        start = file.read(6)
        if start != b"\x93NUMPY" and not start.startswith(b"PK"):  # np.load would report it as a pickle
            raise ValueError("it is neither an .npy nor an .npz file")
        file.seek(0)
        try:
            loaded = np.load(file, allow_pickle=False)
        except zipfile.BadZipFile as error:
            raise ValueError(str(error)) from None
        if isinstance(loaded, np.ndarray):
            return loaded
        with loaded as archive:
            keys = list(archive.keys())
            if name not in keys and len(keys) != 1:
                raise ValueError(f"it holds {', '.join(keys) or 'nothing'}, but no {name!r}")
            return np.asarray(archive[name if name in keys else keys[0]])


def _read_pb(path: Path, where: str) -> np.ndarray[Any, Any]:
    """Read a serialized TensorProto, the format of ONNX's test data."""
    import numpy as np
    import onnx
    from google.protobuf.message import DecodeError

    try:
        tensor = onnx.TensorProto.FromString(path.read_bytes())
        return np.asarray(onnx.numpy_helper.to_array(tensor))
    except (DecodeError, TypeError, KeyError) as error:
        raise ValueError(str(error)) from None


def _literal(value: Any, type: Type | None, name: str, sizes: DimensionSizes) -> np.ndarray[Any, Any]:
    """Convert a literal. A number fills the shape; a list is used unchanged."""
    import numpy as np

    from tunewright.ir.types import DType, TensorType

    where = f"input {name!r}"
    if not isinstance(type, TensorType):
        raise InputError(f"takes {type}, not a plain value", where=where)
    try:
        array = np.asarray(value, object if type.dtype is DType.STRING else None)
        if type.dtype.is_integer and not np.array_equal(array, array.astype(np.int64)):
            raise ValueError("not a whole number")
        array = array.astype(type.dtype.numpy)
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError(f"{value!r} is not a {type.dtype} value: {error}", where=where) from None
    if array.ndim == 0 and type.shape:
        array = np.full(sizes.static(type, name).dims, array)
    return array


# -- random values ----------------------------------------------------------------------------------------------------
def below(value: Value) -> int:
    """Return the limit of an input's random integers: at most the rows of any table that they index."""
    from tunewright.ir.types import TensorType

    found, seen, waiting = SMALL, {value}, [value]
    while waiting:
        for node, i in waiting.pop().uses:
            at = _TABLES.get(node.op, {}).get(i)
            table = None if at is None else node.inputs[at]
            type = None if table is None else table.type
            if isinstance(type, TensorType) and type.shape:
                rows = type.shape[int(node.attrs.get("axis", 0)) % len(type.shape)]
                found = min(found, rows) if isinstance(rows, int) and rows else found
            if i == 0 and node.op in _SAME and node.output not in seen:
                seen.add(node.output)
                waiting.append(node.output)
    return found


def random_value(
    rng: np.random.Generator, type: Type | None, name: str, sizes: DimensionSizes, top: int = SMALL
) -> Any:
    """Return a random tensor, or for a sequence a list of two. Integers are below ``top``."""
    from tunewright.ir.types import SequenceType, TensorType

    if isinstance(type, SequenceType) and type.elem is not None:
        return [random_value(rng, type.elem, name, sizes, top) for _ in range(2)]
    if not isinstance(type, TensorType):
        hint = f"give one: --input {name}=..."
        raise InputError(f"there are no random values of type {type or '?'}", where=f"input {name!r}", hint=hint)
    return random_tensor(rng, sizes.static(type, name), top)


def random_tensor(rng: np.random.Generator, type: TensorType, top: int = SMALL) -> np.ndarray[Any, Any]:
    """Draw normal floats, bytes over their range, other integers below ``top``, and words for strings."""
    import numpy as np

    from tunewright.ir.types import DType

    dims, dtype = type.dims, type.dtype
    if dtype is DType.STRING:
        return rng.choice(np.asarray(WORDS, object), dims)
    if dtype is DType.BOOL:
        return rng.integers(0, 2, dims).astype(bool)
    if dtype is DType.UINT8:
        return rng.integers(0, 256 if top == SMALL else top, dims, np.uint8)
    if dtype.is_integer:
        bits = int("".join(c for c in dtype.value if c.isdigit()))
        top = min(top, 1 << (bits - (not dtype.value.startswith("u"))))
        return rng.integers(0, top, dims).astype(dtype.numpy)
    if dtype in (DType.COMPLEX64, DType.COMPLEX128):
        return (rng.standard_normal(dims) + 1j * rng.standard_normal(dims)).astype(dtype.numpy)
    return np.asarray(rng.standard_normal(dims, np.float32)).astype(dtype.numpy)


def _foreign(type: TensorType) -> bool:
    """Whether numpy, and so the .npy format, lacks the type."""
    return type.dtype.numpy.isbuiltin != 1 and type.dtype.numpy.kind != "O"
