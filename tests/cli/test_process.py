"""What only a process of its own shows: limits, signals, closed pipes, locales, terminals."""

from __future__ import annotations

import gzip
import json
import os
import pty
import re
import resource
import select
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

import trainverify as tv
from cli.models import model, plan
from files.big import big_plan
from trainverify import files
from trainverify.limits import default_megabytes

COMMAND = [sys.executable, "-m", "trainverify"]
LONG = ["verify", "--zoo", "llama3-8b", "--dp", "2", "--tp", "2", "--pp", "2", "--microbatches", "2"]  # some seconds


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    files.write("model.json", model())
    files.write("good.json", plan())
    files.write("wrong.json", plan("sum"))
    return tmp_path


def run(*arguments: str, **environment: str) -> tuple[int, str, str]:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, env={**os.environ, **environment}, timeout=300)
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")


# -- limits --------------------------------------------------------------------------------------------------------------


def test_time_limit(folder: Path) -> None:
    code, out, err = run("verify", "model.json", "wrong.json", "--timeout", "0.001")
    assert (code, err) == (3, "")
    assert out.startswith("UNKNOWN wrong.json against model.json: time limit: no verdict within 0.001 s\nWhat to try:\n  - --timeout ")
    code, out, _ = run("verify", "model.json", "wrong.json", "--timeout", "0.001", "--json")
    assert (code, json.loads(out)["verdict"]) == (3, "UNKNOWN")


def test_time_limit_of_a_long_run(folder: Path) -> None:
    begin = time.perf_counter()
    code, out, _ = run(*LONG, "--timeout", "0.5")
    assert (code, out.split()[0]) == (3, "UNKNOWN")
    assert out.splitlines()[0].endswith(": time limit: no verdict within 0.5 s")
    assert time.perf_counter() - begin < 40  # of several minutes


STUCK = """
import ctypes
from trainverify.ops.table import op
from trainverify.primitives.node import Node

@op("stuck", "mine")
def stuck(x: Node) -> Node:
    return x

{}
"""


def test_time_limit_while_c_code_runs(folder: Path) -> None:
    """No signal handler gets its turn: the process is ended from outside."""
    Path("ops.py").write_text(STUCK.format("ctypes.PyDLL(None).sleep(60)"))
    begin = time.perf_counter()
    code, out, _ = run("verify", "model.json", "good.json", "--ops", "ops.py", "--timeout", "0.5")
    assert (code, out.splitlines()[0]) == (3, "UNKNOWN good.json against model.json: time limit: no verdict within 0.5 s")
    assert time.perf_counter() - begin < 40  # of 60 in C


def test_memory_limit(folder: Path) -> None:
    code, out, err = run("verify", "model.json", "wrong.json", "--memory", "20")
    assert (code, err) == (3, "")
    assert out.splitlines()[0] == "UNKNOWN wrong.json against model.json: memory limit: more than 20 MB of address space needed"
    code, out, _ = run("verify", "model.json", "wrong.json", "--memory", "20", "--json")
    assert (code, json.loads(out)["verdict"]) == (3, "UNKNOWN")


@pytest.mark.parametrize(
    ("more", "shown"), [((), "UNKNOWN good.json against model.json: out of memory: more than 2048 MB"), (("--json",), "{")]
)
def test_default_memory_limit(folder: Path, more: tuple[str, ...], shown: str) -> None:
    """What the machine has, or less if the shell says so: UNKNOWN and one line, where the process would be killed."""

    def little() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (2048 << 20, resource.RLIM_INFINITY))

    Path("ops.py").write_text(
        STUCK.format("import sys\nsys.modules['trainverify.verdicts.judge'].told_apart = lambda *_: bytearray(8 << 30)")
    )
    arguments = ["verify", "model.json", "good.json", "--ops", "ops.py", *more]
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, preexec_fn=little, timeout=300)
    assert (done.returncode, done.stderr) == (3, b"")
    assert done.stdout.decode().startswith(shown)
    assert done.stdout.count(b"\n") == (1 if more else 4)  # with what to try


def test_default_limit_is_what_the_machine_has() -> None:
    """Less than all of it, so that others do not have to be killed; and every command has it."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    assert 0 < (default_megabytes() or 0) < 0.8 * physical
    told = "print(resource.getrlimit(resource.RLIMIT_AS)[0] >> 20) or 0"
    shown = f"import resource, trainverify.cli.application as c; c.run = lambda a: {told}; c.main()"
    done = subprocess.run([sys.executable, "-c", shown], capture_output=True, timeout=300)
    assert int(done.stdout) == default_megabytes()


@pytest.mark.parametrize("end", ["ctypes.CDLL(None).abort()", "ctypes.CDLL(None).exit(1)", "ctypes.CDLL(None).exit(0)"])
def test_library_that_ends_the_process(folder: Path, end: str) -> None:
    """Libraries abort or exit when they get no memory; with status 0 or 1 that would be a verdict."""
    Path("ops.py").write_text(STUCK.format(end))
    code, out, _ = run("verify", "model.json", "good.json", "--ops", "ops.py", "--memory", "4000")
    assert code == 3
    assert out.startswith("UNKNOWN good.json against model.json: memory limit: ")
    code, out, err = run("verify", "model.json", "good.json", "--ops", "ops.py", "--timeout", "50")
    assert (code, out) == (4, "")
    assert err.startswith("error: internal error, no verdict: the process ended")


def test_verdicts_within_limits(folder: Path) -> None:
    for name, code, verdict in (("good.json", 0, "PROVED"), ("wrong.json", 1, "REFUTED")):
        got, out, _ = run("verify", "model.json", name, "--timeout", "60", "--memory", "4000")
        assert (got, out.split()[0]) == (code, verdict)
    code, out, err = run("verify", "nowhere.json", "good.json", "--timeout", "60")
    assert (code, out, err) == (2, "", "error: nowhere.json: No such file or directory\n")


# -- interruption --------------------------------------------------------------------------------------------------------


def on_terminal(*arguments: str, columns: int = 80, until: bytes = b"", then: int | None = None, **environment: str) -> tuple[int, str]:
    """Runs with stdout and stderr on a terminal; sends a signal once some text has appeared."""
    main, side = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns), **environment}
    process = subprocess.Popen([*COMMAND, *arguments], stdin=side, stdout=side, stderr=side, env=env)
    os.close(side)
    text, deadline = b"", time.monotonic() + 60
    while time.monotonic() < deadline:
        ready, _, _ = select.select([main], [], [], 0.1)
        if ready:
            try:
                text += os.read(main, 1 << 16)
            except OSError:
                break
            if then is not None and until in text:
                process.send_signal(then)
                then = None
        elif process.poll() is not None:
            break
    os.close(main)
    return process.wait(10), text.decode()


@pytest.mark.parametrize("limits", [[], ["--timeout", "50"]], ids=["plain", "limited"])
def test_interrupt(folder: Path, limits: list[str]) -> None:
    before = sorted(p.name for p in folder.iterdir())
    code, text = on_terminal(*LONG, *limits, until=b"evaluating", then=signal.SIGINT)
    assert code == 130
    assert "interrupted; no verdict" in text
    assert not re.search("PROVED|REFUTED|INVALID|UNKNOWN", text)
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is there again
    assert sorted(p.name for p in folder.iterdir()) == before


def test_interrupted_writer_leaves_the_old_file(tmp_path: Path) -> None:
    """Ctrl-C while a large file is replaced: the old one stays whole, no draft is left."""
    path = tmp_path / "plan.json.gz"
    files.write(path, plan())
    script = "import sys; from files.big import big_plan; from trainverify import files\n"
    script += "plan = big_plan(4, 3000, 1024)\nprint('go', flush=True)\nwhile True: files.write(sys.argv[1], plan)"
    paths = os.pathsep.join([str(Path(__file__).parents[1])])
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"go\n"
    while not list(tmp_path.glob(".*.tmp")):
        time.sleep(0.001)
    for _ in range(12):  # Python drops an interruption that comes while it takes an object apart
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
            break
    assert process.returncode not in (None, 0)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert files.read(path) in (plan(), big_plan(4, 3000, 1024))


def test_child_ends_with_its_parent(folder: Path) -> None:
    process = subprocess.Popen([*COMMAND, *LONG, "--timeout", "50"], stdout=subprocess.PIPE)
    time.sleep(1.5)
    process.kill()
    assert process.stdout is not None
    begin = time.perf_counter()
    assert process.stdout.read() == b""  # returns when no process holds the pipe any more
    assert time.perf_counter() - begin < 40  # of several minutes
    process.wait()


# -- output --------------------------------------------------------------------------------------------------------------


def test_closed_pipe_is_no_verdict(folder: Path) -> None:
    for arguments in (["verify", "model.json", "good.json"], ["ops"], ["ops", "--json"], ["show", "good.json"], ["--help"], ["--version"]):
        process = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(30) == 141


COMMANDS = [  # what is asked for, and its exit code
    (["verify", "model.json", "good.json"], 0),
    (["verify", "model.json", "wrong.json", "--json"], 1),
    pytest.param(["verify", "model.json", "wrong.json", "--timeout", "50"], 1, marks=pytest.mark.long),
    pytest.param(["validate", "good.json"], 0, marks=pytest.mark.long),
    (["show", "good.json"], 0),
    pytest.param(["reduce", "model.json"], 0, marks=pytest.mark.long),
    (["ops", "--json"], 0),
    (["zoo"], 0),
    (["--help"], 0),
    (["--version"], 0),
    (["show", "nowhere.json", "--json"], 2),
]


@pytest.mark.parametrize(("arguments", "code"), COMMANDS, ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_streams_that_take_nothing(folder: Path, arguments: list[str], code: int) -> None:
    """Closed (`>&-`): the code is the answer. Full: one line says so, and the code is no verdict."""
    command = shlex.join([*COMMAND, *arguments])
    for streams in (">&-", ">&- 2>&-", ">&- 2>&- <&-", ">/dev/null 2>/dev/full"):
        done = subprocess.run(["sh", "-c", f"{command} {streams}"], capture_output=True, timeout=300)
        assert (done.returncode, done.stdout, done.stderr) == (code, b"", b"")
    done = subprocess.run(["sh", "-c", f"{command} >/dev/full"], capture_output=True, timeout=300)
    assert (done.returncode, done.stderr) == (2, b"error: standard output: No space left on device\n")


def test_closed_output_is_not_taken_for_a_file(folder: Path) -> None:
    """The first file that is opened would get the number of the stream that is closed."""
    command = shlex.join([*COMMAND, "zoo", "gpt2", "--layers", "1", "--out", "made"])
    assert subprocess.run(["sh", "-c", f"{command} >&- 2>&-"], timeout=300).returncode == 0
    assert isinstance(files.read("made/gpt2.logical.json.gz"), tv.Program)
    assert isinstance(files.read("made/gpt2.plan.json.gz"), tv.Plan)


@pytest.mark.parametrize("locale", [{"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}, {"PYTHONIOENCODING": "latin-1"}])
def test_locale_without_the_characters(folder: Path, locale: dict[str, str]) -> None:
    code, out, err = run("ops", "linear", **locale)
    assert (code, err) == (0, "")
    assert "\\u03a3_k x[b,k]" in out
    code, out, err = run("show", "nöwhere.json", **locale)
    assert code == 2
    assert err.startswith("error: n")
    assert err.count("\n") == 1
    assert run("verify", "model.json", "wrong.json", **locale)[0] == 1
    assert run("ops", "--json", **locale)[1].isascii()


def test_narrow_terminal(folder: Path) -> None:
    """Nothing is cut: names are whole, each obligation takes two lines."""
    code, text = on_terminal("verify", "model.json", "wrong.json", columns=30)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "")
    assert code == 1
    assert "\ndifferent  gradient of w\n    w.grad, 3 ranks; evaluation, random points\n" in plain
    assert "…" not in plain
    code, text = on_terminal("verify", "model.json", "wrong.json", columns=200)
    assert re.search("gradient of w +w.grad +3  evaluation", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text))


def test_progress_on_stderr_of_a_terminal_only(folder: Path) -> None:
    assert run("verify", "model.json", "good.json")[2] == ""
    assert "evaluating 300 points" in on_terminal("verify", "model.json", "good.json", "--points", "300")[1]
    code, text = on_terminal("verify", "model.json", "good.json", "--json")
    assert json.loads(text)["exit_code"] == code == 0


def test_no_colour_codes_in_files(folder: Path) -> None:
    assert "\x1b" not in run("verify", "model.json", "wrong.json")[1]


def test_very_many_obligations(folder: Path) -> None:
    """The text report lists the first; those that differ come first. JSON has all."""
    b = tv.program("wide")
    x = b.input("x", (2, 3))
    total = b.sum(x, name="sum0")
    for i in range(40):
        w = b.parameter(f"w{i}", (3,))
        total = b.add(total, b.sum(b.mul(x, w, name=f"m{i}"), name=f"sum{i + 1}"), name=f"total{i}")
    b.loss(b.mul(total, total, name="loss"))
    files.write("wide.json", tv.complete(b.build(), tv.SGD(lr=0.5)))
    tree = json.loads(Path("wide.json").read_text())
    last = tree["ops"][-1]
    last["attrs"]["lr"] = 0.25
    Path("other.json.gz").write_bytes(gzip.compress(json.dumps(tree).encode()))
    code, out, _ = run("verify", "wide.json", "other.json.gz")
    assert code == 1
    lines = [line.split() for line in out.splitlines()]
    assert lines[[line[:1] for line in lines].index(["status"]) + 1][:3] == ["different", "updated", "parameter"]
    assert "\n… and 21 more: proved\n" in out
    assert len(json.loads(run("verify", "wide.json", "other.json.gz", "--json")[1])["obligations"]) == 81


# -- completion ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("typed", "word", "found"), [("trainverify ver", "1", "verify"), ("trainverify verify --js", "2", "--json")])
def test_shells_complete_commands_and_options(typed: str, word: str, found: str) -> None:
    code, out, err = run(_TRAINVERIFY_COMPLETE="complete_bash", COMP_WORDS=typed, COMP_CWORD=word)
    assert (code, out.split(), err) == (0, [found], "")


def test_completion_for_a_shell_is_shown() -> None:
    code, out, err = run("--show-completion", "bash")
    assert code == 0, (out, err)
    assert "_TRAINVERIFY_COMPLETE" in out
