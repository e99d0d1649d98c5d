"""Solvers, rewriters and a selector in one episode: the example's function on scripted turns."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from generate_support import CHAT, EOS, roll_out, rows, runner_of, spelled, turn

from verl_mt.algorithms.advantages import grpo
from verl_mt.config.schema import Config
from verl_mt.data.batch import build_batch, trajectory_rewards
from verl_mt.data.trajectory import Status
from verl_mt.diagnostics.step_metrics import rollout_metrics
from verl_mt.engines.scripted import ScriptedEngine
from verl_mt.errors import EngineError
from verl_mt.plugins import import_file

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "05_multi_agent.py"
CALLS: list[list[str]] = []


def right(args, samples):
    """Batched: 1 where an agent's text says so."""
    CALLS.append([s.model_text for s in samples])
    return [float("right" in s.model_text) for s in samples]


def role_of(request) -> str:
    asked = CHAT.decode(request.input_ids)
    return "selector" if "Which of these" in asked else "rewriter" if "Others have" in asked else "solver"


class Cast:
    """What each role says, in order; an exception is a request that the engine refuses."""

    def __init__(self, **lines):
        self.lines = {role: list(texts) for role, texts in lines.items()}
        self.asked: list[str] = []

    def __call__(self, request):
        role = role_of(request)
        self.asked.append(role)
        said = self.lines[role].pop(0)
        if isinstance(said, Exception):
            raise said
        if said is CUT:
            return turn("cut", reason="length")
        return turn(said)


CUT = object()


def run(cast, *, n=1, size=2, questions=("two",), reward=f"{__name__}.right", latency_s=0.0):
    CALLS.clear()
    config = Config()
    config.data.apply_chat_template = False
    config.actor_rollout_ref.rollout.custom_generate_kwargs = {"num_parallel": size}
    engine = ScriptedEngine(cast, decode=CHAT.decode, latency_s=latency_s)
    runner = runner_of(f"{EXAMPLE}:generate", None, engine=engine, config=config, reward=reward)
    prompts = rows(*questions)
    for prompt in prompts:
        prompt.row.raw["prompt"] = prompt.messages
    return roll_out(runner, prompts, n=n), engine


def rewards_by_role(group) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for t in group.trajectories:
        found.setdefault(t.group_id.split("/")[-1], []).append(round(t.reward, 6))
    return found


@pytest.mark.cap("C72", "C74")
def test_every_agent_is_a_trajectory_of_its_own_under_one_prompt_and_one_episode():
    cast = Cast(solver=["right a", "b"], rewriter=["right c", "right d"], selector=["Judgment: 2"])
    [group], engine = run(cast)
    trajectories = group.trajectories
    assert [t.sample.metadata["role"] for t in trajectories] == ["solver"] * 2 + ["rewriter"] * 2 + ["selector"]
    assert len({t.trajectory_id for t in trajectories}) == 5
    assert {t.prompt_id for t in trajectories} == {"s1.00000"}
    assert {t.episode_id for t in trajectories} == {"s1.00000.00"}
    assert [t.group_id for t in trajectories] == [f"s1.00000/{t.sample.metadata['role']}" for t in trajectories]
    by_prompt = {tuple(r.input_ids) for r in engine.requests}
    for t, said in zip(trajectories, ["right a", "b", "right c", "right d", "Judgment: 2"], strict=True):
        [record] = t.records
        assert tuple(record.token_ids[: record.num_prompt_tokens]) in by_prompt
        assert record.token_ids[record.num_prompt_tokens :] == [*spelled(said), EOS]
        assert t.sample.tokens == record.token_ids and all(t.sample.loss_mask)
    assert "1. right a\n2. b" in CHAT.decode(engine.requests[2].input_ids)
    assert sorted(engine.opened) == sorted(engine.closed)


@pytest.mark.cap("C73")
def test_agents_of_a_role_are_in_the_engine_together():
    cast = Cast(solver=["a", "b", "c"], rewriter=["d", "e", "f"], selector=["Judgment: 1"])
    live, most, agents = 0, 0, asyncio.Barrier(3)

    class Counting(ScriptedEngine):
        async def generate(self, request):
            nonlocal live, most
            live += 1
            most = max(most, live)
            try:
                if role_of(request) != "selector":
                    await agents.wait()
                return await super().generate(request)
            finally:
                live -= 1

    config = Config()
    config.data.apply_chat_template = False
    config.actor_rollout_ref.rollout.custom_generate_kwargs = {"num_parallel": 3}
    runner = runner_of(f"{EXAMPLE}:generate", None, engine=Counting(cast, decode=CHAT.decode), config=config)
    prompts = rows("q")
    prompts[0].row.raw["prompt"] = prompts[0].messages
    [group] = roll_out(runner, prompts)
    assert most == 3 and len(group.trajectories) == 7


@pytest.mark.cap("C75")
def test_samples_are_scored_in_one_call_per_stage_and_in_their_order():
    cast = Cast(solver=["right a", "b"], rewriter=["c", "right d"], selector=["Judgment: 2"])
    [group], _ = run(cast)
    assert CALLS == [["right a", "b"], ["c", "right d"]]
    assert rewards_by_role(group) == {"solver": [1.2, 0.0], "rewriter": [0.0, 1.2], "selector": [1.2]}


@pytest.mark.cap("C76", "C77")
@pytest.mark.parametrize(
    ("rewriters", "judgment", "expected"),
    [
        (["right", "right"], "Judgment: 2", {"solver": [1.2, 0.0], "rewriter": [1.2, 1.2], "selector": [1.2]}),
        (["right", "right"], "the first", {"solver": [0.8, 0.0], "rewriter": [0.8, 0.8], "selector": [0.0]}),
        (["right", "wrong"], "Judgment: 2", {"solver": [0.8, 0.0], "rewriter": [0.8, 0.0], "selector": [0.0]}),
    ],
)
def test_the_selector_gets_its_choices_reward_and_the_outcome_weighs_all(rewriters, judgment, expected):
    rewriters = [r.replace("wrong", "no") for r in rewriters]
    [group], _ = run(Cast(solver=["right", "no"], rewriter=rewriters, selector=[judgment]))
    assert rewards_by_role(group) == expected


@pytest.mark.cap("C76")
@pytest.mark.parametrize(
    ("judgment", "index"),
    [
        ("Judgment: 2", 1),
        ("judgment: 2", None),
        ("Judgment: 9", None),
        ("Judgment:3\nJudgment: 1", 2),
        ("none", None),
    ],
)
def test_a_judgment_names_a_candidate_or_nobody(judgment, index):
    assert import_file(EXAMPLE).selected(judgment, 3) == index


@pytest.mark.cap("C77", "C78")
def test_without_a_solution_in_words_only_the_solvers_are_returned():
    [group], engine = run(Cast(solver=[CUT, CUT]))
    assert rewards_by_role(group) == {"solver": [0.0, 0.0]} and len(engine.requests) == 2
    assert [t.status for t in group.trajectories] == [Status.TRUNCATED] * 2
    [group], _ = run(Cast(solver=[CUT, CUT]), reward="generate_support.one")
    assert rewards_by_role(group) == {"solver": [0.8, 0.8]}


@pytest.mark.cap("C78")
def test_workers_that_fail_are_left_out_and_counted_and_the_others_go_on():
    cast = Cast(solver=[EngineError("refused"), "right a"], rewriter=["right b", "c"], selector=["Judgment: 1"])
    [group], engine = run(cast)
    assert rewards_by_role(group) == {"solver": [1.2], "rewriter": [1.2, 0.0], "selector": [1.2]}
    assert group.trajectories[0].counters["dropped_samples"] == 1
    assert group.trajectories[0].counters["unreturned_conversations"] == 1
    assert sorted(engine.opened) == sorted(engine.closed)
    assert "s1.00000.00" not in {t.trajectory_id for t in group.trajectories}, "the first conversation was the lost one"
    sent = sum(len(r.input_ids) for r in engine.requests)
    lost = len(engine.requests[0].input_ids)
    assert sum(t.counters["input_tokens"] for t in group.trajectories) == sent - lost
    metrics = rollout_metrics([group])
    assert metrics["rollout/dropped_samples"] == 1 and metrics["rollout/trajectories"] == 4
    everybody = [EngineError("refused")] * 2
    [group], _ = run(Cast(solver=everybody))
    [lost] = group.trajectories
    assert lost.status is Status.FAILED and "returned no Sample" in lost.error


@pytest.mark.cap("C74")
def test_groups_of_uneven_size_are_compared_by_their_ids():
    """Two episodes of one prompt, one of them with an agent less; and a second prompt with one episode's worth."""
    solvers = ["right", "no", EngineError("refused"), "right"]
    cast = Cast(solver=solvers, rewriter=["right"] * 4, selector=["Judgment: 1"] * 2)
    groups, _ = run(cast, n=2)
    batch = build_batch([t for g in groups for t in g.trajectories], pad_token_id=0)
    rewards, index = trajectory_rewards(batch)
    names = [t.group_id.split("/")[1] for t in groups[0].trajectories]
    assert names.count("solver") == 3 and names.count("rewriter") == 4 and names.count("selector") == 2
    advantages = grpo(rewards, index, norm_by_std=False)
    for role in ("solver", "rewriter", "selector"):
        mine = [k for k, name in enumerate(names) if name == role]
        centred = rewards[mine] - rewards[mine].mean()
        assert torch.allclose(advantages[mine], centred, atol=1e-6), role
    # Reference: rewards [1, 3 | 5] of two groups, never one group of three.
    index = torch.tensor([0, 0, 1])
    assert torch.allclose(grpo(torch.tensor([1.0, 3.0, 5.0]), index), torch.tensor([-0.7071, 0.7071, 0.0]), atol=1e-4)


def test_agents_with_the_same_prompt_and_the_same_words_stay_apart():
    [group], _ = run(Cast(solver=["", ""], rewriter=["same", "same"], selector=["Judgment: 1"]))
    ids = [t.trajectory_id for t in group.trajectories]
    assert len(ids) == len(set(ids)) == 5
    assert [t.turn_texts for t in group.trajectories] == [[""], [""], ["same"], ["same"], ["Judgment: 1"]]
