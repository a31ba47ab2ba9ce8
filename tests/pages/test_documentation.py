"""Links lead somewhere, and the tables that docs/hooks.py makes are up to date."""

import inspect
import re
import runpy
from dataclasses import fields

import pytest

import troll_trl
from tests.pages.page_texts import MARKDOWN, text_of
from tests.support.repository import ROOT
from troll_trl import TrollGRPOConfig, data, evaluation, rewards

DOCS = ROOT / "docs"
REPOSITORY = "https://github.com/troll-trl/troll_trl/blob/main/"
DOCUMENTS = [*MARKDOWN, ROOT / "tests" / "README.md", *sorted((ROOT / "evidence" / "tables").glob("*.md"))]


def without_code(page) -> str:
    return re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL)


def anchors(page) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    texts = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line) for line in re.findall(r"(?m)^#+ (.*)$", without_code(page))]
    return {re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-") for text in texts}


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    """On GitHub, where the pages outside of docs/ are, too. `make docs` checks the site's."""
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        path, _, anchor = link.replace(REPOSITORY, f"{ROOT}/").partition("#")
        if "://" not in path:
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not anchor or target.suffix != ".md" or anchor in anchors(target), link


@pytest.mark.parametrize("name", ["options", "api"])
def test_tables_of_the_source_are_those_of_the_page(name):
    page = text_of(DOCS / f"{name}.md")
    assert runpy.run_path(str(DOCS / "hooks.py"))["filled"](page) == page, "run: python docs/hooks.py"


def test_the_docstring_of_the_config_has_the_help_of_its_options():
    """For editors. The other configs refer to it."""
    ours = [base for base in TrollGRPOConfig.__mro__ if base.__module__.startswith("troll_trl")]
    # The field's own type is what transformers' parser has made of it
    declared = {name: kind for base in reversed(ours) for name, kind in vars(base).get("__annotations__", {}).items()}
    entries = []
    for option in fields(TrollGRPOConfig):
        if option.name in declared:
            kind = getattr(declared[option.name], "__name__", declared[option.name])
            default = "" if option.default is None else f", defaults to `{option.default!r}`"
            entries.append(f"{option.name} (`{kind}`, *optional*{default}): {option.metadata['help']}")
    arguments = re.search(r"\nArgs:\n(.*?)\n\n", inspect.getdoc(TrollGRPOConfig), re.DOTALL)[1]
    assert " ".join(arguments.split()) == " ".join(entries)


def test_every_option_of_the_config_has_a_row_in_the_table_of_compatibility():
    rows = [line.split("|")[1] for line in text_of(DOCS / "compatibility.md").splitlines() if line.startswith("| ")]
    named = set(re.findall(r"`(\w+)`", "".join(rows)))
    assert {option.name for option in fields(troll_trl.TrollGRPOConfig)} - named == set()


@pytest.mark.parametrize("package", [troll_trl, rewards, data, evaluation], ids=lambda package: package.__name__)
def test_every_public_name_is_in_the_api_reference(package):
    page = text_of(DOCS / "api.md")
    names = [name for name in package.__all__ if name != "__version__"]
    assert [name for name in names if f"- [`{package.__name__}.{name}`]" not in page] == []
