"""The scheduler's rollout driver and the shipped schedulers. Plug-ins import `verl_mt.rollout.scheduler`."""
