"""What a report says where there is no verdict, and what `verbose` adds."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from cli.models import model, plan
from trainverify.check.findings import Finding
from trainverify.cli.judged import options_of
from trainverify.report import Report
from trainverify.report.next_steps import _BY_REASON, _CAPTURED, FORMS, POINTS, SMALLER, STAGES, what_to_try
from trainverify.verdicts import verify


def printed(report: Report, verbose: bool = False) -> str:
    out = io.StringIO()
    report.print(Console(file=out, width=1000, soft_wrap=True), verbose)
    return out.getvalue()


@pytest.mark.parametrize(
    ("reason", "first"),
    [
        ("time limit: no verdict within 3 s", "--timeout with more seconds, or none"),
        ("out of memory: more than 20 MB of address space needed", "--memory with more megabytes, or a machine that has more"),
        ("2 of 3 obligations not proved; agreed on 3 random points", STAGES),
        ("something else", FORMS),
    ],
)
def test_by_reason(reason: str, first: str) -> None:
    report = Report("UNKNOWN", reason, "x against y")
    assert report.next_steps()[0] == first
    assert f"What to try:\n  - {first}\n" in printed(report)


def test_stages_that_were_tried_are_not_proposed() -> None:
    reason = "1 of 3 obligations not proved; agreed on 3 random points"
    assert what_to_try("UNKNOWN", reason, (), ("not proved: loss: algebra: no; smt: no",)) == [FORMS, POINTS, SMALLER]


CAPTURED = (
    ("without a mapping: mine::gelu.default (3 times, first at train.py:20: no mapping)", 'tvt.meaning("mine::gelu", lambda'),
    ("without a mapping: aten::hash (3 times, first at a/train.py:20: no mapping)", "a/train.py:20: write aten::hash with ops that have a"),
    ("rank 0 (train.py:4): ReadsData: float of a computed number", "train.py:4: compute with the tensor there, not with its number"),
    (
        "memory of 4 bytes, no tensor of a model, carries values from step to step (t.py:3)",
        "t.py:3: keep it in the model (register_buffer)",
    ),
    ("lineage: up.weight is [2, 3] on rank 0 and [4, 3] on one device; say cuts", 'say how it is cut: cuts={"up.weight": "(tp o) k"}'),
    ("last.bias changes after one step and before the next", "with tvt.step(model, optimizer, batch): around the step alone"),
)


@pytest.mark.parametrize(("reason", "first"), CAPTURED)
def test_of_a_capture_the_smallest_change(reason: str, first: str) -> None:
    assert what_to_try("UNKNOWN", reason, (), ())[0].startswith(first)


JUDGING = ("verify", "nnscaler", "torch", "jax", "megatron", "transformers", "deepspeed", "torchtitan")


@pytest.mark.parametrize("command", JUDGING)
def test_only_options_that_the_command_has(command: str) -> None:
    """Whatever is proposed; the first thing that is proposed of every reason is there for the command that gives it."""
    there = options_of(command)
    assert {"--json", "--help"} & there
    reasons = [r.replace("\\", "").strip("^").partition("|")[0] for r, _ in (*_BY_REASON, *_CAPTURED)] + [r for r, _ in CAPTURED]
    for verdict in ("UNKNOWN", "PROVED(reduced)", "PROVED(sampled)"):
        for reason in reasons:
            for step in what_to_try(verdict, reason, (), (), there):
                assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", step)) <= there, step
    assert any("--workers" in s or "--engine" in s for s in what_to_try("PROVED(reduced)", "", (), (), options_of("verify")))
    assert ("--real, for code that reads data" in what_to_try("UNKNOWN", "reads a value", (), (), there)) == (command == "torch")


def test_unsupported_operator() -> None:
    finding = Finding("TV104", "unknown operator 'mystery'", severity="unsupported", hint="is it `mysterious`?")
    first, second, *_ = what_to_try("UNKNOWN", "unsupported: unknown operator 'mystery'", [finding], ())
    assert first == "is it `mysterious`?"
    assert second.startswith("declare the operator")


def test_only_where_there_is_no_verdict() -> None:
    for p in (plan(), plan("sum")):
        report = verify(model(), p, points=1)
        assert report.next_steps() == []
        assert "What to try" not in printed(report)
    reduced = verify(model(), plan(), points=1, engine="smt")
    assert reduced.next_steps()[0].startswith("--accept-reduced")
    assert replace(reduced, accept_reduced=True).next_steps() == []


def test_forms_are_for_the_verbose() -> None:
    report = verify(model(), plan("sum"), points=1)
    assert any(f.startswith("gradient of w: rank 0: w.grad.mean is not w.grad: got 1/4") for f in report.forms)
    assert "got 1/4·(Σ" not in printed(report)
    assert "got 1/4·(Σ" in printed(report, verbose=True)
    assert report.json()["forms"] == list(report.forms)


def test_what_inherits_the_mistake_is_one_line() -> None:
    report = verify(model(), plan("sum"), points=1)
    text, everything = printed(report), printed(report, verbose=True)
    assert "1 more differs as it is computed from these: updated parameter w (--verbose lists them)\n" in text
    assert "different  updated parameter w" not in text
    assert "different  updated parameter w" in everything
    assert "2 of the 2 that differ are computed from w.grad\n" in everything
    assert {o["name"]: o["inherited"] for o in report.json()["obligations"] if o["status"] == "different"} == {
        "gradient of w": False,
        "updated parameter w": True,
    }


def test_fail_fast() -> None:
    """REFUTED before anything is proved, without a cause; a right plan is proved as always."""
    told: list[str] = []
    report = verify(model(), plan("sum"), fail_fast=True, progress=told.append)
    assert report.verdict == "REFUTED"
    assert report.place is None
    assert report.difference is not None
    assert not any(o.status == "proved" for o in report.obligations)
    assert not any(text.startswith("normalising the plan") for text in told)
    assert "first wrong tensor" not in printed(report)
    assert verify(model(), plan(), fail_fast=True).verdict == "PROVED"
