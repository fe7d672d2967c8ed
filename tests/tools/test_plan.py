"""Plans: names of slices, memory by purpose, time, search, messages; one plan of this machine."""

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys

import jax
import pytest

from bertjax.config import OptimizerSettings, default_config, finetune_config, frozen
from bertjax.model.presets import PRESETS
from bertjax.model.size import bytes_of
from bertjax.process import hardware
from bertjax.process.hardware import GIB
from bertjax.tasks import kinds
from bertjax.tools.plan import compilation, estimate, plans
from bertjax.tools.plan.compilation import allocations, refused
from bertjax.tools.plan.estimate import Compiled, seconds_of
from bertjax.tools.plan.hlo import Collective
from bertjax.tools.stages import StageInfo, stages

ROOT = pathlib.Path(__file__).parents[2]

PROGRAM = """
ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %c = f32[8]{0} copy(%a), backend_config={"estimated_cycles":"150000000"}
}
"""


def info(**changes):
    return StageInfo(
        **{
            **dict(
                name="phase 1",
                steps=1000,
                tokens=256 * 512,
                flops=1e15,
                rows=256,
                length=512,
                mesh={"data": 16, "fsdp": 1, "tensor": 1},
                accumulation=2,
                model="",
                execution="",
                remat="dots",
                parameters=GIB,
                optimizer=2 * GIB,
                batch=1000,
                device_kind="TPU v5 lite",
            ),
            **changes,
        }
    )


def costs(of, compiled, piece, **how):
    """cost() with the memory and peak of the slice; those of this machine are not known."""
    chip = piece.chip if piece else None
    return estimate.cost(of, compiled, piece, chip.hbm_bytes if chip else 0, chip and chip.peak_flops, **how)


@pytest.mark.parametrize(
    "text, name, devices, accelerator",
    [
        ("v5e:4x4", "v5e:4x4", 16, "v5litepod-16"),
        ("v5e-64", "v5e:8x8", 64, "v5litepod-64"),
        ("v5litepod-8", "v5e:2x4", 8, "v5litepod-8"),
        ("v4-32", "v4:2x2x4", 16, "v4-32"),
        ("v5p-16", "v5p:2x2x2", 8, "v5p-16"),
        ("v6e-16", "v6e:4x4", 16, "v6e-16"),
        ("v3-32", "v3:4x4", 32, "v3-32"),
    ],
)  # v3: a device is a core, as in jax
def test_names_of_slices(text, name, devices, accelerator):
    piece = hardware.slice_of(text)
    assert (piece.name, piece.devices, piece.accelerator) == (name, devices, accelerator)


@pytest.mark.parametrize(
    "text, words",
    [
        ("v7x:4x4", "v7x"),
        ("v5e:2x2x4", "2 axes"),
        ("v4:4x4", "3 axes"),
        ("v4-31", "v4-32"),
        ("v5e-5", "v5e-4"),
        ("gpu", "valid are"),
        ("v5e", "valid are"),
    ],
)
def test_an_unknown_topology_is_refused_with_the_valid_forms(text, words):
    with pytest.raises(ValueError, match=words):
        hardware.slice_of(text)


def test_a_missing_or_foreign_libtpu_says_what_to_install(monkeypatch):
    versions = {"jax": "0.10.2"}

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["numpy", 'libtpu==0.0.42.*; extra == "tpu"'])
    with pytest.raises(ValueError, match=r"pip install .*'libtpu==0\.0\.42\.\*'"):
        compilation.check_libtpu()
    versions["libtpu"] = "0.0.17"
    with pytest.raises(ValueError, match=r"libtpu 0\.0\.17 does not belong to jax 0\.10\.2"):
        compilation.check_libtpu()
    versions["libtpu"] = "0.0.42.1"
    compilation.check_libtpu()


def test_a_refusal_of_the_compiler_becomes_numbers():
    found = refused(
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 24.50G of "
        "15.75G hbm. Exceeded hbm capacity by 8.75G."
    )
    assert (found.wanted, found.limit) == (int(24.5 * GIB), int(15.75 * GIB))
    found = refused(
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for "
        "HLO temporaries (26.52G) exceeds available HBM (15.75G)."
    )
    assert (found.temporaries, found.limit) == (int(26.52 * GIB), int(15.75 * GIB))
    assert not found.fits and refused("INTERNAL: something else") is None


def test_memory_of_a_buffer_assignment_leaves_out_other_memories():
    assert allocations("""BufferAssignment:
allocation 0: size 512, thread-local:
 value: <117 x{} @0> (size=512,offset=0): u32[]
allocation 1: size 4096, parameter 5, shape |f32[1024]| at ShapeIndex {}, maybe-live-out:
allocation 2: size 8192, parameter 6, shape |f32[2048]| at ShapeIndex {}:
allocation 3: size 77, output shape is |f32[7]|, maybe-live-out:
allocation 4: size 1000000, preallocated-temp:
allocation 5: size 117440512, color 1, preallocated-temp:
""") == (12288, 1_000_000, 77)


def test_the_step_has_the_name_by_which_a_quick_plan_knows_its_dump():
    import jax.numpy as jnp

    from bertjax.training.optimizer import make_optimizer
    from bertjax.training.sharding import make_mesh
    from bertjax.training.trainer import Trainer

    class Objective:
        def init(self, key):
            return {"kernel": jnp.zeros(2)}

    trainer = Trainer(make_optimizer(OptimizerSettings(), 1e-3), make_mesh(devices=jax.devices()[:1]))
    assert f"jit_{trainer.train_step(Objective()).__name__}" == compilation.STEP_MODULE


def test_bytes_add_up_to_what_the_compiler_takes():
    compiled = Compiled(PROGRAM, arguments=3 * GIB + 5000, temporaries=4 * GIB, fresh_outputs=100, code=7)
    found = costs(info(), compiled, hardware.slice_of("v5e:4x4"))
    assert found.bytes == {
        "parameters": GIB,
        "optimizer": 2 * GIB,
        "batch": 1000,
        "padding": 4000,
        "temporaries": 4 * GIB + 100,
        "program": 7,
    }
    assert found.fits and found.total == 7 * GIB + 5107


def test_time_is_cycles_over_the_clock_and_days_follow():
    found = costs(info(), Compiled(PROGRAM), hardware.slice_of("v5e:4x4"))
    assert found.method == "cycles" and found.step_s == pytest.approx(0.1)
    assert found.tokens_s == pytest.approx(256 * 512 / 0.1)
    assert found.mfu == pytest.approx(1e15 / 0.1 / (16 * 197e12))
    assert found.days == pytest.approx(1000 * 0.1 / 86400)


def test_without_cycles_the_time_is_a_roofline_and_says_so():
    text = PROGRAM.replace("estimated_cycles", "x").replace("f32[8]", "f32[819000000]")
    found = costs(info(flops=16 * 197e12), Compiled(text, complete=False), hardware.slice_of("v5e:4x4"))
    # A second of products, a tenth of a third of it again, 8 ms of reading and writing.
    assert found.method == "roofline" and found.step_s == pytest.approx(1 + 0.1 / 3 + 0.008)
    assert "a roofline" in plans.recipe_text([found])
    assert "whole run: 12.0 hours, 192 chip-hours\n" in plans.recipe_text([found], 720.0)


def test_an_operation_without_an_estimate_leaves_the_time_to_the_roofline_and_the_memory_as_compiled():
    """libtpu 0.0.42 gives the largest number for some of ModernBERT's at 8,192 tokens on v4."""
    found = costs(info(), Compiled(PROGRAM.replace("150000000", str(2**63 - 1))), hardware.slice_of("v5e:4x4"))
    assert found.method == "roofline" and found.step_s < 10
    assert "yes: " in plans.stage_text(found)
    assert "not refused: " in plans.stage_text(dataclasses.replace(found, complete=False))


def test_a_step_with_cycles_can_be_compared_with_one_that_has_none():
    with_cycles = Compiled(PROGRAM)
    without = Compiled(PROGRAM.replace("estimated_cycles", "x"), complete=False)
    a, b = (costs(info(), compiled, hardware.slice_of("v5e:4x4"), quick=True) for compiled in (with_cycles, without))
    assert (a.method, a.step_s) == (b.method, b.step_s) and a.method == "roofline"
    assert costs(info(), with_cycles, hardware.slice_of("v5e:4x4")).step_s != a.step_s


KERNEL = """
ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %k = f32[8]{0} custom-call(%a), custom_call_target="tpu_custom_call", \
backend_config={"custom_call_config":{"body":"TUzv","cost_estimate":{"flops":"FLOPS",\
"transcendentals":"7","bytes_accessed":"BYTES","remote_bytes_transferred":"0"}}}
  ROOT %c = f32[8]{0} copy(%k), backend_config={"estimated_cycles":"150000000"}
}
"""


@pytest.mark.parametrize(
    "flops, size, seconds", [(197 * 10**10, 819, 0.01 / 0.3), (1, 819 * 10**7, 0.01)]
)  # of a v5e: 197 TFLOP/s, 819 GB/s
def test_a_kernel_takes_the_longer_of_its_flops_and_its_bytes(flops, size, seconds):
    text = KERNEL.replace("FLOPS", str(flops)).replace("BYTES", str(size))
    found = costs(info(), Compiled(text), hardware.slice_of("v5e:4x4"))
    assert found.method == "cycles" and found.step_s == pytest.approx(0.1 + seconds, rel=1e-4)


def test_an_all_reduce_over_the_slice_uses_both_axes():
    piece = hardware.slice_of("v5e:4x4")
    whole = seconds_of(Collective("all-reduce", 1, 90 * 10**9, 16, False), piece)
    part = seconds_of(Collective("all-reduce", 1, 90 * 10**9, 4, False), piece)
    assert whole == pytest.approx(2 * 15 / 16) and part == pytest.approx(2 * 2 * 3 / 4)


def test_a_plan_that_does_not_fit_names_remedies_in_order():
    refusal = Compiled(wanted=24 * GIB, limit=16 * GIB)
    found = costs(info(remat="none", accumulation=1), refusal, hardware.slice_of("v5e:4x4"))
    assert not found.fits and "NO: 24.00 of 16.00 GiB" in plans.stage_text(found)
    first, second, third, *_ = plans.remedies(found)
    assert "remat=dots" in first and "remat=full" in second
    assert third == "--config.accumulation=2"


def test_search_prunes_by_memory_and_tries_every_policy_of_the_simplest_mesh_first():
    config = load("large").get_config()
    config.execution.kernels = "xla"

    def found(limit):
        settings, sizes = zip(*plans.candidates(frozen(config), 16, limit, tpu=True), strict=True)
        assert max(sizes) <= 0.9 * limit
        return [(s["mesh.fsdp"], s["accumulation"], s["execution.remat"]) for s in settings]

    assert found(16 * GIB)[:4] == [(1, 1, "dots"), (1, 1, "minimal"), (1, 1, "full"), (2, 1, "dots")]
    assert found(95 * GIB)[0] == (1, 1, "none")
    assert not list(plans.candidates(frozen(config), 16, GIB / 5, tpu=True))


# GiB that the TPU compiler assigned to buffers (plan --quick; jax 0.10.2, libtpu 0.0.42.1), of
# 256 x 512 tokens with layers=scan; fused = attention by a kernel instead of XLA's.
@pytest.mark.parametrize(
    "model, devices, fsdp, remat, fused, gib",
    [
        ("base", 16, 1, "none", False, 9.76),
        ("base", 64, 1, "none", False, 3.73),
        ("base", 8, 1, "none", False, 17.94),
        ("large", 16, 1, "dots", False, 10.95),
        ("large", 8, 1, "dots", False, 16.33),
        ("large", 64, 1, "none", False, 10.85),
        ("large", 16, 16, "dots", False, 6.06),
        ("large", 16, 1, "full", True, 6.58),
        ("large", 16, 1, "dots", True, 10.81),
        ("large", 64, 1, "none", True, 8.22),
        ("base", 16, 1, "none", True, 5.87),
        ("base", 8, 1, "none", True, 10.16),
    ],
)
def test_arithmetic_agrees_with_the_compiler_within_a_tenth(model, devices, fsdp, remat, fused, gib):
    found = bytes_of(PRESETS[model], (256, 512, 77), (devices, fsdp, 1, 1), remat, fused)
    assert found / GIB == pytest.approx(gib, rel=0.1)


@pytest.mark.parametrize("steps", [1000, None])  # of a table without its data they are not known
def test_a_search_compiles_what_should_fit_and_puts_the_fastest_that_fits_first(monkeypatch, steps):
    cycles = {"dots": 440, "minimal": 0, "full": 360}  # 0 = refused

    def compile_stage(config, *where):
        remat = config.execution.remat
        text = PROGRAM.replace("150000000", str(cycles[remat] * 1_500_000))
        refusal = Compiled(wanted=17 * GIB, limit=16 * GIB)
        return info(remat=remat, steps=steps), Compiled(text) if cycles[remat] else refusal

    monkeypatch.setattr(plans, "compile_stage", compile_stage)
    config = frozen(load("large").get_config())
    found = plans.search(config, hardware.slice_of("v5e:4x4"), pathlib.Path("unused"), False, 3)
    assert [plan.stages[0].info.remat for plan in found] == ["full", "dots", "minimal"]
    assert [plan.unfit is None for plan in found] == [True, True, False]
    assert "execution.remat=full" in found[0].overrides and config.execution.remat == "none"


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "configs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def a_plan(days, fits=True, method="cycles", overrides=""):
    compiled = Compiled(PROGRAM) if fits else Compiled(wanted=24 * GIB, limit=16 * GIB)
    stage = costs(info(steps=int(days * 864_000)), compiled, hardware.slice_of("v5e:4x4"))
    return plans.Plan([dataclasses.replace(stage, method=method)], overrides)


def test_a_quick_ranking_says_that_it_does_not_order_policies():
    full = plans.ranking([a_plan(1, overrides="a=1"), a_plan(1, fits=False, overrides="a=2")])
    assert "| 1 | a=1 | yes | 3.00 | 100 |" in full and "| 2 | a=2 | no | 24.00 | - |" in full
    assert plans.UNRANKED not in full
    assert plans.UNRANKED in plans.ranking([a_plan(1, method="roofline")])


def test_this_machine_has_devices_and_small_numbers_are_not_rounded_away():
    found = costs(
        info(parameters=5 * 2**20, optimizer=10 * 2**20, batch=0, device_kind="cpu"),
        Compiled(PROGRAM, arguments=15 * 2**20, measured_s=0.1),
        None,
    )
    assert "16 x cpu" in plans.heading("demo.py", None, found, "jax")
    text = plans.stage_text(found)
    assert "5.0 MiB" in text and "0.4 device-hours" in text and "chip" not in text


def test_a_compiled_step_that_takes_more_than_is_free_does_not_fit_and_has_no_time():
    found = costs(
        info(parameters=5, optimizer=10, batch=0, device_kind="cpu"),
        Compiled(PROGRAM, arguments=15, temporaries=90, limit=100),
        None,
    )
    assert not found.fits and found.step_s is None and found.total == 105
    assert "NO" in plans.stage_text(found)


def test_the_cache_gives_back_what_was_saved_and_ignores_what_is_broken(tmp_path):
    path, compiled = tmp_path / "cache" / "key.json.gz", Compiled(PROGRAM, arguments=3)
    assert compilation.load(path) is None
    compilation.save(path, compiled)
    assert compilation.load(path) == compiled
    path.write_bytes(b"cut")
    assert compilation.load(path) is None


def plan(*arguments):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "bertjax.tools.plan", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )


@pytest.mark.slow
def test_a_plan_of_this_machine_is_measured_and_kept(tmp_path):
    arguments = (
        "--config",
        str(ROOT / "configs/demo.py"),
        "--config.batch_size=8",
        f"--cache={tmp_path / 'cache'}",
        f"--json={tmp_path / 'plan.json'}",
    )
    first = plan(*arguments)
    assert first.returncode == 0, first.stderr
    assert "measured" in first.stdout and "parameters" in first.stdout
    numbers = json.loads((tmp_path / "plan.json").read_text())[0]["stages"][0]
    assert numbers["step_s"] > 0 and numbers["bytes"]["temporaries"] > 0
    assert "compiled before" in plan(*arguments).stderr


@pytest.mark.slow
def test_no_compilation_outlives_a_plan_that_is_killed(tmp_path):
    arguments = f"--config={ROOT / 'configs/base.py'} --config.batch_size=2 --cache={tmp_path}".split()
    process = subprocess.Popen(
        [sys.executable, "-m", "bertjax.tools.plan", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)},
    )
    assert any(" compiling " in line for line in process.stderr)
    process.kill()
    # The compilation's process holds the same pipe: it ends when that process has ended, and a minute earlier than a
    # compilation of base would.
    rest = process.stderr.read()
    assert "compiled after" not in rest and process.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    "status, words",
    [
        (-signal.SIGKILL, "was ended by SIGKILL, as happens to a process that takes all"),
        (-signal.SIGTERM, "was ended by SIGTERM"),
        (3, "ended early"),
    ],
)
def test_a_worker_that_dies_is_explained(status, words):
    assert words in compilation.how_it_ended(status)


def test_cpu_devices_share_the_memory_that_is_free(tmp_path, monkeypatch):
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    (tmp_path / "meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:   800 kB\nSwapTotal: 500 kB\n")
    (tmp_path / "none").write_text("max\n")
    (tmp_path / "container").write_text("5000\n")
    files = [str(tmp_path / name) for name in ("meminfo", "none", "container", "absent")]
    meminfo, none, container, absent = files
    assert hardware.host_bytes(meminfo, none) == hardware.host_bytes(meminfo, absent) == (800 * 1024, 9500 * 1024)
    assert hardware.host_bytes(meminfo, container) == hardware.host_bytes(absent, container) == (5000, 5000)
    assert hardware.host_bytes(absent, absent) == (machine, machine)
    monkeypatch.setattr(hardware, "host_bytes", lambda: (8000, 9000))
    assert hardware.local_device_bytes() == 1000  # tests run on 8 forced devices


def test_what_is_hopeless_for_this_machine_is_refused_before_it_is_compiled(tmp_path):
    done = plan("--config", str(ROOT / "configs/base.py"), "--config.batch_size=65536", f"--cache={tmp_path}")
    assert done.returncode == 1, done.stderr
    assert "not compiled, since by arithmetic it takes more memory than is free" in done.stderr
    assert "fits  NO" in done.stdout and "--config.accumulation=2" in done.stdout
    assert not list(tmp_path.iterdir())


def test_bad_command_lines_are_one_message(tmp_path):
    config = str(ROOT / "configs/demo.py")
    for arguments, words in [
        (("--topology=v5e:4x4",), "no experiment"),
        (("--config", config, "--topology=v9:1x1"), "valid are"),
        (("--config", config, f"--json={tmp_path}"), "is a directory; name a file in it"),  # before it compiles
        (("--config", config, "--config.lerning_rate=1"), "Did you mean"),
    ]:
        done = plan(*arguments)
        assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("module", ["bertjax.main", "bertjax.tools.plan"])
def test_mesh_auto_is_understood_on_the_command_line(module):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            module,
            "--config",
            str(ROOT / "configs/demo.py"),
            "--config.mesh=auto",
            "--config.job=nonsense",
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        timeout=300,
    )
    assert done.returncode == 2 and "config.job='nonsense'" in done.stderr, done.stderr[-2000:]


def test_the_batch_of_a_kind_of_head_is_what_it_says_of_its_gold(monkeypatch):
    class Scores(kinds.TextKind):
        gold_fields = {"scores": "float32 B C"}

        def losses(self, logits, batch):
            return ((logits - batch["scores"]) ** 2).sum(-1)

    monkeypatch.setitem(kinds.KINDS, "scores", Scores())
    config = finetune_config()
    config.model.update(num_hidden_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=50)
    config.task.update(name="table", options={"head": "scores"})
    (stage,) = stages(frozen(config), jax.devices()[:1])
    assert stage.batch["scores"].shape == (config.batch_size, 2) and stage.batch["scores"].dtype == "float32"
    params = stage.trainer.abstract_state(stage.objective).params
    jax.eval_shape(lambda params, batch: stage.objective.loss(params, batch, {"loss": 1.0}, None), params, stage.batch)


def test_rows_beyond_the_positions_are_planned_where_the_table_is_to_be_extended():
    config = finetune_config()
    config.model.update(num_hidden_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=50)
    config.task.update(name="table", max_length=1024)
    with pytest.raises(ValueError, match="max_length=1024 exceeds the 512 positions .*extend_positions"):
        stages(frozen(config), jax.devices()[:1])
    config.extend_positions = "repeat"
    (stage,) = stages(frozen(config), jax.devices()[:1])
    params = stage.trainer.abstract_state(stage.objective).params
    assert stage.batch["input_ids"].shape[1] == len(params["encoder"]["embeddings"]["position_embeddings"]) == 1024


@pytest.mark.parametrize("name, gold", [("mrpc", "labels"), ("stsb", "targets"), ("squad1.1", "start_positions")])
def test_packed_rows_of_a_task_are_planned_as_packed(name, gold):
    config = finetune_config()
    config.model.update(num_hidden_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=50)
    config.task.update(name=name, max_length=100, pack="all")
    (stage,) = stages(frozen(config), jax.devices()[:1])
    rows = config.batch_size
    assert stage.batch["position_ids"].shape == (rows, 112)
    assert stage.batch["weights"].shape == stage.batch[gold].shape == stage.batch["cls_positions"].shape == (rows, 14)
    params = stage.trainer.abstract_state(stage.objective).params
    jax.eval_shape(lambda params, batch: stage.objective.loss(params, batch, {"loss": 1.0}, None), params, stage.batch)


def test_the_steps_of_a_run_that_ends_by_the_clock_are_not_known():
    config = default_config()
    config.model.update(num_hidden_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=50)
    assert [stage.info.steps for stage in stages(frozen(config), jax.devices()[:1])] == [1_000_000]
    config.budget_minutes = 720.0
    assert [stage.info.steps for stage in stages(frozen(config), jax.devices()[:1])] == [None]
