#!/usr/bin/env bash
# testbed.sh - a real, throw-away Slurm cluster of several nodes on one Linux machine, for the tests.
#
#   testbed.sh start [N]         start a controller and N nodes n1..nN (default 3)
#   testbed.sh stop              end everything, remove the directory
#   testbed.sh env               print the exports that put sbatch, srun, ... of this cluster in PATH
#   testbed.sh exec CMD...       run CMD on the "login node" (same files, directory and user)
#   testbed.sh wait JOB [SECS]   wait for a job's end; print its state (exit 0: COMPLETED)
#   testbed.sh status            nodes and queue
#   testbed.sh kill-node NODE    power failure: every process of NODE dies at once
#   testbed.sh start-node NODE   boot NODE again
#   testbed.sh cut-node NODE     pull NODE's network cable (its processes go on)
#   testbed.sh join-node NODE    plug it in again
#   testbed.sh node-exec NODE CMD...   run CMD inside NODE
#   testbed.sh node-pid NODE     the process that is PID 1 in NODE, as the host numbers it
#
# Settings: TESTBED_DIR (default /tmp/slurm-testbed.$UID) names the cluster, several can run side by side;
#   TESTBED_CPUS=8, TESTBED_MEM=64000 (MB), TESTBED_GPUS=0: each node's, all make-believe;
#   TESTBED_SSHD=1 runs an sshd in each node (root, by key), for the launchers that use ssh.
# Beside the partition "main" there is "urgent", whose jobs preempt those of main, and "paper": 128 nodes of 8 GPUs that
# do not exist, on which sbatch --test-only plans jobs of any size.
#
# A node is a bundle of network, UTS, mount and PID namespaces: its own host name, address, loopback, /proc and
# /dev/shm; the file system is shared, as on a cluster. All nodes are nested in the head's namespaces, so that the
# end of one process (the head's PID 1) ends everything. Nothing is added to the host's network, /run, /etc or cgroups.
#
# Needs root with CAP_SYS_ADMIN and CAP_NET_ADMIN. Debian: apt-get install slurm-wlm munge iproute2 util-linux
set -euo pipefail

SELF=$(readlink -f "${BASH_SOURCE[0]}")
export TESTBED_DIR=${TESTBED_DIR:-/tmp/slurm-testbed.$UID}
D=$TESTBED_DIR
NET=10.213.77 # lives only inside the cluster's own network namespaces
export PATH=$PATH:/usr/sbin:/sbin

die() {
    echo "testbed: $*" >&2
    exit 1
}

cannot() { # exit status 77: this machine is not fit, as opposed to a failure
    echo "testbed: $*" >&2
    exit 77
}

# shellcheck source=testbed_config.sh
. "${SELF%/*}/testbed_config.sh"

# ---- processes are remembered as "pid starttime", so that a reused pid is never hit ---------------------------------

start_time() { # PID -> its start time; nothing if it is gone or a zombie
    local stat fields
    { stat=$(<"/proc/$1/stat"); } 2>/dev/null || return 0
    read -ra fields <<<"${stat##*) }" # the name in brackets may hold spaces
    [ "${fields[0]}" = Z ] || echo "${fields[19]}"
}

remember_me() { # FILE: /proc is still the host's here, so this is the host's number of a namespace's PID 1
    local pid
    read -r pid _ </proc/self/stat
    echo "$pid $(start_time "$pid")" >"$1.new"
    mv "$1.new" "$1"
}

alive() { # FILE -> prints the pid if that very process still runs
    local pid started
    [ -s "$1" ] && read -r pid started <"$1" && [ -n "$started" ] && [ "$(start_time "$pid")" = "$started" ] && echo "$pid"
}

end_process() { # FILE: it is PID 1 of a PID namespace, the kernel ends the rest of the namespace with it
    local pid
    if pid=$(alive "$1"); then
        kill -KILL "$pid" || :
        for _ in {1..500}; do
            alive "$1" >/dev/null || break
            sleep .01
        done
    fi
    rm -f "$1"
}

until_() { # SECONDS WHAT CMD...: poll until CMD succeeds
    local end=$((SECONDS + $1)) what=$2
    shift 2
    until "$@" >/dev/null 2>&1; do
        if [ $SECONDS -ge $end ]; then
            tail -n 20 "$D"/log/*.log "$D"/log/*.out >&2 || :
            die "timed out: $what"
        fi
        sleep .05
    done
}

head_pid() { alive "$D/run/head.pid" || die "no cluster runs in $D"; }
address() { echo "$NET.$((10 + ${1#n}))"; }

known_node() { # NODE
    [ -d "$D/spool/$1" ] || die "no such node: $1 (nodes: $(ls "$D/spool"))"
}

node_pid() { alive "$D/run/$1.pid" || die "$1 is not running"; }

in_namespaces() { # PID, NSENTER-OPTION (or ""), CMD...: run CMD there, in the same directory
    local pid=$1 option=$2
    shift 2
    # shellcheck disable=SC2016,SC2086 # the inner shell expands its own arguments; an empty option is no word
    nsenter -t "$pid" --net --uts --mount $option -- sh -c 'cd "$0" && exec "$@"' "$PWD" "$@"
}

login() { in_namespaces "$(head_pid)" "" "$@"; }

# ---- these run inside the namespaces --------------------------------------------------------------------------------

common_mounts() { # HOSTNAME
    hostname "$1"
    # -n: mount(8) would leave a /run/mount on the host
    mount -n --bind "$D/etc/hosts" /etc/hosts # gloo and MASTER_ADDR need n1 to resolve
    mount -n --bind "$D/etc" /etc/slurm
    if [ -f "$D/etc/ssh/config" ]; then
        mount -n --bind "$D/etc/ssh/config" /etc/ssh/ssh_config
    fi
    mount -n --bind "$D/empty" "$D/bin" # in here sbatch and the rest are the plain ones
    ip link set lo up
}

idle() { # bash as PID 1 also reaps orphans
    while :; do
        sleep infinity &
        wait $! || :
    done
}

_head() { # PID 1 of the outermost PID namespace
    common_mounts head
    remember_me "$D/run/head.pid"
    ip link add br0 type bridge
    ip addr add "$NET.1/24" dev br0
    ip link set br0 up
    # One munged serves all nodes: its socket is a path. --force: it would refuse a folder that others may write.
    munged --force --socket="$D/run/munge.socket" --key-file="$D/etc/munge.key" --pid-file="$D/run/munged.pid" \
        --log-file="$D/log/munged.log" --seed-file="$D/run/munged.seed" --num-threads=4
    cd "$D/log"
    slurmctld -D >"$D/log/slurmctld.out" 2>&1 &
    idle
}

_boot() { # NODE: in the head's namespaces, its PID namespace too
    local node=$1 pid
    rm -f "$D/run/$node.pid"
    setsid unshare --net --uts --mount --pid --fork --kill-child=KILL -- "$SELF" _node "$node" \
        </dev/null >"$D/log/$node.out" 2>&1 &
    until_ 10 "namespaces of $node" test -s "$D/run/$node.pid"
    read -r pid _ <"$D/run/$node.pid"
    ip link del "v$node" 2>/dev/null || :
    ip link add "v$node" type veth peer name eth0 netns "/proc/$pid/ns/net"
    ip link set "v$node" master br0 up
}

_node() { # NODE: PID 1 of the node's PID namespace, itself inside the head's
    local node=$1
    common_mounts "$node"
    remember_me "$D/run/$node.pid"
    mount -n -t proc proc /proc
    mount -n -t tmpfs tmpfs /dev/shm
    mount -n -t sysfs sysfs /sys || : # /sys/class/net of this node
    until_ 10 "eth0 of $node" test -e /sys/class/net/eth0
    # The same address after each boot: the others remember it for some seconds.
    ip link set eth0 address "$(printf '02:53:4c:55:52:%02x' "${node#n}")"
    ip addr add "$(address "$node")/24" dev eth0
    ip link set eth0 up
    if [ "${TESTBED_SSHD:-0}" = 1 ]; then
        mount -n -t tmpfs tmpfs /run
        mkdir -p /run/sshd
        /usr/sbin/sshd -f "$D/etc/ssh/sshd_config" -E "$D/log/sshd-$node.log"
    fi
    cd "$D/spool/$node"
    slurmd -D -N "$node" >"$D/log/slurmd-$node.out" 2>&1 || :
    idle
}

# ---- commands -------------------------------------------------------------------------------------------------------

boot() { in_namespaces "$(head_pid)" --pid "$SELF" _boot "$1"; }
node_state() { login scontrol -o show node "$1" | grep -o ' State=[^ ]*'; } # sinfo may show an older one
is_down() { [[ $(node_state "$1") == *=DOWN* ]]; }
is_up() { [[ $(node_state "$1") =~ =(IDLE|MIXED|ALLOCATED)(\+[A-Z]+)*$ ]]; } # a * at the end: it does not respond

check_requirements() {
    local program
    [ "$(id -u)" = 0 ] || cannot "only root can make the nodes' namespaces"
    for program in slurmctld slurmd munged sinfo unshare nsenter ip; do
        command -v "$program" >/dev/null || cannot "$program is not installed"
    done
    [ -d /etc/slurm ] || cannot "there is no /etc/slurm to bind the cluster's settings over"
    unshare --net --uts --mount --pid --fork ip link add br0 type bridge 2>/dev/null ||
        cannot "namespaces cannot be made here (CAP_SYS_ADMIN and CAP_NET_ADMIN are needed)"
}

start() { # N
    local count=$1 i booting=() daemons=()
    [[ $count =~ ^[1-9][0-9]?$ ]] || die "how many nodes? (1 to 99)"
    [[ $D =~ ^/[A-Za-z0-9._/-]+$ && $D != *..* ]] || die "TESTBED_DIR must be absolute and plain, not $D"
    [ ${#D} -le 80 ] || die "TESTBED_DIR is too long for a socket's path: $D"
    check_requirements
    [ ! -e "$D" ] || stop
    mkdir -p "$D"/{etc,state,log,spool,run,bin,empty}
    chmod 755 "$D" "$D"/*
    for ((i = 1; i <= count; i++)); do mkdir "$D/spool/n$i"; done
    write_settings "$count"
    # The daemons get a clean environment; jobs get that of their sbatch.
    daemons=(env -i PATH="$PATH" HOME="${HOME:-/}" LANG="${LANG:-C}" TESTBED_DIR="$D" TESTBED_SSHD="${TESTBED_SSHD:-0}")
    "${daemons[@]}" setsid unshare --net --uts --mount --pid --fork --kill-child=KILL -- "$SELF" _head \
        </dev/null >"$D/log/head.out" 2>&1 &
    until_ 10 "namespaces of the head" alive "$D/run/head.pid"
    until_ 20 slurmctld login scontrol ping
    for ((i = 1; i <= count; i++)); do
        boot "n$i" &
        booting+=($!)
    done
    wait "${booting[@]}"
    for ((i = 1; i <= count; i++)); do until_ 60 "n$i to be up" is_up "n$i"; done # "unknown" until it has registered
}

stop() {
    local file
    [ -e "$D" ] || return 0
    if [ ! -d "$D/spool" ] || [ ! -d "$D/run" ]; then die "$D does not hold a cluster"; fi
    end_process "$D/run/head.pid" # takes the nodes, nested in its PID namespace, with it
    for file in "$D"/run/n*.pid; do
        [ ! -e "$file" ] || end_process "$file"
    done
    rm -rf --one-file-system "$D"
}

wait_job() { # JOB SECONDS (sbatch --wait polls at 2, 4, 8.. s only)
    local end=$((SECONDS + $2)) state=
    while [ $SECONDS -lt $end ]; do
        state=$(login scontrol -o show job "$1" | grep -o 'JobState=[A-Z_]*' | sort -u | paste -sd' ' || :)
        state=${state//JobState=/}
        # Anything else is on its way: PENDING, RUNNING, SIGNALING (about to be preempted), REQUEUED, ...
        if [[ $state =~ ^(COMPLETED|CANCELLED|FAILED|TIMEOUT|NODE_FAIL|OUT_OF_MEMORY|BOOT_FAIL|DEADLINE| )+$ ]]; then
            echo "$state"
            [ "$state" = COMPLETED ]
            return
        fi
        sleep .2
    done
    echo "TIMEOUT $state"
    return 124
}

start_node() { # NODE
    ! alive "$D/run/$1.pid" >/dev/null || die "$1 runs"
    # A node that comes back before Slurm saw it go would leave its job hanging to the limit: slurmd compares the time
    # of the boot, which is the host's.
    until_ 90 "Slurm to see that $1 is down" is_down "$1"
    boot "$1"
    until_ 60 "$1 to be up" is_up "$1"
}

command=${1:-help}
[ $# -eq 0 ] || shift
case $command in
    start) start "${1:-3}" ;;
    stop) stop ;;
    env)
        head_pid >/dev/null
        echo "export TESTBED_DIR=$D PATH=$D/bin:\$PATH"
        ;;
    exec) login "$@" ;;
    wait) wait_job "$1" "${2:-120}" ;;
    status)
        login sinfo -N -l
        login squeue
        ;;
    *-node | node-*)
        node=${1:-}
        head_pid >/dev/null
        known_node "$node"
        shift
        case $command in
            kill-node) end_process "$D/run/$node.pid" ;;
            start-node) start_node "$node" ;;
            cut-node) login ip link set "v$node" down ;;
            join-node) login ip link set "v$node" up ;;
            node-exec) in_namespaces "$(node_pid "$node")" --pid "$@" ;;
            node-pid) node_pid "$node" ;;
            *) die "no such command: $command" ;;
        esac
        ;;
    _head | _boot | _node) "$command" "$@" ;;
    *)
        sed -n '2,/^set -e/{/^set/d;s/^# \{0,1\}//;p}' "$SELF" >&2
        exit 2
        ;;
esac
