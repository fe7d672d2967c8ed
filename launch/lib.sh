# shellcheck shell=bash
# shellcheck disable=SC2034  # what is set here is used by the scripts that source it
# The gcloud side of the launch scripts: flags, retries, and everything done to one slice.
#
# Sourced by tpu.sh and babysit.sh. In: their command line (parse_flags) and a few delays from the
# environment. Out: gcloud commands, printed instead of run under --dry_run.
#
# A slice has a NAME and is of one KIND: "vm", a plain TPU VM, or "queue", a queued resource, which
# may hold several slices (multislice). Whatever runs on its hosts goes through launch/host.sh.
set -euo pipefail

if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 404)); then
  echo "bertjax: bash $BASH_VERSION is too old, 4.4 is needed (macOS: brew install bash)" >&2
  exit 2
fi

REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# --- Settings from the environment -----------------------------------------------------------

BACKOFF=${BERTJAX_BACKOFF:-15}           # seconds before the second attempt; doubles each time
BACKOFF_MAX=${BERTJAX_BACKOFF_MAX:-300}  # longest such wait, in seconds
ATTEMPTS=${BERTJAX_ATTEMPTS:-10}         # tries of one step before giving up
POLL=${BERTJAX_POLL:-30}                 # seconds between two looks at a slice or a run

# Exit codes of the launch scripts, beside 0 and 1. Codes 2 and 75 mean what bertjax.main means.
EXIT_USAGE=2
EXIT_QUOTA=3
EXIT_CAPACITY=4
EXIT_SSH=5

# --- Talking ---------------------------------------------------------------------------------

exec 3>&1  # the real standard output, for what is printed inside $(...)

say() { printf 'bertjax: %s\n' "$*" >&2; }

note() { $DRY_RUN || say "$@"; } # what a dry run has not really done

die() { # CODE MESSAGE...
  local code=$1
  shift
  say "$@"
  exit "$code"
}

quoted() { # WORD...: the words as one line that a shell reads back unchanged
  local word line=()
  for word in "$@"; do
    if [[ $word =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]]; then
      line+=("$word")
    else
      line+=("'${word//\'/\'\\\'\'}'")
    fi
  done
  printf '%s\n' "${line[*]}"
}

# --- Flags -----------------------------------------------------------------------------------

COMMON_FLAGS="Flags of every command:
  --zone=ZONE         zone of the slice, or \$BERTJAX_ZONE
  --project=PROJECT   or \$BERTJAX_PROJECT; without either, the one gcloud is set to
  --queued            the slice is a queued resource (found out by asking, where not given)
  --ssh_flag=FLAG     one more flag of gcloud ... ssh and scp, such as --internal-ip; repeatable
  --dry_run           print each gcloud command instead of running it"

CREATE_FLAGS='Flags that describe a new slice:
  --type=TYPE         accelerator and cores or chips: v4-32, v5p-16, v5litepod-16 (or v5e-16), v6e-16
  --version=VERSION   runtime of the TPU VM; chosen from the type where not given
  --spot              cheaper, and may be pre-empted at any time
  --reserved          from a reservation of the project
  --queued            ask by a queued resource: waits in line for capacity
  --slices=N          multislice: N slices of this type, as one queued resource
  --valid_until=TIME  drop a queued request that is not met by then (6h, 2d)
  --create_flag=FLAG  one more flag of gcloud ... create, such as --network=NAME; repeatable'

NAME='' ZONE=${BERTJAX_ZONE:-} PROJECT=${BERTJAX_PROJECT:-} TYPE='' VERSION='' VALID_UNTIL=''
SPOT=false RESERVED=false QUEUED=false DRY_RUN=false
FOLLOW=false YES=false DELETE_WHEN_DONE=false
SLICES=1 WORKER=0 NODE=0 MAX_FAILURES=3 MAX_RESTARTS=1000 MAX_WAIT=86400
CREATE_EXTRA=() SSH_EXTRA=() REMOTE_COMMAND=()

parse_flags() { # NAME [--flag=value ...] [-- COMMAND ...]; sets the variables above
  local argument flag value
  while (($#)); do
    argument=$1
    shift
    flag=${argument%%=*}
    flag=${flag//-/_}
    value=${argument#*=}
    case $flag in
      __)
        REMOTE_COMMAND=("$@")
        break
        ;;
      __help | _h) usage && exit 0 ;;
      __spot | __reserved | __queued | __dry_run | __follow | __yes | __delete_when_done)
        [[ $argument != *=* ]] || die "$EXIT_USAGE" "$argument: this flag takes no value"
        ;;&
      __spot) SPOT=true ;;
      __reserved) RESERVED=true ;;
      __queued) QUEUED=true ;;
      __dry_run) DRY_RUN=true ;;
      __follow) FOLLOW=true ;;
      __yes) YES=true ;;
      __delete_when_done) DELETE_WHEN_DONE=true ;;
      __*)
        [[ $argument == *=?* ]] || die "$EXIT_USAGE" "$argument: unknown, or without its value" \
          "(values are written --flag=value; --help lists the flags)"
        ;;&
      __slices | __max_failures | __max_restarts | __max_wait)
        [[ $value =~ ^(0|[1-9][0-9]{0,8})$ ]] || die "$EXIT_USAGE" "$argument: not a whole number"
        ;;&
      __zone) ZONE=$value ;;
      __project) PROJECT=$value ;;
      __type) TYPE=$value ;;
      __version) VERSION=$value ;;
      __valid_until) VALID_UNTIL=$value ;;
      __create_flag) CREATE_EXTRA+=("$value") ;;
      __ssh_flag) SSH_EXTRA+=("$value") ;;
      __slices) SLICES=$value ;;
      __worker) WORKER=$value ;;
      __node) NODE=$value ;;
      __max_failures) MAX_FAILURES=$value ;;
      __max_restarts) MAX_RESTARTS=$value ;;
      __max_wait) MAX_WAIT=$value ;;
      __*) die "$EXIT_USAGE" "unknown flag $argument; --help lists them" ;;
      *)
        [[ -z $NAME ]] || die "$EXIT_USAGE" "unexpected argument '$argument' after the name" \
          "'$NAME': put the command to run after --"
        NAME=$argument
        ;;
    esac
  done
  [[ $NAME =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ ]] || die "$EXIT_USAGE" \
    "'$NAME' cannot name a slice: lower-case letters, digits and hyphens, a letter first" \
    "(launch/${0##*/} --help)"
  [[ -n $ZONE ]] || die "$EXIT_USAGE" "no zone: give --zone=ZONE or set BERTJAX_ZONE"
  ((SLICES >= 1)) || die "$EXIT_USAGE" "--slices=$SLICES: at least 1"
  LOCATION=(--zone="$ZONE")
  [[ -z $PROJECT ]] || LOCATION+=(--project="$PROJECT")
  if ((SLICES > 1)); then QUEUED=true; fi
  # Its absence would be read off the shell's "not found" as that of the slice.
  $DRY_RUN || command -v gcloud >/dev/null ||
    die "$EXIT_USAGE" "gcloud is not on PATH: install it (https://cloud.google.com/sdk/docs/install), or give --dry_run"
}

require_type() { # checks the flags of a new slice; sets TYPE and VERSION as gcloud wants them
  [[ -n $TYPE ]] || die "$EXIT_USAGE" "no accelerator: give --type=TYPE, such as --type=v5e-16"
  TYPE=${TYPE/#v5e-/v5litepod-}
  if $SPOT && $RESERVED; then die "$EXIT_USAGE" "--spot and --reserved exclude each other"; fi
  if [[ -n $VALID_UNTIL ]] && ! $QUEUED; then
    die "$EXIT_USAGE" "--valid_until is about a request in a queue: add --queued"
  fi
  [[ -z $VERSION ]] || return 0
  # https://cloud.google.com/tpu/docs/runtimes, the table for JAX.
  case $TYPE in
    v2-* | v3-* | v4-*) VERSION=tpu-ubuntu2204-base ;;
    v5litepod-*) VERSION=v2-alpha-tpuv5-lite ;;
    v5p-*) VERSION=v2-alpha-tpuv5 ;;
    v6e-*) VERSION=v2-alpha-tpuv6e ;;
    tpu7x* | v7*) die "$EXIT_USAGE" "$TYPE is only lent through GKE: see launch/gke.sh" ;;
    *) die "$EXIT_USAGE" "no runtime is known for --type=$TYPE: give --version=VERSION too" ;;
  esac
}

require_command() { # checks REMOTE_COMMAND: there, and with a work directory that outlives the slice
  ((${#REMOTE_COMMAND[@]})) || die "$EXIT_USAGE" "no command: put it after --"
  local word workdir='' previous='' trains=false
  for word in "${REMOTE_COMMAND[@]}"; do
    case $word in
      # Taken for the command's, these would be overlooked, and the slice paid for.
      --dry_run | --dry-run | --zone=* | --spot | --queued) die "$EXIT_USAGE" \
        "$word stands after --, where the command to run is: put it before" ;;
      bertjax | bertjax.main) trains=true ;;
      --workdir=*) workdir=${word#--workdir=} ;;
      *) [[ $previous != --workdir ]] || workdir=$word ;;
    esac
    previous=$word
  done
  # Each host has its own disk, which goes with the slice: checkpoints there would be lost.
  if $trains && [[ $workdir != gs://* && $workdir != /* ]]; then
    die "$EXIT_USAGE" "--workdir='$workdir' would be on the disk of each host and be lost with the" \
      "slice: give --workdir=gs://BUCKET/RUN, or the absolute path of a shared file system"
  fi
}

# --- gcloud ----------------------------------------------------------------------------------

SCRATCH=$(mktemp -d)
trap 'rm -rf "$SCRATCH"' EXIT
: >"$SCRATCH/error"

call() { # gcloud's words: runs it, keeps its error text for failure_kind
  if $DRY_RUN; then
    quoted gcloud "$@" >&3
    return 0
  fi
  local status=0
  gcloud "$@" 2>"$SCRATCH/error" || status=$?
  cat "$SCRATCH/error" >&2
  if grep -q 'host.sh: No such file' "$SCRATCH/error"; then
    say "the hosts of $NAME are not set up: launch/tpu.sh setup $NAME --zone=$ZONE"
  fi
  return "$status"
}

query() { # ASSUMED gcloud's words: prints gcloud's answer; under --dry_run, ASSUMED
  local assumed=$1
  shift
  if $DRY_RUN; then
    quoted gcloud "$@" >&3
    printf '%s\n' "$assumed"
  else
    gcloud "$@" 2>"$SCRATCH/error"
  fi
}

failure_kind() { # prints what the last failure was: quota, capacity, exists, missing, ...
  local kind pattern
  # In order: a quota error also says RESOURCE_EXHAUSTED, which alone means no capacity.
  while read -r kind pattern; do
    if grep -qiE -- "$pattern" "$SCRATCH/error"; then
      printf '%s\n' "$kind"
      return 0
    fi
  done <<'PATTERNS'
transient Max retries exceeded|name resolution|unable to find the server|unreachable
quota quota
capacity no more capacity|insufficient .*capacity|RESOURCE_EXHAUSTED|RESOURCE_POOL_EXHAUSTED|stockout|"?code"?:? 8\b
exists already exists|ALREADY_EXISTS
permission PERMISSION_DENIED|does not have .*permission|SERVICE_DISABLED|has not been used in project|have an active account|auth login
missing NOT_FOUND|not found
transient UNAVAILABLE|INTERNAL\b|internal error|DEADLINE_EXCEEDED|timed out|connection (reset|aborted)|\b50[0234]\b|ABORTED
PATTERNS
  printf 'other\n'
}

pause_for() { # ATTEMPT: the back-off before the attempt after this one
  local delay=$BACKOFF step
  for ((step = 1; step < $1 && delay < BACKOFF_MAX; step++)); do delay=$((delay * 2)); done
  sleep "$((delay < BACKOFF_MAX ? delay : BACKOFF_MAX))"
}

# --- One slice -------------------------------------------------------------------------------

KIND=vm

set_kind() { # find out whether NAME is a queued resource
  if $QUEUED; then
    KIND=queue
  elif $DRY_RUN; then
    say "dry run: taken for a plain TPU VM; for a queued resource add --queued"
  elif query '' compute tpus queued-resources describe "$NAME" "${LOCATION[@]}" \
    '--format=value(name)' >/dev/null; then
    KIND=queue
  elif [[ $(failure_kind) != missing ]]; then
    explain_and_exit "look up $NAME"
  fi
}

slice_state() { # prints READY, ABSENT, or PENDING, GONE or HALTED with gcloud's word; fails if gcloud does
  local attempt=1
  until state_once; do
    if [[ $(failure_kind) == permission ]] || ((attempt >= ATTEMPTS)); then return 1; fi
    pause_for "$attempt"
    attempt=$((attempt + 1))
  done
}

state_once() {
  local state
  if [[ $KIND == queue ]]; then
    state=$(query ACTIVE compute tpus queued-resources describe "$NAME" "${LOCATION[@]}" \
      '--format=value(state.state)') || state=''
  else
    state=$(query READY compute tpus tpu-vm describe "$NAME" "${LOCATION[@]}" \
      '--format=value(state)') || state=''
  fi
  case $state in
    '') if [[ $(failure_kind) == missing ]]; then echo ABSENT; else return 1; fi ;;
    READY | ACTIVE) echo READY ;;
    STOPPED | STOPPING) echo "HALTED $state" ;; # by its owner, who can start it again
    # Nothing comes back by itself from these.
    PREEMPTED | TERMINATED | DELETING | HIDING | HIDDEN | UNKNOWN) echo "GONE $state" ;;
    SUSPENDING | SUSPENDED | FAILED) echo "GONE $state" ;;
    *) echo "PENDING $state" ;; # CREATING, WAITING_FOR_RESOURCES, PROVISIONING, REPAIRING, ...
  esac
}

create_once() {
  local tier=()
  if $SPOT; then tier=(--spot); fi
  if $RESERVED; then tier=(--reserved); fi
  if [[ $KIND == vm ]]; then
    call compute tpus tpu-vm create "$NAME" "${LOCATION[@]}" --accelerator-type="$TYPE" \
      --version="$VERSION" "${tier[@]}" "${CREATE_EXTRA[@]}" --quiet
    return
  fi
  local nodes=(--node-id="$NAME") until=()
  if ((SLICES > 1)); then nodes=(--node-count="$SLICES" --node-prefix="$NAME"); fi
  if [[ -n $VALID_UNTIL ]]; then until=(--valid-until-duration="$VALID_UNTIL"); fi
  call compute tpus queued-resources create "$NAME" "${LOCATION[@]}" --accelerator-type="$TYPE" \
    --runtime-version="$VERSION" "${nodes[@]}" "${tier[@]}" "${until[@]}" "${CREATE_EXTRA[@]}" --quiet
}

create_slice() { # asks until there is capacity, at most ATTEMPTS times; the exit code says why not
  local attempt=1 kind
  until create_once; do
    kind=$(failure_kind)
    case $kind in
      capacity | transient) ;;
      exists) # our own earlier attempt, whose answer was lost on the way
        if ((attempt > 1)); then return 0; fi
        say "$NAME exists already: use it (launch/tpu.sh status), delete it, or take another name"
        return 1
        ;;
      quota)
        say "the project's quota does not allow $SLICES x $TYPE in $ZONE: see gcloud's message above;" \
          "ask for more at https://console.cloud.google.com/iam-admin/quotas, or take another zone or type"
        return "$EXIT_QUOTA"
        ;;
      *) explain "create $NAME" "$kind" || return 1 ;;
    esac
    if ((attempt >= ATTEMPTS)); then
      say "no $TYPE in $ZONE after $attempt attempts ($kind): try another zone, or wait in line with --queued"
      return "$EXIT_CAPACITY"
    fi
    say "attempt $attempt of $ATTEMPTS to create $NAME failed ($kind); next one after a pause"
    pause_for "$attempt"
    attempt=$((attempt + 1))
  done
}

wait_until_ready() { # waits through PENDING states, at most MAX_WAIT seconds
  local state polls=0
  while true; do
    state=$(slice_state) || explain_and_exit "look at $NAME"
    case $state in
      READY) return 0 ;;
      PENDING*) ;;
      *)
        say "$NAME is $state"
        return 1
        ;;
    esac
    polls=$((polls + 1))
    if ((polls * (POLL > 0 ? POLL : 1) > MAX_WAIT)); then
      say "$NAME is still $state after $MAX_WAIT seconds"
      return "$EXIT_CAPACITY"
    fi
    if ((polls % 20 == 1)); then say "waiting for $NAME: ${state#PENDING }"; fi
    sleep "$POLL"
  done
}

delete_slice() { # also when it is half gone already; waits, so that the name and the quota are free
  local attempt=1
  WAS_THERE=true
  until delete_once; do
    case $(failure_kind) in
      missing)
        if ((attempt == 1)); then WAS_THERE=false; fi
        return 0
        ;;
      permission) explain_and_exit "delete $NAME" permission ;;
    esac
    if ((attempt >= ATTEMPTS)); then
      die 1 "$NAME could not be deleted in $attempt attempts and may still be billed:" \
        "see gcloud's message above"
    fi
    pause_for "$attempt"
    attempt=$((attempt + 1))
  done
}

delete_once() {
  if [[ $KIND == queue ]]; then # --force: its nodes too
    call compute tpus queued-resources delete "$NAME" "${LOCATION[@]}" --force --quiet
  else
    call compute tpus tpu-vm delete "$NAME" "${LOCATION[@]}" --quiet
  fi
}

explain() { # WHAT KIND: why gcloud could not, and what helps; always fails
  case $2 in
    permission) say "could not $1: this account may not, or the API is off." \
      "Log in (gcloud auth login), and enable it: gcloud services enable tpu.googleapis.com" ;;
    missing) say "could not $1: gcloud does not know it in $ZONE (its message is above);" \
      "check the name, --zone and --type: gcloud compute tpus accelerator-types list --zone=$ZONE" ;;
    *) say "could not $1: gcloud's message is above" ;;
  esac
  return 1
}

explain_and_exit() { # WHAT [KIND]
  cat "$SCRATCH/error" >&2
  explain "$1" "${2:-$(failure_kind)}" || exit 1
}

# --- Its hosts -------------------------------------------------------------------------------

# A dead host must not hold a command for ever.
SSH_LIMITS=(--ssh-flag=-oConnectTimeout=30 --ssh-flag=-oServerAliveInterval=30)

ssh_arguments() { # WORKER NODE: sets SSH, gcloud's words up to the command
  SSH=(compute tpus tpu-vm ssh "$NAME" "${LOCATION[@]}" --worker="$1")
  if [[ $KIND == queue ]]; then
    SSH=(compute tpus queued-resources ssh "$NAME" "${LOCATION[@]}" --node="$2" --worker="$1")
  fi
  SSH+=("${SSH_LIMITS[@]}" "${SSH_EXTRA[@]}" --quiet)
}

on_all() { # COMMAND, one line: runs it on every host at once
  ssh_arguments all all
  call "${SSH[@]}" --command="$1"
}

wait_for_ssh() {
  local attempt=1
  until on_all true; do
    if ((attempt >= ATTEMPTS)); then
      say "no ssh to all hosts of $NAME after $attempt attempts. Usual causes: no firewall rule for" \
        "tcp:22; hosts without a public address (--ssh_flag=--internal-ip); a key that the agent" \
        "does not hold (ssh-add ~/.ssh/google_compute_engine)"
      return "$EXIT_SSH"
    fi
    say "hosts of $NAME do not answer yet (attempt $attempt of $ATTEMPTS)"
    pause_for "$attempt"
    attempt=$((attempt + 1))
  done
}

pack_code() { # FILE: the work tree without what git ignores
  cd "$REPO" || return
  if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
    git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
      if [[ -e $file ]]; then printf '%s\0' "$file"; fi # deleted, but not committed yet
    done | tar --null -czf "$1" -T -
  else
    tar -czf "$1" --exclude=./runs --exclude=./.venv --exclude=__pycache__ .
  fi
}

copy_code() { # the work tree to ~/bertjax/code of every host, in place of what was there
  local archive=$SCRATCH/bertjax-code.tar.gz scp
  if ! $DRY_RUN; then (pack_code "$archive") || return; fi
  scp=(compute tpus tpu-vm scp "$archive" "$NAME:bertjax-code.tar.gz" "${LOCATION[@]}" --worker=all)
  if [[ $KIND == queue ]]; then
    scp=(compute tpus queued-resources scp "$archive" "$NAME:bertjax-code.tar.gz" "${LOCATION[@]}"
      --node=all --worker=all)
  fi
  call "${scp[@]}" "${SSH_EXTRA[@]}" --quiet && on_all "$UNPACK"
}

# In place of the old tree, so that a file that was deleted here is deleted there.
UNPACK='set -e; rm -rf bertjax/new; mkdir -p bertjax/new'
UNPACK+='; tar -xzf bertjax-code.tar.gz -C bertjax/new; rm -rf bertjax/code; mv bertjax/new bertjax/code'

HOST_SCRIPT='bash bertjax/code/launch/host.sh'

set_up_hosts() { on_all "$HOST_SCRIPT setup tpu"; }

run_id() { quoted "${REMOTE_COMMAND[@]}" | cksum | cut -d ' ' -f 1; } # the same command, the same run

start_run() { on_all "$HOST_SCRIPT start $(run_id) -- $(quoted "${REMOTE_COMMAND[@]}")"; }

stop_run() { on_all "$HOST_SCRIPT stop"; }

poll_run() { # RUN_ID or "any": one line a host, "bertjax-host HOSTNAME STATE [CODE]"
  ssh_arguments all all
  query "bertjax-host dry-run ${ASSUMED_STATE:-running}" "${SSH[@]}" \
    --command="$HOST_SCRIPT status $1 2>/dev/null || echo bertjax-host \$(hostname) bare"
}

show_log() { # LINES [follow]
  ssh_arguments "$WORKER" "$NODE"
  call "${SSH[@]}" --command="$HOST_SCRIPT log${*:+ $*}"
}

show_complaints() { # LINES: of every host where the run failed; host 0 often only waited for another
  on_all "$HOST_SCRIPT complaint $1"
}

summarise() { # reads poll_run's lines: prints bare, other, idle, running, "partly CODE" or "exited CODE"
  local tag host state code running=0 ended=0 idle=0 worst=0 lines=0
  while read -r tag host state code; do
    [[ $tag == bertjax-host ]] || continue
    lines=$((lines + 1))
    case $state in
      bare | other) echo "$state" && return ;;
      idle) idle=$((idle + 1)) ;;
      running) running=$((running + 1)) ;;
      lost) ended=$((ended + 1)) worst=$(worse "$worst" 1) ;; # the host was restarted
      exited) ended=$((ended + 1)) worst=$(worse "$worst" "${code:-1}") ;;
      *) say "$host sent a state that is not known: '$state'" ;;
    esac
  done
  if ((lines == 0 || idle > 0 && running + ended == 0)); then
    echo idle
  elif ((running == 0 && idle == 0)); then
    echo "exited $worst"
  elif ((worst > 0 || idle > 0)); then # some started and some not: no step can be taken
    echo "partly $((worst > 0 ? worst : 1))"
  else
    echo running
  fi
}

worse() { # CODE CODE: the one that decides what is done. 2 (refused) before 75 (saved) before others
  local code
  for code in 2 75; do
    if (($1 == code || $2 == code)); then echo "$code" && return; fi
  done
  echo "$(($1 > $2 ? $1 : $2))"
}
