/*
 * Section 6: attention of a row to the tokens of its list, straight from the paged cache.
 *
 * Order of sums, the same however a row is cut: the row's live list entries are taken in units of 8 regions (64
 * tokens), each with a softmax of its own; the 8 units of a piece (64 entries) join one after the other, and so
 * do the pieces. What joins is (m, l, o): the largest logit in base 2, the sum of 2^(logit - m), the values
 * weighted by it.
 *
 * A warp finds the logits and the weights of a whole unit, for 16 heads (the product's rows, padded), and then
 * the weighted sums of its share of the 192 values: weights stay in registers, nothing is exchanged, and the
 * two warps of a block only meet when keys or values have been used and the next ones may be copied over them.
 * Where rows are few, four warps share the unit's logits, too.
 *
 * A block takes a part of a row, a unit (few rows) or a piece, and leaves a record in the workspace, which
 * attend_join.cu's kernel joins; or, where there are many rows or no workspace, a whole row.
 *
 * Keys and values of a region come as boxes of 8 rows, copied by the hardware and swizzled so that no load
 * conflicts. Where it cannot (portable; addresses or strides that are no multiples of 16), threads copy.
 *
 * e4m3 caches: codes become f16 exactly; queries become f16 after scaling each head to just below f16's largest
 * value by a power of two, which the logits are relieved of; weights are f16. bf16 caches: all bf16.
 *
 * Bound by memory: a multiprocessor has four blocks of two warps (bf16; of e4m3 as many as share it evenly), of
 * which each has 25 to 49 KB under way.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "attend_join.cuh"
#include "attend_result.cuh"
#include "launch.h"
#include "stages.h"

namespace
{

template <bool FP8, int WARPS> struct shared_state {
    /* Keys and values, each copied as soon as those of the unit before are no longer read. */
    __align__(1024) unsigned char half[2][UNIT * layout<FP8>::REGION];
    queries<FP8> query;
    weight_exchange<WARPS> exchange;
    uint32_t entries[2 * CSA_PIECE]; /* of the piece that is worked on, and the next */
    uint64_t arrived[2];
};

template <bool FP8, int WARPS, bool WHOLE>
__global__ void __launch_bounds__(32 * WARPS, WARPS == 4 ? 2 : 4)
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
    int unit = WHOLE ? 0 : (int)blockIdx.y * p.part, end = WHOLE ? at.units : min(unit + p.part, at.units);
    if (!WHOLE && unit >= end) {
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
    wait_for_kernel_ahead();
    resolve(unit, unit + UNITS);
    __syncthreads();
    copy(KEYS, unit < end ? entries_of(unit) : nullptr);
    copy(VALUES, unit < end ? entries_of(unit) : nullptr);

    partial<N> result, row_result; /* of this piece, and (whole rows) of those before */
    result.clear();
    row_result.clear();
#pragma unroll 1
    for (int done = 0; unit < end; unit++, done++) {
        if (WHOLE && unit % UNITS == 0) {
            if (unit > 0)
                row_result.join(result);
            result.clear();
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
        if (!full && p.mapped)
            clear_unseen_values<FP8, WARPS>(s.half[VALUES], own);
        result.sums.join({{w.m[0], w.m[1]}, {w.l[0], w.l[1]}}, its, other);
        weigh_values<FP8, WARPS>(s.half[VALUES], w, [&](int i, const float(&sums)[4]) {
            join_values(result.o[i], sums, its, other);
        });
        __syncthreads(); /* the values have been used */
        copy(VALUES, next);
    }
    if (!WHOLE) {
        store_record(p.records[(int64_t)at.row * p.parts + blockIdx.y], result, warp_tile<WARPS>);
        return;
    }
    row_result.join(result);
    write_row<FP8>(p, at, finish(p, at), row_result, warp_tile<WARPS>, threadIdx.x < 32);
}

/* ---- Launching ---------------------------------------------------------------------------------- */

using kernel = void (*)(attend_params);

struct variant {
    kernel run;
    unsigned threads;
    size_t shared;
};

template <bool FP8, int WARPS, bool WHOLE> variant make_variant()
{
    return {attend_kernel<FP8, WARPS, WHOLE>, 32 * WARPS, sizeof(shared_state<FP8, WARPS>)};
}

/* Kernels for parts, by two or four warps, and for whole rows. */
enum { PARTS_BY_2, PARTS_BY_4, WHOLE_ROWS, KERNELS };

template <bool FP8> variant find_variant(int kernel)
{
    switch (kernel) {
    case PARTS_BY_2:
        return make_variant<FP8, 2, false>();
    case PARTS_BY_4:
        return make_variant<FP8, 4, false>();
    default:
        return make_variant<FP8, 2, true>();
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
    MOST_SHARED = MULTIPROCESSOR_SHARED / 2 - BLOCK_SHARED
};

/* Shared memory with which blocks that start early cannot crowd the multiprocessors that are free first. */
int64_t spreading_shared(const csa_context *context, int64_t needed, int64_t blocks)
{
    int64_t each = (blocks + context->multiprocessors - 1) / context->multiprocessors;
    return max(needed, min(MULTIPROCESSOR_SHARED / each - BLOCK_SHARED, (int64_t)MOST_SHARED));
}

csa_status queue_attend(const csa_context *context, attend_params &p, bool fp8, int64_t rows, int64_t room,
                        bool overlap, void *stream)
{
    /* Four blocks a multiprocessor; what a step reserves is for CSA_CUT_UNITS. */
    int64_t at_once = min(4 * (int64_t)context->multiprocessors, (int64_t)CSA_CUT_UNITS);
    csa_cut cut = csa_cut_rows(rows, p.columns, at_once, room);
    p.part = (int)cut.entries / UNIT;
    p.parts = (int)cut.parts;
    int kernel = p.parts == 0                                   ? WHOLE_ROWS
                 : p.part == 1 && 2 * rows * p.parts <= at_once ? PARTS_BY_4
                                                                : PARTS_BY_2;
    variant v = fp8 ? find_variant<true>(kernel) : find_variant<false>(kernel);
    csa_launch l;
    l.grid = dim3((unsigned)rows, (unsigned)max(p.parts, 1));
    l.block = dim3(v.threads);
    l.shared = v.shared;
    l.overlap = overlap && !context->portable;
    if (l.overlap)
        l.shared = (size_t)spreading_shared(context, (int64_t)v.shared, rows * max(p.parts, 1));
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
