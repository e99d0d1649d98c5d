# verl_mt with SGLang for machines with NVIDIA GPUs (driver 580 or newer: SGLang's packages are for CUDA 13).
#     docker build -t verl_mt .
#     docker run --gpus all --ipc=host --ulimit memlock=-1 --ulimit stack=67108864 -v "$PWD/runs:/workspace/runs" verl_mt \
#         python -m verl_mt.trainer actor_rollout_ref.rollout.name=sglang
# --ipc=host: weights reach the engine through shared memory. Without a GPU no image is needed: docs/sglang.md.
# CI builds no image; a test checks this file against the checkout.
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04
FROM ${CUDA_IMAGE}

# A compiler and Python's headers: SGLang, Triton and FlashInfer compile kernels when they are first used.
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential ca-certificates git libnuma1 \
        python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
ENV VIRTUAL_ENV=/opt/venv PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
ENV PATH=/opt/venv/bin:$PATH
RUN python3 -m venv /opt/venv && python -m pip install --upgrade pip

WORKDIR /opt/verl_mt
COPY pyproject.toml entry_points_hook.py README.md LICENSE ./
COPY verl_mt verl_mt
COPY config config
COPY tools_configs tools_configs
COPY interaction_configs interaction_configs
COPY recipes recipes
COPY examples examples
# No constraints.txt: it holds the torch of machines without a GPU, and SGLang pins its own.
RUN python -m pip install ".[sglang,wandb]" "ray[default]"
RUN python -c "import sglang, verl_mt; from verl_mt.config.compose import compose; compose()"

WORKDIR /workspace
CMD ["python", "-m", "verl_mt.trainer", "--help"]
