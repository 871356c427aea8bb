"""Who imports whom, read from the source; and that importing the package stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# From the bottom up: a module of grpo_fast imports from lower lines, and freely within its own package.
LAYERS = (
    ("grpo_fast.checks", "grpo_fast.types", "grpo_fast.modes", "grpo_fast.tasks", "grpo_fast.kernels"),
    ("grpo_fast.ops", "grpo_fast.advantages", "grpo_fast.prompts", "grpo_fast.rewards", "grpo_fast.parallel"),
    ("grpo_fast.config", "grpo_fast.heads", "grpo_fast.attention"),
    ("grpo_fast.lora",),
    ("grpo_fast.data", "grpo_fast.optim", "grpo_fast.memory", "grpo_fast.checkpoint", "grpo_fast.merged_weights"),
    ("grpo_fast.rollout", "grpo_fast.model", "grpo_fast.smollm2"),
    ("grpo_fast.batching", "grpo_fast.evaluate", "grpo_fast.sampling_correction", "grpo_fast.environment"),
    ("grpo_fast.forward", "grpo_fast.metrics"),
    ("grpo_fast.experience", "grpo_fast.reference"),
    ("grpo_fast.update",),
    ("grpo_fast.trainer",),
    ("grpo_fast.run", "grpo_fast.demo", "grpo_fast.merge", "grpo_fast.integrations"),
    ("grpo_fast.cli",),
    ("grpo_fast.__main__",),
)
LAYER = {name: level for level, names in enumerate(LAYERS) for name in names}
# What else a part may import, besides the standard library.
OUTSIDE = {
    "grpo_fast.kernels": {"torch", "triton"},
    "grpo_fast.ops": {"torch"},
    "grpo_fast.types": {"torch"},
    "grpo_fast.advantages": {"torch"},
    "grpo_fast.batching": {"torch"},
    "grpo_fast.checks": set(),
    "grpo_fast.heads": {"torch"},
    "grpo_fast.config": {"yaml"},
    "grpo_fast.tasks": set(),
}


def sources():
    yield from ((path, f"grpo_fast.kernels.{path.stem}") for path in sorted((ROOT / "kernels").glob("*.py")))
    for path in sorted((ROOT / "grpo_fast").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if "kernels" not in parts:
            yield path, ".".join(part for part in parts if part != "__init__")


def imported(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            # `from grpo_fast import x` and `from grpo_fast.ops import library` may name modules.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part(module):
    return ".".join(module.split(".")[:2])


def test_arrows_point_down():
    wrong = []
    for path, module in sources():
        if module == "grpo_fast":
            continue
        for name in imported(path):
            own = part(name) == part(module)
            if name.startswith("grpo_fast.") and not own and LAYER[part(name)] >= LAYER[part(module)]:
                wrong.append(f"{module} imports {name}")
    assert not wrong


def test_the_lower_parts_depend_on_little():
    wrong = []
    for path, module in sources():
        allowed = OUTSIDE.get(part(module))
        for name in imported(path):
            top = name.split(".")[0]
            if allowed is not None and top not in {"grpo_fast", "__future__", *sys.stdlib_module_names, *allowed}:
                wrong.append(f"{module} imports {name}")
    assert not wrong


def test_only_its_own_integration_imports_trl():
    for path, module in sources():
        if module != "grpo_fast.integrations.trl":
            assert not any(name.split(".")[0] == "trl" for name in imported(path)), module


def test_nothing_imports_benchmarks_tests_or_the_bare_kernels_folder():
    for path, module in sources():
        tops = {name.split(".")[0] for name in imported(path)}
        assert not tops & {"benchmarks", "tests", "kernels"}, module


def test_only_its_own_rollout_file_imports_vllm():
    for path, module in sources():
        if module != "grpo_fast.rollout.vllm":
            assert not any(name.split(".")[0] == "vllm" for name in imported(path)), module


@pytest.mark.parametrize(
    "statement",
    ["import grpo_fast, grpo_fast.integrations", "import grpo_fast, grpo_fast.config; grpo_fast.GRPOConfig"],
)
def test_importing_the_package_loads_neither_transformers_nor_triton_nor_peft_nor_a_gpu(statement):
    code = f"""
import sys
sys.modules["triton"] = None  # as where it is not installed
{statement}
import torch
assert not any(name.split(".")[0] in ("transformers", "datasets", "matplotlib", "peft", "trl") for name in sys.modules)
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_trainer_stays_readable_at_one_sitting():
    assert len((ROOT / "grpo_fast/trainer.py").read_text(encoding="utf-8").splitlines()) <= 300


def test_the_kernels_folder_is_no_package_of_its_own():
    # A regular package of this name would shadow Hugging Face's `kernels`, which transformers imports.
    assert not (ROOT / "kernels/__init__.py").exists()
    assert (ROOT / "grpo_fast/kernels").resolve() == ROOT / "kernels"
    assert not any(path.is_dir() and path.name != "__pycache__" for path in (ROOT / "kernels").iterdir())
