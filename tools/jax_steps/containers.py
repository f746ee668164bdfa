"""How parameters are kept: a dictionary, nested dictionaries, a NamedTuple, a tuple or a list."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Final

Shape = tuple[int, ...]
STYLES: Final = ("dict", "dict", "dict", "nested", "named", "tuple", "list")


@dataclass(frozen=True)
class Container:
    style: str
    shapes: Mapping[str, Shape]
    specs: Mapping[str, str]  # of parameters that are cut

    def access(self, name: str) -> str:
        if self.style == "dict":
            return f'params["{name}"]'
        if self.style == "nested":
            layer, leaf = _path(name)
            return f'params["{layer}"]["{leaf}"]' if layer else f'params["{leaf}"]'
        if self.style == "named":
            return f"params.{name}"
        return f"params[{list(self.shapes).index(name)}]"

    def build(self, values: Mapping[str, str]) -> str:
        if self.style == "dict":
            return "{" + ", ".join(f'"{name}": {value}' for name, value in values.items()) + "}"
        if self.style == "nested":
            layers: dict[str, dict[str, str]] = {}
            for name, value in values.items():
                layer, leaf = _path(name)
                layers.setdefault(layer, {})[leaf] = value
            loose = [f'"{leaf}": {value}' for leaf, value in layers.pop("", {}).items()]
            inner = [f'"{layer}": {{' + ", ".join(f'"{leaf}": {v}' for leaf, v in leaves.items()) + "}" for layer, leaves in layers.items()]
            return "{" + ", ".join([*inner, *loose]) + "}"
        if self.style == "named":
            return "Params(" + ", ".join(f"{name}={value}" for name, value in values.items()) + ")"
        both = "[]" if self.style == "list" else "()"
        return both[0] + ", ".join(values.values()) + ("," if len(values) == 1 and self.style == "tuple" else "") + both[1]

    def declared(self) -> str:
        return self.build({name: f"tvj.Reals({shape}, REAL)" for name, shape in self.shapes.items()})

    def cut(self) -> str:
        """The specs of all parameters; one for all where none is cut."""
        return "specs" if self.specs else "P()"

    def every_spec(self) -> str:
        return self.build({name: self.specs.get(name, "P()") for name in self.shapes})

    def top(self) -> str:
        if self.style != "named":
            return ""
        return "class Params(NamedTuple):\n" + "\n".join(f"    {name}: jax.Array" for name in self.shapes)

    def written(self, text: str) -> str:
        """Text in which `@name` is a parameter."""
        return re.sub(r"(?<![|\n])@([a-z]\w*)", lambda found: self.access(found.group(1)), text)

    def with_specs(self, specs: Mapping[str, str]) -> Container:
        return replace(self, specs=specs)


def container(rng: Random, shapes: Mapping[str, Shape], specs: Mapping[str, str] | None = None) -> Container:
    return Container(rng.choice(STYLES), shapes, specs or {})


def _path(name: str) -> tuple[str, str]:
    found = re.fullmatch(r"([a-z_]+)(\d)", name)
    return (f"layer{found.group(2)}", found.group(1)) if found else ("", name)
