# SPDX-License-Identifier: Apache-2.0
"""Write docs/reference/contract.md: every name that users and operators see, read from the code.

tests/unit/docs/test_contract.py keeps it current.

Run it again after adding a resource, annotation, setting, metric, reason or event: ``.venv/bin/python docs/reference/make_contract.py``.
"""

import ast
import inspect
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import TypeVar

from agent import settings as agent_settings
from agent.core.audit import FindingKind
from agent.core.drift import CURES, DriftKind
from agent.core.health import HealthState
from agent.core.inventory import DeviceInventory
from agent.core.metrics import Snapshot, families
from agent.core.refusal import Reason
from agent.mps import settings as mps_settings
from agent.services.telemetry import Telemetry as AgentTelemetry
from aliquot import contract
from aliquot.contract import features
from aliquot.placement.fit import Reject
from aliquot.process.settings import Setting, Table
from aliquot_cli import exit_codes
from scheduler_plugin import settings as scheduler_settings
from scheduler_plugin.core.cluster.decisions import Decisions
from scheduler_plugin.core.cluster.reasons import NodeReason
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.services.cluster_metrics import QUEUES, ClusterCollector
from scheduler_plugin.services.telemetry import Telemetry as SchedulerTelemetry
from scheduler_plugin.webhook.words import WORDS

TARGET = Path(__file__).parent / "contract.md"
MIGRATION = Path(__file__).parents[1] / "use/migration.md"
WORDS_BEGIN, WORDS_END = "<!-- words: written by docs/reference/make_contract.py -->", "<!-- end of words -->"
ROOT = Path(__file__).parents[2]
_E = TypeVar("_E", bound=Enum)

HEAD = """# The contract

Every name that users and operators meet, generated from the code by `docs/reference/make_contract.py`. Do not edit.
Renaming one is a breaking change and stands in the changelog.
"""


def main() -> None:
    """Write the page, and the table of words in the page on migration."""
    TARGET.write_text(page())
    MIGRATION.write_text(with_words(MIGRATION.read_text()))


def with_words(text: str) -> str:
    """Return the text of the page on migration with the current table between its two marks."""
    before, _, rest = text.partition(WORDS_BEGIN)
    _, _, after = rest.partition(WORDS_END)
    return f"{before}{WORDS_BEGIN}\n{_words()}{WORDS_END}{after}"


def _words() -> str:
    """Return one row for all words of a system, kind and fate with the same text."""
    rows: dict[tuple[str, str, str, str], list[str]] = {}
    for word in WORDS:
        rows.setdefault((word.system, word.kind, word.fate, word.text), []).append(word.name)
    lines = [
        f"| {system} | {kind} | {', '.join(f'`{name}`' for name in names)} | {fate}: {_cell(text)} |"
        for (system, kind, fate, text), names in rows.items()
    ]
    return "\n".join(["| system | kind | words | here |", "|---|---|---|---|", *lines, ""])


def page() -> str:
    """Return the page's text."""
    names = dict(_constants())
    parts = [
        HEAD,
        _features(),
        _section("Resources", "In a container's `limits`.", _named(names, "RESOURCE_", skip=("RESOURCE_DOMAIN",))),
        _section("Annotations", "On pods, unless said otherwise.", _named(names, "ANNOTATION_", skip=("ANNOTATION_PREFIX",))),
        _section("Labels", "On namespaces, for administrators; one of them also on pods.", _named(names, "LABEL_")),
        _section("Node conditions and events", "In `kubectl describe`.", _named(names, "NODE_CONDITION_", "EVENT_REASON_")),
        _section(
            "Why a node cannot take a pod",
            "The sentences in kube-scheduler's events, and the label `reason` of the scheduler's metrics.",
            [(reason.label, reason.sentence) for reason in NodeReason if reason is not NodeReason.FITS],
        ),
        _section(
            "Why a container was refused at its start",
            "The label `reason` of `aliquot_refusals_total`; the event `AliquotRefused` has the sentence. First what the agent itself "
            "finds, then why the GPUs of the node do not fit.",
            [*_members(Reason), *_members(Reject)],
        ),
        _section(
            "Health of a GPU", "The label `state` of `aliquot_device_health_state`, and `state` in `gpunodes`.", _members(HealthState)
        ),
        _section(
            "Drift",
            "The label `kind` of `aliquot_drift`, with the cure.",
            [(f"{kind}", f"{text} Cure: {CURES[kind]}.") for kind, text in _documented(DriftKind)],
        ),
        _section("Findings of the audit", "The label `kind` of `aliquot_audit_findings`.", _members(FindingKind)),
        _settings("Settings of the agent", agent_settings.TABLE, "ALIQUOT_CONFIG"),
        _settings("Settings of aliquot-mps", mps_settings.TABLE, "ALIQUOT_MPS_CONFIG"),
        _settings("Settings of the scheduler", scheduler_settings.TABLE, "ALIQUOT_SCHEDULER_CONFIG"),
        _advanced(),
        _section(
            "Exit codes",
            "Of `aliquot`; agent, `aliquot-mps` and scheduler know 0, 1 and 2.",
            [(str(code), text) for code, text in exit_codes.TABLE.items()],
        ),
        _section(
            "Metrics",
            "Names and help texts as `/metrics` has them; counters end in `_total` there. The series of a container, "
            "`aliquot_container_*`, are there from its grant until it has ended for good, such as an init container that completed, and "
            "stay while it restarts. What it was granted counts in `aliquot_device_*` until its pod ends or kubelet gives its IDs to "
            "another container of it.",
            sorted(_metrics()),
        ),
    ]
    return "\n".join(parts)


def _section(title: str, introduction: str, rows: Iterable[tuple[str, str]]) -> str:
    lines = [f"## {title}", "", introduction, "", "| name | meaning |", "|---|---|"]
    lines += [f"| `{name}` | {_cell(text)} |" for name, text in rows]
    return "\n".join(lines) + "\n"


def _features() -> str:
    """Return the table of features with their maturity."""
    lines = ["## Features", "", *(f"- {maturity}: {text}" for maturity, text in _documented(features.Maturity)), ""]
    lines += [
        (
            f"The agent's setting `{features.SETTING}` opens gates: `{features.Gate.PAUSING}=true,{features.Gate.MPS_ISOLATION}=true`, or "
            f"`{features.ALL_ALPHA}=true` for all. A gate by its name beats `{features.ALL_ALPHA}`."
        ),
        "",
        "| feature | maturity | since | gate |",
        "|---|---|---|---|",
    ]
    for feature in features.FEATURES:
        gate = f"`{feature.gate}`" if feature.gate else ""
        lines.append(f"| {feature.name} | {feature.maturity} | {feature.since} | {gate} |")
    return "\n".join(lines) + "\n"


def _settings(title: str, table: Table, config_env: str) -> str:
    introduction = f"A flag beats the environment, which beats the file (`--config` or `{config_env}`), which beats the default."
    lines = [f"## {title}", "", introduction, "", "| in the file | environment | flag | meaning | default |", "|---|---|---|---|---|"]
    lines += [_setting(setting) for setting in table.settings if not setting.row.advanced]
    return "\n".join(lines) + "\n"


def _advanced() -> str:
    """Return the table of the settings that a cluster has no reason to change."""
    lines = [
        "## Advanced settings",
        "",
        "The defaults are right on nodes and clusters set up by the manifests. Change one only for a reason that you measured.",
        "",
        "| program | in the file | environment | flag | meaning | default |",
        "|---|---|---|---|---|---|",
    ]
    tables = {"agent": agent_settings.TABLE, "aliquot-mps": mps_settings.TABLE, "scheduler": scheduler_settings.TABLE}
    for program, table in tables.items():
        lines += [f"| {program} {_setting(setting)}" for setting in table.settings if setting.row.advanced]
    return "\n".join(lines) + "\n"


def _setting(setting: Setting) -> str:
    default = str(setting.default).lower() if isinstance(setting.default, bool) else str(setting.default)
    allowed = "" if setting.type is str else f" ({setting.wanted})"
    shown = f"`{default}`" if default else ""
    return f"| `{setting.key}` | `{setting.env}` | `{setting.flag}` | {_cell(setting.row.meaning + allowed)} | {shown} |"


def _constants() -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield each constant of the contract with its value and the docstring under it."""
    body = ast.parse(Path(contract.__file__).read_text()).body
    for place, statement in enumerate(body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            after = body[place + 1] if place + 1 < len(body) else None
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            name = statement.target.id
            yield name, (str(getattr(contract, name)), str(text))


def _named(names: dict[str, tuple[str, str]], *prefixes: str, skip: Sequence[str] = ()) -> list[tuple[str, str]]:
    return [entry for name, entry in names.items() if name.startswith(prefixes) and name not in skip]


def _members(kind: type[Enum]) -> list[tuple[str, str]]:
    return [(str(member.value), text) for member, text in _documented(kind)]


def _documented(kind: type[_E]) -> Iterator[tuple[_E, str]]:
    """Yield the members of an enum with the docstrings under them."""
    (body,) = ast.parse(inspect.getsource(kind)).body
    texts: dict[str, str] = {}
    name = ""
    for statement in body.body if isinstance(body, ast.ClassDef) else []:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            texts.setdefault(name, str(statement.value.value))
    for member in kind:
        yield member, texts.get(member.name, "")


def _metrics() -> Iterator[tuple[str, str]]:
    """Yield every metric of agent and scheduler with its help text: what the registries have, and what is made at scrape time."""
    scheduler = SchedulerTelemetry()
    scheduler.watch_state(ClusterState(), lambda: True)
    scheduler.watch_certificate(lambda: 0.0)
    queues = dict.fromkeys(QUEUES, lambda: 0)
    scheduler.registry.register(ClusterCollector(ClusterState(), Decisions(), queues, dict))
    for registry in (AgentTelemetry().registry, scheduler.registry):
        for metric in registry.collect():
            if metric.name.startswith(contract.METRIC_PREFIX):
                yield metric.name, metric.documentation
    for made in families(Snapshot(DeviceInventory())):
        yield made.name, made.help
    for source in sorted((ROOT / "agent/services").glob("*.py")):
        yield from _families_in(ast.parse(source.read_text()))


def _families_in(module: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the families that a module of services makes by ``family(name, text, …)``."""
    for function in (node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)):
        texts = {
            statement.targets[0].id: statement.value.value
            for statement in ast.walk(function)
            if isinstance(statement, ast.Assign)
            and isinstance(statement.targets[0], ast.Name)
            and isinstance(statement.value, ast.Constant)
        }
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Name) and call.func.id == "family":
                name, text = (arg.value if isinstance(arg, ast.Constant) else texts[ast.unparse(arg)] for arg in call.args[:2])
                yield contract.METRIC_PREFIX + str(name), str(text)


def _cell(text: str) -> str:
    return " ".join(text.replace("``", "`").replace("|", "\\|").split())


if __name__ == "__main__":
    main()
