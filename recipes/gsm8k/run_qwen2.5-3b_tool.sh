#!/usr/bin/env bash
# Qwen2.5-3B-Instruct on GSM8K with the answer-checking tool, GRPO, sampled with SGLang. PLACEMENT says on what:
#   1gpu     one GPU of 80 GB (the default)
#   8gpus    one machine with 8 GPUs
#   2nodes   two machines with 8 GPUs each, on which Ray runs (README.md)
# Further overrides go behind it: PLACEMENT=8gpus recipes/gsm8k/run_qwen2.5-3b_tool.sh trainer.total_epochs=1
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
data="${DATA_DIR:-data/gsm8k}"
placement="${PLACEMENT:-1gpu}"

for split in train test; do
  [ -f "$data/$split.parquet" ] || python "$here/prepare.py" --split "$split" --style tool --out "$data/$split.parquet"
done

exec python -m verl_mt.trainer experiment="gsm8k_tool_$placement" \
  data.train_files="$data/train.parquet" data.val_files="$data/test.parquet" "$@"
