"""Torch's caching allocator of GPU memory: what it takes from CUDA so that it can give a program its tensors.

    tensor ── rounded to 512 B ──> smallest free block that is large enough ── none ──> a new segment of cudaMalloc
    ── refused ──> what is free in whole segments goes back to CUDA, and once more ── refused ──> out of memory

Written from memory of c10/cuda/CUDACachingAllocator.cpp (torch 2.1 to 2.6): ``malloc``, ``get_free_block``,
``should_split``, ``free_block``, ``try_merge_blocks``, ``release_cached_blocks``, and of expandable segments
``try_allocate_expandable_block`` and ``unmap_block``. One stream makes all tensors, that of kernels, as in training
software. Left out are max_split_size_mb, roundup_power2_divisions and garbage_collection_threshold, which are off by
default, and pools of CUDA graphs.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from sim.words.options import AllocatorName

_MIB = 2**20
ROUND = 512
"""What blocks are multiples of."""
SMALL = _MIB
"""Largest block of the small pool; of what is left of a larger one more than that is split off."""
SMALL_SEGMENT, LARGE_SEGMENT = 2 * _MIB, 20 * _MIB
"""Segments of both pools, or pages of them where they are expandable."""
OWN_SEGMENT = 10 * _MIB
"""Blocks from here on have a segment to themselves, a multiple of 2 MiB."""


class OutOfMemoryError(Exception):
    """CUDA has no more to give. Users are told that a step does not fit."""


class Block:
    """A piece of a segment, between its neighbours there. A piece of an expandable one that has no memory is not
    mapped.
    """

    __slots__ = ("after", "at", "before", "free", "mapped", "pool", "size")

    def __init__(self, pool: _Pool, at: int, size: int, before: Block | None = None) -> None:
        self.pool, self.at, self.size, self.before = pool, at, size, before
        self.after: Block | None = None
        self.free = self.mapped = True
        pool.blocks[at] = self
        if before:
            self.after, before.after = before.after, self
        if self.after:
            self.after.before = self

    @property
    def usable(self) -> bool:
        """Whether a neighbour can be joined with it."""
        return self.free and self.mapped

    def split(self, size: int) -> Block:
        """Return what is behind the first ``size`` bytes, as a block of its own."""
        rest = Block(self.pool, self.at + size, self.size - size, self)
        self.size = size
        return rest

    def join(self, after: Block) -> None:
        """Take in the neighbour behind it."""
        del self.pool.blocks[after.at]
        self.size, self.after = self.size + after.size, after.after
        if self.after:
            self.after.before = self


class _Pool:
    """Blocks of segments of one kind, by address, and which of them can be used, by size."""

    def __init__(self, segment: int) -> None:
        self.segment = segment
        self.blocks: dict[int, Block] = {}
        self.usable: list[tuple[int, int]] = []

    def put(self, block: Block) -> None:
        insort(self.usable, (block.size, block.at))

    def pull(self, block: Block) -> None:
        del self.usable[bisect_left(self.usable, (block.size, block.at))]

    def best(self, size: int) -> Block | None:
        """Return the smallest block of a size or more, the first of several, and take it out."""
        at = bisect_left(self.usable, (size, -1))
        return self.blocks[self.usable.pop(at)[1]] if at < len(self.usable) else None

    def joined(self, block: Block) -> Block:
        """Return a block with its neighbours that can be used, which are taken out."""
        before, after = block.before, block.after
        if after and after.usable:
            self.pull(after)
            block.join(after)
        if before and before.usable:
            self.pull(before)
            before.join(block)
            return before
        return block


class CachingAllocator:
    """The allocator of one GPU. Sizes in bytes."""

    def __init__(self, name: AllocatorName = "caching", limit: int | None = None) -> None:
        """``limit``: what CUDA can give; None: whatever is asked for."""
        self._expands, self._limit = name == "expandable", limit
        self._large, self._small = _Pool(LARGE_SEGMENT), _Pool(SMALL_SEGMENT)
        self._waiting: list[Block] = []
        self._end = 0
        """Of all segments, which begin one behind the other."""
        self.reserved = 0
        """What CUDA has given, as torch.cuda.memory_reserved says it."""
        self.peak = 0
        """Most of that since ``reset_peak``."""

    def reset_peak(self) -> None:
        """Begin the peak anew, as torch.cuda.reset_peak_memory_stats does."""
        self.peak = self.reserved

    def take(self, nbytes: int) -> Block:
        """Return a block for a tensor; raises OutOfMemoryError where CUDA cannot give what is missing."""
        size = max(ROUND, -(-nbytes // ROUND) * ROUND)
        pool = self._small if size <= SMALL else self._large
        block = pool.best(size)
        if block is None:
            try:
                block = self._new(pool, size)
            except OutOfMemoryError:
                self.pass_events()
                self._release()
                block = self._new(pool, size)
        left = block.size - size
        if left > SMALL or (left and (self._expands or pool is self._small)):
            pool.put(block.split(size))
        block.free = False
        return block

    def give(self, block: Block, *, waits: bool = False) -> None:
        """Take a block back. One that ``waits`` for events of other streams cannot be used until these have passed."""
        if waits:
            self._waiting.append(block)
            return
        block.free = True
        block.pool.put(block.pool.joined(block))

    def pass_events(self) -> None:
        """Let all events pass that blocks wait for."""
        for block in self._waiting:
            self.give(block)
        self._waiting.clear()

    def _reserve(self, nbytes: int) -> None:
        if self._limit is not None and self.reserved + nbytes > self._limit:
            raise OutOfMemoryError
        self.reserved += nbytes
        self.peak = max(self.peak, self.reserved)

    def _new(self, pool: _Pool, size: int) -> Block:
        """Return a block that is large enough by memory that CUDA gives, in no list."""
        if self._expands:
            return self._expanded(pool, size)
        segment = -(-size // SMALL_SEGMENT) * SMALL_SEGMENT if size >= OWN_SEGMENT else pool.segment
        self._reserve(segment)
        block = Block(pool, self._end, segment)
        self._end += segment
        return block

    def _expanded(self, pool: _Pool, size: int) -> Block:
        """Return the smallest hole of the segment that is wide enough with its neighbours, else the segment's end, with
        as many pages of memory as are missing.
        """
        for hole in sorted((one for one in pool.blocks.values() if not one.mapped), key=lambda one: (one.size, one.at)):
            sides = [side for side in (hole.before, hole.after) if side and side.usable]
            if hole.size + sum(side.size for side in sides) >= size:
                break
        else:
            last = pool.blocks[max(pool.blocks)] if pool.blocks else None
            hole = Block(pool, last.at + last.size if last else 0, 2 * (size + pool.segment), last)
            hole.mapped = False
        own = size - (hole.before.size if hole.before and hole.before.usable else 0)
        pages = min(-(-own // pool.segment) * pool.segment, hole.size)
        try:
            self._reserve(pages)
        except OutOfMemoryError:
            self._drop_end(pool)
            raise
        if pages < hole.size:
            hole.split(pages).mapped = False
        hole.mapped = True
        found = pool.joined(hole)
        self._drop_end(pool)
        return found

    @staticmethod
    def _drop_end(pool: _Pool) -> None:
        """Forget a hole at the end of a segment, behind which there is room without end."""
        last = pool.blocks[max(pool.blocks)]
        if not last.mapped:
            del pool.blocks[last.at]
            if last.before:
                last.before.after = None

    def _release(self) -> None:
        """Give back to CUDA all segments without a tensor, or the pages of expandable ones that have none."""
        for pool in (self._large, self._small):
            for block in [pool.blocks[at] for _, at in pool.usable]:
                if self._expands:
                    self._unmap(pool, block)
                elif not (block.before or block.after):
                    pool.pull(block)
                    del pool.blocks[block.at]
                    self.reserved -= block.size

    def _unmap(self, pool: _Pool, block: Block) -> None:
        """Take the whole pages of a block from it; what is left on either side can still be used."""
        end, page = block.at + block.size, pool.segment
        first, last = -(-block.at // page) * page, end // page * page
        if first >= last:
            return
        pool.pull(block)
        if last < end:
            pool.put(block.split(last - block.at))
        hole = block
        if first > block.at:
            hole = block.split(first - block.at)
            pool.put(block)
        hole.mapped = False
        if hole.after and not hole.after.mapped:
            hole.join(hole.after)
        if hole.before and not hole.before.mapped:
            hole.before.join(hole)
        self.reserved -= last - first
        self._drop_end(pool)
