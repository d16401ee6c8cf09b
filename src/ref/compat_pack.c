/*
 * Section 9: packed pages of summaries, the schedule over them, and the metadata of their rows.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "compat.h"

/* ---- What decode and prefill know of their rows ------------------------------------------------- */

/* The stage that scores also writes the rows. */
static csa_status write_rows(const csa_context *context, const csa_tokens *tokens, const csa_rows *rows,
                             int64_t count)
{
    csa_score_args score = {.tokens = tokens, .rows_out = rows};
    score.query.shape[0] = count;
    score.query.shape[1] = 1;
    return rows ? csa_ref_score(context, &score) : CSA_OK;
}

/* A token of no request has no pages: -1. */
static void write_page_table(const csa_tensor *table, const csa_tokens *tokens)
{
    int64_t pages = table->shape[1];
    for (int64_t row = 0; csa_present(table) && row < table->shape[0]; row++) {
        int64_t owner = csa_token_owner(tokens, row);
        int32_t *entries = csa_at(table, row, 0, 0);
        for (int64_t page = 0; page < pages; page++)
            entries[page] = owner < 0 ? -1 : (int32_t)(owner * pages + page);
    }
}

/* ---- Schedule ----------------------------------------------------------------------------------- */

static int64_t segments(int64_t length)
{
    return length > 0 ? (length + CSA_COMPAT_SEGMENT - 1) / CSA_COMPAT_SEGMENT : 0;
}

csa_status csa_ref_compat_schedule(const csa_context *context, const csa_compat_schedule_args *args)
{
    (void)context;
    int64_t rows = args->lengths.shape[0], workers = args->schedule.shape[0] - 1, total = 0;
    for (int64_t row = 0; row < rows; row++)
        total += segments(csa_i32(&args->lengths, row));
    int64_t row = 0, before = 0; /* segments of the rows before this one */
    for (int64_t worker = 0; worker <= workers; worker++) {
        int64_t longer = worker < total % workers ? worker : total % workers;
        int64_t start = worker * (total / workers) + longer;
        while (row < rows && start - before >= segments(csa_i32(&args->lengths, row)))
            before += segments(csa_i32(&args->lengths, row++));
        int32_t *entry = csa_at(&args->schedule, worker, 0, 0);
        entry[0] = (int32_t)row;
        entry[1] = (int32_t)(start - before);
    }
    return CSA_OK;
}

static csa_status write_schedule(const csa_context *context, const csa_rows *rows, const csa_tensor *schedule)
{
    if (!csa_present(schedule))
        return CSA_OK;
    csa_compat_schedule_args args = {.lengths = rows->lengths, .schedule = *schedule};
    return csa_ref_compat_schedule(context, &args);
}

/* ---- Packing ------------------------------------------------------------------------------------ */

typedef struct packing {
    const csa_compat_pack_args *args;
    int64_t pages; /* per request */
    int64_t tokens;
} packing;

/* The pages that the longest of a request's tokens needs; an inactive token has length 1. */
static int64_t live_pages(const packing *p, int64_t request)
{
    const csa_tokens *tokens = p->args->tokens;
    int64_t first = csa_token_first(tokens, request), end = csa_token_first(tokens, request + 1), longest = 1;
    for (int64_t token = first < 0 ? 0 : first; token < end && token < p->tokens; token++) {
        int64_t length = csa_token_position(tokens, token) / CSA_REGION + 1;
        if (csa_token_active(tokens, token) && length > longest)
            longest = length;
    }
    return csa_compat_packed_pages(longest);
}

static void pack_page(void *data, int64_t page)
{
    const packing *p = data;
    const csa_compat_pack_args *a = p->args;
    int64_t request = page / p->pages, first = page % p->pages * CSA_COMPAT_PAGE_REGIONS;
    if (a->live_only && page % p->pages >= live_pages(p, request))
        return;
    uint8_t *out = csa_at(&a->packed, page, 0, 0);
    const float one = 1;
    for (int64_t i = 0; i < CSA_COMPAT_PAGE_REGIONS; i++) {
        const uint8_t *summary = NULL;
        if (first + i < a->regions)
            summary = csa_summary_at(a->tokens, a->cache, request, first + i);
        if (summary)
            memcpy(out + i * CSA_SUMMARY_SIZE, summary, CSA_SUMMARY_SIZE);
        else
            memset(out + i * CSA_SUMMARY_SIZE, 0, CSA_SUMMARY_SIZE);
        memcpy(out + CSA_PAGE_SCALES + i * (int64_t)sizeof one, &one, sizeof one);
    }
}

csa_status csa_ref_compat_pack(const csa_context *context, const csa_compat_pack_args *args, int64_t tokens)
{
    packing p = {args, csa_compat_packed_pages(args->regions), tokens};
    write_page_table(&args->page_table, args->tokens);
    csa_status status = csa_parallel(context, args->packed.shape[0], pack_page, &p);
    if (status == CSA_OK)
        status = write_rows(context, args->tokens, args->rows_out, tokens);
    return status == CSA_OK ? write_schedule(context, args->rows_out, &args->schedule) : status;
}

/* ---- Prefill metadata --------------------------------------------------------------------------- */

csa_status csa_ref_compat_metadata(const csa_context *context, const csa_compat_metadata_args *args,
                                   int64_t tokens)
{
    write_page_table(&args->page_table, args->tokens);
    csa_status status = write_rows(context, args->tokens, args->rows_out, tokens);
    if (status == CSA_OK && csa_present(&args->selected)) {
        csa_select_args select = {
            .scores = csa_tensor_2d(NULL, CSA_F32, tokens, args->regions),
            .current = args->rows_out->current,
            .selected = args->selected,
            .topk = args->topk,
        };
        status = csa_ref_select(context, &select);
    }
    return status == CSA_OK ? write_schedule(context, args->rows_out, &args->schedule) : status;
}
