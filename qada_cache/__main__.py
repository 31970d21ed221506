"""The command `qada`, and `python -m qada_cache`."""

import sys

from .arguments import check_options, make_parser


def main(arguments: list[str] | None = None) -> int:
    """Run `qada`; returns the exit status. User errors are one line on stderr and status 1. In `tune` they are status
    2, as 1 says that no setting was kept."""
    options = make_parser().parse_args(arguments)
    try:
        check_options(options)
        from .commands import RUN  # and with them torch

        return RUN[options.command](options) or 0
    except (OSError, ValueError, NotImplementedError, ImportError) as error:
        print(f"qada {options.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if options.command == "tune" else 1
    except KeyboardInterrupt:
        print(f"qada {options.command}: interrupted, nothing was written", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
