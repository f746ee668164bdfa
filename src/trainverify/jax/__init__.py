"""JAX code in: the jaxpr of a single-device training step against what the devices of a mesh run.

```python
import trainverify.jax as tvj

report = tvj.verify(reference=train_step, distributed=sharded_step, args=shapes)
```
"""

from __future__ import annotations

from typing import Any as _Any

try:
    import jax as _jax  # noqa: F401
except ImportError as error:  # pragma: no cover
    raise ImportError("trainverify.jax needs JAX: pip install 'trainverify[jax]'") from error

from trainverify.jax.inputs import Count, Ids, Reals
from trainverify.jax.judge import judge, pair, verify
from trainverify.jax.meanings import meaning
from trainverify.jax.replay import replay
from trainverify.report import Report as _Report
from trainverify.testing.assertion import checked as _checked
from trainverify.translate.targets import CaptureError


def assert_equivalent(*args: _Any, **options: _Any) -> _Report:
    """Fails unless `verify`, with the same arguments, gives PROVED; returns the report."""
    __tracebackhide__ = True  # pytest then points at the line of the caller
    return _checked(verify(*args, **options))


__all__ = ["CaptureError", "Count", "Ids", "Reals", "assert_equivalent", "judge", "meaning", "pair", "replay", "verify"]
