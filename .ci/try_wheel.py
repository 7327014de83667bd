"""Builds the sdist, a wheel from that sdist, installs it beside nothing else of ours and uses it.

The throw-away venv sees the dependencies of the venv that runs this (a .pth line), so nothing is
downloaded; packages of that venv that are installed as editable stay invisible to it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 120.0
FILES = ("cli.py", "py.typed", "server/__init__.py", "proto/transport/__init__.py")
JOB = """
import torch, gradsum
gradsum.init()
total = gradsum.push_pull(torch.arange(5.0), average=False, name="t")
assert total.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0], total
print("sum of", gradsum.size(), "worker is right")
gradsum.shutdown()
"""


def run(*command: str | Path, cwd: Path) -> str:
    """The output of a command; ends this program with that output when the command fails."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "GRADSUM_"))}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, text=True, timeout=LIMIT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}: exit {done.returncode}\n{done.stdout}")
    return done.stdout


def install(folder: Path) -> Path:
    """Build into ``folder`` and install the wheel; returns the venv's bin folder."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (wheel,) = folder.glob("gradsum-*.whl")
    place = folder / "venv"
    venv.create(place, with_pip=False, symlinks=True)
    pip = (sys.executable, "-m", "pip", "--python", place, "--disable-pip-version-check")
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=folder)
    (site,) = place.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    missing = [name for name in FILES if not (site / "gradsum" / name).is_file()]
    if missing:
        raise SystemExit(f"the wheel lacks {missing}")
    return place / "bin"


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="gradsum-wheel-") as name:
        folder = Path(name)
        bin_ = install(folder)
        where = run(bin_ / "python", "-c", "import gradsum; print(gradsum.__file__)", cwd=folder)
        if not where.startswith(str(folder.resolve())):
            raise SystemExit(f"imported {where.strip()}, not the wheel")
        run(bin_ / "gradsum", "--help", cwd=folder)
        (folder / "job.py").write_text(JOB)
        launch = ("launch", "--standalone", "--nproc-per-node", "1", "--", "python", "job.py")
        print("wheel:", run(bin_ / "gradsum", *launch, cwd=folder).strip())


if __name__ == "__main__":
    main()
