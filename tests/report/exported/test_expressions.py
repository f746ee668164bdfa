"""NumPy expressions of primitives compute what the numeric domain does: every operator, forward and gradient."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest

from ops.references import REFERENCES
from trainverify.domains.numeric import NUMERIC
from trainverify.graph.types import TensorType
from trainverify.ops import OPS
from trainverify.ops.table import Lowered
from trainverify.report.exported.expressions import Writer
from trainverify.report.exported.pytest_file import _FUNCTIONS

_SPACE: dict[str, Any] = {}
exec("import math\nimport numpy as np\n" + "\n".join(_FUNCTIONS.values()), _SPACE)


def written(lowered: Lowered, inputs: list[Any]) -> list[Any]:
    writer = Writer()
    made = writer.write(lowered.outputs, [None if v is None else f"v[{i}]" for i, v in enumerate(inputs)])
    space = {**_SPACE, "v": inputs}
    exec("\n".join([*writer.lines, f"result = [{', '.join(made)}]"]), space)
    assert not writer.used - _FUNCTIONS.keys()
    return list(space["result"])


def agree(lowered: Lowered, inputs: list[Any]) -> None:
    with np.errstate(all="ignore"):
        got, want = written(lowered, inputs), NUMERIC.run(lowered.outputs, inputs)
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape
        assert g.dtype.kind == w.dtype.kind
        np.testing.assert_allclose(g, w, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", REFERENCES)
def test_operators(name: str) -> None:
    for n, sample in enumerate(REFERENCES[name][1]):
        lead = (sample.members if OPS[name].senders == "all" else 1,) if sample.members else ()
        inputs = sample.draw(zlib.crc32(name.encode()) + n, lead)
        lowered = OPS.lower(name, sample.attrs, sample.types, sample.members)
        agree(lowered, inputs)
        if sample.members or lowered.types[0].kind != "real":
            continue
        wrt = tuple(i for i, t in enumerate(sample.types) if t is not None and t.kind == "real")
        if wrt:
            types = (*sample.types, TensorType(lowered.types[0].shape, "f64"))
            gradient = OPS.lower(f"{name}.grad", {**sample.attrs, "wrt": wrt}, types)
            agree(gradient, [*inputs, np.random.default_rng(n).standard_normal(lowered.types[0].shape)])
