"""A large plan: data × pipeline × tensor parallel, 1F1B with batched exchange, function bodies, SGD with momentum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from trainverify.graph.lineage import Layout, Pattern
from trainverify.graph.mesh import Mesh
from trainverify.graph.plan import Plan, Template
from trainverify.graph.program import Function, Op, Output, Program, Ref, Source, Value, attributes
from trainverify.graph.types import TensorType

WIDTH, INNER, ROWS = 24, 40, 5


@dataclass
class Listing:
    """Ops by hand, with types."""

    tensors: dict[str, TensorType] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)

    def source(self, name: str, *shape: int) -> str:
        self.tensors[name] = TensorType(shape)
        return name

    def op(self, name: str, inputs: tuple[str, ...], outputs: dict[str, tuple[int, ...]], phase: str = "forward", **attrs: Value) -> None:
        self.tensors.update({n: TensorType(s) for n, s in outputs.items()})
        self.ops.append(Op(name, inputs, tuple(outputs), attributes(attrs), phase, None, Source("large.py", len(self.ops) + 1)))  # type: ignore[arg-type]


def forward_body(rows: int, inner: int, group: Ref | None) -> Function:
    b = Listing()
    x, w1, w2 = b.source("x", rows, WIDTH), b.source("w1", inner, WIDTH), b.source("w2", WIDTH, inner)
    b.op("linear", (x, w1), {"h": (rows, inner)})
    b.op("relu", ("h",), {"a": (rows, inner)})
    b.op("linear", ("a", w2), {"y": (rows, WIDTH)})
    last = "y"
    if group is not None:
        b.op("all_reduce", ("y",), {"z": (rows, WIDTH)}, group=group)
        b.op("all_reduce", ("z",), {"u": (rows, WIDTH)}, group=group, op="avg")
        last = "u"
    return Function("layer", b.tensors, ("x", "w1", "w2"), (last, "h", "a"), tuple(b.ops))


def backward_body(rows: int, inner: int, group: Ref | None) -> Function:
    b = Listing()
    x, w1, w2 = b.source("x", rows, WIDTH), b.source("w1", inner, WIDTH), b.source("w2", WIDTH, inner)
    h, a, g = b.source("h", rows, inner), b.source("a", rows, inner), b.source("g", rows, WIDTH)
    b.op("linear.grad", (a, w2, g), {"ga": (rows, inner), "gw2": (WIDTH, inner)}, "backward", wrt=(0, 1))
    b.op("relu.grad", (h, "ga"), {"gh": (rows, inner)}, "backward", wrt=(0,))
    b.op("linear.grad", (x, w1, "gh"), {"gx": (rows, WIDTH), "gw1": (inner, WIDTH)}, "backward", wrt=(0, 1))
    last = "gx"
    if group is not None:
        b.op("all_reduce", ("gx",), {"gz": (rows, WIDTH)}, "backward", group=group)
        b.op("all_reduce", ("gz",), {"gu": (rows, WIDTH)}, "backward", group=group, op="avg")
        last = "gu"
    return Function("layer.backward", b.tensors, ("x", "w1", "w2", "h", "a", "g"), (last, "gw1", "gw2"), tuple(b.ops))


def schedule(stage: int, stages: int, micro: int) -> Iterator[tuple[str, int]]:
    """1F1B: forward and backward passes of one stage in order."""
    warm = min(stages - 1 - stage, micro)
    yield from (("forward", m) for m in range(warm))
    for m in range(warm, micro):
        yield "forward", m
        yield "backward", m - warm
    yield from (("backward", m) for m in range(micro - warm, micro))


def step(b: Listing, names: list[tuple[str, tuple[int, ...]]], grads: dict[str, str], group: Ref | None) -> list[Output]:
    outputs = []
    for name, shape in names:
        grad = grads[name]
        if group is not None:
            b.op("all_reduce", (grad,), {f"{name}.synced": shape}, "optimizer", group=group)
            grad = f"{name}.synced"
        b.source(f"{name}.momentum", *shape)
        new = {f"{name}.new": shape, f"{name}.momentum.new": shape}
        b.op("sgd", (name, grad, f"{name}.momentum"), new, "optimizer", lr=0.1, momentum=0.9)
        outputs += [Output(grad, "gradient", name), Output(f"{name}.new", "parameter", name)]
        outputs += [Output(f"{name}.momentum.new", "state", f"{name}.momentum")]
    return outputs


def logical(mesh: Mesh, layers: int, micro: int) -> Program:
    rows = mesh.length("dp") * micro * ROWS
    b = Listing()
    x = b.source("x", rows, WIDTH)
    names = [(f"l{i}.{w}", s) for i in range(layers) for w, s in (("w1", (INNER, WIDTH)), ("w2", (WIDTH, INNER)))]
    for n, s in names:
        b.source(n, *s)
    saved = []
    for i in range(layers):
        out = {f"z{i}": (rows, WIDTH), f"h{i}": (rows, INNER), f"a{i}": (rows, INNER)}
        b.op("call", (x, f"l{i}.w1", f"l{i}.w2"), out, function="layer")
        saved.append(x)
        x = f"z{i}"
    b.op("sum", (x,), {"loss": ()})
    b.op("full", (), {"seed": ()}, "backward", shape=(), value=1.0, dtype="f32")
    b.op("sum.grad", (x, "seed"), {"g": (rows, WIDTH)}, "backward", wrt=(0,))
    g, grads = "g", {}
    for i in reversed(range(layers)):
        out = {f"g{i}": (rows, WIDTH), f"l{i}.w1.grad": (INNER, WIDTH), f"l{i}.w2.grad": (WIDTH, INNER)}
        b.op("call", (saved[i], f"l{i}.w1", f"l{i}.w2", f"h{i}", f"a{i}", g), out, "backward", function="layer.backward")
        g = f"g{i}"
        grads |= {f"l{i}.w1": f"l{i}.w1.grad", f"l{i}.w2": f"l{i}.w2.grad"}
    outputs = [Output("loss", "loss"), *step(b, names, grads, None)]
    bodies = {f.name: f for f in (forward_body(rows, INNER, None), backward_body(rows, INNER, None))}
    state = tuple(f"{n}.momentum" for n, _ in names)
    return Program("large", b.tensors, ("x",), tuple(n for n, _ in names), state, tuple(b.ops), tuple(outputs), bodies)


def stage_program(stage: int, mesh: Mesh, per_stage: int, micro: int) -> tuple[Program, list[Layout]]:
    stages, inner = mesh.length("pp"), INNER // mesh.length("tp")
    b = Listing()
    here = range(stage * per_stage, (stage + 1) * per_stage)
    names = [(f"l{i}.{w}", s) for i in here for w, s in (("w1", (inner, WIDTH)), ("w2", (WIDTH, inner)))]
    where = (("pp", stage),)
    lineage = []
    for n, s in names:
        b.source(n, *s)
        form = Pattern("(tp o) k") if n.endswith("w1") else Pattern("o (tp k)")
        lineage += [Layout(n, n, form, where), Layout(f"{n}.momentum", f"{n}.momentum", form, where)]
    inputs: list[str] = []
    grads: dict[str, str] = {}
    losses: list[str] = []
    block = (ROWS, WIDTH)

    def receive(name: str, peer: str, batch: str | None = None) -> None:
        extra: dict[str, Value] = {} if batch is None else {"batch": batch}
        b.op("recv", (), {name: block}, peer=Ref(peer), shape=block, dtype="f32", **extra)

    def send(name: str, peer: str, batch: str | None = None) -> None:
        extra: dict[str, Value] = {} if batch is None else {"batch": batch}
        b.op("send", (name,), {}, peer=Ref(peer), **extra)

    order = list(schedule(stage, stages, micro))
    received: set[str] = set()
    for k, (what, m) in enumerate(order):
        following = order[k + 1] if k + 1 < len(order) else None
        if what == "forward":
            if stage == 0:
                x = b.source(f"x{m}", *block)
                inputs.append(x)
                lineage.append(Layout("x", x, Pattern("(dp mb b) k", (("mb", m, micro),)), where))
            else:
                x = f"x{m}"
                if x not in received:
                    receive(x, "before")
            for i in here:
                out = {f"z{i}.{m}": block, f"h{i}.{m}": (ROWS, inner), f"a{i}.{m}": (ROWS, inner)}
                b.op("call", (x, f"l{i}.w1", f"l{i}.w2"), out, function="layer", tp=Ref("group.tp"))
                x = f"z{i}.{m}"
            if stage == stages - 1:
                b.op("sum", (x,), {f"loss{m}": ()})
                losses.append(f"loss{m}")
            elif following is not None and following[0] == "backward":  # send and receive at once
                g = f"g{following[1]}"
                send(x, "after", f"b{k}")
                receive(g, "after", f"b{k}")
                received.add(g)
            else:
                send(x, "after")
            continue
        if stage == stages - 1:
            b.op("full", (), {f"seed{m}": ()}, "backward", shape=(), value=1.0, dtype="f32")
            b.op("sum.grad", (f"z{here[-1]}.{m}", f"seed{m}"), {f"g{m}": block}, "backward", wrt=(0,))
        elif f"g{m}" not in received:
            receive(f"g{m}", "after")
        g = f"g{m}"
        for i in reversed(here):
            x = f"x{m}" if i == here[0] else f"z{i - 1}.{m}"
            out = {f"g{i}.{m}": block, f"l{i}.w1.g{m}": (inner, WIDTH), f"l{i}.w2.g{m}": (WIDTH, inner)}
            arguments = (x, f"l{i}.w1", f"l{i}.w2", f"h{i}.{m}", f"a{i}.{m}", g)
            b.op("call", arguments, out, "backward", function="layer.backward", tp=Ref("group.tp"))
            g = f"g{i}.{m}"
            for w, s in (("w1", (inner, WIDTH)), ("w2", (WIDTH, inner))):
                name, new = f"l{i}.{w}", f"l{i}.{w}.g{m}"
                if name in grads:
                    b.op("add", (grads[name], new), {f"{new}.sum": s}, "backward")
                    new = f"{new}.sum"
                grads[name] = new
        if stage > 0:
            if following is not None and following[0] == "forward":
                send(g, "before", f"b{k}")
                receive(f"x{following[1]}", "before", f"b{k}")
                received.add(f"x{following[1]}")
            else:
                send(g, "before")
    outputs: list[Output] = []
    if losses:
        total = losses[0]
        for n in losses[1:]:
            b.op("add", (total, n), {f"{n}.sum": ()})
            total = f"{n}.sum"
        b.op("all_reduce", (total,), {"loss": ()}, group=Ref("group.dp"))
        outputs.append(Output("loss", "loss"))
    outputs += step(b, names, grads, Ref("group.dp"))
    state = tuple(f"{n}.momentum" for n, _ in names)
    program = Program(f"stage{stage}", b.tensors, tuple(inputs), tuple(n for n, _ in names), state, tuple(b.ops), tuple(outputs))
    return program, lineage


def large(dp: int, pp: int, tp: int, per_stage: int, micro: int) -> tuple[Program, Plan]:
    mesh = Mesh(dp=dp, pp=pp, tp=tp)
    groups = {f"tp.{d}.{p}": mesh.ranks(dp=d, pp=p) for d in range(dp) for p in range(pp)}
    groups |= {f"dp.{p}.{t}": mesh.ranks(pp=p, tp=t) for p in range(pp) for t in range(tp)}
    templates, lineage = [], []
    for s in range(pp):
        program, layouts = stage_program(s, mesh, per_stage, micro)
        lineage += layouts
        ranks = mesh.ranks(pp=s)
        columns: dict[str, tuple[Value, ...]] = {
            "group.tp": tuple(f"tp.{r // (pp * tp)}.{s}" for r in ranks),
            "group.dp": tuple(f"dp.{s}.{r % tp}" for r in ranks),
        }
        if s > 0:
            columns["before"] = tuple(r - tp for r in ranks)
        if s < pp - 1:
            columns["after"] = tuple(r + tp for r in ranks)
        templates.append(Template(program, ranks, columns))
    bodies = {f.name: f for f in (forward_body(ROWS, INNER // tp, Ref("tp")), backward_body(ROWS, INNER // tp, Ref("tp")))}
    return logical(mesh, pp * per_stage, micro), Plan("large", mesh, tuple(templates), groups, tuple(lineage), bodies)
