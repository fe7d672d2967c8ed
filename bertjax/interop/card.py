"""README.md of a model directory."""

from __future__ import annotations

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
) -> str:
    """README.md of a model directory: what it is, how to load it, what it was trained on and how.

    Args:
      architecture, model_type: see huggingface.class_name.
      summary: the first paragraph.
      recipe: what of the training -> value, in the order to print.
      sections: further titles and their Markdown.
      fill_mask: whether it answers `fill-mask`, which the card then shows with its tokenizer's mask_token.
      embeddings: whether it is a directory of sentence-transformers.
    """
    theirs_too = model_type != OWN
    head = [
        "---",
        *[f"library_name: {'sentence-transformers' if embeddings else 'transformers'}"] * theirs_too,
        "tags:",
        *["- sentence-transformers"] * embeddings,
        *[f"- {model_type}"] * theirs_too,
        "- bertjax",
    ]
    answers = ["sentence-similarity"] * embeddings or ["fill-mask"] * fill_mask
    head += [f"pipeline_tag: {task}" for task in answers]
    sentence = f"The capital of France is {mask_token}."
    theirs = (
        [
            "from transformers import pipeline",
            "",
            'fill = pipeline("fill-mask", model="DIRECTORY")',
            f'fill("{sentence}")',
        ]
        if fill_mask
        else [
            f"from transformers import AutoTokenizer, {architecture}",
            "",
            'tokenizer = AutoTokenizer.from_pretrained("DIRECTORY")',
            f'model = {architecture}.from_pretrained("DIRECTORY")',
        ]
    )
    ours = ["import bertjax", "", 'model = bertjax.load_model("DIRECTORY")']
    ours += [f'bertjax.fill_mask(model, "{sentence}")'] if fill_mask else []
    if embeddings:
        theirs = [
            "from sentence_transformers import SentenceTransformer",
            "",
            'vectors = SentenceTransformer("DIRECTORY").encode(["One text.", "Another."])',
        ]
        ours += ['vectors = bertjax.sentence_embeddings(model, ["One text.", "Another."])']
    lines = [
        *head,
        "---",
        "",
        f"# {name}",
        "",
        summary,
        "",
        f"Written by bertjax {source_version()} as `{architecture}`.",
        "",
        "## Use",
        "",
        *(["```python", *theirs, "```", "", "or, without torch,", ""] if theirs_too else []),
        "```python",
        *ours,
        "```",
    ]
    if data:
        lines += ["", "## Data", "", data]
    if recipe:
        rows = [
            f"| {what} | {value:.6g} |" if isinstance(value, float) else f"| {what} | {value} |"
            for what, value in recipe.items()
        ]
        lines += ["", "## Training", "", "| | |", "|---|---|", *rows]
    for title, text in (sections or {}).items():
        lines += ["", f"## {title}", "", text]
    return "\n".join(lines) + "\n"
