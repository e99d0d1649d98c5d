"""Low-rank adapters (LoRA, Hu et al. 2021, https://arxiv.org/abs/2106.09685): W x + alpha / rank * B A x, W frozen.

The layers are peft's, put into the model in place: its class stays the same, and its parameters get the names
`....q_proj.base_layer.weight`, `....q_proj.lora_A.default.weight` [rank, in], `....q_proj.lora_B.default.weight`
[out, rank]. B starts as 0, so that the policy starts as the base model, to the bit.

There is no dropout in the adapters: the policy that is trained would be another one than the one that sampled, and
importance ratios would be noise.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verl_mt.config.actor import ModelConfig
from verl_mt.config_paths import resolve_model_path
from verl_mt.errors import CheckpointError, ConfigError
from verl_mt.modeling.exact import take_exact

_KEY = "actor_rollout_ref.model"
_ALL = "all-linear"
_VISION = {
    "visual", "vision_tower", "vision_model", "vision_encoder", "vision_embed_tokens", "image_newline",
    "multi_modal_projector", "connector", "aligner",
}  # fmt: skip
"""What transformers' models call their vision towers and the projectors behind them."""
_NAME = "default"
"""peft's name of an adapter without a name."""
_PARTS = re.compile(r"\.(base_layer|lora_A\.default|lora_B\.default)(?=\.)")


@dataclass(frozen=True)
class Lora:
    """What the adapters of a model are; two runs whose adapters agree in it may go on from each other's checkpoints."""

    rank: int
    alpha: int
    targets: tuple[str, ...]
    """Last names of the layers that have adapters; full names where not all layers of a name have them."""
    base: str
    """Fingerprint of the frozen weights."""
    path: str
    """Where those came from."""

    def __str__(self) -> str:
        shown = ", ".join(self.targets[:8]) + (f", ... ({len(self.targets)})" if len(self.targets) > 8 else "")
        return f"lora_rank={self.rank} lora_alpha={self.alpha} lora_target_modules=[{shown}]"


def require_peft() -> None:
    """Raises:
    ConfigError: the library that brings the layers is not installed.
    """
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            f'{_KEY}.lora_rank needs the library peft: pip install "verl_mt[lora]", or set lora_rank=0 to train all '
            "weights"
        )


def add_adapters(model: Any, config: ModelConfig, *, seed: int) -> Any:
    """Give a model the adapters that the config asks for, and freeze everything else; with rank 0 do nothing.

    A starts uniform in +-1 / sqrt(in) (He et al. 2015 with a = sqrt(5), as peft and torch.nn.Linear have it), from a
    generator of its own: nothing else that is random changes.

    Args:
        model: a Hugging Face causal language model without adapters; changed in place.
        config: `lora_rank`, `lora_alpha`, `lora_target_modules`, `path`.
        seed: of A.

    Returns:
        The model.

    Raises:
        ConfigError: peft is not installed, or a target is no linear layer of the model.
    """
    if not config.lora_rank:
        return model
    require_peft()
    import peft

    chosen, targets = adapted_layers(model, config.lora_target_modules, text_only=config.freeze_vision)
    lora = Lora(config.lora_rank, config.lora_alpha, targets, _fingerprint(model), config.path)
    with torch.random.fork_rng(devices=[]):
        peft.inject_adapter_in_model(_peft_config(lora, chosen), model)
    generator = torch.Generator().manual_seed(seed)
    dtype = model.dtype
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
        if is_adapter(name):
            parameter.data = parameter.data.to(dtype)
        if ".lora_A." in name:
            bound = 1.0 / math.sqrt(parameter.shape[1])
            parameter.data.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator))
    set_lora(model, lora)
    return model


def lora_of(model: nn.Module) -> Lora | None:
    """What adapters a model has."""
    return getattr(model, "verl_mt_lora", None)


def set_lora(model: nn.Module, lora: Lora) -> None:
    """Say what adapters a model has."""
    model.verl_mt_lora = lora  # type: ignore[assignment]


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def is_vision(name: str) -> bool:
    """Whether a parameter or module belongs to a vision tower or to the projector behind it, by its name."""
    return not _VISION.isdisjoint(name.split("."))


def freeze_vision(model: nn.Module) -> None:
    """A vision tower and its projector are not trained, and need no exact values; a model without them stays as it is.

    Raises:
        ConfigError: the model's config has a `vision_config`, but none of its weights has a name by which a tower is
            known.
    """
    found = [parameter for name, parameter in model.named_parameters() if is_vision(name)]
    if not found and getattr(getattr(model, "config", None), "vision_config", None) is not None:
        parts = dict.fromkeys(".".join(name.split(".")[:2]) for name, _ in model.named_parameters())
        raise ConfigError(
            f"{_KEY}.freeze_vision: the config of {type(model).__name__} has a vision_config, but none of its weights "
            f"is known to be of a vision tower (its parts are {', '.join(parts)}; known are "
            f"{', '.join(sorted(_VISION))}): set freeze_vision=False, or give a model with one of these names"
        )
    for parameter in found:
        parameter.requires_grad_(False)
        take_exact(parameter)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model is its frozen base inside. Without adapters nothing happens."""
    layers = list(_adapted(model).values())
    # Not peft's enable_adapters, which also switches requires_grad: sharded parameters would lose their gradients.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def plain_name(name: str) -> str:
    """The name that a weight has in a model without adapters; an adapter's is that of the weight it changes."""
    return _PARTS.sub("", name)


@torch.no_grad()
def merged(lora: Lora, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of a model without adapters that computes the same: W + alpha / rank * B A, under W's plain name.

    Args:
        lora: of the model that they come from.
        tensors: whole tensors by the names that they have there; a layer together with its adapter. None is changed,
            and those without adapter are passed on as they are.

    Returns:
        In the dtype of W; the sum is taken in float32 at least and rounded once.
    """
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if is_adapter(name):
            continue
        prefix = name.removesuffix("base_layer.weight")
        if prefix != name:
            a, b = (tensors[f"{prefix}lora_{part}.{_NAME}.weight"] for part in "AB")
            exact = torch.promote_types(tensor.dtype, torch.float32)
            wide = torch.addmm(tensor.to(exact), b.to(exact), a.to(exact), alpha=lora.alpha / lora.rank)
            tensor = wide.to(tensor.dtype)
        plain[plain_name(name)] = tensor
    return plain


@torch.no_grad()
def without_adapters(model: Any) -> Any:
    """A plain model that computes the same, with the merged weights; the model itself if it has no adapters.

    Only what has an adapter is copied: all other tensors are shared with the given model, which stays as it is.
    """
    lora = lora_of(model)
    if lora is None:
        return model
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    plain = copy.deepcopy(model, shared)
    for name, layer in _adapted(plain).items():
        parent, _, last = name.rpartition(".")
        weights = merged(lora, {f"{name}.{part}": tensor for part, tensor in layer.state_dict().items()})
        linear = layer.get_base_layer()
        linear.weight = nn.Parameter(weights[f"{name}.weight"], requires_grad=False)
        setattr(plain.get_submodule(parent), last, linear)
    del plain.verl_mt_lora
    if hasattr(plain, "peft_config"):
        del plain.peft_config
    return plain


def describe(lora: Lora | None) -> dict[str, Any] | None:
    """For a checkpoint."""
    return None if lora is None else asdict(lora)


def require_same(saved: Mapping[str, Any] | None, lora: Lora | None) -> None:
    """Whether the adapters of a checkpoint fit.

    Args:
        saved: what `describe` gave when it was written.
        lora: of the model that is to take it.

    Raises:
        CheckpointError: they do not; says what the checkpoint has and what was asked for.
    """
    then = None if saved is None else Lora(**{**saved, "targets": tuple(saved["targets"])})
    if then is None and lora is None:
        return
    if then is None or lora is None or (then.rank, then.alpha, then.targets) != (lora.rank, lora.alpha, lora.targets):
        has, asked = ("lora_rank=0 (all weights are trained)" if x is None else str(x) for x in (then, lora))
        raise CheckpointError(
            f"the checkpoint was written with {has}, but {_KEY} says {asked}: resume with what it was written with, or "
            "export it (python -m verl_mt.export) and start a new run from the export"
        )
    if then.base != lora.base:
        raise CheckpointError(
            f"the checkpoint has adapters only, and they belong to other weights than those of {_KEY}.path="
            f"{lora.path}: it was written with {then.path} (fingerprint {then.base}, here {lora.base}). Give the model "
            "that the run was started with, in its dtype"
        )


@dataclass(frozen=True)
class Adapter:
    """The adapters of a model without the model."""

    lora: Lora
    tensors: dict[str, Tensor]
    """Whole, by the names that they have in the model."""

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """By the names that they have in peft's files: below a wrapper, and without the name of the adapter."""
        return ((f"base_model.model.{name.replace(f'.{_NAME}.', '.')}", t) for name, t in self.tensors.items())

    def save(self, folder: Path) -> None:
        """Write a folder that `peft.PeftModel.from_pretrained(base_model, folder)` loads."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        _peft_config(self.lora, self.lora.targets).save_pretrained(str(folder))
        contents = {name: tensor.detach().to("cpu").contiguous() for name, tensor in self.named()}
        save_file(contents, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def adapter_of(model: nn.Module) -> Adapter | None:
    """The adapters of a whole model; their tensors are the live ones."""
    lora = lora_of(model)
    if lora is None:
        return None
    return Adapter(lora, {name: p.detach() for name, p in model.named_parameters() if is_adapter(name)})


def _peft_config(lora: Lora, targets: Iterable[str]) -> Any:
    import peft

    return peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(targets),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(resolve_model_path(lora.path)),
        inference_mode=False,
    )


def adapted_layers(model: Any, asked: list[str], *, text_only: bool) -> tuple[list[str], tuple[str, ...]]:
    """Full names of the layers that get an adapter, and the shortest way to say it.

    Args:
        model: without adapters; of its layers only names and classes are looked at.
        asked: `lora_target_modules`.
        text_only: without those of a vision tower.

    Raises:
        ConfigError: a name that stands for no linear layer.
    """
    head = model.get_output_embeddings()
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]
    linear = [name for name in linear if not (text_only and is_vision(name))]
    chosen: set[str] = set()
    unknown = []
    for target in asked:
        found = {name for name in linear if target == _ALL or name == target or name.endswith(f".{target}")}
        chosen |= found
        if not found:
            unknown.append(target)
    last = {name: name.rpartition(".")[2] for name in linear}
    if unknown or not chosen:
        raise ConfigError(
            f"{_KEY}.lora_target_modules: {', '.join(map(repr, unknown)) or 'an empty list'} names no linear layer of "
            f"{type(model).__name__} below its output head. It has {', '.join(sorted(set(last.values())))}, or say "
            f"{_ALL}"
        )
    names = {last[name] for name in chosen}
    whole = chosen == {name for name in linear if last[name] in names}
    return sorted(chosen), tuple(sorted(names if whole else chosen))


def _adapted(model: nn.Module) -> dict[str, Any]:
    """The layers that have an adapter."""
    if lora_of(model) is None:
        return {}
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def _fingerprint(model: nn.Module) -> str:
    """Of at most 64 numbers of every parameter: other weights show, and it costs nothing."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().reshape(-1)
        some = flat[:: max(1, len(flat) // 64)][:64].float().cpu()
        digest.update(name.encode() + some.numpy().tobytes())
    return digest.hexdigest()[:16]
