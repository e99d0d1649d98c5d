"""What the actor differentiates: the policy loss of the configuration, corrections, the entropy bonus and a KL term.

What a policy loss reads, and what it must know of a whole mini-batch, its class says
(verl_mt/config/policy_losses.py `PolicyLoss`). No code of the workers knows losses by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from verl_mt.algorithms.aggregate import tokens_per_trajectory
from verl_mt.algorithms.kl import kl_penalty
from verl_mt.algorithms.losses import sequence_log_ratio
from verl_mt.algorithms.masked import at_least_quantile, masked_fill_zero
from verl_mt.config.actor import ActorConfig
from verl_mt.config.policy_losses import KEY, CustomLoss, PolicyLoss, read_policy_loss
from verl_mt.data import batch as columns
from verl_mt.errors import ConfigError, UserCodeError, error_text
from verl_mt.modeling.log_probs import LogProbs
from verl_mt.plugins import load_object
from verl_mt.workers.rank_batch import RankBatch
from verl_mt.workers.rollout_correction import RolloutCorrection, with_log_probs

TokenLoss = Callable[..., tuple[Tensor, dict[str, Tensor]]]
"""(log_probs, old_log_probs, advantages, mask), [B, T] each -> (loss [B, T], 0 outside of the mask; means to log)."""
_TENSORS = ("log_probs", "old_log_probs", "advantages", "mask")


@dataclass(frozen=True)
class WholeMiniBatch:
    """What a loss may look at when it decides something over a mini-batch, before that is split. Shape suffix N: its
    rows with a token that losses are of, those without advantage too, in the batch's order.

    Every rank has the same numbers, and so comes to the same decision. Over several ranks they are gathered, in CPU
    memory, when they are first looked at: what reads them is collective.
    """

    rank_batch: RankBatch
    """This rank's."""
    numbers: Tensor
    """int64 [N], which rows of the batch they are."""
    old_bT: Tensor
    """Of this rank's rows: the log-probs that ratios are taken to; NaN = the current ones."""
    compute: Callable[[RankBatch, Tensor], Tensor]
    """(rank_batch, rows of the batch) -> log-probs [b, T] of the current weights."""
    generator: torch.Generator | None
    """For what is drawn; on the CPU."""

    @classmethod
    def of(
        cls,
        rank_batch: RankBatch,
        numbers: Tensor,
        old_bT: Tensor,
        compute: Callable[[RankBatch, Tensor], Tensor] | None = None,
        generator: torch.Generator | None = None,
    ) -> WholeMiniBatch:
        """Without `compute` nothing may ask for log-probs."""
        return cls(rank_batch, numbers, old_bT, compute or _no_log_probs, generator)

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def torn(self) -> bool:
        """Whether a trajectory has several of the rows."""
        owners = self.rank_batch.stats.trajectory_B[self.numbers]
        return len(torch.unique(owners)) < len(owners)

    @cached_property
    def batch(self) -> TensorDict:
        """The columns that decisions read."""
        rank_batch = self.rank_batch
        known = [name for name in _DECIDED_FROM if name in rank_batch.rows.keys()]  # noqa: SIM118 - iterates over its rows
        found = {name: rank_batch.together(rank_batch.rows[name], self.numbers) for name in known}
        return TensorDict(found, batch_size=[len(self)])

    @cached_property
    def sampled_NT(self) -> Tensor:
        """The tokens that losses are of."""
        return self.batch[columns.LOSS_MASK] & self.batch[columns.SAMPLED]

    @cached_property
    def old_NT(self) -> Tensor:
        """Log-probs that ratios are taken to; NaN = the current ones."""
        return self.rank_batch.together(self.old_bT, self.numbers)

    def log_probs(self, rows: Tensor | None = None) -> Tensor:
        """[N, T] of the current weights, or of some of the rows; a forward pass over them."""
        numbers = self.numbers if rows is None else self.numbers[rows.cpu()]
        return self.rank_batch.together(self.compute(self.rank_batch, numbers), numbers)

    def split_ratios(self, mask_NT: Tensor, old_NT: Tensor) -> Tensor | None:
        """[N], the mean of current log-prob - `old_NT` over the trajectory of each row that is not its only one: they
        may pass through the model one by one. NaN elsewhere; None where there is no such row.

        Args:
            mask_NT: the tokens that the mean is over.
            old_NT: NaN = the current ones.
        """
        rows = mask_NT.any(1).nonzero().flatten()
        owner = self.batch[columns.TRAJECTORY_INDEX]
        _, place, count = torch.unique(owner[rows], return_inverse=True, return_counts=True)
        rows = rows[count[place] > 1]
        if len(rows) == 0:
            return None
        mask, old = mask_NT[rows], old_NT[rows]
        known = mask & ~torch.isnan(old)  # the others have ratio 1
        current = self.log_probs(rows) if known.any() else old
        result_N = torch.full((len(self),), torch.nan, device=old.device)
        result_N[rows] = sequence_log_ratio(
            masked_fill_zero(current, known), masked_fill_zero(old, known), mask, owner[rows]
        )
        return result_N


_DECIDED_FROM = (
    columns.ADVANTAGES, columns.LOSS_MASK, columns.SAMPLED, columns.HAS_LOG_PROBS, columns.ROLLOUT_LOG_PROBS,
    columns.TRAJECTORY_INDEX, columns.GROUP_INDEX, columns.EXECUTION_INDEX,
)  # fmt: skip


def _no_log_probs(rank_batch: RankBatch, rows: Tensor) -> Tensor:
    raise NotImplementedError("log-probs of the current weights were not offered")


@dataclass(frozen=True)
class MiniBatch:
    """What the loss has to know of a whole mini-batch, so that no split into micro-batches or over ranks changes it."""

    weights_BT: Tensor
    """Of each token in the loss; see `token_weights`."""
    drift_B: Tensor | None = None
    """Off-policy sequence masking: log of the trajectory's ratio to the sampler; see `WholeMiniBatch.split_ratios`."""
    arguments: dict[str, Tensor] = field(default_factory=dict)
    """Of the policy loss: what its `over_mini_batch` returned."""
    share_BT: Tensor | None = None
    """Factor of the policy loss of each token; None = 1."""

    def part(self, rows: Tensor) -> MiniBatch:
        """Of some rows."""
        return replace(
            self,
            weights_BT=self.weights_BT[rows],
            drift_B=None if self.drift_B is None else self.drift_B[rows],
            share_BT=None if self.share_BT is None else self.share_BT[rows],
            arguments={name: value[rows] for name, value in self.arguments.items()},
        )


@dataclass(frozen=True)
class MicroBatchLoss:
    """One micro-batch's share of the loss, and what is logged of it."""

    loss: Tensor
    """A scalar with gradient."""
    clipped_BT: Tensor | None
    """1 = the policy loss, whichever it is, does not move this token at all although it has an advantage; None without
    gradient."""
    sums: dict[str, Tensor]
    """Shares of numbers of the mini-batch."""
    means: dict[str, Tensor]
    """Over this micro-batch's `num_tokens`."""
    num_tokens: Tensor


class ActorLoss:
    """Everything between log-probs and the number that is differentiated.

    Args:
        config: which terms there are.

    Raises:
        ConfigError, PluginError: a user's loss that cannot be one.
    """

    def __init__(self, config: ActorConfig):
        self.correction: RolloutCorrection | None = None
        """Corrects for a sampler that differs from the policy; set where workers are put together."""
        self.policy_loss = read_policy_loss(config.policy_loss)
        self._config = config
        self._of_sampled = token_loss(config)
        # Tokens that nobody sampled are trained on request, each by itself; they stay out of ratios and metrics.
        alone = self.policy_loss.depends_on == "token"
        self._of_given = self._of_sampled if alone else token_loss(config, read_policy_loss({}))

    def over_mini_batch(self, whole: WholeMiniBatch, weights_BT: Tensor) -> MiniBatch:
        """Collect what is decided over a mini-batch. Costs a forward pass without gradient over the rows that a choice
        depends on, where one does. Collective.

        Args:
            whole: its rows.
            weights_BT: of the tokens of this rank's rows, 0 outside of the mini-batch.
        """
        low, high = self._config.clip_range
        arguments = self.policy_loss.over_mini_batch(whole, clip_low=low, clip_high=high)
        drift_N, rank_batch = None, whole.rank_batch
        if self.correction is not None and self.correction.masks_sequences and whole.torn:
            drift_N = whole.split_ratios(with_log_probs(whole.batch), whole.batch[columns.ROLLOUT_LOG_PROBS])
        drift_B = None if drift_N is None else rank_batch.back(drift_N, whole.numbers)
        own = {name: rank_batch.back(value, whole.numbers) for name, value in arguments.items()}
        return MiniBatch(weights_BT, drift_B, own)

    def of_micro_batch(self, output: LogProbs, micro: TensorDict, mini: MiniBatch, old_BT: Tensor) -> MicroBatchLoss:
        """The loss of some rows.

        Args:
            output: of the current policy.
            micro: the rows of the batch; what a correction decides over a whole batch is in it.
            mini: these rows' part of what was taken over the whole mini-batch.
            old_BT: log-probs that ratios are taken to; NaN = the current ones, detached.
        """
        config = self._config
        # A view: a gradient that is only looked at (`_clipped`) must not reach the hooks of a sharded policy's output.
        log_probs_BT, entropy_BT = output.log_probs_BT.view_as(output.log_probs_BT), output.entropy_BT
        old_BT = torch.where(torch.isnan(old_BT), log_probs_BT.detach(), old_BT)
        weights_BT, advantages_BT, in_loss_BT = mini.weights_BT, micro[columns.ADVANTAGES], micro[columns.LOSS_MASK]
        sampled_BT = in_loss_BT & micro[columns.SAMPLED]
        loss_BT, means = self._of_sampled(log_probs_BT, old_BT, advantages_BT, sampled_BT, **mini.arguments)
        if self.correction is not None:
            loss_BT, more = self.correction.applied(loss_BT, log_probs_BT.detach(), old_BT, micro, mini.drift_B)
            means |= more
        if mini.share_BT is not None:
            loss_BT = loss_BT * mini.share_BT
        given_BT = in_loss_BT & ~micro[columns.SAMPLED]
        if given_BT.any():
            loss_BT = loss_BT + self._of_given(log_probs_BT, old_BT, advantages_BT, given_BT)[0]
        clipped_BT = _clipped(micro, loss_BT, log_probs_BT)
        pg_loss = (loss_BT * weights_BT).sum()
        loss, num_tokens, sums = pg_loss, sampled_BT.sum(), {"actor/pg_loss": pg_loss}
        if entropy_BT is not None:
            loss = pg_loss - config.entropy_coeff * (entropy_BT * weights_BT).sum()
            means["entropy"] = masked_fill_zero(entropy_BT.detach(), sampled_BT).sum() / num_tokens.clamp(min=1)
        if config.use_kl_loss:
            kl_BT = kl_penalty(log_probs_BT, micro[columns.REF_LOG_PROBS], config.kl_loss_type)
            sums["actor/kl_loss"] = (masked_fill_zero(kl_BT, in_loss_BT) * weights_BT).sum()
            loss = loss + config.kl_loss_coef * sums["actor/kl_loss"]
        sums["actor/loss"] = loss
        return MicroBatchLoss(loss, clipped_BT, sums, means, num_tokens)

    def uncertain(self, whole: WholeMiniBatch, entropies_bT: Tensor) -> Tensor:
        """[b, T], the factor of each token's policy loss under `top_entropy_quantile`: 1 for the mini-batch's tokens of
        the highest entropy, 0 for its others. With one ratio for a trajectory, the share of the former among its
        tokens, as what moves the trajectory moves all of them. Collective.

        Args:
            whole: the mini-batch.
            entropies_bT: of the current weights, in its rows.
        """
        entropies_NT = whole.rank_batch.together(entropies_bT, whole.numbers)
        high_NT = at_least_quantile(entropies_NT, whole.sampled_NT, 1 - self._config.top_entropy_quantile)
        factor_NT = high_NT.float()
        if self.policy_loss.depends_on == "trajectory":
            trajectory_N = whole.batch[columns.TRAJECTORY_INDEX]
            all_K, place_N = tokens_per_trajectory(whole.sampled_NT, trajectory_N)
            high_K, _ = tokens_per_trajectory(high_NT, trajectory_N)
            factor_NT = (high_K / all_K.clamp(min=1))[place_N].unsqueeze(1).expand_as(entropies_NT)
        return whole.rank_batch.back(factor_NT, whole.numbers)

    def slope_where_known(self, micro: TensorDict, mini: MiniBatch, old_BT: Tensor) -> Tensor | None:
        """d loss / d log-prob [B, T] before the log-probs are known; None if it depends on them.

        Where ratios are taken to the current policy itself they are 1, whatever the log-probs are, and so every loss
        whose class says so has the slope that it has at any log-probs. A head that knows the slope makes gradients on
        the way forward, and its logits only once.
        """
        config = self._config
        other_terms = config.use_kl_loss or config.entropy_coeff != 0 or self.correction is not None
        if other_terms or not self.policy_loss.slope_known:
            return None
        if not bool((torch.isnan(old_BT) | ~micro[columns.LOSS_MASK]).all()):
            return None
        guess_BT = torch.zeros_like(old_BT).requires_grad_()
        with torch.enable_grad():
            loss = self.of_micro_batch(LogProbs(guess_BT, torch.zeros_like(old_BT)), micro, mini, old_BT).loss
        return torch.autograd.grad(loss, guess_BT)[0]


def _clipped(micro: TensorDict, loss_BT: Tensor, log_probs_BT: Tensor) -> Tensor | None:
    """See `MicroBatchLoss.clipped_BT`."""
    if not loss_BT.requires_grad:
        return None
    (slope_BT,) = torch.autograd.grad(loss_BT.sum(), log_probs_BT, retain_graph=True)
    return (micro[columns.LOSS_MASK] & (micro[columns.ADVANTAGES] != 0) & (slope_BT == 0)).float()


def token_loss(config: ActorConfig, loss: PolicyLoss | None = None) -> TokenLoss:
    """The function of a loss, with its options and clip ranges filled in.

    Args:
        config: `policy_loss` and the clip ranges.
        loss: another loss than the configuration's.

    Raises:
        PluginError: the path of a custom loss leads nowhere.
        ConfigError: it is no function of four tensors, or takes no argument of the name of an option.
    """
    loss = loss or read_policy_loss(config.policy_loss)
    function = load_object(loss.formula, what=f"{KEY}.loss_mode")
    if not isinstance(loss, CustomLoss):
        return _filled_in(function, loss, config)
    where = f"{KEY}.loss_mode={loss.formula}"
    if isinstance(function, type) and issubclass(function, PolicyLoss):
        raise ConfigError(
            f"{where} is a class: name the path of its formula, or give the class a name: POLICY_LOSSES['my_loss'] = "
            f"{function.__name__} in a file of external_plugins, or an entry point of verl_mt.policy_losses"
        )
    if not callable(function):
        raise ConfigError(f"{where} is a {type(function).__name__}, expected a function")
    takes = inspect.signature(function).parameters
    positional = [p for p in takes.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < len(_TENSORS) and not any(p.kind is p.VAR_POSITIONAL for p in takes.values()):
        raise ConfigError(f"{where} takes {', '.join(takes) or 'nothing'}. Expected ({', '.join(_TENSORS)}, ...)")
    for name in loss.options:
        if name not in takes and not any(p.kind is p.VAR_KEYWORD for p in takes.values()):
            raise ConfigError(
                f"{KEY}.{name}: {loss.formula} takes no argument of that name. It takes {', '.join(takes)}"
            )
    return partial(_of_user, _filled_in(function, loss, config), where)


def try_own_loss(config: ActorConfig) -> None:
    """Call a custom loss once, on made-up log-probs, before anything is sampled.

    Raises:
        PluginError: its path leads nowhere.
        ConfigError: it has other parameters.
        UserCodeError: it raised, or returned something else than a loss for each token.
    """
    chosen = read_policy_loss(config.policy_loss)
    loss = token_loss(config, chosen)
    is_custom = isinstance(chosen, CustomLoss)
    if not is_custom or not inspect.isfunction(load_object(chosen.formula, what=f"{KEY}.loss_mode")):
        return
    old_BT = torch.full((2, 4), -1.0)
    mask_BT = torch.tensor([[False, True, True, True], [True, True, False, False]])
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            loss((old_BT + 0.1).requires_grad_(), old_BT, torch.tensor([[1.0], [-1.0]]) * mask_BT, mask_BT)
    except UserCodeError as error:
        raise UserCodeError(f"{error} (tried at start on made-up log-probs)") from error.__cause__


def _filled_in(function: Callable[..., Any], loss: PolicyLoss, config: ActorConfig) -> Callable[..., Any]:
    """`function` with those options and clip ranges that it takes by name."""
    takes = inspect.signature(function).parameters
    low, high = config.clip_range
    offered = {"clip_low": low, "clip_high": high, "clip_c": config.clip_ratio_c} | loss.options
    if not any(p.kind is p.VAR_KEYWORD for p in takes.values()):
        offered = {name: value for name, value in offered.items() if name in takes}
    return partial(function, **offered)


def _of_user(function: Callable[..., Any], where: str, *tensors: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """What the user's function makes of a micro-batch, checked.

    Raises:
        UserCodeError: it raised, or returned something else than a loss for each token.
    """
    mask_BT = tensors[3]
    try:
        result = function(*tensors)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise UserCodeError(f"{where} raised {error_text(error, named=True)}") from error
    loss, numbers = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not isinstance(loss, Tensor) or loss.shape != mask_BT.shape:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise UserCodeError(
            f"{where} returned {got}. Expected a loss for each token, {tuple(mask_BT.shape)}, alone or with a dict of "
            "numbers. How tokens become one number is actor.loss_agg_mode"
        )
    if torch.is_grad_enabled() and tensors[0].requires_grad and not loss.requires_grad:
        raise UserCodeError(f"{where} returned a loss without gradient: it must depend on log_probs")
    return masked_fill_zero(loss, mask_BT), {name: torch.as_tensor(value).detach() for name, value in numbers.items()}
