"""Settings that are each allowed and do not go together; engine, trackers, run directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
import yaml

from verl_mt import engines
from verl_mt.config.checks import reject_unused_keys
from verl_mt.config.compose import config_to_yaml
from verl_mt.config.options import read_rollout_correction
from verl_mt.config.policy_losses import loss_mode, read_policy_loss
from verl_mt.config.schema import correction_of, explicit_keys
from verl_mt.extensions.inspection.doctor.findings import Finding, Subject, error, ok, warning
from verl_mt.plugins import import_plugins
from verl_mt.trainer.advantage_step import try_own_estimator
from verl_mt.trainer.run_directory import preview
from verl_mt.trainer.tracking import require_trackers
from verl_mt.workers.loss import try_own_loss

_ROLLOUT = "actor_rollout_ref.rollout"
_ACTOR = "actor_rollout_ref.actor"


def keys(subject: Subject) -> Iterator[Finding]:
    """Every key that is set has an effect in a run of this configuration."""
    reject_unused_keys(subject.config)
    yield ok(f"{len(explicit_keys(subject.config))} set, each has an effect")


def plugins(subject: Subject) -> Iterator[Finding]:
    """Plug-in files import, and trackers are installed."""
    import_plugins(subject.config.external_plugins)
    trainer = subject.config.trainer
    require_trackers(trainer.logger, spans=subject.rollout.trace.backend)
    yield ok(f"{len(subject.config.external_plugins)} plug-in(s). Trackers: {', '.join(trainer.logger) or 'none'}")
    offline = os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun")
    known = os.environ.get("WANDB_API_KEY") or (Path.home() / ".netrc").exists()
    if "wandb" in trainer.logger and not offline and not known:
        yield warning(
            "trainer.logger names wandb, and there is no key for it", "run wandb login, or set WANDB_MODE=offline"
        )


def algorithm(subject: Subject) -> Iterator[Finding]:
    """A custom estimator and a custom loss return the right form for made-up numbers."""
    try_own_estimator(subject.config)
    try_own_loss(subject.config.actor_rollout_ref.actor)
    loss = loss_mode(subject.config.actor_rollout_ref.actor.policy_loss)
    yield ok(f"advantages by {subject.config.algorithm.adv_estimator}, loss {loss}")


def engine(subject: Subject) -> Iterator[Finding]:
    """The inference engine can be started here, and the devices exist."""
    config, trainer = subject.config, subject.config.trainer
    name = subject.rollout.name
    if trainer.device == "cuda" and not torch.cuda.is_available():
        text = "trainer.device=cuda, and torch finds no CUDA device here"
        if trainer.placement == "ray":
            yield warning(text, "fine if only the workers have GPUs. Run the doctor where the trainer will run")
        else:
            yield error(text, "set trainer.device=cpu or auto, or run where the GPU is")
            return
    engines.check(config.actor_rollout_ref, trainer)
    gpus = torch.cuda.device_count()
    size = 0 if subject.module is None else sum(p.numel() for p in subject.module.parameters())
    in_process = trainer.placement == "inline" and engines.samples_from_policy(name)
    if in_process and not torch.cuda.is_available() and size > 1e9:
        yield warning(
            f"{size / 1e9:.1f} billion parameters on the CPU: a step will take hours",
            "run where a GPU is, or use a smaller model",
        )
    yield ok(
        f"{name}; {f'{gpus} GPU(s)' if gpus else 'no GPU'} here, workers {trainer.placement} x {subject.num_ranks}"
    )


def ratios(subject: Subject) -> Iterator[Finding]:
    """What samples is what is trained, or the difference is corrected."""
    rollout, actor = subject.rollout, subject.config.actor_rollout_ref.actor
    model = subject.config.actor_rollout_ref.model
    options = read_rollout_correction(correction_of(subject.config))
    corrected = options.rollout_is is not None or options.rollout_rs is not None
    changed = "" if rollout.dtype in (None, model.dtype) else f"dtype={rollout.dtype} (the actor has {model.dtype})"
    if changed and not corrected:
        yield warning(
            f"the engine samples with {changed}: another policy than the one that is trained",
            "add algorithm.rollout_correction.rollout_is=token, or leave it out",
        )
    if actor.use_sampler_log_probs == "always" and changed:
        yield error(
            f"{_ACTOR}.use_sampler_log_probs=always with {changed}: the ratios of the first update are the engine's "
            "error",
            "set use_sampler_log_probs=auto",
        )
    if not 0.3 <= rollout.temperature <= 1.5 and not subject.config.trainer.val_only:
        yield warning(
            f"{_ROLLOUT}.temperature is {rollout.temperature}: "
            + ("samples of a group are nearly alike" if rollout.temperature < 1 else "samples are mostly noise"),
            "train at 1. Validate at another temperature with val_kwargs.temperature",
        )
    corrections = f"corrected by {options.rollout_is or options.rollout_rs}" if corrected else "not corrected"
    yield ok(f"sampled at T={rollout.temperature:g} over the whole vocabulary, {corrections}")


def splits(subject: Subject) -> Iterator[Finding]:
    """Where a conversation becomes several records, ratios of whole sequences are of parts of it."""
    chat, rollout = subject.known_chat, subject.rollout
    reasons = []
    if rollout.multi_turn.use_inference_chat_template and chat.capabilities.history:
        reasons.append(
            "multi_turn.use_inference_chat_template=True with a template that rewrites history "
            f"({', '.join(chat.capabilities.history)})"
        )
    if rollout.custom_generate_function_path is not None:
        reasons.append("a generate function, which may return several Samples")
    if rollout.agent_function_path is not None:
        reasons.append("an agent, which may edit its messages")
    options = read_rollout_correction(subject.config.algorithm.rollout_correction)
    whole = []
    if options.rollout_is == "sequence" or "seq" in str(options.rollout_rs):
        whole.append(f"algorithm.rollout_correction ({options.rollout_is or options.rollout_rs})")
    policy_loss = subject.config.actor_rollout_ref.actor.policy_loss
    if read_policy_loss(policy_loss).depends_on == "trajectory":
        whole.append(f"policy_loss.loss_mode={loss_mode(policy_loss)}")
    if whole and reasons and not rollout.custom_generate_function_path:
        yield warning(
            f"{' and '.join(whole)} take a ratio over a whole sequence, and {' and '.join(reasons)} splits a "
            "conversation into several records",
            "use rollout_is=token or geometric and a loss per token, or let the history stand",
        )
    yield ok(f"several records from {' and '.join(reasons)}" if reasons else "one record per conversation")


def run_directory(subject: Subject) -> Iterator[Finding]:
    """Where the run would write: a new directory, or one that it would go on in. Nothing is made."""
    snapshot = yaml.safe_load(config_to_yaml(subject.config))
    yield ok(preview(subject.config.trainer, snapshot))
