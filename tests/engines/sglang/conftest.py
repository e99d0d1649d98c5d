"""One real engine for all tests that need one; it takes long to start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from live import ROLLOUT, Lab, Loop


@pytest.fixture(scope="session")
def run() -> Iterator[Loop]:
    """Runs coroutines on the loop that the engines live on."""
    loop = Loop()
    yield loop
    loop.loop.close()


@pytest.fixture(scope="session")
def lab() -> Lab:
    """The default task with a user who asks for another try."""
    return Lab.make(
        "data.val_max_samples=120",
        "data.train_batch_size=8",
        ROLLOUT + "n=4",
        ROLLOUT + "interaction_config_file=interaction_configs/checker.yaml",
        ROLLOUT + "multi_turn.max_user_turns=1",
        "actor_rollout_ref.actor.optim.lr=2e-4",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
    )


@pytest.fixture(scope="session")
def colocated_engine(lab: Lab, run: Loop, request: pytest.FixtureRequest) -> Iterator[Any]:
    """SGLang, or what a test's parametrization says (`live.BOTH`)."""
    engine = lab.engine(name=getattr(request, "param", "sglang"))
    try:
        assert run(engine.start_without_weights()), "the first test's fixture sends them"
        yield engine
    finally:
        run(engine.close())


@pytest.fixture
def colocated(colocated_engine: Any, lab: Lab, run: Loop) -> Any:
    """The engine, with the policy's weights of now."""
    from verl_mt.workers.weight_sync import weight_update_for

    run(colocated_engine.apply(weight_update_for(colocated_engine.capabilities, lab.module, 0)))
    return colocated_engine
