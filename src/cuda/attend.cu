/*
 * Section 6: attention of a row to the tokens of its list, straight from the paged cache.
 *
 * Order of sums, the same however a row is cut: the row's live list entries are taken in units of 8 regions (64
 * tokens), each with a softmax of its own; the 8 units of a piece (64 entries) join in a binary tree; pieces
 * join one after the other. What joins is (m, l, o): the largest logit in base 2, the sum of 2^(logit - m), the
 * values weighted by it.
 *
 * A block takes a whole row or, with fewer rows, some pieces of it; with few rows, a cluster of 2, 4 or 8
 * blocks takes a piece, joins its units through their shared memory, and each block goes on with its share of
 * the values. Where a row is cut, pieces leave records in the workspace, and who finds itself the last of its
 * row (and share) joins them. (A block alone also takes a last piece of one unit, the current region where topk
 * is a multiple of 64, after its own.)
 *
 * A block has four warps. A unit's 64 cache rows are copied asynchronously into one of two stages (e4m3: four),
 * a warp two regions; others load while one is worked on. Q.K: heads are the product's rows (16, padded), a
 * warp does its own regions, keys straight from its copies. Maxima are exchanged, weights go to shared memory.
 * P.V: a warp does 48 of the 192 values over all 64 tokens. Three meetings of the block a unit.
 *
 * e4m3 caches: codes become f16 exactly; queries become f16 after scaling each head to just below f16's largest
 * value by a power of two, which the logits are relieved of; weights are f16. bf16 caches: all bf16.
 *
 * Bound by memory where rows are many: two blocks a multiprocessor with some 100 KB each under way. Few rows
 * are bound by waits: a unit takes 2500 cycles from its first load to its last product.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "../numeric.h"
#include "attend_unit.cuh"
#include "launch.h"
#include "stages.h"

namespace
{

enum {
    LEVELS = 3,                    /* of the tree of a piece's units */
    RECORD = CSA_RECORD_FLOATS / 4 /* float4s */
};
static_assert(UNITS == 1 << LEVELS, "a tree of units");
static_assert(RECORD == (1 + TILES) * THREADS, "a record is a partial result of each thread");

/* What a block works on: its share of a row, and whose row that is. */
struct share : csa_share {
    uint32_t token, group;
};

/* Brings the block's entries to s.entries, resolved; what is missing of a unit is 0. */
template <bool FP8>
__device__ void find_entries(const attend_params &p, shared_state<FP8> &s, const share &own, uint32_t row,
                             const token_place &place)
{
    const int32_t *blocks = p.map.row(place.owner);
    const int64_t *list = (const int64_t *)p.selected.at(row) + (p.columns - own.entries);
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < own.units * UNIT; i += THREADS) {
        uint32_t entry = csa_unit_of(&own, i / UNIT) * UNIT + i % UNIT;
        s.entries[i] = entry < own.entries ? resolve_entry(p, blocks, list[entry], place.position) : 0;
    }
    __syncthreads();
}

/* Puts the result of one of a piece's units into their tree; with the last one `result` is that of all. */
template <int LEVEL = 0>
__device__ __forceinline__ void join_next(partial (&waiting)[LEVELS], partial &result, int number)
{
    if constexpr (LEVEL < LEVELS) {
        if ((number >> LEVEL & 1) == 0) {
            waiting[LEVEL] = result;
        } else {
            join(waiting[LEVEL], result);
            result = waiting[LEVEL];
            join_next<LEVEL + 1>(waiting, result, number);
        }
    }
}

/* The result of fewer units: joins what waits in the tree. */
__device__ __forceinline__ void join_rest(partial (&waiting)[LEVELS], partial &result, int units)
{
    bool any = false;
#pragma unroll
    for (int level = 0; level < LEVELS; level++) {
        if ((units >> level & 1) == 0)
            continue;
        if (any)
            join(waiting[level], result);
        result = waiting[level];
        any = true;
    }
}

/* ---- Records ------------------------------------------------------------------------------------ */

/* A partial result as threads hold it, so that the thread of the same number can go on with it. */
__device__ void leave(float4 *record, const partial &r)
{
    float4 *own = record + threadIdx.x;
    own[0] = make_float4(r.m[0], r.m[1], r.l[0], r.l[1]);
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
        own[(1 + tile) * THREADS] = make_float4(r.o[tile][0], r.o[tile][1], r.o[tile][2], r.o[tile][3]);
}

__device__ __forceinline__ void fetch(const float4 *record, partial &r)
{
    const float4 *own = record + threadIdx.x;
    float4 sums = __ldcg(own);
    r.m[0] = sums.x, r.m[1] = sums.y, r.l[0] = sums.z, r.l[1] = sums.w;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        float4 v = __ldcg(own + (1 + tile) * THREADS);
        r.o[tile][0] = v.x, r.o[tile][1] = v.y, r.o[tile][2] = v.z, r.o[tile][3] = v.w;
    }
}

/* A quarter of what a thread left in a record: number `of` of the four values of each tile, which are of one
 * head. */
struct slice {
    float m, l;
    float o[TILES];

    static __device__ __forceinline__ uint32_t sums_at(uint32_t thread, uint32_t of) /* in bytes */
    {
        return thread * 16 + of / 2 * 4;
    }
    static __device__ __forceinline__ uint32_t value_at(uint32_t thread, uint32_t of, uint32_t tile)
    {
        return ((1 + tile) * THREADS + thread) * 16 + of * 4;
    }
};

__device__ __forceinline__ void join(slice &a, const slice &b)
{
    float own, other;
    join_factors(a.m, a.l, b.m, b.l, own, other);
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
        a.o[tile] = fmaf(b.o[tile], other, a.o[tile] * own);
}

__device__ __forceinline__ void clear(partial &r)
{
    r = nothing();
}

__device__ __forceinline__ void clear(slice &r)
{
    r = {-INFINITY, 0.0F, {}};
}

__device__ float4 *find_record(const attend_params &p, uint32_t row, uint32_t piece)
{
    return p.records + ((int64_t)row * p.cut.pieces + piece) * RECORD;
}

/* Joins a row's pieces one after the other, as fetch_one(piece, result) brings them, AT_ONCE on their way at a
 * time. */
template <int AT_ONCE, typename Result, typename Fetch>
__device__ __forceinline__ void join_pieces(uint32_t pieces, Result &result, Fetch fetch_one)
{
    clear(result);
#pragma unroll 1
    for (uint32_t at = 0; at < pieces; at += AT_ONCE) {
        Result some[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (at + i < pieces)
                fetch_one(at + i, some[i]);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (at + i < pieces)
                join(result, some[i]);
    }
}

/* Is this block the last of so many that count? If so, it sees what the others left. */
__device__ bool is_last(uint32_t *counter, uint32_t of, bool &last)
{
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0)
        last = atomicAdd(counter, 1U) == of - 1;
    __syncthreads();
    if (last)
        __threadfence();
    return last;
}

/* ---- The result --------------------------------------------------------------------------------- */

/* What a row's result is multiplied by at the end, for a thread's two heads. */
struct finish {
    float v_scale;
    uint16_t gate[2];

    __device__ void load(const attend_params &p, const share &own, uint32_t thread)
    {
        v_scale = p.v_scale ? *p.v_scale : 1.0F;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t head = thread % 32 / 4 + 8 * half;
            gate[half] =
                p.gate && head < p.heads ? *((const uint16_t *)p.gate.at(own.token, own.group) + head) : 0;
        }
    }
};

/* Writes values of one of a thread's two heads. */
struct head_writer {
    uint16_t *out; /* NULL: there is no such head */
    float factor, gate;
    bool empty, gated;

    __device__ __forceinline__ head_writer(const attend_params &p, const share &own, const finish &f,
                                           uint32_t thread, int half, float m, float l)
    {
        uint32_t head = thread % 32 / 4 + 8 * half;
        out = head < p.heads ? (uint16_t *)p.out.at(own.token, own.group, head) + thread / 32 * SLICE : nullptr;
        empty = l == 0.0F;
        factor = empty ? 0.0F : 1.0F / l * f.v_scale;
        gated = (bool)p.gate;
        gate = gated ? csa_gate_factor(half ? f.gate[1] : f.gate[0]) : 1.0F;
        if (p.lse && out && thread < 32 && thread % 4 == 0)
            *((float *)p.lse.at(own.token, own.group) + head) =
                empty ? -INFINITY : (m + log2f(l)) * 0.693147181F;
    }
    __device__ __forceinline__ void write(int at, float o) const
    {
        float value = __uint_as_float(pack_bf16(0.0F, o * factor)); /* rounded */
        if (gated)
            value = __uint_as_float(pack_bf16(0.0F, value * gate));
        if (out)
            out[at] = empty ? 0 : (uint16_t)(__float_as_uint(value) >> 16);
    }
};

/* ---- What follows the units --------------------------------------------------------------------- */

/* A block alone: `result` is the whole row's, or the row's pieces are in the workspace. */
template <bool FP8>
__device__ __forceinline__ void finish_alone(const attend_params &p, const share &own, uint32_t row, bool &last,
                                             const finish &f, partial &result)
{
    if (own.parts > 1) {
        if (!is_last(p.counters + row, own.parts, last))
            return;
        join_pieces<4>(own.pieces, result,
                       [&](uint32_t piece, partial &r) { fetch(find_record(p, row, piece), r); });
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        head_writer head(p, own, f, threadIdx.x, half, result.m[half], result.l[half]);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int k = 0; k < 2; k++)
                head.write(value_of<FP8>(threadIdx.x % 4, tile, k), result.o[tile][2 * half + k]);
    }
}

/* A block of a cluster: all blocks have left what they have of a piece. Each joins what THREADS / BLOCKS of the
 * threads hold of it, and the last block of a row goes on with the row. */
template <bool FP8, int BLOCKS>
__device__ __forceinline__ void finish_in_cluster(const attend_params &p, const share &own, uint32_t row,
                                                  bool &last, const finish &f, uint32_t thread,
                                                  const float4 *left)
{
    constexpr uint32_t OWN = THREADS / BLOCKS;
    auto fetch_left = [&](uint32_t rank, uint32_t of, slice &r) {
        uint32_t from = cluster_address(left, rank);
        r.m = cluster_load(from + slice::sums_at(thread, of));
        r.l = cluster_load(from + slice::sums_at(thread, of) + 8);
#pragma unroll
        for (uint32_t tile = 0; tile < TILES; tile++)
            r.o[tile] = cluster_load(from + slice::value_at(thread, of, tile));
    };
    auto store = [&](uint32_t piece, uint32_t of, const slice &r) {
        char *record = (char *)find_record(p, row, piece);
        *(float *)(record + slice::sums_at(thread, of)) = r.m; /* twice the same */
        *(float *)(record + slice::sums_at(thread, of) + 8) = r.l;
#pragma unroll
        for (uint32_t tile = 0; tile < TILES; tile++)
            *(float *)(record + slice::value_at(thread, of, tile)) = r.o[tile];
    };
    auto write = [&](uint32_t of, const slice &r) {
        head_writer head(p, own, f, thread, (int)of / 2, r.m, r.l);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
            head.write(value_of<FP8>(thread % 4, tile, of % 2), r.o[tile]);
    };
    bool alone = own.pieces <= 1;
    cluster_arrive();
    cluster_wait();
#pragma unroll 1
    for (uint32_t of = threadIdx.x / OWN; of < 4; of += BLOCKS) {
        slice r[BLOCKS], result;
#pragma unroll
        for (int rank = 0; rank < BLOCKS; rank++)
            fetch_left(rank, of, r[rank]);
#pragma unroll
        for (int step = 1; step < BLOCKS; step *= 2)
#pragma unroll
            for (int rank = 0; rank < BLOCKS; rank += 2 * step)
                join(r[rank], r[rank + step]);
        if (alone) {
            clear(result);
            join(result, r[0]);
            write(of, result);
            continue;
        }
        store(own.part, of, r[0]);
    }
    __syncwarp();
    cluster_arrive(); /* this block has read what it needs of the others */
    if (!alone && is_last(p.counters + row * CSA_MOST_BLOCKS + own.rank, own.parts, last)) {
#pragma unroll 1
        for (uint32_t of = threadIdx.x / OWN; of < 4; of += BLOCKS) {
            slice result;
            join_pieces<4>(own.pieces, result, [&](uint32_t piece, slice &r) {
                const char *record = (const char *)find_record(p, row, piece);
                r.m = __ldcg((const float *)(record + slice::sums_at(thread, of)));
                r.l = __ldcg((const float *)(record + slice::sums_at(thread, of) + 8));
#pragma unroll
                for (uint32_t tile = 0; tile < TILES; tile++)
                    r.o[tile] = __ldcg((const float *)(record + slice::value_at(thread, of, tile)));
            });
            write(of, result);
        }
    }
    __syncwarp();
    cluster_wait(); /* nobody leaves while its units are read */
}

/* ---- The kernel --------------------------------------------------------------------------------- */

template <bool FP8, int BLOCKS>
__global__ void __launch_bounds__(THREADS, 2) attend_kernel(const __grid_constant__ attend_params p)
{
    constexpr int STAGES = layout<FP8>::STAGES;
    extern __shared__ __align__(16) unsigned char shared[];
    shared_state<FP8> &s = *(shared_state<FP8> *)shared;
    uint32_t item = blockIdx.x / BLOCKS, row = quotient(item, p.cut.parts), part = item - row * p.cut.parts;
    uint32_t thread = threadIdx.x, rank = blockIdx.x % BLOCKS; /* whose share of the row this thread writes */
    share own;
    own.token = quotient(row, p.groups);
    own.group = row - own.token * p.groups;
    if (BLOCKS > 1)
        thread = rank * (THREADS / BLOCKS) + threadIdx.x % (THREADS / BLOCKS);
    start_kernel_behind();

    finish f;
    f.load(p, own, thread);
    token_place place = p.tokens.place(p.first + own.token);
    if (p.positions)
        place.position = *p.active.at(row) ? *(const int64_t *)p.positions.at(row) : -1;
    int64_t live = place.position < 0 ? 0 : place.position / CSA_REGION + 1;
    (csa_share &)own = csa_find_share(&p.cut, part, rank, (uint32_t)min(live, (int64_t)p.columns));
    if (own.part >= own.parts) /* nor has another block of its cluster a unit */
        return;
    if (threadIdx.x < 64) { /* a warp for each eight heads */
        const uint8_t *query = p.query.at(own.token, own.group);
        if (p.query_aligned)
            s.query.template load<true>(p, query, threadIdx.x / 32);
        else
            s.query.template load<false>(p, query, threadIdx.x / 32);
    }
    lane_places<FP8> places;
    wait_for_kernel_ahead();
    find_entries<FP8>(p, s, own, row, place);
    const uint8_t *group_kv = p.kv + own.group * p.group_step;
    int total = (int)own.units;
#pragma unroll 1
    for (int i = 0; i < STAGES; i++) {
        if (i < total)
            load_unit<FP8>(p, s.stage[i], s.entries + i * UNIT, group_kv);
        copies_commit();
    }

    float4 *left = (float4 *)(s.stage + STAGES) - RECORD; /* of a cluster's block, when its units are done */
    partial waiting[LEVELS], sum, result = nothing();
    if (BLOCKS > 1 && total == 0)
        leave(left, result);
#pragma unroll 1
    for (int done = 0; done < total;) {
        int together = (int)csa_units_together(&own, done);
#pragma unroll 1
        for (int unit = 0; unit < together; unit++, done++) {
            unsigned char *stage = s.stage[done % STAGES];
            copies_wait<STAGES - 1>();
            sum = nothing();
            attend_unit<FP8>(s, places, stage, s.entries + done * UNIT, sum);
            __syncthreads(); /* the stage has been used */
            if (done + STAGES < total)
                load_unit<FP8>(p, stage, s.entries + (done + STAGES) * UNIT, group_kv);
            copies_commit();
            if (UNITS / BLOCKS > 1)
                join_next(waiting, sum, unit);
        }
        if (UNITS / BLOCKS > 1 && together < UNITS)
            join_rest(waiting, sum, together);
        if (BLOCKS > 1)
            leave(left, sum);
        else if (own.parts > 1)
            leave(find_record(p, row, csa_unit_of(&own, done - 1) / UNITS), sum);
        else
            join(result, sum);
    }
    if constexpr (BLOCKS > 1)
        finish_in_cluster<FP8, BLOCKS>(p, own, row, s.last, f, thread, left);
    else
        finish_alone<FP8>(p, own, row, s.last, f, result);
}

/* ---- Launching ---------------------------------------------------------------------------------- */

/* Clusters start early for up to so many rows. Of more, those that do get in each other's way: 8 rows at 128K
 * took 47 us instead of 43. */
enum { OVERLAP_CLUSTERS = 4 };

using kernel = void (*)(attend_params);

template <bool FP8> kernel kernel_of(int blocks)
{
    return blocks == 8   ? attend_kernel<FP8, 8>
           : blocks == 4 ? attend_kernel<FP8, 4>
           : blocks == 2 ? attend_kernel<FP8, 2>
                         : attend_kernel<FP8, 1>;
}

csa_status queue_attend(const csa_context *context, const attend_params &p, bool fp8, int64_t rows,
                        bool in_step, void *stream)
{
    csa_launch l;
    int blocks = p.cut.blocks;
    l.grid = dim3((unsigned)(rows * p.cut.parts * blocks));
    l.block = dim3(THREADS);
    l.shared = fp8 ? sizeof(shared_state<true>) : sizeof(shared_state<false>);
    l.stream = stream;
    l.cluster = (unsigned)blocks;
    l.overlap = in_step && !context->portable && (blocks == 1 || rows <= OVERLAP_CLUSTERS);
    return csa_queue("attend", fp8 ? kernel_of<true>(blocks) : kernel_of<false>(blocks), l, p);
}

/* What attention alone and attention in a step have in common. */
csa_status fill_params(attend_params &p, const csa_attend_args *args)
{
    const csa_tensor &kv = args->cache->kv;
    p.tokens = csa_token_source(*args->tokens);
    p.map = csa_block_map(args->tokens->block_table, kv.shape[0]);
    if (args->rows) {
        p.active = csa_view(args->rows->active);
        p.positions = csa_view(args->rows->positions);
    }
    p.query = csa_view(args->query);
    p.selected = csa_view(args->selected);
    p.gate = csa_view(args->gate);
    p.out = csa_view(args->out);
    p.lse = csa_view(args->lse);
    p.kv = (const uint8_t *)kv.data;
    p.block_step = csa_view(kv).step[0];
    p.group_step = csa_view(kv).step[1];
    p.row_step = csa_view(kv).step[2];
    if (kv.dtype != CSA_BF16) {
        p.k_scale = args->cache->k_scale;
        p.v_scale = args->cache->v_scale;
    }
    p.groups = (uint32_t)args->query.shape[1];
    p.heads = (uint32_t)args->query.shape[2];
    p.columns = (uint32_t)args->selected.shape[1];
    p.scale = args->scale;
    while ((CSA_REGION << p.block_shift) < kv.shape[2])
        p.block_shift++;
    p.kv_aligned = csa_aligned(&kv);
    p.kv_packed = p.kv_aligned && kv.stride[2] == CSA_KV_SIZE;
    p.query_aligned = csa_aligned(&args->query);
    p.cut = csa_whole_rows();
    if (kv.shape[0] > (int64_t)1 << (28 - p.block_shift))
        return csa_cuda_fail(CSA_ERROR_UNSUPPORTED, "cache.kv: %lld blocks, at most 2^28 regions are supported",
                             (long long)kv.shape[0]);
    return CSA_OK;
}

} // namespace

csa_status csa_cuda_load_attend(void)
{
    csa_status status = CSA_OK;
    for (int blocks = 1; blocks <= CSA_MOST_BLOCKS && status == CSA_OK; blocks *= 2) {
        status = csa_load("attend", kernel_of<false>(blocks), sizeof(shared_state<false>));
        if (status == CSA_OK)
            status = csa_load("attend", kernel_of<true>(blocks), sizeof(shared_state<true>));
    }
    return status;
}

csa_status csa_cuda_attend(const csa_context *context, const csa_attend_args *args)
{
    attend_params p = {};
    int64_t rows = args->query.shape[0] * args->query.shape[1];
    csa_status status = fill_params(p, args);
    if (status != CSA_OK || rows == 0)
        return status;
    return queue_attend(context, p, args->cache->kv.dtype != CSA_BF16, rows, false, args->stream);
}

csa_status csa_cuda_attend_in_step(const csa_context *context, const csa_attend_args *args,
                                   const csa_ranking *ranking)
{
    attend_params p = {};
    int64_t rows = args->query.shape[0] * args->query.shape[1];
    csa_status status = fill_params(p, args);
    if (status != CSA_OK || rows == 0)
        return status;
    p.first = (uint32_t)ranking->first;
    p.counters = ranking->counters;
    p.records = (float4 *)ranking->records;
    p.cut = csa_cut_rows(rows, p.columns, context->multiprocessors, !context->portable, ranking->most_records);
    return queue_attend(context, p, args->cache->kv.dtype != CSA_BF16, rows, true, args->stream);
}
