#!/usr/bin/env bash
# Two vLLM instances on one pool: what one of them has computed, the other loads. Ends both when one ends.
#
#     MODEL=Qwen/Qwen3-0.6B examples/shared_pool.sh       # further arguments go to both
#     GPUS="0 1" examples/shared_pool.sh                  # one GPU for each
set -euo pipefail

: "${MODEL:=Qwen/Qwen3-0.6B}" "${PORTS:=8001 8002}" "${GPUS:=}"
here=$(dirname "$0")
read -r -a gpus <<< "$GPUS"
started=()
trap 'for one in "${started[@]}"; do kill "$one" 2>/dev/null || true; done; wait' EXIT

number=0
for port in $PORTS; do
    [ -z "${gpus[number]:-}" ] || export CUDA_VISIBLE_DEVICES=${gpus[number]}
    # Weights 1 and 1: nobody is pushed below half of a full pool by the other.
    MODEL=$MODEL PORT=$port PEGAFLOW_WEIGHT=1 "$here/single.sh" "$@" &
    started+=($!)
    number=$((number + 1))
done
wait -n
