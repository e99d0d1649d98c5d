"""From an episode to the request that a scheduler gets."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from verl_mt.data.conversation import Message
from verl_mt.data.media import KINDS, Kind, parts_of
from verl_mt.data.placeholders import has_places, place_media
from verl_mt.data.requests import RolloutInferRequest
from verl_mt.errors import DataError
from verl_mt.rollout.doors import Episode

_OWN_COLUMNS = ("prompt", "messages", "images", "audios", "videos", "tools", "objects", "data_dict")


def make_request(episode: Episode) -> RolloutInferRequest:
    """A request of its own for one trajectory: messages, media and the row's other columns in `data_dict`.

    Raises:
        DataError: the row's column `data_dict` or `objects` is no mapping.
    """
    session = episode.session
    return RolloutInferRequest(
        messages=copy.deepcopy(session.messages),
        images=_media(episode, "image"),
        videos=_media(episode, "video"),
        tools=copy.deepcopy(session.trajectory.tools) or None,
        objects=_mapping(episode, "objects"),
        data_dict=_data_dict(episode),
        uuid=session.trajectory.trajectory_id,
    )


def show_new_media(request: RolloutInferRequest, shown: Sequence[Message]) -> None:
    """Put images and videos that a scheduler added to its request into the places `<image>` and `<video>` of the
    messages that it added. New messages without a place stay as they are: they may also hold parts with images.

    Args:
        request: its messages are changed in place.
        shown: the conversation so far; its images are the first ones of the request's.

    Raises:
        DataError: not as many places as new items; says both numbers.
    """
    new = request.messages[len(shown) :]
    if not has_places(new):
        return
    seen = [kind for kind, _ in parts_of(shown)]
    columns = {f"{kind}s": list(getattr(request, f"{kind}s"))[seen.count(kind) :] for kind in KINDS}
    request.messages[len(shown) :] = place_media(new, columns, "the messages that were added")


def _data_dict(episode: Episode) -> dict[str, Any]:
    """The row's columns that a conversation has no field for, nulls dropped; its own `data_dict` wins over them."""
    row = episode.prompt.row
    columns = {k: v for k, v in row.raw.items() if k not in _OWN_COLUMNS and v is not None}
    if row.ground_truth is not None:
        columns.setdefault("solution", row.ground_truth)
    return copy.deepcopy({**columns, **_mapping(episode, "data_dict")})


def _media(episode: Episode, kind: Kind) -> list[Any]:
    """Those of the prompt, a path beside the data file as a whole path; else what the row's column holds."""
    shown = [value for k, value in parts_of(episode.session.messages) if k == kind]
    value = shown or episode.prompt.row.raw.get(f"{kind}s")
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _mapping(episode: Episode, column: str) -> dict[str, Any]:
    row = episode.prompt.row
    value = row.raw.get(column)
    if value is not None and not isinstance(value, dict):
        raise DataError(f"{row.file}, row {row.index}: column {column} must be a mapping, got {value!r:.100}")
    return copy.deepcopy(value or {})
