"""Running a translated program on numbers, and a pair with its replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import jax
import trainverify.jax as tvj
from trainverify.domains.numeric import NUMERIC
from trainverify.graph.mesh import Mesh
from trainverify.graph.types import TensorType
from trainverify.jax.control import CONTROL
from trainverify.jax.emit import RankEmitter
from trainverify.jax.interpret import Interpreter
from trainverify.jax.rewrites import rewritten
from trainverify.jax.values import DTYPES, Opaque
from trainverify.ops import OPS
from trainverify.report import Report
from trainverify.translate.literals import Literals


def translated(fn: Callable[..., Any], *arrays: Any) -> tuple[RankEmitter, Interpreter, list[Any]]:
    """A function on one device as our ops; integers are known to be from 0 to their largest."""
    e = RankEmitter(Mesh(), (0,), rewritten=rewritten)
    i = Interpreter(e, Literals(), CONTROL)
    given = []
    for n, x in enumerate(arrays):
        given.append(e.declare(f"x{n}", TensorType(x.shape, DTYPES[str(x.dtype)])))
        if x.dtype.kind == "i" and hasattr(x, "min"):
            e.bounds[f"x{n}"] = int(x.min()), int(x.max())
    return e, i, i.closed(jax.make_jaxpr(fn)(*arrays), given)


def run(fn: Callable[..., Any], *arrays: Any) -> tuple[list[Any], set[str]]:
    """What the translated function gives, and the primitives in it."""
    e, i, found = translated(fn, *arrays)
    opaque = [x.reason for x in found if isinstance(x, Opaque)]
    assert not opaque, opaque
    outputs = [e.tensor(x) for x in found]
    values = {f"x{n}": np.asarray(x) for n, x in enumerate(arrays)}
    values |= {n: np.asarray(c.data) for n, c in e.constants.items()}
    for op in e.ops:
        lowered = OPS.lower(op.name, dict(op.attrs), tuple(None if t is None else e.tensors[t] for t in op.inputs))
        made = NUMERIC.run(lowered.outputs, [np.zeros(()) if t is None else values[t] for t in op.inputs])
        values.update(zip(op.outputs, made, strict=True))
    return [values[t] for t in outputs], set(i.calls)


def proved(reference: Any, distributed: Any, args: Any, mesh: Any, small: Any = None, roles: Any = None) -> Report:
    """The report; with small arguments, their replay must agree too."""
    report = tvj.verify(reference, distributed, args, mesh, roles)
    assert report.verdict == "PROVED", f"{report.verdict}: {report.reason} {report.notes}"
    if small is not None:
        made = tvj.pair(reference, distributed, small, mesh, roles)
        found = tvj.replay(reference, distributed, small, made)
        assert found.agrees, str(found)
    return report
