"""Users' mistakes: one line that names the field, the value and what would be right, and exit code 2."""

import sys


class UserError(Exception):
    """What the person at the keyboard can mend. The message is one line, written for that person."""


def exit_on_user_error(main):
    """Call `main()`; a UserError becomes its one line on stderr and exit code 2, Ctrl-C exit code 130."""
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
