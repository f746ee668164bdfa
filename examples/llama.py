"""Llama-3-8B on 8 devices: data parallel 2 × pipeline 2 × tensor and sequence parallel 2, two micro-batches, clip and AdamW.

python examples/llama.py OUT [LAYERS]     writes OUT/llama.logical.json.gz and OUT/llama.plan.json.gz
"""

import sys
from dataclasses import replace
from pathlib import Path

from trainverify import files
from trainverify.zoo import llama
from trainverify.zoo.parallel import Degrees, llama_plan, llama_step

HOW = Degrees(dp=2, tp=2, pp=2, sp=True, microbatches=2)

if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    folder.mkdir(parents=True, exist_ok=True)
    config = replace(llama.PRESETS["llama3-8b"], batch=4)
    if len(sys.argv) > 2:
        config = replace(config, layers=int(sys.argv[2]))
    files.write(folder / "llama.logical.json.gz", llama_step(config))
    files.write(folder / "llama.plan.json.gz", llama_plan(config, HOW))
