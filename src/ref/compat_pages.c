/*
 * Section 9: a selection as lists of 8-token pages, from true positions or from upper bounds.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "../pages.h"
#include "compat.h"

/* Pages of a row, wherever they stand. */
static int64_t needed_pages(const csa_compat_pages_args *a, int64_t row)
{
    if (!csa_token_active(a->tokens, row))
        return 0;
    int64_t live = csa_token_position(a->tokens, row) / CSA_REGION + 1;
    return live < a->columns ? live : a->columns;
}

/* Of those, the pages that have a place in the plan. */
static int64_t placed_pages(const csa_compat_pages_args *a, int64_t row)
{
    int64_t needed = needed_pages(a, row), start = csa_i32(&a->page_indptr, row);
    int64_t room = csa_i32(&a->page_indptr, row + 1) - start;
    if (csa_present(&a->pages) && room > a->pages.shape[0] - start)
        room = a->pages.shape[0] - start;
    if (start < 0 || room < 0)
        return 0;
    return needed < room ? needed : room;
}

static int32_t page_of_entry(const csa_compat_pages_args *a, int64_t row, int64_t region)
{
    const csa_tensor *kv = &a->cache->kv;
    int64_t block, request = csa_token_owner(a->tokens, row), position = csa_token_position(a->tokens, row);
    if (!csa_region_tokens(a->tokens, kv, request, region, position, &block))
        return 0;
    return (int32_t)(block * csa_block_pages(kv) + region % (kv->shape[2] / CSA_REGION));
}

/* What the plan's numbers say of one row, and its pages: its list's last entries. */
static void write_row(void *data, int64_t row)
{
    const csa_compat_pages_args *a = data;
    int64_t count = placed_pages(a, row), start = csa_i32(&a->page_indptr, row);
    if (csa_present(&a->page_counts))
        *(int32_t *)csa_at(&a->page_counts, row, 0, 0) = (int32_t)count;
    if (csa_present(&a->last_page_len))
        *(int32_t *)csa_at(&a->last_page_len, row, 0, 0) =
            count ? (int32_t)(csa_token_position(a->tokens, row) % CSA_REGION + 1) : 0;
    if (!csa_present(&a->pages))
        return;
    const int64_t *entries = csa_at(&a->selected, row, 0, 0);
    for (int64_t i = 0; i < count; i++)
        *(int32_t *)csa_at(&a->pages, start + i, 0, 0) = page_of_entry(a, row, entries[a->columns - count + i]);
}

csa_status csa_ref_compat_pages(const csa_context *context, const csa_compat_pages_args *args)
{
    int64_t rows = args->page_indptr.shape[0] - 1, end = 0;
    for (int64_t row = 0; !args->planned && row <= rows; row++) {
        *(int32_t *)csa_at(&args->page_indptr, row, 0, 0) = (int32_t)end;
        if (row < rows)
            end += needed_pages(args, row);
    }
    return csa_parallel(context, rows, write_row, (void *)args);
}
