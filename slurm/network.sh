# Which network the ranks take. The train*.sbatch scripts source this, and so do the trials of a sweep whose recipe has
#
#   launch: {setup: [source slurm/network.sh]}
#
# All lines are comments: NCCL and gloo choose by themselves. Where they choose wrongly, or slowly, uncomment the block
# of your cluster; its own documentation has the last word. `auto3d doctor` measures what comes of it.

# Every cluster. Name the interface (`ip address` lists them) where nodes have several networks, or where their names
# lead to 127.0.1.1. NCCL takes prefixes: eth is eth0, eth1, …; =eth0 is that one; ^docker,lo is all but those.
#export GLOO_SOCKET_IFNAME=eth0     # ranks on CPUs
#export NCCL_SOCKET_IFNAME=eth0     # ranks on GPUs: where they meet, and their data if there is nothing faster
#export NCCL_DEBUG=INFO             # says which network NCCL took: NET/IB, NET/OFI (libfabric), or NET/Socket, slow

# NVLink inside nodes, InfiniBand or RoCE between them. NCCL knows both without a plugin.
#export NCCL_SOCKET_IFNAME=ib0      # IP over InfiniBand, to meet; on RoCE the Ethernet interface
#export NCCL_IB_HCA==mlx5_0,mlx5_1  # exactly these adapters (`ibstat`), where others lead to storage alone
#export NCCL_NET_GDR_LEVEL=PHB      # adapters read GPU memory themselves if both are on one NUMA node
#export NCCL_CROSS_NIC=0            # 0: each adapter number has switches of its own (rails); 1: all share theirs
#export NCCL_IB_GID_INDEX=3         # RoCE v2, and only before NCCL 2.21, which finds it (`show_gids`)
#export NCCL_IB_TIMEOUT=22          # large fabrics, where "work completion with error 12" ends jobs

# Slingshot (HPE Cray). NCCL needs the plugin aws-ofi-nccl, often a module of the cluster's: without it, it takes TCP.
#module load aws-ofi-nccl
#export NCCL_NET="AWS Libfabric"    # the plugin or an error, rather than TCP without a word
#export NCCL_SOCKET_IFNAME=hsn      # also GLOO_SOCKET_IFNAME=hsn0, which takes whole names
#export NCCL_NET_GDR_LEVEL=PHB
#export NCCL_CROSS_NIC=1
#export FI_MR_CACHE_MONITOR=userfaultfd   # the others watch memory in ways that deadlock beside CUDA
#export FI_CXI_DISABLE_HOST_REGISTER=1    # the same: no registration of host memory with CUDA
#export FI_CXI_DEFAULT_CQ_SIZE=131072     # many ranks overflow the default queue of completions
#export FI_CXI_DEFAULT_TX_SIZE=2048       # the same, of sends
#export FI_CXI_RX_MATCH_MODE=software     # if receives fail on lack of the adapter's own resources; else hybrid
#export FI_CXI_RDZV_PROTO=alt_read        # where the adapters are set up for it: libfabric's tuning for NCCL

# EFA (Amazon EC2). NCCL needs the plugin aws-ofi-nccl, which the images of AWS hold.
#export FI_PROVIDER=efa
#export NCCL_SOCKET_IFNAME=^docker,lo,veth
#export FI_EFA_USE_HUGE_PAGE=0      # with huge pages, fork fails for lack of memory
#export FI_EFA_USE_DEVICE_RDMA=1    # before libfabric 1.18 and aws-ofi-nccl 1.7; later they find it
#export FI_EFA_FORK_SAFE=1          # before Linux 5.15
#export NCCL_PROTO=simple           # before aws-ofi-nccl 1.6, whose data may come out of order
