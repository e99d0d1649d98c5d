"""Training from Python, without Hydra and without the command line: a config object, a trainer, a step at a time.

python examples/02_train_tiny.py [STEPS]
"""

import sys

from verl_mt.config.schema import Config
from verl_mt.trainer.build import build_trainer


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 10

    config = Config()
    config.data.train_files = config.data.val_files = "verl_mt.tiny.problems:rows"
    config.data.train_max_samples = 1024
    config.data.val_max_samples = 50
    config.data.train_batch_size = 8
    config.actor_rollout_ref.model.path = "verl_mt://tiny"
    config.actor_rollout_ref.rollout.name = "local"
    config.actor_rollout_ref.rollout.n = 8
    config.actor_rollout_ref.rollout.multi_turn.max_assistant_turns = 4
    config.actor_rollout_ref.rollout.tool_kwargs.tools_config_file = "tools_configs/calculator.yaml"
    config.actor_rollout_ref.actor.optim.lr = 3e-4
    config.trainer.total_training_steps = steps
    config.trainer.experiment_name = "from_python"
    config.trainer.resume_mode = "disable"
    config.trainer.logger = []

    trainer = build_trainer(config)
    try:
        print("before:", round(trainer.validate()["val/accuracy"], 3))
        for _ in range(steps):
            metrics = trainer.step()
            trainer.step_number += 1
            print(f"step {trainer.step_number}: reward {metrics['reward/mean']:.3f}, {metrics['time/step_s']:.1f} s")
        print("after:", round(trainer.validate()["val/accuracy"], 3))
    finally:
        trainer.close()


if __name__ == "__main__":
    main()
