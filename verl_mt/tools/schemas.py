"""Schemas and responses of tools, under the names that verl's tool files import from `verl.tools.schemas`."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ValidationError, field_validator

from verl_mt.data.conversation import (
    OpenAIFunctionParametersSchema,
    OpenAIFunctionPropertySchema,
    OpenAIFunctionSchema,
    OpenAIFunctionToolSchema,
    ToolSchema,
)
from verl_mt.errors import PluginError

__all__ = [
    "OpenAIFunctionCallSchema",
    "OpenAIFunctionParametersSchema",
    "OpenAIFunctionParsedSchema",
    "OpenAIFunctionPropertySchema",
    "OpenAIFunctionSchema",
    "OpenAIFunctionToolCall",
    "OpenAIFunctionToolSchema",
    "ToolResponse",
    "ToolSchema",
    "as_tool_schema",
]


def as_tool_schema(given: Any, where: str) -> OpenAIFunctionToolSchema:
    """A tool schema from the dict that an author wrote. A schema as it is.

    Args:
        where: what to call it in errors.

    Raises:
        PluginError: it is no OpenAI tool schema. Says which fields are wrong.
    """
    try:
        return OpenAIFunctionToolSchema.model_validate(given)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'schema'}: {e['msg']}" for e in error.errors()[:3])
        raise PluginError(
            f"{where} is not an OpenAI tool schema: {problems}. Write "
            "{type: function, function: {name: ..., description: ..., parameters: {type: object, properties: {...}}}}"
        ) from error


class ToolResponse(BaseModel):
    """What a tool answers. A text model is told of images and videos only that it cannot see them.

    Images are in any of the forms of `verl_mt.data.media`. A video is a list of them.
    """

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    @field_validator("image", "video", mode="before")
    @classmethod
    def _must_be_a_list(cls, value: Any) -> Any:
        if value is not None and not isinstance(value, list):
            raise ValueError(f"must be a list even for one item, got {type(value).__name__}. Write [item]")
        return value

    def is_empty(self) -> bool:
        """Neither text nor media."""
        return not self.text and not self.image and not self.video

    def is_text_only(self) -> bool:
        """Text and no media."""
        return bool(self.text) and not self.image and not self.video


class OpenAIFunctionParsedSchema(BaseModel):
    """A call as written: `arguments` is the JSON text."""

    name: str
    arguments: str


class OpenAIFunctionCallSchema(BaseModel):
    """A call with decoded arguments."""

    name: str
    arguments: dict[str, Any]

    @staticmethod
    def from_openai_function_parsed_schema(
        parsed_schema: OpenAIFunctionParsedSchema,
    ) -> tuple[OpenAIFunctionCallSchema, bool]:
        """Decode the arguments.

        Returns:
            The call, and whether decoding failed (the text was not a JSON object: arguments are then empty).
        """
        try:
            arguments = json.loads(parsed_schema.arguments)
        except ValueError:
            arguments = None
        failed = not isinstance(arguments, dict)
        return OpenAIFunctionCallSchema(name=parsed_schema.name, arguments={} if failed else arguments), failed


class OpenAIFunctionToolCall(BaseModel):
    """A call with its id."""

    id: str
    type: str = "function"
    function: OpenAIFunctionCallSchema
