"""Check the laws of a family for some members: `python -m atoll.testing attacks sign_flip my_pkg.my_mod:attack`."""

from __future__ import annotations

import sys

from atoll.core.errors import AtollError
from atoll.testing.law import LawError, cases

USAGE = "usage: python -m atoll.testing FAMILY [NAME or MODULE:FUNCTION ...]; without a name it checks all members"


def main(arguments: list[str]) -> int:
    """Print each law and whether it holds; return the exit code, which is 1 if one is broken."""
    if not arguments or arguments[0].startswith("-"):
        print(USAGE)
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    try:
        every = cases(*arguments)
    except AtollError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    broken = 0
    for case in every:
        try:
            case.check()
        except LawError as error:
            broken += 1
            print(f"BROKEN  {error}")
        else:
            print(f"holds   {case}")
    print(f"{len(every)} laws, {broken} broken")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
