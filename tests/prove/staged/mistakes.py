"""Mistakes in the plan of a small MLP."""

from __future__ import annotations

from dataclasses import replace

from verdicts.changes import Change, attrs, inputs, replaced

MISTAKES: dict[str, tuple[str, Change]] = {
    "sum over tp missing": ("y", replaced("pp1", "y0", lambda op: replace(op, name="identity", attrs=()))),
    "other micro-batch": ("u", inputs("pp0", "u1", "x0", "w0")),
    "sum instead of mean over dp": ("w1.grad", attrs("pp0", "w1.grad.mean", op="sum")),
}
