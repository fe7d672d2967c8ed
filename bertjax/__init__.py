"""bertjax: pre-train BERT from scratch and fine-tune it, in JAX/Flax.

The names a notebook needs; each is imported when it is first used, so that tools which need no
accelerator start without loading jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers, which read and do not run
    from bertjax.data.store import TokenStore as TokenStore
    from bertjax.inference import answer as answer
    from bertjax.inference import classify as classify
    from bertjax.inference import fill_mask as fill_mask
    from bertjax.inference import next_sentence as next_sentence
    from bertjax.inference import sentence_embeddings as sentence_embeddings
    from bertjax.inference import tag_words as tag_words
    from bertjax.interop import LoadedModel as LoadedModel
    from bertjax.interop import load_model as load_model
    from bertjax.model.heads import BertForPreTraining as BertForPreTraining
    from bertjax.model.presets import PRESETS as PRESETS
    from bertjax.model.presets import BertConfig as BertConfig
    from bertjax.model.presets import Execution as Execution
    from bertjax.tokenization import Tokenizer as Tokenizer
    from bertjax.tokenization import load_tokenizer as load_tokenizer
    from bertjax.training.trainer import Trainer as Trainer

__version__ = "0.1.0"

_HOMES = {
    "BertConfig": "bertjax.model.presets",
    "Execution": "bertjax.model.presets",
    "PRESETS": "bertjax.model.presets",
    "BertForPreTraining": "bertjax.model.heads",
    "Tokenizer": "bertjax.tokenization",
    "load_tokenizer": "bertjax.tokenization",
    "LoadedModel": "bertjax.interop",
    "load_model": "bertjax.interop",
    "fill_mask": "bertjax.inference",
    "next_sentence": "bertjax.inference",
    "classify": "bertjax.inference",
    "tag_words": "bertjax.inference",
    "answer": "bertjax.inference",
    "sentence_embeddings": "bertjax.inference",
    "TokenStore": "bertjax.data.store",
    "Trainer": "bertjax.training.trainer",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'bertjax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
