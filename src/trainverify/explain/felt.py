"""Which outputs feel a change of one logical tensor: an output that does not says nothing about that tensor.

Where all tokens of a small program are equal, say, attention weights are too, and gradients of queries and keys are zero
whatever comes before them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.domains.numeric import NUMERIC
from trainverify.evaluate.compare import distance
from trainverify.evaluate.flow import Flow, logical_tasks
from trainverify.evaluate.small import Small

CHANGE, PLAINLY = 0.1, 1e-3  # how much larger elements of a tensor get, at least, and how much of that an output must show


def after(small: Small, name: str) -> set[str]:
    """What the logical program makes from a tensor, and the tensor itself."""
    found = {name}
    for step in small.logical_steps:
        if not found.isdisjoint(i for i in step.inputs if i is not None):
            found.update(step.outputs)
    return found


def felt(small: Small, values: Mapping[str, Array], name: str, outputs: Collection[str]) -> set[str]:
    """Of some outputs, those that change with a tensor."""
    reached = after(small, name)
    value = np.asarray(values[name])
    changed = {n: np.asarray(v)[None, ...] for n, v in values.items() if n not in reached}
    changed[name] = (value * (1 + CHANGE * (np.arange(value.size) % 2 + 1).reshape(value.shape)))[None, ...]
    tasks = [t for t in logical_tasks(small) if any(o in reached for _, o in t.makes) and (0, name) not in t.makes]
    with np.errstate(all="ignore"):
        Flow(tasks, [1], 1).run([changed], NUMERIC)
    return {n for n in outputs if n in changed and n in reached and distance(changed[n][0, ...], np.asarray(values[n])) > PLAINLY}
