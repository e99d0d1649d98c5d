#!/usr/bin/env bash
# The boxes: a model of a million parameters learns to search, on a laptop. Starts a retrieval server of its own.
# Further overrides go behind it: recipes/search/run_boxes.sh trainer.seed=1
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
data="${DATA_DIR:-data/search_boxes}"

[ -f "$data/val.parquet" ] || python "$here/tiny/world.py" --out "$data"

log="$(mktemp)"
python -m verl_mt.retrieval --corpus "$data/corpus.jsonl" --port 0 > "$log" 2>&1 &
server=$!
trap 'kill "$server" 2> /dev/null || true; rm -f "$log"' EXIT
until grep -q "ready: " "$log"; do
  kill -0 "$server" 2> /dev/null || { cat "$log" >&2; exit 1; }
  sleep 0.2
done

SEARCH_URL="$(sed -n 's/.*ready: //p' "$log")" python -m verl_mt.trainer \
  --config-path "$here/config" --config-name search_boxes \
  data.train_files="$data/train.parquet" data.val_files="$data/val.parquet" \
  actor_rollout_ref.model.path="$here/tiny/checkpoint" \
  actor_rollout_ref.rollout.tool_kwargs.tools_config_file="$here/tiny/tools.yaml" "$@"
