"""Keys of the run as a whole."""

from __future__ import annotations

from typing import Any
from unittest import mock

import effect_probes as probes
import torch
from effect_kinds import NOT_VALIDATED, PPO, TINY_ROWS, VALIDATES, Effect

COLLAPSES = (
    "trainer.total_training_steps=3",
    "actor_rollout_ref.actor.optim.lr=1e-2",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=constant",
    "trainer.collapse_guard_thresholds={window: 1, entropy_rise: 1.0}",
    *NOT_VALIDATED,
)


def without_gpu(overrides: tuple[str, ...]) -> Any:
    """What is printed; also where this machine has a GPU."""
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        return probes.printed(overrides)


def waits(overrides: tuple[str, ...]) -> Any:
    """What the first of two ranks says of the second, which never comes."""
    from verl_mt.extensions.cluster.workers.rank_worker import RankWorker
    from verl_mt.trainer import build
    from verl_mt.workers.setup import WorkerSetup
    from verl_mt.workers.sharding import Ranks

    config = probes.compose([*overrides])
    with mock.patch("verl_mt.trainer.build.build_worker_group", lambda model, **given: given["placement"]):
        placement = build.build_workers(config, total_steps=1)
    setup = WorkerSetup(config.actor_rollout_ref, 1, None, "cpu", 0, placement)
    threads = torch.get_num_threads()
    try:
        RankWorker(setup, Ranks(0, 2)).start("tcp://127.0.0.1:0", setup.patience_s)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    finally:
        torch.set_num_threads(threads)


def begun(overrides: tuple[str, ...]) -> Any:
    """How often a run begins whose workers are always lost."""
    from verl_mt.errors import WorkerError
    from verl_mt.trainer import restarts

    with mock.patch.object(restarts, "build_trainer", side_effect=WorkerError("lost")) as build:
        try:
            restarts.run_to_the_end(probes.compose([*overrides]))
        except WorkerError:
            return build.call_count


TRAINER = {
    "total_training_steps": Effect("1", "steps", probes.steps, NOT_VALIDATED),
    "total_epochs": Effect(
        "1",
        "steps",
        probes.steps,
        ("trainer.total_training_steps=null", "data.train_max_samples=4", *NOT_VALIDATED),
        base="2",
    ),
    "project_name": Effect(
        "mine", "what trackers are told", probes.files, ("trainer.logger=[effect_parts.Noted]", *NOT_VALIDATED)
    ),
    "experiment_name": Effect(
        "mine", "the run directory", probes.files, ("trainer.default_local_dir=null", *NOT_VALIDATED)
    ),
    "default_local_dir": Effect("elsewhere", "the run directory", probes.files, NOT_VALIDATED),
    "logger": Effect("[console]", "something is printed", probes.printed, NOT_VALIDATED),
    "log_val_generations": Effect(
        "1", "what trackers show", probes.files, ("trainer.logger=[effect_parts.Noted]", *VALIDATES)
    ),
    "critic_warmup": Effect("1", "the policy waits", probes.weights, PPO),
    "test_freq": Effect("1", "validations", probes.val_rows, (f"data.val_files={TINY_ROWS}",)),
    "val_before_train": Effect("True", "validations", probes.val_rows, (f"data.val_files={TINY_ROWS}",)),
    "val_only": Effect("True", "no step", probes.steps, VALIDATES),
    "save_freq": Effect("1", "checkpoints", probes.files, NOT_VALIDATED),
    "max_actor_ckpt_to_keep": Effect(
        "1", "checkpoints that are kept", probes.files, ("trainer.save_freq=1", *NOT_VALIDATED)
    ),
    "resume_mode": Effect(
        "resume_path", "asks for a checkpoint", probes.printed, NOT_VALIDATED, refused="needs trainer.resume_from_path"
    ),
    "resume_from_path": Effect(
        "nothing",
        "asks for that checkpoint",
        probes.printed,
        ("trainer.resume_mode=resume_path", *NOT_VALIDATED),
        refused="got 'nothing'",
    ),
    "seed": Effect("7", "what is sampled", probes.rows, NOT_VALIDATED),
    "deterministic": Effect("False", "where timings are written", probes.files, NOT_VALIDATED),
    "num_threads": Effect("2", "threads of torch", probes.of_run("threads"), NOT_VALIDATED),
    "device": Effect("cuda", "no such device here", without_gpu, NOT_VALIDATED, refused="no CUDA device"),
    "placement": Effect(
        "ray", "several ranks are possible", probes.placed, ("trainer.nnodes=2",), refused="needs trainer.placement=ray"
    ),
    "nnodes": Effect("2", "needs Ray", probes.placed, refused="needs trainer.placement=ray"),
    "n_workers_per_node": Effect("2", "needs Ray", probes.placed, refused="needs trainer.placement=ray"),
    "worker_timeout_s": Effect("2", "how long a rank waits", waits, base="1", refused="Timed out after"),
    "max_restarts": Effect("2", "how often a run begins", begun),
    "max_staleness": Effect(
        "1", "the oldest tokens", probes.metric("staleness/max"), ("trainer.deterministic=False", *NOT_VALIDATED)
    ),
    "progress": Effect("on", "a live line", probes.live, ("trainer.logger=[console]", *NOT_VALIDATED)),
    "rollout_rows": Effect("off", "no files of rows", probes.files, NOT_VALIDATED),
    "debug_rollout_data": Effect("$RUN/{rollout_id}.pt", "a file for each step", probes.files, NOT_VALIDATED),
    "debug_mode": Effect(
        "rollout_only",
        "nothing is trained",
        probes.weights,
        ("trainer.debug_rollout_data=$RUN/{rollout_id}.pt", *NOT_VALIDATED),
    ),
    "collapse_guard": Effect("off", "nothing is watched", probes.signs, COLLAPSES),
    "collapse_guard_thresholds": Effect(
        "{window: 1, entropy_rise: null}", "that sign is switched off", probes.signs, COLLAPSES
    ),
    "export_at_end": Effect("True", "hf/", probes.files, NOT_VALIDATED),
    "dry_run": Effect("True", "a list, and nothing else", probes.dry, quick=False),
}
