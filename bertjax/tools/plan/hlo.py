"""Reads the text of a compiled XLA program: instructions, trip counts of loops, collectives, cycles.

In: `compiled.as_text()`. Out: a `Program`. What is in the body of a loop counts as often as the loop runs. No API of
jax gives the cycle estimates and trip counts; they are attributes in this text.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
# Opcodes that only name data, or move it beside the operations.
_MOVE_NOTHING = frozenset(
    "parameter constant tuple get-tuple-element bitcast while conditional call copy-start copy-done slice-start "
    "slice-done after-all partition-id custom-call async-start async-update async-done optimization-barrier".split()
)
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*-> .*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"(?:^|\s)([a-z][a-z0-9\-]*)\(")
_ARRAY = re.compile(r"\b(pred|bf16|[suf](?:4|8|16|32|64)|c64|c128)\[([0-9,<=]*)\](?:\{[^}]*?(S\(\d+\))?\})?")
CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
KERNEL = re.compile(r'"cost_estimate":\{"flops":"?(\d+)"?,.*?"bytes_accessed":"?(\d+)')  # a hand-written one
_TRIPS = re.compile(r'"known_trip_count":\{"n":"?(\d+)')
_CALLEES = re.compile(r"\b(?:to_apply|calls|called_computation|true_computation|false_computation)=%?([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str  # as written, layouts included
    opcode: str
    operands: tuple[str, ...]
    attributes: str  # everything after the operands
    is_root: bool = False

    def numbers(self, pattern: re.Pattern[str]) -> tuple[int, ...]:
        """The numbers of an attribute (CYCLES, KERNEL, _TRIPS) for one execution; () where it is absent."""
        found = pattern.search(self.attributes)
        return tuple(map(int, found.groups())) if found else ()

    def called(self, attribute: str) -> str:
        """Name of the computation in 'attribute=%name', or ''."""
        found = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.attributes)
        return found[1] if found else ""


Computation = Mapping[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Collective:
    """Exchanges of one kind: how many per step, and their bytes."""

    kind: str
    count: int  # executions per step
    bytes: int  # result bytes on one chip, over all executions
    group: int  # chips that exchange with each other
    asynchronous: bool  # the program goes on between its start and its end


class Program:
    """A module, from its text.

    Attributes:
      computations: {computation: {name: instruction}}.
      executions: how often each computation runs in a step, without fused ones. A loop whose trip count cannot be read
        counts once; all branches of a conditional count.
      loops: {name: trip count or None} of the while-loops that run.
    """

    def __init__(self, text: str):
        """Raises ValueError if there is no entry computation."""
        self.computations: dict[str, dict[str, Instruction]] = {}
        entry, current = "", None
        for line in text.splitlines():
            if header := _COMPUTATION.match(line):
                current = self.computations.setdefault(header[2], {})
                entry = header[2] if header[1] else entry
            elif current is not None and (found := _INSTRUCTION.match(line)):
                if instruction := _instruction(found[2], found[3], bool(found[1])):
                    current[found[2]] = instruction
        if not entry:
            raise ValueError("this is not the text of an HLO module: it has no ENTRY computation")
        self.executions: dict[str, int] = collections.Counter()
        self.loops: dict[str, int | None] = {}
        self._visit(entry, 1)

    def _visit(self, computation: str, times: int) -> None:
        self.executions[computation] += times
        here = self.computations.get(computation, {})
        for i in here.values():
            if i.opcode == "while":
                self.loops[i.name] = trips = self._trip_count(here, i)
                self._visit(i.called("body"), times * (trips or 1))
            elif i.opcode in ("call", "async-start", "conditional"):
                branches = re.search(r"branch_computations=\{([^}]*)\}", i.attributes)
                callees = _CALLEES.findall(i.attributes)
                for callee in callees + (re.findall(r"[\w.\-]+", branches[1]) if branches else []):
                    self._visit(callee, times)

    def instructions(self) -> Iterator[tuple[Instruction, int]]:
        """(instruction, executions per step) of all that run."""
        for name, times in self.executions.items():
            for instruction in self.computations.get(name, {}).values():
                yield instruction, times

    def _trip_count(self, here: Computation, loop: Instruction) -> int | None:
        """How often the body of a while-loop runs, or None if the text does not tell.

        Either the compiler wrote it down, or the condition compares a counter that goes up by one with a constant (the
        form of `lax.scan`).
        """
        if known := loop.numbers(_TRIPS):
            return known[0]
        condition = self.computations.get(loop.called("condition"), {})
        root = next((i for i in condition.values() if i.is_root), None)
        if root is None or root.opcode != "compare":
            return None
        counter, limit = (condition.get(name) for name in root.operands)
        last, more = _integer(limit), {"LT": 0, "LE": 1}.get(root.called("direction"))
        if counter is None or counter.opcode != "get-tuple-element" or last is None or more is None:
            return None
        state = here.get(loop.operands[0])
        first = None
        if state is not None and state.opcode == "tuple":
            first = here.get(state.operands[int(counter.called("index"))])
            while first is not None and first.opcode in ("copy", "bitcast"):
                first = here.get(first.operands[0])
        return max(0, last + more - (_integer(first) or 0))

    def cycles(self) -> int:
        """Estimated cycles of a step on one chip."""
        return sum(sum(i.numbers(CYCLES)) * times for i, times in self.instructions())

    def hbm_bytes(self) -> int:
        """Bytes per step that operations read from or write to HBM.

        Arrays that the compiler keeps in the chip's own memory, marked S(1), do not count. Of an array that is only
        sliced, or updated in place, the slice counts.
        """
        total = 0
        for name, times in self.executions.items():
            here = self.computations.get(name, {})
            for i in here.values():
                if i.opcode in _MOVE_NOTHING or i.opcode.removesuffix("-start") in COLLECTIVES:
                    continue
                inside = self.computations.get(i.called("calls"), {})
                read, written = self._touched(inside) if inside else ({}, math.inf)
                for number, operand in enumerate(i.operands):
                    whole = sum(array_bytes(here[operand].shape, "HBM")) if operand in here else 0
                    total += times * min(whole, read.get(number, math.inf))
                total += times * min(sum(array_bytes(i.shape, "HBM")), written)
        return int(total)

    def _touched(self, inside: Computation) -> tuple[dict[int, int], float]:
        """What a fused computation reads of those parameters of which it needs only slices, and what it writes where
        its result is an array updated in place (else infinite)."""

        def size(name: str) -> int:
            return sum(array_bytes(inside[name].shape)) if name in inside else 0

        users = collections.defaultdict(list)
        for i in inside.values():
            for operand in i.operands:
                users[operand].append(i)
        read: dict[int, int] = {}
        for i in inside.values():
            if i.opcode != "parameter":
                continue
            number, uses = int(i.operands[0]), users[i.name]
            while len(uses) == 1 and uses[0].opcode == "bitcast":
                uses = users[uses[0].name]
            kinds = {use.opcode for use in uses}
            if kinds and kinds <= {"dynamic-slice", "gather"}:
                read[number] = sum(size(use.name) for use in uses)
            elif kinds == {"dynamic-update-slice"}:
                read[number] = 0
            elif kinds == {"fusion"} and len(uses) == 1:  # the slice is cut one level deeper
                nested, _ = self._touched(self.computations.get(uses[0].called("calls"), {}))
                position = uses[0].operands.index(i.name) if i.name in uses[0].operands else -1
                if position in nested:
                    read[number] = nested[position]
        updates = [i for i in inside.values() if i.opcode == "dynamic-update-slice"]
        if not updates:
            return read, math.inf
        written = sum(size(i.operands[1]) for i in updates)
        root = next((i for i in inside.values() if i.is_root), None)
        if root is not None and root.opcode == "tuple":  # the other results are written whole
            whole = {size(i.name) for i in updates}
            written += sum(size(operand) for operand in root.operands if size(operand) not in whole)
        return read, written

    def collectives(self, devices: int) -> list[Collective]:
        """The collectives of a step, added up by kind, group size and whether they overlap.

        Args:
          devices: of the program; the size of a group that spans all.
        """
        found: dict[tuple[str, int, bool], list[int]] = collections.defaultdict(lambda: [0, 0])
        for instruction, times in self.instructions():
            kind = instruction.opcode.removesuffix("-start")
            if kind not in COLLECTIVES or (group := group_size(instruction.attributes, devices)) == 1:
                continue
            started = instruction.opcode.endswith("-start")
            sizes = array_bytes(instruction.shape)
            if started and kind != "all-reduce" and instruction.shape.startswith("("):
                # The tuple of a start: operands, results, and whatever else.
                operands = len(instruction.operands)
                sizes = sizes[operands : 2 * operands]
            entry = found[kind, group, started]
            entry[0] += times
            entry[1] += times * sum(sizes)
        return [
            Collective(kind, count, size, group, started)
            for (kind, group, started), (count, size) in sorted(found.items())
        ]


def _integer(instruction: Instruction | None) -> int | None:
    """The value of an integer constant; None for anything else."""
    known = instruction is not None and instruction.opcode == "constant" and instruction.operands
    return int(instruction.operands[0]) if known and re.fullmatch(r"-?\d+", instruction.operands[0]) else None


def _instruction(name: str, text: str, is_root: bool) -> Instruction | None:
    """'f32[2]{0} add(%a, %b), attributes' taken apart."""
    # A tuple's shape has parentheses of its own; the opcode is what follows it.
    opcode = _OPCODE.search(text, _closing(text, 0) + 1 if text.startswith("(") else 0)
    if opcode is None:
        return None
    end = _closing(text, opcode.end() - 1)
    inner = re.sub(r"/\*.*?\*/", "", text[opcode.end() : end])
    operands = tuple(re.findall(r"%([\w.\-]+)", inner)) or tuple(word for word in re.split(r"[,\s]+", inner) if word)
    return Instruction(name, text[: opcode.start()].strip(), opcode[1], operands, text[end + 1 :], is_root)


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.start()
    return len(text) - 1


def array_bytes(shape: str, memory: str = "") -> list[int]:
    """Bytes of an array, or of each array of a tuple, as text 'f32[8,16]{1,0}', without padding.

    memory='HBM' leaves out arrays that are in another memory space.
    """
    found = []
    for kind, dimensions, space in _ARRAY.findall(shape):
        if not (memory and space):
            bits = 8 if kind == "pred" else int(kind.strip("bsufc"))
            found.append(math.prod(int(size.lstrip("<=")) for size in dimensions.split(",") if size) * bits // 8)
    return found


def group_size(attributes: str, devices: int) -> int:
    """Chips of one replica group, in any of the three notations of HLO."""
    if meshed := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", meshed[1]))
        return math.prod(int(sizes[name]) for name in re.findall(r"'([^']+)'", meshed[2]))
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", attributes):
        return int(iota[2])
    if explicit := re.search(r"replica_groups=\{\{([^}]*)\}", attributes):
        return len(explicit[1].split(","))
    return 2 if "source_target_pairs={" in attributes else devices
