"""Groups go where there is least to do, and come back when a worker is gone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from verl_mt.data.dataset import DataRow
from verl_mt.rollout.prompts import Prompt
from verl_mt.rollout_workers.dealer import Dealer, Job


def job(position: int, *, plan: str = "s1", tokens: int = 10, conversations: int = 4) -> Job:
    return Job(plan, position, Prompt(DataRow([], "toy"), [], [], [0] * tokens), conversations)


def dealt(dealer: Dealer) -> list[tuple[int, int]]:
    return [(worker, job.position) for worker, job in dealer.deal()]


def test_the_worker_with_the_fewest_conversations_gets_the_next_group_and_of_equal_ones_that_with_fewer_tokens():
    dealer = Dealer()
    dealer.join(0)
    dealer.join(1)
    dealer.add([job(0, tokens=50), job(1), job(2), job(3, conversations=12), job(4), job(5)])
    assert dealt(dealer) == [(0, 0), (1, 1), (1, 2), (0, 3), (1, 4), (1, 5)]


def test_with_a_limit_a_worker_gets_one_group_more_than_it_has_room_for():
    dealer = Dealer(capacity=4)
    dealer.join(0)
    dealer.add(map(job, range(4)))
    assert dealt(dealer) == [(0, 0), (0, 1)]
    assert dealer.finish(0, ("s1", 1)) is not None
    assert dealt(dealer) == [(0, 2)]


def test_what_a_lost_worker_had_begins_again_elsewhere_before_anything_else():
    dealer = Dealer(capacity=4)
    dealer.join(0)
    dealer.join(1)
    dealer.add(map(job, range(6)))
    assert dealt(dealer) == [(0, 0), (1, 1), (0, 2), (1, 3)]
    assert [lost.position for lost in dealer.leave(0)] == [0, 2]
    assert dealt(dealer) == []
    dealer.finish(1, ("s1", 1))
    assert dealt(dealer) == [(1, 0)]
    assert dealer.finish(0, ("s1", 2)) is None, "it is nobody's any more"
    dealer.join(0)
    assert dealt(dealer) == [(0, 2), (0, 4)]


def test_a_plan_that_is_over_leaves_nothing_behind():
    dealer = Dealer(capacity=4)
    dealer.join(0)
    dealer.add([*map(job, range(3)), job(0, plan="s2")])
    assert dealt(dealer) == [(0, 0), (0, 1)]
    dealer.forget("s1")
    assert dealt(dealer) == [(0, 0)] and dealer.finish(0, ("s1", 0)) is None
    assert dealer.finish(0, ("s2", 0)) is not None and dealer.leave(0) == []


@given(
    st.lists(st.tuples(st.sampled_from(["finish", "leave", "join"]), st.integers(0, 2)), max_size=40),
    st.sampled_from([None, 1, 5]),
)
def test_whatever_happens_each_group_is_finished_once(events, capacity):
    dealer, finished, there = Dealer(capacity), [], {0, 1, 2}
    for worker in there:
        dealer.join(worker)
    dealer.add(map(job, range(12)))
    having: dict[int, list[Job]] = {0: [], 1: [], 2: []}

    def deal() -> None:
        for worker, given_job in dealer.deal():
            having[worker].append(given_job)

    deal()
    for what, worker in [*events, ("join", 0), *[("finish", 0)] * 12, *[("finish", 1)] * 12, *[("finish", 2)] * 12]:
        if what == "join" and worker not in there:
            dealer.join(worker)
            there.add(worker)
        elif what == "leave" and worker in there:
            assert {j.key for j in dealer.leave(worker)} == {j.key for j in having[worker]}
            having[worker] = []
            there.discard(worker)
        elif what == "finish" and having[worker]:
            done = having[worker].pop()
            assert dealer.finish(worker, done.key) is done
            finished.append(done.position)
        deal()
    left = [j.position for jobs in having.values() for j in jobs]
    assert sorted(finished + left) == list(range(12))
