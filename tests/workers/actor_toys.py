"""A small random policy, batches for it and an actor around it, for tests in one process and over several."""

from __future__ import annotations

import copy
import functools

import torch
from tensordict import TensorDict

from verl_mt.algorithms.advantages import grpo
from verl_mt.config.actor import ActorConfig, ModelConfig, OptimConfig
from verl_mt.data import batch as col
from verl_mt.data.trajectory import StopReason, Trajectory, TrajectoryRecord
from verl_mt.modeling.lora import add_adapters
from verl_mt.workers.actor import ActorWorker
from verl_mt.workers.sharding import ShardedPolicy

VOCAB = 37


@functools.cache
def tiny_policy(layers: int = 2):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    return model


def lora_policy(rank: int = 4, dtype: torch.dtype = torch.float32, targets: tuple[str, ...] = ("all-linear",)):
    """The same with low-rank adapters whose B is no longer 0."""
    model = copy.deepcopy(tiny_policy()).to(dtype)
    add_adapters(model, ModelConfig(lora_rank=rank, lora_target_modules=list(targets)), seed=0)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def record(tokens: list[int], prompt: int, sampled: list[int], lp: float = -3.0) -> TrajectoryRecord:
    """`sampled` = provenance of the tokens behind the prompt."""
    out = TrajectoryRecord()
    out.append_given(tokens[:prompt], kind="prompt", turn=0)
    for token, bit in zip(tokens[prompt:], sampled):
        if bit:
            out.append_sampled([token], [lp], [0], turn=1)
        else:
            out.append_given([token], kind="observation", turn=1)
    return out


def make_batch(rewards: list[list[float]], seed: int = 0, records: int = 1) -> TensorDict:
    """One group per inner list; prompts shared inside a group; ragged; an observation inside every response."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(1, VOCAB, (count,), generator=generator).tolist()

    trajectories = []
    for group, values in enumerate(rewards):
        prompt = tokens(3 + group)
        for sample, reward in enumerate(values):
            made = []
            for _ in range(records if sample == 0 else 1):
                size = int(torch.randint(2, 8, (1,), generator=generator))
                bits = [1] * size + [0, 0] + [1] * (sample % 3)
                made.append(record(prompt + tokens(len(bits)), len(prompt), bits))
            name = f"g{group}s{sample}"
            trajectories.append(
                Trajectory(
                    name, f"g{group}", f"g{group}", name, records=made, reward=reward, stop_reason=StopReason.FINISHED
                )
            )
    batch = col.build_batch(trajectories, pad_token_id=0)
    assert batch is not None
    fill_advantages(batch)
    return batch


def fill_advantages(batch: TensorDict) -> None:
    batch[col.ADVANTAGES] = col.expand_to_tokens(batch, grpo(*col.trajectory_rewards(batch)))


REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.0, 1.0], [0.4, 0.0, 1.0]]


def worker(
    policy, *, total_steps: int = 100, lr: float = 1e-2, optim: dict | None = None, temperature: float = 1.0, **kwargs
) -> ActorWorker:
    """An actor over a copy of the policy, or over a sharded one."""
    config = ActorConfig(optim=OptimConfig(lr=lr, **({"lr_warmup_steps": 0} | (optim or {}))), **kwargs)
    module = policy if isinstance(policy, ShardedPolicy) else copy.deepcopy(policy)
    schedule = {"total_steps": total_steps, "train_batch_size": 3}
    return ActorWorker(module, config, temperature=temperature, norm_constant=8.0, **schedule)


def hand_made(in_loss: list[list[int]], sampled: list[list[int]] | None = None, **given) -> TensorDict:
    """Rows with the columns that workers read; one trajectory, prompt and group each if not `given`."""
    mask = torch.tensor(in_loss).bool()
    rows = torch.arange(len(mask))
    columns = {
        col.LOSS_MASK: mask,
        col.SAMPLED: mask.clone() if sampled is None else torch.tensor(sampled).bool(),
        col.ATTENTION_MASK: torch.ones_like(mask),
        col.HAS_LOG_PROBS: torch.ones(len(mask), dtype=torch.bool),
        col.ROLLOUT_LOG_PROBS: torch.zeros(mask.shape, dtype=torch.float64),
        **dict.fromkeys((col.TRAJECTORY_INDEX, col.PROMPT_INDEX, col.GROUP_INDEX), rows),
    }
    columns |= {name: torch.as_tensor(values) for name, values in given.items()}
    return TensorDict(columns, batch_size=[len(mask)])
