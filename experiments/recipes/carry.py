"""Packs what Longstep needs beside torch into a folder, for a machine without a network.

    make carry CARRY="--python 3.12"     build/carry/3.12, for that Python on Linux

Recipes import from there what is not installed. This file runs before they can, so it needs the standard library only.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Sequence
from importlib import invalidate_caches
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[2]
BESIDE_TORCH = "numpy"
"""Is nearly always where torch is, and larger than all others together."""
FOR_TESTS = ("pytest", "hypothesis")
"""What tests on a GPU need of the extra ``dev``."""
_GLIBC = (28, 27, 24, 17, 12, 5)
"""Of wheels for Linux, by their tag: pip takes each tag by itself, where an interpreter takes all older ones, too."""


def folder_of(python: str, root: Path = ROOT) -> Path:
    """Return where packages for a version of Python, such as 3.12, are carried."""
    return root / "build" / "carry" / python


def this_python() -> str:
    """Return the version of Python that runs this, such as 3.12."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def requirements(root: Path = ROOT) -> list[str]:
    """Return what the project depends on, torch excepted; nothing where it was installed, and so has them."""
    project = root / "pyproject.toml"
    return list(tomllib.loads(project.read_text())["project"]["dependencies"]) if project.exists() else []


def needed_by_tests(root: Path = ROOT) -> list[str]:
    """Return what its tests need beside them."""
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return [wanted for wanted in extras["dev"] if _name(wanted) in FOR_TESTS]


def lacking(wanted: Iterable[str]) -> list[str]:
    """Return the requirements, as ``name>=version``, that nothing here meets."""
    return [one for one in wanted if not _met(one)]


def _name(requirement: str) -> str:
    return re.split(r"[<>=!~\[; ]", requirement, maxsplit=1)[0]


def _met(requirement: str) -> bool:
    least = re.search(r">=([\d.]+)", requirement)
    try:
        found = version(_name(requirement))
    except PackageNotFoundError:
        return False
    return least is None or _numbers(found) >= _numbers(least[1])


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)[:3]]


def use_carried(root: Path = ROOT) -> None:
    """Put what was carried first on the path, of this process and of those that it starts, if packages are missing;
    exits with 2 if some are missing then.
    """
    wanted, folder = requirements(root), folder_of(this_python(), root)
    if lacking(wanted) and folder.is_dir():
        sys.path.insert(1, str(folder))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        invalidate_caches()
    if missing := lacking(wanted):
        sys.stderr.write(f"longstep: {what_is_missing(missing, root)}\n")
        sys.exit(2)


def what_is_missing(missing: Sequence[str], root: Path = ROOT) -> str:
    """Return what to do about missing packages."""
    folder = folder_of(this_python(), root).relative_to(root)
    option = " --with-numpy" if any(_name(one) == BESIDE_TORCH for one in missing) else ""
    return (
        f"{sys.executable} (Python {this_python()}) lacks {', '.join(missing)}: install them with pip, or run "
        f'make carry CARRY="--python {this_python()}{option}" where there is a network, and bring {folder} along with '
        f"this checkout"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill the folder of a version of Python, by pip."""
    parser = argparse.ArgumentParser(prog="python -m experiments.recipes.carry", description=__doc__.split("\n")[0])
    parser.add_argument("--python", default=this_python(), help="version of Python there, such as 3.12")
    parser.add_argument("--machine", default=platform.machine(), help="x86_64 or aarch64")
    parser.add_argument("--with-numpy", action="store_true", help="for a machine whose torch has no numpy beside it")
    given = parser.parse_args(arguments)
    wanted = [*requirements(), *needed_by_tests()]
    if not given.with_numpy:
        wanted = [one for one in wanted if _name(one) != BESIDE_TORCH]
    folder = folder_of(given.python)
    shutil.rmtree(folder, ignore_errors=True)
    tags = [f"manylinux_2_{glibc}_{given.machine}" for glibc in _GLIBC] + [f"manylinux2014_{given.machine}"]
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile",
        "--target", str(folder), "--constraint", str(ROOT / "constraints.txt"), "--only-binary=:all:",
        "--implementation", "cp", "--python-version", given.python, *(f"--platform={tag}" for tag in tags), *wanted,
    ]  # fmt: skip
    if subprocess.run(command, check=False).returncode:
        sys.stderr.write(f"longstep: pip could not fill {folder}: it needs a network, and wheels for that Python\n")
        sys.exit(1)
    for tests in sorted(folder.glob("**/tests")):
        shutil.rmtree(tests)
    size = sum(path.stat().st_size for path in folder.glob("**/*") if path.is_file())
    sys.stdout.write(f"{folder.relative_to(ROOT)}: {size / 1e6:.0f} MB for Python {given.python} on {given.machine}\n")


if __name__ == "__main__":
    main()
