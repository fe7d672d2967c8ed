"""Every program, whatever it is given: one last line that tells, no traceback, nothing left behind.

The commands run in forks of one process that has imported the library, so each costs milliseconds
and still ends as the real program does.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.fakes import SPECIALS

ROOT = pathlib.Path(__file__).parents[1]

FORKS = """
import gc, importlib, json, os, resource, sys, time
import bertjax.main  # defines the flags of a run
for name in ("build_corpus", "convert", "evaluate", "features", "predict", "report", "sweep",
             "train_vocab", "bench"):
    importlib.import_module("bertjax.tools." + name)
for late in ("bertjax.tasks.job", "bertjax.tasks.suite", "bertjax.pretraining.job",
             "bertjax.process.runtime", "bertjax.data.build", "bertjax.interop.stablehlo"):
    importlib.import_module(late)
gc.collect()
gc.freeze()  # children copy no pages because of it
for line in sys.stdin:
    command, out = json.loads(line)
    child = os.fork()
    if not child:
        for number in (1, 2):
            os.dup2(os.open(out + str(number), os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
        sys.argv = command
        resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
        if command[0] == "bertjax":
            bertjax.main.run()
        else:
            sys.modules["bertjax.tools." + command[0]].main(command[1:])
        sys.exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with a model, a corpus and files that cannot be read."""
    place = tmp_path_factory.mktemp("place")
    model = place / "model"
    model.mkdir()
    golden = ROOT / "tests" / "interop" / "golden"
    for name in ("config.json", "model.safetensors"):
        shutil.copy(golden / name, model / name)
    words = [*SPECIALS, *"abcdefghijklmnopqrstuvwxyz", *"012345"]
    (model / "vocab.txt").write_text("\n".join(words) + "\n")
    for damage in ("deep", "digits", "list", "text", "nothing", "latin"):
        shutil.copytree(model, place / damage)
    shutil.copytree(model, place / "shards")
    (place / "shards" / "model.safetensors").unlink()
    (place / "shards" / "model.safetensors.index.json").write_text('{"weight_map": {"a": 5}}')
    (place / "deep" / "config.json").write_text("[" * 100_000)
    config = (model / "config.json").read_text()
    (place / "digits" / "config.json").write_text(config.replace("37", "3" * 10_000))
    (place / "list" / "config.json").write_text("[]")
    (place / "text" / "config.json").write_text("hello")
    (place / "nothing" / "model.safetensors").write_bytes(b"")
    (place / "latin" / "vocab.txt").write_bytes(b"[PAD]\n\xe9\n")
    (place / "a.txt").write_text("one two.\nthree four.\n\nfive six.\nseven eight.\n")
    (place / "b.txt").write_text("a\nb\n")
    (place / "latin.txt").write_bytes(b"caf\xe9\n")
    (place / "deep.jsonl").write_text("[" * 100_000 + "\n")
    (place / "deep.json").write_text("[" * 100_000)
    (place / "empty.txt").write_text("")
    (place / "train.csv").write_text("text,label\na b,x\nc d,y\n")
    (place / "config.py").write_text("\ndef get_config():\n    return 1 / 0\n")
    for name, loss in (("run", 1.0), ("odd", [])):
        (place / name).mkdir()
        (place / name / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": loss}) + "\n")
    (place / "run" / "result.json").write_text('{"scores": 3, "rows": [], "history": [4], "details": "x"}')
    (place / "locked").mkdir()
    (place / "locked" / "f").write_text("")
    return place


@pytest.fixture(scope="module")
def forks():
    """Runs one command in a fork; returns its exit code, standard output and standard error."""
    server = subprocess.Popen(
        [sys.executable, "-c", FORKS],
        text=True,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""},
    )

    def run(command, out):
        server.stdin.write(json.dumps([command, out]) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        return code, *(pathlib.Path(out + n).read_text(errors="replace") for n in "12")

    yield run
    server.stdin.close()
    server.wait()


GLUE = "--config=configs/glue.py:mrpc"
BASE = "--config=configs/base.py"
# command, words of its last line; {p} is the directory
BAD = [
    (f"bertjax {BASE} --config.data.corpus={{p}}/absent", "absent"),
    (f"bertjax {BASE} --config.data.corpus={{p}}/a.txt --workdir={{p}}/w", "a.txt"),
    (f"bertjax {BASE} --config.data.corpus={{p}}/model --workdir={{p}}/w", "model"),
    (f"bertjax {BASE} --config.data.corpus={{p}}/absent --workdir={{p}}/new/w", "absent"),
    (f"bertjax {BASE} --config.data.corpus=x --workdir={{p}}/a.txt/w", "a.txt"),
    (f"bertjax {BASE} --epochs=3", "--config.task.epochs"),
    (f"bertjax {BASE} --lr=3", "--config.optimizer.learning_rate"),
    (f"bertjax {BASE} --config.optimizer.lr=3", "--config.optimizer.learning_rate"),
    (f"bertjax {BASE} --config.steps=3", "--config.phases"),
    (f"bertjax {BASE} --config.phases=((2,32", "config.phases"),
    (f"bertjax {BASE} --config.phases=2", "config.phases"),
    (f"bertjax {BASE} --config.batch_size", "config.batch_size"),
    (f"bertjax {BASE} --output_dir=x", "--workdir"),
    ("bertjax --config={p}/config.py", "config.py, line 3: ZeroDivisionError"),
    ("bertjax --config={p}/absent.py", "absent.py"),
    ("bertjax --config={p}", "{p}"),
    ("bertjax --config={p}/a.txt", "a.txt, line 1"),
    ("bertjax --config={p}/latin.txt", "latin.txt"),
    ("bertjax --flagfile={p}/absent", "absent"),
    (f"bertjax {GLUE} --config.init_from={{p}}/absent --config.task.data={{p}}", "{p}"),
    (
        f"bertjax {GLUE} --config.init_from={{p}}/model --config.task.data={{p}}/absent --config.task.max_length=16",
        "absent",
    ),
    (f"bertjax {GLUE} --config.init_from={{p}}/model", "config.task.data"),
    (
        "bertjax --config=configs/classify.py --config.init_from={p}/model --config.task.data={p}/train.csv",
        "train.csv is a file",
    ),
    (f"bertjax {GLUE} --config.init_from={{p}}/deep --config.task.data={{p}}", "deep/config.json"),
    ("evaluate --model={p}/model --task=table --data={p} --options=[", "must be a JSON object: '{{\"NAME\": VALUE}}'"),
    ("evaluate --model={p}/model --task=table --data={p} --options=" + "[" * 100_000, "deep"),
    ("evaluate --model={p}/model --task=table --data={p}/absent.csv", "--data={p}/absent.csv does not exist"),
    ("evaluate --model={p}/model --task=tabel --data={p}", "tabel"),
    ("evaluate --model={p}/model --task=mrpc --data={p} --max_length=16", "{p}"),
    ("evaluate --model={p}/model --task=mrpc --data={p} --split=nope --max_length=16", "{p}"),
    ("evaluate --model={p}/model --task=mrpc --data={p} --max_length=16 --out={p}/new/out", "{p}"),
    ("predict --model={p}/absent --task=fill-mask --text=a", "absent"),
    ("predict --model={p}/a.txt --task=fill-mask --text=a", "a.txt"),
    ("predict --model={p}/deep --task=fill-mask --text=a --out={p}/new/o", "deep/config.json"),
    ("predict --model={p}/digits --task=fill-mask --text=a", "digits/config.json"),
    ("predict --model={p}/list --task=fill-mask --text=a", "list/config.json"),
    ("predict --model={p}/text --task=fill-mask --text=a", "text/config.json"),
    ("predict --model={p}/nothing --task=fill-mask --text=a", "nothing/model.safetensors"),
    ("predict --model={p}/latin --task=fill-mask --text=a", "latin/vocab.txt"),
    ("predict --model={p}/model --task=fill-mask --file={p}/absent", "absent"),
    ("predict --model={p}/model --task=fill-mask --file={p}", "{p}: Is a directory; name a file in it"),
    ("predict --model={p}/model --task=fill-mask --file={p}/latin.txt", "latin.txt"),
    ("predict --model={p}/model --task=fill-mask --text=a --out={p}", "{p}"),
    (
        "predict --model={p}/model --task=fill-mask --text=a --out={p}/a.txt/x",
        "{p}/a.txt: File exists; it is a file: choose another place",
    ),
    ("predict --model={p}/model --task=fill-mask --text=a --out=/dev/full/x", "/dev/full"),
    ("predict --model={p}/model --task=fill-mask", "--text"),
    ("predict --model={p}/model --task=fil --text=a", "fil"),
    ("predict --model={p}/model --task=classify --text=a", "classif"),
    ("predict --task=classify --text=a", "--model"),
    ("predict --modle={p}/model --task=fill-mask --text=a", "no such flag: --modle={p}/model. Did you mean --model?"),
    ("convert --model={p}/model --out={p}/new/out", "no such flag: --model={p}/model. Did you mean --from?"),
    ("train_vocab -input={p}/a.txt --output={p}/new", "no such flag: -input={p}/a.txt. Did you mean --input?"),
    ("predict --model={p}/model --task=fill-mask --text=a --batch_size=x", "--batch_size"),
    ("predict --model={p}/model --task=fill-mask --text=a --config.seed=3", "--config.seed has no effect"),
    ("predict --model={p}/model --task=fill-mask --text=a --max_length=9", "--config.task.max_length has no effect"),
    ("predict --model={p}/model --task=classify --text=a --top_k=3", "--top_k=3 has no effect"),
    ("predict --model={p}/model --task=fill-mask --text=a --columns=x", "--columns=x has no effect on --text"),
    ("predict --model={p}/model --task=fill-mask --file={p}/b.txt --columns=x", "--columns=x has no effect"),
    ("evaluate --model={p}/model --task=mrpc --data={p} --config.mesh.fsdp=2", "--config.mesh.fsdp has no effect"),
    ("convert --from={p}/model --out={p}/new/out --private", "--private has no effect"),
    ("convert --from={p}/model --out={p}/new/out --extend_positions=repeat", "has no effect without --max_positions"),
    ("features --model={p}/model --file={p}/b.txt --out={p}/x.csv", ".jsonl"),
    ("features --model={p}/absent --file={p}/b.txt --out={p}/new/x.jsonl", "absent"),
    ("features --model={p}/model --file={p}/absent --out={p}/x.jsonl", "absent"),
    ("features --model={p}/model --file={p}/b.txt --out={p}/x.npz --layers=9", "9"),
    ("features --model={p}/model --file={p}/b.txt --output={p}/x.npz", "--out"),
    ("convert --from={p}/absent --out={p}/new/out", "absent"),
    ("convert --from={p}/model --out={p}/locked", "locked"),
    ("convert --from={p}/model --out={p}/a.txt", "a.txt"),
    ("convert --from={p}/model --out={p}/new/out --add_vocab={p}/absent", "absent"),
    ("convert --from={p}/deep --out={p}/new/out", "deep/config.json"),
    ("convert --from={p}/shards --out={p}/new/out", "shards/model.safetensors.index.json"),
    ("report {p}/absent", "absent"),
    ("report {p}/model", "model"),
    ("report gs://bucket/run", "gs://bucket/run is not on a local disk"),
    ("report", "RUN"),
    ("train_vocab --input={p}/absent --output={p}/new", "absent"),
    ("train_vocab --input={p}/a.txt --output={p}/new --num_unused=-1", "at least 0"),
    ("train_vocab --input={p}/a.txt --output={p}/new --max_chars=0", "at least 1"),
    ("build_corpus --input={p}/a.txt --tokenizer={p}/model --output={p}/new/s --workers=-3", "--workers"),
    ("train_vocab --input={p}/latin.txt --output={p}/new", "latin.txt"),
    ("train_vocab --input={p}/empty.txt --output={p}/new", "no words"),
    ("train_vocab --input={p}/a.txt --output={p}/a.txt", "a.txt"),
    ("train_vocab --input={p}/a.txt --output={p}/new --compare={p}/absent", "absent"),
    ("train_vocab --input={p}/a.txt --output={p}/new --vocab_size=3", "3"),
    ("train_vocab --input={p}/a.txt {p}/b.txt --output={p}/new", "wildcard"),
    ("train_vocab --input={p}/a.txt --output={p}/new --heldout={p}/absent", "absent"),
    ("build_corpus --input={p}/absent --tokenizer={p}/model --output={p}/new/s", "absent"),
    ("train_vocab --input={p}/deep.jsonl --output={p}/new", "deep.jsonl"),
    ("build_corpus --input={p}/a.txt --tokenizer={p}/absent --output={p}/new/s", "absent"),
    ("build_corpus --input={p}/a.txt --output={p}/new/s", "--tokenizer"),
    ("build_corpus --output={p}/new/s", "--input"),
    *(
        (f"{command}=gs://bucket/x", "gs://bucket/x is not on a local disk")
        for command in (
            "build_corpus --input={p}/a.txt --tokenizer={p}/model --output",
            "convert --from={p}/model --out",
            "predict --model={p}/model --task=fill-mask --text=[MASK] --out",
            "sweep --task=mrpc --data={p} --init_from={p}/model --workdir",
            # and what is read, but for stores
            "build_corpus --input={p}/a.txt --output={p}/new/s --tokenizer",
            "build_corpus --output={p}/new/s --input",
            "convert --out={p}/new/out --from",
            "features --model={p}/model --out={p}/x.npz --file",
            "sweep --task=mrpc --init_from={p}/model --workdir={p}/new/w --data",
            "train_vocab --input={p}/a.txt --output={p}/new --compare",
        )
    ),
    ("build_corpus --inspect --output={p}/absent", "absent"),
    ("build_corpus --inspect --output={p}/model", "model"),
    ("build_corpus --input={p}/a.txt --tokenizer={p}/model --output={p}/s --shard=9", "--shard"),
    ("sweep --task=mrpc --data={p} --init_from={p}/absent --workdir={p}/new/w", "{p}"),
    ("sweep --task=mrpc --data={p}/absent --init_from={p}/model --workdir={p}/new/w --max_length=16", "absent"),
    ("sweep --task=nope --data={p} --init_from={p}/model --workdir={p}/new/w", "nope"),
    ("sweep --task=mrpc --data={p} --init_from={p}/model --workdir={p}/new/w --seeds=0", "--seeds"),
    ("sweep --task=mrpc --data={p} --init_from={p}/model --workdir={p}/w --epochs=x", "--epochs"),
    ("report {p}/run", "result.json"),
    ("report {p}/odd", "metrics.jsonl"),
    ("bench input --store={p}/absent", "absent"),
    ("bench step huge@1x1", "huge@1x1"),
    ("bench step --config={p}/config.py", "config.py"),
]


def contents(place):
    return {path: path.stat().st_mtime_ns for path in sorted(place.rglob("*")) if path.is_file()} | {
        path: 0 for path in sorted(place.rglob("*")) if path.is_dir()
    }


@pytest.mark.parametrize("command, words", BAD, ids=[text[:90] for text, _ in BAD])
def test_a_wrong_command_ends_with_one_line_and_leaves_nothing(command, words, place, forks, tmp_path):
    before = contents(place)
    code, _, errors = forks(command.replace("{p}", str(place)).split(), str(tmp_path / "out"))
    last = (errors.splitlines() or [""])[-1]
    assert code in (1, 2), errors[-2000:]
    assert "Traceback" not in errors, errors[-3000:]
    assert last.startswith(command.split()[0] + ":") and words.format(p=place) in last, last
    assert contents(place) == before
