"""How long a step takes: sizes of a model, what a step does, rates of a machine, and out comes each part's time.

docs/scaling.md has the formula as a table, and how wrong it is; `recipes/scaling` fits a machine's rates to finished
runs.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_mt.errors import ConfigError


@dataclass(frozen=True)
class Model:
    """What of a decoder decides its cost."""

    parameters: int
    """All of them, tied embeddings once: what is stored, sent and optimized."""
    matmul_parameters: int
    """Those that every token is multiplied with: no norms, no input embedding (tied: once, as the head)."""
    layers: int
    attention_width: int
    """Query heads times head size."""
    kv_width: int
    """Key-value heads times head size."""
    bytes_per_parameter: int = 4
    """In the engine."""

    def flops(self, context: float) -> float:
        """Of one token's forward pass, with `context` tokens to attend to: two per multiplication and addition."""
        return self.product_flops + self.attention_flops * context

    @property
    def product_flops(self) -> float:
        """Of one token, products with weights alone."""
        return 2.0 * self.matmul_parameters

    @property
    def attention_flops(self) -> float:
        """Of one token that attends to one other."""
        return 4.0 * self.layers * self.attention_width

    @classmethod
    def of(cls, config: Any, shapes: Mapping[str, tuple[int, ...]], bytes_per_parameter: int = 4) -> Model:
        """Of a decoder's config, and the shapes of its weights by name."""
        sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        matrices = {name: size for name, size in sizes.items() if len(shapes[name]) > 1}
        if any(name.startswith("lm_head") for name in matrices):
            matrices = {name: size for name, size in matrices.items() if "embed_tokens" not in name}
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            parameters=sum(sizes.values()),
            matmul_parameters=sum(matrices.values()),
            layers=config.num_hidden_layers,
            attention_width=config.num_attention_heads * head,
            kv_width=(getattr(config, "num_key_value_heads", None) or config.num_attention_heads) * head,
            bytes_per_parameter=bytes_per_parameter,
        )

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one token."""
        return 2 * self.layers * self.kv_width * self.bytes_per_parameter


@dataclass(frozen=True)
class Work:
    """What one step does. Means are over trajectories."""

    trajectories: int
    """Prompts times samples per prompt."""
    prompt_tokens: float
    sampled_tokens: float
    """Per trajectory, over all of its turns."""
    longest_tokens: float
    """Sampled tokens of the longest trajectory: everybody waits for it."""
    turns: float = 1.0
    observation_tokens: float = 0.0
    """Per trajectory: what tools and users said."""
    calls: float = 0.0
    """Per trajectory: times it waits for a tool or a user."""
    last: tuple[tuple[float, float], ...] = ()
    """(sampled tokens, waits) of trajectories that may be the last to end; empty = (`longest_tokens`, `calls`)."""
    tool_latency_s: float = 0.0
    """Of one wait."""
    concurrency: int | None = None
    """Trajectories that live at once (`rollout.max_concurrent`); None = all."""
    samples_per_prompt: float = 1.0
    """They share the computation of their prompt."""
    trained_share: float = 1.0
    """Trajectories that go through the update: groups whose rewards are all equal do not (`skip_zero_advantage`)."""
    updates: float = 1.0
    """Optimizer steps per training step."""
    epochs: int = 1
    """Passes of the update over the batch (`actor.ppo_epochs`)."""
    max_tokens_per_pass: int = 16384
    """`actor.ppo_max_token_len`."""
    packed: bool = False
    """`model.use_remove_padding`: rows go through the update as a tree, what they share of their beginnings once."""
    tree: tuple[float, float, float] | None = None
    """Of the trained rows, where they were counted: tokens, segments, and pairs of a token and one that it attends to.
    None = as if a prompt's samples shared the prompt and nothing else."""
    ref: bool = False
    """A KL term asks the reference policy for log-probs."""
    ranks: int = 1
    """Data-parallel ranks of the update."""
    engines: int = 1
    """Replicas that sample at the same time, each its share of the trajectories."""
    sync_copies: int = 1
    """How often all weights pass the narrowest link on their way to the engines: once where each replica gets them
    from the ranks beside it or all get one broadcast, once for each engine that copies them out of one process."""

    @property
    def response_tokens(self) -> float:
        """Per trajectory: sampled and observed."""
        return self.sampled_tokens + self.observation_tokens

    @property
    def context(self) -> float:
        """Mean number of tokens that a sampled token attends to."""
        return self.prompt_tokens + self.response_tokens / 2

    @property
    def trained_rows(self) -> float:
        """That go through the update, each as often as it does."""
        return self.trained_share * self.trajectories * self.epochs

    @property
    def sharing(self) -> float:
        """Rows that share the computation of their prompt. Padded rows of several ranks share nothing."""
        if self.packed:
            return max(1.0, self.samples_per_prompt / self.ranks)
        return self.samples_per_prompt if self.ranks == 1 else 1.0

    @property
    def trained_tokens(self) -> float:
        """That go through the update."""
        if self.packed and self.tree is not None:
            return self.epochs * self.tree[0]
        return self.trained_rows * (self.response_tokens + self.prompt_tokens / self.sharing)

    @property
    def segments(self) -> float:
        """Of the trees of packed rows; 0 = rows are padded."""
        if self.packed and self.tree is not None:
            return self.epochs * self.tree[1]
        return self.trained_rows * (1 + (self.sharing > 1) / self.sharing) if self.packed else 0.0

    @property
    def attended(self) -> float:
        """Pairs of a token and one that it attends to, in the update. A tree is computed with masks, which leave
        nothing out; a causal kernel leaves out half."""
        if not self.packed:
            return self.trained_tokens * self.context
        if self.tree is not None:
            return self.epochs * self.tree[2]
        length = self.prompt_tokens + self.response_tokens
        return self.trained_rows * (self.response_tokens * length + self.prompt_tokens**2 / self.sharing)

    @property
    def passes(self) -> float:
        """Micro-batches of a rank: prompts count in each row, shared or not, and padding where there is any."""
        tokens = self.trained_rows * (self.response_tokens + self.prompt_tokens)
        return max(self.updates, math.ceil(tokens / self.ranks / self.max_tokens_per_pass))


@dataclass(frozen=True)
class Machine:
    """Rates of one engine and of one rank. Seconds are added, everything per second divides; `inf` = costs nothing."""

    engine_flops: float = math.inf
    """Multiplications and additions per second, of the engine as it is (not of the data sheet)."""
    memory_bandwidth: float = math.inf
    """Bytes per second at which the engine reads weights, keys and values while it decodes."""
    step_overhead_s: float = 0.0
    """Per decoding step."""
    layer_overhead_s: float = 0.0
    """Per decoding step and layer."""
    token_overhead_s: float = 0.0
    """Per sampled token: sampling, bookkeeping."""
    turn_overhead_s: float = 0.0
    """Per assistant turn: parsing, rendering, the tool's own work on this process."""
    train_flops: float = math.inf
    """Of a rank's forward and backward pass: products with weights."""
    train_attention_flops: float = math.inf
    """The same, of attention."""
    train_activation_rate: float = math.inf
    """Activations (tokens x layers x width) per second: what is no matrix product, and weighs more in narrow models."""
    train_layer_overhead_s: float = 0.0
    """Per forward-and-backward pass and layer."""
    train_segment_overhead_s: float = 0.0
    """Per segment of packed rows and layer."""
    optimizer_bandwidth: float = math.inf
    """Parameters per second and rank that the optimizer steps over."""
    network_bandwidth: float = math.inf
    """Bytes per second that a rank receives from the others."""
    sync_overhead_s: float = 0.0
    """Per weight update of the engine."""
    sync_bandwidth: float = math.inf
    """Bytes per second of weights on their way to the engine."""
    rest_overhead_s: float = 0.0
    """Per step: what no other phase has."""
    rest_token_s: float = 0.0
    """Per token of the batch: building it, writing the rollout rows."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step."""

    rollout_s: float
    ref_s: float
    update_s: float
    weights_s: float
    rest_s: float
    waiting_s: float
    """Of `rollout_s`: waiting for tools."""

    @property
    def step_s(self) -> float:
        """All of it."""
        return self.rollout_s + self.ref_s + self.update_s + self.weights_s + self.rest_s

    def ahead_s(self, max_staleness: int, *, one_device: bool) -> float:
        """Of a step whose conversations began `trainer.max_staleness` updates before its own: they have this many steps
        more for their waits, and neither engine nor trainer does the work of two steps at once (`ahead.py` says it of
        steps that were measured, which are not all alike).

        Args:
            max_staleness: k; 0 = `step_s`.
            one_device: engine and trainer compute on the same one.
        """
        sampling, training = self.rollout_s - self.waiting_s, self.step_s - self.rollout_s
        busy = sampling + training if one_device else max(sampling, training)
        return max(busy, self.step_s / (max_staleness + 1))

    @property
    def bottleneck(self) -> str:
        """The longest part."""
        parts = {
            "tools": self.waiting_s,
            "rollout": self.rollout_s - self.waiting_s,
            "ref": self.ref_s,
            "update": self.update_s,
            "weights": self.weights_s,
            "rest": self.rest_s,
        }
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class Observed:
    """One step of a run."""

    model: Model
    work: Work
    times: StepTime
    """As measured; `waiting_s` is 0, because nobody measures it."""


def predict(model: Model, work: Work, machine: Machine) -> StepTime:
    """Seconds of each phase of a step.

    Rollout. Each engine has its share of the trajectories, and all sample at the same time. A decoding step costs `a`
    (overheads, and reading the weights once) and `b` for each trajectory in it; `b` includes what a trajectory's turns
    and prefills cost, spread over its tokens. The last `concurrency` trajectories of an engine decode in
    `longest_tokens` steps, which take `x = a + b * (mean number in a step)` each, and end with the one whose tokens and
    waits take longest. Those before them hand their places on: `concurrency` of them take
    `sampled_tokens * (a + b * concurrency)` and their waits. Waits are taken to be in step, because turns that began
    together end at about the same time; the more latencies scatter, the more of them hides behind others' decoding.

    Update: three forward passes' work per trained token, per rank, attention at a rate of its own; packed rows pay for
    each segment; over several ranks what they exchange (docs/scaling.md); then the optimizer. Weights: bytes over
    bandwidth.
    """
    a, b, concurrency = _step_costs(model, work, machine)
    trajectories = math.ceil(work.trajectories / work.engines)
    last = min(concurrency, trajectories)
    x = a + b * last * work.sampled_tokens / work.longest_tokens
    paths = work.last or ((work.longest_tokens, work.calls),)
    rollout, waiting = max((t * x + waits * work.tool_latency_s, waits * work.tool_latency_s) for t, waits in paths)
    period = work.sampled_tokens * (a + b * concurrency) + work.calls * work.tool_latency_s
    rollout += (trajectories - last) / concurrency * period
    waiting += (trajectories - last) / concurrency * work.calls * work.tool_latency_s
    products, attention = model.product_flops, model.attention_flops
    compute = 3 * work.trained_tokens * products / machine.train_flops
    compute += 3 * work.attended * attention / machine.train_attention_flops
    compute += work.trained_tokens * model.layers * model.attention_width / machine.train_activation_rate
    compute += work.segments * model.layers * machine.train_segment_overhead_s
    compute /= work.ranks
    # Layers twice, and gradients, which are float32.
    sent = 2 * model.bytes_per_parameter + 4
    exchanged = work.passes * model.parameters * sent * (work.ranks - 1) / work.ranks
    update = compute + work.passes * model.layers * machine.train_layer_overhead_s
    update += exchanged / machine.network_bandwidth
    update += work.updates * model.parameters / work.ranks / machine.optimizer_bandwidth
    batch_tokens = work.trajectories * (work.prompt_tokens + work.response_tokens)
    ref = products / machine.train_flops + work.context * attention / machine.train_attention_flops
    return StepTime(
        rollout_s=rollout,
        ref_s=batch_tokens * ref / work.ranks if work.ref else 0.0,
        update_s=update,
        weights_s=machine.sync_overhead_s
        + work.sync_copies * model.parameters * model.bytes_per_parameter / machine.sync_bandwidth,
        rest_s=machine.rest_overhead_s + batch_tokens * machine.rest_token_s,
        waiting_s=waiting,
    )


def decoding_steps(work: Work) -> float:
    """How often each engine steps, if nobody waits for tools."""
    trajectories = math.ceil(work.trajectories / work.engines)
    concurrency = math.ceil((work.concurrency or work.trajectories) / work.engines)
    return work.longest_tokens + max(0, trajectories - concurrency) * work.sampled_tokens / concurrency


def engine_flops(model: Model, work: Work) -> float:
    """All multiplications and additions of a rollout: decode and prefill."""
    prefill = work.prompt_tokens / work.samples_per_prompt + work.observation_tokens
    sampled = work.sampled_tokens * model.flops(work.context)
    return work.trajectories * (sampled + prefill * model.flops(work.prompt_tokens / 2))


def _step_costs(model: Model, work: Work, machine: Machine) -> tuple[float, float, int]:
    a = machine.step_overhead_s + model.layers * machine.layer_overhead_s
    a += model.matmul_parameters * model.bytes_per_parameter / machine.memory_bandwidth
    per_trajectory = engine_flops(model, work) / work.trajectories / machine.engine_flops
    per_trajectory += work.turns * machine.turn_overhead_s
    b = machine.token_overhead_s + model.kv_bytes * work.context / machine.memory_bandwidth
    b += per_trajectory / max(1.0, work.sampled_tokens)
    return a, b, math.ceil((work.concurrency or work.trajectories) / work.engines)


def load_machine(path: Path) -> Machine:
    """From JSON; what is absent costs nothing.

    Raises:
        ConfigError: a name that is none of `Machine`.
    """
    given = json.loads(path.read_text())
    known = {field.name for field in dataclasses.fields(Machine)}
    if unknown := sorted(set(given) - known):
        raise ConfigError(f"{path}: {', '.join(unknown)} not known. It takes {', '.join(sorted(known))}")
    return Machine(**{name: math.inf if value is None else float(value) for name, value in given.items()})


def save_machine(machine: Machine, path: Path) -> None:
    """As JSON; null = infinitely fast."""
    values = dataclasses.asdict(machine)
    path.write_text(json.dumps({k: None if math.isinf(v) else v for k, v in values.items()}, indent=2) + "\n")
