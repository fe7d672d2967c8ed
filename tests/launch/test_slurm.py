"""launch/slurm.sh as SLURM runs it, with an srun and a scontrol that write down their words."""

import os
import pathlib
import subprocess

import pytest

REPO = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = REPO / "launch" / "slurm.sh"
FLAGS = ["--config=configs/base.py", "--config.log.fill_mask=('a [MASK] b',)", "--workdir=runs/a"]


@pytest.fixture
def sbatch(tmp_path):
    (tmp_path / "repo").mkdir()
    for name in ("bertjax", "configs"):
        (tmp_path / "repo" / name).symlink_to(REPO / name)

    def run(code: int = 0, flags=FLAGS, cwd=tmp_path / "repo", **environment: str):
        for name, end in (("srun", f"exit {code}"), ("scontrol", "exit 0")):
            program = tmp_path / name
            program.write_text(f'#!/bin/bash\nprintf "%s\\n" {name} "$@" >>{tmp_path}/calls\n{end}\n')
            program.chmod(0o755)
        slurm = {
            "SLURM_JOB_ID": "7",
            "SLURM_NTASKS_PER_NODE": "8",
            "SLURM_GPUS_ON_NODE": "8",
            "SLURM_CPUS_PER_TASK": "6",
        } | environment
        done = subprocess.run(
            ["bash", SCRIPT, *flags],
            cwd=cwd,
            text=True,
            capture_output=True,
            timeout=30,
            env={"PATH": f"{tmp_path}:{os.environ['PATH']}"} | {name: value for name, value in slurm.items() if value},
        )
        calls = tmp_path / "calls"
        words = calls.read_text().splitlines() if calls.exists() else []
        calls.unlink(missing_ok=True)
        return done, words

    return run


def test_every_node_starts_bertjax_with_the_flags_as_given(sbatch):
    done, words = sbatch()
    assert done.returncode == 0
    assert words == [
        "srun",
        "--kill-on-bad-exit=0",
        "--wait=120",
        "--cpus-per-task=6",
        "python",
        "-m",
        "bertjax.main",
        *FLAGS,
    ]


def test_a_job_that_saved_and_stopped_goes_back_into_the_queue(sbatch):
    done, words = sbatch(75)
    assert (done.returncode, words[-3:]) == (0, ["scontrol", "requeue", "7"])


@pytest.mark.parametrize("code", [76, 77, 134, 137])
def test_a_job_that_hung_or_lost_a_process_is_started_again_a_few_times(sbatch, code):
    for failure in (1, 2):
        done, words = sbatch(code, BERTJAX_MAX_FAILURES="2")
        assert (done.returncode, words[-3:]) == (0, ["scontrol", "requeue", "7"])
        assert f"exit code {code} (failure {failure}, 2 allowed in a row)" in done.stderr
    done, words = sbatch(code, BERTJAX_MAX_FAILURES="2")
    assert (done.returncode, "scontrol" in words) == (code, False)
    assert f"failed 3 times in a row, the last time with exit code {code}" in done.stderr


@pytest.mark.parametrize("between", [{"code": 75}, {"code": 76, "BERTJAX_HEALTHY_SECONDS": "0"}])
def test_a_start_that_went_well_clears_the_count_of_failures(sbatch, between):
    sbatch(76, BERTJAX_MAX_FAILURES="1")
    assert sbatch(**between, BERTJAX_MAX_FAILURES="1")[1][-3:] == ["scontrol", "requeue", "7"]
    if between["code"] == 75:
        assert "scontrol" in sbatch(76, BERTJAX_MAX_FAILURES="1")[1]


@pytest.mark.parametrize("code", [0, 1, 2])
def test_any_other_end_is_the_end_of_the_job(sbatch, code):
    done, words = sbatch(code)
    assert (done.returncode, "scontrol" in words) == (code, False)


def test_requeues_are_bounded(sbatch):
    done, words = sbatch(75, SLURM_RESTART_COUNT="5", BERTJAX_MAX_RESTARTS="5")
    assert (done.returncode, "scontrol" in words) == (75, False)


@pytest.mark.parametrize("tasks", ["1", ""])
def test_other_than_one_process_a_gpu_is_refused(sbatch, tasks):
    done, words = sbatch(SLURM_NTASKS_PER_NODE=tasks)
    assert (done.returncode, words) == (2, [])
    assert "--ntasks-per-node=8 with --gpus-per-node=8" in done.stderr


def test_outside_slurm_or_the_repository_it_says_how_to_submit(sbatch, tmp_path):
    done, words = sbatch(SLURM_JOB_ID="")
    assert done.returncode == 2 and "sbatch launch/slurm.sh" in done.stderr and not words
    done, words = sbatch(cwd=tmp_path)
    assert done.returncode == 2 and "repository's directory" in done.stderr and not words


def test_sbatch_options_let_a_run_save_and_come_back():
    options = [line.split()[1] for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH ")]
    assert {"--signal=TERM@300", "--requeue", "--open-mode=append"} <= set(options)
    values = dict(option.partition("=")[::2] for option in options)
    assert values["--ntasks-per-node"] == values["--gpus-per-node"]
    assert not {"--gpus-per-task", "--gpu-bind"} & set(values)


def test_jax_gives_each_slurm_process_the_gpu_of_its_number_on_the_node(monkeypatch):
    """Why the script starts one process a GPU. If this fails, JAX has changed: think again."""
    clusters = pytest.importorskip("jax._src.clusters")
    for name, value in {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": "node[3-4]",
        "SLURM_NTASKS": "16",
        "SLURM_PROCID": "13",
        "SLURM_LOCALID": "5",
        "SLURM_STEP_NUM_NODES": "2",
    }.items():
        monkeypatch.setenv(name, value)
    address, count, process, devices = clusters.ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, "slurm", 10
    )
    assert (address.split(":")[0], count, process, devices) == ("node3", 16, 13, [5])
