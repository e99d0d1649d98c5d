"""Environments of other libraries: Gymnasium, TRL, reasoning_gym, TextArena."""

from __future__ import annotations

import pytest
from environment_lab import call, environments_of, play, words_of
from two_steps import RO, train_two_steps

from verl_mt.data.trajectory import StopReason
from verl_mt.environments.kinds import build_kind
from verl_mt.errors import ConfigError, DataError, PluginError
from verl_mt.extensions.environments.reasoning import ReasoningGym

CLOSED: list[str] = []


class Bandit:
    """In Gymnasium's manner, without Gymnasium."""

    def __init__(self, arms: int):
        self.arms = arms

    def reset(self, seed=None, options=None):
        self.best = (seed or 0) % self.arms
        return f"Choose one of {self.arms} arms.", {}

    def step(self, action):
        right = action.strip() == str(self.best)
        return ("right" if right else "wrong"), 1.0 if right else -0.25, right, False, {}

    def close(self):
        CLOSED.append("bandit")


@pytest.fixture(autouse=True)
def _fresh():
    CLOSED.clear()


def test_a_class_in_gymnasiums_manner_is_played_in_text():
    (done,) = play(Bandit, ["1", "2", "never"], {"seed": 7}, config={"arms": 5})
    assert words_of(done) == [
        ("user", "Choose one of 5 arms."), ("assistant", "1"), ("user", "wrong"), ("assistant", "2"),
    ]  # fmt: skip
    assert done.reward == 0.75 and done.turn_scores == [-0.25, 1.0] and done.stop_reason is StopReason.ENVIRONMENT
    assert done.info["environment"]["name"] == "Bandit" and CLOSED == ["bandit"]


def test_what_a_wrapped_constructor_does_not_take_or_lacks_is_said_before_anything_is_sampled():
    with pytest.raises(ConfigError, match=r"test_adapters\.py:\d+ \(Bandit\) takes no 'arm'; did you mean 'arms'\."):
        environments_of(Bandit, config={"arm": 5})
    with pytest.raises(DataError, match=r"wants 'arms', which the row has not\. Add .* or set .*config\.arms"):
        environments_of(Bandit).kind_of({}).check_row({})


def test_a_registered_gymnasium_environment_takes_numbers_as_actions():
    pytest.importorskip("gymnasium", reason="needs the package gymnasium")
    kind = build_kind("gymnasium", {"env": "FrozenLake-v1", "is_slippery": False, "render_mode": "ansi"})
    turns = ["I go.", "down: 1", "1", "2", "2", "1", "9", "2"]
    (done,) = play(kind.cls, turns, {"seed": 3}, config=kind.config)
    assert "SFFF" in words_of(done)[0][1].replace("\x1b[41mS\x1b[0m", "S")
    assert [c for r, c in words_of(done) if r == "user"][1] == "That is no action. Write a whole number from 0 to 3."
    assert done.reward == 1.0 and done.num_turns == 8, words_of(done)


def test_a_subclass_of_gymnasium_env_is_known_by_itself():
    gymnasium = pytest.importorskip("gymnasium", reason="needs the package gymnasium")

    class Text(gymnasium.Env):
        action_space = gymnasium.spaces.Text(10)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return f"say {seed}", {}

        def step(self, action):
            return "", float(action == "3"), True, False, {}

    (done,) = play(Text, ["3"], {"seed": 3})
    assert done.reward == 1.0 and words_of(done)[0] == ("user", "say 3")


class CounterEnv:
    """As a user of TRL writes it for `environment_factory`."""

    def reset(self, **kwargs) -> str | None:
        self.value, self.reward = 0, 0.0
        return " Count to three."

    def increment(self, step: int) -> str:
        """
        Increase the counter.

        Args:
            step: How much to add.

        Returns:
            The new value.
        """
        self.value += step
        self.reward = float(self.value == 3)
        return str(self.value)

    async def look(self) -> str:
        """Say the value."""
        return f"it is {self.value}"

    def _hidden(self):
        raise AssertionError


class ScoredEnv(CounterEnv):
    def get_reward(self) -> float:
        return -1.0

    def close(self) -> None:
        CLOSED.append("scored")


def test_a_class_for_trls_environment_factory_runs_unchanged():
    prompt = [{"role": "user", "content": "Hello."}]
    turns = [call("increment", step=1) + call("look"), call("increment", step=2), "done"]
    (done,) = play(CounterEnv, turns, {"prompt": prompt}, prompt=prompt)
    assert words_of(done)[0] == ("user", "Hello.\n\n Count to three.")
    assert [c for r, c in words_of(done) if r == "tool"] == ["1", "it is 1", "3"] and done.reward == 1.0
    assert [tool["function"]["name"] for tool in done.tools] == ["increment", "look"]
    (done,) = play(ScoredEnv, ["done"], {"prompt": prompt}, prompt=prompt)
    assert done.reward == -1.0 and CLOSED == ["scored"]


def test_trls_images_are_added_to_the_rows_last_message():
    class Draws(CounterEnv):
        def reset(self, **kwargs):
            super().reset()
            return [{"type": "text", "text": "and look"}]

    (done,) = play(Draws, ["done"], {"prompt": "Hello."}, prompt=[{"role": "user", "content": "Hello."}])
    parts = [{"type": "text", "text": "Hello."}, {"type": "text", "text": "and look"}]
    assert done.messages[0] == {"role": "user", "content": parts}


def test_a_method_of_trls_without_hints_is_refused_by_name():
    class Untyped(CounterEnv):
        def step(self, by) -> str:
            """Step.

            Args:
                by: how far
            """
            return ""

    with pytest.raises(PluginError, match=r"Untyped\.step: no tool schema can be made"):
        environments_of(Untyped)


def test_reasoning_gyms_families_score_their_own_answers():
    pytest.importorskip("reasoning_gym", reason="needs the package reasoning-gym")
    kind = build_kind("reasoning_gym", {"task": "spell_backward", "max_word_len": 5})
    turns = {"00": ["thinking <answer>x</answer>"], "01": [""]}
    done = play(kind.cls, turns, {"seed": 7}, n=2, config=kind.config)
    question = words_of(done[0])[0][1]
    assert question == words_of(done[1])[0][1] and done[0].reward < 1.0
    (right,) = play(kind.cls, [f"<answer>{question.split()[-1][::-1]}</answer>"], {"seed": 7}, config=kind.config)
    assert right.reward == 1.0 and right.stop_reason is StopReason.ENVIRONMENT and right.num_turns == 1
    assert words_of(play(kind.cls, ["x"], {"seed": 8}, config=kind.config)[0])[0][1] != question


def test_textarenas_games_show_only_what_is_new():
    pytest.importorskip("textarena", reason="needs the package textarena")
    kind = build_kind("textarena", {"game": "FrozenLake-v0"})
    (done,) = play(kind.cls, ["[right]", "[up]", "[up]", "[up]"], {"seed": 3}, config=kind.config)
    users = [c for r, c in words_of(done) if r == "user"]
    assert users[0].startswith("Welcome to Frozen Lake!") and users[1].startswith("You moved right")
    assert done.stop_reason is StopReason.ENVIRONMENT and done.error is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "path", "config"),
    [
        (None, f"{__file__}:Bandit", "{arms: 3}"),
        (None, f"{__file__}:CounterEnv", "{}"),
        ("gymnasium", "gymnasium", "{env: FrozenLake-v1, render_mode: ansi}"),
        ("reasoning_gym", "reasoning_gym", "{task: spell_backward}"),
        ("textarena", "textarena", "{game: FrozenLake-v0}"),
    ],
)
def test_each_is_trained_for_two_steps(tmp_path, package, path, config):
    if package is not None:
        pytest.importorskip(package, reason=f"needs the package {package}")
    train_two_steps(tmp_path, f"{RO}.environment.path={path}", f"{RO}.environment.config={config}")


def test_the_answer_of_reasoning_gym_may_stand_in_another_form():
    for pattern, said in (("#### (", "is no regular expression"), ("####", "has 0 groups. It needs one")):
        with pytest.raises(PluginError, match=said):
            ReasoningGym("chain_sum", answer_pattern=pattern)
    pytest.importorskip("reasoning_gym", reason="needs the package reasoning-gym")
    config = {"task": "chain_sum", "max_terms": 2, "max_digits": 1}
    answer = ReasoningGym(**config)
    answer.reset(seed=1)
    told = f"#### {answer._entry['answer']}"
    for changed, right in (({"answer_pattern": r"#### *(\S+)"}, True), ({}, False)):
        (done,) = play(ReasoningGym, [told], {"seed": 1}, config=config | changed)
        assert (done.reward == 1.0) is right
