"""From a config to a trainer: every choice that depends on the config is made here, once."""

from __future__ import annotations

import copy
import logging
import sys
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.markup import escape
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from verl_mt import engines
from verl_mt.chat.display import token_text
from verl_mt.chat.template import ChatTemplate
from verl_mt.config.checks import check_once, reject_unused_keys
from verl_mt.config.compose import config_to_yaml
from verl_mt.config.schema import Config, correction_of
from verl_mt.config_paths import resolve_model_path
from verl_mt.data.dataset import DataRow
from verl_mt.data.drawn_prompts import PromptLog
from verl_mt.data.sampler import RowSampler
from verl_mt.engines.base import EngineHost, InferenceEngine
from verl_mt.errors import CheckpointError, ConfigError, DataError, PluginError, VerlMTError
from verl_mt.extension_points import known, own
from verl_mt.interactions import session as interactions
from verl_mt.modeling.load import export_hf
from verl_mt.modeling.lora import without_adapters
from verl_mt.plugins import Registry, extension_function, import_plugins, listing, load_object, objects_in, plugin_names
from verl_mt.rewards.contract import RunState
from verl_mt.rollout.prompts import PromptBuilder, PromptDraws
from verl_mt.rollout.runner import RolloutRunner
from verl_mt.rollout.stream import RolloutStream
from verl_mt.tools.registry import ToolSet
from verl_mt.trainer import checkpoint
from verl_mt.trainer.advantage_step import advantage_estimator, try_own_estimator
from verl_mt.trainer.build_data import RunData, load_data, notes, require_same_rows
from verl_mt.trainer.build_rollout import (
    begin_workers,
    build_fitting_chat,
    build_runner,
    build_tools,
    check_parser,
    require_media,
    training_sampling,
    validation_sampling,
)
from verl_mt.trainer.checkpoint import CheckpointStore
from verl_mt.trainer.display import Display
from verl_mt.trainer.dynamic_sampling import Selection
from verl_mt.trainer.ppo_trainer import PPOTrainer
from verl_mt.trainer.rollout_files import RolloutFiles
from verl_mt.trainer.rollout_source import BatchPlan, RolloutSource, SourceParts
from verl_mt.trainer.run_directory import RunDirectory, other_directory
from verl_mt.trainer.run_log import RunLog
from verl_mt.trainer.step_hook import HookParts, StepHooks
from verl_mt.trainer.tracking import JsonLines, TrackedRun, build_trackers, require_trackers
from verl_mt.workers.cores import idle_cores
from verl_mt.workers.loss import try_own_loss
from verl_mt.workers.process import prepare_torch
from verl_mt.workers.setup import AlgorithmNeeds, Placement
from verl_mt.workers.trainable import updates_per_step
from verl_mt.workers.weight_sync import Transport, WeightSync
from verl_mt.workers.worker_group import WorkerGroup, build_worker_group

SOURCES: Registry[type[RolloutSource]] = Registry(
    "rollout source",
    {
        "synchronous": "verl_mt.trainer.rollout_source:RolloutSource",
        "kept": "verl_mt.trainer.spool:SpooledSource",
    },
    group="verl_mt.rollout_sources",
)
"""Where the groups of a step come from; `_source` chooses one."""
TRAINERS: Registry[type[PPOTrainer]] = Registry(
    "trainer", {"trains": "verl_mt.trainer.ppo_trainer:PPOTrainer"}, group="verl_mt.trainers"
)
"""What makes the steps; with `trainer.debug_mode=rollout_only` nothing is trained."""
_HOOKS = "verl_mt.step_hooks"
"""Entry points of what may watch the steps of a run, in the order in which they are called; `_hooks` chooses some."""


def build_trainer(config: Config, *, engine: InferenceEngine | None = None, lost: Path | None = None) -> PPOTrainer:
    """Put a trainer together. Everything that can be wrong with the input is found here, before any training step.

    Args:
        config: the whole configuration.
        engine: samples instead of the one that `rollout.name` asks for. Closed with the trainer.
        lost: directory of a run of this very configuration that lost a worker: the trainer goes on there.

    Raises:
        VerlMTError: one of its subclasses. The text names the key, file or row.
    """
    _before_anything_slow(config, engine)
    chat = build_fitting_chat(config)
    tools = build_tools(config)
    check_parser(config, chat, tools)
    data = load_data(config, chat, tools)
    plan = _build_plan(config, data.sampler)
    with ExitStack() as undo:
        workers = undo.enter_context(closing(build_workers(config, total_steps=plan.total_steps)))
        logging.getLogger("verl_mt.start").info("model loaded on %s", workers.where)
        runner = build_runner(config, chat, tools, *place_engine(config, workers, engine, config.trainer.steps_ahead))
        stream = RolloutStream(runner)
        undo.callback(stream.close, runner.context.engine.close)
        _check_rows(config, data.prompts, runner)
        empty = stream.call(runner.context.engine.start_without_weights())
        begin_workers(config, stream)
        # Last, so that a mistake above leaves no directory that looks like an unfinished run.
        run = RunDirectory.open(config.trainer, snapshot := yaml.safe_load(config_to_yaml(config)), lost=lost)
        undo.callback(run.abandon)
        model = _describe_model(config)
        checkpoints = CheckpointStore(run.path / "checkpoints", config.trainer.max_actor_ckpt_to_keep)
        state = None if run.resume_from is None else _load_checkpoint(config, run.resume_from, model, data)
        prompt_log = PromptLog.after(state, run.path, rows=config.trainer.rollout_rows != "off")
        draws = _draws(config, data, runner)
        weights = weight_sync(config, stream, workers, run.path / "weights")
        source = _source(SourceParts(config, plan, draws, stream, prompt_log, run.path, state, chat.decode))
        trainer = _trainer_class(config)(
            config=config.trainer,
            source=source,
            val_prompts=[] if config.trainer.debug_mode == "train_only" else data.val_prompts,
            prompt_counts=data.counts,
            engine=runner.context.engine,
            workers=workers,
            weights=weights,
            estimate_advantages=advantage_estimator(config.algorithm, workers),
            checkpoints=checkpoints,
            hooks=_hooks(HookParts(config, run.path, checkpoints, source, chat.decode)),
            sanity=runner.context.sanity,
            log=build_log(config, run, snapshot, plan.total_steps, tools, resumes=state, chat=chat),
            pad_token_id=pad_token_id(chat),
            selection=_selection(config),
            model=model,
            rows=data.fingerprint,
            export=partial(_export, weights, chat, run) if config.trainer.export_at_end else lambda: None,
        )
        _resume(trainer, state, run, empty)
        undo.pop_all()
    _announce(config, trainer, workers)
    return trainer


def _before_anything_slow(config: Config, engine: InferenceEngine | None) -> None:
    """Refuse what can be refused; say which directory it will be if not the one that is named."""
    check_once(config)
    reject_unused_keys(config)
    if (words := other_directory(config.trainer)) is not None:
        Display(total_steps=0, live=False, enabled="console" in config.trainer.logger).note(escape(words))
    import_plugins(config.external_plugins)
    try_own_estimator(config)
    if engine is None and config.trainer.debug_mode != "train_only":
        engines.check(config.actor_rollout_ref, config.trainer)
        if config.trainer.steps_ahead:
            extension_function("require_copyable")(config)
    if engine is not None and config.trainer.steps_ahead:
        engines.check_overlap(engine, config)
    require_trackers(config.trainer.logger, spans=config.actor_rollout_ref.rollout.trace.backend)
    prepare_process(config)


def _source(parts: SourceParts) -> RolloutSource:
    trainer, factor = parts.config.trainer, parts.config.data.over_sample
    if trainer.debug_mode == "train_only":
        name = "replay"
    elif trainer.steps_ahead or factor > 1:
        name = "asynchronous"
    else:  # a deterministic run samples again what a kill took, with the same bits
        name = "synchronous" if trainer.deterministic or trainer.debug_mode != "save" else "kept"
    return SOURCES.find(name).of(parts)


def _trainer_class(config: Config) -> type[PPOTrainer]:
    name = "rollout_only" if config.trainer.debug_mode == "rollout_only" else "trains"
    return TRAINERS.find(name)


def _hooks(parts: HookParts) -> StepHooks:
    """Files of hooks that the configuration does not ask for are not loaded."""
    trainer, factor = parts.config.trainer, parts.config.data.over_sample
    asked = {"debug_data": trainer.debug_rollout_data is not None, "staleness": trainer.steps_ahead or factor > 1}
    paths = {**own(_HOOKS), **known(_HOOKS)}
    if missing := [name for name, wanted in asked.items() if wanted and name not in paths]:
        raise PluginError(
            f"step hook {listing(missing)}: an extension has it, and verl_mt/extensions is not installed here"
        )
    found = (load_object(path, what=f"step hook {name}") for name, path in paths.items() if asked.get(name, True))
    return StepHooks(hook for hook in (kind.of(parts) for kind in found) if hook is not None)


def _draws(config: Config, data: RunData, runner: RolloutRunner) -> PromptDraws:
    # A row that a sampler made has only its own trajectories to lose; without a reward it has none.
    of_files = data.prompts.num_unseen or data.prompts.skips_bad
    check = partial(check_row, config, runner) if of_files else runner.reward.check
    return PromptDraws(data.sampler, data.prompts, check)


def _check_rows(config: Config, prompts: PromptBuilder, runner: RolloutRunner) -> None:
    for row in prompts.rows():
        try:
            check_row(config, runner, row)
        except VerlMTError as error:
            prompts.leave_out(row, error)


def check_row(config: Config, runner: RolloutRunner, row: DataRow) -> None:
    """What the engine cannot show, no reward scores, or no interaction answers.

    Raises:
        VerlMTError: names file and row.
    """
    try:
        interactions.check_row(runner.interactions, row.extra_info.get("interaction_kwargs"))
    except DataError as error:
        raise DataError(f"{row.place}: {error}") from error
    require_media(runner.context.engine, row, rollout_name=config.actor_rollout_ref.rollout.name)
    runner.reward.check(row)


def _export(weights: WeightSync, chat: ChatTemplate, run: RunDirectory) -> None:
    """At the end of a run, whose engine may hold the device's memory."""
    weights.free_engine_memory()
    export_model(weights.workers, chat, run)


def export_model(workers: WorkerGroup, chat: ChatTemplate, run: RunDirectory) -> None:
    """Write the Hugging Face folder `hf/` of a run."""
    export_hf(workers.policy_module, tokenizer_as_trained(chat), run.path / "hf", adapter=workers.adapter())


def _resume(trainer: PPOTrainer, state: dict[str, Any] | None, run: RunDirectory, empty: bool) -> None:
    if state is None:
        if empty:  # the engine has no weights yet
            trainer.weights.push(trainer.version)
        return
    trainer.load_state_dict(state, run.resume_from)
    trainer.log.display.resume_at(trainer.step_number)
    trainer.log.display.note(f"resuming {run.path} after step {trainer.step_number}")


def prepare_process(config: Config) -> None:
    """Threads, seeds and determinism of this process; no progress bars of others."""
    transformers_logging.disable_progress_bar()
    trainer = config.trainer
    # How many cores are idle is up to the moment, and the number of threads changes the last bits.
    threads = trainer.num_threads or (1 if trainer.deterministic else idle_cores())
    prepare_torch(threads=threads, seed=trainer.seed, deterministic=trainer.deterministic)


def build_workers(config: Config, *, total_steps: int) -> WorkerGroup:
    """The actor / ref worker group that the YAML declares."""
    trainer = config.trainer
    try_own_loss(config.actor_rollout_ref.actor)
    return build_worker_group(
        config.actor_rollout_ref,
        train_batch_size=config.data.train_batch_size,
        total_steps=total_steps,
        device=device_of(trainer.device) if trainer.placement == "inline" else trainer.device,
        seed=trainer.seed,
        algorithm=AlgorithmNeeds(
            rollout_correction=correction_of(config),
            kl_in_reward=config.algorithm.use_kl_in_reward,
            critic=config.critic if config.algorithm.adv_estimator == "gae" else None,
            critic_warmup=trainer.critic_warmup,
        ),
        placement=Placement(
            worker_timeout_s=trainer.worker_timeout_s,
            kind=trainer.placement,
            nnodes=trainer.nnodes,
            n_workers_per_node=trainer.n_workers_per_node,
            num_threads=trainer.num_threads,
            deterministic=trainer.deterministic,
            external_plugins=plugin_names(config.external_plugins),
            # Tools, rewards and interactions stay in this process; a loss is computed where the policy is.
            objects=objects_in(config.actor_rollout_ref.actor.policy_loss) if trainer.placement == "ray" else {},
        ),
    )


def _build_plan(config: Config, sampler: RowSampler) -> BatchPlan:
    data, rollout, trainer = config.data, config.actor_rollout_ref.rollout, config.trainer
    by_epochs = trainer.total_epochs * sampler.num_rows // data.train_batch_size
    if not by_epochs and trainer.total_training_steps != 0 and not trainer.val_only:
        raise ConfigError(
            f"data.train_batch_size is {data.train_batch_size}, but there are only {sampler.num_rows} training rows "
            f"(after over-long prompts were left out) and trainer.total_epochs is {trainer.total_epochs}: that is not "
            "one step. Lower the batch size, raise total_epochs, or give more rows"
        )
    total = by_epochs if trainer.total_training_steps is None else min(by_epochs, trainer.total_training_steps)
    actor = config.actor_rollout_ref.actor
    run = RunState(
        total_steps=total,
        updates_per_step=updates_per_step(actor.ppo_epochs, actor.ppo_mini_batch_size, data.train_batch_size),
        total_epochs=trainer.total_epochs,
    )
    return BatchPlan(
        num_prompts=data.train_batch_size,
        n=rollout.n,
        sampling=training_sampling(config),
        val_n=rollout.val_kwargs.n,
        val_sampling=validation_sampling(config),
        val_greedy_too=rollout.val_kwargs.greedy_too,
        val_batch_size=data.val_batch_size,
        total_steps=total,
        greedy_too=config.algorithm.adv_estimator == "remax",
        run=run,
    )


def _selection(config: Config) -> Selection:
    """What `algorithm.filter_groups`, `algorithm.filter_overlong` and `reward.overlong_buffer` ask for."""
    groups, buffer = config.algorithm.filter_groups, config.reward.overlong_buffer
    if config.trainer.debug_mode == "train_only":  # saved rewards have their penalties, and saved groups were filtered
        return Selection(filter_overlong=config.algorithm.filter_overlong)
    one_by_one = groups.enable and config.algorithm.adv_estimator == "gdpo"
    return Selection(
        metric=groups.metric if groups.enable else None,
        max_gen_batches=groups.max_num_gen_batches,
        overlong_buffer=buffer.len if buffer.enable else None,
        overlong_factor=buffer.penalty_factor,
        max_length=config.actor_rollout_ref.rollout.response_length,
        filter_overlong=config.algorithm.filter_overlong,
        several=tuple(config.algorithm.gdpo_reward_weights) if one_by_one else (),
    )


def build_log(
    config: Config,
    run: RunDirectory,
    snapshot: dict[str, Any],
    total_steps: int,
    tools: ToolSet | None,
    *,
    resumes: dict[str, Any] | None,
    chat: ChatTemplate,
) -> RunLog:
    """What a run writes and shows, in the directory `run`; `resumes` is the checkpoint that it goes on from."""
    trainer = config.trainer
    # A run that is resumed at step 0 validates again: its old line goes.
    resume_step = None if resumes is None else resumes["step"] or None
    live = trainer.progress == "on" or (trainer.progress == "auto" and sys.stdout.isatty())
    return RunLog(
        run,
        Display(total_steps=total_steps, live=live, enabled="console" in trainer.logger),
        build_trackers(
            trainer,
            TrackedRun(run.path, trainer.project_name, run.path.name, snapshot, resume_step),
            spans=config.actor_rollout_ref.rollout.trace.backend,
        ),
        JsonLines(run.path, resume_step=resume_step, split_timings=trainer.deterministic),
        tool_names=tools.names if tools is not None else (),
        rollout_files=RolloutFiles(run.path, partial(token_text, chat.tokenizer))
        if trainer.rollout_rows != "off"
        else None,
    )


def place_engine(
    config: Config, workers: WorkerGroup, engine: InferenceEngine | None = None, steps_ahead: int = 0
) -> tuple[Any, InferenceEngine | None, tuple[EngineHost, ...], bool]:
    """Where what samples this policy lives, for `build_runner`: (the module that it samples from, a copy of the
    policy's where it does so during training; the caller's engine; places for its replicas beside the ranks;
    whether it samples during training)."""
    rollout = config.actor_rollout_ref.rollout
    module = workers.policy_module if engines.samples_from_policy(rollout.name) else None
    overlaps = steps_ahead > 0
    if module is not None and overlaps and engine is None:
        module = copy.deepcopy(without_adapters(module))
    if engine or config.trainer.debug_mode == "train_only" or not engines.lives_beside_ranks(rollout.name):
        return module, engine, (), overlaps
    return module, engine, workers.engine_hosts(), overlaps


def weight_sync(config: Config, stream: RolloutStream, workers: WorkerGroup, folder: Path) -> WeightSync:
    """From these workers to the stream's engine; files go to `folder` where the configuration names none."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.weight_sync_dir is not None:
        folder = Path(rollout.weight_sync_dir)
    transport = Transport(bucket_bytes=rollout.update_weights_bucket_megabytes * 1024 * 1024, folder=folder)
    return WeightSync(stream.runner.context.engine, workers, stream.call, transport)


def _announce(config: Config, trainer: PPOTrainer, workers: WorkerGroup) -> None:
    note, run = trainer.log.display.note, trainer.log.run
    of_them = f" ({workers.num_trained / 1e6:.2f}M of them trained)"
    trained = "" if workers.num_trained == workers.num_parameters else of_them
    note(
        f"[bold]verl_mt[/] {trainer.plan.num_prompts} prompts x {trainer.plan.n} samples per step, "
        f"{trainer.plan.total_steps} steps, "
        f"{workers.num_parameters / 1e6:.2f}M parameters{trained} on {workers.where}, "
        f"{torch.get_num_threads()} thread(s). Writing to {run.path}"
    )
    for text in trainer.notes():
        note(text)
    for text in notes(config, trainer.source.draws.prompts):
        note(f"[yellow]{text}[/]")


def _describe_model(config: Config) -> dict[str, str]:
    """What a checkpoint says about its model: where it came from, and what must be the same to go on."""
    model = config.actor_rollout_ref.model
    found = AutoConfig.from_pretrained(
        resolve_model_path(model.path), revision=model.revision, trust_remote_code=model.trust_remote_code
    )
    text = found.get_text_config()
    sizes = {name: getattr(text, name, None) for name in ("num_hidden_layers", "hidden_size", "vocab_size")}
    name = (found.architectures or [type(found).__name__])[0]
    return {"path": model.path, "architecture": f"{name}, {', '.join(f'{k} {v}' for k, v in sizes.items())}"}


def _load_checkpoint(config: Config, folder: Path, model: dict[str, str], data: RunData) -> dict[str, Any]:
    state = checkpoint.load(folder)
    saved = state.get("model", model)
    if saved["architecture"] != model["architecture"]:
        raise CheckpointError(
            f"{folder} was written by {saved['path']} ({saved['architecture']}), but actor_rollout_ref.model.path is "
            f"{model['path']} ({model['architecture']}): resume with the model that the run was started with"
        )
    require_same_rows(config, folder, state.get("rows"), data.fingerprint)
    return state


def tokenizer_as_trained(chat: ChatTemplate) -> Any:
    """With the template that was trained with: whoever serves the export must render the same. Of a multimodal model,
    its image processor goes with it."""
    tokenizer = chat.tokenizer
    if chat.custom_template is not None:
        tokenizer = copy.deepcopy(chat.tokenizer)
        tokenizer.chat_template = chat.custom_template
    return chat.saved_with_model(tokenizer)


def pad_token_id(chat: ChatTemplate) -> int:
    """Fills rows beyond their end; some end token where the tokenizer has no own one for it."""
    pad = chat.tokenizer.pad_token_id
    return pad if pad is not None else min(chat.end_token_ids)


def device_of(name: str) -> str:
    """`trainer.device` with `auto` resolved."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
