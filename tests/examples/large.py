"""8192 ranks from templates: built, validated, saved, loaded. Prints peak memory and seconds of one core. Run by test_scale.py."""

import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from check.large import large
from trainverify import files
from trainverify.check import validate

folder = Path(sys.argv[1])
logical, plan = large(64, 16, 8, 4, 75)
assert plan.size == 8192
assert validate(logical, plan) == []
files.write(folder / "plan.json.gz", plan)
files.write(folder / "logical.json", logical)
assert files.read(folder / "plan.json.gz") == plan
assert files.read(folder / "logical.json") == logical
status = Path("/proc/self/status")  # getrusage would count the process that started this one
peak = [int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM:")] if status.exists() else []
print(*(peak or [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]), time.process_time())
