"""A run of two processes in which one freezes, from the watchdog to the launcher's second start."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from bertjax.formats.checkpoint import SavedStates

REPO = pathlib.Path(__file__).resolve().parents[2]
STEPS = 120


@pytest.fixture
def hosts(cloud):
    """Two hosts of a slice that is ready, with bertjax installed."""
    for number in "01":
        root = cloud.root / "hosts" / f"w{number}" / "bertjax"
        (root / "code").mkdir(parents=True)
        for name in ("bertjax", "configs", "launch"):
            (root / "code" / name).symlink_to(REPO / name)
        (root / "ready").touch()
    cloud.has_slice("READY")
    cloud.environment |= {
        "PATH": f"{pathlib.Path(sys.executable).parent}:{cloud.environment['PATH']}",
        "PYTHONPATH": str(REPO),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1"),
        "BERTJAX_POLL": "1",
        "BERTJAX_GRACE": "2",
        "BERTJAX_STOP_SECONDS": "2",
    }
    yield cloud.root / "hosts"
    for pid in (cloud.root / "hosts").glob("*/bertjax/run/pid"):
        try:
            os.killpg(int(pid.read_text()), signal.SIGKILL)
        except ProcessLookupError:
            pass


def babysitter(cloud, store, workdir):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    flags = [
        "--config=configs/base.py",
        f"--config.data.corpus={store}",
        f"--workdir={workdir}",
        f"--config.phases=(({STEPS},32),)",
        "--config.batch_size=8",
        "--config.model.num_hidden_layers=1",
        "--config.model.hidden_size=16",
        "--config.model.num_attention_heads=2",
        "--config.model.intermediate_size=32",
        "--config.optimizer.warmup_steps=10",
        "--config.eval.rows=16",
        "--config.log.every_steps=1",
        "--config.log.tensorboard=false",
        "--config.checkpoint.every_steps=20",
        "--config.watchdog_seconds=8",
        f"--coordinator=127.0.0.1:{port}",
        "--processes=2",
    ]
    # As on real hosts each finds out by itself which one it is; here by its home.
    command = 'exec python -m bertjax.main "$@" --process_id="${HOME: -1}"'
    return subprocess.Popen(
        ["launch/babysit.sh", "bert", "--type=v5e-16", "--", "bash", "-c", command, "main", *flags],
        cwd=REPO,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=cloud.environment,
    )


def process_on(host):
    """The number of the Python process that trains there."""
    supervisor = (host / "bertjax" / "run" / "pid").read_text().strip()
    return int(
        subprocess.run(["pgrep", "-P", supervisor], text=True, check=True, capture_output=True).stdout.split()[0]
    )


def losses(workdir):
    records = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [(record["step"], record["loss"]) for record in records if "loss" in record]


def weights(workdir):
    return SavedStates(workdir / "checkpoints").restore_numpy(STEPS)[0]["params"]


@pytest.mark.slow
def test_a_frozen_process_is_named_the_other_ends_and_the_next_start_goes_on(cloud, hosts, random_store, tmp_path):
    calm, rough = tmp_path / "calm", tmp_path / "rough"
    babysitting = babysitter(cloud, random_store, calm)
    said = babysitting.communicate(timeout=300)[0]
    assert babysitting.returncode == 0, said

    babysitting = babysitter(cloud, random_store, rough)
    for frozen, step in (("w0", 20), ("w1", 60)):
        while not (rough / "checkpoints" / str(step)).exists():
            assert babysitting.poll() is None, babysitting.stdout.read()
            time.sleep(0.01)
        os.kill(process_on(hosts / frozen), signal.SIGSTOP)
    said = babysitting.communicate(timeout=300)[0]
    assert babysitting.returncode == 0, said

    # What the operator reads: which process, what it waited for, how long, and what to suspect.
    for failure, left in ((1, 1), (2, 0)):
        assert re.search(
            rf"watchdog: process \d+ on \S+ \({left} of 2\): .* has not ended for \d+ s \(limit: "
            r"--config.watchdog_seconds=8\)\. Suspect .*another process of the run.*\. "
            r"Exit code 76: the same command goes on",
            said,
        ), said
        assert f"failed: 76 (failure {failure}, 3 allowed in a row)" in said
    assert said.count("a host ended with code 76 and others did not follow: stopping them") == 2
    log = (hosts / "w0" / "bertjax" / "run" / "log").read_text()
    assert log.count("resumed from the checkpoint of step") == 2, log

    assert losses(rough) == losses(calm) and len(losses(calm)) == STEPS
    jax.tree.map(np.testing.assert_array_equal, weights(rough), weights(calm))
