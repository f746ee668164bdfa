"""Communication that a library makes for the user: the line that asked for it.

DDP, FSDP2 and DTensor's parallel styles communicate from hooks, where no line of the user's says what they do. What the user wrote are
the lines that changed how the wrapper communicates, the last one first, and the line that wrapped the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from trainverify.graph.program import Source
from trainverify.torch import buckets
from trainverify.torch.frames import ENGINE, torchs
from trainverify.torch.private import fsdp_param_group

_LINE: Final = "_line_of_the_user"
_MADE: Final = "__init__"
_GROUP: Final = "distributed/fsdp/_fully_shard/_fsdp_param_group.py"
_STYLE: Final = "distributed/tensor/parallel/style.py"
_SETTERS: Final = (
    "set_requires_gradient_sync",
    "set_requires_all_reduce",
    "set_reduce_scatter_divide_factor",
    "set_gradient_divide_factor",
    "set_force_sum_reduction_for_comms",
    "set_all_reduce_hook",
    "set_is_last_backward",
)


class Wrappers:
    """Lines of wrappers in this process."""

    def __init__(self, here: Callable[[], Source | None]):
        self.here = here
        self.ddp: Source | None = None
        self.styles: dict[int, Source] = {}  # id of a module → its style

    def install(self) -> None:
        """For the rest of this process."""
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.tensor.parallel import style
        from torch.nn.parallel import DistributedDataParallel

        def group_made(group: Any, *args: Any) -> None:
            setattr(group, _LINE, {_MADE: self.here()})

        def group_set(name: str) -> Callable[..., None]:
            def note(module: Any, *args: Any) -> None:
                line = self.here()
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    lines = getattr(group, _LINE)
                    setattr(group, _LINE, {name: line, **{n: x for n, x in lines.items() if n != name}})

            return note

        def ddp_made(module: Any, *args: Any) -> None:
            self.ddp = self.here()

        def style_made(made: Any, *args: Any) -> None:
            made.__dict__.setdefault(_LINE, self.here())

        def style_applied(made: Any, module: Any, *args: Any) -> None:
            if (line := getattr(made, _LINE, None)) is not None:
                self.styles[id(module)] = line

        _after(fsdp_param_group(), "__init__", group_made)
        for name in _SETTERS:
            if hasattr(FSDPModule, name):
                _after(FSDPModule, name, group_set(name))
        _after(DistributedDataParallel, "__init__", ddp_made)
        buckets.install()
        for kind in vars(style).values():
            if isinstance(kind, type) and issubclass(kind, style.ParallelStyle) and kind is not style.ParallelStyle:
                _after(kind, "__init__", style_made)
                _after(kind, "_apply", style_applied)

    def of(self, frames: list[FrameType]) -> list[Source]:
        """The lines of the wrapper that runs, if one does; `frames` are those between an op and the user's innermost line."""
        if frames and frames[0].f_code is ENGINE and self.ddp is not None:
            return [self.ddp]  # called from C++ without Python in between: DDP's reducer
        in_style = False
        for frame in frames:
            file = torchs(frame.f_code.co_filename)
            if file == _GROUP and (found := getattr(frame.f_locals.get("self"), _LINE, None)) is not None:
                return list(dict.fromkeys(line for line in found.values() if line is not None))
            in_style = in_style or file == _STYLE
            if in_style and frame.f_code.co_name in ("_call_impl", "inner") and (module := frame.f_locals.get("self")) is not None:
                return [self.styles[id(module)]] if id(module) in self.styles else []
        return []


def _after(owner: Any, name: str, note: Callable[..., None]) -> None:
    """Run `note` with the same arguments after a method."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        note(self, *args)
        return result

    setattr(owner, name, run)
