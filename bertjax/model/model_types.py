"""The model types of transformers: which networks each has, and how its config.json spells them.

In: a config.json as a dictionary, or a BertConfig's fields. Out: the other. To add a type: an entry of TYPES here
and its names of parameters in interop/names.py.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bertjax.config import Architecture

OWN = "bertjax"  # model_type of what transformers has no class for
# All other fields say which kind of network it is. A type fixes them, but for those that it leaves free.
SIZES = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size hidden_act hidden_dropout_prob "
    "attention_probs_dropout_prob max_position_embeddings initializer_range layer_norm_eps type_vocab_size model_type"
).split()
SWITCHES = tuple(field.name for field in dataclasses.fields(Architecture) if field.name not in SIZES)
_BERT: dict[str, Any] = dataclasses.asdict(Architecture())

Fields = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ModelType:
    """One model_type.

    Attributes:
      prefix: how the names of its classes in transformers begin.
      fixed: fields whose value every model of the type has, where it is not BERT's.
      free: switches that config.json sets.
      keys: field -> its key in config.json, where they differ.
      absent: field -> value where config.json has no such key, if it is not BertConfig's.
      one_value: keys that may have one value only, beside those of every type.
      harmless: keys that change nothing, beside those of every type.
      special: keys for ids of the tokenizer's special tokens, whose defaults are those of the published models.
      only_tokenizer_json: transformers has no tokenizer class of this type: it reads tokenizer.json and no vocab.txt.
      read: changes the dictionary of a file before its keys are read, write that of a file to be.
    """

    prefix: str = "Bert"
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    free: Sequence[str] = ()
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    absent: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    one_value: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    harmless: Sequence[str] = ()
    special: Mapping[str, str] = dataclasses.field(default_factory=dict)
    only_tokenizer_json: bool = False
    read: Callable[[Fields], Fields] = dict
    write: Callable[[Fields], Fields] = dict

    def misfits(self, config: Architecture) -> list[str]:
        """The switches in which a network is not of this type."""
        wanted, passed_over = {**_BERT, **self.fixed}, {*self.free, *config.idle}
        names = [name for name in dict.fromkeys((*SWITCHES, *self.fixed)) if name not in passed_over]
        found = [name for name in names if getattr(config, name) != wanted[name]]
        segments = "type_vocab_size" in self.fixed or config.type_vocab_size > 0
        return found if segments else [*found, "type_vocab_size"]


def _read_roberta(values: Fields) -> Fields:
    """Its position table has pad_token_id + 1 rows more than there are positions."""
    offset = int(values.get("pad_token_id", 1)) + 1
    return {**values, "max_position_embeddings": int(values.get("max_position_embeddings", 512)) - offset}


def _write_roberta(values: Fields) -> Fields:
    return {**values, "max_position_embeddings": values["max_position_embeddings"] + values["pad_token_id"] + 1}


def _read_electra(values: Fields) -> Fields:
    size = values.get("embedding_size", 128)
    return {**values, "embedding_size": 0 if size == values.get("hidden_size", 256) else size}


def _write_electra(values: Fields) -> Fields:
    return {**values, "embedding_size": values["embedding_size"] or values["hidden_size"]}


_KINDS = {"full_attention": "global", "sliding_attention": "local"}


def _read_modernbert(values: Fields) -> Fields:
    """layer_types and rope_parameters of transformers 5 become the three numbers that were there before."""
    values = {"local_attention": 128, **values}
    scaling = values.pop("rope_scaling", None)
    if scaling:
        raise ValueError(f"config rope_scaling={scaling!r:.80} is not supported")
    for kind, rope in (values.pop("rope_parameters", None) or {}).items():
        if kind not in _KINDS or not isinstance(rope, Mapping) or rope.get("rope_type", "default") != "default":
            raise ValueError(f"config rope_parameters[{kind!r}]={rope!r:.80} not supported, only rope_type 'default'")
        if unknown := sorted(rope.keys() - {"rope_type", "rope_theta"}):
            raise ValueError(f"config rope_parameters[{kind!r}]: {', '.join(unknown)} not supported")
        if "rope_theta" in rope:
            values[f"{_KINDS[kind]}_rope_theta"] = rope["rope_theta"]
    kinds = values.pop("layer_types", None)
    if kinds:
        layers = values.get("num_hidden_layers", 22)
        local = values["local_attention"]
        every = next((i for i, kind in enumerate(kinds) if i and kind == "full_attention"), len(kinds))
        expected = ["sliding_attention" if i % every else "full_attention" for i in range(layers)]
        if kinds != expected:
            raise ValueError(f"config layer_types={kinds!r:.200} not supported, only every n-th layer full_attention")
        values["global_attn_every_n_layers"] = every
        values["local_attention"] = local if "sliding_attention" in kinds else 0
    if (out := values.get("embedding_dropout", 0)) != values.get("mlp_dropout", 0):
        raise ValueError(f"config embedding_dropout={out!r} is not supported beside another mlp_dropout")
    values.pop("embedding_dropout", None)
    return values


def _write_modernbert(values: Fields) -> Fields:
    layers, local = values["num_hidden_layers"], values["local_attention"]
    every = values["global_attn_every_n_layers"] if local else 1
    rope = {kind: {"rope_type": "default", "rope_theta": values[f"{ours}_rope_theta"]} for kind, ours in _KINDS.items()}
    return values | {
        "local_attention": local or 128,
        "global_attn_every_n_layers": every,
        "layer_types": ["sliding_attention" if i % every else "full_attention" for i in range(layers)],
        "rope_parameters": rope,
        "embedding_dropout": values["mlp_dropout"],
    }


_ENDS = {"bos_token_id": "cls_token", "eos_token_id": "sep_token"}
_ROBERTA = ModelType(
    "Roberta",
    fixed={"positions": "offset", "heads": "roberta"},
    free=("is_decoder",),
    absent={"vocab_size": 50265, "pad_token_id": 1},
    special=_ENDS,
    read=_read_roberta,
    write=_write_roberta,
)

TYPES: dict[str, ModelType] = {
    "bert": ModelType(free=("is_decoder",)),
    "roberta": _ROBERTA,
    "xlm-roberta": dataclasses.replace(_ROBERTA, prefix="XLMRoberta", absent={"pad_token_id": 1}),
    "camembert": dataclasses.replace(_ROBERTA, prefix="Camembert", absent={"pad_token_id": 1}),
    "distilbert": ModelType(
        "DistilBert",
        fixed={"type_vocab_size": 0, "layer_norm_eps": 1e-12, "heads": "distilbert"},
        keys={
            "hidden_size": "dim",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "intermediate_size": "hidden_dim",
            "hidden_act": "activation",
            "hidden_dropout_prob": "dropout",
            "attention_probs_dropout_prob": "attention_dropout",
            "classifier_dropout": "seq_classif_dropout",
        },
        absent={"num_hidden_layers": 6, "classifier_dropout": 0.2},
        # Sinusoids are how the table was first filled; it is in the file.
        harmless=("sinusoidal_pos_embds", "tie_weights_", "qa_dropout"),
    ),
    "electra": ModelType(
        "Electra",
        fixed={"heads": "electra"},
        free=("embedding_size",),
        absent={"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024},
        one_value={"summary_type": "first", "summary_use_proj": True, "summary_activation": "gelu"},
        harmless=("summary_last_dropout", "generator_size", "embedding_size"),
        read=_read_electra,
        write=_write_electra,
    ),
    "modernbert": ModelType(
        "ModernBert",
        fixed={
            "positions": "rotary",
            "norm": "before",
            "first_norm": False,
            "final_norm": True,
            "feed_forward": "gated",
            "type_vocab_size": 0,
            "heads": "modernbert",
        },
        free=(
            "global_rope_theta local_rope_theta local_attention global_attn_every_n_layers norm_bias attention_bias "
            "mlp_bias classifier_pooling"
        ).split(),
        keys={
            "hidden_act": "hidden_activation",
            "layer_norm_eps": "norm_eps",
            "hidden_dropout_prob": "mlp_dropout",
            "attention_probs_dropout_prob": "attention_dropout",
        },
        absent={
            "vocab_size": 50368,
            "intermediate_size": 1152,
            "num_hidden_layers": 22,
            "max_position_embeddings": 8192,
            "pad_token_id": 50283,
            "layer_norm_eps": 1e-5,
            "norm_bias": False,
            "attention_bias": False,
            "mlp_bias": False,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "classifier_dropout": 0.0,
        },
        one_value={"classifier_bias": False, "classifier_activation": "gelu", "decoder_bias": True},
        harmless=(
            "initializer_cutoff_factor sparse_prediction sparse_pred_ignore_index deterministic_flash_attn "
            "reference_compile repad_logits_with_grad layer_norm_eps type_vocab_size embedding_dropout"
        ).split(),
        special=_ENDS | {"cls_token_id": "cls_token", "sep_token_id": "sep_token"},
        only_tokenizer_json=True,
        read=_read_modernbert,
        write=_write_modernbert,
    ),
}


def fitting(config: Architecture) -> str:
    """The model_type that a network is exported as: the one it names, else the first that has it, else OWN.

    Raises:
      ValueError: it names one that does not have it.
    """
    if named := config.model_type:
        if misfits := TYPES[named].misfits(config):
            raise ValueError(
                f"model_type={named!r} has no network with "
                + ", ".join(f"{name}={getattr(config, name)!r}" for name in misfits)
                + "; leave model_type='' for a network of your own"
            )
        return named
    return next((name for name, kind in TYPES.items() if not kind.misfits(config)), OWN)
