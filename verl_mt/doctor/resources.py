"""The model's own limits; disk, memory and time.

How much memory and time a step takes is told from sizes alone, right within a factor of a few, which is what a plan
needs. `recipes/scaling` fits such a formula to finished runs of one machine; here there is no run yet, so the machine's
speed is measured with two matrix products, and overheads are round numbers.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from verl_mt import engines
from verl_mt.doctor.findings import Finding, Subject, error, ok, warning
from verl_mt.modeling.head_log_probs import LOGITS_AT_ONCE
from verl_mt.modeling.load import meta_causal_lm
from verl_mt.trainer import build_rollout
from verl_mt.trainer.run_directory import wanted_directory

GB = 1e9
_ACTIVATIONS_PER_LAYER = 16
"""Numbers of a layer that the backward pass needs, per token and unit of width."""
_LAYER_OVERHEAD_S = {"cpu": 1.5e-4, "cuda": 2.5e-5}
"""Of one layer in one forward pass: kernels, Python."""
_ASSUMED_GPU_FLOPS = 2e14
"""Where the workers' GPUs are not here."""
_EFFICIENCY = {"cpu": 1.0, "cuda": 0.4}
"""Of a forward and backward pass, beside the matrix product that was measured."""
_ROW_BYTES_PER_TOKEN = 60
"""Of a rollout row: id, masks, log-probs, version, advantage as JSON."""


def model(subject: Subject) -> Iterator[Finding]:
    """The model is there, has the shape that is needed, and its tokens are the tokenizer's."""
    wanted = subject.config.actor_rollout_ref.model
    subject.module = meta_causal_lm(
        wanted.path,
        revision=wanted.revision,
        dtype=wanted.dtype,
        attn_implementation=wanted.attn_implementation,
        trust_remote_code=wanted.trust_remote_code,
    )
    config = subject.module.config.get_text_config()
    size = sum(p.numel() for p in subject.module.parameters())
    yield ok(f"{type(subject.module).__name__}, {size / 1e6:,.1f}M parameters in {wanted.dtype}")
    longest, positions = subject.max_model_len, getattr(config, "max_position_embeddings", None)
    if positions is not None and longest > positions:
        yield error(
            f"sequences may have {longest} tokens (prompt + response), and the model was made for {positions}",
            "lower data.max_prompt_length or actor_rollout_ref.rollout.response_length, or set rollout.max_model_len",
        )
    if wanted.lora_rank:
        names = {name.rpartition(".")[2] for name, _ in subject.module.named_modules()}
        absent = [n for n in wanted.lora_target_modules if n != "all-linear" and n.rpartition(".")[2] not in names]
        if absent:
            yield error(
                f"actor_rollout_ref.model.lora_target_modules: the model has no {', '.join(absent)}",
                "use all-linear, or names of its linear layers",
            )


def vocabulary(subject: Subject) -> Iterator[Finding]:
    """No token without an embedding."""
    rows = build_rollout.check_vocabulary(subject.config, subject.known_chat)
    tokens = len(subject.known_chat.tokenizer)
    yield ok(f"{tokens} tokens, {rows} embeddings")


def disk(subject: Subject) -> Iterator[Finding]:
    """Checkpoints, export and rollout rows fit on the disk that they are written to."""
    trainer, demand = subject.config.trainer, Demand.of(subject)
    steps = subject.total_steps
    saves = (steps // trainer.save_freq if trainer.save_freq > 0 else 0) + 1
    kept = saves if trainer.max_actor_ckpt_to_keep is None else min(saves, trainer.max_actor_ckpt_to_keep + 1)
    checkpoints = (kept + 1) * demand.checkpoint_bytes  # one more while it is written
    export = demand.weight_bytes if trainer.export_at_end else 0
    tokens = subject.config.data.train_batch_size * subject.rollout.n * subject.max_model_len / 2
    rows = steps * tokens * _ROW_BYTES_PER_TOKEN if trainer.rollout_rows else 0
    folder = wanted_directory(trainer).absolute()
    while not folder.exists():
        folder = folder.parent
    needed, free = checkpoints + export + rows, shutil.disk_usage(folder).free
    words = (
        f"about {needed / GB:,.1f} GB: {kept} checkpoint(s) of {demand.checkpoint_bytes / GB:,.2f} GB"
        f"{f', up to {rows / GB:,.1f} GB of rollout rows' if rows else ''}; {free / GB:,.0f} GB free"
    )
    if checkpoints + export > free:
        yield error(words, "lower trainer.max_actor_ckpt_to_keep, or set trainer.default_local_dir to a larger disk")
    elif needed > free:
        yield warning(words, "set trainer.rollout_rows=False, or trainer.default_local_dir to a larger disk")
    else:
        yield ok(words)


def memory(subject: Subject) -> Iterator[Finding]:
    """Weights, gradients, optimizer and activations of one rank, against what its device has."""
    demand = Demand.of(subject)
    device = device_memory(subject)
    needed = demand.peak_bytes
    words = (
        f"about {needed / GB:,.1f} GB per rank (weights and optimizer {demand.state_bytes / GB:,.1f}, activations "
        f"{demand.activation_bytes / GB:,.1f}, cache of the engine {demand.cache_bytes / GB:,.1f})"
    )
    if device is None:
        yield ok(f"{words}; the workers' devices are not here to compare with")
    elif needed > device:
        yield error(
            f"{words}; there are {device / GB:,.1f} GB",
            "lower actor.ppo_max_token_len, set model.enable_gradient_checkpointing=True or model.lora_rank, or use "
            "more ranks (trainer.n_workers_per_node)",
        )
    elif needed > 0.9 * device:
        yield warning(f"{words} of {device / GB:,.1f} GB", "lower actor.ppo_max_token_len to be safe")
    else:
        yield ok(f"{words} of {device / GB:,.1f} GB")


def step_time(subject: Subject) -> Iterator[Finding]:
    """Seconds of one step, from the work and the speed of this machine."""
    found = Seconds.of(subject)
    sampled = f" with {found.engines} engines" if found.engines > 1 else ""
    yield ok(
        f"about {found.step_s:,.1f} s a step on {found.device}: rollout{sampled} {found.rollout_s:,.1f}, update "
        f"{found.update_s:,.1f}{f', reference {found.ref_s:,.1f}' if found.ref_s else ''}; all "
        f"{subject.total_steps} steps {found.step_s * subject.total_steps / 3600:,.2f} h (tools aside, if responses "
        "fill half of their length)"
    )


@dataclass(frozen=True)
class Demand:
    """Bytes of one rank."""

    weight_bytes: float
    """Of the policy, whole."""
    checkpoint_bytes: float
    state_bytes: float
    """Weights, gradients, optimizer, reference policy, critic: what a rank holds while it trains."""
    activation_bytes: float
    cache_bytes: float
    """Keys and values of the local engine."""

    @property
    def peak_bytes(self) -> float:
        """Sampling and training are one after the other; the local engine keeps its cache."""
        return self.state_bytes + self.cache_bytes + self.activation_bytes

    @classmethod
    def of(cls, subject: Subject) -> Demand:
        config = subject.config.actor_rollout_ref
        actor, model = config.actor, config.model
        size = sum(p.numel() for p in subject.module.parameters())
        width = 2 if model.dtype == "bfloat16" else 4
        trained = size if not model.lora_rank else _adapter_parameters(subject)
        optimizer = 8 + (4 if width == 2 else 0)  # two moments; the exact weights where they are rounded
        own = trained * (width + optimizer) + size * width
        needs_ref = actor.use_kl_loss or subject.config.algorithm.use_kl_in_reward
        ref = size * width if needs_ref and not model.lora_rank and not config.ref.offload else 0
        has_critic = subject.config.algorithm.adv_estimator == "gae" and not subject.config.critic.share_trunk
        critic = size * (2 * width + optimizer) if has_critic else 0
        return cls(
            weight_bytes=size * width,
            checkpoint_bytes=size * width + trained * optimizer + critic,
            state_bytes=(own + ref + critic) / subject.num_ranks,
            activation_bytes=_activations(subject, width),
            cache_bytes=_cache(subject, width),
        )


@dataclass(frozen=True)
class Seconds:
    """Of one step."""

    device: str
    engines: int
    """That sample at the same time."""
    rollout_s: float
    update_s: float
    ref_s: float

    @property
    def step_s(self) -> float:
        return self.rollout_s + self.update_s + self.ref_s

    @classmethod
    def of(cls, subject: Subject) -> Seconds:
        """The step's work over this machine's speed; over a round number where the devices are elsewhere."""
        config, rollout = subject.config, subject.rollout
        kind = "cuda" if torch.cuda.is_available() and config.trainer.device != "cpu" else "cpu"
        elsewhere = kind == "cpu" and (config.trainer.device == "cuda" or not subject.samples_from_policy)
        flops = _ASSUMED_GPU_FLOPS if elsewhere else _speed(kind, config.actor_rollout_ref.model.dtype)
        kind = "cuda" if elsewhere else kind
        sizes = subject.module.config.get_text_config()
        size = sum(p.numel() for p in subject.module.parameters())
        layers = sizes.num_hidden_layers
        trajectories = config.data.train_batch_size * rollout.n
        sampled = rollout.response_length / 2
        prompt = sum(len(p.ids) for p in subject.prompts) / max(1, len(subject.prompts))
        forward = 2.0 * size + 4.0 * layers * sizes.hidden_size * (prompt + sampled / 2)
        replicas = num_engines(subject)
        at_once = min(trajectories, rollout.max_concurrent or trajectories) / replicas
        live = min(max(1.0, at_once), rollout.max_num_seqs)
        waves = trajectories / replicas / live
        overhead = layers * _LAYER_OVERHEAD_S[kind]
        # A sampled token's products are narrow: a few times slower than wide ones until a few hundred are together.
        narrow = max(1.0, 4.0 - live / 100)
        decode = waves * rollout.response_length * (overhead + live * forward * narrow / flops / 2)
        prefill = config.data.train_batch_size * prompt * forward / flops
        prompts = (
            config.data.train_batch_size if subject.num_ranks == 1 else trajectories
        )  # one rank computes them once
        tokens = trajectories * sampled + prompts * prompt
        epochs = config.actor_rollout_ref.actor.ppo_epochs
        passes = max(1.0, tokens / config.actor_rollout_ref.actor.ppo_max_token_len)
        compute = tokens * forward / flops / _EFFICIENCY[kind] / subject.num_ranks
        needs_ref = config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward
        return cls(
            device="a GPU of 200 TFLOP/s" if elsewhere else kind,
            engines=replicas,
            rollout_s=decode + prefill / replicas,
            update_s=epochs * (3 * compute + 3 * passes * overhead / subject.num_ranks),
            ref_s=compute if needs_ref else 0.0,
        )


def num_engines(subject: Subject) -> int:
    """Replicas that sample: beside the ranks, or servers; 1 where the policy's own module does."""
    rollout = subject.rollout
    servers = len(rollout.servers) or rollout.launch_servers
    if servers or subject.config.trainer.placement != "ray" or not engines.lives_beside_ranks(rollout.name):
        return max(1, servers)
    machines, on_each = rollout.devices_apart or (1, subject.num_ranks)
    return max(1, machines * on_each // rollout.tensor_model_parallel_size)


def device_memory(subject: Subject) -> float | None:
    """Bytes that a rank may use; None where the ranks are elsewhere."""
    trainer = subject.config.trainer
    if torch.cuda.is_available() and trainer.device != "cpu":
        return float(torch.cuda.get_device_properties(0).total_memory)
    if trainer.device == "cuda" or not subject.samples_from_policy:
        return None
    on_here = trainer.n_workers_per_node if trainer.placement == "ray" else 1
    return available_memory() / on_here


def available_memory() -> float:
    """Bytes of main memory that are free."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"))


def _activations(subject: Subject, width: int) -> float:
    config, sizes = subject.config.actor_rollout_ref, subject.module.config.get_text_config()
    actor = config.actor
    if actor.ppo_micro_batch_size is not None:
        tokens = actor.ppo_micro_batch_size * subject.max_model_len
    else:
        tokens = min(
            actor.ppo_max_token_len, subject.config.data.train_batch_size * config.rollout.n * subject.max_model_len
        )
    layer = tokens * sizes.hidden_size * _ACTIVATIONS_PER_LAYER * width
    kept = tokens * sizes.hidden_size * width * sizes.num_hidden_layers + layer
    whole = layer * sizes.num_hidden_layers
    logits = 3 * 4 * min(tokens * sizes.vocab_size, LOGITS_AT_ONCE)
    return (kept if config.model.enable_gradient_checkpointing else whole) + logits


def _cache(subject: Subject, width: int) -> float:
    rollout, sizes = subject.rollout, subject.module.config.get_text_config()
    if not subject.samples_from_policy:
        return 0.0
    heads = getattr(sizes, "num_key_value_heads", None) or sizes.num_attention_heads
    head = getattr(sizes, "head_dim", None) or sizes.hidden_size // sizes.num_attention_heads
    rows = min(rollout.max_num_seqs, subject.config.data.train_batch_size * rollout.n)
    return 2.0 * sizes.num_hidden_layers * heads * head * width * rows * subject.max_model_len


def _adapter_parameters(subject: Subject) -> int:
    rank = subject.config.actor_rollout_ref.model.lora_rank
    linear = (m for m in subject.module.modules() if isinstance(m, torch.nn.Linear))
    return sum(rank * (m.in_features + m.out_features) for m in linear)


def _speed(kind: str, dtype: str) -> float:
    """Multiplications and additions per second of a product like the model's."""
    side = 4096 if kind == "cuda" else 256
    a = torch.randn(side, side, device=kind, dtype=getattr(torch, dtype))
    rates = []
    for _ in range(3):
        count, begun = 0, time.perf_counter()
        while time.perf_counter() - begun < 0.02:
            for _ in range(4):
                torch.mm(a, a)
            if kind == "cuda":
                torch.cuda.synchronize()
            count += 4
        rates.append(2.0 * side**3 * count / (time.perf_counter() - begun))
    return sorted(rates)[1]
