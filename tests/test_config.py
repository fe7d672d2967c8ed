"""Settings: defaults are the paper's, and what cannot work is refused with its remedy."""

import json
import pathlib
import re

import pytest

from bertjax import config as settings
from bertjax.command_line import split_settings
from bertjax.config.describe import page
from bertjax.config_checks import ALIASES, check_config
from bertjax.model.presets import BertConfig

FLOATS = [name.replace(".", "__") for name, one in settings.walk(settings.Config) if isinstance(one.default, float)]


def changed(**values):
    config = settings.default_config()
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in values.items()})
    return config


def test_defaults_are_the_original_recipe():
    config = settings.default_config()
    check_config(config)
    assert config.batch_size * config.phases[0][1] == 131_072
    assert settings.total_steps(config) == 1_000_000
    assert (config.optimizer.b1, config.optimizer.b2, config.optimizer.eps) == (0.9, 0.999, 1e-6)
    assert not config.optimizer.bias_correction
    assert config.model.layer_norm_eps == 1e-12


@pytest.mark.parametrize("length, expected", [(20, 3), (128, 20), (512, 77)])
def test_max_predictions_is_the_rate_rounded_up(length, expected):
    # 20 at 128 and 77 at 512: the paper's appendix and the original's README.
    assert settings.max_predictions(settings.default_config(), length) == expected


@pytest.mark.parametrize(
    "values, words",
    [
        (dict(phases=((10, 512), (5, 128))), "shrinks from 512 to 128"),
        (dict(phases=((10, 600),)), "max_position_embeddings is 512"),
        (dict(phases=((10, 4),)), "at least 5"),
        (dict(phases=()), "must be"),
        (dict(phases=((10, 128, 0),)), "batches of 0 rows"),
        (dict(phases=((10, 128, 8, 8),)), "rows of the batch as a third number"),
        (
            dict(phases=((10, 128), (10, 128, 10), (10, 128, 8)), accumulation=4, optimizer__warmup_steps=0),
            "rows=10 is not divisible.*size is 12",
        ),
        (dict(batch_size=10, accumulation=4), "next valid batch size is 12"),
        (dict(batch_size=2, accumulation=4), "valid batch size is 4, or lower accumulation to 1"),
        (dict(optimizer__warmup_steps=-1), "warmup_steps=-1"),
        (dict(optimizer__warmup_steps=2_000_000), "1,000,000 steps"),
        (dict(optimizer__name="adamv"), "Did you mean 'adamw'"),
        (dict(checkpoint__metric="mlm_loss"), "Did you mean 'eval/mlm_loss'"),
        (dict(checkpoint__metric="eval/nsp_loss", data__nsp=False), "is not measured with config.data.nsp=False"),
        (dict(masking__mask_prob=0.95, masking__random_prob=0.2), "more than 1"),
        (dict(masking__rate=0.0), "nothing would be predicted"),
        (dict(model__num_attention_heads=7), "num_attention_heads=7"),
        (dict(data__short_seq_prob=1.5), "short_seq_prob=1.5 must be a probability"),
        (dict(optimizer__learning_rate=float("nan")), "learning_rate=nan must be positive"),
        (dict(optimizer__eps=0.0), "eps=0.0 must be positive"),
        (dict(optimizer__b2=1.0), "b2=1.0 must be at least 0 and below 1"),
        (dict(optimizer__weight_decay=-0.01), "weight_decay=-0.01 must be at least 0"),
        (dict(optimizer__no_decay="(bias"), "no_decay: '(bias' is not a regular expression"),
        (dict(job="finetune", task__freeze=("((",)), "task.freeze: '((' is not a regular expression"),
        (dict(seed=-1), "seed=-1 must be from 0"),
        (dict(eval__rows=-1), "rows=-1 must be at least 0"),
        (dict(masking__max_predictions=-1), "max_predictions=-1 must be at least 0"),
        (
            dict(masking__max_predictions=129, phases=((9, 64), (1, 128)), optimizer__warmup_steps=0),
            "max_predictions=129 is more than the 128 tokens",
        ),
        (dict(execution__layers="scanned"), "config.execution.layers='scanned'.*scan"),
        (dict(execution__remat="Full"), "config.execution.remat='Full'.*full"),
        (dict(checkpoint__keep_every=999_999), "keep_every=999999 keeps nothing: no step up to 1,000,000 is a"),
        (dict(checkpoint__keep_every=7, checkpoint__every_steps=0), "keep_every=7 keeps nothing"),
        (dict(checkpoint__keep_every=1000, budget_minutes=1.0), "keep_every=1000 counts steps.*by the clock"),
        (dict(checkpoint__keep_last=0), "keep_last=0 must be at least 1"),
        (dict(job="finetune", task__epochs=0), "task.epochs=0 must be at least 1"),
        (dict(job="finetune", task__class_weights=(3.0, 1.0)), "(3.0, 1.0) does not say which weight is for which"),
        (dict(job="finetune", task__class_weights=(("spam", -1.0),)), "weights of 'spam'=-1.0 must be at least 0"),
        (dict(seed=2**31), "seed=2147483648 must be from 0 to 2,147,483,647"),
        (dict(model__attention_probs_dropout_prob=1.0), "dropout_prob=1.0 must be"),
        *((dict([(name, float("inf"))]), "=inf must be finite") for name in FLOATS),
    ],
)
def test_impossible_settings_are_refused_with_the_reason(values, words):
    with pytest.raises(ValueError, match=re.escape(words).replace(r"\.\*", ".*")):
        check_config(changed(**values))


@pytest.mark.parametrize(
    "values, words",
    [
        (dict(job="finetune", optimizer__warmup_steps=9), "warmup_steps=9 has no effect.*task.warmup"),
        (dict(job="finetune", model__hidden_dropout_prob=0.0), "no effect.*that of config.init_from"),
        (dict(job="finetune", checkpoint__metric="eval/mlm_loss"), "no effect.*task.metric says which is best"),
        (dict(job="finetune", reinitialise_head=True), "has no effect.*always starts with random weights"),
        (dict(job="finetune", checkpoint__keep_best=0), "keep_best=0 must be at least 1: a resumed fine-tuning"),
        (
            dict(job="finetune", task__feature_layers="last", task__layer_decay=0.9),
            "layer_decay=0.9 would have no effect: .* a frozen encoder",
        ),
        (dict(job="finetune", task__feature_layers="last", task__bilstm=2), "bilstm=2 would .*feature_layers"),
        (dict(job="finetune", task__feature_layers="last", task__head_init="normal"), "head_init=.*feature_layers"),
        (dict(job="finetune", task__feature_layers="first"), "feature_layers='first'.*second_to_last"),
        (dict(optimizer__decay_share=0.2), "decay_share=0.2 would have no effect.*warmup_stable_decay"),
        (dict(masking__random_prob=0.0, masking__replace_with_special=True), "replace_with_special=.*random_prob=0"),
        (
            dict(data__corpus="tfrecord:a", data__heldout="tfrecord:b", data__heldout_fraction=0.2),
            "heldout_fraction=0.2 would have no effect.*config.data.heldout names",
        ),
        (dict(job="finetune", checkpoint__keep_every=5), "keep_every=5 has no effect.*its model is the best one"),
        (dict(job="finetune", task__pack="all", task__buckets=2), "buckets=2 would have no effect: rows are packed"),
        (dict(job="finetune", export__push="a/b", task__bilstm=2), "push nothing: no format of models can hold"),
        (dict(export__private=True), "export.private=True would have no effect: there is no config.export.push"),
        (dict(export__push="a/b", task__name="all"), "export.push=a/b is one name, and config.task.name=all"),
        (
            dict(job="finetune", task__pack="all", task__group_by_length=True),
            "group_by_length=True would have no effect: rows are packed .config.task.pack='all'",
        ),
        (dict(model__global_rope_theta=5.0), "global_rope_theta=5.0 would have no effect.*rotary"),
        (
            dict(model__positions="rotary", model__local_rope_theta=5.0),
            "local_rope_theta.*no effect.*with local_attention",
        ),
        (
            dict(model__global_attn_every_n_layers=2),
            "global_attn_every_n_layers=2 would .*for config.model.local_attention",
        ),
        (dict(model__first_norm=False), "first_norm=False would have no effect.*norm='before'"),
        (dict(model__classifier_pooling="mean"), "classifier_pooling='mean' would .*heads='modernbert'"),
        (dict(model__vocab_size=100, model__vocab_multiple=64), "vocab_multiple=64 would .*vocab_size=100"),
        (dict(reinitialise_head=True), "reinitialise_head=True would have no effect.*no config.init_from"),
        (dict(extend_positions="repeat"), "extend_positions='repeat' would have no effect.*no config.init_from"),
        (dict(checkpoint__keep_best=0, checkpoint__metric="eval/mlm_loss"), "metric=.*no effect.*keep_best=0"),
        (dict(log__fill_mask=("a b",)), r"fill_mask: there is no \[MASK\] in 'a b'"),
        (dict(task__epochs=9), "task.epochs=9 has no effect on config.job='pretrain'"),
        (dict(task__options={"label": "x"}), "task.options={'label': 'x'} has no effect on config.job='pretrain'"),
    ],
)
def test_what_would_be_ignored_is_refused(values, words):
    with pytest.raises(ValueError, match=words):
        check_config(changed(**values))


def test_a_switch_of_an_optimizer_is_true_or_false():
    values = {"optimizer.name": "optax.sgd", "optimizer.options": {"nesterov": "no"}}
    with pytest.raises(ValueError, match="optimizer.options.nesterov='no' must be true or false"):
        check_config(settings.Config().replace(values))
    check_config(settings.Config().replace({**values, "optimizer.options": {"nesterov": False, "momentum": 0.9}}))


def test_vocabulary_larger_than_the_model_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match="30600 entries.*30522"):
        BertConfig.of(settings.ModelSettings(vocab_size=30522), 30600)
    assert BertConfig.of(settings.ModelSettings(vocab_multiple=64), 30522).vocab_size == 30528


@pytest.mark.parametrize(
    "argument, hint",
    [
        ("--config.optimizer.lerning_rate=1", "optimizer.learning_rate"),
        ("--config.learning_rate=1", "optimizer.learning_rate"),
        ("--config.bach_size", "batch_size"),
        ("--config.optimizer.lr=1", "learning_rate"),
        ("--config.steps=1", "phases="),
        ("--config.num_train_epochs=1", "task.epochs.*phases"),
        ("--config.gradient_accumulation_steps=2", "accumulation"),
        ("--config.every_steps=2", "checkpoint.every_steps or --config.eval.every_steps or"),
    ],
)
def test_unknown_setting_names_the_nearest_one(argument, hint):
    with pytest.raises(ValueError, match=hint):
        split_settings([argument])


def test_every_alias_names_a_setting_and_is_none():
    names = [name for name, _ in settings.walk(settings.Config)]
    for alias, meant in ALIASES.items():
        assert alias not in names
        for name in re.findall(r"(?:^|--config\.)([\w.]+)", meant):
            assert name in names, alias


def test_a_misspelt_setting_of_a_config_file_is_refused():
    config = settings.default_config()
    config.optimizer.lerning_rate = 3e-4
    with pytest.raises(
        ValueError,
        match="unknown setting --config.optimizer.lerning_rate. Did you mean --config.optimizer.learning_rate",
    ):
        check_config(config)


@pytest.mark.parametrize("steps", [(5,), (1, 2, 3), ("a", "b"), (-1, 4), (0, 4), (4, 3)])
def test_steps_of_a_profile_are_two_in_order(steps):
    with pytest.raises(ValueError, match="config.profile_steps=.* must be .first, last."):
        check_config(changed(profile_steps=steps))


def test_resume_conflicts_names_what_would_change_the_run():
    old = json.loads(settings.default_config().to_json())
    new = settings.Config()
    assert settings.resume_conflicts(old, new) == []
    free = new.replace({"mesh.fsdp": 2, "log.every_steps": 7, "execution.remat": "full"})
    assert settings.resume_conflicts(old, free) == []
    lines = settings.resume_conflicts(old, new.replace({"optimizer.learning_rate": 3e-4}))
    assert lines == ["optimizer.learning_rate: 0.0001 -> 0.0003"]


@pytest.mark.parametrize("name", ["data.corpus", "data.tokenizer", "data.heldout"])
def test_a_path_in_another_spelling_is_no_other_setting(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    run = settings.Config().replace({name: "store"})
    old, mixed = (json.loads(one.to_json()) for one in (run, run.replace({name: "a=2,b=1"})))
    for same in ("store/", "./store", "~/store", str(tmp_path / "store")):
        assert settings.resume_conflicts(old, run.replace({name: same})) == []
    assert settings.resume_conflicts(mixed, run.replace({name: "./a/=2, b/=1"})) == []
    for other in ("store2", "store,b", "a/store", "", "store=2"):
        assert settings.resume_conflicts(old, run.replace({name: other})) == [f"{name}: 'store' -> {other!r}"]
    assert settings.resume_conflicts(mixed, run.replace({name: "a=1,b=2"})) == [f"{name}: 'a=2,b=1' -> 'a=1,b=2'"]


def test_a_run_that_is_older_than_a_setting_had_its_default():
    old = json.loads(settings.Config().to_json())
    del old["model"]["is_decoder"], old["data"]["packed"]
    assert settings.resume_conflicts(old, settings.Config()) == []
    lines = settings.resume_conflicts(old, settings.Config().replace({"data.packed": True}))
    assert lines == ["data.packed: False -> True"]


def test_every_number_says_what_it_may_be():
    elsewhere = ("mesh.", "model.", "optimizer.warmup_steps", "data.demo_vocab_size", "task.max_length")
    for name, setting in settings.walk(settings.Config):
        number = isinstance(setting.default, int | float) and not isinstance(setting.default, bool)
        if number and not name.startswith(elsewhere):
            assert isinstance(setting.allowed, settings.Range), name


def test_every_default_is_allowed():
    for name, setting in settings.walk(settings.Config):
        if isinstance(setting.allowed, settings.Range):
            assert setting.allowed.holds(setting.default), name
        elif setting.allowed is not None:
            assert setting.default in setting.allowed, name


def test_every_setting_is_described():
    text = settings.describe()
    for name in settings.flatten(settings.default_config()):
        assert f"--config.{name}=" in text


def test_the_page_of_settings_is_up_to_date():
    text = (pathlib.Path(__file__).parents[1] / "docs" / "settings.md").read_text()
    assert text == page(), "run: python -m bertjax.config > docs/settings.md"
    for name, _ in settings.walk(settings.Config):
        assert f"| `{name}` |" in text


def test_the_variants_for_a_slice_undo_another_layout():
    config = settings.default_config()
    config.mesh.data, config.mesh.fsdp, config.mesh.tensor, config.accumulation = 2, 4, 2, 8
    settings.scan_layers("full")(config)
    assert (config.mesh.data, config.mesh.fsdp, config.mesh.tensor) == (-1, 1, 1)
    assert config.accumulation == 1
    assert (config.execution.layers, config.execution.remat) == ("scan", "full")
