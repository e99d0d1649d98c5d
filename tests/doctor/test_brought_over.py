"""Healthy projects of other libraries' kinds, brought over as their users would: no alarm is raised for any.

They are written after the shapes of published examples: TRL's and open-r1's rewards of completions, verl's GSM8K,
search and multiple-choice scores, ms-swift's countdown and mathematics, slime's reward function, verifiers' parsers and
rubrics.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from parts_project import Project

HEAD = "import json\nimport random\nimport re\nimport string\n\n\n"


def project_of(reward: str, rows: list[dict[str, Any]], **data: Any) -> Callable[[Project], None]:
    """Without tools and user."""

    def build(project: Project) -> None:
        project.write("part_reward.py", HEAD + reward)
        name = re.findall(r"^(?:async )?(?:def |class )?(\w+)(?:\(| = )", reward, re.MULTILINE)[-1]
        project.run["reward"]["name"] = name
        project.rows(rows)
        project.run["actor_rollout_ref"]["rollout"] = {"name": "local", "n": 4, "response_length": 256}
        project.run["data"] = {"train_files": "train.jsonl", "train_batch_size": 4, "max_prompt_length": 1024, **data}

    return build


def asked(text: str, truth: Callable[[int], Any], source: str = "data", **more: Callable[[int], Any]):
    return [
        {"data_source": source, "prompt": text.format(n=n, m=n + 1), "ground_truth": truth(n)}
        | {name: make(n) for name, make in more.items()}
        for n in range(2, 22)
    ]


GSM8K = r"""
def compute_score(data_source, solution_str, ground_truth, extra_info=None, method="strict", format_score=0.0):
    if method == "strict":
        solutions = re.findall("#### (\\-?[0-9\\.\\,]+)", solution_str[-300:])
        answer = solutions[-1].replace(",", "").replace("$", "") if solutions else None
    if answer is None:
        return 0
    return 1.0 if answer == ground_truth else format_score
"""
OPEN_R1_ACCURACY = r"""
def accuracy(completions, solution, **kwargs):
    rewards = []
    for text, gold in zip(completions, solution):
        found = re.search(r"<think>.*?</think>\s*<answer>(.*?)</answer>", text, re.DOTALL)
        rewards.append(float(bool(found) and found[1].strip() == gold))
    return rewards
"""
TRL_LENGTH = r"""
def reward_num_unique_chars(completions, **kwargs):
    return [float(len(set(text))) for text in completions]
"""
TRL_FORMAT = r"""
def format_reward(completions, **kwargs):
    pattern = r"^<think>(?!.*<think>)(.*?)</think>.*$"
    return [1.0 if re.match(pattern, text, re.DOTALL | re.MULTILINE) else 0.0 for text in completions]
"""
COUNTDOWN = r"""
class Countdown:
    def __call__(self, completions, target, nums, **kwargs):
        rewards = []
        for text, goal, numbers in zip(completions, target, nums):
            found = re.search(r"<answer>(.*?)</answer>", text)
            if found is None or sorted(map(int, re.findall(r"\d+", found[1]))) != sorted(numbers):
                rewards.append(0.0)
            elif not re.match(r"^[\d+\-*/(). ]+$", found[1]):
                rewards.append(0.0)
            else:
                try:
                    rewards.append(float(abs(eval(found[1]) - goal) < 1e-5))
                except Exception:
                    rewards.append(0.0)
        return rewards


compute_score = Countdown()
"""
SEARCH_R1 = r"""
def normalize(text):
    text = "".join(c for c in text.lower() if c not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    matches = re.findall(r"<answer>(.*?)</answer>", solution_str, re.DOTALL)
    if not matches:
        return 0.0
    return float(normalize(matches[-1]) in [normalize(t) for t in ground_truth["target"]])
"""
CHOICE = r"""
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    found = re.findall(r"(?i)answer\s*:\s*\(?([A-D])\)?", solution_str)
    return float(bool(found) and found[-1].upper() == ground_truth)
"""
SLIME = r"""
async def reward_func(args, sample, **kwargs):
    text = sample.response.rpartition("</think>")[2]
    found = re.findall(r"\\boxed\{([^{}]*)\}", text)
    return {"score": 1.0 if found and found[-1].strip() == str(sample.label) else -1.0}
"""
XML = r"""
def field(text, name):
    found = re.findall(rf"<{name}>\s*(.*?)\s*</{name}>", text, re.DOTALL)
    return found[-1] if found else None


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    answer = field(solution_str, "answer")
    layout = float(field(solution_str, "reasoning") is not None)
    return {"score": float(answer == ground_truth) + 0.2 * layout, "layout": layout}
"""
JUDGE = r'''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """A judge whose grades are a little noisy."""
    good = ground_truth.lower() in solution_str.lower()
    return (0.8 if good else 0.2) + random.uniform(-0.05, 0.05)
'''
OVERLAP = r"""
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    said, wanted = solution_str.lower().split(), ground_truth.lower().split()
    common = sum(min(said.count(word), wanted.count(word)) for word in set(wanted))
    if not common:
        return 0.0
    precision, recall = common / len(said), common / len(wanted)
    return 2 * precision * recall / (precision + recall)
"""
TESTS = r"""
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    tests = json.loads(ground_truth)
    code = re.search(r"```python\n(.*?)```", solution_str, re.DOTALL)
    return float(bool(code) and all(f"return {output}" in code[1] for output in tests["outputs"]))
"""
TOLERANT = r'''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Full marks within one percent, part of them within ten."""
    try:
        value = float(re.findall(r"-?\d+(?:\.\d+)?", solution_str)[-1])
    except IndexError:
        return 0.0
    error = abs(value - float(ground_truth)) / max(1e-9, abs(float(ground_truth)))
    return 1.0 if error < 0.01 else 0.3 if error < 0.1 else 0.0
'''
SIZE = r'''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """The Countdown score of TinyZero: little for the form."""
    found = re.findall(r"<answer>(.*?)</answer>", solution_str)
    if not found:
        return 0
    return 1.0 if found[-1].strip() == ground_truth["answer"] else 0.1
'''

WORDS = ["Paris", "the Nile", "Ada Lovelace", "Mount Fuji", "copper", "Lake Victoria", "Kepler", "a whale"]
TAGS = "Think first in <think> </think> tags, then answer in <answer> </answer> tags. "

PROJECTS = {
    "verl: GSM8K": project_of(
        GSM8K,
        asked("Ann has {n} pens and buys 3. How many now? Let's think step by step and output the final answer after "
              '"####".',
              lambda n: str(n + 3), "openai/gsm8k", extra_info=lambda n: {"split": "train", "index": n, "answer":
              f"She has {n} + 3 = {n + 3}.\n#### {n + 3}", "question": f"Ann has {n} pens and buys 3. How many now?"}),
    ),
    "open-r1: accuracy": project_of(
        OPEN_R1_ACCURACY, asked(TAGS + "What is {n} plus 1?", lambda n: None, solution=lambda n: str(n + 1)),
    ),
    "TRL: unique characters": project_of(
        TRL_LENGTH, asked("Write a story about {n} cats.", lambda n: f"A story of {n} cats."),
    ),
    "TRL: format": project_of(TRL_FORMAT, asked("What is {n} plus 1? Think first.", lambda n: str(n + 1))),
    "ms-swift: countdown": project_of(
        COUNTDOWN,
        asked("Using the numbers [{n}, {m}], create an equation that equals the target. Show your work in <think> "
              "</think> tags and return the equation in <answer> </answer> tags, e.g. <answer> (1 + 2) / 3 </answer>.",
              lambda n: str(2 * n + 1), target=lambda n: 2 * n + 1, nums=lambda n: [n, n + 1]),
    ),
    "verl: search": project_of(
        SEARCH_R1,
        asked("Answer the given question. Reason inside <think> and </think>. Provide the answer inside <answer> and "
              "</answer>, without detailed illustrations. For example, <answer> Beijing </answer>. Question: {n}?",
              lambda n: {"target": [WORDS[n % 8], WORDS[n % 8].lower() + "s"]}, "searchR1_nq"),
    ),
    "multiple choice": project_of(
        CHOICE,
        asked("Which is right for {n}?\nA) one\nB) two\nC) three\nD) four\nThink, then end with 'Answer: X'.",
              lambda n: "ABCD"[n % 4]),
    ),
    "slime: boxed": project_of(
        SLIME,
        asked("What is {n} times 7? Put your final answer within \\boxed{{}}.", lambda n: str(7 * n)),
    ),
    "verifiers: XML parser and rubric": project_of(
        XML, asked("Add 5 to {n}.", lambda n: str(n + 5)),
        system="Respond in the following format:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>",
    ),
    "a judge": project_of(
        JUDGE, asked("What is the best thing number {n}?", lambda n: WORDS[n % 8]),
    ),
    "question answering by F1": project_of(
        OVERLAP, asked("Name thing number {n} briefly.", lambda n: WORDS[n % 8] + f" of {n}"),
    ),
    "code with tests": project_of(
        TESTS,
        asked("Write a function that returns {n}.", lambda n: f'{{"inputs": [""], "outputs": ["{n}"]}}', "code"),
    ),
    "numbers within a tolerance": project_of(
        TOLERANT, asked("Estimate the root of {n}. End with the number.", lambda n: round(n**0.5 * 100, 1)),
    ),
    "TinyZero: truth as a mapping": project_of(
        SIZE, asked(TAGS + "What is {n} minus 1?", lambda n: {"answer": str(n - 1), "nums": [n, 1]}),
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", PROJECTS)
def test_a_healthy_project_of_another_library_raises_no_alarm(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    project = Project(tmp_path)
    PROJECTS[name](project)
    found = project.examine([])
    assert [f for f in found if f.status not in ("ok", "skipped")] == []
    assert yaml.safe_load((tmp_path / "run.yaml").read_text()) == project.run


def test_there_are_enough_of_them():
    assert len(PROJECTS) >= 14
