"""Memory: which tensor of the program every element of a storage holds now.

A storage is a list of pieces. A read of a view is a box of one piece, or of the pieces it touches joined end to end; a write of a
dense view is a new piece, any other write replaces a box of what is there. So views need no ops, in-place ops need no special case,
and flat buckets come out as concatenations and slices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from trainverify.graph.types import TensorType
from trainverify.torch.values import Unknown, Unmapped, Value
from trainverify.torch.views import Digit, View, box, is_dense, reading, writing
from trainverify.translate.emit import Emitter, Place

BOXES: Final = 64  # that a view which is no box of memory is read as
LEFT: Final = "a value that the step before computed and left in memory, no tensor of a model or an optimizer"


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements start … stop of a storage are those of `value`, which lies densely as `block`."""

    start: int
    stop: int
    value: Value
    block: View
    dtype: str
    place: Place = field(default_factory=Place, compare=False)  # where it was written
    old: bool = False  # before the step


@dataclass
class Storage:
    pieces: list[Piece] = field(default_factory=list)
    seen: dict[View, str] = field(default_factory=dict)  # views that were read since the last write
    version: int = 0


class Memory:
    def __init__(self, emitter: Emitter):
        self.emitter = emitter
        self.storages: dict[int, Storage] = {}
        self.old_reads: dict[int, list[tuple[int, int]]] = {}  # ranges that the step reads as they were before it
        self.left_reads: list[tuple[Place, int]] = []  # where values are read that the step before left, no state of it; how many
        self.viewed: dict[tuple[int, View], Place] = {}  # views that the user made, and where

    def storage(self, key: int) -> Storage:
        return self.storages.setdefault(key, Storage())

    def begin(self) -> None:
        """The step starts: what is there is older than it."""
        for storage in self.storages.values():
            storage.pieces = [replace(p, old=True) for p in storage.pieces]

    def values(self) -> set[str]:
        """The tensors of the program that some memory holds."""
        return {p.value for s in self.storages.values() for p in s.pieces if isinstance(p.value, str)}

    def renew(self, emitter: Emitter, names: Mapping[str, str]) -> None:
        """The next step is written by another emitter: what it has by another name is there, all else has no value any more."""

        def renewed(p: Piece) -> Piece:
            if isinstance(p.value, Unknown):
                return p if p.value.pending is None else replace(p, value=Unknown(LEFT, p.value.source))
            found = names.get(p.value)
            return replace(p, value=Unknown(LEFT, p.place.source) if found is None else found)

        self.emitter = emitter
        self.old_reads.clear()
        self.left_reads = []
        for storage in self.storages.values():
            storage.pieces = [renewed(p) for p in storage.pieces]
            storage.seen.clear()

    def settle(self, gone: Collection[str], names: Mapping[str, str], why: Mapping[str, Unknown]) -> None:
        """Tensors get other names, or no value."""
        first = next(iter(why.values()))
        for storage in self.storages.values():
            storage.seen.clear()
            storage.pieces = [
                replace(p, value=names[p.value])
                if isinstance(p.value, str) and p.value in names
                else replace(p, value=why.get(str(p.value), first))
                if p.value in gone
                else p
                for p in storage.pieces
            ]

    def constants_beside(self, keys: Collection[int]) -> list[tuple[int, Piece]]:
        """What follows from constants in storages that also hold sources: padding, say."""
        found = [(key, p) for key in keys for p in self.storage(key).pieces if isinstance(p.value, str)]
        return [(key, p) for key, p in found if self.emitter.is_constant(str(p.value))]

    def drop(self, keys: Collection[int]) -> None:
        """Storages that are gone: their addresses may be those of others."""
        for key in keys:
            self.storages.pop(key, None)
        self.viewed = {at: place for at, place in self.viewed.items() if at[0] not in keys}

    def forget(self, key: int) -> None:
        """The memory of a storage was given back."""
        self.storages[key] = Storage(version=self.storage(key).version + 1)

    # -- reading ------------------------------------------------------------------------------------------------------

    def read(self, key: int, view: View, dtype: str) -> Value:
        """The tensor that a view shows."""
        storage = self.storage(key)
        if not view.size:
            return self.emitter.full(view.shape, 0, dtype)
        if view in storage.seen:
            name = storage.seen[view]
            if self.emitter.tensors[name].dtype == dtype:
                return name
        touched = [p for p in storage.pieces if p.start < view.stop and view.offset < p.stop]
        old = [(max(p.start, view.offset), min(p.stop, view.stop)) for p in touched if p.old]
        if old:
            self.old_reads.setdefault(key, []).extend(old)
        for p in touched:
            if isinstance(p.value, Unknown):
                if p.value.reason == LEFT:
                    self.left_reads.append((self.emitter.place, view.size))
                return p.value
            if p.dtype != dtype:
                return Unknown(f"memory written as {p.dtype} is read as {dtype}")
        if len(touched) == 1 and touched[0].start <= view.offset and view.stop <= touched[0].stop:
            found = self._of_piece(touched[0], view, self.viewed.get((key, view)))
        else:
            joined = self._joined(touched, view)
            found = joined if isinstance(joined, Unknown) else self._of_piece(joined, view, self.viewed.get((key, view)))
        if isinstance(found, str):
            storage.seen[view] = found
        return found

    @contextlib.contextmanager
    def unnoted(self) -> Iterator[None]:
        """Reads that are not the step's: they leave no note of what the step before left."""
        old, left = {key: list(ranges) for key, ranges in self.old_reads.items()}, list(self.left_reads)
        try:
            yield
        finally:
            self.old_reads, self.left_reads = old, left

    def has_values(self, key: int, view: View) -> bool:
        """Whether some of what a view shows has a value."""
        return any(isinstance(p.value, str) for p in self.storage(key).pieces if p.start < view.stop and view.offset < p.stop)

    def written(self, key: int, view: View) -> Place | None:
        """Where the first of what a view shows was written."""
        return next((p.place for p in self.storage(key).pieces if p.start < view.stop and view.offset < p.stop), None)

    def _of_piece(self, piece: Piece, view: View, made: Place | None = None, most: int = BOXES) -> Value:
        assert isinstance(piece.value, str)
        if piece.block == view:
            return piece.value
        found = box(view, piece.block)
        if found is None:
            return self._of_boxes(piece, view, made, most) or Unknown(
                f"view {list(view.shape)} with strides {list(view.stride)} of a tensor {list(piece.block.shape)} is no box of it"
            )
        label, self.emitter.label = self.emitter.label, "view"
        place, self.emitter.place = self.emitter.place, made or self.emitter.place
        try:
            return self.emitter.steps(piece.value, reading(found, piece.block))
        finally:
            self.emitter.label, self.emitter.place = label, place

    def _of_boxes(self, piece: Piece, view: View, made: Place | None, most: int) -> str | None:
        """A view that shows elements several times, as boxes side by side: one for every position of its shortest dimension."""
        d = min((d for d, s in enumerate(view.shape) if s > 1 and view.stride[d]), key=lambda d: view.shape[d], default=None)
        if d is None or view.shape[d] > most or not view.size:
            return None
        shape, stride = (v[:d] + v[d + 1 :] for v in (view.shape, view.stride))
        parts: list[str] = []
        for i in range(view.shape[d]):
            part = self._of_piece(piece, View(view.offset + i * view.stride[d], shape, stride), made, most // view.shape[d])
            if isinstance(part, Unknown):
                return None
            parts.append(part)
        return self.emitter.op("stack", parts, {"dim": d})

    def _joined(self, touched: list[Piece], view: View) -> Piece | Unknown:
        """The pieces that a view touches, whole, flat and end to end."""
        if not touched or touched[0].start > view.offset or touched[-1].stop < view.stop:
            return Unknown("memory that was never written is read")
        parts: list[str] = []
        for before, p in zip([None, *touched], touched, strict=False):
            if before is not None and before.stop != p.start:
                return Unknown("memory that was never written is read")
            part = self._of_piece(p, View(p.start, (p.stop - p.start,), (1,)))
            if isinstance(part, Unknown):
                return part
            parts.append(part)
        name = parts[0] if len(parts) == 1 else self.emitter.op("concat", parts, {"dim": 0})
        start, stop = touched[0].start, touched[-1].stop
        return Piece(start, stop, name, View(start, (stop - start,), (1,)), touched[0].dtype)

    # -- writing ------------------------------------------------------------------------------------------------------

    def write(self, key: int, view: View, dtype: str, value: Value) -> None:
        """From now on the view shows `value`."""
        if not view.size:
            return
        storage = self.storage(key)
        storage.version += 1
        if view.repeats:
            value = Unknown("a write to elements that are shown several times")
        if is_dense(view):
            self.place(key, Piece(view.offset, view.stop, value, view, dtype, self.emitter.place))
            return
        touched = [p for p in storage.pieces if p.start < view.stop and view.offset < p.stop]
        self.place(key, replace(self._replaced(touched, view, dtype, value), place=self.emitter.place))

    def _replaced(self, touched: list[Piece], view: View, dtype: str, value: Value) -> Piece:
        """What a write with gaps makes of the pieces it touches."""
        whole = View(view.offset, (view.stop - view.offset,), (1,))
        unknown = next((p.value for p in touched if isinstance(p.value, Unknown)), None)
        if isinstance(value, Unknown) or unknown is not None or any(p.dtype != dtype for p in touched):
            why = value if isinstance(value, Unknown) else unknown or Unknown("memory of another dtype is written")
            return Piece(view.offset, view.stop, why, whole, dtype)
        single = len(touched) == 1 and touched[0].start <= view.offset and view.stop <= touched[0].stop
        piece: Piece | Unknown = touched[0] if single else self._joined(touched, view)
        if isinstance(piece, Unknown):
            return Piece(view.offset, view.stop, piece, whole, dtype)
        found = box(view, piece.block, split_steps=True)
        if found is None or isinstance(piece.value, Unknown):
            return Piece(
                view.offset, view.stop, Unknown(f"a write to a view {list(view.shape)} that is no box of its memory"), whole, dtype
            )
        how = writing(found, piece.block)
        e = self.emitter
        made = _replace_box(e, e.steps(piece.value, how.to_digits), e.steps(value, how.of_value), how.digits, 0)
        return replace(piece, value=e.steps(made, how.back), old=False)

    def place(self, key: int, piece: Piece) -> None:
        storage, kept = self.storage(key), []
        for p in storage.pieces:
            if p.stop <= piece.start or piece.stop <= p.start:
                kept.append(p)
                continue
            if p.start < piece.start:
                kept.append(replace(p, stop=piece.start))
            if piece.stop < p.stop:
                kept.append(replace(p, start=piece.stop))
        kept.append(piece)
        storage.pieces = sorted(kept, key=lambda p: p.start)
        storage.seen = {v: n for v, n in storage.seen.items() if v.stop <= piece.start or piece.stop <= v.offset}


def _replace_box(e: Emitter, x: str, value: str, digits: tuple[Digit, ...], at: int) -> str:
    """x with a box of it replaced: one concatenation for every dimension that is cut."""
    while at < len(digits) and (digits[at].start, digits[at].count) == (0, digits[at].size):
        at += 1
    if at == len(digits):
        return value
    d = digits[at]

    def cut(tensor: str, start: int, end: int) -> str:
        return e.op("slice", (tensor,), {"dim": at, "start": start, "stop": end})

    width = d.count if d.step == 1 else 1
    parts, done = [], 0
    for i in range(0, d.count, width):
        start = d.start + i * d.step
        if done < start:
            parts.append(cut(x, done, start))
        new = value if width == d.count else cut(value, i, i + 1)
        parts.append(_replace_box(e, cut(x, start, start + width), new, digits, at + 1))
        done = start + width
    if done < d.size:
        parts.append(cut(x, done, d.size))
    return e.op("concat", parts, {"dim": at})


def checked(e: Emitter, name: str, shape: tuple[int, ...], dtype: str) -> str:
    """A result with the shape and dtype that PyTorch gave it; another shape is refused."""
    kind = e.tensors[name]
    if kind.shape != shape:
        raise Unmapped(f"the mapping gives {kind}, PyTorch gives {TensorType(shape, dtype)}")
    return e.cast(name, dtype)
