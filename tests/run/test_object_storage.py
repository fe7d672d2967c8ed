"""Runs whose work directory and corpus are at gs://, against fake_gcs.py: killed, stopped, damaged,
and refused every few requests, they end as the run that nobody disturbed."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request

import jax
import pytest

from bertjax.interop.huggingface import write_directory
from bertjax.model.heads import BertModel, init_params
from bertjax.model.presets import BertConfig
from bertjax.tokenization import WordPieceTokenizer
from tests.fakes import SPECIALS

pytest.importorskip("gcsfs", reason="needs gcsfs, as the extra 'tpu' brings it")
pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).resolve().parents[2]
STEPS, SAVE_EVERY = 40, 10
RUN = [
    "-m",
    "bertjax.main",
    "--config=configs/miniatures.py:L=1,H=64",
    "--config.data.corpus=gs://bucket/store",
    f"--config.phases=(({STEPS},16),)",
    "--config.batch_size=8",
    "--config.optimizer.warmup_steps=5",
    "--config.mesh.data=1",
    "--config.log.every_steps=1",
    "--config.log.tensorboard=False",
    f"--config.checkpoint.every_steps={SAVE_EVERY}",
    "--config.checkpoint.keep_last=2",
    f"--config.eval.every_steps={SAVE_EVERY}",
    "--config.eval.rows=16",
]


class Bucket:
    """gs://bucket of a server of our own, with a token store, and programs that run against it."""

    def __init__(self, home, store, *options):
        self.server = subprocess.Popen(
            [sys.executable, ROOT / "tests" / "run" / "fake_gcs.py", *options], stdout=subprocess.PIPE, text=True
        )
        self.url = f"http://127.0.0.1:{int(self.server.stdout.readline())}"
        self.command = RUN
        self.environment = {
            **os.environ,
            "STORAGE_EMULATOR_HOST": self.url,
            "TENSORSTORE_GCS_HTTP_URL": self.url,
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            "HOME": str(home),
            "XLA_FLAGS": "",
            "PYTHONPATH": str(ROOT),
        }
        for path in store.rglob("*"):
            if path.is_file():
                self.write(f"store/{path.relative_to(store)}", path.read_bytes())

    def names(self, prefix):
        found = self._ask(f"/storage/v1/b/bucket/o?prefix={prefix}&maxResults=100000")
        return {item["name"]: int(item["size"]) for item in json.loads(found).get("items", ())}

    def read(self, name):
        return self._ask(f"/storage/v1/b/bucket/o/{urllib.parse.quote(name, safe='')}?alt=media")

    def write(self, name, content):
        self._ask(f"/upload/storage/v1/b/bucket/o?uploadType=media&name={name}", content)

    def _ask(self, path, data=None):
        for last in (False, True):  # the server may refuse us as it refuses others
            try:
                with urllib.request.urlopen(urllib.request.Request(self.url + path, data)) as reply:
                    return reply.read()
            except urllib.error.HTTPError as error:
                if last or error.code != 503:
                    raise

    def steps(self, run):
        """Committed checkpoints."""
        return sorted(
            int(found[1])
            for name in self.names(f"{run}/checkpoints/")
            if (found := re.search(r"/(\d+)/manifest\.json$", name))
        )

    def start(self, run):
        return subprocess.Popen(
            [sys.executable, *self.command, f"--workdir=gs://bucket/{run}"],
            cwd=ROOT,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self, run):
        """Runs to the end; what it said."""
        child = self.start(run)
        said, _ = child.communicate(timeout=300)
        assert child.returncode == 0, said
        return said

    def stop(self, run, number, step):
        """Sends a signal once `step` is logged; (exit code, what it said)."""
        child, said = self.start(run), []
        for line in child.stdout:
            said.append(line)
            if line.startswith(f"step {step}/"):
                child.send_signal(number)
        return child.wait(), "".join(said)

    def result(self, run):
        """Weights and every logged loss."""
        records = map(json.loads, self.read(f"{run}/metrics.jsonl").splitlines())
        losses = [(r["step"], r.get("loss"), r.get("eval/loss")) for r in records]
        return self.read(f"{run}/model/model.safetensors"), losses


@pytest.fixture
def bucket(request, tmp_path, random_store):
    found = Bucket(tmp_path, random_store, *getattr(request, "param", ()))
    yield found
    found.server.kill()


def test_a_run_in_a_bucket_survives_kills_and_a_damaged_checkpoint_bit_for_bit(bucket):
    bucket.finish("calm")

    # The save of step 20 waits until that of step 10 is whole.
    code, said = bucket.stop("rough", signal.SIGKILL, 21)
    assert code == -signal.SIGKILL, said
    newest = bucket.steps("rough")[-1]
    assert newest in (10, 20)

    code, said = bucket.stop("rough", signal.SIGTERM, 33)
    assert code == 75 and f"resumed from the checkpoint of step {newest}" in said, said
    newest = bucket.steps("rough")[-1]
    assert 33 <= newest < STEPS  # saved where SIGTERM met it

    files = bucket.names(f"rough/checkpoints/{newest}/state/")
    largest = max(files, key=files.get)
    bucket.write(largest, bucket.read(largest)[: files[largest] // 2])
    said = bucket.finish("rough")
    assert f"checkpoint of step {newest} in gs://bucket/rough/checkpoints is CORRUPT" in said
    assert "falling back to the checkpoint of step 30" in said

    assert bucket.steps("rough") == bucket.steps("calm")
    assert bucket.result("rough") == bucket.result("calm")


@pytest.mark.parametrize("bucket", [["--fail_every=25"]], indirect=True)
def test_requests_that_the_storage_refuses_for_a_moment_are_repeated(bucket):
    bucket.finish("run")
    assert bucket.steps("run")[-1] == STEPS


def test_a_fine_tuning_run_in_a_bucket_goes_on_bit_for_bit(bucket, tmp_path):
    words = [*SPECIALS, "good", "bad", "film"]
    config = BertConfig(8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    params = jax.jit(lambda key: init_params(BertModel(config), key))(jax.random.key(0))
    write_directory(tmp_path / "start", config, params, "BertModel", WordPieceTokenizer(words, do_lower_case=True))
    for name in ("train", "dev"):
        (tmp_path / f"{name}.csv").write_text("text,label\n" + "good film,yes\nbad film,no\n" * 40)
    bucket.command = [
        "-m",
        "bertjax.main",
        "--config=configs/classify.py",
        f"--config.init_from={tmp_path / 'start'}",
        f"--config.task.data={tmp_path}",
        "--config.batch_size=8",
        "--config.task.epochs=4",
        "--config.mesh.data=1",
        "--config.log.every_steps=1",
        "--config.log.tensorboard=False",
    ]
    bucket.finish("calm")
    code, said = bucket.stop("rough", signal.SIGTERM, 23)
    assert code == 75, said
    said = bucket.finish("rough")
    assert "resumed from the checkpoint of step 2" in said
    assert bucket.result("rough") == bucket.result("calm")
    assert {"rough/finetune.json", "rough/result.json", "rough/report.html"} <= bucket.names("rough/").keys()
