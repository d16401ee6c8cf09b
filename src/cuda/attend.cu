/*
 * Section 6: attention of a row to the tokens of its list, straight from the paged cache.
 *
 * Order of sums, the same however a row is cut: the row's live list entries are taken in units of 8 regions (64
 * tokens), each with a softmax of its own; the 8 units of a piece (64 entries) join in a binary tree; pieces
 * join one after the other. What joins is (m, l, o): the largest logit in base 2, the sum of 2^(logit - m), the
 * values weighted by it.
 *
 * A cluster of 1, 2, 4 or 8 blocks works on a piece, each on an aligned subtree of its units; then each block
 * joins its slice of the 192 values over all blocks, read from their shared memory. A cluster takes a whole
 * row, piece by piece, or (few rows) a single piece: then pieces leave records in the workspace, and the block
 * that finds itself the last of its row and slice joins them.
 *
 * A block has four warps. A unit's 64 cache rows are copied asynchronously into one of two stages, a warp two
 * regions; one stage loads while the other is worked on. Q.K: heads are the product's rows (16, padded), a warp
 * does its own two regions, keys straight from its copies. Maxima are exchanged, weights go to shared memory.
 * P.V: a warp does 48 of the 192 values over all 64 tokens. Rows in shared memory lie 16 bytes apart from a
 * multiple of 128, and tokens are numbered within the products so that no load conflicts. Three meetings of the
 * block a unit.
 *
 * e4m3 caches: codes become f16 exactly; queries become f16 after scaling each head to just below f16's largest
 * value by a power of two, which the logits are relieved of; weights are f16. bf16 caches: all bf16.
 *
 * Bound by memory: two blocks a multiprocessor with 49 KB (bf16) each under way.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "../numeric.h"
#include "attend_unit.cuh"
#include "launch.h"
#include "stages.h"

namespace
{

/* ---- A row's result, slice by slice ------------------------------------------------------------- */

/* A thread's share of a slice: one head, every eighth value of SIZE / BLOCKS. */
template <int BLOCKS> struct slice {
    static constexpr int EACH = SIZE / BLOCKS / 8;
    float m, l;
    float o[EACH];

    __device__ static int head()
    {
        return threadIdx.x / 8;
    }
    __device__ static int value(int rank, int i)
    {
        return rank * (SIZE / BLOCKS) + i * 8 + threadIdx.x % 8;
    }

    __device__ void join(float other_m, float other_l, const float (&other_o)[EACH])
    {
        float own, other;
        join_factors(m, l, other_m, other_l, own, other);
#pragma unroll
        for (int i = 0; i < EACH; i++)
            o[i] = fmaf(other_o[i], other, o[i] * own);
    }
};

/* Joins what the blocks of the cluster left at `left`, in a tree. */
template <int BLOCKS> __device__ void join_blocks(const part_result &left, int rank, slice<BLOCKS> &result)
{
    constexpr int EACH = slice<BLOCKS>::EACH;
    slice<BLOCKS> parts[BLOCKS];
    int head = slice<BLOCKS>::head();
#pragma unroll
    for (int of = 0; of < BLOCKS; of++) {
        parts[of].m = __uint_as_float(cluster_load<BLOCKS>(cluster_address<BLOCKS>(&left.m[head], of)));
        parts[of].l = __uint_as_float(cluster_load<BLOCKS>(cluster_address<BLOCKS>(&left.l[head], of)));
#pragma unroll
        for (int i = 0; i < EACH; i++)
            parts[of].o[i] = __uint_as_float(cluster_load<BLOCKS>(
                cluster_address<BLOCKS>(&left.o[head][slice<BLOCKS>::value(rank, i)], of)));
    }
#pragma unroll
    for (int step = 1; step < BLOCKS; step *= 2)
#pragma unroll
        for (int of = 0; of + step < BLOCKS; of += 2 * step)
            parts[of].join(parts[of + step].m, parts[of + step].l, parts[of + step].o);
    result = parts[0];
}

/* What a row's result is multiplied by at the end, for the thread's head. */
struct finish {
    float v_scale;
    uint16_t gate;

    __device__ void load(const attend_params &p, uint32_t token, uint32_t group)
    {
        uint32_t head = threadIdx.x / 8;
        v_scale = p.v_scale ? *p.v_scale : 1.0F;
        gate = p.gate && head < p.heads ? *((const uint16_t *)p.gate.at(token, group) + head) : 0;
    }
};

template <int BLOCKS>
__device__ void write_row(const attend_params &p, uint32_t token, uint32_t group, int rank, const finish &f,
                          const slice<BLOCKS> &result)
{
    uint32_t head = slice<BLOCKS>::head();
    if (head >= p.heads)
        return;
    uint16_t *out = (uint16_t *)p.out.at(token, group, head);
    bool empty = result.l == 0.0F;
    float factor = empty ? 0.0F : 1.0F / result.l * f.v_scale, gate = p.gate ? csa_gate_factor(f.gate) : 1.0F;
#pragma unroll
    for (int i = 0; i < slice<BLOCKS>::EACH; i++) {
        float value = __uint_as_float(pack_bf16(0.0F, result.o[i] * factor)); /* rounded */
        if (p.gate)
            value = __uint_as_float(pack_bf16(0.0F, value * gate));
        out[slice<BLOCKS>::value(rank, i)] = empty ? 0 : (uint16_t)(__float_as_uint(value) >> 16);
    }
    if (p.lse && rank == 0 && threadIdx.x % 8 == 0)
        *((float *)p.lse.at(token, group) + head) =
            empty ? -INFINITY : (result.m + log2f(result.l)) * 0.693147181F;
}

/* Leaves a piece's slice in the workspace; the last of the row's pieces joins all of them into `result`. */
template <int BLOCKS>
__device__ bool join_pieces(const attend_params &p, uint32_t row, int piece, int pieces, int rank, bool &last,
                            slice<BLOCKS> &result)
{
    constexpr int EACH = slice<BLOCKS>::EACH;
    float *records = p.records + (int64_t)row * p.pieces * CSA_RECORD_FLOATS;
    int head = slice<BLOCKS>::head(), sums = HEADS * SIZE + rank * 2 * HEADS;
    float *record = records + piece * CSA_RECORD_FLOATS;
#pragma unroll
    for (int i = 0; i < EACH; i++)
        __stcg(&record[head * SIZE + slice<BLOCKS>::value(rank, i)], result.o[i]);
    if (threadIdx.x % 8 == 0) {
        __stcg(&record[sums + head], result.m);
        __stcg(&record[sums + HEADS + head], result.l);
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0)
        last = atomicAdd(&p.counters[row * CSA_RECORD_RANKS + rank], 1U) == (uint32_t)pieces - 1;
    __syncthreads();
    if (!last)
        return false;
    __threadfence();
    constexpr int AT_ONCE = BLOCKS >= 4 ? 4 : 2; /* loads that do not wait for each other */
    const float *first_sum = records + sums + head,
                *first_value = records + head * SIZE + slice<BLOCKS>::value(rank, 0);
#pragma unroll 1
    for (int first = 0; first < pieces; first += AT_ONCE) {
        slice<BLOCKS> next[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            int offset = (first + i) * CSA_RECORD_FLOATS;
            if (first + i >= pieces)
                continue;
            next[i].m = __ldcg(first_sum + offset);
            next[i].l = __ldcg(first_sum + offset + HEADS);
#pragma unroll
            for (int k = 0; k < EACH; k++)
                next[i].o[k] = __ldcg(first_value + offset + k * 8);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            if (first + i == 0)
                result = next[i];
            else if (first + i < pieces)
                result.join(next[i].m, next[i].l, next[i].o);
        }
    }
    return true;
}

/* ---- The kernel --------------------------------------------------------------------------------- */

/* Puts a unit's result into the tree of the block's COUNT units; at the last one `result` is the block's. */
template <int COUNT, int LEVEL = 0>
__device__ __forceinline__ void join_units(partial (&waiting)[3], partial &result, int unit)
{
    if constexpr (1 << LEVEL < COUNT) {
        if ((unit >> LEVEL & 1) == 0) {
            waiting[LEVEL] = result;
        } else {
            join(waiting[LEVEL], result);
            result = waiting[LEVEL];
            join_units<COUNT, LEVEL + 1>(waiting, result, unit);
        }
    }
}

/* The block's result when only `live` of its COUNT units have entries: joins what waits in the tree. */
template <int COUNT> __device__ __forceinline__ void join_rest(partial (&waiting)[3], partial &result, int live)
{
    bool any = false;
#pragma unroll
    for (int level = 0; 1 << level < COUNT; level++) {
        if ((live >> level & 1) == 0)
            continue;
        if (any)
            join(waiting[level], result);
        result = waiting[level];
        any = true;
    }
    if (!any) {
        result = partial{};
        result.m[0] = result.m[1] = -INFINITY;
    }
}

/* Joins the blocks' results of a piece and puts it behind those before; `left` is a stage that has been used
 * and may be loaded again, and left, after cluster_wait. */
template <bool FP8, int BLOCKS>
__device__ void join_piece(part_result &left, const partial &own, int rank, bool first, slice<BLOCKS> &result)
{
    int g = threadIdx.x % 32 / 4, warp = threadIdx.x / 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (threadIdx.x < 32 && threadIdx.x % 4 == 0) {
            left.m[g + 8 * half] = own.m[half];
            left.l[g + 8 * half] = own.l[half];
        }
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int k = 0; k < 2; k++)
                left.o[g + 8 * half][warp * SLICE + value_of<FP8>(tile, k)] = own.o[tile][2 * half + k];
    }
    cluster_sync<BLOCKS>();
    slice<BLOCKS> piece;
    join_blocks<BLOCKS>(left, rank, piece);
    if (first)
        result = piece;
    else
        result.join(piece.m, piece.l, piece.o);
    cluster_arrive<BLOCKS>(); /* this block has read what it needs of the others */
}

template <bool FP8, int BLOCKS>
__global__ void __launch_bounds__(THREADS, 2) attend_kernel(const __grid_constant__ attend_params p)
{
    constexpr int OWN_UNITS = UNITS / BLOCKS, OWN_ENTRIES = OWN_UNITS * UNIT;
    extern __shared__ __align__(16) unsigned char shared[];
    shared_state<FP8, BLOCKS> &s = *(shared_state<FP8, BLOCKS> *)shared;
    uint32_t rank = blockIdx.x % BLOCKS, first_piece = blockIdx.y, row = blockIdx.x / BLOCKS;
    uint32_t token = quotient(row, p.groups), group = row - token * p.groups;
    start_kernel_behind();

    finish f;
    f.load(p, token, group);
    token_place place = p.tokens.place(p.first + token);
    if (p.positions)
        place.position = *p.active.at(row) ? *(const int64_t *)p.positions.at(row) : -1;
    int64_t live = place.position < 0 ? 0 : place.position / CSA_REGION + 1;
    int entries = (int)min(live, (int64_t)p.columns);
    uint32_t pieces = max(1, (entries + CSA_PIECE - 1) / CSA_PIECE);
    if (first_piece >= pieces)
        return;
    if (threadIdx.x < 64) { /* a warp for each eight heads */
        const uint8_t *query = p.query.at(token, group);
        if (p.query_aligned)
            s.query.template load<true>(p, query, threadIdx.x / 32);
        else
            s.query.template load<false>(p, query, threadIdx.x / 32);
    }
    uint32_t end_piece =
        p.pieces > 0 ? first_piece + 1 : pieces; /* units of all pieces but the last are live */
    int last_units = (entries - (int)(pieces - 1) * CSA_PIECE + UNIT - 1) / UNIT - (int)rank * OWN_UNITS;
    last_units = max(0, min(last_units, OWN_UNITS));
    int total = (int)(end_piece - first_piece) * OWN_UNITS - (end_piece == pieces ? OWN_UNITS - last_units : 0);
    const int64_t *list = (const int64_t *)p.selected.at(row) + (p.columns - entries);
    const int32_t *blocks = p.map.row(place.owner);
    const uint8_t *group_kv = p.kv + group * p.group_step;
    wait_for_kernel_ahead();
#pragma unroll 1
    for (int i = threadIdx.x; i < total * UNIT; i += THREADS) {
        int at = (first_piece + i / OWN_ENTRIES) * CSA_PIECE + rank * OWN_ENTRIES + i % OWN_ENTRIES;
        s.entries[i] = at < entries ? resolve_entry(p, blocks, list[at], place.position) : 0;
    }
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < 2; i++) {
        if (i < total)
            load_unit<FP8>(p, s.stage[i], s.entries + i * UNIT, group_kv);
        copies_commit();
    }

    slice<BLOCKS> result;
    partial waiting[3], unit_result, row_result; /* the last one for a block alone, until the end */
    int done = 0;
#pragma unroll 1
    for (uint32_t piece = first_piece; piece < end_piece; piece++) {
        int live = piece == pieces - 1 ? last_units : OWN_UNITS;
#pragma unroll 1
        for (int unit = 0; unit < live; unit++, done++) {
            unsigned char *stage = s.stage[done % 2];
            bool free = BLOCKS == 1 || unit < live - 1; /* else it will hold what the cluster is to read */
            copies_wait<1>();
            attend_unit<FP8, BLOCKS>(s, stage, s.entries + done * UNIT, unit_result);
            __syncthreads(); /* the stage has been used */
            if (free && done + 2 < total)
                load_unit<FP8>(p, stage, s.entries + (done + 2) * UNIT, group_kv);
            copies_commit();
            join_units<OWN_UNITS>(waiting, unit_result, unit);
        }
        if (live < OWN_UNITS)
            join_rest<OWN_UNITS>(waiting, unit_result, live);
        if constexpr (BLOCKS == 1) {
            if (piece > first_piece)
                join(row_result, unit_result);
            else
                row_result = unit_result;
            continue;
        }
        /* Where the latest unit was, or nothing any more; the same in all blocks. */
        unsigned char *used = s.stage[((piece - first_piece + 1) * OWN_UNITS + 1) % 2];
        join_piece<FP8, BLOCKS>(*(part_result *)used, unit_result, rank, piece == first_piece, result);
        if (piece + 1 == end_piece)
            break;
        cluster_wait<BLOCKS>();
        if (done + 1 < total && live > 0)
            load_unit<FP8>(p, used, s.entries + (done + 1) * UNIT, group_kv);
        copies_commit();
    }
    if constexpr (BLOCKS == 1)
        join_piece<FP8, BLOCKS>(*(part_result *)s.stage[0], row_result, 0, true, result);
    if (p.pieces == 0 || pieces == 1 || join_pieces<BLOCKS>(p, row, first_piece, pieces, rank, s.last, result))
        write_row<BLOCKS>(p, token, group, rank, f, result);
    cluster_wait<BLOCKS>(); /* nobody leaves while its results are read */
}

/* ---- Launching ---------------------------------------------------------------------------------- */

using kernel = void (*)(attend_params);

struct variant {
    kernel run;
    size_t shared;
};

/* Kernels for clusters of 1, 2, 4 and 8 blocks. */
template <bool FP8> variant find_variant(int blocks)
{
    switch (blocks) {
    case 8:
        return {attend_kernel<FP8, 8>, sizeof(shared_state<FP8, 8>)};
    case 4:
        return {attend_kernel<FP8, 4>, sizeof(shared_state<FP8, 4>)};
    case 2:
        return {attend_kernel<FP8, 2>, sizeof(shared_state<FP8, 2>)};
    default:
        return {attend_kernel<FP8, 1>, sizeof(shared_state<FP8, 1>)};
    }
}

/* Clusters of 1, 2, 4 and 8 blocks that fit a Hopper of 132 multiprocessors at a time, as it says itself:
 * clusters do not cross its partitions, so that larger ones leave some of it idle. */
const int CLUSTERS_AT_ONCE[] = {264, 132, 62, 30};

/* Blocks per cluster so that `items` pieces or rows are done soonest. A cluster's time is counted in units of
 * work: its share of a piece, one to begin and, if blocks have to meet, one for that. */
int cluster_size(const csa_context *context, int64_t items)
{
    int best = 1;
    int64_t best_time = INT64_MAX;
    for (int blocks = 1, i = 0; blocks <= (context->portable ? 1 : 8); blocks *= 2, i++) {
        int64_t at_once = CLUSTERS_AT_ONCE[i] * (int64_t)context->multiprocessors / 132;
        int64_t waves = (items + at_once - 1) / (at_once > 0 ? at_once : 1);
        int64_t time = waves * (UNITS / blocks + 1 + (blocks > 1));
        if (time < best_time) {
            best_time = time;
            best = blocks;
        }
    }
    return best;
}

csa_status queue_attend(const csa_context *context, attend_params &p, bool fp8, int64_t rows,
                        int64_t split_rows, bool overlap, void *stream)
{
    int64_t whole_pieces =
        max(1U, (p.columns + CSA_PIECE - 2) / CSA_PIECE); /* the current region alone is no work */
    if (rows <= split_rows)
        p.pieces = (int)((p.columns + CSA_PIECE - 1) / CSA_PIECE);
    int blocks = cluster_size(context, p.pieces > 0 ? rows * whole_pieces : rows);
    variant v = fp8 ? find_variant<true>(blocks) : find_variant<false>(blocks);
    csa_launch l;
    l.grid = dim3((unsigned)(rows * blocks), (unsigned)(p.pieces > 0 ? p.pieces : 1));
    l.block = dim3(THREADS);
    l.shared = v.shared;
    l.stream = stream;
    l.cluster = (unsigned)blocks;
    l.overlap = overlap && !context->portable;
    return csa_queue("attend", v.run, l, p);
}

} // namespace

csa_status csa_cuda_load_attend(void)
{
    csa_status status = CSA_OK;
    for (int blocks = 1; blocks <= 8 && status == CSA_OK; blocks *= 2) {
        variant bf16 = find_variant<false>(blocks), fp8 = find_variant<true>(blocks);
        status = csa_load("attend", bf16.run, bf16.shared);
        if (status == CSA_OK)
            status = csa_load("attend", fp8.run, fp8.shared);
    }
    return status;
}

csa_status csa_cuda_attend_span(const csa_context *context, const csa_attend_args *args, csa_span span,
                                const csa_chunk_arrays *scratch, int64_t split_rows)
{
    attend_params p = {};
    if (span.count == 0)
        return CSA_OK;
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
    p.first = (uint32_t)span.first;
    p.groups = (uint32_t)args->query.shape[1];
    p.heads = (uint32_t)args->query.shape[2];
    p.columns = (uint32_t)args->selected.shape[1];
    p.scale = args->scale;
    while ((CSA_REGION << p.block_shift) < kv.shape[2])
        p.block_shift++;
    p.kv_aligned = csa_aligned(&kv);
    p.kv_packed = p.kv_aligned && kv.stride[2] == CSA_KV_SIZE;
    p.query_aligned = csa_aligned(&args->query);
    if (scratch) {
        p.counters = scratch->counters;
        p.records = scratch->records;
    }
    if (kv.shape[0] > (int64_t)1 << (28 - p.block_shift))
        return csa_cuda_fail(CSA_ERROR_UNSUPPORTED, "cache.kv: %lld blocks, at most 2^28 regions are supported",
                             (long long)kv.shape[0]);
    int64_t rows = args->query.shape[0] * args->query.shape[1];
    return queue_attend(context, p, kv.dtype != CSA_BF16, rows, scratch ? split_rows : 0, span.overlap,
                        args->stream);
}

csa_status csa_cuda_attend(const csa_context *context, const csa_attend_args *args)
{
    csa_span all = {0, args->query.shape[0], false};
    return csa_cuda_attend_span(context, args, all, nullptr, 0);
}
