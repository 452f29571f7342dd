"""The command ``longstep``, and ``python -m experiments.verbs``.

Importing the verbs takes most of a second. An interrupt ends the process at once then: there is nothing to tidy up.
"""

from __future__ import annotations

import os

_SAID = b"longstep: interrupted\n"
_EXIT_CODE = 130


def main() -> None:
    """Import the verbs and run one command; an interrupt is one line at any time."""
    try:
        import signal  # which takes a while of its own

        heard = signal.getsignal(signal.SIGINT)
        if heard is signal.default_int_handler:  # and not ignored, as in the background of a script
            signal.signal(signal.SIGINT, lambda *_: _end())
        from sim.base.garbage import collect_rarely

        collect_rarely()
        from experiments.verbs import cli

        signal.signal(signal.SIGINT, heard)
        cli.main()
    except KeyboardInterrupt:
        _end()


def _end() -> None:
    """End at once: an exception that hits an import can be caught, or be turned into another one, half-way."""
    os.write(2, _SAID)
    os._exit(_EXIT_CODE)


if __name__ == "__main__":
    main()
