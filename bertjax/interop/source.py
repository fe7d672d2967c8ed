"""The one way to open a model on disk: Hugging Face directories, Google's checkpoints, our runs.

In: a path. Out: a `Source`, whose configuration, tokenizer and label names have been read and
checked against each other; its weights are read when they are asked for. Whatever needs a model,
its tokenizer or its heads (pre-training, fine-tuning, the tools, Python calls) comes through here.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bertjax.config import ModelSettings
from bertjax.formats import hub
from bertjax.formats.arrays import Header, LoadError
from bertjax.formats.checkpoint import CheckpointError, SavedStates
from bertjax.formats.files import read_json
from bertjax.interop import huggingface, sentence_transformers
from bertjax.interop.names import GOOGLE, HUGGING_FACE, RUN, Naming
from bertjax.interop.sentence_transformers import SentenceSettings
from bertjax.model import heads
from bertjax.model.paths import flatten
from bertjax.model.positions import EXTENSIONS, extended
from bertjax.model.presets import BertConfig
from bertjax.tokenization import Tokenizer, load_tokenizer

log = logging.getLogger(__name__)
_FILLED = 0.9  # of the rows of a word table; released models pad theirs to a multiple of 64 or 128

# kind of source -> its weight files (of a run the manifests, which hold their checksums)
_FILES = {"huggingface": ("*.safetensors", "*.bin"), "tf1": ("*.data-*",), "bertjax": ("checkpoints/*/manifest.json",)}
# Weights in formats that are not read, and what turns them into one that is.
_OTHER_WEIGHTS = {
    "flax_model.msgpack": "from_flax=True, with a transformers below 5",
    "tf_model.h5": "from_tf=True, with a transformers below 5",
}
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".onnx", ".gguf")
MANY_LAYERS = 1000  # more than any model has; the file must hold them before anything is made


@dataclasses.dataclass(frozen=True)
class Source:
    """What a path holds.

    Attributes:
      kind: 'huggingface', 'tf1' or 'bertjax'.
      config: the network.
      settings: the whole configuration file.
      naming: parameter path -> its foreign name.
      read: reads the weights, foreign name -> array.
      read_headers: reads types and shapes alone, foreign name -> Header.
      directory: where the tokenizer files are.
      tokenizer: None where the directory has none; never larger than the embedding table.
      sentence: what a directory of sentence-transformers says about embeddings, else None.
    """

    kind: str
    config: BertConfig
    settings: Mapping[str, Any]
    naming: Naming
    read: Callable[[], dict[str, np.ndarray]]
    read_headers: Callable[[], dict[str, Header]]
    directory: Path
    tokenizer: Tokenizer | None = None
    sentence: SentenceSettings | None = None

    def __post_init__(self) -> None:
        # A network is built layer by layer, before its weights are read.
        if self.config.num_hidden_layers > MANY_LAYERS:
            self.check_layers()

    @functools.cached_property
    def headers(self) -> dict[str, Header]:
        """Foreign name -> type and shape of every array.

        Raises:
          LoadError: the files cannot be read.
        """
        return self.read_headers()

    def check_layers(self) -> None:
        """Refuses more layers than the file has arrays, before a network of that size is made.

        Raises:
          LoadError: it has, or the files cannot be read.
        """
        if self.config.num_hidden_layers > len(self.headers):
            raise LoadError(
                f"{self.directory}: the configuration says num_hidden_layers="
                f"{self.config.num_hidden_layers}, the file holds {len(self.headers)} arrays in all"
            )

    def extended(self, positions: int, how: str) -> Source:
        """The model for rows of so many tokens: a table of positions grows, see `positions.extended`.

        Texts as long as all positions were may be as long as all that there are now.

        Raises:
          LoadError: it has more already, or `how` is not one of positions.EXTENSIONS.
        """
        old = self.config
        if positions == old.max_position_embeddings:
            return self
        if how not in EXTENSIONS or positions < old.max_position_embeddings:
            raise LoadError(
                f"{self.directory} has {old.max_position_embeddings} positions, not {positions}: its table can be "
                f"extended ({', '.join(EXTENSIONS)}), not cut"
            )
        log.warning("%s: %d positions extended to %d (%s)", self.directory, old.max_position_embeddings, positions, how)
        config = dataclasses.replace(old, max_position_embeddings=positions)
        tokenizer, sentence = copy.copy(self.tokenizer), self.sentence
        if tokenizer is not None and (tokenizer.model_max_length or 0) >= old.max_position_embeddings:
            tokenizer.model_max_length = positions
        if sentence is not None and (sentence.max_length or 0) >= old.max_position_embeddings:
            sentence = dataclasses.replace(sentence, max_length=positions)
        larger = dataclasses.replace(self, config=config, tokenizer=tokenizer, sentence=sentence)
        if not old.position_rows:
            return larger
        name = self.naming("encoder/embeddings/position_embeddings").name
        return larger._changed(
            {name: name},
            lambda table: extended(table, old, positions, how),
            lambda header: header._replace(shape=(config.position_rows, *header.shape[1:])),
        )

    def with_transform_as_pooler(self) -> Source:
        """The model whose pooler is the transform of its MLM head, if it has one."""
        parts = ("kernel", "transform/kernel"), *((f"LayerNorm/{leaf}",) * 2 for leaf in ("scale", "bias"))
        return self._changed({self.naming(f"pooler/{new}").name: self.naming(f"mlm/{old}").name for new, old in parts})

    def _changed(
        self,
        made_of: Mapping[str, str],
        array: Callable[[np.ndarray], np.ndarray] = lambda array: array,
        header: Callable[[Header], Header] = lambda header: header,
    ) -> Source:
        """The same with some arrays made of others, {name: name of the other}, as far as the others are there."""

        def changed(found: dict[str, Any], make: Callable[[Any], Any]) -> dict[str, Any]:
            return found | {name: make(found[other]) for name, other in made_of.items() if other in found}

        return dataclasses.replace(
            self, read=lambda: changed(self.read(), array), read_headers=lambda: changed(self.read_headers(), header)
        )

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the head's classes, by index; () if the model names none.

        Raises:
          LoadError: names that cannot be told apart or whose order is not clear.
        """
        return _labels(self.settings, self.directory)

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises LoadError if the directory has none."""
        if self.tokenizer is None:
            raise LoadError(
                f"{self.directory} holds no tokenizer: put the model's vocab.txt or "
                "tokenizer.json (with tokenizer_config.json) beside its weights"
            )
        return self.tokenizer

    def fingerprint(self) -> str:
        """Hash of the weight files' names, sizes and first MiB: tells other weights at the same place without reading
        them all."""
        digest = hashlib.sha256()
        for pattern in _FILES[self.kind]:
            for path in sorted(self.directory.glob(pattern)):
                digest.update(f"{path.name} {path.stat().st_size}\n".encode())
                with open(path, "rb") as file:
                    digest.update(file.read(1 << 20))
        return digest.hexdigest()


def open_source(path: str | os.PathLike[str]) -> Source:
    """Recognises a model directory, a TF1 checkpoint (directory or prefix), a bertjax workdir, or a name at the Hub.

    WORKDIR@STEP is the checkpoint of that step of a run instead of its newest; the directory of a
    fine-tuning run stands for its best model.

    Raises:
      LoadError: none of these; its configuration is missing, describes no BERT or asks for what
        this code does not compute; its tokenizer has more entries than the embedding table.
      ValueError: its tokenizer files are damaged or contradict each other.
    """
    path = os.fspath(path)
    if "://" in path:
        raise LoadError(
            f"{path} is not on a local disk; copy the model there first (for example "
            "gcloud storage cp -r) and name the copy"
        )
    path = Path(path).expanduser()
    source = _recognise(path)
    tokenizer = source.tokenizer or _tokenizer(source)
    if tokenizer is not None and tokenizer.vocab_size > source.config.vocab_size:
        raise LoadError(
            f"{source.directory}: the tokenizer has {tokenizer.vocab_size} entries, the model "
            f"{source.config.vocab_size} rows: the vocabulary is not this checkpoint's"
        )
    if tokenizer is not None and tokenizer.vocab_size < _FILLED * source.config.vocab_size:
        _tell_once(
            f"{source.directory}: the tokenizer has only {tokenizer.vocab_size} entries for the model's "
            f"{source.config.vocab_size} rows. Was its vocabulary cut off? Then words are read as unknown"
        )
    return dataclasses.replace(source, tokenizer=tokenizer)


@functools.cache
def _tell_once(text: str) -> None:
    log.warning("%s", text)


def step_of_run(path: str | Path) -> tuple[Path, int | None]:
    """(the work directory, step) of WORKDIR@STEP where that is a run; (path, None) of another path."""
    path = Path(path).expanduser()
    name, _, step = path.name.rpartition("@")
    if not path.exists() and step.isdecimal() and (path.parent / name / "checkpoints").is_dir():
        return path.parent / name, int(step)
    return path, None


def _recognise(path: Path) -> Source:
    sentence = sentence_transformers.read(path) if path.is_dir() else None
    directory = path if sentence is None else sentence.directory
    if (directory / "adapter_config.json").is_file():  # without which the weights beside it are another model
        raise LoadError(
            f"{directory} holds an adapter of peft, which is not a whole model. Merge it, in torch: PeftModel."
            "from_pretrained(BASE, DIR).merge_and_unload().save_pretrained(OUT), with the tokenizer's files in OUT"
        )
    if directory.is_dir() and huggingface.is_hugging_face(directory):
        config, settings = huggingface.read_config(directory)
        naming = HUGGING_FACE[settings.get("model_type") or "bert"]
        naming = dataclasses.replace(naming, tied=settings.get("tie_word_embeddings") in (None, True))
        read = [
            functools.partial(f, directory, naming) for f in (huggingface.read_state_dict, huggingface.read_headers)
        ]
        return Source("huggingface", config, settings, naming, *read, directory, sentence=sentence)
    if (path / "finetune.json").is_file():
        return _finetuned(path)
    if (path / "checkpoints").is_dir():
        return _run(path)
    workdir, step = step_of_run(path)
    if step is not None:
        if (workdir / "finetune.json").is_file():
            raise LoadError(f"{path}: the model of a fine-tuning run is its best one, {workdir}")
        return _run(workdir, step)
    from bertjax.interop import tf1  # late: it imports numba

    prefix = tf1.find_prefix(path)
    if prefix is not None:
        config, settings = tf1.read_config(prefix)
        read = [functools.partial(f, prefix) for f in (tf1.read_variables, tf1.read_headers)]
        return Source("tf1", config, settings, GOOGLE, *read, prefix.parent)
    if path.is_file():
        raise LoadError(f"{path} is a file; give the directory that it is in")
    if not path.exists():
        try:
            return _recognise(hub.fetch(path))
        except FileNotFoundError as error:
            raise LoadError(str(error)) from None
    for name, how in _OTHER_WEIGHTS.items():
        if (directory / name).is_file():
            raise LoadError(
                f"{directory} has its weights in {name} alone, which is not read. Convert them in "
                f"torch: BertForPreTraining.from_pretrained(DIR, {how}).save_pretrained(OUT) "
                "(or the class that config.json names), and copy the tokenizer files to OUT"
            )
    if path.parent.name == "checkpoints" and path.name.isdecimal():
        raise LoadError(f"{path}: a checkpoint of a run is named by its step, {path.parent.parent}@{path.name}")
    inside = sorted(place.name for place in directory.iterdir() if huggingface.is_hugging_face(place))
    others = sorted(place.name for place in directory.iterdir() if place.suffix in _SUFFIXES)
    raise LoadError(
        f"{path} holds no model: expected config.json with {' or '.join(huggingface.WEIGHT_FILES)}"
        ", bert_config.json with bert_model.ckpt.index, or a bertjax workdir with checkpoints/"
        + "; it is an export to StableHLO: name the model that this was made of" * (directory / "export.json").is_file()
        + f"; its folder {', '.join(inside)} does, which can be named" * bool(inside)
        + f"; found {', '.join(others)}, which is not read under this name" * bool(others)
    )


def _finetuned(workdir: Path) -> Source:
    model = workdir / "model"
    if not huggingface.is_hugging_face(model):
        raise LoadError(
            f"{workdir} is a fine-tuning run that has not finished, and its best model will be in {model}; or it was "
            "one with a BiLSTM, which no format of models can hold"
        )
    return _recognise(model)


def _run(workdir: Path, step: int | None = None) -> Source:
    """A checkpoint of a pre-training run, without the rows that pad its table (vocab_multiple);
    None = the newest intact one."""
    path = workdir / "config.json"
    if not path.is_file():
        raise LoadError(f"{workdir} has checkpoints/, but no config.json that says of what: put a copy of it back")
    tokenizer = load_tokenizer(workdir)
    if _vocabulary_of_run(workdir) not in (None, tokenizer.fingerprint):
        raise LoadError(
            f"{workdir} holds another vocabulary or casing than its run was trained with: it was damaged or replaced. "
            f"Copy the tokenizer's files from the token store, or from {workdir / 'model'}"
        )
    saved = SavedStates(workdir / "checkpoints")
    try:
        saved.require(step)
    except CheckpointError as error:
        raise LoadError(str(error)) from error
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
        padded = BertConfig.of(ModelSettings(**run["model"]), tokenizer.vocab_size, tokenizer.pad_id)
        nsp = run.get("data", {}).get("nsp", True)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise LoadError(f"{path} does not describe a run: {error!r:.200}") from error
    config = padded.without_padding()

    def read() -> dict[str, np.ndarray]:
        try:
            state, _ = saved.restore_numpy(step)
        except CheckpointError as error:
            raise LoadError(str(error)) from error
        return heads.with_rows(flatten(state["params"]), config.vocab_size)

    def read_headers() -> dict[str, Header]:
        network = heads.pretraining_network(config, nsp)
        shapes = flatten(heads.parameter_shapes(network(config)))
        return {name: Header(leaf.shape, np.dtype(leaf.dtype)) for name, leaf in shapes.items()}

    settings = {**run, "untrained_heads": heads.untrained_heads(config, nsp)}
    return Source("bertjax", config, settings, RUN, read, read_headers, workdir, tokenizer)


def _vocabulary_of_run(workdir: Path) -> str | None:
    """The fingerprint of the tokenizer that a run was begun with, if it is known."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return read_json(workdir / "corpus.json")["vocabulary"]
    return None


def _tokenizer(source: Source) -> Tokenizer | None:
    """The tokenizer beside the weights, or None without vocabulary files."""
    stamp = tuple(
        (path.name, path.stat().st_mtime_ns, path.stat().st_size)
        for path in sorted(source.directory.iterdir())
        if path.suffix in (".txt", ".json", ".model")
    )
    return _read_tokenizer(source.directory, stamp)


@functools.lru_cache(maxsize=4)  # a job opens its model several times
def _read_tokenizer(directory: Path, stamp: tuple) -> Tokenizer | None:
    try:
        return load_tokenizer(directory)
    except FileNotFoundError:
        return None


def _labels(settings: Mapping[str, Any], directory: Path) -> tuple[str, ...]:
    """By index, from id2label, or from label2id where that stands alone."""
    by_number, numbers = settings.get("id2label") or {}, settings.get("label2id") or {}
    if not by_number:
        by_number = {number: name for name, number in numbers.items()}
        if len(by_number) < len(numbers):
            raise LoadError(f"{directory}: label2id gives two labels the same number: {numbers}")
    names = {int(number): name for number, name in by_number.items()}
    if sorted(map(int, by_number)) != list(range(len(by_number))):
        raise LoadError(
            f"{directory}: the labels are numbered {sorted(map(int, by_number))}, not "
            f"from 0 to {len(by_number) - 1}: give every class of the head a name"
        )
    ordered = tuple(str(names[i]) for i in range(len(names)))
    if ordered == tuple(f"LABEL_{i}" for i in range(len(ordered))) and not settings.get("finetuned"):
        return ()  # what transformers writes for no names
    if twice := sorted(name for name, times in Counter(ordered).items() if times > 1):
        raise LoadError(
            f"{directory}: id2label names several classes {', '.join(twice)}; give "
            "each class a name of its own in config.json"
        )
    places = {name: str(place) for place, name in enumerate(ordered)}
    other = [name for name, number in numbers.items() if str(number) != places.get(name, str(number))]
    if other:
        raise LoadError(
            f"{directory}: label2id contradicts id2label about {', '.join(map(str, other))}; "
            "correct the wrong one in config.json (transformers goes by id2label)"
        )
    return ordered
