# SPDX-License-Identifier: Apache-2.0
"""The Helm chart installs what kustomize installs, object by object, and refuses invalid values."""

import copy
import importlib.util
import json
import re
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import agent.mps.settings
import agent.settings
import scheduler_plugin.settings
from aliquot import contract
from aliquot.process.settings import Table
from tests.rendering import CHART, DEPLOY, NAMESPACE, ROOT, Installation, Object, Renderer, RenderError, installations

GENERATED_NAME = re.compile(r"-[0-9a-z]{10}$")
"""What kustomize and the chart put behind the names of config maps; each has its own hash."""


def by_name(objects: list[Object]) -> dict[tuple[str, str, str], Object]:
    """Objects by kind, namespace and name; hashes of config maps are taken off, also where pods mount them."""
    found = {}
    for item in copy.deepcopy(objects):
        for volume in item.get("spec", {}).get("template", {}).get("spec", {}).get("volumes", []):
            if "configMap" in volume:
                volume["configMap"]["name"] = GENERATED_NAME.sub("", volume["configMap"]["name"])
        if item["kind"] == "ConfigMap":
            item["metadata"]["name"] = GENERATED_NAME.sub("", item["metadata"]["name"])
        key = item["kind"], item["metadata"].get("namespace", ""), item["metadata"]["name"]
        assert key not in found, f"two objects are {key}"
        found[key] = item
    return found


# --- the same as kustomize ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("installation", installations(), ids=str)
def test_chart_renders_same_objects_as_kustomize(renderer: Renderer, installation: Installation) -> None:
    kustomized, charted = by_name(renderer.kustomized(installation)), by_name(renderer.charted(installation.values))
    del kustomized["Namespace", "", NAMESPACE]  # Helm has a release's namespace before it has the release
    assert charted.keys() == kustomized.keys()
    assert len(charted) > 10
    for key, item in kustomized.items():
        assert charted[key] == item


@pytest.mark.parametrize("overlay", ["default", "simulated", "local-placement"])
def test_every_mounted_config_map_exists(renderer: Renderer, overlay: str) -> None:
    objects = renderer.charted(Installation(overlay).values)
    there = {item["metadata"]["name"] for item in objects if item["kind"] == "ConfigMap"}
    volumes = [volume for item in objects for volume in item.get("spec", {}).get("template", {}).get("spec", {}).get("volumes", [])]
    mounted = {volume["configMap"]["name"] for volume in volumes if "configMap" in volume}
    assert mounted
    assert mounted <= there


def test_packaged_chart_is_complete(renderer: Renderer, tmp_path: Path) -> None:
    renderer.run_helm("package", str(CHART), f"--destination={tmp_path}")
    [package] = tmp_path.glob("*.tgz")
    with tarfile.open(package) as archive:
        assert all(member.isfile() for member in archive.getmembers()), "the manifests themselves, not links to them"
    values = Installation("simulated", monitoring=True).values
    assert renderer.charted(values, chart=package) == renderer.charted(values)


def test_helm_lint_passes(renderer: Renderer) -> None:
    assert "0 chart(s) failed" in renderer.run_helm("lint", "--strict", str(CHART))


# --- what values change -------------------------------------------------------------------------------------------


def the(objects: list[Object], kind: str, name: str) -> Object:
    return next(item for (of, _, called), item in by_name(objects).items() if (of, called) == (kind, name))


def pod_of(objects: list[Object], kind: str, name: str) -> Object:
    return the(objects, kind, name)["spec"]["template"]


def test_settings_override_file_and_roll_pods(renderer: Renderer) -> None:
    values = {"agent": {"settings": {"sharesPerGpu": 4, "publishNodeCondition": False}}, "scheduler": {"settings": {"policy": "binpack"}}}
    before, after = renderer.charted({}), renderer.charted(values)
    of_agent = yaml.safe_load(the(after, "ConfigMap", "aliquot-agent")["data"]["config.yaml"])
    assert of_agent == {"placement": "assigned", "sharesPerGpu": 4, "publishNodeCondition": False}
    assert yaml.safe_load(the(after, "ConfigMap", "aliquot-scheduler-config")["data"]["config.yaml"])["policy"] == "binpack"
    names = [{item["metadata"]["name"] for item in objects if item["kind"] == "ConfigMap"} for objects in (before, after)]
    assert not names[0] & names[1]


@pytest.mark.parametrize("wanted", [{"type": "OnDelete"}, {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "25%"}}], ids=str)
def test_how_agents_are_replaced_is_a_value(renderer: Renderer, wanted: Object) -> None:
    agent = the(renderer.charted({"agent": {"updateStrategy": wanted}}), "DaemonSet", "aliquot-agent")
    assert agent["spec"]["updateStrategy"] == wanted


@pytest.mark.parametrize(
    ("strategy", "kept"),
    [({}, []), ({"type": "RollingUpdate"}, []), ({"type": "OnDelete"}, ["aliquot-agent"])],
    ids=["default", "rolling", "by hand"],
)
def test_config_maps_stay_for_agents_that_are_replaced_by_hand(renderer: Renderer, strategy: Object, kept: list[str]) -> None:
    objects = by_name(renderer.charted({"agent": {"updateStrategy": strategy}}))
    policies = {key: item["metadata"].get("annotations", {}).get("helm.sh/resource-policy") for key, item in objects.items()}
    assert [key for key, policy in policies.items() if policy == "keep"] == [("ConfigMap", NAMESPACE, name) for name in kept]


def agent_mounts(objects: list[Object]) -> dict[str, str]:
    """Where the agent sees each directory of the node, by the node's path."""
    spec = pod_of(objects, "DaemonSet", "aliquot-agent")["spec"]
    mounts = {mount["name"]: mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}
    return {volume["hostPath"]["path"]: mounts[volume["name"]] for volume in spec["volumes"] if "hostPath" in volume}


@pytest.mark.parametrize(
    ("setting", "path", "gone"),
    [
        ("cdiDir", "/run/cdi", contract.CDI_DYNAMIC_DIR),
        ("cdiStaticDir", "/usr/local/etc/cdi", contract.CDI_STATIC_DIR),
        ("stateDir", "/srv/aliquot", contract.STATE_DIR),
        ("runtimeDir", "/run/gpu-sharing", contract.RUNTIME_DIR),
    ],
)
def test_a_directory_of_the_settings_is_mounted_from_the_node(renderer: Renderer, setting: str, path: str, gone: str) -> None:
    before, after = renderer.charted({}), renderer.charted({"agent": {"settings": {setting: path}}})
    assert agent_mounts(after) == {at: inside for at, inside in agent_mounts(before).items() if at != gone} | {path: path}


def test_kubelet_directory_is_mounted_from_the_node_but_for_its_fixed_part(renderer: Renderer) -> None:
    elsewhere = "/var/lib/k0s/kubelet"
    values = {"components": ["dra"], "agent": {"settings": {"kubeletDir": elsewhere}}}
    mounts = agent_mounts(renderer.charted(values))
    below = {path: inside for path, inside in mounts.items() if "kubelet" in path}
    names = ("pod-resources", "plugins_registry", f"plugins/{contract.DRA_DRIVER}")
    assert below == {f"{elsewhere}/{name}": f"{elsewhere}/{name}" for name in names} | {
        contract.KUBELET_DEVICE_PLUGIN_DIR: f"{elsewhere}/{contract.DEVICE_PLUGINS}"
    }


def test_settings_of_the_scheduler_reach_the_places_that_depend_on_them(renderer: Renderer) -> None:
    chosen = {
        "webhookAddress": "0.0.0.0:10250",
        "schedulerName": "gpu-scheduler",
        "webhookCertificateSecret": "gpu-webhook",
        "lingerSeconds": 20.5,
    }
    objects = renderer.charted({"scheduler": {"settings": chosen}})
    pod = pod_of(objects, "Deployment", "aliquot-scheduler")["spec"]
    assert {port["name"]: port["containerPort"] for port in pod["containers"][1]["ports"]} == {"webhook": 10250, "metrics": 9412}
    assert the(objects, "Service", "aliquot-webhook")["spec"]["ports"][0]["targetPort"] == "webhook"
    assert pod["terminationGracePeriodSeconds"] == 26
    files = the(objects, "ConfigMap", "aliquot-scheduler-config")["data"]
    assert yaml.safe_load(files["config.yaml"]).items() >= chosen.items()
    original = yaml.safe_load((DEPLOY / "daemonset/scheduler/kube-scheduler.yaml").read_text())
    original["profiles"][0]["schedulerName"] = "gpu-scheduler"
    assert yaml.safe_load(files["kube-scheduler.yaml"]) == original
    named = [
        (rule["resources"], rule["resourceNames"]) for rule in the(objects, "Role", "aliquot-scheduler")["rules"] if "resourceNames" in rule
    ]
    assert named == [(["leases"], ["aliquot-scheduler"]), (["secrets"], ["gpu-webhook"])]
    for kind in ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"):
        condition = the(objects, kind, "aliquot")["webhooks"][0]["matchConditions"][1]["expression"]
        assert "schedulerName.orValue('') == 'gpu-scheduler'" in condition
        assert "'aliquot-scheduler'" not in condition


def test_a_grace_period_is_never_shortened_by_a_setting(renderer: Renderer) -> None:
    values = {"scheduler": {"settings": {"lingerSeconds": 4}, "pod": {"terminationGracePeriodSeconds": 45}}}
    assert pod_of(renderer.charted(values), "Deployment", "aliquot-scheduler")["spec"]["terminationGracePeriodSeconds"] == 45


@pytest.mark.parametrize(
    ("values", "part", "variable"),
    [
        pytest.param(
            {"variant": "legacy-runtime", "agent": {"settings": {"deviceInjection": "auto"}}}, "agent", "DEVICE_INJECTION", id="variant"
        ),
        pytest.param(
            {"components": ["evict-offenders"], "agent": {"settings": {"driftPolicy": "report"}}}, "agent", "DRIFT_POLICY", id="policy"
        ),
        pytest.param(
            {"components": ["driver-limits"], "agent": {"settings": {"driverLimitsHook": "/x"}}}, "agent", "DRIVER_LIMITS_HOOK", id="hook"
        ),
        pytest.param(
            {"components": ["adopt-nvidia-gpu"], "scheduler": {"settings": {"adoptNvidiaGpu": True}}},
            "extender",
            "ADOPT_NVIDIA_GPU",
            id="scheduler",
        ),
    ],
)
def test_setting_overrides_component(renderer: Renderer, values: Object, part: str, variable: str) -> None:
    def variables(given: Object) -> set[str]:
        pods = [item["spec"]["template"]["spec"] for item in renderer.charted(given) if item["kind"] in ("DaemonSet", "Deployment")]
        [container] = [one for pod in pods for one in pod["containers"] if one["name"] == part]
        return {entry["name"] for entry in container["env"]}

    component: Object = {key: values[key] for key in ("variant", "components") if key in values}
    assert variables(component) - variables(values) == {f"ALIQUOT_{variable}"}


def test_aliquot_mps_uses_agent_values_and_its_own(renderer: Renderer) -> None:
    moved = {"runtimeDir": "/run/gpu-sharing", "sharesPerGpu": 4}
    values = {
        "components": ["mps"],
        "images": {"agent": {"repository": "registry/agent"}, "pullSecrets": [{"name": "mine"}]},
        "agent": {"settings": moved, "pod": {"nodeSelector": {"pool": "gpu"}}, "resources": {"limits": {"memory": "1Gi"}}},
        "mps": {"settings": {"logLevel": "debug"}, "resources": {"limits": {"memory": "8Gi"}}},
    }
    objects = renderer.charted(values)
    spec = pod_of(objects, "DaemonSet", "aliquot-mps")["spec"]
    [mps] = spec["containers"]
    assert (spec["nodeSelector"], spec["imagePullSecrets"]) == ({"pool": "gpu"}, [{"name": "mine"}])
    assert mps["image"].startswith("registry/agent:")
    assert mps["resources"]["limits"] == {"memory": "8Gi"}
    env = {entry["name"]: entry["value"] for entry in mps["env"] if entry["name"].startswith("ALIQUOT_")}
    assert env == {"ALIQUOT_LOG_LEVEL": "debug", "ALIQUOT_RUNTIME_DIR": "/run/gpu-sharing"}
    settings = agent.mps.settings.Settings.load([], env)
    mounts = {mount["name"]: mount["mountPath"] for mount in mps["volumeMounts"]}
    on_node = {volume["name"]: volume["hostPath"]["path"] for volume in spec["volumes"]}
    assert on_node["runtime"] == mounts["runtime"] == settings.runtime_dir == agent_mounts(objects)["/run/gpu-sharing"]
    assert (on_node["mps-shared-memory"], mounts["mps-shared-memory"]) == (f"{settings.runtime_dir}/mps-shm", "/dev/shm")


def test_other_namespace_is_used_everywhere(renderer: Renderer) -> None:
    values = Installation("simulated", monitoring=True).values
    here, elsewhere = renderer.charted(values), renderer.charted(values, "--namespace=gpu-sharing")
    moved = json.loads(json.dumps(by_name(here)["Deployment", NAMESPACE, "aliquot-scheduler"]).replace(NAMESPACE, "gpu-sharing"))
    assert NAMESPACE not in json.dumps(elsewhere)
    assert the(elsewhere, "Deployment", "aliquot-scheduler") == moved
    settings = yaml.safe_load(the(elsewhere, "ConfigMap", "aliquot-scheduler-config")["data"]["config.yaml"])
    assert settings["leaseNamespace"] == "gpu-sharing", "where the extender keeps the webhook's certificate"


def test_images_come_from_configured_registry(renderer: Renderer) -> None:
    images = {
        "agent": {"repository": "registry.example/agent", "tag": "9.9.9"},
        "scheduler": {"repository": "registry.example/scheduler"},
        "kubeScheduler": {"tag": "v1.35.1"},
        "pullPolicy": "Always",
        "pullSecrets": [{"name": "token"}],
    }
    values = {"variant": "simulated", "images": images}
    objects = renderer.charted(values)
    pods = [pod_of(objects, "DaemonSet", "aliquot-agent")["spec"], pod_of(objects, "Deployment", "aliquot-scheduler")["spec"]]
    pods += [hook["spec"] for hook in renderer.hooks(values)]
    containers = [container for pod in pods for container in pod.get("initContainers", []) + pod["containers"]]
    assert [container["image"] for container in containers] == [
        "registry.example/agent:9.9.9",
        "registry.example/agent:9.9.9",
        "registry.k8s.io/kube-scheduler:v1.35.1",
        "registry.example/scheduler:0.1.0",
        "registry.example/agent:9.9.9",
    ]
    assert {container["imagePullPolicy"] for container in containers} == {"Always"}
    assert all(pod["imagePullSecrets"] == [{"name": "token"}] for pod in pods)


def test_one_registry_value_prefixes_every_image(renderer: Renderer) -> None:
    values = {"images": {"registry": "registry.example/gpu", "scheduler": {"repository": "other.example/scheduler"}}}
    objects = renderer.charted(values)
    pods = [pod_of(objects, "DaemonSet", "aliquot-agent")["spec"], pod_of(objects, "Deployment", "aliquot-scheduler")["spec"]]
    assert [container["image"].rpartition(":")[0] for pod in pods for container in pod["containers"]] == [
        "registry.example/gpu/aliquot-agent",
        "registry.example/gpu/kube-scheduler",
        "other.example/scheduler",
    ]


def test_fields_of_the_pods_and_resources_are_replaced(renderer: Renderer) -> None:
    pod = {"nodeSelector": {"pool": "gpu"}, "tolerations": [], "hostNetwork": True}
    changed = {"agent": {"pod": pod, "resources": {"limits": {"memory": "512Mi"}}, "annotations": {"team": "ml"}}}
    template = pod_of(renderer.charted(changed), "DaemonSet", "aliquot-agent")
    assert {key: template["spec"][key] for key in pod} == pod
    assert template["metadata"]["annotations"] == {"team": "ml"}
    assert template["spec"]["containers"][0]["resources"] == {"requests": {"cpu": "20m", "memory": "64Mi"}, "limits": {"memory": "512Mi"}}


def test_single_replica_has_no_disruption_budget_that_blocks_drain(renderer: Renderer) -> None:
    objects = renderer.charted({"scheduler": {"replicas": 1}})
    assert the(objects, "Deployment", "aliquot-scheduler")["spec"]["replicas"] == 1
    assert "PodDisruptionBudget" not in {item["kind"] for item in objects}


@pytest.mark.parametrize(
    ("on_the_node", "turnover"),
    [(False, {"maxUnavailable": 0, "maxSurge": 1}), (True, {"maxUnavailable": 1, "maxSurge": 0})],
)
def test_scheduler_with_host_ports_frees_them_before_successor_starts(renderer: Renderer, on_the_node: bool, turnover: Object) -> None:
    objects = renderer.charted({"scheduler": {"pod": {"hostNetwork": on_the_node}}})
    strategy = the(objects, "Deployment", "aliquot-scheduler")["spec"]["strategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": turnover}


@pytest.mark.parametrize(
    ("on_the_node", "turnover"),
    [(False, {"maxUnavailable": 0, "maxSurge": "5%"}), (True, {"maxUnavailable": "5%", "maxSurge": 0})],
)
def test_driver_of_claims_updates_without_a_gap_where_two_agents_have_room(renderer: Renderer, on_the_node: bool, turnover: Object) -> None:
    objects = renderer.charted({"components": ["dra"], "agent": {"pod": {"hostNetwork": on_the_node}}})
    strategy = the(objects, "DaemonSet", "aliquot-agent")["spec"]["updateStrategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": turnover}


def patch(path: str, op: str = "add", name: str = "aliquot-agent", kind: str = "DaemonSet") -> Object:
    return {"patches": [{"target": {"kind": kind, "name": name}, "patch": f"- {{op: {op}, path: {path}, value: 1}}"}]}


WATCHED = {"monitoring": dict.fromkeys(("serviceMonitors", "alerts", "dashboards"), True)}


def monitoring_objects(objects: list[Object]) -> set[tuple[str, str]]:
    kinds = ("ServiceMonitor", "PrometheusRule", "Service")
    return {(item["kind"], item["metadata"]["name"]) for item in objects if item["kind"] in kinds}


def test_labels_that_an_operator_selects_by_are_on_what_it_selects(renderer: Renderer) -> None:
    values = {"monitoring": WATCHED["monitoring"] | {"labels": {"release": "kube-prometheus-stack"}}}
    objects = renderer.charted(values)
    labels = [item["metadata"]["labels"] for item in objects if item["kind"] in ("ServiceMonitor", "PrometheusRule")]
    assert len(labels) == 4
    assert all(one == {"app.kubernetes.io/part-of": "aliquot", "release": "kube-prometheus-stack"} for one in labels)
    assert "release" not in next(item for item in objects if item["metadata"]["name"] == "aliquot-dashboards")["metadata"]["labels"]


def test_objects_of_monitoring_are_patched_like_the_others(renderer: Renderer) -> None:
    values = WATCHED | patch("/spec/sampleLimit", kind="ServiceMonitor")
    assert the(renderer.charted(values), "ServiceMonitor", "aliquot-agent")["spec"]["sampleLimit"] == 1


def test_without_a_scheduler_nothing_watches_for_one(renderer: Renderer) -> None:
    objects = renderer.charted(WATCHED | {"variant": "local-placement"})
    agents = {("ServiceMonitor", "aliquot-agent"), ("Service", "aliquot-agent-metrics"), ("PrometheusRule", "aliquot")}
    assert monitoring_objects(objects) == agents
    assert "aliquot-scheduler" not in json.dumps([item for item in objects if item["kind"] == "PrometheusRule"])
    assert monitoring_objects(renderer.charted(WATCHED)) > agents


def test_patches_change_fields_without_value(renderer: Renderer) -> None:
    objects = renderer.charted(patch("/spec/minReadySeconds"))
    assert the(objects, "DaemonSet", "aliquot-agent")["spec"]["minReadySeconds"] == 1


@pytest.mark.parametrize(
    ("values", "said"),
    [
        pytest.param(patch("/spec/x", name="other"), "there is no DaemonSet other", id="no such object"),
        pytest.param(patch("/spec/missing/x"), "there is no missing", id="no such place"),
        pytest.param(patch("/spec/missing", op="replace"), "nothing to replace", id="nothing to replace"),
        pytest.param(patch("/spec/template", op="move"), "found move", id="an operation of another kind"),
        pytest.param(patch("/spec/template/spec/containers/0", op="replace"), "add at its beginning or end", id="a place in a list"),
        pytest.param({"variant": "openshift"}, "variant", id="a variant that there is not"),
        pytest.param({"components": ["gpu"]}, "components", id="a component that there is not"),
        pytest.param({"agent": {"setings": {}}}, "setings", id="a misspelt value"),
        pytest.param({"agent": {"settings": {"sharesPerGPU": 4}}}, "sharesPerGPU", id="a misspelt setting"),
        pytest.param({"agent": {"settings": {"sharesPerGpu": 0}}}, "sharesPerGpu", id="a setting out of range"),
        pytest.param({"scheduler": {"settings": {"policy": "best"}}}, "policy", id="a setting's unknown word"),
        pytest.param({"scheduler": {"replicas": 0}}, "replicas", id="no replica"),
        pytest.param({"agent": {"updateStrategy": {"rollingUpdate": {"maxSurge": 1}}}}, "maxSurge", id="two agents of one node"),
        pytest.param({"agent": {"updateStrategy": {"rollingUpdate": {"maxUnavailable": 0}}}}, "maxUnavailable", id="no agent at a time"),
        pytest.param({"agent": {"settings": {"auditPolicy": "evict"}}}, "component evict-offenders", id="eviction without the right"),
        pytest.param(
            {"agent": {"settings": {"driftPolicy": "evict"}}}, "component evict-offenders", id="eviction of drift without the right"
        ),
        pytest.param({"agent": {"settings": {"auditPolicy": "kill"}}}, "component audit-kill", id="killing without the capability"),
        pytest.param({"agent": {"settings": {"migStrategy": "dynamic"}}}, "component mig", id="making instances without the capability"),
        pytest.param({"mps": {"settings": {"mpsControl": "/x"}}}, "component mps", id="settings of a program that there is not"),
        pytest.param({"mps": {"settings": {"runtimeDir": "/x"}}}, "runtimeDir", id="a directory that the agent does not share"),
        pytest.param({"agent": {"settings": {"driverLimitsHook": "/usr/bin/nvidia-cdi-hook"}}}, "component driver-limits", id="no cgroups"),
        pytest.param({"scheduler": {"settings": {"adoptNvidiaGpu": True}}}, "component adopt-nvidia-gpu", id="a webhook that is sent none"),
        pytest.param({"agent": {"settings": {"publishGpuNode": False}}}, "variant local-placement", id="a scheduler without GPUs"),
        pytest.param({"agent": {"settings": {"metricsAddress": "0.0.0.0:9500"}}}, "metricsAddress", id="a port that others look for"),
        pytest.param({"scheduler": {"settings": {"leaseNamespace": "x"}}}, "leaseNamespace", id="a namespace without the right"),
        pytest.param({"scheduler": {"settings": {"webhookAddress": "127.0.0.1:9411"}}}, "webhookAddress", id="a webhook for itself"),
        pytest.param({"scheduler": {"settings": {"webhookAddress": ""}}}, "webhookAddress", id="no webhook where all GPU pods need one"),
        pytest.param(
            {"scheduler": {"settings": {"schedulerName": "default-scheduler"}}}, "schedulerName", id="the cluster's own scheduler"
        ),
    ],
)
def test_unknown_value_is_refused_by_name(renderer: Renderer, values: Object, said: str) -> None:
    with pytest.raises(RenderError, match=re.escape(said)):
        renderer.charted(values)


@pytest.mark.parametrize("variant", ["default", "local-placement"])
def test_helm_test_requests_share_with_agent_image(renderer: Renderer, variant: str) -> None:
    [pod] = renderer.hooks({"variant": variant})
    [container] = pod["spec"]["containers"]
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert container["image"] == pod_of(renderer.charted({}), "DaemonSet", "aliquot-agent")["spec"]["containers"][0]["image"]
    whole_without_a_webhook_too = {contract.RESOURCE_VGPU: 1, contract.RESOURCE_VGPU_MEMORY: 256}
    assert container["resources"]["limits"] == whole_without_a_webhook_too


@pytest.mark.parametrize(
    ("variant", "first_pod"),
    [
        pytest.param("default", {contract.RESOURCE_VGPU_MEMORY: "4Gi", contract.RESOURCE_VGPU_CORES: 30}, id="the webhook completes it"),
        pytest.param(
            "local-placement",
            {contract.RESOURCE_VGPU: 1, contract.RESOURCE_VGPU_MEMORY: 4096, contract.RESOURCE_VGPU_CORES: 30},
            id="nobody does",
        ),
    ],
)
def test_notes_show_pod_that_variant_accepts(renderer: Renderer, variant: str, first_pod: Object) -> None:
    said = renderer.run_helm("install", "aliquot", str(CHART), "--dry-run=client", f"--namespace={NAMESPACE}", f"--set=variant={variant}")
    [limits] = re.findall(r"limits: (\{.*\})", said.partition("NOTES:")[2])
    assert yaml.safe_load(limits) == first_pod


# --- files --------------------------------------------------------------------------------------------------------


def schema_maker() -> Any:
    spec = importlib.util.spec_from_file_location("make_schema", DEPLOY / "helm/make_schema.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_schema_equals_generated_one() -> None:
    maker = schema_maker()
    assert maker.TARGET.read_text() == maker.to_json(maker.schema()), "run deploy/helm/make_schema.py"


@pytest.mark.parametrize(
    ("part", "table"),
    [("agent", agent.settings.TABLE), ("mps", agent.mps.settings.TABLE), ("scheduler", scheduler_plugin.settings.TABLE)],
)
def test_every_setting_is_chart_value_or_listed_exception(part: str, table: Table) -> None:
    maker = schema_maker()
    allowed = maker.schema()["properties"][part]["properties"]["settings"]["properties"].keys()
    left_out = {setting.key for setting in table.settings if setting.name in maker.NOT_IN_THE_CHART[part]}
    assert len(left_out) == len(maker.NOT_IN_THE_CHART[part])
    assert {setting.key for setting in table.settings} == (allowed - {"classes", "weights"}) | left_out
    readme = (DEPLOY / "helm/README.md").read_text()
    assert not [key for key in left_out if f"`{key}`" not in readme]


def test_schema_allows_existing_values_only() -> None:
    def compare(values: Any, schema: Object, path: str) -> None:
        if not isinstance(values, dict) or not schema.get("properties"):
            return
        assert schema["additionalProperties"] is False, path
        assert values.keys() <= schema["properties"].keys(), path
        for key, value in values.items():
            compare(value, schema["properties"][key], f"{path}.{key}")

    values, schema = yaml.safe_load((CHART / "values.yaml").read_text()), schema_maker().schema()
    assert schema["properties"].keys() - values.keys() == {"global"}
    compare(values, schema, "values")


def test_the_chart_has_the_products_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (chart["version"], chart["appVersion"]) == (version, version)


def test_the_chart_reads_the_manifests_themselves() -> None:
    for name in ("daemonset", "monitoring"):
        assert (CHART / name).resolve() == DEPLOY / name
