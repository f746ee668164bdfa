"""Every composition against the kernel that it stands for: its results are the kernel's, and the program computes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is absent: captured code is not tested")

import torch.nn.functional as F  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from capture.tracing import agree, ids, positive, real, traced  # noqa: E402
from trainverify.torch.compositions import COMPOSITIONS  # noqa: E402
from trainverify.torch.translate import flat  # noqa: E402

A = torch.ops.aten
Case = tuple[str, Callable[..., Any], tuple[Any, ...]]
TIED = torch.tensor([[0.5, -1.0, 0.5, -1.0], [0.0, 0.0, 0.0, 0.0], [-2.0, 3.0, 3.0, 1.0]], dtype=torch.float64)
HALVES = torch.tensor([[-2.5, -1.5, -0.5, 0.0], [0.5, 1.5, 2.5, 3.49]], dtype=torch.float64)
ZEROS = torch.tensor([[0.0, 1.0, 0.0], [2.0, 0.5, 0.0]], dtype=torch.float64)
image, volume = real(2, 3, 5, 7), real(1, 2, 4, 5, 3)


def gradient(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The gradient of a function that is weighted unevenly."""

    def run(a: Any) -> Any:
        a = a.detach().requires_grad_()
        value = fn(a)
        weights = torch.arange(1.0, value.numel() + 1, dtype=torch.float64).reshape(value.shape)
        return torch.autograd.grad((value * weights).sum(), a)[0]

    return run


def both(name: str, fn: Callable[[Any], Any], a: Any) -> list[Case]:
    return [(name, fn, (a,)), (f"{name}_backward", gradient(fn), (a,))]


def reduced(name: str, reduce: str, include: bool) -> Case:
    """Positions 0 to 3 of 5 along a dimension, several of them the same."""
    index = torch.tensor([0, 3, 0, 1, 3, 3])
    if name == "index_reduce":
        return name, lambda a, i, s: a.index_reduce(1, i, s, reduce, include_self=include), (real(2, 5, 3), index, real(2, 6, 3))
    many = index.reshape(1, 6, 1).expand(2, 6, 2).clone()
    return name, lambda a, i, s: a.scatter_reduce(1, i, s, reduce, include_self=include), (real(2, 5, 3), many, real(3, 7, 2))


CASES: list[Case] = [
    *((n, getattr(torch, n), (TIED, TIED.flip(1))) for n in ("fmax", "fmin", "hypot")),
    *((n, lambda a, n=n: getattr(torch, n)(torch.log(a), a), (TIED,)) for n in ("fmax", "fmin")),
    ("ldexp", torch.ldexp, (real(2, 3), ids(5, 3) - 2)),
    ("round", torch.round, (HALVES,)),
    *(("round", lambda a, d=d, by=by: torch.round(a * by, decimals=d), (HALVES,)) for d, by in ((1, 0.1), (-1, 10))),
    ("round", lambda a: a.clone().round_(), (HALVES,)),
    ("xlogy", torch.xlogy, (ZEROS, positive(2, 3))),
    ("xlogy", lambda a, i: (torch.xlogy(a, 0.0), torch.xlogy(2, a), torch.xlogy(i, 3)), (ZEROS, ids(4, 3))),
    ("xlogy", lambda a: torch.xlogy(ZEROS, torch.log(a)), (real(2, 3),)),  # 0·log of no number is none
    ("special_xlog1py", torch.special.xlog1py, (ZEROS, real(2, 3))),
    ("softshrink_backward", gradient(lambda a: F.softshrink(a, 0.5)), (TIED,)),
    ("hardshrink_backward", gradient(lambda a: F.hardshrink(a, 0.5)), (TIED,)),
    *(("diagonal_backward", gradient(lambda a, k=k: a.diagonal(*k)), (real(3, 5, 4),)) for k in ((0, 0, 2), (-1, 1, 0), (2, -2, 2), (9,))),
    ("diagonal_scatter", lambda a, b: a.diagonal_scatter(b, -1, 2, 0), (real(3, 5, 4), real(5, 3))),
    ("index_fill", lambda a, i: a.index_fill(1, i, 0.5), (real(2, 5, 3), torch.tensor([0, -1, 0]))),
    ("index_fill", lambda a, i, v: a.clone().index_fill_(0, i, v), (real(4), torch.tensor([2, -3]), real())),
    ("take", torch.take, (real(2, 3), torch.tensor([[5, -1], [0, -6]]))),
    ("put", lambda a, i, v: a.put(i, v, accumulate=True), (real(2, 3), torch.tensor([[5, -1], [0, -6]]), real(2, 2))),
    *(
        reduced(name, reduce, include)
        for name in ("scatter_reduce", "index_reduce")
        for reduce in ("sum", "prod", "mean", "amax", "amin")
        if (name, reduce) != ("index_reduce", "sum")
        for include in (True, False)
    ),
    *(
        (f"replication_pad{n}d_backward", gradient(lambda a, p=p: F.pad(a, p, "replicate")), (a,))
        for n, p, a in ((1, (2, 1), real(2, 3, 5)), (2, (1, -2, -1, 3), image), (3, (1, 0, 2, 1, 0, 2), volume))
    ),
    *both("avg_pool2d", lambda a: F.avg_pool2d(a, 2, ceil_mode=True), image),
    *both("avg_pool2d", lambda a: F.avg_pool2d(a, (3, 2), (2, 1), 1, count_include_pad=False), image),
    *both("avg_pool2d", lambda a: F.avg_pool2d(a, 3, 2, 1, ceil_mode=True, divisor_override=5), image),
    *both("avg_pool2d", lambda a: F.avg_pool2d(a, 2, 3, 1, ceil_mode=True), image),
    *both("avg_pool3d", lambda a: F.avg_pool3d(a, (2, 3, 1), (1, 2, 1), (1, 1, 0)), volume),
    *both("_adaptive_avg_pool2d", lambda a: F.adaptive_avg_pool2d(a, (5, 3)), image),
    *both("_adaptive_avg_pool3d", lambda a: F.adaptive_avg_pool3d(a, (2, 3, 5)), volume),
    *both("adaptive_max_pool2d", lambda a: F.adaptive_max_pool2d(a, (2, 3)), torch.relu(image)),
    *both("adaptive_max_pool3d", lambda a: F.adaptive_max_pool3d(a, (2, 3, 2)), torch.relu(volume)),
    ("adaptive_max_pool2d", lambda a: F.adaptive_max_pool2d(a, (2, 3), return_indices=True)[1], (torch.relu(image),)),
    ("max_pool2d_with_indices_backward", gradient(lambda a: F.max_pool2d(a, 3, 2, 1, 1, True)), (torch.relu(image),)),
    ("max_pool3d_with_indices_backward", gradient(lambda a: F.max_pool3d(a, 2, 1, 1)), (torch.relu(volume),)),
    *(
        case
        for mode, name in (("nearest", "upsample_nearest"), ("nearest-exact", "_upsample_nearest_exact"))
        for n, a in ((1, real(2, 3, 5)), (2, image), (3, volume))
        for options in ({"scale_factor": 2}, {"scale_factor": 1.7}, {"size": (3, 8, 4)[:n]})
        for case in both(f"{name}{n}d", lambda a, options=options, mode=mode: F.interpolate(a, mode=mode, **options), a)
    ),
    *(
        (f"upsample_{mode}{n}d_backward", gradient(lambda a, mode=mode, o=o: F.interpolate(a, mode=mode, **o)), (a,))
        for mode, n, a in (("linear", 1, real(2, 3, 5)), ("bilinear", 2, image), ("bicubic", 2, image), ("trilinear", 3, volume))
        for o in ({"scale_factor": 1.7}, {"size": (4, 3, 7)[:n], "align_corners": True})
    ),
    ("_trilinear", lambda a, w, b: F.bilinear(a, b, w), (real(5, 3), real(2, 3, 4), real(5, 4))),
    *(
        (n, fn, (torch.cat([positive(2, 3), TIED[1:, :3]]), torch.cat([positive(4, 3), TIED[1:, :3]])))
        for p in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, math.inf)
        for n, fn in (
            ("_cdist_forward", lambda a, b, p=p: A._cdist_forward(a, b, p, None)),
            ("_cdist_backward", lambda a, b, p=p: A._cdist_backward(torch.ones(4, 6).double(), a, b, p, A._cdist_forward(a, b, p, None))),
        )
    ),
]


class Seen(TorchDispatchMode):
    """The operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        self.names.add(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def test_every_composition_is_compared() -> None:
    assert {f"aten::{name}" for name, *_ in CASES} == COMPOSITIONS.keys()


@pytest.mark.parametrize(("name", "fn", "inputs"), [pytest.param(*c, id=f"{c[0]}-{i}") for i, c in enumerate(CASES)])
def test_composition(name: str, fn: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
    with Seen() as seen:
        kernels = [t for t in flat(fn(*inputs)) if t is not None]
    assert {name, f"{name}_"} & seen.names
    agree(fn, *(t.clone() for t in inputs))
    _, results = traced(fn, [t.clone() for t in inputs])
    for found, kernel in zip(results, kernels, strict=True):
        torch.testing.assert_close(found, kernel, rtol=1e-7, atol=1e-11, equal_nan=True)


@pytest.mark.parametrize("fn", [lambda a: F.interpolate(a, size=(5, 7)), lambda a: A.replication_pad2d_backward(a, a, [0] * 4)])
def test_results_have_memory_of_their_own(fn: Callable[[Any], Any]) -> None:
    """What changes nothing is a copy: a write to it does not reach its argument."""
    agree(lambda a: [fn(a).mul_(2), a], image.clone())


@pytest.mark.parametrize(
    "fn",
    [
        lambda a, i: a.put(i, torch.ones(2, 2, dtype=torch.float64)),
        lambda a, i: i.scatter_reduce(1, i, i, "amax"),
    ],
)
def test_refused(fn: Callable[..., Any]) -> None:
    """UNKNOWN: elements that may go to one place, and integers."""
    translator, _ = traced(fn, (real(2, 3), ids(2, 2, 2)))
    assert translator.missing
