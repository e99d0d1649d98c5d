"""docs/capabilities.md: every promised capability, where it is implemented, and the tests that prove it.

    python tests/capability_table.py      # writes the page

The tests are found by their own markers, `@pytest.mark.cap("C1")`, so the page cannot name a test that is not there.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
PAGE = REPO / "docs" / "capabilities.md"

SECTIONS = {
    "Schedulers, in ms-swift's manner": range(1, 42),
    "Custom generate and reward functions, in slime's manner": range(42, 83),
    "What all of them imply": range(83, 92),
}

CAPABILITIES: dict[str, tuple[str, str]] = {
    "C1": ("a scheduler decides when a conversation ends and what comes next", "extensions/compat/schedulers/base.py"),
    "C2": ("`max_turns`, further constructor arguments accepted", "extensions/compat/schedulers/base.py"),
    "C3": ("`step(request, choice, turn) -> dict`", "extensions/compat/schedulers/hooks.py"),
    "C4": ("`check_finished`, its default", "extensions/compat/schedulers/base.py"),
    "C5": ("turns count from 1", "extensions/compat/schedulers/base.py"),
    "C6": ("hooks see the assistant's reply in the messages", "extensions/compat/schedulers/base.py"),
    "C7": ("the fields of a request", "extensions/compat/schedulers/requests.py"),
    "C8": ("the fields of a response choice", "extensions/compat/schedulers/requests.py"),
    "C9": ("`run` overridden: several outputs, one trajectory", "extensions/compat/schedulers/driver.py"),
    "C10": ("partial and full customisation side by side", "extensions/compat/rollout/scheduler.py"),
    "C11": ("a scheduler is chosen by name", "extensions/compat/rollout/scheduler.py"),
    "C12": ("`external_plugins`", "plugins.py"),
    "C13": ("plug-ins are known in every process", "workers/setup.py"),
    "C14": ("nobody waits for the slowest conversation of a batch", "engines/lock_step.py"),
    "C15": ("the same records in every placement", "engines/base.py"),
    "C16": ("feedback as a new turn, or inside the unfinished message", "extensions/toolbox/editing/reconcile.py"),
    "C17": ("`math_tip_trick`, `math_tip_trick_multi_turn`", "extensions/compat/schedulers/shipped.py"),
    "C18": ("`thinking_tips_scheduler`", "extensions/compat/schedulers/shipped.py"),
    "C19": ("one trajectory, one record, while history stands", "rollout/session.py"),
    "C20": ("history that changes opens a new record", "data/ledger.py"),
    "C21": ("all records of a trajectory share its reward", "data/batch.py"),
    "C22": ("`trajectory_inputs` in the reward's arguments", "extensions/compat/rewards/orm.py"),
    "C23": ("`rollout_infos` reach the reward", "extensions/compat/schedulers/hooks.py"),
    "C24": ("a scheduler replaces images or videos", "extensions/compat/schedulers/hooks.py"),
    "C25": ("`response_token_ids`: nothing is encoded again", "extensions/toolbox/editing/reconcile.py"),
    "C26": ("sampled ids reach the scheduler, as a copy", "extensions/compat/schedulers/hooks.py"),
    "C27": ("`loss_scale`: default, last_round, all", "rollout/loss_scale.py"),
    "C28": ("custom loss scales", "rollout/loss_scale.py"),
    "C29": ("a loss scale is a mask, not a weight", "rollout/loss_scale.py"),
    "C30": ("its default with and without a scheduler", "trainer/build_rollout.py"),
    "C31": ("assistant messages of the data set", "rollout/loss_scale.py"),
    "C32": ("`response_loss_mask`", "extensions/toolbox/editing/reconcile.py"),
    "C33": ("what the environment says is never trained", "data/trajectory.py"),
    "C34": ("`tool_call_scheduler` (ReAct)", "extensions/compat/schedulers/shipped.py"),
    "C35": ("other columns of the row: `data_dict`", "extensions/compat/schedulers/driver.py"),
    "C36": ("rewards of ms-swift's kind", "extensions/compat/rewards/orm.py"),
    "C37": ("`is_truncated`", "extensions/compat/rewards/orm.py"),
    "C38": ("length ends a rollout", "rollout/context.py"),
    "C39": ("rewards registered by name (`orms`)", "rewards/base.py"),
    "C40": ("an answer in the data set is no part of the prompt", "data/dataset.py"),
    "C41": ("launch scripts are checked", "config/compose.py"),
    "C42": ("generate, parse, act, observe, again", "extensions/compat/generate/driver.py"),
    "C43": ("a generate function by dotted path", "extensions/compat/generate/driver.py"),
    "C44": ("a reward function by dotted path", "rewards/base.py"),
    "C45": ("the search settings, checked", "extensions/toolbox/tools/search_tool.py"),
    "C46": ("two search backends", "extensions/toolbox/tools/search_tool.py"),
    "C47": ("`topk` results", "extensions/toolbox/tools/search_tool.py"),
    "C48": ("how a result is written", "extensions/toolbox/tools/search_tool.py"),
    "C49": ("the wrapper around an observation", "extensions/toolbox/tools/search_tool.py"),
    "C50": ("search and answer tags", "chat/parsers/prompted.py"),
    "C51": ("an invalid action is answered with a hint", "chat/parsers/prompted.py"),
    "C52": ("limits on what runs at once", "tools/executor.py"),
    "C53": ("parallel calls keep their order", "tools/executor.py"),
    "C54": ("cached search results", "extensions/toolbox/tools/search_tool.py"),
    "C55": ("a tool's error is text for the model", "tools/executor.py"),
    "C56": ("aborts", "rollout/runner.py"),
    "C57": ("one bad sample never kills a batch", "rollout/runner.py"),
    "C58": ("finish reason and status", "data/trajectory.py"),
    "C59": ("ids and log-probs come from the engine's output", "extensions/cluster/replicas/turn.py"),
    "C60": ("what the model wrote is never encoded again", "rollout/session.py"),
    "C61": ("requests carry ids", "rollout/session.py"),
    "C62": ("ids, mask and log-probs have one length", "data/ledger.py"),
    "C63": ("the fields of a `Sample`", "extensions/compat/slime_sample.py"),
    "C64": ("its status", "extensions/compat/slime_sample.py"),
    "C65": ("truncated importance sampling", "algorithms"),
    "C66": ("names of data columns", "data/dataset.py"),
    "C67": ("prompts times samples", "rollout/runner.py"),
    "C68": ("tokens per turn, per response, temperature", "rollout/context.py"),
    "C69": ("tools per row, in its metadata", "rollout/prompts.py"),
    "C70": ("exact match with a format score", "rewards/exact_match.py"),
    "C71": ("labels that are lists", "rewards/exact_match.py"),
    "C72": ("several agents: solver, rewriter, selector", "extensions/compat/generate/driver.py"),
    "C73": ("agents in parallel", "extensions/compat/generate/driver.py"),
    "C74": ("a list of samples for one prompt", "extensions/compat/generate/driver.py"),
    "C75": ("rewards in batches", "rewards/base.py"),
    "C76": ("a selector's reward is that of its choice", "extensions/compat/generate/driver.py"),
    "C77": ("rewards scaled by an episode's success", "extensions/compat/generate/driver.py"),
    "C78": ("failed workers are left out", "extensions/compat/generate/driver.py"),
    "C79": ("a log line per turn", "rollout"),
    "C80": ("debug dumps, replayed", "rollout"),
    "C81": ("`ray job submit`", "extensions/cluster/workers/ray_group.py"),
    "C82": ("the reward sees the whole interaction", "rewards/base.py"),
    "C83": ("the model's tokens and the environment's", "data/ledger.py"),
    "C84": ("limits on turns and on tokens", "rollout/context.py"),
    "C85": ("rewards know the number of turns", "rollout/runner.py"),
    "C86": ("feedback that knows the right answer", "extensions/compat/schedulers/shipped.py"),
    "C87": ("older names stay understood", "extensions/compat/aliases/ms_swift.txt"),
    "C88": ("limits without a number of turns", "rollout/context.py"),
    "C89": ("a sampled end of turn is trained", "rollout/session.py"),
    "C90": ("the end of a trajectory has a hook", "extensions/compat/schedulers/driver.py"),
    "C91": ("splitting a trajectory does not change its weight", "algorithms/aggregate.py"),
    "V1": ("`rollout.multi_turn` and `rollout.name`", "config/rollout.py"),
    "V2": ("tools in YAML", "tools/registry.py"),
    "V3": ("interactions in YAML", "interactions/session.py"),
    "V4": ("delta tokenization", "chat/text_delta.py"),
    "V5": ("the same with a multimodal processor", "chat"),
    "V6": ("the comparison with the full tokenization", "chat/sanity.py"),
    "V7": ("its modes", "chat/sanity.py"),
    "V8": ("a fixed base conversation", "chat/text_delta.py"),
    "V9": ("`use_inference_chat_template`", "rollout/session.py"),
    "V10": ("GSM8K with a tool", "extensions/compat/tools/gsm8k_tool.py"),
    "V11": ("GSM8K with an interaction", "extensions/compat/interactions/gsm8k_interaction.py"),
    "V12": ("search against a retrieval service", "extensions/toolbox/tools/search_tool.py"),
    "V13": ("only the delta enters the mask", "chat/text_delta.py"),
}


def proofs() -> dict[str, list[str]]:
    """Capability -> `tests/file.py::test` of every test that is marked with it."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted((REPO / "tests").rglob("test_*.py")):
        text = path.read_text()
        for name, numbers in _marked(ast.parse(text)) if "mark.cap" in text else ():
            for number in numbers:
                found[number].append(f"{path.relative_to(REPO).as_posix()}::{name}")
    return found


def _marked(module: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """Tests of a module and their numbers; a mark of the module or of a class counts for all its tests."""
    whole = [n for node in module.body if _is_pytestmark(node) for n in _numbers(node)]
    scopes: list[tuple[list[ast.stmt], list[str], str]] = [(module.body, whole, "")]
    while scopes:
        body, inherited, prefix = scopes.pop()
        for node in body:
            if isinstance(node, ast.ClassDef):
                scopes.append((node.body, inherited + _decorations(node), f"{node.name}::"))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
                yield prefix + node.name, list(dict.fromkeys(inherited + _decorations(node)))


def _is_pytestmark(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "pytestmark" for t in node.targets)


def _decorations(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    return [number for decorator in node.decorator_list for number in _numbers(decorator)]


def _numbers(node: ast.AST) -> list[str]:
    calls = [n for n in ast.walk(node) if isinstance(n, ast.Call) and ast.unparse(n.func) == "pytest.mark.cap"]
    return [a.value for call in calls for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]


def page() -> str:
    """The page's text."""
    found = proofs()
    lines = [
        "# Capabilities",
        "",
        "What the documents of ms-swift (C1 to C41), slime (C42 to C82) and verl (V1 to V13) promise their users,",
        "where it is implemented here, and the tests that prove it. `python tests/capability_table.py` makes this page",
        "from the tests' own markers, and a test keeps the two together.",
    ]
    titles = [*SECTIONS.items(), ("verl's multi-turn rollout", None)]
    for title, numbers in titles:
        names = [f"C{n}" for n in numbers] if numbers is not None else [f"V{n}" for n in range(1, 14)]
        lines += ["", f"## {title}", "", "| | what | where | proved by |", "|---|---|---|---|"]
        lines += [_row(name, found.get(name, [])) for name in names]
    return "\n".join(lines) + "\n"


def _row(number: str, tests: list[str]) -> str:
    what, where = CAPABILITIES[number]
    shown = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in tests)
    return f"| {number} | {what} | [{where}](../verl_mt/{where}) | {shown} |"


if __name__ == "__main__":
    PAGE.write_text(page())
    missing = [number for number in CAPABILITIES if not proofs().get(number)]
    print(f"wrote {PAGE.relative_to(REPO)}; without a test: {' '.join(missing) or 'none'}")
