# shellcheck shell=bash disable=SC2034
# An example of a profile: CPU nodes, whose ranks gloo connects. `ctxlm submit RECIPE.yaml --profile cpu --nodes 2`
# takes these settings in place of slurm/env.sh, which lists all of them. Commented lines need the names of your cluster.
#
# CPUs without bf16 units (no avx512_bf16 or amx_bf16 in /proc/cpuinfo) train faster with --set training.precision=fp32.

# Options of sbatch, before those of the command line. A rank has as many threads as cores: a rank for each memory node.
#SBATCH --ntasks-per-node=4 --cpus-per-task=8 --time=08:00:00
##SBATCH --partition=cpu --account=me --mem=0

# Each rank keeps to its cores.
CTXLM_SRUN_OPTIONS="--cpu-bind=cores"

# DeepSpeed trains on the CPU also where a node has a GPU.
export DS_ACCELERATOR=cpu

# module load python/3.11
# CTXLM_VENV=/shared/envs/ctxlm-cpu

# The interface that gloo uses (`ip -brief address`).
# export GLOO_SOCKET_IFNAME=eth0
