"""Ways in which Python counts steps. Each leaves `n`, which is 1 in the first step."""

from __future__ import annotations

from random import Random

from tools.steps.pieces import Piece

# name: (top of the file, in the builder, in the step)
COUNTERS: dict[str, tuple[str, str, str]] = {
    "list": ("", "count = [0]", "count[0] += 1\nn = count[0]"),
    "closure": ("", "calls = 0", "nonlocal calls\ncalls += 1\nn = calls"),
    "dict": ("", 'progress = {"steps": 0}', 'progress["steps"] += 1\nn = progress["steps"]'),
    "model attribute": ("", "model.seen = 0", "model.seen += 1\nn = model.seen"),
    "range iterator": ("", "ticks = iter(range(1, 100))", "n = next(ticks)"),
    "enumerate": ("", "ticks = enumerate('a' * 99, 1)", "n, _ = next(ticks)"),
    "generator": ("def ticking():\n    at = 0\n    while True:\n        at += 1\n        yield at", "ticks = ticking()", "n = next(ticks)"),
    "itertools.count": ("import itertools", "ticks = itertools.count(1)", "n = next(ticks)"),
    "itertools.accumulate": ("import itertools", "ticks = itertools.accumulate(itertools.repeat(1))", "n = next(ticks)"),
    "class attribute": ("class Clock:\n    ticks = 0", "", "Clock.ticks += 1\nn = Clock.ticks"),
    "object": (
        "class Clock:\n    ticks = 0\n\n    def __call__(self):\n        self.ticks = self.ticks + 1\n        return self.ticks",
        "clock = Clock()",
        "n = clock()",
    ),
    "slots": (
        "class Clock:\n    __slots__ = ('ticks',)\n\n    def __init__(self):\n        self.ticks = 0",
        "clock = Clock()",
        "clock.ticks += 1\nn = clock.ticks",
    ),
    "module global": ("CALLS = 0", "", "global CALLS\nCALLS += 1\nn = CALLS"),
    "os.environ": (
        "import os",
        "os.environ['STEPS_DONE'] = '0'",
        "os.environ['STEPS_DONE'] = str(int(os.environ['STEPS_DONE']) + 1)\nn = int(os.environ['STEPS_DONE'])",
    ),
    "numpy array": ("import numpy as np", "count = np.zeros(1, dtype=np.int64)", "count[0] += 1\nn = int(count[0])"),
    "numpy scalar": ("import numpy as np", "count = [np.int64(0)]", "count[0] = count[0] + 1\nn = count[0]"),
    "set": ("", "seen = set()", "seen.add(len(seen))\nn = len(seen)"),
    "deque": ("from collections import deque", "left = deque(range(1, 50))", "n = left.popleft()"),
    "history": ("", "history = []", "history.append(None)\nn = len(history)"),
    "bytearray": ("", "count = bytearray(1)", "count[0] += 1\nn = count[0]"),
    "default argument": ("def tick(held=[0]):\n    held[0] += 1\n    return held[0]", "", "n = tick()"),
    "function attribute": ("def tick():\n    tick.calls += 1\n    return tick.calls\n\n\ntick.calls = 0", "", "n = tick()"),
    "cached": ("import functools\n\n\n@functools.lru_cache(maxsize=None)\ndef box():\n    return [0]", "", "box()[0] += 1\nn = box()[0]"),
    "Counter": ("from collections import Counter", "count = Counter()", "count['steps'] += 1\nn = count['steps']"),
    "string": ("", "marks = ['']", "marks[0] += 'x'\nn = len(marks[0])"),
    "random.Random": ("import random", "rng = random.Random(3)\ndrawn = []", "drawn.append(rng.random())\nn = len(drawn)"),
}
BUFFERS: dict[str, tuple[str, str, str]] = {  # the count is a tensor of the model
    "buffer": ("", "model.register_buffer('steps', torch.zeros((), dtype=torch.long))", "model.steps += 1\nn = model.steps.item()"),
    "buffer anew": (
        "",
        "model.register_buffer('steps', torch.zeros((), dtype=torch.long))",
        "model.steps = model.steps + 1\nn = int(model.steps)",
    ),
    "buffer condition": ("", "model.register_buffer('steps', torch.zeros((), dtype=torch.long))", "model.steps.add_(1)\nn = model.steps"),
}


def counter(rng: Random) -> Piece:
    rows = BUFFERS if rng.random() < 0.12 else COUNTERS
    name = rng.choice(sorted(rows))
    top, setup, begin = rows[name]
    return Piece(f"count in {name}", {"top": top, "setup": setup, "begin": begin})
