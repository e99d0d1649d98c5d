"""The default loop: the model speaks; its tool calls are answered; then the interaction, if there is one, reacts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from verl_mt.data.conversation import MalformedCall, Message, ToolCall
from verl_mt.data.trajectory import StopReason
from verl_mt.environments.session import EnvironmentSession
from verl_mt.errors import EngineGoneError
from verl_mt.interactions.session import InteractionSession
from verl_mt.rollout.session import RolloutSession
from verl_mt.tools.executor import ToolSession
from verl_mt.tools.results import clean_text
from verl_mt.user_code import fair_turn


async def run_tool_loop(
    session: RolloutSession,
    tools: ToolSession | None,
    interaction: InteractionSession | EnvironmentSession | None,
    environment: EnvironmentSession | None = None,
) -> None:
    """Drive one conversation to its stop reason.

    Args:
        interaction: reacts to a turn without calls; an environment that replies, too.
        environment: ends the conversation when its episode is over. What it says last is in the messages only.

    An assistant turn cut by length ends the trajectory: its tools are not run. When no assistant turn remains,
    tools are not executed (`max_assistant_turns`), while the interaction still scores the last answer. A model that
    calls again after it was told that its calls are used up has had its chance (`max_tool_calls`).
    """
    while True:
        turn = await session.generate()
        if turn is None or session.ended:
            return
        if tools is not None and turn.parsed.actions:
            if session.turns_left == 0:
                session.end(StopReason.MAX_ASSISTANT_TURNS)
                return
            if tools.budget_spent:
                session.end(StopReason.MAX_TOOL_CALLS)
                return
            session.extend(await run_calls(tools, turn.parsed.actions, turn=session.trajectory.num_turns))
            if environment is not None and environment.over:
                session.end(StopReason.ENVIRONMENT)
                return
        elif environment is not None and environment.over:  # since `reset`
            session.end(StopReason.ENVIRONMENT)
            return
        elif interaction is not None:
            if await _interaction_is_over(session, interaction):
                return
        else:
            session.end(StopReason.FINISHED)
            return


async def run_calls(tools: ToolSession, actions: Sequence[ToolCall | MalformedCall], *, turn: int) -> list[Message]:
    """Run the calls of one turn; one message per call, in order.

    Raises:
        EngineGoneError: a tool's infrastructure is gone: neither the model's nor the tool's fault, so the trajectory is
            thrown away and started again.
    """
    results = await tools.run(actions, turn=turn)
    lost = [result for result in results if result.failure == "infrastructure"]
    if lost:
        raise EngineGoneError(f"tool {lost[0].name!r}: {lost[0].text}")
    return [result.to_message() for result in results]


async def _interaction_is_over(session: RolloutSession, interaction: InteractionSession | EnvironmentSession) -> bool:
    trajectory = session.trajectory
    reply = await interaction.respond(session.messages, turn=trajectory.num_turns)
    await fair_turn()
    trajectory.turn_scores.append(reply.score)
    if reply.extra:
        trajectory.info.setdefault("interaction_extra", []).append(reply.extra)
    limit = session.context.limits.max_user_turns
    user_turns = len(trajectory.turn_scores) - 1
    if reply.done:
        session.end(StopReason.ENVIRONMENT if isinstance(interaction, EnvironmentSession) else StopReason.INTERACTION)
    elif limit is not None and user_turns >= limit:
        session.end(StopReason.MAX_USER_TURNS)
    elif session.turns_left == 0:
        session.end(StopReason.MAX_ASSISTANT_TURNS)
    else:
        session.extend([{"role": "user", "content": _cleaned(session, reply.text)}])
    return session.ended


def _cleaned(session: RolloutSession, text: str) -> str:
    """What the interaction said, under the same limits as a tool's answer."""
    limits, chat = session.context.limits, session.context.chat
    count_tokens = partial(chat.encode_text, neutral=True)
    text, cut = clean_text(text, limits.max_text_tokens, limits.keep_text, count_tokens)
    session.count("cut_interaction_texts", int(cut))
    return text
