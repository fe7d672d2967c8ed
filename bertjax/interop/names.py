"""Tables of names: parameter paths of bertjax, of each model type of Hugging Face, of Google's checkpoints.

A parameter path is the keys of the nested dict joined by '/', as in encoder.py and heads.py. Dense
kernels are [in, out] here and in Google's files and [out, in] in Hugging Face's; Google's output
layers, which were never `tf.layers.dense`, are [out, in] as well.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from bertjax.model.model_types import OWN


class Place(NamedTuple):
    """Where a parameter lives in a foreign file: its name, and whether it is transposed there."""

    name: str
    transposed: bool


# head -> the forms that it may have, each the names of its parameters; '?' marks those that a network may do without.
Heads = dict[str, tuple[tuple[str, ...], ...]]
_DENSE = ("kernel", "bias")
_MLM = ("transform/kernel", "transform/bias", "LayerNorm/scale", "LayerNorm/bias", "bias")
_DEEP = ("dense/kernel", "dense/bias", "out_proj/kernel", "out_proj/bias")
HEAD_PARTS: Heads = {head: (_DENSE,) for head in ("pooler", "nsp", "classifier", "qa_outputs")} | {"mlm": (_MLM,)}
_WITHOUT_NSP: Heads = {head: parts for head, parts in HEAD_PARTS.items() if head != "nsp"}
_TABLES = re.compile(r"encoder/embeddings/\w+_embeddings")


@dataclasses.dataclass(frozen=True)
class Naming:
    """The names of one kind of file: called with a parameter path, it gives its place there.

    Attributes:
      place: parameter path -> place; KeyError for what is not a parameter of heads.py.
      heads: the heads that such files can have.
      joined: last part of a name -> the modules whose arrays it holds, one after the other along the first axis.
      root: before the names of an encoder that was saved within a model, and `bare` how they begin without it.
      ties: copies that some files have -> what they are copies of; `tied`: False where they are arrays of their own,
        which nothing here reads.
      unread: heads that are never read, by how their names begin -> what to know about them.
    """

    place: Callable[[str], Place]
    heads: Heads = dataclasses.field(default_factory=lambda: HEAD_PARTS)
    joined: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    root: str = ""
    bare: tuple[str, ...] = ()
    ties: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tied: bool = True
    unread: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __call__(self, path: str) -> Place:
        return self.place(path)

    def part(self, path: str) -> tuple[int, int]:
        """(which of how many equal parts of its array a parameter is)."""
        module = self.place(path).name.split(".")[-2:-1]
        modules = self.joined.get(module[0], ()) if module else ()
        return (modules.index(path.split("/")[-2]), len(modules)) if modules else (0, 1)

    def names_of(self, head: str) -> list[tuple[set[str], set[str]]]:
        """(names that the head must have, all names that it can have) of each alternative."""
        found = []
        for leaves in self.heads[head]:
            every = {self.place(f"{head}/{leaf.rstrip('?')}").name for leaf in leaves}
            must = {self.place(f"{head}/{leaf}").name for leaf in leaves if not leaf.endswith("?")}
            found.append((must, every))
        return found


def part_of(path: str) -> str:
    """'encoder' or the head that a parameter path belongs to."""
    return path.split("/", 1)[0]


def _hugging_face(root: str, modules: Sequence[tuple[str, str]], **others: Any) -> Naming:
    """Names by a table: module here (regex) -> module there, under `root` those of the encoder. The first that fits
    counts."""

    def place(path: str) -> Place:
        module, leaf = (path, "") if _TABLES.fullmatch(path) else path.rsplit("/", 1)
        for ours, theirs in modules:
            if match := re.fullmatch(ours, module):
                return Place(f"{match.expand(theirs)}.{'bias' if leaf == 'bias' else 'weight'}", leaf == "kernel")
        raise KeyError(f"no foreign name is known for parameter {path!r}")

    bare = {f"{theirs.split('.')[1]}." for _, theirs in modules if theirs.startswith(f"{root}.")}
    return Naming(place, root=root, bare=tuple(bare), **others)


def _as_bert(root: str) -> tuple[tuple[str, str], ...]:
    """The encoder as BERT's own, under another root."""
    return (
        (r"encoder/embeddings/(word|position|token_type)_embeddings", rf"{root}.embeddings.\1_embeddings"),
        (r"encoder/embeddings/LayerNorm", f"{root}.embeddings.LayerNorm"),
        (r"encoder/layer_(\d+)/attention/(query|key|value)", rf"{root}.encoder.layer.\1.attention.self.\2"),
        (r"encoder/layer_(\d+)/attention/output", rf"{root}.encoder.layer.\1.attention.output.dense"),
        (r"encoder/layer_(\d+)/attention/LayerNorm", rf"{root}.encoder.layer.\1.attention.output.LayerNorm"),
        (r"encoder/layer_(\d+)/(intermediate|output)", rf"{root}.encoder.layer.\1.\2.dense"),
        (r"encoder/layer_(\d+)/LayerNorm", rf"{root}.encoder.layer.\1.output.LayerNorm"),
    )


_OUTPUTS = (r"classifier|qa_outputs", r"\g<0>")
_DEEP_OUTPUTS = (r"classifier/(dense|out_proj)", r"classifier.\1")
_BERT = _hugging_face(
    "bert",
    (
        *_as_bert("bert"),
        (r"pooler", "bert.pooler.dense"),
        (r"mlm/transform", "cls.predictions.transform.dense"),
        (r"mlm/LayerNorm", "cls.predictions.transform.LayerNorm"),
        (r"mlm", "cls.predictions"),
        (r"nsp", "cls.seq_relationship"),
        _OUTPUTS,
    ),
    ties={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
)
_ROBERTA = _hugging_face(
    "roberta",
    (
        *_as_bert("roberta"),
        (r"pooler", "roberta.pooler.dense"),
        (r"mlm/transform", "lm_head.dense"),
        (r"mlm/LayerNorm", "lm_head.layer_norm"),
        (r"mlm", "lm_head"),
        _DEEP_OUTPUTS,
        _OUTPUTS,
    ),
    heads={**_WITHOUT_NSP, "classifier": (_DENSE, _DEEP)},
    ties={
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
)
_ELECTRA = _hugging_face(
    "electra",
    (
        *_as_bert("electra"),
        (r"encoder/embeddings/projection", "electra.embeddings_project"),
        (r"pooler", "sequence_summary.summary"),
        (r"mlm/transform", "generator_predictions.dense"),
        (r"mlm/LayerNorm", "generator_predictions.LayerNorm"),
        (r"mlm", "generator_lm_head"),
        _DEEP_OUTPUTS,
        _OUTPUTS,
    ),
    heads={**_WITHOUT_NSP, "classifier": (_DENSE, _DEEP)},
    ties={"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"},
    unread={
        "discriminator_predictions.": "this is ELECTRA's discriminator, which tells replaced tokens from others and "
        "predicts no words: [MASK] is filled by its generator, a checkpoint of its own"
    },
)
_DISTILBERT = _hugging_face(
    "distilbert",
    (
        (r"encoder/embeddings/(word|position)_embeddings", r"distilbert.embeddings.\1_embeddings"),
        (r"encoder/embeddings/LayerNorm", "distilbert.embeddings.LayerNorm"),
        (r"encoder/layer_(\d+)/attention/query", r"distilbert.transformer.layer.\1.attention.q_lin"),
        (r"encoder/layer_(\d+)/attention/key", r"distilbert.transformer.layer.\1.attention.k_lin"),
        (r"encoder/layer_(\d+)/attention/value", r"distilbert.transformer.layer.\1.attention.v_lin"),
        (r"encoder/layer_(\d+)/attention/output", r"distilbert.transformer.layer.\1.attention.out_lin"),
        (r"encoder/layer_(\d+)/attention/LayerNorm", r"distilbert.transformer.layer.\1.sa_layer_norm"),
        (r"encoder/layer_(\d+)/intermediate", r"distilbert.transformer.layer.\1.ffn.lin1"),
        (r"encoder/layer_(\d+)/output", r"distilbert.transformer.layer.\1.ffn.lin2"),
        (r"encoder/layer_(\d+)/LayerNorm", r"distilbert.transformer.layer.\1.output_layer_norm"),
        (r"pooler", "pre_classifier"),
        (r"mlm/transform", "vocab_transform"),
        (r"mlm/LayerNorm", "vocab_layer_norm"),
        (r"mlm", "vocab_projector"),
        _OUTPUTS,
    ),
    heads=_WITHOUT_NSP,
    ties={"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
)
_MODERNBERT = _hugging_face(
    "model",
    (
        (r"encoder/embeddings/word_embeddings", "model.embeddings.tok_embeddings"),
        (r"encoder/embeddings/LayerNorm", "model.embeddings.norm"),
        (r"encoder/layer_(\d+)/attention/(query|key|value)", r"model.layers.\1.attn.Wqkv"),
        (r"encoder/layer_(\d+)/attention/output", r"model.layers.\1.attn.Wo"),
        (r"encoder/layer_(\d+)/attention/LayerNorm", r"model.layers.\1.attn_norm"),
        (r"encoder/layer_(\d+)/(intermediate|gate)", r"model.layers.\1.mlp.Wi"),
        (r"encoder/layer_(\d+)/output", r"model.layers.\1.mlp.Wo"),
        (r"encoder/layer_(\d+)/LayerNorm", r"model.layers.\1.mlp_norm"),
        (r"encoder/final_norm", "model.final_norm"),
        (r"pooler|mlm/transform", "head.dense"),
        (r"(pooler|mlm)/LayerNorm", "head.norm"),
        (r"mlm", "decoder"),
        (r"classifier|qa_outputs", "classifier"),
    ),
    heads=_WITHOUT_NSP
    | {
        "pooler": (("kernel", "LayerNorm/scale", "LayerNorm/bias?"),),
        "mlm": (("transform/kernel", "LayerNorm/scale", "LayerNorm/bias?", "bias"),),
    },
    joined={"Wqkv": ("query", "key", "value"), "Wi": ("intermediate", "gate")},
    ties={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
)


def _own(separator: str) -> Naming:
    """Names that are parameter paths: of runs, and of the layout of networks that transformers has no class for."""
    either = tuple(f"{leaf}?" for leaf in ("bias", "LayerNorm/scale", "LayerNorm/bias"))
    return Naming(
        lambda path: Place(path.replace("/", separator), False),
        HEAD_PARTS
        | {
            "pooler": (("kernel", *either),),
            "mlm": (("transform/kernel", "transform/bias?", "LayerNorm/scale", "LayerNorm/bias?", "bias"),),
            "classifier": (_DENSE, _DEEP),
        },
        root="encoder",
    )


# model_type -> the names in its files
HUGGING_FACE: dict[str, Naming] = {
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "distilbert": _DISTILBERT,
    "electra": _ELECTRA,
    "modernbert": _MODERNBERT,
    OWN: _own("."),
}
RUN = _own("/")


def _google_place(path: str) -> Place:
    """The variable of a parameter in Google's checkpoints.

    A fine-tuned classifier's variables are called plainly output_weights and output_bias
    (run_classifier.py), a reader's cls/squad/output_* (run_squad.py).
    """
    module = _BERT(path).name.rpartition(".")[0]
    module = re.sub(r"layer\.(\d+)", r"layer_\1", module).replace(".", "/")
    leaf = path.rpartition("/")[2]
    if part_of(path) in ("nsp", "classifier", "qa_outputs"):
        module = {"classifier": "", "qa_outputs": "cls/squad/"}.get(module, f"{module}/")
        return Place(f"{module}output_{'weights' if leaf == 'kernel' else 'bias'}", leaf == "kernel")
    if path == "mlm/bias":
        return Place("cls/predictions/output_bias", False)
    if _TABLES.fullmatch(path):
        return Place(module, False)
    if module.endswith("LayerNorm"):
        leaf = {"scale": "gamma", "bias": "beta"}[leaf]
    return Place(f"{module}/{leaf}", False)


GOOGLE = Naming(_google_place)


def heads_in(names: Iterable[str], naming: Naming) -> set[str]:
    """The heads of which a file has every array."""
    names = set(names)
    return {head for head in naming.heads if any(must <= names for must, _ in naming.names_of(head))}
