"""The pages on engines: their tables, their picture and their links are those of the code."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from docs.imported import imports, reached
from prove.laws import LAWS

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "trainverify"
PAGE = (ROOT / "docs" / "engines.md").read_text("utf-8")
ALGEBRA = (ROOT / "docs" / "engine-algebra.md").read_text("utf-8")


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
        "refusal.py",
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
    shown = re.findall(r"^\| \*\*(.+?)\*\*: ", ALGEBRA, re.MULTILINE)
    assert shown == list(LAWS)


def drawn() -> dict[str, set[str]]:
    """Of every box of the picture the boxes that arrows come from."""
    (picture,) = re.findall(r"^```mermaid\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    labels = dict(re.findall(r"^ *(\w+)\[(\w+)\]$", picture, re.MULTILINE))
    found: dict[str, set[str]] = {}
    for line in re.findall(r"^.* --> .*$", picture, re.MULTILINE):
        boxes = [labels.get(b, b) for b in line.strip().split(" --> ")]
        found.setdefault(boxes[0], set())
        for used, user in pairwise(boxes):
            found.setdefault(user, set()).add(used)
    return found


def imported(boxes: set[str]) -> dict[str, set[str]]:
    """Of every box the boxes that its files import. `ops` may use the types of `graph`."""

    def box(module: str) -> str | None:
        path = module.removeprefix("trainverify.").replace(".", "/")
        return next((b for b in boxes if path == b or path.startswith(b + "/")), None)

    found: dict[str, set[str]] = {b: set() for b in boxes}
    for module, used in imports().items():
        user = box(module)
        if user is not None:
            found[user] |= {b for u in used if u != "trainverify.graph.types" and (b := box(u)) is not None} - {user}
    return found


def test_the_picture_is_that_of_the_imports() -> None:
    """Every arrow is an import, and every import goes along arrows."""
    arrows = drawn()
    uses = imported(set(arrows))
    assert len(arrows) > 15
    for user, used in arrows.items():
        assert used <= uses[user], user
        assert uses[user] <= reached(arrows, user), user


def test_all_of_prove_is_in_the_picture() -> None:
    there = {f"prove/{p.stem}" for p in (SOURCE / "prove").iterdir() if p.name not in ("__init__.py", "__pycache__")}
    assert there <= drawn().keys()


def anchors(page: Path) -> set[str]:
    """Of the headings of a page, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads}


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if not target.startswith(("http://", "https://")):
            name, _, anchor = target.partition("#")
            there = page.parent / name if name else page
            assert there.exists(), target
            assert not anchor or anchor in anchors(there), target


def test_what_users_read_is_short() -> None:
    """A verdict is explained on two pages."""
    assert len((ROOT / "docs" / "verdicts.md").read_text("utf-8").split()) <= 1300
