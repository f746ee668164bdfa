"""Whatever the bytes are, reading succeeds or gives a one-line error, quickly and in little memory."""

from __future__ import annotations

import copy
import gzip
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from files.big import big_plan
from files.rejected import PLAN, PROGRAM
from trainverify import files

SMALL = files.Limits(text_bytes=1 << 20, expanded=10_000)


def outcome(path: Path, data: bytes) -> Any:
    """What reading gives, or None; anything but success and `FileError` fails the test."""
    path.write_bytes(data)
    try:
        return files.read(path, SMALL)
    except files.FileError as e:
        line = str(e)
        assert line.isprintable(), line
        assert line.startswith(str(path))
        assert len(line) < 1100
        return None


@pytest.mark.parametrize("seed", range(4))
def test_changed_bytes(tmp_path: Path, seed: int) -> None:
    random_ = random.Random(seed)
    text = json.dumps((PROGRAM, PLAN)[seed % 2], indent=1 if seed == 0 else None).encode()
    base = gzip.compress(text, mtime=0) if seed == 3 else text
    pieces = [
        b'"',
        b"\\",
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b"null",
        b"-1",
        b"1e999",
        b"\xff",
        b"\0",
        b"NaN",
        b"9" * 30,
        b"\\ud800",
        b'"op"',
    ]
    for _ in range(700):
        data = bytearray(base)
        for _ in range(random_.choice([1, 1, 2, 5])):
            at = random_.randrange(len(data) + 1)
            match random_.randrange(5):
                case 0:
                    data[at : at + 1] = bytes([random_.randrange(256)])
                case 1:
                    data[at:at] = random_.choice(pieces)
                case 2:
                    del data[at : at + random_.randrange(1, 20)]
                case 3:
                    other = random_.randrange(len(data) + 1)
                    data[at:at] = data[other : other + random_.randrange(1, 60)]
                case 4:
                    del data[at:]
        outcome(tmp_path / "f", bytes(data))


def test_every_truncation(tmp_path: Path) -> None:
    for base in (json.dumps(PLAN).encode(), gzip.compress(json.dumps(PLAN).encode(), mtime=0)):
        for length in range(0, len(base), 3):
            assert outcome(tmp_path / "f", base[:length]) is None


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every container with every key in it."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from places(tree[key])


VALUES: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        6,
        2**31,
        2**63,
        2**64,
        10**40,
        0.5,
        1.0,
        -0.0,
        1e300,
        "",
        "x",
        "y",
        "f",
        "h",
        "tp",
        "sum",
        "call",
        "f32[2]",
    ),
    *([], {}, [0], [[]], ["x"], [None], {"ref": "r"}, {"fraction": "1/3"}, {"float": "nan"}, {"range": [0, 3, 1]}, {"range": [9, 0, -3]}),
    *({"runs": [["a", 3]]}, {"shard": 0}, [["dp", 1]], [0, 1, 2], "replicate", "(tp a)", "m.py:3", "\ud800", "\x00"),
]


@pytest.mark.parametrize("seed", range(4))
def test_changed_trees(tmp_path: Path, seed: int) -> None:
    """Also: what the reader accepts, the schema accepts."""
    random_ = random.Random(100 + seed)
    schema = jsonschema.Draft202012Validator(files.schema())
    accepted = 0
    for _ in range(700):
        tree = copy.deepcopy((PROGRAM, PLAN)[seed % 2])
        for _ in range(random_.choice([1, 1, 1, 2, 4])):
            here, key = random_.choice(list(places(tree)))
            match random_.randrange(5):
                case 0:
                    del here[key]
                case 1 if isinstance(here, list):
                    here.insert(key, copy.deepcopy(random_.choice(here)))
                case 1 | 2 if isinstance(here, dict):
                    here[random_.choice([*here, "x", "attrs", "local", ""])] = copy.deepcopy(here[key])
                case 3:
                    other, name = random_.choice(list(places(tree)))
                    here[key] = copy.deepcopy(other[name])
                case _:
                    here[key] = copy.deepcopy(random_.choice(VALUES))
            if not tree:
                break
        found = outcome(tmp_path / "f.json", json.dumps(tree).encode())
        if found is not None:
            accepted += 1
            schema.validate(tree)
            files.write(tmp_path / "g.json", found)  # what was read can be written and read again
            assert files.read(tmp_path / "g.json") == found or "nan" in repr(found)
    assert accepted > 20


BOMBS = {"spaces": b" " * (1 << 20), "lists": b"[]," * (1 << 18), "names": b'"x":1,' * (1 << 17)}


@pytest.mark.parametrize("kind", BOMBS)
def test_compression_bombs_stop_early(tmp_path: Path, kind: str) -> None:
    """Hundreds of megabytes behind a few hundred kilobytes; the reader stops at its limit."""
    with gzip.open(tmp_path / "bomb.json.gz", "wb", 1) as f:
        for _ in range(256):
            f.write(BOMBS[kind])
    text, limits = "more than 67108864 bytes decompressed", "text_bytes=64 << 20"
    if kind == "lists":  # below the limit in bytes, but far too many values
        text, limits = "more than 1000000 values", "text_bytes=1 << 28, values=1_000_000"
    code = (
        "import sys, resource\n"
        "from trainverify import files\n"
        "import numpy\n"
        "resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"try: files.read(sys.argv[1], files.Limits({limits}))\n"
        "except files.FileError as e: print(e.reason)\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)\n"
    )
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "bomb.json.gz")], capture_output=True, text=True, timeout=60, check=True
    )
    reason, grown = done.stdout.splitlines()
    assert reason == text
    assert int(grown) < (600 if kind == "lists" else 200)
    assert time.monotonic() - started < 30


def test_a_small_file_cannot_ask_for_much(tmp_path: Path) -> None:
    """Ranges and runs are counted before they are built."""
    tree = {
        "format": "trainverify",
        "version": 1,
        "kind": "plan",
        "name": "p",
        "mesh": [["dp", 1 << 20]],
        "templates": [],
        "groups": {f"g{i}": {"range": [0, 1 << 20, 1]} for i in range(1000)},
    }
    path = tmp_path / "f.json"
    path.write_text(json.dumps(tree))
    with pytest.raises(files.FileError) as e:
        files.read(path, files.Limits(expanded=3 << 20))
    assert str(e.value) == f"{path}: groups.g3.range: more than 3145728 items in ranges and runs"


def test_a_large_plan(tmp_path: Path) -> None:
    """A tenth of 16 programs × 5,000 ops on 8,192 ranks, in a tenth of the time that the whole may take, and some slack."""
    plan = big_plan(templates=4, ops=2000, ranks=8192)
    started = time.process_time()
    files.write(tmp_path / "f.json.gz", plan)
    assert files.read_plan(tmp_path / "f.json.gz") == plan
    assert time.process_time() - started < 5
    assert (tmp_path / "f.json.gz").stat().st_size < 1 << 20
