"""The trainer's loop: which checkpoint is the best, when it validates, what ends it."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from command_lab import NO_VALIDATION, SMALL, fit, interrupt_after, metrics_of, rows_of, small_trainer

from verl_mt.chat.loading import load_chat, load_tokenizer
from verl_mt.config.compose import compose
from verl_mt.config_paths import resolve_model_path
from verl_mt.data.dataset import DataRow
from verl_mt.data.row_files import read_rows
from verl_mt.data.sampler import ShuffledSampler
from verl_mt.engines.scripted import ScriptedEngine, ScriptedTurn
from verl_mt.errors import CheckpointError, ConfigError, DataError, UserCodeError
from verl_mt.tiny.problems import rows as make_rows
from verl_mt.trainer import checkpoint, ppo_trainer
from verl_mt.trainer.build import build_trainer
from verl_mt.trainer.inference import Inference

pytestmark = pytest.mark.slow

TINY_STEPS = (
    "data.train_batch_size=2",
    "data.val_max_samples=2",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.response_length=4",
    "actor_rollout_ref.rollout.val_kwargs.greedy_too=False",
    "trainer.export_at_end=False",
    "trainer.progress=off",
)
"""Steps that cost next to nothing: what they sample does not matter."""


@pytest.mark.slow
def test_the_best_checkpoint_is_one_that_was_validated(tmp_path, monkeypatch):
    accuracies = iter([0.1, 0.9, 0.5])  # before training, after steps 3 and 5
    monkeypatch.setattr(ppo_trainer, "validation_metrics", lambda groups, suffix: {"val/accuracy": next(accuracies)})
    run = tmp_path / "run"
    trainer = small_trainer(
        run,
        *TINY_STEPS,
        "trainer.total_training_steps=5",
        "trainer.test_freq=3",
        "trainer.save_freq=1",
        "trainer.max_actor_ckpt_to_keep=1",
    )
    trainer.fit()
    kept = {path.name: checkpoint.read_meta(path)["score"] for path in trainer.checkpoints.all()}
    assert kept == {"step_000003": 0.9, "step_000005": 0.5}
    assert trainer.checkpoints.best().name == "step_000003"


@pytest.mark.slow
def test_val_only_validates_the_checkpoint_it_is_given(finished_runs, tmp_path):
    saved = finished_runs.original("plain") / "checkpoints" / "step_000002"
    lines = fit(
        tmp_path / "validated",
        *TINY_STEPS,
        "trainer.val_only=True",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={saved}",
    )
    assert [line["step"] for line in lines] == [2]
    assert "val/accuracy" in lines[0]
    assert not (tmp_path / "validated" / "checkpoints").exists()


def test_the_live_line_says_what_is_going_on(tmp_path, monkeypatch):
    steps = ("trainer.total_training_steps=1", "actor_rollout_ref.rollout.response_length=16")
    trainer = small_trainer(tmp_path / "run", *TINY_STEPS, *NO_VALIDATION, *steps)
    seen = []
    monkeypatch.setattr(trainer.log.display, "phase", seen.append)
    trainer.fit()
    rollouts = [text for text in seen if text.startswith("rollout ")]  # 3/4, 80 tok/s, 2 tool calls
    assert rollouts
    parts = ["step", "rollout", "ref", "advantages", "update", "weights", "checkpoint"]
    assert [text for text in seen if text not in rollouts] == parts
    assert seen.index("rollout") < seen.index(rollouts[-1]) < seen.index("ref")


@pytest.mark.parametrize("steps", [0, 2])
def test_a_run_without_anything_left_to_do_ends_well(tmp_path, steps):
    overrides = (*TINY_STEPS, *NO_VALIDATION, f"trainer.total_training_steps={steps}")
    small_trainer(tmp_path / "run", *overrides).fit()
    if steps:
        assert len(metrics_of(tmp_path / "run")) == steps
        saved = tmp_path / "run" / "checkpoints" / f"step_{steps:06d}"
        again = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={saved}")
        small_trainer(tmp_path / "again", *overrides, *again).fit()
        assert (tmp_path / "again" / "FINISHED").exists()
        assert not (tmp_path / "again" / "metrics.jsonl").exists()
    assert (tmp_path / "run" / "FINISHED").exists()


TOOLS = "actor_rollout_ref.rollout.tool_kwargs.tools_config_file"


class Inventive(ShuffledSampler):
    """The first `times` batches begin with a row of its own: `words` words, of `data_source`."""

    def __init__(self, sources, *, words=1000, times=1, data_source="verl_mt/arithmetic", **keys):
        super().__init__(sources, **keys)
        self.made = DataRow([{"role": "user", "content": "long " * words}], data_source, "1", index=0, file="invented")
        self.times = times

    def next_batch(self, n):
        self.times -= 1
        return super().next_batch(n) if self.times < 0 else [self.made, *super().next_batch(n - 1)]


def with_sampler(**kwargs) -> tuple[str, ...]:
    given = ",".join(f"{k}:{v}" for k, v in kwargs.items())
    return (f"data.sampler={__name__}:Inventive", f"data.sampler_kwargs={{{given}}}")


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
def test_prompts_left_out_or_cut_are_metrics_of_their_own_split(tmp_path):
    train, val = (make_rows(num_rows=6, seed=0, split=split) for split in ("train", "val"))
    train[1]["prompt"][-1]["content"] *= 100
    val[0]["prompt"][-1]["content"] *= 100
    val[2]["prompt"][-1]["content"] *= 100
    files = (
        f"data.train_files={jsonl(tmp_path / 'train.jsonl', train)}",
        f"data.val_files={jsonl(tmp_path / 'val.jsonl', val)}",
        "data.val_max_samples=-1",
        "trainer.total_training_steps=1",
    )
    before, after = fit(tmp_path / "left_out", *TINY_STEPS, *files)
    assert before["val/filtered_prompts"] == after["val/filtered_prompts"] == 2
    assert "data/filtered_prompts" not in before
    assert (after["data/filtered_prompts"], after["data/truncated_prompts"]) == (1, 0)
    cut = ("data.filter_overlong_prompts=False", "data.truncation=left")
    _, after = fit(tmp_path / "cut", *TINY_STEPS, *files, *cut)
    assert (after["data/filtered_prompts"], after["data/truncated_prompts"]) == (0, 1)
    assert (after["val/filtered_prompts"], after["val/truncated_prompts"]) == (0, 2)


@pytest.mark.slow
def test_a_row_that_a_sampler_made_too_long_is_counted_and_another_drawn(tmp_path):
    overrides = (*TINY_STEPS, *NO_VALIDATION, "trainer.total_training_steps=1")
    with pytest.raises(DataError, match=r"data\.sampler gave \d+ rows, of which only 1"):
        fit(tmp_path / "endless", *overrides, *with_sampler(times=100))
    (line,) = fit(tmp_path / "run", *overrides, *with_sampler())
    assert (line["rollout/trajectories"], line["data/filtered_prompts"]) == (4, 1)


def test_a_row_that_a_sampler_made_needs_a_reward(tmp_path):
    overrides = (*TINY_STEPS, *NO_VALIDATION, *with_sampler(words=1, data_source="nobody/knows"))
    with pytest.raises(ConfigError, match=r"(?s)invented, row 1.*nobody/knows|nobody/knows.*invented, row 1"):
        fit(tmp_path / "run", *overrides)


def test_a_person_is_told_what_the_rows_carry_in_vain(tmp_path, capsys):
    rows = make_rows(num_rows=4, seed=0, split="train")
    for row in rows[:3]:
        row["extra_info"]["interaction_kwargs"] = {"name": "gsm8k"}
    overrides = (
        *TINY_STEPS,
        *NO_VALIDATION,
        f"data.train_files={jsonl(tmp_path / 'rows.jsonl', rows)}",
        "trainer.logger=[console]",
        f"{TOOLS}=null",
    )
    small_trainer(tmp_path / "run", *overrides).close()
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("3 row(s) name an interaction (interaction_kwargs.name): ignored") == 1
    assert "multi_turn.enable" not in said
    small_trainer(tmp_path / "other", *overrides, "actor_rollout_ref.rollout.multi_turn.enable=True").close()
    said = " ".join(capsys.readouterr().out.split())
    assert "neither tools nor an interaction are configured: every trajectory is one assistant turn" in said


# A run from a script


def says_yes(data_source, solution_str, ground_truth, extra_info):
    return float("yes" in solution_str)


def scripted(tokenizer, **keys) -> ScriptedEngine:
    """The first sample of every group says yes, the others say no."""

    def turn(request) -> ScriptedTurn:
        text = "yes" if request.session_id.endswith(".00") else "no"
        ids = [*tokenizer.encode(text), tokenizer.convert_tokens_to_ids("<|im_end|>")]
        return ScriptedTurn(ids, text, log_probs=[-1.0] * len(ids))

    return ScriptedEngine(turn, **keys)


SCRIPTED = (
    *SMALL,
    *TINY_STEPS,
    "trainer.logger=[]",
    "actor_rollout_ref.rollout.name=scripted",
    f"reward.path={__name__}:says_yes",
)


@pytest.mark.parametrize("gives_ids", [True, False])
def test_a_script_trains_the_policy_with_ids_or_with_text_alone(tmp_path, gives_ids):
    run = tmp_path / "run"
    engine = scripted(load_tokenizer("verl_mt://tiny"), returns_token_ids=gives_ids)
    steps = ("trainer.total_training_steps=2", "data.val_files=null", f"trainer.default_local_dir={run}")
    trainer = build_trainer(compose([*SCRIPTED, *steps]), engine=engine)
    before = [p.detach().clone() for p in trainer.workers.policy_module.parameters()]
    trainer.fit()
    assert not all(map(torch.equal, before, trainer.workers.policy_module.parameters()))
    assert len(engine.requests) == 8
    with pytest.raises(Exception, match="closed"):
        engine._check_open()
    for step, line in enumerate(metrics_of(run), start=1):
        assert line["reward/mean"] == 0.5
        assert math.isfinite(line["actor/loss"]) and line["actor/grad_norm"] > 0
        # Sampler and trainer are compared where the sampler said something.
        assert ("rollout/logprob_diff_max" in line) is gives_ids
        for row in rows_of(run, step):
            (record,) = row["records"]
            assert record["has_log_probs"] is gives_ids
            assert record["loss_mask"] == record["sampled"]
            trained = [p for p, m in zip(record["old_log_probs"], record["loss_mask"], strict=True) if m]
            assert trained and all(p < 0 and p != -1.0 for p in trained), "the trainer's own"


def test_a_script_is_evaluated_without_a_model(tmp_path, monkeypatch):
    monkeypatch.setattr("verl_mt.trainer.inference.load_causal_lm", None)
    with Inference(compose([*SCRIPTED]), engine=scripted(load_tokenizer("verl_mt://tiny"))) as policy:
        groups = policy.roll_out(policy.prompts(), n=2)
    assert [[t.reward for t in g.trajectories] for g in groups] == [[1.0, 0.0]] * 2


def test_a_scripted_engine_must_be_given():
    with pytest.raises(ConfigError, match=r"engine=ScriptedEngine\(turns\).*build_trainer"):
        build_trainer(compose([*SCRIPTED]))


def test_both_passes_of_a_validation_are_written(tmp_path):
    run = tmp_path / "run"
    overrides = ("trainer.total_training_steps=0", "actor_rollout_ref.rollout.val_kwargs.greedy_too=True")
    lines = fit(run, *TINY_STEPS, *overrides)
    assert "val/accuracy_greedy" in lines[0]
    for name in ("val", "val_greedy"):
        rows = list(read_rows(run / "rollouts" / f"{name}_000000.parquet"))
        assert [row["trajectory_id"].split(".")[0] for row in rows] == [name] * 2


def test_a_record_that_was_not_trained_has_null_instead_of_numbers(tmp_path):
    # Nobody earns anything: no row moves the policy, none goes through the model.
    run = tmp_path / "run"
    fit(run, *TINY_STEPS, *NO_VALIDATION, "trainer.total_training_steps=1", "actor_rollout_ref.actor.ppo_epochs=2")
    untouched = [r for row in rows_of(run, 1) for r in row["records"] if not any(r["advantages"])]
    assert all(isinstance(r["old_log_probs"], list | None) and r["old_log_probs"] != [] for r in untouched)
    assert not any(r["old_log_probs"] and None in r["old_log_probs"] for r in untouched)


# Ends of a run


def raises(data_source, solution_str, ground_truth, extra_info):
    raise KeyError("no such answer")


_BROKEN_FROM = "s000003"


def raises_later(data_source, solution_str, ground_truth, extra_info):
    if extra_info["trajectory_id"] >= _BROKEN_FROM:
        raise KeyError("no such answer")
    return 0.0


def test_a_step_in_which_nothing_survives_ends_the_run_with_one_error(tmp_path, monkeypatch):
    run = tmp_path / "run"
    overrides = (*TINY_STEPS, *NO_VALIDATION, "trainer.total_training_steps=5", "trainer.save_freq=100")
    trainer = small_trainer(run, *overrides, f"reward.path={__name__}:raises_later", "trainer.export_at_end=True")
    with pytest.raises(UserCodeError) as caught:
        trainer.fit()
    said = str(caught.value)
    for part in ("step 3: not one of 4 trajectories survived (4 failed)", "KeyError: 'no such answer'", "after step 2"):
        assert part in said, said
    assert "Traceback" not in said
    assert [path.name for path in trainer.checkpoints.all()] == ["step_000002"]
    assert not (run / "FINISHED").exists() and not (run / "hf").exists()
    assert len(rows_of(run, 3)) == 4
    again = small_trainer(run, *overrides, f"reward.path={__name__}:raises_later", "trainer.export_at_end=True")
    assert again.step_number == 2
    monkeypatch.setitem(globals(), "_BROKEN_FROM", "s999999")
    again.fit()  # repaired
    assert again.step_number == 5 and (run / "FINISHED").exists()


def never(data_source, solution_str, ground_truth, extra_info):
    return 0.0


def test_a_run_that_is_dead_from_the_start_says_so_once_and_a_resumed_one_too(tmp_path, caplog):
    overrides = (*TINY_STEPS, "data.val_max_samples=2", "trainer.total_training_steps=4", "trainer.save_freq=1")
    overrides = (*overrides, "trainer.val_before_train=True", "trainer.export_at_end=False", "trainer.logger=[]")
    overrides = (*overrides, f"reward.path={__name__}:never")
    said = {}
    for name, interrupted in (("whole", None), ("resumed", 2)):
        trainer = small_trainer(tmp_path / name, *overrides)
        if interrupted is not None:
            interrupt_after(trainer, interrupted)
            trainer.fit()
            trainer = small_trainer(tmp_path / name, *overrides)
        trainer.fit()
        said[name] = {
            line["step"]: line["collapse/words"] for line in metrics_of(tmp_path / name) if "collapse/words" in line
        }
    assert list(said["whole"]) == [3] and said["whole"] == said["resumed"]
    assert "the validation before training and the first 3 steps nothing was rewarded (0 of " in said["whole"][3]
    assert sum("dead from the start" in record.getMessage() for record in caplog.records) == 2


def test_a_validation_in_which_nothing_survives_is_no_accuracy_of_zero(tmp_path):
    with pytest.raises(UserCodeError, match=r"validation: not one of 2 .*KeyError"):
        fit(tmp_path / "run", *TINY_STEPS, "trainer.val_only=True", f"reward.path={__name__}:raises")
    assert not (tmp_path / "run" / "FINISHED").exists()


def test_the_export_keeps_the_template_that_was_trained_with(tmp_path):
    template = load_tokenizer("verl_mt://tiny").chat_template
    custom = tmp_path / "custom.jinja"
    custom.write_text("{#- mine -#}" + template)
    run = tmp_path / "run"
    overrides = ("trainer.total_training_steps=0", "trainer.export_at_end=True", "data.val_files=null")
    trainer = small_trainer(run, *TINY_STEPS, *overrides, f"actor_rollout_ref.model.custom_chat_template={custom}")
    custom.write_text("changed while the run was going on {{ messages }}")
    trainer.fit()
    assert load_tokenizer(str(run / "hf")).chat_template == "{#- mine -#}" + template
    messages = [{"role": "user", "content": "What is 3+4?"}]
    assert load_chat(str(run / "hf")).prompt_ids(messages, None) == load_chat("verl_mt://tiny").prompt_ids(
        messages, None
    )


def test_a_checkpoint_of_another_architecture_names_both(finished_runs, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    saved = finished_runs.original("plain") / "checkpoints" / "step_000002"
    folder = shutil.copytree(resolve_model_path("verl_mt://tiny"), tmp_path / "other")
    config = AutoConfig.from_pretrained(folder)
    layers, config.num_hidden_layers = config.num_hidden_layers, 1
    config.layer_types = config.layer_types[:1]
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    with pytest.raises(CheckpointError) as caught:
        small_trainer(
            tmp_path / "next",
            *TINY_STEPS,
            *NO_VALIDATION,
            f"actor_rollout_ref.model.path={folder}",
            "trainer.resume_mode=resume_path",
            f"trainer.resume_from_path={saved}",
        )
    said = str(caught.value)
    for part in (
        "plain/checkpoints/step_000002",
        "tiny",
        f"num_hidden_layers {layers}",
        str(folder),
        "num_hidden_layers 1",
    ):
        assert part in said, said
    assert not (tmp_path / "next").exists()
