"""Elements that are 0 wherever another one is, read off the ops that make them: a weight is a factor of all gradients of its expert.

A stage knows this of its symbols, like signs: masking by such a weight being positive does not change what vanishes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from trainverify.domains.arrays import Array
from trainverify.prove.definedness import FACTS
from trainverify.prove.staged.graphs import LARGE, LOGICAL, Call, Graph, moves_only
from trainverify.prove.staged.terms import Term, products

Support = frozenset[int] | None  # elements such that this is 0 where one of them is; None: it is 0 everywhere
NOWHERE: Final[frozenset[int]] = frozenset()


def all_of(supports: Sequence[Support]) -> Support:
    """Of a product."""
    found: frozenset[int] = NOWHERE
    for s in supports:
        if s is None:
            return None
        found |= s
    return found


def common(supports: Sequence[Support]) -> Support:
    """Of a sum."""
    found: Support = None
    for s in supports:
        found = s if found is None else found if s is None else found & s
        if found is not None and not found:
            return NOWHERE
    return found


def expression_support(op: str, info: Any, args: Sequence[Support]) -> Support:
    """Of an expression (`terms.Term`) of arguments with these supports."""
    match op:
        case "real":
            return None if info == 0 else NOWHERE
        case "dot":
            return common([all_of([args[k] for k in product]) for product in products(info)])
        case "map":
            match FACTS[info[0]].zero:
                case "any":
                    return all_of(args)
                case "all":
                    return common(args)
                case "first":
                    return args[0]
        case "choose":
            return common(args[1:])
    return NOWHERE


def term_support(term: Term, leaf: Callable[[Term], Support]) -> Support:
    """Of a term, given that of its leaves."""
    known: dict[Term, Support] = {}

    def walk(t: Term) -> Support:
        if t not in known:
            known[t] = leaf(t) if t.op == "leaf" else expression_support(t.op, t.info, [walk(a) for a in t.args])
        return known[t]

    return walk(term)


def supports(graph: Graph, ids: Mapping[str, Array], compared: Iterable[int]) -> dict[int, frozenset[int]]:
    """Logical elements that are 0 wherever one of these is: by definition, as no stage shows it. That two elements are equal is a claim, so
    each goes by its own name here."""
    known: dict[int, frozenset[int]] = {i: frozenset((i,)) for i in compared}
    for step in graph.small.logical_steps if known else ():
        given = [ids[i].reshape(-1).tolist() for i in step.inputs if i is not None]
        if moves_only(step.nodes) or not any(i in known for row in given for i in row):
            continue
        for name in step.outputs:
            place = (LOGICAL, 0, name)
            if graph.kind(place) != "real" or graph.work(place) > LARGE:
                continue
            call = graph.makers[place]

            def leaf(t: Term, call: Call = call) -> Support:
                (_, _, tensor), at = graph.leaf(call, t.info)
                return known.get(int(ids[tensor].reshape(-1)[at]), NOWHERE)

            for at, i in enumerate(ids[name].reshape(-1).tolist()):
                found = term_support(graph.term(place, at), leaf)
                if found:
                    known[i] = known.get(i, NOWHERE) | found
    return {i: support - {i} for i, support in known.items() if support - {i}}
