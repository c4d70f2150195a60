# SPDX-License-Identifier: Apache-2.0
"""What PyTorch does in a container: each job is a program for the tests and for the script for real GPUs.

Runs in the Python that has PyTorch, as ``python -m tests.clients.torch_jobs JOB``. Each line of output is one JSON object.
"""

import argparse
import sys
import time
from collections.abc import Callable

import torch
import torch.multiprocessing

from aliquot_lab.demo.torch_program import MIB, report_fill, say, train

GEMM_SIZE = 8192
"""A product takes about a millisecond of an H200, so that the GPU and not the CPU bounds the rate."""
GEMM_BATCH = 10
REPORT_SECONDS = 1.0
BLOCK_MIB = 64


def free_mib() -> float:
    """Return the free memory that PyTorch sees."""
    return torch.cuda.mem_get_info()[0] / MIB


def block(mib: int = BLOCK_MIB) -> torch.Tensor:
    """Return a tensor of bytes."""
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


def say_memory(event: str) -> None:
    """Print what PyTorch sees of the GPU."""
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    say(event, free_bytes=free_bytes, total_bytes=total_bytes, device_bytes=torch.cuda.get_device_properties(0).total_memory)


# --- memory -------------------------------------------------------------------------------------------------------------


def fill() -> None:
    """Fill the GPU, then give everything back."""
    say_memory("start")
    filled = report_fill()
    filled.held.clear()
    torch.cuda.empty_cache()
    say_memory("end")


def fraction() -> None:
    """Fill half of the GPU, by PyTorch's own limit."""
    torch.cuda.set_per_process_memory_fraction(0.5)
    fill()


def pinned() -> None:
    """Hold more pinned host memory than the free device memory, then fill the GPU."""
    held = [torch.empty(BLOCK_MIB * MIB, dtype=torch.uint8, pin_memory=True) for _ in range(4)]
    tensor = block().copy_(held[0], non_blocking=True)
    torch.cuda.synchronize()
    say("pinned", all_pinned=all(one.is_pinned() for one in held), free_bytes=torch.cuda.mem_get_info()[0], bytes=tensor.numel())
    del tensor
    torch.cuda.empty_cache()
    fill()


def graphs() -> None:
    """Capture CUDA graphs, each with a private pool, until PyTorch is out of memory; then free them."""
    say_memory("start")
    kept: list[tuple[torch.cuda.CUDAGraph, torch.Tensor]] = []
    text = ""
    while not text:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                tensor = block(256).fill_(1)
            kept.append((graph, tensor))
        except torch.cuda.OutOfMemoryError as exc:
            text = str(exc)
    for made in kept:
        made[0].replay()
    torch.cuda.synchronize()
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    say("fill", held_bytes=256 * MIB * len(kept), free_bytes=free_bytes, total_bytes=total_bytes, text=text)
    del graph, tensor, made
    kept.clear()
    torch.cuda.empty_cache()
    say_memory("end")


def _consume(received: "torch.multiprocessing.Queue", replies: "torch.multiprocessing.Queue") -> None:
    tensor = received.get()
    replies.put((tensor.numel(), free_mib()))
    received.get()


def processes() -> None:
    """Hand a tensor to another process by torch.multiprocessing: it is counted once."""
    context = torch.multiprocessing.get_context("spawn")
    requests, replies = context.Queue(), context.Queue()
    tensor = block(512)
    alone_mib = free_mib()
    child = context.Process(target=_consume, args=(requests, replies))
    child.start()
    requests.put(tensor)
    count, beside_mib = replies.get(timeout=60)
    requests.put(None)
    child.join(60)
    say("shared", elements=count, alone_mib=alone_mib, beside_mib=beside_mib, after_mib=free_mib(), exit_code=child.exitcode)


def commands() -> None:
    """Obey lines of standard input: ``alloc MIB``, ``free``, ``info``, ``step`` (some products of matrices)."""
    held: list[torch.Tensor] = []
    matrix = torch.ones(GEMM_SIZE, GEMM_SIZE, device="cuda", dtype=torch.float16)
    torch.mm(matrix, matrix)
    torch.cuda.synchronize()

    def alloc(mib: str) -> None:
        try:
            held.append(block(int(mib)))
            say("alloc", text="")
        except torch.cuda.OutOfMemoryError as exc:
            say("alloc", text=str(exc))

    def free() -> None:
        held.clear()
        torch.cuda.empty_cache()
        say_memory("free")

    def step() -> None:
        begin = time.monotonic()
        for _ in range(GEMM_BATCH):
            torch.mm(matrix, matrix)
        torch.cuda.synchronize()
        say("step", seconds=time.monotonic() - begin)

    known: dict[str, Callable[..., None]] = {"alloc": alloc, "free": free, "info": lambda: say_memory("info"), "step": step}
    say_memory("ready")
    for line in sys.stdin:
        name, *arguments = line.split()
        known[name](*arguments)


# --- compute ------------------------------------------------------------------------------------------------------------


def gemm(seconds: float) -> None:
    """Multiply matrices with cuBLAS, and report the products of each second."""
    left, right = (torch.ones(GEMM_SIZE, GEMM_SIZE, device="cuda", dtype=torch.float16) for _ in range(2))
    torch.mm(left, right)
    torch.cuda.synchronize()
    say("ready")
    begin = last = time.monotonic()
    count = 0
    while last - begin < seconds:
        for _ in range(GEMM_BATCH):
            torch.mm(left, right)
        torch.cuda.synchronize()
        count, now = count + GEMM_BATCH, time.monotonic()
        if now - last >= REPORT_SECONDS:
            say("progress", seconds=now - begin, kernels=count)
            count, last = 0, now


def libraries() -> None:
    """Use the libraries that PyTorch uses: cuBLAS, cuBLASLt, cuDNN, cuFFT, cuSOLVER, cuSPARSE."""
    square = torch.eye(256, device="cuda")
    half = square.to(torch.bfloat16)
    image = torch.ones(4, 8, 32, 32, device="cuda")
    weight = torch.ones(8, 8, 3, 3, device="cuda")
    bias = torch.ones(256, device="cuda", dtype=torch.bfloat16)
    uses: dict[str, Callable[[], torch.Tensor]] = {
        "cuBLAS": lambda: square @ square,
        "cuBLASLt": lambda: torch.nn.functional.linear(half, half, bias),
        "cuDNN": lambda: torch.nn.functional.conv2d(image, weight),
        "cuFFT": lambda: torch.fft.fft(square),
        "cuSOLVER": lambda: torch.linalg.cholesky(square),
        "cuSPARSE": lambda: square.to_sparse_csr() @ square,
    }
    for name, use in uses.items():
        try:
            use()
            torch.cuda.synchronize()
            say("library", name=name, error="")
        except RuntimeError as exc:
            say("library", name=name, error=str(exc).splitlines()[0])


def nccl(rank: int, address: str) -> None:
    """Sum a tensor over two processes by NCCL."""
    import torch.distributed as distributed

    distributed.init_process_group("nccl", init_method=address, rank=rank, world_size=2)
    tensor = torch.full((MIB,), float(rank + 1), device="cuda")
    distributed.all_reduce(tensor)
    torch.cuda.synchronize()
    say("reduced", rank=rank, value=tensor[0].item(), free_bytes=torch.cuda.mem_get_info()[0])
    distributed.destroy_process_group()


def main() -> None:
    """Run one job."""
    parser = argparse.ArgumentParser(description=__doc__)
    jobs = parser.add_subparsers(dest="job", required=True)
    plain = {job.__name__: job for job in (fill, fraction, pinned, graphs, processes, commands, libraries)}
    for name, job in plain.items():
        jobs.add_parser(name, help=job.__doc__)
    for name in ("gemm", "train"):
        jobs.add_parser(name).add_argument("--seconds", type=float, default=1e9)
    member = jobs.add_parser("nccl")
    member.add_argument("--rank", type=int, required=True)
    member.add_argument("--address", required=True)
    options = parser.parse_args()
    if options.job in plain:
        plain[options.job]()
    elif options.job == "nccl":
        nccl(options.rank, options.address)
    else:
        {"gemm": gemm, "train": train}[options.job](options.seconds)


if __name__ == "__main__":
    main()
