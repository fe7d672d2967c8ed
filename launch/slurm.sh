#!/usr/bin/env bash
# bertjax on GPU nodes under SLURM; goes on by itself after a time limit, a pre-emption, a lost node, a
# process that died or hung.
#
#   sbatch launch/slurm.sh --config=configs/base.py --config.data.corpus=STORE --workdir=RUN
#   sbatch --nodes=4 --time=24:00:00 --partition=gpu launch/slurm.sh --config=...
#   sbatch --nodes=1 --gpus-per-node=4 --ntasks-per-node=4 launch/slurm.sh --config=...
#
# Submit it in the repository's directory; RUN and STORE must be on storage that all nodes share.
# The Python that has bertjax: $BERTJAX_PYTHON, or `python` of the environment that was active.
#
# One process a GPU, since that is what jax.distributed makes of SLURM: it gives each process the GPU
# of its number on the node (SLURM_LOCALID). So every process must see all GPUs of its node: neither
# --gpus-per-task nor --gpu-bind, which would show each process one GPU, called 0.
#
#SBATCH --job-name=bertjax
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --output=bertjax-%j.log
#SBATCH --open-mode=append
# Before the time limit the processes get SIGTERM, save and exit with 75; SLURM requeues by itself
# after a pre-emption or a lost node.
#SBATCH --signal=TERM@300
#SBATCH --requeue
set -euo pipefail

STOPPED=75 # bertjax.main: asked to stop, has saved, start me again
MAX_RESTARTS=${BERTJAX_MAX_RESTARTS:-100}
MAX_FAILURES=${BERTJAX_MAX_FAILURES:-3}  # in a row
HEALTHY=${BERTJAX_HEALTHY_SECONDS:-3600} # a start of this length clears their count
PYTHON=${BERTJAX_PYTHON:-python}

usage() { sed -n '2,/^#SBATCH/{/^#SBATCH/d;s/^# \{0,1\}//;p}' "$0"; }

fail() {
  printf 'bertjax: %s\n' "$*" >&2
  exit 2
}

if (($# == 0)) || [[ $1 == @(-h|--help|help) ]]; then
  usage
  exit 0
fi
[[ -n ${SLURM_JOB_ID:-} ]] || fail "not a SLURM job: submit it with 'sbatch launch/slurm.sh ...'"
[[ -d bertjax && -d configs ]] || fail "submit it in the repository's directory (this is $PWD)"

tasks=${SLURM_NTASKS_PER_NODE:-}
gpus=${SLURM_GPUS_ON_NODE:-}
if [[ -n $gpus && $tasks != "$gpus" ]]; then
  fail "$gpus GPUs a node but ${tasks:-no number of} tasks a node: one process a GPU is needed, so give" \
    "--ntasks-per-node=$gpus with --gpus-per-node=$gpus"
fi

# --kill-on-bad-exit=0 --wait: when one process ends, the others get two minutes to save before they
# are ended too. srun takes no --cpus-per-task over from sbatch by itself.
code=0
srun --kill-on-bad-exit=0 --wait=120 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
  "$PYTHON" -m bertjax.main "$@" || code=$?

FAILURES=bertjax-$SLURM_JOB_ID.failures # a requeued job remembers nothing else
failures=0
case $code in
  0 | 1 | 2) # done, or another start would end the same way: an error, refused settings
    rm -f "$FAILURES"
    exit "$code"
    ;;
  "$STOPPED") what="saved and stopped" ;;
  *) # 76: something hung. 77: not all processes came. From 128 on: one was killed, others left with it
    if [[ -f $FAILURES ]] && ((SECONDS < HEALTHY)); then failures=$(<"$FAILURES"); fi
    failures=$((failures + 1))
    if ((failures > MAX_FAILURES)); then
      printf 'bertjax: failed %s times in a row, the last time with exit code %s\n' \
        "$failures" "$code" >&2
      rm -f "$FAILURES"
      exit "$code"
    fi
    what="failed with exit code $code (failure $failures, $MAX_FAILURES allowed in a row)"
    ;;
esac
printf '%s\n' "$failures" >"$FAILURES"

restarts=${SLURM_RESTART_COUNT:-0}
if ((restarts >= MAX_RESTARTS)); then
  printf 'bertjax: %s; not started again after %s restarts\n' "$what" "$restarts" >&2
  exit "$code"
fi
printf 'bertjax: %s; back into the queue (restart %s)\n' "$what" "$((restarts + 1))" >&2
scontrol requeue "$SLURM_JOB_ID"
