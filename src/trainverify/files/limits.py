"""How much a file may hold. What a reader accepts is bounded before it is built."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that `read` enforces; those that a reader could exceed by far are checked before memory is spent."""

    file_bytes: int = 256 << 20  # on disk
    text_bytes: int = 512 << 20  # decompressed, checked while decompressing
    depth: int = 32  # nested lists and objects
    nesting: int = 16  # lists inside of one attribute
    values: int = 50_000_000  # JSON values of any kind, counted before parsing
    expanded: int = 20_000_000  # items that ranges and runs stand for, all together
    ranks: int = 1 << 20  # size of the mesh
    templates: int = 100_000
    tensors: int = 5_000_000  # of all tensor tables together
    ops: int = 5_000_000  # of all op lists together
    inlined_ops: int = 50_000_000  # of one program, after inlining its calls
    functions: int = 100_000
    groups: int = 2_000_000
    columns: int = 1_000_000  # bindings of all templates together
    layouts: int = 5_000_000
    edits: int = 1_000_000
    name: int = 1_000  # characters of a name
    string: int = 100_000  # characters of any other string
    dimensions: int = 32  # of a tensor
    elements: int = 1 << 60  # of a tensor
