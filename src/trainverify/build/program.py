"""Building logical programs: `b = tv.program("mlp"); x = b.input("x", (8, 16)); …; b.build()`."""

from __future__ import annotations

from trainverify.build.tape import BuildError, Tape, Tensor
from trainverify.graph.program import Domain, Program
from trainverify.graph.types import DTYPES, TensorType
from trainverify.ops import OPS
from trainverify.ops.table import OpTable


def domain_of(dtype: str, ids: int | None, ignore: int | None, domain: str | None) -> Domain | None:
    """The precondition on an input from the keywords of `input` and `state`."""
    if dtype not in DTYPES:
        raise BuildError(f"{dtype!r} is no dtype (they are {', '.join(DTYPES)}); only inputs of a plan have a layout")
    if ids is not None:
        return Domain("ids", ids, ignore)
    return None if domain is None else Domain(domain)  # type: ignore[arg-type]


class Declaring(Tape):
    """A tape that also declares inputs, parameters and state."""

    def __init__(self, name: str, ops: OpTable = OPS):
        super().__init__(name, ops)
        self._inputs: list[str] = []
        self._parameters: list[str] = []
        self._state: list[str] = []
        self._domains: dict[str, Domain] = {}
        self.dtype = "f32"  # of parameters that do not say

    def _source(self, into: list[str], name: str, shape: tuple[int, ...], dtype: str, domain: Domain | None) -> Tensor:
        if not isinstance(shape, tuple | list) or any(not isinstance(s, int) or s < 0 for s in shape):
            raise BuildError(f"{name}: a shape is a tuple of sizes, not {shape!r}")
        made = self.declare(name, TensorType(tuple(shape), dtype))
        into.append(name)
        if domain is not None:
            self._domains[name] = domain
        return made

    def program(self) -> Program:
        return Program(
            self.name,
            dict(self.tensors),
            tuple(self._inputs),
            tuple(self._parameters),
            tuple(self._state),
            tuple(self.ops),
            tuple(self.outputs),
            {},
            dict(self._domains),
        )


class ProgramBuilder(Declaring):
    def input(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: str = "f32",
        ids: int | None = None,
        ignore: int | None = None,
        domain: str | None = None,
    ) -> Tensor:
        """A batch tensor. Integer inputs say what they index: `ids=V` (values 0…V−1), `ignore` for one more value."""
        return self._source(self._inputs, name, shape, dtype, domain_of(dtype, ids, ignore, domain))

    def parameter(self, name: str, shape: tuple[int, ...], dtype: str | None = None) -> Tensor:
        self._trainable.add(name)
        return self._source(self._parameters, name, shape, dtype or self.dtype, None)

    def state(self, name: str, shape: tuple[int, ...], dtype: str = "f32", domain: str | None = None) -> Tensor:
        """Optimizer state or a buffer: there before the step, updated by it or constant."""
        return self._source(self._state, name, shape, dtype, domain_of(dtype, None, None, domain))

    def build(self) -> Program:
        if not self.outputs:
            raise BuildError(f"{self.name}: no outputs; call loss(...)")
        return self.program()


def program(name: str, ops: OpTable = OPS) -> ProgramBuilder:
    """Start a logical program."""
    return ProgramBuilder(name, ops)
