"""Inputs of a benchmark: files in turn (arrays, pictures, folders of them), random values, and the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunewright.errors import InputError

from ..shared.inputs import DimensionSizes, concrete, feed_with, pairs, parse_shapes, read_value

if TYPE_CHECKING:
    import numpy as np

    from tunewright.frontend.model import Model
    from tunewright.ir.graph import Value
    from tunewright.ir.types import Dim, TensorType, Type
    from tunewright.settings import Settings

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff")
ARRAYS = (".npy", ".npz", ".pb")
#: most bytes of files kept in memory; further values are left out with a note
MOST_BYTES = 1 << 30
#: number of channels -> Pillow's mode
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


@dataclass
class Data:
    """A model with all of its shapes set, and inputs to run in turn."""

    model: Model
    feeds: list[dict[str, Any]]
    #: input -> the origin of its values
    origin: dict[str, str]
    #: examples in one inference, or None if the model has no known batch dimension
    batch: int | None
    notes: list[str] = field(default_factory=list)


def gather(
    model: Model,
    given: Sequence[str] | None,
    shapes: Sequence[str] | None,
    batch: int | None,
    seed: int,
    settings: Settings,
    arrays: Mapping[str, Any] | None = None,
) -> Data:
    """Collect inputs from the options of the command line or from ``arrays``, and random ones for the rest."""
    wanted, symbols = parse_shapes(model, shapes or ())
    model = _fixed(model.reshape(wanted) if wanted else model, symbols)
    if batch is not None:
        model = with_batch(model, batch)
    sizes = DimensionSizes(settings)
    notes: list[str] = []
    sources: dict[str, list[str]] = {}
    for name, text in pairs(given or (), model, "--input"):
        sources.setdefault(name, []).extend(_files(text, name))
    values = {name: _values(texts, model.inputs[name], name, sizes, notes) for name, texts in sources.items()}
    values |= {name: [array] for name, array in (arrays or {}).items()}
    turns = max((len(found) for found in values.values()), default=1)
    feed = feed_with(model, {name: found[0] for name, found in values.items()}, settings, seed)
    feeds = [
        {name: values[name][k % len(values[name])] if name in values else value for name, value in feed.values.items()}
        for k in range(turns)
    ]
    origin = {name: _origin(sources[name]) if name in sources else text for name, text in feed.origin.items()}
    made = concrete(feed)
    return Data(made, feeds, origin, batch if batch is not None else batch_size(made), [*feed.notes, *notes])


def _origin(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"{len(texts)} files, {texts[0]} the first"


# -- the batch --------------------------------------------------------------------------------------------------------
def batch_inputs(model: Model) -> tuple[Dim, list[str]]:
    """Return the size or name of the batch dimension, and the inputs whose first dimension it is.

    It is the open first dimension that most inputs share. If none is open, it is the first dimension that all inputs of
    rank two or more share. Raises InputError if there is none.
    """
    from tunewright.ir.types import TensorType

    single = {value.name for value in model.graph.inputs if _is_one_example(value)}
    first: dict[str, Dim] = {
        name: type.shape[0]
        for name, type in model.inputs.items()
        if isinstance(type, TensorType)
        and type.shape
        and (len(type.shape) > 1 or not isinstance(type.shape[0], int))
        and name not in single
    }
    opened: list[Dim] = [d for d in first.values() if not isinstance(d, int)]
    if opened:
        found = max(dict.fromkeys(opened), key=opened.count)
    elif first and len(set(first.values())) == 1:
        found = next(iter(first.values()))
    else:
        there = ", ".join(f"{name}: {type}" for name, type in model.inputs.items()) or "none"
        raise InputError("the model has no batch dimension", where="--batch", hint=f"its inputs are {there}")
    return found, [name for name, dim in first.items() if dim == found]


def _is_one_example(value: Value) -> bool:
    """Whether every reader first adds a leading axis, as for a picture with ``--preprocess x=u8,hwc``."""
    users = [node for node, _ in value.uses]
    axes = [node.inputs[1] for node in users if node.op == "Unsqueeze"]
    fronts = (axis is not None and axis.const is not None and 0 in axis.const for axis in axes)
    return bool(users) and len(axes) == len(users) and all(fronts)


def with_batch(model: Model, batch: int) -> Model:
    """Return the model for this number of examples at a time."""
    dim, names = batch_inputs(model)
    if isinstance(dim, str):
        return _fixed(model, {dim: batch})
    shapes: dict[str, list[Dim]] = {}
    for name in names:
        shape = getattr(model.inputs[name], "shape", None) or ()
        shapes[name] = [batch, *shape[1:]]
    return model.reshape(shapes)


def batch_size(model: Model) -> int | None:
    """Return the number of examples in one inference, or None if it is unknown."""
    try:
        dim, _ = batch_inputs(model)
    except InputError:
        return None
    return dim if isinstance(dim, int) else None


def check_batch(outputs: Mapping[str, Type | None], batch: int) -> None:
    """Raise InputError if no output has the batch in front: the model then does not process batches."""
    from tunewright.ir.types import TensorType

    known = {n: t for n, t in outputs.items() if isinstance(t, TensorType) and t.is_static}
    if batch > 1 and known and not any(t.dims and t.dims[0] and t.dims[0] % batch == 0 for t in known.values()):
        there = ", ".join(f"{name}: {type}" for name, type in known.items())
        raise InputError(f"the model has no batch dimension: with {batch} examples its outputs are {there}",
                         where="--batch", hint="export it with an open batch")  # fmt: skip


def _fixed(model: Model, symbols: Mapping[str, int]) -> Model:
    """Return the model with these symbolic dimensions of its inputs set."""
    shapes: dict[str, list[Dim]] = {}
    for name, type in model.inputs.items():
        shape = getattr(type, "shape", None) or ()
        if any(dim in symbols for dim in shape if isinstance(dim, str)):
            shapes[name] = [symbols.get(dim, dim) if isinstance(dim, str) else dim for dim in shape]
    return model.reshape(shapes) if shapes else model


# -- files ------------------------------------------------------------------------------------------------------------
def _files(text: str, name: str) -> list[str]:
    """Return a folder's files in the order of their names; any other text alone."""
    path = Path(text)
    if not text or not path.is_dir():
        return [text]
    found = sorted(str(p) for p in path.iterdir() if p.suffix.lower() in (*PICTURES, *ARRAYS) and p.is_file())
    if not found:
        endings = ", ".join((*ARRAYS, *PICTURES))
        raise InputError("the folder has no arrays and no pictures", where=f"--input {name}={text}",
                         hint=f"they end with {endings}")  # fmt: skip
    return found


def _values(texts: Sequence[str], type: Type | None, name: str, sizes: DimensionSizes, notes: list[str]) -> list[Any]:
    """Return an input's values in turn. A whole batch of pictures makes one value."""
    import numpy as np

    if all(Path(text).suffix.lower() in PICTURES for text in texts):
        made = _pictures(texts, type, name, sizes)
    else:
        made = (_spread(read_value(text, type, name, sizes), type) for text in texts)
    found: list[Any] = []
    total = 0
    for value in made:
        total += getattr(value, "nbytes", 0)
        if found and total > MOST_BYTES:
            notes.append(f"{name}: {len(found)} values are used, the rest would take more than {MOST_BYTES >> 30} GiB")
            break
        if found and np.shape(value) != np.shape(found[0]):
            raise InputError(
                f"files of different shapes: {list(np.shape(found[0]))} ({texts[0]}), {list(np.shape(value))}",
                where=f"input {name!r}", hint="a benchmark runs one shape: measure each shape separately",
            )  # fmt: skip
        found.append(value)
    return found


def _spread(value: Any, type: Type | None) -> Any:
    """Repeat a single example to fill the batch."""
    import numpy as np

    shape: Sequence[Dim] = getattr(type, "shape", None) or ()
    if not isinstance(value, np.ndarray) or not shape or len(shape) != value.ndim or value.shape[0] != 1:
        return value
    return np.repeat(value, shape[0], axis=0) if isinstance(shape[0], int) and shape[0] > 1 else value


def _pictures(texts: Sequence[str], type: Type | None, name: str, sizes: DimensionSizes) -> Any:
    """Yield pictures as an input takes them, one batch at a time. The first pictures fill up the last batch."""
    import numpy as np

    from tunewright.ir.types import TensorType

    where = f"input {name!r}"
    if not isinstance(type, TensorType) or type.shape is None or not 2 <= len(type.shape) <= 4:
        raise InputError(f"takes {type}, which is not a picture", where=where, hint="give a .npy file")
    shape = list(type.shape)
    batch = 1
    if len(shape) == 4:
        first = shape.pop(0)
        batch = first if isinstance(first, int) else 1
    # If both ends could be the channels, three are more likely than one or four.
    front, back = (shape[0], shape[2]) if len(shape) == 3 else (None, None)
    last = back in _MODES and (back == 3 != front or front not in _MODES)
    if len(shape) == 3 and not last and shape[0] not in _MODES:
        raise InputError(f"takes {type}: which dimension are the colours?", where=where,
                         hint=f"give its shape: --shape {name}=1x3x224x224")  # fmt: skip
    channels = 1 if len(shape) == 2 else shape[2] if last else shape[0]
    high, wide = shape[:2] if last or len(shape) == 2 else shape[1:]
    size = tuple(d if isinstance(d, int) else None for d in (wide, high))
    known: dict[str, Any] = {}

    def one(text: str) -> Any:
        nonlocal size
        if text not in known:
            pixels = _picture(Path(text), _MODES[int(channels or 1)], size, where)
            size = (pixels.shape[1], pixels.shape[0])  # open sizes are those of the first picture
            known[text] = _scaled(pixels if last or len(shape) == 2 else pixels.transpose(2, 0, 1), type)
        return known[text]

    for at in range(0, len(texts), batch):
        group = [one(texts[(at + k) % len(texts)]) for k in range(batch)]
        yield np.ascontiguousarray(np.stack(group) if len(type.shape) == 4 else group[0])
        if batch == 1:
            known.clear()


def _picture(path: Path, mode: str, size: tuple[int | None, ...], where: str) -> np.ndarray[Any, Any]:
    """Return the pixels of a file (height, width, channels), resized."""
    import numpy as np

    try:
        from PIL import Image
    except ImportError:
        raise InputError(f"{path}: Pillow is not installed", where=where,
                         hint="pip install pillow, or give a .npy file") from None  # fmt: skip
    try:
        with Image.open(path) as file:
            picture = file.convert(mode)
        wide, high = (want or have for want, have in zip(size, picture.size, strict=True))
        if (wide, high) != picture.size:
            picture = picture.resize((wide, high), Image.Resampling.BILINEAR)
        pixels = np.asarray(picture)
    except FileNotFoundError:
        raise InputError(f"{path}: there is no such file", where=where) from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InputError(f"{path} cannot be read as a picture: {error}", where=where) from None
    return pixels if mode != "L" or len(size) == 0 else pixels[:, :, None]


def _scaled(pixels: np.ndarray[Any, Any], type: TensorType) -> np.ndarray[Any, Any]:
    """Scale pixels: unsigned integers are unchanged, signed bytes are centred on 0, floats go from 0 to 1."""
    import numpy as np

    if pixels.ndim == 3 and type.shape is not None and len(type.shape) == 2:
        pixels = pixels[:, :, 0]
    if type.dtype.is_integer:
        moved = pixels.astype(np.int16) - (128 if type.dtype.value == "int8" else 0)
        return moved.astype(type.dtype.numpy)
    return (pixels.astype(np.float32) / 255).astype(type.dtype.numpy)
