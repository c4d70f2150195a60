"""The status server and the simulated node's files."""

import urllib.error
import urllib.request

import pytest

from agent.adapters.http_server import StatusServer
from agent.adapters.simulation import driver_library, prepare_node
from agent.ports import Page
from program.settings import SettingsError


class TestStatusServer:
    @pytest.fixture
    def server(self):
        pages = {
            "/metrics": lambda accept: Page(200, "text/plain", accept.encode()),
            "/readyz": lambda _: Page(503, "text/plain", b"not yet\n"),
        }
        one = StatusServer("127.0.0.1", 0, pages)
        one.start()
        yield one
        one.stop()

    def test_a_page_is_made_for_what_the_client_accepts(self, server):
        request = urllib.request.Request(f"http://{server.address}/metrics?name=x", headers={"Accept": "text/openmetrics"})
        with urllib.request.urlopen(request, timeout=5) as answer:
            assert (answer.status, answer.read()) == (200, b"text/openmetrics")

    @pytest.mark.parametrize(("path", "status"), [("/readyz", 503), ("/other", 404)])
    def test_a_bad_answer_has_its_status(self, server, path, status):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"http://{server.address}{path}", timeout=5)
        assert caught.value.code == status
        caught.value.close()

    def test_an_address_in_use_is_a_settings_error(self, server):
        host, _, port = server.address.rpartition(":")
        with pytest.raises(SettingsError, match="in use"):
            StatusServer(host, int(port), {})


class TestSimulation:
    def test_a_node_is_made_once_and_found_again(self, build_dir, tmp_path):
        prepare_node("t4x2", tmp_path / "sim", "node-1", build_dir)
        before = (tmp_path / "sim/state").stat().st_ino
        prepare_node("t4x2", tmp_path / "sim", "node-1", build_dir)
        assert (tmp_path / "sim/state").stat().st_ino == before
        assert driver_library(build_dir).exists()

    def test_an_unknown_profile_is_refused_in_the_tools_words(self, build_dir, tmp_path):
        with pytest.raises(SettingsError, match="no-such-profile"):
            prepare_node("no-such-profile", tmp_path / "sim", "node-1", build_dir)

    def test_what_was_not_built_is_named(self, tmp_path):
        with pytest.raises(SettingsError, match=r"aliquot-sim cannot be run.*make"):
            prepare_node("t4x2", tmp_path / "sim", "node-1", tmp_path)
        with pytest.raises(SettingsError, match=r"libnvidia-ml.so.1 is missing"):
            driver_library(tmp_path)
