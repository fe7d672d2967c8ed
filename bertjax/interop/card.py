"""README.md of a model directory."""

import json
from collections.abc import Mapping
from typing import Any

from bertjax.model.model_types import OWN
from bertjax.version import source_version


def model_card(
    name: str,
    architecture: str,
    summary: str,
    data: str = "",
    recipe: Mapping[str, Any] | None = None,
    sections: Mapping[str, str] | None = None,
    fill_mask: bool = False,
    mask_token: str = "[MASK]",
    model_type: str = "bert",
    embeddings: bool = False,
    sentence: str = "",
) -> str:
    """README.md of a model directory: what it is, how to load it, what it was trained on and how.

    Args:
      architecture, model_type: see huggingface.class_name.
      summary: the first paragraph.
      recipe: what of the training -> value, in the order to print.
      sections: further titles and their Markdown.
      fill_mask: whether it answers `fill-mask`, which the card then shows with its tokenizer's mask_token.
      embeddings: whether it is a directory of sentence-transformers.
      sentence: a text of the model's language with a mask, which the card asks it to fill in; '' = an English one.
    """
    theirs_too = model_type != OWN
    asked = json.dumps(sentence or f"The capital of France is {mask_token}.", ensure_ascii=False)
    theirs = (
        f"from transformers import AutoTokenizer, {architecture}\n\n"
        'tokenizer = AutoTokenizer.from_pretrained("DIRECTORY")\n'
        f'model = {architecture}.from_pretrained("DIRECTORY")'
    )
    ours = 'import bertjax\n\nmodel = bertjax.load_model("DIRECTORY")'
    tags, answers, library = [model_type] * theirs_too, "", "transformers"
    if embeddings:
        tags, answers, library = ["sentence-transformers", *tags], "sentence-similarity", "sentence-transformers"
        theirs = (
            "from sentence_transformers import SentenceTransformer\n\n"
            'vectors = SentenceTransformer("DIRECTORY").encode(["One text.", "Another."])'
        )
        ours += '\nvectors = bertjax.sentence_embeddings(model, ["One text.", "Another."])'
    elif fill_mask:
        answers = "fill-mask"
        theirs = f'from transformers import pipeline\n\nfill = pipeline("fill-mask", model="DIRECTORY")\nfill({asked})'
        ours += f"\nbertjax.fill_mask(model, {asked})"
    lines = [
        "---",
        *[f"library_name: {library}"] * theirs_too,
        "tags:",
        *(f"- {tag}" for tag in (*tags, "bertjax")),
        *[f"pipeline_tag: {answers}"] * bool(answers),
        "---",
        f"\n# {name}\n\n{summary}\n",
        f"Written by bertjax {source_version()} as `{architecture}`.\n\n## Use\n",
        *[f"```python\n{theirs}\n```\n\nor, without torch,\n"] * theirs_too,
        f"```python\n{ours}\n```",
    ]
    if data:
        lines += ["", "## Data", "", data]
    if recipe:
        shown = {what: f"{value:.6g}" if isinstance(value, float) else value for what, value in recipe.items()}
        lines += ["", "## Training", "", "| | |", "|---|---|", *(f"| {what} | {shown[what]} |" for what in shown)]
    for title, text in (sections or {}).items():
        lines += ["", f"## {title}", "", text]
    return "\n".join(lines) + "\n"
