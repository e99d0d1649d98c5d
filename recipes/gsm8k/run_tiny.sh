#!/usr/bin/env bash
# Three steps over real GSM8K rows with the shipped 4 MB model, on a laptop: rows -> rollouts -> reward -> new weights.
# GSM8K_TRAIN and GSM8K_TEST may name JSONL files (`question`, `answer`); else the rows come from the hub.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
data="${DATA_DIR:-data/gsm8k_tiny}"

prepare() { # split, source
  [ -f "$data/$1.parquet" ] || python "$here/prepare.py" --source "$2" --split "$1" --style interaction \
    --system "Answer as #### N." --limit 256 --out "$data/$1.parquet"
}
prepare train "${GSM8K_TRAIN:-openai/gsm8k}"
prepare test "${GSM8K_TEST:-openai/gsm8k}"

exec python -m verl_mt.trainer experiment=gsm8k_tiny \
  data.train_files="$data/train.parquet" data.val_files="$data/test.parquet" "$@"
