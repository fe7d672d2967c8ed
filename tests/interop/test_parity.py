"""bertjax against transformers on torch, float32, CPU: activations, logits, gradients, files."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.interop import load_model
from bertjax.interop.huggingface import write_directory
from bertjax.interop.names import HUGGING_FACE
from bertjax.model.paths import flatten
from bertjax.tokenization import WordPieceTokenizer, load_tokenizer
from bertjax.training.losses import classification_sums, mean
from tests import families
from tests.fakes import SPECIALS
from tests.families import MODEL_TYPES

torch = pytest.importorskip("torch", reason="parity needs the [parity] extra")
transformers = pytest.importorskip("transformers", reason="parity needs the [parity] extra")
pytestmark = pytest.mark.parity
torch.set_num_threads(1)

ABSOLUTE = 1e-4  # activations and logits
RELATIVE = 1e-4  # gradients, against the largest element of each

# vocabulary, hidden, layers, heads, inner, positions, types, activation, epsilon
SHAPES = {
    "tiny": (101, 32, 2, 2, 64, 24, 2, "gelu", 1e-12),
    "wide-heads": (77, 64, 1, 1, 96, 40, 2, "gelu_new", 1e-12),
    "deep": (60, 48, 6, 4, 80, 16, 2, "gelu", 1e-5),
    "long": (90, 40, 2, 5, 160, 128, 2, "gelu_new", 1e-12),
    "miniature": (512, 128, 2, 2, 512, 64, 2, "gelu", 1e-12),
}


def torch_model(shape, kind="BertForPreTraining", **options):
    v, h, layers, heads, inner, positions, types, act, eps = SHAPES[shape]
    torch.manual_seed(sum(map(ord, shape)))
    config = transformers.BertConfig(
        vocab_size=v,
        hidden_size=h,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=inner,
        max_position_embeddings=positions,
        type_vocab_size=types,
        hidden_act=act,
        layer_norm_eps=eps,
        attn_implementation="eager",
        **options,
    )
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and LayerNorm too: zeros would hide errors
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def batch(shape, rows=4, choices=None, length=None):
    """Rows of every length up to the position table's end, both token types, padded."""
    v, positions = SHAPES[shape][0], length or SHAPES[shape][5]
    rng = np.random.default_rng(1)
    lead = (rows, choices) if choices else (rows,)
    lengths = rng.integers(3, positions, lead)
    lengths.ravel()[0] = positions
    mask = (np.arange(positions) < lengths[..., None]).astype(np.int32)
    ids = rng.integers(1, v, (*lead, positions)).astype(np.int32) * mask
    types = ((np.arange(positions) >= lengths[..., None] // 2) * mask).astype(np.int32)
    return ids, mask, types


def tensors(arrays):
    return [torch.tensor(a, dtype=torch.long) for a in arrays]


def close(ours, theirs, record, name, tolerance=ABSOLUTE):
    gap = float(np.abs(np.asarray(ours) - theirs.detach().numpy()).max())
    record(name, gap)
    print(f"{name}: {gap:.2e}")
    assert gap < tolerance


@pytest.mark.parametrize("shape", SHAPES)
def test_hidden_states_pooled_mlm_and_nsp(shape, tmp_path, record_property):
    model = torch_model(shape)
    model.save_pretrained(tmp_path)
    arrays = batch(shape)
    real = arrays[1] == 1
    with torch.no_grad():
        theirs = model(*tensors(arrays), output_hidden_states=True)
        their_pooled = model.bert(*tensors(arrays))[1]
    hidden, pooled = load_model(tmp_path, task="features")(*arrays, all_hidden=True)
    for i, (ours, other) in enumerate(zip(hidden, theirs.hidden_states, strict=True)):
        close(ours[real], other[real], record_property, f"{shape} hidden {i}")
    close(pooled, their_pooled, record_property, f"{shape} pooled")
    mlm, nsp = load_model(tmp_path)(*arrays)
    close(mlm[real], theirs.prediction_logits[real], record_property, f"{shape} mlm")
    close(nsp[:, 0], theirs.seq_relationship_logits, record_property, f"{shape} nsp")


@pytest.mark.parametrize(
    "kind", ["MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice"]
)
def test_task_heads(kind, tmp_path, record_property):
    options = {"num_labels": 5} if kind in ("SequenceClassification", "TokenClassification") else {}
    model = torch_model("tiny", f"BertFor{kind}", **options)
    model.save_pretrained(tmp_path)
    arrays = batch("tiny", choices=3 if kind == "MultipleChoice" else None)
    with torch.no_grad():
        theirs = model(*tensors(arrays))
    ours = load_model(tmp_path)(*arrays)
    real = arrays[1] == 1
    if kind == "QuestionAnswering":
        close(ours[0][real], theirs.start_logits[real], record_property, "start")
        close(ours[1][real], theirs.end_logits[real], record_property, "end")
    elif kind in ("MaskedLM", "TokenClassification"):
        close(ours[real], theirs.logits[real], record_property, kind)
    else:
        close(ours, theirs.logits, record_property, kind)


@pytest.mark.parametrize(
    "task, kind", [("pretraining", "BertForPreTraining"), ("sequence-classification", "BertForSequenceClassification")]
)
def test_transformers_loads_what_we_write_and_gives_the_same_logits(task, kind, tmp_path, record_property):
    torch_model("tiny", kind).save_pretrained(tmp_path / "in")
    loaded = load_model(tmp_path / "in", task=task)
    write_directory(
        tmp_path / "out",
        loaded.config,
        loaded.params,
        kind,
        labels={0: "bad", 1: "good"} if "Sequence" in kind else None,
    )
    other, report = getattr(transformers, kind).from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values()), report
    if "Sequence" in kind:
        assert other.config.id2label == {0: "bad", 1: "good"}
    arrays = batch("tiny")
    with torch.no_grad():
        theirs = other.eval()(*tensors(arrays))
    ours = loaded(*arrays)
    if task == "pretraining":
        real = arrays[1] == 1
        close(ours[0][real], theirs.prediction_logits[real], record_property, "exported mlm")
        close(ours[1][:, 0], theirs.seq_relationship_logits, record_property, "exported nsp")
    else:
        close(ours, theirs.logits, record_property, "exported classifier")


@pytest.mark.parametrize("shape", ["tiny", "deep"])
def test_loss_and_every_gradient_of_a_pretraining_step(shape, tmp_path, record_property):
    model = torch_model(shape)
    model.save_pretrained(tmp_path)
    arrays = batch(shape)
    rng = np.random.default_rng(3)
    positions = np.stack([np.arange(3)] * 4)
    labels = rng.integers(0, SHAPES[shape][0], (4, 3))
    nsp_labels = rng.integers(0, 2, 4)

    everywhere = np.full(arrays[0].shape, -100)
    np.put_along_axis(everywhere, positions, labels, axis=1)
    out = model(*tensors(arrays), labels=torch.tensor(everywhere), next_sentence_label=torch.tensor(nsp_labels))
    out.loss.backward()
    theirs = {name: p.grad.numpy() for name, p in model.named_parameters()}

    loaded = load_model(tmp_path)

    def objective(params):
        mlm, nsp = loaded.model.apply({"params": params}, *arrays, masked_positions=jnp.asarray(positions))
        one = jnp.ones(positions.shape)
        mlm_loss, _, mlm_weight = classification_sums(mlm, jnp.asarray(labels), one)
        nsp_loss, _, nsp_weight = classification_sums(nsp, jnp.asarray(nsp_labels)[:, None], one[:, :1])
        return mean(mlm_loss, mlm_weight) + mean(nsp_loss, nsp_weight)

    loss, gradient = jax.jit(jax.value_and_grad(objective))(loaded.params)
    relative = abs(float(loss) - out.loss.item()) / out.loss.item()
    assert relative < RELATIVE
    worst = 0.0
    total = np.sqrt(sum(float((g**2).sum()) for g in theirs.values()))
    for path, ours in flatten(gradient).items():
        name, transposed = HUGGING_FACE["bert"](path)
        other = theirs[name].T if transposed else theirs[name]
        # The key bias shifts all scores of a query alike: its gradient is zero but for rounding,
        # so it is measured against the whole gradient.
        scale = total if "key/bias" in path else np.abs(other).max()
        gap = np.abs(ours - other).max() / scale
        assert gap < RELATIVE, path
        worst = max(worst, float(gap))
    print(f"{shape}: loss {relative:.2e}, worst gradient {worst:.2e}")
    record_property(f"{shape} gradient", worst)


@pytest.mark.parametrize("options", [{"do_lower_case": True}, {"do_lower_case": False, "strip_accents": True}])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_wordpiece_vocabulary_loads_in_auto_tokenizer_beside_any_model_type(tmp_path, model_type, options):
    families.torch_model(model_type, "ForMaskedLM", pad_token_id=0).save_pretrained(tmp_path / "in")
    loaded = load_model(tmp_path / "in")
    words = [*SPECIALS, "the", "The", "cat", "##s", "sat", "e", ".", "\u4e2d"]
    tokenizer = WordPieceTokenizer(words, **options)
    write_directory(tmp_path / "out", loaded.config, loaded.params, "BertForMaskedLM", tokenizer)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ours = load_tokenizer(tmp_path / "out")
    assert ours.fingerprint == tokenizer.fingerprint
    for text in ("The cats \u00e9 sat.", "the\u4e2d[MASK] cat"):
        assert theirs(text)["input_ids"] == [2, *ours.encode(text, keep_special_tokens=True), 3]
    assert theirs("the", "cat").input_ids == ours.layout.join(ours.encode("the"), ours.encode("cat"))[0].tolist()
    assert theirs.mask_token_id == ours.mask_id and theirs.pad_token_id == ours.pad_id
