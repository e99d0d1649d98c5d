#!/usr/bin/env bash
# One SGLang server per GPU of this machine, for PLACEMENT=2nodes: start it on both machines, before the run, and leave it
# running; when one server ends, all of them do. The rest of each GPU's memory is for the training ranks.
# NUM_SERVERS (8), PORT of the first (30000), MODEL (Qwen/Qwen2.5-3B-Instruct), SGLANG_API_KEY if the servers are to ask
# for one. Further flags of SGLang go behind it.
set -euo pipefail
model="${MODEL:-Qwen/Qwen2.5-3B-Instruct}"
servers=()
trap 'kill "${servers[@]}"' EXIT

for ((gpu = 0; gpu < ${NUM_SERVERS:-8}; gpu++)); do
  # 2056: prompt and response of the recipe, and the few positions that SGLang keeps back.
  CUDA_VISIBLE_DEVICES=$gpu python -m sglang.launch_server --model-path "$model" \
    --host 0.0.0.0 --port $((${PORT:-30000} + gpu)) ${SGLANG_API_KEY:+--api-key "$SGLANG_API_KEY"} \
    --dtype bfloat16 --context-length 2056 --mem-fraction-static 0.4 "$@" &
  servers+=($!)
done
wait -n
