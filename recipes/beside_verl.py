"""A model of the usual size on GPUs: this library's recipe and verl's own command on the same rows, one JSON of both.

    python recipes/beside_verl.py --task gsm8k --model 0.5b --gpus 1 --out results/gsm8k_0.5b_1gpu.json

`--print` shows both commands and runs nothing. `--only ours` or `--only verl` runs one; what the file has of the other
stays in it, so each may run in an environment of its own, one after the other. verl is measured as released in version
0.6.1 (`pip install verl==0.6.1`, with SGLang, in its own environment; `--verl-python` names that one's Python).

Both commands are made from `TASKS` and `MACHINES`; a test reads verl's as `python -m verl_mt.migrate` does and compares
every key of the two. The yardsticks are the same for both: tokens are those of the prompts and responses of a step,
memory is what is in use on the fullest GPU, accuracy is that of the validations before the first step and after the
last.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

RECIPES = Path(__file__).resolve().parent
VERL = "0.6.1"
MODELS = {size: f"Qwen/Qwen2.5-{size.upper()}-Instruct" for size in ("0.5b", "1.5b", "3b")}
SIDES = ("ours", "verl")


@dataclass(frozen=True)
class Task:
    """What is learned, and how: the numbers of the recipe's configuration that verl has to be told."""

    config: str
    tool: dict[str, Any]
    """Of the tools file, for either library."""
    n: int
    response_length: int
    val_samples: int
    prepare: tuple[str, ...]
    """Arguments of its prepare.py, but for split and file."""
    warmup_steps: int = 0


TASKS = {
    "gsm8k": Task(
        config="gsm8k_tool_grpo",
        tool={
            "class_name": "verl_mt.tools.gsm8k_tool.Gsm8kTool",
            "config": {"type": "native"},
            "name": "calc_gsm8k_reward",
            "description": "Check an answer to a GSM8K problem. 1.0 means it is correct, 0.0 that it is not.",
            "argument": ("answer", {"type": "string", "description": "The answer to the problem, a number"}),
        },
        n=16,
        response_length=1024,
        val_samples=-1,
        prepare=("--style", "tool"),
    ),
    "search": Task(
        config="search_tool_grpo",
        tool={
            "class_name": "verl_mt.tools.search_tool.SearchTool",
            "config": {"retrieval_service_url": "", "topk": 3, "type": "native"},
            "name": "search",
            "description": "Search a collection of passages.",
            "argument": (
                "query_list",
                {"type": "array", "items": {"type": "string"}, "description": "What to look for, one query or several"},
            ),
        },
        n=5,
        response_length=4096,
        val_samples=500,
        prepare=("--source", "RUC-NLPIR/FlashRAG_datasets:nq", "--style", "tool"),
        warmup_steps=10,
    ),
}


@dataclass(frozen=True)
class Machine:
    """How the work is laid out; nothing of it changes what is computed."""

    max_tokens: int
    """Of a micro-batch, per GPU."""
    engine_memory: float
    """The share of a GPU's memory that the engine takes."""


MACHINES = {
    ("0.5b", 1): Machine(32768, 0.5), ("1.5b", 1): Machine(24576, 0.4), ("3b", 1): Machine(16384, 0.3),
    ("0.5b", 8): Machine(32768, 0.6), ("1.5b", 8): Machine(32768, 0.5), ("3b", 8): Machine(32768, 0.4),
}  # fmt: skip
"""(model, GPUs of 80 GB) -> its layout. Estimates from the table in docs/scaling.md, run on no GPU yet."""


@dataclass
class Stage:
    """One comparison."""

    task: str
    model: str
    """A size of `MODELS`, a hub name, or a folder."""
    gpus: int
    steps: int
    train: Path
    val: Path
    folder: Path
    """For everything that the two runs write."""
    search_url: str = "http://127.0.0.1:8000/retrieve"
    verl_python: str = sys.executable
    more: list[str] = field(default_factory=list)
    """Overrides in this library's keys; none for verl."""

    @property
    def machine(self) -> Machine:
        """The model's; of a model that is none of `MODELS` the largest one's."""
        return MACHINES.get((self.model, self.gpus), MACHINES["3b", self.gpus])

    def tools_file(self, side: str) -> Path:
        """Written for this side: the same tool, described in the same words."""
        tool = TASKS[self.task].tool
        argument, schema = tool["argument"]
        config = {k: self.search_url if k == "retrieval_service_url" else v for k, v in tool["config"].items()}
        if side == "ours":
            config.pop("type")
        function = {
            "name": tool["name"],
            "description": tool["description"],
            "parameters": {"type": "object", "properties": {argument: schema}, "required": [argument]},
        }
        name = tool["class_name"] if side == "ours" else tool["class_name"].replace("verl_mt.", "verl.", 1)
        entry = {"class_name": name, "config": config, "tool_schema": {"type": "function", "function": function}}
        path = self.folder / f"tools_{side}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump({"tools": [entry]}, sort_keys=False))
        return path.resolve()

    def ours(self) -> list[str]:
        """The recipe's configuration, on this machine."""
        machine = self.machine
        words = [
            sys.executable, "-m", "verl_mt.trainer",
            f"experiment={TASKS[self.task].config}",
            f"data.train_files={self.train}", f"data.val_files={self.val}",
            f"actor_rollout_ref.model.path={MODELS.get(self.model, self.model)}",
            f"actor_rollout_ref.actor.ppo_max_token_len={machine.max_tokens}",
            f"actor_rollout_ref.rollout.gpu_memory_utilization={machine.engine_memory}",
            "actor_rollout_ref.ref.offload=True",
            f"actor_rollout_ref.rollout.tool_kwargs.tools_config_file={self.tools_file('ours')}",
            "trainer.device=cuda", f"trainer.total_training_steps={self.steps}", f"trainer.test_freq={self.steps}",
            "trainer.save_freq=-1", "trainer.val_before_train=True", "trainer.logger=[console]",
            f"trainer.default_local_dir={self.folder / 'ours'}",
        ]  # fmt: skip
        if self.task == "search":  # verl limits whole responses, not their turns
            words.append("actor_rollout_ref.rollout.max_tokens_per_turn=null")
        if self.gpus > 1:
            words += ["trainer.placement=ray", f"trainer.n_workers_per_node={self.gpus}"]
        return words + self.more

    def verl(self) -> list[str]:
        """verl's command for the same."""
        task, machine = TASKS[self.task], self.machine
        actor, rollout, ref = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "ref"))
        return [
            self.verl_python, "-m", "verl.trainer.main_ppo",
            "algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=False",
            f"data.train_files={self.train}", f"data.val_files={self.val}", "data.train_batch_size=256",
            "data.max_prompt_length=1024", f"data.max_response_length={task.response_length}",
            f"data.val_max_samples={task.val_samples}", "data.filter_overlong_prompts=True", "data.truncation=error",
            "data.return_raw_chat=True",
            f"actor_rollout_ref.model.path={MODELS.get(self.model, self.model)}",
            "actor_rollout_ref.model.use_remove_padding=True",
            "actor_rollout_ref.model.enable_gradient_checkpointing=True",
            f"{actor}.optim.lr=1e-6", f"{actor}.optim.lr_warmup_steps={task.warmup_steps}",
            f"{actor}.ppo_mini_batch_size=256", f"{actor}.use_dynamic_bsz=True",
            f"{actor}.ppo_max_token_len_per_gpu={machine.max_tokens}",
            f"{actor}.use_kl_loss=True", f"{actor}.kl_loss_coef=0.001", f"{actor}.kl_loss_type=low_var_kl",
            f"{actor}.entropy_coeff=0",
            f"{rollout}.name=sglang", f"{rollout}.mode=sync", f"{rollout}.n={task.n}",
            f"{rollout}.tensor_model_parallel_size=1", f"{rollout}.gpu_memory_utilization={machine.engine_memory}",
            f"{rollout}.log_prob_use_dynamic_bsz=True",
            f"{rollout}.log_prob_max_token_len_per_gpu={machine.max_tokens}",
            f"{rollout}.multi_turn.enable=True", f"{rollout}.multi_turn.max_assistant_turns=5",
            f"{rollout}.multi_turn.format=hermes",
            f"{rollout}.multi_turn.tool_config_path={self.tools_file('verl')}",
            f"{rollout}.val_kwargs.do_sample=True", f"{rollout}.val_kwargs.temperature=1.0",
            f"{ref}.log_prob_use_dynamic_bsz=True", f"{ref}.log_prob_max_token_len_per_gpu={machine.max_tokens}",
            f"{ref}.fsdp_config.param_offload=True",
            f"trainer.n_gpus_per_node={self.gpus}", "trainer.nnodes=1", "trainer.critic_warmup=0",
            f"trainer.total_training_steps={self.steps}", f"trainer.test_freq={self.steps}", "trainer.save_freq=-1",
            "trainer.val_before_train=True", 'trainer.logger=["console","file"]',
            f"trainer.project_name=beside_{self.task}", f"trainer.experiment_name=verl_{self.model.replace('/', '_')}",
            f"trainer.default_local_dir={self.folder / 'verl' / 'checkpoints'}",
        ]  # fmt: skip


Metrics = dict[int, dict[str, float]]
"""Step -> its numbers; step 0 = the validation before the first one."""


def metrics_of_ours(folder: Path) -> Metrics:
    """Of a run directory; with `trainer.deterministic` its seconds are in a file of their own."""
    found: Metrics = {}
    for name in ("metrics.jsonl", "timings.jsonl"):
        for line in _lines(folder / name):
            found.setdefault(line["step"], {}).update({k: v for k, v in line.items() if isinstance(v, int | float)})
    return found


def metrics_of_verl(folder: Path) -> Metrics:
    """Of the file that verl's `file` logger writes: `{"step": 3, "data": {name: number}}` in each line."""
    return {line["step"]: line["data"] for line in _lines(folder / "metrics.jsonl")}


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _accuracy_of_verl(numbers: dict[str, float]) -> float | None:
    """The mean over data sources of `val-core/SOURCE/VARIABLE/mean@1`; of `acc` where a reward tells it."""
    names = [name for name in numbers if name.startswith("val-core/") and name.endswith("/mean@1")]
    names = [name for name in names if "/acc/" in name] or names
    return statistics.mean(numbers[name] for name in names) if names else None


def _tokens_of_ours(numbers: dict[str, float]) -> float | None:
    means = [numbers.get(name) for name in ("prompt/tokens_mean", "response/tokens_mean")]
    number = numbers.get("rollout/trajectories")
    return None if number is None or None in means else number * sum(mean for mean in means if mean is not None)


@dataclass(frozen=True)
class Yardstick:
    """Where a library says what."""

    accuracy: Callable[[dict[str, float]], float | None]
    tokens: Callable[[dict[str, float]], float | None]
    """Of prompts and responses in a step."""
    seconds: dict[str, tuple[str, ...]]
    """Phase -> names whose sum it is. verl gives its engine the weights within the rollout's time, and computes old
    log-probs apart from the update, which needs no pass of its own for them here."""


YARDSTICKS = {
    "ours": Yardstick(
        lambda numbers: numbers.get("val/accuracy"),
        _tokens_of_ours,
        {
            "rollout, weights": ("time/rollout_s", "time/weights_s"),
            "reference": ("time/ref_s",),
            "update": ("time/update_s",),
            "step": ("time/step_s",),
        },
    ),
    "verl": Yardstick(
        _accuracy_of_verl,
        lambda numbers: numbers.get("perf/total_num_tokens"),
        {
            "rollout, weights": ("timing_s/gen",),
            "reference": ("timing_s/ref",),
            "update": ("timing_s/old_log_prob", "timing_s/update_actor"),
            "step": ("timing_s/step",),
        },
    ),
}


def summary(side: str, metrics: Metrics, gpus: int, peak_memory_gb: float | None) -> dict[str, Any]:
    """The record of one side. What its log does not say is null, and named in `missing`.

    Seconds are medians over the steps, without the first one where there are more: it compiles and warms up.
    """
    yardstick = YARDSTICKS[side]
    steps = [number for number in sorted(metrics) if number > 0]
    measured = steps[1:] or steps
    seconds = {
        phase: _median([_sum(metrics[number], names) for number in measured])
        for phase, names in yardstick.seconds.items()
    }
    rates = []
    for number in measured:
        tokens, time = yardstick.tokens(metrics[number]), _sum(metrics[number], yardstick.seconds["step"])
        rates.append(None if tokens is None or not time else tokens / time / gpus)
    found = {
        "steps": len(steps),
        "accuracy_before": yardstick.accuracy(metrics.get(0, {})),
        "accuracy_after": yardstick.accuracy(metrics[steps[-1]]) if steps else None,
        "tokens_per_second_per_gpu": _median(rates),
        "peak_memory_gb": peak_memory_gb,
        "seconds": seconds,
    }
    missing = [name for name, value in [*found.items(), *seconds.items()] if value is None]
    return {**found, "missing": missing}


def _sum(numbers: dict[str, float], names: Sequence[str]) -> float | None:
    return sum(numbers[name] for name in names) if all(name in numbers for name in names) else None


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known and len(known) == len(values) else None


class Memory(threading.Thread):
    """What is in use on the fullest GPU, in GB, looked at twice a second; None where there is no nvidia-smi."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak: float | None = None
        self._over = threading.Event()

    def run(self) -> None:
        words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while not self._over.wait(0.5):
            try:
                done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True)
            except (OSError, subprocess.SubprocessError):
                return
            used = [float(line) / 1024 for line in done.stdout.split()]
            self.peak = max([self.peak or 0.0, *used])

    def stop(self) -> float | None:
        """The peak."""
        self._over.set()
        self.join()
        return self.peak


class StageError(Exception):
    """A side that could not be run."""


def run_side(stage: Stage, side: str) -> dict[str, Any]:
    """Run one command to its end.

    Raises:
        StageError: it failed; says where its log is and how that ends.
    """
    folder = stage.folder / side
    folder.mkdir(parents=True, exist_ok=True)
    if side == "verl" and subprocess.run([stage.verl_python, "-c", "import verl"], capture_output=True).returncode:
        raise StageError(
            f"{stage.verl_python} has no verl: pip install 'verl=={VERL}' sglang, in an environment of its own, then "
            "--only verl --verl-python ITS_PYTHON"
        )
    words = getattr(stage, side)()
    log = stage.folder / f"{side}.log"
    memory = Memory()
    memory.start()
    with log.open("w") as out:
        environment = os.environ | {"VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl")}
        status = subprocess.run(words, stdout=out, stderr=subprocess.STDOUT, env=environment).returncode
    peak = memory.stop()
    if status:
        last = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise StageError(f"{side} ended with status {status}; its log, {log}, ends:\n{last}")
    metrics = (metrics_of_ours if side == "ours" else metrics_of_verl)(folder)
    return {**summary(side, metrics, stage.gpus, peak), "command": shlex.join(words), "version": _version(stage, side)}


def _version(stage: Stage, side: str) -> str | None:
    if side == "ours":
        try:
            return version("verl_mt")
        except PackageNotFoundError:
            return None
    words = [stage.verl_python, "-c", "from importlib.metadata import version; print(version('verl'))"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip() or None


def prepare(stage: Stage) -> None:
    """Make rows that are not there; both sides read these files."""
    for split, path in (("train", stage.train), ("test", stage.val)):
        if path.exists():
            continue
        kind = ["questions"] if stage.task == "search" else []
        words = [sys.executable, str(RECIPES / stage.task / "prepare.py"), *kind, *TASKS[stage.task].prepare]
        if subprocess.run([*words, "--split", split, "--out", str(path)]).returncode:
            raise StageError(f"{path} could not be made; name files of rows with --train and --val")


def digest(path: Path) -> str:
    """SHA-256 of a file of rows."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--task", choices=sorted(TASKS), required=True)
    parser.add_argument("--model", default="0.5b", help=f"{', '.join(MODELS)}, a hub name or a folder")
    parser.add_argument("--gpus", type=int, choices=(1, 8), default=1)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", choices=SIDES)
    parser.add_argument("--out", type=Path, required=True, help="the JSON; what the runs write goes beside it")
    parser.add_argument("--train", type=Path, help="rows (parquet); made where they are absent")
    parser.add_argument("--val", type=Path)
    parser.add_argument("--search-url", default="http://127.0.0.1:8000/retrieve", help="of the retrieval server")
    parser.add_argument("--verl-python", default=sys.executable)
    parser.add_argument("--print", action="store_true", help="show the commands and run nothing")
    parser.add_argument("overrides", nargs="*", help="for this library's command alone")
    args = parser.parse_args(argv)
    data = Path("data") / args.task
    stage = Stage(
        args.task, args.model, args.gpus, args.steps,
        (args.train or data / "train.parquet").resolve(), (args.val or data / "test.parquet").resolve(),
        args.out.resolve().with_suffix(""), args.search_url, args.verl_python, args.overrides,
    )  # fmt: skip
    sides = [args.only] if args.only else list(SIDES)
    if args.print:
        print("\n\n".join(" \\\n    ".join(map(shlex.quote, getattr(stage, side)())) for side in sides))
        return 0
    failed = 0
    try:
        prepare(stage)
        rows = {split: digest(path) for split, path in (("train", stage.train), ("val", stage.val))}
        result: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
        asked = {"task": args.task, "model": args.model, "gpus": args.gpus, "steps": args.steps, "rows": rows}
        if result and {name: result.get(name) for name in asked} != asked:
            raise StageError(f"{args.out} holds another comparison, or one of other rows; choose another --out")
        result |= asked
        for side in sides:
            try:
                result[side] = run_side(stage, side)
            except StageError as error:
                failed = 1
                print(f"error: {error}", file=sys.stderr)
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(result, indent=2) + "\n")
    except StageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return failed


if __name__ == "__main__":
    sys.exit(main())
