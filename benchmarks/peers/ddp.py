#!/usr/bin/env python3
"""One training step of the two towers under DistributedDataParallel (PyTorch, Gloo), beside which
docs/performance.md puts Tandem's: the same model, batch, optimizer, bucket size and pinning as in
benchmarks/step_bench.cpp.

Run by scripts/bench --peers under mpirun, in an environment of its own (.venv-peers):

    mpirun -np 2 .venv-peers/bin/python benchmarks/peers/ddp.py --out build/bench/ddp.json

Settings that are fair to DDP: one thread a rank on its own core, 25 MB buckets, gradients as views of
the buckets, fused AdamW. Medians over the steps, in rank 0's clock.
"""

import argparse
import json
import os
import statistics
import time

WIDTHS = {"two towers 20.0 M": 1720, "two towers 60.6 M": 3072}
QUICK = "TANDEM_BENCHMARK_QUICK" in os.environ
ROWS, INPUTS, OUTPUTS, BLOCKS = 32, 512, 128, 3
BUCKET_MIB = 25


def set_up_environment():
    """What torch.distributed wants, from what mpirun says; the pin comes before any thread."""
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
    os.environ.setdefault("RANK", str(rank))
    os.environ.setdefault("WORLD_SIZE", os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["OMP_NUM_THREADS"] = "1"
    os.sched_setaffinity(0, {rank % os.cpu_count()})
    return rank


def make_tower(torch, width):
    nn = torch.nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.linear = nn.Linear(width, width)

        def forward(self, x):
            return x + nn.functional.gelu(self.linear(self.norm(x)))

    return nn.Sequential(nn.Linear(INPUTS, width), nn.GELU(), *(Block() for _ in range(BLOCKS)),
                         nn.Linear(width, OUTPUTS))


def info_nce(torch, outputs):
    functional = torch.nn.functional
    first, second = (functional.normalize(output, dim=-1) for output in outputs)
    scores = first @ second.t() / 0.07
    target = torch.arange(scores.shape[0])
    return 0.5 * (functional.cross_entropy(scores, target) +
                  functional.cross_entropy(scores.t(), target))


def measure(torch, rank, width, steps, warm_up):
    """Medians in ms of whole steps and of their passes."""
    distributed = torch.distributed
    torch.manual_seed(7)
    towers = [
        torch.nn.parallel.DistributedDataParallel(
            make_tower(torch, width), gradient_as_bucket_view=True, bucket_cap_mb=BUCKET_MIB)
        for _ in range(2)
    ]
    parameters = [p for tower in towers for p in tower.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.01, fused=True)
    generator = torch.Generator().manual_seed(100 + rank)
    batches = [torch.randn(ROWS, INPUTS, generator=generator) for _ in towers]
    whole, passes = [], []
    for step in range(warm_up + steps):
        distributed.barrier()
        start = time.perf_counter()
        info_nce(torch, [tower(batch) for tower, batch in zip(towers, batches)]).backward()
        middle = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        end = time.perf_counter()
        if step >= warm_up:
            whole.append(1e3 * (end - start))
            passes.append(1e3 * (middle - start))
    quartiles = statistics.quantiles(whole, n=4)
    return {
        "parameters": sum(p.numel() for p in parameters),
        "step_ms": statistics.median(whole),
        "pass_ms": statistics.median(passes),
        "spread": (quartiles[2] - quartiles[0]) / statistics.median(whole),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", required=True, help="JSON file that rank 0 writes")
    parser.add_argument("--steps", type=int, default=2 if QUICK else 15)
    arguments = parser.parse_args()
    rank = set_up_environment()
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    results = {}
    for name, width in WIDTHS.items():
        width = 128 if QUICK else width
        results[name] = measure(torch, rank, width, arguments.steps, warm_up=1 if QUICK else 4)
    if rank == 0:
        with open(arguments.out, "w", encoding="utf-8") as file:
            json.dump({"torch": torch.__version__, "steps": results}, file, indent=1)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
