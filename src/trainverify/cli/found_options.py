"""Options on a step that is found in a script: what its loaders and its model do not show."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_type_hints

import typer

from trainverify.refusal import Refused


def _text(metavar: str, text: str) -> Any:
    return Annotated[str | None, typer.Option(metavar=metavar, help=f"Of a step that is found: {text}")]


OPTIONS: dict[str, Any] = {
    "mesh": _text("AXES", "axes of the ranks and their sizes, dp=2,tp=4."),
    "loss": _text("dp=avg", "how the losses of ranks make the loss, or whole."),
    "below": _text("[NAME=]N,…", "integers of the batch are below N."),
    "ignore": _text("[NAME=]N,…", "an integer that counts as none, such as -100."),
}


def with_found(command: Callable[..., int]) -> Callable[..., int]:
    """A command that takes `found`, these options by name: they are added to its own."""
    own = {n: p for n, p in inspect.signature(command).parameters.items() if n != "found"}
    hints = get_type_hints(command, include_extras=True)

    @functools.wraps(command)
    def complete(**values: Any) -> int:
        given = {n: values.pop(n) for n in OPTIONS}
        return command(found={n: _read(n, v) for n, v in given.items() if v is not None}, **values)

    keyword = inspect.Parameter.KEYWORD_ONLY
    more = [inspect.Parameter(n, keyword, default=None, annotation=kind) for n, kind in OPTIONS.items()]
    vars(complete)["__signature__"] = inspect.Signature([*(p.replace(kind=keyword) for p in own.values()), *more], return_annotation=int)
    complete.__annotations__ = {n: hints[n] for n in own} | OPTIONS | {"return": int}
    del vars(complete)["__wrapped__"]
    return complete


def _read(option: str, text: str) -> str | Mapping[str, int | str]:
    """`NAME=VALUE,…` by name; a number alone is for all names."""
    if option == "loss" and text == "whole":
        return text
    pairs = [part.rpartition("=") for part in text.split(",")]
    if option == "loss":
        if not all(name and op in ("avg", "sum") for name, _, op in pairs):
            raise Refused(f"--loss {text}: AXIS=avg or AXIS=sum, separated by commas, or whole")
        return {name: op for name, _, op in pairs}
    try:
        return {name.strip(): int(number) for name, _, number in pairs}
    except ValueError:
        raise Refused(f"--{option} {text}: NAME=N, separated by commas") from None
