"""Pre-training: the masked language model and next-sentence prediction over a corpus.

`prepare` turns a configuration into a checked `Job` without compiling anything; `run` trains and
evaluates it, and finish.py leaves the model and a report in the work directory. What is learnt
stands in objective.py, which runs may go on in a work directory in workdir.py.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
from etils import epath
from jax.sharding import Mesh

from bertjax.config import Config, OptimizerSettings, order_of_sums, total_steps
from bertjax.data.batches import prefetch
from bertjax.formats.checkpoint import resolve_directory
from bertjax.formats.files import write_whole
from bertjax.interop import check_pretrained, check_vocabulary, load_pretrained_params
from bertjax.log.logbook import Logbook
from bertjax.log.summary import devices_lines, model_line, screen
from bertjax.model.heads import BertForPreTraining
from bertjax.model.presets import BertConfig, Execution, flops_per_row, parameter_count
from bertjax.process import hardware
from bertjax.process.agreement import require_same
from bertjax.process.distributed import wait_for_all
from bertjax.run.checkpoint import Checkpoints
from bertjax.run.corpora import Corpus, open_corpus
from bertjax.run.finish import finish, writing_results
from bertjax.run.starts import Starts
from bertjax.run.workdir import CORPUS_FILE, SETTINGS_FILE, corpus_record, delete_run, goes_on_with, step_to_resume
from bertjax.training import sharding
from bertjax.training.budget import Budget, Steps
from bertjax.training.objective import PretrainingObjective, make_objective, masking_spec
from bertjax.training.optimizer import learning_rate_schedule, make_optimizer
from bertjax.training.trainer import Batch, Phase, Trainer, TrainState

NO_CORPUS = (
    "config.data.corpus is empty: this run needs a corpus, a token store. Make one of your own "
    "text (plain, JSONL, Parquet, WikiExtractor output, TFDS) with bertjax train_vocab "
    "--input='corpus/*.txt' --output=vocab, then bertjax build_corpus --input='corpus/*.txt' "
    "--tokenizer=vocab --output=store, and give --config.data.corpus=store; or try the embedded "
    "demo corpus: --config=configs/demo.py"
)


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluation:
    """Held-out rows, and the objective that masks and scores them."""

    objective: PretrainingObjective
    batches: Any  # finite: iteration, num_pairs
    others: dict[str, Any]  # the same of the further corpora of a mixture, by name

    def __call__(self, trainer: Trainer, params: Any) -> dict[str, float]:
        """Metrics of the first corpus by their names, of the others as eval/CORPUS/NAME."""
        found = self._measured(trainer, params, self.batches)
        for name, batches in self.others.items():
            metrics = self._measured(trainer, params, batches)
            found |= {f"eval/{name}/{metric}": value for metric, value in metrics.items()}
        return found

    def _measured(self, trainer: Trainer, params: Any, batches: Any) -> dict[str, float]:
        """Without NSP where the batches have no labels for it."""
        metrics = trainer.evaluate(self.objective, params, batches)
        return (
            metrics if batches.nsp else {name: value for name, value in metrics.items() if not name.startswith("nsp_")}
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """A pre-training run whose settings have been checked against each other and the data."""

    config: Config
    workdir: epath.Path
    mesh: Mesh
    tokenizer: Any
    model_config: BertConfig
    execution: Execution
    corpus: Corpus
    phases: list[Phase]
    batches: list[Any]  # of the phases: [step]
    evaluations: list[Evaluation]  # of the phases
    epochs: float
    resumed_from: int | None  # step of the newest checkpoint
    mesh_reason: str = ""  # why config.mesh.auto chose this mesh


# --------------------------------------------------------------------------------------- prepare


def prepare(config: Config, workdir: str) -> Job:
    """Checks everything that can be checked without compiling.

    Raises ValueError naming the setting and the remedy. May build the embedded demo corpus.
    """
    if not config.data.corpus:
        raise ValueError(NO_CORPUS)
    directory = resolve_directory(workdir)
    # The vocabulary is not read yet; for the choice of a mesh the usual size will do.
    estimate = BertConfig.of(config.model, config.model.vocab_size or 30_522)
    mesh, mesh_reason = sharding.mesh_of(config.mesh, parameter_count(estimate), jax.devices(), hardware.device_bytes())
    sharding.check_batch(config.batch_size, mesh, config.accumulation)
    resumed_from = step_to_resume(config, directory)

    corpus = open_corpus(config, directory, sharding.batch_slice(mesh))
    require_same(
        {"the content of --config.data.corpus": corpus.fingerprint, "its vocabulary": corpus.tokenizer.fingerprint}
    )
    if resumed_from is not None and not goes_on_with(config, directory, corpus):
        resumed_from = None
    tokenizer = corpus.tokenizer
    starts_from = config.init_from if resumed_from is None else ""
    if starts_from:
        check_vocabulary(starts_from, tokenizer)
    model_config = BertConfig.of(config.model, tokenizer.vocab_size)
    execution = Execution.of(config.execution, mesh.devices.flat[0].platform, config.mesh.tensor > 1)
    if starts_from:
        check_pretrained(starts_from, BertForPreTraining(model_config), config.reinitialise_head)

    phases, batches, evaluations = _phases(config, corpus, model_config, execution)
    epochs = sum(one.epochs(steps) for one, (steps, _) in zip(batches, config.phases, strict=True))
    return Job(
        config,
        directory,
        mesh,
        tokenizer,
        model_config,
        execution,
        corpus,
        phases,
        batches,
        evaluations,
        epochs,
        resumed_from,
        mesh_reason,
    )


def _phases(
    config: Config, corpus: Corpus, model_config: BertConfig, execution: Execution
) -> tuple[list[Phase], list[Any], list[Evaluation]]:
    """The phases of the run; of each its batches by step, and its evaluation."""
    phases, streams, evaluations, until = [], [], [], 0
    for steps, length in config.phases:
        batches = corpus.training(length)
        objective = make_objective(config, model_config, execution, corpus.tokenizer, length, batches.pairs_per_row)
        predictions = length - 1 if model_config.is_decoder else objective.masking.slots
        if corpus.masked:
            objective = dataclasses.replace(objective, masking=None)
            predictions = batches.max_predictions
        # With a budget the trainer counts steps from where the phase began.
        stream = _stream(config, batches, phase_start=0 if config.budget_minutes else until)
        until += steps
        streams.append(batches)
        phases.append(
            Phase(
                until_step=until,
                objective=objective,
                batches=stream,
                tokens_per_step=config.batch_size * length,
                flops_per_step=config.batch_size * flops_per_row(model_config, length, predictions, config.data.nsp),
            )
        )
        same = evaluations and config.eval.seq_length  # then one compilation serves all phases
        evaluations.append(evaluations[0] if same else _evaluation(config, corpus, objective, length))
    return phases, streams, evaluations


def make_trainer(config: Config, mesh: Mesh) -> Trainer:
    """The trainer with the optimizer and schedule of the settings."""
    o = config.optimizer
    schedule = learning_rate_schedule(o.schedule, o.learning_rate, o.warmup_steps, total_steps(config))
    return Trainer(
        make_optimizer(o, schedule),
        mesh,
        config.seed,
        accumulation=config.accumulation,
        prng=config.execution.prng,
        max_skipped_in_row=o.max_skipped_in_row,
        watchdog_s=config.watchdog_seconds,
    )


def _evaluation(config: Config, corpus: Corpus, objective: PretrainingObjective, length: int) -> Evaluation:
    """The evaluation of a phase that trains on rows of `length` tokens: padded rows, always."""
    length = config.eval.seq_length or length
    if not corpus.masked:
        masking = masking_spec(config, corpus.tokenizer, length, 1, config.eval.masking_rate or None)
        objective = dataclasses.replace(objective, masking=masking)
    return Evaluation(objective, corpus.heldout(length), corpus.others(length))


def _stream(config: Config, batches: Any, phase_start: int) -> Callable[[int], Iterator[Batch]]:
    def stream(first_step: int) -> Iterator[Batch]:
        return prefetch(batches, first_step - phase_start, buffer=config.data.prefetch, workers=config.data.workers)

    return stream


# ------------------------------------------------------------------------------------------- run


def run(job: Job) -> None:
    """Trains, evaluates, exports. See trainer.py for what may be raised."""
    config, workdir = job.config, job.workdir
    if config.resume == "overwrite" and job.resumed_from is None:
        delete_run(workdir)
    trainer = make_trainer(config, job.mesh)
    checkpoints = Checkpoints(
        str(workdir / "checkpoints"),
        config.checkpoint.keep_last,
        config.checkpoint.keep_best,
        config.checkpoint.metric,
        keep_every=config.checkpoint.keep_every,
    )
    first = job.phases[0].objective
    starts = Starts(workdir, order_of_sums(config))
    starts.keep(trainer.programs, job.mesh)
    _compile_ahead(job, trainer)
    if job.resumed_from is not None:
        state, step = checkpoints.restore(trainer.abstract_state(first))
    else:
        state, step = trainer.init(first, _initial_params(job)), 0

    with Logbook(
        str(workdir),
        step,
        tensorboard=config.log.tensorboard,
        csv=config.log.csv,
        wandb=config.log.wandb,
        settings=dataclasses.asdict(config),
    ) as logbook:
        _train(job, trainer, checkpoints, state, logbook, starts)
    checkpoints.close()
    wait_for_all("writing model and report")


def _train(
    job: Job, trainer: Trainer, checkpoints: Checkpoints, state: TrainState, logbook: Logbook, starts: Starts
) -> None:
    """From a state, fresh or restored, to the end of the run."""
    config, workdir, step = job.config, job.workdir, int(state.step)
    clock = _clock(config, checkpoints.metrics(step) if step else None)
    if jax.process_index() == 0:
        write_whole(logbook.directory / SETTINGS_FILE, config.to_json())
        write_whole(logbook.directory / CORPUS_FILE, corpus_record(job.corpus))
        job.tokenizer.save(logbook.directory)
        logbook.flush()
    logbook.message(summary(job, step))
    starts.begin(step, logbook)

    evaluated: dict[int, dict[str, float]] = {}  # by step

    def evaluate(state: TrainState) -> dict[str, float]:
        step = int(state.step)
        place = clock.position(step)
        now = next((i for i, phase in enumerate(job.phases) if place <= phase.until_step), len(job.phases) - 1)
        evaluated[step] = job.evaluations[now](trainer, state.params)
        return evaluated[step]

    if clock.position(step) >= job.phases[-1].until_step:
        logbook.message(f"The run is already finished at step {step:,}; nothing to train.")
    else:
        state = trainer.fit(
            state,
            job.phases,
            logbook=logbook,
            checkpoints=checkpoints,
            evaluate=evaluate,
            log_every=config.log.every_steps,
            eval_every=config.eval.every_steps,
            checkpoint_every=config.checkpoint.every_steps,
            profile_steps=config.profile_steps,
            profile_directory=str(workdir / "profile"),
            budget=clock,
        )
    metrics = evaluated.get(int(state.step)) or evaluate(state)
    with writing_results(workdir):
        finish(job, state.params, int(state.step), metrics, logbook)


def _clock(config: Config, record: dict[str, float] | None = None) -> Budget | Steps:
    """What the schedule follows: the steps, or the time; `record` is that of the checkpoint."""
    steps = total_steps(config)
    if not config.budget_minutes:
        clock = Steps(steps)
        clock.go_on(record or {})
        return clock
    return Budget(config.budget_minutes, steps, record, jax.process_count())


def _compile_ahead(job: Job, trainer: Trainer) -> None:
    """All programs of what is left of the run, side by side with the initial state."""
    clock = _clock(job.config)
    for phase, batches, evaluation in zip(job.phases, job.batches, job.evaluations, strict=True):
        if (job.resumed_from or 0) < phase.until_step:
            batch = clock.mark(batches[0], 0)
            trainer.compile_ahead("train", phase.objective, batch)
            trainer.compile_ahead("evaluate", evaluation.objective, next(iter(evaluation.batches)))


def _initial_params(job: Job) -> dict[str, Any] | None:
    """Weights of config.init_from with new heads where it has none; None = from scratch."""
    if not job.config.init_from:
        return None
    return load_pretrained_params(
        job.config.init_from,
        job.phases[0].objective.model,
        jax.random.key(job.config.seed),
        job.config.reinitialise_head,
    )


def optimizer_text(o: OptimizerSettings) -> str:
    """What changes the parameters, with a word on what is not as its paper has it."""
    text = f"{o.name}, learning rate {o.learning_rate:g}, {o.warmup_steps:,} steps of warm-up, {o.schedule}"
    if o.name == "lamb" and not o.bias_correction:  # You et al. 2019, algorithm 2
        text += ", without the bias correction of LAMB's paper (--config.optimizer.bias_correction=true)"
    return text


def summary(job: Job, step: int) -> str:
    """The start-up screen: what will run, on what, over how much data."""
    config, phases = job.config, job.phases
    lines = [
        model_line(job.model_config),
        *devices_lines(job.mesh, job.execution.dtype, job.mesh_reason),
        ("corpus", f"{job.corpus.describe()} + {job.evaluations[0].batches.num_pairs:,} held-out pairs"),
    ]
    lines += [("text", fact) for fact in job.corpus.facts()]
    lines += [("warning", remark) for remark in job.corpus.remarks]
    begin = 0
    for number, (phase, (steps, length)) in enumerate(zip(phases, config.phases, strict=True), 1):
        lines.append(
            (
                f"phase {number}",
                (
                    f"steps {begin + 1:,} to {phase.until_step:,}: {config.batch_size} x {length} = "
                    f"{phase.tokens_per_step:,} tokens a step, {phase.flops_per_step / 1e12:,.3g} TFLOP"
                ),
            )
        )
        begin += steps
    if config.budget_minutes:
        lines.append(
            ("length", f"{config.budget_minutes:g} minutes, start-up included; at most {total_steps(config):,} steps")
        )
    else:
        lines.append(("length", f"{total_steps(config):,} steps, {job.epochs:,.1f} epochs of the corpus"))
    lines.append(("optimizer", optimizer_text(config.optimizer)))
    if job.resumed_from is not None:
        origin = f"resumed from the checkpoint of step {step:,}"
        if config.init_from:
            origin += f" (init_from={config.init_from} counts at step 0 only: the checkpoint wins)"
    else:
        origin = f"weights of {config.init_from}" if config.init_from else "random weights"
    lines.append(("start", origin))
    lines.append(("workdir", str(job.workdir)))
    return screen(lines)
