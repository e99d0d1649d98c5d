"""The actor with low-rank adapters: what is trained, what the reference is, what a checkpoint holds."""

from __future__ import annotations

import copy

import pytest
import torch
from actor_toys import REWARDS, fill_advantages, lora_policy, make_batch, record, tiny_policy, worker

from verl_mt.config.actor import ActorConfig, ModelConfig, RefConfig
from verl_mt.config.schema import ActorRolloutRefConfig
from verl_mt.data import batch as col
from verl_mt.data.trajectory import StopReason, Trajectory
from verl_mt.engines.base import Capabilities, Disk
from verl_mt.errors import CheckpointError, ConfigError
from verl_mt.modeling.load import load_causal_lm
from verl_mt.modeling.lora import adapter_of, adapters_off, is_adapter, lora_of, without_adapters
from verl_mt.modeling.passes import PLAIN, Passes, use_passes
from verl_mt.workers.ref import RefWorker
from verl_mt.workers.weight_sync import LiveWeights, Transport, weight_update_for
from verl_mt.workers.worker_group import InlineWorkerGroup, build_worker_group

pytestmark = pytest.mark.slow  # models


def gradients(module, batch, **kwargs):
    """By parameter, just before the optimizer's step."""
    actor, seen = worker(module, grad_clip=0.0, **kwargs), {}
    actor.optimizer.register_step_pre_hook(
        lambda *_: seen.update({n: p.grad.clone() for n, p in actor.module.named_parameters() if p.grad is not None})
    )
    actor.update(batch.clone())
    return seen


def ref_of(actor):
    return RefWorker(actor.module, RefConfig(offload=True), actor=actor.config, temperature=1.0)


def test_only_adapters_have_gradients_optimizer_state_and_change():
    module = lora_policy()
    seen = gradients(module, make_batch(REWARDS))
    assert seen.keys() == {name for name in dict(module.named_parameters()) if is_adapter(name)}
    assert all(bool(g.abs().sum() > 0) for g in seen.values())
    actor = worker(module)
    actor.update(make_batch(REWARDS))
    assert sum(p.numel() for p in actor.optimizer.state) == sum(g.numel() for g in seen.values())
    for name, parameter in actor.module.named_parameters():
        assert torch.equal(parameter, dict(module.named_parameters())[name]) != is_adapter(name), name


@pytest.mark.slow
def test_the_gradient_is_the_chain_rule_through_the_merged_weights():
    """dL/dB = s dL/dW A^T and dL/dA = s B^T dL/dW, with dL/dW of a plain model that has the merged weights."""
    module, batch = lora_policy(), make_batch(REWARDS, records=2)
    of_adapters = gradients(module, batch)
    of_merged = gradients(without_adapters(module).requires_grad_(True), batch)
    scale = lora_of(module).alpha / lora_of(module).rank
    parameters = dict(module.named_parameters())
    for name, gradient in of_adapters.items():
        layer, _, kind = name.partition(".lora_")
        a, b = (parameters[f"{layer}.lora_{part}.default.weight"] for part in "AB")
        of_weight = of_merged[f"{layer}.weight"]
        expected = scale * (b.T @ of_weight if kind.startswith("A") else of_weight @ a.T)
        torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("passes", [Passes(False, True), Passes(True, False), Passes(True, True)])
@pytest.mark.parametrize("recompute", [False, True])
def test_packing_sharing_prefixes_and_recomputing_activations_change_no_gradient(passes, recompute):
    module, batch = lora_policy(), long_prompts()
    use_passes(module, PLAIN)
    one_by_one = gradients(module, batch, ppo_micro_batch_size=1)
    use_passes(module, passes)
    if recompute:
        module.gradient_checkpointing_enable()
    got = gradients(module, batch)
    assert got.keys() == one_by_one.keys()
    for name, gradient in one_by_one.items():
        torch.testing.assert_close(got[name], gradient, atol=1e-5, rtol=1e-4)


def long_prompts():
    """Prompts that are worth sharing."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda count: torch.randint(1, 37, (count,), generator=generator).tolist()  # noqa: E731
    made = []
    for group in range(2):
        prompt = draw(20 + 3 * group)
        for sample in range(4):
            tokens = draw(4 + sample)
            records = [record(prompt + tokens, len(prompt), [1] * len(tokens))]
            name = f"g{group}s{sample}"
            made.append(
                Trajectory(
                    name, f"g{group}", f"g{group}", name, records=records, reward=float(sample % 2),
                    stop_reason=StopReason.FINISHED,
                )
            )  # fmt: skip
    batch = col.build_batch(made, pad_token_id=0)
    assert batch is not None
    fill_advantages(batch)
    return batch


@pytest.mark.parametrize("split", [{}, {"ppo_micro_batch_size": 2}])
def test_the_kl_term_of_new_adapters_is_exactly_zero(model_folder, split):
    workers = group(model_folder, use_kl_loss=True, **split)
    batch = make_batch([[1.0] * 4, [0.0] * 3])
    workers.add_ref_log_probs(batch)
    metrics = workers.update(batch)
    assert metrics["actor/kl_loss"] == metrics["actor/grad_norm"] == 0


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_policy().save_pretrained(folder)
    return folder


def group(folder, *, lora=None, placement="inline", **actor):
    """A worker group with adapters of rank 4 unless `lora` says otherwise."""
    model = ModelConfig(path=str(folder), **({"lora_rank": 4} | (lora or {})))
    config = ActorRolloutRefConfig(model=model, actor=ActorConfig(**actor))
    return build_worker_group(config, total_steps=10, train_batch_size=3, placement=placement)


def test_a_group_with_a_kl_term_holds_one_model(model_folder):
    workers = group(model_folder, use_kl_loss=True)
    assert workers.ref.module is workers.actor.module
    base, whole = tiny_policy().num_parameters(), workers.num_parameters
    adapters = workers.adapter()
    assert workers.num_trained == sum(t.numel() for t in adapters.tensors.values()) == whole - base
    without = group(model_folder, lora={"lora_rank": 0}, use_kl_loss=True)
    assert without.ref.module is not without.actor.module
    assert without.num_trained == without.num_parameters == base and without.adapter() is None


def test_a_checkpoint_holds_adapters_and_their_optimizer_state_and_nothing_else(tmp_path):
    batches = [make_batch(REWARDS, seed=s) for s in range(4)]
    straight = worker(lora_policy(), total_steps=4)
    metrics = [straight.update(b.clone()) for b in batches]
    first = worker(lora_policy(), total_steps=4)
    for b in batches[:2]:
        first.update(b.clone())
    torch.save(first.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert all(".lora_" in name for name in state["tensors"])
    assert len(state["tensors"]) == 4 * sum(map(is_adapter, dict(first.module.named_parameters())))
    second = worker(lora_policy(), total_steps=4)
    second.load_state_dict(state)
    assert [second.update(b.clone()) for b in batches[2:]] == metrics[2:]
    for name, tensor in straight.module.state_dict().items():
        assert torch.equal(second.module.state_dict()[name], tensor), name


def test_bfloat16_adapters_keep_their_exact_values_in_the_optimizer():
    actor = worker(lora_policy(dtype=torch.bfloat16), lr=1e-5)
    for seed in range(3):
        actor.update(make_batch(REWARDS, seed=seed))
    masters = {n: t for n, t in actor.tensors().items() if n.endswith(".master")}
    assert len(masters) == len(list(actor.optimizer.state)) and all(t.dtype == torch.float32 for t in masters.values())
    for name, master in masters.items():
        live = actor.tensors()[f"module.{name.removeprefix('optimizer.').removesuffix('.master')}"]
        assert live.dtype == torch.bfloat16 and torch.equal(live, master.to(torch.bfloat16))
        assert not torch.equal(live.float(), master)


def test_checkpoints_of_other_adapters_or_of_all_weights_are_refused(model_folder):
    saved = group(model_folder).state_dict()
    for lora, text in (
        ({"lora_rank": 8}, "written with lora_rank=4 .* says lora_rank=8"),
        ({"lora_target_modules": ["q_proj"]}, r"down_proj, .* says .* lora_target_modules=\[q_proj\]"),
        ({"lora_rank": 0}, r"written with lora_rank=4 .* says lora_rank=0 \(all weights are trained\)"),
    ):
        with pytest.raises(CheckpointError, match=text):
            group(model_folder, lora=lora).load_state_dict(saved)
    whole = group(model_folder, lora={"lora_rank": 0}).state_dict()
    with pytest.raises(CheckpointError, match=r"lora_rank=0 \(all weights are trained\), but .* says lora_rank=4"):
        group(model_folder).load_state_dict(whole)


def test_a_checkpoint_from_before_there_were_adapters_still_loads(model_folder):
    plain = group(model_folder, lora={"lora_rank": 0})
    state = plain.state_dict()
    del state["actor"]["lora"]
    plain.load_state_dict(state)


def test_the_group_refuses_adapters_without_peft_before_it_loads_anything(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'pip install "verl_mt\[lora\]"'):
        group("no/such/folder")


def test_weights_leave_merged_under_the_names_of_the_base(model_folder):
    workers = group(model_folder)
    for _ in range(2):
        workers.update(make_batch(REWARDS))
    sent = dict(workers.full_state())
    base = tiny_policy().state_dict()
    assert sent.keys() == base.keys() - {"lm_head.weight"}
    module = copy.deepcopy(tiny_policy())
    module.load_state_dict(sent, strict=False)
    batch = make_batch(REWARDS, seed=5)
    torch.testing.assert_close(
        worker(module).compute_log_probs(batch), workers.compute_log_probs(batch), atol=1e-5, rtol=1e-5
    )
    with adapters_off(workers.policy_module):
        assert float((workers.compute_log_probs(batch) - worker(module).compute_log_probs(batch)).abs().max()) > 1e-4


def test_an_engine_that_reads_files_gets_a_plain_model(model_folder, tmp_path):
    workers = group(model_folder)
    workers.update(make_batch(REWARDS))
    takes_files = Capabilities(transports=frozenset({"disk"}), deterministic=False)
    update = weight_update_for(takes_files, workers, 1, Transport(folder=tmp_path))
    assert isinstance(update, Disk)
    written, sent = load_causal_lm(update.path).state_dict(), dict(workers.full_state())
    assert written.keys() == tiny_policy().state_dict().keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in sent.items())


@pytest.mark.parametrize("offloads", [False, True])
def test_adapters_for_engines_outlive_the_offload_of_the_policy(offloads):
    policy = lora_policy()
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if ".lora_B." in name:
                parameter.normal_()
    wanted = {name: tensor.clone() for name, tensor in adapter_of(policy).named()}
    workers = InlineWorkerGroup(worker(policy, param_offload=offloads))
    given = list(LiveWeights(workers, adapters=True))
    workers.offload()
    assert {name: tensor.tolist() for name, tensor in given} == {name: t.tolist() for name, t in wanted.items()}
