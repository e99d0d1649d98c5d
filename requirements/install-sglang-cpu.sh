#!/usr/bin/env bash
# Real SGLang beside verl_mt on a machine without a GPU (x86, Python 3.11 or newer):
#     bash requirements/install-sglang-cpu.sh [EXTRA ...]
# installs this checkout, with the named extras (dev, ...; none = ray), and SGLang 0.5.23 into the Python that `python`
# is; PIP="uv pip" before the command does it with uv, SGLANG_VERSION=0.5.22 takes another release. Two packages come without their dependencies, which would bring
# another torch and CUDA:
# - sglang;
# - torchvision 0.15.2, whose image operators do not load beside this torch and are not needed for text. (The version
#   that goes with this torch does not even import on a CPU build.)
# pip check will therefore complain for ever. Give every later `pip install` the constraints: -c constraints.txt
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extras=$(IFS=,; echo "${*:-ray}")
install="${PIP:-python -m pip} install -q -c constraints.txt"

$install -r requirements/sglang-cpu.txt -e ".${extras:+[$extras]}"
$install --no-deps "sglang==${SGLANG_VERSION:-0.5.23}" torchvision==0.15.2
python -W ignore - <<'CHECK'
import sglang
import torch
from sglang.srt.platforms import current_platform

print(f"sglang {sglang.__version__}, torch {torch.__version__}, platform {type(current_platform).__name__}")
CHECK
