"""The scan before parsing sees the depth that a parser sees, wherever its pieces end."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainverify.files import text
from trainverify.files.errors import Bad
from trainverify.files.limits import Limits

strings = st.text(st.sampled_from('[]{}",:\\ \nax'), max_size=5)
trees = st.recursive(st.none() | st.integers() | strings, lambda t: st.lists(t, max_size=3) | st.dictionaries(strings, t, max_size=3))


def depth(tree: Any) -> int:
    return 1 + max(map(depth, tree.values() if isinstance(tree, dict) else tree), default=0) if isinstance(tree, dict | list) else 0


def count(tree: Any) -> int:
    return 1 + sum(map(count, tree.values() if isinstance(tree, dict) else tree)) if isinstance(tree, dict | list) else 1


@given(trees, st.integers(1, 9))
@settings(deadline=None, max_examples=200)
def test_the_scan_agrees_with_the_parser(tree: Any, chunk: int) -> None:
    data = json.dumps(tree).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "_CHUNK", chunk)
        text.check_structure(data, Limits(depth=depth(tree), values=2 * count(tree)))
        if depth(tree):
            with pytest.raises(Bad, match="nested more than"):
                text.check_structure(data, Limits(depth=depth(tree) - 1))
            with pytest.raises(Bad, match="values"):
                text.check_structure(data, Limits(values=count(tree) - 1))


def test_the_scan_says_where() -> None:
    with pytest.raises(Bad, match="nested more than 2 deep at byte 12"):
        text.check_structure(b'{"[[[[\\"": [[]]}', Limits(depth=2))
