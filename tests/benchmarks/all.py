"""Every published number, measured piece by piece and written into the page that shows it.

    python -m tests.benchmarks.all --list
    python -m tests.benchmarks.all step-base modern-1024 --out=bench/all
    python -m tests.benchmarks.all --minutes=9 --out=bench/all --store=store --glue=glue --model=MODEL
    cp bench/all/*.json docs/measured
    python -m tests.benchmarks.all --out=docs/measured --page=docs/benchmarks.md

A piece is one command of at most nine minutes, so that a table can be measured on several days. A call runs the named
pieces, or all that fit into --minutes and that this code has not measured yet. Each finished piece leaves
OUT/NAME.json: command, commit, card, versions, date and the tables that the command printed. --page replaces what
stands on a page between `<!-- measured: NAME ... -->` and `<!-- end -->` by the tables of these pieces. Pieces with the
same columns become one table.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import itertools
import json
import pathlib
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

from bertjax.version import source_digest, source_version
from tests.benchmarks import harness

FINETUNE = (  # three of the tasks have their training sets from `transfer prepare`
    "transfer prepare --data={data} --out={out}/transfer && finetune --checkpoint={model} --batch_size=32 "
    "--learning_rate=5e-5 --out={out}/finetune --data={out}/transfer/data"
)
TASKS = {
    "cola": " --tasks=cola --seeds=5 --epochs=4",
    "rte": " --tasks=rte --seeds=5 --epochs=4",
    "mrpc": " --tasks=mrpc --seeds=5 --epochs=4",
    "stsb": " --tasks=stsb --seeds=5 --epochs=4",
    "sst2": " --tasks=sst2 --seeds=5 --epochs=2",
    "qnli": " --tasks=qnli --seeds=5 --epochs=4",
    "squad": "/SQuAD --tasks=squad1.1 --seeds=5 --epochs=2 --max_length=384",
    "wnut": "/WNUT-17 --tasks=ner --seeds=20 --epochs=4",
}
RECIPES = {"bertjax": "bertjax", "transformers": "peer", "recipe": "recipe", "modern": "modern", "muon": "muon"}
QUALITY = (
    "quality prepare --store={store} --out={out}/quality --minutes=8 --phases=128:0.9,512:0.1 "
    f"--runs={','.join(RECIPES.values())} && quality run "
)
DRAW = " --out={out}/quality && quality draw --out={out}/quality"
# Needs the models of the pieces before, on the same machine. Three tasks at a time keep a GPU busy.
TRANSFER = "transfer prepare --data={data} --out={out}/transfer && transfer --out={out}/transfer --gpus=0,0,0 "


@dataclasses.dataclass(frozen=True)
class Piece:
    """Programs of tests.benchmarks with their flags, joined by &&, in which {store}, {glue}, {model}, {text},
    {vocab} and {original} stand for the data that they need."""

    command: str
    minutes: float
    gpus: int = 1

    @property
    def needs(self) -> set[str]:
        return set(re.findall(r"{(\w+)}", self.command)) - {"out"}


PIECES = {
    "step-base": Piece("step base-128x256 base-512x64", 4),
    "step-large": Piece("step large-128x128 large-512x32", 5),
    "modern-1024": Piece("modern full-1024x32 text-1024x32", 3),
    "modern-articles": Piece("modern article-8192x4 --peer_compile=layers --store={store}", 2),
    "modern-8192": Piece("modern full-8192x4 --peer_compile=layers", 2),
    "modern-8192-flex": Piece("modern full-8192x4 --peer_attention=flex_attention", 3),
    "packed": Piece("packed --store={store}", 4),
    "packed-tasks": Piece("packed --tasks=sst2,rte --data={glue} --tokenizer={model}", 6),
    "memory": Piece("memory large-512x32", 4),
    "scaling-2": Piece("scaling base-128x256 large-512x32 large-512x64 --devices 1 2 --fsdp", 8, gpus=2),
    "scaling-4": Piece("scaling base-128x256 large-512x32 large-512x64 --devices 1 2 4 --fsdp", 9, gpus=4),
    "predict": Piece("predict --model={model} --file={glue}/SST-2/dev.tsv", 4),
    "finetune-start": Piece("finetune_startup --checkpoint={model} --data={glue} --task=mrpc", 2),
    "numerics": Piece("numerics --store={store} --batch=64 --gpus=0", 6),
    **{f"quality-{name}": Piece(QUALITY + run + DRAW, 9) for name, run in RECIPES.items()},
    **{f"transfer-{name}": Piece(f"{TRANSFER}{name}={{out}}/quality/{run}/model", 6) for name, run in RECIPES.items()},
    "input": Piece("input --text={text} --vocab={vocab} --original={original} --memory=1", 9, gpus=0),
    **{f"finetune-{name}": Piece(FINETUNE + options, 8) for name, options in TASKS.items()},
}


def commands(name: str) -> list[list[str]]:
    """The words of a piece's commands; what names no directory for its results gets OUT/NAME."""
    found = [command.split() for command in PIECES[name].command.split(" && ")]
    return [words if any("{out}" in word for word in words) else [*words, f"--out={{out}}/{name}"] for words in found]


def shown_command(name: str) -> str:
    """The command of a piece as a page shows it: STORE for {store}."""
    return re.sub("{(\\w+)}", lambda word: "bench" if word[1] == "out" else word[1].upper(), PIECES[name].command)


def run(name: str, given: Mapping[str, str], out: pathlib.Path) -> dict[str, Any]:
    """Runs a piece and writes OUT/NAME.json; its output goes to the screen and to OUT/NAME.log.

    Raises:
      ValueError: the command failed or printed no table.
    """
    started, printed = time.monotonic(), []
    out.mkdir(parents=True, exist_ok=True)
    with open(out / f"{name}.log", "w", encoding="utf-8") as log:
        for words in commands(name):
            program, *flags = [word.format(out=out, **given) for word in words]
            command = harness.python(f"tests.benchmarks.{program}", *flags)
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
                for line in process.stdout or ():
                    print(line, end="", flush=True)
                    log.write(line)
                    printed.append(line.rstrip("\n"))
            if process.returncode:
                raise ValueError(f"{name}: {program} ended with code {process.returncode}, see {out / name}.log")
    found = tables(printed)
    if not found:
        raise ValueError(f"{name}: no table was printed, see {out / name}.log")
    record = {
        "piece": name,
        "commands": [f"python -m tests.benchmarks.{each}" for each in shown_command(name).split(" && ")],
        "code": source_digest(),
        "commit": given["commit"],
        **machine(PIECES[name].gpus),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "seconds": round(time.monotonic() - started),
        "tables": found,
    }
    (out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record


def tables(lines: Iterable[str]) -> list[list[str]]:
    """The Markdown tables of a program's output, as their lines; where they touch, a rule tells that one begins."""
    found: list[list[str]] = []
    inside = False
    for line in lines:
        if line.startswith("|"):
            if not inside:
                found.append([])
            elif line.startswith("|--") and len(found[-1]) > 1:
                found.append([found[-1].pop()])
            found[-1].append(line)
        inside = line.startswith("|")
    return found


@functools.cache
def cards() -> list[str]:
    """The names of the GPUs, asked of NVIDIA's program: this process leaves their memory to the pieces."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return [line.strip() for line in told.splitlines() if line.strip()]


def machine(gpus: int) -> dict[str, str]:
    """The cards, of which a piece uses `gpus`, and the versions of a record."""
    versions = []
    for package in ("jax", "torch", "transformers"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{package} {metadata.version(package)}")
    names = cards()[:gpus] or [platform.processor() or platform.machine()]
    return {"card": f"{len(names)} x {names[0]}" if len(names) > 1 else names[0], "versions": ", ".join(versions)}


def records(out: pathlib.Path) -> dict[str, dict[str, Any]]:
    """What has been measured, by the name of the piece."""
    return {name: json.loads(path.read_text()) for name in PIECES if (path := out / f"{name}.json").exists()}


def to_run(wanted: list[str], given: Mapping[str, str], gpus: int, minutes: float, out: pathlib.Path) -> list[str]:
    """The pieces of a call without names: not yet measured by this code, possible here, and short enough together."""
    done = {name for name, record in records(out).items() if record["code"] == source_digest()}
    chosen: list[str] = []
    for name in wanted or PIECES:
        piece = PIECES[name]
        if not wanted:
            if name in done or piece.gpus > gpus or piece.needs - {key for key, value in given.items() if value}:
                continue
            if sum(PIECES[each].minutes for each in chosen) + piece.minutes > minutes:
                continue
        chosen.append(name)
    return chosen


def section(names: Iterable[str], found: Mapping[str, Mapping[str, Any]]) -> str:
    """What a page shows of some pieces: tables, joined where their columns are the same, then how they were made.

    A later piece's row replaces one with the same first two cells: some programs print what earlier pieces left too.
    """
    joined: dict[str, dict[tuple[str, ...], str]] = {}
    told: dict[str, dict[str, None]] = {}
    for name in names:
        record = found[name]
        for head, rule, *rows in itertools.chain.from_iterable(map(tables, record["tables"])):
            lines = joined.setdefault(head, {("",): head, ("-",): rule})
            lines |= {tuple(row.split("|")[1:3]): row for row in rows}
        where = f"{record['card']}, {record['versions']}, {record['commit']}, {record['date']}"
        told.setdefault(where, {}).update(dict.fromkeys(record["commands"]))
    shown = ["\n".join(lines.values()) for lines in joined.values()]
    shown += [f"{where}:\n\n```bash\n" + "\n".join(commands) + "\n```" for where, commands in told.items()]
    return "\n\n".join(shown)


def rewritten(page: str, found: Mapping[str, Mapping[str, Any]]) -> str:
    """The page with the measured sections made anew; those of which no piece was measured stay.

    Raises:
      ValueError: a section names no piece.
    """

    def replace(match: re.Match[str]) -> str:
        names = match[1].split()
        if unknown := [name for name in names if name not in PIECES]:
            raise ValueError(f"measured: {', '.join(unknown)} is not one of {', '.join(PIECES)}")
        names = [name for name in names if name in found]
        if not names:
            return match[0]
        return f"<!-- measured: {match[1]} -->\n\n{section(names, found)}\n\n<!-- end -->"

    return re.sub(r"<!-- measured: (.+?) -->\n(.*?)<!-- end -->", replace, page, flags=re.DOTALL)


def main(argv: list[str]) -> None:
    parser = harness.make_parser("all", __doc__)
    add = parser.add_argument
    add("pieces", nargs="*", metavar="PIECE", help="of --list; default: what fits into --minutes and is not measured")
    add("--out", type=pathlib.Path, default=pathlib.Path("bench/all"))
    add("--minutes", type=float, default=9)
    add("--commit", default=source_version(), help="what to call this code, where it is not a git checkout")
    add("--list", action="store_true", help="the pieces, their minutes and data")
    add("--page", type=pathlib.Path, help="write what was measured into this page")
    data = {
        "store": "token store",
        "glue": "folder with GLUE's data",
        "data": "folder with glue/, squad/ and ner/, for `transfer`",
        "model": "model to fine-tune and predict with",
        "text": "text files, for `input`",
        "vocab": "vocabulary directory, for `input`",
        "original": "folder with the original's create_pretraining_data.py and tokenization.py, for `input`",
    }
    for name, meaning in data.items():
        add(f"--{name}", default="", help=meaning)
    args = parser.parse_args(argv)
    if unknown := [name for name in args.pieces if name not in PIECES]:
        parser.error(f"{', '.join(unknown)}: not one of {', '.join(PIECES)}")
    if args.list:
        done = records(args.out)
        for name, piece in PIECES.items():
            measured = f"measured {done[name]['date']}" if name in done else ""
            print(f"{name:22} {piece.minutes:3g} min  {' '.join(sorted(piece.needs)):12} {measured}".rstrip())
        return
    if args.page:
        args.page.write_text(rewritten(args.page.read_text(encoding="utf-8"), records(args.out)), encoding="utf-8")
        return
    given = {name: getattr(args, name) for name in (*data, "commit")}
    if missing := {need for name in args.pieces for need in PIECES[name].needs if not given[need]}:
        parser.error(f"{', '.join(args.pieces)}: needs {', '.join(f'--{name}' for name in sorted(missing))}")
    failed = []
    for name in to_run(args.pieces, given, len(cards()), args.minutes, args.out):
        print(f"== {name}: {PIECES[name].minutes:g} minutes", flush=True)
        try:
            run(name, given, args.out)
        except ValueError as error:
            print(error, file=sys.stderr)
            failed.append(name)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main(sys.argv[1:])
