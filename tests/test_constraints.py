"""The two environments of the tests have the same versions."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def pins(file: str) -> dict[str, str]:
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_the_vllm_environment_has_the_tested_versions():
    tested, with_vllm = pins("constraints.txt"), pins("constraints-vllm.txt")
    differ = {name for name in tested.keys() & with_vllm.keys() if tested[name] != with_vllm[name]}
    assert differ == {"numpy"}, "vLLM's mistral-common asks for one below 2.4"
    only_in_extras = {"bitsandbytes", "deepspeed", "einops", "hjson", "msgpack", "ninja", "nvidia-ml-py", "py-cpuinfo"}
    assert tested.keys() - with_vllm.keys() <= only_in_extras
