"""A load as a user's process sees it, behind torch's import and the start of the device: printed as JSON.

python bench/gpu_load.py model.onnx GPU.0 '{"CACHE_DIR": "cache"}'
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

import gpu_ours
from tunewright import Core
from tunewright.ir.types import TensorType


def main(file: str, device: str, config: str) -> None:
    settings = json.loads(config)
    gpu_ours.plugin(device)  # found, opened
    if torch.cuda.is_available():
        some = torch.ones(64, 64, device="cuda")
        (some @ some).sum().item()
    begin = time.perf_counter()
    core = Core(settings)
    model = core.read_model(Path(file))
    read = time.perf_counter() - begin
    compiled = gpu_ours.plugin(device).compile(model, core.settings, consume=True)
    load = time.perf_counter() - begin
    inputs = {}
    for name, type in compiled.inputs.items():
        assert isinstance(type, TensorType) and type.shape is not None
        inputs[name] = np.ones([int(n) for n in type.shape], type.dtype.numpy)
    begin = time.perf_counter()
    compiled(inputs)
    first = time.perf_counter()
    compiled(inputs)
    last = time.perf_counter()
    found = {
        "load": load, "first": first - begin, "second": last - first, "seconds": load + first - begin,
        # where the load's time went; weights are copied to the device by the first inference
        "phases": {"reading": read, **compiled.phases},
        "origins": gpu_ours.about(compiled)["origins"],
    }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
