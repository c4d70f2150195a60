# SPDX-License-Identifier: Apache-2.0
"""Write the modules of ``aliquot/kubelet_api`` from ``proto/kubelet/*.proto``: ``python proto/generate.py``.

Messages and services come from protoc. The stubs that tell a type checker about the services are ours, because protoc writes
none: they describe the services as asyncio code, which is how every caller here uses them.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet, MethodDescriptorProto, ServiceDescriptorProto
from grpc_tools import protoc

SOURCES = Path(__file__).resolve().parent / "kubelet"
ROOT = SOURCES.parent.parent
PACKAGE = "aliquot/kubelet_api"
"""Where the modules go. protoc also takes it as the directory of the sources, so files, modules and pool entries share one name."""

MESSAGE_STUB_HEADER = '# mypy: disable-error-code="type-arg"\n'
"""protoc leaves the arguments of Mapping out, which mypy --strict refuses."""


def generate(out: Path) -> None:
    """Write the modules of every ``.proto`` file into ``aliquot/kubelet_api`` below ``out``."""
    sources = sorted(SOURCES.glob("*.proto"))
    with TemporaryDirectory() as scratch:
        descriptors = Path(scratch) / "descriptors"
        arguments = [
            "protoc",
            f"-I{PACKAGE}={SOURCES}",
            f"--python_out={out}",
            f"--pyi_out={out}",
            f"--grpc_python_out={out}",
            f"--descriptor_set_out={descriptors}",
            *(f"{PACKAGE}/{source.name}" for source in sources),
        ]
        if protoc.main(arguments) != 0:
            raise SystemExit("protoc refused the .proto files; its message is above")
        files = FileDescriptorSet.FromString(descriptors.read_bytes())
    for file in files.file:
        base = (out / file.name).with_suffix("")
        messages = base.with_name(base.name + "_pb2.pyi")
        messages.write_text(MESSAGE_STUB_HEADER + messages.read_text(encoding="utf-8"), encoding="utf-8")
        base.with_name(base.name + "_pb2_grpc.pyi").write_text(_service_stub(file), encoding="utf-8")


def _service_stub(file: FileDescriptorProto) -> str:
    module = Path(file.name).stem + "_pb2"
    package = ".".join(Path(file.name).parent.parts)
    lines = [
        "# ruff: noqa",
        "# fmt: off",
        f'"""Types of the services in {Path(file.name).name}, generated beside them. Calls and handlers are asyncio\'s."""',
        "",
        "from collections.abc import AsyncIterator, Awaitable",
        "from typing import Any",
        "",
        "import grpc.aio",
        "",
        f"from {package} import {module}",
    ]
    for service in file.service:
        lines += _client(service, module)
        lines += _servicer(service, module)
    return "\n".join(lines) + "\n"


def _client(service: ServiceDescriptorProto, module: str) -> Iterator[str]:
    yield from ("", f"class {service.name}Stub:")
    for method in service.method:
        kind = "UnaryStreamMultiCallable" if method.server_streaming else "UnaryUnaryMultiCallable"
        yield f"    {method.name}: grpc.aio.{kind}[{_request(method, module)}, {_response(method, module)}]"
    yield "    def __init__(self, channel: grpc.aio.Channel) -> None: ..."


def _servicer(service: ServiceDescriptorProto, module: str) -> Iterator[str]:
    yield from ("", f"class {service.name}Servicer:")
    for method in service.method:
        answer = "AsyncIterator" if method.server_streaming else "Awaitable"
        yield f"    def {method.name}("
        yield f"        self, request: {_request(method, module)}, context: grpc.aio.ServicerContext[Any, Any]"
        yield f"    ) -> {answer}[{_response(method, module)}]: ..."
    yield ""
    yield f"def add_{service.name}Servicer_to_server(servicer: {service.name}Servicer, server: grpc.aio.Server) -> None: ..."


def _request(method: MethodDescriptorProto, module: str) -> str:
    if method.client_streaming:
        raise SystemExit(f"{method.name} streams its requests: teach generate.py the type of such a call")
    return f"{module}.{_message(method.input_type)}"


def _response(method: MethodDescriptorProto, module: str) -> str:
    return f"{module}.{_message(method.output_type)}"


def _message(full_name: str) -> str:
    return full_name.rpartition(".")[2]


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
