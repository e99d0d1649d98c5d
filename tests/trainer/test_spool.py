"""Finished groups as files: which are kept, used again and removed."""

from __future__ import annotations

import os
import pickle
import threading
from dataclasses import replace

import pytest

from verl_mt.data.dataset import DataRow
from verl_mt.data.ledger import TrajectoryRecord
from verl_mt.data.plain_objects import pack
from verl_mt.data.trajectory import StopReason, TimeSpan, Trajectory, TrajectoryGroup
from verl_mt.rollout.prompts import Prompt
from verl_mt.rollout.runner import RolloutPlan
from verl_mt.trainer.spool import GroupSpool

PLAN = RolloutPlan([Prompt(DataRow([], "d", index=k, source="here"), [], [], [1, k]) for k in range(3)], 2, "s000003")


def group(place=0, versions=((4, 5), (3, 3)), reason=StopReason.FINISHED) -> TrajectoryGroup:
    """A trajectory for each of `versions`."""
    members = []
    for number, own in enumerate(versions):
        record = TrajectoryRecord()
        record.append_given([1], kind="prompt", turn=0)
        record.append_sampled([7] * len(own), [-0.5] * len(own), list(own), turn=1)
        spans = [TimeSpan("decode", 1.0, 2.0, 1)]
        members.append(Trajectory(f"t{number}", "p", "g", "e", records=[record], stop_reason=reason, time_spans=spans))
    name = f"s000003.{place:05d}"
    return TrajectoryGroup(name, name, members, sealed=b"sealed")


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def taken(folder, version=5, plan=PLAN) -> list[str]:
    return [found.prompt_id for found in GroupSpool(folder, version).take(plan)]


def test_kept_groups_are_found_by_the_next_process_without_what_was_its_own(tmp_path):
    folder = tmp_path / "spool"
    spool = GroupSpool(folder, None)
    for place in (2, 0):
        spool.keep(PLAN, group(place))
    assert names(folder) == ["s000003.00000.group", "s000003.00002.group"]
    again = GroupSpool(folder, 5)
    found = again.take(PLAN)
    assert [made.prompt_id for made in found] == ["s000003.00000", "s000003.00002"]
    assert [made.sealed for made in found] == [None, None]
    assert [t.time_spans for made in found for t in made.trajectories] == [[]] * 4
    assert found[0].trajectories[0].records[0].policy_versions == [-1, 4, 5]
    assert again.take(PLAN) == [] and len(names(folder)) == 2, "once; the files stay until their groups are dropped"


@pytest.mark.parametrize(("version", "used"), [(None, []), (4, []), (5, ["s000003.00001"]), (6, ["s000003.00001"])])
def test_groups_of_weights_that_are_gone_are_removed(tmp_path, version, used):
    """The latest token of any of its trajectories counts."""
    for versions in (((4, 5), (3, 3)), ((3, 3), (5, 4))):
        GroupSpool(tmp_path, None).keep(PLAN, group(1, versions))
        assert taken(tmp_path, version) == used and names(tmp_path) == [f"{name}.group" for name in used]


def test_a_group_of_which_nothing_was_sampled_is_of_no_weights(tmp_path):
    made = group(versions=())
    GroupSpool(tmp_path, None).keep(PLAN, made)
    assert taken(tmp_path, 0) == [made.prompt_id]
    made.trajectories = [Trajectory("t", "p", "g", "e", records=[TrajectoryRecord()], stop_reason=StopReason.FINISHED)]
    GroupSpool(tmp_path, None).keep(PLAN, made)
    assert taken(tmp_path, 0) == [made.prompt_id]


OTHER_ROW = Prompt(DataRow([], "d", index=9, source="here"), [], [], [1, 0])
OTHER_SOURCE = Prompt(DataRow([], "d", index=0, source="there"), [], [], [1, 0])
OTHER_TOKENS = Prompt(DataRow([], "d", index=0, source="here"), [], [], [1, 0, 0])


@pytest.mark.parametrize(
    "changes",
    [
        {"prompts": [OTHER_ROW]},
        {"prompts": [OTHER_SOURCE]},
        {"prompts": [OTHER_TOKENS]},
        {"n": 3},
        {"greedy_too": True},
    ],
)
def test_the_answer_to_another_question_is_not_used(tmp_path, changes):
    GroupSpool(tmp_path, None).keep(PLAN, group())
    assert taken(tmp_path, plan=replace(PLAN, **changes)) == []
    assert taken(tmp_path, plan=replace(PLAN, prompts=PLAN.prompts[:1])) == ["s000003.00000"]


@pytest.mark.parametrize(
    ("reason", "kept"),
    [
        (StopReason.FINISHED, 1),
        (StopReason.RESPONSE_LENGTH, 1),
        (StopReason.ERROR, 0),
        (StopReason.ENGINE, 0),
        (None, 0),
    ],
)
def test_a_group_in_which_something_failed_is_sampled_again(tmp_path, reason, kept):
    made = group()
    made.trajectories[1].stop_reason = reason
    GroupSpool(tmp_path, None).keep(PLAN, made)
    assert len(names(tmp_path)) == kept


def test_dropped_groups_are_gone_from_memory_and_disk(tmp_path):
    spool = GroupSpool(tmp_path, None)
    for place in range(3):
        spool.keep(PLAN, group(place))
    again = GroupSpool(tmp_path, 5)
    again.drop(["s000003.00001", "s000009.00000"])
    assert names(tmp_path) == ["s000003.00000.group", "s000003.00002.group"]
    assert [made.prompt_id for made in again.take(PLAN)] == ["s000003.00000", "s000003.00002"]
    again = GroupSpool(tmp_path, 5)
    again.clear()
    assert not tmp_path.exists() and again.take(PLAN) == []
    again.clear()


def test_what_cannot_be_written_leaves_nothing_and_is_said_once(tmp_path, caplog):
    spool = GroupSpool(tmp_path / "spool", None)
    bad, good = group(), group(1)
    bad.trajectories[0].info["lock"] = threading.Lock()
    for _ in range(2):
        spool.keep(PLAN, bad)
    assert caplog.text.count("finished groups are not kept for a run that is killed: DataError") == 1
    spool.keep(PLAN, good)
    (tmp_path / "spool" / "s000003.00002.group").mkdir()  # nothing can take this name
    spool.keep(PLAN, group(2))
    assert names(tmp_path / "spool") == ["s000003.00001.group", "s000003.00002.group"]
    assert caplog.text.count("are not kept") == 1


def test_what_is_no_group_is_said_and_removed(tmp_path, caplog):
    (tmp_path / "a.group").write_bytes(b"torn")
    (tmp_path / "b.group").write_bytes(pack({"group": [1], "asked": ()}))
    (tmp_path / "old.pickle").write_bytes(pickle.dumps([1]))
    assert GroupSpool(tmp_path, 5).take(PLAN) == [] and names(tmp_path) == []
    assert "1 group(s) are files of an earlier version" in caplog.text
    assert "a.group is sampled again" in caplog.text and "TypeError: it holds a list" in caplog.text


def test_what_keeping_a_group_looks_at_does_not_grow_with_the_plan(tmp_path, monkeypatch):
    """Else keeping all groups of a step of 16,384 prompts takes half a minute."""
    asked = []
    name = RolloutPlan.prompt_id
    monkeypatch.setattr(RolloutPlan, "prompt_id", lambda self, place: asked.append(place) or name(self, place))
    prompts = [Prompt(DataRow([], "d", index=k, source="here"), [], [], [1, k]) for k in range(50)]
    plan, spool = RolloutPlan(prompts, 2, "s000003"), GroupSpool(tmp_path / "spool", None)
    for place in reversed(range(50)):
        spool.keep(plan, group(place))
    assert len(asked) == 50 and len(taken(tmp_path / "spool", plan=plan)) == 50


@pytest.mark.timeout(60)
def test_what_is_no_file_is_removed_and_sampled_again(tmp_path, caplog):
    spool = GroupSpool(tmp_path, None)
    spool.keep(PLAN, group(1))
    os.mkfifo(tmp_path / "a.group")
    for name in ("b.group", "c.pickle"):
        (tmp_path / name / "inner").mkdir(parents=True)
    assert taken(tmp_path) == ["s000003.00001"] and names(tmp_path) == ["s000003.00001.group"]
    assert "a.group is sampled again: DataError" in caplog.text and "b.group is a directory" in caplog.text
