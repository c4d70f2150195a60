# SPDX-License-Identifier: Apache-2.0
import ipaddress
import json

import pytest

from aliquot.contract.features import Gate
from aliquot.contract.model import Policy
from aliquot.process.settings import SettingsError, split_address
from scheduler_plugin.settings import TABLE, Consolidation, Settings

NO_WEBHOOK = ["--webhook-address", ""]


def test_a_flag_beats_the_environment_which_beats_the_file(tmp_path):
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"softSeconds": 1, "policy": "spread", "leaseName": "x", "webhookAddress": ""}))
    settings = Settings.load(["--config", str(file), "--soft-seconds", "3"], {"ALIQUOT_SOFT_SECONDS": "2", "ALIQUOT_POLICY": "binpack"})
    assert (settings.soft_seconds, settings.policy, settings.lease_name) == (3.0, Policy.BINPACK, "x")


def test_single_weights_overlay_the_defaults(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("webhookAddress: ''\nweights: {frag: {host: 2.5}}\n")
    weights = Settings.load(["--config", str(file)], {}).weights
    assert (weights[Policy.FRAG].host, weights[Policy.FRAG].policy, weights[Policy.BINPACK].host) == (2.5, 1.0, 0.05)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--soft-seconds", "0"], "out of range for softSeconds; want a number from 0.1 to 600"),
        (["--policy", "best"], "want one of frag, binpack, spread, topology"),
        (["--extender-address", "0.0.0.0:1"], "set tlsCertFile, tlsKeyFile and clientCaFile, or listen on 127.0.0.1"),
        (["--extender-address", "nowhere"], "want host:port"),
        (["--tls-cert-file", "a"], "without tlsKeyFile: set both or neither"),
        (["--client-ca-file", "a"], "without a certificate of the extender"),
        (["--prometheus-url", "prometheus:9090"], "want http://HOST:PORT or https://HOST"),
        (["--webhook-address", "0.0.0.0:1"], "only over TLS"),
        (["--hami-resources", "gpus=nvidia.com/x"], "want KEY=RESOURCE with a key of count, memory, percent, cores, priority"),
        (["--hami-resources", "memory=nvidia.com/vgpu-memory"], "only the count may have our name"),
        (["--mig-profiles", "1g=9728"], "migProfiles 1g=9728: want PROFILE=MIB such as 1g.10gb=9728: expected a MIG profile"),
        (["--mig-profiles", "1g.10gb=9.5"], "expected device memory in whole MiB, at least 1, found '9.5'"),
        (["--mig-profiles", "1g.10gb"], "want PROFILE=MIB"),
        (["--frobnicate", "1"], "unrecognized arguments"),
    ],
)
def test_wrong_settings_say_what_to_do(argv, sentence):
    with pytest.raises(SettingsError, match=sentence.replace(".", r"\.")):
        Settings.load([*NO_WEBHOOK, *argv], {})


@pytest.mark.parametrize(
    "argv",
    [
        [],  # the webhook has no certificate
        [*NO_WEBHOOK, "--metrics-address", "nowhere"],
        [*NO_WEBHOOK, "--extender-address", "0.0.0.0:1"],
        [*NO_WEBHOOK, "--tls-cert-file", "a"],
        [*NO_WEBHOOK, "--prometheus-url", "prometheus:9090"],
        [*NO_WEBHOOK, "--hami-resources", "gpus=nvidia.com/x"],
        [*NO_WEBHOOK, "--consolidation", "on"],
    ],
)
def test_misspelt_feature_gate_is_named_before_settings_that_do_not_go_together(argv):
    with pytest.raises(SettingsError, match=r"'Consolidaton' is not a feature gate; known gates: .*Consolidation"):
        Settings.load([*argv, "--feature-gates", "Consolidaton=true"], {})


def test_memory_of_profiles_is_written_like_any_other_memory():
    settings = Settings.load([*NO_WEBHOOK, "--mig-profiles", "1g.10gb=9728, 3g.40gb=39Gi"], {})
    assert settings.expected_profiles() == {"1g.10gb": 9728, "3g.40gb": 39936}


def test_the_webhook_takes_its_certificate_from_files_or_from_a_secret():
    assert Settings.load(["--webhook-certificate-secret", "s"], {}).webhook_certificate_secret == "s"
    assert Settings.load(["--tls-cert-file", "c", "--tls-key-file", "k"], {}).webhook_certificate_secret == ""


def test_without_settings_only_this_host_reaches_extender():
    settings = Settings.load([], {"ALIQUOT_WEBHOOK_CERTIFICATE_SECRET": "s"})
    host, _ = split_address("extenderAddress", settings.extender_address)
    assert ipaddress.ip_address(host).is_loopback


def test_a_secret_does_not_open_the_extender_beyond_loopback():
    with pytest.raises(SettingsError, match="each client that reaches it can bind pods"):
        Settings.load(["--webhook-certificate-secret", "s", "--extender-address", "0.0.0.0:1"], {})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("softSecond: 1", "did you mean softSeconds"),
        ("weights: {best: {}}", "want policies"),
        ("weights: {frag: {luck: 1}}", "numbers for policy, host"),
        ("- 1", "want a mapping"),
        ("a: [", "configuration file"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path, text, sentence):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=sentence):
        Settings.load([*NO_WEBHOOK, "--config", str(file)], {})


def test_the_help_lists_every_setting():
    assert all(setting.flag in TABLE.text() and setting.env in TABLE.text() for setting in TABLE.settings)


@pytest.mark.parametrize(("text", "mode"), [("on", Consolidation.ON), ("off", Consolidation.OFF), ("plan", Consolidation.PLAN)])
def test_consolidation_is_read_from_yaml_without_quotes(tmp_path, text, mode):
    file = tmp_path / "scheduler.yaml"
    file.write_text(f"webhookAddress: ''\nconsolidation: {text}\nfeatureGates: Consolidation=true\n")
    assert Settings.load(["--config", str(file)], {}).consolidation is mode


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--consolidation", "on"], "consolidation is set, but the alpha feature Consolidation is off: set featureGates"),
        (["--gangs-from-owners", "all"], "gangsFromOwners: all is set, but the alpha feature GangsFromOwners is off: set featureGates"),
        (["--feature-gates", "Consolidate=true"], "featureGates: 'Consolidate' is not a feature gate"),
    ],
)
def test_alpha_setting_needs_its_gate(arguments, says):
    with pytest.raises(SettingsError, match=says):
        Settings.load(["--webhook-address", "", *arguments], {})


def test_weight_of_interference_needs_its_gate(tmp_path):
    file = tmp_path / "scheduler.yaml"
    file.write_text("webhookAddress: ''\nweights: {frag: {interference: 1.0}}\n")
    with pytest.raises(SettingsError, match="weights: interference is set, but the alpha feature Interference is off: set featureGates"):
        Settings.load(["--config", str(file)], {})
    assert Settings.load(["--config", str(file), "--feature-gates", "Interference=true"], {}).weights[Policy.FRAG].interference == 1.0


def test_components_open_gates_beside_those_of_the_setting():
    environ = {"ALIQUOT_FEATURE_GATES_GANGS_FROM_OWNERS": "GangsFromOwners=true"}
    opened = Settings.load([*NO_WEBHOOK, "--feature-gates", "Consolidation=true"], environ).gates.opened
    assert opened == {Gate.CONSOLIDATION, Gate.GANGS_FROM_OWNERS}
    assert Settings.load([*NO_WEBHOOK, "--feature-gates", "GangsFromOwners=false"], environ).gates.opened == set()
