"""A small ResNet on data-parallel ranks."""

from __future__ import annotations

from functools import cache

from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.zoo.parallel.degrees import Degrees
from trainverify.zoo.parallel.resnet import resnet_plan, resnet_step
from trainverify.zoo.resnet import Config

SMALL = Config((1, 1), stem="small", width=4, classes=5, size=(6, 4), batch=6)
HOW = Degrees(dp=2)


@cache
def base() -> tuple[Program, Plan]:
    return resnet_step(SMALL), resnet_plan(SMALL, HOW)
