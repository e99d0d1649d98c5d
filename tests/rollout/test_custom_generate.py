"""The document's search agent on our Sample: only its import lines are ours."""

from __future__ import annotations

import pytest
from generate_support import CHAT, EOS, only, roll_out, rows, runner_of, spelled, turn
from search_r1_functions import DOCUMENTS

from verl_mt.data.trajectory import Status, StopReason

AGENT = "search_r1_functions.generate"
REWARD = "search_r1_functions.reward_func"
LABEL = {"ground_truth": ["Paris", "paris"]}
SEARCH, ANSWER = "all <search>capital</search>", "so <answer> Paris </answer>"


def run_search(script, **keys):
    runner = runner_of(AGENT, script, reward=REWARD, **keys)
    return only(roll_out(runner, rows("Which?", label=LABEL))), runner.context.engine


@pytest.mark.cap("C42", "C43", "C59", "C60", "C61")
def test_a_search_and_an_answer_are_two_engine_calls_over_exactly_the_recorded_ids():
    trajectory, engine = run_search([turn(SEARCH), turn(ANSWER)])
    assert trajectory.error is None
    sample = trajectory.sample
    first, second = (r.input_ids for r in engine.requests)
    title, _, text = DOCUMENTS["capital"].partition("\n")
    observed = CHAT.tokenizer.encode(f"\n\n<information>Doc 1(Title: {title}) {text}\n</information>\n\n")
    assert first == CHAT.prompt_ids([{"role": "user", "content": "Which?"}])
    assert second == [*first, *spelled(SEARCH), EOS, *observed]
    assert sample.tokens == [*second, *spelled(ANSWER), EOS] == trajectory.records[0].token_ids
    assert CHAT.tokenizer.encode(SEARCH) != spelled(SEARCH), "the sampled ids are not the tokenizer's"
    assert sample.reward == trajectory.reward == 1.0
    assert (sample.status, trajectory.stop_reason) == (Status.COMPLETED, StopReason.SCHEDULER)
