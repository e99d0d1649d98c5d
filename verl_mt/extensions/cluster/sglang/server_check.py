"""Is a running server the one that the configuration describes? Asked before any training step."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import httpx

from verl_mt.errors import ConfigError
from verl_mt.extensions.cluster.sglang.options import SGLangOptions, other_sampling

_log = logging.getLogger(__name__)
_KEY = "actor_rollout_ref.rollout.servers"
TESTED = "0.5.23"
_FIRST = (0, 5, 21)
"""The first version with `/begin_weight_update`."""
_CALLS = (
    "/generate",
    "/abort_request",
    "/pause_generation",
    "/continue_generation",
    "/begin_weight_update",
    "/end_weight_update",
    "/update_weights_from_tensor",
    "/update_weights_from_disk",
    "/update_weights_from_distributed",
    "/init_weights_update_group",
)
_RESERVED = 6
"""Positions that SGLang keeps back from its context length."""
_SHAPE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
)


async def check_server(http: httpx.AsyncClient, url: str, options: SGLangOptions) -> dict[str, Any]:
    """Compare a server with what is wanted: its version, its calls, its model, its longest sequence. A version that is
    not the one that was tested, but may do, is a warning.

    Returns:
        What `/model_info` says, and the server's `device`, `tp_size` and `max_running_requests` (None = it does not
        tell).

    Raises:
        ConfigError: names the server, what it has, what is wanted and what to do.
        httpx.HTTPError: it does not answer.
    """
    info = await _get(http, url, "/model_info")
    server = await _get(http, url, "/server_info")
    _check_version(url, server.get("version"))
    await _check_calls(http, url)
    _check_model(url, info, options.model_path)
    _check_lengths(url, server, options.max_model_len)
    for name, reason in other_sampling(server):
        flag = "--" + name.replace("_", "-")
        raise ConfigError(f"{_KEY}: {url} was started with {flag} {server[name]}: {reason}. Start it without {flag}")
    state = (server.get("internal_states") or [{}])[0]
    takes = state.get("effective_max_running_requests_per_dp") or server.get("max_running_requests")
    return info | {key: server.get(key) for key in ("device", "tp_size")} | {"max_running_requests": takes}


async def _get(http: httpx.AsyncClient, url: str, path: str) -> dict[str, Any]:
    response = await http.get(path)
    if response.status_code in (401, 403):
        raise ConfigError(f"{_KEY}: {url} wants a key ({response.status_code}): put it in the variable SGLANG_API_KEY")
    if response.status_code != 200:
        raise ConfigError(
            f"{_KEY}: {url}{path} answers with status {response.status_code}; is that an SGLang server ({TESTED})?"
        )
    try:
        answer = response.json()
    except json.JSONDecodeError:
        answer = None
    if not isinstance(answer, dict):
        raise ConfigError(f"{_KEY}: {url}{path} answers with something else than JSON; is that an SGLang server?")
    return answer


def _check_version(url: str, version: str | None) -> None:
    if version is None or version == TESTED:
        return  # what says nothing of its version is judged by its calls
    numbers = tuple(map(int, re.findall(r"\d+", version)[:3]))
    if (0, 0, 0) < numbers < _FIRST:  # a checkout without tags calls itself 0.0.0
        raise ConfigError(
            f"{_KEY}: {url} runs SGLang {version}, which does not take new weights the way that verl_mt sends them "
            f"(/begin_weight_update, since {'.'.join(map(str, _FIRST))}); start {TESTED} there"
        )
    _log.warning("%s: %s runs SGLang %s; verl_mt is tested with %s", _KEY, url, version, TESTED)


async def _check_calls(http: httpx.AsyncClient, url: str) -> None:
    response = await http.get("/openapi.json")
    if response.status_code == 200:
        paths = response.json().get("paths", {})
        missing = [call for call in _CALLS if call not in paths]
    else:
        # The list is switched off. A path that exists refuses the method OPTIONS, and does nothing.
        missing = [call for call in _CALLS if (await http.options(call)).status_code == 404]
    if missing:
        raise ConfigError(
            f"{_KEY}: {url} lacks the calls {', '.join(missing)}: its SGLang is too old or too new; start {TESTED} "
            "there"
        )


def _check_model(url: str, info: dict[str, Any], wanted: str) -> None:
    """By the two folders' config.json where both are on this machine, else by the architecture."""
    served = info.get("model_path") or ""
    if served == wanted:
        return
    want, have = _config_of(wanted), _config_of(served)
    if want is not None and have is not None:
        different = [key for key in ("architectures", *_SHAPE) if want.get(key) != have.get(key)]
        if not different:
            return
        what = ", ".join(f"{key} {have.get(key)} instead of {want.get(key)}" for key in different[:3])
    elif want is not None and info.get("architectures") is not None:
        if want.get("architectures") == info["architectures"]:
            return
        what = f"architectures {info['architectures']} instead of {want.get('architectures')}"
    else:
        what = "it cannot be told from here whether they are the same"
    raise ConfigError(
        f"{_KEY}: {url} was started with another model: {served!r}, but actor_rollout_ref.model.path is {wanted!r} "
        f"({what}); start the server with that model"
    )


def _config_of(path: str) -> dict[str, Any] | None:
    file = Path(path) / "config.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def _check_lengths(url: str, server: dict[str, Any], max_model_len: int) -> None:
    # What SGLang takes as input is a few tokens less than its context, and less still where its cache is small.
    longest_input = server.get("max_req_input_len")
    if longest_input is None and server.get("context_length") is not None:
        longest_input = server["context_length"] - _RESERVED
    if longest_input is not None and longest_input < max_model_len - 1:
        raise ConfigError(
            f"{_KEY}: {url} takes at most {longest_input} tokens of input, too few for sequences of {max_model_len} "
            f"(prompt and response): start it with --context-length {max_model_len + _RESERVED} (and a cache that "
            "holds them), or lower data.max_prompt_length, rollout.response_length or rollout.max_model_len"
        )
