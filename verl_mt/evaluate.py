"""`python -m verl_mt.evaluate`: accuracy and pass@k of a model on a data file, or a conversation with it.

    python -m verl_mt.evaluate --run runs/tiny                       # a run's export, its own tools and data
    python -m verl_mt.evaluate --model PATH --data FILE.parquet --n 4 --out eval/ [Hydra overrides]
    python -m verl_mt.evaluate --run runs/tiny --chat                # talk to it; its tools really run

The same tools, interactions, limits and reward as in training: what counts is the config, not this command.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from verl_mt.config.compose import compose
from verl_mt.config.schema import Config
from verl_mt.data.run_files import trajectory_to_row, write_rows
from verl_mt.data.trajectory import Trajectory, TrajectoryGroup
from verl_mt.diagnostics.step_metrics import pass_at_k, validation_metrics
from verl_mt.errors import ConfigError, VerlMTError
from verl_mt.rollout.session import RolloutSession
from verl_mt.rollout.tool_loop import run_tool_loop
from verl_mt.trainer.build import validation_sampling
from verl_mt.trainer.inference import Inference


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 for bad input (one line on stderr)."""
    parser = argparse.ArgumentParser(prog="python -m verl_mt.evaluate", description=__doc__.split("\n")[0])
    parser.add_argument("--run", help="run directory: its config.yaml and its hf/ export")
    parser.add_argument("--model", help="local folder or hub name")
    parser.add_argument(
        "--data", help="parquet or JSONL file, or module:function; default: the config's data.val_files"
    )
    parser.add_argument("--n", type=int, help="samples per prompt")
    parser.add_argument("--out", help="folder for metrics.json and rollouts.jsonl")
    parser.add_argument("--chat", action="store_true", help="talk to the model instead")
    args, overrides = parser.parse_known_args(argv)
    try:
        config = _config(args, overrides)
        return _chat(config) if args.chat else _evaluate(config, args.out)
    except VerlMTError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _config(args: argparse.Namespace, overrides: list[str]) -> Config:
    if args.model:
        overrides = [*overrides, f"actor_rollout_ref.model.path={args.model}"]
    if args.data:
        overrides = [*overrides, f"data.val_files={args.data}", "data.val_max_samples=-1"]
    if args.n:
        overrides = [*overrides, f"actor_rollout_ref.rollout.val_kwargs.n={args.n}"]
    if not args.run:
        return compose(overrides)
    folder = Path(args.run)
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"--run: {folder} has no config.yaml; name a run directory such as runs/tiny")
    if not args.model:
        if not (folder / "hf").is_dir():
            raise ConfigError(f"--run: {folder} has no hf/ export (the run is not over); name a model with --model")
        overrides = [*overrides, f"actor_rollout_ref.model.path={folder / 'hf'}"]
    return compose(overrides, config_name=str(folder / "config.yaml"))


def _evaluate(config: Config, out: str | None) -> int:
    validation = config.actor_rollout_ref.rollout.val_kwargs
    with Inference(config) as policy:
        prompts = policy.prompts()
        groups = policy.roll_out(prompts, n=validation.n, sampling=validation_sampling(config))
    metrics = validation_metrics(groups, "") | _pass_rates(groups)
    _show(metrics, len(prompts), validation.n)
    if out:
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metrics.json").write_text(json.dumps(metrics, indent=1))
        write_rows(folder / "rollouts.jsonl", (trajectory_to_row(t, step=0) for g in groups for t in g.trajectories))
        print(f"written to {folder}")
    return 0


def _pass_rates(groups: list[TrajectoryGroup]) -> dict[str, float]:
    smallest = min((len(g.trajectories) for g in groups), default=0)
    rates = {}
    for k in (k for k in (1, 2, 4, 8, 16, 32, 64) if k <= smallest):
        right = [sum(t.reward_parts.get("score", 0.0) >= 1.0 for t in g.trajectories) for g in groups]
        rates[f"val/pass_at_{k}"] = sum(
            pass_at_k(len(g.trajectories), c, k) for g, c in zip(groups, right, strict=True)
        ) / len(groups)
    return rates


def _show(metrics: dict[str, float], num_prompts: int, n: int) -> None:
    table = Table(title=f"{num_prompts} prompts x {n} samples")
    table.add_column("metric")
    table.add_column("value", justify="right")
    for name, value in metrics.items():
        table.add_row(name, f"{value:.4f}")
    Console().print(table)


def _chat(config: Config) -> int:
    console = Console()
    with Inference(config) as policy:
        console.print("[dim]an empty line ends the conversation[/]")
        policy.stream.call(_converse(policy, console))
    return 0


async def _converse(policy: Inference, console: Console) -> None:
    """Read a line, let the model and its tools work, print what they said; until an empty line or the end of input."""
    runner = policy.runner
    tool_schemas = policy.tools.schemas() if policy.tools is not None else []
    trajectory = Trajectory("chat", "chat", "chat", "chat")
    session = RolloutSession(runner.context, trajectory)
    tools = runner.tools.open("chat", None) if runner.tools is not None else None
    runner.context.engine.open_session("chat", 0)
    try:
        while text := (await asyncio.to_thread(_read_line)).strip():
            message = {"role": "user", "content": text}
            if not trajectory.records:
                ids = runner.context.chat.prompt_ids([message], tool_schemas or None)
                session.start(ids, [message], tool_schemas)
            else:
                session.extend([message])
            shown = len(trajectory.messages)
            await run_tool_loop(session, tools, None)
            for answer in trajectory.messages[shown:]:
                _print_message(console, answer)
            console.print(f"[dim]({trajectory.stop_reason})[/]")
            if trajectory.stop_reason is not None and trajectory.stop_reason.status != "completed":
                break
            trajectory.stop_reason = None
    finally:
        runner.context.engine.close_session("chat")
        if tools is not None:
            await tools.close()


def _read_line() -> str:
    try:
        return input("you> ")
    except EOFError:
        return ""


def _print_message(console: Console, message: dict[str, Any]) -> None:
    calls = "".join(
        f" -> {c['function']['name']}({json.dumps(c['function']['arguments'])})" for c in message.get("tool_calls", [])
    )
    style = "green" if message["role"] == "assistant" else "yellow"
    console.print(
        f"{message['role']}> {message.get('content') or ''}{calls}", style=style, markup=False, highlight=False
    )


if __name__ == "__main__":
    sys.exit(main())
