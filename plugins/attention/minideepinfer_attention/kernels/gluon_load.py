"""Producer side of `kernels.gluon`: one warpgroup fills shared memory with asynchronous 16-byte copies.

A block of 64 keys lies in two tiles, one per half of the channels, because each half is released by the warpgroup that
owns these channels. A row number of -1 copies nothing: the hardware fills with zeros, and the bias masks the key.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from minideepinfer_attention.kernels.gluon_attend import BLOCK, HALF
from minideepinfer_attention.kernels.gluon_common import HEADS

# Triton renamed it after 3.6.
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

MASKED = gl.constexpr(-1e30)
"""What is added to the score of a missing key: finite, so that a row without keys meets no NaN."""
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
COPY_ROW = gl.constexpr(gl.SliceLayout(1, COPY.value))


@gluon.jit
def _copy(table, row, tile, half: gl.constexpr):
    """Start copying one half of the channels of rows `[n]` of a table `[N, 512]`."""
    column = gl.arange(0, HALF, gl.SliceLayout(0, COPY))
    offset = row.to(gl.int64) * (2 * HALF) + half * HALF
    present = (row >= 0)[:, None] & (column >= 0)[None, :]
    async_load(tile, table + (offset[:, None] + column[None, :]), mask=present)


@gluon.jit
def _load_query(q, t, phase, tiles, bars):
    row = t * HEADS + gl.arange(0, HEADS, COPY_ROW)
    mbarrier.wait(bars.q_empty, phase)
    for half in gl.static_range(2):
        _copy(q, row, tiles.q[half].index(0), half)
        async_copy.mbarrier_arrive(bars.q_full[half], increment_count=False)


@gluon.jit
def _load_block(table, row, phase, tiles, bars, slot: gl.constexpr):
    mbarrier.wait(bars.empty[2 * slot], phase)
    _copy(table, row, tiles.kv[2 * slot].index(0), 0)
    async_copy.mbarrier_arrive(bars.full[2 * slot], increment_count=False)
    mbarrier.wait(bars.empty[2 * slot + 1], phase)
    tiles.bias[slot].store(gl.where(row >= 0, 0.0, MASKED))
    mbarrier.arrive(bars.full[2 * slot + 1])
    _copy(table, row, tiles.kv[2 * slot + 1].index(0), 1)
    async_copy.mbarrier_arrive(bars.full[2 * slot + 1], increment_count=False)


@gluon.jit
def _block_rows(window_rows, pool_rows, t, pair, slot: gl.constexpr, num_selected, num_tokens):
    """Row numbers of a block: pair 0 is the window, the others are the selection; -1 past the end."""
    if pair == 0:
        rows = window_rows + t.to(gl.int64) * (2 * BLOCK)
        count = 2 * BLOCK
    else:
        rows = pool_rows + (t.to(gl.int64) * num_selected + (pair - 1) * (2 * BLOCK))
        count = num_selected - (pair - 1) * (2 * BLOCK)
    column = slot * BLOCK + gl.arange(0, BLOCK, COPY_ROW)
    return gl.load(rows + column, mask=(column < count) & (t < num_tokens), other=-1)


@gluon.jit
def load_selected(q, lists, tiles, bars):
    """Window and selected rows of every n-th query; row numbers are read one pair of blocks ahead."""
    window, window_rows, pool, pool_rows, num_tokens, num_selected, num_pairs = lists
    first = gl.program_id(0)
    step = gl.num_programs(0)
    row0 = _block_rows(window_rows, pool_rows, first, 0, 0, num_selected, num_tokens)
    row1 = _block_rows(window_rows, pool_rows, first, 0, 1, num_selected, num_tokens)
    phase = 1
    q_phase = 1
    for t in range(first, num_tokens, step):
        for pair in range(num_pairs):
            table = window if pair == 0 else pool
            last = pair == num_pairs - 1
            next_pair = gl.where(last, 0, pair + 1)
            next_t = gl.where(last, t + step, t)
            next0 = _block_rows(window_rows, pool_rows, next_t, next_pair, 0, num_selected, num_tokens)
            next1 = _block_rows(window_rows, pool_rows, next_t, next_pair, 1, num_selected, num_tokens)
            _load_block(table, row0, phase, tiles, bars, 0)
            if pair == 0:
                _load_query(q, t, q_phase, tiles, bars)
                q_phase ^= 1
            _load_block(table, row1, phase, tiles, bars, 1)
            row0 = next0
            row1 = next1
            phase ^= 1
