"""Whatever an honest generate function does, the record is what the engine read and sampled."""

from __future__ import annotations

import pytest
from generate_support import CHAT, only, roll_out, rows, runner_of, turn
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mt.config.schema import Config

WORDS = st.text("alr <", max_size=6)
OBSERVED = st.text("xyz\n_", max_size=8)  # nothing that the model could have gone on with itself
STEPS = st.lists(st.tuples(st.booleans(), st.none() | st.integers(1, 4), OBSERVED), min_size=1, max_size=4)


@pytest.mark.slow
@pytest.mark.cap("C60", "C61", "C62", "C83")
@settings(max_examples=25, deadline=None)
@given(steps=STEPS, data=st.data())
def test_the_record_is_what_the_engine_read_and_sampled(steps, data):
    said = [data.draw(WORDS, label="the model's turn") for _ in steps]
    config = Config()
    config.actor_rollout_ref.rollout.custom_generate_kwargs = {"steps": [list(step) for step in steps]}
    script = [turn(text, log_prob=-0.1 * (k + 1)) for k, text in enumerate(said)]
    runner = runner_of("generate_functions.walks", script, config=config)
    trajectory = only(roll_out(runner, rows("q")))
    assert trajectory.error is None, trajectory.error
    sample, [record], requests = trajectory.sample, trajectory.records, runner.context.engine.requests
    assert len(requests) == len(steps)
    last = requests[-1].input_ids
    assert sample.tokens == record.token_ids == [*last, *script[-1][0]]
    kept = [
        len(ids) if k == len(steps) - 1 else _kept(step, ids) for k, (step, (ids, *_)) in enumerate(zip(steps, script))
    ]
    assert sum(record.sampled) == sum(kept)
    # What the function wanted trained, and the engine sampled, is trained; nothing else is.
    wanted = [_kept(step, ids) for step, (ids, *_) in zip(steps, script)]
    assert sum(record.loss_mask) == sum(sample.loss_mask) == sum(wanted)
    assert all(s for s, m in zip(record.sampled, record.loss_mask) if m)
    expected = [p for (ids, _, _, log_probs), n in zip(script, kept) for p in log_probs[:n]]
    assert [p for p, s in zip(record.rollout_log_probs, record.sampled) if s] == expected
    observed = "".join(
        CHAT.decode(record.token_ids[span.start : span.end]) for span in record.turns if span.kind == "observation"
    )
    assert observed == "".join(step[2] for step in steps[:-1])
    record.check()


def _kept(step, ids) -> int:
    cut = step[1]
    return len(ids) if cut is None or cut >= len(ids) - 1 else cut
