"""Schemas and responses of tools, under the names that verl's tool files import from `verl.tools.schemas`."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, field_validator

from verl_mt.data.conversation import (
    OpenAIFunctionParametersSchema,
    OpenAIFunctionPropertySchema,
    OpenAIFunctionSchema,
    OpenAIFunctionToolSchema,
    ToolSchema,
)

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
]


class ToolResponse(BaseModel):
    """What a tool answers. A text model is told of images and videos only that it cannot see them.

    Images are in any of the forms of `verl_mt.data.media`; a video is a list of them.
    """

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    @field_validator("image", "video", mode="before")
    @classmethod
    def _must_be_a_list(cls, value: Any) -> Any:
        if value is not None and not isinstance(value, list):
            raise ValueError(f"must be a list even for one item, got {type(value).__name__}; write [item]")
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
