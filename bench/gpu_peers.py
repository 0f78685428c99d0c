"""What we are measured against: torch eager, with a CUDA graph, and torch.compile, each in its best form.

Half precision, channels last, normalisations folded, cuDNN picks its algorithms by measuring, attention through torch's
own fused operation; inputs are on the device already.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gpu_sources import Arrays, Case, Refused
from gpu_turns import Ready

#: rounds before a graph is recorded, or a compiled network is believed to be done with compiling
WARM = 4


@contextmanager
def fast() -> Iterator[None]:
    """cuDNN looks for its best algorithm, as the eager rows want it. Ours does without: so it is no global switch."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


class Peers:
    """Rows of torch for one network. The module is copied once, and by each compiled row once more."""

    def __init__(self, case: Case, device: torch.device, dtype: torch.dtype) -> None:
        self.case, self.device = case, device
        self.model = copy.deepcopy(case.model).to(dtype)
        self.inputs = case.tensors(device, dtype)

    def ready(self, label: str, call: Callable[[], object], result: Callable[[], Any], **facts: Any) -> Ready:
        def outputs() -> Arrays:
            call()  # what another compiled network left behind may be over the last results
            return self.case.named(result())

        return Ready(label, call, outputs, around=fast, facts=facts)

    def eager(self, label: str) -> Ready:
        model, inputs = self.model, self.inputs
        last: list[Any] = [None]

        def call() -> None:
            last[0] = model(*inputs)

        with torch.no_grad(), fast():
            call()
        return self.ready(label, call, lambda: last[0])

    def graph(self, label: str) -> Ready:
        return self._recorded(label, self.model)

    def _recorded(self, label: str, model: Callable[..., Any], **facts: Any) -> Ready:
        """Calls of a module recorded in a CUDA graph of our own: no copies, and nothing of Python at a launch."""
        if self.device.type != "cuda":
            raise Refused("a CUDA graph needs a GPU")
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        side.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), fast():
            with torch.cuda.stream(side):
                for _ in range(WARM):
                    model(*self.inputs)
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                result = model(*self.inputs)
        return self.ready(label, graph.replay, lambda: result, **facts)

    def compiled(self, label: str, mode: str | None = "reduce-overhead") -> Ready:
        """torch.compile with weights frozen, as its users call it."""
        made, took = self._compile(mode)
        inputs = self.inputs
        last: list[Any] = [None]

        def call() -> None:
            last[0] = made(*inputs)

        return self.ready(label, call, lambda: last[0], compile_seconds=took, mode=mode)

    def compiled_graph(self, label: str) -> Ready:
        """The kernels of torch.compile, recorded as the eager ones are: without its own copies of inputs and checks."""
        if self.device.type != "cuda":
            raise Refused("a CUDA graph needs a GPU")
        made, took = self._compile(None)
        return self._recorded(label, made, compile_seconds=took, mode=None)

    def autotuned(self, label: str) -> Ready:
        return self.compiled(label, "max-autotune")

    def _compile(self, mode: str | None) -> tuple[Callable[..., Any], float]:
        import torch._inductor.config as inductor

        # For the rest of the process: dynamo asks when it traces, inductor when it compiles.
        inductor.freezing = True
        begin = time.perf_counter()
        made = torch.compile(copy.deepcopy(self.model), mode=mode, dynamic=False)
        with torch.no_grad(), fast():
            for _ in range(WARM):  # one compiles, one warms up, one records
                made(*self.inputs)
            if self.device.type == "cuda":
                torch.cuda.synchronize()
        return made, time.perf_counter() - begin


#: rows by name; those that take minutes are not among them
ROWS: dict[str, Callable[[Peers, str], Ready]] = {
    "eager": Peers.eager, "graph": Peers.graph, "compile": Peers.compiled, "compile-graph": Peers.compiled_graph,
}  # fmt: skip
AUTOTUNED = "max-autotune"
