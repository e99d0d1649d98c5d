"""Secrets never reach a file."""

from __future__ import annotations

import pytest

from verl_mt.config.redact import REDACTED, is_secret_name, redact, redacted_keys


@pytest.mark.parametrize(
    "name",
    ["api_key", "apiKey", "X-API-KEY", "hf_token", "token", "password", "db_password", "client_secret", "Authorization",
     "wandb_api_key", "access_key", "secret_key", "bearer"],
)  # fmt: skip
def test_a_secrets_name_is_known(name):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    ["max_tokens", "token_ids", "num_tokens", "eos_token", "pad_token", "prompt_key", "key", "tokenizer_path",
     "max_new_tokens", "stop_token_ids", "ppo_max_token_len", "loss_agg_mode", "token_usage"],
)  # fmt: skip
def test_what_only_sounds_like_a_secret_stays(name):
    assert not is_secret_name(name)


def test_redaction_goes_to_any_depth_and_leaves_everything_else():
    given = {
        "a": [{"api_key": "k", "max_tokens": 5}, ("x", {"hf_token": "t"})],
        "headers": {"Authorization": "Bearer x", "X-API-KEY": "y"},
        "password": None,
        "token": 7,
        "secret": "",
        "wandb": {"api_key": "${oc.env:WANDB_API_KEY}"},
    }
    assert redact(given) == {
        "a": [{"api_key": REDACTED, "max_tokens": 5}, ["x", {"hf_token": REDACTED}]],
        "headers": {"Authorization": REDACTED, "X-API-KEY": REDACTED},
        "password": None,
        "token": 7,
        "secret": "",
        "wandb": {"api_key": "${oc.env:WANDB_API_KEY}"},
    }
    assert given["headers"]["Authorization"] == "Bearer x"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://user:pw@host:80/x", "http://user:***@host:80/x"),
        ("http://user:p@w:1@host", "http://user:***@host"),
        ("redis://:pw@host/0", "redis://:***@host/0"),
        ("a=https://u:p@h/ b=https://v:q@g/", "a=https://u:***@h/ b=https://v:***@g/"),
        ("http://user:${oc.env:PW}@host", "http://user:${oc.env:PW}@host"),
        ("http://host:8000/v1?mail=a@b.org", "http://host:8000/v1?mail=a@b.org"),
        ("http://[::1]:8000/a@b", "http://[::1]:8000/a@b"),
        ("verl_mt://tiny", "verl_mt://tiny"),
        ("who: me@example.org", "who: me@example.org"),
    ],
)
def test_the_password_of_a_url_is_hidden_in_any_value(text, shown):
    assert redact({"url": [text]}) == {"url": [shown]}


def test_what_was_redacted_is_found_again_and_nothing_else():
    given = {"a": [{"api_key": ["k", "l"]}], "stop": ["***"], "url": "http://u:p@h", "token": {"name": "***"}}
    assert redacted_keys(given) == []
    assert redacted_keys(redact(given)) == ["a[0].api_key[0]", "a[0].api_key[1]", "url"]
