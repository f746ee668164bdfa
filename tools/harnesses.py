"""JAX's own primitive harnesses through our front end: `python -m tools.harnesses [--every 1] [--only gather] [--seconds 0]`.

Each of the calls that JAX tests its primitives with is traced, translated by the same interpreter that steps go through, evaluated on
the harness's own arguments, and compared with what JAX computes. It is *equal*, *refused* with a reason, or *wrong*. Values that are not
finite count as unknown: arguments that are not are replaced, results that are not are not compared. Exit code 1 if any is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

import jax
from trainverify.domains.numeric import NUMERIC
from trainverify.graph.mesh import Mesh
from trainverify.graph.types import TensorType
from trainverify.jax.beside import QUICKLY, difference
from trainverify.jax.control import CONTROL
from trainverify.jax.emit import RankEmitter
from trainverify.jax.interpret import Interpreter
from trainverify.jax.literals import Float32Literals
from trainverify.jax.rewrites import rewritten
from trainverify.jax.values import DTYPES, Opaque
from trainverify.ops import OPS
from trainverify.translate.emit import Unmapped

Array = np.ndarray[Any, Any]
State = Literal["equal", "refused", "wrong", "not run"]
TOLERANCES: Final = {"float64": 1e-9, "float32": 2e-4, "float16": 5e-2, "bfloat16": 2e-1}


@dataclass(frozen=True)
class Outcome:
    group: str
    name: str
    state: State
    why: str = ""


def finite(x: Any) -> Array:
    """An argument as an array of finite numbers."""
    data = np.asarray(x)
    if data.dtype.kind in "fV" and str(data.dtype) in DTYPES:
        wide = data.astype(np.float64)
        return np.where(np.isfinite(wide), wide, 0.5).astype(data.dtype)
    return data


def translated(fn: Any, args: Sequence[Any]) -> tuple[RankEmitter, list[str | None], str]:
    """The program, its outputs, and why one has none."""
    e = RankEmitter(Mesh(), (0,), rewritten=rewritten)
    i = Interpreter(e, Float32Literals(), CONTROL)
    given: list[Any] = []
    for n, x in enumerate(args):
        kind = DTYPES.get(str(x.dtype))
        given.append(Opaque(f"an argument of type {x.dtype}") if kind is None else e.declare(f"x{n}", TensorType(x.shape, kind)))
        if x.dtype.kind in "iu" and x.size and kind is not None:
            e.bounds[f"x{n}"] = int(x.min()), int(x.max())
    outputs: list[str | None] = []
    reason = ""
    for value in i.closed(jax.make_jaxpr(fn)(*args), given):
        try:
            outputs.append(e.tensor(value))  # type: ignore[arg-type]
        except Unmapped as error:
            outputs.append(None)
            first = next(((n, m.reason) for n, m in i.missing.items()), None)
            reason = reason or (f"{first[0]}: {first[1]}" if first else str(error))
    return e, outputs, reason


def evaluated(e: RankEmitter, args: Sequence[Any]) -> dict[str, Array]:
    kinds = {"real": np.float64, "int": np.int64, "bool": np.bool_}
    values: dict[str, Array] = {f"x{n}": np.asarray(x).astype(kinds[e.kind(f"x{n}")]) for n, x in enumerate(args) if f"x{n}" in e.tensors}
    values |= {n: np.asarray(c.data) for n, c in e.constants.items()}
    for op in e.ops:
        lowered = OPS.lower(op.name, dict(op.attrs), tuple(None if t is None else e.tensors[t] for t in op.inputs))
        made = NUMERIC.run(lowered.outputs, [np.zeros(()) if t is None else values[t] for t in op.inputs])
        values.update(zip(op.outputs, made, strict=True))
    return values


def run(harness: Any, seed: int = 0) -> Outcome:
    """One harness through both."""
    head = harness.group_name, harness.name
    args = jax.tree_util.tree_map(finite, list(harness.dyn_args_maker(np.random.RandomState(seed))), is_leaf=lambda x: x is None)
    leaves, tree = jax.tree_util.tree_flatten(args)

    def fn(*flat: Any) -> Any:
        return harness.dyn_fun(*jax.tree_util.tree_unflatten(tree, flat))

    try:
        compiled = jax.jit(fn, keep_unused=True).lower(*leaves).compile(compiler_options=QUICKLY)
        theirs = jax.tree_util.tree_leaves(compiled(*leaves))
    except Exception as error:  # whatever JAX raises
        return Outcome(*head, "not run", f"JAX: {type(error).__name__}")
    try:
        e, outputs, reason = translated(fn, leaves)
        if None in outputs or e.draws:
            return Outcome(*head, "refused", reason or "uniform random numbers, which have no values here")
        values = evaluated(e, leaves)
    except Exception as error:  # a translation that breaks is an error of ours
        return Outcome(*head, "wrong", f"{type(error).__name__}: {error}")
    for name, x in zip(outputs, theirs, strict=True):
        tolerance = max(TOLERANCES.get(str(a.dtype), 1e-9) for a in (x, *leaves))
        data = np.asarray(x)
        wrong, _ = difference(values[str(name)], data.astype(np.float64) if str(data.dtype) in TOLERANCES else data, False, tolerance)
        if wrong is not None:
            return Outcome(*head, "wrong", wrong)
    return Outcome(*head, "equal")


def harnesses(every: int = 1, only: str = "") -> Iterator[Any]:
    """Those that JAX runs on a CPU, each `every`-th of them."""
    from jax._src.internal_test_util.test_harnesses import all_harnesses

    chosen = [h for h in all_harnesses if h.filter("cpu") and only in h.fullname]
    yield from chosen[::every]


def table(outcomes: Sequence[Outcome]) -> str:
    """Totals by primitive."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for o in outcomes:
        counts[o.group][o.state] += 1
    states: tuple[State, ...] = ("equal", "refused", "wrong", "not run")
    lines = [f"{'primitive':40} " + " ".join(f"{s:>8}" for s in states)]
    lines += [f"{g:40} " + " ".join(f"{c[s]:8}" for s in states) for g, c in sorted(counts.items())]
    total = Counter(o.state for o in outcomes)
    return "\n".join([*lines, f"{'all':40} " + " ".join(f"{total[s]:8}" for s in states)])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.harnesses", description=__doc__.partition("\n")[0])
    parser.add_argument("--every", type=int, default=1, help="each n-th harness only")
    parser.add_argument("--only", default="", help="harnesses with this in their names")
    parser.add_argument("--reasons", action="store_true", help="why harnesses are refused")
    said = parser.parse_args(argv)
    jax.config.update("jax_enable_x64", True)
    outcomes, start = [], time.time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for h in harnesses(said.every, said.only):
            outcomes.append(run(h))
            if outcomes[-1].state == "wrong":
                print(f"wrong: {outcomes[-1].group} {outcomes[-1].name}: {outcomes[-1].why}", flush=True)
    print(table(outcomes))
    if said.reasons:
        for why, count in Counter(f"{o.group}: {o.why}" for o in outcomes if o.state in ("refused", "not run")).most_common():
            print(f"{count:6} {why}")
    print(f"{time.time() - start:.0f} seconds")
    return int(any(o.state == "wrong" for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
