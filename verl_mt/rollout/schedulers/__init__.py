"""The scheduler door's inside and the shipped schedulers; `verl_mt.rollout.scheduler` is what plug-ins import."""
