"""What the Gluon kernels for attention share: 64 heads x 512, of which the last 64 are rotated."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

HEADS = gl.constexpr(64)
DIM = gl.constexpr(512)
ROPE = gl.constexpr(64)
LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def barrier(count: gl.constexpr):
    """One allocation each: those in a common one are one buffer to Triton's analysis, which then adds barriers."""
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=count)
    return bar


@gluon.jit
def fresh_zero():
    """Zero, unknown to the compiler: matrix descriptors that depend on it are not hoisted out of loops and spilled."""
    return gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def unrotated(heads, cos, sin):
    """Rotate the channels `[H, ROPE]` of one token back in float32; they come rounded and leave rounded."""
    a, b = heads.to(gl.float32).reshape([HEADS, ROPE // 2, 2]).split()
    angle = gl.arange(0, ROPE // 2, gl.SliceLayout(0, a.type.layout))
    c, s = gl.load(cos + angle)[None, :], gl.load(sin + angle)[None, :]
    return gl.join(a * c + b * s, b * c - a * s).reshape([HEADS, ROPE]).to(gl.bfloat16)
