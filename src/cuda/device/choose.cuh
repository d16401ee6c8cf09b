/*
 * Section 5 for one row by one block: the best regions, exactly and stably.
 *
 * Scores are compared as integers that order as section 5 says (larger is better, NaN is 1, nothing is 0). Each
 * thread holds up to four quads of neighbours in registers. Rows that are longer than that are searched level
 * by level: first the peaks, the largest of each 8 (64, 512) neighbouring scores. At least k scores reach the
 * k-th best peak, so only groups whose peaks reach a bound not above it matter, whose scores the threads hold
 * at the next level: all of them if they fit, else those of the k best peaks. (Of groups that tie, the first
 * have ties enough of their own.)
 *
 * A level: a histogram of the quads' largest keys gives a bound that k keys reach; of all keys, where there are
 * not enough quads; the level above knows one. The keys that reach it, a few more than k mostly, go to shared
 * memory in order. At the last level a histogram of these gives the bin of the k-th best, another one within
 * that bin, until it holds one key only or so few that they are ranked against each other. Plateaus are bins
 * like others.
 *
 * Chosen ones leave in order: the place of one is the number of chosen ones before it, ties counted up to their
 * share, so that earlier regions win ties.
 *
 * Bound by the length of the instruction stream, times the warps of a block, and a dozen meetings.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_CUDA_CHOOSE_CUH
#define CSA_CUDA_CHOOSE_CUH

#include "../../plan.h"
#include "lanes.cuh"

#include <stdint.h>

/* The best keys: those above `threshold`, and the first `share` of its equals. */
struct best_keys {
    uint32_t threshold, share;
};

enum {
    CHOICE_QUADS = 4, /* of a thread */
    CHOICE_FEW = 32   /* keys that are ranked against each other */
};

/* What a block needs for sums over its warps. */
template <int THREADS> struct warp_sums {
    uint32_t warps[3][THREADS / 32];
};

template <int THREADS> struct choice_scratch : warp_sums<THREADS> {
    static constexpr int VALUES = 4 * CHOICE_QUADS * THREADS,
                         GROUPS = VALUES / CSA_PEAK; /* that fit the threads */
    uint32_t bins[4 * THREADS];
    uint32_t groups[2][GROUPS]; /* listed at a level, and at the one before */
    uint32_t held[VALUES];      /* which values reach the bound, in order, or are NaN */
    float values[VALUES];       /* and what they are */
    uint32_t bin, above, within;
    uint32_t few[CHOICE_FEW], few_count;
    best_keys best;
};

/* The scores of a row and, where somebody found them already, the largest of each CSA_PEAK; NULL: not. NaN
 * counts in a peak only where there is nothing else. room: so many of each may be read. aligned: both, to 16
 * bytes. */
struct row_scores {
    const float *scores, *peaks;
    int count, room, peak_room;
    bool aligned;
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

/* A number of which the key is the largest that is no larger, for comparisons; NaN and below: -infinity. */
static __device__ __forceinline__ float number_of(uint32_t key)
{
    constexpr uint32_t LEAST = 0x007FFFFF; /* the key of -infinity */
    return __uint_as_float(key & 0x80000000 ? key ^ 0x80000000 : ~max(key, LEAST));
}

/* What a level looks at: the largest of each 1 << log of so many numbers. */
struct level_values {
    const float *numbers;
    int count, room;
    int log;
    bool aligned;
};

/* NaN only if there is nothing else; past the end there is -infinity. */
static __device__ __forceinline__ float largest_value(const level_values &v, int value)
{
    int64_t at = (int64_t)value << v.log, end = min(at + ((int64_t)1 << v.log), (int64_t)v.count);
    float most = at < end ? NAN : -INFINITY;
    for (; v.aligned && at % 4 == 0 && at + 4 <= end; at += 4) {
        float4 x = *(const float4 *)(v.numbers + at);
        most = fmaxf(most, fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)));
    }
    for (; at < end; at++)
        most = fmaxf(most, v.numbers[at]);
    return most;
}

/* Four neighbours, however they are stored. Out of line: where score left peaks, only the longest rows need it.
 */
static __device__ __noinline__ float4 largest_values(level_values v, int first)
{
    float most[4];
    int64_t at = (int64_t)first << v.log;
    if (v.aligned && v.log == CSA_PEAK_SHIFT && at + 4 * CSA_PEAK <= v.count) {
        float4 x[CSA_PEAK]; /* of four values */
#pragma unroll
        for (int i = 0; i < CSA_PEAK; i++) /* all under way at once */
            x[i] = ((const float4 *)(v.numbers + at))[i];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float4 a = x[2 * i], b = x[2 * i + 1];
            most[i] = fmaxf(fmaxf(fmaxf(a.x, a.y), fmaxf(a.z, a.w)), fmaxf(fmaxf(b.x, b.y), fmaxf(b.z, b.w)));
        }
    } else {
#pragma unroll 1
        for (int i = 0; i < 4; i++)
            most[i] = largest_value(v, first + i);
    }
    return make_float4(most[0], most[1], most[2], most[3]);
}

/* ---- Over the block ----------------------------------------------------------------------------- */

/* What is before, and all there is. */
struct running_sum {
    uint32_t before, all;
};

/* The sums over the warps, of what each one's last lane has. The block meets between two that take the same
 * `buffer`. */
template <int THREADS>
static __device__ __forceinline__ running_sum sum_warps(warp_sums<THREADS> &s, int buffer,
                                                        uint32_t of_last_lane)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 31)
        s.warps[buffer][warp] = of_last_lane;
    __syncthreads();
    uint32_t of_warp = lane < THREADS / 32 ? s.warps[buffer][lane] : 0;
    return {__reduce_add_sync(~0U, lane < warp ? of_warp : 0), __reduce_add_sync(~0U, of_warp)};
}

/* The sums over the threads before, and over the block. */
template <int THREADS>
static __device__ __forceinline__ running_sum scan(warp_sums<THREADS> &s, int buffer, uint32_t own)
{
    uint32_t sum = sum_lanes(own);
    running_sum warps = sum_warps(s, buffer, sum);
    return {warps.before + sum - own, warps.all};
}

enum : uint32_t { CHOICE_UNKNOWN = ~0U };

/* Keys [low, high]: so many are above, and so many within, where that is known. */
struct key_range {
    uint32_t low, high, above, within;
};

/* Narrows a range to a bin that has the rank-th best key (from 1); `each` visits the thread's keys. Bins are
 * empty before and after. */
template <int THREADS, typename Each>
static __device__ __forceinline__ void narrow(choice_scratch<THREADS> &s, key_range &range, uint32_t rank,
                                              Each each)
{
    constexpr int LOG = THREADS == 1024 ? 12 : THREADS == 512 ? 11 : THREADS == 256 ? 10 : 9;
    static_assert(4 * THREADS == 1 << LOG, "bins");
    uint32_t low = range.low, span = range.high - range.low;
    int cut = max(0, 32 - LOG - __clz(span));
    each([&](uint32_t key) {
        if (key - low <= span)
            atomicAdd(&s.bins[(key - low) >> cut], 1U);
    });
    __syncthreads();
    uint4 *own = (uint4 *)s.bins + (THREADS - 1 - threadIdx.x); /* a thread's bins, from the top */
    uint4 counts = *own;
    *own = make_uint4(0, 0, 0, 0);
    uint32_t all = (counts.x + counts.y) + (counts.z + counts.w);
    running_sum sum = scan(s, 0, all);
    uint32_t left = min(rank - range.above, sum.all); /* scores that change meanwhile do no harm */
    if (sum.before < left && left <= sum.before + all) {
        uint32_t bin = 4 * (THREADS - threadIdx.x) - 1, above = sum.before, within = counts.w;
        if (left > above + within)
            bin--, above += within, within = counts.z;
        if (left > above + within)
            bin--, above += within, within = counts.y;
        if (left > above + within)
            bin--, above += within, within = counts.x;
        s.bin = bin;
        s.above = above;
        s.within = within;
    }
    __syncthreads();
    range.within = 0;
    if (sum.all == 0)
        return;
    range.low = low + (s.bin << cut);
    range.high = range.low + min(range.high - range.low, (1U << cut) - 1);
    range.above += s.above;
    range.within = s.within;
}

/* ---- A level ------------------------------------------------------------------------------------ */

/* A level: so many quads, `each` of a thread, of all values (groups NULL) or, by twos, of listed groups. Keys
 * that matter: as many as are wanted reach the bound (CSA_NO_KEY: it is not known yet). */
struct level {
    level_values values;
    int all, count, each; /* values of the whole row; quads */
    const uint32_t *groups;
    uint32_t bound, highest;
};

/* What a thread has of a level: values by quads, and which of the level's values the first of each is (-1:
 * nothing). Its warp has `each` of every thread, or nothing. */
struct thread_quads {
    float value[CHOICE_QUADS][4];
    int each, at[CHOICE_QUADS];
};

/* Loads a thread's quads, past the end -infinity; ready() returns once they may be read. */
template <typename Ready>
static __device__ __forceinline__ void load_quads(const level &l, thread_quads &q, Ready ready)
{
    bool plain = l.values.log == 0 && l.values.aligned;
    int of_warp = (int)threadIdx.x / 32 * l.each * 32;
    q.each = of_warp < l.count ? l.each : 0;
#pragma unroll
    for (int i = 0; i < CHOICE_QUADS; i++) {
        int quad = of_warp + (int)threadIdx.x % 32 + 32 * i;
        q.at[i] = -1;
        if (i < q.each && quad < l.count)
            q.at[i] = l.groups ? (int)l.groups[quad / 2] * CSA_PEAK + quad % 2 * 4 : 4 * quad;
    }
    ready();
#pragma unroll
    for (int i = 0; i < CHOICE_QUADS; i++) { /* loads do not wait for each other */
        float4 x = make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
        if (plain && q.at[i] >= 0 && q.at[i] <= l.values.room - 4)
            x = *(const float4 *)(l.values.numbers + q.at[i]);
        q.value[i][0] = x.x, q.value[i][1] = x.y, q.value[i][2] = x.z, q.value[i][3] = x.w;
    }
#pragma unroll
    for (int i = 0; i < CHOICE_QUADS; i++) {
        if (i >= q.each)
            continue;
        if (q.at[i] >= 0 && (!plain || q.at[i] > l.values.room - 4)) {
            float4 x = largest_values(l.values, q.at[i]);
            q.value[i][0] = x.x, q.value[i][1] = x.y, q.value[i][2] = x.z, q.value[i][3] = x.w;
        }
        if (q.at[i] > l.all - 4) /* what was read past the end: of a listed group a whole quad may be */
#pragma unroll
            for (int k = 0; k < 4; k++)
                q.value[i][k] = q.at[i] + k < l.all ? q.value[i][k] : -INFINITY;
    }
}

/* How many of the largest keys of each quad are sure to be `rank` together; 4: all of the row may be needed. */
static __device__ __forceinline__ int quad_share(const level &l, uint32_t rank)
{
    uint32_t full = (uint32_t)l.all / 4;
    return rank <= full ? 1 : rank <= 2 * full ? 2 : rank <= 3 * full ? 3 : 4;
}

/* The share-th largest of four keys (4: the smallest but CSA_NO_KEY), less 1: no key becomes the largest. */
static __device__ __forceinline__ uint32_t least_of_share(const uint32_t (&key)[4], int share)
{
    uint32_t a = max(key[0], key[1]), b = max(key[2], key[3]), c = min(key[0], key[1]), d = min(key[2], key[3]);
    uint32_t inner = min(a, b), other = max(c, d);
    if (share == 4)
        return min(min(key[0] - 1, key[1] - 1), min(key[2] - 1, key[3] - 1));
    return (share == 1 ? max(a, b) : share == 2 ? max(inner, other) : min(inner, other)) - 1;
}

/* Finds a level's bound and largest key, and the range of the rank-th best key, of a level that has no groups:
 * where there are more quads, from their largest keys alone, so that more keys reach it; else from all keys. */
template <int THREADS>
static __device__ __forceinline__ key_range find_range(choice_scratch<THREADS> &s, level &l,
                                                       const thread_quads &q, uint32_t rank)
{
    constexpr int FEW = (int)CSA_MAX_TOPK / THREADS; /* quads of a thread, at most, if all are up to the rank */
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, share = quad_share(l, rank);
    bool by_quads = (uint32_t)l.count > rank;
    uint32_t key[CHOICE_QUADS][4], low = ~0U, high = 0; /* by quads: [0] alone */
#pragma unroll
    for (int i = 0; i < CHOICE_QUADS; i++) {
        if (i >= q.each)
            continue;
        if (by_quads || i >= FEW) {
            float most = fmaxf(fmaxf(q.value[i][0], q.value[i][1]), fmaxf(q.value[i][2], q.value[i][3]));
            key[i][0] = q.at[i] < 0 ? (uint32_t)CSA_NO_KEY : key_of(most);
            low = min(low, key[i][0] - 1);
            high = max(high, key[i][0]);
        } else {
#pragma unroll
            for (int k = 0; k < 4; k++)
                key[i][k] = q.at[i] >= 0 && q.at[i] + k < l.all ? key_of(q.value[i][k]) : (uint32_t)CSA_NO_KEY;
            low = min(low, least_of_share(key[i], share));
            high = max(high, max(max(key[i][0], key[i][1]), max(key[i][2], key[i][3])));
        }
    }
    low = __reduce_min_sync(~0U, low);
    high = __reduce_max_sync(~0U, high);
    if (lane == 0) {
        s.warps[0][warp] = low;
        s.warps[1][warp] = high;
    }
    __syncthreads();
    key_range range = {__reduce_min_sync(~0U, lane < THREADS / 32 ? s.warps[0][lane] : ~0U) + 1,
                       __reduce_max_sync(~0U, lane < THREADS / 32 ? s.warps[1][lane] : 0U), 0, 0};
    l.highest = range.high;
    narrow(s, range, rank, [&](auto visit) {
#pragma unroll
        for (int i = 0; i < CHOICE_QUADS; i++)
            if (i < q.each) {
                visit(key[i][0]);
                if (i < FEW && !by_quads)
#pragma unroll
                    for (int k = 1; k < 4; k++)
                        visit(key[i][k]);
            }
    });
    l.bound = range.low;
    return by_quads ? key_range{range.low, l.highest, 0, CHOICE_UNKNOWN} : range;
}

/* Brings what reaches a bound, and NaN, to shared memory, in order; how many these are. They are listed as
 * groups if that is what they are to be (not NULL) and they fit. Of -infinity, all of the level's `all` values
 * are held. */
template <int THREADS>
static __device__ __forceinline__ int hold_values(choice_scratch<THREADS> &s, const thread_quads &q,
                                                  float bound, int all, uint32_t *groups)
{
    /* What a warp has leaves quad by quad: a byte for each counts up to this lane. */
    uint32_t counts = 0;
#pragma unroll
    for (int i = 0; i < CHOICE_QUADS; i++)
        if (i < q.each && q.at[i] >= 0)
#pragma unroll
            for (int k = 0; k < 4; k++)
                counts += (uint32_t) !(q.value[i][k] < bound) << 8 * i;
    uint32_t sums = sum_lanes(counts), of_warp = __shfl_sync(~0U, sums, 31);
    sums -= counts;
    running_sum warps =
        sum_warps(s, 2, (of_warp & 0xFF) + (of_warp >> 8 & 0xFF) + (of_warp >> 16 & 0xFF) + (of_warp >> 24));
    uint32_t before = warps.before;
    int held = (int)warps.all;
    uint32_t *list = groups && held <= choice_scratch<THREADS>::GROUPS ? groups : s.held;
#pragma unroll
    for (int i = 0; i < CHOICE_QUADS; i++) {
        if (i >= q.each)
            continue;
        uint32_t to = before + (sums >> 8 * i & 0xFF);
        if (counts >> 8 * i & 0xFF)
#pragma unroll
            for (int k = 0; k < 4; k++)
                if (!(q.value[i][k] < bound)) {
                    s.values[to] = q.value[i][k];
                    list[to++] = (uint32_t)(q.at[i] + k);
                }
        before += of_warp >> 8 * i & 0xFF;
    }
    __syncthreads();
    if (bound == -INFINITY) /* what stands past the end, too, as the last */
        while (held > 0 && list[held - 1] >= (uint32_t)all)
            held--;
    return held;
}

/* Loads a level and holds what matters of it; how many these are, and the range of the rank-th best. ready()
 * returns once the values may be read. */
template <int THREADS, typename Ready>
static __device__ __forceinline__ int hold_level(choice_scratch<THREADS> &s, level &l, uint32_t rank,
                                                 uint32_t *groups, key_range &range, Ready ready)
{
    thread_quads q;
    ((uint4 *)s.bins)[threadIdx.x] = make_uint4(0, 0, 0, 0);
    if (threadIdx.x == 0)
        s.few_count = 0;
    load_quads(l, q, ready);
    range = {l.bound, l.highest, 0, CHOICE_UNKNOWN};
    if (l.bound == CSA_NO_KEY)
        range = find_range(s, l, q, rank);
    float bound = number_of(l.bound);
    int held = hold_values(s, q, bound, l.all, groups);
    if (bound == -INFINITY) {
        l.bound = CSA_NAN_KEY;
        range = {CSA_NAN_KEY, l.highest, 0, CHOICE_UNKNOWN};
    }
    return held;
}

/* The rank-th best of the held keys, which is one of the few in the range: warps rank them in turn. */
template <int THREADS>
static __device__ __forceinline__ best_keys rank_few(choice_scratch<THREADS> &s, int held, key_range range,
                                                     uint32_t rank)
{
    uint32_t lane = threadIdx.x % 32, span = range.high - range.low;
#pragma unroll 1
    for (int i = threadIdx.x; i < held; i += THREADS) {
        uint32_t key = key_of(s.values[i]);
        if (key - range.low <= span)
            s.few[atomicAdd(&s.few_count, 1U) % CHOICE_FEW] = key;
    }
    __syncthreads();
    uint32_t own = lane < range.within ? s.few[lane] : (uint32_t)CSA_NO_KEY;
    rank -= range.above;
#pragma unroll 1
    for (uint32_t of = threadIdx.x / 32; of < range.within; of += THREADS / 32) {
        uint32_t key = s.few[of], better = (uint32_t)__popc(__ballot_sync(~0U, own > key)),
                 equal = __ballot_sync(~0U, own == key);
        bool first = __ffs((int)equal) == (int)of + 1;
        if (lane == 0 && first && better < rank && rank <= better + (uint32_t)__popc(equal)) {
            s.best.threshold = key;
            s.best.share = rank - better;
        }
    }
    __syncthreads();
    return s.best;
}

/* Finds the rank-th best of the held keys, which is in the range. */
template <int THREADS>
static __device__ __forceinline__ best_keys find_best(choice_scratch<THREADS> &s, int held, key_range range,
                                                      uint32_t rank)
{
#pragma unroll 1
    for (;;) {
        if (range.low == range.high || range.within == 0)
            return {range.low, rank - range.above};
        if (range.within <= CHOICE_FEW)
            return rank_few(s, held, range, rank);
        narrow(s, range, rank, [&](auto visit) {
#pragma unroll 1
            for (int i = threadIdx.x; i < held; i += THREADS)
                visit(key_of(s.values[i]));
        });
    }
}

/* What lies before a block's values where others have those: better keys, ties, values. */
struct values_before {
    uint32_t better, ties, values;
};

/* Writes which values the best of the held keys are, in order, to `to`, which has room for `most`; how many
 * they are. */
template <int THREADS, typename To>
static __device__ __forceinline__ int write_best(choice_scratch<THREADS> &s, int held, best_keys best, To *to,
                                                 uint32_t most, values_before start = {0, 0, 0})
{
    int each = (held + THREADS - 1) / THREADS, first = (int)threadIdx.x * each, end = min(first + each, held);
    uint32_t better = 0, ties = 0;
#pragma unroll 1
    for (int i = first; i < end; i++) {
        uint32_t key = key_of(s.values[i]);
        better += key > best.threshold;
        ties += key == best.threshold;
    }
    running_sum sum = scan(s, 1, better | ties << 16); /* two sums at once */
    better = start.better + (sum.before & 0xFFFF), ties = start.ties + (sum.before >> 16);
#pragma unroll 1
    for (int i = first; i < end; i++) {
        uint32_t key = key_of(s.values[i]);
        bool tied = key == best.threshold;
        uint32_t place = better + min(ties, best.share);
        if (key < best.threshold || (tied && ties >= best.share) || place >= most)
            continue;
        to[place] = (To)(start.values + s.held[i]);
        better += !tied;
        ties += tied;
    }
    __syncthreads();
    return (int)min((sum.all & 0xFFFF) + min(sum.all >> 16, best.share), most);
}

/* ---- The whole ---------------------------------------------------------------------------------- */

/* Writes the `rank` best of more regions than that, in order; rank <= GROUPS if they do not fit the threads. */
template <int THREADS, typename Ready>
static __device__ void choose_best(choice_scratch<THREADS> &s, const row_scores &row, uint32_t rank,
                                   int64_t *entries, Ready ready)
{
    int shift = 0; /* scores of a key, as a power of two */
    while ((row.count - 1) >> shift >= choice_scratch<THREADS>::VALUES)
        shift += CSA_PEAK_SHIFT;
    level l = {};
    l.count = (((row.count - 1) >> shift) + 4) / 4;
#pragma unroll 1
    for (;; shift -= CSA_PEAK_SHIFT) {
        if (row.peaks && shift >= CSA_PEAK_SHIFT)
            l.values = {row.peaks, (row.count + CSA_PEAK - 1) / CSA_PEAK, row.peak_room, shift - CSA_PEAK_SHIFT,
                        row.aligned};
        else
            l.values = {row.scores, row.count, row.room, shift, row.aligned};
        l.all = ((row.count - 1) >> shift) + 1;
        l.each = (l.count + THREADS - 1) / THREADS;
        key_range range;
        uint32_t *groups = shift > 0 ? s.groups[shift / CSA_PEAK_SHIFT % 2] : nullptr;
        int held = hold_level(s, l, rank, groups, range, ready);
        if (!groups) {
            write_best(s, held, find_best(s, held, range, rank), entries, rank);
            return;
        }
        if (held > choice_scratch<THREADS>::GROUPS) {
            best_keys best = find_best(s, held, range, rank);
            l.bound = best.threshold;
            held = write_best(s, held, best, groups, choice_scratch<THREADS>::GROUPS);
        }
        l.count = 2 * held;
        l.groups = groups;
    }
}

/* The columns of a row that has no more regions than it may select; current = -1: all are padding. */
template <int THREADS> static __device__ __forceinline__ void list_all(int width, int current, int64_t *entries)
{
    int padding = width - current;
#pragma unroll 1
    for (int column = threadIdx.x; column <= width; column += THREADS)
        entries[column] = column < padding ? -1 : column - padding;
}

/* Writes a row's width + 1 columns: padding (-1), then the best `width` of the regions before the current one,
 * row.count (-1: no region at all), and the current one. ready() returns once the scores may be read and the
 * columns written. */
template <int THREADS, typename Ready>
static __device__ void choose_list(choice_scratch<THREADS> &s, const row_scores &row, int width,
                                   int64_t *entries, Ready ready)
{
    int current = row.count;
    if (current > width) {
        choose_best(s, row, (uint32_t)width, entries, ready);
        if (threadIdx.x == 0)
            entries[width] = current;
        return;
    }
    ready();
    list_all<THREADS>(width, current, entries);
}

#endif
