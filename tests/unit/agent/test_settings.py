# SPDX-License-Identifier: Apache-2.0
import pytest

from agent.core.cdi import Interposition
from agent.settings import TABLE, Placement, Settings
from aliquot import contract
from aliquot.contract.features import Gate
from aliquot.contract.model import Policy
from aliquot.process.settings import SettingsError


def test_defaults_need_no_configuration():
    settings = Settings.load([], {})
    assert settings.shares_per_gpu == 16
    assert settings.placement is Placement.ASSIGNED
    assert settings.publish_node_capacity
    assert str(settings.device_plugin_dir) == contract.KUBELET_DEVICE_PLUGIN_DIR
    assert str(settings.pod_resources_socket) == "/var/lib/kubelet/pod-resources/kubelet.sock"


def test_a_flag_beats_the_environment_which_beats_the_file(tmp_path):
    path = tmp_path / "agent.yaml"
    path.write_text("sharesPerGpu: 2\nplacementPolicy: spread\nlogLevel: debug\n")
    environ = {"ALIQUOT_SHARES_PER_GPU": "3", "ALIQUOT_LOG_LEVEL": "error"}
    settings = Settings.load([f"--config={path}", "--shares-per-gpu", "4"], environ)
    assert (settings.shares_per_gpu, settings.log_level, settings.placement_policy) == (4, "error", Policy.SPREAD)


def test_the_file_may_be_json_and_named_by_the_environment(tmp_path):
    path = tmp_path / "agent.json"
    path.write_text('{"interposition": "preload", "nvmlTimeoutSeconds": 2}')
    settings = Settings.load([], {"ALIQUOT_CONFIG": str(path)})
    assert (settings.interposition, settings.nvml_timeout_seconds) == (Interposition.PRELOAD, 2.0)


@pytest.mark.parametrize(("argv", "value"), [(["--publish-node-capacity"], True), (["--publish-node-capacity=false"], False)])
def test_a_boolean_flag_may_stand_alone(argv, value):
    assert Settings.load(argv, {}).publish_node_capacity is value


@pytest.mark.parametrize(
    ("argv", "environ", "sentence"),
    [
        (["--shares-per-gpu=0"], {}, r"flag --shares-per-gpu: '0' is out of range for sharesPerGpu; want an integer from 1 to 1000"),
        ([], {"ALIQUOT_SHARES_PER_GPU": "many"}, r"environment variable ALIQUOT_SHARES_PER_GPU: 'many' is not valid for sharesPerGpu"),
        (["--placement=there"], {}, r"want one of assigned, local"),
        (["--reconcile-seconds=10.5"], {}, r"out of range for reconcileSeconds; want a number from 0.05 to 10"),
        (["--cdi-dir=cdi"], {}, r"want an absolute path"),
        (["--metrics-address=9402"], {}, r"want host:port"),
        (["--publish-node-capacity=perhaps"], {}, r"want true or false"),
        (["--health-hard-xids=62,all"], {}, r"healthHardXids '62,all': want XIDs by number"),
        (["--no-such-flag"], {}, r"unrecognized arguments: --no-such-flag"),
        (["--config=/no/such/file"], {}, r"configuration file /no/such/file: No such file"),
    ],
)
def test_a_wrong_setting_is_one_sentence_that_says_what_is_wanted(argv, environ, sentence):
    with pytest.raises(SettingsError, match=sentence) as caught:
        Settings.load(argv, environ)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("sharesPerGPU: 4", r"unknown setting 'sharesPerGPU'; did you mean sharesPerGpu\?"),
        ("sharesPerGpu: '4x'", r"not valid for sharesPerGpu"),
        ("sharesPerGpu: 4.5", r"not valid for sharesPerGpu"),
        ("- 1", r"want a mapping of settings, found list"),
        ("a: [", r"configuration file"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(tmp_path, content, sentence):
    path = tmp_path / "agent.yaml"
    path.write_text(content)
    with pytest.raises(SettingsError, match=sentence) as caught:
        Settings.load([f"--config={path}"], {})
    assert str(path) in str(caught.value)


def test_an_empty_file_sets_nothing(tmp_path):
    path = tmp_path / "agent.yaml"
    path.write_text("# nothing\n")
    assert Settings.load([f"--config={path}"], {}) == Settings()


def test_help_lists_every_setting_in_its_three_spellings(capsys):
    with pytest.raises(SystemExit) as caught:
        Settings.load(["--help"], {})
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert TABLE.text() in text
    for setting in TABLE.settings:
        assert f"{setting.flag}  {setting.env}  {setting.key}\n" in text


def test_every_default_is_within_its_own_bounds():
    for setting in TABLE.settings:
        if not (setting.row.absolute or setting.type is str):
            assert setting.parse(setting.default, "default") == setting.default


def test_an_ipv6_address_may_be_listened_on():
    assert Settings.load(["--metrics-address=[::1]:80"], {}).metrics_host_port == ("::1", 80)


@pytest.mark.parametrize(
    ("metrics_address", "pod_ip", "listening", "wanted"),
    [
        pytest.param("0.0.0.0:9402", "10.1.2.3", "0.0.0.0:9402", "10.1.2.3:9402", id="wildcard"),
        pytest.param("[::]:9402", "10.1.2.3", "[::]:9402", "10.1.2.3:9402", id="wildcard of IPv6"),
        pytest.param(":0", "fd00::3", "0.0.0.0:40123", "[fd00::3]:40123", id="a pod with IPv6, a port that was free"),
        pytest.param("127.0.0.1:9402", "10.1.2.3", "127.0.0.1:9402", "127.0.0.1:9402", id="an address of its own"),
        pytest.param("0.0.0.0:9402", "", "0.0.0.0:9402", "0.0.0.0:9402", id="no pod"),
    ],
)
def test_the_node_finds_the_agent_at_its_pods_address(metrics_address, pod_ip, listening, wanted):
    settings = Settings.load([f"--metrics-address={metrics_address}"], {"ALIQUOT_POD_IP": pod_ip})
    assert settings.address_from_node(listening) == wanted


def test_the_rules_of_health_follow_the_settings():
    rules = Settings.load(
        ["--health-recovery-seconds=3600", "--health-max-recovery-seconds=60", "--health-application-xids=62, 119", "--health-hard-xids="],
        {},
    ).health_rules
    assert rules.application_xids == {62, 119}
    assert rules.hard_xids == frozenset()
    assert rules.max_recovery_seconds == 3600  # never below the first wait


@pytest.mark.parametrize(
    ("flag", "gate"),
    [
        ("--mig-strategy=dynamic", "DynamicMig"),
        ("--driver-limits-hook=/x", "DriverIsolation"),
        ("--memory-oversubscription=1.5", "MemoryBurst"),
        ("--allocation=dra", "DynamicResourceAllocation"),
        ("--allocation=planned", "DynamicResourceAllocation"),
        ("--allocation=both", "DynamicResourceAllocation"),
        ("--dra-profiles=20g", "DynamicResourceAllocation"),
        ("--dra-admin-access", "DynamicResourceAllocation"),
        ("--lost-gpu-policy=evict", "DynamicResourceAllocation"),
    ],
)
def test_setting_of_an_alpha_feature_needs_its_gate(flag, gate):
    with pytest.raises(SettingsError, match=f"is set, but the alpha feature {gate} is off: set featureGates: {gate}=true"):
        Settings.load([flag], {})
    assert Gate(gate) in Settings.load([flag, f"--feature-gates={gate}=true"], {}).gates


def test_fixed_shares_are_gib_without_repetitions():
    gate = "--feature-gates=DynamicResourceAllocation=true"
    assert Settings.load(["--dra-profiles=40g, 20g,40g", gate], {}).profiles_gib == (20, 40)
    for wrong in ("20", "0g", "20Gi", "g"):
        with pytest.raises(SettingsError, match="want GiB of memory, such as 10g,20g"):
            Settings.load([f"--dra-profiles={wrong}", gate], {})


def test_fixed_shares_are_refused_beside_device_ids():
    flags = ["--feature-gates=DynamicResourceAllocation=true", "--dra-profiles=20g"]
    assert Settings.load([*flags, "--allocation=planned"], {}).profiles_gib == (20,)
    with pytest.raises(SettingsError, match="allocation: both offers no fixed shares"):
        Settings.load([*flags, "--allocation=both"], {})


def test_unknown_gate_is_refused_with_the_known_ones():
    with pytest.raises(SettingsError, match="featureGates: 'Mps' is not a feature gate; known gates: DriverIsolation, MpsIsolation"):
        Settings.load(["--feature-gates=Mps=true"], {})


def test_components_open_gates_and_the_setting_closes_them_again():
    components = {"ALIQUOT_FEATURE_GATES_MPS": "MpsIsolation=true", "ALIQUOT_FEATURE_GATES_MIG": "DynamicMig=true"}
    assert Settings.load([], components).gates.opened == {Gate.MPS_ISOLATION, Gate.DYNAMIC_MIG}
    environ = {**components, "ALIQUOT_FEATURE_GATES": "MpsIsolation=false,Pausing=true"}
    assert Settings.load([], environ).gates.opened == {Gate.DYNAMIC_MIG, Gate.PAUSING}


def test_exempt_namespaces_are_a_comma_list():
    assert Settings.load([], {}).exempt_namespaces == frozenset()
    assert Settings.load(["--audit-exempt-namespaces= gpu-operator, monitoring,"], {}).exempt_namespaces == {"gpu-operator", "monitoring"}
