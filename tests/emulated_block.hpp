/*
 * A block of a kernel, or a cluster of them, on the host: a thread for each of its threads, barriers for
 * __syncthreads and for what warps do together. Enough of CUDA C++ for kernels' code that is logic, not speed:
 * include it before such a header. It takes the place of device/instructions.cuh, too, as far as clusters go.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_EMULATED_BLOCK_HPP
#define CSA_EMULATED_BLOCK_HPP
#define CSA_CUDA_INSTRUCTIONS_CUH

#include <algorithm>
#include <array>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __noinline__
#define __align__(bytes) alignas(bytes)

struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
static inline float4 make_float4(float x, float y, float z, float w)
{
    return {x, y, z, w};
}
static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w)
{
    return {x, y, z, w};
}

using std::max;
using std::min;

/* ---- The block ---------------------------------------------------------------------------------- */

struct emulated_index {
    uint32_t x;
};
static thread_local emulated_index threadIdx;
static thread_local std::minstd_rand emulated_moods; /* when a thread lets others go first */

struct emulated_warp {
    std::barrier<> meeting{32};
    std::array<uint32_t, 32> values;
};

struct emulated_block {
    std::barrier<> meeting;
    std::deque<emulated_warp> warps;
    void *shared; /* its shared memory */

    emulated_block(int threads, void *memory) : meeting(threads), warps((size_t)threads / 32), shared(memory)
    {
    }
};
struct emulated_cluster {
    std::deque<emulated_block> blocks;
    std::barrier<> meeting;
    std::mutex mutex; /* of its barriers in shared memory */

    explicit emulated_cluster(int threads) : meeting(threads)
    {
    }
};
static thread_local emulated_block *the_block;
static thread_local uint32_t the_block_rank;
static thread_local std::optional<std::barrier<>::arrival_token> the_arrival;
static emulated_cluster *the_cluster;

/* Runs body(shared memory) in each thread of a cluster, a block for each element of `shared`. */
template <typename Shared, typename Body>
static void run_cluster(std::vector<Shared> &shared, int threads, uint32_t seed, Body body)
{
    emulated_cluster cluster((int)shared.size() * threads);
    std::vector<std::thread> all;
    the_cluster = &cluster;
    for (Shared &memory : shared)
        cluster.blocks.emplace_back(threads, &memory);
    for (uint32_t block = 0; block < shared.size(); block++)
        for (int i = 0; i < threads; i++)
            all.emplace_back([=, &shared] {
                the_block = &the_cluster->blocks[block];
                the_block_rank = block;
                threadIdx.x = (uint32_t)i;
                emulated_moods.seed(seed * 8191 + block * 131 + (uint32_t)i + 1);
                body(shared[block]);
            });
    for (std::thread &t : all)
        t.join();
}

/* ---- What threads do together ------------------------------------------------------------------- */

static inline void __syncthreads()
{
    if (emulated_moods() % 64 == 0)
        std::this_thread::yield();
    the_block->meeting.arrive_and_wait();
}

/* What each lane of the warp has. */
static inline std::array<uint32_t, 32> of_warp(uint32_t own)
{
    emulated_warp &warp = the_block->warps[threadIdx.x / 32];
    warp.values[threadIdx.x % 32] = own;
    warp.meeting.arrive_and_wait();
    std::array<uint32_t, 32> all = warp.values;
    warp.meeting.arrive_and_wait();
    return all;
}

static inline uint32_t __shfl_sync(uint32_t, uint32_t own, int lane)
{
    return of_warp(own)[lane & 31];
}
static inline uint32_t __shfl_up_sync(uint32_t, uint32_t own, int step)
{
    int lane = (int)(threadIdx.x % 32);
    return of_warp(own)[lane >= step ? lane - step : lane];
}
static inline uint32_t __shfl_xor_sync(uint32_t, uint32_t own, int mask)
{
    return of_warp(own)[(threadIdx.x ^ (uint32_t)mask) % 32];
}
static inline uint32_t __ballot_sync(uint32_t, bool own)
{
    uint32_t bits = 0;
    std::array<uint32_t, 32> all = of_warp(own);
    for (int i = 0; i < 32; i++)
        bits |= all[i] << i;
    return bits;
}
static inline uint32_t __reduce_min_sync(uint32_t, uint32_t own)
{
    std::array<uint32_t, 32> all = of_warp(own);
    return *std::min_element(all.begin(), all.end());
}
static inline uint32_t __reduce_max_sync(uint32_t, uint32_t own)
{
    std::array<uint32_t, 32> all = of_warp(own);
    return *std::max_element(all.begin(), all.end());
}
static inline uint32_t __reduce_add_sync(uint32_t, uint32_t own)
{
    uint32_t sum = 0;
    for (uint32_t value : of_warp(own))
        sum += value;
    return sum;
}
static inline uint32_t atomicAdd(uint32_t *at, uint32_t value)
{
    return __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
}

/* ---- Clusters ----------------------------------------------------------------------------------- */

static inline uint32_t cluster_blocks()
{
    return (uint32_t)the_cluster->blocks.size();
}
static inline uint32_t block_in_cluster()
{
    return the_block_rank;
}
static inline void cluster_arrive()
{
    the_arrival = the_cluster->meeting.arrive();
}
static inline void cluster_wait()
{
    the_cluster->meeting.wait(std::move(*the_arrival));
    the_arrival.reset();
}

/* What a barrier's 64 bits are here. */
struct emulated_barrier {
    int32_t bytes;               /* announced, not there yet */
    uint16_t arrivals, finished; /* still to come, one each time; phases */
};

template <typename Change> static emulated_barrier change_barrier(uint64_t *barrier, Change change)
{
    std::lock_guard guard(the_cluster->mutex);
    emulated_barrier b;
    memcpy(&b, barrier, sizeof b);
    change(b);
    if (b.arrivals == 0 && b.bytes == 0)
        b = {0, 1, (uint16_t)(b.finished + 1)};
    memcpy(barrier, &b, sizeof b);
    return b;
}
static inline void barrier_init(uint64_t *barrier, uint32_t arrivals)
{
    change_barrier(barrier, [&](emulated_barrier &b) { b = {0, (uint16_t)arrivals, 0}; });
}
static inline void barriers_publish()
{
}
static inline void barrier_expect(uint64_t *barrier, uint32_t bytes)
{
    change_barrier(barrier, [&](emulated_barrier &b) {
        b.bytes += (int32_t)bytes;
        b.arrivals--;
    });
}
static inline void barrier_wait(uint64_t *barrier, uint32_t phase)
{
    while (change_barrier(barrier, [](emulated_barrier &) {}).finished % 2 == phase)
        std::this_thread::yield();
}

/* Where another block has what this one has at `own`. */
template <typename T> static T *address_in(T *own, uint32_t rank)
{
    return (T *)((char *)the_cluster->blocks[rank].shared + ((char *)own - (char *)the_block->shared));
}
template <typename T> static void tell_block(T *own, uint64_t *barrier, uint32_t rank, T value)
{
    if (emulated_moods() % 8 == 0)
        std::this_thread::yield();
    *address_in(own, rank) = value;
    change_barrier(address_in(barrier, rank), [](emulated_barrier &b) { b.bytes -= (int32_t)sizeof(T); });
}

/* ---- What a thread does alone ------------------------------------------------------------------- */

static inline int __clz(uint32_t x)
{
    return x ? __builtin_clz(x) : 32;
}
static inline int __ffs(int x)
{
    return __builtin_ffs(x);
}
static inline int __popc(uint32_t x)
{
    return __builtin_popcount(x);
}
/* The smaller of each half. */
static inline uint32_t __vminu2(uint32_t a, uint32_t b)
{
    return min(a & 0xFFFF, b & 0xFFFF) | min(a >> 16, b >> 16) << 16;
}
static inline uint32_t __float_as_uint(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
static inline float __uint_as_float(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

#endif
