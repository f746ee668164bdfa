"""Expressions with neighbours exchanged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trainverify.prove.staged.graphs import Place
from trainverify.prove.staged.records import Part

BEFORE = {"tasks": (), "short": {}, "identical": 0, "partial": False, "foreign": False, "in_parts": False}


def swapped(part: Part, place: Place) -> Part:
    """Two elements of a leaf exchanged."""
    ids, factor = part.leaves[place]
    return replace(part, leaves={**part.leaves, place: (np.concatenate([ids[1:2], ids[:1], ids[2:]]), factor)})
