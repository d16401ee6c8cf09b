/*
 * The calls of csa_compat.h: argument checks, then dispatch to the context's back end.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "api.h"
#include "check.h"
#include "compat_ids.h"
#include "fetch.h"
#include "format.h"
#include "pages.h"
#include "tokens.h"

#include <string.h>

/* ---- Sizes -------------------------------------------------------------------------------------- */

int64_t csa_compat_packed_pages(int64_t regions)
{
    const int64_t together = (int64_t)4 * CSA_COMPAT_PAGE_REGIONS;
    return regions <= 0 ? 0 : ((regions - 1) / together + 1) * 4;
}

int64_t csa_compat_chunk_rows(int64_t regions)
{
    const int64_t least = 256, most = 4096, scores = ((int64_t)1 << 27) / (int64_t)sizeof(float);
    int64_t rows = most;
    if (regions > scores / least)
        return least;
    int64_t width = regions <= 0 ? 0 : (regions + 255) / 256 * 256;
    while (rows > least && rows * width > scores)
        rows /= 2;
    return rows;
}

bool csa_compat_stage_fits(int64_t blocks, int64_t block_size)
{
    const int64_t token = CSA_KV_SIZE * (int64_t)sizeof(uint16_t);
    return block_size > 0 && blocks <= CSA_COMPAT_STAGE_LIMIT / token / block_size;
}

/* ---- What several calls check ------------------------------------------------------------------- */

/* Numbers up to a * b stand in an int32 tensor. */
static void check_numbers(csa_checker *c, const char *name, int64_t a, int64_t b)
{
    if (c->status == CSA_OK && b > 0 && a > INT32_MAX / b)
        csa_refuse(c, CSA_ERROR_UNSUPPORTED, "%s is %lld * %lld, supported: up to %d", name, (long long)a,
                   (long long)b, INT32_MAX);
}

static void check_regions(csa_checker *c, int64_t regions)
{
    csa_check_range(c, "regions", regions, 0, (int64_t)1 << 40);
}

static csa_dim one_group(void)
{
    return CSA_FIXED_DIM("KV groups", 1, "1, a view of one group");
}

/* Tensors do not say how many tokens there are: then it is query_len for each request. */
static void count_tokens(csa_checker *c, const csa_tokens *tokens, csa_dim *count)
{
    if (c->status != CSA_OK || count->extent >= 0)
        return;
    if (csa_present(&tokens->query_start))
        csa_refuse(c, CSA_ERROR_ARGUMENT,
                   "tokens.slots and positions are absent, expected one of them beside "
                   "query_start");
    *count = CSA_KNOWN_DIM("tokens", csa_token_requests(tokens) * tokens->query_len, "requests * query_len");
}

static void check_schedule(csa_checker *c, csa_tensor *schedule, int flags)
{
    csa_dim workers = CSA_DIM("workers + 1"), two = CSA_FIXED_DIM("columns", 2, "2");
    csa_check_tensor(c, "schedule", schedule, CSA_ARG_OUT | flags, CSA_I32, 2, &workers, &two);
    if (csa_present(schedule))
        csa_check_range(c, "schedule: workers + 1", workers.extent, 2, INT32_MAX);
}

/* Row outputs, page table and schedule of `requests` packed requests. */
static void check_row_outputs(csa_checker *c, const csa_rows *from, csa_rows *rows, csa_tensor *table,
                              csa_tensor *schedule, int64_t pages, const csa_nested *n, csa_dim *tokens)
{
    csa_dim one = CSA_KNOWN_DIM("KV groups", 1, "a token's row"),
            columns = CSA_KNOWN_DIM("pages", pages, "regions");
    count_tokens(c, &n->tokens, tokens);
    csa_check_rows(c, from, CSA_ARG_OUT, tokens, &one, rows);
    csa_check_tensor(c, "page_table", table, CSA_ARG_OUT | CSA_ARG_OPTIONAL, CSA_I32, 2, tokens, &columns);
    check_schedule(c, schedule, CSA_ARG_OPTIONAL);
    check_numbers(c, "requests * pages", csa_token_requests(&n->tokens), pages);
    check_numbers(c, "rows", tokens->extent, 1);
    if (csa_present(schedule) && !csa_present(&rows->lengths))
        csa_refuse(c, CSA_ERROR_ARGUMENT, "rows_out.lengths is absent, expected with schedule");
}

/* ---- Pack --------------------------------------------------------------------------------------- */

typedef struct pack_call {
    csa_compat_pack_args args;
    csa_nested nested;
    int64_t tokens;
    bool rows; /* asks for more than the pages */
} pack_call;

static void check_pack(csa_checker *c, const csa_compat_pack_args *from, pack_call *to)
{
    csa_compat_pack_args *a = &to->args;
    csa_dim tokens = CSA_DIM("tokens"), groups = CSA_DIM("KV groups");
    csa_dim bytes = CSA_FIXED_DIM("page bytes", CSA_COMPAT_PAGE_BYTES, "8320");
    csa_take(c, a, from, sizeof *a, "csa_compat_pack_args");
    check_regions(c, a->regions);
    int64_t pages = csa_compat_packed_pages(a->regions);
    to->rows = a->live_only || a->rows_out || csa_present(&a->page_table) || csa_present(&a->schedule);
    csa_check_tokens(c, a->tokens, CSA_NEED_TABLE | (to->rows ? CSA_NEED_POSITIONS : 0), &tokens,
                     &to->nested.tokens);
    csa_check_cache(c, a->cache, CSA_NEED_SUMMARIES, &groups, &to->nested.cache);
    if (to->rows)
        check_row_outputs(c, a->rows_out, &to->nested.rows, &a->page_table, &a->schedule, pages, &to->nested,
                          &tokens);
    if (a->live_only && csa_present(&to->nested.tokens.owners))
        csa_refuse(c, CSA_ERROR_ARGUMENT, "tokens.owners is present, expected none with live_only");
    int64_t requests = csa_token_requests(&to->nested.tokens);
    check_numbers(c, "requests * pages", requests, pages);
    csa_dim all = CSA_KNOWN_DIM("requests * pages", c->status == CSA_OK ? requests * pages : 0, "regions");
    csa_check_tensor(c, "packed", &a->packed, CSA_ARG_OUT, CSA_U8, 2, &all, &bytes);
    a->tokens = &to->nested.tokens;
    a->cache = &to->nested.cache;
    a->rows_out = a->rows_out ? &to->nested.rows : NULL;
    to->tokens = tokens.extent;
}

csa_status csa_compat_pack(const csa_context *context, const csa_compat_pack_args *args)
{
    pack_call call = {0};
    csa_checker c = csa_begin(context, "csa_compat_pack");
    check_pack(&c, args, &call);
    csa_fetched ids;
    if (call.rows && csa_checking(&ids, &c, context, call.args.stream)) {
        csa_fetch_tokens(&ids, &call.nested.tokens);
        csa_check_seen_ids(&c, call.args.tokens, &call.args.cache->summaries, call.tokens, call.args.regions);
        csa_end_fetch(&ids);
    }
    return c.status == CSA_OK ? context->stages->compat->pack(context, &call.args, call.tokens) : c.status;
}

/* ---- Schedule ----------------------------------------------------------------------------------- */

csa_status csa_compat_schedule(const csa_context *context, const csa_compat_schedule_args *args)
{
    csa_compat_schedule_args a;
    csa_dim rows = CSA_DIM("rows");
    csa_checker c = csa_begin(context, "csa_compat_schedule");
    csa_take(&c, &a, args, sizeof a, "csa_compat_schedule_args");
    csa_check_tensor(&c, "lengths", &a.lengths, 0, CSA_I32, 1, &rows);
    check_schedule(&c, &a.schedule, 0);
    check_numbers(&c, "rows", rows.extent, 1);
    return c.status == CSA_OK ? context->stages->compat->schedule(context, &a) : c.status;
}

/* ---- Score -------------------------------------------------------------------------------------- */

static void check_score(csa_checker *c, const csa_compat_score_args *from, csa_compat_score_args *a)
{
    csa_dim batch = CSA_DIM("batch"), next_n = CSA_DIM("next_n"), heads = CSA_DIM("index heads"),
            packed = CSA_DIM("packed pages"), pages = CSA_DIM("pages"), regions = CSA_DIM("regions");
    csa_dim size = CSA_FIXED_DIM("index head size", CSA_SUMMARY_SIZE, "256");
    csa_dim bytes = CSA_FIXED_DIM("page bytes", CSA_COMPAT_PAGE_BYTES, "8320");
    csa_take(c, a, from, sizeof *a, "csa_compat_score_args");
    csa_dtype dtype = a->query.dtype == CSA_F32 || a->query.dtype == CSA_BF16 ? a->query.dtype : CSA_E4M3;
    csa_check_tensor(c, "query", &a->query, 0, dtype, 4, &batch, &next_n, &heads, &size);
    csa_check_tensor(c, "weights", &a->weights, 0, CSA_F32, 3, &batch, &next_n, &heads);
    csa_check_tensor(c, "packed", &a->packed, 0, CSA_U8, 2, &packed, &bytes);
    csa_check_tensor(c, "page_table", &a->page_table, 0, CSA_I32, 2, &batch, &pages);
    csa_check_tensor(c, "lengths", &a->lengths, 0, CSA_I32, 1, &batch);
    csa_check_range(c, "next_n", next_n.extent, 1, 2);
    if (c->status == CSA_OK && heads.extent != 16 && (heads.extent < 1 || heads.extent > 8))
        csa_refuse(c, CSA_ERROR_UNSUPPORTED, "index heads is %lld, supported: 1 to 8, 16",
                   (long long)heads.extent);
    csa_dim rows = CSA_KNOWN_DIM("rows", batch.extent * next_n.extent, "batch * next_n");
    csa_check_tensor(c, "scores", &a->scores, CSA_ARG_OUT, CSA_F32, 2, &rows, &regions);
}

csa_status csa_compat_score(const csa_context *context, const csa_compat_score_args *args)
{
    csa_compat_score_args a;
    csa_checker c = csa_begin(context, "csa_compat_score");
    check_score(&c, args, &a);
    csa_fetched ids;
    if (csa_checking(&ids, &c, context, a.stream)) {
        csa_fetch(&ids, &a.page_table);
        csa_fetch(&ids, &a.lengths);
        csa_check_compat_score_ids(&c, &a);
        csa_end_fetch(&ids);
    }
    return c.status == CSA_OK ? context->stages->compat->score(context, &a) : c.status;
}

/* [batch, ...] with stride s becomes [batch / 2, ...] with stride 2 s. */
static void halve(csa_tensor *t)
{
    t->shape[0] /= 2;
    t->stride[0] *= 2;
}

/* Second rows only. */
static void take_second(csa_tensor *t)
{
    if (t->data && t->shape[0] > 0)
        t->data = csa_at(t, 1, 0, 0);
    halve(t);
}

/* [batch, 1, ...] becomes [batch / 2, 2, ...]. */
static void fold(csa_tensor *t)
{
    t->shape[1] = 2;
    t->stride[1] = t->stride[0];
    halve(t);
}

csa_status csa_compat_pair(csa_compat_score_args *args)
{
    csa_compat_score_args a;
    csa_checker c = {.call = "csa_compat_pair"};
    check_score(&c, args, &a);
    if (c.status == CSA_OK && a.query.shape[1] != 1)
        csa_refuse(&c, CSA_ERROR_ARGUMENT, "next_n is %lld, expected 1", (long long)a.query.shape[1]);
    if (c.status == CSA_OK && a.query.shape[0] % 2)
        csa_refuse(&c, CSA_ERROR_ARGUMENT, "batch is %lld, expected an even number of rows",
                   (long long)a.query.shape[0]);
    if (c.status != CSA_OK)
        return c.status;
    fold(&a.query);
    fold(&a.weights);
    take_second(&a.page_table);
    take_second(&a.lengths);
    a.size = args->size;
    memcpy(args, &a, args->size < sizeof a ? args->size : sizeof a);
    return CSA_OK;
}

/* ---- Prefill metadata --------------------------------------------------------------------------- */

typedef struct metadata_call {
    csa_compat_metadata_args args;
    csa_nested nested;
    int64_t tokens;
} metadata_call;

/* Either everything is selected, or rows are scored through a page table. */
static void check_selection(csa_checker *c, csa_compat_metadata_args *a, const csa_rows *rows, csa_dim *tokens)
{
    bool all = a->regions <= a->topk;
    csa_dim columns = CSA_KNOWN_DIM("columns", a->regions + 1, "regions + 1");
    csa_check_tensor(c, "selected", &a->selected, CSA_ARG_OUT | CSA_ARG_OPTIONAL, CSA_I64, 2, tokens, &columns);
    const char *unused = !all && csa_present(&a->selected)  ? "selected"
                         : all && csa_present(&a->schedule) ? "schedule"
                                                            : NULL;
    if (unused)
        csa_refuse(c, CSA_ERROR_ARGUMENT, "%s is present, expected none with regions %lld and topk %d", unused,
                   (long long)a->regions, (int)a->topk);
    if (csa_present(&a->selected) && !csa_present(&rows->current))
        csa_refuse(c, CSA_ERROR_ARGUMENT, "rows_out.current is absent, expected with selected");
}

static void check_metadata(csa_checker *c, const csa_compat_metadata_args *from, metadata_call *to)
{
    csa_compat_metadata_args *a = &to->args;
    csa_dim tokens = CSA_DIM("tokens");
    csa_take(c, a, from, sizeof *a, "csa_compat_metadata_args");
    a->topk = csa_check_topk(c, a->topk);
    check_regions(c, a->regions);
    int64_t pages = a->regions <= a->topk ? 0 : csa_compat_packed_pages(a->regions);
    csa_check_tokens(c, a->tokens, CSA_NEED_TABLE | CSA_NEED_POSITIONS, &tokens, &to->nested.tokens);
    check_row_outputs(c, a->rows_out, &to->nested.rows, &a->page_table, &a->schedule, pages, &to->nested,
                      &tokens);
    check_selection(c, a, &to->nested.rows, &tokens);
    a->tokens = &to->nested.tokens;
    a->rows_out = a->rows_out ? &to->nested.rows : NULL;
    to->tokens = tokens.extent;
}

csa_status csa_compat_prefill_metadata(const csa_context *context, const csa_compat_metadata_args *args)
{
    metadata_call call = {0};
    csa_checker c = csa_begin(context, "csa_compat_prefill_metadata");
    check_metadata(&c, args, &call);
    csa_fetched ids;
    if (csa_checking(&ids, &c, context, call.args.stream)) {
        csa_fetch_tokens(&ids, &call.nested.tokens);
        csa_check_compat_metadata_ids(&c, &call.args, call.tokens);
        csa_end_fetch(&ids);
    }
    return c.status == CSA_OK ? context->stages->compat->metadata(context, &call.args, call.tokens) : c.status;
}

/* ---- Page lists --------------------------------------------------------------------------------- */

/* Pages must start at a common distance, and their numbers fit int32. */
static void check_pages_of(csa_checker *c, const csa_tensor *kv)
{
    int64_t page = CSA_REGION * kv->stride[2];
    if (c->status != CSA_OK || kv->shape[0] == 0)
        return;
    if (page <= 0 || kv->stride[0] < 0 || kv->stride[0] % page)
        csa_refuse(
            c, CSA_ERROR_UNSUPPORTED,
            "cache.kv: block stride is %lld, token stride %lld, supported: a multiple of eight token rows",
            (long long)kv->stride[0], (long long)kv->stride[2]);
    else
        check_numbers(c, "pages of the cache", kv->shape[0], csa_block_pages(kv));
}

/* What section 9's plan is made for. */
static void check_paged(csa_checker *c, const csa_tensor *kv, int64_t heads)
{
    if (c->status != CSA_OK)
        return;
    if (kv->dtype != CSA_BF16)
        csa_refuse(c, CSA_ERROR_UNSUPPORTED, "cache.kv: dtype is e4m3, supported: bf16");
    if (heads != 8 && heads != 16)
        csa_refuse(c, CSA_ERROR_UNSUPPORTED, "query heads is %lld, supported: 8, 16", (long long)heads);
    check_pages_of(c, kv);
}

csa_status csa_compat_paged_supported(const csa_context *context, const csa_cache *cache, int64_t heads)
{
    csa_cache copy;
    csa_dim one = one_group();
    csa_checker c = csa_begin(context, "csa_compat_paged_supported");
    csa_check_cache(&c, cache, CSA_NEED_KV, &one, &copy);
    check_paged(&c, &copy.kv, heads);
    return c.status;
}

typedef struct pages_call {
    csa_compat_pages_args args;
    csa_nested nested;
} pages_call;

/* The lists and where their pages go. */
static void check_page_lists(csa_checker *c, pages_call *to, csa_dim *tokens)
{
    csa_compat_pages_args *a = &to->args;
    csa_dim one = one_group(), entries = CSA_DIM("entries");
    csa_dim columns = a->columns ? CSA_KNOWN_DIM("columns", a->columns, "columns") : CSA_DIM("columns");
    csa_check_tensor(c, "selected", &a->selected, CSA_ARG_OPTIONAL, CSA_I64, 2, tokens, &columns);
    csa_check_tensor(c, "pages", &a->pages, CSA_ARG_OPTIONAL | CSA_ARG_OUT, CSA_I32, 1, &entries);
    a->columns = columns.extent;
    csa_check_range(c, "columns", a->columns, 1, CSA_MAX_TOPK + 1);
    check_numbers(c, "rows * columns", tokens->extent, a->columns);
    if (c->status != CSA_OK || !csa_present(&a->pages))
        return;
    csa_check_cache(c, a->cache, CSA_NEED_KV, &one, &to->nested.cache);
    check_pages_of(c, &to->nested.cache.kv);
    if (!csa_present(&a->selected))
        csa_refuse(c, CSA_ERROR_ARGUMENT, "selected is absent, expected with pages");
    int64_t most = tokens->extent * a->columns;
    if (!a->planned && entries.extent < most)
        csa_refuse(c, CSA_ERROR_ARGUMENT, "pages has %lld entries, expected at least rows * columns = %lld",
                   (long long)entries.extent, (long long)most);
}

static void check_pages(csa_checker *c, const csa_compat_pages_args *from, pages_call *to)
{
    csa_compat_pages_args *a = &to->args;
    csa_dim ends = CSA_DIM("tokens + 1");
    csa_take(c, a, from, sizeof *a, "csa_compat_pages_args");
    csa_check_tensor(c, "page_indptr", &a->page_indptr, a->planned ? 0 : CSA_ARG_OUT, CSA_I32, 1, &ends);
    if (ends.extent == 0)
        csa_refuse(c, CSA_ERROR_ARGUMENT, "page_indptr: extent 0 (tokens + 1) is 0");
    csa_dim tokens = CSA_KNOWN_DIM("tokens", ends.extent - 1, "page_indptr");
    csa_check_tensor(c, "page_counts", &a->page_counts, CSA_ARG_OPTIONAL | CSA_ARG_OUT, CSA_I32, 1, &tokens);
    csa_check_tensor(c, "last_page_len", &a->last_page_len, CSA_ARG_OPTIONAL | CSA_ARG_OUT, CSA_I32, 1,
                     &tokens);
    int needs = CSA_NEED_POSITIONS | (csa_present(&a->pages) ? CSA_NEED_TABLE : 0);
    csa_check_tokens(c, a->tokens, needs, &tokens, &to->nested.tokens);
    check_page_lists(c, to, &tokens);
    a->tokens = &to->nested.tokens;
    a->cache = &to->nested.cache;
}

csa_status csa_compat_pages(const csa_context *context, const csa_compat_pages_args *args)
{
    pages_call call = {0};
    csa_checker c = csa_begin(context, "csa_compat_pages");
    check_pages(&c, args, &call);
    csa_fetched ids;
    if (csa_checking(&ids, &c, context, call.args.stream)) {
        csa_fetch_tokens(&ids, &call.nested.tokens);
        csa_fetch(&ids, &call.args.selected);
        if (call.args.planned)
            csa_fetch(&ids, &call.args.page_indptr);
        csa_check_compat_pages_ids(&c, &call.args);
        csa_end_fetch(&ids);
    }
    return c.status == CSA_OK ? context->stages->compat->pages(context, &call.args) : c.status;
}

/* ---- Attention ---------------------------------------------------------------------------------- */

static void check_rows_of_heads(csa_checker *c, csa_tensor *query, csa_tensor *out, csa_tensor *lse,
                                csa_dim *rows)
{
    csa_dim heads = CSA_DIM("query heads"), size = CSA_FIXED_DIM("head size", CSA_HEAD_SIZE, "192");
    csa_check_tensor(c, "query", query, 0, CSA_BF16, 3, rows, &heads, &size);
    csa_check_tensor(c, "out", out, CSA_ARG_OUT, CSA_BF16, 3, rows, &heads, &size);
    csa_check_tensor(c, "lse", lse, CSA_ARG_OUT | CSA_ARG_OPTIONAL, CSA_F32, 2, rows, &heads);
    csa_check_range(c, "query heads", heads.extent, 1, CSA_MAX_HEADS);
}

static void check_attend_paged(csa_checker *c, const csa_compat_attend_paged_args *from,
                               csa_compat_attend_paged_args *a, csa_cache *cache)
{
    csa_dim rows = CSA_DIM("rows"), entries = CSA_DIM("entries"), one = one_group();
    csa_take(c, a, from, sizeof *a, "csa_compat_attend_paged_args");
    check_rows_of_heads(c, &a->query, &a->out, &a->lse, &rows);
    csa_dim ends = CSA_KNOWN_DIM("rows + 1", rows.extent + 1, "query");
    csa_check_tensor(c, "pages", &a->pages, 0, CSA_I32, 1, &entries);
    csa_check_tensor(c, "page_indptr", &a->page_indptr, 0, CSA_I32, 1, &ends);
    csa_check_tensor(c, "page_counts", &a->page_counts, CSA_ARG_OPTIONAL, CSA_I32, 1, &rows);
    csa_check_tensor(c, "last_page_len", &a->last_page_len, 0, CSA_I32, 1, &rows);
    csa_check_cache(c, a->cache, CSA_NEED_KV, &one, cache);
    check_paged(c, &cache->kv, a->query.shape[1]);
    a->cache = cache;
}

csa_status csa_compat_attend_paged(const csa_context *context, const csa_compat_attend_paged_args *args)
{
    csa_compat_attend_paged_args a;
    csa_cache cache;
    csa_checker c = csa_begin(context, "csa_compat_attend_paged");
    check_attend_paged(&c, args, &a, &cache);
    csa_fetched ids;
    if (csa_checking(&ids, &c, context, a.stream)) {
        csa_fetch(&ids, &a.pages);
        csa_fetch(&ids, &a.page_indptr);
        csa_fetch(&ids, &a.page_counts);
        csa_fetch(&ids, &a.last_page_len);
        csa_check_compat_paged_ids(&c, &a);
        csa_end_fetch(&ids);
    }
    return c.status == CSA_OK ? context->stages->compat->attend_paged(context, &a) : c.status;
}

typedef struct gather_call {
    csa_compat_gather_args args;
    csa_nested nested;
} gather_call;

static void check_key_value(csa_checker *c, csa_tensor *key, csa_tensor *value, int flags, csa_dim *tokens)
{
    csa_dim one = one_group(), size = CSA_FIXED_DIM("head size", CSA_HEAD_SIZE, "192");
    csa_check_tensor(c, "key", key, flags, CSA_BF16, 3, tokens, &one, &size);
    csa_check_tensor(c, "value", value, flags, CSA_BF16, 3, tokens, &one, &size);
}

static void check_gather(csa_checker *c, const csa_compat_gather_args *from, gather_call *to)
{
    csa_compat_gather_args *a = &to->args;
    csa_dim rows = CSA_DIM("tokens"), columns = CSA_DIM("columns"), room = CSA_DIM("room"), one = one_group();
    csa_take(c, a, from, sizeof *a, "csa_compat_gather_args");
    csa_check_tensor(c, "selected", &a->selected, 0, CSA_I64, 2, &rows, &columns);
    csa_check_range(c, "selected: columns", columns.extent, 1, CSA_MAX_TOPK + 1);
    csa_dim ends = CSA_KNOWN_DIM("tokens + 1", rows.extent + 1, "selected");
    csa_check_tensor(c, "cu_k", &a->cu_k, CSA_ARG_OUT, CSA_I32, 1, &ends);
    check_key_value(c, &a->key, &a->value, CSA_ARG_OUT, &room);
    csa_check_tokens(c, a->tokens, CSA_NEED_TABLE | CSA_NEED_POSITIONS, &rows, &to->nested.tokens);
    csa_check_cache(c, a->cache, CSA_NEED_KV, &one, &to->nested.cache);
    int64_t most = columns.extent * CSA_REGION;
    check_numbers(c, "tokens * (columns * 8)", rows.extent, most);
    if (c->status == CSA_OK && room.extent < rows.extent * most)
        csa_refuse(c, CSA_ERROR_ARGUMENT, "key has room for %lld tokens, expected at least %lld * %lld * 8",
                   (long long)room.extent, (long long)rows.extent, (long long)columns.extent);
    a->tokens = &to->nested.tokens;
    a->cache = &to->nested.cache;
}

csa_status csa_compat_gather(const csa_context *context, const csa_compat_gather_args *args)
{
    gather_call call = {0};
    csa_checker c = csa_begin(context, "csa_compat_gather");
    check_gather(&c, args, &call);
    csa_fetched ids;
    if (csa_checking(&ids, &c, context, call.args.stream)) {
        csa_fetch_tokens(&ids, &call.nested.tokens);
        csa_fetch(&ids, &call.args.selected);
        csa_check_compat_gather_ids(&c, &call.args);
        csa_end_fetch(&ids);
    }
    return c.status == CSA_OK ? context->stages->compat->gather(context, &call.args) : c.status;
}

csa_status csa_compat_attend_ragged(const csa_context *context, const csa_compat_attend_ragged_args *args)
{
    csa_compat_attend_ragged_args a;
    csa_dim rows = CSA_DIM("rows"), tokens = CSA_DIM("tokens");
    csa_checker c = csa_begin(context, "csa_compat_attend_ragged");
    csa_take(&c, &a, args, sizeof a, "csa_compat_attend_ragged_args");
    check_rows_of_heads(&c, &a.query, &a.out, &a.lse, &rows);
    csa_dim ends = CSA_KNOWN_DIM("rows + 1", rows.extent + 1, "query");
    csa_check_tensor(&c, "cu_k", &a.cu_k, 0, CSA_I32, 1, &ends);
    check_key_value(&c, &a.key, &a.value, 0, &tokens);
    csa_fetched ids;
    if (csa_checking(&ids, &c, context, a.stream)) {
        csa_fetch(&ids, &a.cu_k);
        csa_check_compat_ragged_ids(&c, &a);
        csa_end_fetch(&ids);
    }
    return c.status == CSA_OK ? context->stages->compat->attend_ragged(context, &a) : c.status;
}

/* ---- Stage -------------------------------------------------------------------------------------- */

typedef struct stage_call {
    csa_compat_stage_args args;
    csa_nested nested;
} stage_call;

static void check_stage(csa_checker *c, const csa_compat_stage_args *from, stage_call *to)
{
    csa_compat_stage_args *a = &to->args;
    csa_dim tokens = CSA_DIM("tokens"), room = CSA_DIM("room"), one = one_group(), single = CSA_DIM("count");
    csa_dim row = CSA_FIXED_DIM("cache row", CSA_KV_SIZE, "384, a key and a value of 192");
    csa_take(c, a, from, sizeof *a, "csa_compat_stage_args");
    csa_check_tokens(c, a->tokens, CSA_NEED_TABLE, &tokens, &to->nested.tokens);
    csa_check_cache(c, a->cache, CSA_NEED_KV, &one, &to->nested.cache);
    const csa_tensor *table = &to->nested.tokens.block_table, *kv = &to->nested.cache.kv;
    if (c->status == CSA_OK && !csa_present(&to->nested.tokens.seq_lens))
        csa_refuse(c, CSA_ERROR_ARGUMENT, "tokens.seq_lens is absent");
    csa_dim requests = CSA_KNOWN_DIM("requests", table->shape[0], "tokens.block_table");
    csa_dim columns = CSA_KNOWN_DIM("columns", table->shape[1], "tokens.block_table");
    csa_dim block_size = CSA_KNOWN_DIM("block size", kv->shape[2], "cache.kv");
    single.extent = 1;
    csa_check_tensor(c, "staged", &a->staged, CSA_ARG_OUT, CSA_BF16, 4, &room, &one, &block_size, &row);
    csa_check_tensor(c, "staged_pages", &a->staged_pages, CSA_ARG_OUT | CSA_ARG_OPTIONAL, CSA_I32, 1, &room);
    csa_check_tensor(c, "staged_table", &a->staged_table, CSA_ARG_OUT, CSA_I32, 2, &requests, &columns);
    csa_check_tensor(c, "staged_count", &a->staged_count, CSA_ARG_OUT | CSA_ARG_OPTIONAL, CSA_I32, 1, &single);
    check_numbers(c, "requests * columns", requests.extent, columns.extent);
    if (c->status == CSA_OK && !csa_compat_stage_fits(room.extent, block_size.extent))
        csa_refuse(c, CSA_ERROR_UNSUPPORTED, "staged: %lld blocks of %lld tokens take more than %d MiB",
                   (long long)room.extent, (long long)block_size.extent, CSA_COMPAT_STAGE_LIMIT >> 20);
    a->tokens = &to->nested.tokens;
    a->cache = &to->nested.cache;
}

csa_status csa_compat_stage(const csa_context *context, const csa_compat_stage_args *args)
{
    stage_call call = {0};
    csa_checker c = csa_begin(context, "csa_compat_stage");
    check_stage(&c, args, &call);
    csa_fetched ids;
    if (csa_checking(&ids, &c, context, call.args.stream)) {
        csa_fetch_tokens(&ids, &call.nested.tokens);
        csa_check_compat_stage_ids(&c, &call.args);
        csa_end_fetch(&ids);
    }
    return c.status == CSA_OK ? context->stages->compat->stage(context, &call.args) : c.status;
}
