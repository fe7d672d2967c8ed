"""bertjax: pre-train BERT from scratch and fine-tune it, in JAX/Flax.

The names a notebook needs; each is imported when it is first used, so that tools which need no
accelerator start without loading jax.
"""

import importlib

__version__ = "0.1.0"

_HOMES = {
    "BertConfig": "bertjax.model.presets",
    "Execution": "bertjax.model.presets",
    "PRESETS": "bertjax.model.presets",
    "BertForPreTraining": "bertjax.model.heads",
    "Tokenizer": "bertjax.tokenization",
    "load_tokenizer": "bertjax.tokenization",
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


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'bertjax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
