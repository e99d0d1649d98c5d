"""`agent_data`: tools of today's verl read their trajectory from it, and the reward reads what they leave there."""

from __future__ import annotations

import json
import threading

import pytest
import tool_runs
from PIL import Image

from verl_mt.data.trajectory import Trajectory
from verl_mt.errors import EngineGoneError
from verl_mt.rewards.adapters import adapt
from verl_mt.tools.agent_data import AgentData, takes_agent_data
from verl_mt.tools.base_tool import BaseTool
from verl_mt.tools.calculator import Calculator
from verl_mt.tools.function_tool import function_tool
from verl_mt.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl_mt.tools.toolset import ToolSet


class Tool(BaseTool):
    """Shows what `behave(agent_data)` says, as tools of verl 0.7 and later are written."""

    def __init__(self, behave, name: str = "tool"):
        self.behave = behave
        function = {"name": name, "parameters": {"type": "object", "properties": {}}}
        super().__init__({}, OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function}))

    async def execute(self, instance_id, parameters, **kwargs):
        agent_data = kwargs.get("agent_data")
        if agent_data is None:
            return ToolResponse(text="Error: requires agent_data."), 0.0, {}
        return ToolResponse(text=str(self.behave(agent_data))), 0.5, {}


def call(*names: str) -> str:
    return "".join(f"<tool_call>{json.dumps({'name': name, 'arguments': {}})}</tool_call>" for name in names)


def answers(trajectory: Trajectory) -> list[str]:
    return [m["content"] for m in trajectory.messages if m["role"] == "tool"]


def test_a_tool_finds_the_trajectory_that_called_it_in_agent_data():
    seen: list[AgentData] = []

    def look(data):
        seen.append(data)
        said = [m["role"] for m in data.messages]
        return said, data.tool_rewards, data.turn_scores, data.assistant_turns, data.user_turns

    row = {
        "tools_kwargs": {"tool": {"create_kwargs": {"environment_id": "e1", "hint": None}}},
        "interaction_kwargs": {"query": "q", "ground_truth": None},
    }
    (done,) = tool_runs.roll_out([call("tool"), call("tool"), "done"], ToolSet([Tool(look)]), extra_info=row)
    asked = ["user", "assistant"]
    assert answers(done) == [
        str((asked, [], [], 1, 0)),
        str(([*asked, "tool", "assistant"], [0.5], [], 2, 1)),
    ]
    data = seen[0]
    assert data.tools_kwargs == {"tool": {"create_kwargs": {"environment_id": "e1"}}}
    assert data.interaction_kwargs == {"query": "q"} and data.image_data == data.video_data == []
    assert data.metrics == {} and data.extra_fields == {}


def test_what_tools_set_on_agent_data_lives_as_long_as_the_trajectory_and_no_longer():
    def count(data):
        data.calls = getattr(data, "calls", 0) + 1
        return f"{data.request_id} {data.calls}"

    tools = ToolSet([Tool(count), Tool(count, "other")])
    first, second = tool_runs.roll_out([call("tool"), call("other"), call("tool"), "done"], tools, n=2)
    (one,), (other,) = ({answer.split()[0] for answer in answers(done)} for done in (first, second))
    assert one != other
    assert answers(first) == [f"{one} 1", f"{one} 2", f"{one} 3"]
    assert answers(second) == [f"{other} 1", f"{other} 2", f"{other} 3"]


def test_an_attempt_that_starts_again_has_an_agent_data_of_its_own():
    seen = []

    def lose_the_first(data):
        seen.append(data)
        if len(seen) == 1:
            raise EngineGoneError("the server is gone")
        return "ok"

    (done,) = tool_runs.roll_out([call("tool"), "done"], ToolSet([Tool(lose_the_first)]))
    assert answers(done) == ["ok"] and seen[0].request_id != seen[1].request_id


def test_the_reward_finds_extra_fields_in_extra_info_and_no_trajectory_keeps_them():
    found = []

    def compute_score(data_source, solution_str, ground_truth, extra_info):
        found.append(extra_info)
        return 1.0

    def submit(data):
        data.extra_fields["answer"] = "42"
        data.extra_fields["lock"] = threading.Lock()  # cannot be written or sent
        data.extra_fields["trajectory_id"] = "no"
        return "submitted"

    reward = adapt(compute_score, label="r", kwargs={}, timeout_s=5.0)
    (done,) = tool_runs.roll_out([call("tool"), "done"], ToolSet([Tool(submit)]), reward=reward)
    assert found[0]["answer"] == "42" and "lock" in found[0]
    assert found[0]["trajectory_id"] == done.trajectory_id
    assert done.extra_fields == {}


def test_images_are_those_of_the_conversation_and_messages_are_copies():
    image = Image.new("L", (3, 2))
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "what is it?"}]
    video = {"type": "video", "video": [image, image]}
    trajectory = Trajectory("t", "p", "p", "t", messages=[{"role": "user", "content": [*parts, video]}])
    data = AgentData(trajectory)
    assert [(i.size, i.mode) for i in data.image_data] == [((3, 2), "RGB")]
    assert [[f.size for f in v] for v in data.video_data] == [[(3, 2)] * 2]
    data.messages.append({"role": "user", "content": "mine"})
    data.messages[0]["content"] = "changed"
    assert trajectory.messages == [{"role": "user", "content": [*parts, video]}]


def test_an_attribute_that_only_verl_has_is_named_in_the_error():
    assert not hasattr(AgentData(), "prompt_ids")
    with pytest.raises(AttributeError, match=r"agent_data has no 'prompt_ids'. It has request_id, messages"):
        AgentData().prompt_ids  # noqa: B018


def test_only_an_execute_that_can_take_agent_data_gets_it():
    class Named(Tool):
        async def execute(self, instance_id, parameters, agent_data):
            return agent_data.request_id

    class Older(Tool):
        async def execute(self, instance_id, parameters):
            return "no keywords"

    @function_tool
    def plain() -> str:
        """Say hello."""
        return "hello"

    tools = ToolSet([Named(None, "named"), Older(None, "older"), plain, Calculator({}, None)])
    said = call("named", "older", "plain") + (
        '<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>'
    )
    (done,) = tool_runs.roll_out([said, "done"], tools)
    assert len(answers(done)[0]) == 32 and answers(done)[1:] == ["no keywords", "hello", "2"]
    assert not takes_agent_data(Older.execute)
