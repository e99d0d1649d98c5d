"""OpenEnv: environments of a real server, with a session for each conversation."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from environment_lab import call, play, words_of
from two_steps import RO, train_two_steps

from verl_mt.data.trajectory import StopReason
from verl_mt.environments.kinds import build_kind
from verl_mt.errors import ConfigError, PluginError
from verl_mt.extensions.environments.check import check

pytest.importorskip("openenv", reason="needs the package openenv")
pytestmark = pytest.mark.slow


def wishes(*, num_rows: int, seed: int, split: str) -> list[dict[str, object]]:
    """Rows for an environment whose `reset` says nothing."""
    return [{"seed": k, "prompt": "Buy a pen."} for k in range(8)]


SERVER = Path(__file__).with_name("openenv_server.py")


@pytest.fixture(scope="module")
def server() -> Iterator[Callable[[str], str]]:
    """Kind -> the address of a server that runs."""
    running: dict[str, tuple[subprocess.Popen[str], str]] = {}

    def start(kind: str) -> str:
        if kind not in running or running[kind][0].poll() is not None:
            process = subprocess.Popen([sys.executable, str(SERVER), kind], stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None
            running[kind] = process, f"http://127.0.0.1:{process.stdout.readline().strip()}"
        return running[kind][1]

    yield start
    for process, _ in running.values():
        process.kill()
        process.communicate()


def test_a_text_is_the_action_where_the_action_is_one_text_and_each_conversation_has_a_session(server):
    kind = build_kind("openenv", {"url": server("guess"), "shown": "text"})
    turns = {"00": ["1", "2", "3", "never"], "01": ["3", "never"]}
    first, second = play(kind.cls, turns, {"seed": 1, "n": 3, "prompt": []}, n=2, config=kind.config)
    assert words_of(first)[0] == ("user", "Guess a number from 1 to 9. ['n']"), first.error
    assert words_of(first)[1:] == [
        ("assistant", "1"), ("user", "wrong"), ("assistant", "2"), ("user", "wrong"), ("assistant", "3"),
    ]  # fmt: skip
    assert (first.reward, second.reward) == (1.0, 1.0) and second.num_turns == 1 and first.turn_scores == [0, 0, 1.0]
    assert {first.stop_reason, second.stop_reason} == {StopReason.ENVIRONMENT}


def test_an_action_with_fields_is_a_tool(server):
    kind = build_kind("openenv", {"url": server("grid")})
    (done,) = play(kind.cls, [call("step", east=2, north=1)] * 3, {"seed": 1}, config=kind.config)
    assert [t["function"]["name"] for t in done.tools] == ["step"] and done.reward == 0.75, done.error
    assert words_of(done)[2] == ("tool", '{"text": "moved", "left": 3}')
    assert set(done.tools[0]["function"]["parameters"]["properties"]) == {"east", "north"}


def test_the_servers_mcp_tools_are_the_models_tools_and_its_error_is_the_models_mistake(server):
    kind = build_kind("openenv", {"url": server("shop")})
    prompt = [{"role": "user", "content": "Buy."}]
    turns = [call("add", item="pen") + call("add", item="gold"), call("add", item="ink"), "done"]
    (done,) = play(kind.cls, turns, {"seed": 1}, prompt=prompt, config=kind.config)
    assert [c for r, c in words_of(done) if r == "tool"][::2] == ["pen", "pen, ink"], done.error
    assert "no gold here" in words_of(done)[3][1] and words_of(done)[3][1].startswith("<error>")
    assert done.reward == 1.0 and done.counters["tools/add/model_errors"] == 1


def test_a_server_that_dies_fails_the_episode_and_is_not_silently_another(server):
    url = server("guess")
    kind = build_kind("openenv", {"url": url})
    (failed,) = play(kind.cls, ["die", "1"], {"seed": 1}, config=kind.config)
    assert failed.stop_reason is StopReason.ERROR and "(OpenEnv.reply) of trajectory" in failed.error
    assert server("guess") != url
    with pytest.raises(PluginError, match=r"OpenEnv server http://127\.0\.0\.1:1 cannot be used"):
        build_kind("openenv", {"url": "http://127.0.0.1:1"})


def test_an_address_is_wanted():
    with pytest.raises(ConfigError, match=r"environment\.config\.url is not set"):
        build_kind("openenv", {})


def test_a_call_that_was_given_up_is_the_end_of_its_session(server):
    kind = build_kind("openenv", {"url": server("shop")})
    prompt = [{"role": "user", "content": "Buy."}]
    turns = [call("add", item="slow"), call("add", item="pen"), "done"]
    (failed,) = play(kind.cls, turns, {"seed": 1}, prompt=prompt, config=kind.config, timeout_s=0.3)
    texts = [c for r, c in words_of(failed) if r == "tool"]
    assert "timed out after 0.3 s" in texts[0] and "so the episode failed" in texts[1]
    assert "(OpenEnv.score) of trajectory" in failed.error


@pytest.mark.parametrize("kind", ["guess", "shop"])
def test_it_is_trained_for_two_steps(server, tmp_path, kind):
    rows = {"guess": [], "shop": [f"data.train_files={__file__}:wishes"]}[kind]
    train_two_steps(
        tmp_path, f"{RO}.environment.path=openenv", f"{RO}.environment.config={{url: '{server(kind)}'}}", *rows
    )


def test_env_check_raises_no_alarm(server):
    lines = check("openenv", {"url": server("guess")})
    assert [line for line in lines if line.verdict == "wrong"] == []
