"""What every process of a worker group is told, and how it becomes an actor and a reference policy."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from verl_mt import engines
from verl_mt.config.actor import CriticConfig
from verl_mt.config.options import read_rollout_correction
from verl_mt.config.schema import ActorRolloutRefConfig
from verl_mt.errors import ConfigError
from verl_mt.modeling.load import empty_causal_lm, load_causal_lm, source_of
from verl_mt.modeling.lora import Lora, add_adapters, freeze_vision, lora_of, set_lora
from verl_mt.modeling.passes import choose_passes, use_passes
from verl_mt.modeling.values import ValueHead, ValueModel
from verl_mt.plugins import give_objects, import_plugins, optional_function
from verl_mt.workers.actor import ActorWorker
from verl_mt.workers.critic import CriticSchedule, CriticWorker, filled_in
from verl_mt.workers.ref import RefWorker
from verl_mt.workers.rollout_correction import RolloutCorrection
from verl_mt.workers.sharding import ALONE, Ranks, ShardedCritic, ShardedPolicy, model_of
from verl_mt.workers.trainable import offload, steps_of_actor


@dataclass(frozen=True)
class Placement:
    """Where the workers live: `trainer.placement`, `nnodes`, `n_workers_per_node` and what their processes need."""

    kind: str = "inline"
    nnodes: int = 1
    n_workers_per_node: int = 1
    num_threads: int | None = None
    """Of one Ray worker; None = its part of the machine's cores."""
    deterministic: bool = False
    worker_timeout_s: float = 1800.0
    """`trainer.worker_timeout_s`."""
    external_plugins: tuple[str, ...] = ()
    """Files (absolute) and modules that every process imports before anything else."""
    objects: Mapping[str, Any] = field(default_factory=dict)
    """`object:name` -> an object of a Python call that every process loads by its name."""

    @property
    def num_ranks(self) -> int:
        return self.nnodes * self.n_workers_per_node


@dataclass(frozen=True)
class AlgorithmNeeds:
    """What `algorithm.*` wants of the workers."""

    rollout_correction: Mapping[str, Any] = field(default_factory=dict)
    """`algorithm.rollout_correction`."""
    kl_in_reward: bool = False
    """A reference policy is needed even without a KL term in the loss."""
    critic: CriticConfig | None = None
    """None = the estimator needs no values."""
    critic_warmup: int = 0
    """Steps at the beginning in which only the critic learns."""

    @property
    def correction(self) -> RolloutCorrection | None:
        """None = nothing is corrected."""
        options = read_rollout_correction(self.rollout_correction)
        acts = options.corrects or options.off_policy_sequence_mask_delta is not None
        return RolloutCorrection(options) if acts else None


@dataclass(frozen=True)
class WorkerSetup:
    """Everything that makes the workers of a process; goes to other processes as it is."""

    config: ActorRolloutRefConfig
    total_steps: int
    train_batch_size: int | None
    device: str
    seed: int
    placement: Placement
    algorithm: AlgorithmNeeds = AlgorithmNeeds()

    def ranks(self, rank: int) -> Ranks:
        """One rank's view of the group."""
        return Ranks(rank, self.placement.num_ranks, self.config.actor.ulysses_sequence_parallel_size)

    @property
    def patience_s(self) -> float:
        """How long ranks wait for each other. Asked where plug-ins are known, and sent to the ranks: the engine may be
        one."""
        rollout, limit = self.config.rollout, self.placement.worker_timeout_s
        # While one rank gives weights to engines, the others wait in a collective.
        return limit if engines.samples_from_policy(rollout.name) else max(limit, 3 * rollout.engine_timeout_s)

    @property
    def has_ref(self) -> bool:
        """Whether a reference policy is loaded."""
        return self.config.actor.use_kl_loss or self.algorithm.kl_in_reward


def load_workers(setup: WorkerSetup, ranks: Ranks = ALONE) -> tuple[ActorWorker, RefWorker | None, CriticWorker | None]:
    """Load the policy and put the workers of one rank around it. With low-rank adapters the reference policy is the
    frozen base of the actor's own module: no second model.

    Raises:
        ConfigError: a model, a device or adapters that cannot be had.
        PluginError: a plug-in that does not import.
    """
    import_plugins(setup.placement.external_plugins)
    give_objects(setup.placement.objects)
    config, model = setup.config, setup.config.model
    if torch.device(setup.device).type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"trainer.device={setup.device}: torch finds no CUDA device. Set trainer.device=cpu or auto")
    module = add_adapters(_first_policy(setup, ranks, trained=model.lora_rank == 0), model, seed=setup.seed)
    if model.freeze_vision:
        freeze_vision(module)
    lora = _agreed(lora_of(module), module, ranks)
    # Made before any checkpoint is loaded into the actor: the reference stays what the run started from.
    ref = copy.deepcopy(module) if setup.has_ref and ranks.size == 1 and lora is None else None
    if model.enable_gradient_checkpointing:
        module.gradient_checkpointing_enable()
    actor = ActorWorker(
        _spread(module, setup, ranks),
        config.actor,
        temperature=config.rollout.temperature,
        total_steps=steps_of_actor(setup.total_steps, setup.algorithm.critic_warmup),
        train_batch_size=setup.train_batch_size,
        norm_constant=config.rollout.response_length,
        seed=setup.seed,
    )
    actor.loss.correction = setup.algorithm.correction
    reference, critic = _load_ref(setup, ranks, ref, actor), load_critic(setup, ranks, actor)
    if tune := optional_function("tune_workers"):
        tune(setup, actor, reference)
    offload(actor, critic)
    return actor, reference, critic


def _load_ref(setup: WorkerSetup, ranks: Ranks, ref: Any, actor: ActorWorker) -> RefWorker | None:
    """`ref` is a copy of the policy as it was loaded, where there is one."""
    config, temperature = setup.config, setup.config.rollout.temperature
    if not setup.has_ref:
        return None
    if lora_of(model_of(actor.module)) is not None:
        return RefWorker(actor.module, config.ref, actor=config.actor, temperature=temperature)
    # Over ranks it is loaded once more: the actor's whole copy is gone, and two would not have to fit.
    ref = _first_policy(setup, ranks) if ref is None else ref
    ref = _spread(ref.requires_grad_(False), setup, ranks, offload=config.ref.offload)
    return RefWorker(ref, config.ref, actor=config.actor, temperature=temperature, device=setup.device)


def load_critic(setup: WorkerSetup, ranks: Ranks, actor: ActorWorker) -> CriticWorker | None:
    """The critic of one rank; None where the estimator needs none.

    Raises:
        ConfigError: its model cannot be had, or has fewer tokens than the policy.
    """
    if setup.algorithm.critic is None:
        return None
    config = filled_in(setup.algorithm.critic, setup.config.actor)
    schedule = CriticSchedule(
        total_steps=setup.total_steps,
        train_batch_size=setup.train_batch_size,
        warmup_steps=setup.algorithm.critic_warmup,
        norm_constant=setup.config.rollout.response_length,
        seed=setup.seed,
    )
    policy, shuffle = model_of(actor.module), setup.config.actor.shuffle
    if config.share_trunk:
        head = ValueHead(policy.config.get_text_config().hidden_size, seed=setup.seed).to(setup.device)
        return CriticWorker(head, config, schedule=schedule, shuffle=shuffle, policy=actor.module)
    model = _first_policy(setup, ranks, path=config.model.path, trained=True)
    sizes = [m.config.get_text_config().vocab_size for m in (model, policy)]
    if sizes[0] < sizes[1]:
        raise ConfigError(
            f"critic.model.path={config.model.path} has {sizes[0]} tokens and the policy {sizes[1]}: the critic reads "
            "what the policy writes, so both need one tokenizer. Leave the path out to start from the policy's weights"
        )
    if setup.config.model.enable_gradient_checkpointing:
        model.gradient_checkpointing_enable()
    values = _spread(ValueModel(model), setup, ranks)
    param_offload = setup.config.actor.param_offload
    return CriticWorker(values, config, schedule=schedule, shuffle=shuffle, param_offload=param_offload)


def _first_policy(setup: WorkerSetup, ranks: Ranks, path: str | None = None, *, trained: bool = False) -> Any:
    """Whole, or where it is going to be spread: whole on rank 0, which deals it out, without content on the others.
    `path` names another model than the policy; `trained`: all of it gets master weights."""
    source = source_of(setup.config.model)
    if path is not None:
        source |= {"path": path, "revision": None}
    if ranks.size == 1:
        return load_causal_lm(**source, device=setup.device, exact=trained)
    return load_causal_lm(**source, device="cpu", exact=trained) if ranks.rank == 0 else empty_causal_lm(**source)


def _agreed(lora: Lora | None, module: Any, ranks: Ranks) -> Lora | None:
    """Rank 0 alone has seen the frozen weights; what it says of them is so on all ranks."""
    if lora is not None:
        lora = ranks.gather(lora)[0]
        set_lora(module, lora)
    return lora


def load_policy(setup: WorkerSetup, *, device: str) -> Any:
    """The model that the config names, whole and without adapters."""
    return load_causal_lm(**source_of(setup.config.model), device=device)


def _spread(module: Any, setup: WorkerSetup, ranks: Ranks, *, offload: bool = False) -> nn.Module:
    config, wanted = setup.config, None
    if ranks.rank == 0:  # the only one that is sure to have weights to try it with
        wanted = choose_passes(
            module,
            remove_padding=config.model.use_remove_padding,
            share_prefixes=config.actor.share_prefixes,
            device=setup.device,
        )
    use_passes(module, ranks.gather(wanted)[0])
    if ranks.size == 1:
        return module
    kind = ShardedCritic if isinstance(module, ValueModel) else ShardedPolicy
    device, shard = torch.device(setup.device).type, config.actor.fsdp_size
    return kind(module, ranks, device_type=device, offload=offload, shard=shard)
