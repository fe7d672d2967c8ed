"""ModernBERT's training step beside transformers + torch.compile, round by round on the same card.

    python -m tests.benchmarks.modern                                       full rows and texts in rows of 1,024
    python -m tests.benchmarks.modern full-8192x4 --peer_compile=layers     compiled as a whole it needs over 140 GB
    python -m tests.benchmarks.modern article-8192x4 --store=STORE
    python -m tests.benchmarks.modern full-64x4 text-64x4 --miniature       a rehearsal, on a CPU too

modernbert-base, bf16, 30 % of the tokens predicted, AdamW. `full` rows hold one text each. `text`: texts of a sixth to
three fifths of a row; `article`: texts as long as documents of the store, cut at the length of a row. Of these bertjax
has several in a row, attention confined to each, and transformers one in a row, padded. All words are random. Counted
are the tokens that are not padding, and the model FLOPs of the texts by themselves. Prints a line as soon as a round
is timed, then a table; writes modern.json into --out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bertjax import markdown
from bertjax.data.rows import pairs_per_row
from bertjax.data.store import TokenStore
from bertjax.model.presets import BertConfig, modern
from bertjax.model.size import flops_per_row
from tests.benchmarks import harness

RATE = 0.3  # of the tokens are predicted
PAD, CLS, SEP, MASK, FIRST_WORD = 0, 2, 3, 4, 5  # as the tokenizer of tools/plan has them
SHORTEST, LONGEST = 170 / 1024, 600 / 1024  # of a text, as shares of a row
BASE, MINIATURE = modern(22, 768, 1152, vocab_size=50_368), modern(4, 64, 96, vocab_size=512)
OURS, PEER = "bertjax", "transformers"
KINDS = ("full", "text", "article")


@dataclasses.dataclass(frozen=True)
class Workload:
    """Rows of one text or of several: 'full-1024x32', 'text-1024x32', 'article-8192x4'."""

    kind: str
    length: int
    rows: int
    store: str = ""  # of the articles

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.length}x{self.rows}"

    @classmethod
    def parse(cls, text: str) -> Workload:
        kind, _, shape = text.partition("-")
        length, _, rows = shape.partition("x")
        if kind not in KINDS or not (length.isdigit() and rows.isdigit()):
            raise argparse.ArgumentTypeError(
                f"workload {text!r} is not KIND-LENGTHxROWS, KIND one of {', '.join(KINDS)}"
            )
        return cls(kind, int(length), int(rows))

    @property
    def several(self) -> bool:
        """Whether bertjax puts several texts into a row."""
        return self.kind != "full"

    def drawn(self) -> list[int]:
        """Lengths of more texts than the rows hold."""
        random, count = np.random.default_rng(0), 4 * self.rows
        if self.kind == "text":
            low, high = int(SHORTEST * self.length), int(LONGEST * self.length)
            return [int(n) for n in random.integers(low, high + 1, count)]
        store = TokenStore(self.store)
        documents = random.choice(store.num_documents, count, replace=False)
        return [min(self.length, 2 + sum(map(len, store.document(i)))) for i in documents]

    def texts(self, packed: bool) -> list[list[int]]:
        """The lengths of the texts in each row."""
        if not self.several:
            return [[self.length]] * self.rows
        drawn = self.drawn()
        if not packed:
            return [[n] for n in drawn[: self.rows]]
        rows: list[list[int]] = [[] for _ in range(self.rows)]
        for n in drawn:  # into the fullest row that it fits
            fitting = [row for row in rows if sum(row) + n <= self.length]
            if fitting:
                max(fitting, key=sum).append(n)
        return rows

    def batch(self, config: BertConfig, packed: bool) -> dict[str, np.ndarray]:
        """Random words in bertjax's layout, unmasked."""
        random = np.random.default_rng(1)
        texts, pairs = self.texts(packed), pairs_per_row(self.length, packed)
        shape = self.rows, self.length
        ids = random.integers(FIRST_WORD, config.vocab_size, shape).astype(np.int32)
        mask, places = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        cls = np.zeros((self.rows, pairs), np.int32)
        for row, lengths in enumerate(texts):
            start = 0
            for number, n in enumerate(lengths):
                end = start + n
                mask[row, start:end], places[row, start:end] = number + 1, np.arange(n)
                ids[row, start], ids[row, end - 1], cls[row, number] = CLS, SEP, start
                start = end
            ids[row, start:] = PAD
        batch = {"input_ids": ids, "token_type_ids": np.zeros(shape, np.int32), "attention_mask": mask}
        if packed:
            batch |= {"position_ids": places, "cls_positions": cls}
        none = {"nsp_labels": np.zeros_like(cls), "nsp_weights": np.zeros(cls.shape, np.float32)}
        return batch | none

    def work(self, config: BertConfig, packed: bool) -> tuple[int, float]:
        """(tokens that are not padding, model FLOPs of their texts) of a step."""
        lengths = [n for row in self.texts(packed) for n in row]
        return sum(lengths), sum(flops_per_row(config, n, round(RATE * n), nsp=False) for n in lengths)


DEFAULT = ("full-1024x32", "text-1024x32")


def add_workloads(parser: argparse.ArgumentParser, default: Sequence[str] = ()) -> None:
    """The flags that all sides have."""
    parser.add_argument("workloads", nargs="*", type=Workload.parse, default=[Workload.parse(name) for name in default])
    parser.add_argument("--store", default="", help="token store whose documents are the articles")
    parser.add_argument("--miniature", action="store_true", help="4 layers of width 64")


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments, in which each workload knows the store."""
    args = parser.parse_args(argv)
    if not args.store and any(work.kind == "article" for work in args.workloads):
        parser.error("--store=STORE is missing: the lengths of articles are those of its documents")
    args.workloads = [dataclasses.replace(work, store=args.store) for work in args.workloads]
    return args


class Side:
    """A process that compiles steps, then times them when it is told to."""

    def __init__(self, name: str, workloads: Sequence[Workload], arguments: Sequence[str]):
        self.name, self.workloads = name, workloads
        command = harness.python(f"tests.benchmarks.modern_{name}", *(work.name for work in workloads), *arguments)
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def result(self) -> dict[str, Any]:
        """The JSON object on the next line that has one; ValueError when the process has ended."""
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise ValueError(f"{self.name} ended with code {self.process.wait()}")

    def time(self, work: Workload, steps: int) -> dict[str, Any]:
        """{'step_seconds', 'loss', 'peak_bytes'} of one round."""
        self.process.stdin.write(f"{work.name} {steps}\n")
        self.process.stdin.flush()
        return self.result()


def serve(ready: Mapping[str, Any], time_round: Any) -> None:
    """The loop of a side: says what it has compiled, then times a round for each line 'WORKLOAD STEPS'."""
    print(json.dumps(ready), flush=True)
    for line in sys.stdin:
        name, steps = line.split()
        print(json.dumps(time_round(name, int(steps))), flush=True)


def side_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """The command line of a side."""
    parser = harness.make_parser(name, doc)
    add_workloads(parser)
    return parser


def line(
    name: str, who: str, seconds: float, result: Mapping[str, Any], tokens: int, flops: float, peak: float | None
) -> tuple[str, ...]:
    """Workload, side, milliseconds, tokens/s, MFU, GB, loss."""
    mfu = f"{flops / seconds / peak:.1%}" if peak else "-"
    memory = f"{result['peak_bytes'] / 1e9:.1f}"
    return name, who, f"{1e3 * seconds:.2f}", f"{tokens / seconds:,.0f}", mfu, memory, f"{result['loss']:.3f}"


def main(argv: list[str]) -> None:
    parser = harness.make_parser("modern", __doc__)
    add_workloads(parser, DEFAULT)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("bench"))
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a round, one by one and again in a row")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=250, help="no round starts later than this")
    parser.add_argument("--no_peer", action="store_true", help="do not run transformers")
    parser.add_argument("--peer_attention", default="sdpa", help="sdpa or flex_attention")
    parser.add_argument("--peers_together", type=int, default=2, help="peer processes that compile at once")
    parser.add_argument(
        "--peer_compile",
        default="model",
        choices=("model", "layers", "none"),
        help="what torch.compile gets; layer by layer, all layers share the masks of attention",
    )
    parser.add_argument("--profile", action="store_true", help="milliseconds of bertjax's step by kind of kernel")
    args = parse(parser, argv)
    began, config = time.monotonic(), MINIATURE if args.miniature else BASE
    options = ["--miniature"] * args.miniature + [f"--store={args.store}"] * bool(args.store)

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:4.0f} s] {text}", flush=True)

    ours = Side(OURS, args.workloads, options + ["--profile"] * args.profile)
    options += [f"--compile={args.peer_compile}", f"--attention={args.peer_attention}"]
    waiting, compiling, peers = [] if args.no_peer else list(args.workloads), [], {}
    sides = [ours]
    try:
        while waiting or compiling:  # a peer is a process a step: torch.compile has one thread of Python
            while waiting and len(compiling) < args.peers_together:
                compiling.append(Side(PEER, [waiting.pop(0)], options))
                sides.append(compiling[-1])
            side = compiling.pop(0)
            name = side.workloads[0].name
            try:
                say(f"{PEER} {name}: {side.result()}")
                peers[name] = side
            except ValueError as error:
                say(f"{name}: {error}")
        ready = ours.result()
        say(f"{OURS}: {ready}")

        peak, found = ready["nominal_flops"], {}
        for number in range(1, args.rounds + 1):
            for work in args.workloads:
                for who, side in {OURS: ours, PEER: peers.get(work.name)}.items():
                    if side is None or (number > 1 and time.monotonic() - began > args.seconds):
                        continue
                    try:
                        result = side.time(work, args.steps)
                    except (ValueError, BrokenPipeError) as error:
                        say(f"{work.name}: {error}")
                        continue
                    found.setdefault(work.name, {}).setdefault(who, []).append(result)
                    tokens, flops = work.work(config, packed=who == OURS and work.several)
                    say("  ".join(line(work.name, who, result["step_seconds"], result, tokens, flops, peak)))
    finally:
        for side in sides:
            side.process.kill()

    report: dict[str, Any] = {**ready, "rounds": found, "table": []}
    lines: list[tuple[str, ...]] = []
    for work in args.workloads:
        rates = {}
        for who, rounds in found.get(work.name, {}).items():
            for name, milliseconds in rounds[-1].get("profile_ms", {}).items():
                print(f"{milliseconds:9.2f} ms  {name}")
            for kernel in rounds[-1].get("kernels", []):
                print(kernel)
            seconds = statistics.median(each["step_seconds"] for each in rounds)
            tokens, flops = work.work(config, packed=who == OURS and work.several)
            rates[who] = tokens / seconds
            cells = line(work.name, who, seconds, rounds[-1], tokens, flops, peak)
            lines.append((*cells[:4], f"{rates[OURS] / rates[PEER]:.2f}" if len(rates) == 2 else "-", *cells[4:]))
            fill = tokens / (work.rows * work.length)
            values = {"workload": work.name, "who": who, "step_seconds": seconds, "tokens_per_second": rates[who]}
            report["table"].append(values | {"fill": fill, "mfu": peak and flops / seconds / peak})
    print(f"\n{ready['device']}, {ready['versions']}; median of the rounds, tokens that are not padding\n")
    print(markdown.table(("step", "", "ms", "tokens/s", "bertjax / transformers", "MFU", "GB", "loss"), lines))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "modern.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
