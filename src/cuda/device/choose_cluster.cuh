/*
 * Section 5 for one row by a cluster of blocks, each with a slice of the scores: choose.cuh's steps, where
 * blocks tell each other a few words three times.
 *
 * (1) Each block tells a bound that its share of k scores reaches, found from the largest of groups of threads,
 * and its largest score. What reaches the least of the bounds is held. (2) Blocks count this by bins and tell
 * the counts; all find the bin of the k-th best, and bins within it, until it has few keys or one only. (3)
 * Each block tells which keys these are and how many of its own are better, so that all find the same
 * threshold, and each knows where its chosen ones go.
 *
 * Slices follow each other, so that earlier regions win ties. Should blocks find different lengths, since
 * somebody writes them meanwhile, what is written means nothing; but all end, and none while others may tell it
 * something: which messages there are follows from what all have been told.
 *
 * Bound by the time in which blocks hear from each other.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_CUDA_CHOOSE_CLUSTER_CUH
#define CSA_CUDA_CHOOSE_CLUSTER_CUH

#include "choose.cuh"
#include "instructions.cuh"

enum {
    CLUSTER_BLOCKS = 16, /* at most */
    CLUSTER_BINS = 256,
    CLUSTER_FEW = 128, /* keys that are ranked against each other */
    CLUSTER_ALL = 18   /* bits that count the keys of a cluster; the other 14 those of a block */
};

/* What blocks tell each other, each with a barrier; counts take turns. */
enum message { TELL_BOUNDS, TELL_COUNTS, TELL_KEYS = TELL_COUNTS + 2, MESSAGES };

/* What is told lies by the blocks that tell. */
template <int THREADS> struct cluster_scratch {
    choice_scratch<THREADS> own; /* of the slice */
    uint64_t told[MESSAGES];
    uint64_t bounds[CLUSTER_BLOCKS];                   /* told: the bound; in the upper half the largest key */
    uint4 counts[2][CLUSTER_BLOCKS][CLUSTER_BINS / 8]; /* told: 16 bits for each bin */
    uint32_t better[CLUSTER_BLOCKS], few[CLUSTER_FEW]; /* told: keys above the range, and those in it */
    uint4 bins[CLUSTER_BINS / 8];                      /* of this block */
    uint32_t bin, above, own_above;                    /* as narrow_range finds them */
    uint32_t listed;                                   /* keys in the range that this block has told */
};

/* Keys [low, high]: so many are above, in the cluster and in this block, and so many within, in the cluster and
 * in blocks before this one. */
struct cluster_range {
    uint32_t low, high, above, own_above, within, before;

    __device__ bool has(uint32_t key) const
    {
        return key - low <= high - low;
    }
    /* More than one key, which have to be ranked. */
    __device__ bool open() const
    {
        return low < high;
    }
};

struct cluster_place {
    uint32_t block = block_in_cluster(), blocks = cluster_blocks(), warp = threadIdx.x / 32,
             lane = threadIdx.x % 32;
};

/* ---- What matters ------------------------------------------------------------------------------- */

/* Lanes whose largest keys count as one, so that there are at least `need` such groups; 0: there are not. */
static __device__ __forceinline__ int group_lanes(const level &l, int need)
{
    int of_warp = 32 * l.each, full = l.each ? l.count / of_warp : 0;
    int active = full * 32 + min(l.count - full * of_warp, 32), group = 32;
    while (group > 0 && active < group * need)
        group /= 2;
    return group;
}

/* Told instead of bounds: the row is no longer than its list. No key is so large. */
enum : uint64_t { CLUSTER_SHORT = ~(uint64_t)0 };

/* Tells what this block's first warp says, and waits for the others; what the lane's block said. */
template <int THREADS>
static __device__ __forceinline__ uint64_t tell_bounds(cluster_scratch<THREADS> &s, uint64_t own)
{
    const cluster_place at;
    if (threadIdx.x < at.blocks)
        tell_block(&s.bounds[at.block], &s.told[TELL_BOUNDS], at.lane, own);
    barrier_wait(&s.told[TELL_BOUNDS], 0);
    return at.lane < at.blocks ? s.bounds[at.lane] : (uint32_t)~0U;
}

/* Tells a bound that `need` of the block's keys reach, and its largest; the range that they leave, up to the
 * upper half of CLUSTER_SHORT if a block said that. */
template <int THREADS>
static __device__ __forceinline__ cluster_range find_bound(cluster_scratch<THREADS> &s, const level &l,
                                                           const thread_quads &q, int need)
{
    const cluster_place at;
    float largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < CHOICE_QUADS; i++)
        if (i < q.each)
            largest =
                fmaxf(fmaxf(largest, fmaxf(q.value[i][0], q.value[i][1])), fmaxf(q.value[i][2], q.value[i][3]));
    uint32_t most = q.each > 0 && q.at[0] >= 0 ? key_of(largest) : (uint32_t)CSA_NO_KEY;
    int group = group_lanes(l, need);
#pragma unroll 1
    for (int step = 1; step < group; step *= 2)
        most = max(most, __shfl_xor_sync(~0U, most, step));
    uint32_t low = __reduce_min_sync(~0U, most > CSA_NO_KEY ? most : ~0U), high = __reduce_max_sync(~0U, most);
    if (at.lane == 0) {
        s.own.warps[0][at.warp] = low;
        s.own.warps[1][at.warp] = high;
    }
    __syncthreads();
    if (at.warp == 0) {
        low = __reduce_min_sync(~0U, at.lane < THREADS / 32 ? s.own.warps[0][at.lane] : ~0U);
        high = __reduce_max_sync(~0U, at.lane < THREADS / 32 ? s.own.warps[1][at.lane] : (uint32_t)CSA_NO_KEY);
        low = l.count > 0 && group == 0 ? (uint32_t)CSA_NO_KEY : low;
    }
    uint64_t told = tell_bounds(s, low | (uint64_t)high << 32);
    return {
        __reduce_min_sync(~0U, (uint32_t)told), __reduce_max_sync(~0U, (uint32_t)(told >> 32)), 0, 0, ~0U, 0};
}

/* ---- The threshold ------------------------------------------------------------------------------ */

/* Narrows the range to the bin that has the rank-th best key; `round` counts. Counts are told up to MOST, more
 * than any rank: sums of sixteen fit 16 bits. */
template <int THREADS>
static __device__ __forceinline__ void narrow_range(cluster_scratch<THREADS> &s, int held, uint32_t rank,
                                                    uint32_t round, cluster_range &range)
{
    constexpr int PAIRS = CLUSTER_BINS / 2, LOG = 8, VECTORS = CLUSTER_BINS / 8;
    constexpr uint32_t MASK = (1U << CLUSTER_ALL) - 1, MOST = 0x0FFF0FFF;
    static_assert(1 << LOG == CLUSTER_BINS && PAIRS <= THREADS && VECTORS == 32, "bins");
    const cluster_place at;
    const uint32_t turn = round % 2;
    uint64_t *told = &s.told[TELL_COUNTS + turn];
    int cut = max(0, 32 - LOG - __clz((int)(range.high - range.low)));
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < held; i += THREADS) {
        uint32_t key = key_of(s.own.values[i]), bin = (key - range.low) >> cut;
        if (range.has(key))
            atomicAdd((uint32_t *)s.bins + bin / 2, 1U << bin % 2 * 16);
    }
    if (threadIdx.x == 0)
        barrier_expect(told, at.blocks * (uint32_t)sizeof s.bins);
    __syncthreads();
    uint4 counts = s.bins[at.lane]; /* each warp tells some blocks */
    counts = make_uint4(__vminu2(counts.x, MOST), __vminu2(counts.y, MOST), __vminu2(counts.z, MOST),
                        __vminu2(counts.w, MOST));
    for (uint32_t block = at.warp; block < at.blocks; block += THREADS / 32)
        tell_block(&s.counts[turn][at.block][at.lane], told, block, counts);
    barrier_wait(told, round / 2 % 2);
    uint32_t both = 0, own = 0, pair = PAIRS - 1 - threadIdx.x; /* of two bins, from the top */
    if (threadIdx.x < PAIRS) {
#pragma unroll
        for (uint32_t block = 0; block < CLUSTER_BLOCKS; block++)
            both += block < at.blocks ? ((uint32_t *)s.counts[turn][block])[pair] : 0;
        own = ((uint32_t *)s.counts[turn][at.block])[pair];
    }
    uint32_t upper = both >> 16, all = upper + (both & 0xFFFF);
    running_sum sum = scan(s.own, 0, all | ((own & 0xFFFF) + (own >> 16)) << CLUSTER_ALL);
    if (threadIdx.x < VECTORS) /* everybody has told */
        s.bins[threadIdx.x] = make_uint4(0, 0, 0, 0);
    uint32_t above = sum.before & MASK, left = min(rank - range.above, sum.all & MASK);
    if (above < left && left <= above + all) {
        bool in_upper = left <= above + upper;
        s.bin = 2 * pair + in_upper;
        s.above = above + (in_upper ? 0 : upper);
        s.own_above = (sum.before >> CLUSTER_ALL) + (in_upper ? 0 : own >> 16);
    }
    __syncthreads();
    uint32_t bin = s.bin, within = at.lane < at.blocks ? ((uint16_t *)s.counts[turn][at.lane])[bin] : 0;
    range.low += bin << cut;
    range.high = range.low + min(range.high - range.low, (1U << cut) - 1);
    range.above += s.above;
    range.own_above += s.own_above;
    range.within = __reduce_add_sync(~0U, within);
    range.before = __reduce_add_sync(~0U, at.lane < at.block ? within : 0);
}

/* Tells how many of the block's keys are above the range and, if they have to be ranked, which are in it. */
template <int THREADS>
static __device__ __forceinline__ void tell_keys(cluster_scratch<THREADS> &s, int held,
                                                 const cluster_range &range)
{
    const cluster_place at;
    uint64_t *told = &s.told[TELL_KEYS];
    if (threadIdx.x == 0)
        barrier_expect(told, 4 * (at.blocks + (range.open() ? range.within : 0)));
    if (threadIdx.x < at.blocks)
        tell_block(&s.better[at.block], told, threadIdx.x, range.own_above);
#pragma unroll 1
    for (int i = (int)threadIdx.x; range.open() && i < held; i += THREADS) {
        uint32_t key = key_of(s.own.values[i]);
        if (!range.has(key))
            continue;
        uint32_t *to = &s.few[(range.before + atomicAdd(&s.listed, 1U)) % CLUSTER_FEW];
#pragma unroll 1
        for (uint32_t block = 0; block < at.blocks; block++)
            tell_block(to, told, block, key);
    }
    barrier_wait(told, 0);
}

/* The threshold and the share of its equals: warps rank what blocks have told in turn. */
template <int THREADS>
static __device__ __forceinline__ best_keys rank_told(cluster_scratch<THREADS> &s, const cluster_range &range,
                                                      uint32_t rank)
{
    const cluster_place at;
    uint32_t left = min(rank - range.above, range.within); /* fewer if lengths differ */
    if (!range.open())
        return {range.low, left};
    uint32_t told[CLUSTER_FEW / 32];
#pragma unroll
    for (uint32_t k = 0; k < CLUSTER_FEW / 32; k++)
        told[k] = at.lane + 32 * k < range.within ? s.few[at.lane + 32 * k] : (uint32_t)CSA_NO_KEY;
#pragma unroll 2
    for (uint32_t of = at.warp; of < range.within; of += THREADS / 32) {
        uint32_t key = s.few[of], counts = 0; /* better ones; in the upper half equal ones that come before */
#pragma unroll
        for (uint32_t k = 0; k < CLUSTER_FEW / 32; k++)
            counts += told[k] > key ? 1 : told[k] == key && at.lane + 32 * k < of ? 1 << 16 : 0;
        counts = __reduce_add_sync(~0U, counts);
        if (at.lane == 0 && (counts & 0xFFFF) + (counts >> 16) + 1 == left)
            s.own.best = {key, (counts >> 16) + 1};
    }
    __syncthreads();
    return s.own.best;
}

/* What earlier blocks have of better keys and of ties. */
template <int THREADS>
static __device__ __forceinline__ values_before count_earlier(const cluster_scratch<THREADS> &s,
                                                              const cluster_range &range, best_keys best)
{
    const cluster_place at;
    uint32_t better = at.lane < at.block ? s.better[at.lane] : 0, ties = 0;
#pragma unroll 1
    for (uint32_t i = at.lane; range.open() && i < range.before; i += 32) {
        better += s.few[i] > best.threshold;
        ties += s.few[i] == best.threshold;
    }
    ties = __reduce_add_sync(~0U, ties);
    return {__reduce_add_sync(~0U, better), range.open() ? ties : range.before, 0};
}

/* ---- The whole ---------------------------------------------------------------------------------- */

/* Does a cluster of so many blocks hold a row's scores? */
template <int THREADS> static inline bool cluster_holds(int64_t blocks, int64_t count)
{
    return count <= blocks * choice_scratch<THREADS>::VALUES && count < (int64_t)1 << CLUSTER_ALL;
}

/* Makes a block ready for others to tell it; all threads have to cluster_wait before they do. */
template <int THREADS> static __device__ __forceinline__ void open_cluster(cluster_scratch<THREADS> &s)
{
    if (threadIdx.x == 0) {
        for (uint64_t &barrier : s.told)
            barrier_init(&barrier, 1);
        barriers_publish();
        barrier_expect(&s.told[TELL_BOUNDS], cluster_blocks() * (uint32_t)sizeof s.bounds[0]);
        s.listed = 0;
    }
    if (threadIdx.x < CLUSTER_BINS / 8)
        s.bins[threadIdx.x] = make_uint4(0, 0, 0, 0);
    cluster_arrive();
}

/* Writes the `rank` best of more regions than that, in order. */
template <int THREADS, typename Ready>
static __device__ void choose_best_in_cluster(cluster_scratch<THREADS> &s, const row_scores &row, uint32_t rank,
                                              int64_t *entries, Ready ready)
{
    const cluster_place at;
    int blocks = (int)at.blocks, slice = (row.count + 4 * blocks - 1) / (4 * blocks) * 4;
    int slices = (row.count + slice - 1) / slice, first = (int)at.block * slice;
    level l = {};
    l.all = max(0, min(slice, row.count - first));
    l.values = {row.scores + first, l.all, row.room - first, 0, row.aligned};
    l.count = (l.all + 3) / 4;
    l.each = (l.count + THREADS - 1) / THREADS;
    thread_quads q;
    load_quads(l, q, ready);
    cluster_wait();
    cluster_range range = find_bound(s, l, q, ((int)rank + slices - 1) / slices);
    if (range.high == CLUSTER_SHORT >> 32) /* others find no more regions */
        return;
    float bound = number_of(range.low);
    int held = hold_values(s.own, q, bound, l.all, nullptr);
    if (bound == -INFINITY) /* there may be nothing but NaN */
        range.low = CSA_NAN_KEY;
    uint32_t round = 0;
#pragma unroll 1
    do
        narrow_range(s, held, rank, round++, range);
    while (range.open() && range.within > CLUSTER_FEW);
    tell_keys(s, held, range);
    best_keys best = rank_told(s, range, rank);
    values_before before = count_earlier(s, range, best);
    before.values = (uint32_t)first;
    write_best(s.own, held, best, entries, rank, before);
}

/* As choose_list, by a cluster that is open. */
template <int THREADS, typename Ready>
static __device__ void choose_list_in_cluster(cluster_scratch<THREADS> &s, const row_scores &row, int width,
                                              int64_t *entries, Ready ready)
{
    if (row.count > width) {
        choose_best_in_cluster(s, row, (uint32_t)width, entries, ready);
        if (block_in_cluster() == 0 && threadIdx.x == 0)
            entries[width] = row.count;
        return;
    }
    ready();
    cluster_wait();
    tell_bounds(s, CLUSTER_SHORT);
    if (block_in_cluster() == 0)
        list_all<THREADS>(width, row.count, entries);
}

#endif
