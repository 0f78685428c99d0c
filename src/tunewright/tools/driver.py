"""``tunewright driver``: examines single problems. It queries every solver, times all kernels together and checks them.

An application prints such commands for the problems that it meets (ENABLE_LOGGING_CMD). They can be run here, alone or
all together.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InputError, TunewrightError
from .kb.open import settings_of, writable
from .kb.view import config_text, plural, problem_text, safe, short
from .shared.console import Configs, OneDevice, cell, console, note, number, size, table

if TYPE_CHECKING:
    from ..settings import Settings
    from ..solvers.base import Problem
    from .driver_run import DriverReport, Entrant

#: changes when the meaning of a JSON key changes
SCHEMA = "tunewright.driver/1"
#: exit code if a kernel is faulty, or if one of several commands could not be run
FAULTY = 1
#: seconds after which progress is shown
PATIENCE = 2.0

Tune = Annotated[bool, typer.Option("--tune", help="Tune it first; the result goes into the user's knowledge base.")]
Seconds = Annotated[
    float | None,
    typer.Option("--seconds", min=0, metavar="S", help="Time to tune (default: TUNE_SECONDS).", show_default=False),
]
Warm = Annotated[bool, typer.Option("--warm", help="Let all data stay in the cache (default: as TUNE_REGIME says).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

app = typer.Typer(name="driver", invoke_without_command=True)


@app.callback()
def driver(
    context: typer.Context,
    commands: Annotated[
        str | None,
        typer.Option("--commands", metavar="FILE", help="Run the commands in a file (-: stdin).", show_default=False),
    ] = None,
    device: OneDevice = "CPU",
    tune: Tune = False,
    seconds: Seconds = None,
    warm: Warm = False,
    config: Configs = None,
    as_json: AsJson = False,
) -> None:
    """Time and check every solver of one operation, and tune it.

    A command poses one problem. An input is a type such as 'float32[1,64,56,56]'. A ! after it means that it is
    constant, and =VALUE gives a value that the operation needs; _ is an absent input. Attributes are options: --pads
    1,1,1,1. Attributes that ONNX does not define: --attr name=JSON. Fused steps: --epilogue 'Add(@, 3) | Relu'. There @
    is the result and 3 an input; --operand adds inputs for the steps. --output gives a result's type that cannot be
    inferred.

    With ENABLE_LOGGING_CMD=YES an application prints the commands of all problems that it meets; --commands runs them.

    Example: tunewright driver --commands log.txt --tune --seconds 10
    """
    below = context.invoked_subcommand
    if below is not None:
        if commands is not None:
            raise InputError(f"cannot be combined with the sub-command {below}", where="--commands")
        if device != "CPU" or tune or seconds is not None or warm or config or as_json:
            hint = f"tunewright driver {below} --device NAME ..."
            raise InputError(f"the options must follow the sub-command {below}", hint=hint)
        return
    if commands is None:
        sys.stdout.write(context.get_help() + "\n")
        return
    with _opened(commands) as lines:
        problems, reasons = _read(lines)
    for reason in reasons:
        note(f"{commands}, {reason}")
    if not problems:
        hint = "ENABLE_LOGGING_CMD=YES makes an application print some"
        raise InputError("holds no command that can be run", where=commands, hint=hint)
    code = _run(problems, device, _settings(config, seconds, warm), tune, as_json)
    raise typer.Exit(code or (FAULTY if reasons else 0))


@contextlib.contextmanager
def _opened(name: str) -> Iterator[Iterable[str]]:
    if name == "-":
        yield sys.stdin
        return
    with open(name, encoding="utf-8", errors="replace") as file:
        yield file


def _read(lines: Iterable[str]) -> tuple[list[Problem], list[str]]:
    """Return each problem once, and the reasons for lines that pose none."""
    from ..tuning.offline.command import from_line

    found: dict[str, Problem] = {}
    reasons = []
    for n, line in enumerate(lines, 1):
        try:
            problem = from_line(line)
        except InputError as error:
            reasons.append(f"line {n}: {error}")
            continue
        if problem is not None:
            found.setdefault(problem.key(), problem)
    return list(found.values()), reasons


def _command(title: str) -> Callable[..., None]:
    """Make the sub-command of a class. Options that it does not declare pose the problem."""

    def run(
        context: typer.Context,
        device: OneDevice = "CPU",
        tune: Tune = False,
        seconds: Seconds = None,
        warm: Warm = False,
        config: Configs = None,
        as_json: AsJson = False,
    ) -> None:
        from ..tuning.offline.command import from_arguments

        if not context.args:
            sys.stdout.write(f"{context.get_help()}\n{_usage(title)}\n")
            return
        problem = from_arguments(title, context.args)
        raise typer.Exit(_run([problem], device, _settings(config, seconds, warm), tune, as_json))

    return run


def _usage(title: str) -> str:
    """Describe the options of a class that pose a problem. This needs ONNX's schemas, so a plain --help omits it."""
    from ..tuning.offline.command_form import CLASSES, form

    op = CLASSES[title].default
    if op is None:
        return f"--op says which operation it is, as in: tunewright driver {CLASSES[title].example}"
    own = [*form(op).roles, *(name.replace("_", "-") for name in form(op).kinds)]
    return f"{op} takes {', '.join(f'--{name}' for name in own)}; --op names another operation."


def _settings(config: Sequence[str] | None, seconds: float | None, warm: bool) -> Settings:
    from ..settings import Settings

    asked = {} if seconds is None else {"TUNE_SECONDS": seconds}
    return Settings.make({**asked, **({"TUNE_REGIME": "WARM"} if warm else {})}, settings_of(config))


def _run(problems: Sequence[Problem], device_name: str, settings: Settings, tune: bool, as_json: bool) -> int:
    """Examine problems one by one. Tuning results are stored at once, so that an interrupt loses nothing."""
    from ..plugins.single import of_device, open_device
    from ..tuning.tuner import Tuner
    from .driver_run import examine

    if tune:
        writable(settings)
    device = of_device(open_device(device_name, settings), settings).device  # with the threads of one stream
    tuner = Tuner(settings)
    code = 0
    shown: list[dict[str, Any]] = []
    for n, problem in enumerate(problems, 1):
        before = f"{n} of {len(problems)}, {problem_text(problem.key())}: " if len(problems) > 1 else ""
        try:
            with _progress(before) as tell:
                report = examine(problem, device, tuner, settings, tune, tell)
        except TunewrightError as error:
            if len(problems) == 1:
                raise
            note(f"{before}{error}")
            code = FAULTY
            shown.append({"problem": problem.key(), "error": str(error)})
            continue
        if any(e.is_faulty for e in report.entrants):
            code = FAULTY
        if as_json:
            shown.append(_json(report, device.name, settings))
        else:
            _print(report, device.name)
    if as_json:
        sys.stdout.write(json.dumps({"schema": SCHEMA, "device": device.name, "results": shown}, indent=2) + "\n")
    return code


@contextlib.contextmanager
def _progress(before: str) -> Iterator[Callable[[str], None]]:
    """Show progress on stderr after two seconds, if it is a terminal."""
    import time

    if not sys.stderr.isatty():
        yield lambda text: None
        return
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        status: list[Any] = []

        def tell(text: str) -> None:
            if status:
                status[0].update(cell(before + text))
            elif time.monotonic() - began > PATIENCE:
                status.append(stack.enter_context(console(stderr=True).status(cell(before + text))))

        yield tell


# ---- what is shown --------------------------------------------------------------------------------------------------


def _json(report: DriverReport, device: str, settings: Settings) -> dict[str, Any]:
    tuned, work, chosen = report.tuned, report.work, report.chosen
    return {
        "problem": report.problem.key(),
        "command": _line(report.problem, device, settings),
        "regime": {"kind": report.regime.kind, "copies": report.regime.copies, "bytes": report.regime.nbytes},
        "work": None if isinstance(work, str) else {"flops": work.flops, "bytes": work.bytes},
        "rounds": report.rounds,
        "default": report.default.solver,
        "chosen": {"solver": chosen.solver, "config": dict(chosen.config), "origin": report.origin},
        "kernels": [_entrant(e) for e in report.entrants],
        "refused": dict(report.refused),
        "tuned": None
        if tuned is None
        else {
            "solver": tuned.chosen[0],
            "config": dict(tuned.chosen[1]),
            "changed": tuned.changed,
            "reason": tuned.reason,
            "gain": vars(tuned.gain) if tuned.gain is not None else None,
            "attempted": tuned.attempted,
            "records": len(tuned.records) + len(tuned.faults),
        },
        "untunable": report.untunable or None,
    }


def _line(problem: Problem, device: str, settings: Settings, options: Sequence[str] = ()) -> str | None:
    """Return the command that poses a problem, or None if it would be too long for a shell."""
    from ..tuning.offline import suggested_commands

    with contextlib.suppress(InputError):
        return suggested_commands.driver(problem, device, settings, options)
    return None


def _entrant(e: Entrant) -> dict[str, Any]:
    found = e.quartiles
    return {
        "solver": e.solver,
        "config": dict(e.config),
        "status": str(e.status),
        "why": e.attempt.why or None,
        "seconds": dict(zip(("lower", "median", "upper"), found, strict=True)) if found else None,
        "samples": len(e.samples),
        "probed": e.attempt.probed,
        "speed": vars(e.speed) if e.speed is not None else None,
        "error": e.attempt.error,
        "compile_seconds": e.attempt.compile_seconds,
    }


def _print(report: DriverReport, device: str) -> None:
    out = console()
    work, regime = report.work, report.regime
    out.print(cell(safe(report.problem.key())), style="bold", soft_wrap=True)
    counted = work if isinstance(work, str) else f"{number(work.flops / 1e6)} MFLOP, {size(work.bytes)}"
    data = f"{size(regime.nbytes)} in {regime.copies} {'copy' if regime.copies == 1 else 'copies'}"
    out.print(cell(f"{device}; {counted}; {regime.kind}, {data}; {plural(report.rounds, 'round')}"), soft_wrap=True)
    out.print()
    made = table("solver", ">ms", ">quartiles", ">speed", ">GFLOP/s", ">GB/s", ">error")
    for e in report.entrants:
        found = e.quartiles
        if found is None:
            continue
        rates = ["-", "-"] if isinstance(work, str) else [f"{x / found[1] / 1e9:.1f}" for x in (work.flops, work.bytes)]
        spread = "one probe" if e.attempt.probed else f"{_short(found[0])}-{_short(found[2])}"
        speed = f"{e.speed.median:.2f}" if e.speed is not None else f"{_rough(report, found[1])}"
        name = f"{e.solver} (chosen)" if e is report.chosen and e is not report.default else e.solver
        made.add_row(cell(name), _short(found[1]), spread, speed, *rates, f"{e.attempt.error:.0e}")
    out.print(made)
    out.print()
    for e in report.entrants:
        if e.quartiles is None:
            out.print(cell(f"{e.solver}: {str(e.status).lower()}: {safe(e.attempt.why)}"), style="red", soft_wrap=True)
    out.print(cell(f"default: {_kernel(report.default)}"), soft_wrap=True)
    if report.chosen is not report.default:
        out.print(cell(f"chosen: {_kernel(report.chosen)} ({report.origin})"), soft_wrap=True)
    if report.tuned is not None:
        out.print(cell(f"tuned: {plural(report.tuned.attempted, 'candidate')}; {report.tuned.reason}"), soft_wrap=True)
    elif report.untunable:
        out.print(cell(f"not tuned: {report.untunable}"))
    if report.refused:
        out.print()
        for name, why in report.refused.items():
            out.print(cell(f"{name} refuses: {short(safe(why))}"), style="dim", soft_wrap=True)
    out.print()


def _short(seconds: float) -> str:
    """Format milliseconds in few characters, because names of solvers are long."""
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def _kernel(e: Entrant) -> str:
    return f"{e.solver} {config_text(e.config)}".rstrip()


def _rough(report: DriverReport, seconds: float) -> str:
    """Return the speed of a kernel that was only probed."""
    own = report.default.quartiles
    return "-" if own is None else f"{own[1] / seconds:.2g}"


def _register() -> None:
    from ..tuning.offline.command_form import CLASSES

    for title, about in CLASSES.items():
        example = f"Example: tunewright driver {about.example}"
        app.command(
            title,
            help=f"{about.about} Without options it says which there are.\n\n{example}",
            context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        )(_command(title))


_register()
COMMANDS = (app,)
