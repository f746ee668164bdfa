"""PyTorch's own samples of its operators, captured and compared: `python -m tools.opinfo [--only NAME] [--count N]`.

Every float64 sample of every differentiable entry of PyTorch's OpInfo database is captured through the recorder on fake tensors, forward
and backward with random gradients, and the program that comes out is computed on the sample's values. A sample is *equal* where PyTorch
gives the same, *refused* where some result has no meaning here, by name, else *wrong*. Exit code 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from trainverify.domains.arrays import Array
from trainverify.torch.beside import CLOSE, array, difference
from trainverify.torch.constants import computed
from trainverify.torch.record import Recorder
from trainverify.torch.translate import Translator, memory_of, parts_type
from trainverify.torch.values import Unknown
from trainverify.translate.emit import Place

Outcome = Literal["equal", "refused", "wrong"]
SLICE: Final = 60  # samples of one entry that are compared, evenly spaced, unless all are asked for
ROUNDED: Final = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}  # relative error of a result in a shorter float
Call = Callable[..., Any]


@dataclass
class Entry:
    """What came of the samples of one operator."""

    name: str
    found: Counter[Outcome] = field(default_factory=Counter)
    why: Counter[str] = field(default_factory=Counter)  # of those that are refused or wrong

    @property
    def outcome(self) -> str:
        if self.found["wrong"]:
            return "wrong"
        if self.found["refused"]:
            return "partly" if self.found["equal"] else "refused"
        return "equal" if self.found["equal"] else "refused"

    def __str__(self) -> str:
        counts = f"{self.found['equal']:5}{self.found['refused']:5}{self.found['wrong']:5}"
        return f"{self.name:52} {self.outcome:8}{counts}  {'; '.join(w for w, _ in self.why.most_common(2))}"[:220]


@dataclass(frozen=True)
class Results:
    """What a call gives: its results, gradients of its inputs, and its inputs afterwards."""

    outputs: Sequence[Any]
    gradients: Sequence[Any]
    inputs: Sequence[Any]

    def named(self) -> Iterator[tuple[str, Any]]:
        for kind, values in (("output", self.outputs), ("gradient", self.gradients), ("input", self.inputs)):
            for i, v in enumerate(values):
                yield f"{kind} {i}", v


class Masks(TorchDispatchMode):
    """The random masks that are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.bernoulli_.float:
            self.drawn.append(made.clone())
        return made


def values_of(t: torch.Tensor) -> Array:
    """The numbers of a tensor; of a complex one its parts, along a last dimension."""
    return array(t.double().clone() if t.is_floating_point() else t)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in tree_flatten(value)[0] if isinstance(t, torch.Tensor)]


def _differentiable(t: torch.Tensor) -> bool:
    return bool(t.requires_grad and (t.is_floating_point() or t.is_complex()))


def called(fn: Call, given: Sequence[Any], spec: Any, seeds: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]) -> Results:
    """One call and its backward pass; `seeds` are the gradients of its results."""
    args, kwargs = tree_unflatten(given, spec)
    made = _tensors(fn(*args, **kwargs))
    leaves = [t for t in given if isinstance(t, torch.Tensor) and t.requires_grad]
    ends = [t for t in made if _differentiable(t)]
    gradients: Sequence[Any] = ()
    if leaves and ends:
        gradients = torch.autograd.grad(ends, leaves, list(seeds(ends)), allow_unused=True)
    return Results(made, gradients, [t for t in given if isinstance(t, torch.Tensor)])


def fresh(values: Sequence[Any]) -> list[Any]:
    """Copies of a sample's tensors, leaves of a graph of their own."""
    return [t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t for t in values]


def compare(fn: Call, args: Sequence[Any], kwargs: dict[str, Any], seed: int = 0) -> tuple[Outcome, str]:
    """One sample: PyTorch's results, and those of the program that its capture gives."""
    values, spec = tree_flatten((tuple(args), dict(kwargs)))
    ends: list[torch.Tensor] = []

    def drawn(made: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        ends[:] = [torch.randn(t.shape, dtype=t.dtype, generator=generator) for t in made]
        return ends

    torch.manual_seed(seed)
    try:
        with Masks() as masks:
            theirs = called(fn, fresh(values), spec, drawn)
    except Exception as error:
        return "refused", f"PyTorch: {type(error).__name__}: {error}"
    translator = Translator(Place)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    given: dict[str, Array] = {}

    def source(name: str, t: torch.Tensor) -> torch.Tensor:
        fake = mode.from_tensor(t.detach().clone()).requires_grad_(t.requires_grad)
        translator.emitter.declare(name, parts_type(fake))
        translator.memory.write(translator.keep(fake), *memory_of(fake), name)
        given[name] = values_of(t)
        if given[name].dtype.kind in "iu" and (given[name] >= 0).all():
            translator.emitter.nonnegative.add(name)
        return fake

    try:
        translator.begin()
        fakes = [source(f"x{i}", t) if isinstance(t, torch.Tensor) else t for i, t in enumerate(values)]
        seeds = [source(f"g{i}", t) for i, t in enumerate(ends)]
        with mode, Recorder(translator):
            ours = called(fn, fakes, spec, lambda made: seeds)
            names = {n: None if t is None else translator.read_parts(t) for n, t in ours.named()}
    except Exception as error:
        return "refused", f"{type(error).__name__}: {error}".splitlines()[0]
    if len(translator.emitter.masks) != len(masks.drawn):
        return "refused", "a random number"
    given.update((n, values_of(t)) for n, t in zip(translator.emitter.masks, masks.drawn, strict=True))
    return _judged(translator, names, dict(theirs.named()), given)


def _judged(translator: Translator, names: dict[str, Any], theirs: dict[str, Any], given: dict[str, Array]) -> tuple[Outcome, str]:
    if names.keys() != theirs.keys():
        return "wrong", f"results {sorted(names)} for {sorted(theirs)}"
    known = {n: v for n, v in names.items() if isinstance(v, str)}
    made = computed(translator.emitter, list(known.values()), given)
    for n, t in theirs.items():
        if n in known:
            if t is None:
                if np.asarray(made[known[n]]).any():
                    return "wrong", f"{n}: PyTorch has none"
            elif why := difference(np.asarray(made[known[n]]), values_of(t), ROUNDED.get(t.dtype, CLOSE)):
                return "wrong", f"{n}: {why}"
        elif names[n] is None and t is not None:
            return "wrong", f"{n}: there is none"
    unknown = [str(v.reason) for v in names.values() if isinstance(v, Unknown)]
    if unknown:
        return "refused", unknown[0]
    return ("equal", "") if known else ("refused", "no tensor")


def samples(op: Any, most: int) -> list[Any]:
    torch.manual_seed(0)
    found = list(op.sample_inputs(device="cpu", dtype=torch.float64, requires_grad=op.supports_autograd))
    return found[:: max(1, len(found) // most)][:most] if most else found


def table(only: str = "", most: int = SLICE, names: Sequence[str] = (), say: Callable[[str], None] = lambda line: None) -> list[Entry]:
    """Every differentiable entry of the database whose name has `only` in it, or is one of `names`."""
    from torch.testing._internal.common_methods_invocations import op_db

    entries: list[Entry] = []
    for op in op_db:
        if not op.supports_autograd or torch.float64 not in op.dtypes or only not in op.full_name or (names and op.full_name not in names):
            continue
        entry = Entry(op.full_name)
        try:
            found = samples(op, most)
        except Exception as error:
            entry.why[f"no samples: {type(error).__name__}"] += 1
            found = []
        for i, s in enumerate(found):
            outcome, why = compare(op.op, (s.input, *s.args), s.kwargs, i)
            entry.found[outcome] += 1
            if why:
                entry.why[f"{outcome}: {why}"] += 1
        entries.append(entry)
        say(str(entry))
    return entries


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.opinfo", description=__doc__)
    parser.add_argument("--only", default="", help="entries with this in their name")
    parser.add_argument("--count", type=int, default=SLICE, help="samples of one entry, evenly spaced; 0: all")
    parser.add_argument("--reasons", action="store_true", help="print why samples are refused, and of how many entries")
    parser.add_argument("--wrong", action="store_true", help="print wrong entries only")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.autograd.set_multithreading_enabled(False)
    began = time.process_time()
    entries = table(args.only, args.count, say=lambda line: print(line, flush=True) if not args.wrong or " wrong " in line else None)
    if args.reasons:
        print("\nentries  samples  reason")
        for why, n in sum((Counter(set(e.why)) for e in entries), Counter[str]()).most_common():
            print(f"{n:7}{sum(e.why[why] for e in entries):9}  {why}"[:220])
    total = Counter(e.outcome for e in entries)
    count = sum((e.found for e in entries), Counter[Outcome]())
    print(", ".join(f"{total[k]} {k}" for k in ("equal", "partly", "refused", "wrong")), f"of {len(entries)} entries")
    print(", ".join(f"{count[k]} {k}" for k in ("equal", "refused", "wrong")), f"samples in {time.process_time() - began:.0f} s")
    return 1 if total["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
