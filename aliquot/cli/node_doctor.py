"""``aliquot doctor``: its arguments; what it does is in ``aliquot.doctor``."""

from pathlib import Path

import click

from aliquot.cli import exit_codes
from aliquot.cli.options import output_option
from aliquot.cli.output import Output
from aliquot.doctor.options import DoctorOptions


@click.command(name="doctor")
@click.option(
    "--root",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=Path("/"),
    show_default=True,
    help="Where the node's file system is, such as /host in a pod that mounts it.",
)
@output_option
@click.option(
    "--fail-on", type=click.Choice(["warning", "error"]), default="error", show_default=True, help="Least severity that ends with 4."
)
@click.option("--kubelet-dir", default="/var/lib/kubelet", show_default=True, help="The kubelet's directory on the node.")
@click.option("--nvml", "nvml_library", metavar="FILE", default="", help="NVML library to load.  [default: the loader's, or the root's]")
@click.option("--shim-dir", metavar="DIR", default="", help="The shim's libraries.  [default: as installed on the node]")
@click.option("--image", "images", metavar="DIR", multiple=True, help="Root of an unpacked image to check the shim with; may be repeated.")
def command(
    *, root: Path, output: Output, fail_on: str, kubelet_dir: str, nvml_library: str, shim_dir: str, images: tuple[str, ...]
) -> None:
    """Examine this node: driver, kubelet, runtime, CDI, toolkit, other plugins, system, shim and agent; each finding with its cure.

    Reads only. Run it as root on the node, or in a pod that mounts the node's root read-only. Ends with 4 when it finds errors.
    """
    from aliquot.doctor.command import run
    from aliquot.doctor.findings import Severity

    options = DoctorOptions(kubelet_dir=kubelet_dir, nvml_library=nvml_library, shim_dir=shim_dir, images=images)
    raise SystemExit(exit_codes.OK if run(root, options, output=output, fail_on=Severity(fail_on)) else exit_codes.FINDINGS)
