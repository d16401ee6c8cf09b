/*
 * Steps of several tokens: what each draft may see, drafts that are rejected, rings just large enough for them,
 * requests that bring nothing, prefill that starts and ends anywhere.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "hostile.h"

static int64_t *i64_at(const csa_tensor *t, int64_t i)
{
    return tensor_at(t, i, 0, 0, 0);
}

/* Token t of the step becomes the request's token at a position; a version is a guess of what stands there. */
static void put_token(world *w, int64_t t, int64_t request, int64_t position, int version)
{
    test_random r = random_of((uint64_t)(request * 1000 + position), (uint64_t)version);
    csa_tensor key = tensor_slice(w->prepare.index_key_out, t, 1), z = tensor_slice(w->z, t, 1);
    tensor_randomise(&key, &r, 1);
    tensor_randomise(&z, &r, 1);
    *i64_at(&w->step.positions, t) = position;
    *i64_at(&w->step.slots, t) = world_slot(w, request, position);
}

/* The call's tokens are the first n of the world's, all of request 0. */
static csa_summarize_args first_tokens(world *w, int64_t n, csa_tokens *tokens)
{
    csa_summarize_args a = world_summarize(w);
    *tokens = w->step;
    tokens->slots = tensor_slice(tokens->slots, 0, n);
    tokens->positions = tensor_slice(tokens->positions, 0, n);
    tokens->query_len = (int32_t)n;
    a.key = tensor_slice(a.key, 0, n);
    a.z = tensor_slice(a.z, 0, n);
    a.tokens = tokens;
    return a;
}

static void decode_one(world *w, int64_t position)
{
    csa_tokens tokens;
    csa_summarize_args a = first_tokens(w, 1, &tokens);
    put_token(w, 0, 0, position, 0);
    CHECK_OK(csa_summarize_decode(plain_context(), &a));
}

/* Summaries of the closed regions of the tokens [0, end) are the same bytes. */
static void expect_same_summaries(const world *got, const world *expected, int64_t end)
{
    for (int64_t p = 7; p < end; p += 8) {
        int64_t region = world_slot(got, 0, p) / 8;
        csa_tensor x = tensor_slice(got->cache.summaries, region / 2, 1);
        csa_tensor y = tensor_slice(expected->cache.summaries, region / 2, 1);
        x.shape[1] = y.shape[1] = 1; /* blocks of 16 */
        x.data = tensor_at(&x, 0, region % 2, 0, 0);
        y.data = tensor_at(&y, 0, region % 2, 0, 0);
        tensor_expect_equal("summary", &x, &y);
    }
}

/* A run without speculation. */
static void plain_run(world *w, world_shape shape, int64_t end)
{
    world_make(w, shape, 7000);
    for (int64_t p = 0; p < end; p++)
        decode_one(w, p);
}

/* ---- Drafts (sglang PR 34189) ------------------------------------------------------------------- */

enum { LENGTH = 96 };

/* Steps of 1 + drafts tokens, of whose drafts so many turn out right. */
static void speculate(world *w, int64_t start, int64_t drafts, int64_t accepted)
{
    csa_tokens tokens;
    for (int64_t p = 0; p < start; p++)
        decode_one(w, p);
    for (int64_t p = start; p + drafts < LENGTH; p += accepted + 1) {
        for (int64_t i = 0; i <= drafts; i++)
            put_token(w, i, 0, p + i, i > accepted ? (int)(1 + p % 7) : 0);
        csa_summarize_args a = first_tokens(w, drafts + 1, &tokens);
        CHECK_OK(csa_summarize_verify(plain_context(), &a));
    }
}

static void test_rings_for_drafts(void **state)
{
    (void)state;
    const int drafts[] = {1, 3, 6};
    for (int i = 0; i < 3; i++) {
        world_shape shape = {
            .query_len = 1 + drafts[i], .exact_length = LENGTH, .ring_capacity = 7 + drafts[i]};
        world expected, w;
        plain_run(&expected, shape, LENGTH);
        for (int64_t start = 8; start < 16; start++)
            for (int64_t accepted = 0; accepted <= drafts[i]; accepted++) {
                world_make(&w, shape, 7000);
                speculate(&w, start, drafts[i], accepted);
                expect_same_summaries(&w, &expected, LENGTH - drafts[i]);
                world_end(&w);
            }
        world_end(&expected);
    }
}

static void test_ring_too_small(void **state)
{
    (void)state;
    const int lengths[] = {1, 2, 4, 7, 33};
    for (int i = 0; i < COUNT_OF(lengths); i++) {
        world w;
        world_make(&w, (world_shape){.query_len = lengths[i], .exact_length = 40}, 7100);
        csa_summarize_args a = world_summarize(&w);
        csa_layer_args layer = world_layer(&w);
        int64_t least = lengths[i] > 2 ? 6 + lengths[i] : 8;
        w.cache.ring_capacity = least;
        CHECK_OK(csa_summarize_verify(plain_context(), &a));
        uint8_t *before = arena_snapshot(&w.memory);
        w.cache.ring_capacity = least - 1;
        expect_refused(csa_summarize_verify(plain_context(), &a), CSA_ERROR_ARGUMENT, "ring_capacity", NULL);
        w.cache.ring_capacity = lengths[i] == 1 ? 6 : least - 1; /* decode needs 7 */
        expect_refused(csa_layer(plain_context(), NULL, &layer), CSA_ERROR_ARGUMENT, "ring_capacity", NULL);
        CHECK(arena_unchanged(&w.memory, before));
        free(before);
        world_end(&w);
    }
}

/* Every length-th token of a tensor of tokens, from the first-th on. */
static csa_tensor every(csa_tensor t, int64_t first, int64_t length)
{
    if (!t.ndim)
        return t;
    t.data = tensor_at(&t, first, 0, 0, 0);
    t.shape[0] /= length;
    t.stride[0] *= length;
    return t;
}

/* The decode step of each request's i-th token, on views of a verify step. */
static void decode_drafts(world *w, int64_t i, int64_t length)
{
    csa_tokens tokens = w->step;
    csa_layer_args layer = world_layer(w);
    csa_prepare_args p = w->prepare;
    csa_tensor *all[] = {&tokens.slots, &tokens.positions,  &layer.z,         &layer.gate,
                         &layer.out,    &layer.lse,         &layer.selected,  &p.index_query,
                         &p.index_key,  &p.index_weights,   &p.query,         &p.key,
                         &p.value,      &p.index_query_out, &p.index_key_out, &p.index_weights_out,
                         &p.query_out,  &p.key_out,         &p.value_out};
    for (int n = 0; n < COUNT_OF(all); n++)
        *all[n] = every(*all[n], i, length);
    tokens.query_len = 1;
    p.tokens = &tokens;
    layer.prepare = &p;
    layer.rows_out = NULL;
    CHECK_OK(csa_layer(plain_context(), NULL, &layer));
}

/* FlashMLA 212, vllm 53257: four drafts have the bits of four single decodes; none sees a later one. */
static void test_drafts_as_decodes(void **state)
{
    (void)state;
    for (int draw = 0; draw < test_draws(40); draw++) {
        world a, b;
        world_shape shape = {.requests = 3, .query_len = 4, .heads = 2, .max_length = 90, .topk = 3};
        shape.ring_capacity = 10;
        shape.kv_dtype = draw % 2 ? CSA_E4M3 : CSA_BF16;
        test_set_draw(draw);
        world_make(&a, shape, 7200 + (uint64_t)draw);
        world_make(&b, shape, 7200 + (uint64_t)draw);
        csa_layer_args verify = world_layer(&a);
        verify.rows_out = NULL;
        CHECK_OK(csa_layer(plain_context(), NULL, &verify));
        for (int64_t i = 0; i < 4; i++)
            decode_drafts(&b, i, 4);
        tensor_expect_equal("out", &b.out, &a.out);
        tensor_expect_equal("lse", &b.lse, &a.lse);
        tensor_expect_equal("selected", &b.selected, &a.selected);
        tensor_expect_equal("kv", &b.cache.kv, &a.cache.kv);
        tensor_expect_equal("summaries", &b.cache.summaries, &a.cache.summaries);
        world_end(&a);
        world_end(&b);
    }
}

/* A context shorter than its drafts: the first tokens see nothing, write nothing, and are 0. */
static void test_short_context(void **state)
{
    (void)state;
    const int32_t lengths[] = {2, 0, 4};
    world w;
    world_make(&w, (world_shape){.requests = 3, .query_len = 4, .exact_length = 20, .groups = 2}, 7300);
    w.step.positions = (csa_tensor){0};
    w.step.seq_lens = ids_i32(&w.memory, "seq_lens", 3, lengths);
    csa_tensor kv = copy_of(&w.memory, &w.cache.kv), ring = copy_of(&w.memory, &w.cache.ring),
               summaries = copy_of(&w.memory, &w.cache.summaries);
    csa_layer_args layer = world_layer(&w);
    CHECK_OK(csa_layer(plain_context(), NULL, &layer));
    int64_t kv_rows[12], ring_rows[6], n = 0, m = 0;
    for (int64_t t = 0; t < 12; t++) {
        int64_t position = lengths[t / 4] - 4 + t % 4, slot = *i64_at(&w.step.slots, t);
        CHECK(*(uint8_t *)tensor_at(&w.rows_out.active, t * 2 + 1, 0, 0, 0) == (position >= 0));
        CHECK(tensor_value(&w.rows_out.lengths, t * 2, 0, 0, 0) == 1);
        CHECK((tensor_value(&w.lse, t, 0, 0, 0) == -INFINITY) == (position < 0));
        if (position < 0) {
            CHECK(*(uint16_t *)tensor_at(&w.out, t, 1, 0, 191) == 0);
            continue;
        }
        kv_rows[n++] = slot / 16 * 32 + slot % 16;
        kv_rows[n++] = slot / 16 * 32 + 16 + slot % 16;
        ring_rows[m++] = *i64_at(&w.step.ring_base, t / 4) + position;
    }
    expect_rows_written("kv", &kv, &w.cache.kv, n, kv_rows);
    expect_rows_written("ring", &ring, &w.cache.ring, m, ring_rows);
    expect_rows_written("summaries", &summaries, &w.cache.summaries, 0, NULL);
    world_end(&w);
}

/* ---- Requests that bring no token --------------------------------------------------------------- */

/* Decode with query_start: request and token have different numbers, and some tokens belong to none. */
static void test_decode_with_gaps(void **state)
{
    (void)state;
    const int32_t starts[] = {0, 0, 1, 1, 2};
    world w;
    world_make(&w, (world_shape){.requests = 4, .exact_length = 22}, 7400); /* position 21 */
    w.step.query_start = ids_i32(&w.memory, "query_start", 5, starts);
    csa_tensor ring = copy_of(&w.memory, &w.cache.ring);
    csa_summarize_args a = world_summarize(&w);
    CHECK_OK(csa_summarize_decode(plain_context(), &a));
    int64_t rows[] = {*i64_at(&w.step.ring_base, 1) + 21 % 8, *i64_at(&w.step.ring_base, 3) + 21 % 8};
    expect_rows_written("ring", &ring, &w.cache.ring, 2, rows);
    w.step.block_table = tensor_slice(w.step.block_table, 0, 1); /* more tokens than requests */
    w.step.ring_base = tensor_slice(w.step.ring_base, 0, 1);
    w.step.query_start = tensor_slice(w.step.query_start, 1, 2);
    tensor_copy(&ring, &w.cache.ring);
    tensor_randomise(&w.z, &w.random, 1);
    CHECK_OK(csa_summarize_decode(plain_context(), &a));
    rows[0] = *i64_at(&w.step.ring_base, 0) + 21 % 8;
    expect_rows_written("ring", &ring, &w.cache.ring, 1, rows);
    world_end(&w);
}

/* ---- Prefill ------------------------------------------------------------------------------------ */

/* One chunk of the stream in whichever form fits, padding behind it if that is prefill. */
static void run_chunk(world *w, int64_t first, int64_t count, test_random *r)
{
    csa_tokens tokens;
    int64_t pads = random_between(r, 0, 2), all = count + pads;
    int32_t starts[] = {0, (int32_t)all};
    for (int64_t i = 0; i < all; i++)
        put_token(w, i, 0, first + i, i < count ? 0 : 9);
    if (count == 1 && random_chance(r, 40)) {
        csa_summarize_args a = first_tokens(w, 1, &tokens);
        CHECK_OK(csa_summarize_decode(plain_context(), &a));
    } else if (count <= 6 && random_chance(r, 50)) {
        csa_summarize_args a = first_tokens(w, count, &tokens);
        CHECK_OK(csa_summarize_verify(plain_context(), &a));
    } else {
        for (int64_t i = count; i < all; i++)
            *i64_at(&w->step.slots, i) = -1; /* their positions go on */
        csa_summarize_args a = first_tokens(w, all, &tokens);
        tokens.query_start = ids_i32(&w->memory, "query_start", 2, starts);
        csa_tensor metadata = arena_tensor(&w->memory, "metadata", r, CSA_I64, 2, (int)all, 10);
        a.metadata = metadata;
        CHECK_OK(csa_summarize_metadata(plain_context(), &a));
        a.metadata = random_chance(r, 50) ? metadata : (csa_tensor){0};
        CHECK_OK(csa_summarize_prefill(plain_context(), &a));
    }
}

static void test_forms_alternate(void **state)
{
    (void)state;
    world_shape shape = {.query_len = 24, .exact_length = LENGTH, .ring_capacity = 12};
    world expected, w;
    plain_run(&expected, shape, LENGTH - 3);
    for (int draw = 0; draw < test_draws(100); draw++) {
        test_random r = random_of(7500, (uint64_t)draw);
        test_set_draw(draw);
        world_make(&w, shape, 7000);
        tensor_set(&w.cache.ring, 0xFF); /* needs no initialisation */
        for (int64_t p = 0, count; p < LENGTH - 3; p += count) {
            int64_t longest = random_chance(&r, 50) ? 3 : 21, left = LENGTH - 3 - p;
            count = random_between(&r, 1, longest < left ? longest : left);
            run_chunk(&w, p, count, &r);
        }
        expect_same_summaries(&w, &expected, LENGTH - 3);
        world_end(&w);
    }
    world_end(&expected);
}

/* Without a ring prefill closes only regions that begin in the call; the other forms close none. */
static void test_no_ring(void **state)
{
    (void)state;
    const int32_t starts[] = {0, 20};
    for (int form = 0; form < 6; form++) {
        world w;
        world_make(&w, (world_shape){.query_len = 20, .exact_length = 40, .ring_capacity = 26}, 7600);
        for (int64_t i = 0; i < 20; i++)
            put_token(&w, i, 0, 3 + i, 0); /* 3 to 22 */
        w.step.query_start = ids_i32(&w.memory, "query_start", 2, starts);
        *i64_at(&w.step.ring_base, 0) = -1;
        if (form % 2) {
            w.step.ring_base = (csa_tensor){0};
            w.cache.ring = (csa_tensor){0};
            w.cache.ring_capacity = INT64_MIN;
        }
        csa_tensor kept = copy_of(&w.memory, &w.cache.summaries);
        csa_tokens one;
        csa_summarize_args a = world_summarize(&w), b = first_tokens(&w, 1, &one);
        one.query_start = (csa_tensor){0};
        *i64_at(&one.positions, 0) = form / 2 ? 3 : 7;
        int64_t closed = world_slot(&w, 0, 8) / 8;
        CHECK_OK(form / 2 == 0   ? csa_summarize_decode(plain_context(), &b)
                 : form / 2 == 1 ? csa_summarize_verify(plain_context(), &a)
                                 : csa_summarize_prefill(plain_context(), &a));
        expect_rows_written("summaries", &kept, &w.cache.summaries, form / 2 == 2 ? 1 : 0, &closed);
        world_end(&w);
    }
}

/* The metadata of section 3, request by request. */
static void spec_metadata(const csa_tokens *k, int64_t tokens, int64_t (*rows)[10])
{
    for (int64_t t = 0; t < tokens; t++)
        for (int i = 0; i < 10; i++)
            rows[t][i] = i == 1 ? 8 : -1;
    for (int64_t request = 0; request + 1 < k->query_start.shape[0]; request++) {
        int64_t t = *(int32_t *)tensor_at(&k->query_start, request, 0, 0, 0), first = t;
        int64_t end = *(int32_t *)tensor_at(&k->query_start, request + 1, 0, 0, 0);
        for (; t < end; t++) {
            int64_t position = *i64_at(&k->positions, t), slot = *i64_at(&k->slots, t);
            if (*i64_at(&k->positions, first) / 8 != position / 8)
                first = t;
            if (slot < 0)
                continue;
            if (rows[first][0] < 0) {
                rows[first][0] = slot / 8;
                rows[first][1] = position % 8;
            }
            rows[first][2 + position % 8] = t;
        }
    }
}

/* Requests of 0 to 20 tokens that start anywhere, padding anywhere in them, tokens behind the last one. */
static void test_metadata(void **state)
{
    (void)state;
    for (int draw = 0; draw < test_draws(200); draw++) {
        world w;
        test_set_draw(draw);
        world_make(&w, (world_shape){.requests = 6, .query_len = 12, .exact_length = 140},
                   7700 + (uint64_t)draw);
        int32_t starts[7] = {0};
        for (int64_t request = 0, t = 0; request < 6; request++) {
            int64_t count = random_between(&w.random, 0, 1) * random_between(&w.random, 0, 12);
            int64_t first = random_between(&w.random, 0, 100);
            for (int64_t i = 0; i < count; i++, t++) {
                put_token(&w, t, request, first + i, 0);
                if (random_chance(&w.random, draw % 3 * 25))
                    *i64_at(&w.step.slots, t) = -5;
            }
            starts[request + 1] = (int32_t)t;
        }
        w.step.query_start = ids_i32(&w.memory, "query_start", 7, starts);
        int64_t expected[72][10];
        spec_metadata(&w.step, 72, expected);
        csa_summarize_args a = world_summarize(&w);
        a.metadata = arena_tensor(&w.memory, "metadata", &w.random, CSA_I64, 2, 72, 10);
        CHECK_OK(csa_summarize_metadata(plain_context(), &a));
        for (int64_t n = 0; n < 720; n++)
            CHECKF(*(int64_t *)tensor_at(&a.metadata, n / 10, n % 10, 0, 0) == expected[n / 10][n % 10],
                   "token %lld, column %lld", (long long)n / 10, (long long)n % 10);
        world_end(&w);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rings_for_drafts),  cmocka_unit_test(test_ring_too_small),
        cmocka_unit_test(test_drafts_as_decodes), cmocka_unit_test(test_short_context),
        cmocka_unit_test(test_decode_with_gaps),  cmocka_unit_test(test_forms_alternate),
        cmocka_unit_test(test_no_ring),           cmocka_unit_test(test_metadata),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
