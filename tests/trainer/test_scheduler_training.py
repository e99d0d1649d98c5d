"""A scheduler through the whole trainer: real weights, real sampling, metrics and rows."""

from __future__ import annotations

import json

import pytest
from mixed_scheduler import Mixed

from verl_mt.config.compose import compose
from verl_mt.data.batch import ROLLOUT_LOG_PROBS, SAMPLED, build_batch
from verl_mt.data.row_files import read_rows
from verl_mt.errors import ConfigError
from verl_mt.extensions.compat.rollout.scheduler import MultiTurnScheduler, multi_turns, orms
from verl_mt.extensions.compat.schedulers.driver import SchedulerDriver
from verl_mt.rollout.runner import RolloutPlan
from verl_mt.rollout.stream import RolloutStream
from verl_mt.trainer.build import build_trainer, build_workers
from verl_mt.trainer.build_data import build_prompts, load_val_prompts
from verl_mt.trainer.build_rollout import build_chat, build_runner, build_tools

MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"


class Forgets(MultiTurnScheduler):
    """Runs tools; after a wrong answer the conversation begins again behind a tip."""

    async def step(self, infer_request, response_choice, current_turn):
        if response_choice.message.tool_calls:
            infer_request.messages += await self.infer_engine.run_tools()
        else:
            infer_request.messages = [
                *infer_request.messages[:1],
                {"role": "user", "content": "Again: " + infer_request.messages[1]["content"]},
            ]
        return {"infer_request": infer_request, "rollout_infos": {"turns": current_turn}}

    def check_finished(self, infer_request, response_choice, current_turn):
        if super().check_finished(infer_request, response_choice, current_turn):
            return True
        return not response_choice.message.tool_calls and infer_request.messages[1]["content"].startswith("Again")


@pytest.fixture(autouse=True)
def registered():
    multi_turns["forgets"] = Forgets
    yield
    del multi_turns["forgets"]


@pytest.mark.slow
@pytest.mark.cap("C20", "C21", "C31", "C91")
def test_records_of_rewritten_histories_are_trained(tmp_path):
    config = compose(
        [
            f"{MULTI_TURN}.scheduler=forgets", f"{MULTI_TURN}.max_assistant_turns=5",
            f"{MULTI_TURN}.loss_scale=default",
            "reward.path=math_answer", "data.train_batch_size=2", "data.train_max_samples=16", "data.val_files=null",
            "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.actor.ppo_mini_batch_size=1",
            "trainer.total_training_steps=2", "trainer.logger=[]", "trainer.export_at_end=False",
            f"trainer.default_local_dir={tmp_path / 'run'}",
        ]
    )  # fmt: skip
    build_trainer(config).fit()
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [m for m in metrics if "actor/pg_loss" in m]
    assert len(steps) == 2
    assert all(m["rollout/forks"] > 0 and m["rollout/failed"] == 0 for m in steps)
    assert all(m["rollout/logprob_diff_max"] < 1e-3 for m in steps)
    rows = list(read_rows(tmp_path / "run" / "rollouts" / "step_000001.parquet"))
    several = [r for r in rows if len(r["records"]) > 1]
    assert several
    for row in several:
        assert row["records"][0]["messages"][1]["content"] != row["messages"][1]["content"]
        advantages = {a for r in row["records"] for a, bit in zip(r["advantages"] or [], r["loss_mask"]) if bit}
        assert len(advantages) <= 1


@pytest.mark.slow
@pytest.mark.cap("C15", "C17", "C20")
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_log_probs_stay_those_of_the_trainer_whatever_a_scheduler_does_to_the_conversation(mode):
    """The local engine keeps caches of conversations; one that is cut back or rewritten must not read what is gone."""
    more = [f"{MULTI_TURN}.max_assistant_turns=6", "actor_rollout_ref.rollout.response_length=600"]
    config = compose([f"actor_rollout_ref.rollout.mode={mode}", "data.val_max_samples=24", *more])
    workers = build_workers(config, total_steps=1)
    chat, tools = build_chat(config), build_tools(config)
    runner = build_runner(config, chat, tools, workers.policy_module)
    runner.driver = SchedulerDriver(Mixed())
    prompts = load_val_prompts(config, build_prompts(config, chat, tools))
    stream = RolloutStream(runner)
    try:
        stream.call(runner.context.engine.start())
        stream.start(RolloutPlan(prompts, 2, "s1"))
        trajectories = [t for group in stream.collect("s1") for t in group.trajectories]
    finally:
        stream.close(runner.context.engine.close)
    assert sum(len(t.records) > 1 for t in trajectories) > 20
    assert sum(t.counters.get("cut_tokens", 0) > 0 for t in trajectories) > 20
    batch = build_batch(trajectories, pad_token_id=0)
    own = workers.compute_log_probs(batch)
    assert float((own - batch[ROLLOUT_LOG_PROBS])[batch[SAMPLED]].abs().max()) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([f"{MULTI_TURN}.scheduler_kwargs={{a:1}}"], "scheduler_kwargs=.* has no effect unless"),
        (
            [f"{MULTI_TURN}.scheduler=x", f"{MULTI_TURN}.enable=False"],
            "multi_turn.enable=False does not go with .*scheduler=x",
        ),
        (
            [
                f"{MULTI_TURN}.scheduler=x",
                "actor_rollout_ref.rollout.interaction_config_file=interaction_configs/checker.yaml",
            ],
            "interaction_config_file=.* does not go with .*scheduler=x",
        ),
        (
            [f"{MULTI_TURN}.scheduler=x", "actor_rollout_ref.rollout.custom_generate_function_path=a.b"],
            "scheduler=x does not go with .*custom_generate_function_path=a.b",
        ),
        (
            [
                "actor_rollout_ref.rollout.mode=sync",
                "actor_rollout_ref.rollout.custom_generate_function_path=a.b",
            ],
            "use mode=async with a custom generate function",
        ),
    ],
)
def test_combinations_that_cannot_work_are_refused(words, text):
    from verl_mt.config.checks import reject_unused_keys

    with pytest.raises(ConfigError, match=text.replace("(", r"\(")):
        reject_unused_keys(compose(words))


@pytest.mark.slow
@pytest.mark.cap("C11", "C12")
@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([f"{MULTI_TURN}.scheduler=nope"], "unknown multi-turn scheduler 'nope'.*Registered: .*gym_scheduler"),
        ([f"{MULTI_TURN}.loss_scale=nope"], "unknown loss scale 'nope'.*Registered: all, default"),
        (["external_plugins=nowhere.py"], "external_plugins: no file 'nowhere.py'"),
    ],
)
def test_what_does_not_exist_is_found_before_the_first_step(words, text, tmp_path):
    from verl_mt.errors import PluginError

    with pytest.raises(PluginError, match=text):
        few = ("data.train_max_samples=8", "data.val_max_samples=2", "trainer.logger=[]")
        build_trainer(compose([*words, *few, f"trainer.default_local_dir={tmp_path / 'run'}"]))
    assert not (tmp_path / "run").exists()
    assert "accuracy" in orms
