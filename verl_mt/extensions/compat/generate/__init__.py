"""The slime rollout driver: generate functions. `verl_mt.rollout.custom_generate` is what they import."""
