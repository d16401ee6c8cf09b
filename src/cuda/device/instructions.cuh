/*
 * The instructions that CUDA C++ does not spell: matrix products, conversions, asynchronous copies, launches
 * that overlap. No kernel holds inline assembly of its own. SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_CUDA_INSTRUCTIONS_CUH
#define CSA_CUDA_INSTRUCTIONS_CUH

#include <stdint.h>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define CSA_SM90 1
#else
#define CSA_SM90 0
#endif

/* ---- Matrix products: c (16x8, fp32) += a (16x16) * b (16x8) ------------------------------------ */

/*
 * Lane l = 4 * g + t holds of a: rows g and g + 8, columns 2t, 2t+1 and 2t+8, 2t+9 in the order
 * {row g low, row g+8 low, row g high, row g+8 high}; of b: column g, rows as a's columns {low, high}; of c:
 * rows g and g + 8, columns 2t, 2t+1 {g:2t, g:2t+1, g+8:2t, g+8:2t+1}. Pairs have the smaller index in the low
 * half. Sums over the inner index do not care for its order, so kernels number it as suits their loads.
 */
static __device__ __forceinline__ void mma_f16(float (&c)[4], uint4 a, uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, "
        "%1, %2, "
        "%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

static __device__ __forceinline__ void mma_bf16(float (&c)[4], uint4 a, uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, "
        "%2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

/* Four 8x8 matrices of 16-bit values, transposed: lanes 0-7 name the rows of the first, 8-15 of the second, and
 * so on. A lane gets row 2t, 2t+1 of column g: operand b of the products above. */
static __device__ __forceinline__ void load_transposed_4(uint32_t (&m)[4], uint32_t row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(row)
                 : "memory");
}

/* ---- Conversions -------------------------------------------------------------------------------- */

/* Four e4m3 codes as f16 values, exactly, the lower two in x; NaN stays NaN. */
static __device__ __forceinline__ uint2 e4m3x4_to_f16x4(uint32_t codes)
{
    uint2 values;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2;"
        "cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high; }"
        : "=r"(values.x), "=r"(values.y)
        : "r"(codes));
#else
    uint32_t *half = &values.x;
    for (int i = 0; i < 2; i++, codes >>= 16) {
        /* The code as an f16 pattern is 2^-8 times its value, subnormals included. */
        uint32_t spread = (codes & 0xFF) | (codes & 0xFF00) << 8;
        uint32_t small = (spread & 0x800080) << 8 | (spread & 0x7F007F) << 7;
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(half[i]) : "r"(small), "r"(0x5C005C00));
        if ((spread & 0x7F) == 0x7F)
            half[i] = (half[i] & 0xFFFF0000) | 0x7FFF;
        if ((spread & 0x7F0000) == 0x7F0000)
            half[i] = (half[i] & 0xFFFF) | 0x7FFF0000;
    }
#endif
    return values;
}

/* Two floats to bf16 or f16, to nearest even; low is the low half. */
static __device__ __forceinline__ uint32_t pack_bf16(float low, float high)
{
    uint32_t values;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(values) : "f"(high), "f"(low));
    return values;
}

static __device__ __forceinline__ uint32_t pack_f16(float low, float high)
{
    uint32_t values;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(values) : "f"(high), "f"(low));
    return values;
}

/* 2^x, within 2 units of the last place; subnormal results are 0. */
static __device__ __forceinline__ float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* ---- Loads and asynchronous copies -------------------------------------------------------------- */

/* 16 bytes of what nobody writes meanwhile and few read again; the neighbours in 128 bytes will be wanted too.
 * (Asking for 256 makes part of them cross from one half of the L2 cache to the other twice.) volatile: where a
 * condition guards the address, it must not be loaded before. */
static __device__ __forceinline__ uint4 load_streaming_16(const void *from)
{
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
}

static __device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* 16 bytes from global to shared memory, past the L1 cache; the neighbours in 256 bytes will be wanted too. */
static __device__ __forceinline__ void copy_16(uint32_t to, const void *from)
{
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

static __device__ __forceinline__ void copies_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits until at most `pending` of the thread's latest groups are under way. */
template <int pending> static __device__ __forceinline__ void copies_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

/* ---- Bulk copies of tensors, and the barriers they report to ------------------------------------ */

/*
 * A barrier's phase ends when `arrivals` threads have arrived and all bytes that were announced are there;
 * waiting for phase 0, 1, 0 and so on. Only where CSA_SM90 says so: elsewhere these do nothing, and nobody may
 * rely on them.
 */
static __device__ __forceinline__ void barrier_init(uint64_t *barrier, uint32_t arrivals)
{
#if CSA_SM90
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
                 : "memory");
#endif
}

/* Makes barriers that this thread initialised known to copies. */
static __device__ __forceinline__ void barriers_publish()
{
#if CSA_SM90
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

/* Arrives, and announces so many bytes. */
static __device__ __forceinline__ void barrier_expect(uint64_t *barrier, uint32_t bytes)
{
#if CSA_SM90
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
#endif
}

static __device__ __forceinline__ void barrier_wait(uint64_t *barrier, uint32_t phase)
{
#if CSA_SM90
    uint32_t done = 0;
    while (!done)
        asm volatile("{\n\t.reg .pred p;\n\t"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
                     : "=r"(done)
                     : "r"(shared_address(barrier)), "r"(phase)
                     : "memory");
#endif
}

/* Copies the box of a map that starts at `at`; its bytes are reported to the barrier. */
static __device__ __forceinline__ void copy_box(void *to, const void *map, const int (&at)[5],
                                                uint64_t *barrier)
{
#if CSA_SM90
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, "
                 "{%2, %3, %4, %5, %6}], [%7];" ::"r"(shared_address(to)),
                 "l"(map), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4]),
                 "r"(shared_address(barrier))
                 : "memory");
#endif
}

/* Asks for a map's description, which a copy needs first. */
static __device__ __forceinline__ void fetch_map(const void *map)
{
#if CSA_SM90
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
#endif
}

/* What this thread wrote to shared memory comes before what copies put there afterwards. */
static __device__ __forceinline__ void order_before_copies()
{
#if CSA_SM90
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/* ---- Clusters: blocks that run at the same time and write to each other's shared memory --------- */

static __device__ __forceinline__ uint32_t cluster_blocks()
{
    uint32_t blocks = 1;
#if CSA_SM90
    asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(blocks));
#endif
    return blocks;
}

static __device__ __forceinline__ uint32_t block_in_cluster()
{
    uint32_t rank = 0;
#if CSA_SM90
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
}

/* All threads of a cluster arrive, then wait for all: shared memory of a block that has not started is not
 * there. */
static __device__ __forceinline__ void cluster_arrive()
{
#if CSA_SM90
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

static __device__ __forceinline__ void cluster_wait()
{
#if CSA_SM90
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

/* The address in another block of the cluster of what this one has at `own`. */
static __device__ __forceinline__ uint32_t address_in(const void *own, uint32_t rank)
{
    uint32_t there = 0;
#if CSA_SM90
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(own)), "r"(rank));
#endif
    return there;
}

/* Writes 4, 8 or 16 bytes to where another block (or this one) has `own`, and reports them to its barrier. */
static __device__ __forceinline__ void tell_block(uint32_t *own, uint64_t *barrier, uint32_t rank,
                                                  uint32_t value)
{
#if CSA_SM90
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
                     address_in(own, rank)),
                 "r"(value), "r"(address_in(barrier, rank))
                 : "memory");
#endif
}

static __device__ __forceinline__ void tell_block(uint64_t *own, uint64_t *barrier, uint32_t rank,
                                                  uint64_t value)
{
#if CSA_SM90
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u64 [%0], %1, [%2];" ::"r"(
                     address_in(own, rank)),
                 "l"(value), "r"(address_in(barrier, rank))
                 : "memory");
#endif
}

static __device__ __forceinline__ void tell_block(uint4 *own, uint64_t *barrier, uint32_t rank, uint4 value)
{
#if CSA_SM90
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
            address_in(own, rank)),
        "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(address_in(barrier, rank))
        : "memory");
#endif
}

/* ---- Launches that overlap ---------------------------------------------------------------------- */

/* What the kernel ahead in the stream wrote may be read from here on. */
static __device__ __forceinline__ void wait_for_kernel_ahead()
{
#if CSA_SM90
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* The kernel behind may start; it still waits before it reads what this one writes. */
static __device__ __forceinline__ void start_kernel_behind()
{
#if CSA_SM90
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#endif
