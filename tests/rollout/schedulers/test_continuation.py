"""Going on inside a message, cutting it back, handing in ids and masks: what the ledger then holds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_lab import CHAT, EOS, LP, FixedIdsChat, converse, ids_of, response, said, trained

from verl_mt.data.trajectory import Status, StopReason
from verl_mt.extensions.compat.rollout.scheduler import MultiTurnScheduler
from verl_mt.rollout.context import Limits


class Continue(MultiTurnScheduler):
    """The last message becomes `edit(its text)`; `extra(choice)` is returned beside the request."""

    def __init__(self, edit, extra=lambda choice: {}, max_turns=2):
        super().__init__(max_turns)
        self.edit, self.extra = edit, extra

    def step(self, infer_request, response_choice, current_turn):
        message = infer_request.messages[-1]
        message["content"] = self.edit(message["content"])
        return {"infer_request": infer_request, **self.extra(response_choice)}


@pytest.mark.cap("C16", "C33")
def test_text_added_to_the_message_is_read_and_not_trained_and_the_model_goes_on_in_it():
    run = converse(Continue(lambda text: text + "TOOL"), [said("ab"), said("cd")])
    assert run.engine.requests[1].input_ids == [*run.engine.requests[0].input_ids, *ids_of("ab"), *ids_of("TOOL")]
    ids, mask, log_probs = response(run.record)
    assert CHAT.decode(ids) == "abTOOLcd<|im_end|>"
    assert mask == [1, 1, 0, 0, 0, 0, 1, 1, 1]
    assert log_probs == [LP, LP, 0, 0, 0, 0, LP, LP, LP]
    assert run.trajectory.messages[-1] == {"role": "assistant", "content": "abTOOLcd"}
    # The end of turn that the first answer had is no end: it is cut, and counted.
    assert run.trajectory.counters["cut_tokens"] == 1


@pytest.mark.cap("C17", "C33")
def test_after_a_cut_the_kept_tokens_are_a_prefix_of_the_sampled_ones():
    turns = [said("<think>so 4</think>4"), said("5</think>5")]
    run = converse(Continue(lambda text: text[: text.index("</think>")] + " No:"), turns)
    ids, mask, log_probs = response(run.record)
    kept = ids_of("<think>so 4")
    assert ids[: len(kept)] == kept == turns[0][0][: len(kept)]
    tip = slice(len(kept), len(kept) + len(" No:"))
    assert ids[tip] == ids_of(" No:")
    assert (mask[tip], log_probs[tip]) == ([0] * 4, [0.0] * 4)
    assert (mask[: len(kept)], log_probs[: len(kept)]) == ([1] * len(kept), [LP] * len(kept))
    assert CHAT.decode(ids) == "<think>so 4 No:5</think>5<|im_end|>"
    assert run.trajectory.counters["cut_tokens"] == len("</think>4") + 1


@given(st.text("ab<>/ ", min_size=1, max_size=30), st.data())
@settings(max_examples=20, deadline=None)
@pytest.mark.cap("C17")
def test_whatever_is_cut_and_added_the_record_reads_as_the_message(text, data):
    keep = data.draw(st.integers(1, len(text)))
    tip = data.draw(st.text("ab<>/ ", max_size=10))
    run = converse(Continue(lambda t: t[:keep] + tip), [said(text), said("z")])
    ids, _, _ = response(run.record)
    assert CHAT.decode(ids) == text[:keep] + tip + "z<|im_end|>"
    assert len(run.trajectory.records) == 1
    sampled = [t for t, s in zip(ids, run.record.sampled[run.record.num_prompt_tokens :], strict=True) if s]
    assert trained(run.record) == sampled
    assert sampled[:keep] == ids_of(text)[:keep]


@pytest.mark.cap("C25")
def test_sampled_ids_are_never_made_again_from_text():
    # The tokenizer would write "hello" as one token, 3; the model wrote two.
    chat = FixedIdsChat(appended={"!": [9]}, texts={1: "he", 2: "llo", 3: "hello", 9: "!", 4: "x"})
    turns = [([1, 2], None, "stop", [-0.1, -0.2]), ([4], None, "stop", [-0.3])]
    plain = converse(Continue(lambda text: text + "!"), turns, chat=chat)
    handed = converse(
        Continue(lambda text: text + "!", lambda c: {"response_token_ids": [*c.token_ids, 9]}), turns, chat=chat
    )
    for run in (plain, handed):
        assert response(run.record)[0] == [1, 2, 9, 4]
        assert run.engine.requests[1].input_ids == [1, 2, 3, 1, 2, 9]


@pytest.mark.cap("C25", "C32", "C33")
def test_ids_and_mask_handed_in_in_ms_swifts_manner():
    def hand_in(choice):
        # As ToolCallScheduler does: the ids of the choice, extended in place, the end of turn still among them.
        ids = choice.token_ids
        mask = [1] * len(ids)
        ids.extend(ids_of("TOOL"))
        return {"response_token_ids": ids, "response_loss_mask": mask + [0] * 4}

    run = converse(Continue(lambda text: text + "TOOL", hand_in), [said("ab"), said("cd")])
    ids, mask, _ = response(run.record)
    assert CHAT.decode(ids) == "abTOOLcd<|im_end|>"
    assert mask == [1, 1, 0, 0, 0, 0, 1, 1, 1]


@pytest.mark.cap("C32")
def test_a_mask_clears_bits_of_sampled_tokens():
    extra = lambda c: {"response_token_ids": c.token_ids, "response_loss_mask": [1, 0, 1]}  # noqa: E731
    run = converse(Continue(lambda text: text + "T", extra), [said("ab"), said("c")])
    assert response(run.record)[1] == [1, 0, 0, 1, 1]
    assert run.record.rollout_log_probs[-4] == LP  # a sampled token whose bit was cleared keeps its log-prob
    assert run.trajectory.counters["masked_tokens"] == 1


@pytest.mark.cap("C32")
@pytest.mark.parametrize(
    ("extra", "complaint"),
    [
        (lambda c: {"response_loss_mask": [1]}, "response_loss_mask needs response_token_ids"),
        (
            lambda c: {"response_token_ids": c.token_ids, "response_loss_mask": [1]},
            "response_loss_mask has 1 entries for 3 response_token_ids",
        ),
        (
            lambda c: {"response_token_ids": [*c.token_ids, 7], "response_loss_mask": [1, 1, 1, 1]},
            "sets 1 bits (the first at 3) on response_token_ids that the engine did not sample",
        ),
        (
            lambda c: {"response_token_ids": c.token_ids, "rollout_logprobs": [0.0] * 5},
            "rollout_logprobs has 5 entries for 3 response_token_ids",
        ),
        (
            lambda c: {"response_token_ids": [*c.token_ids, 10**6]},
            f"response_token_ids holds 1000000, but the vocabulary has {len(CHAT.tokenizer)} ids",
        ),
    ],
)
def test_ids_and_masks_that_do_not_fit_are_refused_with_both_numbers(extra, complaint):
    run = converse(Continue(lambda text: text + "T", extra), [said("ab"), said("c")])
    assert run.trajectory.status is Status.FAILED
    assert complaint in run.trajectory.error


@pytest.mark.cap("C25")
def test_ids_that_spell_another_text_than_the_message_are_read_and_said_once(caplog, monkeypatch):
    monkeypatch.setattr("verl_mt.extensions.toolbox.editing.reconcile._said", set())
    extra = lambda c: {"response_token_ids": [*c.token_ids[:-1], *ids_of("IDS")]}  # noqa: E731
    for _ in range(2):
        run = converse(Continue(lambda text: text + "TEXT", extra), [said("ab"), said("c")])
        assert CHAT.decode(run.engine.requests[1].input_ids).endswith("abIDS")
        assert run.trajectory.counters["differing_response_ids"] == 1
    assert sum("spell another text than the message" in r.message for r in caplog.records) == 1


@pytest.mark.cap("C32")
def test_ids_that_do_not_fit_a_rewritten_history_are_refused_with_both_numbers():
    class Rewrites(MultiTurnScheduler):
        def step(self, infer_request, response_choice, current_turn):
            infer_request.messages = [{"role": "user", "content": "other"}]
            return {"infer_request": infer_request, "response_token_ids": [5]}

    run = converse(Rewrites(max_turns=2), [said("ab"), said("c")])
    assert "returned 1 response_token_ids that are not the 3 sampled ones" in run.trajectory.error


@pytest.mark.cap("C3")
def test_log_probs_of_as_many_ids_are_accepted():
    extra = lambda c: {  # noqa: E731
        "response_token_ids": c.token_ids, "rollout_logprobs": [e["logprob"] for e in c.logprobs["content"]],
    }  # fmt: skip
    assert converse(Continue(lambda text: text + "T", extra), [said("ab"), said("c")]).trajectory.error is None


def test_a_turn_cut_by_length_may_be_gone_on_with():
    class Patient(Continue):
        def check_finished(self, infer_request, response_choice, current_turn):
            return response_choice.finish_reason != "length"

    limits = Limits(1000, 2000, max_tokens_per_turn=3)
    turns = [said("abc", "length"), said("def", "length"), said("g")]
    run = converse(Patient(lambda text: text, max_turns=None), turns, limits=limits)
    assert CHAT.decode(response(run.record)[0]) == "abcdefg<|im_end|>"
    assert response(run.record)[1] == [1] * 8
    assert (run.trajectory.stop_reason, run.trajectory.num_turns) == (StopReason.SCHEDULER, 3)
    assert [m["content"] for m in run.trajectory.messages] == ["q", "abcdefg"]


@pytest.mark.cap("C84", "L7")
def test_text_that_does_not_fit_is_in_the_messages_only():
    limits = Limits(response_length=6, max_model_len=2000)
    run = converse(Continue(lambda text: text + "TOOLTOOL"), [said("ab"), said("c")], limits=limits)
    assert len(run.engine.requests) == 1
    assert run.trajectory.stop_reason is StopReason.CONTEXT_FULL
    assert trained(run.record) == ids_of("ab")
    assert run.trajectory.messages[-1]["content"] == "abTOOLTOOL"


def test_cutting_back_again_and_again_comes_to_an_end():
    limits = Limits(response_length=40, max_model_len=2000)
    run = converse(Continue(lambda text: "a", max_turns=None), lambda request: said("abcdef"), limits=limits)
    assert run.trajectory.status is Status.TRUNCATED
    assert len(run.engine.requests) < 10


def test_a_tip_may_be_given_and_a_new_turn_begun_behind_it():
    class Both(MultiTurnScheduler):
        def step(self, infer_request, response_choice, current_turn):
            infer_request.messages[-1]["content"] += " [checked]"
            infer_request.messages.append({"role": "user", "content": "u"})
            return {"infer_request": infer_request}

    run = converse(Both(max_turns=2), [said("ab"), said("c")])
    assert CHAT.decode(run.record.token_ids) == CHAT.full_text(run.trajectory.messages).removesuffix("\n")
    assert response(run.record)[1].count(1) == 2 + 2
    assert run.trajectory.counters["inserted_end_tokens"] == 1


def test_the_next_answer_may_be_begun_for_the_model():
    class Prefill(MultiTurnScheduler):
        def step(self, infer_request, response_choice, current_turn):
            infer_request.messages += [
                {"role": "user", "content": "u"},
                {"role": "assistant", "content": "Well, "},
            ]
            return {"infer_request": infer_request}

    run = converse(Prefill(max_turns=2), [said("ab"), said("c")])
    assert run.trajectory.messages[-1]["content"] == "Well, c"
    assert CHAT.decode(run.record.token_ids) == CHAT.full_text(run.trajectory.messages).removesuffix("\n")
    assert trained(run.record) == [*ids_of("ab"), EOS, *ids_of("c"), EOS]


def test_ms_swifts_placeholder_for_the_answer_to_come_is_no_message():
    class Placeholder(MultiTurnScheduler):
        def step(self, infer_request, response_choice, current_turn):
            infer_request.messages[-1]["content"] += "T"
            infer_request.messages.append({"role": "assistant", "content": None})
            return {"infer_request": infer_request}

    run = converse(Placeholder(max_turns=2), [said("ab"), said("c")])
    assert [m["content"] for m in run.trajectory.messages] == ["q", "abTc"]


def test_an_engine_that_yields_only_text_can_be_gone_on_with():
    turns = [(None, "ab", "stop"), (None, "cd", "stop")]
    run = converse(Continue(lambda text: text + "TOOL"), turns, engine_keys={"returns_token_ids": False})
    assert CHAT.decode(response(run.record)[0]) == "abTOOLcd<|im_end|>"
    assert response(run.record)[1] == [1, 1, 0, 0, 0, 0, 1, 1, 1]
