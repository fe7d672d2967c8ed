#!/usr/bin/env bash
# Keeps one command running on a slice until it is done: makes the slice, installs, starts, watches;
# makes the slice again when it was pre-empted. `launch/babysit.sh --help` is the manual.
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

GRACE=${BERTJAX_GRACE:-4}                # looks that the other hosts get to end after one has failed
HEALTHY=${BERTJAX_HEALTHY_SECONDS:-3600} # a run of this length clears the count of failures

usage() {
  cat <<EOM
Keep a command running on a slice until it is done.

  launch/babysit.sh NAME [--flag=value ...] -- COMMAND

  launch/babysit.sh bert --zone=us-west4-a --type=v5e-16 --spot --delete_when_done -- \\
      python -m bertjax.main --config=configs/base.py --config.data.corpus=gs://BUCKET/store \\
      --workdir=gs://BUCKET/run1
  launch/babysit.sh bert --zone=us-east5-a --type=v5p-16 --slices=2 --dry_run -- python -m ...

What it does about each end of the command:
  0                    done
  2                    settings refused: gives up, since another try would end the same way
  75                   saved and stopped: starts it again
  slice is gone        makes it again, installs, starts: bertjax.main goes on from its checkpoint
  anything else        starts it again, at most --max_failures times in a row

It keeps nothing in memory that matters: end it with Ctrl-C and the run goes on; give the same
command again and it takes up watching where it is. Run it in tmux, or on a small always-on machine.

  --max_failures=N     failures in a row before giving up (3); an hour of running clears the count
  --max_restarts=N     starts in all before giving up (1000)
  --max_wait=SECONDS   longest wait in the queue, each time (86400)
  --delete_when_done   delete the slice at the end, also after giving up

$CREATE_FLAGS

$COMMON_FLAGS

Delays, for scripts: BERTJAX_BACKOFF, BERTJAX_BACKOFF_MAX, BERTJAX_POLL, BERTJAX_HEALTHY_SECONDS
(seconds); counts: BERTJAX_ATTEMPTS, BERTJAX_GRACE.
Exit codes: 0 done, 1 failed, 2 wrong usage or settings refused, 3 quota, 4 no capacity, 5 no ssh.
EOM
}

obtain_slice() { # until READY: waits, deletes what is gone, creates what is absent
  local state code attempt=1
  while true; do
    state=$(slice_state) || explain_and_exit "look at $NAME"
    # A dry run shows the whole way, so it begins where nothing exists yet.
    if $DRY_RUN && ! $HELD; then state=ABSENT HELD=true; fi
    case $state in
      READY)
        HELD=true
        return 0
        ;;
      PENDING*)
        code=0
        wait_until_ready || code=$?
        ((code == 0 || code == 1)) || finish "$code" "gave up waiting for $NAME"
        continue
        ;;
      GONE*)
        say "$NAME is ${state#GONE }: deleting what is left of it"
        delete_slice
        ;;
      HALTED*) finish 1 "$NAME is ${state#HALTED }: gcloud compute tpus tpu-vm start $NAME --zone=$ZONE" ;;
    esac
    if ((attempt > ATTEMPTS)); then
      finish "$EXIT_CAPACITY" "$NAME was created $ATTEMPTS times and never became ready"
    elif ((attempt > 1)); then
      pause_for "$((attempt - 1))"
    fi
    code=0
    create_slice || code=$?
    # The quota of a slice that was just deleted can take a while to come back.
    if ((code == EXIT_QUOTA)) && $HELD; then
      say "had this quota before: asking again"
    elif ((code != 0)); then
      finish "$code" "no slice"
    fi
    attempt=$((attempt + 1))
  done
}

start_if_needed() { # sets the hosts up and starts the command, unless it is going already
  local lines state
  wait_for_ssh || return
  lines=$(ASSUMED_STATE=bare poll_run "$RUN_ID") || return
  state=$(summarise <<<"$lines")
  case $state in
    running | partly*) return 0 ;;
    'exited 0') return 0 ;; # ended while nobody watched
    other) finish 1 "another command is running on $NAME: launch/tpu.sh stop $NAME, then again" ;;
    bare) copy_code && set_up_hosts || return ;;
  esac
  start_run
}

watch_run() { # sets OUTCOME: an exit code, "gone" (the slice), or "unreachable" (its hosts)
  local lines state looks=0 silent=0 deaf=0
  while true; do
    if lines=$(ASSUMED_STATE='exited 0' poll_run "$RUN_ID"); then
      silent=0 deaf=0
      state=$(summarise <<<"$lines")
      case $state in
        running) looks=0 ;;
        exited*) OUTCOME=${state#exited } && return ;;
        partly*) # one host is down: the others wait for it in vain, once they have saved
          looks=$((looks + 1))
          if ((looks > GRACE)); then
            say "a host ended with code ${state#partly } and others did not follow: stopping them"
            stop_run || true
            OUTCOME=${state#partly } && return
          fi
          ;;
        *) OUTCOME=1 && return ;; # bare or idle: the host came back empty
      esac
    elif state=$(slice_state); then
      case $state in GONE* | ABSENT | HALTED*) OUTCOME=gone && return ;; esac
      silent=$((silent + 1))
      if ((silent >= ATTEMPTS)); then OUTCOME=unreachable && return; fi
      say "hosts of $NAME do not answer (slice: $state; $silent of $ATTEMPTS)"
    else # no answer from Google either: our own network, which says nothing about the run
      deaf=$((deaf + 1))
      if ((deaf * (POLL > 0 ? POLL : 1) > MAX_WAIT)); then
        finish 1 "gcloud has not answered for $MAX_WAIT seconds; the run may well go on"
      fi
      say "gcloud does not answer; looking again"
    fi
    sleep "$POLL"
  done
}

finish() { # CODE MESSAGE...: the end of babysitting
  local code=$1
  shift
  note "$@"
  if $DELETE_WHEN_DONE; then
    delete_slice
    note "$NAME is deleted"
  elif $HELD; then
    note "$NAME still exists and is billed: launch/tpu.sh delete $NAME --zone=$ZONE"
  fi
  exit "$code"
}

# shellcheck disable=SC2317,SC2329  # called by the trap
interrupted() {
  say "no longer watching; a run on $NAME goes on, and is billed. The same command watches it again;" \
    "launch/tpu.sh stop $NAME --zone=$ZONE stops it"
  exit 130
}

(($#)) || set -- --help
parse_flags "$@"
require_type
require_command
if $QUEUED; then KIND=queue; fi
RUN_ID=$(run_id)
HELD=false
trap interrupted INT TERM

failures=0
for ((starts = 1; starts <= MAX_RESTARTS + 1; starts++)); do
  obtain_slice
  began=$SECONDS
  OUTCOME=unreachable
  if start_if_needed; then watch_run; fi
  if ((SECONDS - began >= HEALTHY)); then failures=0; fi

  case $OUTCOME in
    0)
      show_log 40 || true
      finish 0 "done"
      ;;
    2)
      show_log 40 || true
      finish 2 "bertjax refused the settings (see above): nothing to try again"
      ;;
    75) say "saved and stopped: starting it again" ;;
    gone) say "the slice was taken away: making it again (start $((starts + 1)))" ;;
    *)
      # A slice taken away while it was being set up is no failure of the command.
      if [[ $OUTCOME == unreachable && $(slice_state || true) == @(GONE*|ABSENT) ]]; then
        say "the slice was taken away before the run began"
        continue
      fi
      failures=$((failures + 1))
      # A slice that is ready is never deleted for its silence: the fault may be on this side, and
      # the run may go on.
      if [[ $OUTCOME != unreachable ]]; then show_complaints 40 || true; fi
      if ((failures > MAX_FAILURES)); then
        [[ $OUTCOME != unreachable ]] || finish "$EXIT_SSH" "the hosts of $NAME do not answer"
        finish 1 "failed $failures times in a row, the last time with exit code $OUTCOME"
      fi
      say "failed: $OUTCOME (failure $failures, $MAX_FAILURES allowed in a row)"
      pause_for "$failures"
      ;;
  esac
done
finish 1 "gave up after $MAX_RESTARTS restarts"
