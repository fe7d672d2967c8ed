"""Reads the text of a compiled XLA program: instructions, trip counts of loops, collectives, cycles.

In: `compiled.as_text()`. Out: a `Program`. What stands in the body of a loop counts as often as the
loop runs. No API of jax has the cycle estimates and trip counts; they are attributes in this text.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

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
_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
_DECLARED = re.compile(r'"cost_estimate":\{"flops":"?(\d+)"?,.*?"bytes_accessed":"?(\d+)')
_KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"?(\d+)')


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str  # as written, layouts included
    opcode: str
    operands: tuple[str, ...]
    attributes: str  # everything behind the operands
    is_root: bool = False

    @property
    def cycles(self) -> int | None:
        """The compiler's estimate for one execution, or None where it makes none."""
        found = _CYCLES.search(self.attributes)
        return int(found[1]) if found else None

    @property
    def declared(self) -> tuple[int, int] | None:
        """(FLOPs, bytes) of one execution that a hand-written kernel declares; None = no kernel."""
        found = _DECLARED.search(self.attributes)
        return (int(found[1]), int(found[2])) if found else None

    @property
    def integer(self) -> int | None:
        """The value of an integer constant; None for anything else."""
        known = self.opcode == "constant" and self.operands and re.fullmatch(r"-?\d+", self.operands[0])
        return int(self.operands[0]) if known else None

    def called(self, attribute: str) -> str | None:
        """Name of the computation in 'attribute=%name'."""
        found = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.attributes)
        return found[1] if found else None


@dataclasses.dataclass(frozen=True)
class Collective:
    """Exchanges of one kind: how many a step, and their bytes."""

    kind: str
    count: int  # executions a step
    bytes: int  # result bytes on one chip, over all executions
    group: int  # chips that exchange with each other
    asynchronous: bool  # the program goes on between its start and its end


@dataclasses.dataclass(frozen=True)
class Program:
    """A module: {computation: instructions} and the name of its entry."""

    computations: dict[str, list[Instruction]]
    entry: str

    def executions(self) -> dict[str, int]:
        """How often each computation runs in a step, fused ones aside.

        A loop whose trip count cannot be read counts once. All branches of a conditional count.
        """
        counts: dict[str, int] = {}

        def visit(name: str, times: int) -> None:
            counts[name] = counts.get(name, 0) + times
            for instruction in self.computations.get(name, ()):
                if instruction.opcode == "while" and (body := instruction.called("body")):
                    visit(body, times * (self.trip_count(name, instruction) or 1))
                elif instruction.opcode in ("call", "async-start", "conditional"):
                    for callee in self._callees(instruction):
                        visit(callee, times)

        visit(self.entry, 1)
        return counts

    def instructions(self) -> Iterator[tuple[Instruction, int]]:
        """(instruction, executions a step) of all that run."""
        for name, times in self.executions().items():
            for instruction in self.computations.get(name, ()):
                yield instruction, times

    def loops(self) -> list[tuple[str, int | None]]:
        """(name, trip count or None) of the while-loops that run."""
        return [
            (loop.name, self.trip_count(name, loop))
            for name in self.executions()
            for loop in self.computations.get(name, ())
            if loop.opcode == "while"
        ]

    def trip_count(self, computation: str, loop: Instruction) -> int | None:
        """How often the body of a while-loop runs, or None if the text does not tell.

        Either the compiler wrote it down, or the condition compares a counter that goes up by one
        with a constant (the form of `lax.scan`).
        """
        if known := _KNOWN_TRIPS.search(loop.attributes):
            return int(known[1])
        condition = {i.name: i for i in self.computations.get(loop.called("condition") or "", ())}
        root = next((i for i in condition.values() if i.is_root), None)
        if root is None or root.opcode != "compare" or len(root.operands) != 2:
            return None
        counter, limit = (condition.get(name) for name in root.operands)
        if counter is None or limit is None or limit.integer is None or counter.opcode != "get-tuple-element":
            return None
        trips = limit.integer - self._initial(computation, loop, counter)
        if "direction=LT" in root.attributes:
            return max(0, trips)
        return max(0, trips + 1) if "direction=LE" in root.attributes else None

    def _initial(self, computation: str, loop: Instruction, counter: Instruction) -> int:
        """Value of the counter before the loop; 0 if it is not a constant."""
        here = {i.name: i for i in self.computations[computation]}
        state = here.get(loop.operands[0]) if loop.operands else None
        index = re.search(r"index=(\d+)", counter.attributes)
        if state is None or state.opcode != "tuple" or index is None:
            return 0
        value = here.get(state.operands[int(index[1])])
        while value is not None and value.opcode in ("copy", "bitcast"):
            value = here.get(value.operands[0])
        return (value and value.integer) or 0

    def _callees(self, instruction: Instruction) -> list[str]:
        single = ("to_apply", "calls", "called_computation", "true_computation", "false_computation")
        branches = re.search(r"branch_computations=\{([^}]*)\}", instruction.attributes)
        names = [instruction.called(attribute) for attribute in single]
        names += re.findall(r"[\w.\-]+", branches[1]) if branches else []
        return [name for name in names if name in self.computations]

    def cycles(self) -> int:
        """Estimated cycles of a step on one chip."""
        return sum((instruction.cycles or 0) * times for instruction, times in self.instructions())

    def hbm_bytes(self) -> int:
        """Bytes a step that operations read from or write to HBM.

        Arrays that the compiler keeps in the chip's own memory, marked S(1), do not count. Of an
        array that is only sliced, or updated in place, the slice counts.
        """
        total = 0
        for name, times in self.executions().items():
            here = {i.name: i for i in self.computations.get(name, ())}
            for i in here.values():
                if i.opcode in _MOVE_NOTHING or i.opcode.removesuffix("-start") in COLLECTIVES:
                    continue
                reads = [here[operand].shape if operand in here else "" for operand in i.operands]
                inside = self.computations.get(i.called("calls") or "", ())
                read, written = self._touched(inside) if inside else ({}, None)
                size = sum(min(array_bytes(shape, "HBM"), read.get(k, math.inf)) for k, shape in enumerate(reads))
                result = array_bytes(i.shape, "HBM")
                total += times * (size + (result if written is None else min(result, written)))
        return int(total)

    def _touched(self, inside: Sequence[Instruction]) -> tuple[dict[int, int], int | None]:
        """What a fused computation reads of those parameters of which it needs only slices, and
        what it writes where its result is an array updated in place (else None)."""
        shapes = {i.name: i.shape for i in inside}
        users: dict[str, list[Instruction]] = {}
        for i in inside:
            for operand in i.operands:
                users.setdefault(operand, []).append(i)
        read: dict[int, int] = {}
        for i in inside:
            if i.opcode != "parameter" or not i.operands:
                continue
            uses = users.get(i.name, [])
            while len(uses) == 1 and uses[0].opcode == "bitcast":
                uses = users.get(uses[0].name, [])
            if uses and all(use.opcode in ("dynamic-slice", "gather") for use in uses):
                read[int(i.operands[0])] = sum(array_bytes(use.shape) for use in uses)
            elif uses and all(use.opcode == "dynamic-update-slice" for use in uses):
                read[int(i.operands[0])] = 0
            elif len(uses) == 1 and uses[0].opcode == "fusion":  # the slice is cut one level deeper
                nested, _ = self._touched(self.computations.get(uses[0].called("calls") or "", ()))
                position = uses[0].operands.index(i.name) if i.name in uses[0].operands else -1
                if position in nested:
                    read[int(i.operands[0])] = nested[position]
        updates = [i for i in inside if i.opcode == "dynamic-update-slice"]
        if not updates:
            return read, None
        written = sum(array_bytes(shapes.get(i.operands[1], "")) for i in updates)
        root = next((i for i in inside if i.is_root), None)
        if root is not None and root.opcode == "tuple":  # the other results are written whole
            whole = {array_bytes(i.shape) for i in updates}
            sizes = [array_bytes(shapes.get(operand, "")) for operand in root.operands]
            written += sum(size for size in sizes if size not in whole)
        return read, written

    def collectives(self, devices: int) -> list[Collective]:
        """The collectives of a step, added up by kind, group size and whether they overlap.

        Args:
          devices: of the program; the size of a group that spans all.
        """
        found: dict[tuple[str, int, bool], tuple[int, int]] = {}
        for instruction, times in self.instructions():
            kind = instruction.opcode.removesuffix("-start")
            group = group_size(instruction.attributes, devices)
            if kind not in COLLECTIVES or group == 1:
                continue
            started = instruction.opcode.endswith("-start")
            sizes = _sizes(instruction.shape)
            if started and kind != "all-reduce" and instruction.shape.startswith("("):
                # The tuple of a start: operands, results, and whatever else.
                count = len(instruction.operands)
                sizes = sizes[count : 2 * count]
            count, size = found.get((kind, group, started), (0, 0))
            found[kind, group, started] = count + times, size + times * sum(sizes)
        return [
            Collective(kind, count, size, group, started)
            for (kind, group, started), (count, size) in sorted(found.items())
        ]


def parse(text: str) -> Program:
    """The program of an HLO module's text; ValueError if there is no entry computation."""
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            current = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif current is not None and (found := _INSTRUCTION.match(line)):
            if instruction := _instruction(found[2], found[3], bool(found[1])):
                current.append(instruction)
    if not entry:
        raise ValueError("this is not the text of an HLO module: it has no ENTRY computation")
    return Program(computations, entry)


def _instruction(name: str, text: str, is_root: bool) -> Instruction | None:
    """'f32[2]{0} add(%a, %b), attributes' taken apart."""
    # A tuple's shape has parentheses of its own; the opcode is what stands behind it.
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
    for index in range(start, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if depth == 0:
            return index
    return len(text) - 1


def array_bytes(shape: str, memory: str = "") -> int:
    """Bytes of an array or of all arrays of a tuple, as text 'f32[8,16]{1,0}', without padding.

    memory='HBM' leaves out arrays that are in another memory space.
    """
    return sum(_sizes(shape, memory))


def _sizes(shape: str, memory: str = "") -> list[int]:
    """The bytes of each array of a tuple."""
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
    return 2 if re.search(r"source_target_pairs=\{(.*?)\}\}", attributes) else devices
