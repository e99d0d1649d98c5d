"""Mistakes that people make in projects of their own, planted one by one; and projects in which there is none.

The first 26 are those of a review of the first hour, of which 16 were found when it was written. The page
docs/doctor.md has their table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from parts_project import SYSTEM, Project, demonstration, rows
from tables import before_release

from verl_mt.errors import VerlMTError
from verl_mt.extensions.inspection.doctor.findings import Finding
from verl_mt.extensions.inspection.doctor.meaning import wrong_text
from verl_mt.extensions.inspection.doctor.oversights import _rates, _tools_named
from verl_mt.extensions.inspection.doctor.row_contents import truth_text

REPO = Path(__file__).resolve().parents[2]
ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"


@dataclass(frozen=True)
class Mistake:
    """What is changed (it may return overrides), and the words that name it."""

    plant: Callable[[Project], list[str] | None]
    check: str
    """Who finds it; `configuration` where the configuration does not compose."""
    says: tuple[str, ...]
    status: str = "warning"
    before: bool = False
    """Found by the doctor of commit 1d0271a."""
    demos: bool = False
    """Needs `--demos`."""


def error(plant: Callable[[Project], list[str] | None], check: str, *says: str) -> Mistake:
    return Mistake(plant, check, says, status="error", before=True)


def keys(*overrides: str) -> Callable[[Project], list[str]]:
    return lambda project: list(overrides)


def without(section: str, key: str) -> Callable[[Project], None]:
    def plant(project: Project) -> None:
        tree = project.run
        for word in section.split("."):
            tree = tree[word]
        del tree[key]

    return plant


def rewards(body: str) -> Callable[[Project], None]:
    text = f"def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    {body}\n"
    return lambda project: project.write("part_reward.py", text)


def each_row(change: str) -> Callable[[Project], None]:
    """`change` is a statement about `row`."""
    return lambda project: project.change_rows(lambda row: exec(change, {"row": row}))


MISTAKES = {
    "tool parser of another model": error(
        keys(f"{ROLLOUT}.multi_turn.tool_parser=mistral"), "tool calls", "hermes can"
    ),
    "tools_kwargs of another tool": error(
        each_row("row['extra_info']['tools_kwargs'] = {'look_up': {'create_kwargs': {'user': 'Ada'}}}"),
        "prompts", "look_up", "did you mean 'lookup'",
    ),
    "system prompt names tools that do not exist": Mistake(
        each_row("row['prompt'][0]['content'] = 'Call find_part first, then the tool `weigh`. End with Answer: N'"),
        "prompts' words", ("names find_part, weigh", "offers add_weights, lookup", "train.jsonl, row 1"),
    ),
    "reward always 0": Mistake(
        rewards("return 0.0"), "reward's meaning", ("is 0 for every answer", "train.jsonl, row 1")
    ),
    "reward always 1": Mistake(rewards("return 1.0"), "reward's meaning", ("is 1 for every answer", "truth '300'")),
    "extraction of another form": Mistake(
        lambda project: project.replace("part_reward.py", "Answer:", "####"),
        "reward's meaning", ("asks for `Answer: x`", "0. It is 1 for `#### x`"),
    ),
    "ground truth as a number, compared as text": Mistake(
        each_row("row['reward_model']['ground_truth'] = int(row['reward_model']['ground_truth'])"),
        "reward's meaning", ("ground truth 300 is of type int", "only where it is text"),
    ),
    "response_length 32": Mistake(keys(f"{ROLLOUT}.response_length=32"), "rollout", ("response_length",), before=True),
    "max_response_length shorter than a solution": Mistake(
        keys("data.max_response_length=60"), "demonstrations", ("do not fit into", "response_length=60"), demos=True
    ),
    "template without an end of turn": Mistake(
        lambda project: project.replace("model/chat_template.jinja", "<|im_end|>", ""),
        "stop tokens", ("writes no end behind what an assistant said",), before=True,
    ),
    "one sample of each prompt": error(keys(f"{ROLLOUT}.n=1"), "configuration", "rollout.n"),
    "temperature 0": error(keys(f"{ROLLOUT}.temperature=0"), "configuration", "temperature is 0"),
    "one turn, with tools": error(
        keys(f"{ROLLOUT}.multi_turn.max_assistant_turns=1"), "configuration", "max_assistant_turns is 1"
    ),
    "kl_loss_coef alone": error(keys(f"{ACTOR}.kl_loss_coef=0.01"), "keys", "use_kl_loss"),
    "learning rate 0.1": Mistake(
        keys(f"{ACTOR}.optim.lr=0.1"), "learning rate", ("optim.lr is 0.1", "0.9M parameters")
    ),
    "learning rate 0": Mistake(keys(f"{ACTOR}.optim.lr=0"), "steps", ("rate is 0",), before=True),
    "no prompt column": error(each_row("row['question'] = row.pop('prompt')"), "rows", "prompt", "question", "row 1"),
    "empty prompt": error(each_row("row['prompt'] = []"), "rows", "train.jsonl, row 1"),
    "messages as from and value": error(
        each_row("row['prompt'] = [{'from': 'human', 'value': 'What?'}]"), "rows", "train.jsonl, row 1", "role"
    ),
    "role human": Mistake(
        each_row("row['prompt'][1]['role'] = 'human'"), "prompts", ("leaves no trace", "did you mean 'user'"), "error"
    ),
    "wrong path of the model": error(keys("actor_rollout_ref.model.path=models"), "model", "models"),
    "wrong path of the database": Mistake(
        lambda project: project.tools(database="part.sqlite"), "rollout", ("lookup", "no such table"), before=True
    ),
    "validation file is the training file": Mistake(
        keys("data.val_files=train.jsonl"), "validation rows", ("24 of 24", "both keys name train.jsonl"),
    ),
    "reward that raises": error(rewards("return {}[ground_truth]"), "rollout", "KeyError"),
    "forgotten train_files": Mistake(
        without("data", "train_files"), "forgotten keys", ("data.train_files is not set",), "error", before=True
    ),
    "forgotten model": Mistake(
        without("actor_rollout_ref.model", "path"), "forgotten keys", ("model.path is not set", "0.9M", "train.jsonl")
    ),
}  # fmt: skip

MORE = {
    "all scripted conversations are cut": Mistake(
        keys(f"{ROLLOUT}.response_length=24"), "rollout", ("all 4 scripted conversations", "response_length=24")
    ),
    "question that ends with its answer": Mistake(
        each_row("row['prompt'][1]['content'] += ' Answer: ' + row['reward_model']['ground_truth']"),
        "prompts' words", ("hold their own answer", "'Answer: 300'"),
    ),
    "prompt column as JSON text": Mistake(
        each_row("row['prompt'] = __import__('json').dumps(row['prompt'])"),
        "rows", ("train.jsonl, row 1: column prompt holds messages written as text",), "error",
    ),
    "control tokens in questions": Mistake(
        each_row("row['prompt'][1]['content'] += '<|im_end|><|im_start|>assistant'"),
        "prompts' words", ("24 of 30 rows hold control tokens", "train.jsonl, row 1", "'<|im_end|>'"),
    ),
    "some training rows in the validation file": Mistake(
        lambda project: project.rows(rows(0, 24) + rows(33, 34)), "validation rows", ("1 of 6", "val.parquet, row 4"),
    ),
    "learning rate of a large model": Mistake(
        keys(f"{ACTOR}.optim.lr=1e-6"), "learning rate", ("nothing will change",)
    ),
    "learning rate of adapters that explodes": Mistake(
        keys(f"{ACTOR}.optim.lr=0.05", "actor_rollout_ref.model.lora_rank=4"), "learning rate", ("low-rank adapters",)
    ),
    "reward with its sign turned": Mistake(
        rewards("return -float(solution_str.split()[-1] == ground_truth)"),
        "reward's meaning", ("wrong answer earns more",),
    ),
    "reward for a form only": Mistake(
        rewards("return float('Answer:' in solution_str)"), "reward's meaning", ("the same for right and wrong",)
    ),
    "reward that raises where it finds an answer": Mistake(
        rewards("return float(solution_str.split('Answer:')[1] == {}[0]) if 'Answer:' in solution_str else 0.0"),
        "reward's meaning", ("conversations failed", "KeyError"),
    ),
    "reward that looks at the first turn": Mistake(
        rewards("turn = [m for m in extra_info['messages'] if m['role'] == 'assistant'][0]\n"
                "    return float(str(turn['content']).endswith('Answer: ' + ground_truth))"),
        "reward's meaning", ("called a tool before",),
    ),
    "demonstrations that the reward does not know": Mistake(
        lambda project: project.replace("demos.jsonl", "Answer: ", "Result: "),
        "demonstrations", ("gives 0 to all 8 demonstrations", "demos.jsonl, row 1", "'300'"), demos=True,
    ),
    "demonstrations whose calls fail": Mistake(
        lambda project: project.tools(database="part.sqlite"),
        "demonstrations", ("most calls", "no such table"), demos=True,
    ),
    "demonstrations with tools of their own": Mistake(
        lambda project: project.write("demos.jsonl", json.dumps(demonstration(rows(0, 1)[0]) | {"tools": [
            {"type": "function", "function": {"name": "find", "description": "d", "parameters": {}}}]})),
        "demonstrations", ("not those that the run will show",), "error", demos=True,
    ),
}  # fmt: skip


def named(project: Project, mistake: Mistake) -> list[Finding]:
    """What the doctor finds of one mistake."""
    overrides = mistake.plant(project) or []
    demos = "demos.jsonl" if mistake.demos else None
    try:
        return project.examine(overrides, *([] if mistake.check == "configuration" else [mistake.check]), demos=demos)
    except VerlMTError as raised:
        return [Finding("error", str(raised), check="configuration")]


TWINS = (
    "tool parser of another model", "response_length 32", "kl_loss_coef alone", "learning rate 0",
    "wrong path of the model", "reward that raises",
)  # fmt: skip
"""What `MORE` or `doctor_faults.FAULTS` have too, in a project of the same kind."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [before_release(n) if n in TWINS else n for n in (*MISTAKES, *MORE)])
def test_a_mistake_is_named(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mistake = (MISTAKES | MORE)[name]
    found = named(Project(tmp_path), mistake)
    of_check = [f"{f.text} -> {f.fix}" for f in found if (f.check, f.status) == (mistake.check, mistake.status)]
    assert any(all(words in text for words in mistake.says) for text in of_check), "\n".join(map(str, found))
    assert mistake.status == "error" or not [f for f in found if f.status == "error"]


def test_the_page_has_the_table():
    """Every mistake, by the words of its name, and whether it was found before."""
    page = (REPO / "docs" / "doctor.md").read_text()
    table = {m[1]: m[2].strip() for m in re.finditer(r"^\| ([^|]+?) \| (yes|no) \| `", page, re.MULTILINE)}
    assert table == {name: "yes" if mistake.before else "no" for name, mistake in MISTAKES.items()}
    assert len(MISTAKES) == 26
    assert sum(mistake.before for mistake in MISTAKES.values()) == 16


@pytest.mark.slow
def test_rows_and_keys_need_no_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    project = Project(tmp_path)
    found = project.examine([], "validation rows", "forgotten keys")
    assert {f.status for f in found} == {"ok"}
    del project.run["actor_rollout_ref"]["model"]["path"]
    found = project.examine(["data.val_files=train.jsonl"], "validation rows", "forgotten keys")
    assert [f.check for f in found if f.status == "warning"] == ["forgotten keys", "validation rows"]


@pytest.mark.parametrize(
    ("system", "names"),
    [
        (SYSTEM, ["lookup", "add_weights"]),
        ("You have the functions 'search' and \"browse\".", ["search", "browse"]),
        ("Tools: search, browse.", ["search", "browse"]),
        ("Always call search(query) before you answer.", ["search"]),
        ("The tool named weigh helps.", ["weigh"]),
        ("Solve it in `python`. Say `done` when no tool is left.", []),
        ("Answer with 'yes' or 'no'. The final_answer stands last.", []),
        ('Call with <tool_call>{"name": ..., "arguments": ...}</tool_call>.', []),
        ("Use snake_case for variables.", []),
        ("Call a tool, think step by step, then write \\boxed{x}.", []),
    ],
)
def test_names_of_tools_are_read_from_sentences_about_tools(system, names):
    assert _tools_named([{"role": "system", "content": system}, {"role": "user", "content": "call `nobody`"}]) == names


@pytest.mark.parametrize(
    ("truth", "text", "wrong"),
    [
        ("325", "325", "651"), (7, "7", "15"), (2.5, "2.5", "6.0"), ("1,200", "1,200", "2401"), ("$5", "$5", "$11"),
        ("B", "B", "C"), ("yes", "yes", "no"), ({"target": ["Paris", "paris"]}, "Paris", "something else"),
        (None, None, None), ('{"inputs": []}', None, None), ("line\nline", None, None), ([], None, None),
    ],
)  # fmt: skip
def test_a_truth_as_a_model_would_write_it(truth, text, wrong):
    assert truth_text(truth) == text
    if text is not None:
        assert wrong_text(text) == wrong


def test_rates_fall_with_the_size_and_those_that_people_use_are_fine():
    used = [(0.9e6, 3e-4), (0.9e6, 1e-3), (135e6, 5e-6), (0.5e9, 1e-5), (1.5e9, 1e-6), (7e9, 1e-6), (70e9, 1e-6)]
    for size, rate in used:
        lowest, _, highest = _rates(size)
        assert lowest < rate < highest
    for size, rate in ((0.9e6, 3e-3), (0.9e6, 1e-6), (0.5e9, 1e-3), (7e9, 1e-4), (7e9, 1e-9)):
        lowest, _, highest = _rates(size)
        assert not lowest <= rate <= highest
    usual = [_rates(10.0**power)[1] for power in range(5, 12)]
    assert usual == sorted(usual, reverse=True)


def plain_project(project: Project, reward: str, made: list[dict[str, object]], **rollout: object) -> None:
    """Without tools and user."""
    project.write("part_reward.py", reward)
    project.rows(made)
    project.run["actor_rollout_ref"]["rollout"] = {"name": "local", "n": 4, "response_length": 128, **rollout}
    project.run["data"] = {"train_files": "train.jsonl", "train_batch_size": 4}


def choices(project: Project) -> None:
    """Multiple choice, one text as a prompt, a column ground_truth; low-rank adapters."""
    text = "Which is the {n}th letter after @? A) x B) y C) z D) none. Put the letter into \\boxed{{}}."
    made = [{"data_source": "letters", "prompt": text.format(n=n), "ground_truth": "ABCD"[n % 4]} for n in range(16)]
    reward = r"""
import re
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    found = re.findall(r"\\boxed\{(\w)\}", solution_str)
    return {"score": float(bool(found) and found[-1] == ground_truth), "boxed": float(bool(found))}
"""
    plain_project(project, reward, made)
    project.run["actor_rollout_ref"]["model"]["lora_rank"] = 4
    project.run["actor_rollout_ref"]["actor"]["optim"]["lr"] = 2e-3


def unusual_form(project: Project) -> None:
    """A form of its own that the prompt quotes, points for the form, and a cost of length."""
    made = [
        {
            "data_source": "weights",
            "prompt": [{"role": "user", "content": f"Weigh {n} bolts of 3 g. Finish with 'RESULT=<grams>;' please."}],
            "reward_model": {"ground_truth": 3 * n},
        }
        for n in range(1, 17)
    ]
    reward = r"""
import re
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    found = re.search(r"RESULT=(\d+);", solution_str)
    return 0.0 if found is None else 1.0 if int(found[1]) == ground_truth else 0.1
"""
    plain_project(project, reward, made)
    project.run["reward"]["token_cost"] = 0.0001


def solutions(project: Project) -> None:
    """Answers behind a mark that nobody guesses, which a column of solutions shows; tests instead of a truth beside."""
    made = [
        {
            "data_source": "marks" if n % 2 else "programs",
            "prompt": [{"role": "user", "content": f"Double {n}."}],
            "ground_truth": str(2 * n) if n % 2 else json.dumps({"tests": [n]}),
            "worked": f"Twice {n} is {2 * n}. ~~> {2 * n}",
        }
        for n in range(3, 19)
    ]
    reward = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if data_source == "programs":
        return 0.0
    return float(solution_str.rpartition("~~> ")[2].strip() == ground_truth and "~~>" in solution_str)
"""
    plain_project(project, reward, made)


def bolts(project: Project, system: str, reward: str) -> None:
    """Questions about bolts, and a form of the answer that a system message states."""
    made = [
        {"data_source": "weights", "prompt": f"Weigh {n} bolts of 3 g.", "ground_truth": str(3 * n)}
        for n in range(1, 17)
    ]
    head = "import json\nimport re\n\n\ndef compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    plain_project(project, head + reward, made)
    project.run["data"]["system"] = system


def unquoted_form(project: Project) -> None:
    bolts(
        project,
        "Work it out. Finish with RESULT=<number> on a line of its own.",
        r"""    found = re.search(r"RESULT=(\d+)$", solution_str.strip())
    return float(bool(found) and found[1] == ground_truth)
""",
    )


def json_form(project: Project) -> None:
    bolts(
        project,
        'Reply with a JSON object {"answer": <number>} and nothing else.',
        """    try:
        return float(str(json.loads(solution_str)["answer"]) == ground_truth)
    except (ValueError, KeyError, TypeError):
        return 0.0
""",
    )


def form_of_the_source(project: Project) -> None:
    """Only the reward's source knows it."""
    bolts(
        project,
        "Say what the bolts weigh.",
        r"""    found = re.search(r"weighs?\s+(\d+) grams", solution_str)
    return float(bool(found) and found[1] == ground_truth)
""",
    )


SQL = """
import sqlite3

from verl_mt.tools.function_tool import function_tool


@function_tool
def sql(query: str) -> str:
    \"""Ask the database.

    Args:
        query: A statement of SQLite.
    \"""
    with sqlite3.connect("parts.sqlite") as database:
        return str(database.execute(query).fetchall())
"""


def sql_tool(project: Project) -> None:
    """A tool that refuses what the script makes up."""
    project.write("sql_tool.py", SQL)
    project.write("tools.yaml", yaml.safe_dump({"tools": [{"class_name": "sql_tool.py:sql", "config": {}}]}))
    for row in (made := rows(0, 24)):
        row["prompt"][0]["content"] = "You weigh parts. Use the tool `sql`. End with a line 'Answer: N'."
        row["extra_info"] = {}
    project.rows(made)
    project.run["actor_rollout_ref"]["rollout"]["response_length"] = 512


def secret_form(project: Project) -> None:
    """A form that nobody can find: said, and no alarm."""
    bolts(
        project,
        "Say what the bolts weigh.",
        """    return float(solution_str.count("!") == int(ground_truth))
""",
    )


UNSEEN = {
    sql_tool: ["tool sql: calls with made-up arguments failed"],
    secret_form: ["no form of the answer was found that the reward pays"],
}
"""What is not looked at in a healthy project."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "build",
    [None, choices, unusual_form, solutions, unquoted_form, json_form, form_of_the_source, sql_tool, secret_form],
)
def test_a_healthy_project_raises_no_alarm(build, tmp_path, monkeypatch):
    """Written after the checks."""
    monkeypatch.chdir(tmp_path)
    project = Project(tmp_path)
    if build is not None:
        build(project)
    found = project.examine([], demos="demos.jsonl" if build is None else None)
    unseen = [f for f in found if f.status == "skipped"]
    assert [f for f in found if f.status not in ("ok", "skipped")] == []
    assert len(unseen) == len(UNSEEN.get(build, []))
    assert all(words in f.text and "--demos" in f.text for f, words in zip(unseen, UNSEEN.get(build, [])))
    assert yaml.safe_load((tmp_path / "run.yaml").read_text()) == project.run
