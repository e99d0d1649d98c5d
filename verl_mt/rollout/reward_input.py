"""What a reward gets of a finished trajectory."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

from verl_mt.chat.template import ChatTemplate
from verl_mt.data.trajectory import StopReason, Trajectory
from verl_mt.rewards.contract import RewardInput, RunState
from verl_mt.rollout.prompts import Prompt


def reward_input(
    trajectory: Trajectory, prompt: Prompt, run: RunState, chat: ChatTemplate, *, several_turns: bool
) -> RewardInput:
    """The item that a reward scores.

    Args:
        trajectory: finished.
        prompt: of the trajectory.
        run: where the training run stands.
        chat: of the run, to decode ids.
        several_turns: conversations of this run may have several turns.
    """
    texts = trajectory.turn_texts
    row = prompt.row
    return RewardInput(
        data_source=row.data_source,
        solution_str="\n".join(texts),
        completion=_last_answer(trajectory),
        ground_truth=row.ground_truth,
        extra_info={
            **row.extra_info,
            **trajectory.extra_fields,
            "messages": trajectory.messages,
            "turn_scores": trajectory.turn_scores,
            "tool_rewards": trajectory.tool_rewards,
            "num_turns": trajectory.num_turns,
            "assistant_turns": trajectory.num_turns,
            "stop_reason": str(trajectory.stop_reason),
            "rollout_infos": trajectory.info,
            "trajectory_id": trajectory.trajectory_id,
            **({"trajectory_inputs": _records(trajectory)} if len(trajectory.records) > 1 else {}),
        },
        row={**row.raw, **trajectory.media},
        conversation_turns=_conversation_turns(trajectory),
        prompt_id=trajectory.prompt_id,
        message_ids=list(_message_ids(trajectory).values()),
        run=run,
        several_turns=several_turns,
        decode_response=partial(_response_text, trajectory, chat.tokenizer),
        trajectory=trajectory,
        data_row=row,
        decode=chat.decode,
    )


def _response_text(trajectory: Trajectory, tokenizer: Any) -> str:
    """Everything after the prompt, as verl decodes it; of several records one after the other."""
    responses = [record.token_ids[record.num_prompt_tokens :] for record in trajectory.records]
    return "\n".join(tokenizer.decode(ids, skip_special_tokens=True) for ids in responses)


def _message_ids(trajectory: Trajectory) -> dict[int, list[int]]:
    """Number of a sampled assistant message -> its ids in order, text that was put into it included."""
    found: dict[int, list[int]] = {}
    for record in trajectory.records:
        for number, (start, end) in trajectory.message_ranges(record.assistant_turns).items():
            found.setdefault(number, []).extend(record.token_ids[start:end])
    return found


def _conversation_turns(trajectory: Trajectory) -> int:
    """The prompt, the assistant turns and the answers to them. Of an interaction that ended the conversation the last
    answer is no message, since the model never sees it; it counts all the same."""
    is_said = [m["role"] == "assistant" for m in trajectory.messages]
    positions = [position for position, said in enumerate(is_said) if said]
    sampled = positions[max(0, len(positions) - trajectory.num_turns) :]
    answers = sum(after > before + 1 for before, after in pairwise(sampled))
    return 1 + trajectory.num_turns + answers + (trajectory.stop_reason is StopReason.INTERACTION)


def _last_answer(trajectory: Trajectory) -> str:
    """What the last turn says; all of its message, where the turn went on inside one that stands there as written."""
    text = trajectory.turn_texts[-1] if trajectory.turn_texts else ""
    said = [m.get("content") for m in trajectory.messages if m["role"] == "assistant"]
    return said[-1] if said and isinstance(said[-1], str) and said[-1].endswith(text) else text


def _records(trajectory: Trajectory) -> list[dict[str, Any]]:
    """What each record has seen, and its ids, in order."""
    return [
        {
            "messages": [dict(m) for m in record.messages or trajectory.messages],
            "response_token_ids": record.token_ids[record.num_prompt_tokens :],
        }
        for record in trajectory.records
    ]
