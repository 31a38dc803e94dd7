#!/bin/bash
# A run on one slice of Cloud TPU VMs, without GKE, with one process per host:
#
#     launch/tpu_vm.sh create                 # rents the slice: it costs from now on
#     launch/tpu_vm.sh setup                  # copies the last commit to all hosts, and installs it
#     launch/tpu_vm.sh train [FLAG ...]       # starts the run on all hosts; flags of launch.train
#     launch/tpu_vm.sh log                    # follows the log of the first host
#     launch/tpu_vm.sh stop                   # saves a checkpoint and ends the run
#     launch/tpu_vm.sh delete                 # gives the slice back
#
# Start it from the root of this repository, with gcloud set up for your project. Check every line
# marked CHANGE first. docs/clusters.md describes the processes.
#
# Exit codes of the trainer (docs/clusters.md), and the action on each host:
#   0                done
#   2                a wrong setting: the run ends; the last line of the log names it
#   75, 76, others   another process was lost, or this one failed: started again, MAX_RESTARTS times;
#                    the run continues from its last checkpoint. After `stop` nothing starts again.
# A slice whose hosts are taken away (spot) does not come back by itself: create, setup, train.

set -u -o pipefail

NAME=${NAME:-semrl}
ZONE=${ZONE:-us-east5-b}                       # CHANGE
ACCELERATOR=${ACCELERATOR:-v6e-16}             # CHANGE: gcloud compute tpus accelerator-types list
RUNTIME=${RUNTIME:-v2-alpha-tpuv6e}            # CHANGE: gcloud compute tpus versions list
PYTHON=${PYTHON:-python3.11}                   # CHANGE: of the hosts' image, 3.11 or newer, with venv
CONFIG=${CONFIG:-configs/gsm8k.py}             # CHANGE
# CHANGE: a directory that all hosts share, for example on a mounted Filestore; without one, any
# directory, and the flag --config.checkpoints.copy_to=gs://... of train
WORKDIR=${WORKDIR:-/mnt/runs/gsm8k}
GRACE_S=${GRACE_S:-60}
MAX_RESTARTS=${MAX_RESTARTS:-50}
PORT=8482                                      # process 0 waits here for the others

on_hosts() {  # of one host or "all", a command
  gcloud compute tpus tpu-vm ssh "$NAME" --zone="$ZONE" --worker="$1" --command="$2"
}

attribute() {  # of this host, from the server that every TPU VM can ask
  curl -sf -H 'Metadata-Flavor: Google' \
    "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1"
}

# On a host: runs the trainer until it is done, stopped or wrong.
host() {
  local index endpoints hosts child code=0 stopped=0 flags
  index=$(attribute agent-worker-number) && endpoints=$(attribute worker-network-endpoints) || exit 1
  IFS=, read -ra hosts <<< "$endpoints"        # each is name:port:address
  flags=(
    --config="$CONFIG"
    --workdir="$WORKDIR"
    --config.training.grace_s="$GRACE_S"
    --config.distributed.coordinator="${hosts[0]##*:}:$PORT"
    --config.distributed.num_processes="${#hosts[@]}"
    --config.distributed.process_id="$index"
    --config.distributed.connect_timeout_s=600
  )
  trap 'stopped=1; kill -TERM "$child" 2> /dev/null' TERM
  for ((attempt = 0; attempt <= MAX_RESTARTS; attempt++)); do
    .venv/bin/python -m launch.train "${flags[@]}" "$@" &
    child=$!
    while wait "$child"; code=$?; kill -0 "$child" 2> /dev/null; do :; done  # a signal ends a wait
    if ((code == 0 || code == 2 || stopped)); then break; fi
    echo "ended with exit code $code: started again"
  done
  echo "ended with exit code $code"
  exit "$code"
}

command=${1:-help}
shift
case $command in
  create)
    gcloud compute tpus tpu-vm create "$NAME" --zone="$ZONE" --accelerator-type="$ACCELERATOR" \
      --version="$RUNTIME"
    ;;
  setup)
    archive=$(mktemp --suffix=.tar.gz)
    git archive --format=tar.gz --output="$archive" HEAD &&
      gcloud compute tpus tpu-vm scp "$archive" "$NAME:semrl_jax.tar.gz" --zone="$ZONE" \
        --worker=all &&
      on_hosts all "mkdir -p semrl_jax && tar -xzf semrl_jax.tar.gz -C semrl_jax && cd semrl_jax &&
        $PYTHON -m venv .venv && .venv/bin/pip install -q -e '.[tpu,buckets]'"
    ;;
  train)
    printf -v settings '%q ' CONFIG="$CONFIG" WORKDIR="$WORKDIR" GRACE_S="$GRACE_S" \
      MAX_RESTARTS="$MAX_RESTARTS"
    printf -v flags ' %q' "$@"
    on_hosts all "cd semrl_jax && { $settings nohup bash launch/tpu_vm.sh host${*:+$flags} \
      > run.log 2>&1 < /dev/null & echo \$! > run.pid; }"
    ;;
  host) host "$@" ;;
  log) on_hosts 0 "tail -n 100 -f semrl_jax/run.log" ;;
  stop) on_hosts all "kill -TERM \$(cat semrl_jax/run.pid)" ;;
  delete) gcloud compute tpus tpu-vm delete "$NAME" --zone="$ZONE" ;;
  *)
    grep -E '^#     launch/tpu_vm' "$0" | cut -c 7-
    exit 2
    ;;
esac
