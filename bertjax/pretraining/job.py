"""Pre-training: the masked language model and next-sentence prediction over a corpus.

objective.py holds the loss, finish.py writes what the run leaves.
"""

import contextlib
import dataclasses
import logging
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from bertjax.config import Config, OptimizerSettings, PhaseSettings, phases, total_steps
from bertjax.data.batches import prefetch
from bertjax.data.masking import MaskingSpec
from bertjax.formats.checkpoint import resolve_directory
from bertjax.interop import check_pretrained, check_vocabulary, huggingface, load_pretrained_params, open_source
from bertjax.log.logbook import Logbook, counted
from bertjax.model.heads import pretraining_network, untrained_heads
from bertjax.model.presets import BertConfig, Execution
from bertjax.model.size import PRETRAINING_HEADS, flops_per_row, parameter_count
from bertjax.pretraining import finish
from bertjax.pretraining.corpora import open_corpus
from bertjax.pretraining.objective import PretrainingObjective, make_objective
from bertjax.process import hardware
from bertjax.process.agreement import require_same
from bertjax.process.clock import Clock
from bertjax.run.checkpoint import Checkpoints
from bertjax.run.run import Line, check_export, clock_of, run
from bertjax.run.workdir import RECORD, goes_on_with, step_to_resume, with_its_origin, write_records
from bertjax.tokenization import load_tokenizer
from bertjax.training import sharding
from bertjax.training.optimizer import learning_rate_schedule, make_optimizer
from bertjax.training.trainer import Batch, Phase, Trainer, TrainState

__all__ = ["PretrainingJob", "prepare", "run"]

log = logging.getLogger(__name__)

NO_CORPUS = (
    "config.data.corpus is empty: this run needs a corpus, a token store. Make one of your own text (plain, JSONL, "
    "Parquet, WikiExtractor output, TFDS) with bertjax train_vocab --input='corpus/*.txt' --output=vocab, then bertjax "
    "build_corpus --input='corpus/*.txt' --tokenizer=vocab --output=store, and give --config.data.corpus=store; from "
    "Python, give bertjax.train(texts=[...]); or try the embedded demo corpus: --config=configs/demo.py"
)
NO_SEGMENTS = (
    "next-sentence pairs without segment embeddings (model.type_vocab_size=0): after such a run tasks that compare two "
    "texts score several points lower (docs/experiments.md). Set model.type_vocab_size=2 or data.nsp=False"
)
LONG_EVALUATION = (
    "held-out rows are longer than those of training: an evaluation takes long, and judges lengths that are not "
    "learnt. Set eval.seq_length=0 to evaluate at the lengths of the phases"
)
NOTHING_LEARNT = (
    "after %s steps the held-out loss, %.2f, is still that of guessing by word frequencies, %.2f. A network that has "
    "not left it by now may never do so: start again with a lower optimizer.learning_rate or a longer "
    "optimizer.warmup_steps"
)
LATE = 1_000, 3  # steps, and warm-ups, after which NOTHING_LEARNT is said


class Evaluation(NamedTuple):
    """Held-out rows, and the objective that masks and scores them."""

    objective: PretrainingObjective
    batches: Any  # finite: iteration, num_pairs
    others: dict[str, Any]  # the same of the further corpora of a mixture, by name

    def __call__(self, trainer: Trainer, params: Any) -> dict[str, float]:
        """Metrics of the first corpus by their names, of the others as eval/CORPUS/NAME."""
        found = {}
        for name, batches in {"": self.batches, **self.others}.items():
            metrics = trainer.evaluate(self.objective, params, batches)
            prefix = f"eval/{name}/" if name else ""
            # Without NSP where the batches have no labels for it.
            found |= {prefix + key: x for key, x in metrics.items() if batches.nsp or not key.startswith("nsp_")}
        return found


class PretrainingJob:
    """A pre-training run whose settings have been checked against each other and the data; see run.Job.

    Checks everything that can be checked without compiling, and may build the embedded demo corpus. Raises ValueError
    naming the setting and the remedy.

    Attributes:
      architecture: the class of heads.py that is trained; `heads` are those of its parts that are counted.
      batches: of each phase: [step], epochs(steps).
      evaluations: of each phase.
      remarks: warnings about this machine.
    """

    mode = "min"

    def __init__(self, config: Config, workdir: str):
        if not config.data.corpus:
            raise ValueError(NO_CORPUS)
        check_export(config)
        self.config, self.workdir = config, resolve_directory(workdir)
        # The vocabulary is not read yet; for the choice of a mesh the usual size will do.
        estimate = BertConfig.of(config.model, config.model.vocab_size or 30_522)
        self.mesh, self.mesh_reason = sharding.mesh_of(
            config.mesh, parameter_count(estimate), jax.devices(), hardware.device_bytes()
        )
        check_rows(config, self.mesh)
        platform = self.mesh.devices.flat[0].platform
        self.execution = Execution.of(config.execution, platform, config.mesh.tensor > 1, estimate)
        self.resumed_from = step_to_resume(config, self.workdir)
        if config.init_from and self.resumed_from is None:
            open_source(config.init_from)  # before a corpus is made, copied or read

        self.corpus = open_corpus(config, self.workdir, sharding.batch_slice(self.mesh))
        self.tokenizer = self.corpus.tokenizer
        self._check_vocabulary_there()
        longest = max(phase.length for phase in phases(config))
        if (self.tokenizer.model_max_length or longest) < longest:  # of the model that the tokenizer comes from
            self.tokenizer.model_max_length = None
        mask = self.tokenizer.id_to_token(self.tokenizer.mask_id)
        for text in config.log.fill_mask:
            if "[MASK]" not in str(text) and mask not in str(text):
                raise ValueError(f"config.log.fill_mask: there is no [MASK] in {text!r:.200}")
        self.made_of = {"content": self.corpus.fingerprint, "vocabulary": self.tokenizer.fingerprint}
        require_same({f"{name} of --config.data.corpus": value for name, value in self.made_of.items()})
        if self.resumed_from is not None and not self._goes_on():
            self.resumed_from = None
        if self.resumed_from is not None:
            self.config = config = with_its_origin(config, self.workdir)
        starts_from = config.init_from if self.resumed_from is None else ""
        if starts_from:
            check_vocabulary(starts_from, self.tokenizer)
        self.model_config = BertConfig.of(config.model, self.tokenizer.vocab_size, self.tokenizer.pad_id)
        network = pretraining_network(self.model_config, config.data.nsp)
        self.architecture = network.__name__
        self.heads = ("mlm",) if self.architecture == "BertForMaskedLM" else PRETRAINING_HEADS
        # A run without next sentences does not train their head, so it needs none.
        self.untrained = untrained_heads(self.model_config, config.data.nsp)
        self.fresh_heads = config.reinitialise_head or self.untrained
        if starts_from:
            check_pretrained(starts_from, network(self.model_config), self.fresh_heads, config.extend_positions)
        self.trainer = make_trainer(config, self.mesh)

        self.remarks: list[str] = []
        self.phases: list[Phase] = []
        self.batches: list[Any] = []
        self.evaluations: list[Evaluation] = []
        for phase in phases(config):
            self._add_phase(phase)
        self._evaluated: dict[int, dict[str, float]] = {}  # by step
        self._judged = False  # whether a late evaluation has been compared with guessing

    def _add_phase(self, phase: PhaseSettings) -> None:
        config, corpus, tokenizer, length = self.config, self.corpus, self.tokenizer, phase.length
        if phase.first_row:
            batches = self.batches[-1].going_on(phase.rows, phase.first_row)
        else:
            batches = corpus.training(length, phase.rows)
        objective = make_objective(config, self.model_config, self.execution, tokenizer, length, batches.pairs_per_row)
        predictions = length - 1 if self.model_config.is_decoder else objective.masking.slots
        if corpus.masked:
            objective = dataclasses.replace(objective, masking=None)
            predictions = batches.empty()["mlm_positions"].shape[1]
        shape = phase.rows, length, predictions
        remat = self.execution.remat
        self.remarks += sharding.check_memory(self.model_config, shape, self.mesh, config.accumulation, remat)

        def stream(first_step: int) -> Iterator[Batch]:
            return prefetch(batches, first_step, buffer=config.data.prefetch, workers=config.data.workers)

        self.batches.append(batches)
        self.phases.append(
            Phase(
                until_step=phase.steps + (self.phases[-1].until_step if self.phases else 0),
                objective=objective,
                batches=stream,
                tokens_per_step=phase.rows * length,
                flops_per_step=phase.rows * flops_per_row(self.model_config, length, predictions, config.data.nsp),
            )
        )
        # One compilation serves all phases of one length, or with eval.seq_length all.
        if self.evaluations and (config.eval.seq_length or phase.first_row):
            self.evaluations.append(self.evaluations[-1])
            return
        rows = config.batch_size if config.eval.seq_length else min(config.batch_size, phase.rows)
        length = config.eval.seq_length or length
        if not corpus.masked:  # padded rows, always
            masking = MaskingSpec.of(config, tokenizer, length, 1, config.eval.masking_rate or None)
            objective = dataclasses.replace(objective, masking=masking)
        self.evaluations.append(Evaluation(objective, corpus.heldout(length, rows), corpus.others(length, rows)))

    def _check_vocabulary_there(self) -> None:
        """Raises ValueError where the run would write over a vocabulary of the user's.

        Not with config.resume=overwrite: a start that was killed after it deleted a run left that run's vocabulary.
        """
        there, overwrites = None, self.config.resume == "overwrite"
        if not overwrites and self.workdir.is_dir() and not (self.workdir / RECORD).exists():
            with contextlib.suppress(OSError, ValueError):  # no vocabulary, or none that can be read
                there = load_tokenizer(str(self.workdir)).fingerprint
        if there not in (None, self.tokenizer.fingerprint):
            raise ValueError(
                f"{self.workdir} holds another vocabulary, which this run would write over; choose another --workdir"
            )

    def _goes_on(self) -> bool:
        """See workdir.goes_on_with. Other words under the same ids are refused always."""
        refusal = (
            f"config.data.corpus={self.config.data.corpus} has another vocabulary or casing now than the run in "
            f"{self.workdir} was trained with, so the same ids would mean other words. Choose another --workdir, or "
            f"build the corpus again with build_corpus --tokenizer={self.workdir}"
        )

        def known() -> dict[str, str]:
            return {"vocabulary": load_tokenizer(str(self.workdir)).fingerprint}

        return goes_on_with(self.config, self.workdir, self.made_of, {"vocabulary": refusal}, known)

    def compile_ahead(self) -> None:
        clock = clock_of(self.config, total_steps(self.config))
        for phase, batches, evaluation in zip(self.phases, self.batches, self.evaluations, strict=True):
            if (self.resumed_from or 0) < phase.until_step:
                self.trainer.compile_ahead("train", phase.objective, clock.mark(batches.empty(), 0))
                self.trainer.compile_ahead("evaluate", evaluation.objective, evaluation.batches.empty())
        self.trainer.programs.lowered_first()

    def start(self, checkpoints: Checkpoints) -> TrainState:
        config, objective = self.config, self.phases[0].objective
        if self.resumed_from is not None:
            return checkpoints.restore(self.trainer.abstract_state(objective))[0]
        if not config.init_from:
            return self.trainer.init(objective)
        # New heads where it has none.
        key = jax.random.key(config.seed)
        params = load_pretrained_params(
            config.init_from, objective.model, key, self.fresh_heads, config.extend_positions
        )
        return self.trainer.init(objective, params)

    def record(self, directory: pathlib.Path) -> None:
        write_records(directory, self.config, self.made_of, numbers=self.corpus.numbers, remarks=self.corpus.remarks)
        self.tokenizer.save(directory)

    def evaluate(self, state: TrainState, place: int) -> dict[str, float]:
        last = len(self.phases) - 1
        now = next((i for i, phase in enumerate(self.phases) if place <= phase.until_step), last)
        self._evaluated[int(state.step)] = found = self.evaluations[now](self.trainer, state.params)
        self._warn_of_nothing_learnt(int(state.step), place, found["mlm_loss"])
        return found

    def _warn_of_nothing_learnt(self, step: int, place: int, loss: float) -> None:
        """Says once that a run is still where networks are that died in their warm-up."""
        steps, warmups = LATE
        if self._judged or step < steps or place < warmups * self.config.optimizer.warmup_steps:
            return
        self._judged = True
        entropy = finish.heldout_entropy(self)
        if loss > entropy - 0.02 and jax.process_index() == 0:
            log.warning(NOTHING_LEARNT, f"{step:,}", loss, entropy)

    def finish(self, state: TrainState, logbook: Logbook, clock: Clock) -> None:
        step = int(state.step)
        metrics = self._evaluated.get(step) or self.evaluate(state, clock.position(step))
        finish.finish(self, state.params, step, metrics, logbook)

    def facts(self) -> list[Line]:
        config, corpus = self.config, self.corpus
        heldout = f"{self.evaluations[0].batches.num_pairs:,} held-out {'pairs' if config.data.nsp else 'texts'}"
        if length := config.eval.seq_length:
            heldout += f" in rows of {length:,}"
        lines = [("corpus", f"{corpus.describe()} + {heldout}")]
        if export := huggingface.export_text(self.model_config, self.architecture):
            lines = [("export", export), *lines]
        lines += [("text", fact) for fact in corpus.facts()]
        lines += [("warning", remark) for remark in (*corpus.remarks, *self.remarks)]
        if length > max(phase_length for _, phase_length, *_ in config.phases):
            lines.append(("warning", LONG_EVALUATION))
        if config.data.nsp and not self.model_config.type_vocab_size:
            lines.append(("warning", NO_SEGMENTS))
        for number, (phase, (steps, length, rows, _)) in enumerate(zip(self.phases, phases(config), strict=True), 1):
            text = (
                f"steps {phase.until_step - steps + 1:,} to {phase.until_step:,}: {rows} x {length} = "
                f"{phase.tokens_per_step:,} tokens a step, {phase.flops_per_step / 1e12:,.3g} TFLOP"
            )
            lines.append((f"phase {number}", text))
        steps = total_steps(config)
        if config.budget_minutes:
            text = f"{config.budget_minutes:g} minutes, start-up included; at most {steps:,} steps"
        else:
            epochs = sum(one.epochs(steps) for one, (steps, *_) in zip(self.batches, config.phases, strict=True))
            text = f"{steps:,} steps, {epochs:{',.1f' if epochs >= 1 else '.2g'}} epochs of the corpus"
        return [*lines, ("length", text), ("optimizer", optimizer_text(config.optimizer))]


prepare = PretrainingJob


def check_rows(config: Config, mesh: Mesh) -> None:
    """Raises ValueError where the rows of a phase or of an evaluation do not divide over the devices."""
    sharding.check_batch(config.batch_size, mesh, config.accumulation)
    for phase in phases(config):
        sharding.check_batch(phase.rows, mesh, config.accumulation, f"config.phases={config.phases!r}: rows")


def make_trainer(config: Config, mesh: Mesh) -> Trainer:
    """The trainer with the optimizer and schedule of the settings."""
    o = config.optimizer
    schedule = learning_rate_schedule(o.schedule, o.learning_rate, o.warmup_steps, total_steps(config), o.decay_share)
    return Trainer(
        make_optimizer(o, schedule), mesh, config.seed, accumulation=config.accumulation, prng=config.execution.prng
    )


def optimizer_text(settings: OptimizerSettings) -> str:
    """The optimizer in words, with a note where it differs from its paper."""
    options = ", ".join(f"{name}={value!r}" for name, value in settings.options.items())
    name = f"{settings.name}({options})" if options else settings.name
    warmup = counted(settings.warmup_steps, "step")
    text = f"{name}, learning rate {settings.learning_rate:g}, {warmup} of warm-up, {settings.schedule}"
    if settings.name == "lamb" and not settings.bias_correction:  # You et al. 2019, algorithm 2
        text += ", without the bias correction of LAMB's paper (--config.optimizer.bias_correction=true)"
    return text
