"""`python -m tools.jax_steps --count 1000 --seed 0 [--workers 2]`; `--only SEED` runs one program, `--show SEED` prints it."""

from __future__ import annotations

import sys

from tools.jax_steps.programs import program
from tools.jax_steps.run import judged
from tools.step_campaigns.command import main

if __name__ == "__main__":
    sys.exit(main("tools.jax_steps", "Random JAX training steps, really run on host devices, against our verdict.", program, judged))
