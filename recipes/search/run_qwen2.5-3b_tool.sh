#!/usr/bin/env bash
# Qwen2.5-3B-Instruct learns to search with a tool, GRPO. Needs GPUs, the SGLang engine, and a retrieval server:
#     python -m verl_mt.retrieval --corpus data/search/corpus.jsonl
# SEARCH_TRAIN and SEARCH_TEST name files of questions or hub data sets (see prepare.py).
# Further overrides go behind it: recipes/search/run_qwen2.5-3b_tool.sh trainer.total_epochs=2
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
data="${DATA_DIR:-data/search}"

prepare() { # split, source
  [ -f "$data/$1.parquet" ] || python "$here/prepare.py" questions --source "$2" --split "$1" --style tool \
    --out "$data/$1.parquet"
}
prepare train "${SEARCH_TRAIN:-RUC-NLPIR/FlashRAG_datasets:nq}"
prepare test "${SEARCH_TEST:-RUC-NLPIR/FlashRAG_datasets:nq}"

exec python -m verl_mt.trainer experiment=search_tool_grpo \
  data.train_files="$data/train.parquet" data.val_files="$data/test.parquet" "$@"
