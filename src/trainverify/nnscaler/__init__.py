"""nnScaler plans: read as plain data, translated into our program and plan, judged."""

from trainverify.nnscaler.dump import Dump, parse, read
from trainverify.nnscaler.judge import judge
from trainverify.nnscaler.live import convert, export, snapshot
from trainverify.nnscaler.plan import plan, program
from trainverify.nnscaler.trainer import Trainer

__all__ = ["Dump", "Trainer", "convert", "export", "judge", "parse", "plan", "program", "read", "snapshot"]
