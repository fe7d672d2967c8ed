#!/usr/bin/env bash
# What happens on a host of a slice; called over ssh by the other launch scripts, on all hosts at once.
#
# Under ~/bertjax: code/ (the copied tree), venv/ (its Python), run/ (the one job: log, pid, id,
# exit_code). A job is detached from the ssh connection, so a lost connection loses nothing.
#
#   launch/host.sh setup EXTRA        install ~/bertjax/code[EXTRA] into ~/bertjax/venv
#   launch/host.sh start ID -- CMD    start CMD in the background; nothing to do if run ID is going already
#   launch/host.sh status ID          one line: bertjax-host HOSTNAME bare|idle|other|running|lost|exited CODE;
#                                     ID "any" is whatever was started last
#   launch/host.sh stop               SIGTERM, so that it saves; SIGKILL after BERTJAX_STOP_SECONDS (300)
#   launch/host.sh log LINES [follow]
#   launch/host.sh complaint LINES    the last lines of the log, if the job failed here; else nothing
#   launch/host.sh exec -- CMD        run CMD in the foreground, with the same directory and Python
#
# Exit codes: 0 done, 1 failed, 2 wrong usage; exec has that of CMD.
set -Eeuo pipefail
# A command that fails unforeseen says where: ssh to all hosts does not.
trap 'echo "bertjax on $(hostname): host.sh line $LINENO failed with code $?: $BASH_COMMAND" >&2' ERR

usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; }

wrong_usage() {
  echo "bertjax: $*; launch/host.sh --help" >&2
  exit 2
}

ROOT=$HOME/bertjax
RUN=$ROOT/run
SELF=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/host.sh

fail() {
  echo "bertjax on $(hostname): $*" >&2
  exit 1
}

retried() { # COMMAND...: three times, for a registry that does not answer at once
  local attempt
  for attempt in 1 2 3; do
    if "$@"; then return 0; fi
    sleep "$((attempt * ${BERTJAX_BACKOFF:-10}))"
  done
  fail "failed three times: $*"
}

setup() { # EXTRA
  rm -f "$ROOT/ready"
  # The images' own Python is 3.10, which is too old. uv brings one without apt, whose lock is held
  # by automatic updates in a new host's first minutes.
  export PATH=$HOME/.local/bin:$PATH
  command -v uv >/dev/null ||
    PIP_BREAK_SYSTEM_PACKAGES=1 retried python3 -m pip install --user --quiet uv
  retried uv venv --quiet --allow-existing --python "${BERTJAX_PYTHON:-3.12}" "$ROOT/venv"
  retried uv pip install --quiet --python "$ROOT/venv/bin/python" -e "$ROOT/code[$1]"
  touch "$ROOT/ready"
}

read_pid() { # sets PID; fails unless the job of that number is ours and alive
  [[ -s $RUN/pid ]] || return 1
  PID=$(<"$RUN/pid")
  # After a restart of the host the number may be another program's.
  [[ -r /proc/$PID/cmdline && $(tr '\0' ' ' <"/proc/$PID/cmdline") == *"host.sh supervise"* ]]
}

enter() { # the directory and the Python of a job
  [[ -d $ROOT/code ]] || fail "no code here yet: launch/tpu.sh setup"
  cd "$ROOT/code"
  export PATH=$ROOT/venv/bin:$PATH
}

start() { # ID -- CMD...
  local id=$1
  shift 2
  [[ -f $ROOT/ready ]] || fail "not set up yet: launch/tpu.sh setup"
  if read_pid; then
    if [[ $(<"$RUN/id") == "$id" ]]; then return 0; fi
    fail "another command is running here: launch/tpu.sh stop ends it"
  fi
  mkdir -p "$RUN"
  rm -f "$RUN/exit_code" "$RUN/pid"
  printf '%s\n' "$id" >"$RUN/id"
  printf '=== %s %s\n' "$(date -u +%FT%TZ)" "$*" >>"$RUN/log"
  enter
  # A session of its own: the job outlives this connection, and its number names the whole group.
  setsid nohup bash "$SELF" supervise "$@" >>"$RUN/log" 2>&1 </dev/null &
  # Only from its number on can the job be seen and stopped; a status in between would say "lost".
  local tenths=100
  until [[ -s $RUN/pid ]]; do
    ((tenths-- > 0)) || fail "the job did not start; $RUN/log may say why"
    sleep 0.1
  done
}

supervise() { # CMD...: runs it and writes down how it ended
  trap : TERM INT # stop signals the whole group; this shell must outlive the job
  write pid "$$"
  local code=0
  "$@" || code=$?
  # In the log too, for who reads only that: an out-of-memory kill (137) leaves no other trace.
  printf '=== %s ended with code %s on %s\n' "$(date -u +%FT%TZ)" "$code" "$(hostname)"
  write exit_code "$code"
}

write() { # NAME VALUE: never seen half written
  printf '%s\n' "$2" >"$RUN/$1.new"
  mv "$RUN/$1.new" "$RUN/$1"
}

state() { # ID or "any"
  if [[ ! -f $ROOT/ready ]]; then
    echo bare
  elif [[ ! -f $RUN/id ]]; then
    echo idle
  elif read_pid; then
    if [[ $1 == any || $(<"$RUN/id") == "$1" ]]; then echo running; else echo other; fi
  elif [[ $1 != any && $(<"$RUN/id") != "$1" ]]; then
    echo idle
  elif [[ -f $RUN/exit_code ]]; then
    echo "exited $(<"$RUN/exit_code")"
  else
    echo lost
  fi
}

stop() {
  read_pid || return 0
  kill -TERM -- "-$PID" 2>/dev/null || return 0
  local tenths=$((${BERTJAX_STOP_SECONDS:-300} * 10))
  while read_pid; do
    if ((tenths-- <= 0)); then
      kill -KILL -- "-$PID" 2>/dev/null || true
      write exit_code 137
      fail "did not stop in ${BERTJAX_STOP_SECONDS:-300} seconds and was killed"
    fi
    sleep 0.1
  done
}

log() { # LINES [follow]
  [[ -f $RUN/log ]] || fail "nothing has run here yet"
  if [[ ${2:-} == follow ]]; then exec tail -n "$1" -F "$RUN/log"; fi
  tail -n "$1" "$RUN/log"
}

complaint() { # LINES: who has not failed is silent, so that all hosts can be asked at once
  local how
  how=$(state any)
  case $how in
    'exited 0' | 'exited 75' | running | idle | bare) return 0 ;;
  esac
  printf '=== %s: %s\n' "$(hostname)" "$how"
  if [[ -f $RUN/log ]]; then tail -n "$1" "$RUN/log"; fi
}

(($#)) || wrong_usage "no command: one of setup, start, status, stop, log, complaint, exec"
command=$1
shift
case ${1:-$command} in -h | --help) usage && exit 0 ;; esac # also host.sh COMMAND --help
case $command in
  help) usage && exit 0 ;;
  setup | status) (($# == 1)) || wrong_usage "$command takes one argument" ;;
  log | complaint) [[ ${1:-} =~ ^[0-9]+$ ]] || wrong_usage "$command needs a number of lines" ;;
  start) [[ $# -ge 3 && $2 == -- ]] || wrong_usage "start needs an ID, -- and a command" ;;
  exec) [[ $# -ge 2 && $1 == -- ]] || wrong_usage "exec needs -- and a command" ;;
  stop | supervise) ;;
  *) wrong_usage "unknown command '$command'" ;;
esac
case $command in
  status) echo "bertjax-host $(hostname) $(state "$1")" ;;
  exec)
    shift
    enter
    exec "$@"
    ;;
  *) "$command" "$@" ;;
esac
