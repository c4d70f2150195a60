# SPDX-License-Identifier: Apache-2.0
"""The runtime stand-in builds what a container would see, and ends all of a container's processes."""

import ctypes
import json
import os
import subprocess
from pathlib import Path

import pytest

from aliquot_lab.standin.cdi import DeviceNode
from aliquot_lab.standin.runtime import ContainerConfig, Runtime, RuntimeRefusalError
from tests.fakes.device_plugin import until

pytestmark = pytest.mark.timeout(60)
KIND = "example.com/device"


@pytest.fixture
async def runtime(tmp_path):
    (tmp_path / "cdi").mkdir()
    created = Runtime(tmp_path / "containers", [tmp_path / "cdi"], visibility=lambda nodes: {"SEEN": ",".join(node.path for node in nodes)})
    yield created
    await created.kill_all()


@pytest.fixture
def library(tmp_path):
    """A shared library with a SONAME that differs from its file name, as the driver's do."""
    source, target = tmp_path / "x.c", tmp_path / "host" / "libthing.so.12.3"
    source.write_text("int thing(void) { return 42; }\n")
    target.parent.mkdir()
    subprocess.run(["cc", "-shared", "-fPIC", "-Wl,-soname,libthing.so.1", "-o", target, source], check=True)
    return target


def write_spec(tmp_path, **edits):
    document = {"cdiVersion": "0.6.0", "kind": KIND, "devices": [{"name": "x", "containerEdits": edits}]}
    (tmp_path / "cdi" / "spec.json").write_text(json.dumps(document))


def mount(host, container):
    return {"hostPath": str(host), "containerPath": container, "options": ["ro", "bind"]}


def config(*argv, pod_uid="uid", **more):
    return ContainerConfig(namespace="default", pod="pod", pod_uid=pod_uid, container="main", attempt=0, argv=argv, **more)


async def run(runtime, *argv, **more):
    container = await runtime.start(config(*argv, **more))
    return container, await container.wait()


async def test_a_mounted_file_is_the_same_inode(runtime, tmp_path):
    region = tmp_path / "region"
    region.write_bytes(b"\0" * 8)
    write_spec(tmp_path, mounts=[mount(region, "/run/aliquot/region")])
    container, code = await run(
        runtime, "sh", "-c", "printf shared! | dd of=run/aliquot/region conv=notrunc 2>/dev/null", cdi_devices=(f"{KIND}=x",)
    )
    assert code == 0
    assert region.read_bytes() == b"shared!\0"
    assert (container.root / "run/aliquot/region").stat().st_ino == region.stat().st_ino


async def test_library_is_found_by_soname_and_is_no_link_to_host(runtime, tmp_path, library):
    write_spec(tmp_path, mounts=[mount(library, "/usr/lib/libthing.so.12.3")])
    program = "import ctypes; print(ctypes.CDLL('libthing.so.1').thing())"
    container, _ = await run(runtime, "python3", "-c", program, cdi_devices=(f"{KIND}=x",), env=(("PATH", os.environ["PATH"]),))
    assert container.lines() == ["42"]
    assert not (container.root / "usr/lib/libthing.so.12.3").is_symlink()
    assert (container.root / "usr/lib/libthing.so.1").readlink() == Path("libthing.so.12.3")
    assert ctypes.CDLL(str(library)).thing() == 42


async def test_libraries_below_the_private_directory_are_not_on_the_search_path(runtime, tmp_path, library):
    write_spec(tmp_path, mounts=[mount(library, "/run/aliquot/driver/libthing.aliquot-driver.so.1")])
    container, _ = await run(runtime, "true", cdi_devices=(f"{KIND}=x",))
    assert "LD_LIBRARY_PATH" not in container.env
    assert [path.name for path in (container.root / "run/aliquot/driver").iterdir()] == ["libthing.aliquot-driver.so.1"]


async def test_ld_so_preload_of_the_root_is_honoured(runtime, tmp_path, library):
    listing = tmp_path / "ld.so.preload"
    listing.write_text("/run/aliquot/libaliquot-preload.so\n")
    write_spec(tmp_path, mounts=[mount(library, "/run/aliquot/libaliquot-preload.so"), mount(listing, "/etc/ld.so.preload")])
    container, _ = await run(runtime, "sh", "-c", "grep -c libaliquot-preload /proc/self/maps", cdi_devices=(f"{KIND}=x",))
    assert int(container.lines()[-1]) > 0


async def test_environment_order_is_plugin_pod_cdi(runtime, tmp_path):
    write_spec(tmp_path, env=["C=cdi"])
    env = (("A", "plugin"), ("B", "plugin"), ("B", "pod"), ("C", "pod"))
    container, _ = await run(runtime, "sh", "-c", "echo $A $B $C", env=env, cdi_devices=(f"{KIND}=x",))
    assert container.lines() == ["plugin pod cdi"]


async def test_the_callers_own_environment_stays_outside(runtime, monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    container, _ = await run(runtime, "env")
    assert not any(line.startswith("SECRET=") for line in container.lines())


async def test_device_nodes_become_visible_through_the_hardwares_environment(runtime, tmp_path):
    write_spec(tmp_path, deviceNodes=[{"path": "/dev/nvidia3"}])
    container, _ = await run(runtime, "true", cdi_devices=(f"{KIND}=x",), device_paths=("/dev/nvidia0",))
    assert container.env["SEEN"] == f"{DeviceNode('/dev/nvidia0').path},/dev/nvidia3"


async def test_a_missing_host_file_refuses_the_container(runtime, tmp_path):
    write_spec(tmp_path, mounts=[mount(tmp_path / "none", "/run/none")])
    with pytest.raises(RuntimeRefusalError, match="failed to mount") as refusal:
        await runtime.start(config("true", cdi_devices=(f"{KIND}=x",)))
    assert refusal.value.reason == "CreateContainerError"


async def test_an_unknown_device_refuses_the_container(runtime):
    with pytest.raises(RuntimeRefusalError, match=f"unresolvable CDI devices {KIND}=nothing"):
        await runtime.start(config("true", cdi_devices=(f"{KIND}=nothing",)))


async def test_a_program_that_does_not_exist_is_a_run_error(runtime):
    with pytest.raises(RuntimeRefusalError, match="No such file") as refusal:
        await runtime.start(config("/no/such/program"))
    assert refusal.value.reason == "RunContainerError"


async def test_exit_codes_and_signals_are_reported_as_container_runtimes_do(runtime):
    assert (await run(runtime, "sh", "-c", "exit 5"))[1] == 5
    assert (await run(runtime, "sh", "-c", "kill -9 $$"))[1] == 137


async def test_output_has_no_half_lines(runtime):
    container = await runtime.start(config("sh", "-c", "printf 'one\\ntw'; sleep 0.2; printf 'o\\n'"))
    await until(lambda: len(container.lines()) > 0)
    assert container.lines() == ["one"]
    await container.wait()
    assert container.lines() == ["one", "two"]


async def test_the_end_of_the_first_process_ends_the_others(runtime):
    container, _ = await run(runtime, "sh", "-c", "sleep 600 & echo $!")
    child = int(container.lines()[0])
    await until(lambda: not alive(child))


async def test_stopping_a_pod_leaves_other_pods_alone(runtime):
    first = await runtime.start(config("sleep", "600", pod_uid="a"))
    second = await runtime.start(config("sleep", "600", pod_uid="b"))
    await runtime.stop_pod("a", grace_seconds=5)
    assert (first.exit_code, second.exit_code) == (143, None)


async def test_a_container_that_ignores_sigterm_is_killed_after_the_grace_time(runtime):
    container = await runtime.start(config("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done"))
    await until(lambda: len(container.lines()) > 0)
    await runtime.stop_pod("uid", grace_seconds=0.2)
    assert container.exit_code == 137


def alive(pid):
    """Whether a process runs; one that ended but was not yet waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
