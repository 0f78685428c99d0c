"""What holds for the explanation of every model."""

import json

from tunewright.runtime.insight.explain import State


def check(layers, compiled):
    """Every layer has an origin, and every solver of its operation is chosen, measured or has a reason."""
    for each in layers:
        concerned = {s.id for s in compiled.env.tuner.candidates if s.ops is None or each.op in s.ops}
        assert {o.solver for o in each.solvers} == concerned and len(each.solvers) == len(concerned)
        assert each.origin and each.kernel and each.name
        assert all(o.why for o in each.solvers)
        chosen = [o for o in each.solvers if o.state is State.CHOSEN]
        assert [o.solver for o in chosen] == ([each.solver] if each.solver else [])
        if not each.solver:
            assert {o.state for o in each.solvers} <= {State.UNASKED}
        for o in each.solvers:
            assert "not measured" in o.why if o.state is State.ACCEPTS else True
            assert o.found is not None or "measured against" in o.why if o.state is State.MEASURED else True
        if each.timing is not None and each.solver:
            assert each.roofline.share is not None or each.roofline.why
    json.dumps([each.to_json() for each in layers], allow_nan=False)
