"""`python -m tools.steps --count 3000 --seed 0 [--workers 2]`; `--only SEED` runs one program, `--show SEED` prints it."""

from __future__ import annotations

import sys

from tools.step_campaigns.command import main
from tools.steps.programs import program
from tools.steps.run import judged

if __name__ == "__main__":
    sys.exit(main("tools.steps", "Random PyTorch training steps, really run by gloo, against our verdict.", program, judged))
