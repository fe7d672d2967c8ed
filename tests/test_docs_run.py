"""Every block of commands and of Python in the README and the pages of docs/ is run, page by page, in order.

The pages stand in a directory of small made-up data. Sizes and numbers of steps are changed by settings (SHORTER); what
cannot run on a machine without network, cluster or several GPUs is in NOT_RUN, with who runs it instead.
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from tests.interop.hub_server import HubServer, person
from tests.test_readme import PAGES, ROOT

pytestmark = pytest.mark.slow

MODEL = (
    "--config.model.num_hidden_layers=4 --config.model.hidden_size=32 --config.model.num_attention_heads=2 "
    "--config.model.intermediate_size=64 --config.optimizer.warmup_steps=1 --config.log.every_steps=1"
)
SHORT = "--config.phases='((3,32),)' --config.batch_size=8 --config.eval.rows=8"
TWO = SHORT.replace("(3,32)", "(2,32),(2,64)")
TASK = "--config.task.epochs=1 --config.task.max_length=32 --config.batch_size=8"
MODERN = SHORT + " --config.accumulation=1 --config.model.vocab_multiple=1 --config.eval.seq_length=32"
# (what a command holds, a pattern in it, what stands there instead). "$" is its end: the last of two flags counts.
SHORTER = [
    (r"configs/base\.py:(two_phase|packed)|:small.*modern|optimizer\.name=lamb", "$", f" {MODEL} {TWO}"),
    (r"configs/(base|demo)\.py(?!:)(?!.*lamb)", "$", f" {MODEL} {SHORT}"),
    (r"configs/demo\.py", "$", " --config.data.demo_megabytes=1 --config.data.demo_vocab_size=600"),
    (r"configs/modern\.py", "$", f" {MODEL} {MODERN}"),
    (r"configs/(miniatures|continued)\.py", "$", f" {SHORT} --config.optimizer.warmup_steps=1"),
    (r"configs/miniatures\.py", "$", f" {MODEL}"),
    (r"bertjax\.main.*configs/(glue|classify|ner|qa|swag|tag)\.py(?!.*runs/long)", "$", f" {TASK}"),
    (r"runs/long( |$)|configs/squad", "$", " --config.task.epochs=1 --config.batch_size=8"),
    (r"tools\.sweep --task", "$", " --batch_size=8 --learning_rate=5e-5 --epochs=1 --max_length=32"),
    (r"tools\.sweep --config", "$", f" {TASK}"),
    (r"tools\.sweep", r"--seeds=\d+", "--seeds=1"),
    (r"soak_run", r"--kills=\d+", "--kills=1"),
    (r"tools\.bench step", r"(base|large)@\d+x\d+", "tiny@32x2"),
    (r"tools\.train_vocab.*(corpus/|hf:)", "$", " --vocab_size=600"),
    (r"tools\.build_corpus --output=store --inspect", "$", " --seq_length=32"),
    (r"--processes=2", r"STORE", "store"),
    (r"--processes=2", r"RUN", "runs/two"),
    (r"--processes=2", r"HOST:PORT", "127.0.0.1:{port}"),
]
# (what a command holds, why it is not run here)
NOT_RUN = [
    (r"pip install|python -m venv", ".ci/run does, in a fresh environment"),
    (r"^pytest|BERTJAX_PLAN_FULL", "a test of its own"),
    (r"^launch/|^sbatch|^docker|^kubectl|^tail|^export BERTJAX_ZONE", "tests/launch, with clusters that are made up"),
    (r"tests\.benchmarks\.(?!soak_run)", "measures for minutes on GPUs; tests/benchmarks runs the parts of it"),
    (r"tools\.plan.*--topology|^export PYTHONPATH", "needs the TPU compiler: tests/tools/test_plan.py"),
]


# What stands in a directory for what another page has made.
STAND_INS = {
    "MODEL": "runs/base/model",
    "wiki": "store",
    "runs/demo": "runs/base",
    "runs/lamb": "runs/base",
    "runs/sentences": "runs/mnli",
}


def code(page: str) -> list[tuple[str, str]]:
    """(language, text) of the blocks that can be run."""
    return re.findall(r"^```(bash|python)\n(.*?)^```", PAGES[page], re.MULTILINE | re.DOTALL)


def lines(block: str) -> list[str]:
    """The lines of a bash block, continued ones as one."""
    return block.replace("\\\n", " ").splitlines()


def not_run(line: str) -> str:
    return next((why for pattern, why in NOT_RUN if re.search(pattern, line)), "")


def shorter(line: str) -> str:
    if not line.startswith(("python -m bertjax", "python -m tests")):
        return line
    for where, pattern, instead in SHORTER:
        if re.search(where, line):
            line = re.sub(pattern, lambda _, instead=instead: instead, line.rstrip(), count=0 if pattern != "$" else 1)
    return line


def both_processes(line: str, port: int) -> str:
    """A command for process 0 of two, with that of process 1 beside it."""
    line = line.replace("{port}", str(port))
    return f"{line.replace('--process_id=0', '--process_id=1')} &\n{line}\nwait" if "--process_id=0" in line else line


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """A directory with what the pages take for given."""
    place = tmp_path_factory.mktemp("pages")
    for name in ("configs", "docs", "launch", "tests"):
        (place / name).symlink_to(ROOT / name)
    prose = [paragraph for text in PAGES.values() for paragraph in text.split("\n\n") if re.match(r"[A-Z]", paragraph)]
    (place / "corpus").mkdir()
    for part in range(4):
        (place / "corpus" / f"{part}.txt").write_text("\n\n".join(p.replace(". ", ".\n") for p in prose[part::4]))
    (place / "words.txt").write_text("checkpoint\nbertjax\n")
    (place / "texts.txt").write_text("One text.\nAnother one.\n")
    written = {
        "reviews/train.csv": ["review,sentiment", *["A good film.,positive", "A bad one.,negative"] * 16],
        "reviews/dev.csv": ["review,sentiment", *["A good one.,positive", "A bad film.,negative"] * 4],
        "new.csv": ["review", "A film."],
        "words/train.conll": ["Anna B-PER", "sings O", ""] * 8,
        "words/dev.conll": ["Bob B-PER", "sings O", ""] * 4,
        "glue/AX/diagnostic.tsv": ["index\tsentence1\tsentence2", "0\tOne text.\tAnother."],
    }
    mrpc = ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"]
    mnli = ["index\tsentence1\tsentence2\tgold_label"]
    for number in range(16):
        mrpc.append(f"{number % 2}\t1\t2\tOne text.\tAnother.")
        mnli.append(f"{number}\tOne text.\tAnother.\t{('entailment', 'neutral', 'contradiction')[number % 3]}")
    written |= {f"glue/MRPC/{split}.tsv": mrpc for split in ("train", "dev")}
    written |= {f"glue/MNLI/{split}.tsv": mnli for split in ("train", "dev_matched")}
    answer = {"text": "by hand", "answer_start": 12}
    question = {"id": "1", "question": "How is it made?", "answers": [answer]}
    squad = {"data": [{"title": "A", "paragraphs": [{"context": "It was made by hand.", "qas": [question]}]}]}
    written |= {f"squad/{split}-v1.1.json": [json.dumps(squad)] for split in ("train", "dev")}
    for name, content in written.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text("\n".join(content) + "\n")
    first = next(block for language, block in code("docs/corpus.md") if "build_corpus" in block)
    mnli = "python -m bertjax.main --config=configs/glue.py:mnli --config.init_from=runs/base/model"
    books = "python -m bertjax.tools.build_corpus --input='corpus/[01].txt' --tokenizer=vocab --output=books"
    run(place, f"{first}\n{books}\n{mnli} --config.task.data=glue --workdir=runs/mnli\n")
    for name, source in STAND_INS.items():
        shutil.copytree(place / source, place / name)
    records(place)
    modern(place)
    data_sets(place)
    return place


def records(place: pathlib.Path) -> None:
    """data/LENGTH/: files as create_pretraining_data.py writes them."""
    from tests.tfrecords import make_example, write_records

    pieces = (place / "vocab" / "vocab.txt").read_text().split("\n")
    cls, sep, mask = (pieces.index(f"[{name}]") for name in ("CLS", "SEP", "MASK"))
    for length in (32, 64):
        rows = []
        for number in range(40):
            words, pad = list(range(200 + number, 209 + number)), [0] * (length - 12)
            fields = {
                "input_ids": [cls, mask, *words, sep, *pad],
                "input_mask": [1] * 12 + pad,
                "segment_ids": [0] * 6 + [1] * 6 + pad,
                "masked_lm_positions": [1, 0],
                "masked_lm_ids": [words[0], 0],
                "masked_lm_weights": np.array([1, 0], np.float32),
                "next_sentence_labels": [number % 2],
            }
            rows.append(make_example(fields))
        (place / "data" / str(length)).mkdir(parents=True)
        for name in ("part-0", "dev.tfrecord"):
            write_records(place / "data" / str(length) / name, rows)


def data_sets(place: pathlib.Path) -> None:
    """served/: small data sets, which the Hub serves."""
    from tests.tasks import test_named_data as named

    pair = {**named.PAIR, "label": named.EQUIVALENT, "idx": named.NUMBER}
    named.write_splits(place / "served/glue/mrpc", pair, train=named.pairs(16), validation=named.pairs(4))
    text = {"text": named.STRING, "label": named.CLASSES(names=["neg", "pos"])}
    films = [{"text": f"Film {number}.", "label": number % 2} for number in range(16)]
    named.write_splits(place / "served/imdb/plain_text", text, train=films, test=films)
    articles = (ROOT / "docs" / "texts" / "german.txt").read_text().split("\n\n")
    rows = [{"text": article} for article in articles]
    named.write_splits(place / "served/wikipedia/20231101.de", {"text": named.STRING}, train=rows)
    for folder in (place / "served").iterdir():
        named.name_configurations(folder)


def modern(place: pathlib.Path) -> None:
    """hub/: a small ModernBERT, which the Hub serves."""
    import jax

    from bertjax.interop.huggingface import write_directory
    from bertjax.model.heads import BertForMaskedLM, shared_init
    from bertjax.model.presets import PRESETS
    from bertjax.tokenization import load_tokenizer

    tokenizer = load_tokenizer(place / "vocab")
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    config = dataclasses.replace(PRESETS["modernbert-small"], vocab_size=tokenizer.vocab_size, **sizes)
    params = shared_init(BertForMaskedLM(config), jax.random.key(0))
    write_directory(place / "hub", config, params, "BertForMaskedLM", tokenizer)


def run(place: pathlib.Path, block: str, language: str = "bash", port: int = 0) -> str:
    """Standard output of a block; lines that are not run are left out."""
    environment = {
        **os.environ,
        "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1"),
        "HF_ENDPOINT": f"http://127.0.0.1:{port}",
        "HF_TOKEN": "secret",
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(place / "cache"),
    }
    if language == "bash":
        kept = [both_processes(shorter(line), port + 1) for line in lines(block) if not not_run(line)]
        command = ["bash", "-euo", "pipefail", "-c", "\n".join(kept)]
    else:
        command = [sys.executable, "-c", block]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, f"{command[-1]}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def runs(page: str) -> bool:
    """Whether a block of the page is run here; test_readme.py runs those of docs/python.md."""
    kept = [language == "python" or not all(map(not_run, lines(block))) for language, block in code(page)]
    return any(kept) and page != "docs/python.md"


@pytest.mark.parametrize("page", [*filter(runs, PAGES)])
def test_the_blocks_of_a_page_run(page, place, tmp_path):
    here = tmp_path / "here"
    shutil.copytree(place, here, symlinks=True)
    for name in STAND_INS:
        if f"--workdir={name}" in PAGES[page]:  # it makes its own
            shutil.rmtree(here / name)
    models = {"answerdotai/ModernBERT-base": {"main": here / "hub"}}
    names = ("nyu-mll/glue", "stanfordnlp/imdb", "wikimedia/wikipedia")
    data = {name: {"main": here / "served" / name.split("/")[1]} for name in names}
    with contextlib.closing(HubServer(models, data, storage=here / "pushed")) as server:
        server.people = {"secret": person("USER")}
        for language, block in code(page):
            if missing := [name for name in re.findall(r"^import (\w+)$", block, re.M) if not known(name)]:
                pytest.skip(f"the rest of the page needs {', '.join(missing)}")
            run(here, block, language, int(server.url.rpartition(":")[2]))


def known(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def test_every_reason_not_to_run_a_command_is_of_use():
    every = [line for page in PAGES for language, block in code(page) if language == "bash" for line in lines(block)]
    assert [pattern for pattern, _ in NOT_RUN if not any(re.search(pattern, line) for line in every)] == []
    assert [rule for rule in SHORTER if not any(re.search(rule[0], line) for line in every)] == []
