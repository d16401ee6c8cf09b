/*
 * Section 6's attention over the token lists of section 9: pages of the cache, or gathered keys and values.
 *
 * A block has one row and four of its heads. Token i of the row's list is warp i % 8's, which keeps a running
 * softmax of its tokens for each head: the largest logit, the sum of weights and the weighted values, rescaled
 * when the largest grows. At the end the eight are joined in the order of warps. So a row's bits depend on its
 * list alone, and are the same for pages and gathered rows. A lane holds six of the 192 values
 * (device/pairs.cuh).
 *
 * Shared memory: what the warps found, 24 KiB. A block writes only its own heads, after all its warps have read
 * them: out may be query. A NaN logit does not count as largest; it makes the sum NaN. Bound by the latency of
 * a token's dots. SPDX-License-Identifier: Apache-2.0
 */
#include "../pages.h"
#include "compat.h"
#include "device/pairs.cuh"

enum { BLOCK_HEADS = 4, PAIRS = CSA_HEAD_SIZE / 64, VALUES = CSA_HEAD_SIZE / 32 };

/* What all forms have. */
struct attention {
    csa_tensor query, out, lse;
    float scale;
};

/* ---- Token lists -------------------------------------------------------------------------------- */

struct paged_list {
    csa_tensor kv, pages, page_indptr, page_counts, last_page_len;

    __device__ int64_t row_pages(int64_t row) const
    {
        int64_t start = csa_i32(&page_indptr, row), left = pages.shape[0] - start;
        int64_t count = csa_i32(&page_indptr, row + 1) - start;
        if (csa_present(&page_counts))
            count = csa_i32(&page_counts, row);
        if (start < 0 || count < 0 || left < 0)
            return 0;
        return count < left ? count : left;
    }

    /* Tokens of a row, those that are not there included. */
    __device__ int64_t count(int64_t row) const
    {
        int64_t listed = row_pages(row), last = csa_i32(&last_page_len, row);
        last = last < 0 ? 0 : last > CSA_REGION ? CSA_REGION : last;
        return listed ? (listed - 1) * CSA_REGION + last : 0;
    }

    /* False: the token is not there, and contributes nothing. */
    __device__ bool find(int64_t row, int64_t i, const uint16_t **key, const uint16_t **value) const
    {
        int64_t page = csa_i32(&pages, csa_i32(&page_indptr, row) + i / CSA_REGION);
        const uint16_t *first = (const uint16_t *)csa_page_row(&kv, page);
        if (!first)
            return false;
        *key = first + i % CSA_REGION * kv.stride[2];
        *value = *key + CSA_HEAD_SIZE;
        return true;
    }
};

struct ragged_list {
    csa_tensor cu_k, key, value;

    __device__ int64_t count(int64_t row) const
    {
        int64_t first = csa_i32(&cu_k, row), end = csa_i32(&cu_k, row + 1);
        if (end > key.shape[0])
            end = key.shape[0];
        return first < 0 || end < first ? 0 : end - first;
    }

    __device__ bool find(int64_t row, int64_t i, const uint16_t **k, const uint16_t **v) const
    {
        int64_t token = csa_i32(&cu_k, row) + i;
        *k = (const uint16_t *)csa_at(&key, token, 0, 0);
        *v = (const uint16_t *)csa_at(&value, token, 0, 0);
        return true;
    }
};

/* ---- A running softmax -------------------------------------------------------------------------- */

struct head_state {
    float query[VALUES], values[VALUES], largest, sum;
};

__device__ static void start_head(head_state *s, const attention &a, int64_t row, int64_t head)
{
    for (int i = 0; i < VALUES; i++)
        s->query[i] = s->values[i] = 0;
    s->largest = -INFINITY;
    s->sum = 0;
    if (head < a.query.shape[1]) {
        uint32_t pairs[PAIRS];
        csa_load_pairs<CSA_HEAD_SIZE>((const uint16_t *)csa_at(&a.query, row, head, 0), pairs);
        csa_unpack_pairs<CSA_HEAD_SIZE>(pairs, s->query);
    }
}

__device__ static void add_token(head_state *s, float scale, const float (&key)[VALUES],
                                 const float (&value)[VALUES])
{
    float dot = 0;
    for (int i = 0; i < VALUES; i++)
        dot = fmaf(s->query[i], key[i], dot);
    float logit = scale * csa_warp_sum(dot);
    if (logit > s->largest) {
        float rescale = expf(s->largest - logit);
        s->sum *= rescale;
        for (int i = 0; i < VALUES; i++)
            s->values[i] *= rescale;
        s->largest = logit;
    }
    float weight = logit == -INFINITY ? 0 : expf(logit - s->largest);
    s->sum += weight;
    for (int i = 0; i < VALUES; i++)
        s->values[i] = fmaf(weight, value[i], s->values[i]);
}

/* ---- What the warps of a block found ------------------------------------------------------------ */

struct block_state {
    float values[CSA_BLOCK_WARPS][BLOCK_HEADS][CSA_HEAD_SIZE];
    float largest[CSA_BLOCK_WARPS][BLOCK_HEADS], sum[CSA_BLOCK_WARPS][BLOCK_HEADS];
    int64_t tokens[CSA_BLOCK_WARPS];
};

template <typename List>
__device__ static void attend_part(const attention &a, const List &list, int64_t row, int64_t first_head,
                                   block_state *shared)
{
    head_state heads[BLOCK_HEADS];
    int64_t count = list.count(row), tokens = 0;
#pragma unroll
    for (int h = 0; h < BLOCK_HEADS; h++)
        start_head(&heads[h], a, row, first_head + h);
    for (int64_t i = csa_warp(); i < count; i += CSA_BLOCK_WARPS) {
        const uint16_t *keys, *values;
        uint32_t key_pairs[PAIRS], value_pairs[PAIRS];
        float key[VALUES], value[VALUES];
        if (!list.find(row, i, &keys, &values))
            continue;
        csa_load_pairs<CSA_HEAD_SIZE>(keys, key_pairs);
        csa_load_pairs<CSA_HEAD_SIZE>(values, value_pairs);
        csa_unpack_pairs<CSA_HEAD_SIZE>(key_pairs, key);
        csa_unpack_pairs<CSA_HEAD_SIZE>(value_pairs, value);
        tokens++;
#pragma unroll
        for (int h = 0; h < BLOCK_HEADS; h++)
            add_token(&heads[h], a.scale, key, value);
    }
    shared->tokens[csa_warp()] = tokens;
#pragma unroll
    for (int h = 0; h < BLOCK_HEADS; h++) {
        shared->largest[csa_warp()][h] = heads[h].largest;
        shared->sum[csa_warp()][h] = heads[h].sum;
        for (int i = 0; i < VALUES; i++)
            shared->values[csa_warp()][h][csa_pair_at(i / 2) + i % 2] = heads[h].values[i];
    }
}

/* What a warp's sums of a head are multiplied by; a warp without a weight has no largest logit. */
__device__ static float rescale(const block_state *shared, int warp, int head, float largest)
{
    float own = shared->largest[warp][head];
    return own == -INFINITY ? 0 : expf(own - largest);
}

/* One value of a head, or with i = 0 also its log-sum-exp. */
__device__ static void join(const attention &a, int64_t row, int64_t first_head, int head, int i,
                            const block_state *shared)
{
    float largest = -INFINITY, sum = 0, value = 0;
    int64_t tokens = 0;
    for (int warp = 0; warp < CSA_BLOCK_WARPS; warp++) {
        largest = fmaxf(largest, shared->largest[warp][head]);
        tokens += shared->tokens[warp];
    }
    for (int warp = 0; warp < CSA_BLOCK_WARPS; warp++) {
        float factor = rescale(shared, warp, head, largest);
        sum = fmaf(factor, shared->sum[warp][head], sum);
        value = fmaf(factor, shared->values[warp][head][i], value);
    }
    ((uint16_t *)csa_at(&a.out, row, first_head + head, 0))[i] = tokens ? csa_float_to_bf16(value / sum) : 0;
    if (i == 0 && csa_present(&a.lse)) /* tokens of weight 0 alone: the formula gives NaN */
        *(float *)csa_at(&a.lse, row, first_head + head, 0) = largest + (tokens && sum == 0 ? NAN : logf(sum));
}

/* ---- The kernel --------------------------------------------------------------------------------- */

CSA_INLINE int64_t parts_of(const attention &a)
{
    return (a.query.shape[1] + BLOCK_HEADS - 1) / BLOCK_HEADS;
}

template <typename List>
static __global__ void __launch_bounds__(CSA_BLOCK_THREADS)
    attend_kernel(const __grid_constant__ attention a, const __grid_constant__ List list)
{
    __shared__ block_state shared;
    int64_t parts = parts_of(a), items = a.query.shape[0] * parts;
    for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
        int64_t row = item / parts, first = item % parts * BLOCK_HEADS, left = a.query.shape[1] - first;
        int heads = left < BLOCK_HEADS ? (int)left : BLOCK_HEADS;
        attend_part(a, list, row, first, &shared);
        __syncthreads();
        for (int i = (int)threadIdx.x; i < heads * CSA_HEAD_SIZE; i += CSA_BLOCK_THREADS)
            join(a, row, first, i / CSA_HEAD_SIZE, i % CSA_HEAD_SIZE, &shared);
        __syncthreads();
    }
}

csa_status csa_cuda_compat_attend_paged(const csa_context *context, const csa_compat_attend_paged_args *args)
{
    (void)context;
    attention a = {args->query, args->out, args->lse, args->scale};
    paged_list list = {args->cache->kv, args->pages, args->page_indptr, args->page_counts, args->last_page_len};
    return csa_queue_items("compat: attend pages", attend_kernel<paged_list>, a.query.shape[0] * parts_of(a), 1,
                           args->stream, a, list);
}

csa_status csa_cuda_compat_attend_ragged(const csa_context *context, const csa_compat_attend_ragged_args *args)
{
    (void)context;
    attention a = {args->query, args->out, args->lse, args->scale};
    ragged_list list = {args->cu_k, args->key, args->value};
    return csa_queue_items("compat: attend rows", attend_kernel<ragged_list>, a.query.shape[0] * parts_of(a), 1,
                           args->stream, a, list);
}

csa_status csa_cuda_load_compat_attend(void)
{
    csa_status status = csa_load("compat: attend pages", attend_kernel<paged_list>, 0);
    return status == CSA_OK ? csa_load("compat: attend rows", attend_kernel<ragged_list>, 0) : status;
}
