"""`load_reward`: the three signatures, isolation of failures, data sources, and refusals at load time."""

from __future__ import annotations

import asyncio
import threading
from collections import UserDict

import numpy as np
import pytest
import torch
from hostile import EXCEPTIONS, Unshowable, deadline_only_for

from verl_mt.data.dataset import DataRow
from verl_mt.errors import ConfigError, PluginError
from verl_mt.rewards import ORM, Reward, RewardFailure, RewardInput, load_reward, orms, rewards
from verl_mt.rewards import base as rewards_base
from verl_mt.rewards.adapters import adapt
from verl_mt.rewards.base import score_all


def item(index: int = 0, text: str = "#### 42", truth="42", source: str = "gsm8k", **extra) -> RewardInput:
    extra = {"index": index, "trajectory_id": f"t{index}", "messages": [{"role": "assistant", "content": text}]} | extra
    return RewardInput(source, text, truth, extra, row={"problem": f"p{index}"}, completion=text)


def row(source: str, reward_model: dict | None = None) -> DataRow:
    raw = {"reward_model": reward_model} if reward_model else {}
    return DataRow([], source, raw=raw, index=7, file="train.parquet")


def score(reward: Reward, *items: RewardInput):
    return asyncio.run(reward.score(items))


def of(function, timeout_s: float = 5.0, **kwargs) -> Reward:
    return adapt(function, label="mine", kwargs=kwargs, timeout_s=timeout_s)


@pytest.fixture
def registered():
    before = dict(rewards)
    yield rewards
    for name in set(rewards) - set(before):
        del rewards[name]


@pytest.fixture
def forever():
    """What a hanging function waits for; it comes when the test is over."""
    event = threading.Event()
    yield event
    event.set()


# ---------------------------------------------------------------- verl's signature


def test_verl_compute_score_gets_its_four_arguments_by_name():
    def compute_score(data_source, solution_str, ground_truth, extra_info, bonus=0.0):
        assert extra_info["trajectory_id"] == "t3" and extra_info["messages"][0]["role"] == "assistant"
        return {"score": float(solution_str.endswith(ground_truth)) + bonus, "acc": np.float32(1), "pred": "42"}

    assert score(of(compute_score, bonus=0.5), item(3)) == [{"score": 1.5, "acc": 1.0}]


@pytest.mark.cap("C44")
def test_sync_and_async_functions_and_objects_are_rewards():
    async def later(solution_str, ground_truth):
        await asyncio.sleep(0)
        return solution_str.endswith(ground_truth)

    class Scorer:
        async def __call__(self, solution_str, **kwargs):
            return 0.25

    assert score(of(later), item()) == [{"score": 1.0}]
    assert score(of(Scorer()), item()) == [{"score": 0.25}]
    assert score(of(lambda **kwargs: 2), item()) == [{"score": 2.0}]
    assert score(of(lambda solution_str: later(solution_str, "42")), item()) == [{"score": 1.0}]


@pytest.mark.parametrize(
    "value", [1, True, 1.0, np.float64(1), np.array([1]), torch.tensor(1.0), {"score": torch.ones(1)}]
)
def test_every_kind_of_number_is_a_score(value):
    assert score(of(lambda solution_str: value), item()) == [{"score": 1.0}]


@pytest.mark.parametrize(
    "value",
    [None, "1.0", float("nan"), float("inf"), {"acc": 1}, {}, [1.0], np.zeros(2), torch.zeros(2), 10**400, object()],
)
def test_what_is_no_finite_number_fails_its_item_only(value):
    def compute_score(solution_str, extra_info):
        return value if extra_info["index"] == 1 else 1.0

    good, bad, other = score(of(compute_score), item(0), item(1), item(2))
    assert good == other == {"score": 1.0}
    silent = value is None or value != value if isinstance(value, float | None) else False
    assert isinstance(bad, RewardFailure) and bad.kind == ("absent" if silent else "invalid")
    assert "reward mine, row 1 (trajectory t1): returned" in bad.error and bad.traceback


def test_a_reward_that_raises_fails_its_item_only_and_keeps_the_traceback():
    def compute_score(solution_str, extra_info):
        if extra_info["index"] == 1:
            raise ZeroDivisionError("no luck")
        if extra_info["index"] == 2:
            raise SystemExit(3)
        return 1.0

    async def later(solution_str, extra_info):
        return compute_score(solution_str, extra_info)

    for function in (compute_score, later):
        good, bad, exit_, other = score(of(function), item(0), item(1), item(2), item(3))
        assert good == other == {"score": 1.0}
        assert bad.kind == "raised" and "row 1 (trajectory t1): raised ZeroDivisionError: no luck" in bad.error
        assert "in compute_score" in bad.traceback and "no luck" in bad.traceback
        assert "raised SystemExit" in exit_.error


@pytest.mark.slow
def test_a_reward_that_hangs_fails_its_item_only_and_in_time(monkeypatch, forever):
    deadline_only_for(monkeypatch, lambda *_, extra_info, **kwargs: extra_info["index"] == 1)

    def compute_score(solution_str, extra_info):
        if extra_info["index"] == 1:
            forever.wait()
        return 1.0

    async def later(solution_str, extra_info):
        await asyncio.sleep(1e6 if extra_info["index"] == 1 else 0)
        return 1.0

    for function in (compute_score, later):
        good, late, other = score(of(function, timeout_s=0.2), item(0), item(1), item(2))
        assert good == other == {"score": 1.0}
        assert late.kind == "timeout" and "no result within reward.timeout_s: timed out after 0.2 s" in late.error


def test_results_keep_the_order_of_the_items():
    ended = [threading.Event() for _ in range(6)]  # the last item ends first
    ended[5].set()

    def compute_score(solution_str, extra_info):
        ended[extra_info["index"] + 1].wait()
        ended[extra_info["index"]].set()
        return extra_info["index"]

    results = score(of(compute_score), *(item(k) for k in range(5)))
    assert [r["score"] for r in results] == [0, 1, 2, 3, 4]


def test_a_reward_cannot_edit_the_trajectory():
    def compute_score(solution_str, extra_info):
        extra_info["messages"][0]["content"] = "edited"
        extra_info["messages"].clear()
        return 1.0

    one = item()
    score(of(compute_score), one)
    assert one.extra_info["messages"] == [{"role": "assistant", "content": "#### 42"}]


# ---------------------------------------------------------------- ms-swift's signature


@pytest.mark.cap("C36", "C37", "C23", "C22")
def test_swift_rewards_get_the_batch_as_lists():
    seen = {}

    class Mine(ORM):
        def __call__(self, completions, problem, solution, **kwargs):
            seen.update(kwargs, completions=completions, problem=problem, solution=solution)
            return [1.0, 0.5]

    reward = of(Mine())
    a = item(0, "first", rollout_infos={"k": 2, "num_turns": 3}, stop_reason="response_length")
    b = item(1, "second", stop_reason="finished", trajectory_inputs=[{"messages": []}, {"messages": ["last"]}])
    assert score(reward, a, b) == [{"score": 1.0}, {"score": 0.5}]
    assert seen["completions"] == ["first", "second"]
    assert seen["problem"] == ["p0", "p1"] and seen["solution"] == ["42", "42"]
    assert seen["is_truncated"] == [True, False]
    assert seen["rollout_infos"][0]["k"] == 2
    assert seen["messages"][1] == [{"role": "assistant", "content": "second"}]
    assert seen["request_id"] == ["t0", "t1"]
    assert {k: len(v) for k, v in seen["trajectory_inputs"].items()} == {"t0": 1, "t1": 2}


@pytest.mark.cap("C39")
def test_swift_rewards_may_be_functions_async_or_written_as_in_the_document():
    async def later(completions, **kwargs):
        return [1.0 for _ in completions]

    class Documented:
        def __call__(completions, **kwargs):
            return [float(len(kwargs["messages"])) for _ in completions]

    assert score(of(later), item()) == [{"score": 1.0}]
    assert score(of(Documented()), item(), item(1)) == [{"score": 2.0}, {"score": 2.0}]
    assert score(of(lambda completions, scale: [scale], scale=3), item()) == [{"score": 3.0}]
    assert score(of(lambda completions: np.ones(len(completions))), item(), item(1)) == [{"score": 1.0}] * 2
    assert score(of(later)) == []


@pytest.mark.slow
def test_one_bad_item_does_not_take_its_swift_batch_along(monkeypatch, forever):
    deadline_only_for(monkeypatch, lambda completions, **_: "" in completions)

    def raises(completions, **kwargs):
        return [1.0 / len(text) for text in completions]

    def hangs(completions, **kwargs):
        if "" in completions:
            forever.wait()
        return [1.0 for _ in completions]

    def none_of(completions, **kwargs):
        return [1.0 if text else None for text in completions]

    def too_few(completions, **kwargs):
        return [1.0 for text in completions if text]

    for function, kind in ((raises, "raised"), (hangs, "timeout"), (none_of, "absent"), (too_few, "invalid")):
        good, bad, other = score(of(function, timeout_s=0.2), item(0, "x"), item(1, ""), item(2, "x"))
        assert good == other == {"score": 1.0}
        assert bad.kind == kind and "row 1" in bad.error


def test_a_swift_reward_names_the_column_that_is_missing():
    (failure,) = score(of(lambda completions, difficulty: [1.0]), item())
    assert "needs the column difficulty. The rows have problem" in failure.error


# ---------------------------------------------------------------- load_reward


@pytest.mark.cap("C39")
def test_rewards_are_found_by_name_path_and_file(tmp_path, registered):
    orms["short"] = lambda completions, **kwargs: [1.0 for _ in completions]
    assert orms is rewards
    file = tmp_path / "my_rewards.py"
    file.write_text(
        "def compute_score(solution_str): return 1.0\n"
        "def other(solution_str): return 2.0\n"
        "class Kept:\n"
        "    def __init__(self, scale): self.scale = scale\n"
        "    def __call__(self, completions, **kwargs): return [self.scale for _ in completions]\n"
    )
    cases = [
        (("short",), 1.0),
        (("gsm8k",), 1.0),
        (("verl_mt.rewards.gsm8k.compute_score",), 1.0),
        (("verl_mt.rewards.gsm8k", "compute_score"), 1.0),
        (("verl_mt.utils.reward_score.gsm8k", None), 1.0),
        ((str(file),), 1.0),
        ((str(file), "other"), 2.0),
        ((f"{file}:other",), 2.0),
        ((f"{file}:Kept", None, {"scale": 4}), 4.0),
        (("gsm8k", None, {"score": 3.0, "method": "flexible"}), 3.0),
    ]
    for arguments, expected in cases:
        assert score(load_reward(*arguments), item())[0]["score"] == expected, arguments


def test_a_reward_of_the_inner_form_is_used_as_it_is(registered):
    class Native(Reward):
        def __init__(self, value=1.0):
            self.value = value

        async def score(self, items):
            return [{"score": self.value} for _ in items]

    registered["native"] = Native
    registered["made"] = Native()
    assert score(load_reward("native", kwargs={"value": 2.0}), item()) == [{"score": 2.0}]
    assert load_reward("made") is registered["made"]
    with pytest.raises(ConfigError, match="an object already"):
        load_reward("made", kwargs={"value": 2.0})
    with pytest.raises(NotImplementedError, match="async score"):
        score(Reward(), item())


async def reward_func(args, sample, **kwargs):
    return 1.0


def needs_more(solution_str, judge):
    return 1.0


def whose(text, answer):
    return 1.0


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (("gsm9k",), PluginError, "did you mean 'gsm8k'.*arithmetic.*exact_match.*gsm8k"),
        (("gsm8k", "compute_score"), ConfigError, "is a registered reward"),
        (("gsm8k", None, {"mode": "strict"}), ConfigError, "gsm8k takes no mode. Its parameters:.*method"),
        (("gsm8k", None, {"ground_truth": "1"}), ConfigError, "ground_truth of gsm8k comes from the rollout"),
        (("absent.py",), PluginError, "reward.path: no file 'absent.py'"),
        ((__file__,), PluginError, "has no 'compute_score'.*reward.name"),
        ((__file__, "rewardfunc"), PluginError, "did you mean 'reward_func'"),
        ((__file__, "reward_func", {"sample": 1}), ConfigError, "sample of .* comes from the rollout"),
        ((__file__, "needs_more"), PluginError, "nothing fills its parameter judge"),
        ((__file__, "whose"), PluginError, r"\(text, answer\).*Expected compute_score"),
        (("verl_mt.rewards.gsm8k.MAX_TAIL_CHARS",), PluginError, "expected a function or a class, got 300"),
        (("verl_mt.rewards.ORM", None, {"args": 1, "x": 1}), None, ""),
        ((None, "compute_score"), ConfigError, "belong to reward.path"),
        ((None, None, {"method": "strict"}), ConfigError, "belong to reward.path"),
        ((None, None, None, 0.0), ConfigError, "timeout_s must be positive"),
    ],
)
def test_a_reward_that_cannot_work_is_refused_at_start(arguments, error, says):
    if error is None:
        assert load_reward(*arguments)
        return
    with pytest.raises(error, match=says):
        load_reward(*arguments)


def scored_by_tests(data_source, solution_str, ground_truth, extra_info):
    return 0.5, [{"passed": 1, "of": 2}]


def batch_scored_by_tests(data_sources, solution_strs, ground_truths, extra_infos):
    return [(0.5, {}) for _ in solution_strs]


def test_of_a_tuple_that_a_scorer_of_verls_kind_returns_the_first_is_the_score():
    for function in (scored_by_tests, batch_scored_by_tests):
        assert score(load_reward(f"{__name__}.{function.__name__}"), item(), item(1)) == [{"score": 0.5}] * 2


# ---------------------------------------------------------------- by data source


def test_without_a_path_the_data_source_decides():
    reward = load_reward()
    results = score(
        reward,
        item(0, "#### 42.", source="openai/gsm8k"),
        item(1, "#### 42.", source="verl_mt/arithmetic"),
        item(2, "#### 41", source="gsm8k"),
        item(3, "#### 42", source="verl_mt/arithmetic"),
    )
    assert [r["score"] for r in results] == [1.0, 0.0, 0.0, 1.0]


def test_an_unknown_data_source_names_the_row_and_what_is_known():
    reward = load_reward()
    good, bad = score(reward, item(0), item(7, source="openai/gsm9k"))
    assert good == {"score": 1.0}
    assert bad.kind == "unknown_data_source"
    for part in ("row 7", "'openai/gsm9k'", "did you mean 'openai/gsm8k'", "verl_mt/arithmetic", "reward.path"):
        assert part in bad.error
    reward.check(row("gsm8k"))
    with pytest.raises(ConfigError, match=r"train.parquet, row 8: no scorer for data_source 'mine'"):
        reward.check(row("mine"))
    load_reward("gsm8k").check(row("mine"))


def test_a_row_that_a_model_is_to_score_is_not_scored_by_rule_in_silence():
    wants_model = row("gsm8k", {"style": "model", "ground_truth": "4"})
    with pytest.raises(ConfigError, match=r"row 8: reward_model.style is 'model'.*rule for 'gsm8k'.*reward.path"):
        load_reward().check(wants_model)
    load_reward().check(row("gsm8k", {"style": "rule", "ground_truth": "4"}))
    load_reward().check(row("gsm8k", {"style": "rule-lighteval/MATH_v2", "ground_truth": "4"}))
    load_reward("gsm8k").check(wants_model)  # the user has named what scores it


def test_a_shipped_scorer_that_refuses_a_row_fails_that_row_only():
    good, bad = score(load_reward(), item(0), item(1, truth="many"))
    assert good == {"score": 1.0}
    assert "row 1 (trajectory t1)" in bad.error and "must be a number, got 'many'" in bad.error


def test_scorers_of_ones_own_can_be_added_for_a_data_source(monkeypatch):
    monkeypatch.setitem(rewards_base.default_scorers, "mine", lambda solution_str, **kwargs: 0.5)
    assert score(load_reward(), item(0, source="mine"), item(1)) == [{"score": 0.5}, {"score": 1.0}]


# ---------------------------------------------------------------- verl's batches


@pytest.mark.cap("C75")
def test_verls_batch_signature_gets_a_group_at_once_and_may_compare_its_members():
    def compute_score(data_sources, solution_strs, ground_truths, extra_infos, weight=1.0):
        assert (data_sources, ground_truths) == (["gsm8k"] * 3, ["42"] * 3)
        assert [info["index"] for info in extra_infos] == [0, 1, 2] and extra_infos[0]["messages"]
        longest = max(map(len, solution_strs))
        return [{"score": weight * len(text) / longest, "length": len(text)} for text in solution_strs]

    results = score(of(compute_score, weight=2.0), item(0, "a"), item(1, "bb"), item(2, "cccc"))
    assert results == [{"score": 0.5, "length": 1}, {"score": 1.0, "length": 2}, {"score": 2.0, "length": 4}]


def test_verls_batch_may_leave_arguments_out_and_return_an_array():
    assert score(of(lambda solution_strs: np.array([0.5, 1.0])), item(), item(1)) == [{"score": 0.5}, {"score": 1.0}]

    async def later(solution_strs, **kwargs):
        return [float(len(kwargs["extra_infos"]))] * len(solution_strs)

    assert score(of(later), item(), item(1)) == [{"score": 2.0}] * 2
    assert score(of(later)) == []


def test_a_batch_that_fails_is_scored_item_by_item_and_says_so_once(caplog):
    def compute_score(solution_strs):
        return [1.0 / len(text) for text in solution_strs]

    reward = of(compute_score)
    for _ in range(2):
        good, bad = score(reward, item(0, "x"), item(1, ""))
        assert good == {"score": 1.0} and bad.kind == "raised" and "row 1 (trajectory t1)" in bad.error
    said = [r.message for r in caplog.records if "do not see the others" in r.message]
    assert len(said) == 1 and "reward mine: a batch of 2 raised ZeroDivisionError" in said[0]


def test_a_parameter_of_a_batch_that_nothing_fills_is_refused():
    with pytest.raises(
        PluginError, match="nothing fills its parameter judge; a reward gets data_sources, solution_strs"
    ):
        of(lambda solution_strs, judge: [1.0])
    with pytest.raises(ConfigError, match="solution_strs of mine comes from the rollout"):
        of(lambda solution_strs: [1.0], solution_strs=["x"])


# ---------------------------------------------------------------- foreign code at its worst


def rewards_raising(error):
    """One of each form; all raise for item 1, and batches of several for that alone."""

    def sync(solution_str, extra_info):
        if extra_info["index"] == 1:
            raise error
        return 1.0

    async def later(solution_str, extra_info):
        return sync(solution_str, extra_info)

    def batch(solution_strs, extra_infos):
        return [sync(text, extra) for text, extra in zip(solution_strs, extra_infos)]

    async def swift(completions, problem, **kwargs):
        return [sync(text, {"index": int(p[1:])}) for text, p in zip(completions, problem)]

    return [sync, later, batch, swift]


@pytest.mark.parametrize("form", range(4), ids=["sync", "async", "verl_batch", "swift"])
@pytest.mark.parametrize("name", EXCEPTIONS)
def test_whatever_a_reward_raises_fails_its_item_only_and_at_once(form, name):
    function = rewards_raising(EXCEPTIONS[name])[form]
    good, bad, other = score(of(function, timeout_s=1e6), item(0), item(1), item(2))
    assert good == other == {"score": 1.0}
    assert bad.kind == "raised" and "row 1" in bad.error and f"raised {name}" in bad.error
    assert "in sync" in bad.traceback and name in bad.traceback


@pytest.mark.parametrize("value", [1e39, -1e308, 3e38, 1.1e15, 10**400])
def test_a_number_that_spoils_sums_of_float32_is_no_score_and_no_further_number(value):
    def compute_score(solution_str, extra_info):
        return {"score": value if extra_info["index"] == 1 else 1e15, "part": value}

    good, bad = score(of(compute_score), item(0), item(1))
    assert good == {"score": 1e15}
    assert bad.kind == "invalid" and "finite number of at most 1e+15" in bad.error


def test_what_cannot_be_read_or_shown_fails_its_item_only():
    class Odd(UserDict):
        def __iter__(self):
            raise SystemExit(3)

    class Liar(float):
        def __float__(self):
            raise LookupError("no number")

    values = [1.0, Unshowable(), Odd(score=1.0), Liar(1.0), {"score": 2.0, "part": Unshowable()}]
    found = score(of(lambda solution_str, extra_info: values[extra_info["index"]]), *map(item, range(5)))
    assert found[0] == {"score": 1.0} and found[4] == {"score": 2.0}
    assert [f.kind for f in found[1:4]] == ["invalid"] * 3
    assert "a Unshowable whose __repr__ raised AttributeError" in found[1].error


@pytest.mark.slow
def test_async_rewards_beside_one_that_blocks_fail_and_name_it_and_later_ones_do_not(monkeypatch):
    monkeypatch.setattr("verl_mt.user_code._GRACE_S", 0.1)
    begun, over = [], threading.Event()

    async def compute_score(solution_str, extra_info):
        begun.append(extra_info["index"])
        while len(begun) < 9:
            await asyncio.sleep(0.001)
        if extra_info["index"] == 2:
            over.wait(60)
        await asyncio.sleep(1e6 if len(begun) == 9 else 0.0)
        return 1.0

    function = of(compute_score, timeout_s=2.0)
    found, later = score(function, *map(item, range(9))), score(function, item(0))
    over.set()
    assert [f.kind for f in found] == ["timeout"] * 9 and later == [{"score": 1.0}]
    assert "compute_score of verl_mt-reward blocked its event loop" in found[0].error


@pytest.mark.parametrize("name", [*EXCEPTIONS, "too few", "NaN"])
def test_a_reward_of_the_inner_form_fails_its_items_and_nothing_else(name):
    class Own(Reward):
        async def score(self, items):
            if name in EXCEPTIONS:
                raise EXCEPTIONS[name]
            return [{"score": 1.0}, {"score": float("nan")}][: 1 + (name == "NaN")]

    found = asyncio.run(score_all(Own(), [item(0), item(1)]))
    assert [isinstance(f, RewardFailure) for f in found] == [name != "NaN", True]
    assert "Own" in found[1].error and "row 1" in found[1].error


def test_a_reward_that_is_imported_late_is_its_class_by_every_way_to_ask_for_it(monkeypatch):
    from verl_mt.extensions.toolbox.rewards.llm_judge import LLMJudge

    class Sterner(rewards["llm_judge"]):
        """A plug-in file may build on a shipped one."""

    assert issubclass(Sterner, LLMJudge)
    assert rewards["llm_judge"] is rewards.find("llm_judge") is LLMJudge
    monkeypatch.setitem(rewards, "llm_judge", LLMJudge)  # registering what is registered is no conflict
    with pytest.raises(KeyError):
        rewards["absent"]
