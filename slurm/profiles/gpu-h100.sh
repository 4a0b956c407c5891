# shellcheck shell=bash disable=SC2034
# An example of a profile: nodes with 8 H100 on InfiniBand. `ctxlm submit RECIPE.yaml --profile gpu-h100 --nodes 4`
# takes these settings in place of slurm/env.sh, which lists all of them. Commented lines need the names of your cluster.

# Options of sbatch, before those of the command line. A rank for each GPU; its cores also read and mask samples.
#SBATCH --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=12 --time=24:00:00
##SBATCH --partition=h100 --account=me --exclusive

# Modules, and an environment with a torch for them, on storage that all nodes share.
# module purge
# module load cuda/12.8 python/3.11
# CTXLM_VENV=/shared/envs/ctxlm-h100

# The adapters of NCCL's traffic (`ibstat -l`), and the interface on which ranks find each other (`ip -brief address`).
# export NCCL_IB_HCA=mlx5
# export NCCL_SOCKET_IFNAME=ib0
# export GLOO_SOCKET_IFNAME=ib0

# Each start of a job first checks GPUs, disks and network, and requeues the job without bad nodes.
CTXLM_PREFLIGHT=1

# A disk of the node, to which data sets are copied before the ranks start.
# CTXLM_STAGE_DIR=/local/scratch/$USER
