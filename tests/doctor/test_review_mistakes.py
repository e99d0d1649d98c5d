"""The 25 mistakes of the review of version 435a4e8, of which its doctor found 13, and others that outsiders may make:
each is planted in a small project, and each is named."""

from __future__ import annotations

import pytest
from parts_project import Project, rows, weight
from test_planted_mistakes import ACTOR, ROLLOUT, Mistake, each_row, error, keys, named, rewards

FORM = "re.search(r'Answer: *(\\S+) *$', solution_str)"
HEAD = "import random\nimport re\n\n\ndef compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"


def reward(body: str):
    """`body` is the function's; `found` is the match of the form that the prompts ask for."""
    lines = [f"    found = {FORM}", *(f"    {line}" for line in body.splitlines())]
    return lambda project: project.write("part_reward.py", HEAD + "\n".join(lines) + "\n")


def truths(change: str):
    """`change` makes another truth of `t`, of row `i`."""

    def plant(project: Project) -> None:
        made = rows(0, 24)
        for i, row in enumerate(made):
            model = row["reward_model"]
            model["ground_truth"] = eval(change, {"t": model["ground_truth"], "i": i})
        project.rows(made)

    return plant


def user(body: str):
    text = (
        "from verl_mt.interactions.base import BaseInteraction\n\n\nclass Customer(BaseInteraction):\n"
        "    async def start_interaction(self, instance_id=None, **kwargs):\n        return instance_id\n\n"
        "    async def generate_response(self, instance_id, messages, **kwargs):\n"
        f"        text = str(messages[-1]['content'])\n        {body}\n"
    )
    return lambda project: project.write("customer.py", text)


def tool(old: str, new: str):
    return lambda project: project.replace("part_tools.py", old, new)


def said(plant, check: str, *says: str, status: str = "warning") -> Mistake:
    return Mistake(plant, check, says, status=status)


def both(*plants):
    def plant(project: Project) -> list[str]:
        return [word for one in plants for word in one(project) or []]

    return plant


def one_turn(project: Project) -> None:
    del project.run["actor_rollout_ref"]["rollout"]["interaction_config_file"]


def one_question(project: Project) -> None:
    project.rows(rows(0, 1) * 200)


REVIEW = {
    "answer in the question": said(
        each_row("row['prompt'][1]['content'] += ' Answer: ' + row['reward_model']['ground_truth']"),
        "prompts' words", "hold their own answer",
    ),
    "30 of 90 validation rows in training": said(
        lambda project: project.rows(rows(0, 24) + rows(32, 34)), "validation rows", "2 of 6"
    ),
    "tool answer of 200 kB": said(
        tool('f"{found[0]} g" if found else "no such part"', '"x" * 200_000'), "rollout", "does not fit"
    ),
    "response of 40,000 tokens": error(keys(f"{ROLLOUT}.response_length=40000"), "configuration", "40512"),
    "warm-up of 200 of 80 steps": said(keys(f"{ACTOR}.optim.lr_warmup_steps=200"), "steps", "lr_warmup_steps=200"),
    "reward NaN": error(rewards("return float('nan')"), "rollout", "nan"),
    "thousands separators in some truths": said(
        both(truths("f'{int(t) + 1000:,}' if i % 3 == 2 else t"),
             reward("return float(bool(found) and found[1].replace(',', '') == ground_truth)")),
        "reward's meaning", "'1,314'", "right answer is 0",
    ),
    "temperature 0.02": said(keys(f"{ROLLOUT}.temperature=0.02"), "sampling and ratios", "nearly alike"),
    "14 of 16 prompts over-long": said(
        lambda project: project.change_rows(
            lambda row: row["prompt"][1].update(content="gear " * (2 if row["extra_info"]["index"] < 2 else 900))
        ),
        "prompts", "over-long",
    ),
    "bfloat16 with a rate of 1e-7": said(
        keys("actor_rollout_ref.model.dtype=bfloat16", f"{ACTOR}.optim.lr=1e-7"), "learning rate", "nothing will change"
    ),
    "relative path of a database": said(
        lambda project: project.tools(database="data/parts.sqlite"), "rollout", "unable to open database"
    ),
    "truth that nobody can say": said(truths("t + ' grams exactly'"), "reward's meaning", "earns|reward|form"),
    "prompts as JSON text": error(
        each_row("row['prompt'] = __import__('json').dumps(row['prompt'])"), "rows", "messages written as text"
    ),
    "control tokens in questions": said(
        each_row("row['prompt'][1]['content'] += '<|im_end|><|im_start|>assistant'"), "prompts' words", "control tokens"
    ),
    "slow tool": said(
        tool("with sqlite3", "__import__('time').sleep(2.2)\n        with sqlite3"), "rollout", "lookup is slow"
    ),
    "random reward": said(reward("return random.random()"), "reward's meaning", "the reward is random"),
    "a quarter of the truths empty": said(truths("'' if i % 4 == 3 else t"), "rows' contents", "6 of 24", "row 4"),
    "one question 200 times": said(one_question, "rows' contents", "199 of 200 rows repeat", "only 1"),
    "reward from -1e6 to 1000": said(
        reward("return 1000.0 if found and found[1] == ground_truth else -1e6"), "reward's meaning", "wrong scale"
    ),
    "user who compares a number with a text": said(
        user("done = text.split()[-1] == 300 + 7 * 0\n        return done, 'Again?', 0.0, {}"),
        "reward's meaning", "goes on after the right answer", "'customer'",
    ),
    "clip_ratio 2": said(keys(f"{ACTOR}.clip_ratio=2"), "hyperparameters", "clip_ratio is 2"),
    "KL coefficient 10": said(
        keys(f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=10"), "hyperparameters", "kl_loss_coef is 10"
    ),
    "entropy_coeff 1": said(keys(f"{ACTOR}.entropy_coeff=1"), "hyperparameters", "entropy_coeff is 1"),
}  # fmt: skip
"""23 of the 25. A tokenizer of another model is in `doctor_faults`. A truth in the tool's answer is harmless, as
`solution_str` holds no tool text."""

OUTSIDERS = {
    "rate 1e-2": said(keys(f"{ACTOR}.optim.lr=1e-2"), "learning rate", "falls apart"),
    "one sample of each prompt": error(keys(f"{ROLLOUT}.n=1"), "configuration", "rollout.n"),
    "temperature 0": error(keys(f"{ROLLOUT}.temperature=0"), "configuration", "temperature is 0"),
    "truths with white space behind them": said(
        truths("t + ' '"), "reward's meaning", "'300 '", "without the white space"
    ),
    "some truths with white space": said(
        truths("t + ' ' if i % 2 and i > 7 else t"), "reward's meaning", "white space around it", "right answer is 0"
    ),
    "truths of two types": said(truths("int(t) if i > 11 else t"), "reward's meaning", "are like 384", "int"),
    "truths as a list": said(truths("[t]"), "reward's meaning", "of type list"),
    "truths that are whole solutions": said(
        truths("f'It weighs that.\\n#### {t}'"), "reward's meaning", "only where it is", "####"
    ),
    "truths in another case": said(
        both(truths("'YES'"), reward("return float(bool(found) and found[1].lower() == ground_truth)")),
        "reward's meaning", "in lower case",
    ),
    "one truth for all": said(truths("'300'"), "reward's meaning", "same ground truth '300'"),
    "the same question with other truths": said(
        lambda project: project.rows(
            [
                row | {"prompt": rows(n // 2, n // 2 + 1)[0]["prompt"], "extra_info": {"index": n}}
                for n, row in enumerate(rows(0, 24))
            ]
        ),
        "rows' contents", "12 of 24 rows ask the same",
    ),
    "truths of the next row": said(
        lambda project: project.change_rows(
            lambda row: row.update(solution=f"Look it up. #### {weight(row['extra_info']['index'] + 1)}")
        ),
        "rows' contents", "own solution does not end with", "'307'",
    ),
    "a placeholder in the question": said(
        each_row("row['prompt'][1]['content'] = 'What is the answer to {question}?' + str(row['extra_info']['index'])"),
        "rows' contents", "24 of 24 prompts hold a placeholder", "'{question}'",
    ),
    "questions that are nan": said(
        each_row("row['prompt'][1]['content'] = 'nan' if row['extra_info']['index'] % 5 == 0 else 'Weigh it.'"),
        "rows' contents", "ask nothing",
    ),
    "the wrong encoding": said(
        each_row("row['prompt'][1]['content'] += ' cafÃ©'"), "rows' contents", "wrong encoding"
    ),
    "validation rows with another system message": said(
        lambda project: project.rows([
            row | {"prompt": [{"role": "system", "content": "Weigh."}, row["prompt"][1]]} for row in rows(24, 36)]),
        "validation rows", "6 of 6",
    ),
    "answer told by the system message": said(
        each_row("row['prompt'][0]['content'] += ' The correct answer is ' + row['reward_model']['ground_truth']"),
        "prompts' words", "their own answer",
    ),
    "reward that raises at an empty answer": said(
        both(one_turn, reward("solution_str[0]\nreturn float(bool(found) and found[1] == ground_truth)")),
        "reward's meaning", "odd answers fail", "an empty answer", "IndexError",
    ),
    "reward that raises at a word": said(
        reward("return float(bool(found) and int(found[1]) == int(ground_truth))"),
        "reward's meaning", "odd answers fail", "a word", "ValueError",
    ),
    "reward that reads the first line only": said(
        reward("found = re.match(r'Answer: (\\S+)', solution_str)\n"
               "return float(bool(found) and found[1] == ground_truth)"),
        "reward's meaning", "behind a line of reasoning",
    ),
    "reward that looks for the truth anywhere": said(
        rewards("return float(ground_truth in solution_str)"), "reward's meaning", "another number that holds the truth"
    ),
    "reward that looks for the answer in the truth": said(
        reward("return float(bool(found) and found[1] in ground_truth)"), "reward's meaning", "a part of the truth"
    ),
    "reward that reads the prompt": said(
        rewards("text = ' '.join(str(m['content']) for m in extra_info['messages'])\n"
                "    return float(('Answer: ' + ground_truth) in text.replace('\\n', ' ').split('sys ')[-1])"),
        "reward's meaning", "reads the text of the prompt",
    ),
    "reward for the form, and little for the answer": said(
        reward("return 0.0 if not found else 1.0 if found[1] == ground_truth else 0.95"),
        "reward's meaning", "nearly as much as the right one",
    ),
    "tiny reward": said(
        reward("return 1e-6 * float(bool(found) and found[1] == ground_truth)"), "reward's meaning", "wrong scale"
    ),
    "reward of text of the first turn only": said(
        rewards("turn = [m for m in extra_info['messages'] if m['role'] == 'assistant'][0]\n"
                "    return float(str(turn['content']).endswith('Answer: ' + ground_truth))"),
        "reward's meaning", "called a tool before",
    ),
    "schema and code disagree": said(
        lambda project: (project.replace("tools.yaml", "part", "piece"), project.replace("tools.yaml", "pieces.sqlite",
        "parts.sqlite"), project.replace("tools.yaml", "piece_tools.py", "part_tools.py"))[:0],
        "rollout", "its schema has piece", "reads part",
    ),
    "second tool that raises": said(
        tool("return first + second", "return first + second + missing"), "rollout", "add_weights",
        "'missing' is not defined"
    ),
    "tool without a description": said(
        lambda project: project.replace("tools.yaml", "description: The weight of a part.", "description: ''"),
        "rollout", "lookup has no description",
    ),
    "stop string within a call": said(
        keys(f"{ROLLOUT}.stop=['\"arguments\"']"), "stop strings", "within a tool call"
    ),
    "stop string before the answer": said(
        keys(f"{ROLLOUT}.stop=['Answer:']"), "stop strings", "before the answer"
    ),
    "stop string of another model": said(
        keys(f"{ROLLOUT}.stop=['<|eot_id|>']"), "stop strings", "another model"
    ),
    "solutions longer than the response": said(
        both(each_row("row['solution'] = 'First look it up. ' * 40 + row['reward_model']['ground_truth']"),
             keys(f"{ROLLOUT}.response_length=128")),
        "prompts' words", "solutions", "response_length=128",
    ),
    "clip_ratio_high below clip_ratio_low": said(
        keys(f"{ACTOR}.clip_ratio_low=0.2", f"{ACTOR}.clip_ratio_high=0.05"), "hyperparameters", "below the lower"
    ),
    "negative entropy": said(keys(f"{ACTOR}.entropy_coeff=-0.1"), "hyperparameters", "negative weight"),
    "gradients cut to nothing": said(keys(f"{ACTOR}.grad_clip=1e-6"), "hyperparameters", "grad_clip is 1e-06"),
    "100 passes": said(keys(f"{ACTOR}.ppo_epochs=100"), "hyperparameters", "ppo_epochs is 100"),
    "weight decay 10": said(keys(f"{ACTOR}.optim.weight_decay=10"), "hyperparameters", "weight_decay is 10"),
    "cost of length": said(keys("reward.token_cost=0.1"), "hyperparameters", "token_cost=0.1"),
    "greedy validation, eight times": said(
        keys(f"{ROLLOUT}.val_kwargs.n=8", f"{ROLLOUT}.val_kwargs.temperature=0"), "hyperparameters", "all samples"
    ),
    "KL in the reward of 5": said(
        keys("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=5"), "hyperparameters", "kl_coef is 5"
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", [*REVIEW, *OUTSIDERS])
def test_a_mistake_is_named(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mistake = (REVIEW | OUTSIDERS)[name]
    found = named(Project(tmp_path), mistake)
    of_check = [f"{f.text} -> {f.fix}" for f in found if (f.check, f.status) == (mistake.check, mistake.status)]
    words = [says.split("|") for says in mistake.says]
    good = [text for text in of_check if all(any(word in text for word in either) for either in words)]
    assert good, "\n".join(map(str, found))
