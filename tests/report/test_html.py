"""The page: complete and safe as text; in a browser without complaints, with filters and keys that work."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from cli.models import model, plan
from report.browser import ABSENT, browser
from trainverify import files
from trainverify.cli import run
from trainverify.counterexample import entry_of
from trainverify.graph.mesh import Mesh
from trainverify.ops import OPS
from trainverify.report import Compared, Report, Shown
from trainverify.report.html import Entry, page
from trainverify.report.html.mesh import drawn
from trainverify.report.html.timeline import rows_of
from trainverify.verdicts import verify
from trainverify.zoo.parallel.degrees import Degrees
from trainverify.zoo.recipes import Wish

VOID = {"meta", "link", "input"}


class Balanced(HTMLParser):
    """Elements that are closed in the order in which they were opened."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [v or "" for k, v in attrs if k in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def checked(text: str) -> str:
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    assert all(a.startswith(("data:", "#")) for a in parser.addresses)  # nothing is loaded
    assert "url(" not in text
    assert "@import" not in text
    return text


@pytest.fixture(scope="module")
def refuted() -> Report:
    return verify(model(), plan("sum"), points=1)


def test_what_a_refuted_plan_shows(refuted: Report) -> None:
    text = checked(page([entry_of(refuted)]))
    order = ["REFUTED", "Repair: ", "The difference", "The first wrong tensor", "In the plan", "In the logical program"]
    order += ["A small counterexample", "The mesh", "The step in time", "3 obligations", "Assumed, and not shown"]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert "w.grad.mean = all_reduce(w.grad, group=dp.0, op=sum)" in text
    assert 'class="cell p0 bad"' in text


def test_other_verdicts(refuted: Report) -> None:
    proved = checked(page([Entry(verify(model(), plan(), points=1))]))
    assert "Repair" not in proved
    assert "The mesh" in proved
    late = checked(page([Entry(Report("UNKNOWN", "time limit: no verdict within 1 s", "a against b"))]))
    assert "What to try" in late
    several = checked(page([Entry(refuted, "test_a"), Entry(refuted, "test_b")]))
    assert several.count('href="#report-') == 2


def test_names_cannot_become_markup(refuted: Report) -> None:
    evil = "</script><script>alert(1)</script><b>&\"'"
    shown = (Shown(evil, evil, 1, "different", "e", "s"), Shown("a", "b", 1, evil, evil, evil))
    text = checked(page([Entry(replace(refuted, subject=evil, reason=evil, obligations=shown, notes=(evil,)), evil)]))
    assert "<script>alert" not in text
    assert "<b>" not in text


def test_a_pipeline_in_time() -> None:
    """1F1B with two stages and three micro-batches: the second stage alternates."""
    _, p = Wish("llama3-8b", Degrees(dp=1, tp=1, pp=2, microbatches=3), layers=2).build()
    rows = rows_of(p, OPS)
    assert rows is not None
    first, second = ([(b.phase[0], b.batch) for b in r.boxes if b.batch is not None and b.end - b.start > 5] for r in rows)
    assert first == [("f", 0), ("f", 1), ("b", 0), ("f", 2), ("b", 1), ("b", 2)]
    assert second == [("f", 0), ("b", 0), ("f", 1), ("b", 1), ("f", 2), ("b", 2)]
    starts = {(b.phase, b.batch): b.start for b in reversed(rows[1].boxes)}
    ends = {(b.phase, b.batch): b.end for b in rows[0].boxes}
    assert starts["forward", 0] >= ends["forward", 0] - 1  # not before it arrives


def test_many_ranks_are_folded() -> None:
    assert drawn(Mesh(pp=16, dp=64, tp=8)).folded == ("dp",)
    assert drawn(Mesh(dp=8192)).folded == ("dp",)
    assert drawn(Mesh(dp=2, tp=4)).folded == ()
    logical, p = Wish("llama3-8b", Degrees(dp=512, tp=8, pp=2, microbatches=2), layers=2).build()
    assert p.size == 8192
    shown = tuple(Shown(f"gradient of layers.{n}.w", f"layers.{n}.w.grad", 512, "proved", "algebra", "full size") for n in range(40_000))
    report = Report("PROVED", "", "large", obligations=shown, compared=Compared(logical, p, OPS))
    text = checked(page([Entry(report)]))
    assert len(text) < 5_000_000
    assert "dp (512) folded into every cell" in text
    assert "10,000 more are in the JSON report." in text


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files.write("model.json", model())
    files.write("wrong.json", plan("sum"))
    assert run(["verify", "model.json", "wrong.json", "--points", "1", "--html", "report.html"]) == 1
    assert "A small counterexample" in checked(Path("report.html").read_text("utf-8"))


@pytest.mark.skipif(ABSENT, reason="needs Chromium and its driver: chromium, chromedriver")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_in_a_browser(tmp_path: Path, refuted: Report, dark: bool) -> None:
    more = tuple(Shown(f"gradient of layers.{n}.w", f"layers.{n}.w.grad", 8, "proved", "algebra", "full size") for n in range(700))
    path = tmp_path / "report.html"
    path.write_text(page([entry_of(replace(refuted, obligations=(*refuted.obligations, *more)))]), "utf-8")
    rows = "document.querySelectorAll('.obligations tbody tr').length"
    with browser(tmp_path, 420 if dark else 1100, dark=dark) as b:
        b.open(path)
        assert b.run(rows) == 200
        assert b.run("document.querySelector('.obligations tbody td').textContent") == "different"
        b.click("button.more")
        assert b.run(rows) == 703
        b.press("/", *"layers.69")
        assert b.run(rows) == 11  # 69 and 690 to 699
        assert b.run("document.querySelector('.count').textContent") == "11 of 703"
        b.press("\ue00c")  # Escape
        assert b.run("document.querySelector('.count').textContent") == "703 in all"
        b.press("d")
        assert b.run(rows) == 2
        b.click("input[data-status=proved]")
        assert b.run("document.querySelector('.count').textContent") == "703 in all"
        colour = str(b.run("getComputedStyle(document.body).backgroundColor"))
        assert (max(map(int, re.findall(r"\d+", colour)[:3])) < 60) is dark
        assert b.run("document.documentElement.scrollWidth <= window.innerWidth")  # nothing sticks out, on a phone either
        assert b.console() == []
