"""Forms as text, for people: Σ, indices and atoms by short names."""

from __future__ import annotations

from fractions import Fraction

from trainverify.primitives.scalars import nearest_float
from trainverify.prove.algebra.kernel import Kernel
from trainverify.prove.algebra.terms import Coef, Index, Poly

_NAMES = "ijklmnopqrstuvwabcdefgh"


def index(i: Index) -> str:
    if i >= 0:
        return str(i)
    n = -1 - i
    return _NAMES[n] if n < len(_NAMES) else f"v{n % 10_000}"


def show(kernel: Kernel, p: Poly, depth: int = 2, width: int = 300) -> str:
    """A polynomial; atoms are opened `depth` levels deep, then shown by number."""
    if not p:
        return "0"
    terms = [_coef(c, bool(m)) + "·".join(_factor(kernel, u, idx, w, depth) for u, idx, w in m) for m, c in p.items()]
    text = " + ".join(terms)
    return text if len(text) <= width else text[: width - 1] + "…"


def _coef(c: Coef, followed: bool) -> str:
    if c == 1 and followed:
        return ""
    long = c.numerator.bit_length() > 200 or (isinstance(c, Fraction) and c.denominator >= 10**6)
    text = f"{nearest_float(c):.6g}" if long else str(c)
    return text + "·" if followed else text


def _factor(kernel: Kernel, uid: int, idx: tuple[Index, ...], power: object, depth: int) -> str:
    a = kernel.atoms[uid]
    at = "[" + ",".join(index(i) for i in idx) + "]" if idx else ""
    if a.kind == "input":
        text = f"{a.data}{at}"
    elif a.kind == "delta":
        text = f"[{index(idx[0])}={index(idx[1])}]"
    elif a.kind == "iota":
        text = index(idx[0])
    elif a.kind == "digit":
        text = f"[{a.data[0]}{'[' + ','.join(index(i) for i in idx[:-1]) + ']'} has digit{a.data[1]} {index(idx[-1])}]"
    elif a.kind == "valid":
        text = f"valid({a.data}{at})"
    elif depth <= 0:
        text = f"#{uid}{at}"
    elif a.kind == "fn":
        text = f"{kernel.name(uid)}({show(kernel, kernel.argument(uid, idx), depth - 1, 10**6)})"
    elif a.kind == "cut":
        text = f"({show(kernel, kernel.open((uid, idx, 1)), depth - 1, 10**6)})"
    elif a.kind == "sum":
        (body, sizes), _ = a.data
        slots = kernel.occurrences(uid, idx)
        bound = [f"x{n}" for n in range(len(sizes))]
        inner = []
        for u, w, entries in body:
            names = [bound[e] if e >= 0 else index(next(slots)) for e in entries]
            b = kernel.atoms[u]
            label = b.data if b.kind == "input" else f"#{u}"
            inner.append(f"{label}[{','.join(names)}]" + ("" if w == 1 else f"^{w}"))
        text = f"Σ_{','.join(f'{b}<{s}' for b, s in zip(bound, sizes, strict=True))} " + "·".join(inner)
        text = f"({text})"
    else:
        text = f"{a.kind}#{uid}{at}"
    return text if power == 1 else f"{text}^{power}"
