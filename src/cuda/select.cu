/*
 * Section 5: the best regions of a row, by a block (device/choose.cuh) or, where rows are long and few, by a
 * cluster of them (device/choose_cluster.cuh). In a step the scores come with their peaks, and what is current
 * follows from the tokens; alone, a block finds the peaks by itself. SPDX-License-Identifier: Apache-2.0
 */
#include "device/choose_cluster.cuh"
#include "device/views.cuh"
#include "launch.h"
#include "stages.h"

namespace
{

enum {
    MAX_REGIONS = INT32_MAX - 65536, /* indices past a row's end stay ints */
    SHORT_THREADS = 512,             /* of blocks for rows that they can hold, or whose peaks they can */
    LONG_THREADS = 1024
};
static_assert((int)choice_scratch<LONG_THREADS>::VALUES == (int)CSA_LONG_ROW &&
                  (int)choice_scratch<SHORT_THREADS>::VALUES == (int)CSA_SHORT_ROW &&
                  (int)choice_scratch<SHORT_THREADS>::GROUPS >= (int)CSA_MAX_TOPK,
              "plan.h");

struct select_params {
    view scores, peaks, current, selected; /* of rows; peaks absent: not known */
    token_source tokens;                   /* a step: current regions follow from the tokens of the span */
    uint32_t first, groups;
    bool from_tokens, aligned;
    int regions, room, peak_room; /* of the scores; floats of a row and of its peaks that may be read */
    int width;                    /* most historical regions of a row */
};

__device__ row_scores find_row(const select_params &p, uint32_t row)
{
    int64_t region;
    if (p.from_tokens)
        region = max(p.tokens.place(p.first + quotient(row, p.groups)).position, (int64_t)0) / CSA_REGION;
    else
        region = *(const int64_t *)p.current.at(row);
    return {(const float *)p.scores.at(row),
            p.peaks ? (const float *)p.peaks.at(row) : nullptr,
            (int)max(min(region, (int64_t)p.regions - 1), (int64_t)-1),
            p.room,
            p.peak_room,
            p.aligned};
}

/* AT_ONCE: blocks of a multiprocessor; one has more registers, and is faster where there is no second. */
template <int THREADS, int AT_ONCE>
__global__ void __launch_bounds__(THREADS, AT_ONCE) select_kernel(const __grid_constant__ select_params p)
{
    extern __shared__ __align__(16) unsigned char shared[];
    start_kernel_behind();
    choose_list(*(choice_scratch<THREADS> *)shared, find_row(p, blockIdx.x), p.width,
                (int64_t *)p.selected.at(blockIdx.x), [] { wait_for_kernel_ahead(); });
}

/* A cluster a row. */
template <int AT_ONCE>
__global__ void __launch_bounds__(SHORT_THREADS, AT_ONCE)
    select_by_clusters(const __grid_constant__ select_params p)
{
    extern __shared__ __align__(16) unsigned char shared[];
    cluster_scratch<SHORT_THREADS> &s = *(cluster_scratch<SHORT_THREADS> *)shared;
    uint32_t row = blockIdx.x / cluster_blocks();
    start_kernel_behind();
    open_cluster(s);
    choose_list_in_cluster(s, find_row(p, row), p.width, (int64_t *)p.selected.at(row),
                           [] { wait_for_kernel_ahead(); });
}

csa_status fill_params(select_params &p, const csa_tensor &scores, const csa_tensor &selected)
{
    if (scores.shape[1] > MAX_REGIONS)
        return csa_cuda_fail(CSA_ERROR_UNSUPPORTED, "scores: %lld regions, at most %d are supported",
                             (long long)scores.shape[1], MAX_REGIONS);
    csa_status status = csa_cuda_check_rows(scores.shape[0], 1);
    if (status != CSA_OK)
        return status;
    p.scores = csa_view(scores);
    p.selected = csa_view(selected);
    p.aligned = csa_aligned(&scores);
    p.regions = (int)scores.shape[1];
    p.room = p.regions;
    p.width = (int)selected.shape[1] - 1;
    return CSA_OK;
}

struct variant {
    void (*run)(select_params);
    unsigned threads;
    size_t shared;
};

enum { SHORT_FEW, SHORT_MANY, LONG, FEW_CLUSTERS, MANY_CLUSTERS, KERNELS };

template <int THREADS, int AT_ONCE> variant block_variant()
{
    return {select_kernel<THREADS, AT_ONCE>, THREADS, sizeof(choice_scratch<THREADS>)};
}

template <int AT_ONCE> variant cluster_variant()
{
    return {select_by_clusters<AT_ONCE>, SHORT_THREADS, sizeof(cluster_scratch<SHORT_THREADS>)};
}

variant find_variant(int kernel)
{
    switch (kernel) {
    case SHORT_FEW:
        return block_variant<SHORT_THREADS, 1>();
    case SHORT_MANY:
        return block_variant<SHORT_THREADS, 2>();
    case LONG:
        return block_variant<LONG_THREADS, 1>();
    case FEW_CLUSTERS:
        return cluster_variant<1>();
    default:
        return cluster_variant<2>();
    }
}

/* Do the smaller blocks hold a row, or its peaks and then the groups of all that matter? */
bool is_short(const select_params &p)
{
    return p.regions <= CSA_SHORT_ROW || (p.peaks.data && (p.regions - 1) / CSA_PEAK < CSA_SHORT_ROW &&
                                          2 * p.width <= choice_scratch<SHORT_THREADS>::GROUPS);
}

/* Blocks of the cluster that each of so many rows gets; 0: a block does it alone. As measured on an H200: from
 * 128K tokens on while rows are few, from 512K on while clusters have a multiprocessor for each block. */
int find_cluster(const csa_context *context, int64_t rows, int64_t regions)
{
    int64_t ranked = regions - 1, processors = context->multiprocessors;
    int blocks = cluster_holds<SHORT_THREADS>(CLUSTER_BLOCKS / 2, ranked) ? CLUSTER_BLOCKS / 2 : CLUSTER_BLOCKS;
    bool few = 2 * rows * blocks <= processors, many = rows * blocks <= processors;
    bool pays = (few && regions >= CSA_LONG_ROW) || (many && regions >= 4 * CSA_LONG_ROW);
    return pays && blocks <= context->most_cluster && cluster_holds<SHORT_THREADS>(blocks, ranked) ? blocks : 0;
}

csa_status queue_select(const csa_context *context, const select_params &p, int64_t rows, bool overlap,
                        void *stream)
{
    int64_t processors = context->multiprocessors;
    int cluster = find_cluster(context, rows, p.regions), kernel = rows > processors ? SHORT_MANY : SHORT_FEW;
    if (cluster > 0)
        kernel = 2 * rows * cluster > processors ? MANY_CLUSTERS : FEW_CLUSTERS;
    else if (!is_short(p) && !context->portable) /* portable: not all GPUs have the shared memory */
        kernel = LONG;
    variant v = find_variant(kernel);
    csa_launch l;
    l.cluster = (unsigned)max(cluster, 1);
    l.grid = dim3((unsigned)rows * l.cluster);
    l.block = dim3(v.threads);
    l.shared = v.shared;
    l.stream = stream;
    l.overlap = overlap && !context->portable;
    return rows == 0 ? CSA_OK : csa_queue("select", v.run, l, p);
}

} // namespace

csa_status csa_cuda_load_select(void)
{
    csa_status status = CSA_OK;
    for (int kernel = 0; kernel < KERNELS && status == CSA_OK; kernel++) {
        variant v = find_variant(kernel);
        bool small = kernel == SHORT_FEW || kernel == SHORT_MANY;
        if (small || v.shared <= csa_most_shared())
            status = kernel < FEW_CLUSTERS ? csa_load("select", v.run, v.shared)
                                           : csa_load_clusters("select", v.run, v.shared);
    }
    return status;
}

int32_t csa_cuda_most_cluster(void)
{
    bool fit = true;
    for (int kernel = FEW_CLUSTERS; kernel <= MANY_CLUSTERS; kernel++) {
        variant v = find_variant(kernel);
        csa_launch l;
        l.cluster = CLUSTER_BLOCKS;
        l.grid = dim3(l.cluster);
        l.block = dim3(v.threads);
        l.shared = v.shared;
        fit = fit && csa_clusters_fit(v.run, l);
    }
    return fit ? CLUSTER_BLOCKS : 0;
}

bool csa_cuda_select_wants_peaks(const csa_context *context, int64_t rows, int64_t regions)
{
    return find_cluster(context, rows, regions) == 0;
}

csa_status csa_cuda_select(const csa_context *context, const csa_select_args *args)
{
    select_params p = {};
    csa_status status = fill_params(p, args->scores, args->selected);
    p.current = csa_view(args->current);
    return status == CSA_OK ? queue_select(context, p, args->scores.shape[0], false, args->stream) : status;
}

csa_status csa_cuda_select_span(const csa_context *context, const csa_select_args *args,
                                const csa_tokens *tokens, csa_span span, bool overlap, const csa_tensor *peaks)
{
    select_params p = {};
    csa_status status = fill_params(p, args->scores, args->selected);
    if (status != CSA_OK || span.count == 0)
        return status;
    p.peaks = csa_view(*peaks);
    p.room = (int)min(args->scores.stride[0], (int64_t)INT32_MAX); /* scratch */
    p.peak_room = csa_present(peaks) ? (int)peaks->shape[1] : 0;
    p.tokens = csa_token_source(*tokens);
    p.first = (uint32_t)span.first;
    p.groups = (uint32_t)(args->scores.shape[0] / span.count);
    p.from_tokens = true;
    return queue_select(context, p, args->scores.shape[0], overlap, args->stream);
}
