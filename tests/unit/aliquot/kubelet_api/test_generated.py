# SPDX-License-Identifier: Apache-2.0
"""The checked-in gRPC modules are what the .proto files say, byte for byte."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
SPEC = importlib.util.spec_from_file_location("generate", ROOT / "proto/generate.py")
assert SPEC is not None
assert SPEC.loader is not None
generate = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(generate)


@pytest.fixture(scope="module")
def regenerated(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("generated")
    generate.generate(out)
    return out / generate.PACKAGE


def generated_files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if "_pb2" in path.name}


def test_regenerating_changes_nothing(regenerated):
    checked_in, fresh = generated_files(ROOT / generate.PACKAGE), generated_files(regenerated)
    assert checked_in.keys() == fresh.keys()
    changed = [name for name in fresh if fresh[name] != checked_in[name]]
    assert not changed, "run python proto/generate.py and commit the result"


def test_every_proto_file_has_modules_and_stubs(regenerated):
    want = {
        f"{source.stem}{suffix}"
        for source in generate.SOURCES.glob("*.proto")
        for suffix in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")
    }
    assert want == set(generated_files(regenerated))
