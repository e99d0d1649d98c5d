"""How much of what prompts share was computed once."""

from verl_mt.data.ledger import TrajectoryRecord
from verl_mt.data.trajectory import Trajectory
from verl_mt.diagnostics.step_metrics import first_turn_hit_rate


def trajectory(ids, cached, replica=None):
    record = TrajectoryRecord()
    record.token_ids = [*ids, 9, 9]
    found = Trajectory("t", "p", "g", "e", records=[record], replicas=[] if replica is None else [replica])
    found.counters = {"input_tokens/1": len(ids), "cached_tokens/1": cached, "cached_tokens/2": 100}
    return found


def test_a_group_whose_prompt_was_computed_once_has_all_that_is_possible():
    # The last token of a prompt is always computed: three of four.
    assert first_turn_hit_rate([trajectory([1, 2, 3, 4], cached) for cached in (0, 3, 3)]) == {
        "rollout/first_turn_hit_rate": 1.0
    }


def test_what_different_prompts_begin_with_counts_and_what_was_computed_again_is_missing():
    prompts = [trajectory([1, 2, 3, 5], 0), trajectory([1, 2, 4, 5], 1), trajectory([1, 2, 4, 6], 1)]
    # Possible: two of the second, three of the third.
    assert first_turn_hit_rate(prompts) == {"rollout/first_turn_hit_rate": 2 / 5}


def test_prompts_at_different_replicas_share_nothing():
    assert first_turn_hit_rate([trajectory([1, 2, 3], 0, replica) for replica in ("rank 0", "rank 1")]) == {}
    assert first_turn_hit_rate([]) == {}
