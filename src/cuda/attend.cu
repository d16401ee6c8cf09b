/*
 * Section 6: attention of a row to the tokens of its list, straight from the paged cache.
 *
 * Order of sums, the same however a row is cut: the row's live list entries are taken in units of 8 regions (64
 * tokens), each with a softmax of its own; the 4 units of a quad join one after the other, then the 2 quads of
 * a piece (64 entries), then the pieces. What joins is (m, l, o): the largest logit in base 2, the sum of
 * 2^(logit - m), the values weighted by it.
 *
 * A block works on a unit for 16 heads (the product's rows, padded): its logits, its weights, and with these
 * the weighted sums of the values, of which each warp has its share. bf16 by two warps: each finds all weights
 * itself and keeps them in registers, and the two only meet when keys or values have been used and the next
 * ones may be copied over them. Four warps, and two of e4m3 caches, share the logits and exchange the weights.
 *
 * A block takes a part of a row, the shorter (unit, quad, piece) the fewer rows there are, and leaves a record
 * in the workspace, which attend_join.cu's kernel joins; or a whole row, where there are many or no workspace.
 *
 * Keys and values of a region come as boxes of 8 rows, copied by the hardware and swizzled so that no load
 * conflicts. Where it cannot (portable; addresses or strides that are no multiples of 16), threads copy.
 *
 * e4m3 caches: codes become f16 exactly; queries become f16 after scaling each head to just below f16's largest
 * value by a power of two, which the logits are relieved of; weights are f16. bf16 caches: all bf16.
 *
 * Bound by memory: a multiprocessor has `at_once` blocks, of which each has half to all of a unit under way, 49
 * KB of a bf16 cache, 25 of an e4m3 one; by the instructions of a unit where blocks are fewer.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "attend_join.cuh"
#include "attend_result.cuh"
#include "launch.h"
#include "stages.h"

namespace
{

/* What a block has: a unit or a quad, a piece, or a row. */
enum share { SHORT, PIECE, ROW };

/* Blocks of a multiprocessor, for which registers are kept; of bf16 ones there is no shared memory for more.
 * Of whole rows four: with fewer registers they would spill. */
template <bool FP8, int WARPS> constexpr int at_once = WARPS == 4 ? (FP8 ? 4 : 3) : FP8 ? 6 : 4;

template <bool FP8, int WARPS> struct shared_state {
    /* Keys and values, each copied as soon as those of the unit before are no longer read. */
    __align__(1024) unsigned char half[2][UNIT * layout<FP8>::REGION];
    queries<FP8> query;
    weight_exchange<WARPS, shares_keys<FP8, WARPS>> exchange;
    uint32_t entries[2 * CSA_PIECE]; /* of the piece that is worked on, and the next */
    uint64_t arrived[2];
};

template <bool FP8, int WARPS, share SHARE>
__global__ void __launch_bounds__(32 * WARPS, SHARE == ROW ? 4 : at_once<FP8, WARPS>)
    attend_kernel(const __grid_constant__ attend_params p)
{
    constexpr int N = TILES / WARPS;
    extern __shared__ __align__(1024) unsigned char shared[];
    shared_state<FP8, WARPS> &s = *(shared_state<FP8, WARPS> *)shared;
    start_kernel_behind();
    if (p.mapped && threadIdx.x == 0) {
        fetch_map(&p.cache);
        barrier_init(&s.arrived[KEYS], 1);
        barrier_init(&s.arrived[VALUES], 1);
        barriers_publish();
    }
    const row_extent at(p, blockIdx.x);
    int unit = (int)blockIdx.y * p.part, end = SHARE == ROW ? at.units : min(unit + p.part, at.units);
    if (SHARE != ROW && unit >= end) {
        wait_for_kernel_ahead(); /* that this kernel is done shall say that those ahead are */
        return;
    }
    const uint8_t *query = p.query.at(at.token, at.group);
    for (int half = threadIdx.x / 32; half < 2; half += WARPS) /* a warp for each eight heads */
        if (p.query_aligned)
            s.query.template load<true>(p, query, half);
        else
            s.query.template load<false>(p, query, half);
    const int64_t *list = (const int64_t *)p.selected.at(at.row) + (p.columns - at.entries);
    auto entries_of = [&](int unit) { return s.entries + unit * UNIT % (2 * CSA_PIECE); };
    auto resolve = [&](int from, int to) {
#pragma unroll 1
        for (int i = from * UNIT + (int)threadIdx.x; i < min(to, end) * UNIT; i += 32 * WARPS)
            s.entries[i % (2 * CSA_PIECE)] =
                i < at.entries ? resolve_entry(p, p.map.row(at.place.owner), list[i], at.place.position) : 0;
    };
    auto copy = [&](int half, const uint32_t *entries) {
        copy_half<FP8, WARPS>(p, s.half[half], s.arrived[half], entries, at.group, half);
    };
    /* The row's last unit may lack regions: what is not copied is cleared while there is time. */
    const bool cleared = SHARE == SHORT && p.mapped && end == at.units;
    if (cleared)
        clear_values<FP8, WARPS>(s.half[VALUES]);
    wait_for_kernel_ahead();
    resolve(unit, unit + UNITS);
    __syncthreads();
    copy(KEYS, unit < end ? entries_of(unit) : nullptr);
    copy(VALUES, unit < end ? entries_of(unit) : nullptr);

    partial<N> quad, piece, row; /* what is joined of them: units, quads before, pieces before */
    quad.clear();
    piece.clear();
    row.clear();
#pragma unroll 1
    for (int done = 0; unit < end; unit++, done++) {
        if (SHARE != SHORT && unit % QUAD == 0) {
            piece.join(quad);
            quad.clear();
        }
        if (SHARE == ROW && unit % UNITS == 0) {
            row.join(piece);
            piece.clear();
            resolve(unit + UNITS, unit + 2 * UNITS);
        }
        const uint32_t *own = entries_of(unit), *next = unit + 1 < end ? entries_of(unit + 1) : nullptr;
        bool full = __all_sync(~0U, (own[threadIdx.x % UNIT] & 15) == CSA_REGION);
        float its[2], other[2];
        unit_weights w;
        wait_for_half(p, s.arrived[KEYS], done);
        find_weights<FP8, WARPS>(s.exchange, s.half[KEYS], own, s.query, full, w);
        copy(KEYS, next);
        wait_for_half(p, s.arrived[VALUES], done);
        if (!full && p.mapped) {
            if (cleared && done == 0)
                clear_arrived_values<FP8, WARPS>(s.half[VALUES], own);
            else
                clear_unseen_values<FP8, WARPS>(s.half[VALUES], own);
        }
        quad.sums.join({{w.m[0], w.m[1]}, {w.l[0], w.l[1]}}, its, other);
        weigh_values<FP8, WARPS>(
            s.half[VALUES], w, [&](int i, const float(&sums)[4]) { join_values(quad.o[i], sums, its, other); });
        __syncthreads(); /* the values have been used */
        copy(VALUES, next);
    }
    if (SHARE != SHORT)
        piece.join(quad);
    if (SHARE == ROW) {
        row.join(piece);
        write_row<FP8>(p, at, finish(p, at), row, 0, warp_tile<WARPS>, threadIdx.x < 32);
        return;
    }
    store_record(p.records[(int64_t)at.row * p.parts + blockIdx.y], SHARE == PIECE ? piece : quad,
                 warp_tile<WARPS>);
}

/* ---- Launching ---------------------------------------------------------------------------------- */

using kernel = void (*)(attend_params);

struct variant {
    kernel run;
    unsigned threads;
    size_t shared;
};

template <bool FP8, int WARPS, share SHARE> variant make_variant()
{
    return {attend_kernel<FP8, WARPS, SHARE>, 32 * WARPS, sizeof(shared_state<FP8, WARPS>)};
}

enum { SHORT_BY_2, SHORT_BY_4, PIECE_BY_2, PIECE_BY_4, ROW_BY_2, KERNELS };

template <bool FP8> variant find_variant(int kernel)
{
    switch (kernel) {
    case SHORT_BY_2: /* which e4m3 caches never want */
        return make_variant<FP8, (FP8 ? 4 : 2), SHORT>();
    case SHORT_BY_4:
        return make_variant<FP8, 4, SHORT>();
    case PIECE_BY_2:
        return make_variant<FP8, 2, PIECE>();
    case PIECE_BY_4:
        return make_variant<FP8, 4, PIECE>();
    default:
        return make_variant<FP8, 2, ROW>();
    }
}

/* Describes an aligned cache to the hardware: boxes of 8 tokens and the chunks of keys or values. False: it
 * cannot. */
bool map_cache(CUtensorMap &map, const csa_tensor &kv, bool fp8)
{
    using encoder = decltype(&cuTensorMapEncodeTiled);
    static const encoder encode = [] {
        void *entry = nullptr;
        cudaDriverEntryPointQueryResult found;
        cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                                             cudaEnableDefault, &found);
        cudaGetLastError();
        return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? (encoder)entry : nullptr;
    }();
    const cuuint32_t chunk = fp8 ? layout<true>::CHUNK : layout<false>::CHUNK;
    const cuuint32_t elements = fp8 ? chunk : chunk / 2, chunks = CSA_KV_SIZE / elements;
    view v = csa_view(kv);
    /* Element, token of a block, chunk of a token, group, block. */
    cuuint64_t size[] = {elements, (cuuint64_t)kv.shape[2], chunks, (cuuint64_t)kv.shape[1],
                         (cuuint64_t)kv.shape[0]};
    cuuint64_t step[] = {(cuuint64_t)v.step[2], chunk, (cuuint64_t)v.step[1], (cuuint64_t)v.step[0]};
    for (int i = 0; i < 4; i++)
        step[i] = size[i + 1] > 1 ? step[i] : 16; /* of an extent of 1, any */
    cuuint32_t box[] = {elements, CSA_REGION, chunks / 2, 1, 1}, each[] = {1, 1, 1, 1, 1};
    /* How much the L2 cache fetches at a time, as measured: a row's keys or values are 192 or 384 bytes. */
    CUtensorMapL2promotion fetched =
        fp8 ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
    return encode && encode(&map, fp8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5,
                            kv.data, size, step, box, each, CU_TENSOR_MAP_INTERLEAVE_NONE,
                            fp8 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B, fetched,
                            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

enum {
    MULTIPROCESSOR_SHARED = 228 * 1024, /* bytes, of which each block costs BLOCK_SHARED beyond its own */
    BLOCK_SHARED = 1024,
    SHARED_STEP = 128, /* in which it is given out */
    MOST_SHARED = MULTIPROCESSOR_SHARED / 2 - BLOCK_SHARED
};

/* Shared memory with which blocks that start early, so many of them full parts, cannot crowd the
 * multiprocessors that are free first. */
int64_t spreading_shared(int64_t processors, int64_t needed, int64_t full)
{
    int64_t each = (full + processors - 1) / processors; /* at least 1 */
    int64_t share = MULTIPROCESSOR_SHARED / each / SHARED_STEP * SHARED_STEP - BLOCK_SHARED;
    return max(needed, min(share, (int64_t)MOST_SHARED));
}

/* What is cut how finely, as measured on an H200; records are reserved for CSA_CUT_UNITS and CSA_CUT_ROWS. */
csa_cut_limits cut_limits(int64_t processors, bool fp8, int64_t room)
{
    int64_t most = CSA_CUT_UNITS;
    csa_cut_limits limits;
    limits.units = min(4 * processors, most);
    limits.quads = min(fp8 ? 4 * processors : 5 * processors / 2, most);
    limits.rows = min(fp8 ? 3 * processors : 4 * processors / 3, (int64_t)CSA_CUT_ROWS);
    limits.records = room;
    return limits;
}

/* Four warps are faster, unless by two all full parts are worked on at once and by four they are not. */
template <bool FP8> bool wants_four_warps(int64_t processors, int64_t full)
{
    return full <= at_once<FP8, 4> * processors || full > at_once<FP8, 2> * processors;
}

csa_status queue_attend(const csa_context *context, attend_params &p, bool fp8, int64_t rows, int64_t room,
                        bool overlap, void *stream)
{
    int64_t processors = context->multiprocessors;
    csa_cut_limits limits = cut_limits(processors, fp8, room);
    csa_cut cut = csa_cut_rows(rows, p.columns, &limits);
    p.part = (int)cut.entries / UNIT;
    p.parts = (int)cut.parts;
    int64_t full = p.parts > 0 ? rows * p.columns / cut.entries : rows; /* parts that are, or rows */
    bool by_4 = fp8 ? wants_four_warps<true>(processors, full) : wants_four_warps<false>(processors, full);
    int kernel = p.parts == 0     ? ROW_BY_2
                 : p.part < UNITS ? (by_4 ? SHORT_BY_4 : SHORT_BY_2)
                                  : (by_4 ? PIECE_BY_4 : PIECE_BY_2);
    variant v = fp8 ? find_variant<true>(kernel) : find_variant<false>(kernel);
    csa_launch l;
    l.grid = dim3((unsigned)rows, (unsigned)max(p.parts, 1));
    l.block = dim3(v.threads);
    l.shared = v.shared;
    l.overlap = overlap && !context->portable;
    if (l.overlap)
        l.shared = (size_t)spreading_shared(processors, (int64_t)v.shared, full);
    l.stream = stream;
    csa_status status = csa_queue("attend", v.run, l, p);
    return status == CSA_OK && p.parts > 0 ? csa_cuda_join(context, p, fp8, rows, stream) : status;
}

} // namespace

csa_status csa_cuda_load_attend(void)
{
    csa_status status = csa_cuda_load_join();
    size_t most = min(csa_most_shared(), (size_t)MOST_SHARED); /* GPUs that have less overlap nothing */
    for (int i = 0; i < 2 * KERNELS && status == CSA_OK; i++) {
        variant v = i < KERNELS ? find_variant<false>(i) : find_variant<true>(i - KERNELS);
        status = csa_load("attend", v.run, max(v.shared, most));
    }
    return status;
}

csa_status csa_cuda_attend_span(const csa_context *context, const csa_attend_args *args, csa_span span,
                                bool overlap, void *records, int64_t room)
{
    attend_params p = {};
    csa_status status = csa_cuda_check_rows(args->query.shape[0], args->query.shape[1]);
    if (status != CSA_OK || span.count == 0)
        return status;
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
    p.mapped = p.kv_aligned && !context->portable && map_cache(p.cache, kv, kv.dtype != CSA_BF16);
    p.query_aligned = csa_aligned(&args->query);
    p.records = (csa_record *)records;
    if (kv.shape[0] > (int64_t)1 << (28 - p.block_shift))
        return csa_cuda_fail(CSA_ERROR_UNSUPPORTED, "cache.kv: %lld blocks, at most 2^28 regions are supported",
                             (long long)kv.shape[0]);
    int64_t rows = args->query.shape[0] * args->query.shape[1];
    return queue_attend(context, p, kv.dtype != CSA_BF16, rows, room, overlap, args->stream);
}

csa_status csa_cuda_attend(const csa_context *context, const csa_attend_args *args)
{
    csa_span all = {0, args->query.shape[0]};
    return csa_cuda_attend_span(context, args, all, false, args->workspace.data,
                                (int64_t)(args->workspace.bytes / CSA_RECORD_BYTES));
}
