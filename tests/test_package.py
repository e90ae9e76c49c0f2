"""What a process gets from `import l2l_compile`, and what a package index shows."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import l2l_compile
from l2l_compile import errors

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MOST_SECONDS = 0.05
SCRIPT = """
import sys, time, torch
before, start = set(sys.modules), time.thread_time()
import l2l_compile
print(time.thread_time() - start, "torch._dynamo" in set(sys.modules) - before)
model = torch.compile(torch.nn.Linear(2, 2), backend="l2l", options={"block_compiler": "eager", "device": "cpu"})
model(torch.ones(3, 2)).sum().backward()
print(len(l2l_compile.programs(model)))
"""


def test_an_import_takes_no_time_beyond_that_of_torch():
    """Seconds of its thread: the machine may do other things. The backend needs no import, and finds its names later."""
    printed = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True).stdout.split()
    seconds, imports_dynamo, programs = printed
    assert float(seconds) < MOST_SECONDS and imports_dynamo == "False" and programs == "1"


def test_names_are_those_of_the_package():
    assert set(l2l_compile.__all__) == set(l2l_compile._MODULE_OF) <= set(dir(l2l_compile))
    for name in l2l_compile.__all__:
        assert getattr(l2l_compile, name).__name__ == name
    assert l2l_compile.session.Session and importlib.import_module("l2l_compile.session") is l2l_compile.session
    with pytest.raises(AttributeError, match="'l2l_compile' has no attribute 'explian'"):
        l2l_compile.explian  # noqa: B018


def test_every_error_is_a_name_of_the_package():
    own = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.L2LError)}
    assert own == {name for name in l2l_compile.__all__ if name.endswith("Error")}


def test_metadata_says_who_for_whom_and_how():
    assert PROJECT["authors"] == [{"name": re.findall(r"^  - name: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[0]}]
    assert len(PROJECT["keywords"]) >= 5 and PROJECT["license"] == "Apache-2.0"
    kinds = {classifier.split(" :: ")[0] for classifier in PROJECT["classifiers"]}
    assert kinds >= {"Development Status", "Intended Audience", "Operating System", "Programming Language", "Topic", "Typing"}
    assert not any(classifier.startswith("License") for classifier in PROJECT["classifiers"]), "the license expression says it"
    assert (ROOT / "l2l_compile" / "py.typed").is_file()


def test_the_page_of_a_package_index_leads_nowhere_relative():
    """Links and pictures of a README are relative, and an index has no files beside it."""
    shown = (ROOT / PROJECT["readme"]).read_text()
    links = re.findall(r"\]\(([^)]+)\)", shown) + re.findall(r"(?:src|href)=\"([^\"]+)", shown)
    assert links and all(link.startswith("https://") for link in [*links, *PROJECT["urls"].values()])


def test_the_page_of_a_package_index_says_what_the_readme_says():
    shown, readme = ((ROOT / name).read_text() for name in (PROJECT["readme"], "README.md"))
    assert re.findall(r"```.*?```", shown, re.DOTALL) == re.findall(r"```diff.*?```", readme, re.DOTALL)
    first = " ".join(readme.split("\n\n")[1].split()).split(". ")[0]
    assert " ".join(shown.split()).startswith(f"# l2l-compile {first}")


def test_every_extra_is_explained_and_report_needs_no_browser():
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "installing.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(PROJECT["optional-dependencies"])
    assert [re.split(r"[<>=~]", need)[0] for need in PROJECT["optional-dependencies"]["report"]] == ["notebook"]


def test_no_text_advises_a_release_that_does_not_exist():
    """`pip install l2l-compile` finds nothing before a release: errors name the library, documents the checkout."""
    advice = re.compile(r"pip install [^\n]*l2l[-_]compile(?!.*\.whl)")
    folders = ("l2l_compile", "passes", "tests", "examples", "docs")
    files = [*ROOT.glob("*"), *(path for name in folders for path in (ROOT / name).rglob("*"))]
    texts = [path for path in files if path.suffix in (".py", ".md", ".ipynb")]
    found = [str(p.relative_to(ROOT)) for p in texts if p != Path(__file__) and advice.search(p.read_text(errors="replace"))]
    assert not found


def test_names_of_tests_are_short():
    tests = list((ROOT / "tests").rglob("*.py"))
    names = [name for path in tests for name in re.findall(r"def (test_\w+)", path.read_text())]
    assert names and not [name for name in names if len(name) > 60]


def test_public_classes_and_modules_have_one_name_each():
    """A name that is searched for has one place. `__init__.py` and `__main__.py` stand in every package."""
    places: dict[str, list[str]] = {}
    for root in ("l2l_compile", "passes"):
        for path in sorted((ROOT / root).rglob("*.py")):
            if not path.stem.startswith("__"):
                places.setdefault(f"module {path.stem}", []).append(str(path.relative_to(ROOT)))
            classes = (n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef))
            for name in (n for n in classes if not n.startswith("_")):
                places.setdefault(f"class {name}", []).append(str(path.relative_to(ROOT)))
    assert len(places) > 500
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
