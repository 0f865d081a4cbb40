"""The commands of `python -m keras_monitored`.

Each is a module with `HELP`, `add_arguments(parser)` and `run(arguments)`, which returns the exit status.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from keras_monitored import demo

_COMMANDS = {"demo": demo}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: The words after `python -m keras_monitored`. Defaults to those of this process.

    Returns:
        The exit status: 0 if the command did its job.

    Raises:
        SystemExit: If the command line can't be understood, with status 2, or asks for help.
    """
    parser = argparse.ArgumentParser(prog="python -m keras_monitored", description="Monitored training for Keras 3.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command in _COMMANDS.items():
        its_parser = commands.add_parser(name, help=command.HELP, description=command.__doc__)
        command.add_arguments(its_parser)
        its_parser.set_defaults(run=command.run)
    parsed = parser.parse_args(arguments)
    return int(parsed.run(parsed))
