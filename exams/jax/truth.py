"""Runs the reference and every variant of every script for three steps in float64, and writes truth.json.

    python truth.py                    all scripts
    python truth.py gpt_tp moe_dense   some of them; the entries of the others are kept

Every result (loss, metrics, parameters, optimizer state) is compared with the reference after every step on every device: each
device's own shard with the same block of the reference's array, also where the sharding says that the shards are replicas.
"""
import dataclasses
import importlib.util
import json
import os
import sys
import types
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4 --xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import jax
import numpy as np

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_platforms", "cpu")

HERE = Path(__file__).resolve().parent
VARIANTS = ("right_1", "right_2", "wrong_1", "wrong_2", "wrong_3")
STEPS = 3

# For every script: which result is which argument of the next step, and which arguments start at zero.
# Arguments and results by position, or results by key. Arguments that no result carries are the batch: new ones every step.
SCRIPTS = {
    "gpt_tp": dict(carry={0: 0, 1: 1}, zeros=(1,)),
    "mixer_dp": dict(carry={0: 0, 1: 1}, zeros=(1,)),
    "fsdp_scan": dict(carry={0: 0, 1: 1}, zeros=(1,)),
    "ring_attention": dict(carry={0: 0, 1: 1}, zeros=(1,)),
    "ulysses_nnx": dict(carry={0: 0, 1: 1}, zeros=(1,)),
    "gpipe": dict(carry={0: 0, 1: 1}, zeros=(1,)),
    "accumulation": dict(carry={0: 0}, zeros=(), zero_keys=("count", "mu", "nu")),
    "moe_dense": dict(carry={0: 0, 1: 1}, zeros=(1,)),
    "dropout_keys": dict(carry={0: 0, 1: 1, 2: 2}, zeros=(1, 2)),
    "contrastive": dict(carry={0: 0, 1: 1}, zeros=(1,)),
    "flax_tp_jit": dict(carry={0: 0}, zeros=(), zero_keys=("count", "mu", "nu", "step")),
    "ema_adam": dict(carry={"params": 0, "state": 1}, zeros=(), zero_keys=("m", "v", "t")),
}


@dataclasses.dataclass(frozen=True)
class Reals:
    shape: tuple
    dtype: object = None
    nonnegative: bool = False

    def __init__(self, shape, dtype=None, nonnegative=False):
        object.__setattr__(self, "shape", tuple(shape))
        object.__setattr__(self, "nonnegative", nonnegative)


@dataclasses.dataclass(frozen=True)
class Ids:
    shape: tuple
    below: int


@dataclasses.dataclass(frozen=True)
class Count:
    shape: tuple = ()


def stand_in():
    """Scripts only declare with trainverify.jax; here these are plain records, so nothing of it takes part in the run."""
    package, module = types.ModuleType("trainverify"), types.ModuleType("trainverify.jax")
    module.Reals, module.Ids, module.Count = Reals, Ids, Count
    package.jax = module
    sys.modules.update({"trainverify": package, "trainverify.jax": module})


def load(folder):
    spec = importlib.util.spec_from_file_location(f"script_{folder.name}", folder / "script.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def draw(spec, rng):
    if isinstance(spec, Reals) or (isinstance(spec, jax.ShapeDtypeStruct) and np.issubdtype(spec.dtype, np.floating)):
        values = rng.standard_normal(spec.shape)
        return np.abs(values) if getattr(spec, "nonnegative", False) else values
    if isinstance(spec, Ids):
        return rng.integers(0, spec.below, spec.shape, dtype=np.int32)
    if isinstance(spec, Count):
        return np.zeros((), np.int32)
    raise TypeError(spec)


def is_spec(leaf):
    return isinstance(leaf, (Reals, Ids, Count, jax.ShapeDtypeStruct))


def first(specs, rng, rule):
    """Arguments of the first step: small random parameters, optimizer state at zero."""
    values = []
    for index, spec in enumerate(specs):
        def leaf(path, s, index=index):
            value = draw(s, rng)
            keys = [getattr(k, "key", getattr(k, "name", None)) for k in path]
            zero = index in rule["zeros"] or any(k in rule.get("zero_keys", ()) for k in keys)
            if index in rule["carry"].values() and value.dtype.kind == "f":
                value = value * 0.4
            return value * 0 if zero else value
        values.append(jax.tree_util.tree_map_with_path(leaf, spec, is_leaf=is_spec))
    if "ema" in str(jax.tree.structure(values[1] if len(values) > 1 else 0)) and 1 in rule["carry"].values():
        values[1]["ema"] = jax.tree.map(np.copy, values[0])
    return values


def picked(result, key):
    return result[key]


def run(step, start, batches, rule):
    """Three steps. What a step returns goes into the next as it is: devices keep their own versions."""
    args, results = list(start), []
    for batch in batches:
        for index, values in batch.items():
            args[index] = values
        result = step(*args)
        results.append(result)
        for key, index in rule["carry"].items():
            args[index] = picked(result, key)
    return results


def compare(got, want):
    """Worst relative difference over leaves and devices: largest difference over largest value of the reference's leaf."""
    worst, place = 0.0, ""
    for (path, g), w in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        w = np.asarray(w)
        assert np.all(np.isfinite(w)), jax.tree_util.keystr(path)
        assert g.shape == w.shape, (jax.tree_util.keystr(path), g.shape, w.shape)
        scale = max(float(np.max(np.abs(w), initial=0.0)), 1e-7)
        for shard in g.addressable_shards:
            difference = np.max(np.abs(np.asarray(shard.data, w.dtype) - w[shard.index]), initial=0.0) / scale
            difference = float(difference) if np.isfinite(difference) else 1e30
            if difference > worst:
                worst, place = difference, f"result{jax.tree_util.keystr(path)} on device {shard.device.id}"
    return worst, place


def judge(name, half):
    rule = SCRIPTS[name]
    module = load(HERE / half / name)
    rng = np.random.default_rng(20 + sorted(SCRIPTS).index(name))
    start = first(module.args, rng, rule)
    carried = set(rule["carry"].values())
    batches = []
    for _ in range(STEPS):
        batches.append({
            i: jax.tree.map(lambda s: draw(s, rng), spec, is_leaf=is_spec) for i, spec in enumerate(module.args) if i not in carried
        })
    want = jax.tree.map(np.asarray, run(jax.jit(module.reference), start, batches, rule))
    sizes = tuple(module.mesh.values())
    mesh = jax.sharding.Mesh(np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), tuple(module.mesh))
    entry = {}
    for variant in VARIANTS:
        step = getattr(module, variant)(mesh)
        if not hasattr(step, "lower"):
            step = jax.jit(step)
        got = run(step, start, batches, rule)
        steps = [compare(g, w) for g, w in zip(got, want, strict=True)]
        worst = max(range(STEPS), key=lambda k: steps[k][0])
        begin = next((k for k in range(STEPS) if steps[k][0] > 1e-6), None)
        entry[variant] = {
            "truth": "right" if steps[worst][0] <= 1e-9 else "wrong" if steps[worst][0] > 1e-6 else "UNDECIDED",
            "largest_relative_difference": steps[worst][0],
            "what": steps[worst][1],
            "step": worst + 1,
            "by_step": [s[0] for s in steps],
            "first_step_that_differs": None if begin is None else begin + 1,
        }
        ok = entry[variant]["truth"] == variant.split("_")[0]
        print(f"{'ok ' if ok else 'BAD'} {half}/{name} {variant}: {entry[variant]['truth']} {steps[worst][0]:.3g} {steps[worst][1]} {[f'{s[0]:.2g}' for s in steps]}", flush=True)
    return {"half": half, "mesh": module.mesh, "devices": int(np.prod(sizes)), "variants": entry}


def main(names):
    stand_in()
    path, truth = HERE / "truth.json", {}
    for half in ("open", "sealed"):
        for folder in sorted((HERE / half).glob("*/script.py")):
            name = folder.parent.name
            if not names or name in names:
                entry = judge(name, half)
                truth = json.loads(path.read_text()) if path.exists() else {}
                truth[name] = entry
                path.write_text(json.dumps(truth, indent=1, sort_keys=True) + "\n")
    bad = [f"{n} {v}" for n, e in truth.items() for v, r in e["variants"].items() if r["truth"] != v.split("_")[0]]
    print("not as named:", bad or "none")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
