"""A machine with many cores: what a cold load does there, and ours against ONNX Runtime on 1, 4 and all threads.

python bench/cores.py --json cores.json                    everything, within five minutes
python bench/cores.py --only loads --compiler /tmp/zig/zig   the loads alone, with a compiler that is not installed
python bench/cores.py --threads 1,2 --models resnet18 --limit 60

It needs onnx, onnxruntime and numpy, no packages of models and no network: weights are random. First come the loads:
the very first one on this machine as it is, then with parts of the machine taken away (disk cache, cores, compilers at
a time), and what the parts of a load take by themselves. That tells why a load is slow: a cold disk (``reads``, seconds
of waiting), processes that start slowly (``starting``), compilers that slow each other down, imports, memory that the
machine touches for the first time, or too little beside each other. Then come the networks, in turns (`turns`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import loads
from loads import How, Stored

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
CORES = len(os.sched_getaffinity(0))
#: seconds of a turn, and rounds of turns at most
TURN, ROUNDS = 0.12, 9
#: megabytes that are touched for the first time, and again
TOUCHED = 512
_TEXT = "float f(float* x, int n) { float s = 0; for (int i = 0; i < n; i++) s += x[i] * x[i]; return s; }\n"


def makers() -> dict[str, Callable[[], tuple[Any, Any]]]:
    """Networks by name; nothing of them is downloaded."""
    from functools import partial

    import light_models
    import numpy as np

    from tunewright.testing import models

    def ours(make: Callable[[], Any]) -> tuple[Any, Any]:
        model, rng = make(), np.random.default_rng(0)
        shapes = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in model.graph.input}
        return model, {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}

    bert = partial(models.transformer, layers=6, hidden=384, heads=12, length=128)
    tiny = partial(models.transformer, layers=1, hidden=32, heads=2, length=8)
    return {
        "resnet50": partial(light_models.load, "resnet50"), "tiny": partial(ours, tiny),
        "resnet18": partial(ours, models.resnet), "mobilenet_v2": partial(ours, models.mobilenet),
        "bert6": partial(ours, bert), "squeezenet": partial(light_models.load, "squeezenet"),
        "densenet121": partial(light_models.load, "densenet121"),
    }  # fmt: skip


# What the parts of a load take


def parts(compiler: Sequence[str]) -> Iterator[tuple[str, float]]:
    """Seconds of single steps, each by itself: what they are, and the least of some times."""
    yield "python -c pass", least(lambda: run(sys.executable, "-c", "pass"))
    yield "python -c pass, without site-packages", least(lambda: run(sys.executable, "-S", "-c", "pass"))
    yield "python: import numpy", least(lambda: run(sys.executable, "-c", "import numpy"))
    product = "import numpy; a = numpy.ones((512, 512), 'f'); a @ a"
    yield "python: import numpy and its first product", least(lambda: run(sys.executable, "-c", product))
    yield "the same with one BLAS thread", least(lambda: run(sys.executable, "-c", product, OPENBLAS_NUM_THREADS="1"))
    yield "python: import onnx", least(lambda: run(sys.executable, "-c", "import onnx"))
    yield "python: import tunewright.core", least(lambda: run(sys.executable, "-c", "import tunewright.core"))
    entries = "import importlib.metadata as m; m.entry_points()"
    yield "python: entry points of all distributions", least(lambda: run(sys.executable, "-c", entries))
    yield f"touching {TOUCHED} MB of memory, first", touch()
    yield f"touching {TOUCHED} MB of memory, again", touch()
    yield "starting /bin/true", least(lambda: run("/bin/true"))
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "f.c"
        source.write_text(_TEXT, encoding="utf-8")

        def compile(number: int) -> None:
            run(*compiler, "-x", "c", "-O3", "-ffreestanding", "-c", str(source), "-o", f"{name}/{number}.o")

        forget([Path(compiler[0])])
        yield "a small text, compiler not in memory", once(lambda: compile(0))
        yield "a small text", least(lambda: compile(0))
        for count in sorted({2, 4, CORES // 2, CORES} - {0, 1}):
            with ThreadPoolExecutor(count) as pool:
                yield f"{count} small texts at a time", least(lambda: list(pool.map(compile, range(count))))  # noqa: B023


def run(*command: str, **environment: str) -> None:
    subprocess.run(command, env={**os.environ, **environment}, capture_output=True, check=True)


def once(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def least(call: Callable[[], Any], times: int = 3) -> float:
    return min(once(call) for _ in range(times))


def touch() -> float:
    """Seconds in which a process touches memory: where a virtual machine has not had it yet, its host makes it."""
    text = f"import time\nb = time.perf_counter()\nx = bytearray({TOUCHED} << 20)\nx[::4096] = bytes(len(x) // 4096)\n"
    text += "print(time.perf_counter() - b)"
    return float(subprocess.run([sys.executable, "-c", text], capture_output=True, check=True).stdout)


def forget(paths: Sequence[Path]) -> None:
    """Have the system drop what it remembers of files: they are read from disk again (where nobody has them open)."""
    for path in paths:
        try:
            handle = os.open(path, os.O_RDONLY)
        except OSError:
            continue
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError:
            pass
        finally:
            os.close(handle)


def imported() -> list[Path]:
    """Files of this engine, and of packages that it imports."""
    from importlib.util import find_spec

    found: list[Path] = []
    for package in ("tunewright", "onnx", "google.protobuf", "ml_dtypes", "numpy"):
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            found += [path for path in Path(folder).rglob("*") if path.suffix in (".py", ".pyc", ".so")]
    return found


# Loads


def measure_loads(stored: dict[str, Stored], compiler: Path, deadline: float) -> dict[str, Any]:
    """Loads by how the machine is; the first is what it says: everything is as it was found."""
    found: dict[str, Any] = {}
    told = list[str]()

    def note(title: str, answers: list[loads.Answer]) -> None:
        one = loads.middle(answers)
        low, median, high = loads.quartiles([a["load"] for a in answers])
        print(f"{title}: load {median:.3f} s ({low:.3f}..{high:.3f}), whole {one['whole']:.3f}", flush=True)
        told.extend([f"{title}:", *loads.told(one)])
        found[title] = answers

    names = [name for name in ("resnet50", "tiny") if name in stored] or list(stored)[:1]
    large = stored[names[0]]
    note(f"{large.name}, the very first load on this machine", [loads.cold(large, How())])
    for name in names:
        model = stored[name]
        note(f"{name}, cold", [loads.cold(model, How()) for _ in range(3)])
        with tempfile.TemporaryDirectory() as folder:
            note(f"{name}, warm", [loads.load(model, How(cache=Path(folder))) for _ in range(4)][1:])
        note(f"{name}, ONNX Runtime", [loads.load(model, How("onnxruntime")) for _ in range(3)])
    for title, how, prepare in conditions(compiler):
        if time.monotonic() > deadline:
            found["left out"] = "the loads took their share of the time"
            break
        answers = []
        for _ in range(2):
            prepare()
            answers.append(loads.cold(large, how))
        note(f"{large.name}, cold, {title}", answers)
    print("\n".join(told))
    return found


def conditions(compiler: Path) -> Iterator[tuple[str, How, Callable[[], None]]]:
    """Ways to take a part of the machine away: a title, how to load, and what to do before."""
    nothing = int  # a call that does nothing
    yield "compiler not in memory", How(), lambda: forget([compiler])
    yield "nothing in memory", How(), lambda: forget([compiler, *imported()])
    for count in sorted({1, 2, 4, 8, CORES // 2} & set(range(1, CORES))):
        yield f"{count} compilers at a time", How(config={"COMPILATION_NUM_THREADS": count}), nothing
    for count in sorted({2, 4, 8} & set(range(1, CORES))):
        cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:count])
        yield f"on {count} cores", How(before=("taskset", "-c", cores)), nothing
    bare = tempfile.mkdtemp(prefix="no-bytecode-")
    without = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": bare}
    yield "Python files without bytecode", How(environment=without), nothing
    yield "one thread for inference", How(config={"INFERENCE_NUM_THREADS": 1}), nothing
    yield "one BLAS thread", How(environment={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}), nothing


# Networks


def measure_networks(
    made: dict[str, tuple[Any, Any]], threads: Sequence[int], deadline: float, compiler: Path
) -> list[dict[str, Any]]:
    """A row for each network and number of threads."""
    import turns

    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for count in reversed(threads):  # all of them matter most
            for name, (model, inputs) in made.items():
                row: dict[str, Any] = {"model": name, "threads": count}
                rows.append(row)
                if time.monotonic() > deadline:
                    row["failed"] = "no time was left"
                    continue
                ours = {**loads.DEFAULTS, "INFERENCE_NUM_THREADS": count, "CACHE_DIR": cache,
                        "CPU_COMPILER": str(compiler)}  # fmt: skip
                labels = {"ours": ("tunewright", ours), "ONNX Runtime": ("onnxruntime", {"threads": count})}
                found = turns.measure(model, inputs, labels, ROUNDS, TURN, least=2, limit=4.0, reference="ONNX Runtime")
                row |= {answer["engine"]: answer for answer in found}
                print(line(row), flush=True)
    return rows


HEAD = """| threads | network | ours ms | ONNX Runtime ms | over ONNX Runtime | error |
| --: | --- | --: | --: | --: | --: |"""


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    ours, theirs = row.get("ours", {}), row.get("ONNX Runtime", {})
    failed = row.get("failed") or ours.get("failed") or theirs.get("failed")
    if failed:
        return f"| {row['threads']} | {row['model']} | {failed[:200]} | | | |"
    low, high = theirs["ours_over_quartiles"]
    return (
        f"| {row['threads']} | {row['model']} | {spread(ours)} | {spread(theirs)} "
        f"| {1 / theirs['ours_over']:.2f} ({1 / high:.2f}..{1 / low:.2f}) | {ours['error']:.0e} |"
    )


def spread(row: dict[str, Any]) -> str:
    low, high = row["quartile_ms"]
    return f"{row['median_ms']:.3f} ({low:.3f}..{high:.3f})"


def summary(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Geometric means by threads."""
    for count in dict.fromkeys(row["threads"] for row in rows):
        found = [1 / r["ONNX Runtime"]["ours_over"] for r in rows
                 if r["threads"] == count and "ours_over" in r.get("ONNX Runtime", {})]  # fmt: skip
        if found:
            mean = statistics.geometric_mean(found)
            of = f"geometric mean of {len(found)}, the least {min(found):.2f}"
            yield f"{count} threads: {mean:.2f} times as fast as ONNX Runtime ({of})"


def machine() -> dict[str, Any]:
    """What the figures are of."""
    from importlib.metadata import version

    from tunewright.devices import host
    from tunewright.devices.native import usable_cores as cores

    known = {"processor": host.cpu_name(), "cores": CORES, "quota": cores.quota(), "python": sys.version.split()[0],
             "kernel": os.uname().release, "load": os.getloadavg()[0]}  # fmt: skip
    nodes, packages = cores.nodes(), ("numpy", "onnx", "onnxruntime")
    siblings = Path("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list")
    known |= {"nodes": len(nodes), "siblings": siblings.read_text().strip() if siblings.exists() else "?"}
    return known | {package: version(package) for package in packages} | {"caches": host.cache_sizes()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("loads", "networks"), help="one half of it")
    parser.add_argument("--models", default="", help="networks, with commas between them")
    parser.add_argument("--threads", default="", help="numbers of threads (default: 1, 4 and all)")
    parser.add_argument("--compiler", type=Path, help="clang or zig (default: as Tunewright finds it)")
    parser.add_argument("--limit", type=float, default=280.0, metavar="SECONDS", help="nothing new begins behind it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    options = parser.parse_args(arguments)
    begun = time.monotonic()
    if options.compiler is not None:
        os.environ["TUNEWRIGHT_CPU_COMPILER"] = str(options.compiler.absolute())
    from tunewright.devices.native import compiler

    found = compiler.find(os.environ.get("TUNEWRIGHT_CPU_COMPILER", ""))
    report: dict[str, Any] = {"machine": machine(), "compiler": found.version}
    print(json.dumps(report), flush=True)
    report["first imports"] = once(makers)
    print(f"numpy, onnx and parts of Tunewright, the first import on this machine: {report['first imports']:.2f} s")
    making = makers()
    names = options.models.split(",") if options.models else list(making)
    unknown = [name for name in names if name not in making]
    if unknown:
        parser.error(f"there is no network {unknown[0]!r}; there are {', '.join(making)}")
    threads = [int(n) for n in options.threads.split(",")] if options.threads else sorted({1, min(4, CORES), CORES})
    with tempfile.TemporaryDirectory() as folder:
        made = {name: making[name]() for name in names}
        if options.only != "networks":
            wanted = [name for name in ("resnet50", "tiny") if name in made] or names[:1]
            stored = {name: Stored.of(name, *made[name], Path(folder)) for name in wanted}
            path = Path(found.compile[0])
            report["loads"] = measure_loads(stored, path, begun + 0.4 * options.limit)
            report["parts"] = {}
            for title, seconds in parts(found.compile):
                report["parts"][title] = seconds
                print(f"{title}: {1e3 * seconds:.1f} ms", flush=True)
        if options.only != "loads":
            print(HEAD)
            report["networks"] = measure_networks(made, threads, begun + options.limit, Path(found.compile[0]))
            print("\n".join(summary(report["networks"])))
    report["seconds"] = time.monotonic() - begun
    print(f"{report['seconds']:.0f} s")
    if options.json is not None:
        options.json.write_text(json.dumps(report), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
