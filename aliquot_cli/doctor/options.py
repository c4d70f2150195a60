# SPDX-License-Identifier: Apache-2.0
"""Paths on the node that differ between distributions."""

from dataclasses import dataclass

from aliquot import contract


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """Paths are those of the node, unless the docstring says otherwise."""

    kubelet_dir: str = contract.KUBELET_DIR
    cdi_dirs: tuple[str, ...] = (contract.CDI_STATIC_DIR, contract.CDI_DYNAMIC_DIR)
    state_dir: str = contract.STATE_DIR
    runtime_dir: str = contract.RUNTIME_DIR
    shim_dir: str = ""
    """Directory of the shim's libraries, for this process. Empty: the agent's on the node, otherwise those of this installation."""
    nvml_library: str = ""
    """NVML library, for this process. Empty: the one that the loader finds on the node itself, otherwise the node's file."""
    images: tuple[str, ...] = ()
    """Root directories of unpacked images to check the shim in, for this process."""
