# SPDX-License-Identifier: Apache-2.0
"""Programs that others wrote, on a real GPU: what ``tests.bench.real_gpu`` measures of them. PyTorch runs the jobs of ``tests/clients``.

Each table is a list of measures. A client that is not on the machine gives no measure and one line that names it.
"""

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tests.clients import page
from tests.clients.installing import read_pins
from tests.fakes.container import SOURCE_TREE, Container, Program

Row = tuple[str, ...]
Measure = Callable[[], Iterable[Row]]

TRAIN_SECONDS = 8
CLIENT_SECONDS = 40.0
"""For all checks of one client, with its installation."""
TORCH = "torch"
TORCH_SECONDS = 110.0
"""For PyTorch's, which also has tables of its own."""
END_SECONDS = 10.0
"""For what was interrupted to write down what it found."""
ALLOCATORS = {
    "native": "",
    "expandable segments": "expandable_segments:True",
    "garbage collection": "garbage_collection_threshold:0.8",
    "cudaMallocAsync": "backend:cudaMallocAsync",
}
FILL = """
import json
{setup}
held, step = 0, 256 * 2**20
kept = []
while step >= 2 * 2**20:
    try:
        kept.append(take(step))
        held += step
    except Exception as exc:
        if not any(word in str(exc).lower() for word in ("out of memory", "out_of_memory", "resource_exhausted")):
            raise
        step //= 2
print(json.dumps({{"held_bytes": held, "total_bytes": total()}}))
"""
CUPY = """
import cupy
take = lambda size: cupy.empty(size, cupy.uint8)
total = lambda: cupy.cuda.runtime.memGetInfo()[1]
"""
JAX = """
import os
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
import jax
import jax.numpy as jnp
take = lambda size: jnp.zeros(size, jnp.uint8).block_until_ready()
total = lambda: jax.devices("gpu")[0].memory_stats()["bytes_limit"]
"""
FRAMEWORKS = {
    "CuPy": (("cupy-cuda13x", "cupy-cuda12x", "cupy"), CUPY),
    "JAX": (("jax",), JAX),
}
"""Name: the distributions that have it, and how it allocates bytes and asks for the total."""
LIMIT_TEXT = re.compile(r"total capacity of [\d.]+ \w+|Device limit *: [\d.]+ \w+|[\d.]+ \w+ allowed")
"""What PyTorch's allocators say of the limit in an OutOfMemoryError."""
VLLM = """
import json, pathlib, tempfile
from vllm import LLM, SamplingParams
config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816,
          "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 32000,
          "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "torch_dtype": "float16", "bos_token_id": 1, "eos_token_id": 2}
folder = pathlib.Path(tempfile.mkdtemp())
(folder / "config.json").write_text(json.dumps(config))
model = LLM(str(folder), load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, max_model_len=512)
outputs = model.generate([{"prompt_token_ids": [1] * 64}] * 32, SamplingParams(max_tokens=64, ignore_eos=True, detokenize=False))
print(json.dumps({"event": "vllm", "tokens": sum(len(one.outputs[0].token_ids) for one in outputs)}))
"""
"""A small Llama with random weights: it needs no download."""
MPS_CONTROL = "nvidia-cuda-mps-control"
LLAMA_BENCH = "llama-bench"


class MakeContainer(Protocol):
    """Creates a container with a share of the device."""

    def __call__(self, memory_mib: int = ..., percent: int = ...) -> Container:
        """Args: percent: the SM limit; 0 = no limit."""


@dataclass(frozen=True)
class Place:
    """Where the clients run."""

    container: MakeContainer
    client: Path
    """``aliquot-cuda-client``."""
    env: Mapping[str, str]
    """Variables of all programs: the visible device."""
    torch_env: Callable[[Mapping[str, str]], Mapping[str, str]]
    """Further variables for PyTorch, from those of its container; empty on a real driver."""
    python: str | None
    """Python with the frameworks."""
    gguf: Path | None
    """A model for llama.cpp."""
    machine_env: Mapping[str, str] = field(default_factory=dict)
    """Variables with which programs outside the containers find the driver; empty for a real driver."""


@dataclass
class Clients:
    """The clients of a machine. Each public method with a list of measures is one table."""

    place: Place
    missing: list[str] = field(default_factory=list)
    """Clients that are not here, each with the reason."""

    def fills(self) -> list[Measure]:
        """Yield how much of the share each framework gets, and the total that it sees."""
        measures: list[Measure] = []
        if self._has("torch", "PyTorch"):
            measures += [functools.partial(self._fill_by_torch, name) for name in ALLOCATORS]
            measures += [functools.partial(self._job_fills, job) for job in ("fraction", "pinned", "graphs")]
        for name, (distributions, setup) in FRAMEWORKS.items():
            if self._has_one_of(distributions, name):
                measures.append(functools.partial(self._fill_by_script, name, FILL.format(setup=setup)))
        return measures

    def libraries(self) -> list[Measure]:
        """Yield which of NVIDIA's libraries work under PyTorch."""
        return [self._libraries] if self._has("torch") else []

    def training(self) -> list[Measure]:
        """Yield the steps per second of a transformer, alone and with a neighbour that fills its share."""
        return [self._training] if self._has("torch") else []

    def collectives(self) -> list[Measure]:
        """Yield whether NCCL sums over two processes: two tenants of one device."""
        return [self._nccl] if self._has("torch") else []

    def servers(self) -> list[Measure]:
        """Yield the results of inference programs."""
        measures: list[Measure] = [self._vllm] if self._has("vllm", "vLLM") else []
        if not shutil.which(LLAMA_BENCH):
            self.missing.append(f"llama.cpp ({LLAMA_BENCH} is not on the PATH)")
        elif self.place.gguf is None:
            self.missing.append("llama.cpp (--gguf names no model)")
        else:
            measures.append(self._llama)
        return measures

    def others(self) -> list[Measure]:
        """Yield what the tests of ``tests/clients`` find, in each way."""
        names = [name for name, pin in read_pins().items() if pin.kind != "missing" and name != TORCH]
        return [functools.partial(self._client_tests, name) for name in names]

    def torch_tests(self) -> list[Measure]:
        """Yield what the tests of PyTorch find that have no table here; they take longest."""
        return [functools.partial(self._client_tests, TORCH)] if self._has(TORCH) else []

    def mps(self) -> list[Measure]:
        """Yield whether limits hold for clients of an MPS daemon."""
        if shutil.which(MPS_CONTROL):
            return [self._fill_under_mps]
        self.missing.append(f"MPS ({MPS_CONTROL} is not on the PATH)")
        return []

    # --- rows -----------------------------------------------------------------------------------------------------

    def _fill_by_torch(self, name: str) -> Iterator[Row]:
        setting = ALLOCATORS[name]
        yield self._filled(f"PyTorch, {name}", "fill", {"PYTORCH_CUDA_ALLOC_CONF": setting} if setting else {})

    def _job_fills(self, job: str) -> Iterator[Row]:
        yield self._filled(f"PyTorch, {job}", job, {})

    def _filled(self, title: str, job: str, settings: Mapping[str, str]) -> Row:
        full = self._run_job(job, settings=settings)["fill"]
        return title, str(full["held_bytes"]), str(full["total_bytes"]), ", ".join(LIMIT_TEXT.findall(full["text"]))

    def _fill_by_script(self, name: str, script: str) -> Iterator[Row]:
        with self._start(["-c", script]) as program:
            reported = last_events(program)[""]
        yield name, str(reported["held_bytes"]), str(reported["total_bytes"]), ""

    def _libraries(self) -> Iterator[Row]:
        with self._start_job("libraries") as program:
            for line in program.process.stdout or ():
                event = parsed(line)
                if event.get("event") == "library":
                    yield event["name"], event["error"] or "works"

    def _training(self) -> Iterator[Row]:
        with self._start_job("train", "--seconds", str(TRAIN_SECONDS)) as alone:
            rate = steps_per_second(alone)
        yield "alone", f"{rate:.1f}"
        with self._start_job("train", "--seconds", str(TRAIN_SECONDS)) as trainer, self._start_job("fill") as greedy:
            beside = steps_per_second(trainer)
            last_events(greedy)
        yield "beside a neighbour that fills its share", f"{beside:.1f}"

    def _nccl(self) -> Iterator[Row]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        settings = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
        with ExitStack() as stack:
            jobs = (("nccl", "--rank", str(rank), "--address", address) for rank in range(2))
            programs = [stack.enter_context(self._start_job(*job, settings=settings)) for job in jobs]
            sums = [last_events(program)["reduced"]["value"] for program in programs]
        yield "NCCL, sum over two processes", ", ".join(map(str, sums)) + (" (expected 3.0, 3.0)" if sums != [3.0, 3.0] else "")

    def _vllm(self) -> Iterator[Row]:
        with self._start(["-c", VLLM]) as program:
            yield "vLLM, tokens of 32 requests", str(last_events(program)["vllm"]["tokens"])

    def _llama(self) -> Iterator[Row]:
        container = self.place.container()
        command = [LLAMA_BENCH, "-m", str(self.place.gguf), "-ngl", "99", "-o", "json"]
        done = subprocess.run(command, env=container.environment(self.place.env), capture_output=True, text=True, check=True)
        for result in json.loads(done.stdout):
            yield f"llama.cpp, {result['n_prompt']} + {result['n_gen']} tokens", f"{result['avg_ts']:.0f} tokens/s"

    def _client_tests(self, name: str) -> Iterator[Row]:
        seconds = TORCH_SECONDS if name == TORCH else CLIENT_SECONDS
        # Without the shim, PyTorch's take as long and check no limit.
        select = "not bare" if name == TORCH else ""
        rows, output = run_client(name, self.place.python, {**os.environ, **self.place.machine_env}, seconds, select)
        if rows and (reason := reason_of_none(rows)):
            self.missing.append(f"{name} ({reason})")
            return
        for client, version, *cells in rows:
            yield f"{client} {version}", *cells
        if output is None:
            yield name, f"the rest was cut off after {seconds:g} s", "", "", ""
        elif not rows or any("failed" in cells for cells in rows):
            print(output, file=sys.stderr)
            raise AssertionError(f"a check of {name} failed; its output is above")

    def _fill_under_mps(self) -> Iterator[Row]:
        with tempfile.TemporaryDirectory(prefix="aliquot-mps-") as folder, mps_daemon(Path(folder)) as settings:
            container = self.place.container()
            with container.start([self.place.client, "fill", "--hold"], {**self.place.env, **settings}) as program:
                reported = program.listen()
                yield "held, counted", str(reported.get("held_bytes", reported)), str(container.used_bytes())

    # --- programs -------------------------------------------------------------------------------------------------

    def _run_job(self, *job: str, settings: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        with self._start_job(*job, settings=settings) as program:
            return last_events(program)

    def _start_job(self, *job: str, settings: Mapping[str, str] | None = None) -> Program:
        return start_job(self.place, self.place.container(), *job, settings=settings)

    def _start(self, arguments: list[str]) -> Program:
        return self.place.container().start([self.place.python or "", *arguments], self.place.env)

    def _has(self, distribution: str, name: str = "") -> bool:
        return self._has_one_of((distribution,), name)

    def _has_one_of(self, distributions: Iterable[str], name: str) -> bool:
        """Return whether the Python has one of them. A named client that it lacks is listed as missing."""
        names = tuple(distributions)
        if self.place.python and any(distribution_version(self.place.python, one) for one in names):
            return True
        if name:
            self.missing.append(f"{name} (pip install {names[0]})")
        return False


def start_job(place: Place, container: Container, *job: str, settings: Mapping[str, str] | None = None) -> Program:
    """Start a job of ``tests/clients/torch_jobs.py`` in a container."""
    env = {**place.env, "PYTHONPATH": str(SOURCE_TREE), **place.torch_env(container.environment(place.env)), **(settings or {})}
    return container.start([place.python or "", "-m", "tests.clients.torch_jobs", *job], env)


@functools.cache
def distribution_version(python: str, distribution: str) -> str | None:
    """Return the version of a distribution in this Python; None without it or without this Python."""
    script = f"import importlib.metadata as m; print(m.version({distribution!r}))"
    try:
        done = subprocess.run([python, "-c", script], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@contextlib.contextmanager
def mps_daemon(folder: Path) -> Iterator[dict[str, str]]:
    """Run an MPS daemon; yield the variables of its clients."""
    settings = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}
    for directory in settings.values():
        Path(directory).mkdir()
    env = {**os.environ, **settings}
    subprocess.run([MPS_CONTROL, "-d"], env=env, check=True)
    try:
        yield settings
    finally:
        subprocess.run([MPS_CONTROL], input="quit\n", env=env, text=True, check=True)


def reason_of_none(rows: Sequence[Sequence[str]]) -> str:
    """Return why no check of a client has a result; empty when one has. Args: rows: client, version, check, and a cell for each way."""
    cells = {cell for row in rows for cell in row[3:]} - {"", "–"}
    if all(cell.startswith("not run") for cell in cells):
        return ", ".join(sorted(cells)) or "no check ended in time"
    return ""


def run_client(
    name: str, python: str | None, env: Mapping[str, str], seconds: float, select: str = ""
) -> tuple[list[list[str]], str | None]:
    """Run a client's tests on this machine's driver. Return the cells of its rows, and the output, or None when the time was over.

    Args: select: which of them, as pytest's ``-k`` takes it.
    """
    with tempfile.TemporaryDirectory(prefix="aliquot-client-") as folder:
        file = Path(folder) / "page.md"
        options = ["--client", name, "--clients-page", str(file), *(["--gpu-python", python] if python else [])]
        options += ["-k", select] if select else []
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/clients", "--gpu", *options]
        output = run_for(command, env, seconds)
        return [page.cells_of(row) for row in page.read_rows(file).get(name, ())], output


def run_for(command: Sequence[str], env: Mapping[str, str], seconds: float) -> str | None:
    """Run a command; return its output, or None after an interrupt because the time was over. It leaves no process behind."""
    with tempfile.TemporaryFile("w+") as output:
        # A job in the background ignores interrupts, and so would its children, unless there is a handler here.
        ours = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            process = subprocess.Popen(command, cwd=SOURCE_TREE, env=env, stdout=output, stderr=output, start_new_session=True)
        finally:
            signal.signal(signal.SIGINT, ours)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return output.read()


def parsed(line: str) -> dict[str, Any]:
    """Return a line's JSON object; an empty one for other output."""
    event: dict[str, Any] = json.loads(line) if line.startswith("{") else {}
    return event


def last_events(program: Program) -> dict[str, dict[str, Any]]:
    """Read a program to its end; return its last event of each kind. Raises: AssertionError: it failed."""
    events = [event for line in program.process.stdout or () if (event := parsed(line))]
    status = program.process.wait()
    assert status == 0, f"the program ended with {status}, after {events[-1:]}"
    return {event.get("event", ""): event for event in events}


def steps_per_second(program: Program) -> float:
    """Return the median of the rates that a training reports."""
    progress = [event for line in program.process.stdout or () if (event := parsed(line)).get("event") == "progress"]
    starts = [0.0, *(event["seconds"] for event in progress)]
    return statistics.median(event["kernels"] / (event["seconds"] - start) for start, event in zip(starts, progress, strict=False))
