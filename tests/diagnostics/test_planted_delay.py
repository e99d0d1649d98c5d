"""A tool that sleeps for one row is named, and the saving that is predicted is the one that is measured."""

from __future__ import annotations

import asyncio
import selectors
import sys
import time
from collections.abc import Iterator

import pytest
import yaml
from tables import before_release
from toys import toy_tokenizer

from verl_mt.chat.parsers import get_parser
from verl_mt.chat.sanity import SanityMode, SanityMonitor
from verl_mt.chat.template import ChatTemplate
from verl_mt.config.compose import compose
from verl_mt.config_paths import find_config_file
from verl_mt.data.dataset import DataRow
from verl_mt.data.requests import SamplingParams
from verl_mt.data.trajectory import TrajectoryGroup
from verl_mt.engines.lock_step import LockStepEngine
from verl_mt.engines.scripted import ScriptedEngine, ScriptedTurn
from verl_mt.extensions.inspection.diagnostics.critical_path import critical_path
from verl_mt.extensions.inspection.step_hooks import CriticalPathHook
from verl_mt.rewards.base import Reward
from verl_mt.rollout.context import Limits
from verl_mt.rollout.prompts import PromptBuilder
from verl_mt.rollout.runner import RolloutPlan, RolloutRunner
from verl_mt.rollout.session import SessionContext
from verl_mt.tiny.problems import rows as problems
from verl_mt.tools.calculator import Calculator
from verl_mt.tools.executor import ToolExecutor, ToolLimits
from verl_mt.tools.function_tool import function_tool
from verl_mt.tools.registry import ToolSet
from verl_mt.trainer.build import build_trainer

pytestmark = pytest.mark.timeout(60)
CHAT = ChatTemplate(toy_tokenizer())
DELAY_S = 7.0
SLEEP_S = {"slow": 0.0}


@function_tool
async def lookup(key: str) -> str:
    """Look a word up.

    Args:
        key: the word
    """
    await asyncio.sleep(0.5 + SLEEP_S.get(key, 0.0))
    return f"value of {key}"


lookup.runs_inline = True  # on the loop whose clock jumps


class SlowReward(Reward):
    async def score(self, inputs):
        await asyncio.sleep(0.3)
        return [{"score": 1.0} for _ in inputs]


class _Clock(selectors.DefaultSelector):
    """Time passes only while everybody sleeps, and then at once: waiting for `timeout` moves the clock by it."""

    now = 1000.0

    def select(self, timeout=None):
        ready = super().select(0)
        if not ready and timeout is None:
            return super().select(None)
        if not ready and timeout > 0:
            self.now += timeout + 1e-9  # more than the loop's resolution, or it would stand still just before a timer
        return ready


@pytest.fixture
def loop(monkeypatch) -> Iterator[asyncio.AbstractEventLoop]:
    clock = _Clock()
    made = asyncio.SelectorEventLoop(clock)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    yield made
    monkeypatch.undo()
    made.close()


def turn_of(request) -> ScriptedTurn:
    """Asks for its question in the first turn, answers in the second; how long it takes depends on both."""
    turn = int(request.request_id.split("/")[-1])
    asked = CHAT.decode(request.input_ids).split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
    said = f'<tool_call>{{"name": "lookup", "arguments": {{"key": "{asked}"}}}}</tool_call>' if turn == 1 else "done"
    ids = [*CHAT.encode_text(said, neutral=False), CHAT.tokenizer.eos_token_id]
    return ScriptedTurn(ids, None, "stop", [-0.5] * len(ids), latency_s=0.4 * turn + 0.1 * len(asked))


def roll_out(loop, *, max_concurrent: int | None, lock_step: bool) -> tuple[list[TrajectoryGroup], float]:
    """Four rows, two samples each; the seconds that it took."""
    engine = ScriptedEngine(turn_of)
    runner = RolloutRunner(
        context=SessionContext(
            chat=CHAT,
            engine=LockStepEngine(engine) if lock_step else engine,
            limits=Limits(response_length=2000, max_model_len=4000),
            parser=get_parser("hermes"),
            sampling=SamplingParams(max_new_tokens=200),
            sanity=SanityMonitor(SanityMode.OFF),
        ),
        reward=SlowReward(),
        tools=ToolExecutor(ToolSet([lookup]), ToolLimits(timeout_s=60.0), CHAT.tokenizer.encode),
        max_concurrent=max_concurrent,
    )
    builder = PromptBuilder(CHAT, ToolSet([lookup]), 2000, True, "error")
    rows = [
        DataRow([{"role": "user", "content": q}], "toy", None, {}, raw={}, index=k, file="toy")
        for k, q in enumerate(("a", "slow", "bcd", "e"))
    ]
    plan = RolloutPlan([builder.build(row) for row in rows], 2, "s000001")

    async def collect() -> list[TrajectoryGroup]:
        return [group async for group in runner.run(plan)]

    begun = time.monotonic()
    groups = loop.run_until_complete(collect())
    return groups, time.monotonic() - begun


@pytest.mark.parametrize("max_concurrent", [None, 3, 2])
@pytest.mark.parametrize("lock_step", [False, True])
def test_a_tool_that_sleeps_for_one_row_is_named_and_its_saving_predicted(loop, monkeypatch, max_concurrent, lock_step):
    _, without_s = roll_out(loop, max_concurrent=max_concurrent, lock_step=lock_step)
    monkeypatch.setitem(SLEEP_S, "slow", DELAY_S)
    groups, with_s = roll_out(loop, max_concurrent=max_concurrent, lock_step=lock_step)
    found = critical_path([t for g in groups for t in g.trajectories], lock_step=lock_step, step_s=with_s)
    held = found.holder
    assert (held.prompt_id, held.what, held.turn) == ("s000001.00001", "tool lookup", 1)
    assert held.span_s == pytest.approx(DELAY_S + 0.5)
    assert with_s == pytest.approx(found.rollout_s, abs=1e-3)
    assert held.saving_s == pytest.approx(with_s - without_s, rel=0.1)


def test_without_a_delay_nothing_would_save_much(loop):
    groups, seconds = roll_out(loop, max_concurrent=None, lock_step=False)
    found = critical_path([t for g in groups for t in g.trajectories], step_s=seconds)
    assert found.holder.saving_s < 0.15 * seconds


def test_the_phases_share_the_time_of_all_trajectories(loop):
    groups, _ = roll_out(loop, max_concurrent=None, lock_step=False)
    found = critical_path([t for g in groups for t in g.trajectories])
    # Decoding takes 0.4 + 0.8 s and twice 0.1 s per letter of the question (1, 4, 3, 1); two samples of each.
    decode_s, tool_s, reward_s = 2 * (4 * 1.2 + 2 * 0.9), 8 * 0.5, 8 * 0.3
    total = decode_s + tool_s + reward_s
    assert found.phase_share["decode"] == pytest.approx(decode_s / total, abs=1e-3)
    assert found.phase_share["tool"] == pytest.approx(tool_s / total, abs=1e-3)
    assert found.phase_share["reward"] == pytest.approx(reward_s / total, abs=1e-3)


ROW_SLEEPS_S = [0.0]


def rows_with_delay(num_rows, seed, split):
    """The tool sleeps for row 1."""
    made = list(problems(num_rows=num_rows, seed=seed, split=split))
    kwargs = {"calculator": {"execute_kwargs": {"sleep_s": ROW_SLEEPS_S[0]}}}
    return [{**row, "extra_info": {"tools_kwargs": kwargs} if k == 1 else {}} for k, row in enumerate(made)]


class SleepyCalculator(Calculator):
    """Sleeps for the row whose `extra_info.tools_kwargs` say so."""

    runs_inline = False

    async def execute(self, instance_id, parameters, **kwargs):
        await asyncio.sleep(kwargs.get("sleep_s", 0.0))
        return await super().execute(instance_id, parameters)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["trainer.deterministic=False", before_release("trainer.deterministic=True")])
def test_a_real_step_names_the_tool_and_would_have_saved_what_was_predicted(tmp_path, monkeypatch, mode):
    """Twice the same step of the default task on the local engine; in the second run the tool sleeps for row 1."""
    file = tmp_path / "tools.yaml"
    declared = yaml.safe_load(find_config_file("tools_configs/calculator.yaml", key="tools").read_text())
    declared["tools"][0]["class_name"] = f"{__name__}.SleepyCalculator"
    file.write_text(yaml.safe_dump(declared))
    steps = []
    for sleep_s in (0.0, 4.0):
        monkeypatch.setattr(sys.modules[__name__], "ROW_SLEEPS_S", [sleep_s])
        trainer = build_trainer(
            compose(
                [
                    f"data.train_files={__name__}:rows_with_delay",
                    "data.train_batch_size=2",
                    "data.train_max_samples=2",
                    "data.shuffle=False",
                    "data.val_files=null",
                    "actor_rollout_ref.rollout.n=2",
                    "trainer.logger=[]",
                    "trainer.num_threads=1",
                    mode,
                    f"actor_rollout_ref.rollout.tool_kwargs.tools_config_file={file}",
                    f"trainer.default_local_dir={tmp_path / str(sleep_s)}",
                ]
            )
        )
        try:
            steps.append(trainer.step())
            (watch,) = (hook for hook in trainer.hooks if isinstance(hook, CriticalPathHook))
            words = watch.straggler.take_words()
        finally:
            trainer.close()
    without, found = steps
    assert words["critical_path/holder"] == "tool calculator"
    assert words["critical_path/trajectory"].startswith("s000001.00001.")
    # Two steps of the same work differ by what the machine does beside them, of which a step's own time is the measure.
    differ, noise = found["time/step_s"] - without["time/step_s"], without["time/step_s"]
    assert found["critical_path/saving_s"] == pytest.approx(differ, rel=0.1, abs=noise)
