"""The slime door: generate functions. `verl_mt.rollout.custom_generate` is what they import."""
