/*
 * Section 5 for one row by one block: the best regions, exactly and stably.
 *
 * Scores are compared as integers that order as section 5 says (larger is better, NaN is 1, nothing is 0). Few
 * scores are searched as they are. Of many, the maxima of groups of neighbours, their peaks, are searched
 * first: at least k scores reach the k-th best peak, so what is below it is out of the question. Groups whose
 * peaks are above a bound that is no larger are listed, and their scores searched. Where no bound leaves few
 * groups (plateaus), the k-th best peak is the bound, and the first k groups whose peak it is are listed, too:
 * each has a tie, so that no later one can be chosen.
 *
 * A search: a key that k keys reach, and the largest; a histogram of bins between them; a scan from the top for
 * the bin of the k-th best; the same within that bin, until few enough reach it or it holds one key. 32 keys or
 * fewer are ranked against each other.
 *
 * Chosen regions leave in order: the place of one is the number of chosen ones before it, ties counted up to
 * their share, so that earlier regions win ties. Each thread has neighbours, which takes one scan.
 *
 * Bound by the length of the instruction stream, which a block of few rows runs through once, cold: loops are
 * rolled, what is called twice is not inlined.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_CUDA_CHOOSE_CUH
#define CSA_CUDA_CHOOSE_CUH

#include "../../plan.h"

#include <stdint.h>

enum {
    CHOICE_HELD = 16384,                   /* keys that are held in shared memory */
    CHOICE_DIRECT = 8192,                  /* scores that are searched without peaks */
    CHOICE_GROUPS = CHOICE_HELD / CSA_PEAK /* that may be listed; at least CSA_MAX_TOPK */
};

/* A block of THREADS has two bins for each. */
template <int THREADS> struct choice_scratch {
    uint4 held[CHOICE_HELD / 4];
    uint32_t bins[2 * THREADS];
    uint32_t groups[CHOICE_GROUPS];
    uint32_t warps[2][THREADS / 32];
    uint32_t bin, above, within;
    __align__(16) uint32_t few[32];
    uint32_t few_count;
};

/* ---- Keys --------------------------------------------------------------------------------------- */

enum { CSA_NO_KEY = 0, CSA_NAN_KEY = 1 }; /* nothing; below every number */

/* Larger is better; -0 equals +0. */
static __device__ __forceinline__ uint32_t key_of(float score)
{
    uint32_t bits = __float_as_uint(score + 0.0F);
    uint32_t key = bits ^ ((uint32_t)((int)bits >> 31) | 0x80000000);
    return score == score ? key : (uint32_t)CSA_NAN_KEY;
}

/* Keys at [at, at + 4) of an array of `count`; those past the end are no keys. */
static __device__ __noinline__ uint4 load_some_keys(const float *scores, int at, int count)
{
    uint32_t k[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        k[i] = at + i < count ? key_of(scores[at + i]) : (uint32_t)CSA_NO_KEY;
    return make_uint4(k[0], k[1], k[2], k[3]);
}

static __device__ __forceinline__ uint4 load_keys(const float *scores, bool aligned, int at, int count)
{
    if (!aligned || at + 3 >= count)
        return load_some_keys(scores, at, count);
    float4 v = *(const float4 *)(scores + at);
    return make_uint4(key_of(v.x), key_of(v.y), key_of(v.z), key_of(v.w));
}

static __device__ __forceinline__ uint32_t max_of_four(uint4 k)
{
    return max(max(k.x, k.y), max(k.z, k.w));
}

/* ---- A row and the keys in question ------------------------------------------------------------- */

/* The scores of a row and, where somebody found them already, the largest of each CSA_PEAK; NULL: not. NaN
 * counts in a peak only where there is nothing else. aligned: both, to 16 bytes. */
struct row_scores {
    const float *scores, *peaks;
    int count;
    bool aligned;
};

/* `all` times four neighbours, of which each thread has `fours`: of an array or of listed groups of 4 <<
 * in_group. */
template <int THREADS> struct key_source {
    const float *values;
    int count;
    bool aligned, held, listed;
    int in_group;
    int all, fours;
    uint32_t floor; /* keys up to this one do not count */

    __device__ __forceinline__ void divide(int number)
    {
        all = number;
        fours = (all + THREADS - 1) / THREADS;
        held = fours * THREADS * 4 <= CHOICE_HELD;
    }
    /* Where one of the thread's fours starts; count or more: nowhere. */
    __device__ __forceinline__ int place(const choice_scratch<THREADS> &s, int i) const
    {
        int four = (int)threadIdx.x * fours + i;
        if (four >= all)
            return count;
        if (!listed)
            return four * 4;
        return (int)((s.groups[four >> in_group] << in_group) + (four & ((1U << in_group) - 1))) * 4;
    }
    __device__ __forceinline__ uint4 load(const choice_scratch<THREADS> &s, int i) const
    {
        uint4 k = load_keys(values, aligned, place(s, i), count);
        k.x = k.x > floor ? k.x : 0, k.y = k.y > floor ? k.y : 0;
        k.z = k.z > floor ? k.z : 0, k.w = k.w > floor ? k.w : 0;
        return k;
    }
    __device__ __forceinline__ uint4 get(const choice_scratch<THREADS> &s, int i) const
    {
        return held ? s.held[i * THREADS + (int)threadIdx.x] : load(s, i);
    }
    template <typename Visit>
    __device__ __forceinline__ void each(const choice_scratch<THREADS> &s, Visit visit) const
    {
#pragma unroll 1
        for (int i = 0; i < fours; i++) {
            uint4 k = get(s, i);
            visit(k.x);
            visit(k.y);
            visit(k.z);
            visit(k.w);
        }
    }
};

/* Brings the keys to shared memory, if they fit. */
template <int THREADS>
static __device__ __noinline__ void hold_keys(choice_scratch<THREADS> &s, key_source<THREADS> k)
{
#pragma unroll 2
    for (int i = 0; k.held && i < k.fours; i++)
        s.held[i * THREADS + (int)threadIdx.x] = k.load(s, i);
}

/* The same with the largest of each 1 << log values, of which four at a time are on their way. */
template <int THREADS>
static __device__ __noinline__ void hold_peaks(choice_scratch<THREADS> &s, key_source<THREADS> k, int log)
{
#pragma unroll 1
    for (int i = 0; i < k.fours; i++) {
        int64_t first = ((int64_t)threadIdx.x * k.fours + i) * 4;
        uint32_t most[4] = {CSA_NO_KEY, CSA_NO_KEY, CSA_NO_KEY, CSA_NO_KEY};
#pragma unroll 2
        for (int v = 0; v < 1 << log; v += 4)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int end = (int)min((first + j + 1) << log, (int64_t)k.count);
                int at = (int)min(((first + j) << log) + v, (int64_t)end);
                most[j] = max(most[j], max_of_four(load_keys(k.values, k.aligned && log > 1, at, end)));
            }
        s.held[i * THREADS + (int)threadIdx.x] = make_uint4(most[0], most[1], most[2], most[3]);
    }
}

/* ---- Over the block ----------------------------------------------------------------------------- */

/* The sum over the threads before, and over the block. `buffer` alternates. */
struct running_sum {
    uint32_t before, all;
};

template <int THREADS>
static __device__ __noinline__ running_sum scan(choice_scratch<THREADS> &s, int buffer, uint32_t own)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        uint32_t other = __shfl_up_sync(~0U, sum, step);
        sum += lane >= step ? other : 0;
    }
    if (lane == 31)
        s.warps[buffer][warp] = sum;
    __syncthreads();
    uint32_t of_warp = lane < THREADS / 32 ? s.warps[buffer][lane] : 0;
    return {__reduce_add_sync(~0U, lane < warp ? of_warp : 0) + sum - own, __reduce_add_sync(~0U, of_warp)};
}

/* The best keys: those above `threshold`, and the first `share` of its equals. `highest`: none is above. */
struct best_keys {
    uint32_t threshold, share, highest;
};

/* The rank-th best of the keys in [low, high], at most 32, whose best is `highest`: each warp finds it. */
template <int THREADS>
static __device__ __forceinline__ best_keys rank_few(choice_scratch<THREADS> &s,
                                                     const key_source<THREADS> &keys, uint32_t rank,
                                                     uint32_t low, uint32_t high, uint32_t highest)
{
    uint32_t lane = threadIdx.x % 32, better = 0, equal = 0;
    if (threadIdx.x < 32)
        s.few[lane] = CSA_NO_KEY;
    if (threadIdx.x == 0)
        s.few_count = 0;
    __syncthreads();
    keys.each(s, [&](uint32_t key) {
        if (key >= low && key <= high)
            s.few[atomicAdd(&s.few_count, 1U) % 32] = key;
    });
    __syncthreads();
    uint32_t own = s.few[lane];
#pragma unroll 2
    for (int i = 0; i < 8; i++) {
        uint4 k = ((const uint4 *)s.few)[i];
        better += (k.x > own) + (k.y > own) + (k.z > own) + (k.w > own);
        equal += (k.x == own) + (k.y == own) + (k.z == own) + (k.w == own);
    }
    int at = __ffs((int)__ballot_sync(~0U, better < rank && rank <= better + equal)) - 1;
    return {__shfl_sync(~0U, own, at), rank - __shfl_sync(~0U, better, at), highest};
}

/* Searches for the `rank` best keys (from 1), and is content with more of them, up to `most`: then share is 0.
 * highest: a key that none is above, or 0: not known. */
template <int THREADS>
static __device__ __noinline__ best_keys find_best(choice_scratch<THREADS> &s, key_source<THREADS> keys,
                                                   uint32_t rank, uint32_t most, uint32_t highest)
{
    constexpr int LOG = THREADS == 1024 ? 11 : THREADS == 512 ? 10 : THREADS == 256 ? 9 : 8;
    static_assert(2 * THREADS == 1 << LOG, "bins");
    uint32_t low = keys.floor + 1, high = highest, above = 0;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    *(uint2 *)&s.bins[2 * threadIdx.x] = make_uint2(0, 0);
    if (highest == 0) {
        low = ~0U;
        keys.each(s, [&](uint32_t key) {
            low = min(low, key - 1); /* no key is the largest */
            high = max(high, key);
        });
        if (!keys.listed && rank * (uint32_t)keys.fours <= (uint32_t)keys.all)
            low = high - 1; /* so many threads have keys: as many reach the smallest of their largest */
        low = __reduce_min_sync(~0U, low);
        high = __reduce_max_sync(~0U, high);
        if (lane == 0) {
            s.warps[0][warp] = low;
            s.warps[1][warp] = high;
        }
    }
    __syncthreads();
    if (highest == 0) {
        low = __reduce_min_sync(~0U, lane < THREADS / 32 ? s.warps[0][lane] : ~0U) + 1;
        high = __reduce_max_sync(~0U, lane < THREADS / 32 ? s.warps[1][lane] : 0U);
    }
    highest = high;
#pragma unroll 1
    for (;;) {
        int cut = max(0, 32 - LOG - __clz(high - low));
        keys.each(s, [&](uint32_t key) {
            if (key >= low && key <= high)
                atomicAdd(&s.bins[(key - low) >> cut], 1U);
        });
        __syncthreads();
        int upper = 2 * THREADS - 1 - 2 * (int)threadIdx.x; /* a thread's two bins, from the top */
        uint2 counts = *(uint2 *)&s.bins[upper - 1];
        running_sum sum = scan(s, 0, counts.x + counts.y);
        *(uint2 *)&s.bins[upper - 1] = make_uint2(0, 0);
        if (sum.all == 0) /* scores that change meanwhile do no harm */
            return {low - 1, 0, highest};
        uint32_t before = sum.before, left = min(rank - above, sum.all); /* of those not above */
        if (before < left && left <= before + counts.x + counts.y) {
            bool second = left > before + counts.y;
            s.bin = (uint32_t)(upper - second);
            s.above = before + (second ? counts.y : 0);
            s.within = second ? counts.x : counts.y;
        }
        __syncthreads();
        above += s.above;
        low += s.bin << cut;
        if (above + s.within <= most)
            return {low - 1, 0, highest};
        if (cut == 0)
            return {low, rank - above, highest};
        high = min(high, low + ((1U << cut) - 1));
        if (s.within <= 32 && most == rank)
            return rank_few(s, keys, rank - above, low, high, highest);
    }
}

/* ---- Writing ------------------------------------------------------------------------------------ */

/* Bits of the keys that are above, and that are equal. */
static __device__ __forceinline__ uint32_t bits_above(uint4 k, uint32_t key)
{
    return (k.x > key) | (k.y > key) << 1 | (k.z > key) << 2 | (k.w > key) << 3;
}

static __device__ __forceinline__ uint32_t bits_equal(uint4 k, uint32_t key)
{
    return (k.x == key) | (k.y == key) << 1 | (k.z == key) << 2 | (k.w == key) << 3;
}

/* Writes where the best keys stand, in order, to `to`, or to s.groups if that is NULL, which have room for
 * `most`; how many they are. */
template <int THREADS>
static __device__ __noinline__ uint32_t write_best(choice_scratch<THREADS> &s, key_source<THREADS> keys,
                                                   best_keys best, int64_t *to, uint32_t most)
{
    running_sum better = {}, ties = {};
#pragma unroll 1
    for (int i = 0; i < keys.fours; i++) {
        uint4 k = keys.get(s, i);
        better.before += __popc(bits_above(k, best.threshold));
        ties.before += __popc(bits_equal(k, best.threshold));
    }
    better = scan(s, 0, better.before);
    ties = best.share > 0 ? scan(s, 1, ties.before) : running_sum{0, 0};
#pragma unroll 1
    for (int i = 0; i < keys.fours; i++) {
        uint4 k = keys.get(s, i);
        uint32_t equal = best.share > 0 ? bits_equal(k, best.threshold) : 0;
        int at = keys.place(s, i);
#pragma unroll 1
        for (uint32_t bits = bits_above(k, best.threshold) | equal; bits; bits &= bits - 1) {
            int bit = __ffs((int)bits) - 1;
            bool tied = equal >> bit & 1;
            uint32_t place = better.before + min(ties.before, best.share);
            if ((tied && ties.before >= best.share) || place >= most)
                continue;
            if (to)
                to[place] = at + bit;
            else
                s.groups[place] = (uint32_t)(at + bit);
            better.before += !tied;
            ties.before += tied;
        }
    }
    __syncthreads();
    return min(better.all + min(ties.all, best.share), most);
}

/* ---- The whole ---------------------------------------------------------------------------------- */

/* Holds the peaks of a row, of 1 << shift scores each. */
template <int THREADS>
static __device__ key_source<THREADS> take_peaks(choice_scratch<THREADS> &s, const row_scores &row, int shift)
{
    key_source<THREADS> peaks = {row.scores, row.count, row.aligned, true, false, 0, 0, 0, CSA_NO_KEY};
    if (row.peaks) {
        peaks.values = row.peaks;
        peaks.count = (row.count + CSA_PEAK - 1) / CSA_PEAK;
    }
    peaks.divide((int)((row.count + ((int64_t)4 << shift) - 1) >> (shift + 2)));
    if (row.peaks && shift == CSA_PEAK_SHIFT)
        hold_keys(s, peaks);
    else
        hold_peaks(s, peaks, row.peaks ? shift - CSA_PEAK_SHIFT : shift);
    return peaks;
}

/* Writes the `rank` best of more regions than that, in order. */
template <int THREADS>
static __device__ void choose_best(choice_scratch<THREADS> &s, const row_scores &row, uint32_t rank,
                                   int64_t *entries)
{
    int shift = CSA_PEAK_SHIFT;
    while ((row.count - 1) >> shift >= CHOICE_HELD)
        shift++;
    key_source<THREADS> keys = {row.scores, row.count, row.aligned, true, false, 0, 0, 0, CSA_NO_KEY};
    uint32_t highest = 0;
    keys.divide((row.count + 3) / 4);
    if (row.count > CHOICE_DIRECT && (uint32_t)((row.count - 1) >> shift) >= rank) {
        key_source<THREADS> peaks = take_peaks(s, row, shift);
        best_keys bound = find_best(s, peaks, rank, max(rank, (uint32_t)CHOICE_HELD >> shift), 0);
        bool plateau = bound.share > 0;
        highest = bound.highest;
        bound.share = plateau ? rank : 0;
        keys.divide((int)(write_best(s, peaks, bound, nullptr, CHOICE_GROUPS) << (shift - 2)));
        keys.listed = true;
        keys.in_group = shift - 2;
        keys.floor = bound.threshold - plateau;
    }
    hold_keys(s, keys);
    write_best(s, keys, find_best(s, keys, rank, rank, highest), entries, rank);
}

/* Writes a row's width + 1 columns: padding (-1), then the best `width` of the regions before the current one,
 * row.count (-1: no region at all), and the current one. */
template <int THREADS>
static __device__ void choose_list(choice_scratch<THREADS> &s, const row_scores &row, int width,
                                   int64_t *entries)
{
    int current = row.count;
    if (current > width) {
        choose_best(s, row, (uint32_t)width, entries);
        if (threadIdx.x == 0)
            entries[width] = current;
        return;
    }
    int padding = width - current; /* current = -1: the whole row */
#pragma unroll 1
    for (int column = threadIdx.x; column <= width; column += THREADS)
        entries[column] = column < padding ? -1 : column - padding;
}

#endif
