"""`trainer.max_staleness`: what is refused, that nothing is older than it says, that no prompt is lost or favoured."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from command_lab import NO_VALIDATION, fit, interrupt_after, metrics_of, rows_of, small_trainer
from tables import before_release

from verl_mt import engines, prompt_log
from verl_mt.config.compose import compose, config_to_yaml
from verl_mt.config.schema import correction_of
from verl_mt.data import batch as columns
from verl_mt.data.drawn_prompts import FILE, read_prompt_log
from verl_mt.data.sampler import ShuffledSampler
from verl_mt.engines.base import Capabilities
from verl_mt.engines.scripted import ScriptedEngine
from verl_mt.errors import ConfigError, DataError, EngineError
from verl_mt.extensions.asynchronous.in_flight import add_ages, require_bound, staleness_metrics
from verl_mt.modeling.weights import named_weights
from verl_mt.trainer import build, build_rollout
from verl_mt.trainer.build import build_trainer

AHEAD = "trainer.max_staleness=2"
ACTOR = "actor_rollout_ref.actor"
STEPS = 4
RUN = (
    "data.train_batch_size=2",
    "data.train_max_samples=16",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.response_length=32",  # as long as a call of the tool
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=2",
    *NO_VALIDATION,
)
SHORT = "actor_rollout_ref.rollout.response_length=8"
"""For runs whose prompts matter, not their answers."""
CHANGES = ("actor_rollout_ref.actor.entropy_coeff=0.01", "actor_rollout_ref.actor.skip_zero_advantage=False")
"""Every update changes the weights, whatever the rewards are."""
SLOW_TOOL = """
import random, time
from verl_mt.tools.calculator import Calculator

class Slow(Calculator):
    async def execute(self, instance_id, parameters, **kwargs):
        import asyncio
        # A few calls take as long as several steps.
        await asyncio.sleep(random.choice([0.0, 0.0, 0.02, 0.3]))
        return await super().execute(instance_id, parameters, **kwargs)
"""


@pytest.fixture(scope="module")
def slow_tool(tmp_path_factory) -> str:
    """The calculator, some of whose calls take long."""
    tmp_path = tmp_path_factory.mktemp("slow_tool")
    (tmp_path / "slow_tool.py").write_text(SLOW_TOOL)
    written = (Path(__file__).resolve().parents[2] / "tools_configs/calculator.yaml").read_text()
    assert "verl_mt.tools.calculator.Calculator" in written
    text = written.replace("verl_mt.tools.calculator.Calculator", f"{tmp_path / 'slow_tool.py'}:Slow")
    (tmp_path / "slow.yaml").write_text(text)
    return f"actor_rollout_ref.rollout.tool_kwargs.tools_config_file={tmp_path / 'slow.yaml'}"


def ages(run: Path, step: int) -> list[int]:
    """Of every trained token of a step, by its rollout rows alone: updates that its weights were older."""
    return [
        row["trained_version"] - version
        for row in rows_of(run, step)
        if row["trained_version"] is not None
        for record in row["records"]
        for sampled, trained, version in zip(record["sampled"], record["loss_mask"], record["policy_versions"])
        if sampled and trained
    ]


def order_of_drawing(run: Path, *overrides: str) -> list[tuple[str, int]]:
    """(source, index) of each row that a run draws in `STEPS` steps, in order. Nothing is sampled or trained."""
    trainer = small_trainer(run, *RUN, *overrides)
    rows = trainer.sampler.next_batch(2 * STEPS)
    trainer.close()
    return [(row.source, row.index) for row in rows]


def drawn_in_order(run: Path) -> list[tuple[str, int, list[int]]]:
    return [(p.source, p.row_index, p.trained_in) for p in read_prompt_log(run).prompts.values()]


# What is refused, before anything is loaded


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "word", "why"),
    [
        (AHEAD, "trainer.deterministic=True", "a clock decides"),
        (AHEAD, "actor_rollout_ref.rollout.mode=sync", "mode=async"),
        (AHEAD, "trainer.debug_mode=rollout_only", "only one of both"),
        ("data.over_sample=1.5", "trainer.deterministic=True", "a clock decides"),
        before_release("data.over_sample=1.5", "actor_rollout_ref.rollout.mode=sync", "mode=async"),
        before_release("data.over_sample=1.5", "trainer.debug_mode=rollout_only", "only one of both"),
    ],
)
def test_what_needs_a_steps_own_conversations_is_refused_by_name(asked, word, why):
    extra = ["trainer.debug_rollout_data=x_{rollout_id}.pt"] if "debug" in word else []
    with pytest.raises(ConfigError, match=re.escape(why)) as error:
        compose([asked, word, *extra])
    assert f"{asked} does not go with" in str(error.value) and word in str(error.value)


def test_groups_are_replaced_or_left_for_later_not_both():
    with pytest.raises(ConfigError, match=r"over_sample=1\.5 does not go with algorithm\.filter_groups\.enable=True"):
        compose([AHEAD, "data.over_sample=1.5", "algorithm.filter_groups.enable=True"])


@pytest.mark.slow
@pytest.mark.parametrize(("bound", "most"), [(0, 2), (3, 4), before_release(1, 2)])
def test_more_prompts_than_can_be_trained_in_time_are_refused(bound, most):
    compose([f"trainer.max_staleness={bound}", f"data.over_sample={most}"])
    with pytest.raises(ConfigError, match=f"Set {most} or less"):
        compose([f"trainer.max_staleness={bound}", f"data.over_sample={most + 0.1}"])


def test_a_negative_bound_is_refused():
    with pytest.raises(ConfigError, match="max_staleness"):
        compose(["trainer.max_staleness=-1"])


def test_the_policys_own_module_over_ray_is_refused_before_anything_is_loaded():
    config = compose([AHEAD, "trainer.placement=ray"])
    with pytest.raises(ConfigError, match=r"max_staleness=2: .*local with trainer.placement=ray.* use sglang"):
        engines.check(config.actor_rollout_ref, config.trainer)


@pytest.mark.slow
def test_a_mixture_of_experts_cannot_be_copied_for_sampling_which_is_said_before_it_is_loaded(tmp_path, monkeypatch):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    config = Qwen3MoeConfig(vocab_size=500, num_key_value_heads=1, **sizes, **experts)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "model")
    monkeypatch.setattr(build, "build_workers", lambda *args, **kwargs: pytest.fail("the model was loaded"))
    with pytest.raises(ConfigError, match=r"max_staleness=2: .* its checkpoint .*experts\.0\..* Set .*name=sglang"):
        build_trainer(compose([AHEAD, f"actor_rollout_ref.model.path={tmp_path / 'model'}"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("can", "samples_from_policy", "says"),
    [
        ({}, False, "use an engine that can"),
        ({"frees_memory": True}, False, "free_cache_engine=False"),
        ({"frees_memory": True, "overlaps_training": True}, False, "free_cache_engine=False"),
        (
            {"overlaps_training": True, "transports": frozenset({"in_place"})},
            True,
            "gets its weights by tensor_buckets",
        ),
        ({"overlaps_training": True, "returns_token_ids": False}, False, "returns text: how probable"),
    ],
)
def test_an_engine_that_cannot_sample_while_the_policy_is_trained_is_refused(can, samples_from_policy, says):
    capabilities = Capabilities(**{"transports": frozenset({"disk"}), "deterministic": False} | can)
    engine = SimpleNamespace(capabilities=capabilities, samples_from_policy=samples_from_policy)
    with pytest.raises(ConfigError, match=re.escape(says)):
        engines.check_overlap(engine, compose([AHEAD]))


@pytest.mark.slow
@pytest.mark.parametrize("made_by", ["Mine", "make"])
def test_an_engine_of_ones_own_that_does_not_say_that_it_can_is_refused_before_anything_is_loaded(
    tmp_path, monkeypatch, made_by
):
    text = "from verl_mt.engines.base import InferenceEngine as E\n\nclass Mine(E): pass\n\nmake = lambda s: 1\n"
    (tmp_path / "mine.py").write_text(text)
    name = f"actor_rollout_ref.rollout.name={tmp_path / 'mine.py'}:{made_by}"
    for slow in ("build_fitting_chat", "build_workers"):
        monkeypatch.setattr(build, slow, lambda *args, **kwargs: pytest.fail("something was loaded"))
    with pytest.raises(ConfigError, match=r"max_staleness=2, .*mine\.py.* does not say .*overlaps_training = True.*=0"):
        build_trainer(compose([AHEAD, name]))
    (tmp_path / "says.py").write_text(f"{text}Mine.overlaps_training = make.overlaps_training = True\n")
    with pytest.raises(pytest.fail.Exception, match="something was loaded"):
        build_trainer(compose([AHEAD, name.replace("mine.py", "says.py")]))


def test_so_is_one_that_is_given(monkeypatch):
    monkeypatch.setattr(build, "build_fitting_chat", lambda *args, **kwargs: pytest.fail("something was loaded"))
    engine = ScriptedEngine([])
    engine.capabilities = Capabilities(frozenset({"disk"}), deterministic=False)
    with pytest.raises(ConfigError, match="does not sample while the policy is trained"):
        build_trainer(compose([AHEAD]), engine=engine)


@pytest.mark.slow
def test_where_no_training_goes_on_nothing_is_asked_of_it(tmp_path, monkeypatch):
    from verl_mt.trainer.inference import Inference

    (tmp_path / "own.py").write_text("from verl_mt.engines.base import InferenceEngine as E\n\nclass Mine(E): pass\n")
    monkeypatch.setattr(build_rollout, "build_fitting_chat", lambda *args, **kwargs: pytest.fail("it goes on"))
    with pytest.raises(pytest.fail.Exception, match="it goes on"):
        Inference(compose([AHEAD, f"actor_rollout_ref.rollout.name={tmp_path / 'own.py'}:Mine"]))


@pytest.mark.slow
def test_where_nothing_is_trained_the_bound_asks_for_nothing(tmp_path):
    val_only = ("trainer.val_only=True", "data.val_files=verl_mt.tiny.problems:rows", "data.val_max_samples=2")
    small_trainer(tmp_path / "validated", AHEAD, "trainer.deterministic=True", *val_only).fit()


# Ages


def a_batch(versions: list[list[int]], mask: list[list[int]]) -> dict[str, torch.Tensor]:
    versions_BT, mask_BT = torch.tensor(versions), torch.tensor(mask, dtype=torch.bool)
    zero_BT = torch.zeros(versions_BT.shape)
    return {
        columns.POLICY_VERSIONS: versions_BT,
        columns.LOSS_MASK: mask_BT,
        columns.SAMPLED: mask_BT,
        columns.OLD_LOG_PROBS: zero_BT - 1.0,
        columns.ROLLOUT_LOG_PROBS: zero_BT - 1.0 - 0.5 * (versions_BT == 3),
        columns.HAS_LOG_PROBS: torch.ones(len(versions), dtype=torch.bool),
        columns.CLIPPED: (versions_BT == 3).float(),
    }


def test_ages_are_of_trained_tokens():
    batch = a_batch([[-1, 5, 3, 0], [-1, 4, 5, 5]], [[0, 1, 1, 0], [0, 1, 1, 1]])
    require_bound(batch, version=5, max_staleness=2)
    found = staleness_metrics(batch, version=5)
    assert found["staleness/mean"] == pytest.approx(0.6) and found["staleness/max"] == 2
    assert [found[f"staleness/age_{age}/token_share"] for age in (0, 1, 2)] == pytest.approx([0.6, 0.2, 0.2])
    assert [found[f"staleness/age_{age}/logprob_diff"] for age in (0, 1, 2)] == pytest.approx([0, 0, 0.5])
    assert [found[f"staleness/age_{age}/clip_fraction"] for age in (0, 1, 2)] == [0, 0, 1]


def test_ages_are_a_column_for_the_update():
    batch = a_batch([[-1, 5, 3, -1], [-1, 4, 2, 5]], [[0, 1, 1, 0], [0, 1, 1, 1]])
    add_ages(batch, version=5)
    assert batch[columns.AGES].tolist() == [[0, 0, 2, 0], [0, 1, 3, 0]]


def test_an_update_of_the_critic_alone_knows_no_log_probs_of_the_policy():
    batch = a_batch([[-1, 5, 3]], [[0, 1, 1]])
    del batch[columns.OLD_LOG_PROBS], batch[columns.CLIPPED]
    found = staleness_metrics(batch, version=5)
    assert set(found) == {
        "staleness/mean",
        "staleness/max",
        "staleness/age_0/token_share",
        "staleness/age_2/token_share",
    }


@pytest.mark.parametrize(("version", "bound"), [(5, 1), (4, 2)])
def test_a_token_beyond_the_bound_or_of_weights_to_come_is_never_trained(version, bound):
    batch = a_batch([[-1, 5, 3]], [[0, 1, 1]])
    with pytest.raises(EngineError, match=f"version {version}.*max_staleness={bound}"):
        require_bound(batch, version=version, max_staleness=bound)


# Runs


@pytest.mark.slow
@pytest.mark.parametrize("bound", [2, before_release(1), before_release(4)])
def test_whatever_tools_take_no_trained_token_is_older_and_the_next_steps_are_under_way(tmp_path, slow_tool, bound):
    run, steps = tmp_path / "run", bound + 2
    lines = fit(run, *RUN, slow_tool, f"trainer.max_staleness={bound}", f"trainer.total_training_steps={steps}")
    found = [ages(run, step) for step in range(1, steps + 1)]
    assert [max(of_step) <= min(bound, step) for step, of_step in enumerate(found)] == [True] * steps
    assert min(map(min, found)) >= 0 and max(map(max, found)) == bound, "the bound is used"
    assert [line["staleness/max"] for line in lines] == list(map(max, found))
    # The metric's mean is over tokens, as is that of the rows.
    assert [line["staleness/mean"] for line in lines] == pytest.approx([sum(a) / len(a) for a in found], abs=1e-5)
    events = [json.loads(line) for line in (run / FILE).read_text().splitlines()]
    first_end = next(k for k, event in enumerate(events) if event["event"] == "trained")
    started = [n for event in events[:first_end] if event["event"] == "started" for n in event["numbers"]]
    assert started == list(range(2 * (bound + 1))), "so many steps are sampled before the first is trained"
    # In the order of drawing, each once, none drawn for a step that does not come.
    assert [p.trained_in for p in read_prompt_log(run).prompts.values()] == [[1 + k // 2] for k in range(2 * steps)]
    assert prompt_log.main([str(run)]) == 0


@pytest.mark.slow
def test_a_run_that_is_stopped_goes_on_with_the_same_prompts_in_the_same_steps(tmp_path, slow_tool, capsys):
    stopped = tmp_path / "stopped"
    for step in (1, 2):
        trainer = small_trainer(stopped, *RUN, AHEAD, slow_tool)
        interrupt_after(trainer, step)
        trainer.fit()
        assert prompt_log.main([str(stopped)]) == 0
        assert re.search(rf"{2 * step} trained, 0 left out, [46] open", capsys.readouterr().out)
    fit(stopped, *RUN, AHEAD, slow_tool)
    assert prompt_log.main([str(stopped)]) == 0
    rows = order_of_drawing(tmp_path / "straight")
    assert drawn_in_order(stopped) == [(*row, [1 + k // 2]) for k, row in enumerate(rows)]
    assert all(max(ages(stopped, step)) <= 2 for step in range(1, STEPS + 1))


class Stumbling(ShuffledSampler):
    """Its seventh row cannot be read, the first time."""

    stumbles = True

    def next_batch(self, n):
        start, rows = self.position, super().next_batch(n)
        if Stumbling.stumbles and start <= 6 < start + n:
            raise DataError("made: row 6 is bad")
        return rows


@pytest.mark.slow
def test_a_bad_row_of_a_step_ahead_takes_no_prompt_along(tmp_path, monkeypatch):
    stopped = tmp_path / "stopped"
    own = (SHORT, f"data.sampler={__name__}:Stumbling")
    monkeypatch.setattr(Stumbling, "stumbles", False)
    rows = order_of_drawing(tmp_path / "straight", *own)
    monkeypatch.setattr(Stumbling, "stumbles", True)
    with pytest.raises(DataError, match="row 6 is bad"):
        fit(stopped, *RUN, AHEAD, *own)
    monkeypatch.setattr(Stumbling, "stumbles", False)
    fit(stopped, *RUN, AHEAD, *own)
    assert drawn_in_order(stopped) == [(*row, [1 + k // 2]) for k, row in enumerate(rows)]
    assert prompt_log.main([str(stopped)]) == 0


@pytest.mark.slow
def test_the_limit_of_conversations_is_one_for_all_steps_and_older_ones_come_first(tmp_path, slow_tool, monkeypatch):
    from verl_mt.engines.local import LocalEngine

    live: set[str] = set()
    peak, begun = 0, []
    opened, closed = LocalEngine.open_session, LocalEngine.close_session

    def open_session(self, session_id, order):
        nonlocal peak
        live.add(session_id)
        peak = max(peak, len(live))
        begun.append(session_id)
        opened(self, session_id, order)

    def close_session(self, session_id):
        live.discard(session_id)
        closed(self, session_id)

    monkeypatch.setattr(LocalEngine, "open_session", open_session)
    monkeypatch.setattr(LocalEngine, "close_session", close_session)
    few = ("actor_rollout_ref.rollout.max_concurrent=3", "trainer.total_training_steps=3")
    fit(tmp_path / "run", *RUN, AHEAD, slow_tool, *few)
    assert peak <= 4, "a session is opened before the one in whose place it is is closed"
    assert begun == sorted(begun) and len(begun) == 4 * 3


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("algorithm.adv_estimator=gae", "critic.optim.lr=1e-3", "trainer.critic_warmup=1"), id="critic"),
        before_release(
            ("actor_rollout_ref.rollout.num_workers=2", "actor_rollout_ref.rollout.max_concurrent=3"), id="workers"
        ),
        before_release(("algorithm.adv_estimator=remax",), id="remax"),
        before_release(
            (
                f"{ACTOR}.use_kl_loss=True",
                "algorithm.filter_overlong=True",
                "actor_rollout_ref.rollout.response_length=128",  # some end by themselves
            ),
            id="kl",
        ),
        before_release(
            (f"{ACTOR}.use_sampler_log_probs=always", f"{ACTOR}.ppo_mini_batch_size=1"), id="sampler's log-probs"
        ),
        before_release((f"{ACTOR}.ppo_epochs=2", "algorithm.rollout_correction={rollout_is: null}"), id="epochs"),
        before_release((f"{ACTOR}.ppo_mini_batch_size=1",), id="mini-batches"),
    ],
)
def test_everything_that_a_step_does_goes_with_it(tmp_path, words):
    run = tmp_path / "run"
    few = ("actor_rollout_ref.rollout.response_length=24", "trainer.total_training_steps=3")
    lines = fit(run, *RUN, AHEAD, *few, *words)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert max(max(ages(run, step)) for step in range(1, 4)) <= 2 and max(line["staleness/max"] for line in lines) >= 1
    assert prompt_log.main([str(run)]) == 0


@pytest.mark.slow
def test_the_sanity_checks_numbers_are_of_the_steps_own_conversations(tmp_path, slow_tool, monkeypatch):
    from verl_mt.chat.sanity import SanityMonitor

    observed, metrics = [], SanityMonitor.metrics

    def look(self, reset=True, of=""):
        observed.append((of, sum(c.observed for plan, c in self._counts.items() if plan.startswith(of))))
        return metrics(self, reset, of)

    monkeypatch.setattr(SanityMonitor, "metrics", look)
    words = [word for word in RUN if not word.startswith("data.val_files")]
    few = ("trainer.total_training_steps=3", "trainer.test_freq=3", "data.val_max_samples=2")
    fit(tmp_path / "run", *words, AHEAD, slow_tool, *few)
    steps = {of: number for of, number in observed if of != "val"}
    assert steps == {f"s{step:06d}": 4 for step in range(1, 4)}
    assert [number for of, number in observed if of == "val"] == [4] * 2, "sampled and greedy, before and after"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), {"rollout_is": "token"}),
        (("trainer.max_staleness=0",), {}),
        (("trainer.val_only=True",), {}),
        (("algorithm.rollout_correction={rollout_is: null}",), {"rollout_is": None}),
        (("algorithm.rollout_correction={rollout_rs: token}",), {"rollout_rs": "token"}),
        (("actor_rollout_ref.actor.use_sampler_log_probs=always",), {}),
        (("actor_rollout_ref.actor.policy_loss={loss_mode: gspo}",), {}),
        (("actor_rollout_ref.actor.policy_loss={loss_mode: cispo}",), {"rollout_is": "token"}),
    ],
)
def test_what_is_older_is_weighed_where_nothing_else_is_said(words, expected):
    config = compose([AHEAD, *words])
    assert correction_of(config) == config.algorithm.rollout_correction == expected
    assert yaml.safe_load(config_to_yaml(config))["algorithm"]["rollout_correction"] == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bound", "loss", "told", "warned"),
    [(1, "gspo", "not corrected", False), (2, "gspo", "not corrected", True), (2, "vanilla", "{'rollout_is'", False)],
)
def test_a_run_says_at_its_start_how_older_tokens_are_corrected(tmp_path, capsys, bound, loss, told, warned):
    words = (f"trainer.max_staleness={bound}", f"{ACTOR}.policy_loss={{loss_mode: {loss}}}")
    small_trainer(tmp_path / "run", *RUN, *words, "trainer.logger=[console]").close()
    said = " ".join(capsys.readouterr().out.split())
    assert told in said
    assert (f"with policy_loss.loss_mode={loss}, tokens of {bound} updates before count as new" in said) == warned


@pytest.mark.slow
def test_old_tokens_are_weighed_in_a_run_and_the_weights_are_told(tmp_path):
    long = ("actor_rollout_ref.rollout.response_length=48", "data.train_max_samples=64")
    lines = fit(tmp_path / "run", *RUN, AHEAD, *long, "actor_rollout_ref.actor.optim.lr=3e-3", *CHANGES)
    assert any(line.get("rollout_corr/rollout_is_max", 1) > 1.01 for line in lines), sorted(lines[-1])
    few = (SHORT, "trainer.total_training_steps=3", "actor_rollout_ref.actor.skip_zero_advantage=False")
    off = fit(tmp_path / "off", *RUN, AHEAD, *few, "algorithm.rollout_correction={rollout_is: null}")
    assert not any("rollout_corr/rollout_is_mean" in line for line in off)


@pytest.mark.slow
def test_an_update_is_told_how_old_each_token_is(tmp_path):
    several = (f"{ACTOR}.ppo_mini_batch_size=1", f"{ACTOR}.skip_zero_advantage=False")
    trainer = small_trainer(tmp_path / "run", *RUN, AHEAD, SHORT, *several)
    update, told = trainer.workers.update, set()

    def look(batch):
        sampled = batch[columns.SAMPLED]
        ages_of_tokens = (trainer.step_number - batch[columns.POLICY_VERSIONS])[sampled]
        assert torch.equal(batch[columns.AGES][sampled].long(), ages_of_tokens)
        told.update(ages_of_tokens.tolist())
        return update(batch)

    trainer.workers.update = look
    trainer.fit()
    assert told == {0, 1, 2}


@pytest.mark.slow
def test_adapters_are_merged_for_the_engine_that_samples_meanwhile(tmp_path):
    words = (SHORT, "actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.optim.lr=1e-2", *CHANGES)
    trainer = small_trainer(tmp_path / "run", *RUN, AHEAD, *words, "trainer.total_training_steps=3")
    before = {name: tensor.clone() for name, tensor in trainer.engine._weights.items()}
    trainer.fit()
    policy, own = dict(named_weights(trainer.workers.policy_module)), trainer.engine._weights
    assert all(torch.equal(own[name], tensor) for name, tensor in policy.items())
    assert any(not torch.equal(own[name], before[name]) for name in policy)
    first = metrics_of(tmp_path / "run")[0]
    assert first["staleness/max"] == 0 and first["rollout/logprob_diff_max"] < 1e-4


@pytest.mark.slow
def test_validation_is_by_the_weights_of_its_step(tmp_path, slow_tool):
    run = tmp_path / "run"
    words = [word for word in RUN if not word.startswith("data.val_files")]
    few = ("trainer.total_training_steps=3", "trainer.test_freq=2", "data.val_max_samples=2")
    fit(run, *words, AHEAD, slow_tool, *few)
    from verl_mt.data.row_files import read_rows, row_files

    found = {
        (file.step, version)
        for file in row_files(run)
        if file.split != "train"
        for row in read_rows(file.path)
        for record in row["records"]
        for sampled, version in zip(record["sampled"], record["policy_versions"])
        if sampled
    }
    assert found == {(step, step) for step in (0, 2, 3)}


@pytest.mark.slow
def test_an_engine_that_was_given_is_asked_whether_it_can(tmp_path):
    from verl_mt.engines.scripted import ScriptedEngine

    engine = ScriptedEngine([])
    engine.capabilities = Capabilities(transports=frozenset({"in_place"}), deterministic=True)
    config = compose([*RUN, AHEAD, f"trainer.default_local_dir={tmp_path / 'run'}"])
    with pytest.raises(ConfigError, match="does not sample while the policy is trained"):
        build_trainer(config, engine=engine)
    assert not (tmp_path / "run").exists()


def versions_of_turns(run: Path, steps: int) -> list[set[int]]:
    return [
        set(record["policy_versions"][turn["start"] : turn["end"]])
        for step in range(1, steps + 1)
        for row in rows_of(run, step)
        for record in row["records"]
        for turn in record["turns"]
        if turn["kind"] == "assistant"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("on_update", ["continue", "finish_turn"])
def test_new_weights_come_inside_a_turn_or_wait_for_its_end(tmp_path, on_update):
    words = (f"actor_rollout_ref.rollout.on_update={on_update}", "data.train_batch_size=6")
    words += ("actor_rollout_ref.rollout.response_length=48", "data.train_max_samples=64")
    words += ("actor_rollout_ref.rollout.max_concurrent=2",)  # sampling takes longer than an update, so they overlap
    fit(tmp_path / "run", *RUN, AHEAD, *words, "trainer.total_training_steps=5")
    several = sum(len(versions) > 1 for versions in versions_of_turns(tmp_path / "run", 5))
    assert several > 0 if on_update == "continue" else several == 0
