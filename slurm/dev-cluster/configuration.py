"""The cluster's folder, and SLURM's configuration files in it."""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from description import CONTROL, Description
from network import control_address, host_addresses

CLUSTER_NAME = "auto3d"
MAX_ARRAY_SIZE = 11  # indices 0 to 10: so small that a sweep of a few trials needs several arrays
GRACE_S = 5  # time between the warning and the end of a preempted job
MEMORY_OF_CPU_MIB = 512  # default memory of a job per CPU; not enforced
GPUS_PER_NODE = 4  # fake GPUs, which SLURM counts, binds and names like real ones


@dataclass(frozen=True)
class Paths:
    """Paths in the cluster's folder. Other users can read what clients need, but nothing in ``private``."""

    folder: Path

    @property
    def state(self) -> Path:  # description of the cluster; it marks the folder as ours
        return self.folder / "cluster.json"

    @property
    def slurm_conf(self) -> Path:
        return self.folder / "slurm.conf"

    @property
    def env(self) -> Path:
        return self.folder / "env"

    @property
    def munge_socket(self) -> Path:
        return self.folder / "munge" / "socket"

    @property
    def spool(self) -> Path:  # job scripts, readable by their users
        return self.folder / "spool"

    @property
    def gpus(self) -> Path:  # files that stand for each node's GPUs; SLURM reads their numbers from their names
        return self.folder / "gpus"

    @property
    def private(self) -> Path:
        return self.folder / "private"

    @property
    def munge_key(self) -> Path:
        return self.private / "munge.key"

    @property
    def database(self) -> Path:
        return self.private / "database"

    @property
    def database_socket(self) -> Path:
        return self.private / "database.socket"

    @property
    def controller(self) -> Path:
        return self.private / "controller"

    @property
    def logs(self) -> Path:
        return self.private / "logs"

    @property
    def client_environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.slurm_conf)}


def write_configuration(paths: Paths, description: Description, subnet: str) -> None:
    """Write the files that SLURM and its clients read, and make the folders that they write to."""
    paths.private.mkdir(mode=0o700, exist_ok=True)
    for folder in (paths.controller, paths.logs):
        folder.mkdir(mode=0o700, exist_ok=True)
    for folder in (paths.munge_socket.parent, paths.spool, paths.gpus):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)
    for number in range(GPUS_PER_NODE):
        device = paths.gpus / f"gpu{number}"
        if not device.is_symlink():
            device.symlink_to("/dev/null")  # SLURM accepts only devices, and nothing opens these
    write(paths.slurm_conf, slurm_conf(paths, description, subnet))
    write(paths.folder / "slurmdbd.conf", slurmdbd_conf(paths, subnet), mode=0o600)
    write(paths.folder / "cgroup.conf", CGROUP_CONF)
    write(paths.folder / "gres.conf", f"Name=gpu File={paths.gpus}/gpu[0-{GPUS_PER_NODE - 1}]\n")
    write(paths.env, env(paths))


def write(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Write ``path`` atomically."""
    unfinished = path.with_name(f".{path.name}.new")
    unfinished.unlink(missing_ok=True)
    with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)
    unfinished.chmod(mode)  # independent of the umask
    unfinished.replace(path)


def env(paths: Paths) -> str:
    """The file that a shell sources to use the cluster. slurm.conf names munge's socket (AuthInfo)."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in paths.client_environment.items())


# proctrack/linuxproc and task/none need no cgroups, so none are made. slurmd inspects the mounted ones all the same.
CGROUP_CONF = "IgnoreSystemd=yes\n"


def slurm_conf(paths: Paths, description: Description, subnet: str) -> str:
    addresses = host_addresses(description, subnet)
    memory_mib = MEMORY_OF_CPU_MIB * description.cpus_per_node
    nodes = "\n".join(
        f"NodeName={node.name} NodeAddr={addresses[node.name]} CPUs={description.cpus_per_node} "
        f"RealMemory={memory_mib} Gres=gpu:{GPUS_PER_NODE}"
        for node in description.nodes
    )
    return f"""\
# Written by `make cluster-up`.
ClusterName={CLUSTER_NAME}
SlurmctldHost={CONTROL}({addresses[CONTROL]})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={paths.munge_socket}
CredType=cred/munge

# SLURM's default ports. They cannot clash, because every host has its own network namespace.
SlurmctldPort=6817
SlurmdPort=6818

StateSaveLocation={paths.controller}
SlurmdSpoolDir={paths.spool}/%n
SlurmctldPidFile={paths.private}/slurmctld.pid
SlurmdPidFile={paths.private}/slurmd-%n.pid
SlurmdLogFile={paths.logs}/slurmd-%n.log
SlurmctldSyslogDebug=quiet
SlurmdSyslogDebug=quiet
MailProg=/bin/true

# Nodes together have more CPUs and memory than the machine; jobs are neither bound nor confined.
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=5

# Start jobs within a second, not within 3. Notice a dead node and retry quickly, but tolerate a busy machine.
SlurmdTimeout=20
TCPTimeout=10
MessageTimeout=30
KillWait=5
ReturnToService=2
SchedulerParameters=sched_interval=5,bf_interval=5,batch_sched_delay=1,sched_min_interval=100000

GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU={MEMORY_OF_CPU_MIB}
MaxArraySize={MAX_ARRAY_SIZE}
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal

AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageEnforce=limits
AccountingStorageHost={addresses[CONTROL]}
AccountingStoragePort=6819
AccountingStoragePass={paths.munge_socket}

{nodes}
# A job in `high` preempts one in `low`, which is requeued {GRACE_S} seconds after a warning signal.
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={GRACE_S}
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


def slurmdbd_conf(paths: Paths, subnet: str) -> str:
    return f"""\
AuthType=auth/munge
AuthInfo=socket={paths.munge_socket}
DbdHost={CONTROL}
DbdAddr={control_address(subnet)}
DbdPort=6819
SlurmUser=root
PidFile={paths.private}/slurmdbd.pid
DebugLevelSyslog=quiet
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageLoc=slurm
StorageUser=root
"""
