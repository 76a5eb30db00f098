"""Fused kernels of NVIDIA's apex, and detection of the installed package of that name.

NVIDIA's apex (github.com/NVIDIA/apex) is not on PyPI; `pip install apex` installs an unrelated toolkit for web pages.
The two are distinguished by their files and metadata, and only NVIDIA's is ever imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, distributions
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from megatron3d.errors import UserError
from megatron3d.ops.norm import NormKernels

_ADAM_KEY, _NORM_KEY = "optimizer.adam_implementation", "train.norm_implementation"
ADAM_EXTENSION, NORM_EXTENSION = "amp_C", "fused_layer_norm_cuda"
INSTALL = (
    "git clone https://github.com/NVIDIA/apex && pip install -v --no-build-isolation "
    '--config-settings "--build-option=--cpp_ext" --config-settings "--build-option=--cuda_ext" ./apex'
)
_STATES: Mapping[str, str] = {
    "none": "not installed",
    "web": "the installed package of that name is not NVIDIA's but PyPI's toolkit for web pages ({detail})",
    "other": "the installed package of that name is not NVIDIA's ({detail}): it has no apex.optimizers.FusedAdam",
    "source": "NVIDIA's is installed ({detail}), but without its compiled extensions: there is no {extension}",
    "ready": "NVIDIA's with compiled extensions ({detail})",
}
_WEB_REQUIREMENTS = ("pyramid", "velruse")


@dataclass(frozen=True)
class Apex:
    """Installed apex package: `state` is none, web, other, source or ready; `detail` is its version and folder."""

    state: str
    detail: str = ""

    def __str__(self) -> str:
        return _STATES[self.state].format(detail=self.detail, extension=ADAM_EXTENSION)


def find_apex() -> Apex:
    """Return the apex package that an import would find, without importing it."""
    found, metadata = find_spec("apex"), next(iter(distributions(name="apex")), None)
    if found is None:
        return Apex("none")
    if metadata is not None and _is_web_toolkit(metadata):
        return Apex("web", _describe(found, metadata))
    if not any((folder / "optimizers" / "fused_adam.py").is_file() for folder in _folders(found)):
        return Apex("other", _describe(found, metadata))
    return Apex("source" if find_spec(ADAM_EXTENSION) is None else "ready", _describe(found, metadata))


def describe_apex() -> str:
    """Return the line of the start-up report about apex."""
    return f"apex: {find_apex()}"


def adam_kernel(devices: Iterable[torch.device]) -> Callable[..., None]:
    """Return the kernel `amp_C.multi_tensor_adam_capturable`; raises UserError if it is missing or on CPU devices."""
    _check(devices, _ADAM_KEY)
    extension = _load(ADAM_EXTENSION, _ADAM_KEY)
    kernel: Callable[..., None] | None = getattr(extension, "multi_tensor_adam_capturable", None)
    if kernel is None:
        raise UserError(
            f"{_ADAM_KEY}=apex: {find_apex()}, older than October 2022: its {ADAM_EXTENSION} has no "
            f"multi_tensor_adam_capturable; install a newer one, or use {_ADAM_KEY} torch"
        )
    return kernel


def fused_norms(devices: Iterable[torch.device]) -> NormKernels:
    """Return apex's LayerNorm and RMSNorm kernels, whose weights must have the dtype of x.

    Raises UserError if they are missing or a device is a CPU.
    """
    _check(devices, _NORM_KEY)
    _load(NORM_EXTENSION, _NORM_KEY)
    functions: Any = _load("apex.normalization.fused_layer_norm", _NORM_KEY)
    return NormKernels(
        lambda x, weight, bias, eps: functions.fused_layer_norm_affine(x, weight, bias, weight.shape, eps),
        lambda x, weight, eps: functions.fused_rms_norm_affine(x, weight, weight.shape, eps),
    )


def _check(devices: Iterable[torch.device], asked_by: str) -> None:
    found, asked, instead = find_apex(), f"{asked_by}=apex", f"{asked_by} torch"
    if found.state != "ready":
        remedy = "pip uninstall apex, then " if found.state in ("web", "other") else ""
        raise UserError(f"{asked}: {found}; {remedy}install NVIDIA's ({INSTALL}), or use {instead}")
    if any(device.type == "cpu" for device in devices):
        raise UserError(f"{asked}: its kernels run on NVIDIA GPUs, and this run is on a CPU; use {instead}")


def _load(module: str, asked_by: str) -> ModuleType:
    """Import a module of NVIDIA's apex; raises UserError if its extensions were compiled for another torch."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{asked_by}=apex: {find_apex()}, but {module} does not load with torch {torch.__version__} ({error}); "
            f"install it again with this torch ({INSTALL}), or use {asked_by} torch"
        ) from error


def _is_web_toolkit(metadata: Distribution) -> bool:
    needs = [requirement.lower() for requirement in metadata.requires or ()]
    return any(need.startswith(_WEB_REQUIREMENTS) for need in needs) or "Pyramid" in (
        metadata.metadata["Summary"] or ""
    )


def _describe(found: ModuleSpec, metadata: Distribution | None) -> str:
    """Return the folder of the package and, if it has metadata, its version and summary."""
    folder = next((str(folder) for folder in _folders(found)), str(found.origin))
    if metadata is None:
        return f"in {folder}, without metadata"
    summary = metadata.metadata["Summary"]
    return f"version {metadata.version}{f', {summary!r}' if summary else ''}, in {folder}"


def _folders(found: ModuleSpec) -> list[Path]:
    return [Path(folder) for folder in found.submodule_search_locations or ()]
