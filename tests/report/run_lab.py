"""Run directories as the trainer would have written them, of any size, without training anything."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from verl_mt.data.run_files import append_metrics, append_token_texts, trajectory_to_row, write_rows
from verl_mt.data.trajectory import StopReason, TimeSpan, Trajectory, TrajectoryRecord

WORDS = [a + b + c for a in "bcdfghjklmnp" for b in "aeiou" for c in "lmnr"]


@dataclass
class Vocabulary:
    """A token for every word with the space before it."""

    ids: dict[str, int] = field(default_factory=dict)

    def encode(self, text: str) -> list[int]:
        pieces = re.findall(r"<\|[a-z_]+\|>|\n|[^\S\n]*[^\s<]+|[^\S\n]+|<", text)
        assert "".join(pieces) == text
        return [self.ids.setdefault(piece, len(self.ids) + 5) for piece in pieces]


@dataclass
class Lab:
    """Writes one run."""

    folder: Path
    seed: int = 0
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    questions: dict[tuple[int, int], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.folder.mkdir(parents=True, exist_ok=True)

    def config(self, **trainer: Any) -> None:
        settings = {"trainer": {"total_training_steps": 4, **trainer}, "actor_rollout_ref": {"model": {"path": "toy"}}}
        (self.folder / "config.yaml").write_text(yaml.safe_dump(settings))

    def metrics(self, steps: int) -> None:
        for step in range(1, steps + 1):
            numbers = {
                "reward/mean": 0.4 + 0.1 * step, "actor/entropy": 1 / step, "rollout/sampler_kl": 1e-4 * step,
                "rollout/trajectories": 8, "tools/search/calls": 12.0, "tools/search/errors": 1.0, "turns/mean": 2.0,
                "response/tokens_mean": 90.0, "rollout/tokens_per_s": 500.0, "time/rollout_s": 2.0,
                "time/update_s": 1.0,
            }  # fmt: skip
            if step % 2 == 0:
                numbers["val/accuracy"] = 0.5 + 0.05 * step
            append_metrics(self.folder / "metrics.jsonl", {"step": step, **numbers})

    def say(self, words: int) -> str:
        return " ".join(self.random.choice(WORDS) for _ in range(words))

    def trajectory(
        self,
        step: int,
        prompt: int,
        sample: int,
        *,
        answer: str = "",
        words: int = 20,
        question: str = "",
        said: str = "",
    ) -> Trajectory:
        """Two assistant turns around one answer of a tool; the last one is `said`."""
        name = f"s{step:06d}.{prompt:05d}"
        random, encode = self.random, self.vocabulary.encode
        if not question:  # the same for all samples of a group
            question = self.questions.setdefault((step, prompt), f"Question {prompt} {self.say(words)}?")
        call, said = self.say(words), said or self.say(words)
        result = answer or self.say(words)
        record, clock = TrajectoryRecord(), 1000.0 * step + 0.01 * prompt

        def sampled(text: str, turn: int) -> None:
            ids = encode(text)
            record.append_sampled(ids, [-random.expovariate(2) for _ in ids], [step - 1] * len(ids), turn=turn)

        given = (
            f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        )
        record.append_given(encode(given), kind="prompt", turn=0)
        sampled(f"{call}<|im_end|>", 1)
        between = f"\n<|im_start|>tool\n{result}<|im_end|>\n<|im_start|>assistant\n"
        record.append_given(encode(between), kind="observation", turn=1)
        sampled(f"{said}<|im_end|>", 2)
        arguments = {"query": call}
        function = {"id": "call_1_0", "type": "function", "function": {"name": "search", "arguments": arguments}}
        spans = [
            TimeSpan("queue", clock, clock + 0.1, 1), TimeSpan("prefill", clock + 0.1, clock + 0.2, 1),
            TimeSpan("decode", clock + 0.2, clock + 1.0, 1), TimeSpan("tool", clock + 1.0, clock + 1.5, 1, "search"),
            TimeSpan("decode", clock + 1.5, clock + 2.0 + 0.1 * sample, 2),
            TimeSpan("reward", clock + 3.0, clock + 3.1, 2),
        ]  # fmt: skip
        return Trajectory(
            f"{name}.{sample:02d}", name, name, f"{name}.{sample:02d}", "toy", prompt, source="rows.jsonl",
            ground_truth=str(prompt), reward_parts={"score": float((prompt + sample) % 2), "form": 0.25 * sample},
            messages=[
                {"role": "system", "content": "Be brief."}, {"role": "user", "content": question},
                {"role": "assistant", "content": call, "tool_calls": [function]},
                {"role": "tool", "content": result, "tool_call_id": "call_1_0", "name": "search"},
                {"role": "assistant", "content": said},
            ],
            tool_calls=[{
                "turn": 1, "name": "search", "call_id": "call_1_0", "arguments": arguments, "failure": None,
                "latency_s": 0.5, "step_reward": 0.0,
            }],
            records=[record], reward=float((prompt + sample) % 2), num_turns=2, stop_reason=StopReason.FINISHED,
            counters={"tools/search/calls": 1.0}, time_spans=spans,
        )  # fmt: skip

    def row(self, trajectory: Trajectory, step: int, *, drift: float = 0.0) -> dict[str, Any]:
        """With what an update would have computed: the trainer's log-probs are the sampler's plus about `drift`."""
        columns: dict[str, list[Any]] = {"advantages": [], "old_log_probs": [], "clipped": []}
        sign = 1.0 if trajectory.reward else -1.0
        for record in trajectory.records:
            noise = [drift + self.random.gauss(0, 1e-3) for _ in record.token_ids]
            columns["advantages"].append([sign * bit for bit in record.loss_mask])
            columns["old_log_probs"].append(
                [(p + n) * bit for p, n, bit in zip(record.rollout_log_probs, noise, record.loss_mask)]
            )
            columns["clipped"].append([0.0] * len(record.token_ids))
        return trajectory_to_row(trajectory, step=step, **columns)

    def write(self, step: int, rows: list[dict[str, Any]], split: str = "step") -> None:
        write_rows(self.folder / "rollouts" / f"{split}_{step:06d}.jsonl", rows)

    def texts(self) -> None:
        append_token_texts(self.folder, {token_id: text for text, token_id in self.vocabulary.ids.items()})


def small_run(folder: Path, *, steps: int = 4, prompts: int = 4, samples: int = 2, finished: bool = True) -> Lab:
    """A complete small run."""
    lab = Lab(folder)
    lab.config()
    lab.metrics(steps)
    for step in range(1, steps + 1):
        lab.write(step, [lab.row(lab.trajectory(step, p, s), step) for p in range(prompts) for s in range(samples)])
    lab.texts()
    if finished:
        (folder / "FINISHED").write_text("")
    return lab
