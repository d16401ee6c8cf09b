/*
 * The reference's formats and plans (csa_compat.h, section 9) against straightforward recomputation: random
 * draws, the corners that broke others' schedules and lists, bad ids, refused sizes. SPDX-License-Identifier:
 * Apache-2.0
 */
#include "support.h"

#include <csa/csa_compat.h>

enum { PAGE_SCALES = 32 * 256, DRAWS = 40 };

static csa_context *context, *checking;

static void expect_status(csa_status got, csa_status expected, const char *words)
{
    CHECKF(got == expected, "status %s, expected %s: %s", csa_status_name(got), csa_status_name(expected),
           test_error());
    CHECKF(!words || strstr(test_error(), words), "no \"%s\" in: %s", words, test_error());
}

/* ---- Straightforward definitions ---------------------------------------------------------------- */

/* The block of a request's column, -1 if the table does not lead to one. */
static int64_t block_of(const csa_tensor *table, int64_t request, int64_t column, int64_t blocks)
{
    if (request < 0 || request >= table->shape[0] || column >= table->shape[1])
        return -1;
    int64_t block = (int64_t)tensor_value(table, request, column, 0, 0);
    return block >= 0 && block < blocks ? block : -1;
}

static int64_t at(const csa_tensor *t, int64_t i)
{
    return (int64_t)tensor_value(t, i, 0, 0, 0);
}

static int32_t at2(const csa_tensor *t, int64_t i, int64_t j)
{
    return *(int32_t *)tensor_at(t, i, j, 0, 0);
}

static int64_t entry(const csa_tensor *list, int64_t i, int64_t j)
{
    return *(int64_t *)tensor_at(list, i, j, 0, 0);
}

/* -1 where the token is inactive. */
static int64_t position_of(const world *w, int64_t token)
{
    return at(&w->step.slots, token) < 0 || at(&w->step.positions, token) < 0 ? -1
                                                                              : at(&w->step.positions, token);
}

static int64_t owner_of(const world *w, int64_t token)
{
    return token / w->shape.query_len;
}

/* One KV group of the world's cache. */
static csa_cache one_group(const world *w, int64_t group)
{
    csa_cache cache = w->cache;
    cache.kv.data = tensor_at(&w->cache.kv, 0, group, 0, 0);
    cache.kv.shape[1] = 1;
    return cache;
}

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

/* Some entries of the block table lead nowhere. */
static void spoil_table(world *w)
{
    csa_tensor *table = &w->step.block_table;
    for (int64_t i = 0; i < table->shape[0]; i++)
        for (int64_t j = 0; j < table->shape[1]; j++)
            if (random_chance(&w->random, 15))
                tensor_put(table, RANDOM_OF(&w->random, -1, INT32_MIN, INT32_MAX, (int32_t)w->blocks), i, j, 0,
                           0);
}

static world_shape random_shape(uint64_t draw)
{
    test_random r = random_of(draw, 1);
    return (world_shape){
        .groups = RANDOM_OF(&r, 1, 2, 4),
        .heads = RANDOM_OF(&r, 1, 8, 8, 16),
        .block_size = RANDOM_OF(&r, 16, 32, 64, 128),
        .requests = (int32_t)random_between(&r, 1, 5),
        .query_len = (int32_t)random_between(&r, 1, 3),
        .kv_dtype = random_chance(&r, 50) ? CSA_E4M3 : CSA_BF16,
        .max_length = RANDOM_OF(&r, 5, 40, 40, 300, 300, 300, 1500),
        .topk = RANDOM_OF(&r, 1, 4, 20),
        .strided = random_chance(&r, 50),
        .inactive = random_chance(&r, 50),
    };
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

/* ---- Lists of a selection ----------------------------------------------------------------------- */

/* Ascending regions up to the current one: all of them good, or with junk in between and before. */
static csa_tensor make_lists(world *w, int64_t columns, bool junk)
{
    csa_tensor lists =
        arena_tensor(&w->memory, "lists", w->shape.strided ? &w->random : NULL, CSA_I64, 2, w->tokens, columns);
    for (int64_t token = 0; token < w->tokens; token++) {
        int64_t current = position_of(w, token) / 8, region = current;
        for (int64_t j = columns - 1; j >= 0; j--) {
            int64_t value = region >= 0 ? region : -1;
            if (junk && j < columns - 1 && random_chance(&w->random, 20))
                value = (int64_t[]){INT64_MIN, -7, current + 1, INT64_MAX,
                                    current}[random_between(&w->random, 0, 4)];
            *(int64_t *)tensor_at(&lists, token, j, 0, 0) = value;
            region -= junk || region > j ? random_between(&w->random, 1, 2) : 1;
        }
    }
    return lists;
}

static int64_t used_entries(const world *w, int64_t token, int64_t columns)
{
    int64_t position = position_of(w, token);
    return position < 0 ? 0 : position / 8 + 1 < columns ? position / 8 + 1 : columns;
}

/* The block of an entry's region; -1 where attention would skip it. */
static int64_t entry_block(const world *w, int64_t token, int64_t region)
{
    if (region < 0 || region > position_of(w, token) / 8)
        return -1;
    return block_of(&w->step.block_table, owner_of(w, token), region * 8 / w->shape.block_size, w->blocks);
}

static int32_t expected_page(const world *w, const csa_tensor *kv, int64_t token, int64_t region)
{
    int64_t block = entry_block(w, token, region);
    int64_t between = w->blocks > 1 ? kv->stride[0] / (8 * kv->stride[2]) : 0;
    return block < 0 ? 0 : (int32_t)(block * between + region % (w->shape.block_size / 8));
}

static bool pages_possible(const csa_tensor *kv)
{
    return kv->shape[0] < 2 || kv->stride[0] % (8 * kv->stride[2]) == 0;
}

/* counts entries of each row's list from indptr on, the last ones of those used. */
static void expect_lists(const world *w, const csa_compat_pages_args *a)
{
    int64_t columns = a->selected.shape[1];
    for (int64_t token = 0; token < w->tokens; token++) {
        int64_t count = at(&a->page_counts, token), start = at(&a->page_indptr, token);
        CHECK(at(&a->last_page_len, token) == (count ? position_of(w, token) % 8 + 1 : 0));
        for (int64_t i = 0; i < count; i++) {
            int64_t region = entry(&a->selected, token, columns - count + i);
            CHECK(at(&a->pages, start + i) == expected_page(w, &a->cache->kv, token, region));
        }
    }
}

typedef struct page_case {
    world w;
    csa_cache cache;
    csa_compat_pages_args args;
} page_case;

static void make_pages(page_case *p, int draw, bool junk)
{
    world *w = &p->w;
    world_make(w, random_shape((uint64_t)draw), (uint64_t)draw);
    if (junk)
        spoil_table(w);
    p->cache = one_group(w, random_between(&w->random, 0, w->shape.groups - 1));
    int64_t columns = random_between(&w->random, 1, 40);
    p->args = (csa_compat_pages_args){.size = sizeof p->args, .tokens = &w->step, .cache = &p->cache};
    p->args.selected = make_lists(w, columns, junk);
    p->args.page_indptr = arena_tensor(&w->memory, "indptr", &w->random, CSA_I32, 1, w->tokens + 1);
    p->args.page_counts = arena_tensor(&w->memory, "counts", &w->random, CSA_I32, 1, w->tokens);
    p->args.last_page_len = arena_tensor(&w->memory, "last", &w->random, CSA_I32, 1, w->tokens);
    p->args.pages = arena_tensor(&w->memory, "pages", &w->random, CSA_I32, 1, w->tokens * columns + 3);
}

static void test_pages(void **state)
{
    (void)state;
    static page_case p;
    for (int draw = 0; draw < test_draws(DRAWS); draw++) {
        test_set_draw(draw);
        make_pages(&p, draw, true);
        csa_status status = csa_compat_pages(context, &p.args);
        if (!pages_possible(&p.cache.kv)) {
            expect_status(status, CSA_ERROR_UNSUPPORTED, "stride");
        } else {
            CHECK_OK(status);
            int64_t end = 0;
            for (int64_t token = 0; token < p.w.tokens; token++) {
                CHECK(at(&p.args.page_indptr, token) == end);
                CHECK(at(&p.args.page_counts, token) == used_entries(&p.w, token, p.args.selected.shape[1]));
                end += at(&p.args.page_counts, token);
            }
            CHECK(at(&p.args.page_indptr, p.w.tokens) == end);
            CHECKF(at(&p.args.pages, end) == -1, "written past the end");
            expect_lists(&p.w, &p.args);
        }
        world_end(&p.w);
    }
}

/* Upper bounds first, then the fix-up. The pages are those of the true positions, at the planned places. */
static void test_planned_pages(void **state)
{
    (void)state;
    static page_case p;
    for (int draw = 0; draw < test_draws(DRAWS); draw++) {
        test_set_draw(draw);
        make_pages(&p, draw, true);
        csa_tokens bounds = {.size = sizeof bounds};
        bounds.positions = arena_tensor(&p.w.memory, "bounds", &p.w.random, CSA_I64, 1, p.w.tokens);
        for (int64_t i = 0; i < p.w.tokens; i++)
            tensor_put(&bounds.positions, (double)(position_of(&p.w, i) + random_between(&p.w.random, 0, 50)),
                       i, 0, 0, 0);
        csa_compat_pages_args plan = {.size = sizeof plan, .tokens = &bounds};
        plan.columns = p.args.selected.shape[1];
        plan.page_indptr = p.args.page_indptr;
        CHECK_OK(csa_compat_pages(context, &plan));
        for (int64_t i = 0; i < p.w.tokens; i++) {
            int64_t bound = at(&bounds.positions, i), most = bound < 0 ? 0 : bound / 8 + 1;
            CHECK(at(&plan.page_indptr, i + 1) - at(&plan.page_indptr, i) ==
                  (most < plan.columns ? most : plan.columns));
        }
        p.args.planned = true;
        if (pages_possible(&p.cache.kv)) {
            CHECK_OK(csa_compat_pages(context, &p.args));
            for (int64_t i = 0; i < p.w.tokens; i++)
                CHECK(at(&p.args.page_counts, i) == used_entries(&p.w, i, plan.columns));
            expect_lists(&p.w, &p.args);
        }
        world_end(&p.w);
    }
}

/* Any page_indptr: nothing outside pages is written, counts say what fits. */
static void test_junk_plan(void **state)
{
    (void)state;
    static page_case p;
    for (int draw = 0; draw < test_draws(DRAWS); draw++) {
        test_set_draw(draw);
        make_pages(&p, draw, false);
        int64_t room = p.args.pages.shape[0], columns = p.args.selected.shape[1];
        for (int64_t i = 0; i <= p.w.tokens; i++)
            tensor_put(&p.args.page_indptr,
                       RANDOM_OF(&p.w.random, INT32_MIN, -1, 0, 1, (int32_t)room - 1, (int32_t)room, INT32_MAX),
                       i, 0, 0, 0);
        p.args.planned = true;
        if (pages_possible(&p.cache.kv))
            CHECK_OK(csa_compat_pages(context, &p.args));
        for (int64_t i = 0; pages_possible(&p.cache.kv) && i < p.w.tokens; i++) {
            int64_t start = at(&p.args.page_indptr, i), end = at(&p.args.page_indptr, i + 1);
            int64_t fits = (end < room ? end : room) - start, needed = used_entries(&p.w, i, columns);
            CHECK(at(&p.args.page_counts, i) == (start < 0 || fits < 0 ? 0 : fits < needed ? fits : needed));
        }
        world_end(&p.w);
    }
}

/* ---- Gather and attention ----------------------------------------------------------------------- */

static uint16_t true_value(const csa_cache *cache, int64_t block, int64_t offset, int64_t i)
{
    double code = tensor_value(&cache->kv, block, 0, offset, i);
    if (cache->kv.dtype == CSA_BF16)
        return bf16_code((float)code);
    const float *scale = i < 192 ? cache->k_scale : cache->v_scale;
    return bf16_code((float)code * (scale ? *scale : 1));
}

/* Compares one token's key and value. */
static void expect_token(const csa_cache *cache, int64_t block, int64_t offset, const csa_compat_gather_args *a,
                         int64_t token)
{
    for (int64_t i = 0; i < 384; i++) {
        const csa_tensor *half = i < 192 ? &a->key : &a->value;
        CHECKF(*(uint16_t *)tensor_at(half, token, 0, i % 192, 0) == true_value(cache, block, offset, i),
               "token %lld, value %lld", (long long)token, (long long)i);
    }
}

static void expect_gathered(const world *w, const csa_compat_gather_args *a)
{
    int64_t columns = a->selected.shape[1], token = 0;
    for (int64_t row = 0; row < w->tokens; row++) {
        CHECK(at(&a->cu_k, row) == token);
        for (int64_t j = columns - used_entries(w, row, columns); j < columns; j++) {
            int64_t region = entry(&a->selected, row, j), block = entry_block(w, row, region);
            for (int64_t i = 0; block >= 0 && i < 8 && region * 8 + i <= position_of(w, row); i++)
                expect_token(a->cache, block, (region * 8 + i) % w->shape.block_size, a, token++);
        }
    }
    CHECK(at(&a->cu_k, w->tokens) == token);
}

static csa_compat_gather_args make_gather(page_case *p)
{
    csa_compat_gather_args a = {.size = sizeof a, .tokens = &p->w.step, .cache = &p->cache};
    int64_t room = p->w.tokens * p->args.selected.shape[1] * 8;
    test_random *gaps = p->w.shape.strided ? &p->w.random : NULL;
    a.selected = p->args.selected;
    a.cu_k = arena_tensor(&p->w.memory, "cu_k", gaps, CSA_I32, 1, p->w.tokens + 1);
    a.key = arena_tensor(&p->w.memory, "key", gaps, CSA_BF16, 3, room, (int64_t)1, (int64_t)192);
    a.value = arena_tensor(&p->w.memory, "value", gaps, CSA_BF16, 3, room, (int64_t)1, (int64_t)192);
    return a;
}

static void test_gather(void **state)
{
    (void)state;
    static page_case p;
    for (int draw = 0; draw < test_draws(DRAWS); draw++) {
        test_set_draw(draw);
        make_pages(&p, draw, true);
        csa_compat_gather_args a = make_gather(&p);
        CHECK_OK(csa_compat_gather(context, &a));
        expect_gathered(&p.w, &a);
        world_end(&p.w);
    }
}

/* One row and head over gathered tokens, in double. */
static void expect_head(const csa_compat_attend_ragged_args *a, int64_t row, int64_t head)
{
    double exact[192] = {0}, sum = 0, largest = -INFINITY, off = 0, size = 0;
    int64_t first = at(&a->cu_k, row), end = at(&a->cu_k, row + 1);
    double *logits = malloc((size_t)(end - first + 1) * sizeof *logits);
    assert_non_null(logits);
    for (int64_t t = first; t < end; t++) {
        double dot = 0;
        for (int64_t i = 0; i < 192; i++)
            dot += tensor_value(&a->query, row, head, i, 0) * tensor_value(&a->key, t, 0, i, 0);
        logits[t - first] = (double)a->scale * dot;
        largest = fmax(largest, logits[t - first]);
    }
    for (int64_t t = first; t < end; t++) {
        double weight = exp(logits[t - first] - largest);
        sum += weight;
        for (int64_t i = 0; i < 192; i++)
            exact[i] += weight * tensor_value(&a->value, t, 0, i, 0);
    }
    free(logits);
    for (int64_t i = 0; i < 192; i++) {
        double got = tensor_value(&a->out, row, head, i, 0), right = first < end ? exact[i] / sum : 0;
        off += (got - right) * (got - right);
        size += right * right;
    }
    CHECKF(sqrt(off) <= 8e-3 * sqrt(size), "row %lld, head %lld", (long long)row, (long long)head);
    double lse = tensor_value(&a->lse, row, head, 0, 0);
    CHECK(first < end ? fabs(lse - largest - log(sum)) < 1e-3 * (1 + fabs(lse)) : isinf(lse) && lse < 0);
}

static csa_compat_attend_ragged_args make_ragged(page_case *p, const csa_compat_gather_args *gathered)
{
    world *w = &p->w;
    csa_compat_attend_ragged_args a = {.size = sizeof a, .scale = 0.07F};
    int64_t heads = w->shape.heads;
    a.query = arena_tensor(&w->memory, "q", &w->random, CSA_BF16, 3, w->tokens, heads, (int64_t)192);
    tensor_randomise(&a.query, &w->random, 1);
    a.cu_k = gathered->cu_k;
    a.key = gathered->key;
    a.value = gathered->value;
    a.out = arena_tensor(&w->memory, "ragged out", &w->random, CSA_BF16, 3, w->tokens, heads, (int64_t)192);
    a.lse = arena_tensor(&w->memory, "ragged lse", &w->random, CSA_F32, 2, w->tokens, heads);
    return a;
}

/* The same rows through pages must give the same bits. */
static void expect_paged(page_case *p, const csa_compat_attend_ragged_args *ragged)
{
    world *w = &p->w;
    int64_t heads = w->shape.heads;
    csa_compat_attend_paged_args a = {.size = sizeof a, .cache = &p->cache, .scale = ragged->scale};
    CHECK_OK(csa_compat_pages(context, &p->args));
    a.query = ragged->query;
    a.pages = p->args.pages;
    a.page_indptr = p->args.page_indptr;
    a.last_page_len = p->args.last_page_len;
    a.out = arena_tensor(&w->memory, "paged out", &w->random, CSA_BF16, 3, w->tokens, heads, (int64_t)192);
    a.lse = arena_tensor(&w->memory, "paged lse", &w->random, CSA_F32, 2, w->tokens, heads);
    CHECK_OK(csa_compat_attend_paged(context, &a));
    tensor_expect_equal("paged out", &a.out, &ragged->out);
    tensor_expect_equal("paged lse", &a.lse, &ragged->lse);
    a.page_counts = p->args.page_counts;
    a.out = a.query; /* in place */
    CHECK_OK(csa_compat_attend_paged(context, &a));
    tensor_expect_equal("paged out in place", &a.out, &ragged->out);
}

static void test_attention(void **state)
{
    (void)state;
    static page_case p;
    for (int draw = 0; draw < test_draws(60); draw++) {
        test_set_draw(draw);
        make_pages(&p, draw, false);
        csa_compat_gather_args gather = make_gather(&p);
        CHECK_OK(csa_compat_gather(context, &gather));
        csa_compat_attend_ragged_args a = make_ragged(&p, &gather);
        CHECK_OK(csa_compat_attend_ragged(context, &a));
        for (int64_t i = 0; i < p.w.tokens * p.w.shape.heads; i++)
            expect_head(&a, i / p.w.shape.heads, i % p.w.shape.heads);
        bool possible = p.w.shape.heads >= 8 && p.w.shape.kv_dtype == CSA_BF16 && pages_possible(&p.cache.kv);
        expect_status(csa_compat_paged_supported(context, &p.cache, p.w.shape.heads),
                      possible ? CSA_OK : CSA_ERROR_UNSUPPORTED, NULL);
        if (possible)
            expect_paged(&p, &a);
        world_end(&p.w);
    }
}

enum { ROWS = 4, HEADS = 8, ENTRIES = 8 };

/* The mean value of a row's tokens, each of which holds its number in the cache plus 1; 0 without a token. Of
 * two groups' pages, four per block, the first two are this group's. */
static double paged_mean(const csa_compat_attend_paged_args *a, int64_t row)
{
    double sum = 0, tokens = 0;
    int64_t start = at(&a->page_indptr, row), count = at(&a->page_counts, row),
            last = at(&a->last_page_len, row);
    if (start < 0 || count < 0)
        return 0;
    count = count < ENTRIES - start ? count : ENTRIES - start;
    for (int64_t i = 0; i < count; i++) {
        int64_t page = at(&a->pages, start + i), block = page / 4, length = i < count - 1 ? 8 : last;
        for (int64_t t = 0; page >= 0 && block < 2 && page % 4 < 2 && t < 8 && t < length; t++, tokens++)
            sum += (double)(block * 16 + page % 4 * 8 + t + 1);
    }
    return tokens > 0 ? sum / tokens : 0;
}

static double ragged_mean(const csa_compat_attend_ragged_args *a, int64_t row)
{
    double sum = 0, tokens = 0;
    int64_t first = at(&a->cu_k, row), end = at(&a->cu_k, row + 1);
    for (int64_t t = first; first >= 0 && t < end && t < a->key.shape[0]; t++, tokens++)
        sum += (double)(t + 1);
    return tokens > 0 ? sum / tokens : 0;
}

static void expect_means(const csa_tensor *out, int64_t row, double right)
{
    for (int64_t i = 0; i < (int64_t)HEADS * 192; i++) {
        double got = tensor_value(out, row, i / 192, i % 192, 0);
        CHECKF(fabs(got - right) <= right / 128, "row %lld: %g, expected %g", (long long)row, got, right);
    }
}

static csa_tensor some_list(arena *memory, const char *name, test_random *r, int64_t count)
{
    return arena_tensor(memory, name, r, CSA_I32, 1, count);
}

static csa_tensor some_heads(arena *memory, const char *name, test_random *r)
{
    return arena_tensor(memory, name, r, CSA_BF16, 3, (int64_t)ROWS, (int64_t)HEADS, (int64_t)192);
}

/* A cache of two groups of which the second holds NaN, and gathered rows; queries of 0 give plain means. */
static void make_junk_case(arena *memory, test_random *r, csa_cache *cache, csa_compat_attend_paged_args *a,
                           csa_compat_attend_ragged_args *b)
{
    csa_tensor kv =
        arena_tensor(memory, "kv", NULL, CSA_BF16, 4, (int64_t)2, (int64_t)2, (int64_t)16, (int64_t)384);
    *cache = (csa_cache){.size = sizeof *cache, .kv = kv};
    cache->kv.shape[1] = 1;
    tensor_set(&cache->kv, 0);
    for (int64_t token = 0; token < 32; token++)
        for (int64_t i = 192; i < 384; i++)
            tensor_put(&cache->kv, (double)(token + 1), token / 16, 0, token % 16, i);
    *a = (csa_compat_attend_paged_args){.size = sizeof *a, .cache = cache, .scale = 1};
    a->query = some_heads(memory, "query", r);
    a->out = some_heads(memory, "out", r);
    tensor_set(&a->query, 0);
    a->pages = some_list(memory, "pages", r, ENTRIES);
    a->page_indptr = some_list(memory, "indptr", r, ROWS + 1);
    a->page_counts = some_list(memory, "counts", r, ROWS);
    a->last_page_len = some_list(memory, "last", r, ROWS);
    *b = (csa_compat_attend_ragged_args){.size = sizeof *b, .query = a->query, .out = a->out, .scale = 1};
    b->cu_k = a->page_indptr;
    b->key = arena_tensor(memory, "key", r, CSA_BF16, 3, (int64_t)ENTRIES, (int64_t)1, (int64_t)192);
    b->value = arena_tensor(memory, "value", r, CSA_BF16, 3, (int64_t)ENTRIES, (int64_t)1, (int64_t)192);
    tensor_set(&b->key, 0);
    for (int64_t token = 0; token < ENTRIES; token++)
        for (int64_t i = 0; i < 192; i++)
            tensor_put(&b->value, (double)(token + 1), token, 0, i, 0);
}

/* Any numbers in the lists: nothing outside is read, and what is there counts. */
static void test_junk_lists(void **state)
{
    (void)state;
    static const int32_t junk[] = {INT32_MIN, -1, 0, 1, 2, 3, 5, 7, 8, INT32_MAX};
    arena memory = {0};
    test_random r = random_of(0, 5);
    csa_cache cache;
    csa_compat_attend_paged_args a;
    csa_compat_attend_ragged_args b;
    make_junk_case(&memory, &r, &cache, &a, &b);
    csa_tensor *lists[] = {&a.pages, &a.page_indptr, &a.page_counts, &a.last_page_len};
    for (int draw = 0; draw < test_draws(300); draw++) {
        test_set_draw(draw);
        for (int list = 0; list < 4; list++)
            for (int64_t i = 0; i < lists[list]->shape[0]; i++)
                tensor_put(lists[list], junk[random_between(&r, 0, 9)], i, 0, 0, 0);
        CHECK_OK(csa_compat_attend_paged(context, &a));
        for (int64_t row = 0; row < ROWS; row++)
            expect_means(&a.out, row, paged_mean(&a, row));
        CHECK_OK(csa_compat_attend_ragged(context, &b));
        for (int64_t row = 0; row < ROWS; row++)
            expect_means(&b.out, row, ragged_mean(&b, row));
    }
    arena_check(&memory);
    arena_free(&memory);
}

/* ---- Staging ------------------------------------------------------------------------------------ */

static void expect_block(const csa_compat_stage_args *a, int64_t number, int64_t block)
{
    for (int64_t token = 0; token < a->staged.shape[2]; token++)
        for (int64_t i = 0; i < 384; i++)
            CHECK(*(uint16_t *)tensor_at(&a->staged, number, 0, token, i) ==
                  true_value(a->cache, block, token, i));
}

static void expect_staged(const world *w, const csa_compat_stage_args *a)
{
    int64_t count = 0, room = a->staged.shape[0];
    for (int64_t request = 0; request < w->shape.requests; request++)
        for (int64_t column = 0; column < w->columns; column++) {
            int64_t number = at2(&a->staged_table, request, column);
            bool live = column * w->shape.block_size < at(&w->step.seq_lens, request);
            int64_t block = live ? block_of(&w->step.block_table, request, column, w->blocks) : -1;
            CHECK(number == (block >= 0 && count < room ? count : 0));
            if (block >= 0 && count < room) {
                CHECK(at(&a->staged_pages, number) == block);
                expect_block(a, number, block);
            }
            count += block >= 0;
        }
    CHECK(at(&a->staged_count, 0) == count);
}

static void test_stage(void **state)
{
    (void)state;
    for (int draw = 0; draw < test_draws(DRAWS); draw++) {
        test_set_draw(draw);
        world w;
        world_shape shape = random_shape((uint64_t)draw);
        shape.max_length = shape.max_length > 300 ? 300 : shape.max_length;
        world_make(&w, shape, (uint64_t)draw);
        if (random_chance(&w.random, 50))
            spoil_table(&w);
        csa_cache cache = one_group(&w, random_between(&w.random, 0, w.shape.groups - 1));
        w.step.seq_lens = arena_tensor(&w.memory, "seq_lens", &w.random, CSA_I32, 1, w.shape.requests);
        int64_t room = 0;
        for (int64_t i = 0; i < w.shape.requests; i++) {
            int64_t length =
                random_chance(&w.random, 10) ? RANDOM_OF(&w.random, -9, 0, INT32_MAX) : w.lengths[i];
            tensor_put(&w.step.seq_lens, (double)length, i, 0, 0, 0);
            room += length > w.columns * w.shape.block_size
                        ? w.columns
                        : (length + w.shape.block_size) / w.shape.block_size;
        }
        if (random_chance(&w.random, 20))
            room = random_between(&w.random, 0, room);
        csa_compat_stage_args a = {.size = sizeof a, .tokens = &w.step, .cache = &cache};
        a.staged = arena_tensor(&w.memory, "staged", w.shape.strided ? &w.random : NULL, CSA_BF16, 4, room,
                                (int64_t)1, (int64_t)w.shape.block_size, (int64_t)384);
        a.staged_pages = arena_tensor(&w.memory, "staged_pages", &w.random, CSA_I32, 1, room);
        a.staged_table =
            arena_tensor(&w.memory, "table", &w.random, CSA_I32, 2, (int64_t)w.shape.requests, w.columns);
        a.staged_count = arena_tensor(&w.memory, "count", NULL, CSA_I32, 1, (int64_t)1);
        CHECK_OK(csa_compat_stage(context, &a));
        expect_staged(&w, &a);
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

static void test_refused_caches(void **state)
{
    (void)state;
    csa_cache cache = {.size = sizeof cache, .kv = csa_tensor_4d(far, CSA_BF16, 100, 1, 16, 384)};
    CHECK_OK(csa_compat_paged_supported(context, &cache, 8));
    CHECK_OK(csa_compat_paged_supported(context, &cache, 16));
    for (int64_t heads = 0; heads < 18; heads++)
        expect_status(csa_compat_paged_supported(context, &cache, heads),
                      heads == 8 || heads == 16 ? CSA_OK : CSA_ERROR_UNSUPPORTED, NULL);
    cache.kv.stride[0] += 384;
    expect_status(csa_compat_paged_supported(context, &cache, 8), CSA_ERROR_UNSUPPORTED, "stride");
    cache.kv.stride[0] += (int64_t)7 * 384;
    CHECK_OK(csa_compat_paged_supported(context, &cache, 8));
    cache.kv.stride[0] = (int64_t)8 * 384 << 30;
    expect_status(csa_compat_paged_supported(context, &cache, 8), CSA_ERROR_UNSUPPORTED, "pages of the cache");
    cache.kv = csa_tensor_4d(far, CSA_BF16, 100, 2, 16, 384);
    expect_status(csa_compat_paged_supported(context, &cache, 8), CSA_ERROR_UNSUPPORTED, "groups");
    cache.kv = csa_tensor_4d(far, CSA_E4M3, 100, 1, 16, 384);
    expect_status(csa_compat_paged_supported(context, &cache, 8), CSA_ERROR_UNSUPPORTED, "bf16");
    cache.kv = csa_tensor_4d(far, CSA_BF16, 100, 1, 24, 384);
    expect_status(csa_compat_paged_supported(context, &cache, 8), CSA_ERROR_UNSUPPORTED, "24");

    csa_tokens tokens = {.size = sizeof tokens, .block_table = csa_tensor_2d(far, CSA_I32, 1, 1)};
    tokens.seq_lens = csa_tensor_1d(far, CSA_I32, 1);
    cache.kv = csa_tensor_4d(far, CSA_BF16, 100, 1, 16, 384);
    csa_compat_stage_args stage = {.size = sizeof stage, .tokens = &tokens, .cache = &cache};
    stage.staged = csa_tensor_4d(far, CSA_BF16, (1 << 29) / (16 * 768) + 1, 1, 16, 384);
    stage.staged_table = csa_tensor_2d(far, CSA_I32, 1, 1);
    expect_status(csa_compat_stage(context, &stage), CSA_ERROR_UNSUPPORTED, "512 MiB");
}

/* A refused call writes nothing. */
static void expect_refused(page_case *p, csa_status expected, const char *words)
{
    uint8_t *before = arena_snapshot(&p->w.memory);
    expect_status(csa_compat_pages(context, &p->args), expected, words);
    CHECK(arena_unchanged(&p->w.memory, before));
    free(before);
}

static void test_refused_views(void **state)
{
    (void)state;
    static page_case p;
    for (int draw = 0; make_pages(&p, draw, false), !pages_possible(&p.cache.kv); draw++)
        world_end(&p.w);
    csa_compat_pages_args good = p.args;
    p.args.pages.shape[0] = p.w.tokens * good.selected.shape[1] - 1;
    expect_refused(&p, CSA_ERROR_ARGUMENT, "rows * columns");
    p.args = good;
    p.args.selected.dtype = CSA_I32;
    expect_refused(&p, CSA_ERROR_ARGUMENT, "selected");
    p.args = good;
    p.args.selected.ndim = 0;
    p.args.columns = 3;
    expect_refused(&p, CSA_ERROR_ARGUMENT, "selected is absent");
    p.args = good;
    p.args.columns = good.selected.shape[1] + 1;
    expect_refused(&p, CSA_ERROR_ARGUMENT, "columns");
    p.args = good;
    p.args.page_indptr.shape[0]++;
    expect_refused(&p, CSA_ERROR_ARGUMENT, NULL);
    csa_compat_gather_args gather = make_gather(&p);
    gather.key.shape[0]--;
    gather.value.shape[0]--;
    expect_status(csa_compat_gather(context, &gather), CSA_ERROR_ARGUMENT, "room");
    world_end(&p.w);
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

static void test_checking(void **state)
{
    (void)state;
    static page_case p;
    for (int draw = 0; draw < test_draws(40); draw++) {
        test_set_draw(draw);
        make_pages(&p, draw, false);
        csa_compat_gather_args gather = make_gather(&p);
        int64_t columns = p.args.selected.shape[1], last = p.w.tokens - 1;
        bool active = position_of(&p.w, last) >= 0;
        CHECK_OK(csa_compat_gather(checking, &gather));
        if (!pages_possible(&p.cache.kv)) {
            world_end(&p.w);
            continue;
        }
        CHECK_OK(csa_compat_pages(context, &p.args));
        *(int64_t *)tensor_at(&p.args.selected, last, columns - 1, 0, 0) = -1;
        if (active)
            expect_status(csa_compat_gather(checking, &gather), CSA_ERROR_ID, "selected");
        p.args.planned = true;
        p.args.selected.ndim = 0;
        p.args.columns = columns;
        p.args.pages.ndim = 0;
        CHECK_OK(csa_compat_pages(checking, &p.args));
        if (active) {
            tensor_put(&p.args.page_indptr, (double)at(&p.args.page_indptr, last + 1), last, 0, 0, 0);
            expect_status(csa_compat_pages(checking, &p.args), CSA_ERROR_ID, "token");
        }
        world_end(&p.w);
    }
}

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

static int set_up(void **state)
{
    (void)state;
    context = test_context((csa_context_options){.threads = 3});
    checking = test_context((csa_context_options){.threads = 1, .check = true});
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    csa_context_destroy(context);
    csa_context_destroy(checking);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sizes),         cmocka_unit_test(test_pack),
        cmocka_unit_test(test_schedule),      cmocka_unit_test(test_score),
        cmocka_unit_test(test_pair),          cmocka_unit_test(test_packed_like_direct),
        cmocka_unit_test(test_metadata),      cmocka_unit_test(test_pages),
        cmocka_unit_test(test_planned_pages), cmocka_unit_test(test_junk_plan),
        cmocka_unit_test(test_gather),        cmocka_unit_test(test_attention),
        cmocka_unit_test(test_junk_lists),    cmocka_unit_test(test_stage),
        cmocka_unit_test(test_refused_sizes), cmocka_unit_test(test_refused_caches),
        cmocka_unit_test(test_refused_views), cmocka_unit_test(test_refused_metadata),
        cmocka_unit_test(test_checking),      cmocka_unit_test(test_checked_scores),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
