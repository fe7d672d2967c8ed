#!/usr/bin/env bash
# bertjax on TPU node pools of GKE: writes a JobSet and hands it to kubectl. --help is the manual.
set -euo pipefail

usage() {
  cat <<'EOM'
Run bertjax on TPU slices of a GKE cluster, as a JobSet.

  launch/gke.sh NAME --image=IMAGE --type=TYPE --topology=TOPOLOGY [--flag=value ...] -- FLAGS OF bertjax.main

  launch/gke.sh bert --image=REGION-docker.pkg.dev/PROJECT/REPO/bertjax:tpu --type=v5e --topology=4x4 \
      --spot -- --config=configs/base.py --config.data.corpus=gs://BUCKET/store --workdir=gs://BUCKET/run1
  launch/gke.sh bert --image=... --type=v5p --topology=2x2x2 --slices=2 --dry_run -- --config=...
  kubectl logs -f -l jobset.sigs.k8s.io/jobset-name=bert -c bertjax        follow
  kubectl delete jobset bert                                               stop and remove

The cluster needs a TPU node pool of this type and topology for each slice, and JobSet:
  kubectl apply --server-side -f https://github.com/kubernetes-sigs/jobset/releases/latest/download/manifests.yaml

  --image=IMAGE           built from launch/Dockerfile, target tpu
  --type=TYPE             v4, v5e, v5p or v6e
  --topology=TOPOLOGY     chips of one slice, as in the node pool: 4x4, 2x2x2
  --slices=N              multislice (1)
  --chips_per_host=N      4, unless the node pool's machines have 1 or 8 chips
  --spot                  the node pool is of spot machines
  --service_account=NAME  Kubernetes service account that may use the bucket
  --user=ID               run as this user instead of root. Only where the nodes give devices to the
                          pod's user (containerd: device_ownership_from_security_context = true);
                          elsewhere the TPU's device files belong to root and jax finds no TPU
  --namespace=NAME        (default)
  --max_restarts=N        starts again after pre-emptions and failures (100); never after exit code 2
  --dry_run               print the manifest instead of applying it
EOM
}

fail() {
  printf 'bertjax: %s\n' "$*" >&2
  exit 2
}

(($#)) || set -- --help
NAME='' IMAGE='' TYPE='' TOPOLOGY='' SLICES=1 CHIPS_PER_HOST=4 SPOT=false SERVICE_ACCOUNT=default
NAMESPACE=default RUN_AS=0 MAX_RESTARTS=100 DRY_RUN=false
while (($#)); do
  case $1 in
    --)
      shift
      break
      ;;
    -h | --help) usage && exit 0 ;;
    --spot) SPOT=true ;;
    --dry_run | --dry-run) DRY_RUN=true ;;
    --image=?*) IMAGE=${1#*=} ;;
    --type=?*) TYPE=${1#*=} ;;
    --topology=?*) TOPOLOGY=${1#*=} ;;
    --slices=?*) SLICES=${1#*=} ;;
    --chips_per_host=?*) CHIPS_PER_HOST=${1#*=} ;;
    --service_account=?*) SERVICE_ACCOUNT=${1#*=} ;;
    --user=?*) RUN_AS=${1#*=} ;;
    --namespace=?*) NAMESPACE=${1#*=} ;;
    --max_restarts=?*) MAX_RESTARTS=${1#*=} ;;
    -*) fail "unknown flag $1, or without its value; --help lists them" ;;
    *)
      [[ -z $NAME ]] || fail "unexpected argument '$1': flags of bertjax.main go after --"
      NAME=$1
      ;;
  esac
  shift
done

[[ $NAME =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ ]] ||
  fail "'$NAME' cannot name a job: lower-case letters, digits and hyphens, a letter first"
[[ -n $IMAGE ]] || fail "no container: give --image=IMAGE, built from launch/Dockerfile"
for number in "$SLICES" "$CHIPS_PER_HOST" "$RUN_AS" "$MAX_RESTARTS"; do
  [[ $number =~ ^(0|[1-9][0-9]{0,8})$ ]] || fail "$(printf '%q' "$number") is not a whole number"
done
# What goes into the manifest as it is must not be able to end its line.
[[ $IMAGE =~ ^[A-Za-z0-9][A-Za-z0-9._/:@-]*$ ]] ||
  fail "--image=$(printf '%q' "$IMAGE") is no name of an image: HOST/PATH:TAG or HOST/PATH@sha256:..."
for name in "namespace=$NAMESPACE" "service_account=$SERVICE_ACCOUNT"; do
  [[ ${name#*=} =~ ^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$ ]] || fail "--$(printf '%q' "$name") is no name" \
    "of Kubernetes: lower-case letters, digits, hyphens and dots"
done
for word in "$@"; do
  [[ ! $word =~ [[:cntrl:]] ]] ||
    fail "$(printf '%q' "$word") has a line end or another control character in it"
done
[[ " $* " == *" --workdir=gs://"* ]] ||
  fail "give --workdir=gs://BUCKET/RUN after --: what a container writes to its own disk is lost with it"
[[ $TOPOLOGY =~ ^[1-9][0-9]{0,3}x[1-9][0-9]{0,3}(x[1-9][0-9]{0,3})?$ ]] || fail "--topology='$TOPOLOGY' is not like 4x4 or 2x2x2"

case $TYPE in # https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus
  v4) ACCELERATOR=tpu-v4-podslice ;;
  v5e) ACCELERATOR=tpu-v5-lite-podslice ;;
  v5p) ACCELERATOR=tpu-v5p-slice ;;
  v6e) ACCELERATOR=tpu-v6e-slice ;;
  *) fail "--type='$TYPE' is none of v4, v5e, v5p, v6e" ;;
esac

CHIPS=$((${TOPOLOGY//x/*}))
((CHIPS_PER_HOST > 0 && CHIPS % CHIPS_PER_HOST == 0)) ||
  fail "$TOPOLOGY has $CHIPS chips, which are not whole hosts of $CHIPS_PER_HOST: give --chips_per_host"
HOSTS=$((CHIPS / CHIPS_PER_HOST))

yaml_list() { # WORD...: a list of double-quoted strings
  local word line=()
  for word in "$@"; do
    word=${word//\\/\\\\}
    line+=("\"${word//\"/\\\"}\"")
  done
  local IFS=,
  printf '[%s]\n' "${line[*]}"
}

spot_selector() {
  if $SPOT; then
    printf '\n                cloud.google.com/gke-spot: "true"'
  fi
}

identity() { # of the pod: root without privileges, or a user
  if ((RUN_AS == 0)); then
    printf 'runAsUser: 0 # the device files of a TPU belong to root'
  else
    printf 'runAsUser: %s\n                runAsGroup: %s\n                runAsNonRoot: true' \
      "$RUN_AS" "$RUN_AS"
  fi
}

manifest() { # ARGUMENT...
  cat <<EOM
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: $NAME
  namespace: $NAMESPACE
  annotations:
    # One slice, one node pool: the hosts of a slice are wired to each other.
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool
spec:
  failurePolicy:
    # All hosts start again together; the run goes on from its newest checkpoint.
    maxRestarts: $MAX_RESTARTS
    rules:
      - action: FailJobSet
        onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
    - name: slice
      replicas: $SLICES
      template:
        spec:
          parallelism: $HOSTS
          completions: $HOSTS
          completionMode: Indexed
          backoffLimit: 0
          podFailurePolicy:
            rules:
              # bertjax.main refused its settings: another start would end the same way.
              - action: FailJob
                onExitCodes: {containerName: bertjax, operator: In, values: [2]}
          template:
            spec:
              restartPolicy: Never
              serviceAccountName: $SERVICE_ACCOUNT
              # Time to save after SIGTERM; a spot machine leaves about 25 seconds of it.
              terminationGracePeriodSeconds: 300
              nodeSelector:
                cloud.google.com/gke-tpu-accelerator: $ACCELERATOR
                cloud.google.com/gke-tpu-topology: $TOPOLOGY$(spot_selector)
              tolerations:
                - {key: google.com/tpu, operator: Exists, effect: NoSchedule}
                - {key: cloud.google.com/gke-spot, operator: Exists, effect: NoSchedule}
              securityContext:
                $(identity)
                seccompProfile: {type: RuntimeDefault}
              containers:
                - name: bertjax
                  image: "$IMAGE"
                  args: $(yaml_list "$@")
                  securityContext: {allowPrivilegeEscalation: false}
                  ports:
                    - {containerPort: 8471} # between the hosts of a slice
                    - {containerPort: 8080} # between slices
                  resources:
                    requests: {google.com/tpu: $CHIPS_PER_HOST}
                    limits: {google.com/tpu: $CHIPS_PER_HOST}
                  volumeMounts:
                    - {name: shared-memory, mountPath: /dev/shm}
              volumes:
                - name: shared-memory
                  emptyDir: {medium: Memory}
EOM
}

if $DRY_RUN; then
  manifest "$@"
else
  command -v kubectl >/dev/null || fail "kubectl is not on PATH: install it, or give --dry_run"
  answer=$(manifest "$@" | kubectl apply -f -)
  printf '%s\n' "$answer"
  if [[ $answer == *unchanged* ]]; then
    printf 'bertjax: %s was there already, so nothing was started. If it has ended, delete it and repeat the command: %s\n' \
      "$NAME" "kubectl delete jobset $NAME --namespace=$NAMESPACE" >&2
  fi
fi
