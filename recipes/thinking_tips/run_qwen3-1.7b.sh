#!/usr/bin/env bash
# Qwen3-1.7B on GSM8K with tips for wrong answers, GRPO, sampled with SGLang. MODE says where turns are sampled:
#   colocate   by an engine beside the actor (the default)
#   server     by a server of its own, on the next GPU
# The same scheduler gives the same records in both. Overrides go behind it.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
data="${DATA_DIR:-data/gsm8k_plain}"

for split in train test; do
  [ -f "$data/$split.parquet" ] ||
    python "$here/../gsm8k/prepare.py" --split "$split" --style interaction --out "$data/$split.parquet"
done

exec python -m verl_mt.trainer experiment="thinking_tips_${MODE:-colocate}" \
  data.train_files="$data/train.parquet" data.val_files="$data/test.parquet" "$@"
