# SPDX-License-Identifier: Apache-2.0
"""``aliquot doctor``: the command line. The checks are in ``aliquot_cli.doctor``."""

from pathlib import Path

import click

from aliquot_cli import exit_codes
from aliquot_cli.doctor.options import DoctorOptions
from aliquot_cli.options import output_option
from aliquot_cli.output import Output


@click.command(name="doctor")
@click.option(
    "--root",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=Path("/"),
    show_default=True,
    help="Root of the node's file system, such as /host in a pod that mounts it.",
)
@output_option
@click.option(
    "--fail-on", type=click.Choice(["warning", "error"]), default="error", show_default=True, help="Lowest severity that sets status 4."
)
@click.option("--kubelet-dir", default="/var/lib/kubelet", show_default=True, help="The kubelet's directory on the node.")
@click.option(
    "--nvml",
    "nvml_library",
    metavar="FILE",
    default="",
    help="NVML library to load.  [default: the loader's, or below --root]",
)
@click.option("--shim-dir", metavar="DIR", default="", help="Directory of the shim's libraries.  [default: as installed on the node]")
@click.option("--image", "images", metavar="DIR", multiple=True, help="Root of an unpacked image to check the shim in; can be repeated.")
def command(
    *, root: Path, output: Output, fail_on: str, kubelet_dir: str, nvml_library: str, shim_dir: str, images: tuple[str, ...]
) -> None:
    """Check this node: driver, kubelet, runtime, CDI, toolkit, other plugins, system, shim and agent. Each finding comes with a fix.

    Changes nothing. Run it as root on the node, or in a pod that mounts the node's root read-only. The status is 4 when it finds errors.
    """
    from aliquot_cli.doctor.command import run
    from aliquot_cli.doctor.findings import Severity

    options = DoctorOptions(kubelet_dir=kubelet_dir, nvml_library=nvml_library, shim_dir=shim_dir, images=images)
    raise SystemExit(exit_codes.OK if run(root, options, output=output, fail_on=Severity(fail_on)) else exit_codes.FINDINGS)
