"""Checkpoints over orbax: written in the background, committed by one rename, never skipped.

In: a tree of arrays, the step, metrics. Out: DIR/<step>/ with `state/` (orbax) and `manifest.json`
(step, metrics, size and crc32 of every file). The rules:

1. A save goes to DIR/tmp.<step>; its manifest is written last, then one rename makes it DIR/<step>.
   So a step directory is complete or does not exist, and leftovers of a killed save are tmp.*.
2. Saving a step that exists replaces it, after the new one is complete.
3. Old checkpoints are deleted only after the new one is committed. So are those, corrupt or not,
   that the restore of an earlier one has abandoned: none of them takes the place of a good one.
4. Restore takes the newest; if its files differ from its manifest it says so and takes the one
   before. If checkpoints existed and none is intact, that is an error, never a fresh start.

On object stores (gs://), where a rename is no single operation, the step directory is written in
place and the manifest, written last, is what commits it.
"""

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
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from bertjax.formats.files import write_whole
from bertjax.run import claim, manifest
from bertjax.run.manifest import CheckpointError, remove_quietly, resolve_directory

log = logging.getLogger(__name__)

STATE = "state"
_NONE, _FAILED = -1, -2  # what is sent in place of a step


class Checkpoints:
    """The checkpoints of one run.

    Args:
      directory: see `resolve_directory`. Made if absent, and tried by writing to it.
      keep_last: newest checkpoints kept, at least 1.
      keep_best: best checkpoints kept besides, by `metric`; 0 = none.
      metric: name in the metrics given to `save`.
      mode: 'min' or 'max', which value of the metric is better.
      keep_every: checkpoints whose step is a multiple of this are never deleted; 0 = none.
      timeout_s: longest time of one save, after which it counts as failed.
      read_only: for readers of a run that may still be training: nothing is touched.

    Raises:
      CheckpointError: the directory cannot be written, or another process is training in it.
      ValueError: several processes do not share it.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep_last: int = 3,
        keep_best: int = 0,
        metric: str = "eval/loss",
        mode: str = "min",
        timeout_s: int = 1200,
        read_only: bool = False,
        keep_every: int = 0,
    ):
        if keep_last < 1 or keep_best < 0:
            raise ValueError(f"keep_last={keep_last} must be at least 1, keep_best={keep_best} at least 0")
        if mode not in ("min", "max"):
            raise ValueError(f"mode={mode!r}; 'min' or 'max'")
        self.directory = resolve_directory(directory)
        self.keep_last, self.keep_best, self.keep_every = keep_last, keep_best, keep_every
        self.metric, self.mode = metric, mode
        self._in_place = manifest.is_remote(self.directory)
        self._primary = jax.process_index() == 0
        # Beside the directory, so that emptying the directory does not erase that it was full.
        self._ledger = self.directory.parent / f"{self.directory.name}.committed.json"
        # orbax measures by the wall clock, which may be set meanwhile; so the limit is ours.
        self._saver = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(), timeout_secs=4 * 10**9)
        self._timeout_s, self._begun = timeout_s, 0.0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._restored: int | None = None  # where the history of this process begins,
        self._saved: set[int] = set()  # and the steps that it has
        self._read_only = read_only
        if read_only:
            return
        if self._primary:
            claim.claim(self.directory)
            self._recover()
        claim.require_shared(self.directory)

    # ---------------------------------------------------------------------------------- saving

    def save(self, step: int, state: Any, metrics: Mapping[str, float] | None = None) -> None:
        """Starts to write `state`; returns once its arrays are copied, so they may be donated.

        All processes call it. An error of the save before this one is raised here.

        Args:
          state: tree of arrays.
          metrics: numbers kept with the checkpoint, for `keep_best`.
        """
        if self._read_only:
            raise CheckpointError(f"{self.directory} was opened read_only")
        self.wait()
        target = self._writing(step)
        if self._primary:
            if self._in_place and target.exists():
                self._make_room_in_place(step)
            elif target.exists():
                target.rmtree()
        _barrier("checkpoint_target_free")
        self._begun = time.monotonic()
        self._saver.save(target / STATE, args=ocp.args.PyTreeSave(state))
        self._pending = self._worker.submit(self._finish, step, dict(metrics or {}))

    def wait(self) -> None:
        """Returns when nothing is being written any more; raises what went wrong meanwhile."""
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
        if self._pending is not None and (self._pending.done() or time.monotonic() > self._begun + self._timeout_s):
            self.wait()

    def clear(self) -> None:
        """Deletes every checkpoint and the memory of them: the run starts afresh."""
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
            self._saver.close()

    def _writing(self, step: int) -> epath.Path:
        return self.directory / (str(step) if self._in_place else f"tmp.{step}")

    def _finish(self, step: int, metrics: dict[str, float]) -> None:
        """In the background thread: waits for orbax, commits, then deletes what is too old."""
        written, final = self._writing(step), self.directory / str(step)
        try:
            self._saver.wait_until_finished()
            if not self._primary:
                return
            manifest.write(written, step, metrics)
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
                remove_quietly(written)  # a full disk gets its room back
            raise CheckpointError(
                f"checkpoint of step {step} could not be written to {final}: {error}. Earlier "
                f"checkpoints are untouched: {self.steps()}"
            ) from error

    def _make_room_in_place(self, step: int) -> None:
        if (self.directory / str(step) / manifest.FILE).exists() and not [
            other for other in self.steps() if other != step
        ]:
            raise CheckpointError(
                f"step {step} is the only checkpoint in {self.directory}, and an object store "
                "cannot replace it in one operation; save to another directory"
            )
        (self.directory / str(step)).rmtree()

    def _retain(self, newest: int) -> None:
        """Deletes all but the newest `keep_last`, the best `keep_best` and every `keep_every`-th.

        History is linear: what is beyond the step just saved, or was beyond the one restored, is
        corrupt or abandoned, and a resume must not land on it.
        """
        steps = [
            step
            for step in self.steps()
            if step <= newest and (self._restored is None or step <= self._restored or step in self._saved)
        ]
        keep = set(steps[-self.keep_last :])
        if self.keep_best:
            keep |= set([step for step, _ in self.ranked() if step in steps][: self.keep_best])
        if self.keep_every:
            keep |= {step for step in steps if step % self.keep_every == 0}
        write_whole(self._ledger, json.dumps({"newest": newest, "kept": sorted(keep)}))
        for step in self.steps():
            if step not in keep:
                doomed = self.directory / str(step)
                if not self._in_place:  # so that a kill meanwhile leaves no half directory behind
                    doomed = doomed.rename(self.directory / f"tmp.deleting.{step}")
                doomed.rmtree()

    # --------------------------------------------------------------------------------- reading

    def steps(self) -> list[int]:
        """Committed steps in ascending order (intact or not)."""
        steps = [int(path.name) for path in self._entries() if path.name.isdigit()]
        if self._in_place:
            steps = [step for step in steps if (self.directory / str(step) / manifest.FILE).exists()]
        return sorted(steps)

    def _entries(self) -> list[epath.Path]:
        """What the directory holds; object stores have no empty directories."""
        try:  # asked before, it may be there for another process's trial to write, and gone now
            return list(self.directory.iterdir())
        except FileNotFoundError:
            return []

    def latest(self) -> int | None:
        """The newest step, or None if this run has never committed a checkpoint.

        All processes call it, and get what process 0 sees: a file system may show others less.

        Raises:
          CheckpointError: there were checkpoints and now there are none.
        """
        return self._as_process_0(self._newest)

    def _newest(self) -> int | None:
        steps = self.steps()
        if steps:
            return steps[-1]
        if self._ledger.exists():
            try:
                what = f"step {json.loads(self._ledger.read_text())['newest']} was saved"
            except (ValueError, KeyError, TypeError):  # damaged, but it is there
                what = "some were saved"
            raise CheckpointError(
                f"{self.directory} holds no checkpoint, but {self._ledger.name} says that {what}. "
                f"Put the checkpoints back, or delete {self._ledger} to start afresh."
            )
        return None

    def metrics(self, step: int) -> dict[str, float]:
        """The metrics saved with a step."""
        return manifest.read(self.directory / str(step))["metrics"]

    def ranked(self) -> list[tuple[int, float]]:
        """(step, value of `metric`), best first, of equals the oldest; others are left out."""
        found = []
        for step in self.steps():
            try:
                value = self.metrics(step).get(self.metric)
            except (OSError, ValueError, KeyError):
                continue  # a corrupt manifest: restore will say so
            if value is not None and not np.isnan(value):
                found.append((step, value))
        sign = 1 if self.mode == "min" else -1
        return sorted(found, key=lambda pair: (sign * pair[1], pair[0]))

    def best(self) -> int | None:
        """The step with the best `metric`, or None."""
        ranked = self.ranked()
        return ranked[0][0] if ranked else None

    def problem(self, step: int) -> str | None:
        """Why a checkpoint is not intact, or None: every file is compared with the manifest."""
        return manifest.problem(self.directory / str(step), step)

    def restore(self, target: Any, step: int | None = None, cast: bool = False) -> tuple[Any, int]:
        """(state, its step), bit for bit as saved, laid out as `target` says.

        Args:
          target: tree of ShapeDtypeStructs with shardings (or of arrays); any number of devices.
          step: None = the newest that is intact, with a warning for each one that is not.
          cast: lets a target's dtype differ from the saved one.

        Raises:
          CheckpointError: none, or the asked step, is intact.
          ValueError: shapes, names or dtypes of the target are not the saved ones.
        """
        step = self._choose(step)
        path = self.directory / str(step) / STATE
        self._check_fits(target, step, cast)
        restore_args = jax.tree.map(
            lambda leaf: ocp.ArrayRestoreArgs(sharding=leaf.sharding, dtype=leaf.dtype, global_shape=leaf.shape), target
        )
        state = self._saver.restore(path, args=ocp.args.PyTreeRestore(item=target, restore_args=restore_args))
        self._restored, self._saved = step, set()
        return jax.tree.map(_own_buffer, state), step

    def restore_numpy(self, step: int | None = None) -> tuple[dict[str, Any], int]:
        """(nested dict of numpy arrays, step), without a target; any device count, or none."""
        step = self._choose(step)
        path = self.directory / str(step) / STATE
        tree = self._saver.metadata(path).item_metadata.tree
        restore_args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        return self._saver.restore(path, args=ocp.args.PyTreeRestore(restore_args=restore_args)), step

    def _choose(self, step: int | None) -> int:
        """The step to restore: process 0 verifies, all others follow it."""
        return self._as_process_0(lambda: self._intact(step))

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

    def _intact(self, step: int | None) -> int:
        self.wait()
        if self._newest() is None:
            raise CheckpointError(f"no checkpoint in {self.directory}")
        candidates = self.steps()[::-1] if step is None else [step]
        problems = []
        for candidate in candidates:
            if candidate not in self.steps():
                raise CheckpointError(
                    f"no checkpoint of step {candidate} in {self.directory}; there are {self.steps()}"
                )
            problem = self.problem(candidate)
            if problem is None:
                if problems:
                    log.error("falling back to the checkpoint of step %d: the work since then is repeated", candidate)
                return candidate
            problems.append(f"step {candidate}: {problem}")
            log.error("checkpoint of step %d in %s is CORRUPT: %s", candidate, self.directory, problem)
        raise CheckpointError(
            f"no intact checkpoint in {self.directory} ({'; '.join(problems)}). Restore one from a "
            "backup, or delete the run to start afresh."
        )

    def _check_fits(self, target: Any, step: int, cast: bool) -> None:
        saved = _by_name(self._saver.metadata(self.directory / str(step) / STATE).item_metadata.tree)
        wanted = _by_name(target)
        missing, extra = sorted(wanted.keys() - saved.keys()), sorted(saved.keys() - wanted.keys())
        problems = [f"not in the checkpoint: {name}" for name in missing]
        problems += [f"only in the checkpoint: {name}" for name in extra]
        for name in sorted(wanted.keys() & saved.keys()):
            if tuple(wanted[name].shape) != tuple(saved[name].shape):
                problems.append(
                    f"{name} is {tuple(saved[name].shape)} in the checkpoint and "
                    f"{tuple(wanted[name].shape)} in this run"
                )
            elif not cast and jnp.dtype(wanted[name].dtype) != jnp.dtype(saved[name].dtype):
                problems.append(f"{name} is {saved[name].dtype} in the checkpoint and {wanted[name].dtype} in this run")
        if problems:
            shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
            raise ValueError(f"checkpoint {self.directory / str(step)} is of another model: {shown}")

    # ---------------------------------------------------------------------------------- start

    def _recover(self) -> None:
        """Clears up after a kill: an unfinished replacement is undone, leftovers are deleted."""
        for path in self._entries():
            if path.name.startswith("old."):
                final = self.directory / path.name.removeprefix("old.")
                if final.exists():
                    path.rmtree()
                else:
                    path.rename(final)
            elif path.name.startswith("tmp."):
                log.warning("removing %s, left by a save that was interrupted", path)
                remove_quietly(path)


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
