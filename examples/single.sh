#!/usr/bin/env bash
# One vLLM instance whose cache outlives it: stop it, or kill it with -9, and start it again.
#
#     MODEL=Qwen/Qwen3-0.6B examples/single.sh            # further arguments go to vllm serve
set -euo pipefail

: "${MODEL:=Qwen/Qwen3-0.6B}" "${PORT:=8000}" "${POOL_SIZE:=8gb}" "${POOL:=default}"
export PYTHONHASHSEED=0

exec vllm serve "$MODEL" --port "$PORT" --prefix-caching-hash-algo sha256_cbor --kv-transfer-config '{
    "kv_connector": "PegaKVConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"pegaflow.pool_name": "'"$POOL"'", "pegaflow.pool_size": "'"$POOL_SIZE"'"}}' "$@"
