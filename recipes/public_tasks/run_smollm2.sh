#!/usr/bin/env bash
# Two families of reasoning_gym with SmolLM2-135M-Instruct, without a cold start: three seeds each, on two cores with AMX.
# `--library trl` trains with TRL. Options and overrides of measure.py go behind the script.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
number="answer_pattern: '(-?\\d+)'"

exec python "$here/measure.py" --model "${MODEL:-models/smollm2-135m}" --out "${OUT:-runs/public_tasks_smollm2}" \
  --steps "${STEPS:-20}" --held-out "${HELD_OUT:-200}" \
  --family "{task: chain_sum, min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 2, $number}" \
  --family "{task: products, min_digits: 1, max_digits: 2, $number}" \
  "data.system='Answer with one number, nothing else. Examples: 2 + 3 = 5. 2 * 3 = 6.'" \
  data.train_batch_size=8 \
  actor_rollout_ref.model.dtype=bfloat16 \
  actor_rollout_ref.actor.optim.lr=2e-5 \
  actor_rollout_ref.actor.optim.lr_warmup_steps=0 \
  actor_rollout_ref.rollout.temperature=0.5 \
  actor_rollout_ref.rollout.response_length=12 \
  actor_rollout_ref.rollout.val_kwargs.temperature=0 \
  actor_rollout_ref.rollout.val_kwargs.greedy_too=false \
  trainer.save_freq=-1 trainer.num_threads=2 "$@"
