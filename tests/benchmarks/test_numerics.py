"""Fast mode against reference: what is run, and the rule by which the curves are judged."""

import argparse
import json
import pathlib

import numpy as np
import pytest

from tests.benchmarks import numerics


def found(fast, seed, steps=100):
    base = np.linspace(10.0, 6.0, steps)
    wave = np.sin(np.arange(steps))
    curves = {"reference": base, "fast": base + fast, "seed": base + seed + 0.01 * wave}
    return {name: {"loss": curve.tolist(), "heldout_mlm_loss": 6.5, "device": "none"} for name, curve in curves.items()}


def test_the_fast_mode_is_judged_by_the_distance_of_two_seeds():
    near, far = numerics.verdict(found(0.01, 0.1)), numerics.verdict(found(0.2, 0.1))
    assert near["within_noise"] and not far["within_noise"]
    assert near["fast"]["mean"] == pytest.approx(0.01)
    assert far["seed"]["mean"] == pytest.approx(0.1, abs=0.01)
    spike = found(0.0, 0.1)
    spike["fast"]["loss"][50] += 2.0  # over 5 steps smoothed: 0.4 at most, 0.02 on average
    judged = numerics.verdict(spike)
    assert judged["fast"]["max"] == pytest.approx(0.4)
    assert judged["fast"]["mean"] < judged["seed"]["mean"] and not judged["within_noise"]
    assert "NOT within the noise of a seed, over 100 steps" in numerics.table(spike)
    assert "is within the noise" in numerics.table(found(0.01, 0.1))


def test_the_runs_differ_in_arithmetic_and_seed_only():
    args = argparse.Namespace(
        store="S",
        out=pathlib.Path("O"),
        steps=300,
        preset="tiny",
        length=128,
        batch=8,
        learning_rate=1e-4,
        heldout_rows=10,
        seed=5,
    )
    fast, reference, seed = (numerics.job(name, args) for name in numerics.RUNS)
    assert set(fast.command) ^ set(reference.command) == {
        "--workdir=O/fast",
        "--workdir=O/reference",
        "--config.execution.dtype=bfloat16",
        "--config.execution.dtype=float32",
        "--config.execution.kernels=auto",
        "--config.execution.kernels=xla",
    }
    assert set(seed.command) ^ set(reference.command) == {
        "--workdir=O/seed",
        "--workdir=O/reference",
        "--config.seed=5",
        "--config.seed=6",
    }
    assert "--config.optimizer.warmup_steps=30" in fast.command
    assert fast.environment == {} and reference.environment == seed.environment == {
        "JAX_DEFAULT_MATMUL_PRECISION": "highest"
    }


def test_finished_runs_are_read_not_repeated(tmp_path, capsys, monkeypatch):
    started = []
    monkeypatch.setattr(numerics.harness, "run_all", lambda jobs, gpus, logs: started.extend(jobs) or [])
    for name, run in found(0.01, 0.1).items():
        directory = tmp_path / name
        (directory / "model").mkdir(parents=True)
        (directory / "model" / "config.json").write_text("{}")
        records = [{"step": i + 1, "loss": loss} for i, loss in enumerate(run["loss"])]
        records.append({"step": 100, "eval/mlm_loss": 6.25})
        (directory / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        (directory / "hardware.json").write_text('{"device_kind": "card"}')
    numerics.main(["--store=S", f"--out={tmp_path}"])
    assert started == []
    assert "| 6.2500 |" in capsys.readouterr().out
    written = json.loads((tmp_path / "numerics.json").read_text())
    assert written["verdict"]["within_noise"] and len(written["runs"]["fast"]["loss"]) == 100
    assert (tmp_path / "numerics.png").read_bytes()[:4] == b"\x89PNG"
