"""Our verdict about the file of a program."""

from __future__ import annotations

from pathlib import Path

import trainverify.jax as tvj
from tools.step_campaigns.files import loaded
from tools.step_campaigns.verdicts import Answer, answer_of


def judge(path: Path) -> Answer:
    try:
        with loaded(path, path.stem) as module:
            report = tvj.verify(module.reference, module.distributed, module.args, module.mesh, points=1, reader=module.reader)
    except tvj.CaptureError as error:
        return "REFUSED", f"{error}"[:400], False
    return answer_of(report)
