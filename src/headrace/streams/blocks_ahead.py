"""The blocks that a consumer takes, turn after turn. Those of remote files are fetched before their turn.

Blocks that follow each other in a file, as they do if nothing is shuffled, are fetched together, about 8 MB in one
request. Two such requests are under way while a block is read, or more if they are smaller.
"""

from headrace.readers.spans import Span, expect_together
from headrace.streams.blocks import Blocks, Turns

_TOGETHER_BYTES = 8 << 20
_AHEAD_BYTES = 2 * _TOGETHER_BYTES
_MOST_AHEAD = 16
"""How many requests are made ahead at most."""


class BlocksAhead:
    def __init__(self, blocks: Blocks, turns: Turns) -> None:
        self._blocks, self._turns = blocks, turns
        self._is_remote = any(file.is_remote for file in blocks.files)
        self._begun: dict[int, Span] = {}
        """By turn: the blocks that were asked for."""
        self._following = 0
        """The first turn whose block was not asked for."""

    def take(self, turn: int) -> Span:
        """The block of a turn. Raises IndexError after the last turn."""
        if not self._is_remote:
            return self._block(turn)
        if turn not in self._begun:
            self._begun.clear()
            self._following = turn
            self._begin_group()
        block = self._begun.pop(turn)
        self._begin_ahead()
        return block

    def _begin_ahead(self) -> None:
        """Ask for blocks until enough of them are under way, or until there are no more."""
        waiting = list(self._begun.values())
        under_way = sum(_fetched_first(block) for block in waiting)
        requests = len({id(block.raw) for block in waiting})
        while under_way < _AHEAD_BYTES and requests < _MOST_AHEAD:
            try:
                under_way += self._begin_group()
            except IndexError:
                return
            requests += 1

    def _begin_group(self) -> int:
        """Ask for the next block, and for those that follow it in its file. Returns about how many bytes that are."""
        group = [self._block(self._following)]
        while (following := self._next_in_file(group)) is not None:
            group.append(following)
        for block in expect_together(group):
            self._begun[self._following] = block
            self._following += 1
        return sum(map(_fetched_first, group))

    def _next_in_file(self, group: list[Span]) -> Span | None:
        """The block of the turn after the group, if it begins where the group ends and the group is not too large."""
        try:
            following = self._block(self._following + len(group))
        except IndexError:
            return None
        is_adjacent = following.file is group[-1].file and following.start == group[-1].stop
        is_too_large = following.stop - group[0].start > _TOGETHER_BYTES
        return following if is_adjacent and not is_too_large else None

    def _block(self, turn: int) -> Span:
        return self._blocks[self._turns[turn]]


def _fetched_first(block: Span) -> int:
    """How many bytes of a block are fetched at once."""
    return min(block.stop - block.start, _TOGETHER_BYTES)
