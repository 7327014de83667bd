"""What README.md and docs/ say is true: blocks run, links lead somewhere, the file map is complete.

The word after a fence says what becomes of a block, in a folder of its own for each document:

* ``bash run``: a shell runs it, its commands must succeed.
* ``bash run machines``: each line is a process of its own; coordinators and servers are ended once
  the others are through. Machines are loopback addresses here, the port is a free one.
* ``python run``: a process runs it alone. ``python file=NAME``: it is kept, a later block runs it.
* ``toml``: it is read as settings. ``picture``, ``hex ...``, ``decoded``: not to be run.
* ``text not run: REASON``: cannot run here; there are at most three of these.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from gradsum import config
from gradsum.arguments import _COMMANDS, parse
from gradsum.proto.transport.ports import free_port

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md",
                *(ROOT / "docs").rglob("*.md")])  # fmt: skip
LIMIT = 40.0  # seconds a block may take

FENCE = re.compile(r"^```(\S[^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"picture|decoded|hex \w+|text not run: .{20,}")
SHORTER = {"--mb 100": "--mb 2 --rounds 3"}  # the same command in less time


class Block(NamedTuple):
    """One fenced block of a page."""

    page: Path
    info: str
    body: str


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    found = [Block(page, *match) for match in FENCE.findall(text)]
    fences = [line for line in text.splitlines() if line.startswith("```")]
    assert len(fences) == 2 * len(found), f"{page.name}: a fence without its kind, or not closed"
    yield from found


def title(page: Path) -> str:
    return str(page.relative_to(ROOT))


PROGRAMS = [p for p in PAGES if any(b.info.startswith(("bash", "python")) for b in blocks(p))]


class Reader:
    """Does what a page says, in a folder that starts with the examples and nothing else."""

    def __init__(self, folder: Path, page: Path) -> None:
        self.folder = folder
        self.page = page
        self.port = free_port()
        (folder / "examples").symlink_to(ROOT / "examples")
        bin_folder = str(Path(sys.executable).parent)
        self.environment = os.environ | {
            "PATH": os.pathsep.join((bin_folder, os.environ["PATH"])), "OMP_NUM_THREADS": "1",
        }  # fmt: skip

    def follow(self, block: Block) -> None:
        body = block.body.replace("10.0.0.", "127.0.0.").replace(":7700", f":{self.port}")
        for long, short in SHORTER.items():
            body = body.replace(long, short)
        name = block.info.partition(" file=")[2]
        if name:
            (self.folder / name).write_text(body, encoding="utf-8")
        elif block.info == "python run":
            self.finish("block", self.start([sys.executable, "-c", body]))
        elif block.info == "bash run":
            self.finish(body, self.start(["bash", "-euo", "pipefail", "-c", body]))
        elif block.info == "bash run machines":
            self.machines([line for line in body.splitlines() if line and line[0] != "#"])
        elif block.info == "toml":
            file = self.folder / "block.toml"
            file.write_text(body, encoding="utf-8")
            config.load({}, {}, file)
        else:
            assert NOT_RUN.fullmatch(block.info), f"{title(self.page)}: what is {block.info!r}?"

    def start(self, words: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            words, cwd=self.folder, env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def finish(self, what: str, child: subprocess.Popen[str], asked_to_end: bool = False) -> None:
        try:
            output, _ = child.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            child.terminate()
            try:
                output, _ = child.communicate(timeout=15)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                output, _ = child.communicate()
            pytest.fail(f"{title(self.page)}: {what}\nnot finished in {LIMIT} s\n{output}")
        allowed = (0, -signal.SIGTERM, 128 + signal.SIGTERM) if asked_to_end else (0,)
        assert child.returncode in allowed, f"{title(self.page)}: {what}\n{output}"

    def machines(self, lines: list[str]) -> None:
        running = [(line, self.start(["bash", "-c", f"exec {line}"])) for line in lines]
        daemons = [pair for pair in running if pair[0].split()[1] in ("coordinator", "server")]
        try:
            for line, child in running:
                if (line, child) not in daemons:
                    self.finish(line, child)
        finally:
            for _, child in daemons:
                child.terminate()
        for line, child in daemons:
            self.finish(line, child, asked_to_end=True)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("page", PROGRAMS, ids=title)
def test_every_block_of_the_page_runs(page: Path, tmp_path: Path) -> None:
    reader = Reader(tmp_path, page)
    for block in blocks(page):
        reader.follow(block)


def test_at_most_three_blocks_are_not_run() -> None:
    every = [block for page in PAGES for block in blocks(page)]
    assert len(every) > 10
    assert len([b for b in every if b.info.startswith("text")]) <= 3
    assert not [b.info for b in every if b.info in ("bash", "python", "sh", "console", "")]


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("https://", "http://")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{title(page)} links to {target}"
        assert file.is_relative_to(ROOT), f"{title(page)} links to {target}"
        assert not anchor or anchor in anchors(file), f"{title(page)} links to {target}"


def mapped() -> tuple[set[str], set[str]]:
    """Folders and modules that the README's file map names."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## File map")[2]
    folders: set[str] = set()
    modules: set[str] = set()
    folder = ""
    for cells in (line.split(" | ") for line in text.splitlines() if line.startswith("| ")):
        for cell in (cells[0].removeprefix("| "), *cells[2::2]):
            if named := re.fullmatch(r"\*\*(.+)/\*\*", cell):
                folder = named[1]
                folders.add(folder)
            elif named := re.fullmatch(r"`(\w+\.py)`", cell):
                assert f"{folder}/{named[1]}" not in modules, "named twice"
                modules.add(f"{folder}/{named[1]}")
    return folders, modules


def test_the_file_map_names_every_module_and_no_other() -> None:
    folders, modules = mapped()
    on_disk: set[str] = set()
    for folder in folders - {"tests", "docs"}:
        on_disk |= {f"{folder}/{file.name}" for file in (ROOT / folder).glob("*.py")}
    inits = {name for name in on_disk if name.endswith("/__init__.py")}
    assert modules - {"src/gradsum/__init__.py"} == on_disk - inits
    sources = {p for p in ROOT.glob("*/") if any(p.rglob("*.py")) and p.name[0] != "."}
    assert {p.name for p in sources} - {"build", "dist"} <= {f.split("/")[0] for f in folders}
    assert "proto/transport" in folders


def test_the_readme_fits() -> None:
    """What is to be read; the file map grows by a row for three files."""
    text, _, tail = (ROOT / "README.md").read_text(encoding="utf-8").partition("## File map")
    files = sum(line.startswith("|") for line in tail.splitlines())
    assert len((text + tail).splitlines()) - files < 165
    assert files < 80


def test_commands_flags_and_variables_that_pages_name_exist(
    capsys: pytest.CaptureFixture[str],
) -> None:
    helped = ""
    for command in _COMMANDS:
        with pytest.raises(SystemExit):
            parse([command, "--help"])
        helped += capsys.readouterr().out
    flags = set(re.findall(r"--[a-z][a-z-]+", helped))
    variables = {option.variable for option in config.options()} | {config.CONFIG_VARIABLE}
    settings = {option.name for option in config.options()}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert set(re.findall(r"GRADSUM_[A-Z]\w+", text)) <= variables, title(page)
        assert set(re.findall(r"gradsum ([a-z]+) --", text)) <= _COMMANDS.keys(), title(page)
        own = [
            line for line in text.splitlines() if "gradsum " in line and "horovodrun" not in line
        ]
        unknown = {f for line in own for f in re.findall(r" (--[a-z][a-z-]+)", line)} - flags
        assert not unknown, f"{title(page)}: {unknown}"
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Settings")[2]
    rows = re.findall(r"^\| `(\w+)` \|", table.partition("## Tests")[0], re.MULTILINE)
    assert rows
    assert set(rows) <= settings


def test_rules_that_sources_cite_are_on_the_page_of_rules() -> None:
    text = (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")
    numbers = set(re.findall(r"^\| \*\*([IVSFE]\d)\*\* \|", text, re.MULTILINE))
    folders = ("proto", "scheduler", "server", "worker", "deploy")
    cited: set[str] = set()
    for file in (f for folder in folders for f in (ROOT / folder).rglob("*.py")):
        cited |= set(re.findall(r"\b([IVSFE][1-9])\b", file.read_text(encoding="utf-8")))
    assert cited - numbers == set()
