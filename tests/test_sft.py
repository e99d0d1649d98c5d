"""The cold start: supervised training through the masks and workers of RL."""

from __future__ import annotations

import fcntl
import json
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from row_formats import as_parquet

from verl_mt import export, sft
from verl_mt.chat.template import ChatTemplate
from verl_mt.config_paths import configs_root
from verl_mt.data.row_files import read_rows
from verl_mt.data.run_files import read_jsonl_tolerant, trajectory_to_row, write_rows
from verl_mt.data.trajectory import StopReason, Trajectory, TrajectoryRecord
from verl_mt.errors import ConfigError, DataError
from verl_mt.extensions.supervised import training as supervised
from verl_mt.extensions.supervised.demonstration_rows import Demonstrations, load_demonstrations
from verl_mt.modeling.load import load_causal_lm
from verl_mt.tiny.problems import SYSTEM, generate
from verl_mt.trainer import build, build_rollout

pytestmark = pytest.mark.slow  # trainings

TINY = "verl_mt://tiny"


def conversations(seed: int, count: int) -> list[dict[str, Any]]:
    declared = yaml.safe_load((configs_root() / "tools_configs" / "calculator.yaml").read_text())
    tools = [entry["tool_schema"] for entry in declared["tools"]]
    rows = []
    for problem, _ in zip(generate(seed, "warm_start"), range(count)):
        call = {"name": "calculator", "arguments": {"expression": problem.expression}}
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": problem.question},
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "name": "calculator", "content": str(problem.answer)},
            {"role": "assistant", "content": f"#### {problem.answer}"},
        ]
        rows.append({"messages": messages, "tools": tools})
    return rows


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def chat() -> ChatTemplate:
    return build_rollout.build_chat(sft.config_of("x.jsonl", []))


def trainer_of(overrides: list[str], rows: list[Trajectory]) -> supervised.SupervisedTrainer:
    config = sft.config_of("x.jsonl", overrides)
    steps = supervised.total_steps(config, len(rows))
    workers = build.build_workers(config, total_steps=steps)
    return supervised.SupervisedTrainer(config, workers, 0, steps, Demonstrations(rows))


def naive_loss(module: Any, trajectories: list[Trajectory]) -> torch.Tensor:
    """Mean cross-entropy, one conversation at a time."""
    losses = []
    for trajectory in trajectories:
        (record,) = trajectory.records
        logits = module(input_ids=torch.tensor([record.token_ids])).logits[0, :-1].double()
        targets = torch.tensor(record.token_ids[1:])
        each = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        losses.append(each[torch.tensor(record.loss_mask[1:], dtype=torch.bool)])
    return torch.cat(losses).mean()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_loss_and_step_are_those_of_cross_entropy(chat, tmp_path, temperature):
    """Whatever the file of a run samples at."""
    file = write(tmp_path / "rows.jsonl", conversations(3, 6))
    rows = load_demonstrations(file, chat, "--data").trajectories
    (tmp_path / "rl.yaml").write_text(
        f"defaults: [ppo_trainer, _self_]\nactor_rollout_ref: {{rollout: {{temperature: {temperature}}}}}\n"
    )
    words = ["--config-path", str(tmp_path), "--config-name", "rl"]
    words += ["data.train_batch_size=6", "actor_rollout_ref.actor.optim.lr=1e-3"]
    trainer = trainer_of(words, rows)
    other = load_causal_lm(TINY)
    expected = naive_loss(other, rows)
    # A mean of float32 log-probs of logits of some tens: a millionth, whatever its size.
    loss = pytest.approx(expected.item(), rel=1e-5, abs=2e-6)
    assert trainer.loss(rows) == loss
    expected.backward()
    norm = torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
    optim = sft.config_of("x.jsonl", words).actor_rollout_ref.actor.optim
    torch.optim.AdamW(other.parameters(), lr=1e-3, betas=tuple(optim.betas), weight_decay=optim.weight_decay).step()
    (metrics,) = trainer.steps()
    assert metrics["loss"] == loss
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
    ours = dict(trainer.workers.policy_module.named_parameters())
    for name, parameter in other.named_parameters():
        # Adam's first step is lr * sign(gradient): where that is rounding noise the sign may differ.
        firm = parameter.grad.abs() > 1e-6
        assert torch.allclose(ours[name][firm], parameter[firm], atol=2e-5), name


def test_every_epoch_shows_every_row_once_and_steps_are_limited(chat, tmp_path):
    file = write(tmp_path / "rows.jsonl", conversations(4, 5))
    rows = load_demonstrations(file, chat, "--data").trajectories
    trainer = trainer_of(["data.train_batch_size=2", "trainer.total_epochs=2"], rows)
    batches = [[t.trajectory_id for t in batch] for batch in trainer._batches()]
    assert [len(b) for b in batches] == [2, 2, 1, 2, 2, 1]
    everything = sorted(t.trajectory_id for t in rows)
    for epoch in (batches[:3], batches[3:]):
        assert sorted(name for batch in epoch for name in batch) == everything
    assert batches[:3] != batches[3:]
    config = sft.config_of("x.jsonl", ["data.train_batch_size=2", "trainer.total_training_steps=3"])
    assert supervised.total_steps(config, 5) == 3


@pytest.mark.slow
def test_the_command_trains_validates_and_exports(tmp_path, capsys):
    data = write(tmp_path / "rows.jsonl", conversations(5, 16))
    words = ["--data", str(data), "--val-data", str(data), "--out", str(tmp_path / "out")]
    words += ["data.train_batch_size=8", "trainer.total_epochs=3", "actor_rollout_ref.actor.optim.lr=2e-4"]
    assert sft.main(words) == 0
    lines = read_jsonl_tolerant(tmp_path / "out" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5, 6]
    assert lines[-1]["val/loss"] < 0.8 * lines[0]["val/loss"]
    assert "training on 16 conversations" in capsys.readouterr().out
    config = sft.config_of("x.jsonl", [f"actor_rollout_ref.model.path={tmp_path}/out/hf"])
    rows = load_demonstrations(data, build_rollout.build_chat(config), "--data").trajectories
    module = load_causal_lm(str(tmp_path / "out" / "hf"))
    assert naive_loss(module, rows).item() == pytest.approx(lines[-1]["val/loss"], rel=1e-4)


def rollout(chat: ChatTemplate, name: str, reward: float | None, reason: StopReason) -> Trajectory:
    """Sampled in pieces that no tokenizer would choose."""
    pieces = [i for c in "#### 42" for i in chat.encode_text(c, neutral=False)] + [min(chat.end_token_ids)]
    record = TrajectoryRecord()
    record.append_given(chat.prompt_ids([{"role": "user", "content": "?"}]), kind="prompt", turn=0)
    record.append_sampled(pieces, [-0.5] * len(pieces), [3] * len(pieces), turn=1)
    found = Trajectory(name, name, name, name, records=[record], reward=reward, stop_reason=reason)
    found.turn_texts, found.num_turns = [chat.turn_text(pieces)], 1
    return found


def test_rollouts_are_trained_with_the_ids_that_were_sampled(chat, tmp_path):
    good, bad = (rollout(chat, n, r, StopReason.FINISHED) for n, r in (("good", 1.0), ("bad", 0.0)))
    failed = rollout(chat, "failed", None, StopReason.ERROR)
    (tmp_path / "rollouts").mkdir()
    write_rows(tmp_path / "rollouts" / "step_000001.jsonl", [trajectory_to_row(t, step=1) for t in (good, bad, failed)])
    found = load_demonstrations(tmp_path, chat, "--data", min_reward=0.5)
    assert (len(found.trajectories), found.num_low) == (1, 2)
    assert found.trajectories[0].records[0].token_ids == good.records[0].token_ids
    assert len(load_demonstrations(tmp_path, chat, "--data").trajectories) == 2
    as_parquet(tmp_path)
    for source in (tmp_path, tmp_path / "rollouts" / "step_000001.parquet"):
        again = load_demonstrations(source, chat, "--data")
        assert again.trajectories == load_demonstrations(tmp_path, chat, "--data").trajectories
        assert again.trajectories[0].records[0].token_ids == good.records[0].token_ids
    with pytest.raises(DataError, match=r"leaves nothing to train on: 0 conversations.*3 below the reward"):
        load_demonstrations(tmp_path, chat, "--data", min_reward=2.0)


def test_rollouts_of_another_tokenizer_are_refused(chat, tmp_path):
    strange = rollout(chat, "strange", 1.0, StopReason.FINISHED)
    strange.turn_texts = ["something else"]
    write_rows(tmp_path / "rows.jsonl", [trajectory_to_row(strange, step=1)])
    with pytest.raises(DataError, match=r"row 1: this rollout was sampled with another tokenizer.*'something else'"):
        load_demonstrations(tmp_path / "rows.jsonl", chat, "--data")


def test_long_conversations_are_left_out_and_counted(chat, tmp_path):
    rows = conversations(6, 2)
    rows[1]["messages"][1]["content"] *= 20
    found = load_demonstrations(write(tmp_path / "r.jsonl", rows), chat, "--data", max_tokens=400)
    assert (len(found.trajectories), found.num_long, "1 too long" in str(found)) == (1, 1, True)


@pytest.mark.parametrize(
    "row, text",
    [
        ({"prompt": "x"}, "neither a rollout nor a conversation.*It has prompt"),
        ({"messages": [{"role": "user", "content": "?"}]}, "no assistant message"),
        (
            {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!", "weight": 0}]},
            "every assistant message has weight 0",
        ),
    ],
)
def test_a_row_without_anything_to_learn_is_named(chat, tmp_path, row, text):
    file = write(tmp_path / "rows.jsonl", [*conversations(1, 1), row])
    with pytest.raises(DataError, match=f"rows.jsonl, row 2: .*{text}"):
        load_demonstrations(file, chat, "--data")


def test_a_reward_is_asked_of_rollouts_only(chat, tmp_path):
    with pytest.raises(DataError, match="--min-reward needs rollouts"):
        load_demonstrations(write(tmp_path / "r.jsonl", conversations(1, 1)), chat, "--data", min_reward=1.0)


def test_keys_that_mean_nothing_here_are_refused_not_ignored():
    with pytest.raises(ConfigError, match=r"reads no actor_rollout_ref.actor.ppo_epochs, algorithm.gamma. It reads"):
        sft.config_of("x.jsonl", ["actor_rollout_ref.actor.ppo_epochs=2", "algorithm.gamma=0.9"])
    with pytest.raises(ConfigError, match=r"lora_alpha=64 has no effect unless .*lora_rank is set \(it is 0"):
        sft.config_of("x.jsonl", ["actor_rollout_ref.model.lora_alpha=64"])


def test_what_the_file_of_a_run_says_of_its_validation_is_left_alone(tmp_path):
    own = tmp_path / "mine.yaml"
    own.write_text("defaults: [ppo_trainer, _self_]\ndata: {val_files: null, val_batch_size: 4, val_seed: 7}\n")
    config = sft.config_of("x.jsonl", ["--config-name", str(own), "actor_rollout_ref.model.lora_rank=4"])
    assert config is not None and config.data.val_batch_size == 4


def test_a_folder_that_is_taken_and_a_missing_file_are_one_line(tmp_path, capsys):
    assert sft.main(["--data", str(tmp_path / "none.jsonl"), "--out", str(tmp_path / "out")]) == 2
    assert "no file" in capsys.readouterr().err and not (tmp_path / "out").exists()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "x").write_text("x")
    assert sft.main(["--data", "x.jsonl", "--out", str(tmp_path / "taken")]) == 2
    assert "is not empty. Name a new folder" in capsys.readouterr().err


def test_a_parquet_file_does_as_well(chat, tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = conversations(8, 2)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    write(tmp_path / "rows.jsonl", rows)
    files = (tmp_path / "rows.parquet", tmp_path / "rows.jsonl")
    ours, theirs = (load_demonstrations(file, chat, "--data").trajectories for file in files)
    assert [t.records for t in ours] == [t.records for t in theirs]


TOOLS = "actor_rollout_ref.rollout.tool_kwargs.tools_config_file"


@pytest.fixture(scope="module")
def tools():
    return build_rollout.build_tools(sft.config_of("x.jsonl", [f"{TOOLS}=tools_configs/calculator.yaml"]))


def test_demonstrations_without_tools_are_shown_those_of_the_run(chat, tools, tmp_path):
    rows = conversations(7, 1)
    bare = [{"messages": row["messages"]} for row in rows]
    files = [write(tmp_path / f"{name}.jsonl", made) for name, made in (("own", rows), ("bare", bare))]
    own, shown = (load_demonstrations(f, chat, "--data", tools=tools).trajectories[0] for f in files)
    assert shown.records == own.records
    prompt = shown.records[0].token_ids[: shown.records[0].num_prompt_tokens]
    assert prompt == chat.prompt_ids(rows[0]["messages"][:2], tools.schemas())  # what a rollout of the run shows


def test_a_conversation_without_a_system_message_begins_with_that_of_the_run(chat, tmp_path):
    rows = conversations(7, 2)
    bare = [{"messages": row["messages"][1:], "tools": row["tools"]} for row in rows[:1]] + rows[1:]
    files = [write(tmp_path / f"{name}.jsonl", made) for name, made in (("whole", rows), ("bare", bare))]
    (tmp_path / "system.txt").write_text(SYSTEM)
    for given in (SYSTEM, str(tmp_path / "system.txt")):
        data = replace(sft.config_of("x.jsonl", []).data, system=given)
        whole, begun = (load_demonstrations(f, chat, "--data", data=data) for f in files)
        assert begun.fingerprint() == whole.fingerprint()
        assert [t.messages for t in begun.trajectories] == [row["messages"] for row in rows]
        assert begun.rows == bare
    assert load_demonstrations(files[1], chat, "--data").fingerprint() != whole.fingerprint()


@pytest.mark.parametrize(
    "change, text",
    [
        (lambda f: f.update(strict=False), r"calculator.function.strict is False in the row and absent in the run"),
        (
            lambda f: f.update(description="Adds."),
            r"calculator.function.description is 'Adds.' in the row and '.*' in the run",
        ),
        (
            lambda f: f.update(name="sum"),
            r"sum is {.* in the row and absent in the run; calculator is absent in the row and {.* in the run",
        ),
        (lambda f: f["parameters"].pop("required"), r"calculator.function.parameters.required is absent in the row"),
    ],
)
def test_demonstrations_with_other_tools_than_the_run_are_refused_with_the_difference(
    chat, tools, tmp_path, change, text
):
    rows = conversations(7, 2)
    rows[1] = json.loads(json.dumps(rows[1]))
    change(rows[1]["tools"][0]["function"])
    with pytest.raises(DataError, match=rf"rows.jsonl, row 2: its tools are not those.*{text}"):
        load_demonstrations(write(tmp_path / "rows.jsonl", rows), chat, "--data", tools=tools)


def test_the_order_of_keys_is_that_of_the_run(chat, tools, tmp_path):
    rows = conversations(7, 1)
    turned = [{**rows[0], "tools": [{k: t[k] for k in reversed(t)} for t in rows[0]["tools"]]}]
    files = [write(tmp_path / f"{name}.jsonl", made) for name, made in (("own", rows), ("turned", turned))]
    own, other = (load_demonstrations(f, chat, "--data", tools=tools).trajectories[0] for f in files)
    assert own.records == other.records


def test_supervised_training_reads_the_configuration_of_the_run(tmp_path):
    (tmp_path / "my_run.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\n"
        "actor_rollout_ref: {rollout: {n: 3, tool_kwargs: {tools_config_file: tools_configs/calculator.yaml}},\n"
        "  actor: {optim: {lr: 1e-7, weight_decay: 0.3}}}\n"
        "trainer: {total_training_steps: 2}\n"
    )
    words = ["--config-path", str(tmp_path), "--config-name", "my_run"]
    config = sft.config_of("demos.jsonl", words)
    assert config.actor_rollout_ref.rollout.tool_kwargs.tools_config_file == "tools_configs/calculator.yaml"
    assert config.actor_rollout_ref.actor.optim.weight_decay == 0.3
    assert (config.data.train_files, config.trainer.total_training_steps) == ("demos.jsonl", None)
    assert config.actor_rollout_ref.actor.optim.lr == 1e-5  # RL's learning rate and steps are not this command's
    with pytest.raises(ConfigError, match=r"reads no actor_rollout_ref\.rollout\.n\. It reads"):
        sft.config_of("demos.jsonl", [*words, "actor_rollout_ref.rollout.n=4"])


def test_the_command_takes_the_configuration_as_the_trainer_does(tmp_path, capsys):
    assert sft.main(["--data", "x.jsonl", "--out", str(tmp_path), "--config-name", "no_such_run"]) == 2
    assert "no no_such_run.yaml" in capsys.readouterr().err
    rows = conversations(7, 1)
    rows[0]["tools"][0]["function"]["strict"] = False
    data, out = write(tmp_path / "rows.jsonl", rows), tmp_path / "out"
    assert sft.main(["--data", str(data), "--out", str(out), "--config-name", "tiny"]) == 2
    assert "function.strict is False in the row and absent in the run" in capsys.readouterr().err and not out.exists()


def words_of(data: Path, out: Path) -> list[str]:
    words = [
        "--data",
        str(data),
        "--out",
        str(out),
        "--config-name",
        "tiny",
        "trainer.save_freq=2",
        "data.val_max_samples=2",
        "trainer.num_threads=1",
        "trainer.test_freq=4",
    ]
    return [*words, "data.train_batch_size=2", "trainer.total_epochs=2", "actor_rollout_ref.actor.optim.lr=2e-4"]


def interrupted_in(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between a step's update and what is noted of it."""
    update = supervised.SupervisedTrainer._step

    def once(self: Any, rows: Any) -> Any:
        found = update(self, rows)
        if self.step + 1 == step:
            signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(supervised.SupervisedTrainer, "_step", once)


@pytest.mark.slow
def test_a_training_that_was_interrupted_goes_on_and_ends_with_the_weights_of_one_that_was_not(
    tmp_path, capsys, monkeypatch
):
    data = write(tmp_path / "rows.jsonl", conversations(5, 4))
    assert sft.main(words_of(data, tmp_path / "whole")) == 0
    with monkeypatch.context() as patch:
        interrupted_in(3, patch)
        assert sft.main(words_of(data, tmp_path / "cut")) == 130
        assert sft.main([*words_of(data, tmp_path / "none"), "trainer.save_freq=-1"]) == 130
    capsys.readouterr()
    assert sft.main([*words_of(data, tmp_path / "none"), "trainer.save_freq=-1"]) == 0  # there is a checkpoint, too
    assert "after step 3" in capsys.readouterr().out
    assert sft.main([*words_of(data, tmp_path / "cut"), "actor_rollout_ref.actor.optim.lr=1e-3"]) == 2
    said = capsys.readouterr().err
    assert "lr: 0.001" in said and "or name a new folder with --out" in said and "experiment_name=<" not in said
    other = write(tmp_path / "other.jsonl", conversations(6, 4))
    data.rename(tmp_path / "kept.jsonl")
    other.rename(data)
    assert sft.main(words_of(data, tmp_path / "cut")) == 2
    assert "was trained on other conversations" in capsys.readouterr().err
    (tmp_path / "kept.jsonl").rename(data)
    with (tmp_path / "cut" / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert sft.main(words_of(data, tmp_path / "cut")) == 2
    assert "is in use by another process" in capsys.readouterr().err and not (tmp_path / "cut-2").exists()
    assert sft.main(words_of(data, tmp_path / "cut")) == 0
    assert "after step 3" in " ".join(capsys.readouterr().out.split())  # wherever the line is broken
    steps = [[line["step"] for line in read_jsonl_tolerant(tmp_path / n / "metrics.jsonl")] for n in ("whole", "cut")]
    assert steps == [[0, 1, 2, 3, 4]] * 2
    whole, cut = (load_causal_lm(str(tmp_path / name / "hf")).state_dict() for name in ("whole", "cut"))
    assert all(torch.equal(tensor, cut[name]) for name, tensor in whole.items())
    assert sft.main(words_of(data, tmp_path / "cut")) == 2
    assert "is not empty. Name a new folder" in capsys.readouterr().err


def test_what_a_run_says_of_its_policy_loss_is_not_supervised_trainings(tmp_path):
    (tmp_path / "rl.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\n"
        "actor_rollout_ref: {actor: {policy_loss: {loss_mode: gspo}, top_entropy_quantile: 0.2, entropy_coeff: 0.5,\n"
        "  use_kl_loss: true, ppo_epochs: 3, ppo_mini_batch_size: 2, grad_clip: 0.7, optim: {weight_decay: 0.3}}}\n"
        "data: {train_batch_size: 8}\nalgorithm: {adv_estimator: gae, use_kl_in_reward: true}\n"
    )
    words = ["--config-path", str(tmp_path), "--config-name", "rl"]
    config = sft.config_of("demos.jsonl", words)
    plain = sft.config_of("demos.jsonl", [])
    actor, other = config.actor_rollout_ref.actor, plain.actor_rollout_ref.actor
    assert (actor.grad_clip, actor.optim.weight_decay) == (0.7, 0.3)
    assert replace(actor, grad_clip=other.grad_clip, optim=other.optim) == other
    assert config.algorithm == plain.algorithm and actor.loss_agg_mode == "token-mean"
    # Its mini-batches do not have to divide another batch.
    assert sft.config_of("demos.jsonl", [*words, "data.train_batch_size=3"]).data.train_batch_size == 3
    agg = "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"
    assert sft.config_of("demos.jsonl", [*words, agg]).actor_rollout_ref.actor.loss_agg_mode == "seq-mean-token-mean"


@pytest.mark.slow
def test_a_run_is_validated_by_rollouts_as_the_trainer_does_and_may_end_at_an_accuracy(tmp_path, capsys):
    data = write(tmp_path / "rows.jsonl", conversations(5, 4))
    words = [*words_of(data, tmp_path / "out"), "trainer.val_before_train=false", "trainer.test_freq=2"]
    words.append("data.val_max_samples=10")
    assert sft.main([*words, "--stop-at-accuracy", "0.05"]) == 0
    lines = read_jsonl_tolerant(tmp_path / "out" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]  # the shipped model is right more often than that
    assert "val/accuracy" not in lines[0] and lines[1]["val/accuracy"] > 0.2
    assert {"val/accuracy_greedy", "val/tool_calls_mean"} <= lines[1].keys()
    said = " ".join(capsys.readouterr().out.split())
    assert "validation after step 2: accuracy" in said and "ended at accuracy" in said
    rows = list(read_rows(tmp_path / "out" / "rollouts" / "val_000002.parquet"))
    assert len(rows) == 10 and any(row["tool_calls"] for row in rows)  # with the run's tools
    assert (tmp_path / "out" / "FINISHED").exists()


@pytest.mark.slow
def test_a_validation_that_was_broken_off_is_made_by_the_command_that_goes_on(tmp_path, monkeypatch):
    data = write(tmp_path / "rows.jsonl", conversations(5, 4))
    words = [*words_of(data, tmp_path / "cut"), "trainer.test_freq=3", "trainer.deterministic=true"]
    assert sft.main([*words, "--out", str(tmp_path / "whole")]) == 0
    measure = supervised.Sampled.measure

    def broken_off(self: Any, step: int, while_waiting: Any) -> Any:
        if step == 3:
            signal.raise_signal(signal.SIGINT)
        return measure(self, step, while_waiting)

    with monkeypatch.context() as patch:
        patch.setattr(supervised.Sampled, "measure", broken_off)
        assert sft.main(words) == 130
    assert read_jsonl_tolerant(tmp_path / "cut" / "metrics.jsonl")[-1]["step"] == 2
    assert sft.main(words) == 0
    whole, cut = ((tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "cut"))
    assert [json.loads(line) for line in cut.splitlines()] == [json.loads(line) for line in whole.splitlines()]
    ours, theirs = (load_causal_lm(str(tmp_path / name / "hf")).state_dict() for name in ("whole", "cut"))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.mark.slow
def test_checkpoints_are_kept_by_number_and_become_models(tmp_path):
    data = write(tmp_path / "rows.jsonl", conversations(5, 4))
    words = [word for word in words_of(data, tmp_path / "out") if not word.startswith("data.val_max_samples")]
    words += ["--no-rollouts", "--val-data", str(data), "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=2"]
    assert sft.main(words) == 0
    kept = sorted(p.name for p in (tmp_path / "out" / "checkpoints").glob("step_*"))
    assert kept == ["step_000003", "step_000004"]
    assert (
        export.main(
            ["--checkpoint", str(tmp_path / "out" / "checkpoints" / "step_000004"), "--out", str(tmp_path / "model")]
        )
        == 0
    )
    last, exported = (load_causal_lm(str(f)).state_dict() for f in (tmp_path / "out" / "hf", tmp_path / "model"))
    assert all(torch.equal(tensor, exported[name]) for name, tensor in last.items())


def test_without_out_the_directory_is_beside_that_of_the_run(tmp_path):
    (tmp_path / "my_run.yaml").write_text("defaults: [ppo_trainer, _self_]\ntrainer: {experiment_name: mine}\n")
    words = ["--config-path", str(tmp_path), "--config-name", "my_run"]
    trainer = sft.config_of("x.jsonl", words).trainer
    assert (trainer.experiment_name, trainer.default_local_dir) == ("mine-sft", None)
    assert sft.config_of("x.jsonl", [*words, "trainer.experiment_name=cold"]).trainer.experiment_name == "cold"
    (tmp_path / "my_run.yaml").write_text("defaults: [ppo_trainer, _self_]\ntrainer: {default_local_dir: out/a/}\n")
    assert sft.config_of("x.jsonl", words).trainer.default_local_dir == "out/a-sft"
    moved = sft.config_of("x.jsonl", [*words, "trainer.default_local_dir=out/b"])
    assert moved.trainer.default_local_dir == "out/b"


def test_an_accuracy_to_stop_at_needs_rollouts_and_those_need_prompts(tmp_path, capsys):
    wanted = {
        ("--stop-at-accuracy", "50", "--rollouts"): "must be a share above 0 and at most 1",
        ("--stop-at-accuracy", "0.5"): "needs prompts to sample",
        ("--stop-at-accuracy", "0.5", "--config-name", "tiny", "--no-rollouts"): "needs prompts to sample",
        ("--stop-at-accuracy", "0.5", "--config-name", "tiny"): "trainer.test_freq=N",
        ("--rollouts",): "has no data.val_files",
    }
    data = write(tmp_path / "rows.jsonl", conversations(1, 1))
    for given, said in wanted.items():
        assert sft.main(["--data", str(data), "--out", str(tmp_path / "out"), *given]) == 2
        assert said in capsys.readouterr().err and not (tmp_path / "out").exists()
    for idle in ("actor_rollout_ref.rollout.n=4", "data.train_max_samples=3"):
        with pytest.raises(ConfigError, match=f"reads no {idle.partition('=')[0]}. It reads"):
            sft.config_of("demos.jsonl", [idle], rollouts=True)
    with pytest.raises(
        ConfigError, match=r"without rollouts .* reads no actor_rollout_ref\.rollout\.response_length\. It reads"
    ):
        sft.config_of("demos.jsonl", ["actor_rollout_ref.rollout.response_length=64"])
    config = sft.config_of("demos.jsonl", ["actor_rollout_ref.rollout.response_length=64"], rollouts=True)
    assert config.actor_rollout_ref.rollout.response_length == 64


def test_where_engines_live_is_read_with_rollouts_only():
    rollout = "actor_rollout_ref.rollout."
    words = ["trainer.placement=ray", rollout + "name=sglang", rollout + "placement=separate", rollout + "nnodes=1"]
    words += [rollout + "n_workers_per_node=2"]
    config = sft.config_of("demos.jsonl", words, rollouts=True)
    assert (config.actor_rollout_ref.rollout.nnodes, config.actor_rollout_ref.rollout.n_workers_per_node) == (1, 2)
    with pytest.raises(ConfigError, match=r"reads no .*rollout\.nnodes"):
        sft.config_of("demos.jsonl", words)


def test_prompts_that_cannot_be_read_leave_no_engine_running(tmp_path):
    words = [f"data.val_files={tmp_path / 'no_such_file.jsonl'}"]
    config = sft.config_of("demos.jsonl", words, rollouts=True)
    workers = build.build_workers(config, total_steps=1)
    with pytest.raises(DataError, match="no_such_file"):
        supervised.Sampled(config, workers, 1)
    assert "rollout" not in {thread.name for thread in threading.enumerate()}


def test_how_the_ranks_hold_the_policy_is_as_the_file_of_the_run_says(tmp_path):
    """Not a matter of RL: the same workers train."""
    actor = {"fsdp_size": 1, "ulysses_sequence_parallel_size": 2, "optimizer_offload": True, "share_prefixes": False}
    lines = "".join(f"    {name}: {value}\n" for name, value in {**actor, "ppo_epochs": 3}.items())
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\ntrainer: {placement: ray, n_workers_per_node: 2}\n"
        f"actor_rollout_ref:\n  actor:\n{lines}"
    )
    words = ["--config-path", str(tmp_path), "--config-name", "mine"]
    for more in ([], [f"actor_rollout_ref.actor.{name}={value}" for name, value in actor.items()]):
        config = sft.config_of("x.jsonl", [*words, *more, "trainer.worker_timeout_s=60"], rollouts=False)
        found = config.actor_rollout_ref.actor
        assert {name: getattr(found, name) for name in actor} == actor and found.ppo_epochs == 1
    with pytest.raises(ConfigError, match=r"reads no actor_rollout_ref\.actor\.param_offload"):
        sft.config_of("x.jsonl", [*words, "actor_rollout_ref.actor.param_offload=True"], rollouts=False)
