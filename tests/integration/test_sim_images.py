# SPDX-License-Identifier: Apache-2.0
"""The simulated libcuda reads what compilers write: images of a generator, loaded by a program that describes them.

The readers themselves, memory, libraries and links are tested in C (simulated_driver/tests/test_images.c), hostile bytes by fuzz_images.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes import images
from tests.fakes.images import Compression, Entry, Kernel, Variable

SUCCESS, OUT_OF_MEMORY, INVALID_IMAGE, NO_BINARY, INVALID_PTX, NOT_FOUND = 0, 2, 200, 209, 218, 500
CAPABILITIES = {"h200x8": 90, "a100x8-mig": 80, "l40sx4": 89, "t4x2": 75}
ARCHITECTURES = [70, 75, 80, 86, 89, 90, 100, 120]

PROGRAM = """
import ctypes as C, json, sys
cuda = C.CDLL("libcuda.so.1")
P = C.c_void_p

def out(kind, name, *arguments):
    made = kind()
    assert getattr(cuda, name)(C.byref(made), *arguments) == 0, name
    return made.value

def parameters(function):
    offset, size, found = C.c_size_t(), C.c_size_t(), []
    while cuda.cuFuncGetParamInfo(function, C.c_size_t(len(found)), C.byref(offset), C.byref(size)) == 0:
        found.append([offset.value, size.value])
    return found

def kernels(module):
    count = out(C.c_uint, "cuModuleGetFunctionCount", module)
    functions = (P * count)()
    assert cuda.cuModuleEnumerateFunctions(functions, count, module) == 0
    for function in map(P, functions):
        name = out(C.c_char_p, "cuFuncGetName", function).decode(errors="replace")
        yield name, {
            "parameters": parameters(function),
            "attributes": [out(C.c_int, "cuFuncGetAttribute", which, function) for which in (0, 1, 3, 4, 6, 11, 12, 13)],
            "launch": cuda.cuLaunchKernel(function, 2, 2, 1, 1, 1, 1, 0, None, None, None),
        }

def variable(module, name):
    address, size = C.c_uint64(), C.c_size_t()
    result = cuda.cuModuleGetGlobal_v2(C.byref(address), C.byref(size), module, name.encode())
    if result:
        return result
    content = C.create_string_buffer(size.value)
    assert cuda.cuMemcpyDtoH_v2(content, address, size) == 0
    return content.raw.hex()

def load(how, path):
    module, image = P(), open(path, "rb").read()
    if how == "file":
        return cuda.cuModuleLoad(C.byref(module), path.encode()), module
    kept = C.create_string_buffer(image)
    if how == "memory":
        return cuda.cuModuleLoadData(C.byref(module), kept), module
    return cuda.cuModuleLoadFatBinary(C.byref(module), bytes.fromhex(how) + C.addressof(kept).to_bytes(8, "little") + bytes(8)), module

def describe(how, path, variables):
    result, module = load(how, path)
    if result:
        return {"result": result}
    found = {"result": 0, "kernels": dict(kernels(module)), "variables": {name: variable(module, name) for name in variables}}
    found["any"] = cuda.cuModuleGetFunction(C.byref(P()), module, b"no such name")
    assert cuda.cuModuleUnload(module) == 0
    return found

assert cuda.cuInit(0) == 0
assert cuda.cuCtxCreate_v2(C.byref(P()), 0, 0) == 0
for line in sys.stdin:
    print(json.dumps(describe(*json.loads(line))), flush=True)
"""


class Driver:
    """A program with a context on the first device of a node, and what it says about images."""

    def __init__(self, build: Path, node: Path, directory: Path, **environment: str) -> None:
        inherited = {name: text for name, text in os.environ.items() if not name.startswith(("ALIQUOT_SIM_", "CUDA_"))}
        libraries = environment.pop("libraries", "")
        search = {"LD_LIBRARY_PATH": f"{libraries}:{build / 'lib/sim'}", "ALIQUOT_SIM_DIR": str(node)}
        self.image = directory / "image"
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=inherited | search | environment,
        )

    def load(self, image: bytes, *variables: str, how: str = "memory") -> dict[str, Any]:
        """Kernels and variables as the driver reports them, or the result of a refused load."""
        self.image.write_bytes(image)
        self.process.stdin.write(json.dumps([how, str(self.image), variables]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def end(self) -> str:
        """End the program; what it wrote to stderr."""
        self.process.stdin.close()
        errors = self.process.stderr.read()
        assert self.process.wait(timeout=30) == 0, errors
        return errors


@pytest.fixture(scope="module")
def open_driver(build_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Driver]]:
    opened: dict[str, Driver] = {}

    def open_one(profile: str) -> Driver:
        if profile not in opened:
            directory = tmp_path_factory.mktemp("images")
            subprocess.run([build_dir / "bin/aliquot-sim", "init", profile, "--dir", directory / "node"], check=True)
            opened[profile] = Driver(build_dir, directory / "node", directory)
        return opened[profile]

    yield open_one
    for driver in opened.values():
        assert driver.end() == ""


names = st.text(alphabet="abcdefghijklmnopqrstuvwxyz_0123456789", min_size=1, max_size=40).map(lambda text: f"_Z{text}")
kernel_lists = st.lists(
    st.builds(
        Kernel,
        name=names,
        parameters=st.lists(st.one_of(st.integers(1, 64), st.integers(1, 20000)), max_size=3).map(tuple),
        code_bytes=st.integers(1, 40).map(lambda blocks: blocks * 128),
        registers=st.integers(1, 255),
        shared_bytes=st.integers(0, 48 << 10),
        local_bytes=st.integers(0, 4096),
        max_threads=st.sampled_from([0, 32, 256, 1024]),
        cluster=st.sampled_from([(0, 0, 0), (2, 1, 1), (2, 2, 1)]),
    ),
    max_size=5,
    unique_by=lambda kernel: kernel.name,
)
values = st.binary(max_size=100)
variable_lists = st.lists(
    st.builds(
        lambda name, value, more, managed, constant: Variable(
            name, len(value) + more, value, managed and not constant, constant and bool(value)
        ),
        names.map(lambda name: f"v{name}"),
        values,
        st.integers(1, 5000),
        st.booleans(),
        st.booleans(),
    ),
    max_size=5,
    unique_by=lambda variable: variable.name,
)
compressions = st.sampled_from(Compression)


def described(kernels: list[Kernel], variables: list[Variable], capability: int) -> dict[str, Any]:
    """What a driver must say of these."""
    return {
        "result": SUCCESS,
        "kernels": {
            kernel.name: {
                "parameters": [list(place) for place in kernel.layout()],
                "attributes": [
                    kernel.max_threads or 1024,
                    kernel.shared_bytes,
                    kernel.local_bytes,
                    kernel.registers,
                    capability,
                    *kernel.cluster,
                ],
                "launch": SUCCESS,
            }
            for kernel in kernels
        },
        "variables": {variable.name: variable.value.ljust(variable.size, b"\0").hex() for variable in variables},
        "any": NOT_FOUND,
    }


@given(kernel_lists, variable_lists, st.sampled_from([7, 8]), st.none() | compressions, st.booleans(), st.sampled_from(["memory", "file"]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_driver_describes_what_the_image_holds(open_driver, kernels, variables, abi, compression, together, how):
    image = images.cubin(90, kernels, variables, abi=abi)
    if compression is not None:
        image = images.fatbin([Entry(90, image)], compression, together=together)
    found = open_driver("h200x8").load(image, *(variable.name for variable in variables), how=how)
    assert found == described(kernels, variables, 90)


def fits(entry: Entry, capability: int) -> bool:
    """The rule of the CUDA programming guide, section application compatibility."""
    if entry.accelerator:
        return entry.capability == capability
    if entry.ptx and not entry.family:
        return entry.capability <= capability
    return entry.capability // 10 == capability // 10 and entry.capability <= capability


def best(entries: list[Entry], capability: int) -> Entry | None:
    fitting = [entry for entry in entries if fits(entry, capability)]
    return max(fitting, key=lambda entry: (not entry.ptx, entry.capability, entry.accelerator or entry.family), default=None)


@st.composite
def entry_lists(draw: st.DrawFn) -> list[Entry]:
    """Entries of different kinds and capabilities; each holds one kernel that names it."""
    chosen = draw(st.lists(st.tuples(st.sampled_from(ARCHITECTURES), st.booleans(), st.booleans()), max_size=6, unique=True))
    entries = []
    for number, (capability, ptx, special) in enumerate(chosen):
        name = f"entry_{number}"
        accelerator = special and not ptx and capability == 90
        text = f".version 8.0\n.visible .entry {name}()\n{{ ret; }}\n".encode()
        image = text if ptx else images.cubin(capability, [Kernel(name)], accelerator=accelerator)
        entries.append(Entry(capability, image, ptx, accelerator))
    return entries


@pytest.mark.parametrize("profile", CAPABILITIES)
@given(entries=entry_lists(), compression=compressions, together=st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_driver_takes_the_entry_that_fits_best(open_driver, profile, entries, compression, together):
    found = open_driver(profile).load(images.fatbin(entries, compression, together=together))
    capability = CAPABILITIES[profile]
    wanted = best(entries, capability)
    if wanted is None:
        assert found == {"result": NO_BINARY}
    else:
        (name,) = found["kernels"]
        chosen = entries[int(name.removeprefix("entry_"))]
        rank = (chosen.ptx, chosen.capability, chosen.accelerator)
        assert (fits(chosen, capability), rank) == (True, (wanted.ptx, wanted.capability, wanted.accelerator))


@pytest.mark.parametrize("abi", [7, 8])
@pytest.mark.parametrize(("profile", "result"), [("h200x8", SUCCESS), ("l40sx4", NO_BINARY)])
def test_accelerator_cubins_run_on_their_capability_only(open_driver, abi, profile, result):
    assert open_driver(profile).load(images.cubin(90, [Kernel("k")], abi=abi, accelerator=True))["result"] == result


@given(
    image=st.builds(
        lambda kernels, variables, compression: images.fatbin([Entry(75, images.cubin(75, kernels, variables))], compression),
        kernel_lists,
        variable_lists,
        compressions,
    ),
    changes=st.lists(st.tuples(st.integers(0, 1 << 20), st.binary(min_size=1, max_size=8)), max_size=6),
    cut=st.none() | st.integers(1, 1 << 16),
    how=st.sampled_from(["memory", "file"]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_images_are_refused_or_loaded(open_driver, image, changes, cut, how):
    damaged = bytearray(image)
    for at, data in changes:
        at %= len(damaged)
        damaged[at : at + len(data)] = data
    damaged = damaged[:cut] if how == "file" else damaged
    result = open_driver("t4x2").load(bytes(damaged), how=how)["result"]
    assert result in (SUCCESS, OUT_OF_MEMORY, INVALID_IMAGE, NO_BINARY, INVALID_PTX)
    assert open_driver("t4x2").load(image)["result"] == SUCCESS


def test_wrapper_leads_to_its_fat_binary(open_driver):
    image = images.fatbin([Entry(75, images.cubin(75, [Kernel("wrapped")]))])
    assert list(open_driver("t4x2").load(image, how=images.wrapper(0)[:8].hex())["kernels"]) == ["wrapped"]


def test_ptx_parameters_lie_at_their_alignment(open_driver):
    parameters = [".u8 a", ".align 8 .b8 b[24]", ".f32 c", ".u64 .ptr .global .align 16 d"]
    text = ".visible .entry k(\n" + ",\n".join(f"\t.param {parameter}" for parameter in parameters) + "\n)\n{}\n"
    found = open_driver("t4x2").load(text.encode(), "d")
    assert found["kernels"]["k"]["parameters"] == [[0, 1], [8, 24], [32, 4], [40, 8]]
    assert found["variables"] == {"d": NOT_FOUND}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        pytest.param(b".global .align 4 .b8 v[100];", 100, id="global"),
        pytest.param(b".const .u32 v;", 4, id="constant"),
        pytest.param(b".global .attribute(.managed) .align 8 .f64 v;", 8, id="managed"),
        pytest.param(b".extern .global .u32 v;\n.entry k()", None, id="declared elsewhere"),
    ],
)
def test_ptx_variables_have_their_size(open_driver, text, found):
    variable = open_driver("t4x2").load(text, "v")["variables"]["v"]
    assert variable == (NOT_FOUND if found is None else bytes(found).hex())


@pytest.mark.parametrize(("text", "result"), [(b".version 8.0\n.func (.param .b32 r) f()\n{}\n", SUCCESS), (b"int main() {}", INVALID_PTX)])
def test_ptx_needs_no_kernel_but_a_version(open_driver, text, result):
    assert open_driver("t4x2").load(text)["result"] == result


def test_without_libzstd_any_name_is_a_kernel(build_dir, sim_node, tmp_path):
    """A library of that name without its functions acts as a missing one."""
    (tmp_path / "lib").mkdir()
    subprocess.run(["cc", "-shared", "-x", "c", "/dev/null", "-o", tmp_path / "lib/libzstd.so.1"], check=True)
    driver = Driver(build_dir, sim_node("t4x2"), tmp_path, libraries=str(tmp_path / "lib"))
    image = images.cubin(75, [Kernel("k")])
    for _ in range(2):
        found = driver.load(images.fatbin([Entry(75, image)], Compression.ZSTD))
        assert (found["result"], found["any"]) == (SUCCESS, SUCCESS)
    assert driver.load(images.fatbin([Entry(75, image)], Compression.LZ4))["any"] == NOT_FOUND
    assert driver.end().count("libzstd.so.1 is missing") == 1
