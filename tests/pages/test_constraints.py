"""The two environments of the tests have the same versions."""

from repository import ROOT


def pins(file: str) -> dict[str, str]:
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_the_vllm_environment_replaces_the_version_of_numpy_alone():
    tested, added = pins("constraints.txt"), pins("constraints-vllm.txt")
    assert {name for name in tested.keys() & added.keys() if tested[name] != added[name]} == {"numpy"}
    # pip takes any spelling of a name, the Makefile's rule does not
    plain = lambda names: {name.lower().replace("_", "-") for name in names}
    assert plain(tested) & plain(added) == plain(tested.keys() & added.keys())
