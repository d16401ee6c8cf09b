/* SPDX-License-Identifier: Apache-2.0 */
#include "compat_ids.h"
#include "check.h"
#include "format.h"
#include "pages.h"
#include "tokens.h"

static void expect(csa_checker *c, const char *name, int64_t index, int64_t value, int64_t low, int64_t high)
{
    if (value < low || value > high)
        csa_refuse(c, CSA_ERROR_ID, "%s[%lld] is %lld, expected %lld to %lld", name, (long long)index,
                   (long long)value, (long long)low, (long long)high);
}

static void expect_entry(csa_checker *c, const char *name, int64_t i, int64_t j, int64_t value, int64_t end)
{
    if (value < 0 || value >= end)
        csa_refuse(c, CSA_ERROR_ID, "%s[%lld, %lld] is %lld, expected 0 to %lld", name, (long long)i,
                   (long long)j, (long long)value, (long long)end - 1);
}

/* Offsets ascend from 0 at least to `end` at most. */
static void expect_offsets(csa_checker *c, const char *name, const csa_tensor *offsets, int64_t end)
{
    int64_t least = 0;
    for (int64_t i = 0; i < offsets->shape[0] && c->status == CSA_OK; i++) {
        expect(c, name, i, csa_i32(offsets, i), least, end);
        least = csa_i32(offsets, i);
    }
}

void csa_check_compat_score_ids(csa_checker *c, const csa_compat_score_args *a)
{
    int64_t regions = a->scores.shape[1], columns = a->page_table.shape[1],
            room = columns * CSA_COMPAT_PAGE_REGIONS;
    for (int64_t entry = 0; entry < a->lengths.shape[0] && c->status == CSA_OK; entry++) {
        int64_t length = csa_i32(&a->lengths, entry);
        expect(c, "lengths", entry, length, 0, regions < room ? regions : room);
        for (int64_t page = 0; page * CSA_COMPAT_PAGE_REGIONS < length && c->status == CSA_OK; page++)
            expect_entry(c, "page_table", entry, page, *(int32_t *)csa_at(&a->page_table, entry, page, 0),
                         a->packed.shape[0]);
    }
}

void csa_check_compat_metadata_ids(csa_checker *c, const csa_compat_metadata_args *a, int64_t tokens)
{
    for (int64_t token = 0; token < tokens && c->status == CSA_OK; token++) {
        if (!csa_token_active(a->tokens, token))
            continue;
        csa_check_region(c, a->tokens, token, a->regions);
        if (csa_token_owner(a->tokens, token) < 0)
            csa_refuse(c, CSA_ERROR_ID, "token %lld belongs to none of the %lld requests", (long long)token,
                       (long long)csa_token_requests(a->tokens));
    }
}

/* Lists and blocks are those of attend. */
static void check_selection(csa_checker *c, const csa_tokens *tokens, const csa_cache *cache,
                            const csa_tensor *selected)
{
    csa_attend_args attend = {.tokens = tokens, .cache = cache, .selected = *selected};
    attend.query.shape[0] = selected->shape[0];
    attend.query.shape[1] = 1;
    csa_check_attend_ids(c, &attend);
}

void csa_check_compat_pages_ids(csa_checker *c, const csa_compat_pages_args *a)
{
    if (csa_present(&a->pages))
        check_selection(c, a->tokens, a->cache, &a->selected);
    if (!a->planned)
        return;
    expect_offsets(c, "page_indptr", &a->page_indptr, csa_present(&a->pages) ? a->pages.shape[0] : INT32_MAX);
    for (int64_t row = 0; row + 1 < a->page_indptr.shape[0] && c->status == CSA_OK; row++) {
        int64_t room = csa_i32(&a->page_indptr, row + 1) - (int64_t)csa_i32(&a->page_indptr, row);
        if (csa_token_active(a->tokens, row) && room < a->columns)
            csa_check_region(c, a->tokens, row, room);
    }
}

void csa_check_compat_paged_ids(csa_checker *c, const csa_compat_attend_paged_args *a)
{
    expect_offsets(c, "page_indptr", &a->page_indptr, a->pages.shape[0]);
    for (int64_t row = 0; row < a->query.shape[0] && c->status == CSA_OK; row++) {
        int64_t start = csa_i32(&a->page_indptr, row), count = csa_i32(&a->page_indptr, row + 1) - start;
        if (csa_present(&a->page_counts)) {
            expect(c, "page_counts", row, csa_i32(&a->page_counts, row), 0, count);
            count = csa_i32(&a->page_counts, row);
        }
        expect(c, "last_page_len", row, csa_i32(&a->last_page_len, row), count > 0, count > 0 ? CSA_REGION : 0);
        for (int64_t i = start; i < start + count && c->status == CSA_OK; i++)
            if (!csa_page_row(&a->cache->kv, csa_i32(&a->pages, i)))
                csa_refuse(c, CSA_ERROR_ID, "pages[%lld] is %d, which is not a page of the cache's %lld blocks",
                           (long long)i, (int)csa_i32(&a->pages, i), (long long)a->cache->kv.shape[0]);
    }
}

void csa_check_compat_gather_ids(csa_checker *c, const csa_compat_gather_args *a)
{
    check_selection(c, a->tokens, a->cache, &a->selected);
}

void csa_check_compat_ragged_ids(csa_checker *c, const csa_compat_attend_ragged_args *a)
{
    expect_offsets(c, "cu_k", &a->cu_k, a->key.shape[0]);
}

void csa_check_compat_stage_ids(csa_checker *c, const csa_compat_stage_args *a)
{
    const csa_tensor *table = &a->tokens->block_table, *kv = &a->cache->kv;
    int64_t live = 0, room = a->staged.shape[0], columns = table->shape[1], block_size = kv->shape[2];
    for (int64_t request = 0; request < table->shape[0] && c->status == CSA_OK; request++) {
        int64_t length = csa_i32(&a->tokens->seq_lens, request);
        expect(c, "tokens.seq_lens", request, length, 0, columns * block_size);
        for (int64_t column = 0; column * block_size < length && c->status == CSA_OK; column++, live++)
            expect_entry(c, "tokens.block_table", request, column,
                         *(int32_t *)csa_at(table, request, column, 0), kv->shape[0]);
    }
    if (live > room)
        csa_refuse(c, CSA_ERROR_ID, "tokens.seq_lens say %lld live blocks, staged has room for %lld",
                   (long long)live, (long long)room);
}
