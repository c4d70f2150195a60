# SPDX-License-Identifier: Apache-2.0
import pytest

from agent.mps.__main__ import main
from agent.mps.settings import Settings
from agent.settings import Settings as AgentSettings
from aliquot.process.settings import SettingsError


def test_agent_and_supervisor_share_a_directory_by_default():
    assert Settings.load([], {}).runtime_dir == AgentSettings().runtime_dir
    assert Settings.load([], {"ALIQUOT_RUNTIME_DIR": "/run/x"}).runtime_dir == AgentSettings.load(["--runtime-dir=/run/x"], {}).runtime_dir


def test_a_relative_directory_is_refused():
    with pytest.raises(SettingsError, match="want an absolute path"):
        Settings.load(["--runtime-dir=run"], {})


def test_wrong_settings_are_reported_in_one_sentence(capsys):
    assert main(["--mps-controll=x"]) == 2
    assert "--mps-controll" in capsys.readouterr().err


def test_a_directory_that_cannot_be_made_is_a_failure(tmp_path):
    (tmp_path / "file").touch()
    assert main([f"--runtime-dir={tmp_path}/file/run"]) == 1
