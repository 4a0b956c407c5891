# shellcheck shell=bash disable=SC2034
# Settings of this cluster. Every script in slurm/ sources this file on the compute node (route.sh on the login node as
# well). All are optional; a commented line shows the default or an example. A file slurm/profiles/NAME.sh is another
# cluster or partition: ctxlm submit --profile NAME. Two examples are there.

# --- sbatch: options that `ctxlm submit` gives, before those of its command line ---------------------------------------
##SBATCH --partition=gpu --account=me --time=24:00:00
##SBATCH --nodes=1 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=8

# --- Python -----------------------------------------------------------------------------------------------------------
# module load cuda/12.8 python/3.11            # modules that your software needs
# CTXLM_VENV=/shared/envs/ctxlm                # virtual environment; default: .venv of the checkout, else python of PATH
# CTXLM_PYTHON=/opt/python/bin/python3         # or the interpreter itself
# CTXLM_HOME=/shared/ctxlm_ds                  # the checkout; default: where sbatch found the script

# --- Container (at most one) ------------------------------------------------------------------------------------------
# The ranks run in it; the job itself (a few lines of Python 3.11 or newer without further packages) runs outside.
# CTXLM_CONTAINER=/shared/images/ctxlm.sif     # apptainer exec --nv IMAGE
# CTXLM_CONTAINER_OPTIONS="--bind /shared"     # further options of apptainer exec
# CTXLM_PYXIS=/shared/images/ctxlm.sqsh        # enroot with pyxis: srun --container-image IMAGE
# CTXLM_PYXIS_OPTIONS="--container-mounts=/shared:/shared"
# CTXLM_CONTAINER_PYTHON=python3               # the interpreter inside

# --- srun and the network ---------------------------------------------------------------------------------------------
# CTXLM_SRUN_OPTIONS="--cpu-bind=cores"        # further options of every srun
# export NCCL_SOCKET_IFNAME=ib0                # the interfaces NCCL and gloo use; default: they choose
# export GLOO_SOCKET_IFNAME=ib0
# export MASTER_ADDR=...                       # default: the first node's name
# export MASTER_PORT=29500                     # default: one that is free on the first node

# --- Folders ----------------------------------------------------------------------------------------------------------
# CTXLM_STAGE_DIR=/local/scratch/$USER         # node-local disk to which data sets are copied first; default: no copy
# export TMPDIR=/local/scratch/$USER

# --- What happens when a job is interrupted ---------------------------------------------------------------------------
# CTXLM_RESTART=requeue                        # requeue, or off
# CTXLM_MAX_RESTARTS=4                         # starts in a row without a new checkpoint before the job gives up
# CTXLM_RESTART_DELAY_S=10                     # pause before a restart in place; four times longer with each
# CTXLM_PREFLIGHT=0                            # 1: check the nodes before training, requeue without bad ones (docs/slurm.md)
