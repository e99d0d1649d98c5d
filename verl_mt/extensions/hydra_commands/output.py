"""The run directory as Hydra's output directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from verl_mt.config.compose import config_to_yaml
from verl_mt.config.redact import redact
from verl_mt.extensions.hydra_commands.under_hydra import OUTPUT_SUBDIR, with_hidden
from verl_mt.trainer.step_hook import HookParts, StepHook


class HydraOutput(StepHook):
    """Acts once, when the run directory is there; watches no step."""

    @classmethod
    def of(cls, parts: HookParts) -> None:
        """Make the run directory Hydra's output directory, and write what Hydra writes there, secrets redacted."""
        subdir: Any = OUTPUT_SUBDIR.get()
        if subdir is None:
            return
        found = HydraConfig.instance().cfg
        assert isinstance(found, DictConfig)
        with read_write(found.hydra.runtime), open_dict(found.hydra.runtime):
            found.hydra.runtime.output_dir = str(parts.folder.absolute())
        if found.hydra.job.chdir:
            os.chdir(parts.folder)
        words = [word for word in found.hydra.overrides.hydra if word.lstrip("+").startswith("hydra.output_subdir=")]
        if words[:-1]:  # the last one is ours
            subdir = OverridesParser.create().parse_override(words[-2]).value()
        if not subdir:
            return
        place = Path(found.hydra.runtime.output_dir) / str(subdir)
        place.mkdir(parents=True, exist_ok=True)
        content: Any = OmegaConf.to_container(found, resolve=False)
        words = content["hydra"]["overrides"] = {k: with_hidden(v) for k, v in content["hydra"]["overrides"].items()}
        content["hydra"]["job"]["override_dirname"] = ",".join(sorted(words["task"]))
        content["hydra"]["job"]["env_set"] = redact(content["hydra"]["job"]["env_set"], "env")
        for name, part in {"hydra": redact(content), "overrides": words["task"]}.items():
            (place / f"{name}.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(part)), encoding="utf-8")
        (place / "config.yaml").write_text(config_to_yaml(parts.config), encoding="utf-8")
