/*
 * A block of a kernel on the host: a thread for each of its threads, barriers for __syncthreads and for what
 * warps do together. Enough of CUDA C++ for kernels' code that is logic, not speed: include it before such a
 * header. SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_EMULATED_BLOCK_HPP
#define CSA_EMULATED_BLOCK_HPP

#include <algorithm>
#include <array>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
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

    explicit emulated_block(int threads) : meeting(threads), warps((size_t)threads / 32)
    {
    }
};
static emulated_block *the_block;

/* Runs body() in each of a block's threads. */
template <typename Body> static void run_block(int threads, uint32_t seed, Body body)
{
    emulated_block block(threads);
    std::vector<std::thread> all;
    the_block = &block;
    for (int i = 0; i < threads; i++)
        all.emplace_back([=] {
            threadIdx.x = (uint32_t)i;
            emulated_moods.seed(seed * 8191 + (uint32_t)i + 1);
            body();
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
