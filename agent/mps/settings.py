# SPDX-License-Identifier: Apache-2.0
"""The configuration of ``aliquot-mps``: each field is a setting with its default, meaning and bounds (``aliquot.process.settings``)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from aliquot import contract
from aliquot.process.settings import LogFormat, LogLevel, Row, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that can be configured. Paths are absolute."""

    runtime_dir: Annotated[str, Row("runtimeDir of the agent; both programs must use the same", absolute=True, advanced=True)] = (
        contract.RUNTIME_DIR
    )
    mps_control: Annotated[str, Row("nvidia-cuda-mps-control, as a path or on PATH")] = "nvidia-cuda-mps-control"
    mps_shared_memory: Annotated[
        str, Row("host directory mounted as /dev/shm in this program and in MPS clients (default: mps-shm in runtimeDir)", advanced=True)
    ] = ""
    log_level: Annotated[LogLevel, Row("lowest severity that is logged")] = LogLevel.INFO
    log_format: Annotated[LogFormat, Row("format of the log lines")] = LogFormat.JSON

    @classmethod
    def load(cls, argv: Sequence[str], environ: Mapping[str, str]) -> "Settings":
        """Read flags, environment and file.

        Raises: SettingsError with one sentence; SystemExit(0) after printing help.
        """
        return cls(**TABLE.read(argv, environ))


TABLE = Table(
    Settings,
    program="agent.mps.__main__",
    purpose="Runs the MPS control daemons that the agent of this node requests, also while the agent restarts.",
    config_env="ALIQUOT_MPS_CONFIG",
)
