"""Runs every script for real: gloo, one process a rank, float64, three steps, against its own reference.

    python truth.py [NAME ...]        writes truth.json beside this file

Every rank runs the reference on the whole batch and the variant on its part, and compares after every step what it
holds (parameters, gradients that are left, optimizer state, buffers, other modules, tensors kept by hand) and what the step returned.
"""

import fnmatch
import importlib.util
import json
import math
import os
import pathlib
import re
import sys
import tempfile
import traceback
import types

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

HERE = pathlib.Path(__file__).resolve().parent
VARIANTS = ["right_1", "right_2", "wrong_1", "wrong_2", "wrong_3"]
STEPS = 3


class Spec:
    def __init__(self, kind, shape, cut=None, below=None, ignore=None):
        self.kind, self.shape, self.cut, self.below, self.ignore = kind, shape, cut, below, ignore


def stub():
    """The declarations only: the real runs need nothing of the package."""
    tvt = types.ModuleType("trainverify.torch")
    for kind in ("Ids", "Reals", "Flags"):
        setattr(tvt, kind, lambda *a, _k=kind, **k: Spec(_k, *a, **k))
    root = types.ModuleType("trainverify")
    root.torch = tvt
    sys.modules["trainverify"], sys.modules["trainverify.torch"] = root, tvt


def load(folder, variant):
    own = folder / f"{variant}.py"
    path = own if own.exists() else folder / "script.py"
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location("script" if path.name == "script.py" else variant, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


# ---- batches


def documents(rows, length, g):
    docs, positions = [], []
    for _ in range(rows):
        d, p = [], []
        k = 0
        while len(d) < length:
            n = int(torch.randint(2, length // 2 + 1, (), generator=g))
            d += [k] * n
            p += list(range(n))
            k += 1
        docs.append(d[:length])
        positions.append(p[:length])
    return torch.tensor(docs), torch.tensor(positions)


def batch_of(module, step):
    g = torch.Generator().manual_seed(7000 + step)
    out = {}
    for name, s in module.batch.items():
        if s.kind == "Reals":
            out[name] = torch.randn(s.shape, generator=g)
        elif s.kind == "Flags":
            out[name] = torch.randint(2, s.shape, generator=g).to(torch.bool)
        else:
            ids = torch.randint(s.below, s.shape, generator=g)
            if s.ignore is not None:
                ids[torch.rand(s.shape, generator=g) < 0.3] = s.ignore
            out[name] = ids
    if "doc" in out and "pos" in out:
        shape = out["doc"].shape
        d, p = documents(math.prod(shape[:-1]), shape[-1], g)
        out["doc"], out["pos"] = d.view(shape), p.view(shape)
    return out


# ---- meshes and cuts


def coordinates(mesh, rank):
    out = {}
    for axis in reversed(list(mesh)):
        out[axis] = rank % mesh[axis]
        rank //= mesh[axis]
    return out


def slices(full, cut, mesh, rank):
    at = coordinates(mesh, rank)
    groups = re.findall(r"\([^)]*\)|\S+", cut)
    assert len(groups) == full.dim(), (cut, full.shape)
    for dim, group in enumerate(groups):
        index, count = 0, 1
        for word in group.strip("()").split():
            if word in mesh:
                index, count = index * mesh[word] + at[word], count * mesh[word]
        assert full.shape[dim] % count == 0, (cut, full.shape)
        size = full.shape[dim] // count
        full = full.narrow(dim, index * size, size)
    return full


# ---- what a step holds


def walk(root):
    """Everything that the step's function refers to, by path."""
    found, seen = {}, set()
    queue = [("", root)]
    while queue:
        path, x = queue.pop(0)
        if id(x) in seen and not isinstance(x, torch.Tensor):
            continue
        seen.add(id(x))
        dot = path + "." if path else ""
        if isinstance(x, (nn.Module, torch.optim.Optimizer, torch.Tensor)):
            found[path] = x
            if isinstance(x, torch.Tensor) or isinstance(x, torch.optim.Optimizer):
                continue
            continue
        if isinstance(x, types.MethodType):
            queue.append((path, x.__self__))
            queue.append((path, x.__func__))
        elif isinstance(x, types.FunctionType):
            for name, cell in zip(x.__code__.co_freevars, x.__closure__ or ()):
                try:
                    queue.append((dot + name, cell.cell_contents))
                except ValueError:
                    pass
        elif isinstance(x, dict):
            queue += [(f"{dot}{k}", v) for k, v in x.items()]
        elif isinstance(x, (list, tuple)):
            queue += [(f"{dot}{k}", v) for k, v in enumerate(x)]
        elif hasattr(x, "__dict__") and type(x).__module__ in ("script", *VARIANTS):
            queue += [(f"{dot}{k}", v) for k, v in vars(x).items()]
    return found


def held(step):
    found = walk(step)
    modules = {}
    for path, m in found.items():
        if isinstance(m, nn.Module):
            m = m.module if isinstance(m, DistributedDataParallel) else m
            if all(m is not other for other in modules.values()):
                modules[path] = m
    inside = {id(c) for m in modules.values() for c in m.modules() if c is not m}
    modules = {path: m for path, m in modules.items() if id(m) not in inside}
    trained = [path for path, m in modules.items() if any(p.requires_grad for p in m.parameters())]
    assert len(trained) == 1, (trained, list(found))
    model = modules.pop(trained[0])
    kept = {p: t for p, t in found.items() if isinstance(t, torch.Tensor)}
    own = {id(p) for p in model.parameters()}
    kept = {p: t for p, t in kept.items() if id(t) not in own}
    optimizers = [o for o in found.values() if isinstance(o, torch.optim.Optimizer)]
    return model, modules, optimizers, kept


def values(step):
    """name -> (tensor, name of the parameter whose cut it follows or None)"""
    model, others, optimizers, kept = held(step)
    out, names = {}, {}
    for name, p in model.named_parameters():
        out[name] = (p.detach(), name)
        names[id(p)] = name
        if p.grad is not None:
            out["gradient of " + name] = (p.grad.detach(), name)
    for name, b in model.named_buffers():
        out["buffer " + name] = (b.detach(), None)
    for path, m in others.items():
        for name, p in m.state_dict().items():
            out[f"{path}.{name}"] = (p.detach(), None)
    for o in optimizers:
        for p, state in o.state.items():
            for key, v in state.items():
                if torch.is_tensor(v):
                    name = names[id(p)]
                    out[f"{key} of {name}"] = (v.detach(), name if v.dim() else None)
    for path, t in kept.items():
        out["kept " + path] = (t.detach(), "kept")
    return out


def matching(got, want, name, follow, module, rank):
    """The part of `want` (whole) that this rank should hold."""
    if isinstance(got, DTensor):
        return got.full_tensor(), want
    if got.shape == want.shape:
        return got, want
    if follow is not None and follow != "kept":
        for pattern, cut in getattr(module, "cuts", {}).items():
            if fnmatch.fnmatchcase(follow, pattern):
                part = slices(want, cut, module.mesh, rank)
                if part.shape == got.shape:
                    return got, part
    if want.dim() == 1 and got.dim() == 1 and follow == "kept":
        n = got.numel()
        whole = n * math.prod(module.mesh.values())
        if n >= want.numel():  # padded at the end
            return got, nn.functional.pad(want, (0, n - want.numel()))
        return got, nn.functional.pad(want, (0, whole - want.numel()))[rank * n : (rank + 1) * n]
    raise ValueError(f"{name}: {tuple(got.shape)} beside {tuple(want.shape)}: no cut")


def distance(got, want):
    got, want = got.to(torch.float64), want.to(torch.float64)
    if got.numel() == 0:
        return 0.0
    d = (got - want).abs().max().item() / max(want.abs().max().item(), 1e-8)
    return d if math.isfinite(d) else 1e300


def report(result):
    if result is None:
        return {}
    result = result if isinstance(result, dict) else {"loss": result}
    out = {}
    for k, v in result.items():
        if isinstance(v, DTensor):
            v = v.full_tensor()
        out[k] = float(v.detach()) if torch.is_tensor(v) else float(v)
    return out


def start(module, reference, model, rank):
    """Gives a variant's cut parameters the reference's values; whole ones are the same by the seed."""
    whole = dict(reference.named_parameters())
    with torch.no_grad():
        for name, p in model.named_parameters():
            if isinstance(p, DTensor):
                assert torch.equal(p.full_tensor(), whole[name]), name
                continue
            _, part = matching(p, whole[name], name, name, module, rank)
            p.copy_(part)


def rank_main(rank, world, folder, variants, store, out):
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    stub()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    results = {}
    for variant in variants:
        try:
            results[variant] = compare(rank, world, folder, variant)
        except Exception:
            traceback.print_exc()
            print("FAILED", folder.name, variant, "rank", rank, flush=True)
            os._exit(1)
        dist.barrier()
    if rank == 0:
        pathlib.Path(out).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def compare(rank, world, folder, variant):
    module = load(folder, variant)
    assert math.prod(module.mesh.values()) == world
    base = load(folder, "reference")
    torch.manual_seed(1234)
    reference = base.reference()
    torch.manual_seed(1234)
    step = getattr(module, variant)(rank, world)
    initial = held(reference)[0]
    start(module, initial, held(step)[0], rank)
    worst = []
    for number in range(STEPS):
        batch = batch_of(module, number)
        part = {k: slices(v, module.batch[k].cut, module.mesh, rank).contiguous().clone() for k, v in batch.items()}
        want = report(reference({k: v.clone() for k, v in batch.items()}))
        got = report(step(part))
        every = [None] * world
        dist.all_gather_object(every, got)
        here = coordinates(module.mesh, rank)
        if got:
            combine = getattr(module, "loss", {})
            peers = [
                g
                for r, g in enumerate(every)
                if g and all(here[a] == c for a, c in coordinates(module.mesh, r).items() if a not in combine)
            ]
            assert set(combine.values()) <= {"avg"}
            got = dict(got, loss=sum(p["loss"] for p in peers) / len(peers))
            for key in want:
                worst.append((distance(torch.tensor(got[key]), torch.tensor(want[key])), key, number + 1, rank))
        mine, theirs = values(step), values(reference)
        for name, (t, follow) in mine.items():
            if name not in theirs:
                if not name.startswith(("kept ", "gradient of ")):
                    raise ValueError(f"{name} has no partner")
                if name.startswith("kept ") and number == 0 and rank == 0:
                    print(f"   {folder.name}: {variant}: {name} has no partner", flush=True)
                continue
            g, w = matching(t, theirs[name][0], name, follow, module, rank)
            worst.append((distance(g, w), name, number + 1, rank))
        if number == 0 and rank == 0 and variant == "right_1":
            print(f"   {folder.name}: {len(theirs)} values, missing on rank 0: {sorted(set(theirs) - set(mine))[:6]}", flush=True)
    every = [None] * world
    dist.all_gather_object(every, worst)
    flat = sorted((w for ws in every for w in ws), key=lambda w: -w[0])
    first = {}
    for d, name, number, r in sorted((w for w in flat if w[0] > 1e-6), key=lambda w: (w[2], -w[0])):
        first.setdefault(name, (number, d))
    return {
        "largest": flat[0][0],
        "of": flat[0][1],
        "step": flat[0][2],
        "rank": flat[0][3],
        "differs": [{"what": k, "first_step": n, "relative": d} for k, (n, d) in list(first.items())[:6]],
        "values_compared": len(flat),
    }


def main():
    names = sys.argv[1:]
    only = [n for n in names if n in VARIANTS]
    names = [n for n in names if n not in VARIANTS]
    path = HERE / "truth.json"
    truth = json.loads(path.read_text()) if path.exists() else {}
    good = True
    for folder in sorted([*HERE.glob("open/*/"), *HERE.glob("sealed/*/")]):
        if not (folder / "script.py").exists() or names and folder.name not in names:
            continue
        stub()
        world = math.prod(load(folder, "reference").mesh.values())
        with tempfile.TemporaryDirectory() as temp:
            out = f"{temp}/out.json"
            mp.start_processes(rank_main, (world, folder, only or VARIANTS, f"{temp}/store", out), nprocs=world, start_method="fork")
            results = json.loads(pathlib.Path(out).read_text())
        entry = truth.setdefault(folder.name, {"half": folder.parent.name, "world_size": world, "variants": {}})
        for variant, r in results.items():
            r["truth"] = "right" if r["largest"] < 1e-9 else "wrong" if r["largest"] > 1e-6 else "neither"
            ok = r["truth"] == variant.split("_")[0]
            good &= ok
            entry["variants"][variant] = r
            print("ok " if ok else "BAD", folder.name, variant, r["truth"], f"{r['largest']:.2e}", r["of"], "step", r["step"], "| first:",
                  [(d["what"], d["first_step"], f"{d['relative']:.1e}") for d in r["differs"][:2]], flush=True)
    path.write_text(json.dumps(truth, indent=1))
    sys.exit(not good)


if __name__ == "__main__":
    main()
