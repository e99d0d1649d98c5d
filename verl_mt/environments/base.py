"""The base class of environments: one object per conversation, whose public methods are the model's tools."""

from __future__ import annotations

from typing import Any, ClassVar

from verl_mt.data.conversation import Message


class Done(Exception):
    """Raise it in a method or in `reply` to end the episode: `raise Done("You found the exit.")`.

    Its text is the last observation.
    """


class Environment:
    """Something that the model acts in. Write a class, and name it in `rollout.environment.path`::

        class Maze(Environment):
            def reset(self, seed: int) -> str:
                '''Returns the prompt.'''
                self.x = random.Random(seed).randint(1, 9)
                return f"The exit is {self.x} steps to the east."

            def walk(self, steps: int) -> str:
                '''Walk to the east.

                Args:
                    steps: how far
                '''
                self.x -= steps
                self.done = self.x == 0
                return "You are out." if self.done else f"{self.x} to go."

            def score(self) -> float:
                return float(self.done)

    **Tools** are all public methods but the reserved ones below. Each needs type hints and a docstring with `Args:`, as
    a `@function_tool` does. It returns text, a dict, a `ToolResponse`, or (response, step reward, metrics). Raise
    `ToolCallError` for a mistake of the model. Any other exception is the environment's fault. Both are shown to the
    model.

    **One object per trajectory.** It is made when the trajectory starts, never used twice, and closed exactly once,
    whatever happened. Each method may be `async def` or a plain `def`. Plain methods of one object run in one thread
    of its own, one after the other.

    These methods are optional, and no tools:

    - `reply(self, text)`: the model ended its turn without a call. Returns the next user message, alone or as
      (text, turn score). Without this method the trajectory ends there.
    - `score(self)`: a finite number, or a dict with `score` and further numbers. Asked once, at the end. It is the
      reward where `reward.path` is null.
    - `state(self)`: what `verl-mt env check` compares: plain data.
    - `fork(self)`: an independent copy in the same state.
    - `close(self)`: free what the object holds.

    The constructor gets `rollout.environment.config` as keywords, and the row's columns of the names that it takes
    besides.
    """

    limit: ClassVar[int | None] = None
    """Objects alive at once in a run, and so trajectories (`rollout.max_concurrent`, where that is lower). None = no
    limit."""
    in_order: ClassVar[bool] = True
    """The calls of one turn run one after the other, in the order written. False = at the same time, where the methods
    are `async`."""
    repeatable: ClassVar[bool] = False
    """A call that failed may be made again (`multi_turn.tool_retries`). False = never: it may have had effects."""
    done: bool = False
    """The episode is over. Set it, or make it a property. It is read after each call and each reply."""

    def reset(self, *args: Any, **row: Any) -> str | list[Message] | None:
        """Begin the episode. Called once.

        Args:
            args: none. (Type checkers take a subclass with any parameters.)
            row: the columns of the data set's row. A copy. A `reset` without `**row` gets the columns that it names.

        Returns:
            A text: it is added to the row's last user message, or is the prompt where the row has none. A list of
            messages: the whole prompt. The row's system message stays where the list has none. None: the row's prompt
            as it is. No text of it becomes a control token.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement reset(self, **row)")

    @classmethod
    def tool_schemas(cls, **config: Any) -> list[dict[str, Any]] | None:
        """For adapters: the OpenAI schemas of tools that are no methods. `call_tool` runs their calls.

        Args:
            config: `rollout.environment.config`.

        Returns:
            The schemas. None = the public methods are the tools.
        """
        return None

    def call_tool(self, name: str, parameters: dict[str, Any]) -> Any:
        """For adapters: run one call of a tool that `tool_schemas` names. May be `async`."""
        raise NotImplementedError(f"{type(self).__name__} returns tool_schemas and must implement call_tool")


RESERVED = (
    "reset", "reply", "score", "state", "fork", "close", "done", "limit", "in_order", "repeatable", "tool_schemas",
    "call_tool",
)  # fmt: skip
"""Names of an environment's class that are no tools."""
