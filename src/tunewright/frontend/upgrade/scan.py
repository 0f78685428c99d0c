"""Converts the first form of Scan, which ran over every sample of a batch."""

from __future__ import annotations

from dataclasses import replace

from tunewright.ir.graph import Graph, Value

from .base import OperatorCall, adapter, ints


@adapter(9, "Scan")
def scan_batch(graph: Graph, call: OperatorCall) -> OperatorCall:
    """Build a scan over the batch whose body scans the sequence. Results are 0 beyond a sample's length."""
    formal = list(call.inputs[: len(call.inputs) - call.captures])
    captured = list(call.inputs[len(formal) :])
    lengths, carried = formal[0], formal[1:]
    count = int(call.attrs["num_scan_inputs"])
    inner = call.bodies["body"]
    outer = Graph(f"{inner.name}/sample")
    rows = [outer.add_input(f"row{i}", None) for i in range(len(carried))]
    length = outer.add_input("length", None) if lengths is not None else None
    captures = [outer.add_input(f"captured{i}", None) for i in range(call.captures)]
    attrs = {"num_scan_inputs": count, "scan_input_directions": tuple(call.attrs.get("directions", ()))}
    states, scanned = rows[: len(rows) - count], rows[len(rows) - count :]
    zero = ints(outer, [0])
    end = whole = zero
    if length is not None:
        end = outer.add("Reshape", [length, ints(outer, [1])]).output
        whole = outer.add("Shape", [scanned[0]], {"start": 0, "end": 1}).output
        scanned = [outer.add("Slice", [x, zero, end, zero]).output for x in scanned]
    made: list[Value] = outer.add(
        "Scan",
        [*states, *scanned, *captures],
        attrs,
        outputs=len(inner.outputs),
        name=call.name,
        bodies={"body": inner},
        captures=call.captures,
    ).outputs
    for i, value in enumerate(made):
        if length is not None and i >= len(states):
            missing = outer.add("Sub", [whole, end]).output
            pads = outer.add("Concat", [zero, missing], {"axis": 0}).output
            value = outer.add("Pad", [value, pads, None, zero]).output
        outer.add_output(value)
    inputs = [*carried, *([] if lengths is None else [lengths]), *captured]
    attrs = {"num_scan_inputs": len(inputs) - call.captures}
    return replace(call, inputs=inputs, attrs=attrs, bodies={"body": outer})
