"""8192 ranks from templates: built, validated, saved, loaded. Prints the peak of resident memory in bytes. Run by test_scale.py."""

import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from check.large import large
from trainverify import files
from trainverify.check import validate

folder = Path(sys.argv[1])
logical, plan = large(64, 16, 8, 2, 16)
assert plan.size == 8192
assert validate(logical, plan) == []
files.write(folder / "plan.json.gz", plan)
files.write(folder / "logical.json", logical)
assert files.read(folder / "plan.json.gz") == plan
assert files.read(folder / "logical.json") == logical
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024))
