"""BlockPool of a pool: who uses which, and which hold the beginning of a prompt that may come again.

A block holds the keys of as many tokens in every layer of its group. A block that prompts share is full and
is never written again, so that none is ever copied: what a request adds goes into blocks of its own.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Named:
    """The tokens whose keys a block holds, and the digest of all that stands before them."""

    parent: bytes
    tokens: Tokens

    @property
    def digest(self) -> bytes:
        """The name of this beginning of a prompt: that of its parent, continued by its tokens."""
        text = ",".join(map(str, self.tokens)).encode()
        return hashlib.sha256(self.parent + text).digest()


def chain(salt: str, prompt: Sequence[int], size: int) -> list[Named]:
    """Return the names of the full blocks of a prompt; prompts with another `salt` have others."""
    parent, names = hashlib.sha256(salt.encode()).digest(), []
    for start in range(0, len(prompt) - size + 1, size):
        names.append(Named(parent, tuple(prompt[start : start + size])))
        parent = names[-1].digest
    return names


class BlockPool:
    """The blocks of one pool. A block that nobody uses keeps its name until its room is needed."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.users = [0] * count
        self.free = set(range(count))  # without a user and without a name
        self.idle: OrderedDict[int, None] = OrderedDict()  # named, without a user, oldest first
        self.named: dict[int, Named] = {}
        self.found: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Number of blocks that can be taken."""
        return len(self.free) + len(self.idle)

    @property
    def used(self) -> int:
        """Number of blocks that requests use."""
        return self.count - self.available

    def take(self, after: int | None) -> int:
        """Take a block, the one right behind block `after` where it is free: neighbours are read in place."""
        if after is not None and after + 1 in self.free:
            block = after + 1
        elif self.free:
            block = self._roomy()
        else:
            block, _ = self.idle.popitem(last=False)
            self._forget(block)
        self.free.discard(block)
        self.users[block] = 1
        return block

    def _roomy(self) -> int:
        """Return a block with room behind it: the middle of the longest run of free blocks."""
        best, length, start = 0, 0, None
        for block in range(self.count + 1):
            if block in self.free:
                start = block if start is None else start
            elif start is not None:
                if block - start > length:
                    best, length = start, block - start
                start = None
        whole = best == 0 or best - 1 in self.named  # nobody is likely to grow into it
        return best if whole else best + length // 2

    def share(self, block: int) -> None:
        """Count one more user of a named block."""
        self.idle.pop(block, None)
        self.users[block] += 1

    def release(self, block: int) -> None:
        """Count one user less."""
        self.users[block] -= 1
        if self.users[block]:
            return
        if block in self.named:
            self.idle[block] = None
        else:
            self.free.add(block)

    def name(self, block: int, name: Named) -> None:
        """Let later prompts find this block, which is full."""
        if block not in self.named and name.digest not in self.found:
            self.named[block], self.found[name.digest] = name, block

    def find(self, name: Named) -> int | None:
        """Return the block with these tokens after the same beginning; equal digests alone do not count."""
        block = self.found.get(name.digest)
        return block if block is not None and self.named[block] == name else None

    def _forget(self, block: int) -> None:
        del self.found[self.named.pop(block).digest]
