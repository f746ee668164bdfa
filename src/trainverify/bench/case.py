"""What is measured: a model of the zoo and how it is divided, in a form that goes to another process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.zoo.parallel.degrees import Degrees
from trainverify.zoo.recipes import Wish, family_of


@dataclass(frozen=True)
class Case:
    """A model and how it is divided; `sizes` are fields of its configuration that differ from the preset's."""

    name: str
    model: str
    how: Degrees
    layers: int | None = None
    batch: int | None = None
    sizes: tuple[tuple[str, int], ...] = ()

    def build(self) -> tuple[Program, Plan]:
        wish = Wish(self.model, self.how, layers=self.layers, batch=self.batch)
        if not self.sizes:
            return wish.build()
        family, config = family_of(self.model), replace(wish.config(), **dict(self.sizes))
        return family.step(config), family.plan(config, self.how)

    def text(self) -> str:
        return json.dumps({**asdict(self), "how": {k: v for k, v in vars(self.how).items() if v != getattr(Degrees(), k)}})

    @staticmethod
    def read(text: str) -> Case:
        found = json.loads(text)
        return Case(
            found["name"],
            found["model"],
            Degrees(**found["how"]),
            found["layers"],
            found["batch"],
            tuple((k, v) for k, v in found["sizes"]),
        )
