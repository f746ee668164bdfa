"""Matrices of configurations, read from TOML: which models, divided how, which pairs of files, and what is left out."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from trainverify.refusal import Refused
from trainverify.sweep.captured import VALUES, commands
from trainverify.zoo.parallel.degrees import Degrees
from trainverify.zoo.parallel.deviations import Deviations
from trainverify.zoo.recipes import NAMES, Wish

MOST: Final = 100_000  # configurations of one matrix
DEGREES: Final = frozenset(f.name for f in fields(Degrees))
CHANGES: Final = frozenset(f.name for f in fields(Wish)) - {"name", "how", "deviations"}
DEVIATIONS: Final = frozenset(f.name for f in fields(Deviations))


@dataclass(frozen=True)
class Case:
    """One configuration: a model of the zoo, two files, or a command that captures code."""

    name: str
    wish: Wish | None = None
    logical: str | None = None
    plan: str | None = None
    steps: int = 1
    allow: tuple[str, ...] = ()  # approximations
    command: tuple[str, ...] = ()  # its line, run in the folder of the matrix
    folder: str = "."


def cases(path: Path) -> tuple[Case, ...]:
    """All configurations of a matrix, in its order."""
    try:
        tree = tomllib.loads(path.read_text())
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Refused(f"{path}: {error}") from error
    unknown = sorted(set(tree) - {"defaults", "zoo", "files", *VALUES})
    if unknown:
        raise Refused(f"{path}: {unknown[0]}: not a part of a matrix (defaults, zoo, files, torch, jax)")
    defaults = _table(path, "defaults", tree.get("defaults", {}))
    found: dict[str, Case] = {}
    for i, block in enumerate(_tables(path, "zoo", tree)):
        for case in _zoo(path, f"zoo[{i}]", defaults | block):
            if found.setdefault(case.name, case) != case:
                raise Refused(f"{path}: zoo[{i}]: {case.name}: another configuration has this name")
            if len(found) > MOST:
                raise Refused(f"{path}: more than {MOST} configurations")
    for i, block in enumerate(_tables(path, "files", tree)):
        case = _files(path, f"files[{i}]", block)
        if case.name in found:
            raise Refused(f"{path}: files[{i}]: {case.name}: another configuration has this name; say `name` to tell them apart")
        found[case.name] = case
    for kind in VALUES:
        for i, block in enumerate(_tables(path, kind, tree)):
            for name, line in commands(f"{path}: {kind}[{i}]", kind, block):
                if name in found:
                    raise Refused(f"{path}: {kind}[{i}]: {name}: another configuration has this name; say `name` to tell them apart")
                found[name] = Case(name, command=line, folder=str(path.parent))
    if not found:
        raise Refused(f"{path}: no configuration (a [[zoo]] with a model, a [[files]] with logical and plan, a [[torch]] or [[jax]])")
    return tuple(found.values())


def _table(path: Path, where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Refused(f"{path}: {where}: a table is expected")
    return value


def _tables(path: Path, where: str, tree: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = tree.get(where, [])
    if not isinstance(found, list):
        raise Refused(f"{path}: {where}: tables are expected, [[{where}]]")
    return [_table(path, f"{where}[{i}]", t) for i, t in enumerate(found)]


def _zoo(path: Path, where: str, block: Mapping[str, Any]) -> Iterator[Case]:
    options = {k: v if isinstance(v, list) else [v] for k, v in block.items() if k != "exclude"}
    excluded = [_table(path, f"{where}.exclude", e) for e in block.get("exclude", [])]
    for name in (*options, *(k for e in excluded for k in e)):
        if name not in DEGREES | CHANGES | DEVIATIONS | {"model", "steps", "allow"}:
            raise Refused(f"{path}: {where}.{name}: no option of a model (see trainverify zoo --help)")
    for model in options.get("model", []):
        if model not in NAMES:
            raise Refused(f"{path}: {where}.model: no model {model!r} (`trainverify zoo` lists all)")
    if "model" not in options:
        raise Refused(f"{path}: {where}.model: is missing")
    for values in itertools.product(*options.values()):
        chosen = dict(zip(options, values, strict=True))
        if not any(all(chosen.get(k) == v for k, v in e.items()) for e in excluded):
            yield _case(path, where, chosen)


def _case(path: Path, where: str, chosen: Mapping[str, Any]) -> Case:
    words = [f"{k}={v}" if v is not True else k for k, v in chosen.items() if k != "model" and v is not False]
    how: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in chosen.items() if k in DEGREES}
    if how.get("schedule") == "interleaved":
        how.setdefault("chunks", 2)
    try:
        deviations = Deviations(**{k: v for k, v in chosen.items() if k in DEVIATIONS})
        wish = Wish(chosen["model"], Degrees(**how), **{k: v for k, v in chosen.items() if k in CHANGES}, deviations=deviations)
    except (TypeError, ValueError) as error:
        raise Refused(f"{path}: {where}: {error}") from error
    return Case(" ".join([chosen["model"], *words]), wish, steps=_steps(path, where, chosen), allow=_allow(path, where, chosen))


def _files(path: Path, where: str, block: Mapping[str, Any]) -> Case:
    for name in block:
        if name not in ("logical", "plan", "name", "steps", "allow"):
            raise Refused(f"{path}: {where}.{name}: not a part of a pair of files (logical, plan, name, steps, allow)")
    for name in ("logical", "plan"):
        if not isinstance(block.get(name), str):
            raise Refused(f"{path}: {where}.{name}: a file is expected")
    logical, plan = (str(path.parent / block[n]) for n in ("logical", "plan"))
    steps, allow = _steps(path, where, block), _allow(path, where, block)
    words = [f"{block['plan']} against {block['logical']}", *([f"steps={steps}"] if steps > 1 else ()), *(f"allow={a}" for a in allow)]
    return Case(str(block.get("name", " ".join(words))), None, logical, plan, steps, allow)


def _steps(path: Path, where: str, block: Mapping[str, Any]) -> int:
    steps = block.get("steps", 1)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise Refused(f"{path}: {where}.steps: {steps!r}: a number of steps, 1 or more")
    return steps


def _allow(path: Path, where: str, block: Mapping[str, Any]) -> tuple[str, ...]:
    """One approximation, or a list of them; "" is none."""
    given = block.get("allow", "")
    several = given if isinstance(given, list) else [given]
    if not all(isinstance(a, str) for a in several):
        raise Refused(f"{path}: {where}.allow: approximations by name are expected (docs/approximations.md)")
    return tuple(a for a in several if a)


__all__ = ["Case", "cases"]
