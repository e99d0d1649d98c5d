"""Numbers of the optimization that are allowed and end a run: clip ranges, KL and entropy weights, gradient clipping,
discounts, passes over a batch."""

from __future__ import annotations

import re
from collections.abc import Iterator

from verl_mt.chat.parser_fit import written_call
from verl_mt.config.policy_losses import loss_mode, read_policy_loss
from verl_mt.config.schema import explicit_keys
from verl_mt.extensions.inspection.doctor.findings import Finding, Subject, ok, warning
from verl_mt.extensions.inspection.doctor.forms import SLOT, asked_forms, shown
from verl_mt.extensions.inspection.doctor.scripted import called

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_CLIPS = {"token": (0.01, 0.5, "0.2"), "trajectory": (1e-5, 0.1, "3e-4")}
"""`PolicyLoss.depends_on` -> smallest and largest lower clip range, and a usual one (PPO, DAPO; GSPO)."""
_MOST_CLIP_HIGH = 1.0
_MOST_KL, _MOST_ENTROPY, _MOST_EPOCHS, _MOST_DECAY = 0.5, 0.05, 10, 0.3
_CLIP_NORM = (1e-3, 100.0)
_MOST_ADAPTER_SCALE = 16.0
_LEAST_GAMMA, _LEAST_LAM = 0.95, 0.5
_CONTROL = re.compile(r"<\|[^|<>\s]{1,40}\|>|</?s>|<(?:start|end)_of_turn>|<｜[^｜<>]{1,40}｜>")


def hyperparameters(subject: Subject) -> Iterator[Finding]:
    """Weights and ranges with which policies learn."""
    if subject.config.trainer.val_only:
        yield ok("nothing is trained")
        return
    found = [*_clips(subject), *_weights(subject), *_optimizer(subject), *_discounts(subject), *_validation(subject)]
    yield from found
    if not found:
        actor = subject.config.actor_rollout_ref.actor
        kl = f", KL {actor.kl_loss_coef:g}" if actor.use_kl_loss else ""
        yield ok(f"clip range {actor.clip_ratio:g}{kl}, entropy {actor.entropy_coeff:g}")


def _clips(subject: Subject) -> Iterator[Finding]:
    actor = subject.config.actor_rollout_ref.actor
    loss = read_policy_loss(actor.policy_loss)
    if loss_mode(actor.policy_loss) not in ("vanilla", "gspo"):
        return  # what is usual is known of these
    lowest, highest, usual = _CLIPS.get(loss.depends_on, _CLIPS["token"])
    for side in ("low", "high"):
        if f"clip_{side}" not in loss.clips:
            continue
        own = getattr(actor, f"clip_ratio_{side}")
        value, name = (actor.clip_ratio, "clip_ratio") if own is None else (own, f"clip_ratio_{side}")
        most = _MOST_CLIP_HIGH if name == "clip_ratio_high" else highest
        explicit = explicit_keys(subject.config)
        if own is None and (side == "high" or f"{_ACTOR}.clip_ratio" not in explicit):
            continue  # said once; a default is what its loss makes of it
        if not lowest <= value <= most:
            effect = "updates are hardly limited" if value > most else "nearly every token is clipped"
            yield warning(
                f"{_ACTOR}.{name} is {value:g}: {effect} ({loss_mode(actor.policy_loss)} usually has {usual})",
                f"set {_ACTOR}.{name} between {lowest:g} and {most:g}",
            )
    low = actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low
    high = actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high
    if actor.clip_ratio_high is not None and high < low:
        yield warning(
            f"{_ACTOR}.clip_ratio_high={high:g} is below the lower clip range {low:g}: probabilities fall faster than "
            "they rise",
            f"set clip_ratio_high to at least {low:g}",
        )


def _weights(subject: Subject) -> Iterator[Finding]:
    config, actor = subject.config, subject.config.actor_rollout_ref.actor
    kl = {f"{_ACTOR}.kl_loss_coef": actor.kl_loss_coef if actor.use_kl_loss else 0.0}
    in_reward = config.algorithm.use_kl_in_reward
    kl["algorithm.kl_ctrl.kl_coef"] = _kl_coef(config.algorithm.kl_ctrl) if in_reward else 0.0
    for key, value in kl.items():
        if value > _MOST_KL:
            yield warning(
                f"{key} is {value:g}: the policy is held at the reference and learns little",
                f"set {key} to 0.001 to 0.1",
            )
    if actor.entropy_coeff < 0:
        yield warning(
            f"{_ACTOR}.entropy_coeff is {actor.entropy_coeff:g}: a negative weight lowers the entropy, and samples of "
            "a group become alike",
            "set it to 0, or to 0.001 to 0.01",
        )
    elif actor.entropy_coeff > _MOST_ENTROPY:
        yield warning(
            f"{_ACTOR}.entropy_coeff is {actor.entropy_coeff:g}: the bonus outweighs the reward, and the policy "
            "becomes noise",
            "set it to 0, or to 0.001 to 0.01",
        )
    cost = config.reward.token_cost * subject.rollout.response_length
    if cost > 1:
        yield warning(
            f"reward.token_cost={config.reward.token_cost:g} takes up to {cost:.3g} from the reward of a response of "
            f"{subject.rollout.response_length} tokens: short wrong answers earn more than right ones",
            f"set reward.token_cost to {0.1 / subject.rollout.response_length:.0e}, or to 0",
        )


def _kl_coef(control: object) -> float:
    value = control.get("kl_coef", 0.0) if isinstance(control, dict) else getattr(control, "kl_coef", 0.0)
    return float(value)


def _optimizer(subject: Subject) -> Iterator[Finding]:
    actor, model = subject.config.actor_rollout_ref.actor, subject.config.actor_rollout_ref.model
    least, most = _CLIP_NORM
    if actor.grad_clip and not least <= actor.grad_clip <= most:
        effect = "gradients are not clipped" if actor.grad_clip > most else "every update is cut to nearly nothing"
        yield warning(f"{_ACTOR}.grad_clip is {actor.grad_clip:g}: {effect}", "set it to 1, or to 0 for no clipping")
    if actor.ppo_epochs > _MOST_EPOCHS:
        yield warning(
            f"{_ACTOR}.ppo_epochs is {actor.ppo_epochs}: the samples are of an old policy after a few passes",
            "set it to 1 to 4",
        )
    if actor.optim.weight_decay > _MOST_DECAY:
        yield warning(
            f"{_ACTOR}.optim.weight_decay is {actor.optim.weight_decay:g}: it pulls the weights to 0",
            "set it to 0 to 0.1",
        )
    if min(actor.optim.betas) < 0.5:
        yield warning(
            f"{_ACTOR}.optim.betas is {list(actor.optim.betas)}: the moments follow single batches",
            "set it to [0.9, 0.999]",
        )
    scale = model.lora_alpha / model.lora_rank if model.lora_rank else 1.0
    if scale > _MOST_ADAPTER_SCALE:
        yield warning(
            f"actor_rollout_ref.model.lora_alpha / lora_rank is {scale:g}: adapters are scaled by it",
            f"set lora_alpha to {model.lora_rank} to {2 * model.lora_rank}",
        )


def _discounts(subject: Subject) -> Iterator[Finding]:
    algorithm, explicit = subject.config.algorithm, explicit_keys(subject.config)
    if "algorithm.gamma" in explicit and algorithm.gamma < _LEAST_GAMMA:
        yield warning(
            f"algorithm.gamma is {algorithm.gamma:g} per token: a reward reaches {1 / (1 - algorithm.gamma):.0f} "
            "tokens back",
            "set it to 1, or to at least 0.99",
        )
    if "algorithm.lam" in explicit and algorithm.lam < _LEAST_LAM:
        yield warning(f"algorithm.lam is {algorithm.lam:g}: advantages hardly see the reward", "set it to 0.95 to 1")


def _validation(subject: Subject) -> Iterator[Finding]:
    sampling = subject.rollout.val_kwargs
    if subject.config.data.val_files is not None and sampling.n > 1 and sampling.temperature == 0:
        yield warning(
            f"{_ROLLOUT}.val_kwargs.n is {sampling.n} at temperature 0: all samples of a prompt are the same",
            "set val_kwargs.n=1, or val_kwargs.temperature to 0.6 to 1",
        )


def stop_strings(subject: Subject) -> Iterator[Finding]:
    """Stop strings end turns where they are meant to: not within a call, nor before the answer."""
    chat, strings = subject.known_chat, subject.rollout.stop
    tools = next((p.tools for p in subject.prompts if p.tools), [])
    written = written_call(chat, tool=tools[0]) if tools and called(chat, tools[0]) is not None else None
    forms = asked_forms(subject.prompts[0]) if subject.prompts else []
    vocabulary, trouble = chat.tokenizer.get_vocab(), []
    for text in strings:
        early = next((form for form in forms if text in form.partition(SLOT)[0]), None)
        if written is not None and text in written.text.strip()[: -len(text)]:
            trouble.append((text, f"ends the turn within a tool call ({written.text.strip()[:40]!r}...)"))
        elif early is not None:
            trouble.append((text, f"ends the turn before the answer that the prompt asks for as {shown(early)}"))
        elif not text.strip() and len(text) == 1:
            trouble.append((text, "ends the turn at the first white space of its kind"))
        elif _CONTROL.fullmatch(text) and text not in vocabulary:
            trouble.append((text, "is a control token of another model: no token of this tokenizer"))
    for text, effect in trouble:
        yield warning(f"{_ROLLOUT}.stop: {text!r} {effect}", "leave it out, or write the end of what you want to read")
    if not trouble:
        yield ok(", ".join(map(repr, strings)) or "none")
