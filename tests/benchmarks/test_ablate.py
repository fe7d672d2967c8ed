"""The ablation table; its runs are those of `main` and of the transfer benchmark."""

import json

import pytest

from bertjax.tasks.sweep import Outcome
from tests.benchmarks import ablate


def test_the_table_sets_scores_and_perplexity_beside_the_papers(tmp_path):
    for name, loss, values in (("base", 2.0, (0.8, 0.84)), ("masking=80/20/0", None, (0.7,))):
        workdir = ablate.directory(tmp_path, name)
        workdir.mkdir(parents=True)
        records = [{"step": 1, "loss": 3.0}]
        records += [] if loss is None else [{"step": 1, "eval/mlm_loss": loss}]
        (workdir / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        path = tmp_path / "mrpc" / workdir.name / "runs.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text(
            "".join(Outcome({"epochs": 4}, seed, value, {}, (), 1, 1.0).to_json() for seed, value in enumerate(values))
        )
    found = ablate.transfer.results(tmp_path, ["base", "masking-80-20-0"])
    text = ablate.table(["base", "masking=80/20/0"], ["mrpc", "rte"], tmp_path, found)
    assert "| base | 7.39 | 82.0 ± 2.8 | - | MNLI 84.4, QNLI 88.4" in text
    assert "| masking=80/20/0 | - | 70.0 | - | MNLI 84.4, NER 95.2 |" in text


def test_a_finished_pre_training_is_not_repeated(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(ablate.subprocess, "run", lambda command, check: commands.append(command))
    models = {}
    monkeypatch.setattr(ablate.transfer, "run_all", lambda tasks, given, *arguments: models.update(given) or [])
    (tmp_path / "data").mkdir()
    for name in ("base", "ltr", "size=6/768/12"):
        workdir = ablate.directory(tmp_path, name)
        workdir.mkdir(parents=True)
        (workdir / "metrics.jsonl").write_text("")
    for name in ("base", "ltr"):
        done = ablate.directory(tmp_path, name) / "model"
        done.mkdir()
        (done / "config.json").write_text("{}")
    ablate.main(
        [
            "--store=S",
            f"--out={tmp_path}",
            "--names=base,ltr,ltr_bilstm,size=6/768/12",
            "--steps=50",
            "--",
            "--config.batch_size=64",
        ]
    )
    assert len(commands) == 1
    assert {
        "--config=bertjax:ablations:size=6/768/12",
        "--config.batch_size=64",
        "--config.phases=((50, 128),)",
        "--config.optimizer.warmup_steps=3",
    } <= set(commands[0])
    assert "size=6/768/12" in (tmp_path / "ablate.md").read_text()
    ltr = tmp_path / "pretrained" / "ltr" / "model"
    assert models["ltr"] == str(ltr) and models["ltr_bilstm"] == f"bilstm:{ltr}"


def test_checkpoints_on_the_way_are_kept_fine_tuned_and_drawn(tmp_path, monkeypatch):
    commands, models = [], {}
    monkeypatch.setattr(ablate.subprocess, "run", lambda command, check: commands.append(command))

    def fine_tune(tasks, given, out, *arguments):
        models.update(given)
        for number, name in enumerate(given):
            path = out / "rte" / name / "runs.jsonl"
            path.parent.mkdir(parents=True)
            lines = [Outcome({"epochs": 4}, seed, 0.5 + number / 10, {}, (), 1, 1.0).to_json() for seed in range(2)]
            path.write_text("".join(lines))
        return ["mrpc"]

    monkeypatch.setattr(ablate.transfer, "run_all", fine_tune)
    (tmp_path / "data").mkdir()
    for name in ("base", "ltr"):
        ablate.directory(tmp_path, name).mkdir(parents=True)
        (ablate.directory(tmp_path, name) / "metrics.jsonl").write_text("")
    with pytest.raises(SystemExit, match="failed: mrpc"):
        ablate.main(
            [
                "--store=S",
                f"--out={tmp_path}",
                "--names=base,ltr_bilstm",
                "--steps=50",
                "--points=2",
                "--tasks=rte,mrpc",
            ]
        )
    for command in commands:
        assert {"--config.checkpoint.every_steps=25", "--config.checkpoint.keep_every=25"} <= set(command)
    runs = tmp_path / "pretrained"
    assert models == {
        "base@25": f"{runs / 'base'}@25",
        "base": f"{runs / 'base' / 'model'}",
        "ltr_bilstm@25": f"bilstm:{runs / 'ltr'}@25",
        "ltr_bilstm": f"bilstm:{runs / 'ltr' / 'model'}",
    }
    text = (tmp_path / "ablate.md").read_text()
    assert "| RTE | base | 50.0 ± 0.0 | 60.0 ± 0.0 |" in text
    assert "| MRPC | ltr_bilstm | - | - |" in text
    assert (tmp_path / "ablate.png").exists()
    with pytest.raises(SystemExit):
        ablate.main(["--store=S", f"--out={tmp_path}", "--steps=5", "--points=6"])


def test_a_pre_training_that_ends_badly_ends_the_tool_in_one_line(tmp_path, monkeypatch):
    def refuse(command, check):
        raise ablate.subprocess.CalledProcessError(2, command)

    monkeypatch.setattr(ablate.subprocess, "run", refuse)
    (tmp_path / "data").mkdir()
    with pytest.raises(SystemExit, match="ablate: the pre-training of base ended with code 2"):
        ablate.main(["--store=S", f"--out={tmp_path}", "--names=base", "--steps=50"])


def test_missing_data_names_the_command_that_makes_it_and_no_usage(tmp_path, capsys):
    with pytest.raises(SystemExit, match="^ablate: .*data is missing: .*benchmarks.transfer prepare"):
        ablate.main(["--store=S", f"--out={tmp_path}", "--steps=5"])
    assert capsys.readouterr().err == ""
