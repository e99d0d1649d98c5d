"""The model's own limits; disk, memory and time.

How much memory and time a step takes is told from sizes alone, right within a factor of a few, which is what a plan
needs. The formula of a step's time (`step_time.py`) can be fitted to finished runs of one machine (`recipes/scaling`);
here there is no run yet, so the machine's speed is measured with a matrix product and a copy, and overheads are round
numbers.
"""

from __future__ import annotations

import math
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from verl_mt import engines
from verl_mt.extensions.inspection.doctor.findings import Finding, Subject, error, ok, warning
from verl_mt.extensions.inspection.doctor.step_time import Machine, Model, StepTime, Work, predict
from verl_mt.modeling.head_log_probs import LOGITS_AT_ONCE
from verl_mt.modeling.load import meta_causal_lm, source_of
from verl_mt.trainer import build_rollout
from verl_mt.trainer.run_directory import wanted_directory

GB = 1e9
_PER_WIDTH, _PER_INTERMEDIATE = 8, 4
"""Numbers of a layer that the backward pass needs per token, of its width (norms, queries, keys, values, attention) and
of its MLP's (gate, up, activation, product)."""
_CONTEXT_BYTES = {"cpu": 0.0, "cuda": 1e9}
"""Of a process on a device: kernels, workspaces, NCCL's buffers."""
_ENGINE_BYTES = 3e9
"""That SGLang does not give back while a colocated engine sleeps: its context, CUDA graphs and workspaces."""
_LAYER_OVERHEAD_S = {"cpu": 1.5e-4, "cuda": 2.5e-5}
"""Of one layer in one forward pass: kernels, Python."""
_TURN_OVERHEAD_S = 2e-3
"""Parsing a turn, rendering what comes after it."""
_ROW_SECONDS_PER_TOKEN = 1.5e-5
"""Building the batch, writing the rollout row."""
_ASSUMED_GPU = (2e14, 2e12)
"""Operations and bytes per second where the workers' GPUs are not here."""
_EFFICIENCY = {"cpu": 1.0, "cuda": 0.4}
"""Of a forward and backward pass, beside the matrix product that was measured."""
_WORTH_SAYING = 0.75
"""A step in float32 takes less than this share of the time."""
_NETWORK = {"machine": 1e11, "machines": 1e10}
"""Bytes per second between the GPUs of one machine, and between machines."""
_ROW_BYTES_PER_TOKEN = 10
"""Of a rollout row: id, masks, log-probs, version, advantage (benchmarks/rollout_rows.py)."""


def model(subject: Subject) -> Iterator[Finding]:
    """The model is there, has the shape that is needed, and its tokens are the tokenizer's."""
    wanted = subject.config.actor_rollout_ref.model
    subject.module = meta_causal_lm(**source_of(wanted))
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
    rows = 0 if trainer.rollout_rows == "off" else steps * tokens * _ROW_BYTES_PER_TOKEN
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
        yield warning(words, "set trainer.rollout_rows=off, or trainer.default_local_dir to a larger disk")
    else:
        yield ok(words)


def memory(subject: Subject) -> Iterator[Finding]:
    """Weights, gradients, optimizer and activations of one rank, against what its device has."""
    demand = Demand.of(subject)
    device = device_memory(subject)
    needed = demand.peak_bytes
    parts = {
        "weights and optimizer": demand.state_bytes,
        "activations": demand.activation_bytes,
        "gathered weights": demand.pass_bytes,
        "cache of the engine": demand.cache_bytes,
        "contexts and the engine's rest": demand.other_bytes,
    }
    told = ", ".join(f"{name} {size / GB:,.1f}" for name, size in parts.items() if size or name == "activations")
    host = f"; {demand.host_bytes / GB:,.1f} GB of main memory" if demand.host_bytes else ""
    words = f"about {needed / GB:,.1f} GB per rank ({told}{host})"
    if device is None:
        yield ok(f"{words}. The workers' devices are not here to compare with")
    elif needed > device:
        yield error(
            f"{words}. There are {device / GB:,.1f} GB",
            "lower actor.ppo_max_token_len, set model.enable_gradient_checkpointing=True, "
            "actor.optimizer_offload=True or model.lora_rank, or use more ranks (trainer.n_workers_per_node)",
        )
    elif needed > 0.9 * device:
        yield warning(f"{words} of {device / GB:,.1f} GB", "lower actor.ppo_max_token_len to be safe")
    else:
        yield ok(f"{words} of {device / GB:,.1f} GB")


def step_time(subject: Subject) -> Iterator[Finding]:
    """Seconds of one step, from the work and the speed of this machine; and whether it is faster in float32."""
    dtype = subject.config.actor_rollout_ref.model.dtype
    device, found = _predicted(subject, dtype)
    parts = {"weights": found.weights_s, "reference": found.ref_s, "the rest": found.rest_s}
    told = "".join(f", {name} {seconds:,.1f}" for name, seconds in parts.items() if seconds >= 0.05)
    ahead = subject.config.trainer.steps_ahead
    seconds = found.ahead_s(ahead, one_device=subject.rollout.placed == "colocated")
    beside = f", of which {found.step_s - seconds:,.1f} beside each other (max_staleness={ahead})" if ahead else ""
    run_s = seconds * subject.total_steps
    length = f"{run_s / 60:,.1f} min" if run_s < 3600 else f"{run_s / 3600:,.2f} h"
    yield ok(
        f"about {seconds:,.1f} s a step on {device}: rollout{sampling_of(subject)} {found.rollout_s:,.1f}, update "
        f"{found.update_s:,.1f}{told}{beside}. All {subject.total_steps} steps "
        f"{length} (tools aside, if responses fill half of their length)"
    )
    # A GPU has bfloat16 for its speed, and so has a CPU with AMX; others compute in it and are slower.
    if device == "cpu" and dtype == "bfloat16":
        exact = _predicted(subject, "float32")[1].step_s
        if exact < _WORTH_SAYING * found.step_s:
            yield warning(
                f"this CPU is faster in float32: about {exact:,.1f} s a step, {found.step_s / exact:.1f} times as fast",
                "set actor_rollout_ref.model.dtype=float32, which takes as much memory but for activations and cache",
            )


def _predicted(subject: Subject, dtype: str) -> tuple[str, StepTime]:
    """(the device, the times) of a step computed in a precision."""
    device, machine = planned_machine(subject, dtype)
    sizes = {name: tuple(p.shape) for name, p in subject.module.named_parameters()}
    width = 2 if dtype == "bfloat16" else 4
    model = Model.of(subject.module.config.get_text_config(), sizes, width)
    return device, predict(model, planned_work(subject), machine)


def sampling_of(subject: Subject) -> str:
    """What samples, in brackets; nothing where all is on one device."""
    number, rollout = num_engines(subject), subject.rollout
    devices = number * rollout.tensor_model_parallel_size
    if rollout.servers:
        return f" ({number} {'servers' if number > 1 else 'server'})"
    if devices == subject.num_ranks == 1:
        return ""
    return f" ({number} {'engines' if number > 1 else 'engine'} on {devices} {'devices' if devices > 1 else 'device'})"


def planned_work(subject: Subject) -> Work:
    """What a step of the run will do, if responses fill half of their length and no tool is waited for."""
    config, rollout, actor = subject.config, subject.rollout, subject.config.actor_rollout_ref.actor
    batch = config.data.train_batch_size
    replicas = num_engines(subject)
    at_once = rollout.max_num_seqs * replicas
    # One process copies to each engine of its own machine; ranks and broadcasts give each byte once.
    copied = bool(rollout.launch_servers) and config.trainer.placement != "ray"
    return Work(
        trajectories=batch * rollout.n,
        prompt_tokens=sum(len(p.ids) for p in subject.prompts) / max(1, len(subject.prompts)),
        sampled_tokens=rollout.response_length / 2,
        longest_tokens=rollout.response_length,
        concurrency=min(at_once, rollout.max_concurrent or at_once, batch * rollout.n),
        samples_per_prompt=rollout.n,
        updates=actor.ppo_epochs * math.ceil(batch / (actor.ppo_mini_batch_size or batch)),
        epochs=actor.ppo_epochs,
        max_tokens_per_pass=actor.ppo_max_token_len,
        packed=config.actor_rollout_ref.model.use_remove_padding,
        ref=actor.use_kl_loss or config.algorithm.use_kl_in_reward,
        ranks=subject.num_ranks,
        engines=replicas,
        sync_copies=replicas if copied else 1,
    )


def planned_machine(subject: Subject, dtype: str) -> tuple[str, Machine]:
    """(what it is called, its rates): of this one, or of a round one where the devices are elsewhere."""
    config, rollout = subject.config, subject.rollout
    kind = "cuda" if torch.cuda.is_available() and config.trainer.device != "cpu" else "cpu"
    elsewhere = kind == "cpu" and (config.trainer.device == "cuda" or not subject.samples_from_policy)
    flops, bandwidth = _ASSUMED_GPU if elsewhere else _speed(kind, dtype)
    name = f"a GPU of {flops / 1e12:.0f} TFLOP/s" if elsewhere else kind
    kind = "cuda" if elsewhere else kind
    live = rollout.max_num_seqs
    if rollout.max_concurrent:
        live = min(live, rollout.max_concurrent / num_engines(subject))
    live = min(live, config.data.train_batch_size * rollout.n / num_engines(subject))
    # On a CPU the narrow products of sampling are a few times slower than wide ones until a few hundred are together.
    narrow = max(1.0, 4.0 - live / 100) if kind == "cpu" else 1.0
    network = _NETWORK["machines" if config.trainer.nnodes > 1 or rollout.placed != "colocated" else "machine"]
    return name, Machine(
        engine_flops=flops / 2 / narrow,
        memory_bandwidth=bandwidth,
        layer_overhead_s=_LAYER_OVERHEAD_S[kind],
        turn_overhead_s=_TURN_OVERHEAD_S,
        train_flops=flops * _EFFICIENCY[kind],
        train_layer_overhead_s=3 * _LAYER_OVERHEAD_S[kind],
        optimizer_bandwidth=bandwidth / 28,  # reads and writes weights, gradients and moments, in float32
        network_bandwidth=network,
        sync_bandwidth=math.inf if subject.samples_from_policy else min(network, bandwidth / 5),
        rest_token_s=_ROW_SECONDS_PER_TOKEN,
    )


@dataclass(frozen=True)
class Demand:
    """Bytes of one rank."""

    weight_bytes: float
    """Of the policy, whole."""
    checkpoint_bytes: float
    state_bytes: float
    """Weights, gradients, optimizer, reference policy, critic: what a rank holds while it trains, without what is
    offloaded."""
    activation_bytes: float
    cache_bytes: float
    """Of the local engine: keys and values, and its copy of the weights where it samples during training."""
    pass_bytes: float = 0.0
    """Whole weights that a pass gathers from the other ranks: the root (embeddings, head) and two layers, with the
    gradients of one."""
    reduce_bytes: float = 0.0
    """At the end of a pass, when activations are gone: the root whole, its gradients and their sum in float32."""
    step_bytes: float = 0.0
    """Copies that AdamW makes of all tensors at once (`foreach`); of an offloaded state the one that visits."""
    other_bytes: float = 0.0
    """Of processes on the device: contexts, buckets of weights, what a sleeping engine keeps."""
    host_bytes: float = 0.0
    """In main memory: what `optimizer_offload`, `ref.offload` and, during rollouts, `param_offload` keep there."""

    @property
    def peak_bytes(self) -> float:
        """Of the most demanding moment of an update. The local engine keeps its cache during training."""
        moments = self.activation_bytes + self.pass_bytes, self.reduce_bytes, self.step_bytes
        return self.state_bytes + self.cache_bytes + self.other_bytes + max(moments)

    @classmethod
    def of(cls, subject: Subject) -> Demand:
        config = subject.config.actor_rollout_ref
        actor, model = config.actor, config.model
        size = sum(p.numel() for p in subject.module.parameters())
        width = 2 if model.dtype == "bfloat16" else 4
        trained = size if not model.lora_rank else _adapter_parameters(subject)
        optimizer = 8 + (4 if width == 2 else 0)  # two moments; the exact weights where they are rounded
        needs_ref = (actor.use_kl_loss or subject.config.algorithm.use_kl_in_reward) and not model.lora_rank
        ref = size * width if needs_ref else 0
        has_critic = subject.config.algorithm.adv_estimator == "gae" and not subject.config.critic.share_trunk
        criticized = size if has_critic else 0
        copied = subject.config.trainer.steps_ahead and subject.samples_from_policy
        shards = min(actor.fsdp_size or subject.num_ranks, subject.num_ranks)
        weights, learned = (size + criticized) * width, trained + criticized
        here = 0 if actor.optimizer_offload else optimizer
        state = weights + learned * (4 + here) + (0 if config.ref.offload else ref)  # gradients are float32
        away = learned * (optimizer - here) + (ref if config.ref.offload else 0) + weights * actor.param_offload
        root, layer = _root_and_layer(subject)
        gathers = shards > 1
        return cls(
            weight_bytes=size * width,
            checkpoint_bytes=size * width + trained * optimizer + criticized * (width + optimizer),
            state_bytes=state / shards,
            activation_bytes=_activations(subject, width),
            cache_bytes=_cache(subject, width) + (size * width if copied else 0),
            pass_bytes=gathers * (root * width + layer * (2 * width + 8)),
            reduce_bytes=gathers * root * (width + 8),
            step_bytes=16 * root / 2 / shards if actor.optimizer_offload else 4 * trained / shards,
            other_bytes=_others(subject),
            host_bytes=away / shards,
        )


def _root_and_layer(subject: Subject) -> tuple[int, int]:
    """(parameters outside of decoder layers, of the largest decoder layer): the units in which weights are gathered."""
    layers: dict[str, int] = {}
    for name, parameter in subject.module.named_parameters():
        numbered = re.match(r"(.*?\.\d+)\.", name)
        unit = numbered[1] if numbered else ""
        layers[unit] = layers.get(unit, 0) + parameter.numel()
    root = layers.pop("", 0)
    return root, max(layers.values(), default=0)


def _others(subject: Subject) -> float:
    """Bytes on a rank's device that are not its tensors."""
    rollout = subject.rollout
    on_gpu = subject.config.trainer.device != "cpu" and (torch.cuda.is_available() or not subject.samples_from_policy)
    context = _CONTEXT_BYTES["cuda" if on_gpu else "cpu"]
    if not on_gpu or subject.samples_from_policy or rollout.placed != "colocated":
        return context
    return context + _ENGINE_BYTES + 2 * rollout.update_weights_bucket_megabytes * 2**20


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
    """Bytes of main memory that a process could get: what is free, and what only caches files."""
    return float(psutil.virtual_memory().available)


def _activations(subject: Subject, width: int) -> float:
    config, sizes = subject.config.actor_rollout_ref, subject.module.config.get_text_config()
    actor = config.actor
    if actor.ppo_micro_batch_size is not None:
        tokens = -(-actor.ppo_micro_batch_size * subject.max_model_len // actor.ulysses_sequence_parallel_size)
    else:
        tokens = min(
            actor.ppo_max_token_len, subject.config.data.train_batch_size * config.rollout.n * subject.max_model_len
        )
    layer = tokens * (_PER_WIDTH * sizes.hidden_size + _PER_INTERMEDIATE * _intermediate(sizes)) * width
    kept = tokens * sizes.hidden_size * width * sizes.num_hidden_layers + layer
    whole = layer * sizes.num_hidden_layers
    logits = 3 * 4 * min(tokens * sizes.vocab_size, LOGITS_AT_ONCE)
    return (kept if config.model.enable_gradient_checkpointing else whole) + logits


def _intermediate(sizes: Any) -> int:
    """Numbers per token within an MLP; of a mixture those of the experts that a token is sent to."""
    whole = getattr(sizes, "intermediate_size", None) or 4 * sizes.hidden_size
    chosen, each = getattr(sizes, "num_experts_per_tok", None), getattr(sizes, "moe_intermediate_size", None)
    return chosen * (each or whole) if chosen else whole


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


def _speed(kind: str, dtype: str) -> tuple[float, float]:
    """Multiplications and additions per second of a product like the model's, and bytes per second of a copy."""
    side, large = (4096, 2**26) if kind == "cuda" else (256, 2**24)
    a = torch.randn(side, side, device=kind, dtype=getattr(torch, dtype))
    b, c = torch.zeros(large, device=kind), torch.zeros(large, device=kind)
    return (
        2.0 * side**3 * _per_second(kind, lambda: torch.mm(a, a)),
        2.0 * large * b.element_size() * _per_second(kind, lambda: c.copy_(b)),
    )


def _per_second(kind: str, call: Callable[[], Any]) -> float:
    rates = []
    for _ in range(3):
        count, begun = 0, time.perf_counter()
        while time.perf_counter() - begun < 0.02:
            for _ in range(4):
                call()
            if kind == "cuda":
                torch.cuda.synchronize()
            count += 4
        rates.append(count / (time.perf_counter() - begun))
    return sorted(rates)[1]
