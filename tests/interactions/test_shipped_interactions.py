"""The interactions that come with verl_mt."""

from __future__ import annotations

import asyncio

import pytest

from verl_mt.errors import DataError
from verl_mt.extensions.compat.interactions.checker import CheckerInteraction
from verl_mt.extensions.compat.interactions.gsm8k_interaction import Gsm8kInteraction, last_assistant_text
from verl_mt.interactions.base import BaseInteraction
from verl_mt.interactions.session import InteractionSession, InteractionTurn, check_row


def react(interaction: BaseInteraction, *answers: str, truth: str | None = "72") -> list[InteractionTurn]:
    async def main():
        session = InteractionSession(interaction, "t", {"name": interaction.name, "query": "q", "ground_truth": truth})
        messages, turns = [{"role": "user", "content": "q"}], []
        for answer in answers:
            messages.append({"role": "assistant", "content": answer})
            turns.append(await session.respond(messages))
            messages.append({"role": "user", "content": turns[-1].text})
        await session.finish()
        return turns

    return asyncio.run(main())


@pytest.mark.cap("V11")
def test_gsm8k_ends_on_the_right_answer_and_asks_again_on_a_wrong_one():
    interaction = Gsm8kInteraction({"name": "gsm8k"})
    wrong, right = react(interaction, "12 * 6 = 71\n#### 71", "12 * 6 = 72\n#### 72")
    assert (wrong.done, wrong.score) == (False, 0.0) and "try again" in wrong.text
    assert (right.done, right.score, right.text) == (True, 1.0, "Your response is correct!")
    assert [t.done for t in react(interaction, "72", "#### 1,072", "")] == [True, False, False]
    assert interaction._instance_dict == {}


def test_the_checker_compares_the_marked_answer_and_says_what_its_config_says():
    checker = CheckerInteraction({"name": "checker", "retry_text": "No.", "done_text": "Yes."})
    wrong, right = react(checker, "#### 5", "so #### -6", truth="-6")
    assert (wrong.done, wrong.text, wrong.score) == (False, "No.", 0.0)
    assert (right.done, right.text, right.score) == (True, "Yes.", 1.0)


def test_the_last_assistant_turn_is_read_from_text_or_parts():
    assert last_assistant_text([{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]) == "a"
    assert (
        last_assistant_text([{"role": "assistant", "content": [{"type": "text", "text": "x"}, {"type": "image"}]}])
        == "x"
    )
    assert last_assistant_text([{"role": "assistant", "content": None}]) == ""
    assert last_assistant_text([]) == ""


def test_a_row_without_the_ground_truth_is_found_before_anything_is_sampled():
    class Own(Gsm8kInteraction):
        async def start_interaction(self, instance_id=None, **kwargs):
            return await super().start_interaction(instance_id, ground_truth="7", **kwargs)

    interactions = {"gsm8k": Gsm8kInteraction({"name": "gsm8k"}), "own": Own({"name": "own"})}
    check_row(interactions, {"name": "gsm8k", "ground_truth": "7"})
    check_row(interactions, {"name": "own"})
    with pytest.raises(DataError, match=r"interaction 'gsm8k' needs extra_info.interaction_kwargs.ground_truth"):
        check_row(interactions, {"name": "gsm8k", "ground_truth": None})
