"""bench: named shapes, tables, rows out of a store."""

import json
import subprocess
import sys

import jax
import pytest

from bertjax.config import finetune_config, frozen, max_predictions
from bertjax.data.store import TokenStore
from bertjax.model.presets import PRESETS, BertConfig
from bertjax.tools import bench
from bertjax.tools.stages import stages


def test_a_shape_is_the_published_size_with_these_rows():
    found = bench.configurations(["large@512x32", "base-128x256"], [], [])  # with - as the benchmarks write it
    config = found["large@512x32"]
    assert BertConfig.of(config.model, 30522).to_dict() == PRESETS["large"].to_dict()
    assert config.phases[0][1] == 512 and config.batch_size == 32 and not config.data.packed
    assert max_predictions(config, 512) == 77
    assert found["base@128x256"].batch_size == 256
    assert bench.configurations(["base@128x256"], [], ["--config.batch_size=8"])["base@128x256"].batch_size == 8


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["step", "huge@128x2"], "not MODEL@LENGTHxROWS"),
        (["step", "--config=configs/demo.py", "--config.lerning_rate=1"], "Did you mean --config.optimizer"),
        (["input"], "give --store=DIR"),
        (["input", "base@128x256"], "shapes ['base@128x256'] has no effect on `bench input`"),
        (["input", "--store=s", "--config.seed=1"], "settings ['--config.seed=1'] has no effect on `bench input`"),
        (["step", "--rows=9"], "rows 9 has no effect on `bench step`"),
        (["step", "--rounds=0"], "must be at least 1"),
    ],
)
def test_mistakes_are_one_line(arguments, said, capsys):
    with pytest.raises(SystemExit) as refused:
        bench.main(arguments)
    assert said in str(refused.value) + capsys.readouterr().err


@pytest.mark.slow
def test_shapes_and_configs_are_timed_in_turn(capsys):
    tiny = ["--config.model.num_hidden_layers=1", "--config.model.hidden_size=64", "--config.batch_size=8"]
    bench.main(["step", "tiny@16x4", "--config=configs/demo.py", *tiny, "--steps=2", "--rounds=2", "--json"])
    results = json.loads(capsys.readouterr().out)["results"]
    assert set(results) == {"tiny@16x4", "configs/demo.py"}
    for found in results.values():
        assert len(found["rounds_seconds"]) == 2 and 0 < found["step_seconds"] < 60 and found["loss"] > 1


def test_the_step_of_a_fine_tuning_has_a_loss():
    config = finetune_config()
    config.model.update(num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=16, vocab_size=50)
    config.task.update(name="mrpc", max_length=16, pack="all")
    config.batch_size = 2
    (stage,) = stages(frozen(config), jax.devices()[:1])
    program = bench.Program("mrpc", stage)
    program.run(2)
    assert 0 < program.loss < 10


def test_the_table_has_rates_and_the_share_of_the_peak():
    result = dict(step_seconds=0.1, rows=8, tokens=800, flops=1e12, peak_bytes=2e9, compile_seconds=3.0, loss=1.5)
    report = {"device": "card", "devices": 2, "nominal_flops": 20e12, "versions": "jax 1", "results": {"a": result}}
    line = bench.step_table(report).splitlines()[-1].split()
    assert line == ["a", "100.00", "80", "8,000", "0.500", "2.0", "3.0", "1.5000"]


def test_rows_of_a_store_are_counted(random_store):
    store = TokenStore(random_store)
    padded, packed = (bench.rows_per_second(store, 64, kind, rows=256) for kind in (False, True))
    assert padded["rows_per_cpu_second"] > 0 and 0 < padded["fill"] < packed["fill"] <= 1


def test_help_needs_no_jax():
    code = "import sys; from bertjax.tools import bench; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
