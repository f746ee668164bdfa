"""Whether the user's code goes on after an error that is raised here: its frames, and the tables of handlers of their code."""

from __future__ import annotations

import builtins
import contextlib
import dis
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from types import CodeType, FrameType, FunctionType
from typing import Any, Final

from trainverify.torch.frames import is_ours
from trainverify.torch.lines import may_be_users
from trainverify.torch.objects import alive

_ALWAYS: Final = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT")
_RAISES: Final = ("RERAISE", "RAISE_VARARGS")
_GENERATED: Final = contextlib._GeneratorContextManager
_CAPTURES: Final = ("capture", "capture_script")  # functions of ours that call the user's


def handled(*errors: type[Exception], any_manager: bool = False) -> bool:
    """Whether a handler of the user's may catch one of these errors, raised where this function is called.

    With `any_manager` every `with` counts as a handler: that is quick to see."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if is_ours(code.co_filename) and code.co_name in _CAPTURES:
            return False
        if may_be_users(code.co_filename) and _catches(frame, errors, True if any_manager else None):
            return True
        frame = frame.f_back
    return False


@cache
def _table(code: CodeType) -> tuple[list[dis.Instruction], dict[int, int], list[Any]]:
    """The instructions of a code, their places by offset, and which of them have handlers."""
    instructions = list(dis.get_instructions(code))
    entries: Any = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]
    return instructions, {i.offset: n for n, i in enumerate(instructions)}, list(entries)


def _catches(frame: FrameType, errors: Sequence[type[Exception]], swallowed: bool | None = None) -> bool:
    """Whether control may leave the handlers around what a frame runs now otherwise than by an error."""
    code, places, entries = _table(frame.f_code)
    waiting, seen = [_handler(entries, frame.f_lasti)], set()
    while waiting:
        offset = waiting.pop()
        if offset is None or offset in seen:
            continue
        seen.add(offset)
        at = places[offset]
        name, after = code[at].opname, code[at + 1].offset if at + 1 < len(code) else None
        if name in _RAISES or (name == "POP_EXCEPT" and code[at + 1].opname == "RERAISE"):
            waiting.append(_handler(entries, offset if name in _RAISES else int(after or 0)))
        elif name in ("POP_EXCEPT", "CHECK_EG_MATCH"):
            return True
        elif name == "CHECK_EXC_MATCH" and not _matches(frame, code[:at], errors):
            waiting.append(code[at + 1].argval)  # the jump that is taken where the error is another one
        elif name == "WITH_EXCEPT_START" and not (_swallowed(errors) if swallowed is None else swallowed):
            waiting.append(code[at + 2].offset)
        else:
            if code[at].opcode in dis.hasjrel or code[at].opcode in dis.hasjabs:
                waiting.append(code[at].argval)
            if name not in _ALWAYS:
                waiting.append(after)
    return False


def _handler(entries: Sequence[Any], offset: int) -> int | None:
    return next((e.target for e in entries if e.start <= offset < e.end), None)


def _matches(frame: FrameType, before: Sequence[dis.Instruction], errors: Sequence[type[Exception]]) -> bool:
    """Whether an `except` may be meant for one of the errors: what it names is computed as its code does that."""
    first = len(before)
    while first and before[first - 1].opname.startswith(("LOAD_", "BUILD_TUPLE")):
        first -= 1
    stack: list[Any] = []
    try:
        for i in before[first:]:
            if i.opname == "BUILD_TUPLE":
                stack[len(stack) - i.argval :] = [tuple(stack[len(stack) - i.argval :])]
            elif i.opname == "LOAD_ATTR":
                stack.append(getattr(stack.pop(), i.argval))
            elif i.opname == "LOAD_CONST":
                stack.append(i.argval)
            else:
                stack.append({**vars(builtins), **frame.f_globals, **frame.f_locals}[i.argval])
        return any(issubclass(e, stack[-1]) for e in errors)
    except Exception:  # what it names is not found so
        return True


def _swallowed(errors: Sequence[type[Exception]]) -> bool:
    """Whether a manager of some `with` may keep an error from its caller. One that is not in use counts too."""
    managers = alive()
    if any(map(_may_swallow, set(map(type, managers)))):
        return True
    frames: list[FrameType | None] = [vars(m)["gen"].gi_frame for m in managers if type(m) is _GENERATED]
    return any(f is not None and may_be_users(f.f_code.co_filename) and _catches(f, errors, False) for f in frames)


@cache
def _may_swallow(kind: Any) -> bool:
    """Whether `__exit__` may return something true. In PyTorch and in Python's library only where it says so."""
    method = next((vars(k)["__exit__"] for k in type.mro(kind) if "__exit__" in vars(k)), None)
    if not isinstance(method, FunctionType):
        return False
    users = may_be_users(method.__code__.co_filename)
    return issubclass(kind, contextlib.suppress) or any(v is True or (users and v not in (None, False)) for v in _returned(method.__code__))


def _returned(code: CodeType) -> Iterator[Any]:
    """What a function returns: constants, or its code where that is computed."""
    instructions = list(dis.get_instructions(code))
    for before, here in zip([None, *instructions], instructions, strict=False):
        if here.opname == "RETURN_CONST":
            yield here.argval
        elif here.opname == "RETURN_VALUE":
            yield before.argval if before is not None and before.opname == "LOAD_CONST" else code


__all__ = ["handled"]
