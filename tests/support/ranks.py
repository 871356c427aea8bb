"""A function run by several processes of one gloo group, on this machine's CPU."""

import os
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _run(rank: int, world_size: int, folder: str, function, arguments: tuple) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    try:
        torch.save(function(rank, *arguments), f"{folder}/result_{rank}.pt")
    finally:
        dist.destroy_process_group()


def run_ranks(function, *arguments, world_size: int = 2) -> list:
    """What `function(rank, *arguments)`, importable by name, returned on every rank; a rank's error is raised."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_run, (world_size, folder, function, arguments), nprocs=world_size)
        return [torch.load(os.path.join(folder, f"result_{rank}.pt")) for rank in range(world_size)]
