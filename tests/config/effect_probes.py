"""Looks at what a configuration does: overrides in, something comparable out. An echo of the config is no effect.

Every probe takes overrides and returns plain values; what the library raises is its text, since being refused is an
effect as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import io
import json
import logging
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import effect_parts
import torch

from verl_mt.config.compose import compose
from verl_mt.data.row_files import read_rows
from verl_mt.engines.scripted import ScriptedEngine, ScriptedTurn
from verl_mt.errors import VerlMTError
from verl_mt.trainer import build
from verl_mt.trainer.build_data import load_data
from verl_mt.trainer.build_rollout import build_chat, build_tools
from verl_mt.trainer.inference import Inference

MINI = (
    "data.train_batch_size=2", "data.train_max_samples=16", "data.val_max_samples=2",
    "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.rollout.response_length=48",
    "actor_rollout_ref.actor.optim.lr=1e-3", "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
    "reward.path=effect_parts:by_length",
    "trainer.total_training_steps=2", "trainer.save_freq=-1", "trainer.test_freq=-1", "trainer.val_before_train=False",
    "trainer.logger=[]", "trainer.export_at_end=False", "trainer.deterministic=True",
)  # fmt: skip
"""Two deterministic steps, half a second; every group has a signal."""
Probe = Callable[[tuple[str, ...]], Any]


def refused(probe: Probe) -> Probe:
    """What is raised is what is seen."""

    @functools.wraps(probe)
    def seen(overrides: tuple[str, ...]) -> Any:
        try:
            return probe(overrides)
        except VerlMTError as error:
            return f"{type(error).__name__}: {error}"

    return seen


# --- rows, prompts, templates, models


@refused
def drawn(overrides: tuple[str, ...]) -> Any:
    """The prompts and labels of the first rows, those of validation, and what was left out."""
    few = ("data.train_max_samples=12", "data.val_max_samples=3", "data.train_batch_size=2")
    config = compose([*few, *overrides])
    data = load_data(config, build_chat(config), build_tools(config))
    rows = data.sampler.next_batch(8)
    prompts = [data.prompts.build(row) for row in rows]
    return {
        "rows": [(row.index, row.source, row.prompt, row.label, row.ground_truth) for row in rows],
        "ids": [p.ids for p in prompts if p is not None],
        "tools": [len(p.tools) for p in prompts if p is not None],
        "num_rows": data.sampler.num_rows,
        "val": [(p.row.prompt, p.ids) for p in data.val_prompts],
        "counts": data.counts,
    }


@refused
def chat(overrides: tuple[str, ...]) -> Any:
    """The ids of a small prompt."""
    made = build_chat(compose([*overrides]))
    return made.prompt_ids([{"role": "user", "content": "1 <|im_end|>?"}], None)


@refused
def model(overrides: tuple[str, ...]) -> Any:
    """What kind of policy the workers hold."""
    config = compose([*overrides])
    group = build.build_workers(config, total_steps=2)
    try:
        policy: Any = group.policy_module
        scales = {m.scaling["default"] for m in policy.modules() if isinstance(getattr(m, "scaling", None), dict)}
        return {
            "parameters": group.num_parameters,
            "trained": group.num_trained,
            "dtypes": sorted({str(p.dtype) for p in policy.parameters()}),
            "attention": policy.config._attn_implementation,
            "recomputes": bool(getattr(policy, "is_gradient_checkpointing", False)),
            "scales": sorted(scales),
            "sum": float(sum(p.detach().float().abs().sum() for p in policy.parameters())),
        }
    finally:
        group.close()


@refused
def placed(overrides: tuple[str, ...]) -> Any:
    """What the check of a whole start says, nothing made."""
    compose([*overrides])
    return ""


@refused
def started(overrides: tuple[str, ...]) -> Any:
    """What the engine says of the configuration, nothing made."""
    from verl_mt import engines

    config = compose([*overrides])
    engines.check(config.actor_rollout_ref, config.trainer)
    return ""


# --- whole runs


@dataclass
class Ran:
    """What a small run left behind."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    weights: str = ""
    files: list[str] = field(default_factory=list)
    rows: list[Any] = field(default_factory=list)
    val_rows: list[Any] = field(default_factory=list)
    shapes: list[Any] = field(default_factory=list)
    """Of the ids of every forward pass of policy, reference and critic."""
    printed: str = ""
    steps: int = 0
    threads: int = 0
    live: bool = False
    """A progress bar."""
    warned: list[str] = field(default_factory=list)
    error: str = ""


@functools.lru_cache(maxsize=64)
def run(overrides: tuple[str, ...]) -> Ran:
    """Train; in a directory that is gone afterwards."""
    ran, place = Ran(), Path(tempfile.mkdtemp(prefix="verl_mt_effect_")) / "run"
    threads = torch.get_num_threads()
    out = io.StringIO()
    words = [o.replace("$RUN", str(place)) for o in overrides]
    named = any(w.startswith(("trainer.default_local_dir", "trainer.experiment_name")) for w in words)
    listener = _Listener(ran.warned)
    logging.getLogger("verl_mt").addHandler(listener)
    try:
        with contextlib.redirect_stdout(out), contextlib.chdir(place.parent):
            config = compose([*MINI, *([] if named else [f"trainer.default_local_dir={place}"]), *words])
            _fit(config, ran)
    except (VerlMTError, SystemExit) as error:
        ran.error = f"{type(error).__name__}: {error}"
    finally:
        logging.getLogger("verl_mt").removeHandler(listener)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
    ran.printed = _plain(out.getvalue().replace(str(place.parent), ""))
    _collect(place.parent, ran)
    shutil.rmtree(place.parent)
    return ran


class _Listener(logging.Handler):
    def __init__(self, heard: list[str]):
        super().__init__(logging.WARNING)
        self.heard = heard

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record.getMessage())


def _plain(text: str) -> str:
    """Without numbers, frames and what the clock decides, which may be broken over lines: these begin with spaces."""
    by_clock, kept, out = ("rollouts spent", "held by", "most in one step"), [], False
    for line in text.splitlines():
        words = " ".join(re.sub(r"[│─╭╮╰╯]", " ", line).split())
        out = out if line.startswith("│    ") else words.startswith(by_clock)
        if words and not out:
            kept.append(re.sub(r"\d[\d,]*(\.\d+)?(e-?\d+)?", "#", words))
    return "\n".join(kept)


def _fit(config: Any, ran: Ran) -> None:
    trainer = build.build_trainer(config)
    ran.threads, ran.live = torch.get_num_threads(), trainer.log.display._progress is not None
    workers = trainer.workers
    modules = {id(m): m for m in _modules(workers)}

    def note(module: Any, args: Any) -> None:
        ran.shapes.append(tuple(args[0].shape))

    embeddings = [e for m in modules.values() for e in m.modules() if isinstance(e, torch.nn.Embedding)]
    hooks = [embedding.register_forward_pre_hook(note) for embedding in embeddings]
    try:
        trainer.fit()
        ran.steps = trainer.step_number
        digest = hashlib.sha256()
        for name, tensor in sorted(workers.policy_module.state_dict().items()):
            digest.update(name.encode() + tensor.detach().float().cpu().contiguous().numpy().tobytes())
        ran.weights = digest.hexdigest()
    finally:
        for hook in hooks:
            hook.remove()


def _modules(workers: Any) -> list[Any]:
    found = [workers.policy_module]
    for name in ("_ref", "ref", "_critic", "critic"):
        worker = getattr(workers, name, None)
        module = getattr(worker, "module", None)
        if isinstance(module, torch.nn.Module):
            found.append(module)
    return found


def _collect(place: Path, ran: Ran) -> None:
    for file in sorted(place.rglob("*")):
        if file.is_file() and not any(part.startswith("events.out") for part in file.parts):
            ran.files.append(str(file.relative_to(place)))
    for file in place.rglob("metrics.jsonl"):
        ran.lines = [json.loads(line) for line in file.read_text().splitlines()]
    for file in sorted(place.rglob("rollouts/*_*")):
        target = ran.val_rows if file.name.startswith("val") else ran.rows
        for row in read_rows(file):
            advantages = [r["advantages"] for r in row["records"]]
            target.append(
                (file.name, row["trajectory_id"], row["turn_texts"], row["reward"], row["reward_parts"], advantages)
            )


def metric(name: str) -> Probe:
    """One number of every step of a run."""

    def seen(overrides: tuple[str, ...]) -> Any:
        ran = run(overrides)
        return ran.error or [line.get(name) for line in ran.lines]

    return seen


def signs(overrides: tuple[str, ...]) -> Any:
    """What the collapse guard saw."""
    ran = run(overrides)
    return ran.error or [sorted(name for name in line if name.startswith("collapse/")) for line in ran.lines]


def of_run(name: str) -> Probe:
    """A field of `Ran`."""

    def seen(overrides: tuple[str, ...]) -> Any:
        ran = run(overrides)
        return (ran.error, getattr(ran, name))

    return seen


weights, files, printed, shapes, rows, val_rows, steps, live, warned = map(
    of_run, ("weights", "files", "printed", "shapes", "rows", "val_rows", "steps", "live", "warned")
)


# --- conversations with a script in the model's place


def call(expression: str = "1+1") -> str:
    return f'<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'


SCRIPTS: dict[str, Callable[[int], str]] = {
    "answers": lambda turn: "#### 1",
    "calls once": lambda turn: call() if turn == 1 else "#### 2",
    "calls always": lambda turn: call(f"{turn}+1"),
    "calls twice at once": lambda turn: f"{call('1+1')}\n{call('2+2')}" if turn == 1 else "#### 2",
    "calls with a number": lambda turn: call().replace('"1+1"', "5") if turn == 1 else "#### 2",
    "writes before its call": lambda turn: f"so{call()} then" if turn == 1 else "#### 2",
    "calls in its thought": lambda turn: f"<think>\nhm\n{call()}" if turn == 1 else "#### 2",
    "thinks": lambda turn: "<think>\nhm\n</think>\n\nyes",
}


def talk(script: str, *, latency_s: float = 0.0, fail_at: tuple[int, ...] = (), n: int = 1) -> Probe:
    """What becomes of the first validation prompt's conversations."""

    @refused
    def seen(overrides: tuple[str, ...]) -> Any:
        base = ("data.val_files=verl_mt.tiny.problems:rows", "data.val_max_samples=1", "trainer.num_threads=1")
        config = compose([*base, *overrides])
        chat = build_chat(config)

        def turn(request: Any) -> ScriptedTurn:
            number = int(request.request_id.split("/")[-1])
            ids = [*chat.encode_text(SCRIPTS[script](number), neutral=False), min(chat.stop_token_ids)]
            return ScriptedTurn(ids, None, "stop", [-0.1] * len(ids), latency_s=latency_s)

        engine = _Counting(turn, decode=chat.decode, fail_at=fail_at)
        effect_parts.SEEN.clear()
        effect_parts.Slow.most = 0
        with Inference(config, engine=engine) as inference:
            groups = inference.roll_out(inference.prompts(), n=n, sampling=None, name="talk")
            lock_step = inference.runner.context.engine.capabilities.lock_step
            mismatches = inference.runner.context.sanity.metrics()
        return {
            "trajectories": [_told(t) for g in groups for t in g.trajectories],
            "asked": [(len(r.input_ids), r.sampling.max_new_tokens, r.sampling.stop) for r in engine.requests],
            "sampling": [(s.temperature, s.top_p, s.top_k, s.min_p) for s in (r.sampling for r in engine.requests[:1])],
            "most at once": engine.most,
            "tools at once": effect_parts.Slow.most,
            "lock step": lock_step,
            "mismatches": mismatches,
            "seen": list(effect_parts.SEEN),
        }

    return seen


class _Counting(ScriptedEngine):
    """Knows how many requests were there at once."""

    live = most = 0

    async def generate(self, request: Any) -> Any:
        self.live += 1
        self.most = max(self.most, self.live)
        try:
            await asyncio.sleep(0)
            return await super().generate(request)
        finally:
            self.live -= 1


def _told(trajectory: Any) -> Any:
    counted = {k: v for k, v in trajectory.counters.items() if not k.endswith("_s")}
    return {
        "turns": trajectory.turn_texts,
        "stop": str(trajectory.stop_reason),
        "error": bool(trajectory.error),
        "messages": [(m["role"], str(m.get("content"))) for m in trajectory.messages],
        "reward": trajectory.reward,
        "parts": trajectory.reward_parts,
        "scores": trajectory.turn_scores,
        "counters": counted,
        "records": [(len(r.token_ids), sum(r.sampled), sum(r.loss_mask)) for r in trajectory.records],
        "sanity": trajectory.sanity is not None,
    }


# --- the command that only looks


def dry(overrides: tuple[str, ...]) -> Any:
    """Whether the command trains, or prints a list and ends."""
    from verl_mt.trainer.__main__ import train

    place = tempfile.mkdtemp(prefix="verl_mt_dry_")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            train(compose([*MINI, *overrides, f"trainer.default_local_dir={place}/run"]))
            ended = "trained"
        except SystemExit as status:
            ended = f"status {status.code}"
    made = [path.name for path in Path(place).iterdir()]
    shutil.rmtree(place)
    return {"ended": ended, "lists": "chat template" in out.getvalue(), "made": made}
