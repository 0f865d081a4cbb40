import subprocess
import sys

import pytest

from keras_monitored import cli, demo


@pytest.mark.parametrize("arguments", [[], ["dmeo"], ["demo", "--outptu", "x"]])
def test_a_command_line_that_says_nothing_or_nonsense_is_an_error(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "usage: python -m keras_monitored" in capsys.readouterr().err


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    assert demo.HELP in " ".join(capsys.readouterr().out.split())


def test_the_exit_status_is_the_commands_own(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(demo, "run", lambda arguments: seen.append(arguments.output) or 7)
    assert cli.main(["demo", "--output", str(tmp_path)]) == 7
    assert seen == [tmp_path]


def test_the_package_can_be_run():
    done = subprocess.run([sys.executable, "-m", "keras_monitored", "nothing"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "invalid choice: 'nothing'" in done.stderr
