"""The `moe_tk` command: its table of subcommands, its exit statuses."""

from __future__ import annotations

import sys
import types

import pytest

from moe_tk.cli import main as cli
from moe_tk.errors import ScheduleError


@pytest.fixture
def command(monkeypatch):
    """Add a subcommand `try` whose run() is the given function; `ghost` has no module."""

    def install(run) -> None:
        module = types.ModuleType("moe_tk_try")
        module.__spec__ = types.SimpleNamespace()
        module.add_arguments = lambda parser: parser.add_argument("--number", type=int)
        module.run = run
        monkeypatch.setitem(sys.modules, "moe_tk_try", module)
        table = (cli.Subcommand("try", "moe_tk_try", "a try"), cli.Subcommand("ghost", "moe_tk.cli.ghost", "no module"))
        monkeypatch.setattr(cli, "available", lambda: real_available(table))

    real_available = cli.available
    return install


def test_run_gets_the_arguments_and_gives_the_status(command):
    command(lambda args: args.number)
    assert cli.main(["try", "--number", "5"]) == 5


def test_missing_module_is_not_offered(command, capsys):
    command(lambda args: 0)
    with pytest.raises(SystemExit) as caught:
        cli.main(["ghost"])
    assert caught.value.code == 2
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    out = capsys.readouterr().out
    assert "try" in out and "ghost" not in out


@pytest.mark.parametrize("words", [[], ["nonsense"], ["try", "--number", "x"], ["try", "--wrong"]])
def test_wrong_usage_is_status_2(words, command, capsys):
    command(lambda args: 0)
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2 and "usage: moe_tk" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "status", "text"), [
    (ScheduleError("slots[3] is 7, wanted 5"), 1, "moe_tk: ScheduleError: slots[3] is 7, wanted 5\n"),
    (KeyboardInterrupt(), 130, "moe_tk: interrupted\n"),
])
def test_errors_are_one_message(error, status, text, command, capsys):
    def run(args):
        raise error

    command(run)
    assert cli.main(["try"]) == status
    assert capsys.readouterr().err == text


def test_bugs_keep_their_traceback(command):
    def run(args):
        raise ZeroDivisionError

    command(run)
    with pytest.raises(ZeroDivisionError):
        cli.main(["try"])


def test_only_the_wanted_subcommand_is_imported(monkeypatch):
    imported = []
    monkeypatch.setattr(cli.importlib, "import_module", lambda name: imported.append(name) or sys.modules[__name__])
    monkeypatch.setattr(sys.modules[__name__], "add_arguments", lambda parser: None, raising=False)
    monkeypatch.setattr(sys.modules[__name__], "run", lambda args: 0, raising=False)
    assert cli.main(["build"]) == 0
    assert imported == ["moe_tk.cli.build"]
