"""Functional collectives, as DTensor calls them: the result is there when `wait_tensor` has been called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trainverify.torch.agreement import lying
from trainverify.torch.buffers import Group
from trainverify.torch.calls import kind_of
from trainverify.torch.collectives import FUNCTIONAL, Flight, Talk
from trainverify.torch.private import _resolve_process_group
from trainverify.torch.translate import flat, type_of
from trainverify.torch.values import Unmapped, Value


class Functional:
    def __init__(self, talk: Talk):
        self.talk = talk
        self._flights: dict[int, Flight] = {}  # storage of a result → its communication

    def call(self, func: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> None:
        schema = func._schema
        given = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        given |= {a.name: v for a, v in zip(schema.arguments, args, strict=False)} | dict(kwargs)
        short = schema.name.rpartition("::")[2]
        if short == "wait_tensor":
            self._wait(next(iter(given.values())), out)
            return
        inputs = [t for t in flat(given.get("input", given.get("inputs", given.get("self")))) if isinstance(t, torch.Tensor)]
        outputs = [t for t in flat(out) if isinstance(t, torch.Tensor)]

        def make() -> list[Value]:
            return self._results(short.removesuffix("_coalesced"), given, inputs, outputs)

        group = self._group(given["group_name"])
        said = f"all_reduce {given.get('reduce_op')} of" if short.startswith("all_reduce") else f"{short.removesuffix('_coalesced')} of"
        told = " and ".join(map(lying, outputs if short.startswith("reduce_scatter") else inputs))
        told = "" if short.startswith("all_to_all") else told
        flight = self.talk.guarded(inputs, outputs, make, kind_of(str(schema.name)), group, f"{said} {told}")
        for t in outputs:
            self._flights[self.talk.translator.keep(t)] = flight

    def _wait(self, given: torch.Tensor, out: torch.Tensor) -> None:
        flight = self._flights.get(self.talk.translator.keep(given))
        if flight is not None:
            self.talk.land(flight)
        t = self.talk.translator
        if self.talk.translator.keep(given) != self.talk.translator.keep(out):
            t.write(out, t.read(given))

    def _group(self, name: Any) -> Group:
        found = _resolve_process_group(name) if isinstance(name, str) else name
        group = found.group()
        assert isinstance(group, Group)
        return group

    def _results(self, name: str, given: Mapping[str, Any], inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> list[Value]:
        talk, t = self.talk, self.talk.translator
        group = self._group(given["group_name"])
        made: list[Value] = []
        for x, out in zip(inputs, outputs, strict=True):
            kind = type_of(out)
            if name in ("all_reduce", "all_reduce_"):
                made.append(talk.emit("all_reduce", t.named(x), group, kind, op=self._reduction(given)))
            elif name in ("all_gather_into_tensor", "all_gather_into_tensor_out"):
                made.append(talk.gathered(group, x, kind.shape))
            elif name == "reduce_scatter_tensor":
                made.append(talk.scattered(group, t.named(x), kind.shape, self._reduction(given)))
            elif name == "all_to_all_single":
                sizes = given["output_split_sizes"], given["input_split_sizes"]
                if any(len(set(s)) > 1 for s in sizes):
                    raise Unmapped("an all-to-all with blocks of different sizes")
                made.append(talk.exchanged(group, t.named(x), kind.shape))
            elif name in ("broadcast", "broadcast_"):
                made.append(talk.from_root("broadcast", group, x, group.members[given["src"]], kind))
            else:
                raise Unmapped(f"functional collective {name}")
        return made

    def _reduction(self, given: Mapping[str, Any]) -> str:
        op = str(given.get("reduce_op", given.get("reduceOp", "")))
        if op not in FUNCTIONAL:
            raise Unmapped(f"reduction {op!r}")
        return FUNCTIONAL[op]
