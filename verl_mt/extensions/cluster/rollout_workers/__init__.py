"""Rollout workers: processes that drive conversations, so that tools, parsing, tokenization and rewards leave the
trainer's event loop (`actor_rollout_ref.rollout.num_workers`, docs/scaling.md)."""
