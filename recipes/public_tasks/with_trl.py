"""TRL's GRPOTrainer on the questions of `measure.py`: `--library trl` there. Without tools, one answer per question.

Training questions come from the same seeds as with verl_mt. The reward, the samples per prompt, the learning rate, its
warm-up, the weight decay, the temperature and the type of the passes are those of the configuration. TRL's other
settings are its own. verl_mt validates the saved model.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset

from verl_mt.config.schema import Config
from verl_mt.config_paths import resolve_model_path
from verl_mt.environments.base import Done
from verl_mt.environments.seeds import rows
from verl_mt.errors import ConfigError
from verl_mt.extensions.environments.reasoning import ReasoningGym

FORWARD_ROWS = 16
"""Samples of one forward pass."""


def train(config: Config, out: Path) -> tuple[Path, set[str]]:
    """Train with TRL what the configuration describes.

    Args:
        config: `experiment=public_tasks` with its overrides.
        out: a folder for TRL.

    Returns:
        The folder of the trained model, and the questions that it was trained on.

    Raises:
        ConfigError: the configuration has tools, or its batch is no multiple of `FORWARD_ROWS`.
    """
    rollout, optim, data = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor.optim, config.data
    if rollout.tool_kwargs.tools_config_file is not None:
        raise ConfigError("--library trl trains without tools. Leave out tool_kwargs.tools_config_file")
    samples = data.train_batch_size * rollout.n
    if samples % FORWARD_ROWS:
        raise ConfigError(f"train_batch_size x rollout.n is {samples}: choose a multiple of {FORWARD_ROWS} for TRL")
    settings = dict(rollout.environment.config)

    def score(text: str, seed: int) -> float:
        task = ReasoningGym(**settings)
        task.reset(seed=seed)
        with contextlib.suppress(Done):
            task.reply(text)
        return task.score()

    def reward(completions: list[Any], seed: list[int], **kwargs: Any) -> list[float]:
        return [score(completion[0]["content"], number) for completion, number in zip(completions, seed)]

    def prompt(question: str) -> list[dict[str, str]]:
        system = [{"role": "system", "content": data.system}] if data.system else []
        return [*system, {"role": "user", "content": question}]

    drawn = rows(num_rows=data.train_batch_size * config.trainer.total_training_steps, seed=data.seed, split="train")
    questions = [ReasoningGym(**settings).reset(seed=row["seed"]) for row in drawn]
    columns = [{"prompt": prompt(question), "seed": row["seed"]} for question, row in zip(questions, drawn)]
    if config.trainer.num_threads is not None:
        torch.set_num_threads(config.trainer.num_threads)
    trainer = trl.GRPOTrainer(
        model=resolve_model_path(config.actor_rollout_ref.model.path),
        reward_funcs=reward,
        train_dataset=Dataset.from_list(columns),
        args=trl.GRPOConfig(
            output_dir=str(out),
            seed=config.trainer.seed,
            max_steps=config.trainer.total_training_steps,
            per_device_train_batch_size=FORWARD_ROWS,
            gradient_accumulation_steps=samples // FORWARD_ROWS,
            num_generations=rollout.n,
            max_completion_length=rollout.response_length,
            learning_rate=optim.lr,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=optim.lr_warmup_steps,
            weight_decay=optim.weight_decay,
            temperature=rollout.temperature,
            beta=0.0,
            shuffle_dataset=False,
            gradient_checkpointing=False,
            bf16=config.actor_rollout_ref.model.dtype == "bfloat16",
            use_cpu=not torch.cuda.is_available(),
            model_init_kwargs={"dtype": "float32"},
            report_to="none",
            save_strategy="no",
        ),
    )
    trainer.train()
    trainer.save_model(str(out / "model"))
    trainer.processing_class.save_pretrained(str(out / "model"))
    return out / "model", set(questions)
