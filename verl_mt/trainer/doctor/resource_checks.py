"""The model's own limits, disk, memory and time."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from verl_mt.modeling.load import meta_causal_lm
from verl_mt.trainer import build_rollout
from verl_mt.trainer.doctor import estimate
from verl_mt.trainer.doctor.estimate import GB, Demand
from verl_mt.trainer.doctor.findings import Note, error, ok, warning
from verl_mt.trainer.doctor.subject import Subject
from verl_mt.trainer.run_directory import wanted_directory

_ROW_BYTES_PER_TOKEN = 60
"""Of a rollout row: id, masks, log-probs, version, advantage as JSON."""


def model(subject: Subject) -> Iterator[Note]:
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


def vocabulary(subject: Subject) -> Iterator[Note]:
    """No token without an embedding."""
    rows = build_rollout.check_vocabulary(subject.config, subject.known_chat)
    tokens = len(subject.known_chat.tokenizer)
    yield ok(f"{tokens} tokens, {rows} embeddings")


def disk(subject: Subject) -> Iterator[Note]:
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


def memory(subject: Subject) -> Iterator[Note]:
    """Weights, gradients, optimizer and activations of one rank, against what its device has."""
    demand = Demand.of(subject)
    device = estimate.device_memory(subject)
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


def step_time(subject: Subject) -> Iterator[Note]:
    """Seconds of one step, from the work and the speed of this machine."""
    found = estimate.step_time(subject)
    yield ok(
        f"about {found.step_s:,.1f} s a step on {found.device}: rollout {found.rollout_s:,.1f}, update "
        f"{found.update_s:,.1f}{f', reference {found.ref_s:,.1f}' if found.ref_s else ''}; all "
        f"{subject.total_steps} steps {found.step_s * subject.total_steps / 3600:,.2f} h (tools aside, if responses "
        "fill half of their length)"
    )
