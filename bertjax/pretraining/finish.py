"""The end of a pre-training run: what it prints, and the model directory with its card.

Out: lines on the console, and in the work directory `model/` (Hugging Face's layout), `examples.json`, `result.json`.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from etils import epath

from bertjax.config import FREE_ON_RESUME, Config, flatten, phases, total_steps
from bertjax.formats.files import write_json, write_whole
from bertjax.interop import huggingface, load_model
from bertjax.interop.card import model_card
from bertjax.log.logbook import Logbook, read_records
from bertjax.log.report.runs import STARTS_FILE
from bertjax.model.model_types import OWN
from bertjax.model.size import parameter_count, parameters_text
from bertjax.run.run import model_text
from bertjax.training import sharding
from bertjax.training.loop import NotFiniteError

if TYPE_CHECKING:
    from bertjax.pretraining.job import PretrainingJob

# Settings that the card's table leaves out: told elsewhere in it, or about the run's place and not the model.
UNTOLD = (
    *FREE_ON_RESUME,
    *(
        "data.corpus data.heldout data.tokenizer batch_size phases budget_minutes model.num_hidden_layers "
        "model.hidden_size model.num_attention_heads model.vocab_size".split()
    ),
)


def finish(job: PretrainingJob, params: Any, step: int, metrics: dict[str, float], logbook: Logbook) -> None:
    """Prints the result, and writes model, card and examples; every process calls it.

    Args:
      step: how many the run has taken.
      metrics: of the last evaluation on held-out text.

    Raises NotFiniteError in place of writing a model whose loss is not a number.
    """
    if not math.isfinite(metrics["mlm_loss"]):
        raise NotFiniteError(
            f"the held-out loss after step {step:,} is {metrics['mlm_loss']}: the last updates were too "
            "large. No model is written. Start again in another --workdir with a lower config.optimizer.learning_rate "
            "or a longer warm-up"
        )
    told, numbers = results(job, metrics)
    logbook.message("\n".join(told))
    params = sharding.fetch(params, job.mesh)
    if jax.process_index() != 0:
        return
    model = logbook.directory / "model"
    settings = {"untrained_heads": job.untrained} if job.untrained else None
    huggingface.write_directory(
        model, job.model_config, params, job.architecture, job.tokenizer, settings=settings, overwrite=True
    )
    examples = fill_masks(job, model, logbook)
    result = {
        "about": [f"model: {model_text(job.model_config, job.heads)}", f"corpus: {job.corpus.describe()}"],
        "results": told,
        "numbers": {name: value for name, value in numbers.items() if math.isfinite(value)},
    }
    write_json(logbook.directory / "result.json", result)
    write_whole(model / "README.md", card(job, step, told, examples))
    readers = "transformers and bertjax.load_model"
    if huggingface.class_name(job.model_config, job.architecture)[1] == OWN:
        readers = "bertjax.load_model; transformers has no class for it"
    logbook.message(f"model written to {job.workdir / 'model'} (loads in {readers})")


def results(job: PretrainingJob, metrics: dict[str, float]) -> tuple[list[str], dict[str, float]]:
    """A line for each objective on held-out text, beside the best guess without a model; and the numbers that
    report/verdicts.py judges.
    """
    heldout = job.evaluations[-1].batches
    entropy = heldout_entropy(job)
    objective = "next-token" if job.model_config.is_decoder else "MLM"
    told = [
        f"held-out {objective} loss {metrics['mlm_loss']:.3f}, accuracy {metrics['mlm_accuracy']:.1%} (unigram entropy "
        f"of the held-out tokens: {entropy:.3f})"
    ]
    numbers = {"mlm_loss": metrics["mlm_loss"], "unigram_entropy": entropy}
    if "nsp_accuracy" in metrics:
        accuracy = metrics["nsp_accuracy"]
        error = math.sqrt(accuracy * (1 - accuracy) / heldout.num_pairs)
        # The larger class is not exactly half: single-sentence chunks are always 'random'.
        share = random_share(heldout)
        chance = max(share, 1 - share)
        numbers |= {"nsp_accuracy": accuracy, "nsp_error": error, "nsp_chance": chance}
        distance = f"{(accuracy - chance) / error:+.1f} standard errors from" if error else "beside"
        told.append(
            f"held-out NSP accuracy {accuracy:.1%} +- {error:.1%} over {heldout.num_pairs:,} "
            f"pairs: {distance} the best constant guess ({chance:.1%})"
        )
    told += [
        f"held-out {objective} loss of {name} {metrics[f'eval/{name}/mlm_loss']:.3f}, "
        f"accuracy {metrics[f'eval/{name}/mlm_accuracy']:.1%}"
        for name in job.evaluations[-1].others
    ]
    return told, numbers


def heldout_entropy(job: PretrainingJob) -> float:
    """token_entropy of the held-out text, at the length of the last evaluation."""
    return token_entropy(job.corpus.token_counts(job.config.eval.seq_length or job.config.phases[-1][1]))


def token_entropy(counts: np.ndarray) -> float:
    """Entropy in nats of tokens counted [V]: the MLM loss of the best context-free guess."""
    share = counts[counts > 0] / counts.sum()
    return float(-np.sum(share * np.log(share)))


def random_share(batches: Iterable[dict[str, np.ndarray]]) -> float:
    """Share of the pairs whose second half is from elsewhere (label 1), in this process's rows."""
    random = pairs = 0.0
    for batch in batches:
        random += float((batch["nsp_labels"] * batch["nsp_weights"]).sum())
        pairs += float(batch["nsp_weights"].sum())
    return random / max(pairs, 1.0)


def fill_masks(job: PretrainingJob, model: pathlib.Path, logbook: Logbook) -> list[dict[str, Any]]:
    """Prints the best fillings of config.log.fill_mask, and keeps them for the report."""
    if not job.config.log.fill_mask:
        return []
    from bertjax.inference import fill_mask  # late: most runs ask for no filling

    loaded = load_model(model)
    examples = []
    for text in job.config.log.fill_mask:
        try:
            first = fill_mask(loaded, text, top_k=5)[0]
        except ValueError as error:  # a sentence too long, or without [MASK]: the run is done
            logbook.message(f"  config.log.fill_mask: {error}")
            continue
        predictions = [(filling.token, filling.probability) for filling in first]
        examples.append({"text": text, "predictions": predictions})
        logbook.message(f"  {text}\n    {_words(predictions)}")
    write_json(logbook.directory / "examples.json", examples)
    return examples


def _words(predictions: list[tuple[str, float]]) -> str:
    return ", ".join(f"{token} {probability:.0%}" for token, probability in predictions)


def card(job: PretrainingJob, step: int, told: list[str], examples: list[dict[str, Any]]) -> str:
    """README.md of the model: how to load it, data, training, results; no path of this machine."""
    config, model = job.config, job.model_config
    start = f"the weights of `{epath.Path(config.init_from).name}`" if config.init_from else "random weights"
    objective = "the next token of a text" if model.is_decoder else "masked words"
    objectives = f"{objective} and next sentences" if config.data.nsp else objective
    size = parameters_text(parameter_count(model, job.heads))
    summary = (
        f"An encoder with {model.num_hidden_layers} layer{'s' * (model.num_hidden_layers > 1)} of width "
        f"{model.hidden_size}, {model.num_attention_heads} heads and {size}, "
        f"pre-trained from {start} to predict {objectives}."
    )
    if job.untrained:
        summary += " Its pooler and next-sentence head are untrained."
    data = f"{job.corpus.describe()}. The vocabulary has {job.tokenizer.vocab_size:,} entries" + (
        " of lower-case text." if job.tokenizer.do_lower_case else "."
    )
    device = job.mesh.devices.flat[0].device_kind
    default = flatten(Config())
    recipe = {
        "steps": f"{step:,} of {_rows(config)} rows",
        "tokens a row": _lengths(config),
        **({"wall clock": f"{config.budget_minutes:g} minutes"} if config.budget_minutes else {}),
        "hardware": f"{job.mesh.devices.size} x {device}, {job.execution.dtype}",
        **{
            f"`{name}`": value
            for name, value in flatten(config).items()
            if value != default.get(name) and not name.startswith(UNTOLD)
        },
        **_changes(job.workdir / STARTS_FILE),
    }
    sections = {"Results": "\n".join(f"* {line}" for line in told)}
    if examples:
        sections["What it fills in"] = "\n".join(
            f"* {example['text']}\n  {_words(example['predictions'])}" for example in examples
        )
    title = f"{'BERT' if model.type == 'bert' else 'Encoder'} pre-trained in {job.workdir.name}"
    architecture, model_type = huggingface.class_name(model, job.architecture)
    mask = job.tokenizer.id_to_token(job.tokenizer.mask_id)
    return model_card(
        title,
        architecture,
        summary,
        data,
        recipe,
        sections,
        fill_mask=not model.is_decoder,
        mask_token=mask,
        model_type=model_type,
        sentence=examples[0]["text"].replace("[MASK]", mask) if examples else "",
    )


def _changes(path: epath.Path) -> dict[str, str]:
    """{'changed at step 800': 'optimizer.name: 'adamw' -> 'lamb''} of a run that went on with other settings."""
    found, place = {}, tuple(f"config.{name}" for name in (*FREE_ON_RESUME, "data."))
    for start in read_records(path) if path.exists() else ():
        why = [line for line in start.get("why", ()) if line.startswith("config.") and not line.startswith(place)]
        if why:
            found[f"changed at step {start['step']:,}"] = "; ".join(why).replace("config.", "")
    return found


def _lengths(config: Config) -> str:
    """'128 for 67% of the time, then 512 for 33%', or the same in steps."""
    total = total_steps(config)
    of = "of the time" if config.budget_minutes else "of the steps"
    if len(config.phases) == 1:
        return str(config.phases[0][1])
    steps = dict.fromkeys((phase.length for phase in phases(config)), 0)
    for phase in phases(config):
        steps[phase.length] += phase.steps
    return ", then ".join(f"{length} for {count / total:.0%} {of}" for length, count in steps.items())


def _rows(config: Config) -> str:
    """'256', or '64, then 128, then 256'."""
    rows = [phase.rows for phase in phases(config)]
    return ", then ".join(f"{own:,}" for number, own in enumerate(rows) if number == 0 or own != rows[number - 1])
