"""Loading a causal language model, and exporting one that `from_pretrained` loads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from verl_mt.config.actor import ModelConfig
from verl_mt.config_paths import resolve_model_path
from verl_mt.data.run_files import disk_refused
from verl_mt.data.temporary_files import new_folder, put_in_place, sweep_beside
from verl_mt.errors import CheckpointError, ConfigError
from verl_mt.modeling.exact import remember_all
from verl_mt.modeling.lora import Adapter, without_adapters

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_KERNELS_KEPT = 128
"""Of each of two caches in which torch and oneDNN keep what they compiled for a CPU, one for each shape of a product.
By default they hold 1,024: gigabytes after some dozen steps in bfloat16 on rows of all lengths, whose shapes do not
come again (benchmarks/kernel_caches.py). A forward pass has some dozen shapes."""
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")


def source_of(model: ModelConfig) -> dict[str, Any]:
    """What the loaders below take of `actor_rollout_ref.model`, as their arguments."""
    return {
        "path": model.path,
        "revision": model.revision,
        "dtype": model.dtype,
        "attn_implementation": model.attn_implementation,
        "trust_remote_code": model.trust_remote_code,
    }


def load_causal_lm(
    path: str,
    *,
    revision: str | None = None,
    dtype: str = "float32",
    attn_implementation: str = "sdpa",
    trust_remote_code: bool = False,
    device: str | torch.device = "cpu",
    exact: bool = False,
) -> Any:
    """Load a model for training or sampling.

    Args:
        path: a local folder, a hub name, or `verl_mt://tiny`.
        revision: branch, tag or commit of a hub model.
        dtype: of the weights: float32, bfloat16, float16.
        attn_implementation: transformers' name of the attention.
        trust_remote_code: run Python code that comes with the model.
        device: where the weights go.
        exact: remember, on the CPU, what a lower `dtype` rounds away of a float32 checkpoint (`exact.py`).

    Returns:
        A `transformers.PreTrainedModel` in eval mode.

    Raises:
        ConfigError: no such folder or hub model, no weights in it, weights that do not fill the model, an unknown
            dtype or attention.
    """
    _keep_few_kernels()
    if dtype not in _DTYPES:
        raise ConfigError(f"model dtype: got {dtype!r}, expected one of {', '.join(_DTYPES)}")
    source = resolve_model_path(path)
    if _is_local(source):
        _check_folder(path, Path(source))
    options: dict[str, Any] = {
        "revision": revision,
        "attn_implementation": attn_implementation,
        "trust_remote_code": trust_remote_code,
    }
    try:
        kind = _auto_class(source, revision, trust_remote_code)
        loaded: Any = kind.from_pretrained(source, dtype=_DTYPES[dtype], output_loading_info=True, **options)
        if exact and dtype != "float32" and _is_float32(source, revision, trust_remote_code):
            remember_all(loaded[0], kind.from_pretrained(source, dtype=torch.float32, **options))
    except SafetensorError as error:
        raise _damaged(path, error) from error
    except (OSError, ValueError, ImportError, RuntimeError, AssertionError) as error:
        raise _not_loadable(path, revision, error) from error
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise ConfigError(
            f"model path {path!r}: the checkpoint lacks {len(missing)} of the model's tensors "
            f"({', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}). They would have been random"
        )
    return model.to(device)


def empty_causal_lm(
    path: str,
    *,
    revision: str | None = None,
    dtype: str = "float32",
    attn_implementation: str = "sdpa",
    trust_remote_code: bool = False,
) -> Any:
    """The model that `load_causal_lm` would load, on the CPU, with memory for its weights and nothing in it.

    Memory that nobody writes costs nothing: a rank whose shards come from another one needs no more than its shards.
    """
    model = meta_causal_lm(
        path,
        revision=revision,
        dtype=dtype,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
    )
    model.to_empty(device="cpu")
    model.tie_weights()
    return model.eval()


def meta_causal_lm(
    path: str,
    *,
    revision: str | None = None,
    dtype: str = "float32",
    attn_implementation: str = "sdpa",
    trust_remote_code: bool = False,
) -> Any:
    """The model that `load_causal_lm` would load, as shapes alone (`meta` device). It knows as well what the checkpoint
    calls each weight: `named_weights` gives the same names as for the loaded model.

    Raises:
        ConfigError: no such folder or hub model, a folder without weights, weights whose header is damaged, an
            architecture or attention that is not to be had.
    """
    from transformers import AutoConfig
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    _keep_few_kernels()
    source = resolve_model_path(path)
    if _is_local(source):
        _check_folder(path, Path(source))
    try:
        config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model = _auto_class(source, revision, trust_remote_code).from_config(
                config,
                dtype=_DTYPES[dtype],
                attn_implementation=attn_implementation,
                trust_remote_code=trust_remote_code,
            )
        if held := tensors_in_checkpoint(path, revision):
            # As `from_pretrained`, which remembers on the way which weights it renamed and converted.
            mapping = get_model_conversion_mapping(model)
            on_meta = LoadStateDictConfig(device_map={"": "meta"}, weight_mapping=mapping)
            convert_and_load_state_dict_in_model(model, held, on_meta)
            model.tie_weights()
        return model
    except (OSError, ValueError, ImportError, RuntimeError, AssertionError) as error:
        raise _not_loadable(path, revision, error) from error


def tensors_in_checkpoint(path: str, revision: str | None = None) -> dict[str, torch.Tensor]:
    """Name -> tensor without content (`meta` device) of all that a checkpoint's *.safetensors say they hold. Only their
    headers are read; of a hub model that is not in the cache, over the network. Empty for other files.

    Raises:
        ConfigError: a damaged header or index.
    """
    import huggingface_hub as hub
    from transformers.utils import cached_file

    source = resolve_model_path(path)
    folder = source if _is_local(source) else os.path.dirname(cached_file(source, "config.json", revision=revision))
    try:
        try:
            found = hub.get_local_safetensors_metadata(folder)
        except (hub.errors.NotASafetensorsRepoError, FileNotFoundError):
            if _is_local(source):
                return {}
            found = hub.get_safetensors_metadata(source, revision=revision)
    except (hub.errors.NotASafetensorsRepoError, hub.errors.OfflineModeIsEnabled):
        return {}
    except (hub.errors.SafetensorsParsingError, ValueError, TypeError, AttributeError) as error:
        raise _damaged(path, error) from error
    held = [info for file in found.files_metadata.values() for info in file.tensors.items()]
    return {name: torch.empty(info.shape, device="meta") for name, info in held}


def check_vocabulary(
    path: str, num_tokens: int, *, revision: str | None = None, trust_remote_code: bool = False
) -> int:
    """How many embeddings the model has; looked up before anything large is loaded.

    Raises:
        ConfigError: fewer than its tokenizer has tokens, or no such model.
    """
    from transformers import AutoConfig

    try:
        found = AutoConfig.from_pretrained(
            resolve_model_path(path), revision=revision, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, ImportError) as error:
        raise _not_loadable(path, revision, error) from error
    rows = int(found.get_text_config().vocab_size)
    if num_tokens > rows:
        raise ConfigError(
            f"model path {path!r}: the tokenizer has {num_tokens} tokens, the model {rows} embeddings (vocab_size), so "
            "some tokens would be out of range. Give the model its own tokenizer (actor_rollout_ref.model."
            "tokenizer_path), or repair vocab_size in its config.json"
        )
    return rows


def _keep_few_kernels() -> None:
    """Unless the environment says how many. Both are read once in a process, at the first product."""
    for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(_KERNELS_KEPT))


def _damaged(path: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"model path {path!r}: its *.safetensors cannot be read ({error}): cut short or damaged; copy or download "
        "the folder's weights again"
    )


def _not_loadable(path: str, revision: str | None, error: Exception) -> ConfigError:
    return ConfigError(
        f"model path {path!r}{'' if revision is None else f' (revision {revision})'} cannot be loaded ({error}). "
        "Give a local folder written by save_pretrained, or a hub name that is reachable or in the cache"
    )


def _is_float32(source: str, revision: str | None, trust_remote_code: bool) -> bool:
    """Whether a checkpoint says so, or says nothing."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code)
    return config.dtype in (None, torch.float32)


def _auto_class(source: str, revision: str | None, trust_remote_code: bool) -> Any:
    """The class of transformers that loads it: with its eyes, if it has any."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code)
    sees = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


def export_hf(model: Any, tokenizer: Any, folder: str | Path, *, adapter: Adapter | None = None) -> Path:
    """Write model and tokenizer as a Hugging Face folder: whole or not at all, and checked by loading it.

    An existing folder is replaced only after the new one is complete.

    Args:
        model: a `transformers.PreTrainedModel`; low-rank adapters are merged into what is written.
        tokenizer: its tokenizer, or None to write none.
        folder: where to; parents are created.
        adapter: low-rank adapters to write as well, into the folder's `adapter/`, for peft.

    Returns:
        The folder.

    Raises:
        CheckpointError: the folder's place is taken by something else, the disk refused, or what was written does not
            load back.
    """
    target = Path(folder).expanduser().resolve()
    if target.exists() and not _is_export(target):
        raise CheckpointError(f"export to {target}: something that is no exported model is there. Take another folder")
    model = without_adapters(model)
    try:
        return _export(model, tokenizer, target, adapter)
    except (OSError, SafetensorError) as error:
        # Safetensors has no error of its own for a full disk, nor its number.
        refused = error if isinstance(error, OSError) else OSError(None, str(error))
        raise CheckpointError(disk_refused(target, refused)) from error


def _export(model: Any, tokenizer: Any, target: Path, adapter: Adapter | None) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    sweep_beside(target)
    with new_folder(target) as staging:
        model.save_pretrained(staging)
        if tokenizer is not None:
            _save_tokenizer(tokenizer, staging)
        if adapter is not None:
            adapter.save(staging / "adapter")
        _check_loads_back(model, staging)
        for file in staging.rglob("*"):
            _sync(file)
        staging.chmod(0o755)
        _sync(staging)
        put_in_place(staging, target)
        _sync(target.parent)
    return target


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise OSError(None, f"the tokenizer: {error}") from error  # the tokenizers library has no error of its own


def _is_export(folder: Path) -> bool:
    return folder.is_dir() and (not any(folder.iterdir()) or (folder / "config.json").is_file())


def _is_local(source: str) -> bool:
    """A path rather than a hub name (`name` or `owner/name`)."""
    return os.path.exists(source) or source.startswith((".", "~", os.sep)) or source.count("/") > 1


def _check_folder(given: str, folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(
            f"model path {given!r}: no folder {folder}. Give an existing folder or a hub name (owner/name)"
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model path {given!r}: {folder} has no config.json. It is not a Hugging Face model folder")
    if not any(next(folder.glob(pattern), None) for pattern in _WEIGHTS):
        raise ConfigError(
            f"model path {given!r}: {folder} has a config.json but no weights ({', '.join(_WEIGHTS[::2])})"
        )


def _check_loads_back(model: Any, folder: Path) -> None:
    loaded, info = type(model).from_pretrained(folder, dtype=model.dtype, output_loading_info=True)
    if info["missing_keys"] or info["unexpected_keys"]:
        raise CheckpointError(
            f"export to {folder}: what was written does not load back. Missing {sorted(info['missing_keys'])}, "
            f"unexpected {sorted(info['unexpected_keys'])}"
        )
    before, after = model.state_dict(), loaded.state_dict()
    changed = [name for name, tensor in after.items() if not torch.equal(tensor, before[name].to(tensor.device))]
    if changed:
        raise CheckpointError(f"export to {folder}: {len(changed)} tensors changed on the way, among them {changed[0]}")


def _sync(path: Path) -> None:
    """To the disk, so that a power cut cannot leave a half-written export under the final name."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
