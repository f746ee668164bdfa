"""Live objects are read by attribute: objects with nnScaler's names give what a dump of them gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nnscaler.plans import DATA, Tree, tree
from tools.nnscaler_verdicts import main
from trainverify import files
from trainverify.graph.plan import Plan
from trainverify.graph.program import Program
from trainverify.nnscaler import convert, export, parse, plan, program, read, snapshot
from trainverify.ops import OPS
from trainverify.verdicts import verify


class Fake:
    """Attributes, and methods that return something stored."""

    def __init__(self, **attributes: Any):
        self.__dict__.update(attributes)


def returning(value: Any) -> Any:
    return lambda: value


class Dtype:
    """Prints as torch's."""

    def __init__(self, name: str):
        self.name = name

    def __str__(self) -> str:
        return self.name


class Fakes:
    """A `ModuleCodeGen` from a dump."""

    def __init__(self, dump: Tree):
        self.dump = dump
        self.full: dict[int, Any] = {}
        self.kinds: dict[str, type] = {"dtype": type("dtype", (Dtype,), {})}

    def make(self, kind: str, **attributes: Any) -> Any:
        return self.kinds.setdefault(kind, type(kind, (Fake,), {}))(**attributes)

    def parent(self, tid: int) -> Any:
        if tid not in self.full:
            data = self.dump["full_tensors"][str(tid)]
            made = self.full[tid] = Fake(tid=tid, name=data["name"], shape=tuple(data["shape"]), dtype=Dtype(data["dtype"]))
            made.grad = None if data["grad"] is None else self.parent(data["grad"])
            for flag in ("is_param", "is_buffer", "is_grad", "is_loss"):
                setattr(made, flag, returning(data[flag]))
            if "origin_shape" in data:
                made.origin_shape = tuple(data["origin_shape"])
        return self.full[tid]

    def value(self, data: Any) -> Any:
        if isinstance(data, list):
            return tuple(self.value(v) for v in data)
        if not isinstance(data, dict):
            return data
        if "tid" in data:
            grad = data.get("grad")
            return Fake(
                tid=data["tid"],
                parent=self.parent(data["parent"]),
                indmap=tuple(tuple(p) for p in data["indmap"]),
                valmap=tuple(data["valmap"]),
                shape=tuple(data["shape"]),
                grad=None if grad is None else self.value(grad),
            )
        if "dtype" in data:
            return self.kinds["dtype"](data["dtype"])
        return Fake(tid=data["object"], name=data["name"])

    def values(self, data: list[Any]) -> Any:
        return returning([self.value(v) for v in data])

    def cell(self, data: Tree) -> Any:
        made = self.make(
            data["kind"],
            cid=data["cid"],
            name=data["name"],
            signature=data["signature"],
            isfw=returning(data["isfw"]),
            device=tuple(data["device"]),
            inputs=self.values(data["inputs"]),
            outputs=self.values(data["outputs"]),
            kwargs={k: self.value(v) for k, v in data["kwargs"].items()},
            mirror=None if data["mirror"] is None else Fake(cid=data["mirror"]),
            comment=None if "comment" not in data else 'File "/home/me/{}", line {}, in forward'.format(*data["comment"].split(":")),
        )
        if "anno" in data:
            made.anno = data["anno"]
        if "module_stack" in data:
            made.module_stack = {"": None, data["module_stack"]: None}
        if "nodes" in data:
            made.nodes = returning([self.cell(n) for n in data["nodes"]])
        if "prims" in data:
            made.differentiable, made.custom = data["differentiable"], data["custom"]
            made.prims = [
                self.make(
                    p["kind"],
                    inputs=self.values(p["inputs"]),
                    outputs=self.values(p["outputs"]),
                    kwargs={k: self.value(v) for k, v in p["kwargs"].items()},
                )
                for p in data["prims"]
            ]
        if "_scaled_device" in data:
            made.scaled = data["_scaled_device"]
        return made

    def sequence(self, d: int) -> list[Any]:
        here = self.dump["execplan"][str(d)]
        made = {key: self.cell(c) for key, c in here["cells"].items()}
        return [
            made[s["cell"]]
            if s["kind"] != "ExeReuseCell"
            else self.make("ExeReuseCell", cell=made[s["cell"]], inputs=self.values(s["inputs"]), outputs=self.values(s["outputs"]))
            for s in here["seq"]
        ]

    def codegen(self) -> Any:
        dump = self.dump
        schedule = None if dump["schedule"] is None else Fake(nmicros=dump["schedule"]["nmicros"])
        execplan = Fake(
            graph=Fake(name=dump["graph"]["name"], sched=schedule), outputs=self.values(dump["execplan_outputs"]), seq=self.sequence
        )
        scale = lambda reducer, rank: Fake(device=tuple(reducer.scaled[str(rank)]))  # noqa: E731
        return self.make(
            "ModuleCodeGen", devices=tuple(dump["devices"]), runtime_ndevs=dump["runtime_ndevs"], execplan=execplan, scale=scale
        )


NAMES = ["mlp2l_v03_dp2pp2tp2nm2", "mlp2l_v08_dp2pp2tp2nm2", "mlp4b_v08_dp2pp1tp2nm1_rand1", "llama1l_v03_dp2pp2tp2nm2"]


@pytest.mark.parametrize("name", NAMES)
def test_live_objects_give_the_same_plan(name: str) -> None:
    made = snapshot(Fakes(tree(name)).codegen())
    assert json.loads(json.dumps(made)) == made
    assert plan(parse(made, name), OPS) == plan(parse(tree(name), name), OPS)


def test_export_writes_what_verifies(tmp_path: Path) -> None:
    export(Fakes(tree("mlp2l_v08_single")).codegen(), tmp_path / "logical.json")
    export(Fakes(tree("mlp2l_v08_dp2pp2tp2nm2")).codegen(), tmp_path / "plan.json.gz")
    logical, made = files.read(tmp_path / "logical.json"), files.read(tmp_path / "plan.json.gz")
    assert isinstance(logical, Program)
    assert isinstance(made, Plan)
    assert verify(logical, made).verdict == "PROVED"
    other = tree("mlp2l_v08_dp2pp2tp2nm2")
    for cell in other["execplan"]["0"]["cells"].values():
        if cell["kind"] == "IRWeightReducer":
            cell["_scaled_device"] = {"0": [0, 1], "4": [4, 5]}
    export(Fakes(other).codegen(), tmp_path / "wrong.json.gz")
    assert verify(logical, files.read(tmp_path / "wrong.json.gz")).verdict == "INVALID"  # device 1 still waits for all four


@pytest.mark.parametrize("name", ["mlp2l_v08_dp2pp2tp2nm2", "llama1l_v03_dp2pp2tp2nm2"])
def test_stored_conversions_are_current(name: str, tmp_path: Path) -> None:
    """The same plans in our own format; PROVED as they are read."""
    single = name.split("_dp")[0] + "_single"
    for each in (name, single):
        convert(read(DATA / f"{each}.json.gz"), tmp_path / "now.json.gz")
        assert files.read(tmp_path / "now.json.gz") == files.read(DATA / "ours" / f"{each}.json.gz")
    logical = files.read_program(DATA / "ours" / f"{single}.json.gz")
    assert logical == program(read(DATA / f"{single}.json.gz"), OPS)
    assert verify(logical, files.read(DATA / "ours" / f"{name}.json.gz")).verdict == "PROVED"


def test_table_of_verdicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = tmp_path / "verdicts.txt"
    listed.write_text(
        "mlp2l_v03_dp2pp2tp2nm2 mlp2l_v03_single PROVED\n"
        "mlp2l_v03_dp2pp2tp2nm2 mlp2l_v03_single REFUTED,INVALID mean the-trainer@0,1,2,3/0,1  # ÷4\n"
    )
    assert main([str(DATA), "--verdicts", str(listed)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "2 of 2 as expected"
    listed.write_text("mlp2l_v03_dp2pp2tp2nm2 mlp2l_v03_single REFUTED\n")
    assert main([str(DATA), "--verdicts", str(listed)]) == 1
    listed.write_text("mlp2l_v03_dp2pp2tp2nm2 mlp2l_v03_single REFUTED mean 7@0/0\n")
    capsys.readouterr()
    assert main([str(DATA), "--verdicts", str(listed)]) == 1
    assert "      named the-trainer@0,1,2,3/0,1, expected 7@0/0" in capsys.readouterr().out.splitlines()
    for bad in ("mlp2l_v03_dp2pp2tp2nm2 PROVED\n", "mlp2l_v03_dp2pp2tp2nm2 mlp2l_v03_single REFUTED 7\n"):
        listed.write_text(bad)
        assert main([str(DATA), "--verdicts", str(listed)]) == 2
