#!/usr/bin/env bash
# Qwen2.5-3B learns to search with Search-R1's tags, through a custom generate function, GRPO. Needs GPUs, the SGLang
# engine, and a retrieval server:
#     python -m verl_mt.retrieval --corpus data/search/corpus.jsonl
# SEARCH_TRAIN and SEARCH_TEST name files of questions or hub data sets (see prepare.py).
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
data="${DATA_DIR:-data/search_tags}"

prepare() { # split, source
  [ -f "$data/$1.parquet" ] || python "$here/prepare.py" questions --source "$2" --split "$1" --style tags \
    --out "$data/$1.parquet"
}
prepare train "${SEARCH_TRAIN:-RUC-NLPIR/FlashRAG_datasets:nq}"
prepare test "${SEARCH_TEST:-RUC-NLPIR/FlashRAG_datasets:nq}"

exec python -m verl_mt.trainer --config-path "$here/config" --config-name search_generate_grpo \
  data.train_files="$data/train.parquet" data.val_files="$data/test.parquet" \
  actor_rollout_ref.rollout.custom_generate_function_path="$here/generate_with_search.py:generate" \
  reward.path="$here/generate_with_search.py:reward_func" "$@"
