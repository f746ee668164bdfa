"""Ctrl-C and kills while workers prove stages: what is known is reported, and no process is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainverify import files
from verdicts.mlp import logical, plan

# the command as it is, but workers say who they are and wait for the other, and the stage of the loss takes for ever
STUCK = """
import glob, os, sys, time
from trainverify import cli
from trainverify.prove.staged import workers

real = workers.check

def check(stage, *args):
    open(f"worker.{os.getpid()}", "w").close()
    while len(glob.glob("worker.*")) < 2:
        time.sleep(0.02)
    if stage.goal.name == "loss":
        time.sleep(600)
    return real(stage, *args)

workers.check = check
sys.argv[0] = "trainverify"
cli.main()
"""
COMMAND = [sys.executable, "-c", STUCK, "verify", "logical.json", "plan.json", "--engine", "smt", "--workers", "2", "--points", "1"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files.write(tmp_path / "logical.json", logical())
    files.write(tmp_path / "plan.json", plan())
    return tmp_path


def running(folder: Path) -> list[int]:
    """Workers that are alive."""
    found = []
    for path in folder.glob("worker.*"):
        process = int(path.name.partition(".")[2])
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            found.append(process)
    return found


def until(folder: Path, workers: int, seconds: float) -> bool:
    """Whether there are so many within this time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if len(running(folder)) == workers:
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def started(folder: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([*COMMAND, *request.param], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert until(folder, 2, 60), "workers did not start"
        yield process
    finally:
        process.kill()
        process.wait()
        for worker in running(folder):
            os.kill(worker, signal.SIGKILL)


@pytest.mark.parametrize("started", [["--json"]], indirect=True, ids=["plain"])
def test_ctrl_c_reports_what_is_known(folder: Path, started: subprocess.Popen[bytes]) -> None:
    time.sleep(0.5)  # the other worker goes on
    started.send_signal(signal.SIGINT)
    out, err = started.communicate(timeout=30)
    report = json.loads(out)
    assert (started.returncode, report["exit_code"], report["verdict"], err) == (3, 3, "UNKNOWN", b"")
    assert any(n.startswith("interrupted") for n in report["notes"])
    status = {o["name"]: o["status"] for o in report["obligations"]}
    assert status["loss"] != "proved"
    assert "proved" in status.values()
    assert until(folder, 0, 5), f"workers {running(folder)} are left"


@pytest.mark.parametrize("started", [["--timeout", "300"]], indirect=True, ids=["limited"])
def test_ctrl_c_of_a_limited_run_leaves_no_worker(folder: Path, started: subprocess.Popen[bytes]) -> None:
    """The process that proves is ended from outside and cannot end its workers: they notice."""
    started.send_signal(signal.SIGINT)
    out, err = (text.decode() for text in started.communicate(timeout=30))
    assert (started.returncode, out) == (130, "")
    assert err == "error: interrupted; no verdict\n"
    assert until(folder, 0, 5), f"workers {running(folder)} are left"


@pytest.mark.parametrize("started", [[]], indirect=True, ids=["plain"])
def test_workers_end_with_a_process_that_is_killed(folder: Path, started: subprocess.Popen[bytes]) -> None:
    started.kill()
    started.wait()
    assert until(folder, 0, 5), f"workers {running(folder)} are left"
