"""What the site changes in our Markdown: links out of docs/ lead to the repository, and docstrings lose brackets."""

import re

REPOSITORY = "https://github.com/troll-trl/troll_trl/blob/main/"


def on_page_markdown(markdown, **_):
    return re.sub(r"(\]\()\.\./(?!\.)", rf"\1{REPOSITORY}", markdown)


def on_page_content(html, **_):
    """[`TrollGRPOConfig`] is how Hugging Face's docstrings name a class."""
    return re.sub(r"\[(<code>[^<]+</code>)\]", r"\1", html)
