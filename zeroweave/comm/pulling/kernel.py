"""The kernel that reduces by pulling: it reads this rank's part of all ranks' flats where they lie, and adds it up.

It runs in few thread blocks, in pairs: clusters of two, which share the multiprocessors that come in pairs. Matmuls
have clusters of two as well, and one block in a pair of multiprocessors would keep the other one from them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

from zeroweave._torch.peers import compiled

BLOCKS: Final = 4
"""Thread blocks; so many multiprocessors belong to it."""
_THREADS: Final = 512
_IN_FLIGHT: Final = 16
"""Vectors of 16 bytes that a thread asks for before it adds: what registers hold of 512 threads in a block."""
PADS: Final = 4096
"""Bytes that ranks meet by: four for each rank and thread block."""
MOST_RANKS: Final = min(_IN_FLIGHT, PADS // (4 * BLOCKS))

# Ranks meet twice, block by block. At first each tells the others which of its flats is meant, plus one, so that none
# has to lie at the same place everywhere. In the end nobody's flat is read any more when his kernel is over. A word is
# 0 unless something is told by it: it is written when it was read before. Nobody waits for ranks that have gone: once
# in a while a block looks whether the engine was given up, and ends with an error when a rank is very late.
SOURCE: Final = """
typedef unsigned int u32;
typedef unsigned long long u64;

#if defined(BFLOAT16)
  #define VALUES 2
  __device__ void add(float* sums, u32 word) {
    sums[0] += __uint_as_float(word << 16);
    sums[1] += __uint_as_float(word & 0xffff0000u);
  }
  __device__ u32 packed(const float* sums) {
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(sums[1] * SCALE), "f"(sums[0] * SCALE));
    return word;
  }
#elif defined(FLOAT16)
  #define VALUES 2
  __device__ void add(float* sums, u32 word) {
    float low, high;
    asm("{.reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
        : "=f"(low), "=f"(high) : "r"(word));
    sums[0] += low;
    sums[1] += high;
  }
  __device__ u32 packed(const float* sums) {
    u32 word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(sums[1] * SCALE), "f"(sums[0] * SCALE));
    return word;
  }
#else
  #define VALUES 1
  __device__ void add(float* sums, u32 word) { sums[0] += __uint_as_float(word); }
  __device__ u32 packed(const float* sums) { return __float_as_uint(sums[0] * SCALE); }
#endif

__device__ u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

struct Wait {
  const volatile u32* gone;
  u64 since;
  u32 looks;

  __device__ bool ends() {
    if (++looks % 1024) return false;
    if (*gone) return true;
    if (nanoseconds() - since > LIMIT) __trap();
    return false;
  }
};

__device__ bool tell(u64 pads, u32 word, Wait& wait) {
  u32* there = (u32*)pads + RANK * BLOCKS + blockIdx.x;
  u32 seen;
  do asm volatile("atom.release.sys.global.cas.b32 %0, [%1], 0, %2;" : "=r"(seen) : "l"(there), "r"(word) : "memory");
  while (seen && !wait.ends());
  return !seen;
}

__device__ u32 hear(u64 pads, u32 rank, Wait& wait) {  // 0: nothing
  u32* here = (u32*)pads + rank * BLOCKS + blockIdx.x;
  u32 word;
  do asm volatile("atom.acquire.sys.global.exch.b32 %0, [%1], 0;" : "=r"(word) : "l"(here) : "memory");
  while (!word && !wait.ends());
  return word;
}

// flats: [number][rank]; pads: [rank]; out: vectors of 16 bytes, those of each flat from `start` on
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS)
pull(const u64* flats, const u64* pads, const u32* gone, uint4* out, int start, int vectors, int number)
{
  __shared__ const uint4* from[WORLD];
  __shared__ bool alone;
  const int mine = threadIdx.x;
  if (mine == 0) alone = false;
  __syncthreads();
  if (mine < WORLD) {
    u32 theirs = number + 1;
    if (mine != RANK) {
      Wait wait = {gone, nanoseconds(), 0};
      theirs = tell(pads[mine], number + 1, wait) ? hear(pads[RANK], mine, wait) : 0;
    }
    if (theirs) from[mine] = (const uint4*)flats[(theirs - 1) * WORLD + mine] + start;
    else alone = true;
  }
  __syncthreads();
  if (alone) return;

  for (int base = blockIdx.x * THREADS * UNROLL + mine; base < vectors; base += BLOCKS * THREADS * UNROLL) {
    uint4 read[UNROLL][WORLD];
    #pragma unroll
    for (int each = 0; each < UNROLL; ++each)
      #pragma unroll
      for (int rank = 0; rank < WORLD; ++rank) {
        uint4& v = read[each][rank];
        const int at = base + each * THREADS;
        if (at < vectors)
          asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                       : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from[rank] + at) : "memory");
      }
    #pragma unroll
    for (int each = 0; each < UNROLL; ++each) {
      const int at = base + each * THREADS;
      uint4 sum;
      #pragma unroll
      for (int word = 0; word < 4; ++word) {
        float sums[VALUES] = {};
        #pragma unroll
        for (int rank = 0; rank < WORLD; ++rank) add(sums, (&read[each][rank].x)[word]);
        (&sum.x)[word] = packed(sums);
      }
      if (at < vectors) out[at] = sum;
    }
  }

  __syncthreads();
  if (mine < WORLD && mine != RANK) {
    Wait wait = {gone, nanoseconds(), 0};
    if (tell(pads[mine], 1, wait)) hear(pads[RANK], mine, wait);
  }
}
"""
_NAMES: Final = {torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16", torch.float32: "FLOAT32"}
DTYPES: Final = frozenset(_NAMES)

Pull = Callable[[torch.Tensor, int, int], None]
"""(out, start, number): see `pull_kernel`."""


class Met(NamedTuple):
    """What ranks meet by, and how long."""

    flats: torch.Tensor
    """int64 [numbers, world]: where each rank's flats lie"""
    pads: torch.Tensor
    """int64 [world]: where each rank's `PADS` bytes lie, which are zeros at first"""
    gone: torch.Tensor
    """int32 [1], pinned: not 0 when others will not come any more"""
    seconds: float
    """so late a rank may be; behind that the kernel ends with an error, as NCCL's do"""


def pull_kernel(dtype: torch.dtype, rank: int, world: int, divisor: int, met: Met) -> Pull:
    """What leaves in `out`, 1-D, the average of the ranks' flats from element `start` on, on the current stream.

    Sums are of float32, in the order of the ranks, and divided by `divisor`. Flat `number` of this rank is read; the
    others tell which of theirs. All ranks launch it, equally often. The address of `out`, its bytes, and `start` times
    its itemsize are multiples of 16.
    """
    kernel: Any = compiled(SOURCE, "pull", options_of(dtype, rank, world, divisor, met.seconds))
    per_vector = 16 // dtype.itemsize

    def pull(out: torch.Tensor, start: int, number: int) -> None:
        kernel(
            grid=(BLOCKS, 1, 1),
            block=(_THREADS, 1, 1),
            args=[met.flats, met.pads, met.gone, out, start // per_vector, len(out) // per_vector, number],
            stream=torch.cuda.current_stream(out.device),
        )

    return pull


def options_of(dtype: torch.dtype, rank: int, world: int, divisor: int, seconds: float) -> list[str]:
    """Of the compiler."""
    values = {
        "WORLD": world,
        "RANK": rank,
        "BLOCKS": BLOCKS,
        "THREADS": _THREADS,
        "UNROLL": _IN_FLIGHT // world,
        "SCALE": f"{1 / divisor!r}f",
        "LIMIT": f"{int(1e9 * seconds)}ull",
        _NAMES[dtype]: 1,
    }
    return [f"-D{name}={value}" for name, value in values.items()]
