"""Several real processes on this machine, joined over loopback, against one process."""

import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from bertjax.process.distributed import Cluster, detect

WORKER = """
import sys
from bertjax.process import distributed
coordinator, processes, process_id, directory, steps, pause = sys.argv[1:]
if int(processes) > 1:
    distributed.initialize(coordinator, int(processes), int(process_id), timeout_s=60,
                           heartbeat_s=10)
import time, dataclasses, jax, jax.numpy as jnp, numpy as np
from bertjax.config import Config, OptimizerSettings
from bertjax.run.checkpoint import Checkpoints
from bertjax.log.logbook import Logbook
from bertjax.training.optimizer import make_optimizer
from bertjax.training.sharding import batch_slice, make_mesh
from bertjax.training.trainer import Phase, Trainer

class Linear:
    def init(self, key):
        return {"dense": {"kernel": jax.random.normal(key, (16, 8))}}
    def prepare(self, batch, key):
        return {"x": batch["x"] + jax.random.normal(key, batch["x"].shape)}
    def denominators(self, batch):
        return {"rows": jnp.float32(batch["x"].shape[0])}
    def loss(self, params, batch, denominators, dropout_key):
        y = batch["x"] @ params["dense"]["kernel"]
        if dropout_key is not None:
            y = y * jax.random.bernoulli(dropout_key, 0.9, y.shape)
        total = jnp.sum((y - 1) ** 2)
        return total / denominators["rows"], {"mse": (total, jnp.float32(y.shape[0]))}

mesh = make_mesh(4, 2, 1)
index, count = batch_slice(mesh)
def batches(step):
    while True:
        rows = np.random.default_rng(step).normal(size=(16, 16)).astype(np.float32)
        yield {"x": rows[index * 16 // count:(index + 1) * 16 // count]}
        step += 1
        time.sleep(float(pause))

objective = Linear()
trainer = Trainer(make_optimizer(OptimizerSettings(), 1e-2), mesh, accumulation=2)
checkpoints = Checkpoints(directory + "/checkpoints")
if checkpoints.latest() is None:
    state, step = trainer.init(objective), 0
else:
    state, step = checkpoints.restore(trainer.abstract_state(objective))
print("start", step, flush=True)
config = Config().replace({"log.every_steps": 1, "log.tensorboard": False, "checkpoint.every_steps": 5})
with Logbook(directory, step, config.log, write=lambda line: None) as logbook:
    state = trainer.fit(state, [Phase(int(steps), objective, batches)], config, logbook=logbook,
                        checkpoints=checkpoints,
                        evaluate=lambda state: trainer.evaluate(
                            objective, state.params, [next(batches(99))]))
checkpoints.close()
"""


STARTED = []


@pytest.fixture(autouse=True)
def no_process_is_left():
    yield
    while STARTED:
        process = STARTED.pop()
        process.kill()
        process.communicate()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(processes, directory, steps=8, pause=0.0, only=None, worker=WORKER):
    directory.mkdir(exist_ok=True)
    coordinator = f"127.0.0.1:{free_port()}"
    started = []
    for process_id in range(processes) if only is None else only:
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join(sys.path),
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={8 // processes}",
        }
        command = [
            sys.executable,
            "-c",
            worker,
            coordinator,
            str(processes),
            str(process_id),
            str(directory),
            str(steps),
            str(pause),
        ]
        started.append(
            subprocess.Popen(
                command,
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=open(directory / f"stderr.{process_id}", "a"),
            )
        )
    STARTED.extend(started)
    return started


def begun(process):
    """The step that a process started from (gloo also writes to standard output)."""
    for line in process.stdout:
        if line.startswith("start "):
            return int(line.split()[1])
    raise AssertionError("the process ended before it trained")


def finish(processes, directory, timeout=240):
    codes = [process.wait(timeout) for process in processes]
    if any(code not in (0, 75) for code in codes):
        print({p.name: p.read_text()[-3000:] for p in directory.glob("stderr.*")})
    return codes


def records(directory):
    import json

    return [
        {k: v for k, v in json.loads(line).items() if k in ("step", "loss", "eval/mse")}
        for line in (directory / "metrics.jsonl").open()
    ]


def final(directory, step):
    from bertjax.formats.checkpoint import SavedStates

    return SavedStates(directory / "checkpoints").restore_numpy(step)[0]


def assert_same_run(a, b, step=8):
    for x, y in zip(records(a), records(b), strict=True):
        assert x == pytest.approx(y, rel=1e-6)
    np.testing.assert_allclose(
        final(a, step)["params"]["dense"]["kernel"], final(b, step)["params"]["dense"]["kernel"], rtol=1e-5, atol=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_several_processes_train_as_one_does(tmp_path, processes):
    assert finish(start(1, tmp_path / "one"), tmp_path / "one") == [0]
    several = tmp_path / "several"
    assert finish(start(processes, several), several) == [0] * processes
    assert_same_run(tmp_path / "one", several)


@pytest.mark.slow
@pytest.mark.parametrize("number, those", [(signal.SIGTERM, [1]), (signal.SIGINT, [0, 1])])  # a terminal's goes to all
def test_a_signal_to_one_process_saves_in_all_and_one_process_resumes(tmp_path, number, those):
    assert finish(start(1, tmp_path / "one", 60), tmp_path / "one") == [0]
    several = tmp_path / "several"
    processes = start(2, several, 60, pause=0.3)
    assert [begun(process) for process in processes] == [0, 0]
    while not (several / "metrics.jsonl").exists() or not records(several):
        time.sleep(0.1)
    for one in those:
        processes[one].send_signal(number)
    assert finish(processes, several) == [75, 75]
    stopped_at = records(several)[-1]["step"]
    assert 0 < stopped_at < 60
    assert finish(start(1, several, 60), several) == [0]
    assert_same_run(tmp_path / "one", several, 60)


@pytest.mark.slow
def test_sigterm_to_one_process_that_prepares_ends_all_before_the_first_step(tmp_path):
    """Nothing compiles any more: that takes longer than a machine that is pre-empted has left."""
    prepare = 'print("start", step, flush=True)\n'
    assert prepare in WORKER
    processes = start(2, tmp_path, worker=WORKER.replace(prepare, prepare + "time.sleep(4)\n"))
    assert [begun(process) for process in processes] == [0, 0]
    processes[1].send_signal(signal.SIGTERM)
    assert finish(processes, tmp_path) == [75, 75]
    assert records(tmp_path) == [] and not list((tmp_path / "checkpoints").glob("[0-9]*"))


@pytest.mark.slow
def test_sigterm_to_one_process_ends_an_evaluation_at_the_same_batch_in_all(tmp_path):
    worker = WORKER.replace("[next(batches(99))]", "heldout()").replace(
        "objective = Linear()",
        """
def heldout():
    for number in range(600):
        if number == 20:
            print("start", number, flush=True)
        time.sleep(0.1)
        yield next(batches(number))

objective = Linear()""",
    )
    processes = start(2, tmp_path, 3, worker=worker)
    assert [begun(process) for process in processes * 2] == [0, 0, 20, 20]
    processes[1].send_signal(signal.SIGTERM)
    assert finish(processes, tmp_path, timeout=40) == [75, 75]  # the whole takes 60 s
    assert final(tmp_path, 3) and "eval/mse" not in records(tmp_path)[-1]


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(tmp_path):
    assert finish(start(1, tmp_path / "one"), tmp_path / "one") == [0]
    several = tmp_path / "several"
    assert finish(start(4, several, 5), several) == [0] * 4
    processes = start(2, several)
    assert [begun(process) for process in processes] == [5, 5]
    assert finish(processes, several) == [0, 0]
    losses = [
        [record["loss"] for record in records(run) if "loss" in record]  # not evaluations
        for run in (tmp_path / "one", several)
    ]
    assert len(losses[0]) == 8
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    np.testing.assert_allclose(
        final(several, 8)["params"]["dense"]["kernel"],
        final(tmp_path / "one", 8)["params"]["dense"]["kernel"],
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.slow
def test_a_peer_that_dies_stops_the_other_and_the_restart_resumes(tmp_path):
    processes = start(2, tmp_path, 40, pause=0.2)
    while not (tmp_path / "checkpoints" / "5").exists():
        assert processes[0].poll() is None, (tmp_path / "stderr.0").read_text()
        time.sleep(0.1)
    processes[1].kill()
    codes = [process.wait(120) for process in processes]
    assert codes[1] == -signal.SIGKILL and codes[0] not in (0, 75)
    processes = start(2, tmp_path, 12)
    assert begun(processes[0]) >= 5
    assert finish(processes, tmp_path) == [0, 0]


LOSING = """
import sys, time
from bertjax.process import distributed
coordinator, process_id = sys.argv[1:]
distributed.initialize(coordinator, 2, int(process_id), timeout_s=60, heartbeat_s=10)
from jax.experimental import multihost_utils
distributed.GRACE_S = 3
with distributed.not_waiting_after_errors():
    for number in range(1000):
        multihost_utils.sync_global_devices(str(number))
        print("start", number, flush=True)
        time.sleep(0.1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_who_lost_a_killed_peer_says_so_last_and_asks_to_be_started_again(victim):
    coordinator = f"127.0.0.1:{free_port()}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", LOSING, coordinator, str(number)],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for number in range(2)
    ]
    STARTED.extend(processes)
    assert [begun(process) for process in processes] == [0, 0]
    processes[victim].kill()
    said = processes[1 - victim].communicate(timeout=60)[1].strip().splitlines()
    assert processes[1 - victim].returncode == 77
    assert "The same command goes on from the newest checkpoint. Exit code 77." in said[-1]


@pytest.mark.slow
def test_a_peer_that_never_comes_is_a_readable_message_and_an_exit_code(tmp_path):
    worker = WORKER.replace("timeout_s=60", "timeout_s=5")
    for process_id in ("0", "1"):
        result = subprocess.run(
            [sys.executable, "-c", worker, f"127.0.0.1:{free_port()}", "2", process_id, str(tmp_path), "5", "0"],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert result.returncode == 77, result.stderr[-2000:]
        assert f"process {process_id} of 2 waited 5 s" in result.stderr


ERRING = """
import sys
from bertjax.process import distributed
coordinator, process_id, culprits, how = sys.argv[1:]
distributed.initialize(coordinator, 2, int(process_id), timeout_s=60, heartbeat_s=10)
from jax.experimental import multihost_utils
distributed.GRACE_S = 6
with distributed.not_waiting_after_errors():
    if process_id in culprits:
        print("no store on this host", file=sys.stderr)
        if how == "is interrupted":
            raise KeyboardInterrupt
        sys.exit(2) if how == "refuses" else 1 / 0
    multihost_utils.sync_global_devices("the others never come")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("culprits", "how", "code"),
    [("1", "refuses", 2), ("0", "refuses", 2), ("1", "raises", 1), ("01", "refuses", 2), ("1", "is interrupted", 130)],
)
def test_an_error_in_one_process_stops_all_within_the_heartbeat(culprits, how, code):
    coordinator = f"127.0.0.1:{free_port()}"
    began = time.monotonic()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", ERRING, coordinator, str(number), culprits, how],
            text=True,
            stderr=subprocess.PIPE,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for number in range(2)
    ]
    STARTED.extend(processes)
    said = [process.communicate(timeout=120)[1] for process in processes]
    for number, process in enumerate(processes):
        if str(number) in culprits:
            assert process.returncode == code and "no store on this host" in said[number]
        else:
            assert process.returncode == (77 if code == 130 else 1)  # as the other, a restart would not help
            assert said[number].strip().splitlines()[-1].startswith(f"bertjax: process {culprits} of 2 has ended:")
    assert time.monotonic() - began < 60  # jax's own wait is five minutes


# -------------------------------------------------------------------------------------- detection


def test_one_process_without_any_hint():
    assert detect(environment={}, tpu_devices=False) is None


def test_flags_come_first():
    slurm = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"}
    assert detect("h:1", 2, 1, slurm, True) == Cluster("flags", "h:1", 2, 1)
    assert detect(environment=slurm, tpu_devices=True) == Cluster("SLURM", None, 4, 1)


def test_a_shell_inside_a_slurm_allocation_is_one_process():
    assert detect(environment={"SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"}, tpu_devices=False) is None


def test_a_tpu_machine_asks_its_metadata_unless_it_runs_on_the_cpu():
    assert detect(environment={}, tpu_devices=True) == Cluster("TPU metadata")
    assert detect(environment={"JAX_PLATFORMS": "cpu"}, tpu_devices=True) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("h:1", 2), "give all three"),
        (("", 2, 0), "give all three"),
        (("h", 2, 0), "needs a port"),
        (("h:1", 2, 2), "must be below"),
    ],
)
def test_incomplete_flags_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        detect(*arguments, environment={}, tpu_devices=False)
