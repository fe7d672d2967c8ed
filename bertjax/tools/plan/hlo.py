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
_MOVE_NOTHING = {*COLLECTIVES, *(f"{kind}-start" for kind in COLLECTIVES)} | set(
    "parameter constant tuple get-tuple-element bitcast while conditional call copy-start copy-done slice-start "
    "slice-done after-all partition-id custom-call async-start async-update async-done optimization-barrier".split()
)
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*-> .*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?)(?<!\S)([a-z][a-z0-9\-]*)\((.*)$")
_ARRAY = re.compile(r"\b(pred|bf16|[suf](?:4|8|16|32|64)|c64|c128)\[([0-9,<=]*)\](?:\{[^}]*?(S\(\d+\))?\})?")
CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
NO_ESTIMATE = 2**62  # cycles: a century
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

    @property
    def integer(self) -> int | None:
        """The value of an integer constant; None for anything else."""
        known = self.opcode == "constant" and self.operands and re.fullmatch(r"-?\d+", self.operands[0])
        return int(self.operands[0]) if known else None


Computation = Mapping[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Collective:
    """Exchanges of one kind in a step."""

    kind: str
    count: int
    bytes: int  # result bytes on one chip, over all of them
    group: int  # chips that exchange with each other
    asynchronous: bool  # the program goes on between its start and its end


class Program:
    """A module, from its text. Raises ValueError if there is no entry computation."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        # How often each computation runs in a step, without fused ones. A loop whose trip count cannot be read counts
        # once; all branches of a conditional count.
        self.executions: dict[str, int] = collections.Counter()
        self.loops: dict[str, int | None] = {}  # trip counts of the while-loops that run
        entry, current = "", {}
        for line in text.splitlines():
            if header := _COMPUTATION.match(line):
                current = self.computations.setdefault(header[2], {})
                entry = header[2] if header[1] else entry
            elif found := _INSTRUCTION.match(line):
                root, name, shape, opcode, rest = found.groups()
                operands, attributes = _split(rest)
                current[name] = Instruction(name, shape.strip(), opcode, operands, attributes, bool(root))
        if not entry:
            raise ValueError("this is not the text of an HLO module: it has no ENTRY computation")
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
                named = re.findall(r"[\w.\-]+", branches[1]) if branches else []
                for callee in _CALLEES.findall(i.attributes) + named:
                    self._visit(callee, times)

    def instructions(self) -> Iterator[tuple[Instruction, int]]:
        """(instruction, executions per step) of all that run."""
        for name, times in self.executions.items():
            for instruction in self.computations.get(name, {}).values():
                yield instruction, times

    def _trip_count(self, here: Computation, loop: Instruction) -> int | None:
        """How often the body of a while-loop runs, None if the text does not tell. The compiler wrote it down, or the
        condition compares a counter that goes up by one with a constant (the form of `lax.scan`)."""
        if known := loop.numbers(_TRIPS):
            return known[0]
        condition = self.computations.get(loop.called("condition"), {})
        for root in (i for i in condition.values() if i.is_root and i.opcode == "compare"):
            counter, limit = (condition[name] for name in root.operands)
            more = {"LT": 0, "LE": 1}.get(root.called("direction"))
            if counter.opcode == "get-tuple-element" and limit.integer is not None and more is not None:
                first = here[loop.operands[0]]
                if first.opcode == "tuple":
                    first = here[first.operands[int(counter.called("index"))]]
                while first.opcode in ("copy", "bitcast"):
                    first = here[first.operands[0]]
                return max(0, limit.integer + more - (first.integer or 0))
        return None

    def cycles(self) -> int:
        """Estimated cycles of a step on one chip; 0 where the compiler has none, or its largest number for one."""
        cycles = [(sum(i.numbers(CYCLES)), times) for i, times in self.instructions()]
        return 0 if any(each >= NO_ESTIMATE for each, _ in cycles) else sum(each * times for each, times in cycles)

    def hbm_bytes(self) -> int:
        """Bytes per step that operations read from or write to HBM, without arrays that stay in the chip's own memory,
        marked S(1). Of an array that is only sliced, or updated in place, the slice counts."""
        total = 0
        for name, times in self.executions.items():
            here = self.computations.get(name, {})
            for i in (i for i in here.values() if i.opcode not in _MOVE_NOTHING):
                read, written = self._touched(self.computations.get(i.called("calls"), {}))
                total += times * min(_bytes(here, i.name, "HBM"), written)
                for number, operand in enumerate(i.operands):
                    total += times * min(_bytes(here, operand, "HBM"), read.get(number, math.inf))
        return int(total)

    def _touched(self, inside: Computation) -> tuple[dict[int, int], float]:
        """What a fused computation reads of those parameters of which it needs only slices, and what it writes where
        its result is an array updated in place (else infinite)."""
        users, read = collections.defaultdict(list), {}
        for i in inside.values():
            for operand in i.operands:
                users[operand].append(i)
        for i in (i for i in inside.values() if i.opcode == "parameter"):
            number, uses = int(i.operands[0]), users[i.name]
            while len(uses) == 1 and uses[0].opcode == "bitcast":
                uses = users[uses[0].name]
            kinds = {use.opcode for use in uses}
            if kinds and kinds <= {"dynamic-slice", "gather"}:
                read[number] = sum(_bytes(inside, use.name) for use in uses)
            elif kinds == {"dynamic-update-slice"}:
                read[number] = 0
            elif kinds == {"fusion"} and len(uses) == 1 and i.name in uses[0].operands:  # cut one level deeper
                nested, _ = self._touched(self.computations.get(uses[0].called("calls"), {}))
                if (position := uses[0].operands.index(i.name)) in nested:
                    read[number] = nested[position]
        updates = [i for i in inside.values() if i.opcode == "dynamic-update-slice"]
        written = sum(_bytes(inside, i.operands[1]) for i in updates) if updates else math.inf
        for root in (i for i in inside.values() if updates and i.is_root and i.opcode == "tuple"):
            whole = {_bytes(inside, i.name) for i in updates}  # the other results are written whole
            written += sum(size for size in (_bytes(inside, name) for name in root.operands) if size not in whole)
        return read, written

    def collectives(self, devices: int) -> list[Collective]:
        """The collectives of a step of so many devices, added up by kind, group size and whether they overlap."""
        found: dict[tuple[str, int, bool], list[int]] = collections.defaultdict(lambda: [0, 0])
        for i, times in self.instructions():
            kind, started = i.opcode.removesuffix("-start"), i.opcode.endswith("-start")
            if kind in COLLECTIVES and (group := group_size(i.attributes, devices)) > 1:
                sizes = array_bytes(i.shape)
                if started and kind != "all-reduce" and i.shape.startswith("("):
                    # The tuple of a start: operands, results, and whatever else.
                    sizes = sizes[len(i.operands) : 2 * len(i.operands)]
                entry = found[kind, group, started]
                entry[0] += times
                entry[1] += times * sum(sizes)
        return [
            Collective(kind, count, size, group, started)
            for (kind, group, started), (count, size) in sorted(found.items())
        ]


def _split(text: str) -> tuple[tuple[str, ...], str]:
    """'%a, %b), attributes' -> ('a', 'b') and the attributes; of a constant or parameter what stands there."""
    depth, end = 1, len(text)
    for found in re.finditer(r"[()]", text):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            end = found.start()
            break
    inner = re.sub(r"/\*.*?\*/", "", text[:end])
    return tuple(re.findall(r"%([\w.\-]+)", inner) or re.findall(r"[^,\s]+", inner)), text[end + 1 :]


def _bytes(here: Computation, name: str, memory: str = "") -> int:
    """Bytes of the result of an instruction; 0 of one that is not there."""
    return sum(array_bytes(here[name].shape, memory)) if name in here else 0


def array_bytes(shape: str, memory: str = "") -> list[int]:
    """Bytes of an array, or of each array of a tuple, as text 'f32[8,16]{1,0}', without padding; memory='HBM' leaves
    out arrays that are in another memory space."""
    found = []
    for kind, dimensions, space in _ARRAY.findall(shape):
        if not (memory and space):
            bits = 8 if kind == "pred" else int(kind.strip("bsufc"))
            found.append(math.prod(map(int, re.findall(r"\d+", dimensions))) * bits // 8)
    return found


def group_size(attributes: str, devices: int) -> int:
    """Chips of one replica group, in any of the three notations of HLO."""
    if meshed := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", meshed[1]))
        return math.prod(int(sizes[name]) for name in re.findall(r"'([^']+)'", meshed[2]))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=", attributes):
        return int(iota[1])
    if explicit := re.search(r"replica_groups=\{\{([^}]*)\}", attributes):
        return len(explicit[1].split(","))
    return 2 if "source_target_pairs={" in attributes else devices
