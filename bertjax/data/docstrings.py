"""The embedded demo corpus: English prose that every installation already has on its disk.

The Python language reference (`pydoc_data.topics`) and the docstrings of the standard library and of installed packages
come in; cleaned paragraphs of prose go out, one document a topic or module. Sources are parsed, never imported.
"""

import ast
import hashlib
import importlib.util
import inspect
import pathlib
import re
import sysconfig
from collections.abc import Iterator

from etils import epath

from bertjax.formats.files import make_once, whole_directory

# Packages of bertjax's own dependency tree with much prose in their docstrings, richest first.
PACKAGES = (
    "numpy scipy jax matplotlib flax optax orbax numba tensorflow_datasets grain pyarrow absl ml_collections"
).split()
_SKIPPED = set("test tests testing idlelib lib2to3 site-packages _vendor __pycache__ turtledemo ensurepip".split())
_MIN_WORDS = 6  # shorter paragraphs are mostly titles and parameter names


def docstring_documents(megabytes: float) -> Iterator[tuple[str, list[str]]]:
    """Yields (name, paragraphs) until about `megabytes` million characters have been given.

    A paragraph is one string of prose without line breaks. The order and the text depend only on what is installed; a
    paragraph that was already given (boilerplate of another module) is left out.
    """
    seen: set[bytes] = set()
    left = megabytes * 1e6
    for name, texts in _sources():
        paragraphs = []
        for paragraph in (p for text in texts for p in prose_paragraphs(text)):
            digest = hashlib.blake2b(paragraph.encode(), digest_size=8).digest()
            if digest not in seen:
                seen.add(digest)
                paragraphs.append(paragraph)
        if len(paragraphs) >= 3:  # a module with two remarks is not a document
            left -= sum(map(len, paragraphs))
            yield name, paragraphs
            if left <= 0:
                return


def build_docstring_store(directory: epath.PathLike, megabytes: float, vocab_size: int, model: str) -> epath.Path:
    """Trains a vocabulary on the corpus and builds its token store, 10 % of the documents held out; returns its
    directory. Does nothing if it is there. One process builds, others wait for it.

    model: wordpiece, bpe or unigram.
    """

    def build(store: pathlib.Path) -> None:
        # Late: a run that finds its store needs none of these.
        from bertjax.data.build import build_store
        from bertjax.data.sentences import split_sentences
        from bertjax.tokenization.train_subwords import train_subwords
        from bertjax.tokenization.train_vocab import train_wordpiece

        print("Gathering the demo corpus from installed documentation (under a minute) ...", flush=True)
        with whole_directory(store) as directory:
            documents = [
                [sentence for text in paragraphs for sentence in split_sentences(text)]
                for _, paragraphs in docstring_documents(megabytes)
            ]
            sentences = (sentence for document in documents for sentence in document)
            if model == "wordpiece":
                tokenizer = train_wordpiece(sentences, vocab_size=vocab_size, do_lower_case=True)
            else:
                tokenizer = train_subwords(sentences, model, vocab_size)
            build_store(None, tokenizer, directory, documents=documents, heldout_fraction=0.1)

    return epath.Path(make_once(directory, build, "the demo corpus", lambda store: (store / "manifest.json").exists()))


def _sources() -> Iterator[tuple[str, list[str]]]:
    from pydoc_data.topics import topics

    for topic, text in sorted(topics.items()):
        yield f"python/{topic}", [text]
    yield from _package_sources("python", pathlib.Path(sysconfig.get_path("stdlib")))
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            yield from _package_sources(package, pathlib.Path(spec.submodule_search_locations[0]))


def _package_sources(package: str, folder: pathlib.Path) -> Iterator[tuple[str, list[str]]]:
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).parts
        if not _SKIPPED.intersection(parts):
            texts = _docstrings(path)
            if texts:
                yield "/".join((package, *parts)), texts


def _docstrings(path: pathlib.Path) -> list[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError, RecursionError):
        return []  # templates and files for other Python versions
    texts = []
    nodes: list[ast.AST] = [tree]
    while nodes:  # definitions only: walking every expression would take far longer
        node = nodes.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            texts.append(ast.get_docstring(node) or "")
            nodes.extend(reversed(node.body))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            if getattr(node.value.func, "id", "") == "add_newdoc":
                # numpy attaches the documentation of its compiled functions this way.
                texts.extend(
                    inspect.cleandoc(constant.value)
                    for constant in ast.walk(node)
                    if isinstance(constant, ast.Constant) and isinstance(constant.value, str)
                )
    return [text for text in texts if text]


_RULES = (
    (re.compile(r":[a-z:]+:`~?([^`<]*?)(?:\s*<[^>]*>)?`"), r"\1"),  # :func:`~x` and :ref:`t <x>`
    (re.compile(r"`([^`<]*?)\s*<[^>]*>`_+"), r"\1"),  # `text <link>`_
    (re.compile(r"`+([^`]*)`+_*"), r"\1"),  # ``code``
    (re.compile(r"\*\*([^*]+)\*\*"), r"\1"),
    (re.compile(r"(?<!\w)\*([^*\s][^*]*)\*(?!\w)"), r"\1"),
    (re.compile(r"\s*\[[0-9, ]+\]_*"), ""),  # footnote marks
    (re.compile(r"\s+"), " "),
)
_NOT_PROSE = re.compile(r">>>|\.\.\. |^\s*(\.\. |[-=~^*#+|]{3,}|:\w+|@)|[{}|\\]|://|__\w+__\(", re.M)


def prose_paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of English sentences in reStructuredText, without markup, code and tables."""
    for block in re.split(r"\n\s*\n", text):
        block = block.strip()
        if not block.endswith((".", "!", "?")) or _NOT_PROSE.search(block):
            continue
        for pattern, replacement in _RULES:
            block = pattern.sub(replacement, block)
        words = block.split()
        plain = sum(word.strip(".,;:()'\"").isalpha() for word in words)
        if len(words) >= _MIN_WORDS and block[0].isupper() and plain >= 0.8 * len(words):
            yield block
