# SPDX-License-Identifier: Apache-2.0
"""SELinux: whether containers can use the agent's files, and the commands that label these files."""

from aliquot_cli.doctor.findings import Finding, error, ok, warning
from aliquot_cli.doctor.host import Host
from aliquot_cli.doctor.options import DoctorOptions

CONTAINER_TYPE = "container_file_t"
"""The type that containers may read, write and load."""
_NAME = "system.selinux"
_CONFIG = "/etc/selinux/config"
_ENFORCE = "/sys/fs/selinux/enforce"


def finding(host: Host, options: DoctorOptions, confines: bool | None) -> Finding | None:
    """Check the labels. Return None where SELinux does not enforce.

    Args: confines: whether the container runtime confines containers by SELinux; None where that is unknown.
    """
    if (host.text(_ENFORCE) or "").strip() != "1":
        return None
    if confines is False:
        return ok(_NAME, "SELinux is enforcing, and the container runtime does not confine containers with it")
    places = (options.runtime_dir, f"{options.state_dir}/shim")
    wrong = [place for place in places if host.selinux_type(place) != CONTAINER_TYPE]
    if not wrong:
        return ok(_NAME, f"SELinux is enforcing, and {' and '.join(places)} have the label that containers can use")
    found = f"SELinux is enforcing: containers cannot use the shim's files in {' and '.join(wrong)}, which lack the label {CONTAINER_TYPE}"
    fix = _fix(host, options.runtime_dir, wrong)
    if confines is None:
        return warning(_NAME, f"{found}, if the container runtime confines them; that is unknown", fix)
    return error(_NAME, found, fix)


def _fix(host: Host, runtime_dir: str, places: list[str]) -> str:
    """Return the commands. /run is empty after a boot, and systemd-tmpfiles creates directories there with their label."""
    rules = [f"semanage fcontext -a -t {CONTAINER_TYPE} '{_path_in_policy(host, place)}(/.*)?'" for place in places]
    if runtime_dir in places:
        rules.append(f"echo 'd {runtime_dir} 0755' > /etc/tmpfiles.d/aliquot.conf && systemd-tmpfiles --create aliquot.conf")
    commands = " && ".join([*rules, f"restorecon -RF {' '.join(places)}"])
    return f"install the agent with deploy/daemonset/components/selinux, and run: {commands}"


def _path_in_policy(host: Host, place: str) -> str:
    """Return the path that semanage accepts: where the policy declares two trees equal, it accepts only the second."""
    lines = (host.text(_CONFIG) or "").splitlines()
    policy = next((line.partition("=")[2].strip() for line in lines if line.strip().startswith("SELINUXTYPE=")), "targeted")
    equal = host.text(f"/etc/selinux/{policy}/contexts/files/file_contexts.subs_dist") or ""
    for line in equal.splitlines():
        words = line.split()
        if len(words) == 2 and place.startswith(f"{words[0]}/"):
            return words[1] + place.removeprefix(words[0])
    return place
