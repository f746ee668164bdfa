"""Runs every script for real and writes truth.json.

    OMP_NUM_THREADS=1 python truth.py [script ...]

For each script: `reference` in a process of its own, then every variant with one gloo process a rank: the same initial weights,
a new global batch each step (cut as the script declares), three steps in float64. After each step loss, other metrics, parameters,
buffers, optimizer state and state kept by hand are compared on every rank with (the rank's part of) the reference's.
"""
import ast
import fnmatch, hashlib, importlib.util, inspect, json, multiprocessing, os, re, sys, tempfile, traceback, types, warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore")
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

import trainverify.torch as tvt  # only for the declarations of the batch

HERE = os.path.dirname(os.path.abspath(__file__))
STEPS = 3
VARIANTS = ["right_1", "right_2", "wrong_1", "wrong_2", "wrong_3"]
LOW_PRECISION = ("COMPUTE_DTYPE", "MASTER_DTYPE")  # constants of scripts with mixed precision: float64 here


def load(folder, variant):
    own = os.path.join(folder, variant + ".py")  # a variant with declarations of its own
    path = own if os.path.exists(own) else os.path.join(folder, "script.py")
    sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location("script" if path.endswith("script.py") else variant, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    for m in [module, sys.modules.get("script")]:
        for name in LOW_PRECISION:
            if m is not None and hasattr(m, name):
                setattr(m, name, torch.float64)
    return module


def part(tensor, cut, mesh, coordinates):
    groups = re.findall(r"\([^)]*\)|\S+", cut)
    assert len(groups) == tensor.dim(), (cut, tensor.shape)
    for d, group in enumerate(groups):
        words = group.strip("()").split()
        if not any(w in mesh for w in words):
            continue
        known = [mesh.get(w) for w in words]
        assert known.count(None) <= 1, cut
        size = tensor.shape[d]
        fixed = 1
        for k in known:
            fixed *= k or 1
        sizes = [k or size // fixed for k in known]
        rest = tensor.reshape(*tensor.shape[:d], *sizes, *tensor.shape[d + 1:])
        for w in reversed(range(len(words))):
            if words[w] in mesh:
                rest = rest.select(d + w, coordinates[words[w]])
        tensor = rest.reshape(*tensor.shape[:d], -1, *tensor.shape[d + 1:])
    return tensor


def global_batch(declared, step):
    out = {}
    for name, spec in declared.items():
        g = torch.Generator().manual_seed(int(hashlib.sha256(f"{name} {step}".encode()).hexdigest()[:12], 16))
        shape = tuple(spec.shape)
        if isinstance(spec, tvt.Ids):
            value = torch.randint(spec.below, shape, generator=g)
            if spec.ignore is not None:
                chance = torch.linspace(0.1, 0.6, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
                value = torch.where(torch.rand(shape, generator=g) < chance, spec.ignore, value)
        elif isinstance(spec, tvt.Flags):
            chance = torch.linspace(0.9, 0.4, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
            value = torch.rand(shape, generator=g) < chance
            kind = getattr(torch, str(getattr(spec, "dtype", "bool")), torch.bool)
            value = value.to(torch.float64 if kind.is_floating_point else kind)
        else:
            value = torch.randn(shape, generator=g, dtype=torch.float64)
        out[name] = value
    return out


class Found:
    """Everything that a step's function holds: modules, optimizers, tensors and numbers by path."""

    def __init__(self, step, files):
        self.modules, self.optimizers, self.loose, self.numbers, self.seen, self.files = [], [], [], [], set(), files
        self.visit(step, "")

    def visit(self, x, path):
        if isinstance(x, (str, bytes, type, types.ModuleType, types.BuiltinFunctionType)) or x is None or isinstance(x, bool):
            return
        if isinstance(x, float):
            self.numbers.append((path, torch.tensor(x, dtype=torch.float64)))
            return
        if isinstance(x, int):
            return
        if id(x) in self.seen and not isinstance(x, torch.Tensor):
            return
        self.seen.add(id(x))
        if isinstance(x, torch.Tensor):
            self.loose.append((path, x))
        elif isinstance(x, nn.Module):
            self.modules.append((path, x))
        elif isinstance(x, torch.optim.Optimizer):
            self.optimizers.append((path, x))
        elif isinstance(x, dict):
            for k, v in list(x.items()):
                self.visit(v, f"{path}[{k}]" if isinstance(k, (str, int)) else f"{path}[?]")
        elif isinstance(x, (list, tuple)):
            for i, v in enumerate(x):
                self.visit(v, f"{path}[{i}]")
        elif isinstance(x, types.MethodType):
            self.visit(x.__self__, path)
            self.visit(x.__func__, path)
        elif isinstance(x, types.FunctionType):
            if x.__code__.co_filename not in self.files:
                return
            for name, cell in zip(x.__code__.co_freevars, x.__closure__ or ()):
                try:
                    self.visit(cell.cell_contents, name)
                except ValueError:
                    pass
            for name in x.__code__.co_names:
                v = x.__globals__.get(name)
                if isinstance(v, (torch.Tensor, dict, list, types.FunctionType)):
                    self.visit(v, name)
        elif hasattr(x, "__dict__") and (type(x).__module__ in ("script", "__main__", "types") or type(x).__module__ in VARIANTS):
            for k, v in vars(x).items():
                self.visit(v, f"{path}.{k}" if path else k)
            call = getattr(type(x), "__call__", None)
            if isinstance(call, types.FunctionType):
                self.visit(call, path)

    def tensors(self):
        """[(kind, key, tensor)]; keys of module members are without the module's own path."""
        out, names = [], {}
        for path, m in self.modules:
            for kind, members in (("parameter", m.named_parameters(remove_duplicate=False)), ("buffer", m.named_buffers(remove_duplicate=False))):
                for n, t in members:
                    n = n.replace("module.", "")
                    names.setdefault(id(t), n)
                    out.append((kind, n, path, t))
        for path, o in self.optimizers:
            for p, state in o.state.items():
                if isinstance(p, torch.Tensor):
                    name = names.get(id(p), "?")
                    for k, v in state.items():
                        if isinstance(v, (int, float)):
                            v = torch.tensor(float(v), dtype=torch.float64)
                        if isinstance(v, torch.Tensor):
                            out.append(("state", f"{name}:{k}", "", v))
        for path, t in self.loose:
            if id(t) in names:
                continue
            out.append(("kept", path, "", t))
        return out + [("number", path, "", t) for path, t in self.numbers]


def whole(t):
    t = t.detach()
    return t.full_tensor().clone() if isinstance(t, DTensor) else t.clone()


def constant(t):
    return t.numel() == 0 or bool((t == t.reshape(-1)[0]).all())


def cut_of(key, cuts):
    name = key.split(":")[0]
    inner = re.findall(r"\[([^\]]*)\]", name)
    for n in [name, *inner]:
        for pattern, cut in cuts.items():
            if fnmatch.fnmatchcase(n, pattern):
                return cut
    return None


def local(value, like, key, cuts, mesh, coordinates):
    """The rank's part of the reference's tensor, None if it has no form that fits."""
    if tuple(like.shape) == tuple(value.shape):
        return value
    cut = cut_of(key, cuts)
    if cut is not None:
        groups = re.findall(r"\([^)]*\)|\S+", cut)
        if len(groups) == value.dim():
            return part(value, cut, mesh, coordinates)
    return None


def scalars(result):
    if result is None:
        return {}
    if not isinstance(result, dict):
        result = {"loss": result}
    return {k: float(v) for k, v in result.items() if v is not None}


def run_reference(folder, out):
    torch.set_default_dtype(torch.float64)
    script = load(folder, "reference")
    torch.manual_seed(0)
    step = script.reference()
    files = {script.__file__, os.path.join(folder, "script.py")}
    first = [(k, n, w, whole(t)) for k, n, w, t in Found(step, files).tensors()]
    after = []
    for i in range(STEPS):
        result = step(global_batch(script.batch, i))
        found = Found(step, files).tensors()
        after.append((scalars(result), [(k, n, w, whole(t)) for k, n, w, t in found]))
    torch.save({"first": first, "after": after}, out)


def keyed(rows):
    """(kind, name) -> tensor; two modules with a member of one name (EMA copies) are told apart by the module's path."""
    seen = {}
    for kind, name, where, t in rows:
        seen.setdefault((kind, name), {})[where] = t
    return seen


def pick(seen, kind, name, where):
    options = seen.get((kind, name))
    if not options:
        return None
    return options[where] if where in options else next(iter(options.values())) if len(options) == 1 or all(
        torch.equal(next(iter(options.values())), o) for o in options.values()) else None


def run_rank(folder, variant, rank, world, known, store, out):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), MASTER_ADDR="localhost")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.set_default_dtype(torch.float64)
    script = load(folder, variant)
    mesh, cuts, over = script.mesh, getattr(script, "cuts", {}), getattr(script, "loss", {}) or {}
    over = over if isinstance(over, dict) else {}
    coordinates, rest = {}, rank
    for axis in reversed(list(mesh)):
        coordinates[axis], rest = rest % mesh[axis], rest // mesh[axis]
    reference = torch.load(known)
    torch.manual_seed(0)
    step = getattr(script, variant)(rank, world)
    files = {script.__file__, os.path.join(folder, "script.py")}
    rows = Found(step, files).tensors()
    before = [(k, n, w, t, whole(t)) for k, n, w, t in rows]
    firsts = keyed(reference["first"])
    with torch.no_grad():
        for kind, name, where, t, value in before:
            want = pick(firsts, kind, name, where)
            if want is None:
                if kind == "kept" and not constant(value):
                    same = [u for k, _, _, u, v in before if k == "parameter" and v.shape == value.shape and torch.equal(v, value)]
                    if same and not isinstance(t, DTensor):
                        t.copy_(same[0])
                continue
            if isinstance(t, DTensor):
                t.to_local().copy_(distribute_tensor(want, t.device_mesh, t.placements).to_local())
                continue
            want = local(want, t, name, cuts, mesh, coordinates)
            if want is not None and t.is_floating_point():
                t.copy_(want)
    worst, differ, compared, missing = 0.0, [], set(), set()

    def compare(i, name, got, want):
        nonlocal worst
        compared.add(name)
        scale = max(float(want.abs().max()) if want.numel() else 0.0, 1e-9)
        relative = float((got.to(torch.float64) - want.to(torch.float64)).abs().max()) / scale if want.numel() else 0.0
        worst = max(worst, relative)
        if not relative <= 1e-9:
            differ.append((i, name, rank, relative))

    for i in range(STEPS):
        batch = {n: part(v, script.batch[n].cut, mesh, coordinates).clone() for n, v in global_batch(script.batch, i).items()}
        result = scalars(step(batch))
        everyone = [None] * world
        dist.all_gather_object(everyone, (coordinates, result))
        expected, states = reference["after"][i]
        for name, want in expected.items():
            if name in result:
                got = result[name]
                if name == "loss" and over:
                    peers = [r["loss"] for c, r in everyone if "loss" in r and all(c[a] == coordinates[a] for a in mesh if a not in over)]
                    got = sum(peers)
                    for a, how in over.items():
                        got = got / mesh[a] if how in ("avg", "mean") else got
                compare(i, "metric " + name, torch.tensor(got), torch.tensor(want))
        wanted = keyed(states)
        fixed = {n for k, n, _, t in reference["first"] if k == "number" and all(torch.equal(t, u[2]) for _, rows in reference["after"] for u in
                 [(a, b, v) for a, b, _, v in rows] if u[0] == "number" and u[1] == n)}
        for kind, name, where, t in Found(step, files).tensors():
            if kind == "number" and name in fixed:
                continue  # a setting, not state
            got, want = whole(t), pick(wanted, kind, name, where)
            if want is not None:
                want = local(want, got, name, cuts, mesh, coordinates)
            if want is None:
                missing.add(f"{kind} {name}")
                continue
            compare(i, f"{kind} {name}" + (f" of {where}" if len(wanted[kind, name]) > 1 else ""), got, want)
    every = {f"{k} {n}" for k, n, _, _ in reference["after"][-1][1] if not (k == "number" and n in fixed)} | {f"metric {m}" for m in reference["after"][-1][0]}
    json.dump({"worst": worst, "differ": sorted(differ), "compared": sorted(compared), "only_here": sorted(missing), "every": sorted(every)}, open(out, "w"))
    dist.barrier()
    dist.destroy_process_group()


def child(function, *args):
    try:
        sys.stderr = open(os.devnull, "w") if not os.environ.get("VERBOSE") else sys.stderr
        function(*args)
    except BaseException:
        print(traceback.format_exc(), flush=True)
        os._exit(1)
    os._exit(0)


def parallel(calls):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=child, args=call) for call in calls]
    for p in processes:
        p.start()
    for p in processes:
        p.join(240)
    failed = [p for p in processes if p.exitcode != 0]
    for p in processes:
        if p.is_alive():
            p.kill()
    return not failed


def judge(folder):
    rows = {}
    with tempfile.TemporaryDirectory() as tmp:
        known = os.path.join(tmp, "reference.pt")
        if not parallel([(run_reference, folder, known)]):
            return {"error": "reference failed"}
        for variant in VARIANTS:
            text = open(os.path.join(folder, "script.py")).read()
            own = os.path.join(folder, variant + ".py")
            text = open(own).read() + text if os.path.exists(own) else text
            world = ast.literal_eval(re.search(r"^mesh = (.*)$", text, re.M).group(1))
            count = 1
            for n in world.values():
                count *= n
            outs = [os.path.join(tmp, f"{variant}.{r}.json") for r in range(count)]
            store = os.path.join(tmp, variant + ".store")
            if not parallel([(run_rank, folder, variant, r, count, known, store, outs[r]) for r in range(count)]):
                rows[variant] = {"error": "failed"}
                continue
            results = [json.load(open(o)) for o in outs]
            worst = max(r["worst"] for r in results)
            differ = sorted(tuple(d) for r in results for d in r["differ"])
            compared = set().union(*(r["compared"] for r in results))
            every = set(results[0]["every"])
            by = {}
            for s, n, r, d in differ:
                by.setdefault((s, n), []).append((d, r))
            verdict = "right" if worst <= 1e-9 else "wrong" if worst > 1e-6 else "unclear"
            row = {"truth": verdict, "largest_relative_difference": worst, "ranks": count, "steps": STEPS, "compared": len(compared)}
            if differ:
                step = differ[0][0]
                row["first_step_that_differs"] = step + 1
                row["differs_first"] = {n: {"relative": max(x)[0], "ranks": sorted(r for _, r in x)} for (s, n), x in by.items() if s == step}
                d, n, s, r = max((d, n, s, r) for s, n, r, d in differ)
                row["largest"] = {"what": n, "step": s + 1, "rank": r}
            lost = {e for e in every if not any(c == e or c.startswith(e + " of ") for c in compared)}
            if lost:
                row["not_compared"] = sorted(lost)
            only = set().union(*(r["only_here"] for r in results))
            if only:
                row["only_in_variant"] = sorted(only)
            rows[variant] = row
    return rows


def main():
    scripts = sorted(os.path.join(half, name) for half in ("open", "sealed") for name in os.listdir(os.path.join(HERE, half))
                     if os.path.exists(os.path.join(HERE, half, name, "script.py")))
    chosen = [s for s in scripts if not sys.argv[1:] or any(a in s for a in sys.argv[1:])]
    path = os.path.join(HERE, "truth.json")
    truth = json.load(open(path)) if os.path.exists(path) else {}
    for s in chosen:
        truth[s] = judge(os.path.join(HERE, s))
        for v, row in truth[s].items():
            if isinstance(row, dict):
                first = list(row.get("differs_first", {}))
                print(s, v, row.get("truth", row), f"{row.get('largest_relative_difference', 0):.1e}", "step", row.get("first_step_that_differs"), len(first), first[:3],
                      "LOST" if row.get("not_compared") else "", row.get("not_compared", ""), row.get("only_in_variant", ""), flush=True)
            else:
                print(s, v, row)
    json.dump({k: truth[k] for k in sorted(truth) if k in scripts}, open(path, "w"), indent=1)


if __name__ == "__main__":
    main()
