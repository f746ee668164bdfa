"""The schema describes what is written, and the documentation's examples are files."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings

from files.contents import plans, programs
from files.rejected import IN_PLAN, IN_PROGRAM, PLAN, PROGRAM, changed
from trainverify import files
from trainverify.files.encode import encode
from trainverify.graph.plan import Plan, expand
from trainverify.graph.program import Program

DOCUMENT = (Path(__file__).parents[2] / "docs" / "format.md").read_text("utf-8")
SCHEMA = jsonschema.Draft202012Validator(files.schema())
EXAMPLES = [json.loads(text) for text in re.findall(r"```json\n(.*?)```", DOCUMENT, re.DOTALL)]


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(files.schema())


@given(programs() | plans())
@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
def test_what_is_written_fits_the_schema(content: Program | Plan) -> None:
    SCHEMA.validate(encode(content))


# The schema cannot say these: references, sums and limits over the whole file, and the difference of 1 and 1.0.
BEYOND = re.compile(
    "no tensor|no function|given twice|is not in|no axis|no dp=|values for|characters that do not print|runs another|runs no program"
    "|calls itself|already|more than|got 2.0|got 1.0|the limit is|starts for|a run past|surrogate|pattern '|shard: 32"
    "|is not a JSON number|source such as"
)


@pytest.mark.parametrize(("base", "cases"), [(PROGRAM, IN_PROGRAM), (PLAN, IN_PLAN)])
def test_the_schema_refuses_what_the_reader_refuses(base: Any, cases: Any) -> None:
    SCHEMA.validate(base)
    for path, value, line in cases:
        if not BEYOND.search(line):
            assert not SCHEMA.is_valid(changed(base, path, value)), line


def test_examples_of_the_documentation(tmp_path: Path) -> None:
    program, plan, layouts = EXAMPLES
    for name, tree in (("program", program), ("plan", plan), ("layouts", {**plan, "lineage": layouts})):
        (tmp_path / name).write_text(json.dumps(tree))
        SCHEMA.validate(tree)
        content = files.read(tmp_path / name)
        files.write(tmp_path / "again", content)
        assert files.read(tmp_path / "again") == content
    read = files.read_plan(tmp_path / "plan")
    assert [op.name for op in expand(read, 3).ops] == ["linear", "all_reduce", "sum", "identity"]
    assert expand(read, 2).ops[1].get("group") == "tp.1"
    assert {x.logical for x in read.lineage} <= set(files.read_program(tmp_path / "program").tensors)


def test_the_documentation_names_every_field_and_limit() -> None:
    for definition in files.schema()["$defs"].values():
        for part in definition.get("oneOf", [definition]):
            for field in part.get("properties", ()):
                assert f"`{field}`" in DOCUMENT or f'"{field}"' in DOCUMENT, field
    for limit in dataclasses.fields(files.Limits):
        assert f"| `{limit.name}` | {limit.default} |" in DOCUMENT
