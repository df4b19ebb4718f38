"""The built packages: what a user installs, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from support.imports import ROOT, modules

pytestmark = pytest.mark.skipif(
    not (ROOT / ".git").exists(), reason="which files belong to the project, git knows"
)
PACKAGES = {"autopar", "autopar_cost_models", "autopar_kernels"}


def build(kind: str, source: Path, out: Path) -> None:
    """Build a 'wheel' or an 'sdist' of a source tree into a folder."""
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(out)], cwd=source, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist of the files that git knows."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    for name in names:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    build("sdist", source, out)
    build("wheel", source, out)
    return out


def test_the_wheel_has_the_three_packages_and_nothing_else(built):
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == PACKAGES
    expected = {
        f"{name.replace('.', '/')}{'/__init__' if path.stem == '__init__' else ''}.py"
        for name, path in modules().items()
    }
    assert {name for name in names if name.endswith(".py")} == expected
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    assert any(name.endswith("LICENSE") for name in names)


def test_the_sdist_builds_the_same_wheel(built, tmp_path):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        # early releases of Python 3.11 have no filters
        safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(tmp_path, **safe)
    (source,) = tmp_path.iterdir()
    build("wheel", source, tmp_path)
    (again,), (wheel,) = tmp_path.glob("*.whl"), built.glob("*.whl")
    assert zipfile.ZipFile(again).namelist() == zipfile.ZipFile(wheel).namelist()
