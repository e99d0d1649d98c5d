"""`SimulatedUser`: a user played by another model behind an OpenAI-compatible URL, persona and goal per row."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl_mt.data.conversation import Message
from verl_mt.errors import EngineGoneError
from verl_mt.extensions.toolbox.remote_model import CONNECTION, RemoteModel, Settings, import_openai, read_settings
from verl_mt.interactions.base import BaseInteraction

DEFAULT_PROMPT = """You play a person who talks to an assistant. Stay in your role; never say that you are a model.
Who you are: {persona}
What you want: {goal}
Write only your next message. Tell what you want little by little, as people do.
Write {done} when you have got what you want, and {give_up} when you no longer expect to get it."""

_SETTINGS: Settings = {
    **CONNECTION,
    "system_prompt": (str, DEFAULT_PROMPT),
    "done_marker": (str, "[DONE]"),
    "give_up_marker": (str, "[GIVE UP]"),
    "temperature": ((int, float), 1.0),
    "max_tokens": (int, 256),
    "max_retries": (int, 2),
    "max_concurrent": (int, 64),
}


class SimulatedUser(BaseInteraction):
    """The other model sees the conversation from the other side: the policy's turns as `user`, its own as `assistant`.

    Tool calls, tool results and system messages are not shown to it: a person does not see them either. What it has
    thought (`<think>`) is not said.

    Config::

        base_url: http://127.0.0.1:8000/v1     # required
        model: Qwen/Qwen2.5-7B-Instruct        # required; its name at that URL
        api_key_env: OPENAI_API_KEY            # environment variable that holds the key; "" = none is needed
        system_prompt: text with {persona}, {goal}, {done}, {give_up} and any other interaction_kwargs of the row
        done_marker: "[DONE]"                  # ends the conversation with turn score 1
        give_up_marker: "[GIVE UP]"            # ends it with turn score 0
        temperature: 1.0
        max_tokens: 256
        request_timeout_s: 30                  # of one attempt; keep multi_turn.interaction_timeout_s above all
        max_retries: 2                         # after 408, 409, 429, 5xx and lost connections, with growing pauses
        max_concurrent: 64                     # requests at once
        extra_body: {}                         # further fields of the request, such as top_k

    A row gives `extra_info.interaction_kwargs.persona` and `.goal`.

    Raises:
        ValueError: an unknown or missing setting, one of the wrong type, or a key that is not in the environment.
    """

    def __init__(self, config: dict[str, Any]):
        super().__init__(config)
        self._set = _checked(self.name, {k: v for k, v in config.items() if k != "name"})
        self._scores: dict[str, float] = {}
        self._user = RemoteModel("SimulatedUser", self._set, max_retries=self._set["max_retries"])
        import_openai("SimulatedUser")

    async def start_interaction(
        self, instance_id: str | None = None, persona: str | None = None, goal: str | None = None, **kwargs: Any
    ) -> str:
        """Check what the row gives.

        Raises:
            ValueError: persona or goal is missing.
        """
        missing = [name for name, value in (("persona", persona), ("goal", goal)) if not value]
        if missing:
            raise ValueError(
                f"interaction {self.name!r} needs a persona and a goal: set "
                + " and ".join(f"extra_info.interaction_kwargs.{name}" for name in missing)
            )
        instance_id = instance_id or str(uuid4())
        self._scores[instance_id] = 0.0
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[Message], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """(over?, what the user says, 1.0 when it has got what it wants, the user model's token counts).

        Raises:
            EngineGoneError: the URL does not answer, or only with 429 or 5xx, after all retries: the trajectory is
                started again.
            ValueError: the request was refused (another 4xx), or the system prompt names a field that the row lacks.
        """
        said, usage = await self._ask(self._seen_by_user(messages, kwargs))
        done, give_up = self._set["done_marker"], self._set["give_up_marker"]
        over = done in said or give_up in said
        score = 1.0 if done in said else 0.0
        self._scores[instance_id] = score
        text = said.replace(done, "").replace(give_up, "").strip()
        return over, text, score, usage

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """1.0 where the user has got what it wanted."""
        return self._scores[instance_id]

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Forget the conversation."""
        self._scores.pop(instance_id, None)

    def _seen_by_user(self, messages: list[Message], row: dict[str, Any]) -> list[dict[str, str]]:
        fields = {"done": self._set["done_marker"], "give_up": self._set["give_up_marker"], **row}
        try:
            prompt = self._set["system_prompt"].format(**fields)
        except (KeyError, IndexError) as error:
            raise ValueError(
                f"interaction {self.name!r}: system_prompt names {error}, which interaction_kwargs of the row does not "
                f"have. It has: {', '.join(sorted(row))}"
            ) from error
        turns: list[dict[str, str]] = []
        for message in messages:
            role = {"assistant": "user", "user": "assistant"}.get(message["role"])
            text = _text(message)
            if role is None or not text.strip():
                continue
            if turns and turns[-1]["role"] == role:
                turns[-1]["content"] += "\n" + text
            else:
                turns.append({"role": role, "content": text})
        return [{"role": "system", "content": prompt}, *turns]

    async def _ask(self, messages: list[dict[str, str]]) -> tuple[str, dict[str, Any]]:
        openai, (client, gate) = import_openai("SimulatedUser"), self._user.client()
        where = f"the simulated user at {self._set['base_url']}"
        try:
            async with gate:
                reply = await client.chat.completions.create(
                    model=self._set["model"],
                    messages=messages,
                    temperature=self._set["temperature"],
                    max_tokens=self._set["max_tokens"],
                    extra_body=self._set["extra_body"] or None,
                )
        except openai.APIStatusError as error:
            text = f"{where} answered {error.status_code}: {error.message}"
            if error.status_code in (408, 409, 429) or error.status_code >= 500:
                raise EngineGoneError(text) from error
            raise ValueError(f"{text}. Check model, api_key_env and extra_body") from error
        except openai.APIConnectionError as error:
            raise EngineGoneError(
                f"{where} does not answer after {self._set['max_retries'] + 1} attempts: {error}"
            ) from error
        usage = reply.usage
        counts = {} if usage is None else {"prompt": usage.prompt_tokens, "completion": usage.completion_tokens}
        said = (reply.choices[0].message.content or "").rpartition("</think>")[2].strip()
        return said, {"user_tokens": counts}


def _checked(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """The settings with their defaults; all that is wrong in one error."""
    settings, problems = read_settings(config, _SETTINGS)
    if problems:
        raise ValueError(f"interaction {name!r}: " + "; ".join(problems))
    return settings


def _text(message: Message) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content if isinstance(part, dict))
