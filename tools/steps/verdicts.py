"""Our verdict about the file of a program."""

from __future__ import annotations

from pathlib import Path

import trainverify.torch as tvt
from tools.step_campaigns.files import loaded
from tools.step_campaigns.verdicts import Answer, answer_of


def judge(path: Path) -> Answer:
    try:
        with loaded(path, path.stem) as module:
            report = tvt.verify(
                module.reference,
                module.distributed,
                world_size=2,
                batch=module.batch,
                mesh=module.mesh,
                cuts=module.cuts,
                loss=module.loss,
                points=1,
            )
    except tvt.CaptureError as error:
        return "REFUSED", f"{error}"[:400], False
    return answer_of(report)
