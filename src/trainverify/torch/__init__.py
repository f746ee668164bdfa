"""Real PyTorch code in: capture training steps rank by rank on fake tensors, and verify them against the same model on one device.

```python
import trainverify.torch as tvt

report = tvt.verify(reference, distributed, world_size=2, batch={"x": tvt.Reals((8, 16), "(dp b) k")})
```
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ImportError as error:  # pragma: no cover
    raise ImportError("trainverify.torch needs PyTorch: pip install 'trainverify[torch]'") from error

from trainverify.torch.inputs import Flags, Ids, Reals
from trainverify.torch.judge import captures, judge, pair, verify
from trainverify.torch.meanings import meaning
from trainverify.torch.script import step
from trainverify.translate.targets import CaptureError

__all__ = ["CaptureError", "Flags", "Ids", "Reals", "captures", "judge", "meaning", "pair", "step", "verify"]
