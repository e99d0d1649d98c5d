"""What verl does where a command says nothing and verl_mt does something else.

`docs/migrating_from_verl.md` shows the table; `python -m verl_mt.migrate` writes it out, so that a command that is
carried over does what it did.
"""

from __future__ import annotations

from typing import Any

from verl_mt.config.spelling import ACTOR, ROLLOUT

VERL_DEFAULTS: dict[str, Any] = {
    "algorithm.adv_estimator": "gae",
    "data.filter_overlong_prompts": False,
    "data.train_batch_size": 1024,
    ACTOR + "ppo_mini_batch_size": 256,
    ROLLOUT + "name": "vllm",
    ROLLOUT + "n": 1,
    ROLLOUT + "val_kwargs.temperature": 0,
    "trainer.logger": ["console", "wandb"],
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.max_actor_ckpt_to_keep": None,
    "trainer.n_workers_per_node": 8,
}
