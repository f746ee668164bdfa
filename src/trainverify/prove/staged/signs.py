"""Signs of single expressions, as `prove.signs` has them of tensors, and whether they are numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainverify.evaluate.small import Small
from trainverify.primitives.scalars import is_finite
from trainverify.prove.definedness import FACTS, FINITE, Arguments, Sign, expression_state, weakest
from trainverify.prove.signs import Signs, of_source
from trainverify.prove.staged.terms import Term, products
from trainverify.prove.strict import Step, Strict


def tensors(small: Small, strict: Strict | None = None) -> Signs:
    """Of the logical tensors of a small program."""
    domains = {n: d.kind for n in small.logical.sources if (d := small.domains.get(n)) is not None}
    sources = {n: of_source(small.logical.tensors[n].kind, domains.get(n)) for n in small.logical.sources}
    return Signs(sources, [Step(s.inputs, s.outputs, s.nodes) for s in small.logical_steps], strict)


def expression_sign(op: str, info: Any, args: Sequence[Sign], states: Sequence[int], numbers: Sequence[int], inside: bool = False) -> Sign:
    """Of an expression (`terms.Term`) of arguments with these signs and states; `numbers` tells equal ones, `inside` that something is
    looked up at a place that is there."""
    match op:
        case "real":
            return None if isinstance(info, str) or not is_finite(info) or info < 0 else "positive" if info else "nonnegative"
        case "constant":
            return FACTS[info[0]].sign(Arguments((), param=info[1]))
        case "map":
            twice = len(numbers) == 2 and numbers[0] == numbers[1]
            return FACTS[info[0]].sign(Arguments(args, all(s == FINITE for s in states), twice, info[1]))
        case "dot":
            signs: list[Sign] = []
            for product in products(info):
                square = len(product) == 2 and numbers[product[0]] == numbers[product[1]]
                signs.append(FACTS["mul"].sign(Arguments([args[k] for k in product], twice=square)))
            return FACTS["add"].sign(Arguments(signs)) if signs else None
        case "hit" | "bool":
            return "nonnegative"
        case "choose":
            return weakest(args[1:])
        case "pick":
            return weakest(args[1:] if inside else [*args[1:], "nonnegative"])
        case "reduce":
            return weakest(args)
    return None


def leaves_of(term: Term, known: Mapping[Term, int]) -> list[Term]:
    """Leaves of a term that are not known, nor in what is."""
    seen = {term}
    stack, found = [term], []
    while stack:
        t = stack.pop()
        if t not in known:
            found += [t] if t.op == "leaf" else []
            stack += [a for a in t.args if a not in seen]
            seen.update(t.args)
    return found


def term_state(term: Term, known: dict[Term, int]) -> int:
    """Of a term, given that of its leaves and maybe of more; what is found on the way is noted."""
    found = known.get(term)
    if found is None:
        found = known[term] = expression_state(term.op, term.info, [term_state(a, known) for a in term.args])
    return found
