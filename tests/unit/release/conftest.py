# SPDX-License-Identifier: Apache-2.0
"""A copy of the source tree as a release takes it."""

from pathlib import Path

import pytest

from release.source import Source, export

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """The tree, exported; the time is set, so that a tree without git works too."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SOURCE_DATE_EPOCH", "1700000000")
        return export(ROOT, tmp_path_factory.mktemp("source") / "tree")
