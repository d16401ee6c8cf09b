/*
 * Section 3: the tail ring and the summaries of closed regions (device/summary.cuh).
 *
 * A warp has a token; in verify a block has a request, a warp each of its tokens. In prefill, runs that begin
 * before their first token in this step read rows of the ring which the step then overwrites: closing runs is
 * one launch, storing the tail the next. A run is found by the warp of its first token; the other warps have
 * nothing to do.
 *
 * Bound by latency in decode (a closing row: eight rows read at once, then eight dependent steps), by fp64
 * throughput and memory in prefill. SPDX-License-Identifier: Apache-2.0
 */
#include "device/summary.cuh"
#include "stages.h"

static csa_summarize_call make_call(const csa_summarize_args *a)
{
    csa_summarize_call call = {*a->tokens, {}, a->key, a->z};
    if (a->cache)
        call.cache = *a->cache;
    return call;
}

/* ---- Decode and verify -------------------------------------------------------------------------- */

/* Token and request have one number, unless query_start or owners say that some requests have no token. */
static __global__ void decode_kernel(const __grid_constant__ csa_summarize_call call)
{
    for (int64_t token = csa_first_warp_item(); token < call.key.shape[0]; token += csa_warp_items())
        csa_summarize_token(call, token);
}

csa_status csa_cuda_summarize_decode(const csa_context *context, const csa_summarize_args *args)
{
    (void)context;
    return csa_queue_items("summarize_decode", decode_kernel, args->key.shape[0], CSA_BLOCK_WARPS, args->stream,
                           make_call(args));
}

static __global__ void __launch_bounds__(CSA_BLOCK_THREADS)
    verify_kernel(const __grid_constant__ csa_summarize_call call, int64_t requests)
{
    for (int64_t request = blockIdx.x; request < requests; request += gridDim.x) {
        int64_t first, end;
        csa_token_range(&call.tokens, request, &first, &end);
        for (; first < end; first += CSA_BLOCK_WARPS)
            csa_verify_tokens(call, request, first, end);
    }
}

csa_status csa_cuda_summarize_verify(const csa_context *context, const csa_summarize_args *args)
{
    (void)context;
    int64_t requests = csa_token_requests(args->tokens);
    return csa_queue_items("summarize_verify", verify_kernel, requests, 1, args->stream, make_call(args),
                           requests);
}

/* ---- Prefill ------------------------------------------------------------------------------------ */

static __global__ void metadata_kernel(const __grid_constant__ csa_tokens tokens,
                                       const __grid_constant__ csa_tensor metadata)
{
    for (int64_t token = csa_first_thread_item(); token < metadata.shape[0]; token += csa_thread_items())
        csa_find_run(&tokens, token, (int64_t *)csa_at(&metadata, token, 0, 0));
}

csa_status csa_cuda_summarize_metadata(const csa_context *context, const csa_summarize_args *args)
{
    (void)context;
    return csa_queue_items("summarize_metadata", metadata_kernel, args->metadata.shape[0], CSA_BLOCK_THREADS,
                           args->stream, *args->tokens, args->metadata);
}

/* Summarises the run that starts at a token, if it closes its region. Reads the ring, writes none. */
__device__ static void close_run(const csa_summarize_call &call, int64_t token, const int64_t *run)
{
    int64_t offset = run[CSA_RUN_OFFSET], last = run[CSA_RUN_TOKENS + CSA_REGION - 1];
    uint8_t *summary = csa_summary_of_slot(&call.cache, run[CSA_RUN_SLOT]);
    if (!summary || offset < 0 || offset >= CSA_REGION || last < 0 || last >= call.key.shape[0])
        return;
    csa_region_rows rows = {csa_token_ring(&call.tokens, csa_token_owner(&call.tokens, token)),
                            csa_token_position(&call.tokens, last) - (CSA_REGION - 1),
                            offset,
                            run + CSA_RUN_TOKENS,
                            0,
                            0};
    csa_summarize_region(call, rows, summary);
}

static __global__ void close_kernel(const __grid_constant__ csa_summarize_call call,
                                    const __grid_constant__ csa_tensor metadata)
{
    __shared__ int64_t runs[CSA_BLOCK_WARPS][CSA_RUN_COLUMNS];
    for (int64_t token = csa_first_warp_item(); token < call.key.shape[0]; token += csa_warp_items()) {
        const int64_t *run = runs[csa_warp()];
        if (csa_present(&metadata))
            run = (const int64_t *)csa_at(&metadata, token, 0, 0);
        else if (csa_lane() == 0)
            csa_find_run(&call.tokens, token, runs[csa_warp()]);
        __syncwarp();
        close_run(call, token, run);
        __syncwarp();
    }
}

/* Keeps a request's latest rows for the steps that come. */
static __global__ void tail_kernel(const __grid_constant__ csa_summarize_call call)
{
    for (int64_t token = csa_first_warp_item(); token < call.key.shape[0]; token += csa_warp_items()) {
        int64_t request = csa_find_owner(&call.tokens, token), first, end;
        int64_t base = csa_token_ring(&call.tokens, request);
        if (base < 0 || !csa_token_active(&call.tokens, token))
            continue;
        csa_token_range(&call.tokens, request, &first, &end);
        int64_t position = csa_token_position(&call.tokens, token);
        if (token < end && position > csa_token_position(&call.tokens, end - 1) - call.cache.ring_capacity)
            csa_store_ring(call, base, position, token);
    }
}

csa_status csa_cuda_summarize_prefill(const csa_context *context, const csa_summarize_args *args)
{
    (void)context;
    int64_t tokens = args->key.shape[0];
    csa_summarize_call call = make_call(args);
    csa_status status = csa_queue_items("summarize_prefill: closing runs", close_kernel, tokens,
                                        CSA_BLOCK_WARPS, args->stream, call, args->metadata);
    if (status == CSA_OK && csa_present(&call.tokens.ring_base))
        status = csa_queue_items("summarize_prefill: storing the tail", tail_kernel, tokens, CSA_BLOCK_WARPS,
                                 args->stream, call);
    return status;
}

csa_status csa_cuda_load_summarize(void)
{
    csa_status status = csa_load("summarize_decode", decode_kernel, 0);
    if (status == CSA_OK)
        status = csa_load("summarize_verify", verify_kernel, 0);
    if (status == CSA_OK)
        status = csa_load("summarize_metadata", metadata_kernel, 0);
    if (status == CSA_OK)
        status = csa_load("summarize_prefill: closing runs", close_kernel, 0);
    return status == CSA_OK ? csa_load("summarize_prefill: storing the tail", tail_kernel, 0) : status;
}
