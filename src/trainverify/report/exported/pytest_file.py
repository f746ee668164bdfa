"""The whole file of an exported test, and the inputs of one that was exported before."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from trainverify.domains.arrays import Array
from trainverify.evaluate.example import Example
from trainverify.refusal import Refused
from trainverify.report.exported.expressions import Writer
from trainverify.report.exported.programs import check_lines, given_lines, logical_lines, plan_lines

MARK = "Exported by trainverify."
_LONGEST = 20_000_000  # characters of a file that is read
_FUNCTIONS = {
    "erf": """
erf = np.vectorize(math.erf, otypes=[float])
""",
    "gather": '''
def gather(x, ids, axis):
    """Elements by number along an axis; 0 where the number is out of range."""
    inside = (ids >= 0) & (ids < x.shape[axis])
    return np.where(inside, np.take_along_axis(x, np.where(inside, ids, 0), axis=axis), 0)
''',
    "uniform": '''
def uniform(key, offset, index):
    """A number in (0, 1), a fixed function of its arguments (splitmix64)."""
    u = np.uint64
    key, offset, index = (np.asarray(a).astype(u) for a in (key, offset, index))
    z = key * u(0x9E3779B97F4A7C15) + offset * u(0xD1B54A32D192ED03) + index * u(0xA0761D6478BD642F) + u(0x632BE59BD9B4E019)
    for _ in range(2):
        z = (z ^ (z >> u(30))) * u(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> u(27))) * u(0x94D049BB133111EB)
        z = z ^ (z >> u(31))
    return (u(2) * (z >> u(11)) + u(1)).astype(float) / 2.0**54
''',
}
_TEST = """
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("obligation", OBLIGATIONS)
def test_ranks_hold_what_one_device_computes(obligation):
    given = {name: np.array(values) for name, values in INPUTS.items()}
    seen = 0
    for name, rank, got, want in compared(logical(given), plan(given)):
        if name == obligation:
            seen += 1
            scale = max(1e-300, float(np.abs(want).max(initial=0.0)))
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-9 * scale, err_msg=f"{name} on rank {rank}: got, then want")
    assert seen
"""


@dataclass(frozen=True)
class Earlier:
    """What an exported test says."""

    inputs: Mapping[str, Array]
    obligations: tuple[str, ...]


def exported(example: Example, about: str, hints: Iterable[str] = ()) -> str:
    """A pytest module that compares what all ranks compute with what one device does. It needs NumPy and pytest only."""
    writer = Writer()
    logical = logical_lines(example.small, writer)
    given = list(given_lines(example))
    plan = list(plan_lines(example.small, writer))
    checks = list(check_lines(example))
    ranks = len(example.small.places)
    text = [
        f'"""{_plain(f"{MARK} {about}")}\n\n{_plain_lines(hints)}"""',
        "\n" + ("import math\n\n" if "erf" in writer.used else "") + "import numpy as np\nimport pytest\n",
        f"OBLIGATIONS = {[str(o) for o in example.wanted]!r}",
        "INPUTS = {",
        *(f"    {name!r}: {value.tolist()!r}," for name, value in example.inputs.items()),
        "}\n",
        *(_FUNCTIONS[name] for name in sorted(writer.used)),
        _function("logical(given)", "The training step on one device: all tensors by name.", ["v = dict(given)", *logical, "return v"]),
        _function(
            "plan(given)",
            f"What {ranks} ranks compute, each from its own part of the same inputs: rank → tensors by name.",
            [f"ranks = {{r: {{}} for r in {sorted(example.small.places)}}}", *given, *plan, "return ranks"],
        ),
        _function("compared(whole, ranks)", "Obligation, rank, what the rank holds, what it should hold.", checks),
        _TEST,
    ]
    made = "\n".join(text)
    ast.parse(made)  # what Python cannot read is not handed out
    return made


def _function(head: str, text: str, lines: list[str]) -> str:
    return f'\ndef {head}:\n    """{text}"""\n' + textwrap.indent("\n".join(lines), "    ") + "\n"


def _plain(text: str) -> str:
    """Text for a docstring: printable, without quotes that would end it."""
    return "".join(c if c.isprintable() and c != "\\" else "?" for c in text).replace('"', "'")


def _plain_lines(lines: Iterable[str]) -> str:
    return "".join(f"{_plain(line)}\n" for line in lines)


def earlier(text: str, where: str) -> Earlier:
    """Inputs and obligations of a file that was exported; nothing in it is run."""
    if len(text) > _LONGEST:
        raise Refused(f"{where}: too long for an exported test")
    try:
        tree = ast.parse(text)
        found = {
            node.targets[0].id: ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in ("INPUTS", "OBLIGATIONS")
        }
        inputs = {str(n): np.asarray(v) for n, v in found["INPUTS"].items()}
        names = tuple(str(o) for o in found["OBLIGATIONS"])
    except (SyntaxError, ValueError, KeyError, AttributeError, TypeError, MemoryError, RecursionError) as error:
        raise Refused(f"{where}: not a test that trainverify exported") from error
    if any(v.dtype.kind not in "fib" for v in inputs.values()):
        raise Refused(f"{where}: an input that is not made of numbers")
    return Earlier(inputs, names)
