/*
 * Packed summaries, schedules and paged scores (csa_compat.h, section 9) against straightforward recomputation:
 * random draws, the corners that broke others' schedules, bad ids, refused sizes.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "compat.h"

enum { PAGE_SCALES = 32 * 256 };

static csa_rows make_rows(arena *memory, int64_t count)
{
    csa_rows rows = {.size = sizeof rows};
    rows.active = arena_tensor(memory, "active", NULL, CSA_BOOL, 1, count);
    rows.positions = arena_tensor(memory, "positions", NULL, CSA_I64, 1, count);
    rows.current = arena_tensor(memory, "current", NULL, CSA_I64, 1, count);
    rows.lengths = arena_tensor(memory, "lengths", NULL, CSA_I32, 1, count);
    rows.topk_lengths = arena_tensor(memory, "topk_lengths", NULL, CSA_I32, 1, count);
    return rows;
}

static void expect_rows(const world *w, const csa_rows *rows)
{
    for (int64_t token = 0; token < w->tokens; token++) {
        int64_t position = position_of(w, token), seen = position < 0 ? 0 : position;
        CHECK(at(&rows->active, token) == (position >= 0));
        CHECK(at(&rows->positions, token) == seen);
        CHECK(at(&rows->current, token) == seen / 8);
        CHECK(at(&rows->lengths, token) == seen / 8 + 1);
        CHECK(at(&rows->topk_lengths, token) == seen / 8);
    }
}

/* ---- Sizes -------------------------------------------------------------------------------------- */

static void test_sizes(void **state)
{
    (void)state;
    for (int64_t n = 1; n < 300000; n += n < 5000 ? 1 : 997) {
        double width = ceil((double)n / 256) * 256;
        double rows = exp2(floor(log2(exp2(27) / (4 * width))));
        CHECKF(csa_compat_chunk_rows(n) == (int64_t)fmin(fmax(rows, 256), 4096), "regions %lld", (long long)n);
        CHECKF(csa_compat_packed_pages(n) == 4 * (int64_t)ceil((double)n / 128), "regions %lld", (long long)n);
    }
    CHECK(csa_compat_chunk_rows(0) == 4096 && csa_compat_chunk_rows(INT64_MIN) == 4096);
    CHECK(csa_compat_chunk_rows(1LL << 40) == 256 && csa_compat_chunk_rows(INT64_MAX) == 256);
    CHECK(csa_compat_packed_pages(0) == 0 && csa_compat_packed_pages(INT64_MIN) == 0);
    CHECK(csa_compat_packed_pages(1LL << 40) == 1LL << 35);
    CHECK(csa_compat_packed_pages(INT64_MAX) == 1LL << 58);
    for (int64_t size = 16; size <= 128; size *= 2) {
        int64_t most = (1LL << 29) / (size * 768);
        CHECK(csa_compat_stage_fits(most, size) && !csa_compat_stage_fits(most + 1, size));
        CHECK(!csa_compat_stage_fits(INT64_MAX, size));
    }
}

/* ---- Pack --------------------------------------------------------------------------------------- */

static const uint8_t *summary_of(const world *w, int64_t request, int64_t region)
{
    int64_t per_block = w->shape.block_size / 8;
    int64_t block = block_of(&w->step.block_table, request, region / per_block, w->blocks);
    return block < 0 ? NULL : tensor_at(&w->cache.summaries, block, region % per_block, 0, 0);
}

static void expect_page(const world *w, const uint8_t *page, int64_t request, int64_t first, int64_t regions)
{
    static const uint8_t zeros[256];
    static const uint8_t one[4] = {0, 0, 0x80, 0x3F}; /* 1.0F */
    for (int64_t i = 0; i < 32; i++) {
        const uint8_t *summary = first + i < regions ? summary_of(w, request, first + i) : NULL;
        CHECKF(!memcmp(page + 256 * i, summary ? summary : zeros, 256), "region %lld", (long long)(first + i));
        CHECK(!memcmp(page + PAGE_SCALES + 4 * i, one, 4));
    }
}

/* Pages of a request that a decode step needs. */
static int64_t live_pages(const world *w, int64_t request)
{
    int64_t longest = 1, n = w->shape.query_len;
    for (int64_t token = request * n; token < (request + 1) * n; token++)
        if (position_of(w, token) / 8 + 1 > longest)
            longest = position_of(w, token) / 8 + 1;
    return 4 * ((longest + 127) / 128);
}

static void expect_packed(const world *w, const csa_compat_pack_args *a, int64_t pages)
{
    static uint8_t untouched[8320];
    memset(untouched, 0xFF, sizeof untouched);
    for (int64_t page = 0; page < a->packed.shape[0]; page++) {
        const uint8_t *bytes = tensor_at(&a->packed, page, 0, 0, 0);
        if (a->live_only && page % pages >= live_pages(w, page / pages))
            CHECKF(!memcmp(bytes, untouched, sizeof untouched), "page %lld", (long long)page);
        else
            expect_page(w, bytes, page / pages, page % pages * 32, a->regions);
    }
}

static void test_pack(void **state)
{
    (void)state;
    for (int draw = 0; draw < test_draws(DRAWS); draw++) {
        test_set_draw(draw);
        world w;
        world_make(&w, random_shape((uint64_t)draw), (uint64_t)draw);
        spoil_table(&w);
        csa_compat_pack_args a = {.size = sizeof a, .tokens = &w.step, .cache = &w.cache};
        a.regions = random_between(&w.random, 0, 3) ? w.regions : random_between(&w.random, 0, 400);
        int64_t pages = csa_compat_packed_pages(a.regions);
        a.packed = arena_tensor(&w.memory, "packed", w.shape.strided ? &w.random : NULL, CSA_U8, 2,
                                w.shape.requests * pages, (int64_t)8320);
        csa_rows rows = make_rows(&w.memory, w.tokens);
        bool decode = random_chance(&w.random, 70);
        if (decode) {
            a.live_only = random_chance(&w.random, 50);
            a.rows_out = &rows;
            a.page_table = arena_tensor(&w.memory, "page_table", &w.random, CSA_I32, 2, w.tokens, pages);
        }
        CHECK_OK(csa_compat_pack(context, &a));
        expect_packed(&w, &a, pages);
        if (decode)
            expect_rows(&w, &rows);
        for (int64_t i = 0; decode && i < w.tokens * pages; i++)
            CHECK(at2(&a.page_table, i / pages, i % pages) == owner_of(&w, i / pages) * pages + i % pages);
        world_end(&w);
    }
}

/* ---- Schedule ----------------------------------------------------------------------------------- */

/* Walks to a segment one row after the other. */
static void expect_start(const int32_t *lengths, int64_t rows, int64_t segment, const int32_t *got)
{
    int64_t row = 0;
    for (; row < rows; row++) {
        int64_t here = lengths[row] > 0 ? ((int64_t)lengths[row] + 255) / 256 : 0;
        if (segment < here)
            break;
        segment -= here;
    }
    CHECKF(got[0] == row && got[1] == (row < rows ? segment : 0), "(%d, %d), expected (%lld, %lld)", got[0],
           got[1], (long long)row, (long long)segment);
}

/* Arrays end where their allocations end. */
static void check_schedule(const int32_t *lengths, int64_t rows, int64_t workers)
{
    int32_t *copy = malloc(rows ? (size_t)rows * 4 : 1), *schedule = malloc((size_t)(workers + 1) * 8);
    assert_true(copy && schedule);
    memcpy(copy, lengths, (size_t)rows * 4);
    csa_compat_schedule_args a = {.size = sizeof a};
    a.lengths = csa_tensor_1d(copy, CSA_I32, rows);
    a.schedule = csa_tensor_2d(schedule, CSA_I32, workers + 1, 2);
    CHECK_OK(csa_compat_schedule(context, &a));
    int64_t total = 0;
    for (int64_t row = 0; row < rows; row++)
        total += lengths[row] > 0 ? ((int64_t)lengths[row] + 255) / 256 : 0;
    for (int64_t i = 0; i <= workers; i += workers > 8 && rows > 64 ? 7 : 1) {
        int64_t extra = i < total % workers ? i : total % workers;
        expect_start(copy, rows, i * (total / workers) + extra, schedule + 2 * i);
    }
    free(copy);
    free(schedule);
}

static void test_schedule(void **state)
{
    (void)state;
    static int32_t lengths[8192];
    for (int draw = 0; draw < test_draws(200); draw++) {
        test_set_draw(draw);
        test_random r = random_of((uint64_t)draw, 2);
        int64_t rows = random_between(&r, 0, 40), workers = RANDOM_OF(&r, 1, 2, 7, 132);
        for (int64_t i = 0; i < rows; i++)
            lengths[i] = random_chance(&r, 30) ? RANDOM_OF(&r, INT32_MIN, -1, 0, 1, 256, 257, INT32_MAX)
                                               : (int32_t)random_between(&r, 0, 3000);
        check_schedule(lengths, rows, workers);
    }
    for (int32_t length = 0; length <= 1; length++)
        for (int64_t rows = 1; rows <= 8192; rows = rows < 8 ? rows + 1 : rows * 2) {
            for (int64_t i = 0; i < rows; i++)
                lengths[i] = length;
            check_schedule(lengths, rows, 1);
            check_schedule(lengths, rows, 132);
        }
}

/* ---- Paged scores ------------------------------------------------------------------------------- */

typedef struct score_case {
    arena memory;
    csa_compat_score_args args;
} score_case;

static void make_score(score_case *s, test_random *r, int64_t next_n)
{
    int64_t batch = random_between(r, 0, 5), heads = RANDOM_OF(r, 1, 3, 4, 5, 8, 16);
    int64_t pages = random_between(r, 0, 3), packed = random_between(r, 1, 6),
            regions = random_between(r, 0, 130);
    csa_dtype dtype = (csa_dtype[]){CSA_E4M3, CSA_U8, CSA_BF16, CSA_F32}[random_between(r, 0, 3)];
    csa_compat_score_args *a = &s->args;
    *s = (score_case){.args.size = sizeof *a};
    a->query = arena_tensor(&s->memory, "query", r, dtype, 4, batch, next_n, heads, (int64_t)256);
    a->weights = arena_tensor(&s->memory, "weights", r, CSA_F32, 3, batch, next_n, heads);
    a->packed = arena_tensor(&s->memory, "packed", r, CSA_U8, 2, packed, (int64_t)8320);
    a->page_table = arena_tensor(&s->memory, "page_table", r, CSA_I32, 2, batch, pages);
    a->lengths = arena_tensor(&s->memory, "lengths", r, CSA_I32, 1, batch);
    a->scores = arena_tensor(&s->memory, "scores", r, CSA_F32, 2, batch * next_n, regions);
    csa_tensor codes = a->query;
    codes.dtype = dtype == CSA_U8 ? CSA_E4M3 : dtype;
    tensor_randomise(&codes, r, random_chance(r, 20) ? 300 : 1);
    tensor_randomise(&a->weights, r, 1);
    for (int64_t i = 0; i < packed * 8192; i++)
        *(uint8_t *)tensor_at(&a->packed, i / 8192, i % 8192, 0, 0) = e4m3_code((float)random_normal(r));
    for (int64_t i = 0; i < packed * 32; i++) {
        float scale = random_chance(r, 50) ? 1 : (float)random_normal(r);
        memcpy(tensor_at(&a->packed, i / 32, PAGE_SCALES + i % 32 * 4, 0, 0), &scale, 4);
    }
    for (int64_t i = 0; i < batch; i++) {
        tensor_put(&a->lengths, RANDOM_OF(r, -3, 0, 1, 31, 33, 64, 1000), i, 0, 0, 0);
        for (int64_t j = 0; j < pages; j++)
            tensor_put(&a->page_table, (double)random_between(r, -1, packed), i, j, 0, 0);
    }
}

static float expected_score(const csa_compat_score_args *a, int64_t row, int64_t region)
{
    int64_t next_n = a->query.shape[1], i = row / next_n, n = row % next_n, heads = a->query.shape[2];
    if (region >= at(&a->lengths, i))
        return -INFINITY;
    int64_t page = block_of(&a->page_table, i, region / 32, a->packed.shape[0]);
    if (page < 0)
        return 0;
    const uint8_t *bytes = tensor_at(&a->packed, page, 0, 0, 0);
    float chains[4] = {0}, scale;
    csa_tensor query = a->query;
    query.dtype = query.dtype == CSA_U8 ? CSA_E4M3 : query.dtype;
    for (int64_t head = 0; head < heads; head++) {
        double dot = 0;
        for (int64_t j = 0; j < 256; j++)
            dot += (double)e4m3_value(e4m3_code((float)tensor_value(&query, i, n, head, j))) *
                   (double)e4m3_value(bytes[region % 32 * 256 + j]);
        float *chain = &chains[head % 4];
        *chain = fmaf((float)tensor_value(&a->weights, i, n, head, 0), dot > 0 ? (float)dot : 0, *chain);
    }
    memcpy(&scale, bytes + PAGE_SCALES + region % 32 * 4, 4);
    return (((chains[0] + chains[1]) + chains[2]) + chains[3]) * scale;
}

/* The bound of section 4 is far above what these draws can differ by in any order. */
static void expect_scores(const csa_compat_score_args *a)
{
    for (int64_t row = 0; row < a->scores.shape[0]; row++)
        for (int64_t region = 0; region < a->scores.shape[1]; region++) {
            float got = *(float *)tensor_at(&a->scores, row, region, 0, 0),
                  right = expected_score(a, row, region);
            CHECKF(isinf(right) ? got == right : fabsf(got - right) <= 1e-4F * (1 + fabsf(right)),
                   "row %lld, region %lld: %g, expected %g", (long long)row, (long long)region, (double)got,
                   (double)right);
        }
}

static void test_score(void **state)
{
    (void)state;
    for (int draw = 0; draw < test_draws(DRAWS); draw++) {
        test_set_draw(draw);
        test_random r = random_of((uint64_t)draw, 3);
        score_case s;
        make_score(&s, &r, random_between(&r, 1, 2));
        CHECK_OK(csa_compat_score(context, &s.args));
        expect_scores(&s.args);
        arena_check(&s.memory);
        arena_free(&s.memory);
    }
}

/* The views over the same memory; then their scores. */
static void test_pair(void **state)
{
    (void)state;
    for (int draw = 0; draw < test_draws(DRAWS); draw++) {
        test_set_draw(draw);
        test_random r = random_of((uint64_t)draw, 4);
        score_case s;
        make_score(&s, &r, 1);
        csa_compat_score_args single = s.args, *pair = &s.args;
        csa_status status = csa_compat_pair(pair);
        if (single.query.shape[0] % 2) {
            expect_status(status, CSA_ERROR_ARGUMENT, "even");
            CHECK(!memcmp(&single, pair, sizeof single));
        } else {
            CHECK_OK(status);
            for (int64_t i = 0; i < single.query.shape[0]; i++) {
                CHECK(tensor_at(&pair->query, i / 2, i % 2, 0, 0) == tensor_at(&single.query, i, 0, 0, 0));
                CHECK(tensor_at(&pair->weights, i / 2, i % 2, 0, 0) == tensor_at(&single.weights, i, 0, 0, 0));
                if (single.page_table.shape[1])
                    CHECK(tensor_at(&pair->page_table, i / 2, 0, 0, 0) ==
                          tensor_at(&single.page_table, i | 1, 0, 0, 0));
                CHECK(tensor_at(&pair->lengths, i / 2, 0, 0, 0) == tensor_at(&single.lengths, i | 1, 0, 0, 0));
            }
            CHECK_OK(csa_compat_score(context, pair));
            expect_scores(pair);
            expect_status(csa_compat_pair(pair), CSA_ERROR_ARGUMENT, "next_n");
        }
        arena_check(&s.memory);
        arena_free(&s.memory);
    }
}

/* From the same summaries, packed scores are those of csa_score. */
static void test_packed_like_direct(void **state)
{
    (void)state;
    for (int draw = 0; draw < test_draws(40); draw++) {
        test_set_draw(draw);
        world w;
        world_shape shape = random_shape((uint64_t)draw);
        shape.groups = 1;
        world_make(&w, shape, (uint64_t)draw);
        csa_score_args direct = world_score(&w);
        CHECK_OK(csa_score(context, &direct));
        int64_t pages = csa_compat_packed_pages(w.regions);
        csa_compat_pack_args pack = {.size = sizeof pack, .tokens = &w.step, .cache = &w.cache};
        pack.regions = w.regions;
        pack.live_only = true;
        pack.packed =
            arena_tensor(&w.memory, "packed", NULL, CSA_U8, 2, w.shape.requests * pages, (int64_t)8320);
        pack.page_table = arena_tensor(&w.memory, "page_table", NULL, CSA_I32, 2, w.tokens, pages);
        CHECK_OK(csa_compat_pack(context, &pack));
        csa_compat_score_args score = {
            .size = sizeof score, .query = w.index_query, .weights = w.index_weights};
        score.packed = pack.packed;
        score.page_table = pack.page_table;
        score.lengths = w.rows_out.lengths;
        score.scores = arena_tensor(&w.memory, "paged scores", NULL, CSA_F32, 2, w.tokens, w.regions);
        CHECK_OK(csa_compat_score(context, &score));
        for (int64_t row = 0; row < w.tokens; row++)
            for (int64_t r = 0; r < at(&score.lengths, row); r++)
                CHECK(fabs(tensor_value(&score.scores, row, r, 0, 0) - tensor_value(&w.scores, row, r, 0, 0)) <
                      1e-3);
        world_end(&w);
    }
}

/* ---- Prefill metadata --------------------------------------------------------------------------- */

static void expect_everything(const csa_rows *rows, const csa_tensor *selected)
{
    int64_t columns = selected->shape[1];
    for (int64_t row = 0; row < selected->shape[0]; row++) {
        int64_t current = at(&rows->current, row);
        current = current < columns - 1 ? current : columns - 2;
        for (int64_t j = 0; j < columns; j++) {
            int64_t right = j - (columns - 1) + current;
            CHECK(entry(selected, row, j) == (right < 0 ? -1 : right));
        }
    }
}

static void test_metadata(void **state)
{
    (void)state;
    for (int draw = 0; draw < test_draws(DRAWS); draw++) {
        test_set_draw(draw);
        world w;
        world_make(&w, random_shape((uint64_t)draw), (uint64_t)draw);
        csa_rows rows = make_rows(&w.memory, w.tokens);
        csa_compat_metadata_args a = {.size = sizeof a, .tokens = &w.step, .rows_out = &rows};
        a.regions = w.regions;
        a.topk = (int32_t)random_between(&w.random, 1, 100);
        bool all = a.regions <= a.topk;
        int64_t pages = all ? 0 : csa_compat_packed_pages(a.regions);
        w.step.block_table = csa_tensor_2d(NULL, CSA_I32, w.shape.requests, 0);
        if (random_chance(&w.random, 50)) { /* owners of no request too */
            w.step.owners = arena_tensor(&w.memory, "owners", &w.random, CSA_I64, 1, w.tokens);
            for (int64_t i = 0; i < w.tokens; i++)
                tensor_put(&w.step.owners, (double)random_between(&w.random, -1, w.shape.requests), i, 0, 0, 0);
        }
        a.page_table = arena_tensor(&w.memory, "page_table", &w.random, CSA_I32, 2, w.tokens, pages);
        if (all)
            a.selected = arena_tensor(&w.memory, "all", &w.random, CSA_I64, 2, w.tokens, a.regions + 1);
        CHECK_OK(csa_compat_prefill_metadata(context, &a));
        expect_rows(&w, &rows);
        for (int64_t i = 0; i < w.tokens * pages; i++) {
            int64_t token = i / pages, owner = owner_of(&w, token);
            if (w.step.owners.ndim)
                owner = at(&w.step.owners, token);
            bool known = owner >= 0 && owner < w.shape.requests;
            CHECK(at2(&a.page_table, token, i % pages) == (known ? owner * pages + i % pages : -1));
        }
        if (all)
            expect_everything(&rows, &a.selected);
        world_end(&w);
    }
}

/* ---- Refusals ----------------------------------------------------------------------------------- */

/* Where made-up views point. Nothing is read or written there. */
static _Alignas(16) uint8_t far[16];

/* Scalars and extents that would not fit are refused before anything is touched. */
static void test_refused_sizes(void **state)
{
    (void)state;
    csa_tokens tokens = {.size = sizeof tokens};
    csa_cache cache = {.size = sizeof cache};
    tokens.block_table = csa_tensor_2d(far, CSA_I32, 1 << 20, 4);
    cache.summaries = csa_tensor_3d(far, CSA_E4M3, 4, 2, 256);
    csa_compat_pack_args pack = {.size = sizeof pack, .tokens = &tokens, .cache = &cache};
    pack.packed = csa_tensor_2d(far, CSA_U8, 4, 8320);
    pack.regions = (int64_t)1 << 40;
    expect_status(csa_compat_pack(context, &pack), CSA_ERROR_UNSUPPORTED, "requests * pages");
    pack.regions++;
    expect_status(csa_compat_pack(context, &pack), CSA_ERROR_UNSUPPORTED, "regions");
    pack.regions = -1;
    expect_status(csa_compat_pack(context, &pack), CSA_ERROR_UNSUPPORTED, "regions");
    pack.regions = 128;
    expect_status(csa_compat_pack(context, &pack), CSA_ERROR_ARGUMENT, "packed");

    csa_tokens rows = {.size = sizeof rows, .positions = csa_tensor_1d(far, CSA_I64, 1 << 22)};
    csa_compat_pages_args pages = {.size = sizeof pages, .tokens = &rows, .columns = 1025};
    pages.page_indptr = csa_tensor_1d(far, CSA_I32, (1 << 22) + 1);
    expect_status(csa_compat_pages(context, &pages), CSA_ERROR_UNSUPPORTED, "rows * columns");
    pages.columns = 1026;
    expect_status(csa_compat_pages(context, &pages), CSA_ERROR_UNSUPPORTED, "columns");

    csa_compat_schedule_args schedule = {.size = sizeof schedule, .lengths = csa_tensor_1d(far, CSA_I32, 4)};
    schedule.schedule = csa_tensor_2d(far, CSA_I32, 1, 2);
    expect_status(csa_compat_schedule(context, &schedule), CSA_ERROR_UNSUPPORTED, "workers");
    schedule.lengths = csa_tensor_1d(far, CSA_I32, (int64_t)1 << 31);
    schedule.schedule = csa_tensor_2d(far, CSA_I32, 133, 2);
    expect_status(csa_compat_schedule(context, &schedule), CSA_ERROR_UNSUPPORTED, "rows");
    expect_status(csa_compat_schedule(NULL, &schedule), CSA_ERROR_ARGUMENT, "context");
    expect_status(csa_compat_schedule(context, NULL), CSA_ERROR_ARGUMENT, "csa_compat_schedule_args");
}

/* What applies to "everything is selected" does not apply to ranking, and the other way round. */
static void test_refused_metadata(void **state)
{
    (void)state;
    int64_t positions[2] = {1, 2}, selected[2 * 5];
    int32_t lengths[2], table[8], schedule[4];
    csa_tokens tokens = {.size = sizeof tokens, .block_table = csa_tensor_2d(NULL, CSA_I32, 2, 0)};
    tokens.positions = csa_tensor_1d(positions, CSA_I64, 2);
    csa_rows rows = {.size = sizeof rows, .lengths = csa_tensor_1d(lengths, CSA_I32, 2)};
    csa_compat_metadata_args a = {
        .size = sizeof a, .tokens = &tokens, .regions = 4, .topk = 4, .rows_out = &rows};
    a.selected = csa_tensor_2d(selected, CSA_I64, 2, 5);
    expect_status(csa_compat_prefill_metadata(context, &a), CSA_ERROR_ARGUMENT, "current");
    a.topk = 3;
    expect_status(csa_compat_prefill_metadata(context, &a), CSA_ERROR_ARGUMENT, "selected");
    a.selected.ndim = 0;
    a.page_table = csa_tensor_2d(table, CSA_I32, 2, 4);
    a.schedule = csa_tensor_2d(schedule, CSA_I32, 2, 2);
    CHECK_OK(csa_compat_prefill_metadata(context, &a));
    a.rows_out = NULL;
    expect_status(csa_compat_prefill_metadata(context, &a), CSA_ERROR_ARGUMENT, "lengths");
    a.topk = 4;
    expect_status(csa_compat_prefill_metadata(context, &a), CSA_ERROR_ARGUMENT, "page_table");
    a.topk = 1025;
    expect_status(csa_compat_prefill_metadata(context, &a), CSA_ERROR_UNSUPPORTED, "topk");
}

/* ---- Checking mode ------------------------------------------------------------------------------ */

static void test_checked_scores(void **state)
{
    (void)state;
    test_random r = random_of(0, 6);
    score_case s;
    do {
        make_score(&s, &r, 1);
        if (s.args.query.shape[0] && s.args.page_table.shape[1] && s.args.scores.shape[1])
            break;
        arena_free(&s.memory);
    } while (true);
    for (int64_t i = 0; i < s.args.query.shape[0]; i++) {
        tensor_put(&s.args.lengths, 1, i, 0, 0, 0);
        tensor_put(&s.args.page_table, 0, i, 0, 0, 0);
    }
    CHECK_OK(csa_compat_score(checking, &s.args));
    tensor_put(&s.args.page_table, (double)s.args.packed.shape[0], 0, 0, 0, 0);
    expect_status(csa_compat_score(checking, &s.args), CSA_ERROR_ID, "page_table");
    tensor_put(&s.args.lengths, -1, 0, 0, 0, 0);
    expect_status(csa_compat_score(checking, &s.args), CSA_ERROR_ID, "lengths");
    arena_free(&s.memory);
}

/* ------------------------------------------------------------------------------------------------- */

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_pack),
        cmocka_unit_test(test_schedule),
        cmocka_unit_test(test_score),
        cmocka_unit_test(test_pair),
        cmocka_unit_test(test_packed_like_direct),
        cmocka_unit_test(test_metadata),
        cmocka_unit_test(test_refused_sizes),
        cmocka_unit_test(test_refused_metadata),
        cmocka_unit_test(test_checked_scores),
    };
    return cmocka_run_group_tests(tests, compat_set_up, compat_tear_down);
}
