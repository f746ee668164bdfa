"""The page on engines: its tables are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

from prove.laws import LAWS

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "trainverify"
PAGE = (ROOT / "docs" / "engines.md").read_text("utf-8")


def lines(name: str) -> int:
    path = SOURCE / name
    return sum(len(p.read_text("utf-8").splitlines()) for p in (path.rglob("*.py") if path.is_dir() else [path]))


def test_trusted_code_is_counted() -> None:
    rows = {name: int(count) for name, count in re.findall(r"^\| `([\w/.]+)` \| (\d+) \|", PAGE, re.MULTILINE)}
    assert "prove/algebra/kernel.py" in rows
    for name, count in rows.items():
        assert abs(lines(name) - count) <= 0.1 * count, f"{name}: {lines(name)} lines, the page says {count}"
    (total,) = re.findall(r"^\| together \| (\d+) \|", PAGE, re.MULTILINE)
    assert abs(sum(map(lines, rows)) - int(total)) <= 0.1 * int(total)


def test_trusted_code_imports_nothing_else() -> None:
    """What a proof uses is in the table, or on the list of what it uses besides."""
    rows = set(re.findall(r"^\| `([\w/.]+)` \| \d+ \|", PAGE, re.MULTILINE))
    besides = {
        "prove/algebra/notation.py",
        "prove/algebra/discover.py",
        "axes/cells.py",
        "axes/reduction.py",
        "domains",
        "evaluate",
        "prove/propose",
        "explain",
        "report",
        "limits.py",
        "progress.py",
    }
    for name in rows:
        path = SOURCE / name
        for file in path.rglob("*.py") if path.is_dir() else [path]:
            for module in re.findall(r"^from trainverify\.([\w.]+) import", file.read_text("utf-8"), re.MULTILINE):
                used = module.replace(".", "/")
                known = rows | besides
                assert any(used == k.removesuffix(".py") or used.startswith(k.removesuffix(".py") + "/") for k in known), (
                    f"{file.name}: {module}"
                )


def test_every_law_is_there() -> None:
    shown = re.findall(r"^\| \*\*(.+?)\*\*: ", PAGE, re.MULTILINE)
    assert shown == list(LAWS)
