# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from aliquot_lab.standin.cdi import CdiError, ContainerEdits, Device, Mount, Spec, SpecError, encode_spec, load_registry, read_spec, resolve

KIND = "vendor.example/gpu"


def document(*names, version="0.6.0", kind=KIND, common=None, **device):
    devices = [{"name": name, "containerEdits": {"env": [f"NAME={name}"]}, **device} for name in names]
    return {"cdiVersion": version, "kind": kind, "devices": devices, **({"containerEdits": common} if common else {})}


def write(directory, name, content):
    directory.mkdir(exist_ok=True)
    path = directory / name
    path.write_text(json.dumps(content))
    return path


def test_a_device_is_resolved_by_its_qualified_name(tmp_path):
    write(tmp_path / "static", "a.json", document("x"))
    assert resolve(load_registry([tmp_path / "static"]), [f"{KIND}=x"]).env == ("NAME=x",)


def test_yaml_specs_are_read_and_other_files_are_not(tmp_path):
    (tmp_path / "a.yaml").write_text(f"cdiVersion: 0.6.0\nkind: {KIND}\ndevices:\n- name: y\n  containerEdits: {{env: [A=1]}}\n")
    (tmp_path / ".tmp-a.json.partial").write_text("{")
    registry = load_registry([tmp_path])
    assert list(registry.devices) == [f"{KIND}=y"]
    assert registry.errors == {}


def test_a_specs_own_edits_come_once_and_before_its_devices(tmp_path):
    write(tmp_path, "a.json", document("x", "y", common={"env": ["COMMON=1"]}))
    assert resolve(load_registry([tmp_path]), [f"{KIND}=x", f"{KIND}=y"]).env == ("COMMON=1", "NAME=x", "NAME=y")


def test_the_later_directory_wins(tmp_path):
    write(tmp_path / "static", "a.json", document("x", common={"env": ["FROM=static"]}))
    write(tmp_path / "dynamic", "a.json", document("x", common={"env": ["FROM=dynamic"]}))
    registry = load_registry([tmp_path / "static", tmp_path / "dynamic"])
    assert resolve(registry, [f"{KIND}=x"]).env[0] == "FROM=dynamic"


def test_two_files_of_one_directory_with_one_name_are_in_conflict(tmp_path):
    write(tmp_path, "a.json", document("x", "only-a"))
    write(tmp_path, "b.json", document("x"))
    registry = load_registry([tmp_path])
    with pytest.raises(CdiError, match=r"in conflict: .*a\.json, .*b\.json"):
        resolve(registry, [f"{KIND}=x"])
    assert resolve(registry, [f"{KIND}=only-a"]).env == ("NAME=only-a",)


def test_a_conflict_in_the_static_directory_is_settled_by_the_dynamic_one(tmp_path):
    for name in ("a.json", "b.json"):
        write(tmp_path / "static", name, document("x"))
    write(tmp_path / "dynamic", "c.json", document("x"))
    assert resolve(load_registry([tmp_path / "static", tmp_path / "dynamic"]), [f"{KIND}=x"]).env == ("NAME=x",)


def test_every_unresolvable_name_is_reported(tmp_path):
    with pytest.raises(CdiError, match="a/b=c, a/b=d"):
        resolve(load_registry([tmp_path]), ["a/b=c", "a/b=d"])


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        pytest.param({**document("x"), "surprise": 1}, "surprise", id="unknown field"),
        pytest.param(document("x", version="9.9.9"), "cdiVersion", id="unknown version"),
        pytest.param(document("x", kind="nokind"), "kind", id="kind without class"),
        pytest.param(document(), "no devices", id="no devices"),
        pytest.param(document("x", "x"), "used twice", id="name twice"),
        pytest.param(document("-x"), "invalid", id="bad name"),
        pytest.param(document("x", version="0.5.0", annotations={"a": "b"}), r"0\.6\.0", id="annotations too early"),
        pytest.param(document("0", version="0.4.0"), r"0\.5\.0", id="digit first too early"),
        pytest.param(document("x", common={"additionalGids": [1]}), r"0\.7\.0", id="gids too early"),
    ],
)
def test_invalid_spec_is_ignored_with_reason(tmp_path, content, complaint):
    path = write(tmp_path, "a.json", content)
    with pytest.raises(SpecError, match=complaint):
        read_spec(path)
    registry = load_registry([tmp_path])
    assert registry.devices == {}
    assert list(registry.errors) == [path]


def test_an_encoded_spec_reads_back_the_same_without_empty_fields(tmp_path):
    spec = Spec("0.6.0", KIND, (Device("x", ContainerEdits(env=("A=1",), mounts=(Mount("/a", "/b", ("ro",)),))),))
    path = tmp_path / "a.json"
    path.write_bytes(encode_spec(spec))
    assert read_spec(path) == spec
    assert "hooks" not in path.read_text()
