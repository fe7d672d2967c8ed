"""What the layers of a model compute of texts: the states of the tokens, or one vector a text.

A model (`bertjax.load_model`, or the path of one) goes in with texts, which forward.py takes through it.
"""

import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from bertjax.forward import Row, make_rows, run
from bertjax.inference import Model, listed, opened
from bertjax.interop import sentence_transformers as sentences
from bertjax.interop.loaded import LoadedModel
from bertjax.interop.loading import load_model
from bertjax.interop.sentence_transformers import POOLINGS, SentenceSettings
from bertjax.model import heads


def layer_outputs(
    model: Model, texts: Sequence[str | tuple[str, str]], layers: Sequence[int] = (-1,), batch_size: int = 32
) -> Iterator[tuple[list[str], np.ndarray]]:
    """Hidden states of chosen layers (original: extract_features.py).

    Args:
      layers: as list indices over the embeddings and L layers: -1 is the last, 0 the embeddings.

    Yields:
      For each text (its tokens, specials included [N], float32 [len(layers), N, H]).
    """
    loaded, texts = _encoder(model), listed(texts, "feature extraction", "[text]")
    rows = make_rows(loaded, texts)
    layers = listed(layers, "layers", "[-1, -2]")
    if not layers:
        raise ValueError("layers=[] names none; [-1] is the last layer, [0] the embeddings")
    depth = loaded.config.num_hidden_layers + 1
    wrong = [i for i in layers if not -depth <= i < depth]
    if wrong:
        raise ValueError(f"no layers {wrong}: this model has 0 (the embeddings) .. {depth - 1}")

    def chosen(row: Row, output: tuple) -> np.ndarray:
        return np.stack([output[0][i][: len(row.ids)] for i in layers]).astype(np.float32)

    for row, states in zip(rows, run(loaded, rows, batch_size, chosen, all_hidden=True), strict=True):
        yield [loaded.tokenizer.id_to_token(int(i)) for i in row.ids], states


def sentence_embeddings(
    model: Model,
    texts: str | Iterable[str | tuple[str, str]],
    pooling: str | None = None,
    normalise: bool | None = None,
    batch_size: int = 32,
    prompt: str | None = None,
) -> np.ndarray:
    """One vector a text, float32 [N, H], or [H] for one text, made of its last hidden states.

    What a directory of sentence-transformers says is obeyed: length, lower-casing, prompts, pooling, dense layers,
    normalisation, truncation (to fewer numbers than H). Without one, it is the mean.

    Args:
      pooling: one of POOLINGS in place of the directory's, and without its dense layers and its truncation.
      normalise: to length 1, or not, whatever the directory says.
      prompt: the name of the prompt that stands before each text; None is the directory's default.
    """
    if pooling not in (None, *POOLINGS):
        raise ValueError(f"pooling={pooling!r} is not one of {', '.join(POOLINGS)}")
    loaded = _encoder(model)
    if isinstance(texts, str):
        return sentence_embeddings(loaded, [texts], pooling, normalise, batch_size, prompt)[0]
    texts = listed(texts, "feature extraction", "[text], or one text")
    settings = loaded.sentence or SentenceSettings()
    if pooling:
        steps = tuple(step for step in settings.steps if not isinstance(step, sentences.Dense))
        settings = dataclasses.replace(settings, pooling=(pooling,), steps=steps, truncate_dim=None)
    texts = [settings.given(text, prompt) for text in texts]
    rows, first = make_rows(loaded, texts, settings.max_length), 0
    if not settings.include_prompt and settings.prompt(prompt):  # the row of the prompt alone, without its end
        first = len(make_rows(loaded, [settings.given("", prompt)], settings.max_length)[0].ids) - 1

    def pooled(row: Row, output: tuple) -> np.ndarray:
        return settings.pooled(output[0][: len(row.ids)].astype(np.float32), first)

    vectors = np.array(run(loaded, rows, batch_size, pooled), np.float32)
    vectors = vectors.reshape(len(texts), len(settings.pooling) * loaded.config.hidden_size)  # also of none
    for step in settings.steps:
        if normalise is not False or step is not sentences.normalise:
            vectors = step(vectors)
    vectors = vectors[:, : settings.truncate_dim]
    return sentences.normalise(vectors) if normalise else vectors


def _encoder(model: Model) -> LoadedModel:
    """The encoder of a model of any kind, or of that at a path."""
    if isinstance(model, str | os.PathLike):  # the pooler is not used here
        model = load_model(model, "features", reinitialise_head=True)
    if isinstance(model, LoadedModel) and not isinstance(model.model, heads.BertModel):
        model = model.encoder
    return opened(model, "features", heads.BertModel, purpose="feature extraction")
