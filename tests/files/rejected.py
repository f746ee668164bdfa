"""Contents of files, and changes after which they are rejected."""

from __future__ import annotations

import copy
from typing import Any

PROGRAM: Any = {
    "format": "trainverify",
    "version": 1,
    "kind": "program",
    "name": "step",
    "inputs": ["x"],
    "parameters": ["w"],
    "tensors": {"x": "f32[2,3]", "w": "f32[5,3]", "y": "f32[2,5]"},
    "domains": {"x": {"kind": "positive"}},
    "functions": {
        "f": {
            "inputs": ["a"],
            "outputs": ["b"],
            "tensors": {"a": "f32[2,3]", "b": "f32[2,5]"},
            "ops": [{"op": "o", "in": ["a"], "out": ["b"]}],
        },
        "g": {"inputs": [], "outputs": [], "tensors": {}, "ops": []},
    },
    "ops": [
        {"op": "linear", "in": ["x", "w"], "out": ["y"], "attrs": {"k": 1}, "source": "m.py:3"},
        {"op": "call", "in": ["x"], "out": ["y"], "attrs": {"function": "f"}},
    ],
    "outputs": [{"tensor": "y", "role": "loss"}],
}
PLAN: Any = {
    "format": "trainverify",
    "version": 1,
    "kind": "plan",
    "name": "plan",
    "mesh": [["dp", 2], ["tp", 3]],
    "groups": {"tp.0": [0, 1, 2]},
    "functions": {"h": {"inputs": [], "outputs": [], "tensors": {}, "ops": []}},
    "templates": [
        {
            "ranks": [0, 1, 2],
            "program": {"name": "a", "tensors": {"x": "f32[2]"}, "ops": [{"op": "o", "in": ["x"], "out": []}]},
            "bindings": {"r": [5, 6, 7]},
        },
        {"ranks": {"range": [3, 6, 1]}, "program": {"name": "b", "tensors": {}}},
    ],
    "lineage": [
        {"logical": "x", "placements": [["tp", {"shard": 0}]]},
        {"logical": "x", "pattern": "(tp a)", "fixed": [["mb", 0, 2]], "partial": [["dp", "sum"]]},
        {"logical": "x", "parts": [[0, [{"local": [0], "logical": [[0, 2]]}]]], "where": [["dp", 0]]},
    ],
    "edits": [{"rank": 2, "path": [0], "ops": [{"op": "o", "in": ["x"], "out": ["z"]}], "tensors": {"z": "f32[2]"}}],
}
DELETE = object()


def changed(tree: Any, path: list[str | int], value: Any) -> Any:
    tree = copy.deepcopy(tree)
    here = tree
    for key in path[:-1]:
        here = here[key]
    if value is DELETE:
        del here[path[-1]]
    elif isinstance(here, list) and path[-1] == len(here):
        here.append(value)
    else:
        here[path[-1]] = value
    return tree


FIELDS = "name, tensors, inputs, parameters, state, domains, functions, ops, outputs"
IN_PROGRAM: list[tuple[list[str | int], Any, str]] = [
    # the head
    (["format"], DELETE, "format: missing"),
    (["format"], "other", 'format: expected "trainverify", got "other"'),
    (["version"], 2, "version: version 2 is not supported; this reader knows version 1"),
    (["version"], "1", 'version: expected an integer, got "1"'),
    (["version"], True, "version: expected an integer, got true"),
    (["version"], 1.0, "version: expected an integer, got 1.0"),
    (["kind"], "graph", 'kind: expected "program" or "plan", got "graph"'),
    (["kind"], [], 'kind: expected "program" or "plan", got a list'),
    # fields
    (["name"], DELETE, "name: missing"),
    (["colour"], 1, f"colour: unknown field; known: format, version, kind, {FIELDS}"),
    (["ops", 0, "inputs"], [], "ops[0].inputs: unknown field; known: op, in, out, attrs, phase, forward, source"),
    (["ops", 0, "out"], DELETE, "ops[0].out: missing"),
    (["ops", 1], {"op": "o", "in": [], "phase": "forward"}, "ops[1].out: missing"),
    (["ops", 1], 7, "ops[1]: expected an object, got 7"),
    (["ops"], {}, "ops: expected a list, got an object"),
    (["inputs"], "x", 'inputs: expected a list, got "x"'),
    (["outputs", 0, "role"], "sum", 'outputs[0].role: expected "loss", "gradient", "parameter", "state" or "metric", got "sum"'),
    (["outputs", 0, "of"], None, "outputs[0].of: expected a name, got null"),
    (["domains", "x", "kind"], "odd", 'domains.x.kind: expected "ids", "nonnegative", "positive" or "indicator", got "odd"'),
    (["domains", "x", "size"], -1, "domains.x.size: -1 is less than 0"),
    (["functions", "f", "outputs"], DELETE, "functions.f.outputs: missing"),
    # names
    (["name"], "", "name: a name must not be empty"),
    (["name"], 3, "name: expected a name, got 3"),
    (["name"], "a\x1b[31m", r'name: name "a\u001b[31m" has characters that do not print'),
    (["name"], "a\u202eb", r'name: name "a\u202eb" has characters that do not print'),
    (["name"], "n" * 1001, "name: a name of 1001 characters; the limit is 1000"),
    (["tensors", ""], "f32[]", "tensors: a name must not be empty"),
    (["tensors", "a\n"], "f32[]", r'tensors: name "a\n" has characters that do not print'),
    (["ops", 0, "op"], "", "ops[0].op: a name must not be empty"),
    (["ops", 0, "attrs", "\t"], 1, r'ops[0].attrs: name "\t" has characters that do not print'),
    (["x\ny"], 1, rf'["x\ny"]: unknown field; known: format, version, kind, {FIELDS}'),
    # types
    (["tensors", "x"], "f32[-1,2]", 'tensors.x: type "f32[-1,2]" has a negative dimension'),
    (["tensors", "x"], "f32[NaN]", 'tensors.x: type "f32[NaN]": dimension "NaN" is not a whole number'),
    (["tensors", "x"], "f32[2.5]", 'tensors.x: type "f32[2.5]": dimension "2.5" is not a whole number'),
    (["tensors", "x"], "f32[2, 3]", 'tensors.x: type "f32[2, 3]": dimension " 3" is not a whole number'),
    (["tensors", "x"], "f32[02]", 'tensors.x: type "f32[02]": dimension "02" is not a whole number'),
    (["tensors", "x"], "f32", 'tensors.x: expected a type such as f32[2048,256], got "f32"'),
    (["tensors", "x"], [2, 3], "tensors.x: expected a type such as f32[2048,256], got a list"),
    (
        ["tensors", "x"],
        "float[2]",
        'tensors.x: type "float[2]" has an unknown dtype; known: f64, f32, bf16, f16, f8e4m3, f8e5m2, i64, i32, i16, i8, u8, bool',
    ),
    (
        ["tensors", "x"],
        "f32[1099511627776,1099511627776]",
        'tensors.x: type "f32[1099511627776,1099511627776]" has more than 1152921504606846976 elements',
    ),
    (["tensors", "x"], "f32[" + "9" * 400 + "]", 'tensors.x: type "f32[' + "9" * 55 + '…" has more than 1152921504606846976 elements'),
    (["tensors", "x"], "f32[" + "9" * 5000 + "]", "tensors.x: a type of 5005 characters; the limit is 1000"),
    (["tensors", "x"], "f32[" + "1," * 32 + "1]", "tensors.x: a tensor of 33 dimensions; the limit is 32"),
    # references
    (["inputs", 1], "v", 'inputs[1]: no tensor "v"'),
    (["inputs", 1], "x", 'inputs[1]: tensor "x" is given twice'),
    (["parameters", 0], "x", 'parameters[0]: tensor "x" is given twice'),
    (["inputs", 0], None, "inputs[0]: expected the name of a tensor, got null"),
    (["ops", 0, "in", 1], "v", 'ops[0].in[1]: no tensor "v"'),
    (["ops", 0, "in", 1], {}, "ops[0].in[1]: expected the name of a tensor, got an object"),
    (["ops", 0, "out", 0], None, "ops[0].out[0]: expected the name of a tensor, got null"),
    (["ops", 0, "forward"], "v", 'ops[0].forward: no tensor "v"'),
    (["outputs", 0, "tensor"], "v", 'outputs[0].tensor: no tensor "v"'),
    (["domains", "v.0"], {"kind": "ids"}, 'domains["v.0"]: no tensor "v.0"'),
    (["functions", "f", "inputs", 1], "a", 'functions.f.inputs[1]: tensor "a" is given twice'),
    (["functions", "f", "ops", 0, "in", 0], "x", 'functions.f.ops[0].in[0]: no tensor "x"'),
    (["ops", 1, "attrs", "function"], "k", 'ops[1].attrs.function: no function "k"'),
    (["ops", 1, "attrs", "function"], {"ref": "f"}, "ops[1].attrs.function: a call needs the name of a function"),
    (["ops", 1, "attrs"], DELETE, "ops[1].attrs.function: a call needs the name of a function"),
    # attributes
    (["ops", 0, "attrs"], [], "ops[0].attrs: expected an object, got a list"),
    (["ops", 0, "attrs", "k"], {"a": 1}, "ops[0].attrs.k.a: unknown field; known: ref, fraction, float"),
    (["ops", 0, "attrs", "k"], {}, 'ops[0].attrs.k: expected one of {"ref": …}, {"fraction": …}, {"float": …}'),
    (["ops", 0, "attrs", "k"], [1, {"fraction": "1/0"}], 'ops[0].attrs.k[1].fraction: fraction "1/0" divides by zero'),
    (["ops", 0, "attrs", "k"], {"fraction": "1"}, 'ops[0].attrs.k.fraction: expected a fraction such as "1/3", got "1"'),
    (["ops", 0, "attrs", "k"], {"float": "1"}, 'ops[0].attrs.k.float: expected "inf", "-inf" or "nan", got "1"'),
    (["ops", 0, "attrs", "k"], {"ref": ""}, "ops[0].attrs.k.ref: a name must not be empty"),
    (["ops", 0, "attrs", "k"], float("nan"), "ops[0].attrs.k: NaN is not a JSON number"),
    (["ops", 0, "attrs", "k"], [0, float("-inf")], "ops[0].attrs.k[1]: -Infinity is not a JSON number"),
    (["ops", 0, "attrs", "k"], 10**1300, "ops[0].attrs.k: an integer of 4319 bits; the limit is 4096"),
    (["ops", 0, "attrs", "k"], "s" * 100_001, "ops[0].attrs.k: a string of 100001 characters; the limit is 100000"),
    (["ops", 0, "attrs", "k"], "\ud800", "ops[0].attrs.k: a string with half a surrogate pair"),
    (["ops", 0, "phase"], "warmup", 'ops[0].phase: expected "forward", "backward", "optimizer" or "metric", got "warmup"'),
    (["ops", 0, "source"], "m.py", 'ops[0].source: expected a source such as model.py:12, got "m.py"'),
    (["ops", 0, "source"], "m.py:-3", 'ops[0].source: expected a source such as model.py:12, got "m.py:-3"'),
]
MESH = "mesh(dp=2, tp=3)"
IN_PLAN: list[tuple[list[str | int], Any, str]] = [
    (["templates"], DELETE, "templates: missing"),
    (
        ["tensors"],
        {},
        "tensors: unknown field; known: format, version, kind, name, mesh, templates, groups, functions, lineage, edits, allow",
    ),
    (["templates", 0, "program", "kind"], "program", f"templates[0].program.kind: unknown field; known: {FIELDS}"),
    # mesh
    (["mesh"], {"dp": 2}, "mesh: expected a list, got an object"),
    (["mesh", 0], ["dp"], "mesh[0]: expected a pair, got a list"),
    (["mesh", 0, 1], 0, "mesh[0]: 0 is less than 1"),
    (["mesh", 0, 1], 2.0, "mesh[0]: expected an integer, got 2.0"),
    (["mesh", 2], ["dp", 5], 'mesh[2]: "dp" is given twice'),
    (["mesh", 0, 1], 10**9, "mesh[0]: 1000000000 is more than 1048576"),
    (["mesh", 2], ["ep", 1 << 20], "mesh: 6291456 ranks; the limit is 1048576"),
    # ranks and groups
    (["groups", "tp.0", 2], 6, f'groups["tp.0"][2]: rank 6 is not in {MESH}'),
    (["groups", "tp.0", 2], -1, f'groups["tp.0"][2]: rank -1 is not in {MESH}'),
    (["groups", "tp.0", 2], 1, 'groups["tp.0"][2]: rank 1 is given twice'),
    (["groups", "tp.0", 2], True, 'groups["tp.0"][2]: expected a rank, got true'),
    (["groups", "tp.0"], {"range": [0, 7, 1]}, f'groups["tp.0"]: rank 6 is not in {MESH}'),
    (["groups", "tp.0"], {"range": [5, -3, -2]}, f'groups["tp.0"]: rank -1 is not in {MESH}'),
    (["groups", "tp.0"], {"range": [0, 6]}, 'groups["tp.0"].range: expected [start, stop, step], got 2 values'),
    (["groups", "tp.0"], {"range": [0, 6, 0]}, 'groups["tp.0"].range: a range with step 0'),
    (["groups", "tp.0"], {"range": [0, 10**18, 1]}, 'groups["tp.0"].range: more than 20000000 items in ranges and runs'),
    (["groups", "tp.0"], {"range": [0, 10**30, 1]}, f'groups["tp.0"].range[1]: {10**30} is more than {2**63 - 1}'),
    (["groups", "tp.0"], {"runs": [[0, 1]]}, 'groups["tp.0"].runs: unknown field; known: range'),
    (["groups", "tp.0"], 3, 'groups["tp.0"]: expected a list or a range of ranks, got 3'),
    (["groups", ""], [0], "groups: a name must not be empty"),
    (["templates", 0, "ranks", 2], 9, f"templates[0].ranks[2]: rank 9 is not in {MESH}"),
    (["templates", 0, "ranks", 2], 0, "templates[0].ranks[2]: rank 0 is given twice"),
    (["templates", 0, "ranks", 2], 4, "templates[1].ranks: rank 4 runs another template already"),
    # bindings
    (["templates", 0, "bindings", "r"], [5, 6], "templates[0].bindings.r: 2 values for 3 ranks"),
    (["templates", 0, "bindings", "r"], {"range": [0, 4, 1]}, "templates[0].bindings.r: 4 values for 3 ranks"),
    (["templates", 0, "bindings", "r"], {"runs": [[0, 2], [1, 2]]}, "templates[0].bindings.r: 4 values for 3 ranks"),
    (["templates", 0, "bindings", "r"], {"runs": [[0, 0]]}, "templates[0].bindings.r.runs[0][1]: 0 is less than 1"),
    (
        ["templates", 0, "bindings", "r"],
        {"runs": [[{"q": 0}, 1]]},
        "templates[0].bindings.r.runs[0][0].q: unknown field; known: ref, fraction, float",
    ),
    (["templates", 0, "bindings", "r"], {"runs": [[0, 10**9]]}, "templates[0].bindings.r.runs[0][1]: 1000000000 is more than 1048576"),
    (["templates", 0, "bindings", "r"], "abc", 'templates[0].bindings.r: expected a list, a range or runs, got "abc"'),
    (["templates", 0, "bindings", "r", 1], {}, 'templates[0].bindings.r[1]: expected one of {"ref": …}, {"fraction": …}, {"float": …}'),
    # functions
    (
        ["templates", 0, "program", "functions"],
        {"h": PLAN["functions"]["h"]},
        "templates[0].program.functions.h: the plan has a function of this name already",
    ),
    (
        ["templates", 0, "program", "ops", 0],
        {"op": "call", "in": [], "out": [], "attrs": {"function": "k"}},
        'templates[0].program.ops[0].attrs.function: no function "k"',
    ),
    (["functions", "h", "ops", 0], {"op": "call", "in": [], "out": [], "attrs": {"function": "h"}}, 'functions.h: calls itself: "h" → "h"'),
    # lineage
    (["lineage", 0], {"logical": "x"}, "lineage[0]: expected one of placements, pattern, parts, got none"),
    (["lineage", 0, "pattern"], "a", "lineage[0]: expected one of placements, pattern, parts, got placements and pattern"),
    (["lineage", 0, "fixed"], [], "lineage[0].fixed: only a pattern has this field"),
    (["lineage", 0, "placements", 0, 0], "ep", f'lineage[0].placements[0]: no axis "ep" in {MESH}'),
    (["lineage", 0, "placements", 1], ["tp", "replicate"], 'lineage[0].placements[1]: "tp" is given twice'),
    (
        ["lineage", 0, "placements", 0, 1],
        "shard",
        'lineage[0].placements[0]: expected "replicate", {"shard": …} or {"partial": …}, got "shard"',
    ),
    (["lineage", 0, "placements", 0, 1], {"shard": -1}, "lineage[0].placements[0].shard: -1 is less than 0"),
    (["lineage", 0, "placements", 0, 1], {"partial": "max"}, 'lineage[0].placements[0].partial: expected "sum" or "avg", got "max"'),
    (["lineage", 1, "pattern"], "(tp", "lineage[1].pattern: pattern '(tp': names and (groups of names) separated by spaces"),
    (["lineage", 1, "fixed", 0], ["mb", 2, 2], "lineage[1].fixed[0]: 2 is more than 1"),
    (["lineage", 1, "fixed", 1], ["mb", 0, 2], 'lineage[1].fixed[1]: "mb" is given twice'),
    (["lineage", 1, "partial", 0, 1], "max", 'lineage[1].partial[0]: expected "sum" or "avg", got "max"'),
    (["lineage", 2, "where", 0, 1], 2, f"lineage[2].where[0]: no dp=2 in {MESH}"),
    (["lineage", 2, "parts", 0, 0], 6, f"lineage[2].parts[0]: rank 6 is not in {MESH}"),
    (["lineage", 2, "parts", 1], [0, []], "lineage[2].parts[1]: rank 0 is given twice"),
    (["lineage", 2, "parts", 0, 1], {}, "lineage[2].parts[0][1]: expected a list, got an object"),
    (["lineage", 2, "parts", 0, 1, 0, "local"], [0, 0], "lineage[2].parts[0][1][0]: 2 starts for 1 runs"),
    (["lineage", 2, "parts", 0, 1, 0, "local", 0], -1, "lineage[2].parts[0][1][0].local[0]: -1 is less than 0"),
    (
        ["lineage", 2, "parts", 0, 1, 0, "logical", 0],
        [1, 2, 3],
        "lineage[2].parts[0][1][0].logical[0]: expected [start, block] or [start, block, count, stride], got 3 values",
    ),
    (["lineage", 2, "parts", 0, 1, 0, "logical", 0], [1, 2, 0, 4], "lineage[2].parts[0][1][0].logical[0][2]: 0 is less than 1"),
    (["lineage", 2, "parts", 0, 1, 0, "logical", 0], [1, 2, 2**40, 2**40], f"lineage[2].parts[0][1][0].logical[0]: a run past {2**60}"),
    (["lineage", 2, "parts", 0, 1, 0, "partial"], ["sum", 2, 2], "lineage[2].parts[0][1][0].partial: 2 is more than 1"),
    (["lineage", 2, "parts", 0, 1, 0, "flat"], 1, "lineage[2].parts[0][1][0].flat: expected true or false, got 1"),
    # edits
    (["edits", 0, "rank"], 6, "edits[0].rank: 6 is more than 5"),
    (["edits", 0, "path"], [], "edits[0].path: an edit needs the position of an op"),
    (["edits", 0, "path", 0], -1, "edits[0].path[0]: -1 is less than 0"),
    (["edits", 0, "tensors"], DELETE, 'edits[0].ops[0].out[0]: no tensor "z"'),
    (["templates"], PLAN["templates"][1:], "edits[0].rank: rank 2 runs no program"),
]


def call(name: str) -> Any:
    return {"op": "call", "in": [], "out": [], "attrs": {"function": name}}
