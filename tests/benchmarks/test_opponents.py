"""The kernel benchmarks: SGLang's own kernels are found, and without them there is no race."""

import ast
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import fused_router
import ple_tail
import triple_rmsnorm
import vision_layer
from measuring import kernels, opponents

from g4debug.fixes.source import source

USES = pytest.mark.usefixtures("_sglang_imported")
FUSED = f"{opponents.LAYER}.gemma_rmsnorm_residual_scalar"


@USES
def test_the_layers_kernels_are_found_on_this_release():
    from sglang.srt.models import gemma4_causal

    assert opponents.found(FUSED) == (gemma4_causal.gemma_rmsnorm_residual_scalar,)
    routes = fused_router.installed(torch.ones(8))
    kernel = getattr(gemma4_causal, "gemma4_fused_routing", None)
    assert routes.get("sglang") is kernel
    assert (routes["torch"] is fused_router.operations) == (kernel is not None)


@USES
def test_the_torch_code_chooses_and_weighs_as_ours():
    scale = torch.rand(fused_router.EXPERTS, generator=torch.Generator().manual_seed(1)).bfloat16()
    torch_code = fused_router.installed(scale)["torch"]
    fused_router.check({"torch": torch_code, "formula": fused_router.operations}, scale)


def test_on_cuda_the_module_of_the_norms_has_the_kernels():
    """On a CPU it does not import them, so its source is read."""
    tree = ast.parse(source(opponents.NORMS))
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    names = {a.asname or a.name for n in imports if n.module == "sgl_kernel" for a in n.names}
    assert {"rmsnorm", "fused_add_rmsnorm"} <= names


@USES
def test_what_is_missing_is_said(capsys):
    assert opponents.found(FUSED, f"{opponents.NORMS}.no_such_kernel") is None
    assert "left out; AttributeError" in capsys.readouterr().out
    assert opponents.found("sglang.no_such_module.kernel") is None
    assert "left out; ModuleNotFoundError" in capsys.readouterr().out


@USES
def test_without_the_norm_kernel_no_script_has_an_opponent():
    """So it is on a CPU, and where SGLang has moved it."""
    assert ple_tail.sglang_kernels() == {}
    assert triple_rmsnorm.sglang_variants() == {}
    assert vision_layer.sglang(vision_layer.Inputs("E2B", 1, 1, "cpu")) == {}


@pytest.mark.parametrize("script", [ple_tail, triple_rmsnorm, vision_layer, fused_router])
def test_on_cuda_ours_does_not_race_alone(script, monkeypatch):
    """Whatever the reason is: the names have moved, or the package is not there."""
    monkeypatch.setattr(opponents, "found", lambda *places: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    ran = []

    def on_cpu(args, stem, keys, names, rows, tuned, build, *more):
        def here(name, rows, device, compiled):
            return build(name, rows, "cpu", compiled)

        compare(args, stem, keys, names, rows, tuned, here, lambda s: ran.append(s), *more[1:])

    compare = kernels.compare
    monkeypatch.setattr(kernels, "compare", on_cpu)
    if script is fused_router:  # the scale is made on the device before
        ones = {"torch": fused_router.operations}
        monkeypatch.setattr(fused_router, "installed", lambda scale: ones)
        monkeypatch.setattr(torch.Tensor, "to", lambda self, *args, **kwargs: self)
    monkeypatch.setattr(sys, "argv", ["script", "--check"])
    with pytest.raises(SystemExit, match="SGLang's own kernel is missing"):
        script.main()
    assert not ran
    monkeypatch.setattr(sys, "argv", ["script", "--check", "--without-sglang"])
    script.main()
    assert ran
