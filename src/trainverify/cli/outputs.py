"""Files that a verdict is also written to, the same options for every command that gives one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

import typer

from trainverify import files
from trainverify.refusal import Refused
from trainverify.report import Report


@dataclass(frozen=True)
class Outputs:
    """What was asked for besides the report."""

    export_test: Path | None = None
    counterexample: Path | None = None
    html: Path | None = None
    sarif: Path | None = None
    junit: Path | None = None
    progress: bool = False
    verbose: bool = False

    def check(self) -> None:
        """Refuse, before anything is computed, what cannot be done."""
        if self.counterexample is not None and self.export_test is None:
            raise Refused("--counterexample goes with --export-test")

    def written(self, report: Report, artifact: str | None) -> Report:
        """The report, with notes on a test that was exported; `artifact` is the file that a verdict without a line is about."""
        notes = tuple(self._test(report))
        if self.html is not None:
            from trainverify.counterexample import entry_of
            from trainverify.report.html import page

            files.write_text(self.html, page([entry_of(report)]))
        if self.sarif is not None:
            from trainverify.report.sarif import sarif

            files.write_text(self.sarif, sarif(report, artifact))
        if self.junit is not None:
            from trainverify.report.junit import junit

            files.write_text(self.junit, junit(report))
        return replace(report, notes=(*report.notes, *notes)) if notes else report

    def _test(self, report: Report) -> Iterator[str]:
        if self.export_test is None:
            return
        from trainverify.counterexample import of_earlier, smallest
        from trainverify.report.exported.expressions import Unwritable
        from trainverify.report.exported.pytest_file import earlier, exported

        if self.counterexample is None and report.verdict != "REFUTED":
            yield f"no test exported: {report.verdict}, there is no counterexample"
            return
        if report.compared is None or report.verdict == "INVALID":
            yield f"no test exported: {report.verdict}, the plan cannot be run"
            return
        try:
            if self.counterexample is None:
                text = exported(smallest(report), report.subject, _hints(report))
            else:
                given = earlier(_text(self.counterexample), str(self.counterexample))
                text = exported(of_earlier(report.compared, given), report.subject, ["On the inputs of an earlier counterexample."])
        except (Refused, Unwritable) as error:
            yield f"no test exported: {error}"
            return
        files.write_text(self.export_test, text)
        yield f"test exported: pytest {self.export_test}"


NOTHING_MORE: Final = Outputs()


def _hints(report: Report) -> Iterator[str]:
    yield report.reason
    if report.place is not None and report.place.repair:
        yield f"repair: {report.place.repair}"
    yield "It fails for the plan that it was exported from. After the fix, make it again of the new plan on the same inputs:"
    yield "    trainverify verify LOGICAL FIXED --export-test NEW.py --counterexample THIS.py"


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise files.FileError(path, "", getattr(error, "strerror", None) or "not UTF-8 text") from error


def _file(text: str) -> Any:
    return Annotated[Path | None, typer.Option(metavar="FILE", help=text)]


OPTIONS: dict[str, tuple[Any, Any]] = {
    "export_test": (_file("If REFUTED, write the counterexample as a stand-alone pytest module."), None),
    "counterexample": (_file("With --export-test: on the inputs of this exported test, whatever the verdict."), None),
    "html": (_file("Also write the report as one page with pictures, filters and the counterexample."), None),
    "sarif": (_file("Also write the report as SARIF 2.1.0, for code scanning."), None),
    "junit": (_file("Also write the report as JUnit XML, one test case for each obligation."), None),
    "verbose": (
        Annotated[bool, typer.Option("--verbose", "-v", help="All obligations, assumptions, and both sides in normal form.")],
        False,
    ),
    "progress": (
        Annotated[bool, typer.Option("--progress", help="Say on stderr what is being done, also where that is no terminal.")],
        False,
    ),
}


def with_outputs(command: Callable[..., int]) -> Callable[..., int]:
    """A command that takes `outputs`: their options are added to its own."""
    own = {n: p for n, p in inspect.signature(command).parameters.items() if n != "outputs"}
    hints = get_type_hints(command, include_extras=True)

    @functools.wraps(command)
    def complete(**values: Any) -> int:
        chosen = Outputs(**{n: values.pop(n) for n in OPTIONS})
        chosen.check()
        return command(outputs=chosen, **values)

    keyword = inspect.Parameter.KEYWORD_ONLY
    more = [inspect.Parameter(n, keyword, default=default, annotation=kind) for n, (kind, default) in OPTIONS.items()]
    plain = [p.replace(kind=keyword, annotation=hints[n]) for n, p in own.items()]
    vars(complete)["__signature__"] = inspect.Signature([*plain, *more], return_annotation=int)
    complete.__annotations__ = {n: hints[n] for n in own} | {n: kind for n, (kind, _) in OPTIONS.items()} | {"return": int}
    del vars(complete)["__wrapped__"]
    return complete
