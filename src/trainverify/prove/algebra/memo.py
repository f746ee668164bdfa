"""Blocks of one kind are worked out once: what came out is said again with other names.

While a block is run everything that is used about the expressions in its inputs is noted: which were looked into, or
found again by what they are made of. The outcome is an identity in all other expressions, so it holds for every block
whose inputs have the same form, and in which what was looked into is made alike. The second time that inputs differ
only by constant indices (a micro-batch), those are made variables. Whatever does not fit exactly is worked out anew.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from trainverify.prove.algebra.forms import Forms
from trainverify.prove.algebra.kernel import Kernel
from trainverify.prove.algebra.places import Value
from trainverify.prove.algebra.terms import LAST, PARAMETER, Atom, Index, Mono, Need, Poly, Trace, Unsupported, named_need

_ENTRIES: Final = 12  # outcomes kept for inputs that look alike
_RIGID: Final = frozenset({"delta", "iota", "digit", "valid", "marker", "at", "region", "shift"})

_Piece = tuple[int, tuple[int, ...]]  # a value without constants, as a number; its constants at every occurrence
_Form = tuple[Any, ...]
Names = dict[int, int]  # atom → the atom that stands in its place
Run = Callable[[list[Value]], list[Value] | None]  # values of inputs → values of all tensors made, None if some have none


@dataclass
class _Renamed:
    """An outcome under other names: generic in the constant indices."""

    names: Names
    made: list[Value | None]  # filled when asked for
    needs: list[Need]
    pieces: dict[int, _Piece | None] = field(default_factory=dict)  # of tensors made, with parameters; None if that cannot be said


@dataclass
class _Entry:
    """The outcome of one block, over the atoms of its inputs."""

    atoms: tuple[int, ...]
    constants: tuple[int, ...]  # at every occurrence
    variable: tuple[int | None, ...]  # which parameter stands there, None for a constant that must be the same
    looked: list[int]  # atoms of the inputs, or in those before, whose making was used
    new: list[int]  # atoms of the outcome that are made of those, in order of their making
    made: list[Value]
    needs: list[Need]
    given: list[Need]  # that had been noted before
    exps: list[tuple[object, str, bool]]
    measured: list[int]  # atoms whose heights decided what was opened
    renamed: dict[tuple[int, ...], _Renamed | None] = field(default_factory=dict)


class Outcome:
    """What a block makes. Values are given their names when somebody asks."""

    def __init__(self, memo: Memo, renamed: _Renamed, entry: _Entry, constants: dict[Index, Index]):
        self._memo = memo
        self._renamed = renamed
        self._entry = entry
        self._constants = constants

    def value(self, n: int) -> Value | None:
        """The n-th tensor that the block makes; None if it has no form under these names."""
        generic = self._generic(n)
        if generic is None:
            return None
        kernel = self._memo.kernel
        try:
            return {key: kernel.substitute(p, self._constants) for key, p in generic.items()}
        except Unsupported:
            return None

    def piece(self, n: int) -> _Piece | None:
        """The n-th tensor as `Memo.piece` would say it of its value; None if that has to be made first."""
        known = self._renamed.pieces
        if n not in known:
            generic = self._generic(n)
            known[n] = None if generic is None or not self._memo.plain(generic) else self._memo.piece(generic)
        found = known[n]
        if found is None:
            return None
        number, constants = found
        at = self._constants
        return number, tuple([at.get(c, c) for c in constants])

    def _generic(self, n: int) -> Value | None:
        generic = self._renamed.made[n]
        if generic is None:
            generic = self._memo.rename_value(self._entry.made[n], self._renamed.names)
            self._renamed.made[n] = generic
        return generic


Given = Value | tuple[Outcome, int]  # an input of a block: a value, or a tensor that another block makes


def _value(x: Given) -> Value:
    if isinstance(x, dict):
        return x
    found = x[0].value(x[1])
    if found is None:
        raise Unsupported("a tensor of a block that has no form with these constants")
    return found


class Memo:
    def __init__(self, kernel: Kernel, forms: Forms):
        self.kernel = kernel
        self.forms = forms
        self._entries: dict[Hashable, list[_Entry]] = {}
        self._hopeless: set[Hashable] = set()  # not every tensor has a form
        self._skeletons: dict[int, tuple[Hashable, tuple[int, ...]]] = {}
        self._signatures: dict[int, Hashable] = {}
        self._pieces: list[_Form] = []
        self._piece_numbers: dict[_Form, int] = {}
        self._piece_by_id: dict[int, tuple[_Piece, Value]] = {}  # with the value, which keeps its id
        self._abstracts: dict[tuple[int, ...], tuple[int, tuple[int, ...]]] = {}  # pieces → the number of their form, atoms
        self._shapes: dict[Hashable, int] = {}

    def outcome(self, kind: Hashable, inputs: Sequence[Given], outputs: Sequence[int], run: Run) -> Outcome | None:
        """What a block of a kind makes of its inputs; `outputs` must have a form. None: run it as it is."""
        try:
            return self._outcome(kind, inputs, outputs, run)
        except Unsupported:  # what is known of these constants is not known of all
            return None

    def _outcome(self, kind: Hashable, inputs: Sequence[Given], outputs: Sequence[int], run: Run) -> Outcome | None:
        shape, atoms, constants = self._abstract(inputs)
        if (kind, shape) in self._hopeless:
            return None
        entries = self._entries.setdefault((kind, shape), [])
        for entry in entries:
            at = _parameters(entry, constants)
            renamed = None if at is None else self._fitted(entry, atoms, outputs)
            if at is not None and renamed is not None:
                return self._said(entry, renamed, at)
        if len(entries) >= _ENTRIES:
            return None
        values = [_value(x) for x in inputs]
        made = self._record(values, outputs, atoms, constants, _differing(entries, constants), run)
        if made is None:
            self._hopeless.add((kind, shape))
            return None
        entries.append(made)
        at, renamed = _parameters(made, constants), self._fitted(made, atoms, outputs)
        return None if at is None or renamed is None else self._said(made, renamed, at)

    def _said(self, entry: _Entry, renamed: _Renamed, at: dict[Index, Index]) -> Outcome:
        for what, uid, idx in renamed.needs:
            self.kernel.needs.add(named_need(what, uid, [at.get(i, i) for i in idx]))
        return Outcome(self, renamed, entry, at)

    # -- inputs ------------------------------------------------------------------------------------------------------

    def _abstract(self, inputs: Sequence[Given]) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """The form of some values without names and constants (a number), their atoms, and their constants at every occurrence."""
        numbers: list[int] = []
        constants: list[int] = []
        for x in inputs:
            found = self._piece_of(x) if isinstance(x, dict) else x[0].piece(x[1])
            number, here = self.piece(_value(x)) if found is None else found
            numbers.append(number)
            constants += here
        key = tuple(numbers)
        if key not in self._abstracts:
            self._abstracts[key] = self._together(key)
        shape, atoms = self._abstracts[key]
        assert not constants or min(constants) >= 0, "parameters stand for constants only within a block"
        return shape, atoms, tuple(constants)

    def _together(self, numbers: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """The form of some pieces, their atoms numbered through, and the atoms."""
        atoms: dict[int, int] = {}
        shape: list[Hashable] = []
        for number in numbers:
            for key, terms in self._pieces[number]:
                shape.append((key, tuple([(c, tuple([(atoms.setdefault(u, len(atoms)), idx, w) for u, idx, w in m])) for c, m in terms])))
            shape.append(())
        found = tuple(atoms)
        form = (tuple(shape), tuple([self._signature(u) for u in found]))
        return self._shapes.setdefault(form, len(self._shapes)), found

    def _piece_of(self, value: Value) -> _Piece:
        """The piece of a value that is used again and again, as parameters are."""
        known = self._piece_by_id.get(id(value))
        if known is None:
            known = self._piece_by_id[id(value)] = self.piece(value), value
        return known[0]

    def piece(self, value: Value) -> _Piece:
        """A value without its constants (parameters are such), and those in order."""
        constants: list[int] = []
        blocks = []
        for key, p in value.items():
            terms = []
            for m, c in p.items() if len(p) < 2 else self.kernel.ordered(p):
                factors = []
                for u, idx, w in m:
                    if idx and (max(idx) >= 0 or min(idx) <= PARAMETER):
                        constants += [i for i in idx if i >= 0 or LAST < i <= PARAMETER]
                        idx = tuple([0 if i >= 0 or LAST < i <= PARAMETER else i for i in idx])
                    factors.append((u, idx, w))
                terms.append((c, tuple(factors)))
            blocks.append((key, tuple(terms)))
        form = tuple(blocks)
        number = self._piece_numbers.get(form)
        if number is None:
            number = self._piece_numbers[form] = len(self._pieces)
            self._pieces.append(form)
        return number, tuple(constants)

    def plain(self, value: Value) -> bool:
        """Whether its terms stay as they are and in order whatever constants are put in: one product of different atoms."""
        for p in value.values():
            for m in p:
                if len(p) > 1 or len({u for u, _, _ in m}) < len(m) or any(self.kernel.atoms[u].kind == "delta" for u, _, _ in m):
                    return False
        return True

    def _generic(self, inputs: Sequence[Value], variable: Sequence[int | None]) -> list[Value]:
        """Values with parameters in place of some constants."""
        places = iter(variable)
        found: list[Value] = []
        for value in inputs:
            blocks: Value = {}
            for key, p in value.items():
                terms = []
                for m, c in p.items() if len(p) < 2 else self.kernel.ordered(p):
                    factors = []
                    for u, idx, w in m:
                        at = [i if i < 0 or (n := next(places)) is None else PARAMETER - n for i in idx]
                        factors.append((u, tuple(at), w))
                    terms.append(self.kernel.monomial(factors, c))
                blocks[key] = self.kernel.add(*terms)
            found.append(blocks)
        return found

    def _signature(self, uid: int) -> Hashable:
        """What may be used about an atom without looking into it."""
        known = self._signatures.get(uid)
        if known is None:
            a = self.kernel.atoms[uid]
            k = self.kernel
            masks = (k.infinite(uid), k.masked(uid), k.infinite(uid) and k.from_below(uid), k.is_opaque(uid))
            flags = (a.sizes, a.indicator, a.positive, a.nonnegative, a.covers, uid < k.named, masks)
            if a.kind in _RIGID and _chosen(a) is None:
                known = uid
            elif a.kind in _RIGID:
                known = (a.kind, flags, a.data[1:] if a.kind == "digit" else ())
            elif a.kind == "input":
                domain = self.forms.domains.get(a.data)  # all but a range of integers is in the flags
                known = uid if domain is not None and domain.kind == "ids" else ("input", flags)
            elif a.kind == "fn":  # a number is what it is
                known = uid if a.data[0][0] == "number" else ("fn", flags, a.data[0][:2])
            else:
                known = (a.kind, flags)
            self._signatures[uid] = known
        return known

    def forget_signatures(self) -> None:
        """After the logical program: its atoms have names now."""
        self._signatures.clear()
        self._abstracts.clear()

    # -- recording ---------------------------------------------------------------------------------------------------

    def _record(
        self,
        inputs: Sequence[Value],
        outputs: Sequence[int],
        atoms: tuple[int, ...],
        constants: tuple[int, ...],
        variable: tuple[int | None, ...],
        run: Run,
    ) -> _Entry | None:
        kernel = self.kernel
        differ = any(n is not None for n in variable)
        kernel.trace = trace = Trace(generic=differ)
        try:
            made = run(self._generic(inputs, variable) if differ else list(inputs))
        finally:
            kernel.trace = None
        if made is None or trace.spoiled:
            return None
        looked: list[int] = []
        queue = [u for u in atoms if u in trace.looked]
        seen = set(queue)
        while queue:
            u = queue.pop()
            looked.append(u)
            for c in self._skeleton(u)[1]:
                if c in trace.looked and c not in seen:
                    seen.add(c)
                    queue.append(c)
        given = set(atoms).union(*(self._skeleton(u)[1] for u in looked))
        wanted = [u for n in outputs for p in made[n].values() for m in p for u, _, _ in m]
        new = self._new([*wanted, *(u for _, u, _ in (*trace.needs, *trace.given))], given)
        measured = sorted(trace.measured)
        return _Entry(atoms, constants, variable, looked, new, made, trace.needs, trace.given, trace.exps, measured)

    def _new(self, wanted: list[int], given: set[int]) -> list[int]:
        """Atoms and all that they are made of, down to what is given."""
        found: set[int] = set()
        queue = list(wanted)
        while queue:
            u = queue.pop()
            if u not in given and u not in found:
                found.add(u)
                queue += self._skeleton(u)[1]
        return sorted(found)

    # -- other names -------------------------------------------------------------------------------------------------

    def _fitted(self, entry: _Entry, atoms: tuple[int, ...], outputs: Sequence[int]) -> _Renamed | None:
        if atoms not in entry.renamed:
            entry.renamed[atoms] = self._fit(entry, atoms, outputs)
        return entry.renamed[atoms]

    def _fit(self, entry: _Entry, atoms: tuple[int, ...], outputs: Sequence[int]) -> _Renamed | None:
        if len(atoms) != len(entry.atoms):
            return None
        names: Names = dict(zip(entry.atoms, atoms, strict=True))
        for u in entry.looked:
            v = names[u]
            (form, inside), (other, instead) = self._skeleton(u), self._skeleton(v)
            if form != other:
                return None
            for a, b in zip(inside, instead, strict=True):
                if names.setdefault(a, b) != b or self._signature(a) != self._signature(b):
                    return None
        if any(u in names and self.kernel.heights(u) != self.kernel.heights(names[u]) for u in entry.measured):
            return None
        for what, uid, idx in entry.given:  # before anything is made that rests on it
            renamed = self._renamed(uid, names)
            if renamed is None or not self.kernel.certain(named_need(what, renamed, idx), self.kernel.needs):
                return None
        if not _ordered(names) or any(self._renamed(u, names) is None for u in entry.new):
            return None
        for u in entry.measured:
            renamed = self._renamed(u, names)
            if renamed is None or self.kernel.heights(u) != self.kernel.heights(renamed):
                return None
        made: list[Value | None] = [None] * len(entry.made)
        for n in outputs:
            made[n] = self.rename_value(entry.made[n], names)
            if made[n] is None:
                return None
        needs: list[Need] = []
        for what, uid, idx in entry.needs:
            renamed = self._renamed(uid, names)
            if renamed is None:
                return None
            needs.append((what, renamed, idx))
        for rest, where, safe in entry.exps:
            said = self._renamed_rest(rest, names)
            if said is not None:
                self.forms.exps.setdefault(said, []).append((where, safe))
        return _Renamed(names, made, needs) if _ordered(names) else None

    def rename_value(self, value: Value, names: Names) -> Value | None:
        out: Value = {}
        for key, p in value.items():
            renamed = self._renamed_poly(p, names)
            if renamed is None:
                return None
            out[key] = renamed
        return out

    def _renamed_poly(self, p: Poly, names: Names) -> Poly | None:
        out: Poly = {}
        for m, c in p.items():
            renamed = self._renamed_mono(m, names)
            if renamed is None or renamed in out:
                return None
            out[renamed] = c
        return out

    def _renamed_mono(self, m: Mono, names: Names) -> Mono | None:
        factors = []
        for u, idx, w in m:
            v = names.get(u)
            if v is None:
                v = self._renamed(u, names)
                if v is None:
                    return None
            factors.append((v, idx, w))
        factors.sort()
        return tuple(factors)

    def _renamed_rest(self, rest: Any, names: Names) -> object:
        out = []
        for m in rest:
            factors = [(self._renamed(u, names), w) for u, w in m]
            if any(u is None for u, _ in factors):
                return None
            out.append(tuple(factors))
        return frozenset(out)

    def _renamed(self, uid: int, names: Names) -> int | None:
        """The atom that is made of the renamed parts as this one is of its own; None if there is none that surely is."""
        known = names.get(uid)
        if known is not None:
            return known
        a = self.kernel.atoms[uid]
        if a.kind in ("input", "at"):
            return None  # an input that came from nowhere, or elements of something else
        if a.kind in _RIGID and _chosen(a) is None:
            names[uid] = uid
            return uid
        inside = []
        for c in self._skeleton(uid)[1]:
            v = self._renamed(c, names)
            if v is None:
                return None
            inside.append(v)
        found = self._made_of(a, inside)
        if found is None or (uid < self.kernel.named) != (found < self.kernel.named):
            return None
        names[uid] = found
        return found

    def _made_of(self, a: Atom, inside: list[int]) -> int | None:
        """An atom like `a` of other parts."""
        kernel = self.kernel
        parts = iter(inside)
        if a.kind in _RIGID:
            name = f"@{inside[0]}"  # no input is called so: there would be no memo
            kernel.always_valid.add(name)
            flags = {"indicator": True, "nonnegative": True}
            return kernel.atom(a.kind, (name, *a.data[1:]) if a.kind == "digit" else name, a.sizes, **flags)
        form: Any
        match a.kind:
            case "cut":
                ((terms, indicator), _) = a.data
                form = (tuple([(c, tuple([(next(parts), w) for _, w in fs])) for c, fs in terms]), indicator)
            case "fn":
                ((name, param, terms), _) = a.data
                form = (name, param, tuple([(c, tuple([(next(parts), w) for _, w in fs])) for c, fs in terms]))
            case "sum":
                ((body, sizes), _) = a.data
                form = (tuple([(next(parts), w, e) for _, w, e in body]), sizes)
            case _:
                ((terms, *rest), _) = a.data
                form = (tuple([(c, tuple([(next(parts), w, e) for _, w, e in fs])) for c, fs in terms]), *rest)
        content = a.content[0], tuple(sorted([(next(parts), at, w) for _, at, w in a.content[1]]))
        idx = [-1 - k for k in a.pattern]  # slots as variables; constants as they are
        there = next((v for v in kernel.forms_of(a.kind, form) if _fits(kernel.atoms[v], idx)), None)
        if there is not None:  # what the kernel would use: it must be the same in every way
            b = kernel.atoms[there]
            same = b.pattern == a.pattern and _flags(a) == _flags(b) and (b.content[0], tuple(sorted(b.content[1]))) == content
            return there if same else None
        if any(k < 0 for k in a.pattern) and not kernel.keep_constants:
            return None
        uid, _, _ = kernel.shared(a.kind, form, idx, [a.sizes[k] if k >= 0 else 0 for k in a.pattern], lambda: _flags(a))
        made = kernel.atoms[uid]
        if a.kind == "cut":
            made.content = content
            names = dict(zip(self._skeleton(a.uid)[1], inside, strict=True))
            assert a.definition is not None
            definition = self._renamed_definition(a.definition, names)
            if definition is None:
                definition = kernel.times(kernel.monomial(content[1], content[0]), kernel.written(form[0], made.pattern))
            kernel.define(made, definition)
        return uid

    def _renamed_definition(self, p: Poly, names: Names) -> Poly | None:
        if any(u not in names for m in p for u, _, _ in m):
            return None  # something cancelled or joined when it was written out
        return self._renamed_poly(p, names)

    def _skeleton(self, uid: int) -> tuple[Hashable, tuple[int, ...]]:
        """What an atom is made of: the form without atoms, and the atoms in it."""
        known = self._skeletons.get(uid)
        if known is None:
            a = self.kernel.atoms[uid]
            known = self._skeletons[uid] = _taken_apart(a)
        return known


def _differing(entries: Sequence[_Entry], constants: tuple[int, ...]) -> tuple[int | None, ...]:
    """Parameters where constants differ from those of an earlier block; equal constants get the same."""
    if not entries:
        return (None,) * len(constants)
    differ = [a != b for a, b in zip(constants, entries[0].constants, strict=True)]
    numbers: dict[int, int] = {}
    return tuple([numbers.setdefault(c, len(numbers)) if d else None for c, d in zip(constants, differ, strict=True)])


def _parameters(entry: _Entry, constants: tuple[int, ...]) -> dict[Index, Index] | None:
    """What the parameters of an outcome are here; None if other constants than those differ."""
    found: dict[Index, Index] = {}
    for c, own, n in zip(constants, entry.constants, entry.variable, strict=True):
        if c != own if n is None else found.setdefault(PARAMETER - n, c) != c:
            return None
    return found


def _taken_apart(a: Atom) -> tuple[Hashable, tuple[int, ...]]:
    content = (a.content[0], tuple([(at, w) for _, at, w in a.content[1]]))
    more = [u for u, _, _ in a.content[1]]
    form: Hashable
    match a.kind:
        case "input" | "delta" | "iota" | "marker" | "at" | "region" | "shift":
            return a.uid, ()
        case "digit" | "valid":
            chosen = _chosen(a)
            return (a.uid, ()) if chosen is None else ((a.kind, a.sizes, a.data[1:] if a.kind == "digit" else ()), (chosen,))
        case "cut":
            ((terms, indicator), pattern) = a.data
            form = tuple([(c, tuple([w for _, w in fs])) for c, fs in terms]), indicator
            inside = [u for _, fs in terms for u, _ in fs]
        case "fn":
            ((name, param, terms), pattern) = a.data
            form = name, param, tuple([(c, tuple([w for _, w in fs])) for c, fs in terms])
            inside = [u for _, fs in terms for u, _ in fs]
        case "sum":
            ((body, sizes), pattern) = a.data
            form = tuple([(w, e) for _, w, e in body]), sizes
            inside = [u for u, _, _ in body]
        case _:
            ((terms, *rest), pattern) = a.data
            form = tuple([(c, tuple([(w, e) for _, w, e in fs])) for c, fs in terms]), tuple(rest)
            inside = [u for _, fs in terms for u, _, _ in fs]
    return (a.kind, a.sizes, pattern, form, content), tuple(inside + more)


def inside(a: Atom) -> tuple[int, ...]:
    """The atoms that an atom is made of."""
    return _taken_apart(a)[1]


def _chosen(a: Atom) -> int | None:
    """The atom whose choice (a position found by sorting) these are digits of."""
    name = a.data[0] if a.kind == "digit" else a.data if a.kind == "valid" else ""
    return int(name[1:]) if isinstance(name, str) and name[:1] == "@" and name[1:].isdigit() else None


def _fits(a: Atom, idx: Sequence[Index]) -> bool:
    """Whether indices at the occurrences of a form can be those of an atom."""
    seen: dict[int, Index] = {}
    return all(i == -1 - k if k < 0 else seen.setdefault(k, i) == i for k, i in zip(a.pattern, idx, strict=True))


def _flags(a: Atom) -> dict[str, bool]:
    return {"indicator": a.indicator, "positive": a.positive, "nonnegative": a.nonnegative}


def _ordered(names: Names) -> bool:
    """Whether names keep their order: then what is in canonical order stays so."""
    before = -1
    for _, v in sorted(names.items()):
        if v <= before:
            return False
        before = v
    return True
