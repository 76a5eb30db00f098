"""Fact: the installed package named apex is identified without importing it; only NVIDIA's with its compiled extensions
is used, and everything else is refused with the package that was found and a remedy.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron3d.comm.process_comm import ProcessComm
from megatron3d.errors import UserError
from megatron3d.hardware.apex import adam_kernel, describe_apex, find_apex, fused_norms
from megatron3d.ops.norm import NormKernels, norm
from megatron3d.parallel.mesh import Mesh

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
NOT_TO_BE_IMPORTED = 'raise AssertionError("imported")\n'
WEB_METADATA = """Metadata-Version: 2.1
Name: apex
Version: 0.9.10.dev0
Summary: Pyramid toolkit to add Velruse, Flash Messages,CSRF, ReCaptcha and Sessions
Author: Chris Davies
Requires-Dist: cryptacular
Requires-Dist: zope.sqlalchemy
Requires-Dist: velruse >=1.0.3
Requires-Dist: pyramid >1.1.2
"""
NVIDIA_METADATA = """Metadata-Version: 2.1
Name: apex
Version: 0.1
Summary: PyTorch Extensions written by NVIDIA
"""
NORMS = """
import fused_layer_norm_cuda
def fused_layer_norm_affine(x, weight, bias, normalized_shape, eps):
    return "layer", x, weight, bias, tuple(normalized_shape), eps
def fused_rms_norm_affine(x, weight, normalized_shape, eps):
    return "rms", x, weight, tuple(normalized_shape), eps
"""
FAKES = ("apex", "amp_C", "fused_layer_norm_cuda")
NVIDIA = {
    "apex/__init__.py": "",
    "apex/optimizers/__init__.py": NOT_TO_BE_IMPORTED,
    "apex/optimizers/fused_adam.py": NOT_TO_BE_IMPORTED,
    "apex/normalization/__init__.py": "",
    "apex/normalization/fused_layer_norm.py": NORMS,
    "apex-0.1.dist-info/METADATA": NVIDIA_METADATA,
}
COMPILED = {"amp_C.py": "multi_tensor_adam_capturable = print", "fused_layer_norm_cuda.py": ""}
WEB = {"apex/__init__.py": NOT_TO_BE_IMPORTED, "apex-0.9.10.dev0.dist-info/METADATA": WEB_METADATA}
INSTALLED = {
    "none": {},
    "web": WEB,
    "web over NVIDIA's": NVIDIA | COMPILED | WEB,
    "other": {"apex/__init__.py": NOT_TO_BE_IMPORTED},
    "other with metadata": {
        "apex/__init__.py": NOT_TO_BE_IMPORTED,
        "apex-7.dist-info/METADATA": "Metadata-Version: 2.1\nName: apex\nVersion: 7\n",
    },
    "a folder of that name": {"apex/readme.txt": ""},
    "source": NVIDIA,
    "ready": NVIDIA | COMPILED,
    "ready without metadata": {name: text for name, text in (NVIDIA | COMPILED).items() if "dist-info" not in name},
}
STATES = {
    "web over NVIDIA's": "web",
    "other with metadata": "other",
    "a folder of that name": "other",
    "ready without metadata": "ready",
}
LINES = {
    "none": "apex: not installed",
    "web": "apex: the installed package of that name is not NVIDIA's but PyPI's toolkit for web pages (version "
    "0.9.10.dev0, 'Pyramid toolkit to add Velruse, Flash Messages,CSRF, ReCaptcha and Sessions', in {folder})",
    "other": "apex: the installed package of that name is not NVIDIA's (in {folder}, without metadata): it has no "
    "apex.optimizers.FusedAdam",
    "other with metadata": "apex: the installed package of that name is not NVIDIA's (version 7, in {folder}): it has "
    "no apex.optimizers.FusedAdam",
    "source": "apex: NVIDIA's is installed (version 0.1, 'PyTorch Extensions written by NVIDIA', in {folder}), but "
    "without its compiled extensions: there is no amp_C",
    "ready": "apex: NVIDIA's with compiled extensions (version 0.1, 'PyTorch Extensions written by NVIDIA', in "
    "{folder})",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder that imports search first; modules imported from it are removed afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in FAKES]:
        del sys.modules[name]


def install(folder: Path, installed: dict[str, str]) -> None:
    for name, text in installed.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize("name", INSTALLED)
def test_the_installed_apex_is_described_without_importing_it(folder: Path, name: str) -> None:
    install(folder, INSTALLED[name])
    assert find_apex().state == STATES.get(name, name)
    assert not [module for module in sys.modules if module.partition(".")[0] in FAKES]


@pytest.mark.parametrize("name", LINES)
def test_the_line_of_the_report(folder: Path, name: str) -> None:
    install(folder, INSTALLED[name])
    assert describe_apex() == LINES[name].format(folder=folder / "apex")


@pytest.mark.parametrize("name", [name for name in INSTALLED if not name.startswith("ready")])
def test_a_missing_kernel_is_refused_with_instructions(folder: Path, name: str) -> None:
    install(folder, INSTALLED[name])
    with pytest.raises(UserError) as caught:
        adam_kernel([GPU])
    message = str(caught.value)
    assert message.startswith(f"optimizer.adam_implementation=apex: {find_apex()}; ")
    assert "git clone https://github.com/NVIDIA/apex && pip install" in message
    assert message.endswith("or use optimizer.adam_implementation torch")
    assert ("pip uninstall apex" in message) == (STATES.get(name, name) in ("web", "other"))
    with pytest.raises(UserError, match=r"^train.norm_implementation=apex: .*or use train.norm_implementation torch$"):
        fused_norms([GPU])


def test_a_compiled_apex_provides_its_kernel(folder: Path) -> None:
    install(folder, INSTALLED["ready"])
    assert adam_kernel([GPU]) is print
    assert adam_kernel([]) is print


def test_a_cpu_has_no_apex_kernels(folder: Path) -> None:
    install(folder, INSTALLED["ready"])
    with pytest.raises(UserError, match=r"run on NVIDIA GPUs, and this run is on a CPU; use .* torch$"):
        adam_kernel([CPU])


@pytest.mark.parametrize("text,reason", [("raise ImportError('undefined symbol: c10')", "undefined symbol: c10")])
def test_extensions_of_another_torch_are_refused_with_the_reason(folder: Path, text: str, reason: str) -> None:
    install(folder, INSTALLED["ready"] | {"amp_C.py": text, "fused_layer_norm_cuda.py": text})
    for ask in (lambda: adam_kernel([GPU]), lambda: fused_norms([GPU])):
        with pytest.raises(UserError, match=rf"does not load with torch .*{reason}.*install it again"):
            ask()


def test_an_old_apex_without_the_kernel_is_refused(folder: Path) -> None:
    install(folder, INSTALLED["ready"] | {"amp_C.py": ""})
    with pytest.raises(UserError, match="has no multi_tensor_adam_capturable; install a newer one, or use"):
        adam_kernel([GPU])


def test_norms_call_apexs_functions_over_the_last_dimension(folder: Path) -> None:
    install(folder, INSTALLED["ready"])
    norms, x, weight, bias = fused_norms([GPU]), torch.ones(2, 3), torch.ones(3), torch.zeros(3)
    assert norms.layer_norm(x, weight, bias, 1e-5) == ("layer", x, weight, bias, (3,), 1e-5)
    assert norms.rms_norm(x, weight, 1e-6) == ("rms", x, weight, (3,), 1e-6)


def test_norms_of_whole_rows_use_the_chosen_kernels() -> None:
    chosen = NormKernels(lambda x, weight, bias, eps: x * weight + bias, lambda x, weight, eps: x * weight)
    alone, x, weight, bias = ProcessComm(Mesh(()), []), torch.randn(2, 3), torch.full((3,), 2.0), torch.ones(3)
    assert torch.equal(norm(x, weight, bias, 1e-5, (), alone, kernels=chosen), 2 * x + 1)
    assert torch.equal(norm(x, weight, None, 1e-5, (), alone, kernels=chosen), 2 * x)
