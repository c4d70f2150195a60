# SPDX-License-Identifier: Apache-2.0
import pytest

from agent.services import changes


@pytest.fixture(autouse=True)
def without_pace(monkeypatch):
    """Services look again at once: these tests judge what they do after each change. ``test_changes`` has the pace."""
    monkeypatch.setattr(changes, "PACE_SECONDS", 0.0)
