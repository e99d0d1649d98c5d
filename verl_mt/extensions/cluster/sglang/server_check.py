"""Is a running server the one that the configuration describes? Asked before any training step."""

from __future__ import annotations

from typing import Any

import httpx

from verl_mt.errors import ConfigError
from verl_mt.extensions.cluster.replicas.servers import KEY, ServerClient, fetch, require_same_model
from verl_mt.extensions.cluster.sglang.options import SGLangOptions, other_sampling
from verl_mt.extensions.cluster.versions import SGLANG

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


async def check_server(
    http: httpx.AsyncClient, client: type[ServerClient], options: SGLangOptions, *, empty: bool = False
) -> dict[str, Any]:
    """Compare a server with what is wanted: its version, its calls, its model, its longest sequence. A version that is
    not the one that was tested, but may do, is a warning.

    Args:
        http: connected to the server.
        client: its class.
        options: what it must be.
        empty: it was launched here, and has no weights until the first update.

    Returns:
        What `/model_info` says, and the server's `device`, `tp_size` and `max_running_requests` (None = it does not
        tell).

    Raises:
        ConfigError: names the server, what it has, what is wanted and what to do.
        httpx.HTTPError: it does not answer.
    """
    url = str(http.base_url).rstrip("/")
    info = await fetch(http, client, "/model_info")
    server = await fetch(http, client, "/server_info")
    SGLANG.check(server.get("version"), f"{KEY}: {url} runs")
    await _check_calls(http, url)
    require_same_model(url, info.get("model_path") or "", info.get("architectures"), options.model_path)
    _check_lengths(url, server, options.max_model_len)
    for name, reason in other_sampling(server | ({"load_format": "auto"} if empty else {})):
        flag = "--" + name.replace("_", "-")
        raise ConfigError(f"{KEY}: {url} was started with {flag} {server[name]}: {reason}. Start it without {flag}")
    state = (server.get("internal_states") or [{}])[0]
    takes = state.get("effective_max_running_requests_per_dp") or server.get("max_running_requests")
    return info | {key: server.get(key) for key in ("device", "tp_size")} | {"max_running_requests": takes}


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
            f"{KEY}: {url} lacks the calls {', '.join(missing)}: its SGLang is too old or too new. Start "
            f"{SGLANG.newest} there"
        )


def _check_lengths(url: str, server: dict[str, Any], max_model_len: int) -> None:
    # What SGLang takes as input is a few tokens less than its context, and less still where its cache is small.
    longest_input = server.get("max_req_input_len")
    if longest_input is None and server.get("context_length") is not None:
        longest_input = server["context_length"] - _RESERVED
    if longest_input is not None and longest_input < max_model_len - 1:
        raise ConfigError(
            f"{KEY}: {url} takes at most {longest_input} tokens of input, too few for sequences of {max_model_len} "
            f"(prompt and response): start it with --context-length {max_model_len + _RESERVED} (and a cache that "
            "holds them), or lower data.max_prompt_length, rollout.response_length or rollout.max_model_len"
        )
