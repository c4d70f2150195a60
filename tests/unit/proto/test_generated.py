"""The checked-in gRPC modules are what the .proto files say, byte for byte."""

from pathlib import Path

import pytest

from proto.kubelet import generate


@pytest.fixture(scope="module")
def regenerated(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("generated")
    generate.generate(out)
    return out / "proto/kubelet"


def generated_files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if "_pb2" in path.name}


def test_regenerating_changes_nothing(regenerated):
    checked_in, fresh = generated_files(generate.HERE), generated_files(regenerated)
    assert checked_in.keys() == fresh.keys()
    changed = [name for name in fresh if fresh[name] != checked_in[name]]
    assert not changed, "run python -m proto.kubelet.generate and commit the result"


def test_every_proto_file_has_modules_and_stubs(regenerated):
    want = {
        f"{source.stem}{suffix}"
        for source in generate.HERE.glob("*.proto")
        for suffix in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")
    }
    assert want == set(generated_files(regenerated))
