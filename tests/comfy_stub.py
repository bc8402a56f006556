"""A stub of ComfyUI's V3 API, for tests without ComfyUI, which is an application and not a package to install.

integrations/test_comfyui_server.py draws with a real one.

It has the classes that integrations/comfyui uses, and refuses arguments that ComfyUI does not have. Nodes run in
inference mode and progress goes through a hook that raises when the user has cancelled, as in ComfyUI.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

COMMON = {"display_name", "optional", "tooltip", "lazy"}
NUMBER = {"default", "min", "max", "step", "display_mode"}
INPUTS = {  # arguments of `io.X.Input` besides the id
    "STRING": COMMON | {"default", "multiline", "placeholder", "dynamic_prompts"},
    "INT": COMMON | NUMBER | {"control_after_generate"},
    "FLOAT": COMMON | NUMBER | {"round"},
    "COMBO": COMMON | {"default", "options", "control_after_generate"},
    "IMAGE": COMMON,
}


@dataclass(frozen=True)
class Socket:
    """An input or output of a node."""

    io_type: str
    id: str | None
    options: Mapping[str, Any]


def socket_type(io_type: str) -> SimpleNamespace:
    """`io.X` with its `Input` and `Output`."""

    def make_input(id: str, **options: Any) -> Socket:
        assert options.keys() <= INPUTS.get(io_type, COMMON), f"{io_type}.Input has no {options.keys()}"
        return Socket(io_type, id, options)

    def make_output(id: str | None = None, **options: Any) -> Socket:
        assert options.keys() <= {"display_name", "tooltip", "is_output_list"}
        return Socket(io_type, id, options)

    return SimpleNamespace(Input=make_input, Output=make_output)


@dataclass
class Schema:
    node_id: str
    display_name: str = ""
    category: str = "sd"
    inputs: list[Socket] = field(default_factory=list)
    outputs: list[Socket] = field(default_factory=list)
    description: str = ""


class NodeOutput:
    def __init__(self, *args: Any) -> None:
        self.result = args


class InterruptProcessingException(Exception):  # noqa: N818 (ComfyUI calls it so)
    """What ComfyUI's progress hook raises after Cancel."""


class ComfyStub:
    """ComfyUI with one folder of custom nodes: runs workflows and records progress."""

    def __init__(self) -> None:
        self.progress: list[tuple[int, int, Any]] = []
        self.cancel_after: int | None = None  # progress reports
        self.nodes: dict[str, Any] = {}
        self.module: Any = None  # that has the nodes

    def install(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> ComfyStub:
        """Put the stub's modules in place and load the nodes of a folder as ComfyUI does."""
        io = SimpleNamespace(Schema=Schema, NodeOutput=NodeOutput, ComfyNode=object, Custom=socket_type)
        for name in ("String", "Int", "Float", "Combo", "Image"):
            setattr(io, name, socket_type(name.upper()))
        for name, content in {
            "comfy": {},
            "comfy.utils": {"ProgressBar": self._progress_bar},
            "comfy_api": {},
            "comfy_api.latest": {"io": io, "ComfyExtension": object},
        }.items():
            module = ModuleType(name)
            module.__dict__.update(content)
            monkeypatch.setitem(sys.modules, name, module)
        sys.modules["comfy"].utils = sys.modules["comfy.utils"]  # type: ignore[attr-defined]
        spec = importlib.util.spec_from_file_location(
            "custom_nodes_of_the_stub", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None
        package = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, package)
        spec.loader.exec_module(package)
        self.module = sys.modules.pop(f"{spec.name}.nodes")  # the next stub loads it anew

        async def node_list() -> list[Any]:
            return await (await package.comfy_entrypoint()).get_node_list()

        self.nodes = {node.define_schema().node_id: node for node in asyncio.run(node_list())}
        return self

    def _progress_bar(self, total: int) -> Any:
        def update_absolute(value: int, total: int | None = None, preview: Any = None) -> None:
            if self.cancel_after is not None and len(self.progress) >= self.cancel_after:
                raise InterruptProcessingException
            self.progress.append((value, total or 0, preview))

        return SimpleNamespace(update_absolute=update_absolute)

    def execute(self, node_id: str, **inputs: Any) -> tuple[Any, ...]:
        """Run a node as a workflow of the API format does: only optional inputs may be left out, even with defaults."""
        node = self.nodes[node_id]
        schema = node.define_schema()
        required = {socket.id for socket in schema.inputs if not socket.options.get("optional")}
        assert required <= inputs.keys() <= {socket.id for socket in schema.inputs}
        inspect.signature(node.execute).bind(**inputs)
        with torch.inference_mode():
            result = node.execute(**inputs).result
        assert len(result) == len(schema.outputs)
        return result

    def run(self, workflow: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
        """Outputs of this package's nodes in a workflow of the API format, whose nodes are in order."""
        outputs: dict[str, tuple[Any, ...]] = {}
        for key, node in workflow.items():
            if node["class_type"] in self.nodes:
                inputs = {
                    name: outputs[value[0]][value[1]] if isinstance(value, list) else value
                    for name, value in node["inputs"].items()
                }
                outputs[key] = self.execute(node["class_type"], **inputs)
        return outputs
