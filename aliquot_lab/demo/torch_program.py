# SPDX-License-Identifier: Apache-2.0
"""A program of PyTorch for a container: ``train`` a transformer, or ``fill`` the GPU until PyTorch is out of memory.

It runs in the Python that has PyTorch, which may have nothing else. Each line of output is one JSON object, as of
``aliquot-cuda-client``, so that demo, tests and benchmarks read both alike.
"""

import argparse
import io
import json
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

MIB = 2**20
FILL_STEPS_MIB = (512, 128, 32, 12, 1)
"""Sizes of the allocations, largest first. PyTorch's allocator takes 2 MiB for one of 1 MiB, and exactly the size of the others."""
OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
REPORT_SECONDS = 1.0
WORDS = 2048
WARM_UP_STEPS = 3


def say(event: str, **values: Any) -> None:
    """Print one event."""
    print(json.dumps({"event": event, **values}), flush=True)


# --- fill -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Filled:
    """The end of an attempt to allocate everything."""

    held: list[torch.Tensor]
    text: str
    """The text of the last OutOfMemoryError."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.numel() for tensor in self.held)


def fill() -> Filled:
    """Allocate until not even the smallest tensor fits."""
    held, text = [], ""
    for step_mib in FILL_STEPS_MIB:
        while True:
            try:
                held.append(torch.empty(step_mib * MIB, dtype=torch.uint8, device="cuda"))
            except torch.cuda.OutOfMemoryError as exc:
                text = str(exc)
                break
    return Filled(held, text)


def report_fill() -> Filled:
    """Fill the GPU and print the result."""
    filled = fill()
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    say(
        "fill",
        held_bytes=filled.held_bytes,
        smallest_refused_bytes=2 * MIB,
        free_bytes=free_bytes,
        total_bytes=total_bytes,
        result_name=OUT_OF_MEMORY,
        text=filled.text,
    )
    return filled


# --- train --------------------------------------------------------------------------------------------------------------


class Transformer(nn.Module):
    """A small language model; each layer is recomputed in the backward pass."""

    def __init__(self, *, words: int = WORDS, width: int = 1024, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, 16, batch_first=True, dropout=0.0) for _ in range(layers))
        self.head = nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of each token."""
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
        return self.head(hidden)


class Training:
    """AdamW with mixed precision and scaled gradients."""

    def __init__(self, *, batch: int = 8, length: int = 1024) -> None:
        self.model = Transformer().cuda()
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._scaler = torch.amp.GradScaler("cuda")
        self._tokens = torch.randint(0, WORDS, (batch, length), device="cuda")

    def step(self) -> None:
        """Do one step, and wait for it."""
        with torch.autocast("cuda", dtype=torch.float16):
            logits = self.model(self._tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), self._tokens.flatten())
        self._scaler.scale(loss).backward()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()

    def save_and_load(self) -> int:
        """Write a checkpoint to memory and load it again; return its size in bytes."""
        file = io.BytesIO()
        torch.save({"model": self.model.state_dict(), "optimizer": self._optimizer.state_dict(), "scaler": self._scaler.state_dict()}, file)
        file.seek(0)
        loaded = torch.load(file, map_location="cuda")
        self.model.load_state_dict(loaded["model"])
        self._optimizer.load_state_dict(loaded["optimizer"])
        return file.tell()


def train(seconds: float) -> None:
    """Train and report the steps of each second; a step counts as a kernel, as in the reports of ``aliquot-cuda-client work``."""
    training = Training()
    for _ in range(WARM_UP_STEPS):
        training.step()
    say("checkpoint", bytes=training.save_and_load())
    begin = last = time.monotonic()
    steps = 0
    while last - begin < seconds:
        training.step()
        steps, now = steps + 1, time.monotonic()
        if now - last >= REPORT_SECONDS:
            say("progress", seconds=now - begin, kernels=steps)
            steps, last = 0, now
    say("trained", held_bytes=torch.cuda.memory_allocated(), reserved_bytes=torch.cuda.memory_reserved())


def main() -> None:
    """Run one of the two."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("fill", help="allocate until PyTorch is out of memory, and hold it")
    trains = commands.add_parser("train", help="train a transformer and report the steps of each second")
    trains.add_argument("--seconds", type=float, default=1e9)
    options = parser.parse_args()
    if options.command == "train":
        train(options.seconds)
    else:
        filled = report_fill()
        while filled.held:
            time.sleep(3600)


if __name__ == "__main__":
    main()
