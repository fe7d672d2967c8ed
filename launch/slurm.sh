#!/usr/bin/env bash
# bertjax on GPU nodes under SLURM; goes on by itself after a time limit, a pre-emption or a lost node.
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
PYTHON=${BERTJAX_PYTHON:-python}

usage() { sed -n '2,/^#SBATCH/{/^#SBATCH/d;s/^# \{0,1\}//;p}' "$0"; }

fail() {
  printf 'bertjax: %s\n' "$*" >&2
  exit 2
}

if (($# == 0)) || [[ $1 == --help ]]; then
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

if ((code != STOPPED)); then exit "$code"; fi
restarts=${SLURM_RESTART_COUNT:-0}
if ((restarts >= MAX_RESTARTS)); then
  printf 'bertjax: saved and stopped; not started again after %s restarts\n' "$restarts" >&2
  exit "$STOPPED"
fi
printf 'bertjax: saved and stopped; back into the queue (restart %s)\n' "$((restarts + 1))" >&2
scontrol requeue "$SLURM_JOB_ID"
