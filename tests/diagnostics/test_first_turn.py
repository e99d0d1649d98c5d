"""How much of what prompts share was computed once, and who sampled how much."""

from verl_mt.data.ledger import TrajectoryRecord, TurnSpan
from verl_mt.data.trajectory import Trajectory, TrajectoryGroup
from verl_mt.diagnostics.step_metrics import first_turn_hit_rate, rollout_metrics, tokens_by_replica


def trajectory(ids, cached, replica=None):
    record = TrajectoryRecord()
    record.token_ids = [*ids, 9, 9]
    found = Trajectory("t", "p", "g", "e", records=[record], replicas=[] if replica is None else [replica])
    found.counters = {"input_tokens/1": len(ids), "cached_tokens/1": cached, "cached_tokens/2": 100}
    return found


def test_a_group_whose_prompt_was_computed_once_has_all_that_is_possible():
    # Three of four: SGLang always computes the last token, the local engine takes it over as well.
    for most in (3, 4):
        assert first_turn_hit_rate([trajectory([1, 2, 3, 4], cached) for cached in (0, most, most)]) == {
            "rollout/first_turn_hit_rate": 1.0
        }


def test_what_different_prompts_begin_with_counts_and_what_was_computed_again_is_missing():
    prompts = [trajectory([1, 2, 3, 5], 0), trajectory([1, 2, 4, 5], 1), trajectory([1, 2, 4, 6], 1)]
    # Possible: two of the second, three of the third.
    assert first_turn_hit_rate(prompts) == {"rollout/first_turn_hit_rate": 2 / 5}


def test_prompts_at_different_replicas_share_nothing():
    assert first_turn_hit_rate([trajectory([1, 2, 3], 0, replica) for replica in ("rank 0", "rank 1")]) == {}
    assert first_turn_hit_rate([]) == {}


def test_what_was_in_the_cache_before_the_step_shows_as_more_than_all():
    prompts = [trajectory([1, 2, 3, 5], 2), trajectory([1, 2, 4, 5], 2)]
    assert first_turn_hit_rate(prompts) == {"rollout/first_turn_hit_rate": 2.0}


def of_turns(*turns: tuple[str, int]) -> Trajectory:
    """Turns as (replica, sampled tokens), each behind two tokens that were not sampled."""
    record = TrajectoryRecord()
    for number, (_, size) in enumerate(turns, start=1):
        start = len(record.token_ids) + 2
        record.token_ids += [5] * (2 + size)
        record.sampled += [0, 0] + [1] * size
        record.turns.append(TurnSpan("prompt" if number == 1 else "observation", start - 2, start, number - 1))
        record.turns.append(TurnSpan("assistant", start, start + size, number))
    return Trajectory("t", "p", "g", "e", records=[record], replicas=[name for name, _ in turns])


def share(trajectories, num_replicas):
    group = TrajectoryGroup("g", "p", trajectories)
    return rollout_metrics([group], num_replicas=num_replicas).get("rollout/replica_tokens_min_share")


def test_a_replicas_share_is_that_of_the_tokens_that_it_sampled_turn_by_turn():
    # A conversation whose replica went away goes on at another one.
    trajectories = [of_turns(("rank 0", 30), ("rank 1", 10)), of_turns(("rank 1", 10))]
    assert tokens_by_replica(trajectories) == {"rank 0": 30, "rank 1": 20}
    assert share(trajectories, 2) == 0.4


def test_a_replica_that_serves_and_sampled_nothing_has_no_share():
    assert share([of_turns(("rank 0", 30)), of_turns(("rank 1", 10))], 3) == 0


def test_an_engine_that_is_one_has_no_shares():
    whole = of_turns(("", 30))
    whole.replicas = []
    assert tokens_by_replica([whole]) == {} and share([whole], 1) is None
