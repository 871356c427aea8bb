"""What users install: source distribution -> wheel -> import, without a compiler, and where symlinks are text files."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from grpo_fast.ops.backends import unavailable_reason

ROOT = Path(__file__).parents[2]
SHIPPED = ("csrc", "grpo_fast", "kernels", "recipes")
FILES = ("LICENSE", "MANIFEST.in", "README.md", "constraints.txt", "pyproject.toml", "setup.py")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the sources with the symlink kept, as git makes one."""
    folder = tmp_path_factory.mktemp("checkout")
    skip = shutil.ignore_patterns("__pycache__", "*.so")
    for name in SHIPPED:
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=skip)
    for name in FILES:
        shutil.copy(ROOT / name, folder / name)
    return folder


def run(command, cwd, **environment):
    done = subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def build_wheel(source, folder, **environment):
    """Returns the names in the wheel, its path, and what the build printed."""
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-deps", "--no-index", "-w"]
    said = run([*command, str(folder), str(source)], source, **environment)
    (wheel,) = folder.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist()), wheel, said


def modules(wheel_names):
    return {name for name in wheel_names if name.endswith(".py")}


def expected_modules():
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "grpo_fast").rglob("*.py")}
    return package | {f"grpo_fast/kernels/{path.name}" for path in (ROOT / "kernels").glob("*.py")}


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory):
    """A wheel built from the source distribution of the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    run([sys.executable, "setup.py", "-q", "sdist", "-d", str(folder)], checkout, GRPO_FAST_PURE="1")
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    source = next(path for path in folder.iterdir() if path.is_dir())
    assert {path.name for path in (source / "csrc").rglob("*.*")} == {p.name for p in (ROOT / "csrc").rglob("*.*")}
    return build_wheel(source, folder, GRPO_FAST_PURE="1")


def test_a_wheel_from_the_source_distribution_holds_every_module(wheel):
    names, path, said = wheel
    assert modules(names) == expected_modules()
    assert "grpo_fast/py.typed" in names
    assert path.name.endswith("py3-none-any.whl")
    assert said.count("installing without the C++ backend: GRPO_FAST_PURE=1 is set") == 1


def test_the_wheel_works_away_from_the_checkout(wheel, tmp_path):
    run([sys.executable, "-m", "zipfile", "-e", str(wheel[1]), str(tmp_path)], tmp_path)
    code = f"""
import torch, grpo_fast, grpo_fast.ops.backends as backends
assert grpo_fast.__file__.startswith({str(tmp_path)!r}), grpo_fast.__file__
assert "not built" in backends.unavailable_reason("cpu")
import grpo_fast.kernels.primitives
logits = torch.zeros(1, 2, 3, requires_grad=True)
out = grpo_fast.grpo_loss(logits, torch.zeros(1, 2, dtype=torch.long), torch.ones(1))
out.loss.backward()
assert abs(out.loss.item() + 1) < 1e-6, out.loss
"""
    said = run([sys.executable, "-c", code], tmp_path, PYTHONPATH=str(tmp_path))
    assert said.count("the reference backend answers") == 1
    done = subprocess.run(
        [sys.executable, "-m", "grpo_fast", "bench"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "part of a checkout" in done.stderr


def test_a_checkout_with_the_symlink_as_a_text_file_gives_the_same_wheel(checkout, wheel, tmp_path):
    copy = tmp_path / "checkout"
    shutil.copytree(checkout, copy, symlinks=True)
    (copy / "grpo_fast/kernels").unlink()
    (copy / "grpo_fast/kernels").write_text("../kernels")
    names, _, _ = build_wheel(copy, tmp_path, GRPO_FAST_PURE="1")
    assert modules(names) == modules(wheel[0])


@pytest.mark.parametrize(
    "hidden, reason",
    [
        ({"CXX": "no-such-compiler -O2"}, "the C++ compiler no-such-compiler is missing"),
        ({"PYTHONPATH": "without_torch"}, "torch is missing in the build environment"),
    ],
)
def test_what_the_extension_lacks_is_said_once(checkout, tmp_path, hidden, reason):
    if "PYTHONPATH" in hidden:  # as in pip's isolated build environment
        (tmp_path / "sitecustomize.py").write_text(
            "import importlib.util as util\n"
            "find = util.find_spec\n"
            "util.find_spec = lambda name, *rest: None if name == 'torch' else find(name, *rest)\n"
        )
        hidden = {"PYTHONPATH": str(tmp_path)}
    copy = tmp_path / "checkout"
    shutil.copytree(checkout, copy, symlinks=True)
    said = run([sys.executable, "setup.py", "-q", "bdist_wheel", "-d", str(tmp_path)], copy, **hidden)
    assert said.count(f"installing without the C++ backend: {reason}") == 1
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("py3-none-any.whl")


def test_a_compile_error_is_loud(checkout, tmp_path):
    copy = tmp_path / "checkout"
    shutil.copytree(checkout, copy, symlinks=True)
    for source in copy.glob("csrc/**/*.cpp"):
        source.write_text("#error broken on purpose\n")
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "bdist_wheel", "-d", str(tmp_path)],
        cwd=copy,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "broken on purpose" in done.stdout + done.stderr


def test_where_the_extension_can_be_built_it_is_there(monkeypatch):
    """Otherwise the suite would pass with every test of the C++ backend skipped."""
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    monkeypatch.chdir(ROOT)
    why_pure = runpy.run_path(str(ROOT / "setup.py"))["why_pure"]
    if why_pure() is None:
        assert unavailable_reason("cpu") is None


def test_the_oldest_python_is_the_same_everywhere():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    floor = settings["project"]["requires-python"].removeprefix(">=")
    assert settings["tool"]["ruff"]["target-version"] == "py" + floor.replace(".", "")
    setup = (ROOT / "setup.py").read_text()
    assert f'"py_limited_api": "cp{floor.replace(".", "")}"' in setup
    assert f"any Python >= {floor}." in setup
    assert f"Python {floor} or newer" in (ROOT / "README.md").read_text()


def test_the_pinned_versions_install_on_the_oldest_python():
    """Where they are installed here, their own metadata says."""
    floor = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    checked = 0
    for name, pinned in re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE):
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue
        if package.version.split("+")[0] == pinned and (needs := package.metadata["Requires-Python"]):
            assert SpecifierSet(needs).contains(floor), f"{name} {pinned} needs Python {needs}"
            checked += 1
    assert checked > 0


def test_setup_stays_small():
    assert len((ROOT / "setup.py").read_text().splitlines()) <= 80
