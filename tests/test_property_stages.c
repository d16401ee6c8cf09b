/*
 * Every stage against SPEC.md written down once more (oracle.c), on random worlds with hostile contents.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "oracle.h"

/* Contexts that a draw may run on. */
static csa_context *contexts[3];
enum { CONTEXTS = sizeof contexts / sizeof *contexts };

static int make_contexts(void **state)
{
    (void)state;
    contexts[0] = test_context((csa_context_options){.threads = 1});
    contexts[1] = test_context((csa_context_options){.threads = 7});
    contexts[2] = test_context((csa_context_options){.threads = 5, .parallel_for = pool_for});
    return 0;
}

static int end_contexts(void **state)
{
    (void)state;
    for (int i = 0; i < CONTEXTS; i++)
        csa_context_destroy(contexts[i]);
    return 0;
}

static csa_context *any_context(test_random *r)
{
    return contexts[random_between(r, 0, CONTEXTS - 1)];
}

/* ref is held to the definition bit by bit. */
static bool exact(const csa_context *context)
{
    return csa_context_backend(context) == CSA_BACKEND_REF;
}

static world_shape draw_shape(test_random *r)
{
    return (world_shape){
        .groups = (int32_t)random_between(r, 1, 8),
        .heads = (int32_t)random_between(r, 1, 16),
        .index_heads = RANDOM_OF(r, 1, 2, 3, 4, 5, 6, 7, 8, 16),
        .block_size = RANDOM_OF(r, 16, 32, 64, 128),
        .topk = RANDOM_OF(r, 1, 3, 7, 200),
        .requests = (int32_t)random_between(r, 1, 4),
        .query_len = (int32_t)random_between(r, 1, 4),
        .kv_dtype = random_chance(r, 50) ? CSA_BF16 : CSA_E4M3,
        .max_length = random_between(r, 4, 150),
        .rotary = RANDOM_OF(r, -1, 2, 64, 190, 192),
        .strided = random_chance(r, 50),
        .inactive = random_chance(r, 50),
    };
}

/* Some block-table entries of the live part name no block of the cache. */
static void make_holes(world *w)
{
    int32_t junk[] = {-1, INT32_MIN, (int32_t)w->blocks, INT32_MAX};
    for (int64_t request = 0; request < w->shape.requests; request++)
        for (int64_t column = 0; column < w->columns; column++)
            if (random_chance(&w->random, 20))
                *(int32_t *)tensor_at(&w->step.block_table, request, column, 0, 0) =
                    junk[random_between(&w->random, 0, 3)];
}

static int64_t position_of(const world *w, int64_t token)
{
    int64_t slot = *(int64_t *)tensor_at(&w->step.slots, token, 0, 0, 0);
    int64_t position = *(int64_t *)tensor_at(&w->step.positions, token, 0, 0, 0);
    return slot < 0 || position < 0 ? -1 : position;
}

/* ---- Prepare ------------------------------------------------------------------------------------ */

/* Values compared, and how many of them were not the nearest. fp32 leaves few: a rounding that is forgotten, or
 * done once too often, shows here where the tolerance hides it. */
typedef struct tally {
    const char *name;
    int64_t values, off;
} tally;

static tally tallies[] = {{.name = "index_key_out"},
                          {.name = "index_query_out"},
                          {.name = "query_out"},
                          {.name = "key_out"},
                          {.name = "gated"}};

static void count_value(const char *name, bool nearest)
{
    for (size_t i = 0; i < sizeof tallies / sizeof *tallies; i++)
        if (strcmp(tallies[i].name, name) == 0) {
            tallies[i].values++;
            tallies[i].off += !nearest;
        }
}

static void check_tallies(void)
{
    for (size_t i = 0; i < sizeof tallies / sizeof *tallies; i++)
        CHECKF(tallies[i].off * 2000 <= tallies[i].values, "%s: %lld of %lld values are not the nearest",
               tallies[i].name, (long long)tallies[i].off, (long long)tallies[i].values);
}

static void expect_near(const char *name, const csa_tensor *got, int64_t i, int64_t j, int64_t k, int n,
                        const double *expected, const double *tolerance)
{
    for (int c = 0; c < n; c++) {
        bool e4m3 = got->dtype == CSA_E4M3;
        int64_t at[4] = {i, j, k, c};
        if (got->ndim < 4) /* [T, 256] and [T, G, 192]: the last index given is the value's */
            at[got->ndim - 1] = c;
        double value = tensor_value(got, at[0], at[1], at[2], at[3]);
        double wanted = e4m3 ? (double)e4m3_value(e4m3_code((float)expected[c])) : expected[c];
        double allowed = tolerance[c] + (e4m3 ? fabs(wanted) / 8 + 0x1p-9 : 0);
        count_value(name, value == wanted);
        CHECKF(fabs(value - wanted) <= allowed, "%s[%d, %d, %d, %d] is %.9g, expected %.9g", name, (int)i,
               (int)j, (int)k, c, value, wanted);
    }
}

static void expect_zero(const char *name, const csa_tensor *t, int64_t token)
{
    csa_tensor row = tensor_slice(*t, token, 1), zero = row;
    uint8_t *bytes = calloc((size_t)tensor_count(&row), (size_t)tensor_itemsize(row.dtype));
    zero.data = bytes;
    for (int d = row.ndim - 1, reach = 1; d >= 0; d--) {
        zero.stride[d] = reach;
        reach *= (int)row.shape[d];
    }
    tensor_expect_equal(name, &row, &zero);
    free(bytes);
}

static void check_index_part(const csa_prepare_args *p, int64_t token, int64_t position)
{
    double out[CSA_SUMMARY_SIZE], tolerance[CSA_SUMMARY_SIZE];
    oracle_norm query = {.weight = &p->index_query_norm,
                         .table = &p->index_rope,
                         .position = position,
                         .eps = (double)p->eps,
                         .zero_centered = p->zero_centered,
                         .rounds_twice = true,
                         .native_rope = p->native_rope};
    oracle_norm key = query;
    key.weight = &p->index_key_norm;
    key.bias = &p->index_key_bias;
    key.rounds_twice = false;
    oracle_prepare(tensor_at(&p->index_key, token, 0, 0, 0), CSA_SUMMARY_SIZE, &key, out, tolerance);
    expect_near("index_key_out", &p->index_key_out, token, 0, 0, CSA_SUMMARY_SIZE, out, tolerance);
    int64_t heads = p->index_query.shape[2];
    for (int64_t g = 0; g < p->index_query.shape[1]; g++)
        for (int64_t h = 0; h < CSA_INDEX_HEADS; h++) {
            float weight = *(float *)tensor_at(&p->index_weights_out, token, g, h, 0);
            if (h < heads) {
                float root = heads == 4 ? 0.5F : 0.70710678118654752F;
                CHECK(weight == (float)tensor_value(&p->index_weights, token, g, h, 0) * root);
                oracle_prepare(tensor_at(&p->index_query, token, g, h, 0), CSA_SUMMARY_SIZE, &query, out,
                               tolerance);
            } else {
                CHECK(weight == 0 && !signbit(weight));
                for (int i = 0; i < CSA_SUMMARY_SIZE; i++)
                    CHECK(*(uint8_t *)tensor_at(&p->index_query_out, token, g, h, i) == 0);
                continue;
            }
            expect_near("index_query_out", &p->index_query_out, token, g, h, CSA_SUMMARY_SIZE, out, tolerance);
        }
}

static void check_attention_part(const csa_prepare_args *p, int64_t token, int64_t position)
{
    double out[CSA_HEAD_SIZE], tolerance[CSA_HEAD_SIZE];
    oracle_norm query = {.weight = &p->query_norm,
                         .table = p->rope.ndim ? &p->rope : NULL,
                         .position = position,
                         .eps = (double)p->eps,
                         .zero_centered = p->zero_centered};
    oracle_norm key = query;
    key.weight = &p->key_norm;
    for (int64_t g = 0; g < p->query.shape[1]; g++) {
        for (int64_t h = 0; h < p->query.shape[2]; h++) {
            oracle_prepare(tensor_at(&p->query, token, g, h, 0), CSA_HEAD_SIZE, &query, out, tolerance);
            expect_near("query_out", &p->query_out, token, g, h, CSA_HEAD_SIZE, out, tolerance);
        }
        oracle_prepare(tensor_at(&p->key, token, g, 0, 0), CSA_HEAD_SIZE, &key, out, tolerance);
        expect_near("key_out", &p->key_out, token, g, 0, CSA_HEAD_SIZE, out, tolerance);
    }
    csa_tensor value_out = tensor_slice(p->value_out, token, 1), value = tensor_slice(p->value, token, 1);
    tensor_expect_equal("value_out", &value_out, &value);
}

/* The cache row of a key and a value, as the outputs give them. */
static void write_cache(const csa_prepare_args *p, csa_tensor *kv, int64_t token, int64_t slot)
{
    int64_t size = kv->shape[2];
    for (int64_t g = 0; slot / size < kv->shape[0] && g < kv->shape[1]; g++)
        for (int i = 0; i < CSA_KV_SIZE; i++) {
            const csa_tensor *from = i < CSA_HEAD_SIZE ? &p->key_out : &p->value_out;
            float x = (float)tensor_value(from, token, g, i % CSA_HEAD_SIZE, 0);
            float scale = i < CSA_HEAD_SIZE ? *p->cache->k_scale : *p->cache->v_scale;
            void *to = tensor_at(kv, slot / size, g, slot % size, i);
            if (kv->dtype == CSA_E4M3)
                *(uint8_t *)to = e4m3_code(x / scale);
            else
                *(uint16_t *)to = *(uint16_t *)tensor_at(from, token, g, i % CSA_HEAD_SIZE, 0);
        }
}

static void check_prepared(const world *w, const csa_prepare_args *p)
{
    for (int64_t token = 0; token < w->tokens; token++) {
        int64_t position = *(int64_t *)tensor_at(&w->step.positions, token, 0, 0, 0);
        bool outside = position < 0 || position >= p->index_rope.shape[0];
        outside = outside || (p->rope.ndim && position >= p->rope.shape[0]);
        if (outside) {
            expect_zero("index_query_out", &p->index_query_out, token);
            expect_zero("index_key_out", &p->index_key_out, token);
            expect_zero("index_weights_out", &p->index_weights_out, token);
            expect_zero("query_out", &p->query_out, token);
            expect_zero("key_out", &p->key_out, token);
            expect_zero("value_out", &p->value_out, token);
        } else {
            check_index_part(p, token, position);
            check_attention_part(p, token, position);
        }
    }
}

/* A scale and a value whose quotient lies between two codes, and whose product with the reciprocal does not. */
static float hard_scale(test_random *r, float *value)
{
    for (;;) {
        float x = bf16_value((uint16_t)random_between(r, 0x3F80, 0x407F));
        float scale = x / (1 + (float)random_between(r, 0, 7) / 8 + 0.0625F);
        if (e4m3_code(x / scale) != e4m3_code(x * (1 / scale))) {
            *value = x;
            return scale;
        }
    }
}

/* Values that an e4m3 cache saturates, rounds to nothing, or has no code for. */
static void spice_values(world *w)
{
    const float corners[] = {
        448, 464, 465, 480, 1000, INFINITY, -INFINITY, NAN, 0x1p-9F, 0x1p-10F, 1.5F * 0x1p-10F, -0.0F};
    float hard, *v_scale = (float *)(uintptr_t)w->cache.v_scale; /* the world's own memory */
    *v_scale = hard_scale(&w->random, &hard);
    for (int64_t token = 0; token < w->tokens; token++)
        for (int i = 0; i < 13; i++)
            tensor_put(&w->prepare.value, i < 12 ? (double)(corners[i] * *v_scale) : (double)hard, token, 0, i,
                       0);
}

static void prepare_as_written(void **state)
{
    (void)state;
    for (int draw = 0; draw < test_draws(120); draw++) {
        test_set_draw(draw);
        test_random r = random_of((uint64_t)draw, 11);
        world_shape shape = draw_shape(&r);
        shape.heads = RANDOM_OF(&r, 1, 2, 16);
        world w;
        world_make(&w, shape, (uint64_t)draw);
        csa_prepare_args *p = &w.prepare;
        p->zero_centered = random_chance(&r, 50);
        p->native_rope = random_chance(&r, 50);
        if (random_chance(&r, 30)) /* tables too short for some tokens */
            p->index_rope.shape[0] = random_between(&r, 0, w.shape.max_length);
        if (p->rope.ndim && random_chance(&r, 30))
            p->rope.shape[0] = random_between(&r, 0, w.shape.max_length);
        if (random_chance(&r, 20)) /* past the cache */
            *(int64_t *)tensor_at(&w.step.slots, 0, 0, 0, 0) =
                random_chance(&r, 50) ? INT64_MAX : w.blocks * w.shape.block_size;
        spice_values(&w);
        csa_tensor before = arena_tensor(&w.memory, "kv before", NULL, w.cache.kv.dtype, 4, (int)w.blocks,
                                         shape.groups, shape.block_size, CSA_KV_SIZE);
        tensor_copy(&before, &w.cache.kv);
        CHECK_OK(csa_prepare(any_context(&r), p));
        check_prepared(&w, p);
        for (int64_t token = 0; token < w.tokens; token++)
            if (position_of(&w, token) >= 0)
                write_cache(p, &before, token, *(int64_t *)tensor_at(&w.step.slots, token, 0, 0, 0));
        tensor_expect_equal("cache.kv", &w.cache.kv, &before);
        world_end(&w);
    }
    check_tallies();
}

/* ---- Summarize ---------------------------------------------------------------------------------- */

/* z of every kind: small, of large spread, infinite, NaN. */
static void spice_z(csa_tensor *z, test_random *r)
{
    for (int64_t row = 0; row < z->shape[0]; row++) {
        int64_t kind = random_between(r, 0, 9);
        for (int64_t i = 0; i < CSA_SUMMARY_SIZE; i++)
            if (kind < 4)
                tensor_put(z, 100 * kind * random_normal(r), row, i, 0, 0);
            else if (kind == 4 && i % 3 == 0)
                tensor_put(z, -(double)INFINITY, row, i, 0, 0);
            else if (kind == 5)
                tensor_put(z, -(double)INFINITY, row, i, 0, 0);
        if (random_chance(r, 3))
            tensor_put(z, random_chance(r, 50) ? (double)NAN : (double)INFINITY, row, 7, 0, 0);
    }
}

/* A world whose new tokens are prefill: many of each request, some inactive by slot. */
static void make_prefill(world *w, csa_summarize_args *a, test_random *r)
{
    csa_tokens *k = &w->step;
    k->query_start = arena_tensor(&w->memory, "query_start", NULL, CSA_I32, 1, w->shape.requests + 1);
    for (int64_t q = 0; q <= w->shape.requests; q++)
        tensor_put(&k->query_start, (double)(q * w->shape.query_len), q, 0, 0, 0);
    if (random_chance(r, 50) && w->shape.query_len > 3) /* padding behind the last request */
        tensor_put(&k->query_start, (double)(w->tokens - 2), w->shape.requests, 0, 0, 0);
    for (int64_t t = 0; t < w->tokens; t++)
        if (random_chance(r, 10))
            tensor_put(&k->slots, -1, t, 0, 0, 0);
    a->metadata =
        arena_tensor(&w->memory, "metadata", w->shape.strided ? r : NULL, CSA_I64, 2, (int)w->tokens, 10);
}

static csa_op make_summarize(world *w, csa_summarize_args *a, uint64_t draw)
{
    test_random r = random_of(draw, 12);
    csa_op op = (csa_op)RANDOM_OF(&r, CSA_OP_SUMMARIZE_DECODE, CSA_OP_SUMMARIZE_VERIFY,
                                  CSA_OP_SUMMARIZE_PREFILL, CSA_OP_SUMMARIZE_METADATA);
    bool prefill = op == CSA_OP_SUMMARIZE_PREFILL || op == CSA_OP_SUMMARIZE_METADATA;
    world_shape shape = draw_shape(&r);
    shape.groups = shape.heads = 1;
    shape.query_len = op == CSA_OP_SUMMARIZE_DECODE ? 1 : (int32_t)random_between(&r, 1, prefill ? 40 : 4);
    shape.inactive = shape.inactive && !prefill;
    shape.ring_capacity = prefill ? random_between(&r, 7, 12) : random_between(&r, 10, 12);
    world_make(w, shape, draw);
    tensor_randomise(&w->prepare.index_key_out, &r, 1);
    spice_z(&w->z, &r);
    for (int64_t row = 0; row < w->cache.ring.shape[0]; row++) {
        csa_tensor z = tensor_slice(w->cache.ring, row, 1);
        z.data = tensor_at(&z, 0, CSA_SUMMARY_SIZE, 0, 0);
        z.shape[1] = CSA_SUMMARY_SIZE;
        spice_z(&z, &r);
    }
    *a = world_summarize(w);
    if (prefill)
        make_prefill(w, a, &r);
    int64_t ring = random_between(&r, 0, 9), request = random_between(&r, 0, shape.requests - 1);
    if (ring < 3) /* no ring for one request, a ring past the memory, no ring at all */
        *(int64_t *)tensor_at(&w->step.ring_base, request, 0, 0, 0) =
            ring == 0 ? -1 : w->cache.ring.shape[0] - ring;
    if (ring == 3)
        w->step.ring_base = w->cache.ring = (csa_tensor){0};
    if (ring == 4 && position_of(w, 0) >= 0)
        tensor_put(&w->step.slots, (double)(w->blocks * shape.block_size), 0, 0, 0, 0);
    return op;
}

static void run_summarize(const csa_context *context, csa_op op, csa_summarize_args *a, bool with_metadata)
{
    csa_tensor metadata = a->metadata;
    switch (op) {
    case CSA_OP_SUMMARIZE_DECODE:
        CHECK_OK(csa_summarize_decode(context, a));
        break;
    case CSA_OP_SUMMARIZE_VERIFY:
        CHECK_OK(csa_summarize_verify(context, a));
        break;
    case CSA_OP_SUMMARIZE_PREFILL:
        if (with_metadata)
            CHECK_OK(csa_summarize_metadata(context, a));
        else
            a->metadata = (csa_tensor){0};
        CHECK_OK(csa_summarize_prefill(context, a));
        tensor_set(&metadata, 0xFF); /* the oracle leaves it alone */
        break;
    default:
        CHECK_OK(csa_summarize_metadata(context, a));
    }
}

static void summaries_as_written(void **state)
{
    (void)state;
    for (int draw = 0; draw < test_draws(400); draw++) {
        test_set_draw(draw);
        test_random r = random_of((uint64_t)draw, 13);
        world ours, theirs;
        csa_summarize_args a, b;
        csa_op op = make_summarize(&ours, &a, (uint64_t)draw);
        make_summarize(&theirs, &b, (uint64_t)draw);
        run_summarize(any_context(&r), op, &a, random_chance(&r, 50));
        oracle_summarize(op, &b);
        arena_expect_equal(&ours.memory, &theirs.memory, NULL);
        world_end(&ours);
        world_end(&theirs);
    }
}

/* ---- Score -------------------------------------------------------------------------------------- */

static void spice_codes(csa_tensor *t, test_random *r)
{
    for (int i = 0; i < 4; i++) { /* NaN of both signs, -0, the largest */
        const uint8_t codes_of[] = {0x7F, 0xFF, 0x80, 0x7E};
        int64_t at[4];
        for (int d = 0; d < 4; d++)
            at[d] = d < t->ndim ? random_between(r, 0, t->shape[d] - 1) : 0;
        *(uint8_t *)tensor_at(t, at[0], at[1], at[2], at[3]) = codes_of[i];
    }
}

static void check_scores(const world *w, const csa_score_args *a, bool exactly)
{
    int64_t groups = w->shape.groups, per_block = w->shape.block_size / CSA_REGION;
    for (int64_t row = 0; row < w->rows; row++) {
        int64_t token = row / groups, position = position_of(w, token);
        int64_t length = (position < 0 ? 0 : position) / CSA_REGION + 1;
        for (int64_t region = 0; region < length && region < a->scores.shape[1]; region++) {
            int32_t block = region / per_block < w->columns
                                ? *(int32_t *)tensor_at(&w->step.block_table, token / w->shape.query_len,
                                                        region / per_block, 0, 0)
                                : -1;
            double bound = 0;
            float expected = 0, got = *(float *)tensor_at(&a->scores, row, region, 0, 0);
            if (block >= 0 && block < w->blocks)
                expected =
                    oracle_score(a, token, row % groups,
                                 tensor_at(&w->cache.summaries, block, region % per_block, 0, 0), &bound);
            bool same = got == expected || (isnan(got) && isnan(expected));
            bool near = isfinite(got) && isfinite(expected) && fabs((double)got - (double)expected) <= bound;
            CHECKF(same || (near && !exactly), "row %d, region %d: %.9g, expected %.9g", (int)row, (int)region,
                   (double)got, (double)expected);
        }
        CHECK(tensor_value(&a->rows_out->lengths, row, 0, 0, 0) == (double)length);
        CHECK(tensor_value(&a->rows_out->topk_lengths, row, 0, 0, 0) == (double)(length - 1));
        CHECK(tensor_value(&a->rows_out->current, row, 0, 0, 0) == (double)(length - 1));
        CHECK(tensor_value(&a->rows_out->active, row, 0, 0, 0) == (position >= 0));
        CHECK(tensor_value(&a->rows_out->positions, row, 0, 0, 0) == (double)(position < 0 ? 0 : position));
    }
}

static void scores_as_written(void **state)
{
    (void)state;
    for (int draw = 0; draw < test_draws(120); draw++) {
        test_set_draw(draw);
        test_random r = random_of((uint64_t)draw, 14);
        world_shape shape = draw_shape(&r);
        shape.heads = 1;
        world w;
        world_make(&w, shape, (uint64_t)draw);
        make_holes(&w);
        spice_codes(&w.index_query, &r);
        spice_codes(&w.cache.summaries, &r);
        if (random_chance(&r, 20))
            tensor_put(&w.index_weights, (double)INFINITY, 0, 0, 0, 0);
        csa_score_args a = world_score(&w);
        a.scores.shape[1] = random_between(&r, 1, w.regions); /* also fewer than a row has */
        csa_context *context = any_context(&r);
        CHECK_OK(csa_score(context, &a));
        check_scores(&w, &a, exact(context));
        world_end(&w);
    }
}

/* ---- Select ------------------------------------------------------------------------------------- */

static float draw_score(test_random *r, int64_t kind)
{
    const float few[] = {1.5F, 0.0F, -0.0F, -1, 0x1p-149F, INFINITY, -INFINITY, NAN};
    if (kind == 0)
        return (float)random_normal(r);
    if (kind == 1)
        return few[random_between(r, 0, 7)];
    if (kind == 2)
        return random_chance(r, 90) ? -INFINITY : 1;
    if (kind == 3) { /* neighbours, and NaN of either sign */
        uint32_t bits = 0x3F800000 + (uint32_t)random_between(r, 0, 3);
        bits = random_chance(r, 10) ? 0xFFC00001 : random_chance(r, 10) ? 0x7F800001 : bits;
        float x;
        memcpy(&x, &bits, sizeof x);
        return x;
    }
    return kind == 4 ? NAN : 0;
}

static void selections_as_written(void **state)
{
    (void)state;
    for (int draw = 0; draw < test_draws(2000); draw++) {
        test_set_draw(draw);
        test_random r = random_of((uint64_t)draw, 15), *gaps = random_chance(&r, 50) ? &r : NULL;
        arena memory = {NULL};
        int rows = (int)random_between(&r, 1, 6), regions = (int)random_between(&r, 1, 130);
        int32_t topk = (int32_t)random_between(&r, 1, random_chance(&r, 50) ? 140 : 12);
        int width = topk < regions ? topk : regions;
        csa_select_args a = {.size = sizeof a, .topk = topk};
        a.scores = arena_tensor(&memory, "scores", gaps, CSA_F32, 2, rows, regions);
        a.current = arena_tensor(&memory, "current", gaps, CSA_I64, 1, rows);
        a.selected = arena_tensor(&memory, "selected", gaps, CSA_I64, 2, rows, width + 1);
        csa_tensor expected = arena_tensor(&memory, "expected", NULL, CSA_I64, 2, rows, width + 1);
        for (int row = 0; row < rows; row++) {
            int64_t current = random_between(&r, -1, regions + 1), kind = random_between(&r, 0, 5);
            tensor_put(&a.current, (double)(random_chance(&r, 2) ? 1LL << 40 : current), row, 0, 0, 0);
            for (int i = 0; i < regions; i++)
                *(float *)tensor_at(&a.scores, row, i, 0, 0) = i < current ? draw_score(&r, kind) : 1e30F;
            oracle_select(tensor_at(&a.scores, row, 0, 0, 0), regions,
                          *(int64_t *)tensor_at(&a.current, row, 0, 0, 0), topk,
                          tensor_at(&expected, row, 0, 0, 0));
        }
        if (regions <= topk && random_chance(&r, 50))
            a.scores.data = NULL;
        CHECK_OK(csa_select(any_context(&r), &a));
        tensor_expect_equal("selected", &a.selected, &expected);
        arena_check(&memory);
        arena_free(&memory);
    }
}

/* ---- Attend and gate ---------------------------------------------------------------------------- */

/* Lists in any order with all that may stand in them. */
static void spice_lists(world *w, csa_tensor *lists)
{
    for (int64_t row = 0; row < w->rows; row++) {
        int64_t region = 0, last = w->lengths[row / w->shape.groups / w->shape.query_len] / CSA_REGION;
        for (int64_t c = 0; c < lists->shape[1]; c++) {
            int64_t kind = random_between(&w->random, 0, 19);
            if (kind > 2)
                region = random_between(&w->random, 0, last);
            int64_t entry = kind == 0 ? -1 : kind == 1 ? INT64_MAX : kind == 2 ? INT64_MIN : region;
            *(int64_t *)tensor_at(lists, row, c, 0, 0) = entry;
        }
    }
}

/* A row's outputs without a gate; `exactly`: the nearest bf16 value, or one next to it. */
static void check_attention_row(const world *w, const csa_attend_args *a, int64_t row, bool exactly)
{
    int64_t groups = w->shape.groups, token = row / groups, position = position_of(w, token);
    for (int64_t head = 0; head < w->shape.heads; head++) {
        oracle_attention o;
        oracle_attend(a, token / w->shape.query_len, position, row, head, &o);
        double lse = tensor_value(&a->lse, token, row % groups, head, 0);
        if (o.tokens == 0)
            CHECK(isinf(lse) && lse < 0);
        else
            CHECKF(fabs(lse - o.lse) <= o.lse_bound, "row %d, head %d: lse %.9g, expected %.9g", (int)row,
                   (int)head, lse, o.lse);
        for (int i = 0; i < CSA_HEAD_SIZE; i++) {
            double got = tensor_value(&a->out, token, row % groups, head, i);
            double allowed = fabs(o.out[i]) * 0x1p-8 + o.magnitude[i] * (exactly ? 1e-6 : 0x1p-7);
            CHECKF(fabs(got - o.out[i]) <= allowed, "row %d, head %d, value %d: %.9g, expected %.9g", (int)row,
                   (int)head, i, got, o.out[i]);
            if (o.tokens == 0)
                CHECK(*(uint16_t *)tensor_at(&a->out, token, row % groups, head, i) == 0);
        }
    }
}

static void check_gate(const world *w, const csa_attend_args *plain, const csa_tensor *gated)
{
    int64_t groups = w->shape.groups;
    for (int64_t row = 0; row < w->rows; row++)
        for (int64_t head = 0; head < w->shape.heads; head++)
            for (int i = 0; i < CSA_HEAD_SIZE; i++) {
                int64_t token = row / groups, group = row % groups;
                double x = tensor_value(&plain->out, token, group, head, i);
                double gate = oracle_sigmoid(tensor_value(&w->gate, token, group, head, 0));
                double got = tensor_value(gated, token, group, head, i);
                double expected = (double)bf16_rounded((float)(x * (double)bf16_rounded((float)gate)));
                if (position_of(w, token) < 0) {
                    CHECK(*(uint16_t *)tensor_at(gated, token, group, head, i) == 0);
                    continue;
                }
                count_value("gated", got == expected);
                CHECKF(fabs(got - expected) <= fabs(expected) * 0x1p-7, "row %d, value %d: %.9g, expected %.9g",
                       (int)row, i, got, expected);
            }
}

static void attention_as_written(void **state)
{
    (void)state;
    for (int draw = 0; draw < test_draws(120); draw++) {
        test_set_draw(draw);
        test_random r = random_of((uint64_t)draw, 16);
        world_shape shape = draw_shape(&r);
        shape.heads = RANDOM_OF(&r, 1, 2, 5, 16);
        shape.groups = shape.heads > 2 ? 1 : shape.groups;
        shape.max_length = random_between(&r, 4, 70);
        world w;
        world_make(&w, shape, (uint64_t)draw);
        make_holes(&w);
        csa_attend_args a = world_attend(&w);
        a.selected = arena_tensor(&w.memory, "lists", w.shape.strided ? &r : NULL, CSA_I64, 2, (int)w.rows,
                                  (int)random_between(&r, 1, 12));
        spice_lists(&w, &a.selected);
        a.scale = random_chance(&r, 10) ? 0 : a.scale;
        csa_tensor gate = a.gate, plain = a.out;
        for (int64_t t = 0; t < w.tokens; t++)
            if (position_of(&w, t) < 0)
                tensor_put(&gate, (double)NAN, t, 0, 0, 0);
        a.gate = (csa_tensor){0};
        csa_context *context = any_context(&r);
        CHECK_OK(csa_attend(context, &a));
        for (int64_t row = 0; row < w.rows; row++)
            check_attention_row(&w, &a, row, exact(context));
        /* The gated output takes the query's place. */
        csa_attend_args gated = a;
        gated.gate = gate;
        gated.out = gated.query;
        CHECK_OK(csa_attend(context, &gated));
        check_gate(&w, &a, &gated.out);
        tensor_expect_equal("out", &plain, &a.out);
        world_end(&w);
    }
    check_tallies();
}

/* csa_gate gives what a gate inside csa_attend gives. */
static void gate_alone(void **state)
{
    (void)state;
    for (int draw = 0; draw < test_draws(50); draw++) {
        test_set_draw(draw);
        test_random r = random_of((uint64_t)draw, 17);
        world_shape shape = draw_shape(&r);
        shape.strided = false; /* groups and heads are one extent here */
        shape.max_length = 30;
        world w;
        world_make(&w, shape, (uint64_t)draw);
        csa_step_args step = world_step(&w);
        step.gate = (csa_tensor){0};
        csa_context *context = any_context(&r);
        CHECK_OK(csa_decode(context, &step));
        int64_t heads = w.shape.groups * w.shape.heads;
        csa_gate_args g = {.size = sizeof g,
                           .attention = csa_tensor_3d(w.out.data, CSA_BF16, w.tokens, heads, CSA_HEAD_SIZE),
                           .gate = csa_tensor_2d(w.gate.data, CSA_BF16, w.tokens, heads)};
        g.out = g.attention;
        g.active = w.rows_out.active;
        g.active.shape[0] = w.tokens;
        g.active.stride[0] = w.shape.groups; /* of each token's first row */
        for (int64_t t = 0; t < w.tokens; t++)
            if (position_of(&w, t) < 0)
                tensor_put(&w.gate, (double)NAN, t, 0, 0, 0);
        CHECK_OK(csa_gate(context, &g));
        step = world_step(&w);
        step.out = w.query;
        CHECK_OK(csa_decode(context, &step));
        tensor_expect_equal("gated", &w.out, &w.query);
        world_end(&w);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(prepare_as_written),   cmocka_unit_test(summaries_as_written),
        cmocka_unit_test(scores_as_written),    cmocka_unit_test(selections_as_written),
        cmocka_unit_test(attention_as_written), cmocka_unit_test(gate_alone),
    };
    test_seed();
    return cmocka_run_group_tests(tests, make_contexts, end_contexts);
}
