"""bertjax: pre-train BERT from scratch and fine-tune it, in JAX/Flax.

The names a notebook needs; each is imported when it is first used, so that tools which need no
accelerator start without loading jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

from bertjax.version import __version__ as __version__

if TYPE_CHECKING:  # for editors and type checkers
    from bertjax.data.store import TokenStore
    from bertjax.embeddings import sentence_embeddings
    from bertjax.experiment import Result, finetune, train
    from bertjax.inference import answer, classify, fill_mask, next_sentence, tag_words
    from bertjax.interop import LoadedModel, load_model
    from bertjax.model.heads import BertForPreTraining
    from bertjax.model.presets import PRESETS, BertConfig, Execution
    from bertjax.prediction import Predictions, predict
    from bertjax.tokenization import Tokenizer, load_tokenizer
    from bertjax.training.trainer import Trainer

_HOMES = {
    "data.store": ["TokenStore"],
    "embeddings": ["sentence_embeddings"],
    "experiment": ["Result", "finetune", "train"],
    "inference": ["answer", "classify", "fill_mask", "next_sentence", "tag_words"],
    "interop": ["LoadedModel", "load_model"],
    "model.heads": ["BertForPreTraining"],
    "model.presets": ["PRESETS", "BertConfig", "Execution"],
    "prediction": ["Predictions", "predict"],
    "tokenization": ["Tokenizer", "load_tokenizer"],
    "training.trainer": ["Trainer"],
}
__all__ = sorted(name for names in _HOMES.values() for name in names)


if not TYPE_CHECKING:  # which would take any name for one

    def __getattr__(name: str) -> Any:
        for home, names in _HOMES.items():
            if name in names:
                return getattr(importlib.import_module(f"bertjax.{home}"), name)
        raise AttributeError(f"module 'bertjax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
