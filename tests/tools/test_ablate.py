"""The ablation table; its runs are those of `main` and of the transfer benchmark."""

import json

import pytest

from bertjax.tasks.sweep import Outcome
from bertjax.tools import ablate


def test_the_table_sets_scores_and_perplexity_beside_the_papers(tmp_path):
    for name, loss, values in (("base", 2.0, (0.8, 0.84)), ("masking=80/20/0", None, (0.7,))):
        workdir = ablate.directory(tmp_path, name)
        workdir.mkdir(parents=True)
        records = [{"step": 1, "loss": 3.0}]
        records += [] if loss is None else [{"step": 1, "eval/mlm_loss": loss}]
        (workdir / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        path = tmp_path / "mrpc" / workdir.name / "runs.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text("".join(json.dumps(vars(Outcome(32, 5e-5, 4, seed, value, {}, (), 1, 1.0)))
                                + "\n" for seed, value in enumerate(values)))
    text = ablate.table(["base", "masking=80/20/0"], ["mrpc", "rte"], tmp_path)
    assert "| base | 7.39 | 82.0 ± 2.8 | - | MNLI 84.4, QNLI 88.4" in text
    assert "| masking=80/20/0 | - | 70.0 ± 0.0 | - | MNLI 84.4, NER 95.2 |" in text


def test_a_finished_pre_training_is_not_repeated(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(ablate.subprocess, "run", lambda command, check: commands.append(command))
    models = {}
    monkeypatch.setattr(ablate.transfer, "run_all",
                        lambda tasks, given, *arguments: models.update(given))
    (tmp_path / "data").mkdir()
    for name in ("base", "ltr", "size=6/768/12"):
        workdir = ablate.directory(tmp_path, name)
        workdir.mkdir(parents=True)
        (workdir / "metrics.jsonl").write_text("")
    for name in ("base", "ltr"):
        done = ablate.directory(tmp_path, name) / "model"
        done.mkdir()
        (done / "config.json").write_text("{}")
    ablate.main(["--store=S", f"--out={tmp_path}", "--names=base,ltr,ltr_bilstm,size=6/768/12",
                 "--steps=50", "--", "--config.batch_size=64"])
    assert len(commands) == 1
    assert {"--config=bertjax:ablations:size=6/768/12", "--config.batch_size=64",
            "--config.phases=((50, 128),)", "--config.optimizer.warmup_steps=3"} <= set(commands[0])
    assert "size=6/768/12" in (tmp_path / "ablate.md").read_text()
    ltr = tmp_path / "pretrained" / "ltr" / "model"
    assert models["ltr"] == str(ltr) and models["ltr_bilstm"] == f"bilstm:{ltr}"


def test_missing_data_names_the_command_that_makes_it(tmp_path, capsys):
    with pytest.raises(SystemExit):
        ablate.main(["--store=S", f"--out={tmp_path}", "--steps=5"])
    assert "transfer prepare" in capsys.readouterr().err
