"""`moe_tk plan`: its table, its machine, its refusals."""

from __future__ import annotations

import pytest

from moe_tk.cli.main import main


def lines(capsys, *words: str) -> list[list[str]]:
    assert main(["plan", *words]) == 0
    return [line.split() for line in capsys.readouterr().out.splitlines()]


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def test_prints_both_accounts_and_the_pattern(capsys):
    shapes = "qwen3,seed,deepseek-v3"
    found = {tuple(line[:2]): line[2:7] for line in lines(capsys, "--shapes", shapes, "--tokens", "64,2048") if len(line) > 6}
    assert found["qwen3-30b-a3b", "64"] == ["132", "1", "1.01", "2.9", "two_kernel"]
    assert found["qwen3-30b-a3b", "2048"][-1] == "two_kernel" and float(found["qwen3-30b-a3b", "2048"][2]) > 1.2
    assert found["seed", "2048"][0] == "1556" and found["deepseek-v3", "64"][-1] == "serial"


def test_e4m3_has_accounts_of_its_own(capsys):
    found = {tuple(line[:2]): line[2:7] for line in lines(capsys, "--shapes", "seed", "--tokens", "64,8192", "--dtype", "e4m3")
             if len(line) > 6}
    assert found["seed", "64"][0] == "263" and found["seed", "64"][-1] == "two_kernel" and found["seed", "8192"][-1] == "serial"


def test_numbers_of_the_machine_can_be_given(capsys):
    out = lines(capsys, "--shapes", "4096,3072,64,8", "--tokens", "512", "--mode", "tp", "--wire-gbs", "50", "--gpu", "H100")
    assert out[0][0] == "H100:" and "50" in out[0] and "wire_gbs" in " ".join(out[0])
    assert any("two_kernel" in line for line in out)


@pytest.mark.parametrize("words, text", [
    (("--tokens", "64,x"), "--tokens is '64,x'"), (("--shapes", "nobody"), "nobody"), (("--wire-gbs", "0"), "wire_gbs is 0"),
    (("--sms", "0"), "sms is 0"), (("--world", "0"), "world is 0")])
def test_refuses_with_one_line(capsys, words, text):
    assert main(["plan", *words]) == 1
    assert text in capsys.readouterr().err
