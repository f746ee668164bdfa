"""Versions of libraries that this one is tested with, and which are installed. Nothing is imported to find out."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

# Package → the versions that the tests ran with, the suite's first, and what needs it. Of libraries that work by what they document, the
# range in pyproject.toml is all there is.
TESTED: Final[dict[str, tuple[tuple[str, ...], str]]] = {
    "numpy": ((), "everything"),
    "python-flint": ((), "verdicts"),
    "z3-solver": ((), "--engine smt, both and auto"),
    "torch": (("2.13.0",), "trainverify torch, and the frameworks below"),
    "jax": ((), "trainverify jax"),
    "torchtitan": (("0.3.0",), "trainverify torchtitan"),
    "megatron-core": (("0.16.1",), "trainverify megatron"),
    "transformers": (("5.23.0",), "trainverify transformers"),
    "accelerate": (("1.15.0",), "trainverify transformers"),
    "deepspeed": (("0.19.8",), "trainverify deepspeed"),
    "distributed": ((), "trainverify sweep --cluster"),
}
_EXTRAS: Final = {"torch": "torch", "jax": "jax", "distributed": "cluster"}
_CORE: Final = ("numpy", "python-flint", "z3-solver")
PYTHON: Final = "3.11"


@dataclass(frozen=True)
class Installed:
    """One library as it is here."""

    name: str
    version: str | None
    tested: tuple[str, ...]
    needed: str

    @property
    def as_tested(self) -> bool:
        """Whether nothing is known against it: `2.13.0+cpu` is 2.13.0."""
        return self.version is not None and (not self.tested or self.version.partition("+")[0] in self.tested)

    @property
    def state(self) -> str:
        if self.version is None:
            return "missing"
        return "ok" if self.as_tested else "untested"

    @property
    def advice(self) -> str:
        """How to get it, or what is known of another version."""
        if self.version is None:
            wanted = f"{self.name}=={self.tested[0]}" if self.tested else self.name
            return f"pip install 'trainverify[{_EXTRAS[self.name]}]'" if self.name in _EXTRAS else f"pip install {wanted}"
        return "" if self.as_tested else f"tested with {listed(self.tested)}: another version may lack what captures rest on"


def listed(versions: Sequence[str]) -> str:
    """`2.13.0, 2.14.1 and 2.15.0`."""
    *most, last = versions
    return f"{', '.join(most)} and {last}" if most else last


def installed(name: str) -> Installed:
    tested, needed = TESTED[name]
    try:
        version: str | None = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        version = None
    return Installed(name, version, tested, needed)


def every() -> Iterator[Installed]:
    """Python, and all libraries."""
    yield Installed("Python", platform.python_version(), (), f"{PYTHON} or newer")
    yield from (installed(n) for n in TESTED)


def core() -> list[Installed]:
    """What no command works without."""
    return [installed(n) for n in _CORE]


def warning(name: str) -> str | None:
    """One line on an installed library of another version than the tested one."""
    found = installed(name)
    if found.version is None or found.as_tested:
        return None
    return f"{name} {found.version} is installed; captures are tested with {listed(found.tested)} (trainverify doctor)"


__all__ = ["TESTED", "Installed", "core", "every", "installed", "listed", "warning"]
