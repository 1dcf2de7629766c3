"""Command line: python -m reference.ptx count <operator> <size> --arch sm_100a"""

from __future__ import annotations

import argparse


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m reference.ptx", description="The PTX machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    count = commands.add_parser("count", help="what an operator's kernels move and compute, against the minimum")
    count.add_argument("operator")
    count.add_argument("size", help="such as 1x1; an unknown one says what its operator takes")
    count.add_argument("--arch", choices=("sm_90a", "sm_100a"), default="sm_100a")
    options = parser.parse_args(argv)
    from . import count as counting

    if options.operator not in counting.OPERATORS:
        parser.error(f"no operator {options.operator}; there are {', '.join(counting.OPERATORS)}")
    try:
        print(counting.text(options.operator, options.size, options.arch))
    except (ValueError, NotImplementedError) as e:
        parser.error(str(e))


if __name__ == "__main__":
    main()
