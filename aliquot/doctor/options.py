"""Where things are on the node, as far as that differs between distributions."""

from dataclasses import dataclass

from proto import contract


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """Paths are the node's own."""

    kubelet_dir: str = "/var/lib/kubelet"
    cdi_dirs: tuple[str, ...] = (contract.CDI_STATIC_DIR, contract.CDI_DYNAMIC_DIR)
    state_dir: str = contract.STATE_DIR
    runtime_dir: str = contract.RUNTIME_DIR
    shim_dir: str = ""
    """Where the shim's libraries are for this process; empty: the agent's on the node, else those of this installation."""
    nvml_library: str = ""
    """For this process; empty: the loader's on the node itself, else the node's own file."""
    images: tuple[str, ...] = ()
    """Root directories of unpacked images to check the shim against, for this process."""
