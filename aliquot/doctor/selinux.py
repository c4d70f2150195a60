"""SELinux: whether containers may use the files that the agent shows them, and how to label these where it must be done by hand."""

from aliquot.doctor.findings import Finding, error, ok, warning
from aliquot.doctor.host import Host
from aliquot.doctor.options import DoctorOptions

CONTAINER_TYPE = "container_file_t"
"""What containers may read, write and load."""
_NAME = "system.selinux"
_CONFIG = "/etc/selinux/config"
_ENFORCE = "/sys/fs/selinux/enforce"


def finding(host: Host, options: DoctorOptions, confines: bool | None) -> Finding | None:
    """Examine labels. None where SELinux does not enforce.

    Args: confines: whether the container runtime runs containers under labels of their own; None where that is not known.
    """
    if (host.text(_ENFORCE) or "").strip() != "1":
        return None
    if confines is False:
        return ok(_NAME, "SELinux is enforcing, and the container runtime is not set to confine containers by it")
    places = (options.runtime_dir, f"{options.state_dir}/shim")
    wrong = [place for place in places if host.selinux_type(place) != CONTAINER_TYPE]
    if not wrong:
        return ok(_NAME, f"SELinux is enforcing, and {' and '.join(places)} have the label that lets containers in")
    found = f"SELinux is enforcing: containers may not use the shim's files in {' and '.join(wrong)} without the label {CONTAINER_TYPE}"
    fix = _cure(host, options.runtime_dir, wrong)
    if confines is None:
        return warning(_NAME, f"{found}, if the container runtime confines them, which is not known", fix)
    return error(_NAME, found, fix)


def _cure(host: Host, runtime_dir: str, places: list[str]) -> str:
    """Return what to do. /run is empty after a boot, and what systemd-tmpfiles makes there has its label from the start."""
    rules = [f"semanage fcontext -a -t {CONTAINER_TYPE} '{_as_policy_has_it(host, place)}(/.*)?'" for place in places]
    if runtime_dir in places:
        rules.append(f"echo 'd {runtime_dir} 0755' > /etc/tmpfiles.d/aliquot.conf && systemd-tmpfiles --create aliquot.conf")
    commands = " && ".join([*rules, f"restorecon -RF {' '.join(places)}"])
    return f"with the agent from deploy/daemonset/components/selinux: {commands}"


def _as_policy_has_it(host: Host, place: str) -> str:
    """Return the path for which rules are made: where the policy takes one tree for another, semanage refuses a rule for the first."""
    lines = (host.text(_CONFIG) or "").splitlines()
    policy = next((line.partition("=")[2].strip() for line in lines if line.strip().startswith("SELINUXTYPE=")), "targeted")
    equal = host.text(f"/etc/selinux/{policy}/contexts/files/file_contexts.subs_dist") or ""
    for line in equal.splitlines():
        words = line.split()
        if len(words) == 2 and place.startswith(f"{words[0]}/"):
            return words[1] + place.removeprefix(words[0])
    return place
