"""What the documents name exists: options, tests, links, packages, metrics. Nothing points outside the repository."""

import inspect
import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from types import SimpleNamespace

from repository import ROOT

sys.path.insert(0, str(ROOT / "docs"))

import hooks
import pytest
import yaml
from trl import GRPOTrainer, RLOOTrainer

import troll_trl
from troll_trl import TrollGRPOConfig, TrollRLOOConfig, __version__
from troll_trl.cli.arguments import TrollScriptArguments, training_parser
from troll_trl.trainers.config import troll_fields

DOCS = ROOT / "docs"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
REPOSITORY = PROJECT["project"]["urls"]["Repository"]
TABLE = (DOCS / "compatibility.md").read_text(encoding="utf-8")

# What the tables name except options
OTHER_NAMES = {
    "output_router_logits",
    "lm_head",
    "nn.DataParallel",
    "modules_to_save",
    "env_mask",
    "log_metric",
    "log_extra",
    "None",
    "eager",
}


def named_options():
    """Backticked names of the first column of the tables."""
    listed = []
    for line in TABLE.splitlines():
        if line.startswith("| ") and "|---" not in line:
            listed += re.findall(r"`([^`]+)`", line.split("|")[1])
    return [name for name in listed if name not in OTHER_NAMES]


def all_options():
    options = {option.name for config in (TrollGRPOConfig, TrollRLOOConfig) for option in fields(config)}
    for trainer in (GRPOTrainer, RLOOTrainer):
        options |= set(inspect.signature(trainer.__init__).parameters) - {"self"}
    return options


def test_every_option_is_in_the_table_and_no_other():
    """A new option of TRL's needs a row."""
    listed = named_options()
    assert set(listed) - all_options() == set()
    assert all_options() - set(listed) == set()
    assert {name for name in listed if listed.count(name) > 1} == {"loss_type"}, "which is partly refused"


@pytest.mark.parametrize("page", ["docs/design.md", "docs/kernels.md", "tests/README.md", "CONTRIBUTING.md"])
def test_files_that_contributors_are_sent_to_exist(page):
    sources = {
        path
        for folder in ("math_answers", "troll_trl", "tests", "benchmarks", "scripts", "docs")
        for path in (ROOT / folder).rglob("*.py")
    }
    named = re.findall(r"`[^`]*?([\w/]+\.py)\b", (ROOT / page).read_text(encoding="utf-8"))
    assert named and [name for name in named if not any(path.match(name) for path in sources)] == []


def test_names_in_the_design_exist():
    """The way of the old policy, through functions and fields."""
    ways = (DOCS / "design.md").read_text(encoding="utf-8").partition("### Where to start")[2].partition("\n## ")[0]
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "troll_trl").rglob("*.py"))
    named = set(re.findall(r"`(\w+)`", ways))
    assert named and {name for name in named if not re.search(rf"\b{name}\b", sources)} == set()


def documents():
    return sorted(ROOT.glob("*.md")) + sorted(
        path for folder in ("docs", "configs", "tests", "evidence") for path in (ROOT / folder).rglob("*.md")
    )


def links(page):
    return links_of(page.read_text(encoding="utf-8"))


def links_of(text):
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", text)


def test_names_of_other_recipes_are_ours_or_lead_to_ours():
    lines = (DOCS / "from-other-recipes.md").read_text(encoding="utf-8").splitlines()
    rows = [line.split("|")[1:3] for line in lines if line.startswith("| ") and "troll grpo" not in line]
    ours, open_r1 = ({name for row in rows for name in re.findall(r"`([a-z_0-9]+)", row[side])} for side in (0, 1))
    parser = training_parser("grpo", "x")
    assert ours and open_r1 and ours - parser.hints.keys() - parser.only_launcher == set()


@pytest.mark.parametrize("page", documents(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_into_the_repository_lead_somewhere(page):
    raw = REPOSITORY.replace("github.com", "raw.githubusercontent.com") + "/main/"
    for link in links(page):
        here = next((link.removeprefix(start) for start in (f"{REPOSITORY}/blob/main/", raw) if start in link), None)
        if here is not None:
            assert (ROOT / here).is_file(), link
        elif "://" not in link and not link.startswith("#"):
            assert (page.parent / link.partition("#")[0]).exists(), link


def headings(page):
    """The anchors that GitHub gives to the headings of a page."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    texts = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line) for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-") for text in texts}


@pytest.mark.parametrize("page", documents(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_headings_lead_to_one(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if anchor and "://" not in link and target.suffix == ".md":
            assert anchor in headings(target), link


def test_links_of_the_readme_are_relative_here_and_absolute_on_a_package_index():
    """A page that shows the README alone has no files next to it. What the build substitutes, this does too."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{REPOSITORY}/blob" not in text and "raw.githubusercontent.com" not in text
    for rule in PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    relative, absolute = links_of((ROOT / "README.md").read_text(encoding="utf-8")), links_of(text)
    pictures = [link for link in absolute if link.startswith("https://raw.githubusercontent.com/")]
    drawn = text.count("![") - text.count("[![")  # a badge is a picture of another site
    assert len(absolute) == len(relative) and len(pictures) == drawn > 0
    assert [link for link in absolute if not link.startswith("https://")] == []


def test_types_on_the_site_keep_their_brackets():
    """`list[str]` was `liststr`."""
    written = "<code>`list[list | dict]` or [`~trl.GRPOConfig`], *optional*</code> and [<code>TrustRegionOutput</code>]"
    assert (
        hooks.on_page_content(written)
        == "<code>list[list | dict] or GRPOConfig</code> and <code>TrustRegionOutput</code>"
    )


def test_a_line_of_the_site_does_not_end_within_a_flag():
    """Browsers break lines after a hyphen: `--` was at the end of one, and `max_prompt_tokens` in the next."""
    word = '<span class="word">--max_prompt_tokens</span>'
    block = '<div class="language-bash">a<span> </span>--max_prompt_tokens</div>'
    for html in ("<code>a --max_prompt_tokens</code>", block):
        assert hooks.on_page_content(html) == html.replace("--max_prompt_tokens", word)


def test_a_number_of_the_site_stays_whole():
    """A line ended with "1e-", and "4" was in the next."""
    word = '<span class="word">1e-4</span>'
    html = '<p id="at-1e-4">at 1e-4</p><td>1e-4</td><a href="#1e-4">1e-4</a><pre><code>1e-4</code></pre>'
    shown = f'<p id="at-1e-4">at {word}</p><td>{word}</td><a href="#1e-4">{word}</a><pre><code>{word}</code></pre>'
    assert hooks.on_page_content(html) == shown


def test_a_long_name_in_a_table_may_break_where_its_parts_meet():
    """The table of options was wider than a telephone, and the tables of other recipes than any screen."""
    html = "<td><code>arr.actor.use_kl_loss: 0.05</code></td><p><code>use_kl_loss</code></p>"
    shown = html.replace("arr.actor.use_kl_loss", "arr.<wbr>actor.<wbr>use_<wbr>kl_<wbr>loss", 1)
    assert hooks.on_page_content(html) == shown
    assert hooks.on_page_content(r"<td><code>\|S\|</code></td>") == "<td><code>|S|</code></td>"
    style = (DOCS / "style.css").read_text(encoding="utf-8")
    assert style.count("td wbr { display: inline; }") == 2 and "td wbr { display: none; }" in style


def test_the_first_page_of_the_site_is_the_readme():
    """`make docs` checks its links."""
    page = hooks.on_page_markdown("", SimpleNamespace(is_homepage=True))
    assert "](choosing.md" in page and "](docs/" not in page and "](evidence/figures/rate.png)" in page
    assert f"]({REPOSITORY}/blob/main/evidence/README.md)" in page and "badge.svg" not in page


@pytest.mark.parametrize("name", ["options", "api"])
def test_tables_of_the_source_are_those_of_the_page(name):
    """On GitHub these pages were empty marks. `python docs/hooks.py` writes them."""
    page = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    assert hooks.filled(page) == page, "run: python docs/hooks.py"
    other = re.sub(r"^\| `.*\n", "", page, flags=re.MULTILINE).replace("): ", "): Not ")
    assert other != page and hooks.filled(other) == page


def test_the_page_of_options_has_every_option_of_ours():
    page = (DOCS / "options.md").read_text(encoding="utf-8")
    rows = [re.split(r"(?<!\\) \| ", line) for line in page.splitlines() if line.startswith("| `")]
    ours = {option.name for config in (TrollGRPOConfig, TrollRLOOConfig) for option in troll_fields(config)}
    ours |= {option.name for option in fields(TrollScriptArguments) if option.init}
    named = [(row[0].removeprefix("| ").strip("`"), len(row)) for row in rows]
    assert sorted(named) == sorted((name, 3) for name in ours)
    assert all(len(row[-1].removesuffix(" |")) > 8 for row in rows)


def test_the_page_of_options_describes_every_trust_region():
    """RLOO's description, which has no mask, took the place of GRPO's."""
    [row] = [line for line in (DOCS / "options.md").read_text().splitlines() if line.startswith("| `trust_region`")]
    assert all(f"'{kind}'" in row for kind in TrollGRPOConfig._kinds)


def test_the_site_shows_the_docstrings_of_the_names():
    page = SimpleNamespace(is_homepage=False, file=SimpleNamespace(src_uri="api.md"))
    shown = hooks.on_page_markdown((DOCS / "api.md").read_text(encoding="utf-8"), page)
    names = re.findall(r"^::: ([\w.]+)$", shown, re.MULTILINE)
    assert (
        len(names) > 20
        and "- [`" not in shown
        and set(troll_trl.__all__) - {"__version__"} <= {name.removeprefix("troll_trl.") for name in names}
    )


def test_every_package_is_in_the_design():
    tree = (DOCS / "design.md").read_text(encoding="utf-8").partition("\n## The parts")[2]
    roots = ("math_answers", "troll_trl")
    packages = {path.parent.name for root in roots for path in (ROOT / root).rglob("__init__.py")}
    assert packages and packages <= set(re.findall(r"^ *(\w+)/\s", tree, flags=re.MULTILINE))


def test_every_metric_is_in_its_table():
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "troll_trl").rglob("*.py"))
    logged = set(re.findall(r'"(troll/\w+)"', sources))
    table = set(re.findall(r"`(troll/\w+)`", (DOCS / "choosing.md").read_text(encoding="utf-8")))
    assert "troll/kl_max" in logged and logged == table


def test_the_version_stands_in_changelog_and_citation():
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"version: {__version__}\n" in citation and REPOSITORY in citation


def test_nothing_points_outside_of_the_repository():
    """Configs, benchmarks and pages named folders beside the clone. CI alone may look for one there."""
    outside = "/".join(("..", "shared"))
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("no git clone: a file that is not the repository's may name anything")
    files = [ROOT / name for name in tracked.stdout.splitlines() if name != ".ci/run"]
    assert [path for path in files if path.is_file() and outside.encode() in path.read_bytes()] == []


def test_messages_in_the_index_of_errors_are_ours():
    """Someone who searches the page for a message must find it."""
    sources = "".join(
        path.read_text(encoding="utf-8")
        for name in ("troll_trl", "math_answers")
        for path in (ROOT / name).rglob("*.py")
    )
    sources = re.sub(r'"\s*f?"', "", sources)  # a message over several lines
    page = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8").partition("## Errors")[2]
    rows = re.findall(r"^\| (``?)(.+?) ?\1 \|", page, re.MULTILINE)
    assert rows
    theirs = {"Your setup doesn't support bf16/gpu"}  # of transformers
    assert [message for _, message in rows if message not in sources and message not in theirs] == []
    # Code that contains a backtick needs two around it: two messages were cut in half on the page
    assert [message for ticks, message in rows if "`" in message and ticks != "``"] == []


def test_the_completions_of_the_recipes():
    page = " ".join((ROOT / "docs" / "recipes.md").read_text(encoding="utf-8").split())
    batch, one_gpu = (
        yaml.safe_load((ROOT / "configs" / file).read_text())
        for file in ("base/batch.yaml", "qwen3-0.6b/gsm8k-one-gpu.yaml")
    )
    rollouts = batch["max_steps"] / 8
    whole, first = (round(rollouts * config["generation_batch_size"], -3) for config in (batch, one_gpu))
    assert f"generates {whole / 1e6:.0f} million completions, or {first:,.0f} in the first row, and" in page
    assert batch["num_generations_eval"] == 1 and "one completion for each problem" in page
    evaluations = batch["max_steps"] // batch["eval_steps"]
    assert f"evaluates {evaluations} times (`eval_steps: {batch['eval_steps']}`)" in page
