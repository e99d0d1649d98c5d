#!/usr/bin/env bash
# Two families of reasoning_gym with the shipped model of 0.9 M parameters and a calculator: a cold start of some
# supervised steps, then GRPO, three seeds. Needs no GPU and no download but `pip install reasoning-gym`.
# Overrides of the GRPO runs go behind it.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
out="${OUT:-runs/public_tasks}"
chain_sum="{task: chain_sum, max_terms: 3, max_digits: 2, answer_pattern: '#### *(\\S+)'}"
products="{task: products, max_digits: 2, answer_pattern: '#### *(\\S+)'}"

common=(
  "data.system='Answer as #### N.'"
  actor_rollout_ref.rollout.response_length=128
  actor_rollout_ref.rollout.multi_turn.max_assistant_turns=4
  actor_rollout_ref.rollout.tool_kwargs.tools_config_file=tools_configs/calculator.yaml
)

for task in chain_sum products; do
  [ -d "$out/cold_$task/hf" ] && continue
  python "$here/demonstrations.py" --family "${!task}" --out "$out/demos_$task.jsonl"
  python -m verl_mt.sft experiment=public_tasks --data "$out/demos_$task.jsonl" --out "$out/cold_$task" \
    --stop-at-accuracy 0.2 actor_rollout_ref.model.path=verl_mt://tiny data.train_batch_size=32 \
    data.val_max_samples=100 actor_rollout_ref.actor.optim.lr=1e-3 trainer.test_freq=8 trainer.save_freq=8 \
    trainer.total_training_steps=40 "actor_rollout_ref.rollout.environment.config=${!task}" "${common[@]}"
done

exec python "$here/measure.py" --model "$out/cold_{task}/hf" --family "$chain_sum" --family "$products" \
  --out "$out" --steps "${STEPS:-24}" --held-out "${HELD_OUT:-200}" \
  "${common[@]}" actor_rollout_ref.rollout.val_kwargs.greedy_too=false actor_rollout_ref.actor.optim.lr=3e-4 "$@"
