"""ms-swift's own plug-in files, after the documented replacement: schedulers, environments, rewards."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import re
import sys
import threading
from contextlib import contextmanager
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from json import dumps, loads
from typing import ClassVar

import conformance
import pytest
from command_lab import NO_VALIDATION, metrics_of, rows_of
from scheduler_lab import CHAT, converse, ids_of, prompt_of, response, said, trained

from verl_mt.config.compose import compose
from verl_mt.errors import PluginError
from verl_mt.extensions.compat.aliases.families import families
from verl_mt.extensions.compat.rollout import scheduler as swift
from verl_mt.extensions.compat.rollout.scheduler import (
    ContextType,
    LossScale,
    MultiTurnScheduler,
    OpenEnvScheduler,
    RolloutInferRequest,
    load_scheduler,
    loss_scale_map,
    orms,
)
from verl_mt.extensions.compat.schedulers.gym import environments
from verl_mt.extensions.compat.schedulers.shipped import schedulers
from verl_mt.rewards.base import load_reward, rewards
from verl_mt.rewards.contract import RewardInput, RunState
from verl_mt.rollout.drivers import ToolLoopDriver
from verl_mt.rollout.loss_scale import load_loss_scale, loss_scales, zero_stretches
from verl_mt.trainer.build import build_trainer

pytestmark = pytest.mark.slow  # real files, whole conversations

PLUGIN = "examples/train/grpo/plugin/plugin.py"
GSM8K = "examples/train/grpo/plugin/gsm8k/gsm8k_plugin.py"
LAKE = "examples/megatron/grpo/multi_turn/frozen_lake_plugin.py"


@pytest.fixture
def registries():
    """What a file registers is forgotten afterwards."""
    kept = [(names, dict(names)) for names in (rewards, schedulers, environments, loss_scales)]
    yield
    for names, items in kept:
        names.clear()
        dict.update(names, items)


@contextmanager
def plugin(file, tmp_path):
    copy = conformance.copy_replaced("ms-swift", conformance.peer("ms-swift", "2026-08", file), tmp_path)
    with conformance.imported(copy, f"swift_{copy.stem}") as module:
        yield module


@pytest.mark.parametrize("file", [PLUGIN, GSM8K, LAKE])
def test_a_plug_in_file_loads_whole(file, tmp_path, registries):
    with plugin(file, tmp_path) as module:
        assert module.__name__ in sys.modules


def test_its_tool_call_scheduler_takes_the_place_of_ours_and_trains_only_what_was_sampled(tmp_path, registries, caplog):
    with plugin(PLUGIN, tmp_path) as module:
        assert "takes the place of" in caplog.text
        scheduler = load_scheduler("tool_call_scheduler", max_turns=3)
        assert type(scheduler) is module.ToolCallScheduler
        turns = [said("Action: calculator\nAction Input: 2+3\n"), said("Final Answer: 5")]
        run = converse(scheduler, turns)
    assert run.trajectory.error is None and run.trajectory.num_turns == 2
    ids, mask, _ = response(run.record)
    assert CHAT.decode(ids).startswith("Action: calculator\nAction Input: 2+3\nResult: 5Final Answer: 5")
    assert trained(run.record) == ids_of("Action: calculator\nAction Input: 2+3\n") + turns[1][0]
    assert len(mask) - sum(mask) == len("Result: 5")
    assert run.trajectory.info["tool_results"] == "Result: 5"


def test_its_rewards_of_services_say_what_they_need(tmp_path, registries):
    with plugin(PLUGIN, tmp_path) as module:
        assert load_reward("external_countdown") is not None
        with pytest.raises(PluginError, match="JUDGE0_ENDPOINT"):
            load_reward("external_code_reward_by_judge0")
        with pytest.raises(PluginError, match="a reward model is a server"):
            module.QwenLongPlugin(None, None)
    with plugin(GSM8K, tmp_path) as module:
        texts = ["so \\boxed{1,234}", "#### 7", "no"]
        assert module.GSM8KAccuracy()(texts, ["#### 1234", "#### 8", "#### 1"]) == [1.0, 0.0, 0.0]
        assert module.GSM8KFormat()(texts) == [1.0, 1.0, 0.0]


CALL = '<tool_call>{"name": "a", "parameters": {"x": 1}}</tool_call>'
NEAR = '<tool_call>{"name": "a", "parameters": {"x": 2}}</tool_call>'
PYTHON = {"verification_info": {"language": "python", "test_cases": []}}


# What each class documents: a countdown uses every number once; an answer is compared as mathematics, then as text;
# the tool-use rewards are format 0..1, length words/512, correctness -3..3 by names, parameters and values.
SCORED = [
    ("external_countdown", "<answer>(1 + 2) * 4 = 12</answer>", {"target": 12, "nums": [1, 2, 4]}, 1.0),
    ("external_countdown", "<answer>1 + 2 + 4</answer>", {"target": 12, "nums": [1, 2, 4]}, 0.0),
    ("external_countdown", "<answer>12</answer>", {"target": 12, "nums": [1, 2, 4]}, 0.0),
    ("external_r1v_acc", "so $\\frac{1}{2}$", {"solution": "$0.5$"}, 1.0),
    ("external_r1v_acc", "<answer>a cat</answer>", {"solution": "<answer>a cat</answer>"}, 1.0),
    ("external_r1v_acc", "<answer>a cat</answer>", {"solution": "<answer>a dog</answer>"}, 0.0),
    ("thinking_tips", "it is $\\boxed{12}$", {"solution": "$12$"}, 1.0),
    ("thinking_tips", "it is $\\boxed{13}$", {"solution": "$12$"}, 0.0),
    ("external_code_format", "<think>t</think><answer>```python\n1```</answer>", PYTHON, 1.0),
    ("external_code_format", "```python\n1```", PYTHON, 0.0),
    ("external_tooluse_format_reward", f"<think>t</think> {CALL}", {"solution": CALL}, 1.0),
    ("external_tooluse_format_reward", CALL, {"solution": CALL}, 0.0),
    ("external_tooluse_format_reward", "<think>t</think><response>r</response>", {"solution": "<response>"}, 1.0),
    ("external_tooluse_length_reward", f"<think>{'w ' * 256}</think> {CALL}", {"solution": CALL}, 0.5),
    ("external_tooluse_length_reward", f"{'w ' * 256} {CALL}", {"solution": CALL}, 0.0),
    ("external_tooluse_correct_reward", f"<think>t</think> {CALL}", {"solution": CALL}, 3.0),
    ("external_tooluse_correct_reward", "<think>t</think> none", {"solution": CALL}, -3.0),
    # the name (1), the parameter's name (1), not its value: 6 * 2 / 3 - 3
    ("external_tooluse_correct_reward", f"<think>t</think> {NEAR}", {"solution": CALL}, 1.0),
]


@pytest.mark.parametrize(("name", "text", "columns", "score"), SCORED)
def test_every_reward_of_its_plug_in_that_needs_no_service_scores_a_trajectory_as_it_documents(
    name, text, columns, score, tmp_path, registries
):
    if name in ("external_r1v_acc", "thinking_tips"):
        pytest.importorskip("math_verify", reason="an extra: pip install 'verl_mt[math]'")
    with plugin(PLUGIN, tmp_path):
        run = converse(ToolLoopDriver(), [said(text)], prompt=prompt_of(**columns), reward=load_reward(name).function)
    assert (run.trajectory.error, run.trajectory.reward) == (None, pytest.approx(score))


def test_the_table_of_scored_rewards_holds_all_that_the_plug_in_registers(tmp_path, registries):
    before = set(rewards)
    with plugin(PLUGIN, tmp_path):
        registered = set(rewards) - before | {"thinking_tips"}
    services = {"external_code_reward", "external_code_reward_by_judge0", "async_genrm"}
    assert registered == {name for name, *_ in SCORED} | services


@pytest.mark.parametrize(("step", "scores"), [(0, [2.0, -2.0]), (75, [2.5, -2.5]), (150, [3.0, -3.0])])
def test_a_reward_with_a_schedule_follows_the_trainers_state(step, scores, tmp_path, registries, monkeypatch):
    monkeypatch.setenv("SCHEDULEREWARD", "1")
    with plugin(PLUGIN, tmp_path):
        reward = load_reward("external_tooluse_correct_reward")
        run = RunState(step=step // 3, total_steps=100, updates_per_step=3)
        items = [
            RewardInput("d", text, CALL, {}, {"solution": CALL}, text, run=run)
            for text in (f"<think>t</think> {CALL}", "x")
        ]
        found = asyncio.run(reward.score(items))
    assert [s["score"] for s in found] == pytest.approx(scores)


@contextmanager
def judge_server(reply):
    """A model behind OpenAI's endpoint that always says `reply`; yields its URL and what it was asked."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer({"object": "list", "data": [{"id": "judge", "object": "model"}]})

        def do_POST(self):
            asked.append(loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][-1]["content"])
            self.answer({"choices": [{"message": {"role": "assistant", "content": reply}}]})

        def answer(self, value):
            body = dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        server.shutdown()


def test_its_async_reward_asks_a_model_for_each_of_a_groups_answers(tmp_path, registries, monkeypatch):
    for package in ("openai", "aiohttp"):
        pytest.importorskip(package, reason="the plug-in's judge needs it")
    with judge_server("good [[7]]") as (url, asked), plugin(PLUGIN, tmp_path):
        monkeypatch.setenv("GENRM_API_BASE", url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        reward = load_reward("async_genrm").function
        run = converse(ToolLoopDriver(), [said("four")], prompt=prompt_of("2+2?"), reward=reward)
    assert (run.trajectory.error, run.trajectory.reward) == (None, 0.7)
    assert len(asked) == 1 and "2+2?" in asked[0] and "four" in asked[0]


class Asked:
    """A reward that keeps what it is called with."""

    def __init__(self):
        self.given = {}

    def __call__(self, completions, **kwargs):
        self.given = {"completions": completions, **kwargs}
        return [0.0] * len(completions)


def test_a_reward_is_given_the_trainers_state_and_the_ids_of_each_message():
    asked = Asked()
    turns = [said("Action: calculator\nAction Input: 2+3\n"), said("Final Answer: 5")]
    run = converse(load_scheduler("tool_call_scheduler", max_turns=3), turns, reward=asked)
    given = asked.given
    assert run.trajectory.error is None and given["completions"] == [run.trajectory.messages[-1]["content"]]
    start = run.record.num_prompt_tokens
    assert given["response_token_ids"] == [[run.record.token_ids[start:]]], "its observation is inside the message"
    assert given["request_id"] == [run.trajectory.trajectory_id] and given["prompt_id"] == [run.trajectory.prompt_id]
    assert (given["finish_reason"], given["is_truncated"]) == (["stop"], [False])
    state = given["trainer_state"]
    assert (state.global_step, state.max_steps, state.is_world_process_zero) == (0, 0, True)
    with pytest.raises(AttributeError, match=r"no 'best_metric'. It has global_step"):
        _ = state.best_metric
    several = [said("one"), said("two")]
    run = converse(Hooked(), several, reward=asked)
    assert asked.given["response_token_ids"] == [[several[0][0], several[1][0]]], "a list for each message"
    run = converse(ToolLoopDriver(), [said("one", reason="length")], reward=asked)
    assert asked.given["response_token_ids"] == [[*ids_of("one")]], "one list where a run has one turn"
    assert asked.given["finish_reason"] == ["length"]


def lake_rows(count):
    file = conformance.peer("ms-swift", "2026-08", LAKE).with_name("frozen_lake.jsonl")
    return [loads(line) for line in file.read_text().splitlines()[:count]]


def test_its_frozen_lake_is_played_to_an_end_with_the_environments_reward(tmp_path, registries):
    with plugin(LAKE, tmp_path) as module:
        scheduler = load_scheduler("gym_scheduler", max_turns=4, kwargs={"env": "frozen_lake"})
        [row] = lake_rows(1)
        prompt = prompt_of(prompt=row["messages"], env_config=row["env_config"])
        run = converse(
            scheduler, [said(f"<action>{way}</action>") for way in ("up", "up", "left", "left")], prompt=prompt
        )
        told = module.SYSTEM_PROMPT
    trajectory = run.trajectory
    assert trajectory.error is None
    info = trajectory.info
    assert len(info["step_rewards"]) == trajectory.num_turns and info["total_reward"] == sum(info["step_rewards"])
    assert info["trajectory_info"][0] == {"seed": 0, "size": 4}
    roles = [m["role"] for m in trajectory.messages]
    assert roles[:3] == ["system", "user", "assistant"] and trajectory.messages[0]["content"] == told
    assert "FrozenLake 4x4" in trajectory.messages[1]["content"]
    assert run.record.loss_mask == run.record.sampled and scheduler._envs == {}


MANUAL = "docs/source_en/Instruction/GRPO/DeveloperGuide"
# Names of the manual that are no names to import: its own examples, an engine that is a key of the run, a function of
# its trainer's.
ELSEWHERE = {
    "AsyncEngine": "actor_rollout_ref.rollout.mode",
    "CustomScheduler": "an example", "FrozenLakeEnv": "an example", "MyEnv": "an example",
    "SudokuScheduler": "an example", "RewardFunction": "an example", "Scheduler": "an example",
}  # fmt: skip


def manual():
    """The text of its two pages, and the code in it."""
    text = "\n".join(
        conformance.peer("ms-swift", "2026-08", f"{MANUAL}/{name}").read_text()
        for name in ("multi_turn.md", "gym_env.md")
    )
    return text, "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))


def test_every_class_that_its_manual_names_is_there_with_the_methods_and_fields_that_it_shows():
    text, code = manual()
    named = set(re.findall(r"\b(?:[A-Z]+[a-z]\w*[A-Z]\w*|[A-Z]{3}Scheduler)\b", code))
    named |= {n for tick in re.findall(r"`([A-Za-z_]+)`", text) for n in [tick] if re.search(r"[A-Z].*[a-z].*[A-Z]", n)}
    named -= {"NotImplementedError"}
    assert {n for n in named if not hasattr(swift, n)} <= set(ELSEWHERE), "a class of the manual that nobody knows"
    assert {"GYMScheduler", "OpenEnvScheduler", "OpenEnvWrapper", "MultiTurnScheduler"} <= named
    shown = {}
    for name, body in re.findall(r"^class (\w+)\(.*?\):\n(.*?)(?=^\S|\Z)", code, re.DOTALL | re.MULTILINE):
        shown.setdefault(name, set()).update(re.findall(r"^    (?:async )?def (\w+)", body, re.MULTILINE))
    for name in re.findall(r"\*\*`(\w+)`\*\*", text):  # the hooks of the list about OpenEnvScheduler, and others
        shown["OpenEnvScheduler"] = shown.get("OpenEnvScheduler", set()) | {name}
    for name, methods in shown.items():
        if hasattr(swift, name):
            missing = {m for m in methods if not hasattr(getattr(swift, name), m)}
            assert not missing, (name, missing)
    for kind in (RolloutInferRequest, swift.ChatCompletionResponseChoice):
        call = text.partition(f"\n{kind.__name__}(\n")[2].partition('"""')[0]
        used = set(re.findall(r"^    (\w+)=", call, re.MULTILINE))
        assert used and used <= {f.name for f in fields(kind)}
    for name in re.findall(r"multi_turn_scheduler (\w+)", text):
        assert name in schedulers or name == "sudoku_scheduler", name
    flags = set(re.findall(r"--(\w+)", text)) - {"rlhf_type"}
    rows = families()["ms-swift"].rows
    assert len(flags) > 15 and {f for f in flags if f not in rows} == set()


class Countdown:
    """Behind an OpenEnv server in another process; here its client's blocking methods."""

    log: ClassVar[list[str]] = []

    def __init__(self, config):
        self.left = config["start"]

    def reset(self):
        self.log.append("open")
        return {"left": self.left}, None

    def step(self, action):
        self.left -= action.get("take", 0)
        return {"left": self.left}, float(self.left == 0), self.left <= 0, {"took": action}

    def close(self):
        self.log.append("close")


class CountdownScheduler(OpenEnvScheduler):
    def _create_env(self, env_config):
        return Countdown(env_config)


@pytest.mark.parametrize(
    ("turns", "rewards_of_steps"),
    [
        ([said('{"take": 1}'), said('```json\n{"take": 2}\n```')], [0.0, 1.0]),
        ([said("none"), said('{"take": 3}'), said("more")], [0.0, 1.0]),
        ([said("none")] * 3, [0.0, 0.0, 0.0]),
    ],
)
def test_an_episode_behind_a_server_is_played_with_the_documented_hooks(turns, rewards_of_steps):
    Countdown.log.clear()
    prompt = prompt_of(env_config={"name": "openenv", "start": 3, "system_message": "Take."})
    run = converse(CountdownScheduler(max_turns=3), turns, prompt=prompt, reward=orms["gym"]())
    trajectory = run.trajectory
    assert trajectory.error is None and Countdown.log == ["open", "close"]
    assert [m["content"] for m in trajectory.messages[:2]] == ["Take.", '{"left": 3}']
    assert trajectory.info["step_rewards"] == rewards_of_steps and trajectory.reward == sum(rewards_of_steps)
    assert trajectory.info["gym_done"] is (sum(rewards_of_steps) > 0)
    assert trajectory.info["trajectory_info"][1]["metadata"]["took"] in ({"take": 1}, {"message": "none"})
    assert run.record.loss_mask == run.record.sampled


class OwnHooks(OpenEnvScheduler):
    """Replaces both hooks, and keeps a state of its own, as the manual's Sudoku does."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._moves = {}

    def _create_env(self, env_config):
        return Countdown(env_config)

    async def on_trajectory_start(self, requests):
        limit = asyncio.Semaphore(getattr(self, "max_concurrent_envs", 4))

        async def begin(request):
            async with limit:
                if request.uuid in self._envs:
                    await self._close_and_remove(request.uuid)
                config = {**getattr(self, "env_config_defaults", {}), **(request.data_dict or {}).get("env_config", {})}
                env = self._create_env(config)
                observation, _ = await asyncio.to_thread(env.reset)
                request.messages = [{"role": "user", "content": f"left: {observation['left']}"}]
                self._envs[request.uuid], self._moves[request.uuid] = env, []
                self._total_rewards[request.uuid], self._step_rewards[request.uuid] = 0.0, []
                self._pending_obs[request.uuid] = None

        await asyncio.gather(*[begin(request) for request in requests])

    async def _close_and_remove(self, uuid):
        await super()._close_and_remove(uuid)
        self._moves.pop(uuid, None)

    async def on_turn_end(self, infer_request, response_choice, current_turn):
        uuid = infer_request.uuid
        action = self.parse_action(response_choice.message.content)
        if action is None:
            infos = {"total_reward": self._total_rewards[uuid] - 1.0, "step_rewards": [-1.0], "gym_done": True}
            await self._close_and_remove(uuid)
            return {"done": True, "rollout_infos": infos}
        observation, reward, done, _ = await asyncio.to_thread(self._envs[uuid].step, action)
        self._moves[uuid].append(action)
        self._total_rewards[uuid] += reward + 0.25 * len(self._moves[uuid])
        self._step_rewards.setdefault(uuid, []).append(reward)
        self._pending_obs[uuid] = None if done else f"left: {observation['left']}"
        infos = {"total_reward": self._total_rewards[uuid], "step_rewards": list(self._step_rewards[uuid])}
        if done:
            await self._close_and_remove(uuid)
        return {"done": done, "rollout_infos": infos}

    def parse_action(self, text):
        found = re.search(r"\[(\d)\]", text)
        return {"take": int(found.group(1))} if found else None


@pytest.mark.parametrize(("says", "total"), [(["[1]", "[2]"], 1.75), (["[1]", "pass"], -0.75), (["[1]", "[1]"], 0.75)])
def test_a_scheduler_that_replaces_the_hooks_around_a_server_keeps_its_state_by_uuid(says, total):
    Countdown.log.clear()
    scheduler = OwnHooks(max_turns=2)
    run = converse(
        scheduler, [said(text) for text in says], prompt=prompt_of(env_config={"start": 3}), reward=orms["gym"]()
    )
    assert (run.trajectory.error, run.trajectory.reward) == (None, total)
    assert Countdown.log == ["open", "close"] and scheduler._moves == scheduler._envs == {}
    assert [m["content"] for m in run.trajectory.messages if m["role"] == "user"] == ["left: 3", "left: 2"]


def test_without_the_package_a_server_is_refused_with_advice():
    if importlib.util.find_spec("openenv") is not None:
        pytest.skip("openenv is installed")
    prompt = prompt_of(env_config={"base_url": "http://127.0.0.1:9"})
    error = converse(load_scheduler("openenv_scheduler"), [said("x")], prompt=prompt).trajectory.error
    assert "pip install openenv" in error and "_create_env" in error


class Penalty(swift.Env):
    """Gives -1 for what it cannot read, and keeps the name that chose it."""

    async def reset(self, config):
        return f"go {self.env_config['name']}", {}, ""

    async def step(self, action):
        return "again", -1.0 if not action[-1]["content"].endswith("!") else 1.0, False, {}

    async def close(self):
        return None


def test_an_environment_judges_a_cut_action_too_and_is_given_its_whole_configuration(registries):
    swift.envs["penalty"] = Penalty
    run = converse(
        load_scheduler("gym_scheduler", max_turns=3),
        [said("hm", "length")],
        prompt=prompt_of(env_config={"name": "penalty"}),
    )
    assert run.trajectory.error is None and run.trajectory.info["step_rewards"] == [-1.0]
    assert run.trajectory.messages[0]["content"] == "go penalty"
    prompt = prompt_of(env_config={"name": "penalty"}, ctx_config={"name": "mine"})
    assert (
        "context managers are not called"
        in converse(load_scheduler("gym_scheduler"), [], prompt=prompt).trajectory.error
    )


class OlderForm(MultiTurnScheduler):
    """In the form of its first releases: the engine comes first, and `step` returns a pair."""

    def __init__(self, infer_engine=None, max_turns=None, *args, **kwargs):
        super().__init__(infer_engine, max_turns, *args, **kwargs)

    def check_finished(self, infer_request, result, current_turn):
        return super().check_finished(infer_request, result, current_turn) or "done" in result.message.content

    def step(self, infer_request, result, current_turn):
        infer_request.messages.append({"role": "user", "content": "more"})
        return infer_request, {"images": infer_request.images, "seen": current_turn}


def test_a_scheduler_in_the_form_of_its_first_releases_runs():
    run = converse(OlderForm(max_turns=3), [said("one"), said("done")])
    assert run.trajectory.error is None and run.trajectory.num_turns == 2 and run.trajectory.info["seen"] == 1
    assert run.record.loss_mask == run.record.sampled


class AsksOtherwise(MultiTurnScheduler):
    """A loop of its own that makes a configuration for each request."""

    def __init__(self, max_turns=None, **asked):
        super().__init__(max_turns)
        self.asked = asked

    async def run(self, infer_request, request_config, **kwargs):
        request_config.logprobs = True
        config = swift.RequestConfig(max_tokens=5, n=1, stream=False, logprobs=True, **self.asked)
        response = await self.infer_engine.infer_async(infer_request, config)
        ids, mask, log_probs = self.prepare_response_continuation(response.choices[0])
        assert len(ids) == len(mask) == len(log_probs) and self.engine is self.infer_engine
        return swift.RolloutOutput(response=response, messages=infer_request.messages, response_token_ids=[ids])


def test_a_request_may_say_what_changes_nothing_and_is_refused_what_would_be_another_distribution():
    assert converse(AsksOtherwise(repetition_penalty=1.0, presence_penalty=0.0), [said("one")]).trajectory.error is None
    for name, value in (("repetition_penalty", 1.1), ("seed", 3), ("num_beams", 4)):
        error = converse(AsksOtherwise(**{name: value}), [said("one")]).trajectory.error
        assert f"request_config.{name} is {value}: not offered" in error


class ReadsArguments(swift.ORM):
    def __init__(self, args, **kwargs):
        super().__init__(args)
        self.longest = args.max_completion_length

    def __call__(self, completions, **kwargs):
        return [float(len(text) <= self.longest) for text in completions]


def test_a_reward_that_reads_the_trainers_arguments_gets_those_that_are_given_or_is_refused_with_advice(registries):
    orms["reads_arguments"] = ReadsArguments
    with pytest.raises(PluginError, match=r"args has no 'max_completion_length'.*reward\.kwargs\.args"):
        load_reward("reads_arguments")
    reward = load_reward("reads_arguments", kwargs={"args": {"max_completion_length": 3}})
    assert [s["score"] for s in asyncio.run(reward.score([RewardInput("d", "", "", {}, {}, "four")]))] == [0.0]


def test_names_of_its_trainer_load_and_say_what_there_is_instead(monkeypatch):
    from abc import ABC

    from verl_mt.extensions.compat.rollout.scheduler import CosineReward, get_env_args, is_master, run_multi_turn  # type: ignore

    for use, advice in ((run_multi_turn, "run drives"), (type("Mine", (CosineReward, ABC), {}), "reward.path=cosine")):
        with pytest.raises(PluginError, match=advice):
            use(None)
    monkeypatch.setenv("MY_WEIGHT", "0.5")
    assert (get_env_args("my_weight", float, 1.0), get_env_args("other", int, 2), is_master()) == (0.5, 2, True)
    with pytest.raises(PluginError, match="A scheduler's step may rewrite"):
        swift.ContextManager().manage_context([], "t")
    with pytest.raises(ImportError, match="nobody_knows"):
        from verl_mt.extensions.compat.rollout.scheduler import nobody_knows  # type: ignore # noqa: F401


def test_overriding_what_nothing_calls_is_refused_by_name():
    class Shares(OlderForm):
        async def async_infer(self, infer_requests, request_config, **kwargs):
            return []

    multi_turns = swift.multi_turns
    multi_turns["shares"] = Shares
    try:
        with pytest.raises(PluginError, match=r"Shares overrides async_infer, which is not called here: .*run"):
            load_scheduler("shares")
    finally:
        del multi_turns["shares"]


class Hooked(MultiTurnScheduler):
    """Counts its hooks, and says in `on_turn_end` when it is over."""

    def __init__(self, max_turns=None, *args, last=2, done=True, **kwargs):
        super().__init__(max_turns, *args, **kwargs)
        self.calls, self.last, self.done = [], last, done

    def on_trajectory_start(self, requests):
        self.calls.append("start")
        for request in requests:
            assert isinstance(request, RolloutInferRequest)
            request.messages = [{"role": "user", "content": "begin"}]

    async def on_turn_end(self, infer_request, response_choice, current_turn):
        self.calls.append(f"end {current_turn} {infer_request.messages[-1]['content']}")
        over = {"done": self.done} if current_turn == self.last else {}
        return {**over, "rollout_infos": {"seen": current_turn}}

    def check_finished(self, infer_request, response_choice, current_turn):
        self.calls.append(f"check {current_turn}")
        return not self.done

    def step(self, infer_request, response_choice, current_turn):
        infer_request.messages.append({"role": "user", "content": "more"})
        return {"infer_request": infer_request}

    def on_trajectory_end(self, requests, error=None):
        self.calls.append(f"over {len(requests)} {error}")


def test_the_documented_hooks_are_called_in_order_and_done_overrides_check_finished():
    scheduler = Hooked()
    run = converse(scheduler, [said("one"), said("two"), said("three")])
    assert run.trajectory.error is None
    assert scheduler.calls == ["start", "end 1 one", "check 1", "end 2 two", "check 2", "over 1 None"]
    assert CHAT.decode(run.record.token_ids).count("begin") == 1 and run.trajectory.info["seen"] == 2
    goes_on = Hooked(max_turns=2, last=1, done=False)
    assert converse(goes_on, [said("one"), said("two"), said("three")]).trajectory.num_turns == 2


@pytest.mark.parametrize(
    ("value", "text"),
    [(3, "must return a dict or None"), ({"dune": True}, "unknown key 'dune'.*'done'"), ({"done": "x"}, "done")],
)
def test_a_wrong_answer_of_on_turn_end_fails_its_trajectory_with_the_hooks_name(value, text):
    class Wrong(Hooked):
        async def on_turn_end(self, infer_request, response_choice, current_turn):
            return value

    trajectory = converse(Wrong(), [said("one")]).trajectory
    assert "on_turn_end" in trajectory.error
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(trajectory.error)


class Today(LossScale):
    """In the form that ms-swift's scales have today."""

    def get_loss_scale(self, context, *, query=None):
        head, found, tail = context.partition("Observation:")
        return ([head, found + tail], [1.0, 0.0]) if found else super().get_loss_scale(context)


def test_a_loss_scale_in_todays_form_clears_what_it_weighs_zero(registries):
    loss_scale_map["today"] = Today
    scale = load_loss_scale("today")
    assert list(inspect.signature(scale.get_loss_scale).parameters) == ["context", "query"]
    stretches = zero_stretches(scale, "I say Observation: x", ContextType.RESPONSE, last=True, messages=[])
    assert stretches == [(6, 20)]
    joined = load_loss_scale("last_round+today")
    assert zero_stretches(joined, "abc", ContextType.RESPONSE, last=False, messages=[]) == [(0, 3)]
    last = Today(base_strategy="last_round")
    assert zero_stretches(last, "abc", ContextType.RESPONSE, last=False, messages=[]) == [(0, 3)]


def two_steps(tmp_path, file, rows, *overrides):
    """Train twice with the file as an external plug-in; metrics, and every sample's row."""
    copy = conformance.copy_replaced("ms-swift", conformance.peer("ms-swift", "2026-08", file), tmp_path)
    data = tmp_path / "train.jsonl"
    data.write_text("\n".join(map(dumps, rows)))
    words = (
        f"dataset={data}", f"external_plugins=[{copy}]", "data.prompt_key=messages", "data.train_batch_size=2",
        "num_generations=2", "max_completion_length=96", "max_steps=2", "data.max_prompt_length=512",
        f"output_dir={tmp_path / 'run'}", "trainer.progress=off", "trainer.num_threads=1",
    )  # fmt: skip
    build_trainer(compose([*NO_VALIDATION, *words, *overrides])).fit()
    lines = metrics_of(tmp_path / "run")
    assert len(lines) == 2 and [line.get("rollout/failed", 0) for line in lines] == [0, 0]
    return lines, [row for step in (1, 2) for row in rows_of(tmp_path / "run", step)]


def test_its_tool_call_scheduler_trains_two_steps_with_the_tiny_model(tmp_path, registries):
    rows = [
        {"messages": [{"role": "user", "content": f"What is {k}+1?"}], "target": 1, "nums": [k, 1]} for k in range(4)
    ]
    rows = [{**row, "solution": "2"} for row in rows]
    words = ("multi_turn_scheduler=tool_call_scheduler", "max_turns=3", "reward_funcs=external_countdown")
    _, read = two_steps(tmp_path, PLUGIN, rows, "data.label_key=solution", *words)
    assert len(read) == 8 and all(row["stop_reason"] != "error" for row in read)


@pytest.mark.parametrize("scaled", ["none", "gdpo"])
def test_its_gsm8k_rewards_train_two_steps_by_their_weighted_sum_on_renamed_columns(tmp_path, registries, scaled):
    rows = [{"messages": [{"role": "user", "content": f"{k}+1?"}], "answer": f"#### {k + 1}"} for k in range(4)]
    words = (
        "reward_funcs=[gsm8k_accuracy,gsm8k_format]", "reward_weights=[1,0.5]", "data.columns={answer: solution}",
        "data.label_key=solution", "system='Answer with ####.'", f"scale_rewards={scaled}", "beta=0.04",
        "top_entropy_quantile=0.5",
    )  # fmt: skip
    lines, read = two_steps(tmp_path, GSM8K, rows, *words)
    assert len(read) == 8 and all(row["messages"][0]["content"] == "Answer with ####." for row in read)
    for row in read:
        parts = row["reward_parts"]
        weighed = parts["gsm8k_accuracy"] + (0.5 if scaled == "none" else 1) * parts["gsm8k_format"]
        assert row["reward"] == parts["score"] == weighed
    assert all({"reward/gsm8k_accuracy", "reward/gsm8k_format", "actor/kl_loss"} <= line.keys() for line in lines)


def test_its_frozen_lake_trains_two_steps_with_the_tiny_model(tmp_path, registries):
    rows = [{**row, "solution": ""} for row in lake_rows(4)]
    words = (
        "multi_turn_scheduler=gym_scheduler", "max_turns=3", "use_gym_env=true", "gym_env=frozen_lake",
    )  # fmt: skip
    _, read = two_steps(tmp_path, LAKE, rows, "data.label_key=solution", *words)
    assert len(read) == 8 and all(row["stop_reason"] != "error" for row in read)
    assert all("FrozenLake 4x4" in row["messages"][1]["content"] for row in read)


def test_its_tool_use_rewards_train_two_steps_and_see_the_steps_pass(tmp_path, registries, monkeypatch):
    monkeypatch.setenv("SCHEDULEREWARD", "1")
    rows = [{"messages": [{"role": "user", "content": f"Call a with {k}."}], "solution": CALL} for k in range(8)]
    words = ("reward_funcs=external_tooluse_correct_reward", "data.label_key=solution")
    words += ("actor_rollout_ref.actor.ppo_mini_batch_size=1", "actor_rollout_ref.actor.ppo_epochs=2")
    _, read = two_steps(tmp_path, PLUGIN, rows, *words)
    # A tiny model calls nothing: the least score, which moves by 1/150 with each of a step's four updates.
    by_step = {row["step"]: row["reward"] for row in read}
    assert by_step == pytest.approx({1: -2.0, 2: 4 / 150 - 2 - 4 / 150 * 2})
