"""The works of `tunewright tune`: models and folders of models, with the shapes and weights of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunewright.errors import InputError

if TYPE_CHECKING:
    from tunewright.core import Core
    from tunewright.frontend.model import Model
    from tunewright.model_tuning.several_models import Workload
    from tunewright.plugins.members import MemberDevice

_HINT = "as in --case batch=8:0.3, or --case ids=1x128,mask=1x128:0.7"


@dataclass(frozen=True)
class InputShapes:
    """Shapes of inputs, and the weight of inferences with these shapes."""

    shapes: tuple[str, ...] = ()
    batch: int | None = None
    weight: float = 1.0

    @property
    def title(self) -> str:
        return f"batch={self.batch}" if self.batch is not None else ", ".join(self.shapes)


@dataclass(frozen=True)
class Fed:
    """Input options of the command line, which all works share."""

    input: Sequence[str] | None = None
    shape: Sequence[str] | None = None
    preprocess: Sequence[str] | None = None
    seed: int = 0


def paths_of(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Return the models and the dumps of problems that arguments name, searching folders. One of the lists is empty."""
    models: list[Path] = []
    dumps: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(path.rglob("*.onnx"))
            if inside and any(path.glob("*.jsonl")):
                raise InputError("holds models and dumps of problems", where=str(path), hint="name the files")
            if not inside and not any(path.glob("*.jsonl")):
                hint = "ENABLE_TUNE_DUMP=YES writes a dump"
                raise InputError("holds no model (.onnx) and no dump of problems (.jsonl)", where=str(path), hint=hint)
            models += inside
            dumps += [] if inside else [path]
        elif is_dump(path):
            dumps.append(path)
        else:
            models.append(path)
    if models and dumps:
        hint = "tune models and dumps (.jsonl) one after the other"
        raise InputError("is a model, but other arguments are dumps of problems", where=str(models[0]), hint=hint)
    return list(dict.fromkeys(models)), dumps


def is_dump(path: Path) -> bool:
    """Whether a file contains lines of JSON. ONNX files never begin like that."""
    if path.suffix == ".jsonl":
        return True
    with path.open("rb") as file:
        return file.read(64).lstrip().startswith(b"{")


def cases_of(case: Sequence[str] | None, batch: str | None) -> list[InputShapes]:
    """Return the cases to tune for; a single one without shapes if none are named."""
    if case and batch:
        raise InputError("exclude each other", where="--case, --batch", hint="give one of them")
    found = [_case(text) for text in case or ()]
    for text in (batch or "").split(",") if batch is not None else ():
        number, weight = _weighted(text, f"--batch {batch}", "as in --batch 1:0.8,8:0.2")
        if not number.isdecimal() or not int(number):
            hint = "as in --batch 1:0.8,8:0.2"
            raise InputError(f"{number!r} is not a batch size", where=f"--batch {batch}", hint=hint)
        found.append(InputShapes(batch=int(number), weight=weight))
    return found or [InputShapes()]


def _case(text: str) -> InputShapes:
    shapes, weight = _weighted(text, f"--case {text}", _HINT)
    parts = tuple(part.strip() for part in shapes.split(","))
    if not all("=" in part for part in parts):
        raise InputError("is not NAME=SHAPE[,NAME=SHAPE...][:WEIGHT]", where=f"--case {text}", hint=_HINT)
    return InputShapes(parts, weight=weight)


def _weighted(text: str, where: str, hint: str) -> tuple[str, float]:
    """Split off the weight after the last colon. It is 1 if there is none."""
    head, colon, tail = text.strip().rpartition(":")
    try:
        weight = float(tail) if colon else 1.0
    except ValueError:  # the colon belongs to a name
        return text.strip(), 1.0
    if not 0 < weight < float("inf"):
        raise InputError(f"{tail} is not a weight", where=where, hint=hint)
    return (head.strip() if colon else text.strip()), weight


def weights_of(texts: Sequence[str] | None, models: Sequence[Path]) -> dict[Path, float]:
    """Parse NAME=WEIGHT for models, which are named by path or file name. The default is 1."""
    found = dict.fromkeys(models, 1.0)
    for text in texts or ():
        name, _, value = text.rpartition("=")
        meant = [path for path in models if name in (str(path), path.name, path.stem)]
        try:
            weight = float(value)
        except ValueError:
            weight = 0.0
        if not name or not 0 < weight < float("inf"):
            raise InputError("is not NAME=WEIGHT", where=f"--weight {text}", hint="as in --weight model.onnx=3")
        if not meant:
            names = ", ".join(path.name for path in models[:5]) + (", ..." if models[5:] else "")
            raise InputError(f"there is no model {name!r}", where=f"--weight {text}", hint=f"the models are {names}")
        found |= dict.fromkeys(meant, weight)
    return found


def works_of(
    core: Core, models: Mapping[Path, float], cases: Sequence[InputShapes], fed: Fed, one: MemberDevice
) -> list[Workload]:  # fmt: skip
    """Return a work for every model and case, as one of several devices serves it."""
    from tunewright.model_tuning.several_models import Workload

    total = sum(case.weight for case in cases)
    return [
        Workload(
            " ".join(filter(None, (str(path), case.title))), _Opener(core, path, case, fed, one), str(path), weight,
            case.weight / total,
        )
        for path, weight in models.items()
        for case in cases
    ]  # fmt: skip


class _Opener:
    """Reads a model with inputs of the shapes of a case. Assumptions are printed once."""

    def __init__(self, core: Core, path: Path, case: InputShapes, fed: Fed, one: MemberDevice) -> None:
        self._core, self._path, self._case, self._fed, self._one = core, path, case, fed, one
        self._noted = False

    def __call__(self) -> tuple[Model, Mapping[str, Any]]:
        from ..benchmark.data import with_batch
        from ..shared.console import note
        from ..shared.inputs import coming, concrete, make_feed

        fed, case = self._fed, self._case
        model = coming(self._core.read_model(self._path), fed.preprocess)
        if case.batch is not None:
            model = with_batch(model, case.batch)
        feed = make_feed(model, fed.input, [*(fed.shape or ()), *case.shapes], fed.seed, self._core.settings)
        for text in () if self._noted else feed.notes:
            note(text)
        self._noted = True
        return self._one.model(concrete(feed)), self._one.inputs(feed.values)
