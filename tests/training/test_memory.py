"""The memory of the host over a long run, with all that a run does between its steps."""

import os
import pathlib
import re
import statistics
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
STEPS = 3000
RUN = [
    sys.executable,
    "-m",
    "bertjax.main",
    "--config=configs/miniatures.py:L=2,H=128",
    f"--config.phases=(({STEPS},16),)",
    "--config.batch_size=8",
    "--config.mesh.data=1",
    "--config.optimizer.warmup_steps=5",
    "--config.log.every_steps=20",
    "--config.log.csv=True",
    "--config.checkpoint.every_steps=100",
    "--config.eval.every_steps=100",
    "--config.eval.rows=16",
]


def resident_mb(process):
    """Memory that a process holds, of files that it has mapped aside."""
    status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) / 1024


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="reads /proc")
def test_the_memory_of_the_host_is_flat_over_a_long_run(tmp_path, random_store):
    run = subprocess.Popen(
        [*RUN, f"--config.data.corpus={random_store}", f"--workdir={tmp_path / 'run'}"],
        cwd=ROOT,
        # Else glibc has an arena a thread, whose fragments grow by 20 MB, and by more where the machine is busy.
        env={**os.environ, "XLA_FLAGS": "", "MALLOC_ARENA_MAX": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    held = {}
    for line in run.stdout:
        if found := re.match(r"step (\d+)/", line.replace(",", "")):
            held[int(found[1])] = resident_mb(run)
    assert run.wait() == 0
    # The first thousand steps meet everything once: compilation, the allocator's pools, threads.
    early, late = (statistics.median(held[step] for step in range(end - 500, end, 20)) for end in (1500, STEPS))
    assert late < early + 12, {step: round(mb) for step, mb in held.items() if step % 100 == 0}  # 8 kB a step
