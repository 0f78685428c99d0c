"""One engine with one model in a process of its own: `turns` starts one per engine and lets them take turns.

Engines in one process slow each other down: their idle threads spin. A worker reads lines from its standard input (for
how many seconds to keep running the model, and how often at least) and answers with the latencies, as JSON.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path

import numpy as np

import engines

#: seconds of a turn that do not count, in which there is one inference at least
LEAD = 0.01


def main() -> int:
    label, name, folder, config = sys.argv[1], sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4])
    outputs = json.loads((folder / "outputs.json").read_text(encoding="utf-8"))
    with np.load(folder / "inputs.npz") as stored:
        inputs = {k: stored[k] for k in stored.files}
    try:
        engine = engines.make(name, folder / "model.onnx", outputs, config)
        begin = time.perf_counter()
        found = engine.run(inputs)
        first = time.perf_counter() - begin
    except Exception as error:  # another engine's native code raises what it likes, and the table says so
        say({"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"})
        return 1
    # files are numbered: an output may be called as no file can be
    np.savez(folder / f"{label}.npz", *(found[output] for output in outputs))
    del found
    say({"version": engine.version, "compile": engine.compile_seconds, "first": first, **engine.facts})
    gc.disable()
    for line in sys.stdin:
        seconds, least = line.split()
        begin = time.perf_counter()
        while time.perf_counter() - begin < LEAD:  # the others had the caches, and their threads may still spin
            engine.run(inputs)
        deadline, times = time.perf_counter() + float(seconds), list[float]()
        while len(times) < int(least) or time.perf_counter() < deadline:
            begin = time.perf_counter()
            engine.run(inputs)
            times.append(time.perf_counter() - begin)
        gc.collect()
        say(times)
    return 0


def say(answer: object) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    sys.exit(main())
