"""Which instances meet in a communication, and where in their programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainverify.axes.system import MeetingAxes, System
from trainverify.prove.algebra.folding import Instance


class Meetings:
    def __init__(self, system: System, instances: Sequence[Instance]):
        self.system = system
        self.instances = instances
        self.by_class: dict[int, list[int]] = {}
        for i, instance in enumerate(instances):
            self.by_class.setdefault(instance.class_index, []).append(i)
        self.at = {(c, self.op(c, e)): meeting for meeting in system.meetings for c, e in meeting.step}  # by class and op
        self._parties: dict[object, dict[int, list[int]]] = {}

    def op(self, class_index: int, nth: int) -> int:
        """The place in its program of the nth communication of a class."""
        return self.system.talking[self.system.schedule.classes[class_index].unit][nth]

    def parties(self, meeting: MeetingAxes) -> dict[int, list[int]]:
        """Who meets whom: instances that share everything but the coordinates along the group."""
        ops, along = dict(meeting.ops), meeting.mesh_axes
        known: object = None if along is None else (along, *ops)
        if known is not None and known in self._parties:
            return self._parties[known]
        parties: dict[object, list[int]] = {}
        for i in (i for c in ops for i in self.by_class[c]):
            key: object
            if along is not None:
                key = tuple((a, c) for a, c in self.instances[i].fixed if a not in along)
            else:
                key = self.system.talk.value(self.instances[i].rank, ops[self.instances[i].class_index].get("group"))
            parties.setdefault(key, []).append(i)
        found = {i: party for party in parties.values() for i in party}
        if known is not None:
            self._parties[known] = found
        return found

    def messages(self, meeting: MeetingAxes) -> Iterator[tuple[int, str, int, str]]:
        """Of a message between classes: who sends which tensor to whom, and what it is called there."""
        (c, send), (d, recv) = sorted(meeting.ops, key=lambda m: m[1].name != "send")
        for i in self.by_class[c]:
            peer = self.system.talk.value(self.instances[i].rank, send.get("peer"))
            assert isinstance(peer, int)
            at = self.system.plan.mesh.coordinates(peer)
            for j in self.by_class[d]:
                if all(at[a] == x for a, x in self.instances[j].fixed):
                    yield i, str(send.inputs[0]), j, recv.outputs[0]
