"""Training and inference in several processes, and what `torchrun` tells each of them by its environment."""

import os


def started() -> bool:
    """Return True in a process that `torchrun` has started with others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def processes_here() -> int:
    """Return how many processes `torchrun` has started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def restarts() -> int:
    """Return how often `torchrun` has started the processes again after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def launch() -> str | None:
    """Return a name of the launch that started these processes; it stays when they are restarted."""
    return f"{os.environ.get('TORCHELASTIC_RUN_ID')} {os.getppid()}" if started() else None


def first_here() -> bool:
    """Return True in the process that reports, before and after it has joined the others."""
    return os.environ.get("RANK", "0") == "0" or not started()
