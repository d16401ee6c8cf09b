/*
 * Gathered tokens, attention over them and over pages, and staged blocks (csa_compat.h, section 9) against
 * straightforward recomputation: random draws, any numbers in the lists, refused caches.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "compat.h"

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

/* ------------------------------------------------------------------------------------------------- */

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gather), cmocka_unit_test(test_attention),      cmocka_unit_test(test_junk_lists),
        cmocka_unit_test(test_stage),  cmocka_unit_test(test_refused_caches),
    };
    return cmocka_run_group_tests(tests, compat_set_up, compat_tear_down);
}
