"""Secrets never reach a file."""

from __future__ import annotations

import random
import time

import pytest
from planted_secrets import HARMLESS, HARMLESS_NAMED, RANDOM_SHAPES, draw, planted

from verl_mt.config.redact import RANDOM, REDACTED, is_secret_name, redact, redacted_keys


@pytest.mark.parametrize(
    "name",
    ["api_key", "apiKey", "X-API-KEY", "hf_token", "token", "password", "db_password", "client_secret", "Authorization",
     "wandb_api_key", "access_key", "secret_key", "bearer", "private_key", "auth", "X-Auth", "Cookie", "Set-Cookie",
     "wandb_key", "serper_key", "SERPAPI_KEY", "pat", "pass", "db_pass", "passcode", "pw", "account_sid", "webhook_url",
     "basic_auth", "oauth", "passphrase", "ssh_key", "api_keys", "auth_key", "cookies", "session_id", "sessionId",
     "aws_secret_access_key"],
)  # fmt: skip
def test_a_secrets_name_is_known(name):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    ["max_tokens", "token_ids", "num_tokens", "eos_token", "pad_token", "prompt_key", "key", "tokenizer_path",
     "max_new_tokens", "stop_token_ids", "ppo_max_token_len", "loss_agg_mode", "token_usage", "author", "authors_file",
     "tokenizer", "public_key", "answer_key", "api_key_file", "keys", "authority", "cookie_policy", "tokens", "bypass",
     "forward_pass", "path", "pattern", "sort_key", "reward_key", "passes"],
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


def test_bytes_and_long_numbers_under_a_secrets_name_are_hidden():
    given = {"api_key": b"abc", "password": 12345678, "pw": 7, "token": True, "seed": 12345678, "data": b"abc"}
    assert redact(given) == {**given, "api_key": REDACTED, "password": REDACTED}


def test_a_long_text_takes_linear_time():
    begun = time.process_time()
    for part in ("a", "eyJ", "x: 1\n", "curl ", '"a":', "-----BEGIN ", "12345678", "a1", "M", "key-", "a_", "Ab1-"):
        redact({"kwargs": {"x": part * (30_000 // len(part))}})
    assert time.process_time() - begun < 2.0


def test_what_was_redacted_is_found_again_and_nothing_else():
    given = {"a": [{"api_key": ["k", "l"]}], "stop": ["***"], "url": "http://u:p@h", "token": {"name": "***"}}
    assert redacted_keys(given) == []
    assert redacted_keys(redact(given)) == ["a[0].api_key[0]", "a[0].api_key[1]", "url"]


SECRET = "Zx81Qk77vW23pL90"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"api_key": SECRET}, {"api_key": "***"}),
        ({"headers": {"Authorization": f"Bearer {SECRET}"}}, {"headers": {"Authorization": "***"}}),
        (f"https://user:{SECRET}@host/v1", "https://user:***@host/v1"),
        ({"passwd": SECRET}, {"passwd": "***"}),
        ({"credential": SECRET}, {"credential": "***"}),
        ({"dsn": f"postgres://me:{SECRET}@db/x"}, {"dsn": "postgres://me:***@db/x"}),
        ({"aws_secret_access_key": SECRET}, {"aws_secret_access_key": "***"}),
        ({"bearer": SECRET}, {"bearer": "***"}),
        ({"private_key": SECRET}, {"private_key": "***"}),
        ({"auth": ["user", SECRET]}, {"auth": ["***", "***"]}),
        ({"headers": {"X-Auth": SECRET}}, {"headers": {"X-Auth": "***"}}),
        ({"headers": {"Cookie": f"session={SECRET}; theme=dark"}}, {"headers": {"Cookie": "***"}}),
        (f"https://h/v1?api_key={SECRET}&page=2", "https://h/v1?api_key=***&page=2"),
        (f"https://h/v1?page=2&token={SECRET}#top", "https://h/v1?page=2&token=***#top"),
        ({"note": f"sk-{SECRET}"}, {"note": "sk-***"}),
        ({"note": f"hf_{SECRET}"}, {"note": "hf_***"}),
        (["serve", f"--token={SECRET}", "--port=80"], ["serve", "--token=***", "--port=80"]),
        (["serve", "--api-key", SECRET, "--port", "80"], ["serve", "--api-key", "***", "--port", "80"]),
        (f"serve --port 80 --token {SECRET} --fast", "serve --port 80 --token *** --fast"),
        ([f"reward.kwargs.api_key={SECRET}", "data.seed=3"], ["reward.kwargs.api_key=***", "data.seed=3"]),
        ([f"X-Auth: {SECRET}", "Accept: text/plain"], ["X-Auth: ***", "Accept: text/plain"]),
        (f"call failed: Bearer {SECRET} was refused", "call failed: Bearer *** was refused"),
        (f"OpenAI said: key sk-proj-{SECRET} is wrong", "OpenAI said: key sk-*** is wrong"),
        (f"host=db user=me password={SECRET} port=5", "host=db user=me password=*** port=5"),
        (f"https://h/v1?key={SECRET}", "https://h/v1?key=***"),
        ({"git": f"ghp_{SECRET}"}, {"git": "ghp_***"}),
        (f'{{"api_key": "{SECRET}", "n": 1}}', '{"api_key": "***", "n": 1}'),
        (f"model: x\n  api_key: {SECRET}\nn: 1", "model: x\n  api_key: ***\nn: 1"),
        (f"curl -u me:{SECRET} https://h", "curl -u me:*** https://h"),
        (f"see AKIA{SECRET.upper()}", "see AKIA***"),
        (f"AIza{SECRET * 2}", "AIza***"),
        (f"github_pat_{SECRET}_{SECRET}", "github_pat_***"),
        (f"eyJ{SECRET}.eyJ{SECRET}.{SECRET}", "eyJ***"),
        (f"post to https://hooks.slack.com/services/T0/B0/{SECRET}", "post to https://hooks.slack.com/services/***"),
        (f"https://discord.com/api/webhooks/123/{SECRET}abcd", "https://discord.com/api/webhooks/***"),
        (f"https://h/x?X-Amz-Date=1&X-Amz-Signature={SECRET}", "https://h/x?X-Amz-Date=1&X-Amz-Signature=***"),
        (f"nvapi-{SECRET}-{SECRET}", "nvapi-***"),
        (f"xai-{SECRET}", "xai-***"),
        (f"gsk_{SECRET}", "gsk_***"),
        (f"r8_{SECRET}", "r8_***"),
        (f"tvly-{SECRET}", "tvly-***"),
        (f"sk_live_{SECRET}", "sk_live_***"),
        (f"npm_{SECRET * 2}", "npm_***"),
        (f"pypi-{SECRET * 2}", "pypi-***"),
        (f"SG.{SECRET}.{SECRET}", "SG.***"),
        (f"12345678:AA{SECRET * 2}x", "12345678:***"),
        (
            f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----",
            "-----BEGIN RSA PRIVATE KEY-----***-----END RSA PRIVATE KEY-----",
        ),
        ("sk-abcdefghijklmnopqrst", "sk-***"),
        ("sk-abc123", "sk-***"),
        ("hf_abc123", "hf_***"),
    ],
)
def test_a_secret_is_hidden_wherever_it_stands(given, shown):
    assert redact({"at": given}) == {"at": shown}
    assert redact(redact({"at": given})) == {"at": shown}
    assert redacted_keys({"at": given}) == [] and len(redacted_keys({"at": shown})) == (2 if "auth" in given else 1)


@pytest.mark.parametrize(
    "given",
    [
        {
            "max_tokens": "512",
            "tokenizer": "Qwen/Qwen3-8B",
            "author": "Ada",
            "authors_file": "AUTHORS",
            "eos_token": "</s>",
        },
        {"key": "prompt", "value": "answer", "prompt_key": "question", "columns": ["key", "value"], "sort_key": "id"},
        {"path": "data/hf_Qwen3/sk-2025-train.parquet", "format": "hf_model", "cache": "/home/me/hf_cache2/x1y2z3"},
        {"experiment_name": "hf_qwen3_8b_grpo", "project_name": "sk-learn-2", "model": "Qwen/Qwen2.5-0.5B-Instruct"},
        {"backend": "hf_transfer", "locale": "sk-SK", "library": "sk-learn", "name": "hf_mistral7b"},
        {"url": "http://host:8000/v1?max_tokens=5&key=prompt&page=2#key=3", "mail": "a@b.org"},
        {"prompt": "Write the answer as token=<answer>. The bearer of this key: none.", "text": "Password: "},
        {"custom_chat_template": "{% set image_token=x1 %}{{ bos_token }}{%- set auth='abc' %} --token abc"},
        {"api_key": "${oc.env:KEY}", "url": "https://h?token=${oc.env:T}", "words": ["--token=${oc.env:T}"]},
        {"words": ["--tokenizer=a/b", "--max-tokens", "5", "--token", "--fast", "tokens=3", "--author", "Ada"]},
        {"prompt": "eyJust a word, npm_install, xai-grok, gsk_model, SG.x, AKIA", "class": "pypi-server", "r8_rank": 2},
        {"schema": '{"token_count": "many", "author": "Ada"}', "text": "Note: password\nToken: none\nkey: value12345"},
        {"command": "docker run -u 1000:1000x/y --user me", "time": "12345678:30", "pass_k": "a", "pattern": "x"},
        {"stop": ["***", "a: ***", "x=***"], "rule": "***", "token": 7, "auth": None, "cookie": True, "secret": ""},
    ],
)
def test_what_is_no_secret_stays_readable(given):
    assert redact(given) == given and redacted_keys(given) == []


@pytest.mark.parametrize(("shape", "token"), planted().items(), ids=planted())
def test_a_token_of_a_known_service_is_hidden_in_every_place(shape, token):
    for given in ({"note": token}, {"note": f"the key {token} was refused"}, {"kwargs": {"a": [{"b": token}]}}):
        hidden = redact(given)
        assert token not in str(hidden)
        assert redact(hidden) == hidden and len(redacted_keys(hidden)) == 1


def test_harmless_texts_stay_readable_in_every_place():
    given = {"reward": {"kwargs": {"some": {f"at{k}": text for k, text in enumerate(HARMLESS)}, "tokens": HARMLESS}}}
    given |= {"kwargs": HARMLESS_NAMED, "texts": HARMLESS}
    assert redact(given) == given and redacted_keys(given) == []


@pytest.mark.slow
@pytest.mark.parametrize("shape", RANDOM_SHAPES)
def test_what_looks_random_is_hidden_in_settings_of_other_peoples_code(shape):
    drawn = [draw(shape, random.Random(k)) for k in range(300)]
    hidden = [redact({"kwargs": {"grader": {"x": text}}})["kwargs"]["grader"]["x"] for text in drawn]
    found = [f"kwargs[{k}]" for k, text in enumerate(drawn) if hidden[k] != text]
    assert len(found) >= 0.9 * len(drawn) and redacted_keys({"kwargs": hidden}) == found
    assert RANDOM not in str(redact({"experiment_name": drawn}))


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"reward": {"kwargs": {"grader": SECRET}}}, {"reward": {"kwargs": {"grader": RANDOM}}}),
        ({"engine_kwargs": {"a": {"b": [SECRET]}}}, {"engine_kwargs": {"a": {"b": [RANDOM]}}}),
        ({"config": {"salt": f"v1:{SECRET}"}}, {"config": {"salt": f"v1:{RANDOM}"}}),
        ({"policy_loss": {"loss_mode": "mine", "x": SECRET}}, {"policy_loss": {"loss_mode": "mine", "x": RANDOM}}),
        ({"tokens": ["<think>", SECRET], "keys": [SECRET]}, {"tokens": ["<think>", RANDOM], "keys": [RANDOM]}),
        ({"kwargs": {"revision": "9c46dd6066d109eabc6255188de91218b968826d"}},) * 2,
        ({"env": {"EXA": "pw", "lower": "pw"}}, {"env": {"EXA": "***", "lower": "pw"}}),
        ({"env_vars": {"JUDGE": SECRET, "HF_X": SECRET}}, {"env_vars": {"JUDGE": "***", "HF_X": RANDOM}}),
        ({"kwargs": {"environment": {"A": "x y"}}}, {"kwargs": {"environment": {"A": "***"}}}),
        ({"env": {"A": "${oc.env:A}", "B": "${oc.env:B,pw}"}}, {"env": {"A": "${oc.env:A}", "B": "***"}}),
        ({"api_key": f"${{oc.env:KEY,{SECRET}}}"}, {"api_key": "***"}),
    ],
)
def test_settings_of_other_peoples_code(given, shown):
    assert redact(given) == redact(redact(given)) == shown
    assert redacted_keys(given) == [] and bool(redacted_keys(shown)) == (given != shown)


def test_variables_that_anybody_may_know_stay_readable():
    known = {"OMP_NUM_THREADS": "8", "CUDA_VISIBLE_DEVICES": "0,1", "HF_HOME": "/data/hf", "PATH": "/bin:/usr/bin",
             "NCCL_SOCKET_IFNAME": "eth0", "WANDB_MODE": "offline", "MASTER_ADDR": "head"}  # fmt: skip
    plain = {"A": "1", "B": "true", "C": "~/x", "D": "http://host:80/v1", "E": "INFO", "F": ""}
    given = {"env": known | plain}
    assert redact(given) == given and redacted_keys(given) == []
    assert redact({"env": {"HF_TOKEN": "x", "VLLM_API_KEY": "y"}}) == {
        "env": {"HF_TOKEN": "***", "VLLM_API_KEY": "***"}
    }


def test_a_separator_of_stars_is_no_hidden_value():
    given = {"reward": {"kwargs": {"separator": "***", "prompt": "**very** ***bold***"}}}
    assert redact(given) == given and redacted_keys(given) == []
