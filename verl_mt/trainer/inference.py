"""A policy with its tools, limits and reward, and no training around it: for evaluation, demos and debugging.

`evaluate` and `chat` are what `python -m verl_mt.evaluate` does: numbers on a data file, and a conversation.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from verl_mt import engines
from verl_mt.config.checks import check_once
from verl_mt.config.compose import config_to_yaml
from verl_mt.config.schema import Config
from verl_mt.config_paths import resolve_model_path
from verl_mt.data.conversation import Message
from verl_mt.data.requests import SamplingParams
from verl_mt.data.run_files import trajectory_to_row, write_rows
from verl_mt.data.trajectory import Status, Trajectory, TrajectoryGroup
from verl_mt.diagnostics.step_metrics import (
    interval_95,
    num_right,
    prompt_scores,
    total_failure,
    validation_metrics,
)
from verl_mt.engines.base import InferenceEngine
from verl_mt.errors import CheckpointError, ConfigError, DataError, UserCodeError
from verl_mt.modeling.load import load_causal_lm, source_of
from verl_mt.plugins import import_plugins
from verl_mt.rollout.prompts import Prompt
from verl_mt.rollout.runner import RolloutPlan
from verl_mt.rollout.session import RolloutSession
from verl_mt.rollout.stream import RolloutStream
from verl_mt.rollout.tool_loop import run_tool_loop
from verl_mt.tools.agent_data import AgentData
from verl_mt.tools.executor import ToolSession
from verl_mt.tools.registry import ToolSet
from verl_mt.trainer import build, build_data, build_rollout
from verl_mt.trainer.display import terminal
from verl_mt.trainer.run_directory import RunDirectory
from verl_mt.trainer.spool import GroupSpool
from verl_mt.workers.worker_group import WorkerGroup


class Inference(AbstractContextManager["Inference"]):
    """Rolls out prompts exactly as training would.

    Args:
        config: the same config that a trainer gets.
        tools: instead of those that the config's YAML declares.
        engine: samples instead of the one that `rollout.name` asks for. No model is loaded then.
        workers: that train the policy: the engine samples from their module, or lives where a trainer's would.
        spool: keeps finished groups for the process after this one, and has those of the process before.

    Raises:
        VerlMTError: what `build_trainer` would refuse.
    """

    def __init__(
        self,
        config: Config,
        *,
        tools: ToolSet | None = None,
        engine: InferenceEngine | None = None,
        workers: WorkerGroup | None = None,
        spool: GroupSpool | None = None,
    ):
        check_once(config)
        import_plugins(config.external_plugins)
        if engine is None:
            # No training goes on meanwhile, whatever the file of a run says of it.
            engines.check(config.actor_rollout_ref, replace(config.trainer, max_staleness=0))
        build.prepare_process(config)
        self.config = config
        self.num_filtered = 0
        self.chat = build_rollout.build_fitting_chat(config)
        self.tools = tools if tools is not None else build_rollout.build_tools(config)
        build_rollout.check_parser(config, self.chat, self.tools)
        if workers is not None:
            place = build.place_engine(config, workers, engine)
        else:
            shares = engine is None and engines.samples_from_policy(config.actor_rollout_ref.rollout.name)
            place = (_load(config) if shares else None, engine, (), False)
            config = copy.deepcopy(config)  # the model that is named has no adapters, and no update brings any
            config.actor_rollout_ref.model.lora_rank = 0
        self.runner = build_rollout.build_runner(config, self.chat, self.tools, *place)
        self.stream = RolloutStream(self.runner)
        self._spool = spool
        if spool is not None:
            self.stream.keep = spool.keep
        try:
            self.stream.call(self.runner.context.engine.start())
            build_rollout.begin_workers(config, self.stream)
        except BaseException:
            self.stream.close(self.runner.context.engine.close)
            raise

    def prompts(self) -> list[Prompt]:
        """The prompts of `data.val_files`. `num_filtered` says how many were too long and left out."""
        builder = build_data.build_prompts(self.config, self.chat, self.tools)
        prompts = build_data.load_val_prompts(self.config, builder)
        self.num_filtered = builder.num_filtered
        return prompts

    def roll_out(
        self,
        prompts: list[Prompt],
        *,
        n: int = 1,
        sampling: SamplingParams | None = None,
        name: str = "inference",
        while_waiting: Callable[[], None] = lambda: None,
    ) -> list[TrajectoryGroup]:
        """Scored groups, in the order of the prompts. `while_waiting` is called a few times a second.

        Raises:
            ConfigError: a row whose data source has no reward. Named before anything is sampled.
        """
        self.check(prompts)
        plan = RolloutPlan(prompts, n, name, sampling, evaluation=True)
        self.stream.start(plan, () if self._spool is None else self._spool.take(plan))
        return self.stream.collect(name, while_waiting)

    def check(self, prompts: list[Prompt]) -> None:
        """Before anything is sampled.

        Raises:
            ConfigError: a row whose data source has no reward, or that shows what the engine cannot see.
        """
        for row in (prompt.row for prompt in prompts):
            build_rollout.require_media(
                self.runner.context.engine, row, rollout_name=self.config.actor_rollout_ref.rollout.name
            )
            self.runner.reward.check(row)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stream.close(self.runner.context.engine.close)


def _load(config: Config) -> Any:
    source = source_of(config.actor_rollout_ref.model)
    return load_causal_lm(**source, device=build.device_of(config.trainer.device))


@dataclass(frozen=True)
class Measured:
    """What `measure` found."""

    metrics: dict[str, float]
    """`val/...` as in training, and `val/pass_at_k`; only `val/prompts_left_out` where all trajectories failed."""
    groups: list[TrajectoryGroup]
    """The conversations, in the order of the prompts."""
    failure: str | None
    """Why nothing could be measured; None if it could."""
    num_left_out: int
    """Prompts longer than `data.max_prompt_length`."""
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Of the accuracy and of each pass@k: 95 % confidence, over the prompts (`interval_95`)."""


def measure(
    config: Config,
    while_waiting: Callable[[int, int], None] = lambda done, of: None,
    spool: GroupSpool | None = None,
) -> Measured:
    """Sample every prompt of `data.val_files` as validation does.

    Args:
        while_waiting: called a few times a second with the number of finished conversations, and of all that are begun.
        spool: see `Inference`.

    Raises:
        VerlMTError: bad input.
    """
    if config.data.val_files is None:
        raise ConfigError("no data to evaluate on: the config has no data.val_files. Name a file with --data")
    n, sampling = config.actor_rollout_ref.rollout.val_kwargs.n, build_rollout.validation_sampling(config)
    with Inference(config, spool=spool) as policy:
        prompts, progress = policy.prompts(), policy.stream.progress

        def wait() -> None:
            while_waiting(progress.num_finished, progress.num_trajectories)

        groups = policy.roll_out(prompts, n=n, sampling=sampling, while_waiting=wait)
    failure = total_failure(groups)
    metrics, intervals = {}, {}
    if not failure:
        rates = {name: prompt_scores(groups, k) for name, k in _rates(groups).items()}
        metrics = validation_metrics(groups, "") | {name: fmean(of) for name, of in rates.items() if name != _ACCURACY}
        intervals = {name: found for name, of in rates.items() if (found := interval_95(of)) is not None}
    metrics["val/prompts_left_out"] = policy.num_filtered
    return Measured(metrics, groups, failure, policy.num_filtered, intervals)


def evaluate(config: Config, out: str | None) -> int:
    """Sample every prompt of `data.val_files`, print the numbers, write them and the rollouts into `out`. Returns 0.

    What a process that was ended had finished lies in `out` until then, and is not sampled again.

    Raises:
        VerlMTError: bad input, or not one trajectory survived.
    """
    folder = None if out is None else Path(out).expanduser()
    run = None if folder is None or config.trainer.deterministic else _unfinished(config, folder)
    try:
        with _progress() as finished:
            found = measure(config, finished, None if run is None else GroupSpool(run.path / _SPOOL, version=0))
    except BaseException:
        if run is not None:
            _leave(run)
        raise
    if found.failure is None:
        n = config.actor_rollout_ref.rollout.val_kwargs.n
        _show(found.metrics, f"{len(found.groups)} prompts x {n} samples", found.intervals)
        if n > 1:
            print(start_for_groups(found.groups))
    if found.num_left_out:
        limit = config.data.max_prompt_length
        print(f"left out: {found.num_left_out} prompt(s) longer than data.max_prompt_length={limit} tokens")
    if folder is not None:
        write_measured(found, folder)
        print(f"written to {folder}")
    if run is not None:
        shutil.rmtree(run.path)
        run.close()
    if found.failure is not None:
        raise UserCodeError(f"nothing could be measured, all failed: {found.failure}")
    return 0


_SPOOL = "spool"


def _unfinished(config: Config, out: Path) -> RunDirectory:
    """`out/unfinished`: what this evaluation keeps for a process that goes on, or what it goes on with.

    Raises:
        CheckpointError: an evaluation that was ended there had another configuration, or other files that it names.
    """
    wanted = out / "unfinished"
    mode = "other_data" if config.trainer.resume_mode == "other_data" else "auto"
    place = replace(config.trainer, default_local_dir=str(wanted), resume_mode=mode, resume_from_path=None)
    snapshot = yaml.safe_load(config_to_yaml(config))
    run = RunDirectory.open(place, snapshot | {"files": _files(snapshot)}, way_out="give another --out")
    if run.path != wanted:
        run.abandon()
        raise CheckpointError(f"{wanted} is in use by another process. Give another --out")
    return run


def _leave(run: RunDirectory) -> None:
    """It ends before its numbers are there."""
    if kept := len(list((run.path / _SPOOL).glob("*"))):
        print(f"{kept} finished prompt(s) are kept in {run.path}: the same command goes on with them", file=sys.stderr)
        run.close()
    else:
        run.abandon()
        with contextlib.suppress(OSError):  # it was there, with something in it
            run.path.parent.rmdir()


def _files(value: Any) -> list[str]:
    """Size and time of change of each file that a configuration names: data, a model's, code of the user's."""
    if isinstance(value, dict | list):
        return [state for of in (value.values() if isinstance(value, dict) else value) for state in _files(of)]
    if not isinstance(value, str):
        return []
    named = os.path.expanduser(value.split(":")[0])
    files = map(str, Path(named).glob("*")) if os.path.isfile(f"{named}/config.json") else (named,)
    states = {file: os.stat(file) for file in sorted(files) if os.path.isfile(file)}  # a long text is none
    return [f"{file}: {state.st_size} bytes of {state.st_mtime_ns} ns" for file, state in states.items()]


_PROGRESS_EVERY_S = 60.0


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Takes how many conversations are finished, and of how many: a moving line in a terminal, a line a minute else."""
    console = terminal(stderr=True)
    said_s = time.monotonic()

    def finished(done: int, of: int) -> None:
        nonlocal said_s
        text = f"{done} of {of} conversations"
        if status is not None:
            status.update(text)
        elif time.monotonic() > said_s + _PROGRESS_EVERY_S:
            said_s = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    with console.status("sampling") if console.is_terminal else contextlib.nullcontext() as status:
        yield finished


def write_measured(found: Measured, folder: Path) -> None:
    """`metrics.json`, with the ends of the intervals, and `rollouts.jsonl`, as `report` and `sft` read them."""
    folder.mkdir(parents=True, exist_ok=True)
    ends = {f"{name}/{end}": value for name, of in found.intervals.items() for end, value in zip(("low", "high"), of)}
    (folder / "metrics.json").write_text(json.dumps(found.metrics | ends, indent=1) + "\n")
    rows = (trajectory_to_row(t, step=0) for g in found.groups for t in g.trajectories)
    write_rows(folder / "rollouts.jsonl", rows)


_ACCURACY = "val/accuracy"


def _rates(groups: list[TrajectoryGroup]) -> dict[str, int | None]:
    """`val/accuracy`, and `val/pass_at_k` for the powers of two up to the samples per prompt."""
    smallest = min(len(g.trajectories) for g in groups)
    passes = {f"val/pass_at_{k}": k for k in (1, 2, 4, 8, 16, 32, 64, 128) if k <= smallest}
    return {_ACCURACY: None, **passes}


_TOO_FEW = 0.1
"""Share of prompts with samples of different reward: below it hardly anything of a step's batch is learned from."""


def start_for_groups(groups: list[TrajectoryGroup]) -> str:
    """Whether GRPO and its kin have something to learn from where samples of a prompt are rewarded like these.

    They learn from the differences between the samples of a prompt: prompts whose samples are all rewarded alike give
    no gradient.
    """
    rewards = [[t.reward for t in group.trajectories if t.reward is not None] for group in groups]
    mixed = sum(len(set(of_prompt)) > 1 for of_prompt in rewards)
    right = sum(0 < num_right(g) == len(g.trajectories) for g in groups)
    wrong = sum(num_right(g) == 0 for g in groups)
    text = (
        f"{mixed} of {len(groups)} prompts have samples of different reward (all right: {right}, all wrong: {wrong}): "
    )
    if mixed >= _TOO_FEW * len(groups):
        return f"{text}a start that GRPO can learn from"
    if right > wrong:
        return f"{text}too easy for GRPO, nearly all is right already; give harder prompts, or more samples (rollout.n)"
    return (
        f"{text}too hard for GRPO, which learns from these alone; look at the samples (--out), then give easier "
        "prompts or a cold start (docs/cold_start.md)"
    )


def _show(metrics: dict[str, float], title: str, intervals: dict[str, tuple[float, float]]) -> None:
    table = Table(title=title)
    table.add_column("metric")
    table.add_column("value", justify="right")
    table.add_column("95 % interval")
    for name, value in metrics.items():
        ends = intervals.get(name)
        table.add_row(name, f"{value:.4f}", "" if ends is None else f"{ends[0]:.4f} to {ends[1]:.4f}")
    terminal().print(table)


def chat(config: Config, system: str | None) -> int:
    """Read a line, let the model and its tools work, show what they said; until an empty line or the end of input.

    Raises:
        ConfigError: the model is to play in an environment, where nobody else speaks.
    """
    if config.actor_rollout_ref.rollout.environment.is_configured:
        raise ConfigError(
            "a conversation with a person has no environment. Set actor_rollout_ref.rollout.environment.path=null, or "
            "evaluate without --chat"
        )
    _lift_limits(config)
    console = terminal()
    with Inference(config) as policy:
        opening = _opening(policy, system)
        for message in opening:
            _print_message(console, message)
        console.print("[dim]an empty line ends the conversation[/]")
        conversation = _Conversation(policy, opening)
        try:
            # Lines are read in this thread: in another one, input() would keep Ctrl-C from ending the process.
            while not conversation.over and (text := _read_line().strip()):
                for message in policy.stream.call(conversation.say(text)):
                    _print_message(console, message)
                console.print(f"[dim]({conversation.stop_reason})[/]")
        finally:
            policy.stream.call(conversation.close())
    return 0


def _lift_limits(config: Config) -> None:
    """Limits of one training trajectory do not fit a conversation with a person; the model's context remains."""
    model, rollout, actor = (getattr(config.actor_rollout_ref, name) for name in ("model", "rollout", "actor"))
    try:
        loaded = AutoConfig.from_pretrained(
            resolve_model_path(model.path), revision=model.revision, trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"actor_rollout_ref.model.path {model.path!r} cannot be loaded: {error}") from error
    longest = getattr(loaded, "max_position_embeddings", None)
    if rollout.max_model_len is None and longest is not None:
        rollout.max_model_len = min(longest, actor.ppo_max_token_len)
    if rollout.max_model_len is not None:
        rollout.response_length = rollout.max_model_len
    rollout.multi_turn.max_assistant_turns = None
    rollout.max_seconds = None


def _opening(policy: Inference, system: str | None) -> list[Message]:
    """The system message: the caller's, else that of the data, which the model was trained with."""
    if system is not None:
        return [{"role": "system", "content": system}] if system else []
    if policy.config.data.val_files is None:
        return []
    policy.config.data.val_max_samples = 1
    try:
        rows = policy.prompts()
    except DataError as error:
        print(f"no system message: {error}", file=sys.stderr)
        return []
    return [dict(m) for m in rows[0].messages if m["role"] == "system"][:1]


class _Conversation:
    """One trajectory that goes on for as long as a person does."""

    def __init__(self, policy: Inference, opening: list[Message]):
        runner = policy.runner
        self._context, self._opening = runner.context, opening
        self._schemas = policy.tools.schemas() if runner.tools is not None and policy.tools is not None else []
        self._trajectory = Trajectory("chat", "chat", "chat", "chat")
        self._session = RolloutSession(runner.context, self._trajectory)
        self._tools: ToolSession | None = None
        if runner.tools is not None:
            self._tools = runner.tools.open("chat", agent_data=AgentData(self._trajectory))
        self.stop_reason: str = ""
        self.over = False
        """A limit was hit: nothing more fits."""
        runner.context.engine.open_session("chat", 0)

    async def say(self, text: str) -> list[Message]:
        """What the model and its tools answer."""
        message: Message = {"role": "user", "content": text}
        if self._trajectory.records:
            self._trajectory.stop_reason = None
            self._session.extend([message])
        else:
            messages = [*self._opening, message]
            self._session.start(self._context.chat.prompt_ids(messages, self._schemas or None), messages, self._schemas)
        shown = len(self._trajectory.messages)
        await run_tool_loop(self._session, self._tools, None)
        self.stop_reason = str(self._trajectory.stop_reason)
        self.over = self._trajectory.status is not Status.COMPLETED
        return self._trajectory.messages[shown:]

    async def close(self) -> None:
        """Give back what tools and engine hold."""
        self._context.engine.close_session("chat")
        if self._tools is not None:
            await self._tools.close()


def _read_line() -> str:
    try:
        return input("you> ")
    except EOFError:
        return ""


def _print_message(console: Console, message: Message) -> None:
    calls = "".join(
        f" -> {c['function']['name']}({json.dumps(c['function']['arguments'])})" for c in message.get("tool_calls", [])
    )
    style = {"assistant": "green", "tool": "yellow"}.get(message["role"], "dim")
    text = f"{message['role']}> {message.get('content') or ''}{calls}"
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
