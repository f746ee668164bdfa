"""Axes made of pieces take part in products: blocks of several pieces, cut alike."""

from __future__ import annotations

from trainverify.axes.structure import Axes, Axis


def sizes(axes: Axes, axis: Axis) -> list[int]:
    return [a.size for a in axes.leaves([axis])]


def test_equal_pieces_are_split_over_two_mesh_axes() -> None:
    axes, whole = Axes(), Axis(8192)
    for start in range(0, 8192, 1024):
        axes.piece(whole, start, 1024)
    local = Axis(1024)
    axes.align([whole], [Axis(2, fixed=True), Axis(4, fixed=True), local])
    assert not axes.clashes
    assert sizes(axes, whole) == [2, 4, 1024]
    assert axes.leaves([whole])[-1] is local.root()


def test_unequal_pieces_repeat() -> None:
    axes, whole = Axes(), Axis(12)
    for cut in (1, 6, 7):
        axes.cut(whole, cut)
    axes.align([whole], [Axis(2), Axis(6)])
    assert not axes.clashes
    assert sizes(axes, whole) == [2, 6]
    assert [p.size for p in axes.leaves([whole])[1].pieces or ()] == [1, 5]


def test_blocks_that_are_cut_differently_clash() -> None:
    axes, whole = Axes(), Axis(12)
    for cut in (1, 6, 8):
        axes.cut(whole, cut)
    axes.align([whole], [Axis(2), Axis(6)])
    assert axes.clashes
