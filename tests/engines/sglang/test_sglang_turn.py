"""Requests and answers, without an engine."""

from __future__ import annotations

import pytest
from engine_models import request
from fake_client import answer

from verl_mt.data.requests import VersionSpan
from verl_mt.errors import EngineError
from verl_mt.extensions.cluster.replicas.turn import Turn


def turn_of(ids=(5, 6, 7), *, max_model_len=100, ends=(3,), **sampling):
    return Turn(request(list(ids), **sampling), max_model_len, frozenset(ends))


def test_every_sampling_parameter_is_said_and_penalties_of_the_models_own_files_are_switched_off():
    turn = turn_of(temperature=0.7, top_p=0.9, top_k=20, min_p=0.1, stop=("END",), stop_token_ids=(9,))
    body = turn.body("rid")
    assert (body["input_ids"], body["rid"], body["return_logprob"]) == ([5, 6, 7], "rid", True)
    sampling = body["sampling_params"]
    expected = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "max_new_tokens": 8, "stop": ["END"]}
    assert expected.items() <= sampling.items()
    assert sampling["stop_token_ids"] == [3, 9]
    assert (sampling["repetition_penalty"], sampling["frequency_penalty"], sampling["presence_penalty"]) == (1, 0, 0)
    assert not any("seed" in name for name in sampling)


def test_a_turn_never_grows_beyond_the_longest_sequence():
    assert turn_of(range(96), max_new_tokens=50).body("r")["sampling_params"]["max_new_tokens"] == 4


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (answer([10, 3], "stop", matched=3), "stop"),
        (answer([10, 11], "stop", matched="END"), "stop"),
        (answer([10] * 8, "length", length=8), "length"),
        (answer([10], "abort", message="Aborted"), "abort"),
        (answer([], "abort", message="Aborted"), "abort"),
    ],
)
def test_why_sglang_ended_a_turn(given, expected):
    turn = turn_of()
    assert turn.add(given, 0) == expected
    output = turn.output(expected)
    assert output.token_ids == [entry[1] for entry in given["meta_info"]["output_token_logprobs"]]
    assert len(output.log_probs) == len(output.token_ids) == sum(span.num_tokens for span in output.version_spans)


def test_an_end_of_sequence_id_that_is_not_ours_does_not_end_the_turn():
    turn = turn_of(max_new_tokens=5)
    assert turn.add(answer([10, 4], "stop", matched=4, cached=2), 0) is None
    body = turn.body("again")
    assert body["input_ids"] == [5, 6, 7, 10, 4]
    assert body["sampling_params"]["max_new_tokens"] == 3
    assert turn.add(answer([11, 3], "stop", matched=3, cached=4), 0) == "stop"
    output = turn.output("stop")
    assert output.token_ids == [10, 4, 11, 3]
    assert output.cached_tokens == 2  # of the request; what it sampled itself is no prefix that was met


def test_the_last_token_that_fits_is_no_stop_if_its_id_is_not_ours():
    turn = turn_of(max_new_tokens=2)
    assert turn.add(answer([10, 4], "stop", matched=4), 0) == "length"


def test_versions_are_told_token_by_token():
    turn = turn_of()
    turn.add(answer([10, 11, 12, 4], "stop", versions=[("4", 0, 3), ("5", 3, 4)]), 9)
    turn.add(answer([3], "stop", versions=[("5", 0, 1)]), 9)
    assert turn.output("stop").version_spans == [VersionSpan(4, 3), VersionSpan(5, 2)]


def test_versions_that_count_tokens_which_an_abort_lost_are_cut_and_unnamed_ones_are_the_engines():
    turn = turn_of()
    turn.add(answer([10, 11], "abort", versions=[("4", 0, 1), ("5", 1, 30)]), 9)
    assert turn.output("abort").version_spans == [VersionSpan(4, 1), VersionSpan(5, 1)]
    turn = turn_of()
    turn.add(answer([10, 3], versions=[("of somebody", 0, 2)]), 9)
    assert turn.output("stop").version_spans == [VersionSpan(9, 2)]
    # SGLang's name for the model's files, which are version 0, though the engine has newer weights by now.
    turn = turn_of()
    turn.add(answer([10, 11, 3], versions=[("default", 0, 2), ("1", 2, 3)]), 1)
    assert turn.output("stop").version_spans == [VersionSpan(0, 2), VersionSpan(1, 1)]


def test_where_sglang_tells_its_times_the_phases_are_told_apart():
    turn = turn_of()
    turn.body("r")
    turn.submitted, turn.dispatched = turn.submitted - 10.0, turn.submitted - 9.0
    given = answer([3])
    given["meta_info"] |= {"queue_time": 2.0, "forward_entry_time": 1000.0, "prefill_finished_time": 1000.5}
    turn.add(given, 0)
    timings = turn.output("stop").timings
    assert (round(timings.queue_s, 1), timings.prefill_s) == (3.0, 0.5)
    assert 6.4 < timings.decode_s < 7.5


def test_a_refusal_is_an_error_and_an_answer_without_tokens_cannot_repeat_for_ever():
    with pytest.raises(EngineError, match=r"SGLang refused it: too long"):
        turn_of().add(answer([], "abort", status_code=400, message="too long"), 0)
    with pytest.raises(EngineError, match="without sampling any of the 8 tokens"):
        turn_of().add(answer([], "length"), 0)
