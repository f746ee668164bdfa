"""`trainverify zoo` and `verify --zoo`: listing, building, files, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainverify.cli import run
from trainverify.zoo.recipes import NAMES


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["zoo"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in NAMES)
    assert "layers 126, hidden 16384, heads 128, kv-heads 8, vocabulary 128256, sequence 8192" in shown
    assert run(["zoo", "--json"]) == 0
    models = {m["name"]: m for m in json.loads(capsys.readouterr().out)["models"]}
    assert set(models) == set(NAMES)
    assert models["llama3-8b"]["plans"] is True


def test_files_are_what_is_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["llama3-8b", "--layers", "1", "--dp", "2", "--tp", "2", "--zero", "1"]
    assert run(["zoo", *options, "--out", str(tmp_path / "new"), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["ranks"], made["mesh"], made["findings"]) == (4, "mesh(pp=1, dp=2, tp=2)", [])
    assert run(["verify", *made["files"], "--points", "1", "--json"]) == 0
    from_files = json.loads(capsys.readouterr().out)
    assert run(["verify", "--zoo", *options, "--points", "1", "--json"]) == 0
    at_once = json.loads(capsys.readouterr().out)
    assert from_files["verdict"] == at_once["verdict"] == "PROVED"
    assert from_files["obligations"] == at_once["obligations"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["zoo", "lama3-8b"], "no model 'lama3-8b'; did you mean llama3-8b?"),
        (
            ["zoo", "llama3-8b", "--tp", "3"],
            "llama3-8b: 8 key-value heads do not divide among 3 tensor-parallel ranks: try --tp 1 or 2 or 4 or 8, or a multiple of 8",
        ),
        (["zoo", "gpt2", "--tp", "2"], "gpt2: 50257 ids do not divide among 2 tensor-parallel ranks: try --vocabulary 50304"),
        (["zoo", "gpt2", "--packed"], "GPT has no packed to choose"),
        (["zoo", "gpt2", "--ep", "2", "--dp", "2"], "plans of GPT have no ep=2"),
        (["zoo", "resnet50", "--tp", "2"], "plans of ResNet divide the batch among data-parallel ranks"),
        (["zoo", "llama3-8b", "--zero", "1"], "with dp=1 there is nothing to shard"),
        (["zoo", "llama3-8b", "--dp", "2", "--shards", "chunk"], "nothing is cut without it: zero=1, 2 or 3 goes with it"),
        (["zoo", "llama3-8b", "--pp", "2", "--schedule", "interleaved", "--microbatches", "3"], "3 micro-batches do not divide among 2"),
        (["zoo", "llama3-8b", "--pp", "40"], "llama3-8b: 32 layers are fewer than 40 stages"),
        (["verify", "--zoo", "gpt2", "--pp", "14"], "gpt2: 12 layers on 14 stages: stage 12 of"),
        (["zoo", "llama3-8b", "--pp", "2", "--stages", "33,-1"], "stages of (33, -1) layers for 32 layers on 2 stages"),
        (["zoo", "llama3-8b", "--pp", "3", "--stages", "16,0,16"], "32 layers on 3 stages: stage 1 of (16, 0, 16) has no layer"),
        (["zoo", "llama3-8b", "--dp", "1000000000"], "llama3-8b: 1000000000 ranks; the limit is 1048576"),
        (["verify", "--zoo", "resnet18", "--dp", "1000000000"], "resnet18: 1000000000 ranks; the limit is 1048576"),
        (["zoo", "gpt2", "--tp", "8", "--cp", "1024", "--pp", "256"], "gpt2: 2097152 ranks; the limit is 1048576"),
        (["mutate", "--zoo", "gpt2", "--tiny", "--dp", "1000000000"], "1000000000 ranks; the limit is 1048576"),
        (["zoo", "llama3-8b", "--microbatches", "1000000000"], "layers × micro-batches are 32000000000; the limit is 100000"),
        (["verify", "--zoo", "llama3-8b", "--layers", "1000000000"], "layers × micro-batches are 1000000000; the limit is 100000"),
        (["zoo", "llama3-8b", "--pp", "2", "--stages", "a,b"], "--stages a,b: numbers of layers separated by commas"),
        (["zoo", "llama3-8b", "--batch", "3", "--dp", "2"], "3 rows of the batch do not divide among 2 data-parallel ranks: try --batch 4"),
        (["zoo", "--dp", "2"], "--dp goes with a model of the zoo"),
        (["verify", "a.json", "b.json", "--tp", "2"], "--tp goes with a model of the zoo"),
        (["verify", "a.json", "b.json", "--zoo", "gpt2"], "either two files or --zoo NAME"),
        (["verify", "a.json"], "two files are needed, LOGICAL and PLAN, or --zoo NAME"),
        (["verify", "--zoo", "llama3-8b", "--tp", "5"], "llama3-8b: 8 key-value heads do not divide among 5"),
        (["zoo", "llama3-8b", "--dp", "0"], "'--dp'"),
        (["zoo", "llama3-8b", "--schedule", "magic"], "'--schedule'"),
    ],
)
def test_refused(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    printed = capsys.readouterr()
    assert why in printed.err
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert run([*arguments, "--json"]) == 2
    assert why in json.loads(capsys.readouterr().out)["error"]


def test_out_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("kept")
    Path("folder/gpt2.plan.json.gz").mkdir(parents=True)
    for path, line in (
        ("file", "error: file: not a folder\n"),
        ("file/new", "error: file/new: Not a directory\n"),
        ("/proc/new", "error: /proc/new: No such file or directory\n"),
        ("n" * 300, f"error: {'n' * 300}: File name too long\n"),
        ("folder", "error: folder/gpt2.plan.json.gz: not a regular file\n"),
    ):
        assert run(["zoo", "gpt2", "--layers", "1", "--out", path]) == 2
        assert capsys.readouterr() == ("", line)
    assert Path("file").read_text() == "kept"
    assert run(["zoo", "--out", "new"]) == 2
    assert capsys.readouterr().err == "error: --out goes with a model of the zoo\n"
    assert run(["bench", "scaling", "--quick", "--out", "folder"]) == 2
    assert capsys.readouterr().err == "error: folder: a folder, not a file\n"


LLAMA, GPT, DEEPSEEK = ["llama3-8b", "--layers", "1"], ["gpt2", "--layers", "1"], ["deepseek-16b", "--layers", "2"]
CHUNK, FLAT, TP = ["--zero", "1", "--shards", "chunk"], ["--zero", "1", "--shards", "flat"], ["--tp", "2"]
RING, ZIGZAG, ULYSSES = (["--cp", "2", "--cp-kind", kind] for kind in ("ring", "zigzag", "ulysses"))

NOT_PROVED = {  # what is asked for; the options that are named, what works instead; the nearest that is proved
    "ring and sp": (
        [*LLAMA, *RING, *TP, "--sp"],
        "--cp-kind ring with --sp",
        "--cp-kind ulysses goes with --sp",
        [*LLAMA, *ULYSSES, *TP, "--sp"],
    ),
    "zigzag and sp": ([*LLAMA, *ZIGZAG, *TP, "--sp"], "--cp-kind zigzag with --sp", "zigzag without it", [*LLAMA, *ZIGZAG, *TP]),
    "ring and flat": ([*LLAMA, *RING, *FLAT], "--shards flat with --cp-kind ring", "or --cp-kind ulysses", [*LLAMA, *ULYSSES, *FLAT]),
    "zigzag and uneven": (
        [*LLAMA, *ZIGZAG, *CHUNK, "--dp", "3"],
        "--shards chunk with --cp-kind zigzag",
        "--shards parameter goes with it",
        [*LLAMA, *ZIGZAG, *CHUNK, "--dp", "2"],
    ),
    "tp and flat": (
        [*LLAMA, *TP, *FLAT, "--dp", "2"],
        "--shards flat with --tp",
        "--shards parameter goes with --tp",
        [*LLAMA, *FLAT, "--dp", "2"],
    ),
    "tp and uneven": (
        [*LLAMA, *TP, *CHUNK, "--dp", "3"],
        "--shards chunk with --tp",
        "which do not divide among 3 ranks",
        [*LLAMA, *TP, *CHUNK, "--dp", "2"],
    ),
    "stacked": (
        ["gpt2-xl", "--layers", "1", "--dp", "3", "--zero", "2", "--shards", "chunk"],
        "--shards chunk with GPT on 3 data-parallel ranks",
        "--shards parameter and --shards flat work",
        ["gpt2-xl", "--layers", "1", "--dp", "3", "--zero", "2"],
    ),
    "latent": (
        [*DEEPSEEK, *FLAT, "--dp", "2"],
        "--shards flat with DeepSeek",
        "--shards parameter cuts",
        [*DEEPSEEK, "--zero", "1", "--dp", "2"],
    ),
    "latent chunks": (
        [*DEEPSEEK, *CHUNK, "--dp", "2"],
        "--shards chunk with DeepSeek",
        "--shards parameter cuts",
        [*DEEPSEEK, "--dp", "2"],
    ),
    "padding": (
        [*LLAMA, *FLAT, "--dp", "12"],
        "--shards flat on 12 data-parallel ranks",
        "another number of ranks",
        [*LLAMA, *FLAT, "--dp", "11"],
    ),
}


@pytest.mark.parametrize("name", NOT_PROVED)
def test_what_is_not_proved_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Not after minutes: before anything is verified, with what works instead."""
    asked, options, instead, near = NOT_PROVED[name]
    for command in (["zoo"], ["verify", "--zoo"]):
        assert run([*command, *asked]) == 2
        printed = capsys.readouterr()
        assert (printed.out, printed.err.count("\n")) == ("", 1)
        assert options in printed.err
        assert "is not supported" in printed.err
        assert instead in printed.err
    assert run(["verify", "--zoo", *near, "--points", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "PROVED"


def test_eight_thousand_ranks_are_built_in_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    """The text of the plan grows with layers and micro-batches, not with ranks: a quarter of the micro-batches of a real run here."""
    options = ["--dp", "64", "--tp", "8", "--pp", "16", "--microbatches", "4", "--zero", "1", "--layers", "32"]
    assert run(["zoo", "llama3-405b", *options, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["ranks"], made["findings"]) == (8192, [])
    assert made["seconds"] < 30
