# SPDX-License-Identifier: Apache-2.0
import pytest

from aliquot_lab.standin.cluster import Cluster, Kind
from aliquot_lab.standin.errors import InvalidError
from aliquot_lab.standin.quantities import canonical


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        (4000, "4k"),
        ("4096", "4096"),
        ("1024Mi", "1Gi"),
        ("0.5Gi", "512Mi"),
        ("512Ki", "512Ki"),
        ("1Ki", "1Ki"),
        ("650000", "650k"),
        ("1.5", "1500m"),
        ("100m", "100m"),
        ("1000m", "1"),
        (0, "0"),
        ("1000000", "1M"),
    ],
)
def test_a_quantity_is_kept_in_canonical_form(written, kept):
    assert canonical(written) == kept


@pytest.mark.parametrize("text", ["", "4GiB", "x"])
def test_invalid_quantity_is_refused(text):
    with pytest.raises(InvalidError):
        canonical(text)


def test_pods_come_back_with_canonical_limits_and_requests_that_default_to_them():
    container = {"name": "c", "resources": {"limits": {"nvidia.com/vgpu-memory": 4000, "cpu": 2}, "requests": {"cpu": "100m"}}}
    pod = Cluster().create(Kind.POD, {"metadata": {"name": "p"}, "spec": {"containers": [container]}})
    assert pod["spec"]["containers"][0]["resources"] == {
        "limits": {"nvidia.com/vgpu-memory": "4k", "cpu": "2"},
        "requests": {"nvidia.com/vgpu-memory": "4k", "cpu": "100m"},
    }


def test_a_nodes_amounts_are_brought_into_canonical_form_by_every_update():
    cluster = Cluster()
    cluster.create(Kind.NODE, {"metadata": {"name": "n"}, "status": {"capacity": {}}})
    node = cluster.update(Kind.NODE, "", "n", lambda item: item["status"]["capacity"].update({"nvidia.com/vgpu-memory": "650000"}))
    assert node["status"]["capacity"] == {"nvidia.com/vgpu-memory": "650k"}
