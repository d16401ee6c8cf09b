/*
 * Section 2: norm, RoPE, quantisation and the cache write.
 *
 * One launch. A warp has one head of one token (device/heads.cuh): first all index keys, then token by token
 * the index queries (a warp also clears the heads that pad its group, and converts its head's weights), the
 * queries, the keys and the values with their cache rows. Every value is read before its place is written, and
 * by the warp that writes it: outputs may be the inputs' views. Shared memory: a row of floats per warp, in
 * which rotated pairs meet.
 *
 * Decode and verify can go on to section 3 in the same launch (csa_cuda_prepare_and_summarize): the warp that
 * prepares an index key then stores it in the ring, or closes its region; in verify a block has the index keys
 * of a request.
 *
 * Bound by launch and latency in decode, by memory and conversions in prefill.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "device/heads.cuh"
#include "device/summary.cuh"
#include "stages.h"

/* What follows an index key's preparation. */
enum after_key { NOTHING, DECODE, VERIFY };

struct prepare_call {
    csa_prepare_args args;
    csa_summarize_call next; /* tokens and cache are both parts'; key is index_key_out */
};

/* One token, and the warp's row of shared memory. */
struct place {
    int64_t token, position;
    bool zero; /* outside a table: all outputs are zeros */
    float *row;
};

__device__ static place find_place(const prepare_call &call, int64_t token, float *row)
{
    int64_t position = csa_token_position(&call.next.tokens, token);
    bool inside = csa_in_table(&call.args.index_rope, position) && csa_in_table(&call.args.rope, position);
    return {token, position, !inside, row};
}

template <int N> __device__ static void clear(float (&x)[N])
{
    for (int i = 0; i < N; i++)
        x[i] = 0;
}

/* ---- The indexer's part ------------------------------------------------------------------------- */

/* Writes a head's weight; its padding's are 0. */
__device__ static void index_weight(const csa_prepare_args &a, const place &p, int64_t group, int64_t head)
{
    int64_t heads = a.index_weights.shape[2];
    float scale = (float)(1 / sqrt((double)heads)), weight = 0;
    if (!p.zero)
        weight =
            csa_bf16_to_float(((const uint16_t *)csa_at(&a.index_weights, p.token, group, 0))[head]) * scale;
    float *out = (float *)csa_at(&a.index_weights_out, p.token, group, 0);
    for (int64_t h = head; h < CSA_INDEX_HEADS; h += heads)
        out[h] = h == head ? weight : 0;
}

__device__ static void index_query(const csa_prepare_args &a, const place &p, int64_t group, int64_t head)
{
    float x[CSA_SUMMARY_SIZE / 32], zeros[CSA_SUMMARY_SIZE / 32];
    clear(x);
    clear(zeros);
    if (csa_lane() == 0)
        index_weight(a, p, group, head);
    if (!p.zero) {
        csa_load_head<CSA_SUMMARY_SIZE>(csa_at(&a.index_query, p.token, group, head), x);
        csa_rms_norm<CSA_SUMMARY_SIZE>(x, &a.index_query_norm, a.eps, a.zero_centered, true);
        csa_rotate<CSA_SUMMARY_SIZE>(x, &a.index_rope, p.position, CSA_INDEX_ROTARY, a.native_rope, p.row);
    }
    csa_store_codes<CSA_SUMMARY_SIZE>((uint8_t *)csa_at(&a.index_query_out, p.token, group, head), x);
    int64_t heads = a.index_query.shape[2];
    for (int64_t h = head + heads; h < CSA_INDEX_HEADS; h += heads)
        csa_store_codes<CSA_SUMMARY_SIZE>((uint8_t *)csa_at(&a.index_query_out, p.token, group, h), zeros);
}

__device__ static void index_key(const csa_prepare_args &a, const place &p)
{
    float x[CSA_SUMMARY_SIZE / 32];
    clear(x);
    if (!p.zero) {
        csa_load_head<CSA_SUMMARY_SIZE>(csa_at(&a.index_key, p.token, 0, 0), x);
        csa_layer_norm<CSA_SUMMARY_SIZE>(x, &a.index_key_norm, &a.index_key_bias, a.eps);
        csa_rotate<CSA_SUMMARY_SIZE>(x, &a.index_rope, p.position, CSA_INDEX_ROTARY, a.native_rope, p.row);
    }
    csa_store_head<CSA_SUMMARY_SIZE>(csa_at(&a.index_key_out, p.token, 0, 0), x);
}

/* ---- The attention's part ----------------------------------------------------------------------- */

__device__ static void attention_head(const csa_prepare_args &a, const place &p, const void *from,
                                      const csa_tensor *norm, float (&x)[CSA_HEAD_SIZE / 32])
{
    clear(x);
    if (p.zero)
        return;
    csa_load_head<CSA_HEAD_SIZE>(from, x);
    csa_rms_norm<CSA_HEAD_SIZE>(x, norm, a.eps, a.zero_centered, false);
    if (csa_present(&a.rope))
        csa_rotate<CSA_HEAD_SIZE>(x, &a.rope, p.position, (int)a.rope.shape[1], false, p.row);
}

/* A key or a value to the cache, `offset` elements into the token's row; e4m3 divides by the scale, as a
 * reciprocal would change codes. */
__device__ static void cache_half(const prepare_call &call, const place &p, int64_t group, int64_t offset,
                                  const float *scale, const float (&x)[CSA_HEAD_SIZE / 32])
{
    const csa_tensor *kv = &call.next.cache.kv;
    char *row = (char *)csa_cache_row(&call.next.tokens, &call.next.cache, p.token, group);
    if (!row)
        return;
    if (kv->dtype == CSA_BF16) {
        csa_store_head<CSA_HEAD_SIZE>((uint16_t *)row + offset, x);
        return;
    }
    float scaled[CSA_HEAD_SIZE / 32], divisor = scale ? *scale : 1.0F;
    for (int i = 0; i < CSA_HEAD_SIZE / 32; i++)
        scaled[i] = x[i] / divisor;
    csa_store_codes<CSA_HEAD_SIZE>((uint8_t *)row + offset, scaled);
}

__device__ static void query_head(const csa_prepare_args &a, const place &p, int64_t group, int64_t head)
{
    float x[CSA_HEAD_SIZE / 32];
    attention_head(a, p, csa_at(&a.query, p.token, group, head), &a.query_norm, x);
    csa_store_head<CSA_HEAD_SIZE>(csa_at(&a.query_out, p.token, group, head), x);
}

__device__ static void key_head(const prepare_call &call, const place &p, int64_t group)
{
    const csa_prepare_args &a = call.args;
    float x[CSA_HEAD_SIZE / 32];
    attention_head(a, p, csa_at(&a.key, p.token, group, 0), &a.key_norm, x);
    if (csa_present(&a.key_out))
        csa_store_head<CSA_HEAD_SIZE>(csa_at(&a.key_out, p.token, group, 0), x);
    cache_half(call, p, group, 0, call.next.cache.k_scale, x);
}

__device__ static void value_head(const prepare_call &call, const place &p, int64_t group)
{
    const csa_prepare_args &a = call.args;
    float x[CSA_HEAD_SIZE / 32];
    clear(x);
    if (!p.zero)
        csa_load_head<CSA_HEAD_SIZE>(csa_at(&a.value, p.token, group, 0), x);
    if (csa_present(&a.value_out))
        csa_store_head<CSA_HEAD_SIZE>(csa_at(&a.value_out, p.token, group, 0), x);
    cache_half(call, p, group, CSA_HEAD_SIZE, call.next.cache.v_scale, x);
}

/* ---- Items -------------------------------------------------------------------------------------- */

/* Heads of a token besides its index key. */
CSA_INLINE int64_t heads_of_token(const csa_prepare_args &a)
{
    int64_t groups = a.index_query.shape[1], heads = a.index_query.shape[2];
    return groups * (heads + (csa_present(&a.query) ? a.query.shape[2] + 2 : 0));
}

/* Blocks of index keys: a token per warp, or a request per block. They come first: most hangs on them. */
CSA_INLINE int64_t key_blocks(const prepare_call &call, after_key after)
{
    int64_t tokens = call.args.index_query.shape[0];
    return after == VERIFY ? tokens / call.next.tokens.query_len
                           : (tokens + CSA_BLOCK_WARPS - 1) / CSA_BLOCK_WARPS;
}

CSA_INLINE int64_t head_blocks(const prepare_call &call)
{
    return (call.args.index_query.shape[0] * heads_of_token(call.args) + CSA_BLOCK_WARPS - 1) / CSA_BLOCK_WARPS;
}

__device__ static void prepare_head(const prepare_call &call, const place &p, int64_t head)
{
    const csa_prepare_args &a = call.args;
    int64_t groups = a.index_query.shape[1], index_heads = a.index_query.shape[2];
    if (head < groups * index_heads) {
        index_query(a, p, head / index_heads, head % index_heads);
        return;
    }
    head -= groups * index_heads;
    int64_t queries = groups * a.query.shape[2];
    if (head < queries)
        query_head(a, p, head / a.query.shape[2], head % a.query.shape[2]);
    else if (head < queries + groups)
        key_head(call, p, head - queries);
    else
        value_head(call, p, head - queries - groups);
}

/* A request's tokens in order, as many at a time as a block has warps. */
__device__ static void prepare_request_keys(const prepare_call &call, int64_t request, float *row)
{
    int64_t count = call.next.tokens.query_len, first = request * count, end = first + count;
    for (; first < end; first += CSA_BLOCK_WARPS) {
        int64_t token = first + csa_warp();
        if (token < end)
            index_key(call.args, find_place(call, token, row));
        csa_verify_tokens(call.next, request, first, end);
    }
}

template <after_key after>
static __global__ void __launch_bounds__(CSA_BLOCK_THREADS, after == NOTHING ? 3 : 2)
    prepare_kernel(const __grid_constant__ prepare_call call)
{
    __shared__ float rows[CSA_BLOCK_WARPS][CSA_SUMMARY_SIZE];
    int64_t tokens = call.args.index_query.shape[0], heads = heads_of_token(call.args);
    int64_t keys = key_blocks(call, after), blocks = keys + head_blocks(call);
    float *row = rows[csa_warp()];
    for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
        int64_t item = (block < keys ? block : block - keys) * CSA_BLOCK_WARPS + csa_warp();
        if (block >= keys) {
            if (item < tokens * heads)
                prepare_head(call, find_place(call, item / heads, row), item % heads);
        } else if (after == VERIFY) {
            prepare_request_keys(call, block, row);
        } else if (item < tokens) {
            index_key(call.args, find_place(call, item, row));
            if (after == DECODE)
                csa_summarize_token(call.next, item);
        }
    }
}

template <after_key after>
static csa_status queue(const char *name, const csa_prepare_args *args, const csa_tensor *z)
{
    prepare_call call = {*args, {*args->tokens, {}, args->index_key_out, *z}};
    if (args->cache)
        call.next.cache = *args->cache;
    return csa_queue_items(name, prepare_kernel<after>, key_blocks(call, after) + head_blocks(call), 1,
                           args->stream, call);
}

csa_status csa_cuda_prepare(const csa_context *context, const csa_prepare_args *args)
{
    (void)context;
    const csa_tensor none = {};
    return queue<NOTHING>("prepare", args, &none);
}

csa_status csa_cuda_prepare_and_summarize(const csa_context *context, const csa_prepare_args *prepare,
                                          const csa_summarize_args *summarize)
{
    const csa_tokens *tokens = prepare->tokens;
    if (tokens->query_len <= 1)
        return queue<DECODE>("prepare and summarize_decode", prepare, &summarize->z);
    int64_t count = prepare->index_query.shape[0];
    bool even = count % tokens->query_len == 0 && count / tokens->query_len == csa_token_requests(tokens);
    if (even && !csa_present(&tokens->query_start))
        return queue<VERIFY>("prepare and summarize_verify", prepare, &summarize->z);
    csa_status status = csa_cuda_prepare(context, prepare); /* requests of any length */
    return status == CSA_OK ? csa_cuda_summarize_verify(context, summarize) : status;
}

csa_status csa_cuda_load_prepare(void)
{
    csa_status status = csa_load("prepare", prepare_kernel<NOTHING>, 0);
    if (status == CSA_OK)
        status = csa_load("prepare and summarize_decode", prepare_kernel<DECODE>, 0);
    return status == CSA_OK ? csa_load("prepare and summarize_verify", prepare_kernel<VERIFY>, 0) : status;
}
