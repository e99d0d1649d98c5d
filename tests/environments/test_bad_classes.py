"""What a class says wrongly about itself is one error before anything is sampled, with its file, line and name."""

from __future__ import annotations

from typing import Any

import pytest
from environment_lab import environments_of

from verl_mt import Environment
from verl_mt.config.rollout import EnvironmentConfig
from verl_mt.environments.kinds import build_environments
from verl_mt.errors import ConfigError, DataError, PluginError
from verl_mt.tools.function_tool import function_tool
from verl_mt.tools.toolset import ToolSet


class Good(Environment):
    def reset(self, **row: Any) -> str:
        return "go"

    def look(self) -> str:
        """Look."""
        return ""


class NoReset(Environment):
    def look(self) -> str:
        """Look."""
        return ""


class NoHints(Good):
    def move(self, where) -> str:
        """Move.

        Args:
            where: where to
        """
        return where


class NoDocstring(Good):
    def move(self, where: str) -> str:
        return where


class AnyArguments(Good):
    def move(self, *where: str) -> str:
        """Move."""
        return ""


class Twice(Good):
    def move(self) -> str:
        """Move."""
        return ""

    def move(self) -> str:  # type: ignore[no-redef]  # noqa: F811
        """Move on."""
        return ""


class ToolNamedState(Good):
    def state(self, city: str) -> str:
        """Say in which state a city lies.

        Args:
            city: which
        """
        return city


class ToolNamedScore(Good):
    score = 3


class ToolNamedLimit(Good):
    def limit(self) -> str:  # type: ignore[override]
        """Say the limit."""
        return ""


class NoObjects(Good):
    limit = 0


class DoneIsAMethod(Good):
    def done(self) -> bool:  # type: ignore[override]
        return True


class Static(Good):
    @staticmethod
    def move() -> str:
        """Move."""
        return ""


class ReplyWithoutText(Good):
    def reply(self) -> str:
        return ""


class BrokenSchemas(Good):
    @classmethod
    def tool_schemas(cls, **config: Any) -> Any:
        raise RuntimeError("no server")


class SchemasOfAnotherForm(Good):
    @classmethod
    def tool_schemas(cls, **config: Any) -> Any:
        return [{"name": "x"}]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (NoReset, r"\(NoReset\) has no reset\(self, \*\*row\)"),
        (NoHints, r"\(NoHints\.move\): no tool schema can be made: .*where"),
        (NoDocstring, r"\(NoDocstring\.move\): no tool schema can be made"),
        (AnyArguments, r"\(AnyArguments\.move\): argument \*where: .* cannot be shown to a model"),
        (Twice, r"\(Twice\) has two tools named 'move', in its lines \d+ and \d+"),
        (
            ToolNamedState,
            r"\(ToolNamedState\.state\): 'state' is reserved and takes no argument beside self\. Give your",
        ),
        (ToolNamedScore, r"ToolNamedScore.*'score' is reserved"),
        (ToolNamedLimit, r"\(ToolNamedLimit\.limit\): 'limit' is reserved"),
        (NoObjects, r"\(NoObjects\): 'limit' is reserved and cannot be 0"),
        (DoneIsAMethod, r"\(DoneIsAMethod\.done\): `done` is a method\. Write @property above it, or set self\.done"),
        (Static, r"\(Static\.move\): a staticmethod sees no trajectory\. Write a method"),
        (
            ReplyWithoutText,
            r"\(ReplyWithoutText\.reply\): 'reply' is reserved and takes one argument, the model's text",
        ),
        (BrokenSchemas, r"\(BrokenSchemas\.tool_schemas\) raised RuntimeError: no server"),
        (SchemasOfAnotherForm, r"SchemasOfAnotherForm\.tool_schemas is not an OpenAI tool schema"),
    ],
)
def test_a_class_that_cannot_be_played_is_refused(kind, text):
    with pytest.raises(PluginError, match=text) as caught:
        environments_of(kind)
    if kind not in (ToolNamedScore, SchemasOfAnotherForm):
        assert "test_bad_classes.py:" in str(caught.value)


def test_a_tool_of_the_run_with_the_name_of_a_method_is_refused():
    @function_tool
    def look(word: str) -> str:
        """Look.

        Args:
            word: what
        """
        return word

    with pytest.raises(PluginError, match=r"\.py:\d+ \(Good\.look\): a tool named 'look' exists already"):
        environments_of(Good, ToolSet([look]))


class WantsALevel(Good):
    def __init__(self, level: int):
        self.level = level

    def reset(self, seed: int, **row: Any) -> str:
        return f"level {self.level}"


def test_a_column_that_the_constructor_or_reset_wants_is_named():
    environments = environments_of(WantsALevel)
    with pytest.raises(DataError, match=r"\(WantsALevel\.__init__\) wants 'level', .*or set .*config\.level.*: seed"):
        environments.of_row({}, {"seed": 1})
    with pytest.raises(DataError, match=r"\(WantsALevel\.reset\) wants 'seed', which the row has not"):
        environments.of_row({}, {"level": 1})
    assert environments.of_row({}, {"level": 1, "seed": 2}).names == ["look"]
    assert environments.kind_of({}).config_of({"level": 1, "seed": 2}) == {"level": 1}


@pytest.mark.parametrize("named", [{"default": Good}, {"a": {"path": "x", "limit": 3}}, {"a": {"config": {}}}])
def test_named_environments_of_another_form_are_refused(named):
    with pytest.raises(ConfigError, match=r"environment\.named\.\w+: got .*Expected a path, or"):
        build_environments(EnvironmentConfig(named=named), None, 1.0)


def test_a_row_whose_environment_is_no_name_is_refused():
    environments = environments_of({"good": Good})
    with pytest.raises(DataError, match=r"column environment must be a name, or \{name: \.\.\., .*, got 3"):
        environments.kind_of({"environment": 3})
    with pytest.raises(DataError, match=r"column environment: unknown key 'path'\. Known: name, config"):
        environments.kind_of({"environment": {"path": "x"}})
