# SPDX-License-Identifier: Apache-2.0
"""How busy MIG instances are, by the real nvidia-ml-py on the simulated driver, in a child because one process can load one NVML."""

import subprocess
import time

import pytest

from tests.fakes.nvml_child import NvmlChild

CHILD = """
import asyncio, ctypes, json, sys
from agent.adapters.nvml.driver import NvmlDriver
from agent.adapters.nvml.mig import NvmlMig
from aliquot.contract.codec import MigPlace
import pynvml

def fails(name, code):
    def failing(*_):
        raise pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{code}"))
    setattr(pynvml, name, failing)

def answers(value, status):
    def found(question):
        question.metrics[0].value, question.metrics[0].nvmlReturn = float(value), int(status)
    pynvml.nvmlGpmMetricsGet = found

async def main():
    errors = []
    driver = NvmlDriver(sys.argv[1], 5, lambda call, code: errors.append(call))
    mig = NvmlMig(driver)
    gpu = (await driver.read()).devices[0].device.uuid
    for line in sys.stdin:
        command, *words = line.split()
        print(json.dumps(await do(driver, mig, gpu, errors, command, words)), flush=True)

async def do(driver, mig, gpu, errors, command, words):
    if command == "enable":
        return await driver.run(lambda: pynvml.nvmlDeviceSetMigMode(pynvml.nvmlDeviceGetHandleByUUID(gpu), 1) and None)
    if command == "make":
        return (await mig.create(MigPlace(gpu, words[0], int(words[1])), int(words[2]))).uuid
    if command == "remove":
        return await mig.destroy(MigPlace(gpu, words[0], int(words[1])))
    if command == "divide":  # a second compute instance beside one of one slice
        return await driver.run(lambda: divided(gpu))
    if command == "errors":
        return errors
    if command in ("fails", "answers"):
        return globals()[command](*words)
    if command == "restart":
        return await driver.restart()
    (first, *_) = (await driver.read()).devices
    return dict(first.instances_utilization)

def divided(gpu):
    handle = pynvml.nvmlDeviceGetHandleByUUID(gpu)
    placement = ctypes.byref(pynvml.c_nvmlGpuInstancePlacement_t(4, 4))
    profile = pynvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, pynvml.NVML_GPU_INSTANCE_PROFILE_3_SLICE, 2)
    instance = pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(handle, profile.id, placement)
    part = pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, pynvml.NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE, 0)
    for _ in range(2):
        pynvml.nvmlGpuInstanceCreateComputeInstance(instance, part.id)

asyncio.run(main())
"""


@pytest.fixture
def node(build_dir, sim_node):
    """A GPU of the first model with GPM, in MIG mode."""
    child = NvmlChild(CHILD, build_dir / "lib/sim/libnvidia-ml.so.1", sim_node("h200x8"))
    child.ask("enable")
    yield child
    child.close()


def until_told(node: NvmlChild, instance: str) -> float:
    """Read until there is a figure."""
    deadline = time.monotonic() + 60
    while (found := node.ask("read").get(instance)) is None:
        assert time.monotonic() < deadline, "no figure"
        time.sleep(0.05)
    return found


def test_working_instance_is_busy_and_idle_one_is_not(node, build_dir):
    busy, idle = node.ask("make", "3g.71gb", 0, 4), node.ask("make", "3g.71gb", 4, 4)
    env = {**node.env, "ALIQUOT_SIM_DEVICE_0": busy, "LD_LIBRARY_PATH": str(build_dir / "lib/sim")}
    command = [build_dir / "bin/aliquot-cuda-client", "work", "--seconds", "60", "--kernel-us", "1000"]
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL) as program:
        deadline = time.monotonic() + 60
        while (found := node.ask("read")).get(busy, 0) < 0.2:
            assert time.monotonic() < deadline, found
            time.sleep(0.2)
        assert found[idle] == 0
        program.kill()
    assert node.ask("errors") == []


def test_first_sample_has_no_figure_and_early_one_repeats_last(node):
    instance = node.ask("make", "1g.18gb", 0, 1)
    assert node.ask("read") == {}
    assert until_told(node, instance) == 0
    node.ask("answers", 50, 0)
    assert until_told(node, instance) in (0, 0.5)
    time.sleep(0.2)
    assert node.ask("read") == {instance: 0.5}


def test_recreated_instance_starts_without_history(node):
    instance = node.ask("make", "1g.18gb", 0, 1)
    until_told(node, instance)
    node.ask("remove", "1g.18gb", 0)
    node.ask("read")
    again = node.ask("make", "1g.18gb", 0, 1)
    assert node.ask("read") == {}
    until_told(node, again)
    node.ask("restart")
    assert node.ask("read") == {}
    assert node.ask("errors") == []


def test_compute_instances_that_divide_an_instance_have_no_figure(node):
    whole = node.ask("make", "1g.18gb", 0, 1)
    node.ask("divide")
    until_told(node, whole)
    assert node.ask("read").keys() == {whole}


@pytest.mark.parametrize(("value", "status"), [("nan", 0), ("250", 0), ("-1", 0), ("40", 3)])
def test_invalid_gpm_value_is_omitted(node, value, status):
    instance = node.ask("make", "1g.18gb", 0, 1)
    until_told(node, instance)
    node.ask("answers", value, status)
    time.sleep(0.2)
    assert node.ask("read") == {}


@pytest.mark.parametrize("code", ["NO_PERMISSION", "NOT_SUPPORTED", "FUNCTION_NOT_FOUND"])
@pytest.mark.parametrize("call", ["nvmlGpmQueryDeviceSupport", "nvmlGpmMigSampleGet"])
def test_unreported_value_gives_no_figure_and_no_error(node, call, code):
    node.ask("fails", call, code)
    node.ask("make", "1g.18gb", 0, 1)
    for _ in range(2):
        assert node.ask("read") == {}
    assert node.ask("errors") == []
