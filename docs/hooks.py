"""
Adapts our Markdown, in the style of Hugging Face's docstrings, to the site. Also makes the tables of the pages:

    python docs/hooks.py  # regenerates options.md and api.md from the source
"""

import inspect
import pkgutil
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
REPOSITORY = "https://github.com/troll-trl/troll_trl/blob/main/"
WORD = r'<span class="word">\g<0></span>'  # `--max_prompt_tokens` and 1e-4 stay whole: browsers break after hyphens
NAMED = re.compile(r"^- \[`([\w.]+)`\].*$", re.MULTILINE)  # a line of api.md


def on_files(files, config):
    """Add the figures outside docs/ that the README, the first page, shows."""
    from mkdocs.structure.files import File

    for picture in re.findall(r"\((evidence/figures/.*?)\)", (ROOT / "README.md").read_text(encoding="utf-8")):
        files.append(File.generated(config, picture, abs_src_path=str(ROOT / picture)))


def on_page_markdown(markdown, page=None, **_):
    """Make the README the first page, point links out of docs/ to the repository, and replace names with docstrings."""
    if page and page.is_homepage:
        markdown = _home((ROOT / "README.md").read_text(encoding="utf-8"))
    elif page and page.file.src_uri == "api.md":
        markdown = re.sub(NAMED, r"::: \1", markdown)
    markdown = markdown.replace("](../README.md", "](README.md")
    return re.sub(r"(\]\()\.\./(?!\.)", rf"\1{REPOSITORY}", markdown)


def _home(readme):
    """Return the README with links as in docs/, without badges, which are images from other hosts, and without the link
    to the site."""
    readme = re.sub(r"\[!\[.*?\]\(.*?\)\]\(.*?\)\n|\s\[Documentation\]\(.*?\)", "", readme)
    readme = re.sub(r",\s\[all\spages\]\(docs/README\.md\)", "", readme)
    readme = re.sub(r"(?<!!)(\[[^\]]*\]\()(?!docs/|https:|#)", r"\1../", readme)
    return re.sub(r"(\]\()docs/", r"\1", readme)


def filled(text):
    """Return a page with its tables, and the lines of its names, regenerated from the source."""
    for name, table in {"options": options, "command": command}.items():
        mark, end = f"<!-- {name} -->\n", "\n<!-- end -->"
        if mark in text:
            before, _, rest = text.partition(mark)
            text = f"{before}{mark}\n{table()}\n{end}{rest.partition(end)[2]}"
    return re.sub(NAMED, lambda line: _described(line[1]), text)


def _described(name):
    """The line of a public name: where its source is, and the first sentence of its docstring."""
    what = pkgutil.resolve_name(name)
    path = Path(inspect.getsourcefile(inspect.unwrap(what))).relative_to(ROOT)
    sentence = re.split(r"(?<=\.)\s|:\s|\n\n", inspect.getdoc(what))[0]
    sentence = re.sub(r" ?\([^()]*(arXiv|Language)[^()]*\)|\[(?=TROLL)|\]\(http[^)]*\)", "", " ".join(sentence.split()))
    sentence = re.sub(r"\[`~?(?:[\w.]*\.)?(\w+)`\]", r"`\1`", sentence)
    return f"- [`{name}`](../{path.as_posix()}): {sentence.rstrip('.')}."


def options():
    """Every option that our configs add to TRL's. A dagger marks those that the asynchronous config lacks."""
    from dataclasses import fields

    from troll_trl import TrollGRPOConfig  # imports torch, which the other pages do not need
    from troll_trl.experimental.async_grpo import AsyncTrollGRPOConfig
    from troll_trl.trainers.config import troll_fields

    asynchronous = {option.name for option in fields(AsyncTrollGRPOConfig)}
    rows = [_row(option, "" if option.name in asynchronous else "†") for option in troll_fields(TrollGRPOConfig)]
    return _table(("option", "default", "meaning"), rows)


def command():
    """Every option that `troll grpo` and `troll rloo` add to the options of the trainer and the model."""
    from dataclasses import fields

    from troll_trl.cli.arguments import TrollScriptArguments

    return _table(
        ("option", "default", "meaning"), [_row(option) for option in fields(TrollScriptArguments) if option.init]
    )


def _row(option, mark=""):
    default = option.default_factory() if callable(option.default_factory) else option.default
    return f"`{option.name}`{mark}", f"`{default}`", option.metadata["help"].replace("%%", "%")


def _table(head, rows):
    lines = ["| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def on_page_content(html, **_):
    """Show [`~trl.GRPOConfig`] as `GRPOConfig`, and a parameter's type without the marks and the default that
    follow."""
    html = re.sub(r"\[(<code>[^<]+</code>)\]", r"\1", html)
    html = re.sub(r"<code>([^<]*)</code>", lambda code: f"<code>{_plain(code[1])}</code>", html)
    html = re.sub(r"<code>[^<]*</code>", lambda code: re.sub(r"[^\s<>]*-[^\s<>]*", WORD, code[0]), html)
    html = re.sub(r"(?s)<td.*?</td>", lambda cell: re.sub(r"<code>[^<]*</code>", _breakable, cell[0]), html)
    html = re.sub(r"(?s)(<(code|pre)\b.*?</\2>|<[^>]*>)|\b[\d.]+e-\d+", _whole_number, html)
    return re.sub(r'(?s)"language-bash.*?</div>', lambda block: re.sub(r"(?<=[\s>])--\w+", WORD, block[0]), html)


def _breakable(code):
    """Allow breaks between the parts of a long name in a table; style.css says on which screens. Unescape bars."""
    return re.sub(r"(?<=[A-Za-z])[._/](?=[A-Za-z])", r"\g<0><wbr>", code[0].replace(r"\|", "|"))


def _whole_number(found):
    return found[0] if found[1] else WORD.replace(r"\g<0>", found[0])


def _plain(code):
    code = re.sub(r"~[\w.]*\.(\w+)", r"\1", code)
    if "`" not in code:
        return code
    code = re.sub(r",? ?\*optional\*.*", "", code)
    return re.sub(r"\[(`[^`]+`)\]", r"\1", code).replace("`", "")


if __name__ == "__main__":
    for page in (ROOT / "docs" / "options.md", ROOT / "docs" / "api.md"):
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
