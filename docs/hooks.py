"""What the site changes in our Markdown, which follows Hugging Face's docstrings."""

import re

REPOSITORY = "https://github.com/troll-trl/troll_trl/blob/main/"


def on_page_markdown(markdown, **_):
    """Links out of docs/ lead to the repository."""
    return re.sub(r"(\]\()\.\./(?!\.)", rf"\1{REPOSITORY}", markdown)


def on_page_content(html, **_):
    """[`~trl.GRPOConfig`] is `GRPOConfig`, and a parameter's type loses the marks and the default that follow it."""
    html = re.sub(r"\[(<code>[^<]+</code>)\]", r"\1", html)
    return re.sub(r"<code>([^<]*)</code>", lambda code: f"<code>{_plain(code[1])}</code>", html)


def _plain(code):
    code = re.sub(r"~[\w.]*\.(\w+)", r"\1", code)
    if "`" not in code:
        return code
    code = re.sub(r",? ?\*optional\*.*", "", code)
    return re.sub(r"\[(`[^`]+`)\]", r"\1", code).replace("`", "")
