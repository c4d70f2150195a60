"""The configuration of ``aliquot-mps``: each field is a setting with its default, meaning and bounds (``program.settings``)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from program.settings import LogFormat, LogLevel, Row, Table
from proto import contract


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that can be configured. Paths are absolute."""

    runtime_dir: Annotated[str, Row("the agent's runtimeDir, which both share", absolute=True)] = contract.RUNTIME_DIR
    mps_control: Annotated[str, Row("nvidia-cuda-mps-control, as a path or on PATH")] = "nvidia-cuda-mps-control"
    mps_shared_memory: Annotated[
        str, Row("host directory that is /dev/shm to this program, and becomes it in MPS clients (default: mps-shm in runtimeDir)")
    ] = ""
    log_level: Annotated[LogLevel, Row("least severity that is logged")] = LogLevel.INFO
    log_format: Annotated[LogFormat, Row("form of the log lines")] = LogFormat.JSON

    @classmethod
    def load(cls, argv: Sequence[str], environ: Mapping[str, str]) -> "Settings":
        """Read flags, environment and file.

        Raises: SettingsError with one sentence; SystemExit(0) after printing help.
        """
        return cls(**TABLE.read(argv, environ))


TABLE = Table(
    Settings,
    program="agent.mps_main",
    purpose="Keeps the MPS control daemons that the agent of this node wants, and goes on while the agent is replaced.",
    config_env="ALIQUOT_MPS_CONFIG",
)
