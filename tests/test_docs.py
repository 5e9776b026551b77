"""README.md and docs/: excerpts are what they quote, Python runs, commands work as written, links lead somewhere.

A comment above a block says what the block is:

    <!-- file: specs/x.py -->                   that file, whole
    <!-- excerpt: chain for target -->          the plan and the first pass of a kernel
    <!-- output: fusegen ... | from "a" to "b" -->  the lines of a command's output from one to the other, without that
    <!-- save: x.py -->                         Python that the page's commands find under this name
    <!-- refused: x.py -->                      Python that is refused in the words of the block behind it

`pytest --update-golden` rewrites what is quoted.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fusegen
from fusegen.cli import app
from fusegen.emitting import golden
from fusegen.errors import MissingError, SpecError
from fusegen.language.spec import load_chains
from fusegen.targets import target
from tests.tools import needs_compiler

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
OTHERS = (ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md")
README_LINES, EXCERPT_LINES = 250, 40
LANGUAGES = {"python", "sh", "text", "c++", "c"}

BLOCK = re.compile(r"(?:^<!-- (\w+): (.*?) -->\n)?^```(\S*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
QUOTED = re.compile(r"(<!-- (file|excerpt|output): (.*?) -->\n```[\w+]*\n)(.*?)(```\n)", re.DOTALL)
REFUSED = re.compile(r"(<!-- (refused): (.*?) -->\n```python\n(.*?)```\n```text\n)(.*?)(```\n)", re.DOTALL)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
PATH = re.compile(r"`((?:fusegen|templates|specs|generated|benchmarks|scripts|tests|docs)/[\w./-]*)`")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> Iterator[tuple[str | None, str, str]]:
    """What is said of each block of that language, about what, and the block."""
    for kind, what, written, text in BLOCK.findall(page.read_text()):
        if written == language:
            yield kind or None, what, text


# ---------------------------------------------------------------- what is quoted


def quoted(kind: str, what: str) -> str:
    if kind == "file":
        return (ROOT / what).read_text()
    if kind == "output":
        return output(what)
    name, _, gpu = what.partition(" for ")
    (chain,) = load_chains(f"{ROOT}/specs/{name}.py")
    return excerpt(golden.emitted(chain, target(gpu))[0].text)


def excerpt(text: str) -> str:
    """The plan, and the first of the kernel's passes over a row. The spec's body stands before it on the page."""
    head, _, rest = text.partition("\n\n")
    head = re.sub(r"(^//     .*\n)+//\n", "", head, flags=re.MULTILINE)
    first, second = (re.search(rf"^  // \w+ {number} of \d+", rest, re.MULTILINE) for number in (1, 2))
    assert first is not None
    part = rest[first.start() : second.start() if second else None]
    return f"{head}\n// ...\n{part.rstrip()}\n"


def output(what: str) -> str:
    """Lines of a command: from the first that starts so up to the next that starts so; "" is an empty one."""
    found = re.fullmatch(r'(.*?) \| from "(.*?)" to "(.*?)"', what)
    assert found is not None
    command, first, last = found.groups()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    start = next(number for number, line in enumerate(lines) if line.startswith(first))
    end = next(i for i, line in enumerate(lines) if i > start and (line.startswith(last) if last else not line))
    return "\n".join(lines[start:end]) + "\n"


def refusal(file: Path, code: str) -> str:
    """The error that loading `code` as this file ends in."""
    file.write_text(code)
    with pytest.raises(SpecError) as caught:
        load_chains(str(file))
    return str(caught.value).replace(f"{file.parent}/", "") + "\n"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_quotes_are_what_they_quote(page: Path, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    text = page.read_text()
    fresh = QUOTED.sub(lambda m: m[1] + quoted(m[2], m[3]) + m[5], text)
    fresh = REFUSED.sub(lambda m: m[1] + refusal(tmp_path / m[3], m[4]) + m[6], fresh)
    if request.config.getoption("--update-golden"):
        page.write_text(fresh)
        return
    assert fresh == text, f"{name_of(page)} quotes what is no longer so; `pytest --update-golden` writes it anew"


# ---------------------------------------------------------------- what runs


def snippets() -> Iterator[object]:
    for page in PAGES:
        for number, (kind, _, code) in enumerate(blocks(page, "python")):
            if kind != "refused":
                yield pytest.param(code, id=f"{name_of(page)}-{number}")


@needs_compiler
@pytest.mark.parametrize("code", list(snippets()))
def test_python_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("torch", "jax"):
        if f"import {library}\n" in code:
            pytest.importorskip(library)
    file = tmp_path / "snippet.py"
    file.write_text(code)
    monkeypatch.chdir(tmp_path)
    try:
        exec(compile(code, str(file), "exec"), {"__name__": "snippet"})
    except MissingError as error:
        pytest.skip(str(error).splitlines()[0])


def commands() -> Iterator[object]:
    """All but half a minute's work that tests/emitting/test_golden.py does as well."""
    seen = {"fusegen emit --check"}
    for page in PAGES:
        for _, _, block in blocks(page, "sh"):
            for line in (line.partition("#")[0].strip() for line in block.splitlines()):
                endless = line.startswith("fusegen watch")  # tests/cli/test_authoring.py ends it
                if line.startswith("fusegen ") and line not in seen and not endless:
                    seen.add(line)
                    yield pytest.param(page, line, id=f"{name_of(page)}: {line}")


@pytest.mark.parametrize(("page", "command"), list(commands()))
def test_commands_work_as_written(page: Path, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that looks like the checkout, with what the page tells to save. The cache is everybody's, but for a
    command that clears it."""
    if command == "fusegen cache clear":
        monkeypatch.setenv("FUSEGEN_CACHE_DIR", str(tmp_path / "cache"))
    for path in ROOT.iterdir():
        if path.name != "specs" or "specs/" not in shlex.split(command):
            (tmp_path / path.name).symlink_to(path)
    if not (specs := tmp_path / "specs").exists():  # golden sources show that every spec compiles
        specs.mkdir()
        for name in ("rmsnorm", "mlp"):
            (specs / f"{name}.py").symlink_to(ROOT / "specs" / f"{name}.py")
    for kind, name, code in blocks(page, "python"):
        if kind == "save":
            (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    if result.exit_code == MissingError.exit_code:
        pytest.skip(result.output.splitlines()[0])
    assert result.exit_code == 0, result.output
    assert result.stdout


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_of_a_kind_that_is_tested(page: Path) -> None:
    """Python runs, commands run, kernels are quoted; text is quoted, or of few lines that nothing prints."""
    for _, _, language, _ in BLOCK.findall(page.read_text()):
        assert language in LANGUAGES, f"{name_of(page)} has a block of {language or 'no language'}"
    assert all(kind in ("excerpt", "file") for kind, _, _ in blocks(page, "c++"))
    assert page.name == "export.md" or not list(blocks(page, "c"))  # whose C tests/exporting compiles
    for _, _, block in blocks(page, "sh"):
        for line in filter(None, (line.partition("#")[0].strip() for line in block.splitlines())):
            first, *rest = shlex.split(line)
            assert first in ("fusegen", "make", "pip", "python"), f"{name_of(page)}: {line}"
            assert first != "python" or rest[0] == "-m" or (ROOT / rest[0]).is_file(), f"{name_of(page)}: {line}"


@pytest.mark.parametrize("number", range(3))
def test_recipes_of_contributing_are_python(number: int) -> None:
    """Parts of files: they are compiled, and don't run by themselves."""
    code = [text for _, _, text in blocks(ROOT / "CONTRIBUTING.md", "python")][number]
    compile(code, "CONTRIBUTING.md", "exec")


# ---------------------------------------------------------------- what is named


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(without_code(page.read_text())):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        there = (page.parent / file).resolve() if file else page
        assert there.is_relative_to(ROOT), f"{name_of(page)}: {link} leads out of the checkout"
        assert there.is_file(), f"{name_of(page)}: {link} leads to no file"
        assert not anchor or anchor in anchors(there), f"{name_of(page)}: {link} leads to no heading"


def anchors(page: Path) -> set[str]:
    """Of headings, by the rules that GitHub and mkdocs share; a page that includes a file has that file's."""
    text = without_code(re.sub(r'^--8<-- "(.*)"$', lambda m: (ROOT / m[1]).read_text(), page.read_text(), flags=re.M))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in HEADING.findall(text)}


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", [*PAGES, OTHERS[0]], ids=name_of)
def test_named_files_are_there(page: Path) -> None:
    for path in PATH.findall(without_code(page.read_text())):
        assert (ROOT / path).exists(), f"{name_of(page)} names {path}, which is not there"


def test_every_page_stands_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"^ +- ([\w/]+\.md)$", text, re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(ROOT / "docs")) for page in PAGES[1:])


def test_every_public_name_stands_in_the_reference() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    shown = set(re.findall(r"^::: fusegen\.(\w+)$", text, re.MULTILINE))
    constants = {name for name, value in vars(fusegen).items() if isinstance(value, fusegen.DType)}
    assert set(fusegen.__all__) - constants - {"FusegenError"} | {"errors"} == shown
    assert all(f"`{name}`" in text for name in constants)


def test_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= README_LINES
    assert [len(code.splitlines()) <= EXCERPT_LINES for _, _, code in blocks(ROOT / "README.md", "c++")] == [True]


def test_every_make_target_is_there() -> None:
    text = "".join(page.read_text() for page in (*PAGES, *OTHERS))
    named = set(re.findall(r"(?:^|`)make (\w+)", text, re.MULTILINE))
    known = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test", "docs"} <= named <= known
