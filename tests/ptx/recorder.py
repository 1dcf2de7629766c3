"""The command line of a recorder: `python -m tests.ptx.NAME COMMAND FOLDER`."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable, Mapping


def recorder(description: str, commands: Mapping[str, Callable[[pathlib.Path], None]]) -> None:
    """Runs the command that was asked for, on the folder of the recording."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=commands)
    parser.add_argument("folder", type=pathlib.Path)
    options = parser.parse_args()
    commands[options.command](options.folder)
