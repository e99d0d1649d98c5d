"""`MultiTurnScheduler`: decides whether a conversation goes on, and with what."""

from __future__ import annotations

from typing import Any

from verl_mt.data.conversation import Message
from verl_mt.extensions.compat.schedulers.hooks import InferEngine, TrajectoryOver, current
from verl_mt.extensions.compat.schedulers.requests import (
    ChatCompletionResponseChoice,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
)
from verl_mt.extensions.compat.schedulers.swift_names import extract_logprobs_from_choice


class MultiTurnScheduler:
    """Base of all schedulers: implement `step` (and perhaps `check_finished`), or replace `run`.

    One object per process, shared by all trajectories. `infer_request.uuid` tells them apart. Hooks are called
    positionally, may be plain functions (they run in threads) or async, and have a deadline
    (`multi_turn.interaction_timeout_s`). What they raise fails their trajectory and no other.

    Example:
        >>> class AskAgain(MultiTurnScheduler):
        ...     def step(self, infer_request, response_choice, current_turn):
        ...         infer_request.messages.append({"role": "user", "content": "Are you sure?"})
        ...         return {"infer_request": infer_request}

    Attributes:
        infer_engine: `infer_async(infer_request)` samples a turn. `tokenizer.encode` makes ids of foreign text that
            hold no control tokens. Set before the first conversation.
    """

    runs_inline = False
    """True: the hooks never block, and are called without a thread."""
    infer_engine: InferEngine
    _tokenizer: Any = None

    def __init__(self, max_turns: int | None = None, *args: Any, **kwargs: Any):
        """
        Args:
            max_turns: engine turns of one trajectory; None = only the run's other limits.
        """
        # ms-swift's later releases pass the engine first; here it is not there yet, and comes before the first hook.
        if max_turns is None and args and isinstance(args[0], int):
            max_turns = args[0]
        self.max_turns = max_turns

    @property
    def tokenizer(self) -> Any:
        """The engine's, whose `encode` makes no control tokens of foreign text. A subclass may set another."""
        return self._tokenizer if self._tokenizer is not None else self.infer_engine.tokenizer

    @tokenizer.setter
    def tokenizer(self, value: Any) -> None:
        self._tokenizer = value

    @property
    def engine(self) -> InferEngine:
        """`infer_engine` under ms-swift's other name."""
        return self.infer_engine

    _extract_logprobs_from_choice = staticmethod(extract_logprobs_from_choice)

    def prepare_response_continuation(
        self, response_choice: ChatCompletionResponseChoice
    ) -> tuple[list[int], list[int], list[float]]:
        """A turn's sampled ids, their mask (all 1) and their log-probs, to put more behind. Copies."""
        ids = list(response_choice.token_ids or [])
        return ids, [1] * len(ids), extract_logprobs_from_choice(response_choice)

    def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> Any:
        """Called by the default `run` before a trajectory's first turn. May be async.

        Args:
            requests: a list of one. Edit its `messages` in place to begin with another prompt.
        """

    def on_turn_end(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> Any:
        """Called by the default `run` after every turn, before `check_finished`. May be async.

        Returns:
            None, or a dict: `done` (True or False) instead of what `check_finished` says, `rollout_infos` as of `step`.
            `max_turns` holds all the same.
        """

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> Any:
        """What the model reads next. May be async.

        Args:
            infer_request: the conversation, the model's newest turn included. Edit its `messages` and return it.
                Messages added behind it are a new turn. If the last message is the assistant's, the model goes on
                inside it.
            response_choice: the newest turn.
            current_turn: its number, from 1.

        Returns:
            `infer_request`, and optionally `response_token_ids` (this turn's ids as they shall be recorded: the
            sampled ones or the first of them, and what was put behind), `response_loss_mask` (as long; 0 takes an id
            out of the loss), `rollout_infos` (a dict for the reward; later turns win; `images` and `videos` replace
            the row's). The request alone works too.
        """
        raise NotImplementedError(missing_methods(type(self)))

    def check_finished(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> bool:
        """Whether the conversation is over. By default when the turn was cut by length, or `max_turns` is reached.

        True or False. None counts as False, and anything else fails the trajectory.
        """
        if response_choice.finish_reason == "length":
            return True
        return bool(self.max_turns and current_turn >= self.max_turns)

    def on_trajectory_end(self, infer_request: RolloutInferRequest, reason: str) -> Any:
        """Called exactly once per trajectory, whatever ended it. May be async.

        Args:
            infer_request: as the last hook left it. A parameter named `requests` gets a list of it instead.
            reason: the stop reason. `error` where something raised, `engine` where the engine went away (the
                trajectory then starts again), `cancelled` where the run ended. A parameter named `error` gets the
                exception, or None.
        """

    async def run(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig | None = None, **kwargs: Any
    ) -> RolloutOutput | list[RolloutOutput]:
        """One conversation: sample, `check_finished`, `step`, and again.

        Override it for another loop. Each `await self.infer_engine.infer_async(infer_request, request_config)` samples
        one turn behind `infer_request.messages`. Return one output, or one per record that is to be trained: turns
        that none of them covers are taken out of the loss and counted.

        Raises:
            TrajectoryOver: the very first turn had no room.
        """
        conversation, output, turn = current(), None, 0
        if type(self).on_trajectory_start is not MultiTurnScheduler.on_trajectory_start:
            await conversation.hook("on_trajectory_start", [infer_request])
        while True:
            turn += 1
            try:
                response = await self.infer_engine.infer_async(infer_request, request_config, **kwargs)
            except TrajectoryOver:
                if output is None:
                    raise
                return output
            choice = response.choices[0]
            append_completion(infer_request.messages, choice.message.content or "")
            output = RolloutOutput(response, infer_request.messages, whole=True)
            if choice.finish_reason == "abort" or await self._is_over(infer_request, choice, turn):
                return output
            result = await conversation.hook("step", infer_request, choice, turn)
            infer_request = conversation.take_step(result)

    async def _is_over(
        self, infer_request: RolloutInferRequest, choice: ChatCompletionResponseChoice, turn: int
    ) -> bool:
        done = None
        if type(self).on_turn_end is not MultiTurnScheduler.on_turn_end:
            done = current().take_turn_end(await current().hook("on_turn_end", infer_request, choice, turn))
        over = current().is_over(await current().hook("check_finished", infer_request, choice, turn))
        over = over if done is None else done
        # A subclass's check that forgets `max_turns` does not lift it.
        return over or bool(self.max_turns and turn >= self.max_turns)


def append_completion(messages: list[Message], text: str) -> None:
    """Write a sampled turn into the messages: behind an unfinished assistant message, or as a new one."""
    if messages and messages[-1]["role"] == "assistant" and not messages[-1].get("content"):
        messages.pop()
    if messages and messages[-1]["role"] == "assistant":
        messages[-1]["content"] = str(messages[-1]["content"]) + text
    else:
        messages.append({"role": "assistant", "content": text})


def missing_methods(kind: type) -> str:
    """What to say of a scheduler that decides nothing."""
    return (
        f"{kind.__name__} must implement step(infer_request, response_choice, current_turn), or replace "
        "run(infer_request, request_config, **kwargs)"
    )
