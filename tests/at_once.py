"""pytest -p tests.at_once: a failure is printed when it happens, not at the end of the run, which a limit may cut off; and how
long a test took, where that is long."""

from __future__ import annotations

import pytest

SLOW_S = 3.0
_terminal = None


def pytest_sessionstart(session):
    global _terminal
    _terminal = session.config.pluginmanager.get_plugin("terminalreporter")


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report):
    if report.failed:
        printed = "".join(f"\n--- {name}\n{text[-2000:]}" for name, text in report.sections)
        _terminal.write(f"\n{report.longreprtext}{printed}\n")
    if report.failed or report.duration > SLOW_S:
        _terminal.write_line(f"{report.duration:.1f} s {report.when}")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    session.config.option.tbstyle = "no"  # failures are not printed again
