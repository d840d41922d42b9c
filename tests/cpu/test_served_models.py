"""SGLang's registry of models imports one of them, and has all of them for whoever asks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import warm
from real_engine import ENGINE

pytestmark = ENGINE
RUN_CODE = Path(__file__).parents[1] / "support" / "run_code.py"
BEGIN = """
import json, sys
from g4debug import cpu
cpu.activate()
from sglang.srt.models.registry import ModelRegistry, import_model_classes
def imported():
    return sorted(n for n in sys.modules if n.startswith("sglang.srt.models.llama"))
"""
ALONE = """
before = imported()
found, name = ModelRegistry.resolve_model_cls(["LlamaForCausalLM"])
told = [before, imported(), found.__module__, name, "LlamaForCausalLM" in
        ModelRegistry.get_supported_archs(), "sglang.srt.models.qwen3" in sys.modules]
print(json.dumps(told))
"""
EACH = """
whole = import_model_classes("sglang.srt.models")
lone = [name for name in whole if ModelRegistry.models._alone(name) is not None]
other = [name for name in lone if ModelRegistry.models._alone(name) is not whole[name]]
nobody = "NobodyForCausalLM" in ModelRegistry.models
names = [*ModelRegistry.get_supported_archs()]
same = dict(ModelRegistry.models) == whole
print(json.dumps([len(whole), len(lone), other, nobody, sorted(names) == sorted(whole), same]))
"""
LEFT_OUT = """
names = ("Qwen3NextForCausalLM", "LlamaForCausalLM")
print(json.dumps([name in ModelRegistry.models for name in names]))
"""
EXTERNAL = """
found, _ = ModelRegistry.resolve_model_cls(["LlamaForCausalLM"])
print(json.dumps([found.__module__, type(ModelRegistry.models).__name__]))
"""
MINE = "class LlamaForCausalLM: pass\nEntryClass = LlamaForCausalLM\n"


def told(folder: Path, code: str, **environ: str):
    out, clean = folder / "out", {k: v for k, v in os.environ.items() if k[:7] != "SGLANG_"}
    command = (str(RUN_CODE), str(out), BEGIN + code)
    with (folder / "log").open("wb") as log:
        status = warm.start(command, {**clean, **environ}, log.fileno()).wait(300)
    assert status == 0, (folder / "log").read_text()[-3000:]
    return json.loads(out.read_text().splitlines()[-1])


def test_the_module_of_the_model_that_is_asked_for_is_imported_alone(tmp_path):
    module = "sglang.srt.models.llama"
    assert told(tmp_path, ALONE) == [[], [module], module, "LlamaForCausalLM", True, False]


def test_each_class_is_the_one_that_sglang_finds_by_importing_all(tmp_path):
    count, lone, other, nobody, names, same = told(tmp_path, EACH)
    assert count > 150
    assert lone > 0.9 * count  # else not much is gained
    assert (other, nobody, names, same) == ([], False, True, True)


def test_a_module_that_the_user_leaves_out_is_not_imported(tmp_path):
    assert told(tmp_path, LEFT_OUT, SGLANG_DISABLED_MODEL_ARCHS="qwen3_next,x") == [False, True]


def test_a_package_of_the_users_own_models_comes_as_ever(tmp_path):
    package = tmp_path / "my_models"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "llama.py").write_text(MINE)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    more = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "my_models", "PYTHONPATH": path}
    assert told(tmp_path, EXTERNAL, **more) == ["my_models.llama", "dict"]


def test_where_it_is_imported_already_it_stays(tmp_path):
    code = "\nfrom g4debug.cpu import served_models\nhad = ModelRegistry.models\n"
    code += "served_models.install()\nprint(json.dumps(ModelRegistry.models is had))"
    assert told(tmp_path, code)
