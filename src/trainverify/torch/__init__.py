"""Real PyTorch code in: capture training steps rank by rank on fake tensors, and verify them against the same model on one device.

```python
import trainverify.torch as tvt

report = tvt.verify(reference, distributed, world_size=2, batch={"x": tvt.Reals((8, 16), "(dp b) k")})
```
"""

from __future__ import annotations

from dataclasses import replace as _replace
from typing import Any as _Any

try:
    import torch as _torch  # noqa: F401
except ImportError as error:  # pragma: no cover
    raise ImportError("trainverify.torch needs PyTorch: pip install 'trainverify[torch]'") from error

from trainverify.report import Report as _Report
from trainverify.testing.assertion import checked as _checked
from trainverify.torch.inputs import Flags, Ids, Reals
from trainverify.torch.judge import captures, judge, pair, verify
from trainverify.torch.meanings import meaning
from trainverify.torch.script import step
from trainverify.translate.targets import CaptureError


def assert_equivalent(*args: _Any, accept_sampled: bool = False, **options: _Any) -> _Report:
    """Fails unless `verify`, with the same arguments, gives PROVED; returns the report. `accept_sampled` takes that of a sample."""
    __tracebackhide__ = True  # pytest then points at the line of the caller
    return _checked(_replace(verify(*args, **options), accept_sampled=accept_sampled))


__all__ = ["CaptureError", "Flags", "Ids", "Reals", "assert_equivalent", "captures", "judge", "meaning", "pair", "step", "verify"]
