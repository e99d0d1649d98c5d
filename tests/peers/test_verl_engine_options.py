"""Options of the inference engine in verl's own files: each is set here, has another name here, or is listed.

verl's own Hydra composes the oracle: the configuration of a script, and the same without the script's words. A key of
`actor_rollout_ref.rollout` in which the two differ is one that the script sets. Scripts of SGLang are tried a second
time with `rollout.name=vllm` in them, as a user of vLLM writes them.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import conformance
import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from tables import newest_first, one_of_each
from verl_resolved import verl_composes, we_resolve

from verl_mt.config.compose import compose
from verl_mt.config.schema import Config
from verl_mt.extensions.cluster.replicas.options import ReplicaOptions
from verl_mt.extensions.cluster.vllm.options import VLLMOptions
from verl_mt.extensions.compat.migrate import migrate, report

pytestmark = pytest.mark.slow  # real files, a shell for each

EXAMPLES, CONFIG, ROLLOUT = "examples/sglang_multiturn", "verl/trainer/config", "actor_rollout_ref.rollout"
SCRIPTS = sorted(
    (revision.name, str(file.relative_to(revision / EXAMPLES)))
    for revision in conformance.revisions("verl")
    for file in (revision / EXAMPLES).rglob("*.sh")
    if "main_ppo" in file.read_text() and "megatron" not in file.name and "dapo" not in file.name
)
VLLM = [(revision, script) for revision, script in SCRIPTS if "vllm" in script]
ENGINE_OF = re.compile(r"(actor_rollout_ref\.rollout\.name=)\w+")
OURS: dict[str, Callable[[Config], Any]] = {
    "multi_turn.tool_config_path": lambda config: config.actor_rollout_ref.rollout.tool_kwargs.tools_config_file,
    "multi_turn.interaction_config_path": lambda config: config.actor_rollout_ref.rollout.interaction_config_file,
    "multi_turn.format": lambda config: config.actor_rollout_ref.rollout.multi_turn.tool_parser,
}
"""verl's key below `rollout` -> what has its value here, where that is not the key of the same name."""
SAME = (
    "enforce_eager", "enable_chunked_prefill", "enable_prefix_caching", "max_num_batched_tokens", "max_num_seqs",
    "cudagraph_capture_sizes", "gpu_memory_utilization",
)  # fmt: skip
TO_VLLM = {"tensor_model_parallel_size": "tensor_parallel_size", "dtype": "dtype", **{name: name for name in SAME}}
"""verl's key -> the argument of vLLM that verl's rollout makes of it."""
MISSING = "not there"


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        inner = isinstance(value, dict) and bool(value)
        found |= flat(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return found


def written(tree: DictConfig) -> dict[str, Any]:
    """What stands below `rollout`, interpolations as they are written."""
    found: Any = OmegaConf.to_container(tree.actor_rollout_ref.rollout, resolve=False)
    return {key: value for key, value in flat(found).items() if not key.endswith("_target_")}


def set_by(tree: DictConfig, root: Path) -> dict[str, Any]:
    """The options that a script sets: those that are not as in verl's own file, and how many ranks an engine has."""
    with initialize_config_dir(str((root / CONFIG).resolve()), version_base=None):
        usual = written(hydra_compose("ppo_trainer"))
    options, names = tree.actor_rollout_ref.rollout, written(tree)
    changed = [key for key, value in names.items() if key not in usual or usual[key] != value]
    values = {key: OmegaConf.select(options, key) for key in {*changed, "name", "tensor_model_parallel_size"}}
    return {k: OmegaConf.to_container(v) if OmegaConf.is_config(v) else v for k, v in values.items()}


def arguments_of(config: Config) -> dict[str, Any]:
    """What vLLM is started with."""
    made = ReplicaOptions.from_config.__func__  # type: ignore[attr-defined]  # without a search for an interpreter
    options = made(
        VLLMOptions,
        config.actor_rollout_ref,
        python=sys.executable,
        end_token_ids=(),
        max_model_len=4096,
        seed=0,
        hosts=(),
    )
    return options.arguments()["engine"]


def silent(theirs: dict[str, Any], config: Config, listed: str) -> dict[str, Any]:
    """verl's options of a script that are neither in force here nor listed -> (value there, value here)."""
    rollout = config.actor_rollout_ref.rollout
    vllm = arguments_of(config) if rollout.name == "vllm" else {}
    own = flat(dataclasses.asdict(rollout))
    missed = {}
    for key, value in theirs.items():
        group, _, argument = key.removeprefix("engine_kwargs.").partition(".")
        if re.search(rf"(?m)^# .*\b{re.escape(f'{ROLLOUT}.{key}')}(?![\w.])", listed):
            continue
        if key.startswith("engine_kwargs."):
            here = flat(rollout.engine_kwargs).get(argument, MISSING) if group == rollout.name else MISSING
        elif vllm and key in TO_VLLM:
            here = vllm.get(TO_VLLM[key], own.get(key, MISSING))
        elif key in OURS:
            here = OURS[key](config)
        else:
            here = own.get(key, MISSING)
        if here != value:
            missed[key] = value, here
    return missed


def resolved(text: str, revision: str, script: str, folder: Path) -> tuple[dict[str, Any], Config, str]:
    """verl's options of a script, our configuration of what `migrate` makes of it, and the report."""
    root = conformance.peer("verl", revision)
    place = folder / Path(script).name
    place.write_text(text)
    for name in ("theirs", "ours"):
        (folder / name).mkdir()
    outside = {"use_kl_loss": "False"}
    theirs = set_by(verl_composes(place, root, folder / "theirs", outside), root)
    file = conformance.peer("verl", revision, f"{EXAMPLES}/{script}")
    found = migrate(text, file)
    assert found.refused == []
    return theirs, we_resolve(found.command(), root, folder / "ours", outside), report(found)


def test_there_are_scripts_of_vllm():
    if not SCRIPTS:
        pytest.skip("no files of verl")
    assert VLLM == [("v0.6.1", "run_qwen2.5-3b_gsm8k_multiturn_vllm_fsdp.sh")] and len(SCRIPTS) == 21


# The only script of vLLM runs for every commit.
CASES = sorted(
    ((*place, engine) for place in SCRIPTS for engine in ("as it is", "vllm")), key=lambda c: "vllm" not in c[1]
)


@pytest.mark.parametrize(("revision", "script", "engine"), one_of_each(CASES, lambda case: "vllm"))
def test_every_engine_option_of_a_script_is_set_or_listed(revision, script, engine, tmp_path):
    text = conformance.peer("verl", revision, f"{EXAMPLES}/{script}").read_text()
    wanted = "vllm" if "vllm" in script else "sglang"
    if engine == "vllm":
        text, wanted = ENGINE_OF.sub(r"\1vllm", text), "vllm"
    theirs, config, listed = resolved(text, revision, script, tmp_path)
    assert theirs["name"] == config.actor_rollout_ref.rollout.name == wanted
    assert silent(theirs, config, listed) == {} and len(theirs) > 5
    if wanted == "vllm":
        assert "free_cache_engine=True -> False" in listed and not config.actor_rollout_ref.rollout.free_cache_engine


@pytest.mark.parametrize("revision", newest_first(["v0.5.0", "v0.6.1"]))
def test_arguments_of_vllm_reach_vllm_and_an_unknown_option_is_missed(revision, tmp_path):
    script = "run_qwen2.5-3b_gsm8k_multiturn.sh"
    text = ENGINE_OF.sub(r"\1vllm", conformance.peer("verl", revision, f"{EXAMPLES}/{script}").read_text())
    own = {
        "engine_kwargs.vllm.max_num_partial_prefills": 4,
        "engine_kwargs.vllm.compilation_config.cudagraph_mode": "FULL",
        "engine_kwargs.vllm.disable_mm_preprocessor_cache": True,
        "engine_kwargs.sglang.attention_backend": "fa3",
        "enforce_eager": revision != "v0.5.0",
        "max_num_batched_tokens": 9000,
        "enable_chunked_prefill": False,
        "cudagraph_capture_sizes": [1, 2],
    }
    words = " ".join(f"++{ROLLOUT}.{key}={str(value).replace(' ', '')}" for key, value in own.items())
    text = re.sub(r"(\s-m verl\.trainer\.main_ppo )", rf"\1{words} ", text)
    theirs, config, listed = resolved(text, revision, script, tmp_path)
    assert {key: theirs[key] for key in own} == own
    assert config.actor_rollout_ref.rollout.engine_kwargs == {
        "max_num_partial_prefills": 4, "compilation_config": {"cudagraph_mode": "FULL"}, "mm_processor_cache_gb": 0,
        "max_num_batched_tokens": 9000, "enable_chunked_prefill": False, "cudagraph_capture_sizes": [1, 2],
        **({"enforce_eager": True} if own["enforce_eager"] else {}),
    }  # fmt: skip
    assert "only sglang has these arguments" in listed
    known = "engine_kwargs.vllm.disable_mm_preprocessor_cache"  # has another name
    assert silent(theirs, config, listed).keys() == {known}
    assert silent({**theirs, "engine_kwargs.vllm.new": 1, "new_option": 2}, config, listed).keys() == {
        known, "engine_kwargs.vllm.new", "new_option",
    }  # fmt: skip


def test_a_whole_configuration_whose_engine_is_vllm_keeps_it():
    config = compose([], "ppo_trainer", conformance.peer("verl", "v0.5.0", CONFIG))
    assert config.actor_rollout_ref.rollout.name == "vllm" and config.actor_rollout_ref.rollout.engine_kwargs == {}
