/*
 * csa replay: the reference's formats.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "replay_compat.h"

#include <csa/csa_compat.h>
#include <math.h>
#include <string.h>

enum { PAGE = CSA_COMPAT_PAGE_BYTES, WORKERS_MOST = 1 << 20 };

static const int64_t regions_most = (int64_t)1 << 40; /* more than any memory holds */

/* [pages, 8320] with the nominal shape of a packed page, and back. */
static csa_tensor nominal_pages(csa_tensor t)
{
    return t.ndim > 0 ? csa_tensor_4d(t.data, CSA_U8, t.shape[0], 32, 1, 260) : t;
}

static csa_tensor plain_pages(csa_tensor t)
{
    return t.ndim > 0 ? csa_tensor_2d(t.data, CSA_U8, t.shape[0], PAGE) : t;
}

/* ---- Packing ------------------------------------------------------------------------------------ */

static int64_t packed_pages(replay_case *c, int64_t *regions)
{
    *regions = replay_integer(c, "regions", 0, regions_most);
    return csa_compat_packed_pages(*regions);
}

static csa_compat_pack_args pack_args(replay_case *c, const csa_tokens *tokens, const csa_cache *cache,
                                      int64_t regions)
{
    csa_compat_pack_args a = {.size = sizeof a, .tokens = tokens, .cache = cache, .regions = regions};
    int64_t pages = tokens->block_table.shape[0] * csa_compat_packed_pages(regions);
    a.packed = replay_output(c, CSA_U8, REPLAY_SHAPE(pages, PAGE));
    return a;
}

static csa_tensor load_mean(replay_case *c)
{
    return replay_input(c, "mean", CSA_E4M3, REPLAY_SHAPE(REPLAY_ANY, REPLAY_ANY, CSA_SUMMARY_SIZE));
}

void replay_pack(replay_case *c)
{
    int64_t regions, pages = packed_pages(c, &regions);
    if (replay_integer(c, "pages", 0, INT64_MAX) != pages)
        replay_fault(c, TOOL_BAD_FILE, "pages", "not the %lld of so many regions", (long long)pages);
    csa_tokens tokens = {.size = sizeof tokens};
    csa_cache cache = {.size = sizeof cache, .summaries = load_mean(c)};
    tokens.block_table = replay_input(c, "table", CSA_I32, REPLAY_SHAPE(REPLAY_ANY, REPLAY_ANY));
    csa_compat_pack_args a = pack_args(c, &tokens, &cache, regions);
    REPLAY_CALL(c, csa_compat_pack(c->context, &a));
    replay_check(c, "packed", nominal_pages(a.packed), REPLAY_EXACT);
}

/* Per request, the bytes of its live pages. */
static int64_t *live_bytes(replay_case *c, const replay_scoring *s, int64_t requests, int64_t pages)
{
    int64_t *bytes = replay_memory(c, requests, sizeof *bytes), query_len = s->tokens.query_len;
    for (int64_t r = 0; replay_ok(c) && r < requests; r++) {
        int64_t live = 0;
        for (int64_t i = r * query_len; i < (r + 1) * query_len; i++) {
            int64_t needed = csa_compat_packed_pages(s->places[i].position / CSA_REGION + 1);
            live = needed > live ? needed : live;
        }
        bytes[r] = (live < pages ? live : pages) * PAGE;
    }
    return bytes;
}

void replay_pack_decode(replay_case *c)
{
    int64_t regions, pages = packed_pages(c, &regions), workers = replay_integer(c, "num_sms", 1, WORKERS_MOST);
    replay_scoring s = {.cache = {.size = sizeof s.cache}};
    replay_load_tokens(c, &s, 1);
    s.cache.summaries = load_mean(c);
    s.rows = replay_row_outputs(c, s.count);
    int64_t requests = s.tokens.block_table.shape[0];
    csa_compat_pack_args a = pack_args(c, &s.tokens, &s.cache, regions);
    a.live_only = replay_flag(c, "live_only", false);
    a.rows_out = &s.rows;
    a.page_table = replay_output(c, CSA_I32, REPLAY_SHAPE(s.count, pages));
    a.schedule = replay_output(c, CSA_I32, REPLAY_SHAPE(workers + 1, 2));
    REPLAY_CALL(c, csa_compat_pack(c->context, &a));
    replay_check_rows(c, &s, true);
    replay_tolerance live = {.limits = a.live_only ? live_bytes(c, &s, requests, pages) : NULL};
    replay_check(c, "packed", csa_tensor_3d(a.packed.data, CSA_U8, requests, pages, PAGE), live);
    replay_check(c, "block_table", a.page_table, REPLAY_EXACT);
    replay_check(c, "schedule", a.schedule, REPLAY_EXACT);
}

/* ---- Paged scores ------------------------------------------------------------------------------- */

typedef struct paged_judge {
    const csa_compat_score_args *args;
    judge_query loaded;
    int64_t loaded_row;
} paged_judge;

/* The page that holds a region of an entry, NULL if none does. */
static const uint8_t *find_page(const csa_compat_score_args *a, int64_t entry, int64_t region)
{
    int64_t columns = a->page_table.shape[1], column = region / CSA_COMPAT_PAGE_REGIONS;
    int64_t page = column < columns ? ((const int32_t *)a->page_table.data)[entry * columns + column] : -1;
    return page >= 0 && page < a->packed.shape[0] ? (const uint8_t *)a->packed.data + page * PAGE : NULL;
}

static void score_paged_row(void *data, int64_t row, int64_t region, float *score, double *bound)
{
    paged_judge *judge = data;
    const csa_compat_score_args *a = judge->args;
    int64_t entry = row / a->query.shape[1], heads = a->query.shape[2];
    if (row != judge->loaded_row)
        judge_load_query(&judge->loaded, a->query.dtype, a->query.data, a->weights.data, row, heads,
                         (int32_t)heads);
    judge->loaded_row = row;
    const uint8_t *page = find_page(a, entry, region);
    int64_t place = region % CSA_COMPAT_PAGE_REGIONS;
    float scale = 1;
    judge_score(&judge->loaded, page != NULL ? page + place * CSA_SUMMARY_SIZE : NULL, score, bound);
    if (page != NULL)
        memcpy(&scale,
               page + (int64_t)CSA_COMPAT_PAGE_REGIONS * CSA_SUMMARY_SIZE + place * (int64_t)sizeof scale,
               sizeof scale);
    bool past = region >= ((const int32_t *)a->lengths.data)[entry];
    *score = past ? -INFINITY : *score * scale;
    *bound *= fabs((double)scale);
}

/* For each of `rows` rows: everything. */
static int64_t *no_limits(replay_case *c, int64_t rows, int64_t regions)
{
    int64_t *limits = replay_memory(c, rows, sizeof *limits);
    for (int64_t i = 0; replay_ok(c) && i < rows; i++)
        limits[i] = regions;
    return limits;
}

/* Rows whose query is too large for the reference's conversion to e4m3 (section 8). */
static uint8_t *overflowing_rows(replay_case *c, csa_tensor query)
{
    int64_t rows = query.shape[0] * query.shape[1], values = query.shape[2] * CSA_SUMMARY_SIZE;
    uint8_t *wrong = replay_memory(c, rows, 1);
    for (int64_t row = 0; replay_ok(c) && row < rows; row++) {
        wrong[row] = 0;
        for (int64_t i = 0; query.dtype != CSA_E4M3 && i < values; i++)
            wrong[row] |= fabs(judge_value(query.dtype, query.data, row * values + i)) > 448;
    }
    return wrong;
}

void replay_score_paged(replay_case *c)
{
    const reader_tensor *given = capture_input(c->what, "query");
    csa_dtype dtype = given != NULL ? given->view.dtype : CSA_E4M3;
    if (dtype != CSA_BF16 && dtype != CSA_F32)
        dtype = CSA_E4M3;
    int64_t next_n = replay_integer(c, "next_n", 1, REPLAY_MOST);
    int64_t regions = replay_integer(c, "regions", 0, regions_most);
    csa_compat_score_args a = {.size = sizeof a};
    a.query = replay_input(c, "query", dtype, REPLAY_SHAPE(REPLAY_ANY, next_n, REPLAY_ANY, CSA_SUMMARY_SIZE));
    int64_t batch = a.query.shape[0], heads = a.query.shape[2];
    csa_tensor weights = replay_input(c, "weights", CSA_F32, REPLAY_SHAPE(batch * next_n, heads));
    a.weights = csa_tensor_3d(weights.data, CSA_F32, batch, next_n, heads);
    a.packed = plain_pages(replay_input(c, "packed", CSA_U8, REPLAY_SHAPE(REPLAY_ANY, 32, 1, 260)));
    a.page_table = replay_input(c, "block_table", CSA_I32, REPLAY_SHAPE(batch, REPLAY_ANY));
    a.lengths = replay_input(c, "lengths", CSA_I32, REPLAY_SHAPE(batch));
    a.scores = replay_output(c, CSA_F32, REPLAY_SHAPE(batch * next_n, regions));
    REPLAY_CALL(c, csa_compat_score(c->context, &a));
    paged_judge judge = {.args = &a, .loaded_row = -1};
    replay_scorer scorer = {score_paged_row, &judge, no_limits(c, batch * next_n, regions),
                            overflowing_rows(c, a.query)};
    replay_check_scores(c, "scores", a.scores, scorer);
}

/* ---- Scores of a prefill step ------------------------------------------------------------------- */

void replay_score_packed(replay_case *c, replay_packed *packed, replay_scoring *s, int64_t topk)
{
    int64_t heads = s->query.shape[2], pages = csa_compat_packed_pages(s->regions);
    csa_compat_pack_args pack = pack_args(c, &s->tokens, &s->cache, s->regions);
    REPLAY_CALL(c, csa_compat_pack(c->context, &pack));
    csa_rows rows = replay_row_outputs(c, s->count);
    csa_compat_metadata_args m = {.size = sizeof m, .tokens = &s->tokens, .regions = s->regions};
    m.topk = (int32_t)topk;
    m.rows_out = &rows;
    m.page_table = replay_output(c, CSA_I32, REPLAY_SHAPE(s->count, pages));
    REPLAY_CALL(c, csa_compat_prefill_metadata(c->context, &m));
    csa_compat_score_args a = {.size = sizeof a, .packed = pack.packed, .page_table = m.page_table};
    a.query = csa_tensor_4d(s->query.data, CSA_E4M3, s->count, 1, heads, CSA_SUMMARY_SIZE);
    a.weights = csa_tensor_3d(s->weights.data, CSA_F32, s->count, 1, heads);
    a.lengths = rows.lengths;
    a.scores = replay_output(c, CSA_F32, REPLAY_SHAPE(s->count, s->regions));
    if (packed->paired) {
        REPLAY_CALL(c, csa_compat_pair(&a));
        a.query.shape[2] = a.weights.shape[2] = heads < 4 ? heads : 4;
    }
    REPLAY_CALL(c, csa_compat_score(c->context, &a));
    packed->scores = a.scores;
    packed->scoring = s;
    packed->limits = no_limits(c, s->count, s->regions);
}

static void score_packed_row(void *data, int64_t row, int64_t region, float *score, double *bound)
{
    replay_packed *packed = data;
    replay_scoring *s = packed->scoring;
    int64_t stored = s->query.shape[2], heads = packed->paired && stored > 4 ? 4 : stored;
    const judge_row *place = &s->places[packed->paired ? row | 1 : row];
    if (row != s->loaded_row)
        judge_load_query(&s->loaded, CSA_E4M3, s->query.data, s->weights.data, row, stored, (int32_t)heads);
    s->loaded_row = row;
    judge_score(&s->loaded, judge_summary(&s->judge, place->request, region), score, bound);
    if (region > place->position / CSA_REGION)
        *score = -INFINITY;
}

replay_scorer replay_packed_scorer(replay_packed *packed)
{
    if (packed->scoring != NULL)
        packed->scoring->loaded_row = -1;
    return (replay_scorer){score_packed_row, packed, packed->limits, NULL};
}

/* ---- Prefill metadata --------------------------------------------------------------------------- */

/* As many requests as the owners name, as far as the numbers of their pages fit. */
static int64_t count_requests(replay_case *c, csa_tensor owners, int64_t pages)
{
    int64_t most = INT32_MAX / (pages > 0 ? pages : 1), requests = 0;
    const int64_t *values = owners.data;
    for (int64_t i = 0; replay_ok(c) && i < owners.shape[0]; i++)
        if (values[i] >= requests)
            requests = values[i] < most ? values[i] + 1 : most;
    return requests;
}

/* The rows of the case's chunk, as the scalars say. */
static void cut_chunk(replay_case *c, csa_tokens *tokens, int64_t regions)
{
    int64_t count = tokens->positions.shape[0], size = csa_compat_chunk_rows(regions);
    int64_t chunks = count > 0 ? (count + size - 1) / size : 1;
    if (replay_integer(c, "chunk_size", 1, INT64_MAX) != size)
        replay_fault(c, TOOL_BAD_FILE, "chunk_size", "not the %lld of so many regions", (long long)size);
    if (replay_integer(c, "chunks", 0, INT64_MAX) != chunks)
        replay_fault(c, TOOL_BAD_FILE, "chunks", "not the %lld of so many rows", (long long)chunks);
    int64_t first = replay_integer(c, "chunk", 0, chunks - 1) * size;
    int64_t rows = count - first < size ? count - first : size;
    tokens->positions = replay_rows(tokens->positions, first, rows);
    tokens->owners = replay_rows(tokens->owners, first, rows);
}

void replay_prefill_metadata(replay_case *c)
{
    int64_t regions, pages = packed_pages(c, &regions), topk = replay_integer(c, "topk", 1, INT32_MAX);
    int64_t workers = replay_integer(c, "num_sms", 1, WORKERS_MOST);
    csa_tokens tokens = {.size = sizeof tokens};
    tokens.positions = replay_input(c, "positions", CSA_I64, REPLAY_SHAPE(REPLAY_ANY));
    tokens.owners = replay_input(c, "owners", CSA_I64, REPLAY_SHAPE(tokens.positions.shape[0]));
    tokens.block_table = csa_tensor_2d(NULL, CSA_I32, count_requests(c, tokens.owners, pages), 0);
    cut_chunk(c, &tokens, regions);
    int64_t rows = tokens.positions.shape[0];
    bool all = regions <= topk;
    csa_rows out = replay_row_outputs(c, rows);
    csa_compat_metadata_args a = {.size = sizeof a, .tokens = &tokens, .regions = regions, .rows_out = &out};
    a.topk = (int32_t)topk;
    a.page_table = replay_output(c, CSA_I32, REPLAY_SHAPE(rows, all ? 0 : pages));
    if (all)
        a.selected = replay_output(c, CSA_I64, REPLAY_SHAPE(rows, regions + 1));
    else
        a.schedule = replay_output(c, CSA_I32, REPLAY_SHAPE(workers + 1, 2));
    REPLAY_CALL(c, csa_compat_prefill_metadata(c->context, &a));
    replay_check(c, "current", out.current, REPLAY_EXACT);
    replay_check(c, "lengths", out.lengths, REPLAY_EXACT);
    replay_check(c, "topk_lengths", out.topk_lengths, REPLAY_EXACT);
    replay_check(c, "block_table", a.page_table, REPLAY_EXACT);
    replay_check(c, all ? "selected" : "schedule", all ? a.selected : a.schedule, REPLAY_EXACT);
}
