"""Checkpoints of a run: written in the background by orbax, committed by one rename, checked before they are read.

In: a tree of arrays, the step, metrics. Out: DIR/<step>/ (formats/checkpoint.py). The rules:

1. A save goes to DIR/tmp.<step>; its manifest is written last, then one rename makes it DIR/<step>. So a step directory
   is complete or does not exist, and leftovers of a killed save are tmp.*.
2. Saving a step that exists replaces it, after the new one is complete.
3. Old checkpoints are deleted only after the new one is committed. So are those, corrupt or not, that the restore of an
   earlier one has abandoned: none of them takes the place of a good one.
4. Restore takes the newest; if its files differ from its manifest it says so and takes the one before. If checkpoints
   existed and none is intact, that is an error, never a fresh start.

On object stores (gs://), where a rename is not a single operation, the step directory is written in place and the
manifest, written last, commits it. docs/design.md says why orbax's CheckpointManager does not do this.
"""

import functools
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from bertjax.config import CheckpointSettings
from bertjax.formats import checkpoint as formats
from bertjax.formats.checkpoint import STATE, CheckpointError, SavedStates
from bertjax.formats.files import write_whole
from bertjax.run import claim

log = logging.getLogger(__name__)

_NONE, _FAILED = -1, -2  # sent in place of a step


class Checkpoints(SavedStates):
    """The checkpoints of one run, which this process (or process 0) writes.

    Args:
      directory: see `resolve_directory`. Made if absent, and tried by writing to it.
      rules: which checkpoints are kept; `metric` is a name in the metrics given to `save`.
      mode: 'min' or 'max', which value of the metric is better.
      timeout_s: longest time of one save, after which it counts as failed.

    Raises:
      CheckpointError: the directory cannot be written, or another process is training in it.
      ValueError: several processes do not share it.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        rules: CheckpointSettings = CheckpointSettings(),  # noqa: B008  frozen
        mode: str = "min",
        timeout_s: int = 1200,
    ):
        super().__init__(directory)
        self.rules, self.mode = rules, mode
        self._primary = jax.process_index() == 0
        self._timeout_s, self._begun = timeout_s, 0.0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._restored: int | None = None  # the step that this process went on from
        self._saved: set[int] = set()  # the steps saved since then
        if self._primary:
            claim.claim(self.directory)
            self._recover()
        claim.require_shared(self.directory)

    @functools.cached_property
    def _orbax(self) -> Any:
        import orbax.checkpoint as ocp

        # orbax measures by the wall clock, which may jump; `wait` has a limit of its own.
        return ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(), timeout_secs=4 * 10**9)

    def _recover(self) -> None:
        """Clears up after a kill: an unfinished replacement is undone, leftovers are deleted."""
        for path in self._entries():
            if path.name.startswith("old."):
                final = self.directory / path.name.removeprefix("old.")
                path.rmtree() if final.exists() else path.rename(final)
            elif path.name.startswith("tmp."):
                log.warning("removing %s, left by a save that was interrupted", path)
                _remove_quietly(path)

    def save(self, step: int, state: Any, metrics: Mapping[str, float] | None = None) -> None:
        """Starts to write the arrays of `state`; returns once they are copied, so they may be donated.

        All processes call it. An error of the save before this one is raised here. `metrics` are kept with the
        checkpoint.
        """
        import orbax.checkpoint as ocp

        self.wait()
        target = self._writing(step)
        if self._primary and target.exists():
            if self._in_place and self.steps() == [step]:
                raise CheckpointError(
                    f"step {step} is the only checkpoint in {self.directory}, and an object store "
                    "cannot replace it in one operation; save to another directory"
                )
            target.rmtree()
        _barrier("checkpoint_target_free")
        self._begun = time.monotonic()
        self._orbax.save(target / STATE, args=ocp.args.PyTreeSave(state))
        self._pending = self._worker.submit(self._finish, step, dict(metrics or {}))

    def amend(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds to the metrics that a step was saved with. All processes call it."""
        if self._primary:
            formats.amend_manifest(self.directory / str(step), metrics)

    def wait(self) -> None:
        """Returns when nothing is being written any more; raises what went wrong meanwhile."""
        claim.require_in_place(self.directory)
        if self._pending is not None:
            pending, self._pending = self._pending, None
            try:
                pending.result(max(0.0, self._begun + self._timeout_s - time.monotonic()))
            except TimeoutError:
                raise CheckpointError(
                    f"a checkpoint could not be written to {self.directory} in {self._timeout_s} s."
                    f" Earlier checkpoints are untouched: {self.steps()}"
                ) from None

    def check(self) -> None:
        """Raises the error of a finished background save, without waiting for a running one."""
        claim.require_in_place(self.directory)
        if self._pending is not None and (self._pending.done() or time.monotonic() > self._begun + self._timeout_s):
            self.wait()

    def clear(self) -> None:
        """Deletes every checkpoint and the memory of them: the run starts at step 0."""
        self.wait()
        if self._primary:
            self._ledger.unlink(missing_ok=True)
            for path in self._entries():
                path.rmtree() if path.is_dir() else path.unlink()
        _barrier("checkpoints_cleared")

    def close(self) -> None:
        """Waits, then ends the background threads."""
        try:
            self.wait()
        finally:
            self._worker.shutdown()
            if "_orbax" in self.__dict__:
                self._orbax.close()

    def _writing(self, step: int) -> epath.Path:
        return self.directory / (str(step) if self._in_place else f"tmp.{step}")

    def _finish(self, step: int, metrics: dict[str, float]) -> None:
        """In the background thread: waits for orbax, commits, then deletes what is too old."""
        written, final = self._writing(step), self.directory / str(step)
        try:
            self._orbax.wait_until_finished()
            if not self._primary:
                return
            claim.require_in_place(self.directory)  # orbax makes the directories that it misses
            formats.write_manifest(written, step, metrics)
            if not self._in_place:
                aside = self.directory / f"old.{step}"
                if final.exists():
                    final.rename(aside)
                written.rename(final)
                if aside.exists():
                    aside.rmtree()
            self._saved.add(step)
            self._retain(step)
        except Exception as error:
            if self._primary and not self._in_place:
                _remove_quietly(written)  # frees the space on a full disk
                claim.require_in_place(self.directory)
            raise CheckpointError(
                f"checkpoint of step {step} could not be written to {final}: {error}. Earlier "
                f"checkpoints are untouched: {self.steps()}. The same command goes on from there"
            ) from error

    def _retain(self, newest: int) -> None:
        """Deletes what no rule keeps.

        What is beyond the step just saved, or was beyond the one restored, is corrupt or abandoned: no resume may take
        it.
        """
        steps = [
            step
            for step in self.steps()
            if step <= newest and (self._restored is None or step <= self._restored or step in self._saved)
        ]
        keep = self.rules.kept(steps, [step for step, _ in self.ranked() if step in steps])
        write_whole(self._ledger, json.dumps({"newest": newest, "kept": sorted(keep)}))
        for step in set(self.steps()) - keep:
            doomed = self.directory / str(step)
            if not self._in_place:  # a kill meanwhile must leave no half directory
                doomed = doomed.rename(self.directory / f"tmp.deleting.{step}")
            doomed.rmtree()

    def latest(self) -> int | None:
        """The newest step, see SavedStates. All processes call it, and get what process 0 sees."""
        return self._as_process_0(self._newest)

    def intact(self, step: int | None = None) -> int:
        """The step to restore, see SavedStates. All processes call it; process 0 verifies."""
        self.wait()
        return self._as_process_0(lambda: SavedStates.intact(self, step))

    def _as_process_0(self, find: Callable[[], int | None]) -> int | None:
        """What `find` gives on process 0, on all; if it raises CheckpointError there, all do."""
        if jax.process_count() == 1:
            return find()
        found, message = _FAILED, "process 0 could not read the checkpoints; see its log"
        if self._primary:
            try:
                step = find()
                found = _NONE if step is None else step
            except CheckpointError as error:
                message = str(error)
        found = int(multihost_utils.broadcast_one_to_all(np.int64(found)))
        if found == _FAILED:
            raise CheckpointError(message)
        return None if found == _NONE else found

    def ranked(self) -> list[tuple[int, float]]:
        """(step, value of the metric), best first, of equals the oldest; others are left out."""
        found = []
        for step in self.steps():
            try:
                value = self.metrics(step).get(self.rules.metric)
            except (OSError, ValueError, KeyError):
                continue  # a corrupt manifest: restore will say so
            if value is not None and not np.isnan(value):
                found.append((step, value))
        sign = 1 if self.mode == "min" else -1
        return sorted(found, key=lambda pair: (sign * pair[1], pair[0]))

    def best(self, until: int | None = None) -> int | None:
        """The step with the best value of the metric, of those up to `until`, or None."""
        return next((step for step, _ in self.ranked() if until is None or step <= until), None)

    def restore(self, target: Any, step: int | None = None) -> tuple[Any, int]:
        """(state, its step), bit for bit as saved, laid out as `target` says.

        Args:
          target: tree of ShapeDtypeStructs with shardings (or of arrays); any number of devices.
          step: None = the newest that is intact, with a message for each one that is not.

        Raises:
          CheckpointError: none, or the asked step, is intact.
          ValueError: shapes, names or dtypes of the target are not the saved ones.
        """
        import orbax.checkpoint as ocp

        step = self.intact(step)
        self._check_fits(target, step)
        restore_args = jax.tree.map(
            lambda leaf: ocp.ArrayRestoreArgs(sharding=leaf.sharding, dtype=leaf.dtype, global_shape=leaf.shape), target
        )
        state = self._orbax.restore(
            self.directory / str(step) / STATE, args=ocp.args.PyTreeRestore(item=target, restore_args=restore_args)
        )
        self._restored, self._saved = step, set()
        return jax.tree.map(_own_buffer, state), step

    def _check_fits(self, target: Any, step: int) -> None:
        saved = _by_name(self._orbax.metadata(self.directory / str(step) / STATE).item_metadata.tree)
        wanted = _by_name(target)
        problems = [f"not in the checkpoint: {name}" for name in sorted(wanted.keys() - saved.keys())]
        problems += [f"only in the checkpoint: {name}" for name in sorted(saved.keys() - wanted.keys())]
        for name in sorted(wanted.keys() & saved.keys()):
            here, there = wanted[name], saved[name]
            if tuple(here.shape) != tuple(there.shape):
                problems.append(f"{name} is {tuple(there.shape)} in the checkpoint and {tuple(here.shape)} in this run")
            elif jnp.dtype(here.dtype) != jnp.dtype(there.dtype):
                problems.append(f"{name} is {there.dtype} in the checkpoint and {here.dtype} in this run")
        if problems:
            shown = "; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else "")
            raise ValueError(
                f"checkpoint {self.directory / str(step)} is of another model or optimizer than this run's settings "
                f"describe ({shown}). Set them as they were, or take its weights alone: --config.init_from="
                f"{self.directory.parent} with another --workdir"
            )


def _own_buffer(leaf: Any) -> Any:
    """On the CPU a restored array may alias memory of the reader; a donating step needs its own."""
    aliases = isinstance(leaf, jax.Array) and next(iter(leaf.devices())).platform == "cpu"
    return jnp.copy(leaf) if aliases else leaf


def _by_name(tree: Any) -> dict[str, Any]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _barrier(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def _remove_quietly(path: epath.Path) -> None:
    """Removes a file or a tree; a failure is only logged."""
    try:
        path.rmtree() if path.is_dir() else path.unlink()
    except OSError as error:
        log.warning("could not remove %s: %s", path, error)
