"""A shop behind MCP: each conversation has its own basket, and two steps of training fail in none."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from two_steps import RO, train_two_steps

from verl_mt.engines.scripted import ScriptedEngine
from verl_mt.trainer.build_rollout import build_chat

pytest.importorskip("mcp", reason="needs the package mcp")
SHOP = Path(__file__).with_name("shop_server.py")


def rows(*, num_rows: int, seed: int, split: str) -> list[dict[str, object]]:
    """What the page's user has."""
    return [{"prompt": f"Buy {word}.", "data_source": "shop", "ground_truth": word} for word in ("a pen", "ink") * 4]


def reward(data_source, solution_str, ground_truth, extra_info=None) -> float:
    """Whether the basket holds it."""
    return float(ground_truth in solution_str)


def buys_twice(config):
    """An engine whose model buys two things and then says something."""
    chat = build_chat(config)

    def say(request):
        number = int(request.request_id.rpartition("/")[2])
        wanted = json.dumps({"name": "buy", "arguments": {"item": f"{number}"}})
        said = f"<tool_call>\n{wanted}\n</tool_call>" if number < 3 else "done"
        ids = chat.tokenizer.encode(f"{said}<|im_end|>", add_special_tokens=False)
        return ids, None, "stop", [-0.1] * len(ids)

    return ScriptedEngine(say)


@pytest.mark.slow
@pytest.mark.parametrize("state", ["session", "argument"])
@pytest.mark.parametrize("scripted", [False, True])
def test_a_shop_is_trained_for_two_steps_and_no_sibling_sees_another_ones_basket(tmp_path, state, scripted):
    settings = {"type": "mcp", "state": state} | ({"state_argument": "session_id"} if state == "argument" else {})
    entry = {
        "class_name": "verl_mt.tools.mcp_base_tool.MCPBaseTool",
        "config": settings,
        "mcp": {"servers": {"shop": {"command": sys.executable, "args": [str(SHOP)]}}},
    }
    (tmp_path / "tools.yaml").write_text(json.dumps({"tools": [entry]}))
    words = (
        f"data.train_files={__file__}:rows", f"reward.path={__file__}:reward",
        f"{RO}.tool_kwargs.tools_config_file={tmp_path / 'tools.yaml'}", f"{RO}.multi_turn.max_assistant_turns=4",
        f"{RO}.max_tokens_per_turn={64 if scripted else 16}",
    )  # fmt: skip
    found = train_two_steps(tmp_path, *words, engine=buys_twice if scripted else None)
    shown = json.dumps([row["tools"] for row in found]) if "tools" in found[0] else ""
    assert state == "session" or "session_id" not in shown
    if not scripted:
        return
    shops = set()
    for row in found:
        said = [message["content"] for message in row["messages"] if message["role"] == "tool"]
        assert [re.match(r"basket: ([^;]*);", text)[1] for text in said] == ["1", "1, 2"]
        shops |= {re.search(r"shop (\d+)", text)[1] for text in said}
    assert len(shops) == (8 if state == "session" else 1)
