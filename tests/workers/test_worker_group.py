"""The worker group that a config declares."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from actor_toys import tiny_policy

from verl_mt import engines
from verl_mt.config.actor import (
    ActorConfig,
    CriticConfig,
    CriticModelConfig,
    CriticOptimConfig,
    ModelConfig,
    RefConfig,
)
from verl_mt.config.rollout import RolloutConfig
from verl_mt.config.schema import ActorRolloutRefConfig
from verl_mt.data import batch as col
from verl_mt.data.trajectory import StopReason, Trajectory, TrajectoryRecord
from verl_mt.errors import CheckpointError, ConfigError
from verl_mt.modeling.passes import PLAIN
from verl_mt.workers import setup, worker_group
from verl_mt.workers.critic import CriticSchedule, filled_in
from verl_mt.workers.setup import AlgorithmNeeds, Placement, WorkerSetup
from verl_mt.workers.sharding import ALONE, Ranks, ShardedCritic, ShardedPolicy
from verl_mt.workers.worker_group import InlineWorkerGroup, build_worker_group, load_workers_state


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    sizes = {"vocab_size": 29, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)).save_pretrained(folder)
    return folder


def a_batch():
    trajectories = []
    for sample, reward in enumerate((1.0, 0.0)):
        record = TrajectoryRecord()
        record.append_given([1, 2, 3], kind="prompt", turn=0)
        record.append_sampled([4 + sample, 6], [-1.0, -1.0], [0, 0], turn=1)
        name = f"t{sample}"
        trajectories.append(
            Trajectory(name, "p", "p", name, records=[record], reward=reward, stop_reason=StopReason.FINISHED)
        )
    batch = col.build_batch(trajectories, pad_token_id=0)
    assert batch is not None
    batch[col.ADVANTAGES] = col.expand_to_tokens(batch, torch.tensor([1.0, -1.0]))
    return batch


def build(folder, *, checkpointing: bool = False, **actor):
    model = ModelConfig(path=str(folder), enable_gradient_checkpointing=checkpointing)
    config = ActorRolloutRefConfig(model=model, actor=ActorConfig(**actor))
    return build_worker_group(config, total_steps=10, train_batch_size=1)


def test_without_a_kl_term_there_is_no_reference_policy(model_folder):
    workers = build(model_folder)
    batch = a_batch()
    workers.add_ref_log_probs(batch)
    assert workers.ref is None and col.REF_LOG_PROBS not in batch.keys()  # noqa: SIM118
    assert workers.policy_module is workers.actor.module
    assert workers.update(batch)["actor/num_updates"] == 1


def test_the_reference_policy_never_moves_and_survives_a_resume(model_folder):
    workers = build(model_folder, use_kl_loss=True)
    start = workers.compute_log_probs(a_batch())
    for _ in range(3):
        batch = a_batch()
        workers.add_ref_log_probs(batch)
        torch.testing.assert_close(batch[col.REF_LOG_PROBS], start)
        metrics = workers.update(batch)
    assert metrics["actor/kl_loss"] > 0
    resumed = build(model_folder, use_kl_loss=True)
    resumed.load_state_dict(workers.state_dict())
    assert torch.equal(resumed.compute_log_probs(a_batch()), workers.compute_log_probs(a_batch()))
    batch = a_batch()
    resumed.add_ref_log_probs(batch)
    torch.testing.assert_close(batch[col.REF_LOG_PROBS], start)


def test_gradient_checkpointing_is_switched_on_by_the_config(model_folder):
    workers = build(model_folder, checkpointing=True)
    assert workers.policy_module.is_gradient_checkpointing
    assert workers.update(a_batch())["actor/num_updates"] == 1
    assert not workers.policy_module.training


def test_a_device_that_cannot_be_had_is_refused(model_folder):
    config = ActorRolloutRefConfig(model=ModelConfig(path=str(model_folder)))
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"trainer\.device=cuda: torch finds no CUDA device"):
            build_worker_group(config, total_steps=1, device="cuda")


@pytest.mark.slow
def test_workers_in_this_process_load_neither_ray_nor_what_only_ranks_need(model_folder):
    code = (
        "import sys; from test_worker_group import build\n"
        f"build({str(model_folder)!r}); assert 'ray' not in sys.modules\n"
        "assert 'torch.distributed.checkpoint' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)


def test_an_offloaded_reference_policy_gives_the_same_log_probs(model_folder):
    """On the CPU there is nothing to move; the key only says where the weights wait."""
    results = []
    for offload in (False, True):
        config = ActorRolloutRefConfig(
            model=ModelConfig(path=str(model_folder)),
            actor=ActorConfig(use_kl_loss=True),
            ref=RefConfig(offload=offload),
        )
        batch = a_batch()
        build_worker_group(config, total_steps=1, train_batch_size=1).add_ref_log_probs(batch)
        results.append(batch[col.REF_LOG_PROBS])
    assert torch.equal(*results)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_trial_of_a_policy_over_ranks_is_for_their_device(monkeypatch, rank):
    """And with what `actor.fsdp_size` says: all that `_spread` hands on."""
    asked, made = [], []
    monkeypatch.setattr(setup, "choose_passes", lambda module, **options: asked.append(options) or PLAIN)
    monkeypatch.setattr(setup, "ShardedPolicy", lambda module, ranks, **options: made.append((ranks, options)))
    monkeypatch.setattr(Ranks, "gather", lambda ranks, value: [PLAIN] * ranks.size)
    actor = ActorConfig(fsdp_size=2, ulysses_sequence_parallel_size=2, share_prefixes=False)
    config = ActorRolloutRefConfig(model=ModelConfig(path="x"), actor=actor)
    placement = setup.Placement("ray", n_workers_per_node=4)
    worker_setup = setup.WorkerSetup(config, 1, None, "cuda", 0, placement)
    ranks = worker_setup.ranks(rank)
    assert (ranks.size, ranks.sequence, ranks.num_parts) == (4, 2, 2)
    setup._spread(tiny_policy(), worker_setup, ranks)
    assert asked == ([{"remove_padding": True, "share_prefixes": False, "device": "cuda"}] if rank == 0 else [])
    assert made == [(ranks, {"device_type": "cuda", "offload": False, "shard": 2})]


def test_peft_is_required_only_where_adapters_are_trained(monkeypatch):
    def lacking() -> None:
        raise ConfigError("peft is not installed")

    def loading(setup) -> None:
        raise ConfigError("the model is loaded")

    monkeypatch.setattr(worker_group, "require_peft", lacking)
    monkeypatch.setattr(worker_group, "load_workers", loading)
    for lora_rank, said in ((0, "the model is loaded"), (4, "peft is not installed")):
        config = ActorRolloutRefConfig(model=ModelConfig(lora_rank=lora_rank))
        with pytest.raises(ConfigError, match=said):
            build_worker_group(config, total_steps=1, train_batch_size=1)


# What a setup says, without a model


def a_setup(
    *, actor: dict | None = None, model: dict | None = None, rollout: dict | None = None, **given
) -> WorkerSetup:
    config = ActorRolloutRefConfig(
        model=ModelConfig(**{"path": "x"} | (model or {})),
        actor=ActorConfig(**(actor or {})),
        rollout=RolloutConfig(**(rollout or {})),
    )
    fields = {"total_steps": 10, "train_batch_size": 4, "device": "cpu", "seed": 3, "placement": Placement()}
    return WorkerSetup(config, **fields | given)


def test_ranks_are_those_of_all_machines():
    placement = Placement("ray", nnodes=3, n_workers_per_node=2)
    assert placement.num_ranks == 6
    wanted = a_setup(placement=placement, actor={"ulysses_sequence_parallel_size": 2})
    assert wanted.ranks(4) == Ranks(4, 6, 2)


@pytest.mark.parametrize(
    ("given", "corrects"),
    [({}, False), ({"rollout_is": "token"}, True), ({"off_policy_sequence_mask_delta": 0.5}, True)],
)
def test_a_correction_is_made_only_where_something_is_corrected(given, corrects):
    correction = AlgorithmNeeds(rollout_correction=given).correction
    assert (correction is not None) == corrects
    if correction is not None:
        assert correction.options.off_policy_sequence_mask_delta == given.get("off_policy_sequence_mask_delta")


@pytest.mark.parametrize(
    ("kl_loss", "in_reward", "has_ref"),
    [(False, False, False), (True, False, True), (False, True, True), (True, True, True)],
)
def test_a_reference_policy_is_loaded_for_a_kl_term_of_loss_or_reward(kl_loss, in_reward, has_ref):
    needs = AlgorithmNeeds(kl_in_reward=in_reward)
    assert a_setup(actor={"use_kl_loss": kl_loss}, algorithm=needs).has_ref == has_ref


@pytest.mark.parametrize(
    ("samples_from_policy", "engine_s", "patience"),
    [(True, 500.0, 100.0), (False, 500.0, 1500.0), (False, 20.0, 100.0)],
)
def test_ranks_wait_as_long_as_an_engine_may_take(monkeypatch, samples_from_policy, engine_s, patience):
    asked = []
    monkeypatch.setattr(engines, "samples_from_policy", lambda name: asked.append(name) or samples_from_policy)
    placement = Placement(worker_timeout_s=100.0)
    assert a_setup(placement=placement, rollout={"engine_timeout_s": engine_s}).patience_s == patience
    assert asked == [RolloutConfig().name]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (ALONE, ("load", {"device": "cuda"})),
        (Ranks(0, 2), ("load", {"device": "cpu"})),
        (Ranks(1, 2), ("empty", {})),
    ],
)
@pytest.mark.parametrize("path", [None, "other"])
@pytest.mark.parametrize("trained", [True, False])
def test_rank_0_loads_the_weights_and_others_leave_them_empty(monkeypatch, ranks, expected, path, trained):
    done = []
    monkeypatch.setattr(setup, "source_of", lambda model: {"path": model.path, "revision": "r", "dtype": "d"})
    monkeypatch.setattr(setup, "load_causal_lm", lambda **options: done.append(("load", options)))
    monkeypatch.setattr(setup, "empty_causal_lm", lambda **options: done.append(("empty", options)))
    setup._first_policy(a_setup(device="cuda"), ranks, path, trained=trained)
    kind, options = expected
    source = (
        {"path": "x", "revision": "r", "dtype": "d"} if path is None else {"path": path, "revision": None, "dtype": "d"}
    )
    assert done == [(kind, source | options | ({"exact": trained} if kind == "load" else {}))]
    done.clear()
    setup.load_policy(a_setup(), device="cuda")
    assert done == [("load", {"path": "x", "revision": "r", "dtype": "d", "device": "cuda"})]


def test_all_ranks_believe_rank_0_of_the_adapters(monkeypatch):
    told = []
    monkeypatch.setattr(setup, "set_lora", lambda module, lora: told.append((module, lora)))
    assert setup._agreed(None, "module", ALONE) is None and told == []
    monkeypatch.setattr(Ranks, "gather", lambda ranks, value: ["first", value])
    assert setup._agreed("own", "module", Ranks(1, 2)) == "first" and told == [("module", "first")]


def small(vocab: int = 7):
    module = torch.nn.Linear(2, 1)
    sizes = SimpleNamespace(vocab_size=vocab, hidden_size=6)
    module.config = SimpleNamespace(get_text_config=lambda: sizes)
    module.switched_on = False
    module.gradient_checkpointing_enable = lambda: setattr(module, "switched_on", True)
    return module


class Loads:
    """The parts of `load_workers` that need a model, which note what they were given."""

    def __init__(self, monkeypatch, *, adapters: bool = False):
        self.made: list = []
        self.policies: list = []
        lora = SimpleNamespace() if adapters else None
        monkeypatch.setattr(setup, "_first_policy", self.first)
        monkeypatch.setattr(setup, "_spread", self.spread)
        monkeypatch.setattr(setup, "add_adapters", self.adapters)
        monkeypatch.setattr(setup, "freeze_vision", lambda module: self.made.append("vision is frozen"))
        monkeypatch.setattr(setup, "lora_of", lambda module: lora)
        monkeypatch.setattr(setup, "set_lora", lambda module, lora: None)
        monkeypatch.setattr(setup, "offload", lambda *workers: self.made.append(("offload", workers)))
        monkeypatch.setattr(setup, "ValueHead", lambda size, *, seed: torch.nn.Linear(size, seed))
        monkeypatch.setattr(setup, "ValueModel", lambda model: ("values of", model))
        for name in ("ActorWorker", "RefWorker", "CriticWorker"):
            monkeypatch.setattr(
                setup, name, lambda module, config, name=name, **options: self.worker(name, module, config, options)
            )

    def first(self, setup, ranks, path=None, *, trained=False):
        assert isinstance(setup, WorkerSetup) and isinstance(ranks, Ranks)
        self.policies.append((path, trained))
        return small(5 if path == "small" else 7)

    def spread(self, module, setup, ranks, *, offload=False):
        assert isinstance(setup, WorkerSetup) and isinstance(ranks, Ranks)
        if offload:
            self.made.append("offloaded")
        return module

    def adapters(self, module, model, *, seed):
        self.made.append(("adapters", seed))
        return module

    def worker(self, name, module, config, options):
        return SimpleNamespace(
            name=name, module=module, config=config, options=options, loss=SimpleNamespace(correction=None)
        )


def test_an_actor_is_told_of_sampling_and_of_the_run(monkeypatch):
    loads = Loads(monkeypatch)
    wanted = a_setup(rollout={"temperature": 0.7, "response_length": 55}, algorithm=AlgorithmNeeds(critic_warmup=2))
    actor, ref, critic = setup.load_workers(wanted)
    assert (actor.name, ref, critic) == ("ActorWorker", None, None) and actor.config is wanted.config.actor
    assert actor.options == {
        "temperature": 0.7, "total_steps": 8, "train_batch_size": 4, "norm_constant": 55, "seed": 3,
    }  # fmt: skip
    assert actor.loss.correction is None and not actor.module.switched_on
    assert loads.policies == [(None, True)]
    assert loads.made == [("adapters", 3), ("offload", (actor, None))]


def test_switches_of_the_model_and_a_correction(monkeypatch):
    loads = Loads(monkeypatch, adapters=True)
    model = {"enable_gradient_checkpointing": True, "freeze_vision": True, "lora_rank": 4}
    needs = AlgorithmNeeds(rollout_correction={"rollout_is": "token"}, kl_in_reward=True)
    actor, ref, _ = setup.load_workers(a_setup(model=model, algorithm=needs, rollout={"temperature": 0.7}))
    assert actor.module.switched_on and actor.loss.correction.options.rollout_is == "token"
    assert loads.policies == [(None, False)] and loads.made[:2] == [("adapters", 3), "vision is frozen"]
    assert ref.module is actor.module and ref.options == {"actor": actor.config, "temperature": 0.7}


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("offload", [True, False])
def test_the_reference_policy_is_a_copy_of_the_first_policy_or_loaded_once_more(monkeypatch, alone, offload):
    monkeypatch.setattr(Ranks, "gather", lambda ranks, value: [value])
    loads = Loads(monkeypatch)
    wanted = a_setup(actor={"use_kl_loss": True}, rollout={"temperature": 0.7})
    wanted = replace(wanted, config=replace(wanted.config, ref=RefConfig(offload=offload)))
    actor, ref, _ = setup.load_workers(wanted, ALONE if alone else Ranks(0, 2))
    assert loads.policies == [(None, True)] + ([] if alone else [(None, False)])
    assert ref.module is not actor.module and ref.config is wanted.config.ref
    assert torch.equal(ref.module.weight, actor.module.weight) == alone
    assert not any(p.requires_grad for p in ref.module.parameters())
    assert all(p.requires_grad for p in actor.module.parameters())
    assert ref.options == {"actor": wanted.config.actor, "temperature": 0.7, "device": "cpu"}
    assert ("offloaded" in loads.made) == offload


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("switches", [True, False])
def test_a_critic_is_told_of_the_run(monkeypatch, shared, switches):
    loads = Loads(monkeypatch)
    critic_config = CriticConfig(share_trunk=shared, model=CriticModelConfig(path="other"))
    wanted = a_setup(
        actor={"param_offload": switches, "shuffle": switches}, rollout={"response_length": 55},
        model={"enable_gradient_checkpointing": switches},
        algorithm=AlgorithmNeeds(critic=critic_config, critic_warmup=2),
    )  # fmt: skip
    actor, _, critic = setup.load_workers(wanted)
    schedule = CriticSchedule(total_steps=10, train_batch_size=4, warmup_steps=2, norm_constant=55, seed=3)
    assert critic.config == filled_in(critic_config, wanted.config.actor)
    assert loads.made[-1] == ("offload", (actor, critic))
    options = {"schedule": schedule, "shuffle": switches}
    if shared:
        assert (critic.module.in_features, critic.module.out_features) == (6, 3)
        assert critic.options == options | {"policy": actor.module} and loads.policies == [(None, True)]
    else:
        kind, model = critic.module
        assert kind == "values of" and model.switched_on == switches
        assert critic.options == options | {"param_offload": switches}
        assert loads.policies == [(None, True), ("other", True)]


def test_a_critic_reads_all_tokens_that_the_policy_writes(monkeypatch):
    Loads(monkeypatch)
    needs = AlgorithmNeeds(critic=CriticConfig(model=CriticModelConfig(path="small")))
    with pytest.raises(ConfigError, match=r"critic\.model\.path=small has 5 tokens and the policy 7"):
        setup.load_workers(a_setup(algorithm=needs))


def test_plug_ins_are_imported_and_objects_kept_before_a_device_is_asked_for(monkeypatch):
    done = []
    monkeypatch.setattr(setup, "import_plugins", lambda names: done.append(names))
    monkeypatch.setattr(setup, "give_objects", lambda objects: done.append(objects))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    placement = Placement(external_plugins=("p.py",), objects={"object:x": 1})
    with pytest.raises(ConfigError, match=r"trainer\.device=cuda:1: torch finds no CUDA device"):
        setup.load_workers(a_setup(device="cuda:1", placement=placement))
    assert done == [("p.py",), {"object:x": 1}]
    loads = Loads(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    setup.load_workers(a_setup(device="cuda:1"))
    assert loads.policies


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("critic", [True, False])
def test_a_policy_over_ranks_passes_as_rank_0_found_it_can(monkeypatch, rank, critic):
    done = []
    monkeypatch.setattr(setup, "choose_passes", lambda module, **options: "chosen")
    monkeypatch.setattr(setup, "use_passes", lambda module, passes: done.append(passes))
    monkeypatch.setattr(Ranks, "gather", lambda ranks, value: ["chosen" if rank else value, value])
    for kind in (ShardedCritic, ShardedPolicy):
        monkeypatch.setattr(setup, kind.__name__, lambda *args, kind=kind, **options: (kind.__name__, args, options))
    module = SimpleNamespace()
    monkeypatch.setattr(setup, "ValueModel", SimpleNamespace if critic else int)
    ranks = Ranks(rank, 2)
    made = setup._spread(module, a_setup(), ranks, offload=True)
    kind = "ShardedCritic" if critic else "ShardedPolicy"
    assert made == (kind, (module, ranks), {"device_type": "cpu", "offload": True, "shard": None})
    assert done == ["chosen"]
    assert setup._spread(module, a_setup(), ALONE) is module


# A group in this process, with workers that note calls


class Note:
    def __init__(self, name: str, calls: list, offloads: bool = False):
        self.name, self.calls, self.offloads = name, calls, offloads
        self.module, self.device = torch.nn.Linear(2, 1), "cpu"
        self.module.bias.requires_grad_(False)

    def __getattr__(self, method: str):
        def called(*args):
            self.calls.append((self.name, method, *args))
            return {"tensors": {"w": self.module.weight}, "of": self.name} if method == "state_dict" else torch.ones(1)

        return called


def noting_group(*, critic: bool = True, ref: bool = True, offloads: bool = False):
    calls: list = []
    actor = Note("actor", calls, offloads)
    return InlineWorkerGroup(
        actor, Note("ref", calls) if ref else None, Note("critic", calls) if critic else None
    ), calls


ONLOAD = [("actor", "onload"), ("critic", "onload")]
OFFLOAD = [("actor", "offload"), ("critic", "offload")]


def test_a_group_says_what_its_policy_is():
    group, _ = noting_group(offloads=True)
    assert (group.num_parameters, group.num_trained, group.where, group.offloads) == (3, 2, "cpu", True)
    assert not noting_group()[0].offloads


def test_weights_are_at_hand_while_they_are_used(monkeypatch):
    group, calls = noting_group()
    monkeypatch.setattr(
        worker_group, "update_policy_and_critic", lambda *args: calls.append(("group", "update", *args)) or {}
    )
    monkeypatch.setattr(worker_group, "adapter_of", lambda module: calls.append(("group", "adapter")) or "adapter")
    batch = {}
    uses = {
        "update": lambda: group.update(batch),
        "adapter": group.adapter,
        "log_probs": lambda: group.compute_log_probs(batch),
        "ref": lambda: group.add_ref_log_probs(batch),
        "values": lambda: group.add_values(batch),
        "policy_module": lambda: group.policy_module,
    }
    expected = {
        "update": [("group", "update", group.actor, group.critic, batch)],
        "adapter": [("group", "adapter")],
        "log_probs": [("actor", "compute_log_probs", batch)],
        "ref": [("ref", "compute_log_probs", batch)],
        "values": [("critic", "compute_values", batch)],
        "policy_module": [],
    }
    for name, use in uses.items():
        calls.clear()
        use()
        assert calls == ONLOAD + expected[name], name
    assert [*batch] == [col.REF_LOG_PROBS, col.VALUES]
    calls.clear()
    group.offload()
    assert calls == OFFLOAD


def test_weights_stay_while_somebody_uses_them():
    group, calls = noting_group()
    with group._at_hand(), group._at_hand():
        group.offload()
    assert calls == ONLOAD * 2
    with pytest.raises(RuntimeError), group._at_hand():
        raise RuntimeError
    group.offload()
    assert calls[-2:] == OFFLOAD


def test_nothing_is_brought_for_a_worker_that_is_not_there():
    group, calls = noting_group(ref=False, critic=False)
    batch = {}
    group.add_ref_log_probs(batch)
    group.add_values(batch)
    assert calls == [] and batch == {}
    assert [*group.state_dict()] == ["actor"] and group.save_shards(Path()) == {}


@pytest.mark.parametrize("offloads", [True, False])
def test_saved_tensors_are_copies_only_where_live_ones_may_go(offloads):
    group, calls = noting_group(offloads=offloads)
    state = group.state_dict()
    assert calls[:2] == ONLOAD and {name: part["of"] for name, part in state.items()} == {
        "actor": "actor",
        "critic": "critic",
    }
    for worker in (group.actor, group.critic):
        found = state[worker.name]["tensors"]["w"]
        assert torch.equal(found, worker.module.weight)
        assert (found.data_ptr() == worker.module.weight.data_ptr()) != offloads


@pytest.mark.parametrize("now", [True, False])
@pytest.mark.parametrize("then", [True, False])
def test_a_checkpoint_has_a_critic_where_the_run_has_one(now, then):
    group, calls = noting_group(critic=now)
    state = {"actor": {"a": 1}} | ({"critic": {"c": 1}} if then else {})
    if now != then:
        estimator = "gae" if then else "another one than gae"
        with pytest.raises(CheckpointError, match=rf"algorithm.adv_estimator was {estimator}\."):
            group.load_state_dict(state, Path("folder"))
    else:
        load_workers_state(group.actor, group.critic, state, Path("folder"))
        expected = [("actor", "load_checkpoint", {"a": 1}, Path("folder"), "actor")]
        assert calls == expected + [("critic", "load_checkpoint", {"c": 1}, Path("folder"), "critic")] * now


def test_the_group_that_is_built_is_the_one_of_the_placement(monkeypatch):
    told = []
    monkeypatch.setattr(
        worker_group.placements, "find", lambda name: lambda setup: told.append((name, setup)) or "on ray"
    )
    config = ActorRolloutRefConfig(model=ModelConfig(path="x"))
    options = {"total_steps": 5, "train_batch_size": 2, "device": torch.device("cpu"), "seed": 9}
    for placement, kind in (("ray", Placement(kind="ray")), (Placement("ray", nnodes=2), Placement("ray", nnodes=2))):
        assert build_worker_group(config, **options, placement=placement) == "on ray"
        ((path, wanted),) = told
        assert path == "ray"
        assert wanted == WorkerSetup(config, 5, 2, "cpu", 9, kind, AlgorithmNeeds())
        told.clear()


# The critic's configuration


def test_a_critic_has_the_actors_numbers_where_it_has_none():
    actor = ActorConfig(
        ppo_epochs=2, ppo_mini_batch_size=3, ppo_micro_batch_size=4, ppo_max_token_len=50, loss_agg_mode="token-mean"
    )
    names = ("ppo_epochs", "ppo_mini_batch_size", "ppo_micro_batch_size", "ppo_max_token_len", "loss_agg_mode")

    def numbers(**given):
        found = filled_in(CriticConfig(optim=CriticOptimConfig(lr=0.5), **given), actor)
        assert found.optim.lr == 0.5
        return [getattr(found, name) for name in names]

    assert numbers() == [2, 3, 4, 50, "token-mean"]
    own = {"ppo_epochs": 5, "ppo_mini_batch_size": 6, "ppo_micro_batch_size": 7, "ppo_max_token_len": 80}
    assert numbers(**own, loss_agg_mode="seq-mean-token-sum") == [5, 6, 7, 80, "seq-mean-token-sum"]
    assert numbers(ppo_max_token_len=80) == [2, 3, None, 80, "token-mean"], "rows of another size"
