"""srun starts this for each rank: it finds its GPU as a training does, and compares it with those of other ranks."""

import socket

import torch

from auto3d.runtime.process.joined import joined_world
from auto3d.runtime.process.rank_devices import RankDevice, gather_rank_devices
from auto3d.runtime.process.world import join, leave
from launch.run.devices import visible_devices

world, names = joined_world(), visible_devices()
torch.cuda.device_count = lambda: len(names)  # a torch without CUDA would count none
own = names[world.device("cuda").index]
join(world, device=torch.device("cpu"), timeout_s=60)
gather_rank_devices(RankDevice(socket.gethostname(), own, "a GPU"))
print(socket.gethostname(), world.local_rank, own, flush=True)
leave()
