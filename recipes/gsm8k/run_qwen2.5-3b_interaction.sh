#!/usr/bin/env bash
# Qwen2.5-3B-Instruct on GSM8K with a simulated user, GRPO. Needs GPUs and the SGLang engine.
# Further overrides go behind it: recipes/gsm8k/run_qwen2.5-3b_interaction.sh trainer.total_epochs=1
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
data="${DATA_DIR:-data/gsm8k}"

for split in train test; do
  [ -f "$data/$split.parquet" ] || python "$here/prepare.py" --split "$split" --style interaction --out "$data/$split.parquet"
done

exec python -m verl_mt.trainer --config-path "$here/config" --config-name gsm8k_interaction_grpo \
  data.train_files="$data/train.parquet" data.val_files="$data/test.parquet" "$@"
