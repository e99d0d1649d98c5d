"""Groups go where there is least to do, and come back when a worker is gone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from verl_mt.data.dataset import DataRow
from verl_mt.extensions.cluster.rollout_workers.dealer import MAX_LOST, Dealer, Job, cause_of
from verl_mt.rollout.prompts import Prompt


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


def test_what_a_lost_worker_had_begins_again_alone_before_anything_else():
    dealer = Dealer(capacity=4)
    dealer.join(0)
    dealer.join(1)
    dealer.add(map(job, range(6)))
    assert dealt(dealer) == [(0, 0), (1, 1), (0, 2), (1, 3)]
    again, failed = dealer.leave(0)
    assert [lost.position for lost in again] == [0, 2] and failed == []
    assert dealt(dealer) == []
    dealer.finish(1, ("s1", 1))
    assert dealt(dealer) == [], "a worker that has another group does not get a suspect, nor anything else"
    dealer.finish(1, ("s1", 3))
    assert dealt(dealer) == [(1, 0)]
    assert dealer.finish(0, ("s1", 2)) is None, "it is nobody's any more"
    dealer.join(0)
    assert dealt(dealer) == [(0, 2)]
    dealer.finish(1, ("s1", 0))
    assert dealt(dealer) == [(1, 4), (1, 5)]


def test_other_groups_go_on_while_suspects_wait():
    dealer = Dealer(capacity=4)
    for worker in (0, 1, 2):
        dealer.join(worker)
    dealer.add(map(job, range(9)))
    assert dealt(dealer) == [(0, 0), (1, 1), (2, 2), (0, 3), (1, 4), (2, 5)]
    dealer.leave(2)
    dealer.finish(0, ("s1", 0))
    dealer.finish(1, ("s1", 1))
    assert dealt(dealer) == [(1, 6)], "the worker with the least to do is kept free"
    dealer.finish(0, ("s1", 3))
    assert dealt(dealer) == [(0, 2)]
    dealer.finish(1, ("s1", 4))
    assert dealt(dealer) == []
    dealer.finish(1, ("s1", 6))
    assert dealt(dealer) == [(1, 5)]


def test_a_group_that_ends_its_workers_fails_and_those_beside_it_do_not():
    dealer, failed = Dealer(), []
    dealer.add(map(job, range(5)))
    for _ in range(20):
        dealer.join(0)
        for _ in range(20):
            having = [position for _, position in dealt(dealer)] or [j.position for j in dealer._hands[0].jobs.values()]
            if 3 in having:
                failed += dealer.leave(0)[1]
                break
            for position in having:
                dealer.finish(0, ("s1", position))
    assert [(lost.position, lost.num_lost) for lost in failed] == [(3, MAX_LOST)]
    assert not dealer._waiting and not dealer._hands[0].jobs


def test_a_plan_that_is_over_leaves_nothing_behind():
    dealer = Dealer(capacity=4)
    dealer.join(0)
    dealer.add([*map(job, range(3)), job(0, plan="s2")])
    assert dealt(dealer) == [(0, 0), (0, 1)]
    dealer.forget("s1")
    assert dealt(dealer) == [(0, 0)] and dealer.finish(0, ("s1", 0)) is None
    assert dealer.finish(0, ("s2", 0)) is not None and dealer.leave(0) == ([], [])


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
            again, failed = dealer.leave(worker)
            assert {j.key for j in again + failed} == {j.key for j in having[worker]}
            finished += [j.position for j in failed]
            having[worker] = []
            there.discard(worker)
        elif what == "finish" and having[worker]:
            done = having[worker].pop()
            assert dealer.finish(worker, done.key) is done
            finished.append(done.position)
        deal()
    left = [j.position for jobs in having.values() for j in jobs]
    assert sorted(finished + left) == list(range(12))


def test_a_job_is_as_large_as_its_prompts_and_is_named_for_messages():
    one = Job("s000004", 7, Prompt(DataRow([], "toy", file="a.jsonl", index=2), [], [], [0] * 5), 3)
    assert (one.key, one.num_tokens, one.where) == (("s000004", 7), 15, "s000004.00007 (a.jsonl, row 3)")


def test_what_is_done_or_lost_or_forgotten_no_longer_weighs():
    """Each time the next group goes to the worker that has less now."""
    dealer = Dealer()
    for worker in (0, 1):
        dealer.join(worker)
    dealer.add([job(0, conversations=8), job(1, conversations=6)])
    assert dealt(dealer) == [(0, 0), (1, 1)]
    assert dealer.finish(0, ("s1", 0)).position == 0 and dealer.finish(0, ("s1", 0)) is None
    assert dealer.finish(7, ("s1", 1)) is None and dealer.finish(0, ("s1", 1)) is None
    dealer.add([job(0, plan="s2", tokens=30), job(1, plan="s2", tokens=10)])
    assert dealt(dealer) == [(0, 0), (0, 1)], "none against 6, 4 against 6"
    dealer.forget("s1")
    dealer.add([job(2, plan="s2", conversations=8, tokens=1)])
    assert dealt(dealer) == [(1, 2)]
    dealer.add([job(3, plan="s2")])
    assert dealt(dealer) == [(1, 3)], "8 against 8 conversations, 8 against 160 tokens"
    dealer.forget("s2")
    dealer.add([job(4, plan="s3", tokens=9), job(5, plan="s3", tokens=3), job(6, plan="s3", tokens=1)])
    assert dealt(dealer) == [(0, 4), (1, 5), (1, 6)], "nothing weighs any more, tokens neither"


def test_a_forgotten_plan_is_not_dealt_and_others_keep_their_order():
    dealer = Dealer(capacity=4)
    dealer.add([job(0), job(0, plan="s2"), job(1), job(1, plan="s2")])
    dealer.forget("s1")
    assert dealt(dealer) == []
    dealer.join(3)
    assert dealt(dealer) == [(3, 0), (3, 1)]
    assert dealer.leave(9) == ([], [])
    assert [(lost.plan, lost.num_lost) for lost in dealer.leave(3)[0]] == [("s2", 1)] * 2


def test_lost_groups_come_first_in_the_order_of_their_plans_and_places():
    dealer = Dealer(capacity=8)
    dealer.join(0)
    dealer.add([job(1, plan="s2"), job(5), job(2), job(0, plan="s3")])
    assert dealt(dealer) == [(0, 1), (0, 5), (0, 2)]
    assert [(lost.plan, lost.position) for lost in dealer.leave(0)[0]] == [("s1", 2), ("s1", 5), ("s2", 1)]
    order = []
    for worker in range(3):
        dealer.join(worker)
        order += dealt(dealer)
    assert order == [(0, 2), (1, 5), (2, 1)]


def test_why_a_group_failed_names_it():
    assert cause_of(job(1)).startswith("3 rollout workers ended while they had s1.00001 (")
