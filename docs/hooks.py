"""What the site changes in our Markdown, which follows Hugging Face's docstrings."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
REPOSITORY = "https://github.com/troll-trl/troll_trl/blob/main/"
WORD = r'<span class="word">\g<0></span>'  # `--max_prompt_tokens` and 1e-4 stay whole: browsers break after hyphens


def on_files(files, config):
    """The README, which is the first page, shows a figure of the study."""
    from mkdocs.structure.files import File

    picture = "evidence/figures/rate.png"
    files.append(File.generated(config, picture, abs_src_path=str(ROOT / picture)))


def on_page_markdown(markdown, page=None, **_):
    """The README is the first page, tables replace their markers, and links out of docs/ lead to the repository."""
    if page and page.is_homepage:
        markdown = _home((ROOT / "README.md").read_text(encoding="utf-8"))
    for marker, table in {"<!-- options -->": options, "<!-- configs -->": configs}.items():
        if marker in markdown:
            markdown = markdown.replace(marker, table())
    markdown = markdown.replace("](../README.md", "](README.md")
    return re.sub(r"(\]\()\.\./(?!\.)", rf"\1{REPOSITORY}", markdown)


def _home(readme):
    """The README with links as in docs/, and the badge, a picture of another host, as a link."""
    readme = re.sub(r"\[!\[(.*?)\]\(.*?\)\]", r"[\1]", readme).replace(", [all pages](docs/README.md)", "")
    readme = re.sub(r"(?<!!)(\[[^\]]*\]\()(?!docs/|https:|#)", r"\1../", readme)
    return re.sub(r"(\]\()docs/", r"\1", readme)


def options():
    """Every option that our configs add to TRL's."""
    from dataclasses import fields

    from troll_trl import TrollGRPOConfig, TrollRLOOConfig  # imports torch, which the other pages do not need
    from troll_trl.experimental.async_grpo import AsyncTrollGRPOConfig
    from troll_trl.trainers.config import troll_fields

    found = {"GRPO": troll_fields(TrollGRPOConfig), "RLOO": troll_fields(TrollRLOOConfig)}
    every = {option.name: option for group in found.values() for option in group}
    found["asynchronous GRPO"] = [option for option in fields(AsyncTrollGRPOConfig) if option.name in every]
    rows = []
    for name, option in every.items():
        algorithms = [group for group, options in found.items() if name in {field.name for field in options}]
        only = "" if len(algorithms) == len(found) else f" For {' and '.join(algorithms)}."
        rows.append((f"`{name}`", f"`{option.default}`", option.metadata["help"] + only))
    return _table(("option", "default", "meaning"), rows)


def configs():
    """Every YAML file of configs/, with the first sentence of its comment."""
    from troll_trl.cli.settings.layers import configs_folder

    folder = configs_folder()
    names = sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))
    names.sort(key=lambda name: name.startswith(("base/", "accelerate/")))  # what nobody trains with comes last
    return _table(("name", "what"), [(f"`{name}`", _what(folder / f"{name}.yaml")) for name in names])


def _what(path):
    comment = re.match(r"(# .*\n)+", path.read_text(encoding="utf-8"))[0]
    return re.sub(r"\n?# ", " ", comment).strip().partition(". ")[0].removesuffix(".") + "."


def _table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def on_page_content(html, **_):
    """[`~trl.GRPOConfig`] is `GRPOConfig`, and a parameter's type loses the marks and the default that follow it."""
    html = re.sub(r"\[(<code>[^<]+</code>)\]", r"\1", html)
    html = re.sub(r"<code>([^<]*)</code>", lambda code: f"<code>{_plain(code[1])}</code>", html)
    html = re.sub(r"<code>[^<]*</code>", lambda code: re.sub(r"[^\s<>]*-[^\s<>]*", WORD, code[0]), html)
    html = re.sub(r"(?<=>)[\d.]+e-\d+(?=</th>)", WORD, html)
    return re.sub(r'(?s)"language-bash.*?</div>', lambda block: re.sub(r"(?<=[\s>])--\w+", WORD, block[0]), html)


def _plain(code):
    code = re.sub(r"~[\w.]*\.(\w+)", r"\1", code)
    if "`" not in code:
        return code
    code = re.sub(r",? ?\*optional\*.*", "", code)
    return re.sub(r"\[(`[^`]+`)\]", r"\1", code).replace("`", "")
