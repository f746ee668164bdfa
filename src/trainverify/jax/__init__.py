"""JAX code in: the jaxpr of a single-device training step against what the devices of a mesh run.

```python
import trainverify.jax as tvj

report = tvj.verify(reference=train_step, distributed=sharded_step, args=shapes)
```
"""

from __future__ import annotations

try:
    import jax as _jax  # noqa: F401
except ImportError as error:  # pragma: no cover
    raise ImportError("trainverify.jax needs JAX: pip install 'trainverify[jax]'") from error

from trainverify.jax.inputs import Count, Ids, Reals
from trainverify.jax.judge import judge, pair, verify
from trainverify.jax.meanings import meaning
from trainverify.jax.replay import replay
from trainverify.translate.targets import CaptureError

__all__ = ["CaptureError", "Count", "Ids", "Reals", "judge", "meaning", "pair", "replay", "verify"]
