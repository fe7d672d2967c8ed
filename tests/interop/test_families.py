"""Every model type against transformers on torch, float32, CPU: in and out, heads, gradients, refusals by name."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.interop import LoadError, load_model
from bertjax.interop.huggingface import write_directory
from bertjax.model import heads
from bertjax.model.paths import flatten
from bertjax.tools.convert import convert
from bertjax.training.losses import classification_sums, mean
from tests.families import FAMILIES, torch_model

torch = pytest.importorskip("torch", reason="parity needs the [parity] extra")
transformers = pytest.importorskip("transformers", reason="parity needs the [parity] extra")
pytestmark = pytest.mark.parity
torch.set_num_threads(1)

ABSOLUTE = 1e-4
RELATIVE = 1e-4  # gradients, against the largest element of each
WORDS = 101
COMPARED = [name for name in FAMILIES if name != "bert"]  # which has tests of its own
HEADS = ("MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice")


def batch(model, length=37, lead=(4,)):
    """Rows of several lengths, padded; (ids, mask)."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(3, length, lead)
    lengths.ravel()[0] = length
    mask = (np.arange(length) < lengths[..., None]).astype(np.int32)
    return np.where(mask, rng.integers(5, WORDS, mask.shape), model.config.pad_token_id).astype(np.int32), mask


def their(model, ids, mask, **more):
    with torch.no_grad():
        return model(torch.tensor(ids).long(), attention_mask=torch.tensor(mask).long(), **more)


def gap(ours, theirs, where=...):
    return float(np.abs(np.asarray(ours)[where] - theirs.detach().numpy()[where]).max())


@pytest.mark.parametrize("family", COMPARED)
def test_hidden_states_of_every_layer(family, tmp_path):
    model = torch_model(family, "")
    model.save_pretrained(tmp_path)
    ids, mask = batch(model)
    theirs = their(model, ids, mask, output_hidden_states=True)
    hidden, pooled = load_model(tmp_path)(ids, mask, all_hidden=True)
    for ours, other in zip(hidden, theirs.hidden_states, strict=True):
        assert gap(ours, other, mask == 1) < ABSOLUTE
    if getattr(theirs, "pooler_output", None) is not None:
        assert gap(pooled, theirs.pooler_output) < ABSOLUTE


# Names, and what transformers 5 does not ask for beside layer_types, but 4 does.
NOT_COMPARED = ("_name_or_path", "id2label", "label2id", "global_attn_every_n_layers")


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", COMPARED)
def test_every_head_goes_in_and_comes_out_equal(family, head, tmp_path):
    labels = {"num_labels": 3} if head in ("SequenceClassification", "TokenClassification") else {}
    model = torch_model(family, f"For{head}", **labels)
    model.save_pretrained(tmp_path / "in")
    ids, mask = batch(model, lead=(2, 3) if head == "MultipleChoice" else (4,))
    theirs, loaded = their(model, ids, mask), load_model(tmp_path / "in")
    ours = loaded(ids, mask)
    if head == "QuestionAnswering":
        assert gap(ours[0], theirs.start_logits, mask == 1) < ABSOLUTE
        assert gap(ours[1], theirs.end_logits, mask == 1) < ABSOLUTE
    else:
        assert gap(ours, theirs.logits, mask == 1 if head in ("MaskedLM", "TokenClassification") else ...) < ABSOLUTE

    write_directory(tmp_path / "out", loaded.config, loaded.params, type(loaded.model).__name__)
    again, report = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    before, after = ({k: v for k, v in one.config.to_dict().items() if k not in NOT_COMPARED} for one in (model, again))
    assert before == after


@pytest.mark.parametrize("family", ["roberta", "electra", "distilbert", "modernbert", "modernbert, biases, mean"])
def test_loss_and_every_gradient_of_an_mlm_step(family, tmp_path):
    model = torch_model(family, "ForMaskedLM")
    model.save_pretrained(tmp_path)
    ids, mask = batch(model)
    positions = np.stack([np.arange(3)] * 4)
    labels = np.random.default_rng(3).integers(0, WORDS, (4, 3))
    everywhere = np.full(ids.shape, -100)
    np.put_along_axis(everywhere, positions, labels, axis=1)
    arrays = (torch.tensor(x).long() for x in (ids, mask, everywhere))
    out = model(**dict(zip(("input_ids", "attention_mask", "labels"), arrays, strict=True)))
    out.loss.backward()
    theirs = {name: p.grad.numpy() for name, p in model.named_parameters()}
    loaded = load_model(tmp_path)
    place = _naming(loaded)

    @jax.jit
    @functools.partial(jax.value_and_grad)
    def objective(params):
        logits = loaded.model.apply({"params": params}, ids, mask, masked_positions=jnp.asarray(positions))
        loss, _, weight = classification_sums(logits, jnp.asarray(labels), jnp.ones(positions.shape))
        return mean(loss, weight)

    loss, gradient = objective(loaded.params)
    assert abs(float(loss) - out.loss.item()) / out.loss.item() < RELATIVE
    whole = np.sqrt(sum(float((g**2).sum()) for g in theirs.values()))
    for path, ours in flatten(gradient).items():
        name, transposed = place(path)
        part, parts = place.part(path)
        other = np.split(theirs[name], parts)[part]
        other = other.T if transposed else other
        # The key bias shifts all scores of a query alike: its gradient is zero but for rounding.
        scale = whole if "key/bias" in path else np.abs(other).max()
        if path == "encoder/embeddings/word_embeddings":  # torch has no gradient of the padding row's lookup
            rows = np.arange(WORDS) != model.config.pad_token_id
            ours, other = ours[rows], other[rows]
        if path == "encoder/embeddings/position_embeddings" and family == "roberta":
            ours, other = ours[2:], other[2:]
        assert np.abs(ours - other).max() / scale < RELATIVE, path


def _naming(loaded):
    from bertjax.interop.names import HUGGING_FACE

    return HUGGING_FACE[loaded.config.type]


@pytest.mark.slow
def test_modernbert_at_8192_tokens(tmp_path):
    """Windows and both bases of rotary positions, at the length where the last bit of a frequency shows."""
    sizes = {"max_position_embeddings": 8192, "local_attention": 128, "num_attention_heads": 1, "hidden_size": 64}
    model = torch_model("modernbert", "ForMaskedLM", num_hidden_layers=4, **sizes)
    model.save_pretrained(tmp_path)
    ids, mask = batch(model, length=8192, lead=(2,))
    theirs = their(model, ids, mask).logits
    assert gap(load_model(tmp_path)(ids, mask), theirs, mask == 1) < ABSOLUTE


@pytest.mark.parametrize(
    "family, change, message",
    [
        ("roberta", {"model_type": "deberta-v2"}, "model_type='deberta-v2'"),
        ("roberta", {"model_type": "longformer"}, "model_type='longformer'"),
        ("roberta", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("roberta", {"norm_bias": False}, "norm_bias"),
        ("electra", {"summary_type": "mean"}, "summary_type"),
        ("modernbert", {"classifier_bias": True}, "classifier_bias"),
        ("modernbert", {"decoder_bias": False}, "decoder_bias"),
        ("modernbert", {"layer_types": ["full_attention"] * 4 + ["sliding_attention"]}, "layer_types"),
        (
            "modernbert",
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0}}},
            "rope_parameters",
        ),
        ("modernbert", {"something_new": 3}, "something_new"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(family, change, message, tmp_path):
    torch_model(family, "").save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | change))
    with pytest.raises(LoadError, match=message):
        load_model(tmp_path)


def test_modernberts_old_configuration_means_the_same(tmp_path):
    """As the hub has it: a base for each kind of layer and no list of them."""
    model = torch_model("modernbert", "ForMaskedLM")
    model.save_pretrained(tmp_path)
    ids, mask = batch(model)
    values = json.loads((tmp_path / "config.json").read_text())
    for name in ("layer_types", "rope_parameters"):
        del values[name]
    old = {"global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "global_attn_every_n_layers": 3}
    old |= {"position_embedding_type": "absolute", "layer_norm_eps": 1e-5, "reference_compile": None}
    (tmp_path / "config.json").write_text(json.dumps(values | old))
    assert gap(load_model(tmp_path)(ids, mask), their(model, ids, mask).logits, mask == 1) < ABSOLUTE


def test_electras_discriminator_is_read_as_an_encoder(tmp_path, caplog):
    """Its head is left out, which is said, and what is written is the encoder alone."""
    model = torch_model("electra", "ForPreTraining")
    model.save_pretrained(tmp_path / "in")
    ids, mask = batch(model)
    loaded = load_model(tmp_path / "in")
    assert gap(loaded(ids, mask)[0], their(model.electra, ids, mask)[0], mask == 1) < ABSOLUTE
    assert "no model here has are left out: discriminator_predictions.dense.bias" in caplog.text
    tagger = load_model(tmp_path / "in", "token-classification", num_labels=4, reinitialise_head=True)
    assert tagger(ids, mask).shape == (*ids.shape, 4)
    convert(tmp_path / "in", "hf", tmp_path / "out")
    again, report = transformers.AutoModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()) and again.config.architectures == ["ElectraModel"]
    assert gap(loaded(ids, mask)[0], their(again.eval(), ids, mask)[0], mask == 1) < ABSOLUTE


def test_a_head_that_the_type_never_has_is_missing_or_starts_afresh(tmp_path):
    torch_model("roberta", "ForMaskedLM").save_pretrained(tmp_path)
    with pytest.raises(LoadError, match="(?s)nsp/kernel.*the heads that the file has are: mlm"):
        load_model(tmp_path, "next-sentence")
    loaded = load_model(tmp_path, "pretraining", reinitialise_head=True)
    assert {name.split("/")[0] for name in loaded.fresh} == {"pooler", "nsp"}


def test_electras_discriminator_predicts_no_words(tmp_path):
    torch_model("electra", "ForPreTraining").save_pretrained(tmp_path)
    with pytest.raises(LoadError, match="ELECTRA's discriminator.* is filled by its generator"):
        load_model(tmp_path, "mlm")


@pytest.mark.parametrize("task", ["sequence-classification", "token-classification", "question-answering"])
def test_a_task_starts_from_the_prediction_head_of_modernbert(task, tmp_path):
    """As in transformers: both are called head.dense and head.norm. Also where a pooler has learnt next sentences."""
    model = torch_model("modernbert", "ForMaskedLM")
    model.save_pretrained(tmp_path / "theirs")
    pairs = load_model(tmp_path / "theirs", "pretraining", reinitialise_head=True)
    pairs.params["pooler"] = jax.tree.map(lambda leaf: leaf + 1, pairs.params["pooler"])
    write_directory(tmp_path / "pairs", pairs.config, pairs.params, type(pairs.model).__name__)
    again = load_model(tmp_path / "pairs").params["pooler"]
    np.testing.assert_array_equal(again["kernel"], pairs.params["pooler"]["kernel"])
    for directory in ("theirs", "pairs"):
        loaded = load_model(tmp_path / directory, task, reinitialise_head=True)
        np.testing.assert_array_equal(loaded.params["pooler"]["kernel"].T, model.head.dense.weight.detach().numpy())
        assert {name.split("/")[0] for name in loaded.fresh} <= {"classifier", "qa_outputs"}


@pytest.mark.parametrize("head", HEADS[1:])
@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_before_a_head_has_the_rate_that_transformers_has(family, head, tmp_path, monkeypatch):
    rates = {"hidden_dropout_prob": 0.1, "classifier_dropout": 0.25, "dropout": 0.1, "seq_classif_dropout": 0.25}
    names = {"distilbert": ("dropout", "seq_classif_dropout"), "modernbert": ("classifier_dropout",)}
    names = names.get(family.split(",")[0], ("hidden_dropout_prob", "classifier_dropout"))
    model = torch_model(family, f"For{head}", **{name: rates[name] for name in names})
    base = f"{model.base_model_prefix}."
    theirs = {
        module.p
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Dropout) and not name.startswith((base, "head."))
    }
    model.save_pretrained(tmp_path)
    ours, loaded = set(), load_model(tmp_path)
    monkeypatch.setattr(heads, "dropout", lambda x, rate, key: ours.add(rate) or x)
    ids, mask = batch(model, lead=(2, 3) if head == "MultipleChoice" else (2,))
    loaded.model.apply({"params": loaded.params}, ids, mask, dropout_key=jax.random.key(0))
    assert ours == theirs


@pytest.mark.parametrize("family", ["roberta", "distilbert"])
def test_a_table_of_positions_is_extended_on_request(family, tmp_path):
    """Repeated rows: a text gives the same where its positions were; the longer model reloads in transformers."""
    model = torch_model(family, "ForMaskedLM")
    model.save_pretrained(tmp_path / "in")
    old = load_model(tmp_path / "in")
    positions = old.config.max_position_embeddings
    ids, mask = batch(model, length=positions)
    longer = load_model(tmp_path / "in", max_positions=2 * positions)
    np.testing.assert_array_equal(old(ids, mask), longer(ids, mask))
    table = longer.params["encoder"]["embeddings"]["position_embeddings"][-positions:]
    np.testing.assert_array_equal(table, old.params["encoder"]["embeddings"]["position_embeddings"][-positions:])
    write_directory(tmp_path / "out", longer.config, longer.params, "BertForMaskedLM")
    again = type(model).from_pretrained(tmp_path / "out").eval()
    ids, mask = batch(model, length=2 * positions)
    assert gap(longer(ids, mask), their(again, ids, mask).logits, mask == 1) < ABSOLUTE
    between = load_model(tmp_path / "in", max_positions=2 * positions - 1, extend_positions="interpolate")
    table = between.params["encoder"]["embeddings"]["position_embeddings"]
    np.testing.assert_allclose(
        table[-2 * positions + 1 :: 2],
        old.params["encoder"]["embeddings"]["position_embeddings"][-positions:],
        atol=1e-6,
    )
    with pytest.raises(LoadError, match="can be extended .*not cut"):
        load_model(tmp_path / "in", max_positions=7)
