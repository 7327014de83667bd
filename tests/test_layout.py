"""The package table of pyproject.toml, the links in src/gradsum and the disk are equal."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def packages_on_disk() -> set[str]:
    """Every folder with Python files below src/gradsum, through its links, as a package name."""
    found = {"gradsum"}
    for link in (ROOT / "src" / "gradsum").iterdir():
        if link.is_symlink():
            folders = {file.parent for file in link.resolve().rglob("*.py")}
            parts = {folder.relative_to(link.resolve()).parts for folder in folders}
            found |= {".".join(("gradsum", link.name, *rest)) for rest in parts}
    return found


def test_every_package_is_in_the_table() -> None:
    assert set(SETUPTOOLS["packages"]) == packages_on_disk()


def test_every_package_has_an_init() -> None:
    for name in SETUPTOOLS["packages"]:
        folder = ROOT / "src" / Path(*name.split("."))
        assert (folder / "__init__.py").is_file(), f"{folder} has no __init__.py"


def test_links_lead_to_the_mapped_folders() -> None:
    for name, folder in SETUPTOOLS["package-dir"].items():
        path = ROOT / "src" / Path(*name.split("."))
        assert path.resolve() == ROOT / folder
        if name != "gradsum":
            assert str(path.readlink()) == f"../../{folder}", "a link must work in every clone"


def test_no_folder_is_importable_at_top_level_only() -> None:
    links = {p.name for p in (ROOT / "src" / "gradsum").iterdir() if p.is_symlink()}
    mapped = {name.split(".")[1] for name in SETUPTOOLS["package-dir"] if "." in name}
    assert links == mapped


def test_marked_as_typed() -> None:
    assert (ROOT / "src" / "gradsum" / "py.typed").is_file()
    assert SETUPTOOLS["package-data"]["gradsum"] == ["py.typed"]
