# shellcheck shell=bash
# The files of a test cluster, sourced by testbed.sh: write_settings N fills $D/etc and $D/bin.

: "${D:?sourced by testbed.sh}" "${NET:?}" "${SELF:?}"

write_settings() { # N
    write_hosts "$1"
    write_munge_key
    write_gpus
    write_cgroup_conf
    write_slurm_conf "$1"
    [ "${TESTBED_SSHD:-0}" != 1 ] || write_ssh
    write_clients
}

write_hosts() { # N
    local i
    {
        echo "127.0.0.1 localhost"
        echo "$NET.1 head"
        for ((i = 1; i <= $1; i++)); do echo "$NET.$((10 + i)) n$i"; done
    } >"$D/etc/hosts"
}

write_munge_key() {
    dd if=/dev/urandom of="$D/etc/munge.key" bs=128 count=1 status=none
    chmod 600 "$D/etc/munge.key"
}

write_gpus() { # Slurm sets CUDA_VISIBLE_DEVICES only for device files
    local i count=${TESTBED_GPUS:-0}
    [ "$count" -gt 0 ] || return 0
    mkdir "$D/dev"
    for ((i = 0; i < count; i++)); do ln -s /dev/null "$D/dev/nvidia$i"; done
    echo "Name=gpu File=$D/dev/nvidia[0-$((count - 1))]" >"$D/etc/gres.conf"
}

write_cgroup_conf() { # slurmd loads a plugin even when nothing uses it; v1 needs neither a mount nor systemd
    echo CgroupPlugin=cgroup/v1 >"$D/etc/cgroup.conf"
}

write_clients() { # what a shell outside of the namespaces finds in PATH after `testbed.sh env`
    local client
    for client in sbatch srun salloc squeue scancel scontrol sinfo sacct sdiag; do
        printf '#!/bin/sh\nTESTBED_DIR=%q exec %q exec %s "$@"\n' "$D" "$SELF" "$client" >"$D/bin/$client"
        chmod 755 "$D/bin/$client"
    done
}

write_ssh() {
    mkdir -m 700 "$D/etc/ssh"
    ssh-keygen -q -t ed25519 -N '' -f "$D/etc/ssh/host_key"
    ssh-keygen -q -t ed25519 -N '' -f "$D/etc/ssh/id"
    printf '%s\n' "Port 22" "HostKey $D/etc/ssh/host_key" "PidFile none" "AuthorizedKeysFile $D/etc/ssh/id.pub" \
        "StrictModes no" "UsePAM no" "PasswordAuthentication no" "PermitRootLogin prohibit-password" "PrintMotd no" \
        >"$D/etc/ssh/sshd_config"
    printf '%s\n' "Host *" "  IdentityFile $D/etc/ssh/id" "  IdentitiesOnly yes" "  StrictHostKeyChecking no" \
        "  UserKnownHostsFile /dev/null" "  LogLevel ERROR" "  BatchMode yes" >"$D/etc/ssh/config"
}

send_user_signal() { # the signal that a job asked for also comes before a preemption; the setting's name has moved
    local major
    major=$(slurmctld -V | grep -oE '[0-9]+' | head -n 1)
    if [ "$major" -ge 23 ]; then echo PreemptParameters=send_user_signal; else
        echo SlurmctldParameters=preempt_send_user_signal
    fi
}

write_slurm_conf() { # N
    local gres=
    [ "${TESTBED_GPUS:-0}" -eq 0 ] || gres="Gres=gpu:$TESTBED_GPUS"
    cat >"$D/etc/slurm.conf" <<CONF
ClusterName=testbed
SlurmctldHost=head($NET.1)
SlurmctldPort=6817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# cred_expire (default 120 s) is also how long a requeued job waits before it may start again
AuthInfo=socket=$D/run/munge.socket,cred_expire=5
StateSaveLocation=$D/state
SlurmdSpoolDir=$D/spool/%n
SlurmctldPidFile=$D/run/slurmctld.pid
SlurmdPidFile=$D/run/slurmd-%n.pid
SlurmctldLogFile=$D/log/slurmctld.log
SlurmdLogFile=$D/log/slurmd-%n.log
SlurmctldDebug=info
SlurmdDebug=info
# no cgroups, no binding: CPUs, memory and GPUs are make-believe
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=1000
# a record of ended jobs without a database
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$D/log/jobcomp.txt
MinJobAge=3600
# be quick, but do not take a busy machine for a dead node
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2,sched_min_interval=0,batch_sched_delay=0
SlurmctldTimeout=30
SlurmdTimeout=15
KillWait=10
CompleteWait=0
MessageTimeout=10
TCPTimeout=4
BatchStartTimeout=10
InactiveLimit=0
TreeWidth=64
# requeue after a node failure or a preemption; a node that comes back is used again
JobRequeue=1
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
$(send_user_signal)
GresTypes=gpu
NodeName=n[1-$1] NodeAddr=$NET.[11-$((10 + $1))] CPUs=${TESTBED_CPUS:-8} RealMemory=${TESTBED_MEM:-64000} $gres State=UNKNOWN
# Machines that exist on paper only: sbatch --test-only plans jobs of published size on them
NodeName=paper[1-128] NodeAddr=127.0.0.1 CPUs=128 RealMemory=2000000 Gres=gpu:8 State=CLOUD
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=INFINITE
PartitionName=paper Nodes=paper[1-128] MaxTime=INFINITE State=UP
PartitionName=main Nodes=n[1-$1] Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=5
PartitionName=urgent Nodes=n[1-$1] MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
CONF
}
