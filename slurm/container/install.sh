#!/bin/bash
# Inside either image, as root: Python, torch for CUDA, apex, ctxlm_ds. Arguments: where the checkout lies, and the tag of
# torch's index for the image's CUDA (cu130), and a tag or commit of NVIDIA's apex.
set -euo pipefail
checkout=$1 torch_index=$2 apex=$3
python=3.11 # constraints.txt was tested with it
export DEBIAN_FRONTEND=noninteractive

apt-get update
apt-get install -y --no-install-recommends ca-certificates software-properties-common
add-apt-repository -y ppa:deadsnakes/ppa # Ubuntu has no release of this Python
apt-get install -y --no-install-recommends \
    build-essential git "python$python" "python$python-dev" "python$python-venv" \
    libaio-dev libibverbs1 ibverbs-providers librdmacm1 # NVMe offload; NCCL on InfiniBand and RoCE
rm -rf /var/lib/apt/lists/*

"python$python" -m venv /opt/venv
export PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
cd "$checkout"
# torch first: DeepSpeed and apex are built against it.
pip install -c constraints.txt setuptools wheel
version=$(sed -n 's/^torch==//p' constraints.txt)
pip install -c constraints.txt --extra-index-url "https://download.pytorch.org/whl/$torch_index" \
    "torch==$version+$torch_index"
pip install -c constraints.txt ninja packaging
pip install -c constraints.txt -e .

# apex is NOT the package of that name on PyPI. Flags as its README says; no GPU is needed to build it.
git clone --filter=blob:none https://github.com/NVIDIA/apex /tmp/apex
git -C /tmp/apex checkout "$apex"
git -C /tmp/apex submodule update --init --recursive
APEX_CPP_EXT=1 APEX_CUDA_EXT=1 APEX_PARALLEL_BUILD=8 NVCC_APPEND_FLAGS="--threads 4" \
    pip install -v --no-build-isolation /tmp/apex
rm -rf /tmp/apex

python -c 'import apex, deepspeed, torch; print(torch.__version__, deepspeed.__version__, torch.version.cuda)'
