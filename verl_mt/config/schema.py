"""The whole configuration as dataclasses: the one place where an option has its type, default, doc and check.

YAML files under `config/` hold differences only. `docs/configuration.md` is generated from here.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from verl_mt.config.actor import KL_LOSS, ActorConfig, CriticConfig, ModelConfig, RefConfig
from verl_mt.config.declare import Condition, Section, conflicts, is_set, only, option, switched_on
from verl_mt.config.extended import extended_classes
from verl_mt.config.options import KLControlOptions, RolloutCorrectionOptions
from verl_mt.config.policy_losses import POLICY_LOSSES, loss_mode
from verl_mt.config.rollout import GENERATES, VALIDATES, WITHOUT_GROUPS, RolloutConfig
from verl_mt.extension_points import known
from verl_mt.plugins import names_code

ESTIMATOR = "algorithm.adv_estimator"
KL_IN_REWARD = "algorithm.use_kl_in_reward"
PER_TOKEN = ("gae", "reinforce_plus_plus")
"""Estimators that see where in a trajectory a reward was earned."""
GAE = only(ESTIMATOR, "gae", own=False)
_OVERLONG = switched_on("reward.overlong_buffer.enable")
_FILTERS = switched_on("algorithm.filter_groups.enable")


@dataclass
class DataConfig(Section):
    """`data`. A file entry is a path (.parquet, .jsonl, .json) or `package.module:function` that makes rows."""

    train_files: Any = option(
        "verl_mt.tiny.problems:rows", "Training data: one entry, a list, or a mapping name -> {path, weight}."
    )
    val_files: Any = option(None, "Validation data, in the same forms without weights. null = no validation.")
    train_max_samples: int = option(
        -1, "Rows taken from each training entry. -1 = all (a generator needs a number).", min=1, off=-1
    )
    val_max_samples: int = option(-1, "Rows taken from each validation entry. -1 = all.", min=1, off=-1, when=VALIDATES)
    eager_rows: int = option(
        100_000,
        "At most this many rows in all training files are loaded, rendered and checked at startup. If there are more, "
        "rows of Parquet and JSON Lines files are read when they are drawn.",
        min=0,
    )
    on_bad_row: str = option(
        "raise",
        "A row that cannot be read, rendered or scored: raise = the run stops and names it. skip = it is left out, "
        "named in the log and counted (data/bad_rows).",
        choices=("raise", "skip"),
        may_change=True,
    )
    train_batch_size: int = option(16, "Prompts per training step.", min=1)
    over_sample: float = option(
        1.0,
        "Prompts in flight, in batches: above 1 a step trains those that finish first. The others go on for the next "
        "steps (with trainer.max_staleness) or begin again under its weights (docs/asynchronous.md).",
        min=1,
    )
    val_batch_size: int | None = option(
        None, "Prompts per validation batch. null = all at once.", min=1, when=VALIDATES
    )
    max_prompt_length: int = option(512, "Longest prompt in tokens.", min=1)
    filter_overlong_prompts: bool = option(
        True, "Drop and count rows with a longer prompt. False = `truncation` decides."
    )
    truncation: str = option(
        "error", "An over-long prompt that was not filtered.", choices=("error", "left", "right", "middle")
    )
    prompt_key: str = option("prompt", "Column of the messages.")
    label_key: str | None = option(
        None, "Column of the label and of the ground truth. null = reward_model.ground_truth, or ground_truth."
    )
    columns: dict[str, str] = option(
        {}, "Column of the files -> the name that it is read by, also by rewards, tools and schedulers."
    )
    system: str | None = option(
        None,
        "System message, or a .txt file with it, of prompts that begin with none. null = as the rows are.",
    )
    apply_chat_template: bool = option(
        True,
        "A custom generate function gets its prompt rendered. False = the prompt column as it is.",
        when=GENERATES,
    )
    shuffle: bool = option(True, "Shuffle the training rows in each epoch.")
    seed: int = option(0, "Seed of the row order and of generated training rows.")
    val_seed: int = option(1234, "Seed of generated validation rows.", when=VALIDATES)
    mixing: str = option(
        "proportional",
        "With several training entries: by size, or by their weights.",
        choices=("proportional", "weights"),
    )
    sampler: str | None = option(None, "Dotted path of a curriculum sampler class. null = shuffled order.")
    sampler_kwargs: dict[str, Any] = option({}, "Its arguments.", when=is_set("data.sampler"))

    def problems(self, config: Any, key: str) -> Iterator[str]:
        if not self.apply_chat_template:
            given, why = {"data.system": self.system}, "a prompt column as it is gets no message"
            yield from conflicts(given, "data.apply_chat_template=False", why)


@dataclass
class OverlongBufferConfig(Section):
    """`reward.overlong_buffer`, of DAPO."""

    enable: bool = option(False, "Penalise responses that come near `actor_rollout_ref.rollout.response_length`.")
    len: int = option(128, "Tokens before the limit on which the penalty grows.", min=1, when=_OVERLONG)
    penalty_factor: float = option(
        1.0, "Largest penalty, at the limit. In the metrics as reward/overlong.", min=0, when=_OVERLONG
    )


@dataclass
class RewardConfig(Section):
    """`reward`. `custom_reward_function.path` and `.name` are aliases of `path` and `name`; the first also sets
    `solution_str=response`."""

    path: str | None = option(
        None,
        "Reward function: dotted path, file.py:name, or a registered name. null = by the row's data_source.",
    )
    name: str | None = option(
        None, "Function name, where `path` is a bare file. null = compute_score.", when=is_set("reward.path")
    )
    kwargs: dict[str, Any] = option({}, "Extra arguments of every call.")
    solution_str: str = option(
        "model",
        "What solution_str of a compute_score function holds: model = the model's own text. response = the whole "
        "response with tool results and user turns.",
        choices=("model", "response"),
        when=is_set("reward.path"),
    )
    tool_reward_weight: float = option(0.0, "Weight of the tools' step rewards and calc_reward in the reward.")
    turn_score_weight: float = option(0.0, "Weight of the interaction's turn scores in the reward.")
    turn_cost: float = option(
        0.0,
        "Subtracted from the reward for each assistant turn after the first. In the metrics as reward/turn_cost.",
        min=0,
    )
    token_cost: float = option(
        0.0, "Subtracted from the reward for each sampled token. In the metrics as reward/token_cost.", min=0
    )
    placement: str = option(
        "trajectory",
        "Where weighted tool rewards and turn scores enter: trajectory = with the rest on the last sampled token. Turn "
        "= at the end of the turn that made the call or was scored (gae, reinforce_plus_plus).",
        choices=("trajectory", "turn"),
    )
    overlong_buffer: OverlongBufferConfig = option(OverlongBufferConfig, "DAPO's penalty on overlong responses.")
    timeout_s: float = option(60.0, "Deadline of one reward call in seconds.", min=0.001)

    def problems(self, config: Any, key: str) -> Iterator[str]:
        estimator, limit = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.response_length
        if self.overlong_buffer.enable and self.overlong_buffer.len > limit:
            yield (
                f"reward.overlong_buffer.len is {self.overlong_buffer.len}, more than "
                f"actor_rollout_ref.rollout.response_length ({limit}): even an empty response would be penalised. Make "
                "it smaller"
            )
        if self.placement == "turn" and estimator not in PER_TOKEN and not names_code(estimator):
            yield (
                f"reward.placement=turn with {ESTIMATOR}={estimator}, which has one reward per trajectory: use "
                f"{' or '.join(PER_TOKEN)}, or placement=trajectory"
            )
        if self.placement == "turn" and not self.tool_reward_weight and not self.turn_score_weight:
            yield (
                "reward.placement=turn, but nothing belongs to a turn: give reward.tool_reward_weight or "
                "reward.turn_score_weight, or leave it out"
            )


@dataclass
class FilterGroupsConfig(Section):
    """`algorithm.filter_groups`, of DAPO."""

    enable: bool = option(
        False, "Replace groups whose members all did equally well by those of further prompts (dynamic sampling)."
    )
    metric: str = option(
        "seq_final_reward",
        "What must differ within a group: seq_final_reward (the reward), or a number of the reward function's dict, "
        "such as acc or score.",
        when=_FILTERS,
    )
    max_num_gen_batches: int = option(
        10,
        "Rollouts per step. Then the step trains on the groups that it has. 0 or less = until the batch is full.",
        when=_FILTERS,
    )


@dataclass
class AlgorithmConfig(Section):
    """`algorithm`."""

    adv_estimator: str = option(
        "grpo",
        "How rewards become advantages (docs/algorithms.md), or the dotted path or file.py:name of a custom "
        "function (docs/your_own_algorithm.md).",
        plugin=True,
        choices=(
            "grpo",
            "rloo",
            "reinforce_plus_plus",
            "reinforce_plus_plus_baseline",
            "opo",
            "gpg",
            "grpo_passk",
            "remax",
            "gdpo",
            "gae",
        ),
    )
    gamma: float = option(
        1.0,
        "Discount of one sampled token.",
        min=0,
        max=1,
        when=only(ESTIMATOR, *PER_TOKEN),
    )
    lam: float = option(
        1.0,
        "How far advantages look ahead, 0 = one token, 1 = to the end.",
        min=0,
        max=1,
        when=only(ESTIMATOR, "gae"),
    )
    use_kl_in_reward: bool = option(
        False, "Subtract a KL penalty to the reference policy from the reward, token by token."
    )
    kl_penalty: str = option(
        "kl",
        "Its estimator (k1 = kl, k2 = mse).",
        choices=("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"),
        when=switched_on(KL_IN_REWARD),
    )
    kl_ctrl: dict[str, Any] = option(
        {},
        "Its weight: `type` (fixed, the default; adaptive) and `kl_coef` (0.001). adaptive also reads `target_kl` "
        "(0.1) and `horizon` (10000 trajectories).",
        options=KLControlOptions,
        when=switched_on(KL_IN_REWARD),
    )
    gdpo_reward_weights: dict[str, float] = option(
        {},
        "Name -> weight of the numbers that the reward function returns. Each is normalised by itself.",
        when=only(ESTIMATOR, "gdpo", own=False),
    )
    norm_adv_by_std_in_grpo: bool = option(
        True,
        "Divide by the group's standard deviation (False: Dr.GRPO).",
        when=only(ESTIMATOR, "grpo", "grpo_passk"),
    )
    rollout_correction: dict[str, Any] = option(
        {},
        "Against a sampler that is not quite the trainer's policy: rollout_is (token, sequence, geometric) weights, "
        "rollout_rs and rollout_token_veto_threshold leave out, with their thresholds (docs/algorithms.md). Empty: "
        "nothing, or rollout_is=token with trainer.max_staleness and a loss per token.",
        options=RolloutCorrectionOptions,
    )
    filter_groups: FilterGroupsConfig = option(FilterGroupsConfig, "DAPO's dynamic sampling.")
    filter_overlong: bool = option(
        False, "Leave trajectories that a limit cut out of the loss. Their groups' statistics keep their rewards."
    )

    def problems(self, config: Any, key: str) -> Iterator[str]:
        if self.filter_groups.enable and self.adv_estimator in WITHOUT_GROUPS:
            yield (
                f"algorithm.filter_groups.enable is True with {ESTIMATOR}={self.adv_estimator}, which does not compare "
                "the samples of a prompt: a group of equal rewards still trains, and leaving it out would bias the "
                "estimate. Use grpo, rloo or another that compares groups, or leave filter_groups out"
            )
        if self.adv_estimator == "gdpo":
            yield from self._problems_of_gdpo(config.reward)

    def _problems_of_gdpo(self, reward: RewardConfig) -> Iterator[str]:
        weights, gdpo = self.gdpo_reward_weights, f"{ESTIMATOR}=gdpo"
        why = "every reward is normalised by itself, and a KL penalty is none of them; actor.use_kl_loss=True works"
        yield from conflicts({KL_IN_REWARD: self.use_kl_in_reward}, gdpo, why)
        if not weights:
            yield (
                f"{gdpo} needs algorithm.gdpo_reward_weights: the names of the numbers that the reward function "
                "returns, with their weights, e.g. {score: 1.0, format: 0.5}"
            )
        for name, value in weights.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                yield f"algorithm.gdpo_reward_weights.{name} is {value!r}: expected a number"
        summed = {
            f"reward.{name}": getattr(reward, name) or None for name in ("tool_reward_weight", "turn_score_weight")
        }
        why = (
            "it reads the reward function's own numbers, not their sum. Let the function return it (extra_info has it)"
        )
        yield from conflicts(summed, gdpo, why)
        # These are parts of a reward beside the function's own, under names of theirs.
        parts = {
            "turn_cost": ("turn_cost", reward.turn_cost),
            "token_cost": ("token_cost", reward.token_cost),
            "overlong": ("overlong_buffer.enable", reward.overlong_buffer.enable),
        }
        for part, (name, value) in parts.items():
            if value and part not in weights:
                yield (
                    f"reward.{name} is {value} with {gdpo}, which reads the numbers that algorithm.gdpo_reward_weights "
                    f"names, not their sum: add {part} to them, with its weight"
                )


@dataclass
class TrainerConfig(Section):
    """`trainer`."""

    total_training_steps: int | None = option(None, "Training steps. null = `total_epochs` decides.", min=0)
    total_epochs: int = option(30, "Passes over the training rows. Whichever limit comes first ends the run.", min=1)
    project_name: str = option("verl_mt", "Project, for trackers.", may_change=True)
    experiment_name: str = option("run", "Run name. The run directory is runs/<experiment_name>.", may_change=True)
    default_local_dir: str | None = option(
        None, "Run directory. null = runs/<experiment_name>, numbered if finished.", may_change=True
    )
    logger: list[str] = option(
        ["console"],
        "Trackers: console, tensorboard, wandb, mlflow, or the dotted path or file.py:Name of a custom one. "
        "`file` is metrics.jsonl, which every run has.",
        may_change=True,
    )
    log_val_generations: int = option(
        8,
        "Rollouts of a validation that trackers show to read, from the worst to the best, and as many of the training "
        "step before it. 0 = none.",
        min=0,
        may_change=True,
    )
    critic_warmup: int = option(0, "Steps at the beginning in which only the critic learns.", min=0, when=GAE)
    test_freq: int = option(10, "Validate every that many steps and at the end. -1 = only at the end.", min=1, off=-1)
    val_before_train: bool = option(True, "Validate before the first step.")
    val_only: bool = option(False, "Validate and stop.")
    save_freq: int = option(
        10, "Checkpoint every that many steps and at the end. -1 = only at the end.", min=1, off=-1, may_change=True
    )
    max_actor_ckpt_to_keep: int | None = option(
        2, "Newest checkpoints kept. The best validated one is kept too. null = all.", min=1, may_change=True
    )
    resume_mode: str = option(
        "auto",
        "auto = resume an unfinished run. disable = start a new run. resume_path = a new run from `resume_from_path`. "
        "other_data = resume (from `resume_from_path` if set) with other rows: data.train_files, val_files, "
        "train_max_samples, val_max_samples (docs/resume.md).",
        choices=("auto", "disable", "resume_path", "other_data"),
        may_change=True,
    )
    resume_from_path: str | None = option(
        None,
        "The checkpoint's folder.",
        when=only("trainer.resume_mode", "resume_path", "other_data"),
        may_change=True,
    )
    seed: int = option(0, "Seed of the run: sampling, mini-batches, initial state. The row order has data.seed.")
    deterministic: bool = option(
        False,
        "The same config gives the same weights, bit for bit, also when killed and resumed (local, scripted).",
    )
    num_threads: int | None = option(
        None, "CPU threads of torch. null = all idle cores, at most 4 (1 with trainer.deterministic).", min=1
    )
    device: str = option("auto", "Where the actor lives. auto = cuda if there.", choices=("auto", "cpu", "cuda"))
    placement: str = option("inline", "Where the workers live.", choices=("inline", "ray"))
    nnodes: int = option(1, "Machines. More than one needs placement=ray.", min=1)
    n_workers_per_node: int = option(1, "Actor ranks per machine. More than one needs placement=ray.", min=1)
    worker_timeout_s: float = option(
        1800.0,
        "Longest that ranks wait for another one in an exchange. After that the run ends and names the missing rank. "
        "At least three times rollout.engine_timeout_s where ranks publish weights to engines. A whole call to "
        "the ranks (an update, a checkpoint) may take ten times as long.",
        min=1,
        may_change=True,
    )
    max_restarts: int = option(
        0,
        "After the loss of a rank, an engine or a machine the run begins again by itself, from its last checkpoint, at "
        "most so often. 0 = it ends, and the same command goes on (trainer.worker_timeout_s is also how long it waits "
        "for a machine in the place of a lost one). Supervised training (sft) ends.",
        min=0,
        may_change=True,
    )
    max_staleness: int = option(
        0,
        "How many updates old a trained token may be, at most. 0 = a step samples, then trains. Above 0 the next steps "
        "are sampled during the update (docs/asynchronous.md).",
        min=0,
    )
    progress: str = option(
        "auto", "Live display: auto = on a terminal.", choices=("auto", "on", "off"), may_change=True
    )
    rollout_rows: Any = option(
        "parquet",
        "Write every trajectory with every token's numbers to rollouts/step_* (docs/rollout_rows.md): parquet (True), "
        "beside the training, or off (False). `python -m verl_mt.report.rows RUN` prints them as JSON.",
        choices=("parquet", "off"),
        also={True: "parquet", "auto": "parquet", False: "off"},
        removed={
            "jsonl": "Rollout rows are written as Parquet. Set parquet, and print them as JSON with "
            "`python -m verl_mt.report.rows RUN`."
        },
        may_change=True,
    )
    debug_rollout_data: str | None = option(
        None, "File of each step's Samples for torch.load. `{rollout_id}` in it is the step from 0. null = none."
    )
    debug_mode: str = option(
        "save",
        "How `debug_rollout_data` is used. save = write it. rollout_only = write it and train nothing. train_only = "
        "train on it instead of sampling, without an engine. With train_only it may be a run directory, whose "
        "rollout rows are read.",
        choices=("save", "rollout_only", "train_only"),
    )
    export_at_end: bool = option(True, "Write a Hugging Face folder (hf/) when the run ends.", may_change=True)
    dry_run: bool = option(
        False, "Look at everything that a run needs, print what is wrong, and stop (docs/doctor.md).", may_change=True
    )

    def problems(self, config: Any, key: str) -> Iterator[str]:
        for name in ("nnodes", "n_workers_per_node"):
            if (number := getattr(self, name)) > 1 and self.placement != "ray":
                yield f"trainer.{name} is {number}, which needs trainer.placement=ray (it is {self.placement})"
        if self.resume_mode == "resume_path" and self.resume_from_path is None:
            yield "trainer.resume_mode=resume_path needs trainer.resume_from_path"
        if self.val_only and config.data.val_files is None:
            yield "trainer.val_only needs data.val_files"
        trackers = ("console", "file", *known("verl_mt.trackers"))
        for name in self.logger:
            # A plug-in may register one; those are known when plug-ins are imported.
            if name not in trackers and not config.external_plugins and not names_code(name):
                yield (
                    f"trainer.logger: unknown tracker {name!r}. Known: {', '.join(trackers)}, and the dotted path or "
                    "file.py:Name of a custom one"
                )

    @property
    def steps_ahead(self) -> int:
        """`max_staleness`, where anything is trained."""
        return 0 if self.val_only else self.max_staleness


@dataclass
class ActorRolloutRefConfig(Section):
    """`actor_rollout_ref`: the YAML-declared worker group."""

    model: ModelConfig = option(ModelConfig, "The policy's weights, tokenizer and chat template.")
    actor: ActorConfig = option(ActorConfig, "The trained policy.")
    rollout: RolloutConfig = option(RolloutConfig, "Sampling of trajectories.")
    # verl's launch scripts give its keys to every run.
    ref: RefConfig = option(
        RefConfig,
        "The frozen reference policy.",
        when=switched_on(KL_LOSS) | switched_on(KL_IN_REWARD),
        allow_unused=True,
    )


@dataclass
class Config(Section):
    """The root."""

    data: DataConfig = option(DataConfig, "Rows.")
    actor_rollout_ref: ActorRolloutRefConfig = option(ActorRolloutRefConfig, "The worker group.")
    critic: CriticConfig = option(CriticConfig, "Values of states, for PPO.", when=GAE)
    reward: RewardConfig = option(RewardConfig, "Scores.")
    algorithm: AlgorithmConfig = option(AlgorithmConfig, "Advantages.")
    trainer: TrainerConfig = option(TrainerConfig, "The loop.")
    external_plugins: list[str] = option([], "Python files or modules imported at start. They register plug-ins.")

    def problems(self, config: Any, key: str) -> Iterator[str]:
        rollout, actor, critic = self.actor_rollout_ref.rollout, self.actor_rollout_ref.actor, self.critic
        longest = self.data.max_prompt_length + rollout.response_length
        if rollout.max_model_len is not None and rollout.custom_generate_function_path is not None:
            longest = rollout.max_model_len  # the function may write longer prompts
        elif rollout.max_model_len is not None:
            longest = min(longest, rollout.max_model_len)
        passes: dict[str, int | None] = {}
        if actor.ppo_micro_batch_size is None:
            passes["actor_rollout_ref.actor.ppo_max_token_len"] = actor.ppo_max_token_len
        if critic.ppo_micro_batch_size is None:
            passes["critic.ppo_max_token_len"] = critic.ppo_max_token_len
        if actor.use_kl_loss or self.algorithm.use_kl_in_reward:
            passes["actor_rollout_ref.ref.log_prob_max_token_len"] = self.actor_rollout_ref.ref.log_prob_max_token_len
        for name, limit in passes.items():
            # Ranks that share a sequence hold a part of it each.
            if limit is not None and limit * actor.ulysses_sequence_parallel_size < longest:
                yield f"{name} ({limit}) is less than the longest sequence ({longest} = prompt + response): raise it"
        for name, optim in {"actor_rollout_ref.actor.optim": actor.optim, "critic.optim": critic.optim}.items():
            both = {f"{name}.{part}": getattr(optim, part) for part in ("lr_warmup_steps", "lr_warmup_steps_ratio")}
            if all(both.values()) and both.keys() <= explicit_keys(self):
                shown = " and ".join(f"{part}={value}" for part, value in both.items())
                yield f"{shown} both say how long the warm-up is: set one of them to 0"


def schema() -> type[Config]:
    """`Config` with the keys of extensions, as `Config()` makes it."""
    return extended_classes(Config).get(Config, Config)


def _extended_of(cls: type, of_others: bool = False) -> type:
    # An extension may make its own sections while it is imported, when classes cannot be made yet.
    return extended_classes(Config).get(cls, cls) if of_others or cls.__module__.startswith(__package__) else cls


Section.extended_of = staticmethod(_extended_of)


def correction_of(config: Config) -> dict[str, Any]:
    """`algorithm.rollout_correction`; where that is empty and training is asynchronous, weights per token, if the loss
    is one per token and its ratios are not to the sampler already (benchmarks/staleness.py: without any, a policy falls
    apart that learns from 8 updates before)."""
    given, actor = config.algorithm.rollout_correction, config.actor_rollout_ref.actor
    mode = loss_mode(actor.policy_loss)
    per_token = mode in POLICY_LOSSES and POLICY_LOSSES[mode].depends_on != "trajectory"
    if given or not config.trainer.steps_ahead or actor.use_sampler_log_probs == "always" or not per_token:
        return given
    return {"rollout_is": "token"}


@dataclass(frozen=True)
class Leaf:
    """One key that holds a value."""

    key: str
    type: Any
    default: Any
    doc: str
    metadata: Mapping[str, Any]
    when: Condition | None
    """Under which condition it means something; its sections' conditions are part of it."""
    allow_unused: tuple[Any, ...] | bool

    @property
    def is_open(self) -> bool:
        """It may hold a mapping with keys of the user's own."""
        return typing.get_origin(self.type) is dict or (self.type is Any and "choices" not in self.metadata)


@dataclass(frozen=True)
class SectionNode:
    """One key that holds further keys."""

    key: str
    cls: type
    doc: str
    when: Condition | None
    allow_unused: tuple[Any, ...] | bool


def _walk(cls: type, above: SectionNode | None) -> Iterator[Leaf | SectionNode]:
    hints = typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        hint, meta = hints[item.name], item.metadata
        key = item.name if above is None else f"{above.key}.{item.name}"
        inherited: Condition | None = None if above is None else above.when
        when = inherited & meta["when"] if inherited and meta["when"] else inherited or meta["when"]
        allow_unused = meta["allow_unused"] or (above is not None and above.allow_unused)
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            section = SectionNode(key, hint, meta["doc"], when, allow_unused)
            yield section
            yield from _walk(hint, section)
        else:
            made = item.default_factory() if item.default_factory is not dataclasses.MISSING else item.default
            yield Leaf(key, hint, made, meta["doc"], meta, when, allow_unused)


@functools.cache
def leaves() -> dict[str, Leaf]:
    """Dotted key -> leaf, in the order of the schema."""
    return {node.key: node for node in _walk(schema(), None) if isinstance(node, Leaf)}


@functools.cache
def sections() -> dict[str, SectionNode]:
    """Dotted key -> section, in the order of the schema."""
    return {node.key: node for node in _walk(schema(), None) if isinstance(node, SectionNode)}


def open_parent(key: str) -> Leaf | None:
    """The leaf with a free mapping that `key` lies under: `a.kwargs` for `a.kwargs.x`; None if there is none."""
    parts = key.split(".")
    for end in range(len(parts) - 1, 0, -1):
        leaf = leaves().get(".".join(parts[:end]))
        if leaf is not None:
            return leaf if leaf.is_open else None
    return None


def value_of(config: Config, key: str) -> Any:
    """The value of a dotted key; of one below a mapping with options (`a.policy_loss.loss_mode`) their default where
    it is not set."""
    leaf = None if key in leaves() else open_parent(key)
    if leaf is None:
        return functools.reduce(getattr, key.split("."), config)
    name, options = key.removeprefix(f"{leaf.key}."), leaf.metadata["options"]
    return value_of(config, leaf.key).get(name, options.__dataclass_fields__[name].default)


@dataclass(frozen=True)
class _Origin:
    explicit: frozenset[str]
    values: dict[str, Any]


def whole_keys(keys: Collection[str]) -> frozenset[str]:
    """Keys of the schema: `a.kwargs` for `a.kwargs.x`."""
    return frozenset(parent.key if (parent := open_parent(key)) else key for key in keys)


def set_explicit(config: Config, keys: Collection[str]) -> None:
    """Remember which keys somebody has set, by whatever alias, and the values beside them; not part of the
    configuration."""
    vars(config)["_origin"] = _Origin(whole_keys(keys), _values(config))


def explicit_keys(config: Config) -> frozenset[str]:
    """Keys that a command line, or a YAML file of the user's own, has set, and those that were changed in Python since;
    in a configuration that was made in Python, those that differ from their defaults."""
    origin = vars(config).get("_origin")
    before = {key: leaf.default for key, leaf in leaves().items()} if origin is None else origin.values
    changed = {key for key, value in _values(config).items() if value != before[key]}
    return frozenset(changed) if origin is None else origin.explicit | changed


def is_as_checked(config: Config) -> bool:
    """Nothing was changed since `set_explicit`."""
    origin = vars(config).get("_origin")
    return origin is not None and origin.values == _values(config)


def _values(config: Config) -> dict[str, Any]:
    return {key: copy.copy(value_of(config, key)) for key in leaves()}
