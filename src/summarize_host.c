/* SPDX-License-Identifier: Apache-2.0 */
#include "summarize_host.h"

#include "runs.h"

#include <string.h>

typedef struct work {
    const csa_summarize_args *args;
    csa_summary summary;
} work;

/* ---- The ring ----------------------------------------------------------------------------------- */

static void store_row(const csa_summarize_args *a, int64_t base, int64_t position, int64_t token)
{
    uint16_t *row = csa_ring_row(a->cache, base, position);
    if (!row)
        return;
    memcpy(row, csa_at(&a->key, token, 0, 0), CSA_SUMMARY_SIZE * sizeof *row);
    memcpy(row + CSA_SUMMARY_SIZE, csa_at(&a->z, token, 0, 0), CSA_SUMMARY_SIZE * sizeof *row);
}

static void add_row(csa_region_rows *rows, const uint16_t *key, const uint16_t *z)
{
    rows->key[rows->count] = key;
    rows->z[rows->count++] = z;
}

/* Adds the ring rows of positions [first, first + count); false if one is missing. */
static bool add_ring_rows(const csa_summarize_args *a, int64_t base, int64_t first, int64_t count,
                          csa_region_rows *rows)
{
    for (int64_t i = 0; i < count; i++) { /* first + count may lie past the last int64 */
        const uint16_t *row = csa_ring_row(a->cache, base, first + i);
        if (!row)
            return false;
        add_row(rows, row, row + CSA_SUMMARY_SIZE);
    }
    return true;
}

static void add_token(const csa_summarize_args *a, int64_t token, csa_region_rows *rows)
{
    add_row(rows, csa_at(&a->key, token, 0, 0), csa_at(&a->z, token, 0, 0));
}

/* Where an active token's region is summarised; NULL past the cache. */
static uint8_t *summary_of(const csa_summarize_args *a, int64_t token)
{
    return csa_summary_of_slot(a->cache, csa_i64(&a->tokens->slots, token) / CSA_REGION);
}

/* ---- Decode and verify -------------------------------------------------------------------------- */

/* Token and request have one number, unless query_start or owners say that some requests have no token. */
static void decode_token(void *data, int64_t token)
{
    const work *w = data;
    const csa_summarize_args *a = w->args;
    if (!csa_token_active(a->tokens, token))
        return;
    int64_t position = csa_token_position(a->tokens, token);
    int64_t base = csa_token_ring(a->tokens, csa_token_owner(a->tokens, token));
    if (position % CSA_REGION != CSA_REGION - 1) {
        store_row(a, base, position, token);
        return;
    }
    csa_region_rows rows = {.count = 0};
    uint8_t *summary = summary_of(a, token);
    if (summary && add_ring_rows(a, base, position - (CSA_REGION - 1), CSA_REGION - 1, &rows)) {
        add_token(a, token, &rows);
        w->summary(&rows, summary);
    }
}

csa_status csa_host_summarize_decode(const csa_context *context, const csa_summarize_args *args,
                                     csa_summary summary)
{
    work w = {args, summary};
    return csa_parallel_small(context, args->key.shape[0], CSA_SUMMARIZE_COST, decode_token, &w);
}

static void verify_token(const work *w, int64_t base, int64_t token)
{
    const csa_summarize_args *a = w->args;
    if (!csa_token_active(a->tokens, token))
        return;
    int64_t position = csa_token_position(a->tokens, token);
    store_row(a, base, position, token);
    if (position % CSA_REGION != CSA_REGION - 1)
        return;
    csa_region_rows rows = {.count = 0};
    uint8_t *summary = summary_of(a, token);
    if (summary && add_ring_rows(a, base, position - (CSA_REGION - 1), CSA_REGION, &rows))
        w->summary(&rows, summary);
}

static void verify_request(void *data, int64_t request)
{
    const work *w = data;
    const csa_summarize_args *a = w->args;
    int64_t first, end;
    csa_token_range(a->tokens, request, &first, &end);
    for (int64_t token = first; token < end; token++)
        verify_token(w, csa_token_ring(a->tokens, request), token);
}

csa_status csa_host_summarize_verify(const csa_context *context, const csa_summarize_args *args,
                                     csa_summary summary)
{
    work w = {args, summary};
    return csa_parallel_small(context, csa_token_requests(args->tokens),
                              (int64_t)CSA_SUMMARIZE_COST * args->tokens->query_len, verify_request, &w);
}

void csa_host_summarize_piece(const csa_summarize_args *args, csa_summary summary, int64_t piece)
{
    work w = {args, summary};
    if (args->tokens->query_len > 1)
        verify_request(&w, piece);
    else
        decode_token(&w, piece);
}

/* ---- Prefill ------------------------------------------------------------------------------------ */

static void metadata_token(void *data, int64_t token)
{
    const csa_summarize_args *a = data;
    int64_t run[CSA_RUN_COLUMNS], *out = csa_at(&a->metadata, token, 0, 0);
    csa_find_run(a->tokens, token, run);
    memcpy(out, run, sizeof run);
}

csa_status csa_host_summarize_metadata(const csa_context *context, const csa_summarize_args *args)
{
    return csa_parallel(context, args->metadata.shape[0], metadata_token, (void *)args);
}

/* The tokens a run names are numbers from memory: outside the call they count as absent. */
static bool run_token(const csa_summarize_args *a, const int64_t *run, int offset)
{
    int64_t token = run[CSA_RUN_TOKENS + offset];
    return token >= 0 && token < a->key.shape[0];
}

/* Summarises the run that starts at a token, if it closes its region. Reads the ring, writes none. */
static void close_run(void *data, int64_t token)
{
    const work *w = data;
    const csa_summarize_args *a = w->args;
    int64_t found[CSA_RUN_COLUMNS], *run = found;
    if (csa_present(&a->metadata))
        run = csa_at(&a->metadata, token, 0, 0);
    else
        csa_find_run(a->tokens, token, found);
    int64_t offset = run[CSA_RUN_OFFSET];
    uint8_t *summary = csa_summary_of_slot(a->cache, run[CSA_RUN_SLOT]);
    if (!summary || offset < 0 || offset >= CSA_REGION || !run_token(a, run, CSA_REGION - 1))
        return;
    int64_t base = csa_token_ring(a->tokens, csa_token_owner(a->tokens, token));
    int64_t last = csa_token_position(a->tokens, run[CSA_RUN_TOKENS + CSA_REGION - 1]);
    csa_region_rows rows = {.count = 0};
    if (!add_ring_rows(a, base, last - (CSA_REGION - 1), offset, &rows))
        return;
    for (int i = (int)offset; i < CSA_REGION; i++)
        if (run_token(a, run, i))
            add_token(a, run[CSA_RUN_TOKENS + i], &rows);
    w->summary(&rows, summary);
}

/* Keeps a request's latest rows for the steps that come. */
static void store_tail(void *data, int64_t request)
{
    const csa_summarize_args *a = ((const work *)data)->args;
    int64_t first, end, base = csa_token_ring(a->tokens, request);
    csa_token_range(a->tokens, request, &first, &end);
    if (base < 0 || first >= end)
        return;
    int64_t last = csa_token_position(a->tokens, end - 1);
    for (int64_t token = first; token < end; token++)
        if (csa_token_active(a->tokens, token) &&
            csa_token_position(a->tokens, token) > last - a->cache->ring_capacity)
            store_row(a, base, csa_token_position(a->tokens, token), token);
}

csa_status csa_host_summarize_prefill(const csa_context *context, const csa_summarize_args *args,
                                      csa_summary summary)
{
    work w = {args, summary};
    csa_status status = csa_parallel_small(context, args->key.shape[0], CSA_SUMMARIZE_COST, close_run, &w);
    if (status != CSA_OK)
        return status;
    return csa_parallel(context, csa_token_requests(args->tokens), store_tail, &w);
}
