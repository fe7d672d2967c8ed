#!/usr/bin/env bash
# One slice of Cloud TPU from creation to deletion. `launch/tpu.sh --help` is the manual.
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

manual() {
  cat <<EOM
One slice of Cloud TPU, from creation to deletion.

  launch/tpu.sh COMMAND NAME [--flag=value ...] [-- COMMAND TO RUN]

  create   make the slice, wait until it is ready and its hosts answer
  setup    copy this work tree to every host and install it there
  copy     copy this work tree again (after a change that needs no installation)
  run      start a command on every host, detached from this terminal
  exec     run a command on every host and wait for it
  logs     print or follow the log of one host
  status   state of the slice and of the run on each host
  stop     ask the run to save and stop (the slice stays, and is still billed)
  ssh      open a shell on one host
  delete   delete the slice (billing ends)

launch/tpu.sh COMMAND --help says more. launch/babysit.sh does all of it, again and again, until the
run is done.

$COMMON_FLAGS

Delays, for scripts: BERTJAX_BACKOFF, BERTJAX_BACKOFF_MAX, BERTJAX_POLL (seconds), BERTJAX_ATTEMPTS.
Exit codes: 0 done, 1 failed, 2 wrong usage, 3 quota, 4 no capacity, 5 no ssh.
EOM
}

usage() { # of COMMAND
  case $COMMAND in
    create) cat <<EOM ;;
Make a slice, wait until it is ready and its hosts answer.

  launch/tpu.sh create bert --zone=us-central2-b --type=v4-32
  launch/tpu.sh create bert --zone=us-west4-a --type=v5e-16 --spot
  launch/tpu.sh create bert --zone=us-east1-d --type=v6e-16 --queued --spot --valid_until=12h
  launch/tpu.sh create bert --zone=us-east5-a --type=v5p-16 --slices=2

$CREATE_FLAGS
  --max_wait=SECONDS  longest wait in the queue (86400)

$COMMON_FLAGS
EOM
    setup) cat <<EOM ;;
Copy this work tree to every host and install it there, with the [tpu] extra.

  launch/tpu.sh setup bert --zone=us-west4-a

$COMMON_FLAGS
EOM
    copy) cat <<EOM ;;
Copy this work tree to every host again, in place of the last copy. Uncommitted changes go too; what
git ignores does not.

  launch/tpu.sh copy bert --zone=us-west4-a

$COMMON_FLAGS
EOM
    run) cat <<EOM ;;
Start a command on every host, in the copied tree, detached from this terminal. jax.distributed finds
the other hosts by itself. The same command again resumes; while it is going, that changes nothing.

  launch/tpu.sh run bert --zone=us-west4-a -- python -m bertjax.main \\
      --config=configs/large.py:two_phase --config.data.corpus=gs://BUCKET/store --workdir=gs://BUCKET/run1

$COMMON_FLAGS
EOM
    exec) cat <<EOM ;;
Run a command on every host, in the copied tree, and wait for it.

  launch/tpu.sh exec bert --zone=us-west4-a -- df -h /
  launch/tpu.sh exec bert --zone=us-west4-a -- python -c 'import jax; print(jax.devices())'

$COMMON_FLAGS
EOM
    logs) cat <<EOM ;;
Print the end of the log of one host, or follow it.

  launch/tpu.sh logs bert --zone=us-west4-a --follow
  launch/tpu.sh logs bert --zone=us-west4-a --worker=3
  launch/tpu.sh logs bert --zone=us-east5-a --node=1 --worker=0     second slice of a multislice

$COMMON_FLAGS
EOM
    status) cat <<EOM ;;
State of the slice and, for each host, of the run: bare (not set up), idle, running, lost (the host
was restarted), or exited with a code (0 done, 2 settings refused, 75 saved and stopped).

  launch/tpu.sh status bert --zone=us-west4-a

$COMMON_FLAGS
EOM
    stop) cat <<EOM ;;
Ask the run to save and stop. The slice stays, and is still billed.

  launch/tpu.sh stop bert --zone=us-west4-a

$COMMON_FLAGS
EOM
    ssh) cat <<EOM ;;
Open a shell on one host.

  launch/tpu.sh ssh bert --zone=us-west4-a --worker=2

$COMMON_FLAGS
EOM
    delete) cat <<EOM ;;
Delete the slice. A run on it is not asked to save: stop it first.

  launch/tpu.sh delete bert --zone=us-west4-a
  launch/tpu.sh delete bert --zone=us-west4-a --yes                without the question

$COMMON_FLAGS
EOM
    *) manual ;;
  esac
}

COMMAND=${1:---help}
case $COMMAND in
  -h | --help | help) manual && exit 0 ;;
  create | setup | copy | run | exec | logs | status | stop | ssh | delete) ;;
  *) die "$EXIT_USAGE" "unknown command '$COMMAND'; launch/tpu.sh --help lists them" ;;
esac
shift
parse_flags "$@"

case $COMMAND in
  create) require_type && if $QUEUED; then KIND=queue; fi ;;
  run) require_command && set_kind ;;
  exec) ((${#REMOTE_COMMAND[@]})) || die "$EXIT_USAGE" "no command: put it after --"
    set_kind ;;
  *) set_kind ;;
esac

case $COMMAND in
  create)
    create_slice
    wait_until_ready
    wait_for_ssh
    note "$NAME is ready and billed from now on. Next: launch/tpu.sh setup $NAME"
    ;;
  setup)
    wait_for_ssh
    copy_code
    set_up_hosts
    note "installed on every host of $NAME. Next: launch/tpu.sh run $NAME -- COMMAND"
    ;;
  copy) copy_code ;;
  run)
    start_run
    note "started. Follow it: launch/tpu.sh logs $NAME --follow"
    ;;
  exec) on_all "$HOST_SCRIPT exec -- $(quoted "${REMOTE_COMMAND[@]}")" ;;
  logs) if $FOLLOW; then show_log 200 follow; else show_log 200; fi ;;
  status)
    state=$(slice_state) || explain_and_exit "look at $NAME"
    echo "$NAME: $state"
    if [[ $state == READY ]]; then
      poll_run any || explain_and_exit "reach the hosts of $NAME"
    fi
    ;;
  stop) stop_run ;;
  ssh)
    ssh_arguments "$WORKER" "$NODE"
    if $DRY_RUN; then quoted gcloud "${SSH[@]}"; else gcloud "${SSH[@]}"; fi
    ;;
  delete)
    if ! $YES && ! $DRY_RUN; then
      read -r -p "Delete $NAME in $ZONE? [y/N] " answer || answer=''
      [[ $answer == [yY]* ]] || die 1 "not deleted"
    fi
    delete_slice
    if $WAS_THERE; then
      note "$NAME is deleted"
    else
      note "there is no $NAME in $ZONE. If it was not deleted before, it is in another zone or project, and billed"
    fi
    ;;
esac
