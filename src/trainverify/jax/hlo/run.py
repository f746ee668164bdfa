"""Running through a partitioned HLO program: every instruction becomes operators, by the rows for JAX's primitives or as control flow."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from trainverify.graph.program import Phase
from trainverify.graph.types import TensorType
from trainverify.jax.constants import constant
from trainverify.jax.control import chosen
from trainverify.jax.hlo.rows import REDUCTIONS, call_of
from trainverify.jax.hlo.text import Aval, Computation, Instruction, Module, integers, literal, replica_groups
from trainverify.jax.interpret import MOST_STEPS, Interpreter, type_of
from trainverify.jax.lines import assigned, installed, source_of
from trainverify.jax.mappings.communication import together
from trainverify.jax.ranges import bounds
from trainverify.jax.values import DTYPES, Divergent, Grid, Number, Opaque, Value, times
from trainverify.translate.emit import Place, Unmapped
from trainverify.translate.groups import bind, by_members

Env = dict[str, Any]  # a value, or the list of values of a tuple
_NOTHING: Final = {"add": 0, "maximum": -np.inf, "minimum": np.inf, "and": 1, "or": 0, "multiply": 1}
_COLLECTIVES: Final = frozenset(("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"))
_CALLED: Final = ("to_apply", "condition", "body", "branch_computations", "true_computation", "false_computation", "calls")
_ALL: Final = {"add": "sum", "maximum": "max", "minimum": "min"}


def _signed(kind: Aval) -> Aval:
    return Aval(kind.shape, "int64") if kind.dtype.startswith("uint") and kind.dtype != "uint8" else kind


class HloInterpreter(Interpreter):
    """One pass over the partitioned program for the ranks of an emitter."""

    module: Module

    def entry(self, module: Module, given: Sequence[Value]) -> list[Value]:
        self.module = module
        found = self.computation(module.computations[module.entry], list(given))
        return found if isinstance(found, list) else [found]

    def computation(self, c: Computation, given: list[Any]) -> Any:
        env: Env = {}
        for i in c.instructions:
            env[i.name] = given[int(i.text)] if i.opcode == "parameter" else self.instruction(i, env)
        return env[c.root.name]

    def instruction(self, i: Instruction, env: Env) -> Any:
        place, label = self.e.place, self.e.label
        self.e.place, self.e.label = self._where(i)
        self.calls[i.opcode] += 1
        try:
            handler = getattr(self, "_" + i.opcode.replace("-", "_"), None)
            return handler(i, env) if handler is not None else self._row(i, env)
        except Unmapped as error:
            self.note(i.opcode, str(error))
            opaque = Opaque(f"{i.opcode}: {error}")
            return [opaque for _ in i.types] if i.is_tuple else opaque
        finally:
            self.e.place, self.e.label = place, label

    def _where(self, i: Instruction) -> tuple[Place, str]:
        meta = i.attrs.get("metadata", "")
        stack = re.search(r"stack_frame_id=(\d+)", meta)
        frames = self.module.frames.get(int(stack.group(1)), ()) if stack else ()
        own = [f for f in frames if not installed(f[0])] or list(frames)
        phase: Phase = "backward" if "transpose(" in meta else "forward"
        if not own:
            return Place(self.e.place.source, self.e.place.module, phase), i.opcode
        function = own[0][2].rpartition("<locals>.")[2].replace("<lambda>", "lambda").replace("<module>", "")
        source = source_of(tuple((f, n) for f, n, _ in own))
        return Place(source, function, phase), assigned(own[0][0], own[0][1]) or i.opcode

    def _row(self, i: Instruction, env: Env) -> Value:
        name, which, params = call_of(i)
        if i.opcode in ("gather", "scatter"):
            self._index_vector(i, env)
        values = [env[i.operands[k]] for k in which]
        types = [self._type(i.operands[k], env) for k in which]
        if i.opcode == "scatter" and self._combines(i) != "add":
            name = "scatter" if self._combines(i) == "" else name
            if self._combines(i):
                raise Unmapped(f"a scatter by {self._combines(i)}")
        return self._known_if_unsigned(i, self.apply(name, values, params, types, [_signed(t) for t in i.types])[0])

    def _known_if_unsigned(self, i: Instruction, value: Value) -> Value:
        """Unsigned integers wrap around: only those that are known, and do not, are followed."""
        if not i.types[0].dtype.startswith("uint") or isinstance(value, Opaque):
            return value
        found = bounds(self.e, value)
        if isinstance(value, str) or found is None or found[0] < 0 or found[1] >= 1 << 32:
            raise Unmapped("unsigned integers that are not known")
        return value

    def _index_vector(self, i: Instruction, env: Env) -> None:
        """JAX has the numbers of an index in the last dimension."""
        ids, at = env[i.operands[1]], int(i.attrs["index_vector_dim"])
        if isinstance(ids, Opaque):
            return
        shape = self._type(i.operands[1], env).shape
        if at == len(shape):
            kind = self._type(i.operands[1], env)
            wide = (*shape, 1)
            out = Aval(wide, next(k for k, v in DTYPES.items() if v == kind.dtype))
            env[i.operands[1]] = self.apply("reshape", [ids], {"new_sizes": wide, "dimensions": None}, [kind], [out])[0]
        elif at != len(shape) - 1:
            raise Unmapped("numbers of an index that are not in the last dimension")

    def _type(self, name: str, env: Env) -> TensorType:
        value = env[name]
        if isinstance(value, str):
            return self.e.tensors[value]
        if isinstance(value, Opaque | list):
            return TensorType(())
        return TensorType(value.shape, value.dtype)

    def _combines(self, i: Instruction) -> str:
        """The opcode that a region applies to its two arguments; empty if it gives the second one."""
        root = self.module.computations[i.attrs["to_apply"].lstrip("%")].root
        if root.opcode == "parameter":
            return "" if root.text == "1" else "first"
        region = self.module.computations[i.attrs["to_apply"].lstrip("%")]
        plain = len(region.instructions) == 3 and all(x.opcode == "parameter" for x in region.instructions if x is not root)
        return root.opcode if plain else "something else"

    # -- what has no row of JAX's -------------------------------------------------------------------------------------

    def _constant(self, i: Instruction, env: Env) -> Any:
        kind = _signed(i.types[0])
        if kind.dtype not in DTYPES:
            return Opaque(f"a constant of type {kind.dtype}")
        found = constant(
            np.array(literal(i.text), kind.dtype if kind.dtype != "bfloat16" else np.float32).reshape(kind.shape), self.literal
        )
        return self.e.closed_over(found, DTYPES[kind.dtype]) if isinstance(found, np.ndarray) else found

    def _tuple(self, i: Instruction, env: Env) -> Any:
        return [env[o] for o in i.operands]

    def _get_tuple_element(self, i: Instruction, env: Env) -> Any:
        return env[i.operands[0]][int(i.attrs["index"])]

    def _optimization_barrier(self, i: Instruction, env: Env) -> Any:
        return env[i.operands[0]]

    _opt_barrier = _optimization_barrier

    def _call(self, i: Instruction, env: Env) -> Any:
        return self.computation(self.module.computations[i.attrs["to_apply"].lstrip("%")], [env[o] for o in i.operands])

    def _conditional(self, i: Instruction, env: Env) -> Any:
        """A branch by its number (the last one by a number of none), or the first of two where a condition holds."""
        which, by_number = env[i.operands[0]], "branch_computations" in i.attrs
        names = i.attrs["branch_computations"].strip("{}").split(",") if by_number else []
        names = names or [i.attrs["false_computation"], i.attrs["true_computation"]]
        given = [env[o] for o in i.operands[1:]]
        bodies = [self.module.computations[n.strip().lstrip("%")] for n in names]
        if isinstance(which, Grid) and by_number and not 0 <= which.bounds()[0] <= which.bounds()[1] < len(bodies):
            raise Unmapped("a branch by a number of none")
        if not isinstance(which, Opaque | Grid) and any(self._communicates(b) for b in bodies):
            raise Unmapped("a condition on data with communication in a branch")

        def run(body: Computation, x: Any) -> list[Any]:
            found = self.computation(body, [x])
            return found if isinstance(found, list) else [found]

        branches = [partial(run, b, x) for b, x in zip(bodies, given if by_number else given[::-1], strict=True)]
        found = chosen(self.e, which, branches, len(i.types))
        return found if i.is_tuple else found[0]

    def _communicates(self, c: Computation) -> bool:
        named = (v.strip("{}").split(",") for x in c.instructions for k, v in x.attrs.items() if k in _CALLED)
        called = (self.module.computations[n.strip().lstrip("%")] for several in named for n in several)
        return any(x.opcode in _COLLECTIVES for x in c.instructions) or any(map(self._communicates, called))

    def _while(self, i: Instruction, env: Env) -> Any:
        test, body = (self.module.computations[i.attrs[n].lstrip("%")] for n in ("condition", "body"))
        state = env[i.operands[0]]
        for _ in range(MOST_STEPS):
            goes = self.computation(test, [state])
            if not isinstance(goes, Grid):
                raise Unmapped("a loop whose end depends on data")
            if goes.literal is None:
                raise Divergent(np.broadcast_to(goes.start, (len(self.e.ranks),)))
            if not goes.literal:
                return state
            state = self.computation(body, [state])
        raise Unmapped(f"a loop of more than {MOST_STEPS} steps")

    def _reduce(self, i: Instruction, env: Env) -> Any:
        combines = self._combines(i) if len(i.operands) == 2 else "several values"
        if combines not in REDUCTIONS:
            raise Unmapped(f"a reduction by {combines}")
        start = env[i.operands[1]]
        first = start.value if isinstance(start, Number) else start.literal if isinstance(start, Grid) else None
        if first != _NOTHING[combines]:
            raise Unmapped("a reduction that does not start with nothing")
        kind, params = self._type(i.operands[0], env), {"axes": integers(i.attrs["dimensions"])}
        return self.apply(REDUCTIONS[combines], [env[i.operands[0]]], params, [kind], i.types)[0]

    def _topk(self, i: Instruction, env: Env) -> Any:
        if i.attrs.get("largest") != "true":
            raise Unmapped("the smallest in place of the largest")
        given, kind = env[i.operands[0]], self._type(i.operands[0], env)
        return list(self.apply("top_k", [given], {"k": int(i.attrs["k"]), "axis": len(kind.shape) - 1}, [kind], i.types))

    def _partition_id(self, i: Instruction, env: Env) -> Any:
        found = np.array(self.e.ranks, np.int64)
        return Grid(found, (), (), "i64")

    def _replica_id(self, i: Instruction, env: Env) -> Any:
        return Grid(np.zeros(1, np.int64), (), (), "i64")

    # -- communication ------------------------------------------------------------------------------------------------

    def _groups(self, i: Instruction) -> tuple[list[str], int]:
        if i.opcode != "all-to-all" and i.attrs.get("use_global_device_ids") != "true":
            raise Unmapped("groups that are not of partitions")
        members = {r: g for g in replica_groups(i.attrs["replica_groups"], self.module.partitions) for r in g}
        names = []
        for rank in self.e.ranks:
            if rank not in members:
                raise Unmapped("a rank without a group")
            names.append(bind(self.e.groups, by_members("ranks", members[rank]), members[rank]))
        if len({len(g) for g in members.values()}) != 1:
            raise Unmapped("groups of different sizes")
        return names, len(members[self.e.ranks[0]])

    def _sent(self, i: Instruction, env: Env, k: int = 0) -> str:
        return self.e.tensor(env[i.operands[k]])

    def _all_reduce(self, i: Instruction, env: Env) -> Any:
        combines, (names, size) = self._combines(i), self._groups(i)
        if combines not in _ALL:
            raise Unmapped(f"an all-reduce by {combines}")
        found = []
        for k, o in enumerate(i.operands):
            x = env[o]
            if isinstance(x, Opaque) or size == 1:
                found.append(x)
            elif isinstance(x, Number) and together(self.e, names):
                found.append(Number(times(x.value, size) if combines == "add" else x.value, x.shape, x.dtype))
            else:
                name = self._sent(i, env, k)
                attrs: dict[str, Any] = {"group": names} | ({} if combines == "add" else {"op": _ALL[combines]})
                made = self.e.communicate("all_reduce", (name,), attrs, self.e.tensors[name])
                found.append(self.fitting(str(made), self.e.tensors[name]))
        return found if i.is_tuple else found[0]

    def _one(self, i: Instruction, env: Env, name: str, attrs: dict[str, Any]) -> Any:
        if isinstance(env[i.operands[0]], Opaque):
            return env[i.operands[0]]
        if len(i.operands) != 1 or i.is_tuple:
            raise Unmapped("several arrays at once")
        made = self.e.communicate(name, (self._sent(i, env),), attrs, type_of(i.types[0]))
        return self.fitting(str(made), type_of(i.types[0]))

    def _all_gather(self, i: Instruction, env: Env) -> Any:
        return self._one(i, env, "all_gather", {"group": self._groups(i)[0], "dim": integers(i.attrs["dimensions"])[0]})

    def _reduce_scatter(self, i: Instruction, env: Env) -> Any:
        if self._combines(i) != "add":
            raise Unmapped(f"a reduce-scatter by {self._combines(i)}")
        return self._one(i, env, "reduce_scatter", {"group": self._groups(i)[0], "dim": integers(i.attrs["dimensions"])[0]})

    def _all_to_all(self, i: Instruction, env: Env) -> Any:
        names, size = self._groups(i)
        if not i.is_tuple:
            dim = integers(i.attrs["dimensions"])[0]
            return self._one(i, env, "all_to_all", {"group": names, "split_dim": dim, "concat_dim": dim})
        if len(i.operands) != size:
            raise Unmapped("an exchange of fewer blocks than ranks")
        blocks = [self._sent(i, env, k) for k in range(size)]
        joined = self.e.op("stack", blocks, {"dim": 0})
        made = self.e.communicate("all_to_all", (joined,), {"group": names, "split_dim": 0, "concat_dim": 0}, self.e.tensors[joined])
        return [self.e.op("select", (str(made),), {"dim": 0, "index": k}) for k in range(size)]

    def _collective_permute(self, i: Instruction, env: Env) -> Any:
        if isinstance(env[i.operands[0]], Opaque):
            return env[i.operands[0]]
        found = [integers(p) for p in re.findall(r"\{(\d+,\d+)\}", i.attrs["source_target_pairs"])]
        params = {"axis_name": self.e.mesh.names, "perm": found}
        return self.apply("ppermute", [env[i.operands[0]]], params, [self._type(i.operands[0], env)], i.types)[0]


__all__ = ["HloInterpreter"]
