"""The doctor checks the configured environment as `verl-mt env check` does."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_mt.config.compose import compose
from verl_mt.extensions.inspection.doctor import checks

LEAKS = Path(__file__).parents[1] / "environments" / "leaks.py"
RO = "actor_rollout_ref.rollout"
WANTED = {"plug-ins and trackers", "forgotten keys", "tools", "rows", "environment", "reward", "validation rows"}


def findings_of(name: str) -> dict[str, list]:
    config = compose(
        [
            f"{RO}.environment.path={LEAKS}:{name}", f"{RO}.tool_kwargs.tools_config_file=null",
            "data.train_files=verl_mt.environments.seeds:rows", "data.val_files=verl_mt.environments.seeds:rows",
        ]
    )  # fmt: skip
    found: dict[str, list] = {}
    for finding in checks.examine(config, [check for check in checks.CHECKS if check.name in WANTED]):
        found.setdefault(finding.check, []).append(finding)
    return found


@pytest.mark.slow
def test_a_leak_is_a_warning_and_a_healthy_environment_is_none():
    leaky = findings_of("ClassCounter")["environment"]
    assert {finding.status for finding in leaky} == {"warning"}
    assert "isolation of resets" in leaky[0].text and "(ClassCounter)" in leaky[0].text
    healthy = findings_of("Plain")
    assert [f.text for f in healthy["environment"]] == [
        "Plain: siblings share nothing, answers are the same twice, and all are closed once"
    ]
    assert [f.text for f in healthy["reward"]] == ["the environment's score"]
    assert [f.text for f in healthy["validation rows"]] == ["none is a training row"]
