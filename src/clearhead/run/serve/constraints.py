"""Forms that others send, tried first in a process of their own: one that takes too long ends nothing else.

A schema or an expression of a few letters can ask for minutes and gigabytes before its first token. The
library's own limits catch most of them. What they miss meets the system's limits on time and memory here.
"""

import functools
import json
import subprocess
import sys
import threading

from clearhead.errors import BusyError, ClearheadError, first_line, refuse
from clearhead.run.generate.forms import LONGEST, Form, check_matcher, compiled, vocabulary_of

SECONDS, BYTES = 2, 1 << 30  # of the processor and of memory, for one form
PATIENCE = 30.0  # seconds by the clock, on a machine that is busy
STEPS = 32  # tokens that are written on trial
AT_ONCE, WAITING = 4, 2.0  # forms tried at the same time, and seconds that another one waits
TRIALS = threading.BoundedSemaphore(AT_ONCE)


def check_form(form: Form) -> None:
    """Refuse a form that is wrong, or that takes too much; one that was tried already costs nothing."""
    refuse(len(form[1]) > LONGEST, f"{form[0]} has more than {LONGEST:,} characters: give a smaller one")
    line = _tried(form)
    refuse(line, line)


@functools.lru_cache(maxsize=1024)
def _tried(form: Form) -> str:
    """Return what is wrong with a form, in one line; nothing if it can be followed."""
    if not TRIALS.acquire(timeout=WAITING):
        raise BusyError(f"{AT_ONCE} forms are being tried now: try again later")
    large = f"{form[0]} takes more than {SECONDS} seconds or {BYTES >> 20} MiB to follow: give a simpler one"
    try:
        command = [sys.executable, "-P", "-m", __name__]
        made = subprocess.run(command, input=json.dumps(form).encode(), capture_output=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return large
    finally:
        TRIALS.release()
    return made.stdout.decode() if made.returncode == 0 else large


def _limit() -> None:
    try:
        import resource
    except ImportError:  # on Windows the clock alone ends a trial
        return
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))


def main() -> None:
    """Read a form, follow it for some tokens, and print what is wrong with it."""
    _limit()
    kind, text = json.load(sys.stdin)
    tokens = [bytes([value]) for value in range(256)]
    try:
        matcher = compiled(vocabulary_of(tokens), (kind, text))
        for _ in range(STEPS):
            allowed = int.from_bytes(matcher.compute_bitmask(), "little")
            check_matcher(matcher, (kind, text))
            matcher.consume_token((allowed & -allowed).bit_length() - 1)  # the first one
    except (ClearheadError, RecursionError) as error:
        print(first_line(error), end="")


if __name__ == "__main__":
    main()
