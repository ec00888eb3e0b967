#!/usr/bin/env bash
# One instance that computes prompts, one that decodes, and vLLM's router before them (pip install vllm-router).
#
#     MODEL=Qwen/Qwen3-0.6B examples/prefill_decode.sh    # further arguments go to both instances
#     curl localhost:8100/v1/completions -H 'content-type: application/json' -d '{"model": "...", "prompt": "..."}'
#
# The router sends each request to the prefill instance with max_tokens=1, and then as it is to the decode instance, which
# loads the prompt from the pool. Ends all three when one ends.
set -euo pipefail

: "${MODEL:=Qwen/Qwen3-0.6B}" "${PORT:=8100}" "${PREFILL_PORT:=8101}" "${DECODE_PORT:=8102}"
: "${POOL_SIZE:=8gb}" "${POOL:=default}" "${GPUS:=}"
export PYTHONHASHSEED=0
read -r -a gpus <<< "$GPUS"
started=()
trap 'for one in "${started[@]}"; do kill "$one" 2>/dev/null || true; done; wait' EXIT

[ -z "${gpus[0]:-}" ] || export CUDA_VISIBLE_DEVICES=${gpus[0]}
vllm serve "$MODEL" --port "$PREFILL_PORT" --prefix-caching-hash-algo sha256_cbor --kv-transfer-config '{
    "kv_connector": "PegaKVConnector", "kv_role": "kv_producer", "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"pegaflow.pool_name": "'"$POOL"'", "pegaflow.pool_size": "'"$POOL_SIZE"'",
        "pegaflow.pd_tail_save": true}}' "$@" &
started+=($!)

[ -z "${gpus[1]:-}" ] || export CUDA_VISIBLE_DEVICES=${gpus[1]}
vllm serve "$MODEL" --port "$DECODE_PORT" --prefix-caching-hash-algo sha256_cbor --kv-transfer-config '{
    "kv_connector": "PegaKVConnector", "kv_role": "kv_consumer", "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"pegaflow.pool_name": "'"$POOL"'", "pegaflow.pool_size": "'"$POOL_SIZE"'",
        "pegaflow.pd_tail_load": true, "pegaflow.wait_for_full_prefix": true}}' "$@" &
started+=($!)

# It waits until both answer.
vllm-router --host 127.0.0.1 --port "$PORT" --vllm-pd-disaggregation --policy round_robin \
    --prefill "http://127.0.0.1:$PREFILL_PORT" --decode "http://127.0.0.1:$DECODE_PORT" \
    --worker-startup-timeout-secs 1800 &
started+=($!)
wait -n
