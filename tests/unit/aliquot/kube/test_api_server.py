# SPDX-License-Identifier: Apache-2.0
import pytest

from aliquot.kube.api_server import ApiServer, find_api_server
from aliquot.process.settings import SettingsError

IN_CLUSTER = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}


def test_pod_learns_api_address_from_environment(tmp_path):
    for name in ("token", "ca.crt"):
        (tmp_path / name).touch()
    found = find_api_server("", "", "", IN_CLUSTER, tmp_path)
    assert found == ApiServer("https://10.0.0.1:443", tmp_path / "token", tmp_path / "ca.crt")


def test_an_ipv6_cluster_is_reached(tmp_path):
    assert find_api_server("", "", "", {**IN_CLUSTER, "KUBERNETES_SERVICE_HOST": "fd00::1"}, tmp_path).url == "https://[fd00::1]:443"


def test_settings_win(tmp_path):
    found = find_api_server("http://127.0.0.1:8080/", "/t", "", IN_CLUSTER, tmp_path)
    assert (found.url, str(found.token_file), found.ca_file) == ("http://127.0.0.1:8080", "/t", None)


@pytest.mark.parametrize("url", ["", "localhost:8080", "ftp://x"])
def test_no_usable_address_is_a_settings_error(tmp_path, url):
    with pytest.raises(SettingsError, match="kubeApiUrl"):
        find_api_server(url, "", "", {}, tmp_path)
